"""IDX files, as MNIST, Fashion-MNIST and EMNIST come: a header of sizes, then bytes; gzipped or not."""

from __future__ import annotations

import gzip
import struct
import zlib
from math import prod
from pathlib import Path

import numpy as np

from etcl_deploy.data.source import Part
from etcl_deploy.errors import DataError

UNSIGNED_BYTES = 0x08
MAX_BYTES = 4 << 30  # of one file's values, checked before they are read


def read_idx_part(images: Path, labels: Path, *, turned: bool = False) -> Part:
    """The items of two IDX files; `turned` for EMNIST, whose images are stored column by column."""
    pixels, numbers = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(numbers):
        raise DataError(f"{images} holds {len(pixels)} images, but {labels} {len(numbers)} labels")
    return Part(np.ascontiguousarray(pixels.transpose(0, 2, 1)) if turned else pixels, numbers.astype(np.int64))


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The bytes of an IDX file, in the shape its header states."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            start = file.read(4)
            if start != bytes([0, 0, UNSIGNED_BYTES, dimensions]):
                right = f"00 00 08 {dimensions:02x}"
                raise DataError(
                    f"{path} is no IDX file of {dimensions} dimensions: it begins {start.hex(' ')}, not {right}"
                )
            header = file.read(4 * dimensions)
            shape = struct.unpack(f">{dimensions}I", header)
            count = prod(shape)
            if count > MAX_BYTES:
                raise DataError(f"{path} states {list(shape)} values; at most {MAX_BYTES} bytes are read")
            data = file.read(count + 1)
    except FileNotFoundError:
        raise DataError(f"there is no file {path}") from None
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise DataError(f"{path} is damaged or cut off: {error}") from None
    if len(data) != count:
        held = "more" if len(data) > count else str(len(data))
        raise DataError(f"{path} is damaged or cut off: it states {count} bytes of values and holds {held}")
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)
