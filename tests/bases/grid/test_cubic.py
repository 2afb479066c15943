"""Interpolation inside a cell against Keys' kernel and numpy's polynomials."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bo_stream.bases.grid.mesh import (
    PAIR_DEGREES,
    gauss_legendre,
    legendre,
    pair_coefficients,
    weights,
)
from bo_stream.testing.streams import assert_close
from tests.oracles.interpolation import keys_kernel

T = torch.cat((torch.tensor([0.0, 1.0]), torch.linspace(0.013, 0.987, 9))).double()
NODES = torch.tensor([-1.0, 0.0, 1.0, 2.0], dtype=torch.float64)


def test_weights_are_the_cubic_convolution_kernel() -> None:
    assert_close(weights(T), keys_kernel(T.unsqueeze(-1) - NODES))


@pytest.mark.parametrize("degree", [0, 1, 2])
def test_weights_reproduce_quadratics(degree: int) -> None:
    assert_close(weights(T) @ NODES**degree, T**degree)


def test_legendre_polynomials_are_those_of_the_shifted_position() -> None:
    expected = np.polynomial.legendre.legvander(2.0 * T.numpy() - 1.0, PAIR_DEGREES - 1)
    assert_close(legendre(T), torch.from_numpy(expected))


def test_pair_coefficients_expand_products_of_weights() -> None:
    w = weights(T)
    expanded = torch.einsum("nl,ljk->njk", legendre(T), pair_coefficients())
    assert_close(expanded, w.unsqueeze(-1) * w.unsqueeze(-2))


@pytest.mark.parametrize("degree", range(8))
def test_four_gauss_points_integrate_degree_seven(degree: int) -> None:
    nodes, quadrature = gauss_legendre(4)
    assert_close((quadrature * nodes**degree).sum(), torch.tensor(1.0 / (degree + 1)))
