"""The cap on inducing points: who enters, who goes, and in what order."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel
from torch import Tensor

from bo_stream.allocation.allocator import BETTER, SWAPS, capped, correlation
from tests.oracles.allocation import exchanged


def batch_of_two() -> Kernel:
    kernel = RBFKernel(batch_shape=torch.Size([2])).double()
    kernel.lengthscale = torch.tensor([[[0.15]], [[0.3]]])
    return kernel


def matern() -> Kernel:
    kernel = MaternKernel(nu=1.5).double()
    kernel.lengthscale = 0.3
    return kernel


KERNELS = {"matern": matern, "two kernels": batch_of_two}


def crowded(n: int = 30, more: int = 40) -> tuple[Tensor, Tensor]:
    """Points in a corner of the square, and others all over it."""
    return 0.4 * torch.rand(n, 2).double(), torch.rand(more, 2).double()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("more", [3, 40])
def test_exchanges_are_those_of_dense_formulas(name: str, more: int) -> None:
    kernel, (Z, new) = KERNELS[name](), crowded(more=more)
    pool = torch.cat((Z, new))
    found = capped(Z, pool, kernel, len(Z))
    expected = exchanged(
        correlation(kernel, pool, pool),
        list(range(len(Z))),
        list(range(len(Z), len(pool))),
        BETTER,
        SWAPS,
    )
    assert torch.equal(found, pool[expected])
    assert not torch.equal(found, Z)


def test_under_the_cap_everything_enters() -> None:
    Z, new = crowded()
    wanted = torch.cat((Z[5:], new))
    assert torch.equal(capped(Z, wanted, matern(), len(wanted)), wanted)


def test_there_is_room_first_for_the_old_then_for_the_new() -> None:
    """What is wanted no more has gone; far points need no exchange."""
    kernel = RBFKernel().double()
    kernel.lengthscale = 1e-3
    Z, new = crowded(10, 10)
    found = capped(Z, torch.cat((new, Z[2:])), kernel, 12)
    assert torch.equal(found, torch.cat((Z[2:], new[:4])))


def test_a_point_that_is_no_better_does_not_enter() -> None:
    kernel = RBFKernel().double()
    kernel.lengthscale = 0.1
    Z = torch.tensor([[0.0, 0.0], [0.5, 0.5], [1.0, 1.0]]).double()
    assert torch.equal(capped(Z, torch.cat((Z, Z[:1] + 0.05)), kernel, 3), Z)


def test_nothing_given_is_changed() -> None:
    Z, new = crowded()
    pool, former = torch.cat((Z, new)), torch.cat((Z, new))
    capped(Z, pool, matern(), len(Z))
    assert torch.equal(pool, former)


def test_a_repeated_point_makes_room() -> None:
    """Two equal points are nothing without each other: the first to go."""
    Z = torch.cat((torch.eye(2).double(), torch.eye(2).double()[:1]))
    found = capped(Z, torch.cat((Z, Z[:1] + 5.0)), matern(), 3)
    assert torch.equal(found[-1], Z[0] + 5.0)
    assert len(torch.unique(found, dim=0)) == 3
