"""Moments, contents and gradients of models, and what it means that two of them are equal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.posteriors.posterior import Posterior
from botorch.posteriors.transformed import TransformedPosterior
from gpytorch.distributions import MultitaskMultivariateNormal
from torch import Tensor

from bo_stream.models.base import StreamingGP

TOLERANCE: dict[torch.dtype, float] = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Two ways to compute the same number, relative to its scale."""

GRADIENT_TOLERANCE = 1e-6
"""An analytic gradient against central differences in float64, relative to the largest entry."""

# --- expectations -------------------------------------------------------------------------------


def expect(condition: bool | Tensor, message: str) -> None:
    """Raise AssertionError with a message unless a condition holds, under ``python -O`` too."""
    if not bool(condition):
        raise AssertionError(message)


@contextmanager
def refused(*errors: type[Exception], about: str = "") -> Iterator[None]:
    """Expect that what is done inside raises one of some errors.

    Args:
        errors: Of which one must be raised; any other passes through.
        about: Regular expression that its message must hold.
    """
    names = " or ".join(each.__name__ for each in errors)
    try:
        yield
    except errors as error:
        found = re.search(about, str(error)) is not None
        expect(found, f"Expected an error whose message matches {about!r}, got: {error}")
    else:
        raise AssertionError(f"Expected {names}, got no error.")


def assert_close(actual: Tensor, expected: Tensor, factor: float = 1.0) -> None:
    """Compare values by the actual dtype's tolerance; ``expected`` may be of a higher precision.

    Entries may differ by ``factor`` tolerances, relative to the larger of 1 and the entry's size.
    """
    tolerance = factor * TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance)


def assert_count(model: StreamingGP, expected: float) -> None:
    """Compare the number of observations in memory with another, to 1e-6 of it."""
    found = model.num_observations
    message = f"Expected num_observations of {expected:g}, got {found:g}."
    expect(abs(found - expected) <= 1e-6 * max(abs(expected), 1e-6), message)


# --- posteriors ---------------------------------------------------------------------------------


def gaussian(posterior: Posterior) -> GPyTorchPosterior:
    """Return the normal posterior before outcomes were untransformed."""
    while isinstance(posterior, TransformedPosterior):
        posterior = posterior._posterior
    if not isinstance(posterior, GPyTorchPosterior):
        kind = type(posterior).__name__
        raise AssertionError(f"Expected a posterior of normal standardised outcomes, got a {kind}.")
    return posterior


def centre(posterior: Posterior) -> Tensor:
    """Return the outcomes at the normal posterior's mean: the posterior's median."""
    if isinstance(posterior, TransformedPosterior):
        return posterior._sample_transform(centre(posterior._posterior))
    return gaussian(posterior).mean


def joint_covariance(posterior: GPyTorchPosterior) -> Tensor:
    """Return a posterior's covariance as ``... x m x t x t``; outputs must be independent."""
    distribution = posterior.distribution
    covariance: Tensor = distribution.covariance_matrix
    if not isinstance(distribution, MultitaskMultivariateNormal):
        return covariance.unsqueeze(-3)
    t, m = distribution.event_shape
    if distribution._interleaved:
        blocks = covariance.unflatten(-1, (t, m)).unflatten(-3, (t, m))
    else:
        blocks = covariance.unflatten(-1, (m, t)).unflatten(-3, (m, t))
        blocks = blocks.transpose(-1, -2).transpose(-3, -4)
    own = torch.stack([blocks[..., :, a, :, a] for a in range(m)], -3)
    between = [blocks[..., :, a, :, b] for a in range(m) for b in range(m) if a != b]
    dependent = any(bool(block.any()) for block in between)
    expect(not dependent, "Expected outputs that are independent, got a covariance between two.")
    return own


def moments(model: StreamingGP, X: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of the normal posterior, detached."""
    posterior = gaussian(model.posterior(X))
    return posterior.mean.detach(), joint_covariance(posterior).detach()


def assert_same_posterior(
    a: StreamingGP, b: StreamingGP, X: Tensor, bits: bool = False, factor: float = 1.0
) -> None:
    """Compare mean and covariance at X, to the tolerance or to the bit.

    CUDA adds rows to a memory in any order, so that there no two updates are equal to the bit.
    """
    names = ("mean", "covariance")
    for name, actual, expected in zip(names, moments(a, X), moments(b, X), strict=True):
        if bits and not actual.is_cuda:
            same = torch.equal(actual, expected)
            expect(same, f"Expected an equal posterior {name}, to the bit: {actual}, {expected}.")
        else:
            assert_close(actual, expected, factor)


def assert_same_model(a: StreamingGP, b: StreamingGP, X: Tensor, factor: float = 1.0) -> None:
    """Compare posterior, marginal likelihood and count."""
    assert_same_posterior(a, b, X, factor=factor)
    dtype = X.dtype
    ours, theirs = (m.log_marginal_likelihood().detach().to(dtype) for m in (a, b))
    assert_close(ours, theirs, factor=10 * factor)
    assert_count(a, b.num_observations)


def refreshed(model: StreamingGP) -> StreamingGP:
    """Return the model once more standardised by all its outcomes, as a refit does it."""
    model.train()
    model.eval()
    return model


# --- all that a model holds ---------------------------------------------------------------------


def contents(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every tensor and every number that an object holds, wherever it is."""
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
    """Return the parts of a container or an object, by name."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return getattr(value, "__dict__", {})


def fingerprint(model: StreamingGP) -> dict[str, Any]:
    """Copy everything in a model."""
    return {
        path: value.detach().clone() if isinstance(value, Tensor) else value
        for path, value in contents(model)
    }


def assert_untouched(model: StreamingGP, before: dict[str, Any]) -> None:
    """Check that everything in a model is as it was, to the bit."""
    assert_same_contents(fingerprint(model), before)


def assert_same_contents(after: dict[str, Any], before: dict[str, Any]) -> None:
    """Check that two fingerprints are equal, to the bit."""
    changed = sorted(after.keys() ^ before.keys())
    expect(not changed, f"Expected a model that is as it was; what it holds now or then: {changed}")
    for path, value in before.items():
        if isinstance(value, Tensor):
            same = isinstance(after[path], Tensor) and torch.equal(value, after[path])
        else:
            same = value == after[path] or (value != value and after[path] != after[path])
        expect(same, f"{path} changed from {value} to {after[path]}")


def held_bytes(model: StreamingGP) -> int:
    """Count the bytes of all tensors that a model holds, each storage once."""
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for _, value in contents(model)
        if isinstance(value, Tensor)
    }
    return sum(storages.values())


# --- gradients ----------------------------------------------------------------------------------


def central_differences(function: Callable[[Tensor], Tensor], X: Tensor) -> Tensor:
    """Compute the gradient of a scalar function by central differences."""
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
    """Compare autograd's gradient with central differences, relative to its largest entry."""
    X = X.detach().clone().requires_grad_()
    (actual,) = torch.autograd.grad(function(X), X)
    expected = central_differences(function, X.detach())
    size = float(expected.abs().max())
    expect(size > 0.0, "Expected a posterior that depends on X, got a gradient of zero.")
    tolerance = GRADIENT_TOLERANCE * size
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=tolerance)


_DRAWS = 10_000


def smooth_points(
    model: StreamingGP,
    is_smooth_at: Callable[[StreamingGP, Tensor], Tensor],
    *shape: int,
    low: float = 0.03,
    high: float = 0.97,
    shifts: tuple[float, ...] = (0.0,),
) -> Tensor:
    """Draw uniform points, ``shape x d`` of float64 on the model's device, away from all kinks.

    Args:
        model: Whose posterior is differentiated.
        is_smooth_at: Says which of ``n x d`` points are away from all kinks, ``n``.
        shape: Of the points.
        low: Least value of an input.
        high: Largest value of an input.
        shifts: Added to all inputs of a point, 0 among them: each such point is away from kinks.
    """
    (X,), count = model.train_inputs, torch.Size(shape).numel()
    draws = low + (high - low) * torch.rand(max(_DRAWS, 100 * count), X.shape[-1]).double()
    draws = draws.to(X.device)
    clear = torch.stack([is_smooth_at(model, draws + shift) for shift in shifts]).all(0)
    expect(int(clear.sum()) >= count, "the model has kinks everywhere")
    return draws[clear][:count].reshape(*shape, -1)
