"""Outcomes taken out of O-SVGP with a Gaussian likelihood, in any unit: the model of the others."""

from __future__ import annotations

import copy

import pytest
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from gpytorch.likelihoods import GaussianLikelihood, StudentTLikelihood
from torch import Tensor

from bo_stream import OSVGP, AutoGP
from bo_stream.diagnostics import leave_one_out, without
from bo_stream.testing.streams import assert_same_posterior, assert_untouched, fingerprint

N = 40


def data() -> tuple[Tensor, Tensor]:
    X = torch.rand(N, 2, dtype=torch.float64)
    return X, (5.0 * X).sin().sum(-1, keepdim=True)


def noisy(noise: float) -> GaussianLikelihood:
    likelihood = GaussianLikelihood().double()
    likelihood.noise = noise
    return likelihood


def assert_leaves_the_others(X: Tensor, Y: Tensor, out: slice) -> None:
    kept = torch.ones(N, dtype=torch.bool)
    kept[out] = False
    model, others = (OSVGP(X[rows], Y[rows], inducing_points=X) for rows in (slice(None), kept))
    assert_same_posterior(model.retract(X[out], Y[out]), others, X)


@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0, 30.0])
def test_outcomes_of_any_scale_can_be_retracted(scale: float) -> None:
    X, Y = data()
    assert_leaves_the_others(X, scale * Y, slice(3))


def test_an_outlier_that_dwarfs_all_others_can_be_retracted() -> None:
    X, Y = data()
    Y[7] = 100.0
    assert_leaves_the_others(X, (Y - Y.mean()) / Y.std(), slice(7, 8))


def test_one_small_output_among_two_can_be_retracted() -> None:
    X, Y = data()
    assert_leaves_the_others(X, torch.cat((Y, 0.05 * Y.flip(0)), -1), slice(5))


@pytest.mark.parametrize("noise", [0.01, 3.0])
def test_outcomes_that_were_never_put_in_are_refused(noise: float) -> None:
    """Larger than all that were; a large noise hides them no more than a small one."""
    X, Y = data()
    model = OSVGP(X, Y, noisy(noise), inducing_points=X)
    before = fingerprint(model)
    with pytest.raises(InputDataError, match="never put in"):
        model.retract(X[:3], torch.full_like(Y[:3], 7.0))
    assert_untouched(model, before)


def test_an_automatic_model_that_became_osvgp_is_named_as_what_it_is() -> None:
    """Outcomes are left out in closed form by other families; here they are retracted."""
    X, Y = data()
    model = AutoGP(X, Y, likelihood=StudentTLikelihood())
    for leave in (leave_one_out, without):
        with pytest.raises(UnsupportedError, match=r"an AutoGP in the family OSVGP.*from a copy"):
            leave(model, X[:3], Y[:3])
    assert copy.deepcopy(model).retract(X[:3], Y[:3]).num_observations == N - 3
