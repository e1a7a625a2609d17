"""A run as a directory: created, added to task by task, taken up again. No pickle anywhere.

    run.json                      settings, where the data is, tasks, accuracy matrix; names and digests of:
    backbone-DIGEST.safetensors   weights, scores and claimed bits, and what the method remembers of all tasks together,
                                  as the last finished task left them
    tasks/NUMBER-DIGEST.safetensors  a finished task: mask, normalization, head, what is known of it, and the heads of
                                  earlier tasks as it left them
    checkpoint-DIGEST.safetensors  the task under way, at some step of it
    events.jsonl, epochs.csv      what happened; see runs/logs.py

Files are named by their content and never changed; `run.json`, which names them, is replaced last. A crash at any
moment leaves the run as it was or as it should be.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from etcl_deploy.config import Config
from etcl_deploy.core import atomic
from etcl_deploy.core.plan import Plan, PlanError
from etcl_deploy.core.preprocessing import Preprocessing
from etcl_deploy.errors import RunError
from etcl_deploy.learn.metrics import forward_transfer
from etcl_deploy.learn.run import Run, RunSummary
from etcl_deploy.learn.similarity import Comparison
from etcl_deploy.learn.task_record import HeadChange, TaskRecord
from etcl_deploy.learn.task_training import Checkpoint
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.runs import tensors as parts
from etcl_deploy.settings import config_from, missing_from

FORMAT = 2
RECORD = "run.json"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Origin:
    """The source of some of a run's tasks, so that it can be taken up again."""

    folder: str | None  # None: the sequence its config names
    tasks: Sequence[tuple[str, str]]  # names in the order they are learned, each with the digest of its items
    partial: Sequence[str] = ()  # where only a part of a data set was at hand, in words


@dataclass(frozen=True)
class StoredRun:
    """The contents of a run directory."""

    run: Run
    config: Config
    origins: tuple[Origin, ...]
    digest: str = ""  # of every bit that was learned, as it was read

    @property
    def partial(self) -> list[str]:
        """The data sets that were not complete, in words."""
        return [words for origin in self.origins for words in origin.partial]

    def summary(self, one: StoredRun | None = None) -> RunSummary:
        """The figures of the run; with forward transfer, if the run of `one` is there."""
        fwt = forward_transfer(self.run.matrix, self._learned_alone(one)) if one else None
        return self.run.summary(self.config, fwt=fwt, partial=self.partial, digest=self.digest)

    def _learned_alone(self, one: StoredRun) -> list[float | None]:
        """The accuracies of `one` on each of this run's tasks, which must be the very same."""
        if one.config.learning.method != "one":
            raise RunError(f"forward transfer is measured against a run of one, not of {one.config.learning.method}")
        alone = {name: row[-1] for name, row in zip(one.run.tasks, one.run.matrix, strict=True)}
        if one.config.budget() != self.config.budget():
            raise RunError("the run of one has another network, start or images, another number of epochs or batches")
        theirs, ours = (dict(task for origin in stored.origins for task in origin.tasks) for stored in (one, self))
        other = [name for name in self.run.tasks if name not in alone or theirs[name] != ours[name]]
        if other:
            raise RunError(f"the run of one has not learned {other[0]!r} from the same items")
        return [alone[name] for name in self.run.tasks]

    @property
    def waiting(self) -> list[str]:
        """The tasks that are still to be learned, in order."""
        return [name for origin in self.origins for name, _ in origin.tasks if name not in self.run.tasks]


def how_to_go_on(directory: Path) -> str:
    """The command that takes a run up again."""
    return f"etcl train --run {shlex.quote(str(directory))} --resume"


def check_free(directory: Path) -> None:
    """Refuse a directory that already holds something."""
    if (directory / RECORD).exists():
        raise RunError(f"{directory} already holds a run; go on with it (--resume) or name another directory")
    if directory.exists() and (not directory.is_dir() or not all(map(_is_leftover, directory.iterdir()))):
        raise RunError(f"{directory} is not an empty directory; a run starts in a new or empty one")
    nearest = next(parent for parent in (directory, *directory.absolute().parents) if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise RunError(f"{directory} cannot be made: {nearest} is not a directory one can write to")


def check_there(directory: Path) -> None:
    """Refuse a directory that holds no run."""
    if not (directory / RECORD).exists():
        raise RunError(f"{directory} holds no run: {directory / RECORD} is missing")


def _is_leftover(path: Path) -> bool:
    """Something a process left that was killed before its run was one."""
    ours = r"\.run\.\w+\.json|\.?backbone-[0-9a-f]{16}(\.\w+)?\.safetensors"
    return path.name == atomic.LOCK or re.fullmatch(ours, path.name) is not None


def tidy(directory: Path) -> None:
    """Remove half-written files that processes left which were killed while they wrote."""
    for pattern in (".run.*.json", ".*.safetensors", "tasks/.*.safetensors"):
        for left in directory.glob(pattern):
            left.unlink()


def save(stored: StoredRun, directory: Path) -> StoredRun:
    """Write what is new since the last time; the previous state stays valid until the new one is complete.

    Gives the run with the digest it is now stored under.
    """
    run = stored.run
    network = run.network
    entries = _read_record(directory)["tasks"] if (directory / RECORD).exists() else []
    before = len(entries)
    for number in range(before, len(run.tasks)):
        name = run.tasks[number]
        state, known = network.finished[name], run.records[name]
        changed = {run.tasks.index(c.task): network.finished[c.task].head for c in known.changes if c.kept}
        entries.append(
            {
                "name": name,
                "classes": list(state.classes),
                "comparisons": [asdict(c) for c in known.comparisons],
                "changes": [asdict(c) for c in known.changes],
                "file": _write(directory / "tasks", f"{number:03d}", parts.task_tensors(state, known, changed)),
            }
        )
    record: dict[str, Any] = {
        "format": FORMAT,
        "config": stored.config.as_json(),
        "origins": [asdict(origin) for origin in stored.origins],
        "backbone": network.plan.as_json(),
        "preprocessing": network.preprocessing.as_json(),
        "density": network.density,
        "tasks": entries,
        "state": _write(directory, "backbone", parts.backbone_tensors(network, run.memory)),
        "matrix": [list(row) for row in run.matrix],
        "seconds": run.seconds,
        "versions": dict(run.versions),
    }
    atomic.write_bytes(directory / RECORD, json.dumps(record, indent=1, sort_keys=True).encode())
    _remove(directory, "backbone", keep=record["state"]["name"])
    if len(entries) > before:
        remove_checkpoint(directory)
    return replace(stored, digest=_digest(record))


def load_run(directory: Path, device: torch.device = CPU, *, finished: bool = True) -> StoredRun:
    """The run in a directory, every file checked against its digest; with `finished`, one task at least."""
    path = directory / RECORD
    try:
        record = _read_record(directory)
        if finished and not record["tasks"]:
            raise RunError(f"no task of the run in {directory} is finished; go on with: {how_to_go_on(directory)}")
        try:
            return _restored(record, directory, device)
        except FileNotFoundError:
            newer = _read_record(directory)
            if newer["state"] == record["state"]:
                raise
            return _restored(newer, directory, device)  # a process at work has replaced what the record named
    except OSError as error:
        raise RunError(f"cannot read the run in {directory}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, SafetensorError, PlanError) as error:
        raise RunError(f"{path} is damaged: {error!r}") from None


def save_checkpoint(checkpoint: Checkpoint, directory: Path) -> None:
    """Write the state of the task under way."""
    about = json.dumps(
        {"task": checkpoint.task, "device": checkpoint.device, "numbers": dict(checkpoint.numbers)}
    ).encode()
    numbers = torch.frombuffer(bytearray(about), dtype=torch.uint8)
    written = _write(directory, "checkpoint", {"": numbers, **checkpoint.tensors})
    _remove(directory, "checkpoint", keep=written["name"])


def load_checkpoint(directory: Path, task: str) -> Checkpoint | None:
    """The furthest whole checkpoint of `task`, if it was begun."""
    checkpoints = []
    for path in directory.glob("checkpoint-*.safetensors"):
        data = path.read_bytes()
        if path.stem == f"checkpoint-{hashlib.sha256(data).hexdigest()[:16]}":
            tensors = tensors_from_bytes(data)
            about = json.loads(bytes(tensors.pop("").tolist()))
            checkpoints.append(Checkpoint(about["task"], about["device"], about["numbers"], tensors))
    ours = [checkpoint for checkpoint in checkpoints if checkpoint.task == task]
    return max(ours, key=lambda s: (s.numbers["epoch"] or 0, s.numbers["step"] or 0), default=None)


def remove_checkpoint(directory: Path) -> None:
    """Leave nothing of the task under way: it starts anew."""
    _remove(directory, "checkpoint")


def _read_record(directory: Path) -> dict[str, Any]:
    path = directory / RECORD
    check_there(directory)
    record: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if record["format"] != FORMAT:
        raise RunError(f"{path} has format {record['format']}; this etcl_deploy reads format {FORMAT}")
    return record


def _restored(record: Mapping[str, Any], directory: Path, device: torch.device) -> StoredRun:
    network = MaskedNetwork(
        Plan.from_json(record["backbone"]),
        Preprocessing(**record["preprocessing"]),
        record["density"],
        torch.Generator(),
    ).to(device)
    memory = parts.restore_backbone(network, _read(directory, record["state"], device))
    records = {}
    for entry in record["tasks"]:
        tensors = _read(directory / "tasks", entry["file"], device)
        network.restore(parts.task_from(tensors, network, entry["name"], tuple(entry["classes"])))
        changes = tuple(HeadChange(**change) for change in entry["changes"])
        for change in changes:
            if change.kept:
                number = list(network.finished).index(change.task)
                network.change_head(change.task, parts.under(tensors, f"head_of/{number}"))
        comparisons = tuple(Comparison(**comparison) for comparison in entry["comparisons"])
        kept = (parts.under(tensors, "head"), parts.under(tensors, "record"))
        records[entry["name"]] = TaskRecord(*kept, comparisons, changes)
    matrix = tuple(tuple(None if value is None else float(value) for value in row) for row in record["matrix"])
    if [len(row) for row in matrix] != list(range(1, len(records) + 1)):
        raise ValueError("the accuracy matrix does not fit the tasks")
    run = Run(network, records, memory, matrix, record["seconds"], record["versions"])
    origins = tuple(
        Origin(o["folder"], [(name, digest) for name, digest in o["tasks"]], o["partial"]) for o in record["origins"]
    )
    missing = missing_from(record["config"])
    if missing:  # today's default need not be what the run was learned with
        what = f"{directory / RECORD} does not say {', '.join(missing)}"
        raise RunError(f"{what}: it is of another version of etcl_deploy and has to be learned anew")
    config = config_from(record["config"])
    return StoredRun(run, config, origins, _digest(record))


def _digest(record: Mapping[str, Any]) -> str:
    files = [record["state"], *(entry["file"] for entry in record["tasks"])]
    return hashlib.sha256("".join(file["sha256"] for file in files).encode()).hexdigest()


def _write(directory: Path, prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Write tensors to a file named by its content; its name and its digest."""
    data = tensors_to_bytes({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    digest = hashlib.sha256(data).hexdigest()
    name = f"{prefix}-{digest[:16]}.safetensors"
    atomic.write_bytes(directory / name, data)
    return {"name": name, "sha256": digest}


def _read(directory: Path, file: Mapping[str, str], device: torch.device) -> Mapping[str, Tensor]:
    path = directory / file["name"]
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != file["sha256"]:
        raise RunError(f"{path} is damaged: its digest differs")
    # Copies, since where a tensor starts in memory decides the last bit of what is computed from it.
    return {name: tensor.to(device, copy=True) for name, tensor in tensors_from_bytes(data).items()}


def _remove(directory: Path, prefix: str, keep: str = "") -> None:
    for old in directory.glob(f"{prefix}-*.safetensors"):
        if old.name != keep:
            old.unlink()
