"""The bundle file, format 1.

A bundle is a safetensors file: 8 bytes, little-endian, with the length of the header; the header, JSON filled up with
spaces to a multiple of 8; the tensors, little-endian, without gaps, wider types first, then by name, so that each lies
at a multiple of its own width. The header's `__metadata__` holds exactly one key, `etcl`, whose text is

    1 <sha256 of the manifest, 64 hex digits>\n<manifest>

The number is the format. The manifest is JSON with sorted keys, no spaces, ASCII only. It has these keys:

    backbone        {"name": text, "plan": the network as data, see `etcl_deploy.core.plan`}
    encoding        "packed" or "coded": how masks are kept
    precision       "fp32", "fp16" or "int8": what weights and heads are kept in
    preprocessing   {"height", "width", "channels", "mean", "std"}
    run             where it comes from: recipe, seed, accuracy, versions; nothing in it changes an answer
    sections        {section name: {"dtype", "shape", "sha256"}} for every tensor of the file
    tasks           [{"name", "classes", "density", "accuracy", "learned"}], in the order they were learned; accuracy in
                    percent is the bundle's, `learned` what it was in single precision; null where nobody knows

Weights are those of all steps of the plan that have any, in its order, each row by row: `weights` of them. P is F32,
F16 or I8, as the precision says. `<i>` is a task's position in `tasks`, from 0. Sections with numbers are as below in
a packed bundle; in a coded one they are U8, these numbers in fewer bytes (`etcl_deploy.bundle.float_coding`).

    backbone/weight           P [weights], 0 where no task selects one; coded: [used], only those some task selects
    backbone/owner            U8, coded only: which task first selects each weight, see `etcl_deploy.bundle.mask_coding`
    backbone/scale            F32 [tasks, channels], int8 only: what a weight is multiplied by, by its owner (the first
                              task that selects it) and its output channel; the channels of all steps in their order
    task/<i>/mask             U8, one bit a weight (`etcl_deploy.bundle.bits`); coded: `etcl_deploy.bundle.mask_coding`
    task/<i>/norm             F32: for every normalization step in order, first all it multiplies by, then all it adds
                              (batch statistics are in them; a group or layer norm divides by the item's own deviation
                              first)
    task/<i>/head/weight      P [classes, features]
    task/<i>/head/bias        F32 [classes], where the plan has `head_bias`
    task/<i>/head/scale       F32 [classes], int8 only

A reader MUST refuse: another format; a manifest or section whose digest differs; a header or manifest in another form
than the one the writer gives it; a tensor the manifest does not list with the same type and shape, or lists and the
file lacks; sections other than the ones above; anything after the last tensor; numbers that are not finite, scales
that are not above 0; and what docs/bundle-format.md lists beside these, which says all of this at more length. The
bundle's own digest is the manifest's, which covers all sections.

What a reader may be asked to hold is bounded. Plans have limits (see `core.plan` and `core.operations`); there
are at most 65,534 tasks of 100,000 classes; the header has at most 100 million bytes; a coded bundle has at most 2 **
22 + 32 * the bytes of its weights as many weights, and times tasks 2 ** 34. Reading one task takes at most 64 MB, 3
times the file, 64 times its header, 64 bytes for every weight and number of a head, and 64 for every task and step
with weights.

The same content gives the same bytes: safetensors orders the tensors, and one metadata key has only one order.

A reader may map the file instead of copying it, as this one does: replace a bundle, never overwrite it in place.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from etcl_deploy.errors import BundleError

FORMAT = 1
BUNDLE, DELTA = "etcl", "etcl-delta"  # the metadata key, by which the two kinds of files are told apart
KINDS = {BUNDLE: "bundle", DELTA: "delta"}
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.int8: "I8", torch.uint8: "U8"}
WIDTHS = {"F32": 4, "F16": 2, "I8": 1, "U8": 1}  # in the order in which they lie in a file
UNREADABLE = (SafetensorError, OSError, ValueError, TypeError, RuntimeError, OverflowError)


def to_bytes(manifest: Mapping[str, Any], sections: Mapping[str, Tensor], key: str = BUNDLE) -> bytes:
    """The file's bytes; `manifest` is everything but the list of sections, which is added here."""
    from safetensors.torch import save  # needs numpy, which a server may lack

    sections = {name: tensor.detach().cpu().contiguous() for name, tensor in sections.items()}
    listed = {name: _describe(tensor) for name, tensor in sections.items()}
    text = _dump({**manifest, "sections": listed})
    metadata = f"{FORMAT} {digest_of(text)}\n{text}"
    return save(sections, metadata={key: metadata})


class Opened(Mapping[str, Tensor]):
    """The tensors of a file, each a view of the mapped file, opened when it is asked for: already that reads of it."""

    def __init__(self, path: Path) -> None:
        file: Any = safe_open(path, framework="pt")
        self._file = file
        self._names = dict.fromkeys(file.keys())
        self.metadata: dict[str, str] = file.metadata() or {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        found: Tensor = self._file.get_tensor(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read(path: Path, key: str = BUNDLE, *, check: bool = True) -> tuple[dict[str, Any], Mapping[str, Tensor], str]:
    """Manifest, sections and digest of a file, every byte checked.

    Without `check` the digests of sections are not looked at, so that nothing is read but what is used.
    """
    kind = KINDS[key]
    if path.is_dir():
        raise BundleError(f"{path} is a directory; a {kind} is one file")
    try:
        if path.stat().st_size == 0:
            raise BundleError(f"{path} is empty; a {kind} has at least a header")
        sections = Opened(path)
        with path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
    except FileNotFoundError:
        raise BundleError(f"{path} does not exist") from None
    except UNREADABLE as error:
        raise BundleError(f"{path} is truncated, damaged or not a {kind}: {error}") from None
    metadata = sections.metadata
    text, digest = _manifest_text(path, metadata, key)
    try:
        manifest = json.loads(text)
        listed = manifest["sections"]
        if _dump(manifest) != text:
            raise ValueError("not in its one form")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BundleError(f"{path} has a manifest that is not what format 1 says") from None
    if check:
        _check_sections(path, listed, sections)
    if header != _header(metadata, listed):
        raise BundleError(f"{path} has a header that is not what format 1 says")
    return manifest, sections, digest


def kind_of(path: Path) -> str | None:
    """ "bundle" or "delta", as far as a file says; None where it is neither."""
    try:
        with safe_open(path, framework="pt") as file:
            keys = file.metadata() or {}
    except UNREADABLE:
        return None
    return next((kind for key, kind in KINDS.items() if key in keys), None)


def size_of(listed: Mapping[str, Any]) -> int:
    """Bytes of a section, as the manifest describes it."""
    shape: list[int] = listed["shape"]
    return prod(shape) * WIDTHS[listed["dtype"]]


def digest_of(text: str) -> str:
    """SHA-256 of a text in UTF-8, as 64 hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def _dump(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _manifest_text(path: Path, metadata: Mapping[str, str], key: str) -> tuple[str, str]:
    """The manifest and its digest, once format and digest are right."""
    if set(metadata) != {key}:
        found = "".join(f"it is a {KINDS[other]}" for other in metadata if other in KINDS) or "it has no manifest"
        raise BundleError(f"{path} is a safetensors file, but not a {KINDS[key]}: {found}")
    first, _, text = metadata[key].partition("\n")
    number, _, digest = first.partition(" ")
    if number.isascii() and number.isdigit() and int(number[:9]) > FORMAT:
        raise BundleError(
            f"{path} has format {number[:9]}, written by a later etcl_deploy; "
            f"this one reads format {FORMAT}: upgrade it, or bundle the run again"
        )
    if number != str(FORMAT) or digest != digest_of(text):
        raise BundleError(f"{path} is damaged: its manifest does not have the digest it states")
    return text, digest


def _check_sections(path: Path, listed: Any, sections: Mapping[str, Tensor]) -> None:
    if not isinstance(listed, dict) or set(listed) != set(sections):
        raise BundleError(f"{path} is damaged: its sections are not the ones its manifest lists")
    for name in sections:
        try:
            found = _describe(sections[name])
        except UNREADABLE as error:
            raise BundleError(f"{path} is damaged: section {name!r} cannot be opened: {error}") from None
        if found != listed[name] or found["dtype"] not in WIDTHS:
            raise BundleError(f"{path} is damaged: section {name!r} is not the one its manifest describes")


def _header(metadata: Mapping[str, str], listed: Mapping[str, Any]) -> bytes:
    """The one header that a file with these sections has."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in sorted(listed, key=lambda name: ([*WIDTHS].index(listed[name]["dtype"]), name)):
        begin, end = end, end + size_of(listed[name])
        entries[name] = {key: listed[name][key] for key in ("dtype", "shape")} | {"data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _describe(tensor: Tensor) -> dict[str, Any]:
    # hashlib reads the tensor's memory in place; going through numpy would need numpy on the server.
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""
    return {
        "dtype": DTYPES.get(tensor.dtype, str(tensor.dtype)),
        "shape": list(tensor.shape),
        "sha256": hashlib.sha256(memory).hexdigest(),
    }
