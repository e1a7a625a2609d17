"""Image files to the bytes a network takes: at its size, grey or colour, a byte a value. Decoding is bounded.

Needs Pillow alone, so that a device reads images exactly as a server does.
"""

from __future__ import annotations

import io
import struct
from contextlib import suppress
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from etcl_deploy.core.preprocessing import Preprocessing
from etcl_deploy.errors import BadImageError, TooLargeError

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
MAX_PIXELS = 40_000_000  # of an image file, checked before it is decoded
NOTES = {"exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp"}  # where a camera says which way up it was held
MAX_BYTES = 64 * 1024 * 1024

Picture = bytes | bytearray | str | Path | Image.Image


def read_picture(source: Picture, preprocessing: Preprocessing, max_pixels: int = MAX_PIXELS) -> bytes:
    """`height * width * channels` bytes from an encoded image, a path or a Pillow image."""
    if isinstance(source, str | Path):
        return _from_file(Path(source), preprocessing, max_pixels)
    if isinstance(source, bytes | bytearray):
        return _from_bytes(bytes(source), preprocessing, max_pixels)
    return _decoded(source, preprocessing, max_pixels)


def resize_pixels(data: bytes, shape: tuple[int, ...], preprocessing: Preprocessing, max_pixels: int) -> bytes:
    """Like `read_picture`, from the bytes of pixels `[height, width]` or `[height, width, 1 or 3]`."""
    height, width, channels = (*shape, 1) if len(shape) == 2 else shape if len(shape) == 3 else (0, 0, 0)
    if channels not in (1, 3) or not height * width:
        raise BadImageError(
            f"pixels have the shape {list(shape)}; [height, width], or [height, width, 1 or 3] is right"
        )
    if height * width > max_pixels:
        raise TooLargeError(f"{height} x {width} pixels; at most {max_pixels} are taken")
    return _resized(Image.frombytes("L" if channels == 1 else "RGB", (width, height), data), preprocessing)


def _from_file(path: Path, preprocessing: Preprocessing, max_pixels: int) -> bytes:
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


def _from_bytes(data: bytes, preprocessing: Preprocessing, max_pixels: int) -> bytes:
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


def _decoded(image: Image.Image, preprocessing: Preprocessing, max_pixels: int) -> bytes:
    if image.width * image.height > max_pixels:
        raise TooLargeError(f"the image has {image.width} x {image.height} pixels; at most {max_pixels} are decoded")
    # A large JPEG is decoded at a fraction of its size, but never below twice what is needed.
    image.draft(None, (2 * preprocessing.width, 2 * preprocessing.height))
    image.load()
    return _resized(_upright(image), preprocessing)


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


def _resized(image: Image.Image, preprocessing: Preprocessing) -> bytes:
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
    return image.tobytes()
