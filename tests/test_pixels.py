from __future__ import annotations

import io
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from etcl_deploy.core import pictures
from etcl_deploy.core.pixels import prepare
from etcl_deploy.core.preprocessing import Preprocessing
from etcl_deploy.errors import BadImageError, TooLargeError

GREY = Preprocessing(8, 8, 1)
COLOUR = Preprocessing(8, 8, 3)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP"])
@pytest.mark.parametrize("size", [(1, 1), (8, 8), (31, 97), (200, 3)])
def test_every_format_and_size_is_read(kind: str, size: tuple[int, int]) -> None:
    """A plain colour stays that colour at the network's size, grey or colour."""
    data = encoded(Image.new("RGB", size, (200, 100, 50)), kind)
    assert prepare(data, GREY).shape == (8, 8, 1)
    mean = prepare(data, COLOUR).float().mean((0, 1))
    assert torch.allclose(mean, torch.tensor([200.0, 100.0, 50.0]), atol=4)


def test_pixels_of_the_right_size_are_kept_exactly() -> None:
    """No resampling where none is needed: PNG, array, list and tensor all give the same tensor."""
    pixels = torch.arange(64, dtype=torch.uint8).view(8, 8, 1) * 3
    data = encoded(Image.fromarray(pixels[..., 0].numpy()), "PNG")
    sources = (
        data,
        Image.fromarray(pixels[..., 0].numpy()),
        pixels.numpy(),
        pixels.squeeze(2).tolist(),
        pixels,
        pixels.float(),
    )
    for source in sources:
        assert torch.equal(prepare(source, GREY), pixels)


def test_images_are_seen_as_a_person_sees_them() -> None:
    """Turned as the camera noted; transparent parts white; 16-bit grey scaled, not clipped."""
    turned = Image.new("L", (8, 8), 0)
    turned.paste(255, (0, 0, 8, 4))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    upside = prepare(encoded(turned, "JPEG", exif=exif, quality=100), GREY)
    assert upside[7].float().mean() > 200 > 50 > upside[0].float().mean()
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    assert prepare(encoded(clear, "PNG"), GREY).min() == 255
    deep = Image.fromarray(np.full((8, 8), 257 * 100, dtype=np.uint16))
    assert prepare(encoded(deep, "PNG"), GREY).unique().tolist() == [100]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"", "empty"),
        (b"hello", "not an image; PNG"),
        (encoded(Image.new("L", (64, 64)), "GIF"), "not an image"),
        (encoded(Image.effect_noise((64, 64), 90), "PNG")[:-900], "damaged or cut off"),
        (encoded(Image.effect_noise((64, 64), 90), "JPEG")[:600], "damaged or cut off"),
        ([[1, 2], [3]], "rectangular"),
        ([], "shape"),
        ([[300]], "between 0 and 255"),
        ([[float("nan")]], "between 0 and 255"),
        ([[10**30]], "rectangular array of numbers"),
        ([["a"]], "rectangular array of numbers"),
        ([[[1, 2]]], r"\[1, 1, 2\]"),
        ([[0.0, 0.5], [1.0, 0.0]], "between 0 and 1, where 0 to 255 is right"),
        (torch.zeros(2, 2, 2, 2), "shape"),
        (torch.zeros(8, 8, device="meta"), "rectangular array of numbers"),
    ],
)
def test_what_is_not_an_image_is_refused(source: object, reason: str) -> None:
    """One reason each, never a crash."""
    with pytest.raises(BadImageError, match=reason):
        prepare(source, GREY)


def test_files_are_named_in_errors(tmp_path: Path) -> None:
    """A missing and a damaged file say which."""
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"x")
    for path, reason in ((bad, "not an image"), (tmp_path / "none.png", "No such file"), (tmp_path, "directory")):
        with pytest.raises(BadImageError, match=reason) as error:
            prepare(path, GREY)
        assert str(path) in str(error.value)


def test_size_is_checked_before_decoding() -> None:
    """A small file that unpacks to too many pixels is refused by its header, and so are too many pixels."""
    with pytest.raises(TooLargeError, match="40 x 30 pixels; at most 1000"):
        prepare(encoded(Image.new("L", (40, 30)), "PNG"), GREY, 1000)
    with pytest.raises(TooLargeError, match="40 x 30 pixels; at most 1000"):
        prepare(torch.zeros(40, 30), GREY, 1000)
    with pytest.raises(TooLargeError, match="at most 40000000 are decoded"):
        prepare(encoded(Image.new("1", (8000, 5001)), "PNG"), GREY)


def test_files_without_an_end_are_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that gives bytes for ever is cut off at the limit."""
    monkeypatch.setattr(pictures, "MAX_BYTES", 1000)
    with pytest.raises(TooLargeError, match="more than the 1000 bytes"):
        prepare("/dev/zero", GREY)


def test_decoding_in_threads_leaves_the_warning_filters_alone() -> None:
    """Silencing a warning in one thread would silence it, for good, in all."""
    before = list(warnings.filters)
    data = encoded(Image.new("RGBA", (64, 64)), "PNG")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: prepare(data, GREY), range(200)))
    assert list(warnings.filters) == before


def test_a_broken_note_about_the_camera_does_not_matter() -> None:
    """Damaged EXIF beside whole pixels: the pixels count."""
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x09\0\0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow mentions it
        assert prepare(encoded(Image.new("L", (8, 8), 77), "JPEG", exif=exif), GREY).float().mean() == 77


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.int64, np.float32, bool])
def test_arrays_of_any_number_type(dtype: type) -> None:
    """What counts are the values."""
    assert prepare(np.ones((8, 8), dtype), GREY).unique().tolist() == [1]
