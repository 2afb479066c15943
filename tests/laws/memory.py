"""Laws of memories: what observations leave in a model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import (
    InputDataError,
    UnsupportedError,
)
from botorch.models import SingleTaskGP
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.mlls import LeaveOneOutPseudoLikelihood, PredictiveLogLikelihood
from torch import Tensor

from bo_stream.models.base import StreamingGP
from bo_stream.models.inducing.osgpr import OSGPR
from bo_stream.models.local.local import LocalGP
from tests.laws.registry import (
    Stream,
    condition_on,
    law,
    of_fixed_size,
    of_forgetting,
    of_statistics,
    orderless,
)
from tests.support.comparisons import (
    assert_same_contents,
    assert_same_model,
    assert_same_posterior,
    assert_untouched,
    fingerprint,
    held_bytes,
    moments,
    refreshed,
)
from tests.support.problems import Observations
from tests.support.tolerances import assert_close


@law
@orderless
def updating_in_pieces_is_updating_once(stream: Stream) -> None:
    first, rest = stream.data(6), stream.data(9)
    once = stream.model(first).update(*rest.astuple())
    pieces = stream.model(first)
    pieces.posterior(stream.points)
    for rows in (slice(0, 1), slice(1, 4), slice(4, 9)):
        assert pieces.update(*rest[rows].astuple()) is pieces
        moments(pieces, stream.points)
    assert_same_model(pieces, once, stream.points)


@law
@orderless
def a_stream_is_its_batch(stream: Stream) -> None:
    data = stream.data(15)
    streamed = stream.settled(data[:4])
    streamed.update(*data[4:9].astuple()).update(*data[9:].astuple())
    assert_same_model(refreshed(streamed), stream.settled(data), stream.points)
    assert streamed.num_observations == pytest.approx(15)


@law
@orderless
@of_statistics
def order_does_not_matter(stream: Stream) -> None:
    data = stream.data(12)
    backwards = stream.settled(data[8:]).update(*data[4:8].astuple()).update(*data[:4].astuple())
    forwards = stream.settled(data)
    assert_same_model(refreshed(backwards), refreshed(forwards), stream.points)


@law
@orderless
@of_statistics
def merging_shards_is_one_stream(stream: Stream) -> None:
    data = stream.data(15)
    shards = [stream.model(data[:5]), stream.model(data[5:11], seed=2), stream.model(data[11:])]
    others = [fingerprint(shard) for shard in shards[1:]]
    merged = shards[0].merge(shards[1]).merge(shards[2])
    assert_same_model(refreshed(merged), stream.model(data), stream.points)
    for shard, before in zip(shards[1:], others, strict=True):
        assert_untouched(shard, before)
    merged.update(*data.astuple())
    for shard, before in zip(shards[1:], others, strict=True):
        assert_untouched(shard, before)
    merged.posterior(stream.points)
    before = fingerprint(merged)
    shards[1].update(*data.astuple())
    assert_untouched(merged, before)


@law
@orderless
@of_statistics
def merging_shards_that_went_further_is_one_stream(stream: Stream) -> None:
    near, far = stream.data(6), stream.data(6)
    left = replace(far, X=far.X - 0.4)
    right = replace(far, X=far.X + 0.4)
    merged = stream.model(near).update(*left.astuple())
    merged.merge(stream.model(near[:0]).update(*right.astuple()))
    streamed = stream.model(near).update(*left.astuple()).update(*right.astuple())
    assert_same_model(refreshed(merged), refreshed(streamed), stream.points, factor=10)


@law
@orderless
@of_statistics
def retracting_undoes_updating(stream: Stream) -> None:
    data, wrong = stream.data(10), stream.data(4)
    model, never = stream.model(data), stream.model(data)
    model.posterior(stream.points)
    model.update(*wrong.astuple())
    model.posterior(stream.points)
    assert model.retract(*wrong.astuple()) is model
    assert_same_model(model, never, stream.points)


@law
def a_window_that_empties_fills_again(stream: Stream) -> None:
    """After each verb that leaves nothing, or less than all, to be taken out.

    Where a batch cannot be taken out of what is left, that is said, and the model goes on, too.
    """
    data, batch, more = stream.data(6), stream.data(4), stream.data(3)
    for emptied in _emptied(stream, data):
        refilled = copy.deepcopy(emptied).update(*batch.astuple())
        before = fingerprint(refilled)
        try:
            refilled.retract(*batch.astuple())
        except UnsupportedError:
            assert_untouched(refilled, before)
            emptied.update(*batch.astuple())
        for each in (refilled, emptied):
            each.update(*more.astuple())
        assert refilled.num_observations == pytest.approx(emptied.num_observations)
        # what was taken out may have moved points, a window's edge or a hand-over
        if stream.case.in_order or (stream.case.family == "auto" and not stream.case.growing):
            moments(refilled, stream.points)
        else:
            assert_same_posterior(refilled, emptied, stream.points)


def _emptied(stream: Stream, data: Observations) -> Iterator[StreamingGP]:
    """Models that hold no rows any more, unless their rows outlast the verb."""
    yield stream.settled(data).clear()
    with contextlib.suppress(UnsupportedError):
        yield stream.settled(data).forget(0.9)
    with contextlib.suppress(UnsupportedError):
        yield stream.settled(data).merge(stream.settled(data))


@law
@orderless
@of_forgetting
def what_was_never_in_is_not_taken_out(stream: Stream) -> None:
    """Where features miss some of the prior it may pass for what they took in, but it solves."""
    data, other = stream.data(10), stream.data(8)
    model, forgetful = stream.settled(data), stream.settled(data).forget(0.5)
    wrong = replace(other, X=torch.rand_like(other.X))
    for each, rows in ((model, wrong), (forgetful, data[:5])):
        each.posterior(stream.points)
        before = fingerprint(each)
        if stream.case.residual:
            with contextlib.suppress(InputDataError):
                refreshed(copy.deepcopy(each).retract(*rows.astuple())).posterior(stream.points)
        else:
            with pytest.raises(InputDataError, match="in memory"):
                each.retract(*rows.astuple())
        assert_untouched(each, before)


@law
@of_forgetting
def forgetting_half_of_everything_twice_is_everything_once(stream: Stream) -> None:
    data = stream.data(10)
    model, once = stream.model(data), stream.model(data)
    model.merge(stream.model(data))
    assert model.forget(0.5) is model
    assert_same_model(model, once, stream.points)


@law
def an_empty_batch_changes_nothing(stream: Stream) -> None:
    model, nothing = stream.model(stream.data(8)), stream.data(0)
    model.posterior(stream.points)
    before = fingerprint(model)
    model.update(*nothing.astuple()).retract(*nothing.astuple())
    assert_untouched(model, before)
    conditioned = condition_on(model, nothing)
    assert_same_posterior(conditioned, model, stream.points)


@law
def what_is_kept_between_calls_is_what_would_be_computed_anew(stream: Stream) -> None:
    model, more = stream.model(stream.data(8)), stream.data(6)
    model.posterior(stream.points)
    for rows in (slice(0, 2), slice(2, 5)):  # with no query between them
        model.update(*more[rows].astuple())
    assert_same_posterior(model, _without_cache(model), stream.points)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1.0 if name.startswith("stem.") else 1.2)
    assert_same_posterior(model, _without_cache(model), stream.points)
    model.update(*more[5:].astuple())
    assert_same_posterior(model, _without_cache(model), stream.points)


def _without_cache(model: StreamingGP) -> StreamingGP:
    copied = copy.deepcopy(model)
    copied._cache = None
    return copied


@law
def what_is_handed_out_is_a_copy(stream: Stream) -> None:
    model = stream.model(stream.data(8))
    names = {name for c in type(model).__mro__ for name in vars(c) if _is_property_of_ours(c, name)}
    tensors = [model.outcome_scale(), *(getattr(model, name) for name in sorted(names))]
    before = fingerprint(model)
    for value in tensors:
        if isinstance(value, Tensor) and value.numel() > 0:
            value.detach()[(0,) * value.ndim] += 1
    assert_untouched(model, before)


def _is_property_of_ours(owner: type, name: str) -> bool:
    ours = owner.__module__.startswith("bo_stream.") and not name.startswith("_")
    return ours and isinstance(vars(owner)[name], property)


@law
@orderless
def the_prior_comes_before_the_data(stream: Stream) -> None:
    data = stream.data(8)
    prior = stream.settled(data[:0])
    assert prior.num_observations == 0
    mean, covariance = moments(prior, stream.points)
    s, constant = stream.setting, prior.mean_module.constant.detach()
    constant = constant.unsqueeze(-1) if s.outputs == 1 else constant
    expected = constant.expand(*s.batch_shape, s.outputs)
    assert_close(mean, expected.unsqueeze(-2).expand_as(mean))
    posterior_variance = moments(stream.settled(data), stream.points)[1].diagonal(dim1=-2, dim2=-1)
    scale = prior.outcome_scale() / stream.settled(data).outcome_scale()
    relative = posterior_variance * scale.unsqueeze(-1).square().to(posterior_variance)
    assert bool((relative < covariance.diagonal(dim1=-2, dim2=-1)).all())
    assert_same_model(refreshed(prior.update(*data.astuple())), stream.settled(data), stream.points)


WIDER = ("._cache.wider", "._cache.mean.wider")


def _kept(model: StreamingGP) -> dict[str, Any]:
    """All that a model holds but the posteriors that it keeps for queries outside its bounds."""
    everything = fingerprint(model).items()
    return {path: value for path, value in everything if not path.startswith(WIDER)}


@law
def a_query_outside_leaves_no_trace(stream: Stream) -> None:
    model, more, outside = stream.model(stream.data(10)), stream.data(3), 1.0 + stream.points
    model.posterior(stream.points)
    never, before = copy.deepcopy(model), _kept(model)
    seen = moments(model, outside)
    moments(model, 0.5 + outside)
    assert_same_contents(_kept(model), before)
    assert_same_posterior(model, never, stream.points, bits=True)
    for first, again in zip(seen, moments(model, outside), strict=True):
        assert torch.equal(first, again)
    if not stream.labels:
        moments(model.condition_on_observations(1.0 + more.X, more.Y), 1.0 + more.X)
    for each in (model, never):
        each.update(*more.astuple())
    assert_same_posterior(model, never, stream.points, bits=True)
    assert_same_posterior(model, never, outside)


@law
@of_fixed_size
def memory_does_not_grow_with_the_stream(stream: Stream) -> None:
    model = stream.model(stream.data(10))

    def stream_on(n: int) -> int:
        model.update(*stream.data(n).astuple()).posterior(stream.points)
        model.update(*stream.data(3).astuple()).posterior(stream.points)
        return held_bytes(model)

    before = stream_on(600)  # enough for caches to be made anew, as by the others
    after = stream_on(9_000), stream_on(900)
    if stream.case.spreading:  # at least 4 discs of 0.45 cover the square; at most 9 lie apart
        assert max(after) < 4 * before
    else:
        assert after == (before, before)
    assert model.num_observations == pytest.approx(10_519)


@law
def what_is_remembered_is_detached(stream: Stream) -> None:
    model, more = stream.model(stream.data(8)), stream.data(3)
    tracked = [None if t is None else t.clone().requires_grad_() for t in more.astuple()]
    model.update(*tracked)
    process = model.eval().process(model.transform_inputs(stream.points).double())
    inputs = model.transform_inputs(stream.points).double().detach()
    assert not process.mean(inputs).requires_grad
    assert not process.variance(inputs).requires_grad


@law
def training_inputs_are_the_latest_observed(stream: Stream) -> None:
    data, more = stream.data(8), stream.data(3)
    model = stream.model(data).update(*more.astuple())
    outputs = (model.num_outputs,) if model.num_outputs > 1 else ()
    observed = torch.cat((data.X, more.X), -2)
    observed = observed.unsqueeze(-3) if outputs else observed
    for each in (model, condition_on(model, stream.data(2))):
        (X,) = each.train_inputs
        assert (X.dtype, X.device) == (observed.dtype, observed.device)
        assert X.shape[:-2] == (*each.batch_shape, *outputs)
        assert torch.equal(X[..., :11, :], observed.expand(*X.shape[:-2], 11, X.shape[-1]))


@law
def another_kind_of_model_cannot_be_merged(stream: Stream) -> None:
    data = stream.data(5)
    model = stream.model(data)
    before = fingerprint(model)
    other = OSGPR if type(model) is not OSGPR else LocalGP
    X, Y = data.X, torch.rand_like(data.Y)
    for stranger in (other(X, Y), SingleTaskGP(X, Y)):
        with pytest.raises(UnsupportedError):
            model.merge(stranger)
    assert_untouched(model, before)


@law
def an_objective_that_needs_the_data_is_refused(stream: Stream) -> None:
    model = stream.model(stream.data(5))
    if isinstance(model.likelihood, _GaussianLikelihoodBase):
        mll = LeaveOneOutPseudoLikelihood(model.likelihood, model)
        with pytest.raises(UnsupportedError, match=r"mll .* LeaveOneOutPseudoLikelihood"):
            model.compute_custom_loss(mll)
    with pytest.raises(UnsupportedError, match=r"mll .* PredictiveLogLikelihood"):
        model.compute_custom_loss(PredictiveLogLikelihood(model.likelihood, model, num_data=5))


@law
def whether_gradients_are_recorded_changes_no_update(stream: Stream) -> None:
    data, more, X = stream.data(10), stream.data(3), stream.points
    model, silent, twin = (stream.model(data) for _ in range(3))
    with torch.inference_mode():
        inside = [None if t is None else t.clone() for t in more.astuple()]
        model.update(*inside).posterior(X)
    model.update(*inside)
    with torch.no_grad():
        for _ in range(2):
            silent.update(*more.astuple()).posterior(X)
    for _ in range(2):
        twin.update(*more.astuple()).posterior(X)
    expected = _moments_and_gradient(twin, X)
    for each in (model, silent):
        for ours, theirs in zip(_moments_and_gradient(each, X), expected, strict=True):
            assert_close(ours, theirs)


def _moments_and_gradient(model: StreamingGP, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance in transformed units, and the gradient of their sum."""
    inputs = model.transform_inputs(X).double().requires_grad_()
    process = model.eval().process(inputs)
    mean, variance = process.mean(inputs), process.variance(inputs)
    (gradient,) = torch.autograd.grad((mean + variance).sum(), inputs)
    return mean.detach(), variance.detach(), gradient
