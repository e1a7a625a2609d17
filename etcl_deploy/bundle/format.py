"""The bundle file, format 1.

A bundle is a safetensors file: 8 bytes, little-endian, with the length of the header; the header, JSON filled up with
spaces to a multiple of 8; the tensors, little-endian, without gaps, wider types first, then by name, so that each lies
at a multiple of its own width. The header's `__metadata__` holds exactly one key, `etcl`, whose text is

    1 <sha256 of the manifest, 64 hex digits>\n<manifest>

The number is the format. The manifest is JSON with sorted keys, no spaces, ASCII only. It has these keys:

    backbone        {"name": text, "plan": the network as data, see `etcl_deploy.core.plan`}
    encoding        "packed" or "coded": how masks are kept
    precision       "fp32", "fp16" or "int8": the precision of weights and heads
    preprocessing   {"height", "width", "channels", "mean", "std"}
    run             the origin of the bundle: recipe, seed, accuracy, versions; no answer depends on it
    sections        {section name: {"dtype", "shape", "sha256"}} for every tensor of the file
    tasks           [{"name", "classes", "density", "accuracy", "learned"}], in the order they were learned; `accuracy`
                    is the bundle's in percent, `learned` that in single precision; null where unknown

Weights are those of all steps of the plan that have any, in its order, each row by row: `weights` of them. P is F32,
F16 or I8, as the precision says. `<i>` is a task's position in `tasks`, from 0. Sections with numbers are as below in
a packed bundle; in a coded one they are U8, these numbers in fewer bytes (`etcl_deploy.bundle.float_coding`).

    backbone/weight           P [weights], 0 where no task selects one; coded: [used], only those some task selects
    backbone/owner            U8, coded only: which task first selects each weight, see `etcl_deploy.bundle.mask_coding`
    backbone/scale            F32 [tasks, channels], int8 only: the factor of a weight, by its owner (the first task
                              that selects it) and its output channel; the channels of all steps in their order
    task/<i>/mask             U8, one bit a weight (`etcl_deploy.bundle.bits`); coded: `etcl_deploy.bundle.mask_coding`
    task/<i>/norm             F32: for every normalization step in order, first all its factors, then all its summands
                              (batch statistics are folded into them; a group or layer norm first standardizes the item)
    task/<i>/head/weight      P [classes, features]
    task/<i>/head/bias        F32 [classes], where the plan has `head_bias`
    task/<i>/head/scale       F32 [classes], int8 only

A reader MUST refuse: another format; a manifest or section whose digest differs; a header or manifest in another form
than the one the writer gives it; a tensor the manifest does not list with the same type and shape, or lists and the
file lacks; sections other than the ones above; anything after the last tensor; numbers that are not finite, scales
that are not above 0; and what docs/bundle-format.md lists beside these, which says all of this at more length. The
bundle's own digest is the manifest's, which covers all sections.

The memory of a reader is bounded. Plans have limits (see `core.plan` and `core.operations`); there
are at most 65,534 tasks of 100,000 classes; the header has at most 100 million bytes; a coded bundle has at most 2 **
22 + 32 * the bytes of its weights as many weights, and times tasks 2 ** 34. Reading one task takes at most 64 MB, 3
times the file, 64 times its header, 64 bytes for every weight and number of a head, and 64 for every task and step
with weights.

The same content gives the same bytes: safetensors orders the tensors, and one metadata key has only one order.

A reader may map the file instead of copying it, as this one does: replace a bundle, never overwrite it in place.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from etcl_deploy.errors import BundleError

FORMAT = 1
BUNDLE, DELTA = "etcl", "etcl-delta"  # the metadata key of each kind of file
KINDS = {BUNDLE: "bundle", DELTA: "delta"}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "I8": torch.int8, "U8": torch.uint8}  # as they lie in a file
LENGTH_BYTES, MAX_HEADER, MAX_DIMENSIONS = 8, 100_000_000, 8

Buffer = bytes | bytearray | memoryview | mmap.mmap


def to_bytes(manifest: Mapping[str, Any], sections: Mapping[str, Tensor], key: str = BUNDLE) -> bytes:
    """The file's bytes; `manifest` is everything but the list of sections, which is added here."""
    from safetensors.torch import save  # with numpy; a server, which only reads, may lack both

    sections = {name: tensor.detach().cpu().contiguous() for name, tensor in sections.items()}
    listed = {name: _describe(tensor) for name, tensor in sections.items()}
    text = _dump({**manifest, "sections": listed})
    metadata = f"{FORMAT} {digest_of(text)}\n{text}"
    return save(sections, metadata={key: metadata})


def from_bytes(
    data: Buffer, key: str = BUNDLE, name: str = "the file", *, check: bool = True
) -> tuple[dict[str, Any], Mapping[str, Tensor], str]:
    """Manifest, sections and digest of a file's bytes, every byte checked; errors call the file `name`.

    Sections share the memory of `data`; bytes that cannot be written to are copied once. Without `check` the digests
    of sections are not looked at, so that nothing is read of a mapped file but what is used.
    """
    if not len(data):
        raise BundleError(f"{name} is empty; a {KINDS[key]} has at least a header")
    try:
        header, entries = _read_header(data)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{name} is truncated, damaged or not a {KINDS[key]}: {error}") from None
    metadata = entries.pop("__metadata__")
    text, digest = _manifest_text(name, metadata, key)
    try:
        manifest = json.loads(text)
        listed = manifest["sections"]
        if _dump(manifest) != text:
            raise ValueError("not in its one form")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BundleError(f"{name} has a manifest that is not what format 1 says") from None
    _check_list(name, listed, entries)
    start = LENGTH_BYTES + len(header)
    if len(data) != start + sum(map(size_of, listed.values())):
        raise BundleError(
            f"{name} is truncated, damaged or not a {KINDS[key]}: its sections do not take the {len(data)} bytes it has"
        )
    if header != _header(metadata, listed):
        raise BundleError(f"{name} has a header that is not what format 1 says")
    if check:
        _check_digests(name, listed, memoryview(data)[start:])
    writable = bytearray(data) if memoryview(data).readonly else data
    return manifest, SectionViews(writable, start, listed), digest


class SectionViews(Mapping[str, Tensor]):
    """The sections of a file as tensors, each a view of its bytes that is made when it is asked for."""

    def __init__(self, data: Buffer, start: int, listed: Mapping[str, Any]) -> None:
        self._data = data
        self._listed = listed
        self._begins = {name: start + begin for name, (begin, _) in _places(listed).items()}

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype = self._listed[name]["shape"], DTYPES[self._listed[name]["dtype"]]
        if not prod(shape):
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._data, dtype=dtype, count=prod(shape), offset=self._begins[name]).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._listed)


def map_file(path: Path, kind: str = KINDS[BUNDLE]) -> mmap.mmap:
    """The bytes of a file, mapped: processes that read the same file share them, and none has more than it uses.

    A map holds a file descriptor for as long as something uses it.
    """
    if path.is_dir():
        raise BundleError(f"{path} is a directory; a {kind} is one file")
    try:
        if not path.stat().st_size:
            raise BundleError(f"{path} is empty; a {kind} has at least a header")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        raise BundleError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read: {error}") from None


def kind_of(data: Buffer) -> str | None:
    """ "bundle" or "delta", as far as a file's bytes say; None where it is neither."""
    try:
        _, entries = _read_header(data)
    except (ValueError, RecursionError):
        return None
    return next((kind for key, kind in KINDS.items() if key in entries["__metadata__"]), None)


def size_of(described: Mapping[str, Any]) -> int:
    """Bytes of a section, as the manifest describes it."""
    shape: list[int] = described["shape"]
    return prod(shape) * DTYPES[described["dtype"]].itemsize


def digest_of(text: str) -> str:
    """SHA-256 of a text in UTF-8, as 64 hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def _dump(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _read_header(data: Buffer) -> tuple[bytes, dict[str, Any]]:
    """The header of a safetensors file, and what it says: its metadata, and an entry for every tensor."""
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    if length > min(MAX_HEADER, len(data) - LENGTH_BYTES):
        raise ValueError("its header is cut off or too long")
    header = bytes(data[LENGTH_BYTES : LENGTH_BYTES + length])
    entries = json.loads(header)
    if not isinstance(entries, dict):
        raise ValueError("its header is no object")
    metadata = entries.setdefault("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("its metadata is not text")
    for text in (*metadata, *metadata.values()):
        text.encode()  # half of a surrogate pair is no text: a UnicodeEncodeError is a ValueError
    return header, entries


def _manifest_text(name: str, metadata: Mapping[str, str], key: str) -> tuple[str, str]:
    """The manifest and its digest, once format and digest are right."""
    if set(metadata) != {key}:
        reason = "".join(f"it is a {KINDS[other]}" for other in metadata if other in KINDS) or "it has no manifest"
        raise BundleError(f"{name} is a safetensors file, but not a {KINDS[key]}: {reason}")
    first, _, text = metadata[key].partition("\n")
    number, _, digest = first.partition(" ")
    if number.isascii() and number.isdigit() and int(number[:9]) > FORMAT:
        raise BundleError(
            f"{name} has format {number[:9]}, written by a later etcl_deploy; "
            f"this one reads format {FORMAT}: upgrade it, or bundle the run again"
        )
    if number != str(FORMAT) or digest != digest_of(text):
        raise BundleError(f"{name} is damaged: its manifest does not have the digest it states")
    return text, digest


def _check_list(name: str, listed: Any, entries: Mapping[str, Any]) -> None:
    """Refuse a list of sections that does not name the header's tensors, or describes one that cannot be."""
    if not isinstance(listed, dict) or set(listed) != set(entries):
        raise BundleError(f"{name} is damaged: its sections are not the ones its manifest lists")
    for section, described in listed.items():
        if not isinstance(described, dict) or set(described) != {"dtype", "shape", "sha256"} or not _fits(described):
            raise BundleError(f"{name} is damaged: section {section!r} is not the one its manifest describes")


def _fits(described: Mapping[str, Any]) -> bool:
    """Whether a description names a type there is, and a shape that a tensor can have."""
    dtype, shape = described["dtype"], described["shape"]
    if not isinstance(dtype, str) or dtype not in DTYPES or not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        return False
    return all(type(size) is int and size >= 0 for size in shape) and prod(size or 1 for size in shape) < 1 << 63


def _check_digests(name: str, listed: Mapping[str, Any], data: memoryview) -> None:
    for section, (begin, end) in _places(listed).items():
        if hashlib.sha256(data[begin:end]).hexdigest() != listed[section]["sha256"]:
            raise BundleError(f"{name} is damaged: section {section!r} is not the one its manifest describes")


def _places(listed: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Where each section begins and ends behind the header, in the order in which they lie there."""
    widths = [*DTYPES]
    places, end = {}, 0
    for name in sorted(listed, key=lambda name: (widths.index(listed[name]["dtype"]), name)):
        begin, end = end, end + size_of(listed[name])
        places[name] = begin, end
    return places


def _header(metadata: Mapping[str, str], listed: Mapping[str, Any]) -> bytes:
    """The one header that a file with these sections has."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name, offsets in _places(listed).items():
        entries[name] = {key: listed[name][key] for key in ("dtype", "shape")} | {"data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % LENGTH_BYTES)


def _describe(tensor: Tensor) -> dict[str, Any]:
    names = {dtype: name for name, dtype in DTYPES.items()}
    return {
        "dtype": names.get(tensor.dtype, str(tensor.dtype)),
        "shape": list(tensor.shape),
        "sha256": hashlib.sha256(tensor.numpy().data).hexdigest(),
    }
