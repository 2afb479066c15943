"""Rows that lack one of several outcomes: the message names a model that takes the others."""

from __future__ import annotations

import math
import re

import pytest
import torch
from botorch.acquisition.multi_objective.logei import qLogNoisyExpectedHypervolumeImprovement
from botorch.exceptions.errors import InputDataError
from botorch.models import ModelListGP
from torch import Tensor

from bo_stream import OSGPR, WISKI, AutoGP
from bo_stream.models.base import StreamingGP


def _data() -> tuple[Tensor, Tensor]:
    X = torch.linspace(0.0, 1.0, 8, dtype=torch.float64).unsqueeze(-1)
    Y = torch.cat((torch.sin(5.0 * X), torch.cos(5.0 * X)), -1)
    Y[2, 0] = Y[5, 1] = Y[6, 1] = math.nan
    return X, Y


def _message(kind: type[StreamingGP], X: Tensor, Y: Tensor) -> str:
    with pytest.raises(InputDataError, match="3 rows lack some of their 2 outputs") as error:
        kind(X, Y)
    return str(error.value)


@pytest.mark.parametrize("kind", [AutoGP, WISKI, OSGPR])
def test_what_the_message_names_observes_all_that_was_measured(kind: type[StreamingGP]) -> None:
    X, Y = _data()
    recipe = re.search(r"ModelListGP\(.*?\)\)\)(?=\))?", _message(kind, X, Y))
    assert recipe is not None
    models = eval(recipe[0], {"ModelListGP": ModelListGP, "AutoGP": kind, "X": X, "Y": Y})
    assert [model.num_observations for model in models.models] == [7.0, 6.0]
    for i, model in enumerate(models.models):
        has = Y[:, i].isfinite()
        alone = kind(X[has], Y[has, i : i + 1])
        torch.testing.assert_close(models.posterior(X).mean[:, i], alone.posterior(X).mean[:, 0])
        assert model.num_outputs == 1
    models.models[1].update(X[5:7], torch.cos(5.0 * X[5:7]))
    value = qLogNoisyExpectedHypervolumeImprovement(
        models, ref_point=[-1.0, -1.0], X_baseline=X, prune_baseline=False
    )
    candidate = torch.tensor([[[0.3]]], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(value(candidate).sum(), candidate)
    assert bool(gradient.isfinite().all())


def test_a_row_without_any_outcome_is_to_be_dropped() -> None:
    X, Y = _data()
    Y[:] = 1.0
    Y[3] = math.nan
    with pytest.raises(InputDataError, match="Drop those rows first"):
        AutoGP(X, Y)


def test_an_update_that_lacks_outcomes_changes_nothing() -> None:
    X, Y = _data()
    model = AutoGP(X[:2], Y[:2])
    before = model.posterior(X).mean
    with pytest.raises(InputDataError, match="ModelListGP"):
        model.update(X[2:], Y[2:])
    assert torch.equal(model.posterior(X).mean, before)
