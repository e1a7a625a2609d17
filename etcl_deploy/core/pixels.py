"""Image files and pixel arrays to the uint8 tensor a network takes, and back."""

from __future__ import annotations

import ctypes
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from etcl_deploy.core.pictures import MAX_PIXELS, Picture, read_picture, resize_pixels
from etcl_deploy.core.preprocessing import ONES, Preprocessing
from etcl_deploy.errors import BadImageError

ImageInput = Picture | Tensor | Sequence[Any]


def prepare(source: ImageInput, preprocessing: Preprocessing, max_pixels: int = MAX_PIXELS) -> Tensor:
    """uint8 `[height, width, channels]` from an encoded image, a path, a Pillow image, or pixels from 0 to 255."""
    if isinstance(source, bytes | bytearray | str | Path | Image.Image):
        data = read_picture(source, preprocessing, max_pixels)
    else:
        pixels = _pixels(source)
        if pixels.shape == preprocessing.shape:
            return pixels
        pixels = pixels.contiguous()
        held = ctypes.string_at(pixels.data_ptr(), pixels.nbytes) if pixels.nbytes else b""
        data = resize_pixels(held, tuple(pixels.shape), preprocessing, max_pixels)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(preprocessing.shape)


def _pixels(source: Any) -> Tensor:
    """Nested lists, an array or a tensor of numbers from 0 to 255 as a uint8 tensor on the CPU."""
    try:
        values = (source if isinstance(source, Tensor) else torch.tensor(source)).cpu()
        if values.dtype == torch.uint8:
            return values
        values = values.double()  # holds every number from 0 to 255, and says what is outside
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise BadImageError(f"pixels must be a rectangular array of numbers: {error}") from None
    # Written so that nan fails it too.
    if not bool(((values >= 0) & (values <= 255)).all()):
        raise BadImageError("pixels must lie between 0 and 255")
    if values.numel() and values.max() <= 1 and bool((values != values.round()).any()):
        raise BadImageError(ONES)
    return values.round().to(torch.uint8)


def png(pixels: Tensor) -> bytes:
    """uint8 `[height, width, 1 or 3]` as a PNG file."""
    height, width, channels = pixels.shape
    buffer = io.BytesIO()
    mode = "L" if channels == 1 else "RGB"
    Image.frombytes(mode, (width, height), pixels.numpy().tobytes()).save(buffer, "PNG")
    return buffer.getvalue()
