"""Laws of posteriors: shapes, gradients, noise and outputs; and of the objective of a fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.exceptions.errors import (
    UnsupportedError,
)
from botorch.posteriors import TransformedPosterior
from torch import Tensor

from bo_stream.models.base import StreamingGP
from bo_stream.models.quadruply_stochastic.qsgp import QSGP
from bo_stream.models.wiski.grid_model import GridModel
from tests.laws.registry import (
    DIM,
    Stream,
    condition_on,
    law,
    of_exact_objectives,
    of_gaussian_noise,
    of_outcomes,
)
from tests.oracles.reference import joint_covariance
from tests.support.comparisons import (
    assert_gradient,
    assert_same_posterior,
    assert_untouched,
    central_differences,
    centre,
    fingerprint,
    gaussian,
    moments,
    refreshed,
)
from tests.support.smooth_points import smooth_points
from tests.support.tolerances import assert_close


@law
def points_that_are_evaluated_once_change_nothing(stream: Stream) -> None:
    model, points = stream.model(stream.data(10)), stream.points
    baseline, pending = points[..., :-2, :], points[..., -2:, :]
    X = torch.rand(3, *stream.setting.batch_shape, 2, DIM).to(points)
    first, last = (part.expand(3, *part.shape) for part in (baseline, pending))

    def after_baseline(others: Tensor) -> Tensor:
        return torch.cat((first, others), -2)

    def before_pending(others: Tensor) -> Tensor:
        return torch.cat((others, last), -2)

    def between(others: Tensor) -> Tensor:
        return before_pending(after_baseline(others))

    known = model.with_known_points(baseline, pending)
    for extend in (after_baseline, before_pending, between):
        assert_same_posterior(known, model, extend(X))
        gradients = [summary_gradient(m, X, extend) for m in (known, model)]
        assert_close(*gradients, factor=float(gradients[1].abs().max()))
    for others in (X, baseline, points, between(X)[..., 1:-1, :]):
        assert_same_posterior(known, model, others)
    for part in (model.with_known_points(baseline), model.with_known_points(last=pending)):
        assert_same_posterior(part, model, between(X))
    more = stream.data(2)
    assert_same_posterior(condition_on(known, more), condition_on(model, more), between(X))
    with pytest.raises(UnsupportedError):
        known.update(*more.astuple())


def summary_gradient(model: StreamingGP, X: Tensor, extend: Callable[[Tensor], Tensor]) -> Tensor:
    """Of the entries of a posterior's moments, added up with unequal weights."""
    X = X.clone().requires_grad_()
    posterior = gaussian(model.posterior(extend(X)))
    mean, covariance = posterior.mean, joint_covariance(posterior)
    weights = [torch.linspace(0.3, 1.0, part.numel()).to(part) for part in (mean, covariance)]
    value = mean.flatten() @ weights[0] + covariance.flatten() @ weights[1]
    (gradient,) = torch.autograd.grad(value, X)
    return gradient


@law
def posterior_follows_the_inputs(stream: Stream) -> None:
    """Shape, dtype and device; each input batch is alone; joint and marginal agree; draws too."""
    s = stream.setting
    model = stream.model(stream.data(10))
    X = torch.rand(3, *s.batch_shape, 4, DIM).to(stream.points)
    posterior = model.posterior(X)
    draws, normal = posterior.rsample(torch.Size([2])), gaussian(posterior)
    assert model.batch_shape == s.batch_shape
    assert model.num_outputs == s.outputs
    assert normal.mean.shape == normal.variance.shape == (3, *s.batch_shape, 4, s.outputs)
    assert draws.shape == (2, *normal.mean.shape)
    assert {normal.mean.dtype, normal.variance.dtype, draws.dtype} == {s.dtype}
    assert {t.device.type for t in (normal.mean, normal.variance, draws)} == {s.device}
    marginal = joint_covariance(normal).diagonal(dim1=-2, dim2=-1).mT
    assert_close(normal.variance, marginal)
    mean, covariance = moments(model, X[2])
    assert_close(normal.mean[2], mean)
    assert_close(joint_covariance(normal)[2], covariance)


@law
def the_prior_is_that_of_the_kernel(stream: Stream) -> None:
    """Without observations the covariance is ``covar_module``'s, on a grid but for interpolation.

    Of Fourier features, whose frequencies are drawn, as near as so few draws can be.
    """
    model, X = stream.model(stream.data(0)), stream.points
    inputs = model.transform_inputs(X).double().detach()
    own = model.process(inputs).covariance(inputs).detach()
    kernel = copy.deepcopy(model.covar_module).double().requires_grad_(False)
    wide = inputs if model.num_outputs == 1 else inputs.unsqueeze(-3)
    dense = kernel(wide).to_dense()
    expected = (dense.unsqueeze(-3) if model.num_outputs == 1 else dense).expand_as(own)
    factor = float(expected.abs().max())
    if isinstance(model, GridModel):
        most = 1.1 * model.interpolation_error()  # which is found by probes
    elif isinstance(model, QSGP) and stream.case.name != "QSGP, inducing points":
        most = 0.5  # 20 frequencies: a deviation of 0.16, or less
    else:
        in_single = stream.setting.dtype == torch.float32 or "single" in stream.case.name
        most = 1e-6 if in_single else 1e-12
    assert float((own - expected).abs().max()) <= factor * most


@law
def posterior_of_one_set_serves_every_batch_element(stream: Stream) -> None:
    model, X = stream.model(stream.data(10)), torch.rand(4, DIM).to(stream.points)
    mean, covariance = moments(model, X)
    expected = moments(model, X.expand(*stream.setting.batch_shape, 4, DIM))
    assert_close(mean, expected[0])
    assert_close(covariance, expected[1])


@law
@of_outcomes
def gradients_are_those_of_differences(stream: Stream) -> None:
    if not stream.exact:
        return
    model, T = stream.model(stream.data(10)), stream.points[..., :2, :]

    def posterior_sum(which: str, X: Tensor) -> Tensor:
        value: Tensor = getattr(gaussian(model.posterior(X)), which)
        return value.sin().sum()

    def fantasy_sum(which: str, X: Tensor) -> Tensor:
        fantasy = model.fantasize(X, stream.sampler(2))
        fantasy = fantasy.fantasize(X + 0.1, stream.sampler(2))
        value: Tensor = getattr(gaussian(fantasy.posterior(T)), which)
        return value.sin().sum()

    shape = (*stream.setting.batch_shape, 2)
    X = smooth_points(model, *shape, low=0.1, high=0.8, shifts=(0.0, 0.1))
    for which in ("mean", "variance"):
        assert_gradient(lambda X, which=which: posterior_sum(which, X), X)
        assert_gradient(lambda X, which=which: fantasy_sum(which, X), X)


@law
@of_exact_objectives
def the_objective_has_the_gradient_of_differences(stream: Stream) -> None:
    """Along one direction of all hyperparameters that a fit learns."""
    if not stream.exact:
        return
    model = stream.model(stream.data(10))
    learned = [(p, p.detach().clone()) for p in model.parameters() if p.requires_grad]
    directions = [0.2 * torch.randn_like(start) for _, start in learned]
    value = model.log_marginal_likelihood().sum()
    slopes = torch.autograd.grad(value, [p for p, _ in learned], materialize_grads=True)
    slope = sum((g * d).sum() for g, d in zip(slopes, directions, strict=True))

    def at(step: Tensor) -> Tensor:
        with torch.no_grad():
            for (parameter, start), direction in zip(learned, directions, strict=True):
                parameter.copy_(start + float(step) * direction)
        return model.log_marginal_likelihood().sum()

    (difference,) = central_differences(at, torch.zeros(1).double())
    assert slope.item() == pytest.approx(float(difference), rel=1e-5, abs=1e-5)


@law
@of_outcomes
@of_gaussian_noise
def outcomes_are_predicted_with_their_noise(stream: Stream) -> None:
    model, X = stream.model(stream.data(10)), stream.points
    noisy = model.posterior(X, observation_noise=True)
    Y = noisy.rsample(torch.Size([3])).detach()
    if isinstance(noisy, TransformedPosterior):
        with pytest.raises(UnsupportedError, match="outcome_transform"):
            model.log_predictive(X, Y)
        return
    predicted, expected = model.predictive(X), gaussian(noisy)
    assert_close(predicted.mean, expected.mean)
    assert_close(predicted.variance, expected.variance)
    normal = torch.distributions.Normal(expected.mean, expected.variance.sqrt())
    assert_close(model.log_predictive(X, Y), normal.log_prob(Y))


@law
@of_gaussian_noise
def observation_noise_is_added_to_the_variance(stream: Stream) -> None:
    model, X = stream.model(stream.data(10)), stream.points
    plain = gaussian(model.posterior(X)).variance
    scale = model.outcome_scale().unsqueeze(-2).square().to(plain)
    own = scale * model.noise_at(model.transform_inputs(X).double()).mT.to(plain)
    noisy = gaussian(model.posterior(X, observation_noise=True)).variance
    assert_close(noisy, plain + own)
    given = 0.1 + torch.rand_like(plain)
    noisy = gaussian(model.posterior(X, observation_noise=given)).variance
    assert_close(noisy, plain + scale * given)
    last = [stream.setting.outputs - 1]
    noisy = gaussian(model.posterior(X, last, observation_noise=given)).variance
    assert_close(noisy, (plain + scale * given)[..., last])
    conditioned = model.condition_on_observations(X, centre(model.posterior(X)))
    plain = gaussian(conditioned.posterior(X)).variance
    noisy = gaussian(conditioned.posterior(X, observation_noise=True)).variance
    assert_close(noisy, plain + own)


@law
@of_outcomes
@of_gaussian_noise
def fantasies_take_the_noise_they_are_given(stream: Stream) -> None:
    """Draws have it, and conditioning on them too; per point or for all, per output, in a batch."""
    model, s, T = stream.model(stream.data(10)), stream.setting, stream.points
    X = torch.rand(2, *s.batch_shape, 3, DIM).to(T)
    for rows in (3, 1):
        noise = 0.05 + torch.rand(*s.batch_shape, rows, s.outputs).to(T)
        draws = stream.sampler()(model.posterior(X, observation_noise=noise))
        fantasy = model.fantasize(X, stream.sampler(), observation_noise=noise)
        mean, covariance = moments(fantasy, T)
        alone = model.condition_on_observations(X[1], draws[2, 1], noise=noise)
        expected_mean, expected_covariance = moments(alone, T)
        assert_close(mean[2, 1], expected_mean)
        assert_close(covariance.expand(3, *covariance.shape[1:])[2, 1], expected_covariance)


@law
def a_posterior_transform_sees_the_outcomes(stream: Stream) -> None:
    model, X = stream.model(stream.data(10)), stream.points
    posterior = model.posterior(X)
    if isinstance(posterior, TransformedPosterior):
        return
    weights = torch.linspace(-1.0, 2.0, stream.setting.outputs).to(X)
    scalarized = model.posterior(X, posterior_transform=ScalarizedPosteriorTransform(weights))
    assert_close(scalarized.mean.squeeze(-1), posterior.mean @ weights)
    assert_close(scalarized.variance.squeeze(-1), posterior.variance @ weights.square())


@law
@of_outcomes
def some_outputs_are_as_among_all(stream: Stream) -> None:
    model, more = stream.model(stream.data(10)), stream.data(3)
    conditioned = model.condition_on_observations(more.X, more.Y)
    fantasy = model.fantasize(more.X, stream.sampler())
    for kept in ([0], [stream.setting.outputs - 1], list(reversed(range(stream.setting.outputs)))):
        for whole in (model, conditioned, fantasy):
            full, part = whole.posterior(stream.points), whole.subset_output(kept)
            assert part.num_outputs == len(kept)
            asked = whole.posterior(stream.points, output_indices=kept)
            for found in (asked, part.posterior(stream.points)):
                assert_close(centre(found), centre(full)[..., kept])
                assert_close(gaussian(found).variance, gaussian(full).variance[..., kept])
    lost = more if stream.setting.outputs == 1 else replace(more, Y=more.Y[..., 1:])
    lost = lost if lost.Yvar is None else replace(lost, Yvar=lost.Yvar[..., -1:])
    before = fingerprint(model)
    part = model.subset_output([stream.setting.outputs - 1])
    part.update(*lost.astuple())
    assert_untouched(model, before)
    whole = copy.deepcopy(model).update(*more.astuple())
    assert_same_posterior(
        refreshed(part),
        refreshed(whole).subset_output([stream.setting.outputs - 1]),
        stream.points,
    )
