"""Verbs under ``torch.inference_mode``: what they leave can be differentiated afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bo_stream import (
    OSGPR,
    QSGP,
    WISKI,
    AutoGP,
    DecoupledGP,
    FourierFeatures,
    HeteroscedasticWISKI,
    LocalGP,
)
from bo_stream.testing.streams import assert_close

UNIT = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


def data(n: int = 40) -> tuple[Tensor, Tensor]:
    X = torch.rand(n, 2, dtype=torch.float64)
    return X, (5.0 * X[:, :1]).sin()


def auto() -> AutoGP:
    return AutoGP(*data(), bounds=UNIT)


def on_grid() -> WISKI:
    return WISKI(*data(), bounds=UNIT, grid_size=8)


def decoupled() -> DecoupledGP:
    return DecoupledGP(*data(), num_mean=10, num_covar=5, initial_points=20)


def observed_and_withdrawn(model: HeteroscedasticWISKI) -> None:
    model.withdraw(model.observe(*data(3)))


VERBS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    *(
        (make, verb)
        for make in (auto, on_grid, lambda: OSGPR(*data()), lambda: LocalGP(*data()))
        for verb in (
            lambda model: model.get_fantasy_model(data(2)[0], torch.zeros(2).double()),
            lambda model: model.subset_output([0]),
        )
    ),
    (on_grid, WISKI.log_marginal_likelihood),
    (lambda: OSGPR(*data()), OSGPR.log_marginal_likelihood),
    (auto, lambda model: model.move_to("OSGPR")),
    (auto, lambda model: model.move_to("WISKI").truncate(0.01)),
    (on_grid, lambda model: model.truncate(0.01)),
    (lambda: OSGPR(*data()), lambda model: model.place_points(data(8)[0])),
    (lambda: OSGPR(*data()), lambda model: model.optimize_points(2)),
    (decoupled, lambda model: model.fit(steps=2, progress=False)),
    (decoupled, lambda model: model.optimize_posterior(progress=False)),
    (
        lambda: QSGP(*data(), basis=FourierFeatures(20), initial_points=20, update_steps=0),
        lambda model: model.fit(steps=2, progress=False),
    ),
    (
        lambda: HeteroscedasticWISKI(*data(), bounds=UNIT, grid_size=8, noise_grid_size=8),
        observed_and_withdrawn,
    ),
]


@pytest.mark.parametrize(("make", "verb"), VERBS)
def test_what_a_verb_leaves_can_be_differentiated(
    make: Callable[[], Any], verb: Callable[[Any], Any]
) -> None:
    model = make().eval()
    with torch.inference_mode():
        result = verb(model)
    for left in (model, result if isinstance(result, type(model)) else model):
        X = torch.rand(3, 2, dtype=torch.float64).requires_grad_()
        posterior = left.posterior(X)
        (posterior.mean.sum() + posterior.variance.sum()).backward()
        assert X.grad is not None
        assert bool(X.grad.isfinite().all())


@pytest.mark.parametrize("make", [on_grid, lambda: OSGPR(*data()), auto])
def test_hyperparameters_can_be_learned_afterwards(make: Callable[[], Any]) -> None:
    model = make()
    with torch.inference_mode():
        value = model.log_marginal_likelihood()
    again = model.log_marginal_likelihood()
    assert_close(value, again)
    again.sum().backward()
    assert all(parameter.grad is not None for parameter in model.covar_module.parameters())
