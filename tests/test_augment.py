from __future__ import annotations

import torch

from etcl_deploy.learn.augment import moved


def images() -> torch.Tensor:
    """A bright square in the middle of dark images."""
    dark = torch.zeros(6, 20, 20, 1, dtype=torch.uint8)
    dark[:, 7:13, 7:13] = 200
    return dark


def drawn(seed: int) -> torch.Tensor:
    return torch.rand(4, 6, generator=torch.Generator().manual_seed(seed))


def test_no_movement_leaves_the_pixels() -> None:
    """All three at zero is the identity."""
    same = moved(images(), 0, 0, 0, drawn(0))
    torch.testing.assert_close(same, images().float(), atol=1e-3, rtol=0)


def test_images_move_each_in_its_own_way() -> None:
    """Shifted by whole pixels at most as far as said; the light is kept; the same seed moves them the same way."""
    first = moved(images(), 0, 0, 0.2, drawn(1))
    again = moved(images(), 0, 0, 0.2, drawn(1))
    assert torch.equal(first, again)
    places = torch.arange(20) + 0.5
    centres = torch.stack([(image[:, :, 0].sum(0) * places).sum() / image.sum() for image in first])
    assert centres.std() > 0.5
    assert (centres - 10).abs().max() <= 4 + 1e-3
    torch.testing.assert_close(first.sum((1, 2, 3)), images().float().sum((1, 2, 3)), rtol=1e-3, atol=1)


def test_turning_and_scaling_change_the_shape() -> None:
    """A quarter turn of a square is a square; zooming changes how many pixels are lit."""
    lit = images().float().sum((1, 2, 3))
    turned = moved(images(), 90, 0, 0, drawn(0)).sum((1, 2, 3))
    torch.testing.assert_close(turned, lit, rtol=0.05, atol=1)
    zoomed = moved(images(), 0, 0.5, 0, drawn(0)).sum((1, 2, 3))
    assert ((zoomed - lit).abs() > 0.1 * lit).any()
