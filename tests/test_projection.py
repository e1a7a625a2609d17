from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etcl_deploy.learn.projection import extended, outside, principal


def check_orthonormal(rows: torch.Tensor) -> None:
    assert rows.dtype == torch.float32 and rows.is_contiguous()
    torch.testing.assert_close(rows @ rows.T, torch.eye(len(rows)), atol=1e-5, rtol=0)


def held(inputs: torch.Tensor, rows: torch.Tensor) -> float:
    """The share of the squared norm of inputs inside the space of orthonormal rows."""
    double = inputs.double()
    return float((double @ rows.double().T).square().sum() / double.square().sum())


INPUTS = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])  # shares of exactly 3/4 and 1/4


def test_as_many_directions_as_needed_to_the_letter() -> None:
    """An energy of 3/4 takes one direction, anything above it two; inputs of zeros have one direction."""
    for energy, count in ((0.5, 1), (0.75, 1), (0.7501, 2), (1.0, 2)):
        rows, shares = principal(INPUTS, energy)
        assert rows.abs().tolist() == [[0, 1], [1, 0]][:count] and shares.tolist() == [0.75, 0.25][:count]
    for nothing in (torch.zeros(2, 3), torch.zeros(3, 2)):
        rows, shares = principal(nothing, 0.9)
        assert rows.tolist() == torch.eye(nothing.shape[1])[:1].tolist() and shares.tolist() == [1]


def test_a_space_that_holds_enough_stays() -> None:
    """Exactly the energy is enough; inputs of zeros add nothing; and the whole space cannot grow."""
    space = torch.tensor([[0.0, 1.0]])
    assert extended(space, INPUTS, 0.75) is space
    assert len(extended(space, INPUTS, 0.76)) == 2
    assert extended(space, torch.zeros(3, 2), 0.99) is space
    generator = torch.Generator().manual_seed(0)
    for size in (7, 300):
        whole = principal(torch.randn(2 * size, size, generator=generator), 1.0)[0]
        assert extended(whole, torch.randn(9, size, generator=generator), 1.0) is whole


@pytest.mark.parametrize(("items", "size"), [(9, 30), (30, 9), (9, 9)])
def test_directions_that_are_rounding_are_left_out(items: int, size: int) -> None:
    """All the energy of inputs of rank 3 is in three directions."""
    generator = torch.Generator().manual_seed(1)
    exact = torch.randint(-3, 4, (items, 3), generator=generator), torch.randint(-3, 4, (3, size), generator=generator)
    rows, shares = principal(torch.mm(*exact).float(), 1.0)
    check_orthonormal(rows)
    assert len(rows) == len(shares) == 3 and float(shares.sum()) == pytest.approx(1)


@pytest.mark.parametrize("shape", [(3, 200_000), (200_000, 3)])
def test_many_items_or_many_dimensions_fit_into_memory(shape: tuple[int, int]) -> None:
    """The smaller of the two products of the inputs with themselves is made; the larger one would take 300 GB."""
    rows, _ = principal(torch.randn(shape, generator=torch.Generator().manual_seed(0)), 0.9)
    assert rows.shape == (3, shape[1])


@pytest.mark.parametrize("items", [3, 6000])
def test_directions_of_little_energy_are_as_exact_as_large_ones(items: int) -> None:
    """A share of 1e-8 is beyond what products in single precision can tell; there are more items than go at once."""
    generator = torch.Generator().manual_seed(2)
    left = torch.linalg.qr(torch.randn(items, 2, generator=generator, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(5, 2, generator=generator, dtype=torch.float64))[0]
    rows, shares = principal((left * torch.tensor([1, 1e-4]) @ right.T).float(), 1 - 1e-10)
    assert len(rows) >= 2 and float(shares[1]) == pytest.approx(1e-8, rel=1e-2)
    assert abs(float(rows[1].double() @ right[:, 1])) == pytest.approx(1, abs=1e-3)


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), items=st.integers(1, 40), size=st.integers(1, 30), energy=st.floats(0.1, 1))
def test_an_update_outside_a_space_does_nothing_inside_it(seed: int, items: int, size: int, energy: float) -> None:
    """A head moved by it answers as before on every vector of the space, within 1e-5 of the update's size.

    Only the part inside the space is taken away.
    """
    generator = torch.Generator().manual_seed(seed)
    space, shares = principal(torch.randn(items, size, generator=generator), energy)
    update = torch.randn(5, size, generator=generator)
    inside = torch.randn(7, len(space), generator=generator) @ space
    kept = outside(update, space)
    torch.testing.assert_close(kept + (update @ space.T) @ space, update, atol=1e-4, rtol=0)
    moved = kept @ inside.T
    assert moved.abs().max() <= 1e-5 * max(1.0, float(update.norm() * inside.norm()))
    assert 0 < float(shares.sum()) <= 1 + 1e-5


@settings(deadline=None)
@given(
    seed=st.integers(0, 10_000),
    items=st.integers(1, 40),
    size=st.integers(1, 30),
    rank=st.integers(1, 5),
    energy=st.floats(0.1, 0.999),
)
def test_principal_directions_hold_the_energy_and_no_fewer_do(
    seed: int, items: int, size: int, rank: int, energy: float
) -> None:
    """Orthonormal, the largest share first, each share what its direction holds; wide, tall, of any rank."""
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(items, rank, generator=generator), torch.randn(rank, size, generator=generator)
    inputs = torch.mm(*factors)
    rows, shares = principal(inputs, energy)
    check_orthonormal(rows)
    assert shares.dtype == torch.float32 and shares.tolist() == sorted(shares.tolist(), reverse=True)
    assert [held(inputs, row[None]) for row in rows] == pytest.approx(shares.tolist(), abs=1e-5)
    assert held(inputs, rows) >= energy - 1e-6
    assert held(inputs, rows[:-1]) <= energy + 1e-6
    singular = torch.linalg.svdvals(inputs.double()).square()
    assert shares.tolist() == pytest.approx((singular / singular.sum())[: len(rows)].tolist(), abs=1e-5)


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), size=st.integers(2, 20), energy=st.floats(0.3, 0.99))
def test_an_extended_space_holds_what_is_new_and_all_that_it_held(seed: int, size: int, energy: float) -> None:
    """Orthonormal; the old space is in it, and with one direction fewer it would not hold the energy."""
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randn(2, 15, size, generator=generator)
    space = extended(None, first, energy)
    assert torch.equal(space, principal(first, energy)[0])
    larger = extended(space, second, energy)
    check_orthonormal(larger)
    assert held(second, larger) >= energy - 1e-5
    assert float(outside(space, larger).abs().max()) <= 1e-5
    if len(larger) > len(space):
        assert held(second, space) < energy + 1e-5
        more = principal(outside(second, space), 1.0)[0][: len(larger) - len(space) - 1]
        assert held(second, torch.cat([space, more])) <= energy + 1e-5
    else:
        assert larger is space
