from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from etcl_deploy.learn.projection import outside, principal


@given(seed=st.integers(0, 10_000), items=st.integers(1, 40), size=st.integers(1, 30), energy=st.floats(0.1, 1))
def test_an_update_outside_a_space_does_nothing_inside_it(seed: int, items: int, size: int, energy: float) -> None:
    """A head moved by it answers as before on every vector of the space, within 1e-5 of the update's size."""
    generator = torch.Generator().manual_seed(seed)
    space, shares = principal(torch.randn(items, size, generator=generator), energy)
    update = torch.randn(5, size, generator=generator)
    inside = torch.randn(7, len(space), generator=generator) @ space
    moved = outside(update, space) @ inside.T
    assert moved.abs().max() <= 1e-5 * max(1.0, float(update.norm() * inside.norm()))
    assert 0 < float(shares.sum()) <= 1 + 1e-5


def test_what_is_outside_stays() -> None:
    """Only the part inside the space is removed."""
    space = torch.eye(4)[:2]
    update = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert outside(update, space).tolist() == [[0, 0, 3, 4]]
    assert torch.equal(outside(update, space[:0]), update)
