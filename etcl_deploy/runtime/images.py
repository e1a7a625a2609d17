"""Image files and pixel arrays to the uint8 tensor a network takes, and back. Decoding is bounded."""

from __future__ import annotations

import ctypes
import io
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from etcl_deploy.errors import BadImageError, TooLargeError
from etcl_deploy.preprocessing import Preprocessing

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
MAX_PIXELS = 40_000_000  # of an image file, checked before it is decoded
NOTES = {"exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp"}  # where a camera says which way up it was held
MAX_BYTES = 64 * 1024 * 1024

ImageInput = bytes | bytearray | str | Path | Image.Image | Tensor | Sequence[Any]


def prepare(source: ImageInput, preprocessing: Preprocessing, max_pixels: int = MAX_PIXELS) -> Tensor:
    """uint8 `[height, width, channels]` from an encoded image, a path, a Pillow image, or pixels from 0 to 255."""
    if isinstance(source, str | Path):
        return _from_file(Path(source), preprocessing, max_pixels)
    if isinstance(source, bytes | bytearray):
        return _from_bytes(bytes(source), preprocessing, max_pixels)
    if isinstance(source, Image.Image):
        return _decoded(source, preprocessing, max_pixels)
    pixels = _pixels(source)
    return pixels if pixels.shape == preprocessing.shape else _from_pixels(pixels, preprocessing, max_pixels)


def _from_file(path: Path, preprocessing: Preprocessing, max_pixels: int) -> Tensor:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise BadImageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_BYTES:
        raise TooLargeError(f"{path} has more than the {MAX_BYTES} bytes that are read")
    try:
        return _from_bytes(data, preprocessing, max_pixels)
    except (BadImageError, TooLargeError) as error:
        raise type(error)(f"{path}: {error}") from None


def _from_bytes(data: bytes, preprocessing: Preprocessing, max_pixels: int) -> Tensor:
    if not data:
        raise BadImageError("the image is empty (0 bytes)")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return _decoded(image, preprocessing, max_pixels)
    except UnidentifiedImageError:
        raise BadImageError(f"not an image; {', '.join(FORMATS)} are read") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise TooLargeError(str(error)) from None
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError, struct.error, Warning) as error:
        raise BadImageError(f"the image is damaged or cut off: {error}") from None


def _decoded(image: Image.Image, preprocessing: Preprocessing, max_pixels: int) -> Tensor:
    if image.width * image.height > max_pixels:
        raise TooLargeError(f"the image has {image.width} x {image.height} pixels; at most {max_pixels} are decoded")
    # A large JPEG is decoded at a fraction of its size, but never below twice what is needed.
    image.draft(None, (2 * preprocessing.width, 2 * preprocessing.height))
    image.load()
    return _resized(_upright(image), preprocessing)


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
    return values.round().to(torch.uint8)


def _from_pixels(pixels: Tensor, preprocessing: Preprocessing, max_pixels: int) -> Tensor:
    if pixels.ndim == 2:
        pixels = pixels.unsqueeze(2)
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3) or not pixels.numel():
        raise BadImageError(
            f"pixels have the shape {list(pixels.shape)}; [height, width], or [height, width, 1 or 3] is right"
        )
    height, width, channels = pixels.shape
    if height * width > max_pixels:
        raise TooLargeError(f"{height} x {width} pixels; at most {max_pixels} are taken")
    pixels = pixels.contiguous()
    data = ctypes.string_at(pixels.data_ptr(), pixels.nbytes)
    return _resized(Image.frombytes("L" if channels == 1 else "RGB", (width, height), data), preprocessing)


def _upright(image: Image.Image) -> Image.Image:
    """The image turned as the camera noted, in 8 bit."""
    if not NOTES.isdisjoint(image.info):
        # A broken note about the camera is no reason to refuse whole pixels.
        with suppress(Exception):
            image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        # convert() would clip 16-bit grey at 255 instead of scaling it.
        return image.convert("I").point(lambda value: value / 257).convert("L")
    return image


def _resized(image: Image.Image, preprocessing: Preprocessing) -> Tensor:
    """The image at the network's size and mode; on white where it is transparent."""
    mode = "L" if preprocessing.channels == 1 else "RGB"
    size = (preprocessing.width, preprocessing.height)
    clear = image.has_transparency_data
    wanted = "RGBA" if clear else mode
    if image.mode != wanted:
        image = image.convert(wanted)
    if image.size != size:
        image = image.resize(size, Image.Resampling.BILINEAR)
    if clear:
        image = Image.alpha_composite(Image.new("RGBA", size, "white"), image).convert(mode)
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(preprocessing.shape)


def png(pixels: Tensor) -> bytes:
    """uint8 `[height, width, 1 or 3]` as a PNG file."""
    height, width, channels = pixels.shape
    buffer = io.BytesIO()
    mode = "L" if channels == 1 else "RGB"
    Image.frombytes(mode, (width, height), pixels.numpy().tobytes()).save(buffer, "PNG")
    return buffer.getvalue()
