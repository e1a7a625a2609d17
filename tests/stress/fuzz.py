"""Damaged bundles: 100,000 of them (R2), and 10,000 with one flipped bit (R3).

    python tests/stress/fuzz.py --cases 1000 --flips 200

Each case starts from a file of tests/golden/, or of a small residual network. *Raw* ones have bytes changed, cut off,
repeated or joined, or an offset, length, type or name in the header: each must be refused with a BundleError, or answer
exactly as the file it came from. *Signed* ones have their manifest or sections changed, and right digests again, as
somebody would write them who wants to do harm: they may be other bundles, but must not crash, hang for a second, or
take more memory than the format allows this very file, which is all the process gets. The time is the process's own,
since others may be at work on the machine.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from etcl_deploy.bundle import format
from etcl_deploy.bundle.bundle import load_bundle
from etcl_deploy.bundle.delta import apply_delta_file
from etcl_deploy.bundle.layout import Layout
from etcl_deploy.core.plan import Plan
from etcl_deploy.errors import BundleError
from etcl_deploy.runtime.predictor import Predictor

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from factories import made_bundle
from record import Figure, new_parser, say, write_result

GOLDEN = Path(__file__).parents[1] / "golden"
ACTIVATIONS = 32 << 20  # what asking a network of so small weights may take beside reading it
LONGEST = 1.0  # seconds
NASTY = (
    *(None, True, -1, 0, 1, 3, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308),
    *("", "a", "\u0000", "ß" * 300, "fp16", [], [1], {}),
)

Answers = dict[str, list[list[float]]]


def answers_of(path: Path) -> Answers:
    """The answers of every task of a bundle to the same few images."""
    bundle = load_bundle(path)
    shape = bundle.preprocessing.shape
    count = min(3, 1 + (1 << 16) // (shape[0] * shape[1] * shape[2]))
    size = count * shape[0] * shape[1] * shape[2]
    pixels = (torch.arange(size) * 37 % 256).to(torch.uint8).view(count, *shape)
    predictor = Predictor(bundle)
    return {name: predictor.logits(name, pixels).tolist() for name in bundle.tasks}


def flipped(data: bytes, chance: random.Random) -> bytes:
    """One bit is another."""
    damaged = bytearray(data)
    damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(damaged)


def raw(data: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    """Bytes changed, put in, left out, repeated, cut off, joined; lengths above all."""
    place, end = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    some = chance.randbytes(chance.randrange(1, 40))
    return chance.choice(
        (
            lambda: flipped(data, chance),
            lambda: flipped(flipped(data, chance), chance),
            lambda: data[:place],
            lambda: data[place:],
            lambda: data[:place] + data[end:],
            lambda: data[:place] + some + data[place:],
            lambda: data[:place] + some + data[place + len(some) :],
            lambda: data[:place] + data[place:end] * 2 + data[end:],
            lambda: data[:place] + bytes(end - place) + data[end:],
            lambda: data + chance.choice(others),
            lambda: data[:place] + chance.choice(others)[place:],
            lambda: chance.choice((2**63, 2**40, len(data), 0, 8, 7)).to_bytes(8, "little") + data[8:],
            lambda: header_changed(data, chance),
        )
    )()


def header_changed(data: bytes, chance: random.Random) -> bytes:
    """Something in the header is another: where a tensor begins or ends, its type, its shape, its name."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = chance.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    kind = chance.randrange(4)
    if kind == 0:
        entry["data_offsets"][chance.randrange(2)] += chance.choice((-(2**40), -8, -1, 1, 4, 8, 2**40, 2**63))
    elif kind == 1:
        entry["dtype"] = chance.choice(("F32", "F16", "I8", "U8", "F64", "I64", "BOOL", "F8_E4M3", "X"))
    elif kind == 2:
        entry["shape"] = chance.choice(([], [0], [1], [2**62, 4], [-1], entry["shape"][::-1], [*entry["shape"], 1]))
    else:
        header[chance.choice((name + "x", "task/0/mask", "__metadata__"))] = header.pop(name)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def signed(path: Path, chance: random.Random, key: str) -> bytes:
    """A file that is whole and says something else."""
    manifest, sections, _ = format.from_bytes(path.read_bytes(), key)
    manifest = json.loads(json.dumps({name: value for name, value in manifest.items() if name != "sections"}))
    content = {name: tensor.clone() for name, tensor in sections.items()}
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        if chance.random() < 0.5:
            _change_value(manifest, chance)
        else:
            _change_section(content, chance)
    return format.to_bytes(manifest, content, key)


def _change_value(value: Any, chance: random.Random) -> None:
    """Something in the manifest is replaced, doubled or left out."""
    while True:
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not places:
            return
        place = chance.choice(places)
        inner = value[place]
        if isinstance(inner, dict | list) and chance.random() < 0.85:
            value = inner
            continue
        kind = chance.random()
        if kind < 0.15:
            del value[place]
        elif kind < 0.25 and isinstance(value, list):
            value.insert(place, inner)
        elif kind < 0.5 and type(inner) in (int, float):
            value[place] = inner * chance.choice((-1, 2, 1000)) + chance.choice((0, 1))
        else:
            value[place] = chance.choice(NASTY)
        return


def _change_section(content: dict[str, torch.Tensor], chance: random.Random) -> None:
    name = chance.choice(list(content))
    tensor, other = content[name], content[chance.choice(list(content))]
    kind = chance.choice((0, 0, 0, 1, 2, 3, 4, 5, 6, 7))
    if kind == 7 and tensor.dtype == torch.uint8 and tensor.numel() > 8:
        count = chance.choice((0, 1, 2**16, 2**20, 2**31, 2**32 - 1)).to_bytes(4, "little")
        tensor[:4] = torch.tensor(list(count), dtype=torch.uint8)  # of numbers, it is how many
    elif kind == 0 and tensor.numel():
        flat = tensor.flatten().view(torch.uint8)
        for _ in range(chance.randrange(1, 5)):
            flat[chance.randrange(len(flat))] = chance.randrange(256)
    elif kind == 1:
        del content[name]
    elif kind == 2:
        content[name + chance.choice(("x", "/", "/scale"))] = tensor.clone()
    elif kind == 3:
        content[name] = tensor.flatten()[: chance.randrange(tensor.numel() + 1)].clone()
    elif kind == 4:
        content[name] = torch.cat([tensor.flatten(), tensor.flatten()[: chance.randrange(9)]])
    elif kind == 5:
        content[name] = other.clone()
    else:
        content[name] = tensor.to(chance.choice(list(format.DTYPES))).clone()


def run_case(data: bytes, use: Callable[[Path], Any], path: Path, original: Any) -> tuple[str, float]:
    """The outcome, "refused", "the same", "another" or what went wrong, and the time it took."""
    path.write_bytes(data)
    began = time.process_time()
    try:
        answers = use(path)
        outcome = "the same" if answers == original else "another"
    except BundleError:
        outcome = "refused"
    except Exception as error:
        outcome = f"WRONG: {type(error).__name__}: {error}"[:200]
    return outcome, time.process_time() - began


def fuzz(cases: int, flips: int, seed: int) -> dict[str, Any]:
    """Counts of what became of all cases."""
    chance = random.Random(seed)
    counts, longest, wrong = Counter[str](), 0.0, []
    with tempfile.TemporaryDirectory() as folder:
        uses: dict[Path, Callable[[Path], Any]] = dict.fromkeys(bundles(Path(folder)), answers_of)
        uses |= {
            path: partial(apply_delta_file, GOLDEN / f"{path.stem}-3.etcl") for path in sorted(GOLDEN.glob("*.delta"))
        }
        originals = {path: use(path) for path, use in uses.items()}
        contents = {path: path.read_bytes() for path in uses}
        for case in range(cases + flips):
            path = chance.choice(list(uses))
            kind = "flip" if case >= cases else chance.choice(("raw", "signed"))
            if kind == "signed":
                data = _signed_or_none(path, chance)
                if data is None:
                    counts["signed: not to be written"] += 1
                    continue
            else:
                data = (
                    flipped(contents[path], chance)
                    if kind == "flip"
                    else raw(contents[path], chance, [*contents.values()])
                )
            limit_memory(data)
            outcome, seconds = run_case(data, uses[path], Path(folder) / "case", originals[path])
            longest = max(longest, seconds)
            allowed = {
                "flip": ("refused",),
                "raw": ("refused", "the same"),
                "signed": ("refused", "the same", "another"),
            }
            if outcome == "the same" and data == contents[path]:
                outcome = "nothing changed"
            elif outcome not in allowed[kind] or seconds > LONGEST:
                wrong.append(f"case {case} ({kind}, {path.name}, {seconds:.2f} s): {outcome}")
            counts[f"{kind}: {outcome if not outcome.startswith('WRONG') else 'wrong'}"] += 1
    return {"counts": dict(sorted(counts.items())), "longest_seconds": round(longest, 3), "wrong": wrong}


def bundles(folder: Path) -> list[Path]:
    """Those of tests/golden/, and some of a residual network, made in `folder`."""
    made = []
    for encoding, precision in (("coded", "fp32"), ("packed", "int8")):
        made.append(folder / f"residual-{encoding}.etcl")
        made[-1].write_bytes(made_bundle(2, "resnet18", 2, 8, precision=precision).to_bytes(encoding))
    return [*sorted(GOLDEN.glob("*-7.etcl")), *made]


def _signed_or_none(path: Path, chance: random.Random) -> bytes | None:
    try:
        return signed(path, chance, format.BUNDLE if path.suffix == ".etcl" else format.DELTA)
    except (ValueError, OverflowError, TypeError, RuntimeError):
        return None


def limit_memory(data: bytes) -> None:
    """Let the process have no more than what reading this file may take, and a little to ask its network."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    header = min(int.from_bytes(data[:8], "little"), len(data))
    allowed = (64 << 20) + 3 * len(data) + 64 * header + 64 * numbers_of(data)
    resource.setrlimit(resource.RLIMIT_AS, (used + allowed + ACTIVATIONS, resource.RLIM_INFINITY))


def numbers_of(data: bytes) -> int:
    """How many weights a file says its network has; none if it says nothing."""
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        manifest = json.loads(header["__metadata__"]["etcl"].partition("\n")[2])
        return Layout(Plan.from_json(manifest["backbone"]["plan"])).weight_count
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return 0


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """The recorded results, held against their targets."""
    counts, wrong = results["fuzz"]["counts"], results["fuzz"]["wrong"]
    flips, refused = (sum(n for kind, n in counts.items() if kind.startswith(s)) for s in ("flip: ", "flip: refused"))
    cases = sum(counts.values()) - flips
    harmful = [line for line in wrong if "(flip," not in line]
    note = f"{cases:,} files, the slowest took {results['fuzz']['longest_seconds']} s"
    asks = "of 10,000,000 files"
    yield Figure(
        "R2", "damaged bundles: crash, hang or wrong answer, cases", len(harmful), "= 0", "= 0", (), note, asks
    )
    what = "one flipped bit found before use, share"
    yield Figure("R3", what, refused / flips, "= 1", "= 1", (), f"{flips:,} flipped bits", "of all bits")


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = fuzz(arguments.cases, arguments.flips, arguments.seed)
    say(json.dumps(result, indent=1))
    if arguments.record:
        settings = {"cases": arguments.cases, "flips": arguments.flips, "seed": arguments.seed}
        write_result("fuzz", "fuzz", result, settings)
    sys.exit(bool(result["wrong"]))


if __name__ == "__main__":
    main()
