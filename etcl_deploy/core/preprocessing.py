"""How pixels become the network's input: the size images are brought to, and the scale of their values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a device has none
    from torch import Tensor

MAX_SIDE = 2048
ONES = "pixels lie between 0 and 1, where 0 to 255 is right; multiply them by 255"


@dataclass(frozen=True)
class Preprocessing:
    """Images are resized to `height` x `width` with `channels` (1 grey, 3 RGB), then `(x/255 - mean) / std`."""

    height: int
    width: int
    channels: int
    mean: float = 0.5
    std: float = 0.5

    def __post_init__(self) -> None:
        if not all(type(v) is int and 0 < v <= MAX_SIDE for v in (self.height, self.width)):
            raise ValueError(f"image sides must be 1 to {MAX_SIDE}, not {self.height} x {self.width}")
        if type(self.channels) is not int or self.channels not in (1, 3):
            raise ValueError(f"channels must be 1 (grey) or 3 (colour), not {self.channels!r}")
        if not (type(self.mean) is float and abs(self.mean) <= 1000 and type(self.std) is float):
            raise ValueError(f"mean {self.mean!r} must lie between -1000.0 and 1000.0")
        if not 0.001 <= self.std <= 1000:
            raise ValueError(f"std {self.std!r} must lie between 0.001 and 1000.0")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of a prepared image."""
        return (self.height, self.width, self.channels)

    @property
    def scale(self) -> float:
        """The factor of a pixel value."""
        return 1 / (255 * self.std)

    @property
    def shift(self) -> float:
        """The number added to the product."""
        return -self.mean / self.std

    def normalize(self, pixels: Tensor) -> Tensor:
        """uint8 `[batch, height, width, channels]` to float32 `[batch, channels, height, width]`."""
        return pixels.permute(0, 3, 1, 2).float() * self.scale + self.shift

    def as_json(self) -> dict[str, Any]:
        """The same as a JSON object."""
        return asdict(self)
