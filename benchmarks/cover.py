"""How well the tests hold the code: which of its lines and branches they reach, and which changes of it they notice.

    pip install -c constraints.txt '.[dev,cover]'
    python benchmarks/cover.py

Coverage is that of what a server runs, `bundle/`, `runtime/` and `handlers/`, by tests in their own process: what a
TorchServe worker or another process reaches is not counted. Mutants are of the three files that hold the mathematics
the rest relies on: cosmic-ray changes one thing in one of them, `<` to `<=` or 7 to 8, and the tests that hold its laws
must fail. What they do not notice must be explained in survivors.toml, and every explanation there must be needed; if
not, or where less than 95 % is reached, the exit code is 1. All of it happens in a copy of the tree. A mutant is tried
in a fork of this process, which has imported torch already, and is taken for noticed if it takes longer than a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from functools import partial
from importlib.metadata import version
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from hypothesis import HealthCheck, Phase, settings
from record import read_options, write_result

from etcl_deploy.settings import tomllib

HERE = Path(__file__).parent
LONGEST = 60  # seconds a mutant may take; without a change the tests of a file take one to three
LEAST = 95  # percent of lines and branches
PACKAGES = {"bundle": "etcl_deploy/bundle", "runtime": "etcl_deploy/runtime", "handlers": "handlers"}
TESTS = (
    *("bundle", "cache", "codec", "coded", "delta", "engine", "entropy", "golden", "handler", "images", "mapped"),
    *("meter", "multitask", "onnx", "operations", "precision", "predictor", "requests", "subnet", "values"),
)
SUMMED = {
    "num_statements": "lines",
    "covered_lines": "lines_reached",
    "num_branches": "branches",
    "covered_branches": "branches_reached",
}
MUTATED = {
    "etcl_deploy/bundle/bits.py": ("codec",),
    "etcl_deploy/network/masks.py": ("masks",),
    "etcl_deploy/learn/projection.py": ("projection",),
}
# Ends of pytest that say nothing of the tests.
UNUSABLE = (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)
# Of hypothesis: the same ones for every mutant. A slow one says nothing, and the first that fails is enough.
EXAMPLES: dict[str, Any] = {
    "database": None,
    "deadline": None,
    "derandomize": True,
    "phases": (Phase.explicit, Phase.generate),
    "suppress_health_check": tuple(HealthCheck),
}
OPTIONS = ("-x", "-p", "no:cacheprovider", "--noconftest", "-W", "ignore::pytest.PytestAssertRewriteWarning")
WORDS = {0: "SURVIVED", None: "killed by time"}

Reasons = Mapping[tuple[str, str], str]  # why a mutant cannot be noticed, by its file and what its line becomes


@dataclass(frozen=True)
class Mutant:
    """The text of a file with one change: what made it, in which line, and both sides of it."""

    operator: str
    line: int
    diff: tuple[str, ...]
    text: str

    @property
    def becomes(self) -> str:
        """The lines in the place of what was there, which name it wherever they move."""
        return "\n".join(line[1:].strip() for line in self.diff if line.startswith("+"))


def mutants_of(text: str) -> Iterator[Mutant]:
    """Every change that cosmic-ray knows without being told more."""
    before = text.splitlines()
    for name in operator_names():
        operator = get_operator(name)
        for occurrence in count() if not operator.arguments() else ():
            changed = mutate_code(text, operator(), occurrence)
            if changed is None:
                break
            after = changed.splitlines()
            line = next(number for number, pair in enumerate(zip(before, after, strict=False), 1) if len({*pair}) > 1)
            _, _, _, *diff = unified_diff(before, after, n=0, lineterm="")
            yield Mutant(name, line, tuple(diff), changed)


def files_of(tests: Sequence[str]) -> list[str]:
    return [f"tests/test_{name}.py" for name in tests]


def outcome_of(tree: Path, tests: Sequence[str]) -> int | None:
    """What pytest ends with in a fork of this process, on the files of `tree`; None if it takes too long."""
    process = get_context("fork").Process(target=_test, args=(tree, tests))
    process.start()
    process.join(LONGEST)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return process.exitcode


def _test(tree: Path, tests: Sequence[str]) -> None:
    """Forget our own modules, and test those of `tree`."""
    os.chdir(tree)
    with Path("pytest.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    for name in [name for name in sys.modules if name.partition(".")[0] == "etcl_deploy"]:
        del sys.modules[name]
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = True  # a mutant as long as the one before, in the same second, would be taken for it
    settings.register_profile("mutants", **EXAMPLES)
    settings.load_profile("mutants")
    sys.exit(int(pytest.main([*OPTIONS, *files_of(tests)])))


def mutated(tree: Path, name: str, every: int, reasons: Reasons, say: Callable[[str], None]) -> dict[str, Any]:
    """What became of the mutants of one file, or of one in `every` of them; survivors with the reason, or None."""
    path, tests = tree / name, MUTATED[name]
    text = path.read_text("utf-8")
    if outcome_of(tree, tests) != 0:
        raise SystemExit(f"the tests of {name} fail without a change:\n{(tree / 'pytest.log').read_text('utf-8')}")
    outcomes, survivors = [], []
    for mutant in [*mutants_of(text)][::every]:
        path.write_text(mutant.text, "utf-8")
        outcome = outcome_of(tree, tests)
        if outcome in UNUSABLE:
            raise SystemExit(f"pytest could not try {mutant.diff}:\n{(tree / 'pytest.log').read_text('utf-8')}")
        outcomes.append(outcome)
        if outcome == 0:
            about = {"operator": mutant.operator, "line": mutant.line, "diff": mutant.diff, "becomes": mutant.becomes}
            survivors.append({**about, "why": reasons.get((name, mutant.becomes))})
        say(f"{name}:{mutant.line}: {mutant.becomes!r} ({mutant.operator}): {WORDS.get(outcome, 'killed')}")
    path.write_text(text, "utf-8")
    killed = len(outcomes) - len(survivors)
    counts = {"mutants": len(outcomes), "killed": killed, "killed_by_time": outcomes.count(None)}
    return {"tests": files_of(tests), **counts, "survivors": survivors}


def read_reasons() -> Reasons:
    """What survivors.toml says."""
    rows = tomllib.loads((HERE / "survivors.toml").read_text("utf-8"))["survivors"]
    return {(row["file"], line): row["why"] for row in rows for line in row["becomes"]}


def covered(tree: Path, work: Path) -> dict[str, Any]:
    """For each package how many of its lines and branches the tests reach, and where the others are."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "COVERAGE_FILE": str(work / "data"), "OMP_NUM_THREADS": "1"}
    run = partial(subprocess.run, cwd=tree, env=environment, text=True, stdout=subprocess.PIPE, check=False)
    words = ["run", "--branch", f"--source={','.join(PACKAGES.values())}", "-m", "pytest", "-m", "not torchserve"]
    done = run([sys.executable, "-m", "coverage", *words, *files_of(TESTS)])
    if done.returncode:
        raise SystemExit(f"the tests fail:\n{done.stdout}")
    run([sys.executable, "-m", "coverage", "json", "--quiet", "-o", work / "coverage.json"])
    files = json.loads((work / "coverage.json").read_text("utf-8"))["files"]
    found = {}
    for package, folder in PACKAGES.items():
        own = {name: file for name, file in files.items() if Path(name).is_relative_to(folder)}
        sums = {key: sum(file["summary"][key] for file in own.values()) for key in SUMMED}
        reached = sums["covered_lines"] + sums["covered_branches"]
        found[package] = {
            **{word: sums[key] for key, word in SUMMED.items()},
            "percent": round(100 * reached / (sums["num_statements"] + sums["num_branches"]), 2),
            "not_reached": [place for name, file in own.items() for place in _missed(name, file)],
        }
    return found


def _missed(name: str, file: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{name}:{line}" for line in file["missing_lines"])
    yield from (f"{name}:{first} to {'exit' if last < 0 else last}" for first, last in file["missing_branches"])


def faults_of(result: Mapping[str, Any], reasons: Reasons, *, whole: bool) -> list[str]:
    """What must not be: code out of reach, survivors nobody explains and, of a whole run, reasons nobody needs."""
    survivors = [(name, found) for name, row in result["mutants"].items() for found in row["survivors"]]
    needed = {(name, found["becomes"]) for name, found in survivors}
    return [
        *(f"{name}: only {row['percent']} %" for name, row in result["coverage"].items() if row["percent"] <= LEAST),
        *(f"{name}:{found['line']}: no reason for {found['diff']}" for name, found in survivors if not found["why"]),
        *(f"{name}: no such survivor: {line!r}" for name, line in reasons if whole and (name, line) not in needed),
    ]


def main(say: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="try one mutant of N")
    arguments = read_options(parser, every=50)
    torch.set_num_threads(1)
    reasons = read_reasons()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(HERE.parent, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "build"))
        coverage = covered(tree, Path(folder))
        say(json.dumps({name: row["percent"] for name, row in coverage.items()}))
        mutants = {name: mutated(tree, name, arguments.every, reasons, say) for name in MUTATED}
    versions = {name: version(name) for name in ("coverage", "cosmic-ray", "hypothesis", "pytest")}
    more = {"every": arguments.every, "seconds_a_mutant": LONGEST, "tests_of_coverage": files_of(TESTS)}
    result = {"coverage": coverage, "mutants": mutants}
    write_result("cover", [], result, {**more, "versions": versions})
    say(json.dumps({name: [row["killed"], row["mutants"]] for name, row in mutants.items()}))
    faults = faults_of(result, reasons, whole=arguments.every == 1)
    if faults:
        raise SystemExit("\n".join(faults))


if __name__ == "__main__":
    main(partial(print, flush=True))
