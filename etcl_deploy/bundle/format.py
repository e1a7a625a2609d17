"""The bundle file, format 1.

A bundle is a safetensors file (little-endian; header length, JSON header, tensors without gaps). Its header's
`__metadata__` holds exactly one key, `etcl`, whose text is

    1 <sha256 of the manifest, 64 hex digits>\n<manifest>

The number is the format. The manifest is JSON with sorted keys, no spaces, ASCII only. It has these keys:

    backbone        {"name": text, "plan": the network as data, see `etcl_deploy.plan`}
    encoding        "packed": one bit per weight, see `etcl_deploy.bundle.codec`
    preprocessing   {"height", "width", "channels", "mean", "std"}
    run             where it comes from: recipe, seed, accuracy, versions; nothing in it changes an answer
    sections        {section name: {"dtype", "shape", "sha256"}} for every tensor of the file
    tasks           [{"name", "classes", "density", "accuracy"}], in the order they were learned

Sections, with `<step>` a step of the plan and `<i>` a task's position in `tasks`, from 0:

    backbone/<step>           F32, the weight; 0 where no task selects it
    task/<i>/mask/<step>      U8, packed bits
    task/<i>/norm/<step>      F32 [2, features]: what the frozen normalization multiplies by, what it adds; a group
                              or layer norm divides by the item's own deviation first
    task/<i>/head/weight      F32 [classes, features]
    task/<i>/head/bias        F32 [classes], where the plan has `head_bias`

A reader MUST refuse: another format; a manifest or section whose digest differs; a tensor the manifest does not
list with the same type and shape, or lists and the file lacks; sections other than the ones above; anything after
the last tensor. The bundle's own digest is the manifest's, which covers all sections.

Numbers are finite. The same content gives the same bytes: safetensors orders the tensors, and one metadata key has
only one order.

A reader may map the file instead of copying it, as this one does: replace a bundle, never overwrite it in place.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from etcl_deploy.errors import BundleError

FORMAT = 1
KEY = "etcl"
DTYPES = {torch.float32: "F32", torch.uint8: "U8"}


def to_bytes(manifest: Mapping[str, Any], sections: Mapping[str, Tensor]) -> bytes:
    """The file's bytes; `manifest` is everything but the list of sections, which is added here."""
    from safetensors.torch import save  # needs numpy, which a server may lack

    sections = {name: tensor.detach().cpu().contiguous() for name, tensor in sections.items()}
    listed = {name: _describe(tensor) for name, tensor in sections.items()}
    text = _dump({**manifest, "sections": listed})
    metadata = f"{FORMAT} {digest_of(text)}\n{text}"
    return save(sections, metadata={KEY: metadata})


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """Manifest, sections and digest of a bundle, every byte checked; tensors are views of the mapped file."""
    if path.is_dir():
        raise BundleError(f"{path} is a directory; a bundle is one file ending in .etcl")
    try:
        if path.stat().st_size == 0:
            raise BundleError(f"{path} is empty; a bundle has at least a header")
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            sections = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise BundleError(f"{path} does not exist") from None
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise BundleError(f"{path} is truncated, damaged or not a bundle: {error}") from None
    text, digest = _manifest_text(path, metadata)
    try:
        manifest = json.loads(text)
        listed = manifest["sections"]
        if _dump(manifest) != text:
            raise ValueError("not in its one form")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BundleError(f"{path} has a manifest that is not what format 1 says") from None
    _check_sections(path, listed, sections)
    return manifest, sections, digest


def digest_of(text: str) -> str:
    """SHA-256 of a text in UTF-8, as 64 hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def _dump(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _manifest_text(path: Path, metadata: Mapping[str, str] | None) -> tuple[str, str]:
    """The manifest and its digest, once format and digest are right."""
    if not metadata or set(metadata) != {KEY}:
        raise BundleError(f"{path} is a safetensors file, but not a bundle: it has no manifest")
    first, _, text = metadata[KEY].partition("\n")
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
    for name, tensor in sections.items():
        found = _describe(tensor)
        if found != listed[name]:
            raise BundleError(f"{path} is damaged: section {name!r} is not the one its manifest describes")


def _describe(tensor: Tensor) -> dict[str, Any]:
    # hashlib reads the tensor's memory in place; going through numpy would need numpy on the server.
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""
    return {
        "dtype": DTYPES.get(tensor.dtype, str(tensor.dtype)),
        "shape": list(tensor.shape),
        "sha256": hashlib.sha256(memory).hexdigest(),
    }
