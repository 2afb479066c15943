"""Moments, contents and gradients of models, and assertions that they are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from botorch.posteriors import Posterior, TransformedPosterior
from botorch.posteriors.gpytorch import GPyTorchPosterior
from torch import Tensor

from bo_stream.models.base import StreamingGP
from tests.oracles.reference import joint_covariance
from tests.support.tolerances import GRADIENT_TOLERANCE, assert_close


def gaussian(posterior: Posterior) -> GPyTorchPosterior:
    """The normal posterior before outcomes were untransformed."""
    while isinstance(posterior, TransformedPosterior):
        posterior = posterior._posterior
    assert isinstance(posterior, GPyTorchPosterior)
    return posterior


def centre(posterior: Posterior) -> Tensor:
    """The outcomes at the normal posterior's mean: the posterior's median."""
    if isinstance(posterior, TransformedPosterior):
        return posterior._sample_transform(centre(posterior._posterior))
    return posterior.mean


def moments(model: StreamingGP, X: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the normal posterior, detached."""
    posterior = gaussian(model.posterior(X))
    return posterior.mean.detach(), joint_covariance(posterior).detach()


def assert_same_posterior(
    a: StreamingGP, b: StreamingGP, X: Tensor, bits: bool = False, factor: float = 1.0
) -> None:
    """Equal mean and covariance at X, to the tolerance or to the bit.

    CUDA adds rows to a memory in any order, so that there no two updates are equal to the bit.
    """
    for actual, expected in zip(moments(a, X), moments(b, X), strict=True):
        if bits and not actual.is_cuda:
            assert torch.equal(actual, expected)
        else:
            assert_close(actual, expected, factor)


def assert_same_model(a: StreamingGP, b: StreamingGP, X: Tensor, factor: float = 1.0) -> None:
    """Equal posterior, marginal likelihood and count."""
    assert_same_posterior(a, b, X, factor=factor)
    dtype = X.dtype
    ours, theirs = (m.log_marginal_likelihood().detach().to(dtype) for m in (a, b))
    assert_close(ours, theirs, factor=10 * factor)
    assert a.num_observations == pytest.approx(b.num_observations)


def refreshed(model: StreamingGP) -> StreamingGP:
    """The model once more standardised by all its outcomes, as a refit does it."""
    model.train()
    model.eval()
    return model


def contents(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every tensor and every number that an object holds, wherever it is."""
    yield from _contents(value, path, set())


def _contents(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor | int | float | str | None):
        yield path, value
        return
    if id(value) in seen or isinstance(value, type) or (callable(value) and not vars_of(value)):
        return
    seen.add(id(value))
    for name, part in vars_of(value).items():
        yield from _contents(part, f"{path}.{name}", seen)


def vars_of(value: Any) -> dict[Any, Any]:
    """The parts of a container or an object, by name."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return getattr(value, "__dict__", {})


def fingerprint(model: StreamingGP) -> dict[str, Any]:
    """A copy of everything in a model."""
    return {
        path: value.detach().clone() if isinstance(value, Tensor) else value
        for path, value in contents(model)
    }


def assert_untouched(model: StreamingGP, before: dict[str, Any]) -> None:
    """Everything in a model is as it was, to the bit."""
    assert_same_contents(fingerprint(model), before)


def assert_same_contents(after: dict[str, Any], before: dict[str, Any]) -> None:
    """Two fingerprints are equal, to the bit."""
    assert after.keys() == before.keys()
    for path, value in before.items():
        if isinstance(value, Tensor):
            same = torch.equal(value, after[path])
        else:
            same = value == after[path] or (value != value and after[path] != after[path])
        assert same, f"{path} changed from {value} to {after[path]}"


def held_bytes(model: StreamingGP) -> int:
    """Bytes of all tensors that a model holds, each storage once."""
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for _, value in contents(model)
        if isinstance(value, Tensor)
    }
    return sum(storages.values())


def central_differences(function: Callable[[Tensor], Tensor], X: Tensor) -> Tensor:
    """The gradient of a scalar function by central differences."""
    step = 1e-5
    gradient = torch.zeros_like(X)
    for i in range(X.numel()):
        shift = torch.zeros_like(X).flatten()
        shift[i] = step
        shift = shift.view_as(X)
        with torch.no_grad():
            difference = function(X + shift) - function(X - shift)
        gradient.view(-1)[i] = difference / (2.0 * step)
    return gradient


def assert_gradient(function: Callable[[Tensor], Tensor], X: Tensor) -> None:
    """Autograd's gradient is that of central differences, relative to its largest entry."""
    X = X.detach().clone().requires_grad_()
    (actual,) = torch.autograd.grad(function(X), X)
    expected = central_differences(function, X.detach())
    size = float(expected.abs().max())
    assert size > 0.0
    tolerance = GRADIENT_TOLERANCE * size
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=tolerance)
