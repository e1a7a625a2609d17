"""From a folder of images to a served answer, in commands and in seconds (P1).

    python benchmarks/research/own_data.py [--work DIR]

Draws three tasks, each the same three shapes in another hand, and does what docs/your-own-data.md says with them: four
commands and a request. Prints what each took; the drawings, a sheet of some of them and the report stay in DIR.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image, ImageDraw

from etcl_deploy.serve.properties import any_free_port

sys.path.append(str(Path(__file__).parents[1]))

from record import Figure, new_parser, say, write_result

SIDE, EACH = 64, 40  # pixels; drawings of every shape by every hand
SHAPES = {"circle": 40, "square": 4, "triangle": 3}  # corners
HANDS: dict[str, tuple[str, tuple[str, ...], tuple[int, int]]] = {  # paper, colours, width of the line
    "pencil": ("white", ("#444", "#666", "#888"), (1, 2)),
    "marker": ("#f4f0e0", ("#c33", "#36c", "#283"), (5, 7)),
    "chalk": ("#263", ("#eee", "#fe9", "#fbc"), (2, 4)),
}


def drawing(shape: str, hand: str, chance: random.Random) -> Image.Image:
    """One shape by an unsteady hand: somewhere, of some size, a little crooked."""
    paper, colours, widths = HANDS[hand]
    image = Image.new("RGB", (SIDE, SIDE), paper)
    radius = chance.uniform(0.22, 0.4) * SIDE
    middle = [SIDE / 2 + chance.uniform(-1, 1) * (SIDE / 2 - radius - 4) for _ in range(2)]
    corners = SHAPES[shape]
    turned = math.tau / 4 * (1 + 2 / corners) + chance.uniform(-0.25, 0.25)  # upright is a side at the bottom
    points = []
    for corner in range(corners):
        angle = turned + math.tau * corner / corners
        reach = radius * chance.uniform(0.93, 1.07)
        points.append((middle[0] + reach * math.cos(angle), middle[1] + reach * math.sin(angle)))
    line, width = chance.choice(colours), chance.randint(*widths)
    ImageDraw.Draw(image).line([*points, points[0], points[1]], line, width, joint="curve")
    return image


def draw_tasks(folder: Path, each: int = EACH) -> None:
    """`folder/HAND/SHAPE/NUMBER.png`."""
    chance = random.Random(0)
    for hand in HANDS:
        for shape in SHAPES:
            (folder / hand / shape).mkdir(parents=True)
            for number in range(each):
                drawing(shape, hand, chance).save(folder / hand / shape / f"{number:03}.png")


def sheet(folder: Path, each: int = 3, gap: int = 8) -> Image.Image:
    """The first drawings of every shape, a row for every hand."""
    step = SIDE + gap
    made = Image.new("RGB", (step * each * len(SHAPES) - gap, step * len(HANDS) - gap), "white")
    for row, hand in enumerate(HANDS):
        files = [path for shape in SHAPES for path in sorted((folder / hand / shape).iterdir())[:each]]
        for column, path in enumerate(files):
            made.paste(Image.open(path), (step * column, step * row))
    return made


def etcl(*words: object) -> Any:
    """The JSON that a command prints."""
    command = [sys.executable, "-P", "-m", "etcl_deploy", *map(str, words), "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def walk(work: Path, *learning: object) -> dict[str, Any]:
    """The way from a folder to an answer; `learning` are further words for `etcl train`."""
    drawings, held = work / "drawings", random.Random(1)
    draw_tasks(drawings)
    sheet(drawings).save(work / "drawings.png")
    run, bundle, name = work / "run", work / "drawings.etcl", "drawings"
    steps: dict[str, Callable[[], Any]] = {
        "train": lambda: etcl("train", "--data", drawings, "--run", run, *learning),
        "report": lambda: etcl("report", run, "-o", work / "report.html"),
        "bundle": lambda: etcl("bundle", run, "-o", bundle),
        "serve": lambda: etcl("serve", bundle, "--model-store", work / "store", "--port", any_free_port()),
    }
    seconds, said = {}, {}
    for step, do in steps.items():
        began = time.monotonic()
        said[step] = do()
        seconds[step] = round(time.monotonic() - began, 1)
    try:
        server = said["serve"]
        token = json.loads(Path(server["token_file"]).read_text())["inference"]["key"]
        answers, began = {}, time.monotonic()
        for hand in HANDS:
            for shape in SHAPES:
                path = work / "asked.png"
                drawing(shape, hand, held).save(path)
                headers = {"Authorization": f"Bearer {token}", "X-ETCL-Task": hand, "Content-Type": "image/png"}
                request = urllib.request.Request(server["inference_url"], path.read_bytes(), headers)
                with urllib.request.urlopen(request, timeout=60) as reply:
                    answers[f"{hand} {shape}"] = json.load(reply)["label"]
        seconds["answers"] = round(time.monotonic() - began, 1)
    finally:
        etcl("serve", "--stop", "--name", name, "--model-store", work / "store")
    right = sum(asked.endswith(label) for asked, label in answers.items())
    return {
        "commands": len(steps),
        "seconds": {**seconds, "total": round(sum(seconds.values()), 1)},
        "acc": said["train"]["acc"],
        "answers": {"right": right, "of": len(answers)},
    }


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """The recorded results, held against their targets."""
    row = results["own_data"]
    steps = ", ".join(step for step in row["seconds"] if step not in ("answers", "total"))
    what = "folder of images -> trained, packed, served:"
    yield Figure("P1", f"{what} commands", row["commands"], "<= 4", "<= 3", note=f"{steps}; then a request")
    right = f"{row['answers']['right']} of {row['answers']['of']} answers right"
    yield Figure("P1", f"{what} seconds", row["seconds"]["total"], aim="<= 120", note=right)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, help="a new folder to keep drawings, run and report in")
    parser.add_argument("--epochs", type=int, help="other than the default")
    arguments = parser.parse_args()
    learning = ["--epochs", arguments.epochs] if arguments.epochs else []
    with TemporaryDirectory() as temporary:
        result = walk(arguments.work or Path(temporary), *learning)
    say(json.dumps(result, indent=1))
    if arguments.record:
        settings = {"tasks": list(HANDS), "classes": list(SHAPES), "drawings": EACH, "epochs": arguments.epochs}
        write_result("own_data", "own_data", result, settings)


if __name__ == "__main__":
    main()
