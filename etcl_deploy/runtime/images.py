"""Image files and pixel arrays to the uint8 tensor a network takes. Decoding is bounded."""

from __future__ import annotations

import ctypes
import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from etcl_deploy.errors import BadImageError, TooLargeError
from etcl_deploy.preprocessing import Preprocessing

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
MAX_PIXELS = 40_000_000  # of an image file, checked before it is decoded
MAX_BYTES = 64 * 1024 * 1024

ImageInput = bytes | bytearray | str | Path | Tensor | Sequence[Any]


def prepare(source: ImageInput, preprocessing: Preprocessing) -> Tensor:
    """uint8 `[height, width, channels]` from an encoded image, a file's path, or pixels from 0 to 255."""
    if isinstance(source, str | Path):
        return _from_file(Path(source), preprocessing)
    if isinstance(source, bytes | bytearray):
        return _from_bytes(bytes(source), preprocessing)
    if isinstance(source, Tensor) and source.dtype == torch.uint8:
        if source.shape == preprocessing.shape:
            return source
        return _from_pixels(source, preprocessing)
    return _from_pixels(_pixels(source), preprocessing)


def _from_file(path: Path, preprocessing: Preprocessing) -> Tensor:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise TooLargeError(f"{path} has {size} bytes; at most {MAX_BYTES} are read")
        data = path.read_bytes()
    except OSError as error:
        raise BadImageError(f"cannot read {path}: {error.strerror}") from None
    try:
        return _from_bytes(data, preprocessing)
    except (BadImageError, TooLargeError) as error:
        raise type(error)(f"{path}: {error}") from None


def _from_bytes(data: bytes, preprocessing: Preprocessing) -> Tensor:
    if not data:
        raise BadImageError("the image is empty (0 bytes)")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about sizes we check ourselves
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise TooLargeError(
                        f"the image has {image.width} x {image.height} pixels; at most {MAX_PIXELS} are decoded"
                    )
                image.load()
                return _resized(_upright(image), preprocessing)
    except UnidentifiedImageError:
        raise BadImageError(f"not an image; {', '.join(FORMATS)} are read") from None
    except TooLargeError:
        raise
    except Image.DecompressionBombError as error:
        raise TooLargeError(str(error)) from None
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError) as error:
        raise BadImageError(f"the image is damaged or cut off: {error}") from None


def _pixels(source: Any) -> Tensor:
    """Nested lists or an array of whole numbers from 0 to 255 as a uint8 tensor."""
    try:
        values = source if isinstance(source, Tensor) else torch.tensor(source)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise BadImageError(f"pixels must be a rectangular array of numbers: {error}") from None
    if values.dtype == torch.uint8:
        return values
    if values.numel() and (values.dtype == torch.bool or values.is_complex()):
        raise BadImageError("pixels must be numbers from 0 to 255")
    # The comparison is written so that nan fails it too.
    if values.numel() and not bool(((values >= 0) & (values <= 255)).all()):
        raise BadImageError("pixels must lie between 0 and 255")
    return values.round().to(torch.uint8) if values.is_floating_point() else values.to(torch.uint8)


def _from_pixels(pixels: Tensor, preprocessing: Preprocessing) -> Tensor:
    if pixels.ndim == 2:
        pixels = pixels.unsqueeze(2)
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3) or not pixels.numel():
        raise BadImageError(f"pixels have the shape {list(pixels.shape)}; [height, width], or [height, width, 1 or 3]")
    height, width, channels = pixels.shape
    if height * width > MAX_PIXELS:
        raise TooLargeError(f"{height} x {width} pixels; at most {MAX_PIXELS} are taken")
    mode = "L" if channels == 1 else "RGB"
    pixels = pixels.contiguous()
    data = ctypes.string_at(pixels.data_ptr(), pixels.nbytes)
    return _resized(Image.frombytes(mode, (width, height), data), preprocessing)


def _upright(image: Image.Image) -> Image.Image:
    """The image as a person sees it: turned as the camera noted, on white where it is transparent, 8 bit."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        # convert() would clip 16-bit grey at 255 instead of scaling it.
        return image.convert("I").point(lambda value: value / 257).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image


def _resized(image: Image.Image, preprocessing: Preprocessing) -> Tensor:
    image = image.convert("L" if preprocessing.channels == 1 else "RGB")
    size = (preprocessing.width, preprocessing.height)
    if image.size != size:
        image = image.resize(size, Image.Resampling.BILINEAR)
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(preprocessing.shape)
