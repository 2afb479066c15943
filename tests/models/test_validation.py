"""Checks at the door that the contract's bad inputs do not reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError

from bo_stream.models.checks import check_hypothetical, check_observations

X = torch.rand(5, 2)
Y = torch.rand(5, 3)


def test_sound_observations_pass() -> None:
    Yvar = torch.rand(5, 3)
    Yvar[2] = torch.nan
    Yvar[3] = 0.0
    check_observations(X, Y, Yvar, dim=2, outputs=3, batch_shape=torch.Size(), like=X)
    empty = (X[:0], Y[:0], Yvar[:0])
    check_observations(*empty, dim=2, outputs=3, batch_shape=torch.Size(), like=X)


@pytest.mark.parametrize("noise", [None, torch.rand(5, 3), torch.rand(4, 5, 3), torch.rand(1, 3)])
def test_sound_hypothetical_data_pass(noise: torch.Tensor | None) -> None:
    check_hypothetical(X, Y, noise, 3)
    check_hypothetical(X.expand(4, 5, 2), Y, noise, 3)
    check_hypothetical(X.expand(1, 4, 5, 2), Y.expand(6, 4, 5, 3), noise, 3)


@pytest.mark.parametrize(
    ("conditioned", "noise", "error", "name"),
    [
        (Y[:1], None, BotorchTensorDimensionError, "Y"),
        (Y.expand(3, 5, 3), None, BotorchTensorDimensionError, "Y"),
        (Y, torch.rand(3, 5, 3), BotorchTensorDimensionError, "noise"),
        (Y, torch.rand(5, 1), BotorchTensorDimensionError, "noise"),
        (Y, torch.rand(3), BotorchTensorDimensionError, "noise"),
        (Y, torch.full((5, 3), torch.nan), InputDataError, "noise"),
    ],
)
def test_unsound_hypothetical_data_are_named(
    conditioned: Any, noise: Any, error: type[Exception], name: str
) -> None:
    with pytest.raises(error, match=rf"Expected {name} "):
        check_hypothetical(X.expand(4, 5, 2), conditioned, noise, 3)


def test_the_message_says_how_many_values_are_bad() -> None:
    bad = Y.clone()
    bad[1, 0] = torch.nan
    bad[4, 2] = torch.inf
    with pytest.raises(InputDataError, match="in 2 of 15 values"):
        check_observations(X, bad, None, dim=2, outputs=3, batch_shape=torch.Size(), like=X)


def test_the_message_says_what_came() -> None:
    with pytest.raises(BotorchTensorDimensionError, match=r"`2 x n x 2` .* got \(5, 2\)"):
        check_observations(X, Y, None, dim=2, outputs=3, batch_shape=torch.Size([2]), like=X)
    with pytest.raises(InputDataError, match=r"X as torch.float64 .* X\.to\(dtype=torch\.float64"):
        check_observations(X, Y, None, dim=2, outputs=3, batch_shape=torch.Size(), like=X.double())
