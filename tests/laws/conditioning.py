"""Laws of fantasies and of conditioning: models of hypothetical observations."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.models import SingleTaskGP

from tests.laws.registry import (
    DIM,
    Stream,
    condition_on,
    law,
    of_gaussian_noise,
    of_outcomes,
    without_residual,
)
from tests.support.comparisons import (
    assert_same_posterior,
    assert_untouched,
    centre,
    fingerprint,
    gaussian,
    moments,
    refreshed,
)
from tests.support.tolerances import assert_close


@law
@without_residual
@of_gaussian_noise
def conditioning_is_updating_a_copy(stream: Stream) -> None:
    data, more = stream.data(10), stream.data(3)
    model = stream.model(data)
    scale = model.outcome_scale().unsqueeze(-2).to(more.Y)
    noise = None
    if stream.case.noise in ("known", "mixed"):
        level = model.noise_at(model.transform_inputs(more.X).double()).mT.to(more.Y)
        assert more.Yvar is not None
        noise = torch.where(more.Yvar.isnan(), level, more.Yvar / scale.square())
    conditioned = condition_on(model, more, noise)
    updated = copy.deepcopy(model).update(*more.astuple())
    assert_same_posterior(conditioned, updated, stream.points)


@law
@of_outcomes
@of_gaussian_noise
def conditioning_leaves_the_model_as_it_is(stream: Stream) -> None:
    model, more = stream.model(stream.data(10)), stream.data(3)
    model.posterior(stream.points, observation_noise=True)
    before = fingerprint(model)
    conditioned = model.condition_on_observations(more.X, more.Y)
    conditioned.posterior(stream.points)
    fantasy = model.fantasize(more.X, stream.sampler())
    fantasy.posterior(stream.points).rsample(torch.Size([2]))
    fantasy.condition_on_observations(more.X, more.Y).posterior(stream.points)
    for X, Y in ((more.X[..., :1], more.Y), (more.X, more.Y[..., :2, :]), (more.X, more.Y / 0.0)):
        with pytest.raises((BotorchTensorDimensionError, InputDataError)):
            model.condition_on_observations(X, Y)
    with pytest.raises((RuntimeError, InputDataError)):
        model.fantasize(more.X, lambda posterior: posterior.mean * math.nan)
    assert_untouched(model, before)


@law
def what_is_hypothetical_stays_when_the_model_moves_on(stream: Stream) -> None:
    model, more = stream.model(stream.data(10)), stream.data(3)
    conditioned = condition_on(model, more)
    before = moments(conditioned, stream.points)
    shifted = stream.data(4)
    other = 1.0 - shifted.Y if stream.binary else 2.0 + 3.0 * shifted.Y
    if stream.case.noise == "counts":
        other = 3.0 * shifted.Y
    model.update(shifted.X, other, shifted.Yvar)
    refreshed(model).posterior(stream.points)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    for actual, expected in zip(moments(conditioned, stream.points), before, strict=True):
        assert torch.equal(actual, expected)


@law
@of_gaussian_noise
def conditioning_twice_is_conditioning_once(stream: Stream) -> None:
    model, more = stream.model(stream.data(10)), stream.data(4)
    twice = condition_on(condition_on(model, more[:1]), more[1:])
    assert_same_posterior(twice, condition_on(model, more), stream.points)


@law
@of_gaussian_noise
def conditioning_the_own_mean_leaves_the_mean(stream: Stream) -> None:
    model, X = stream.model(stream.data(10)), stream.data(3).X
    conditioned = model.condition_on_observations(X, centre(model.posterior(X)))
    assert_close(moments(conditioned, stream.points)[0], moments(model, stream.points)[0])


@law
def variance_never_grows(stream: Stream) -> None:
    model, more = stream.model(stream.data(10)), stream.data(3)
    before = gaussian(model.posterior(stream.points)).variance
    conditioned = condition_on(model, more)
    fantasy = conditioned.fantasize(more.X, stream.sampler())
    updated = copy.deepcopy(model).update(*more.astuple())
    slack = 1e-12 if stream.exact else 1e-5
    grows = stream.case.blended or stream.case.renews_sites
    for after in (conditioned, fantasy) if grows else (conditioned, updated, fantasy):
        variance = gaussian(after.posterior(stream.points)).variance
        assert bool((variance <= before * (1.0 + slack)).all())
        assert bool((variance < 0.999 * before).any())


@law
@of_outcomes
@of_gaussian_noise
def fantasies_are_each_alone(stream: Stream) -> None:
    """Fantasies of a batch of inputs are those of each input, conditioned on the same draws."""
    model, batch = stream.model(stream.data(10)), 2
    X = torch.rand(batch, *stream.setting.batch_shape, 3, DIM).to(stream.points)
    draws = stream.sampler()(model.posterior(X, observation_noise=True))
    assert draws.shape == (3, *X.shape[:-1], stream.setting.outputs)
    fantasy = model.fantasize(X, stream.sampler())
    T = stream.points
    mean, covariance = moments(fantasy, T)
    covariance = covariance.expand(3, *covariance.shape[1:])
    for i, j in ((0, 0), (2, 1)):
        alone = model.condition_on_observations(X[j], draws[i, j])
        expected_mean, expected_covariance = moments(alone, T)
        assert_close(mean[i, j], expected_mean)
        assert_close(covariance[i, j], expected_covariance)


@law
def fantasies_have_the_batch_shape_of_their_posteriors(stream: Stream) -> None:
    """That of BoTorch's ``SingleTaskGP``, after whatever verbs; the data's batch shape stays."""
    model, exact, s = stream.model(stream.data(8)), _single_task_gp(stream), stream.setting
    X = torch.rand(*(s.batch_shape or (5,)), 2, DIM).to(stream.points)
    wide = X.expand(4, *X.shape)
    fantasy, theirs = (
        m.fantasize(X.to(m.train_targets), stream.sampler(4)) for m in (model, exact)
    )
    pairs = [
        (fantasy, theirs),
        (
            fantasy.fantasize(wide, stream.sampler(3)),
            theirs.fantasize(wide.double(), stream.sampler(3)),
        ),
    ]
    for own, other in pairs:
        assert own.batch_shape == other.batch_shape
        assert gaussian(own.posterior(stream.points[..., :1, :])).mean.shape[:-2] == own.batch_shape
    conditioned = condition_on(model, stream.data(3))
    assert conditioned.batch_shape == model.batch_shape == torch.Size(s.batch_shape)
    assert condition_on(conditioned, stream.data(2)).batch_shape == model.batch_shape
    assert fantasy.subset_output([0]).batch_shape == fantasy.batch_shape
    assert fantasy.with_known_points(X).batch_shape == fantasy.batch_shape
    assert model.with_known_points(X).batch_shape == model.batch_shape


def _single_task_gp(stream: Stream) -> SingleTaskGP:
    """An exact model of as many observations of the stream's shapes, in float64."""
    X = stream.data(8).X.double()
    model = SingleTaskGP(X, torch.randn(*X.shape[:-1], stream.setting.outputs).to(X))
    model.posterior(X)  # which fills the caches that conditioning needs
    return model


@law
def what_is_hypothetical_cannot_be_put_into_memory(stream: Stream) -> None:
    model, more = stream.model(stream.data(10)), stream.data(3)
    conditioned = condition_on(model, more)
    conditioned.posterior(stream.points)
    before = fingerprint(conditioned)
    verbs: list[Callable[[], Any]] = [
        lambda: conditioned.update(*more.astuple()),
        lambda: conditioned.retract(*more.astuple()),
        lambda: conditioned.merge(model),
        lambda: model.merge(conditioned),
        lambda: conditioned.forget(0.5),
    ]
    for verb in verbs:
        with pytest.raises(UnsupportedError, match="hypothetical"):
            verb()
    assert_untouched(conditioned, before)
