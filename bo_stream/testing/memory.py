"""Laws of memories, files and hyperparameters: what observations leave in a model, and copies."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
from bo_stream.models.local import LocalGP
from bo_stream.testing.streams import (
    ExampleData,
    ModelStream,
    assert_close,
    assert_count,
    assert_same_contents,
    assert_same_model,
    assert_same_moments,
    assert_same_posterior,
    assert_untouched,
    condition_on,
    expect,
    fingerprint,
    held_bytes,
    law,
    moments,
    not_for,
    of_fixed_size,
    of_forgetting,
    of_statistics,
    orderless,
    refreshed,
    refused,
    that_forget,
    that_merge,
    that_retract,
)

# --- observations enter -------------------------------------------------------------------------


@law
def the_same_data_build_the_same_model(stream: ModelStream) -> None:
    """Check that a model is the same, to the bit, whenever it is built of the same data.

    Where it is not: kernels, networks and samples that are made with a model must be drawn from a
    generator of its own, with a seed, and not from torch's.
    """
    data = stream.data(10)
    first = stream.model(data)
    torch.rand(7)
    assert_same_posterior(stream.built(data), first, stream.points, bits=True)


@law
@orderless
def updating_in_pieces_is_updating_once(stream: ModelStream) -> None:
    """Check that several updates give the model of one, with posteriors asked for between them.

    Where they do not: `observe` of the inference must add to the memory, and return a cache that
    is of the new memory, or None.
    """
    first, rest = stream.data(10)[:6], stream.data(9)
    once = stream.model(first).update(*rest.astuple())
    pieces = stream.model(first)
    pieces.posterior(stream.points)
    for rows in (slice(0, 1), slice(1, 4), slice(4, 9)):
        updated = pieces.update(*rest[rows].astuple())
        expect(updated is pieces, "Expected update to return the model itself.")
        moments(pieces, stream.points)
    assert_same_model(pieces, once, stream.points)


@law
@orderless
def a_stream_is_its_batch(stream: ModelStream) -> None:
    """Check that a model of a stream is that which is built of all its observations at once.

    Where it is not: the constructor must put its observations in by the same steps as `update`; or
    the model has the trait `in_order`.
    """
    data = stream.data(10)
    streamed = stream.settled(data[:4])
    streamed.update(*data[4:7].astuple()).update(*data[7:].astuple())
    assert_same_model(refreshed(streamed), stream.settled(data), stream.points)
    assert_count(streamed, 10)


@law
@orderless
@of_statistics
def order_does_not_matter(stream: ModelStream) -> None:
    """Check that the order in which batches enter does not matter.

    Where it does: what the memory keeps must be sums over observations; or the model has the trait
    `in_order`, or `rows`.
    """
    data = stream.data(10)
    backwards = stream.settled(data[7:]).update(*data[4:7].astuple()).update(*data[:4].astuple())
    forwards = stream.settled(data)
    assert_same_model(refreshed(backwards), refreshed(forwards), stream.points)


@law
def an_empty_batch_changes_nothing(stream: ModelStream) -> None:
    """Check that no rows can be put in, taken out and conditioned on, and change nothing.

    Where they do: what is computed of a batch must be right for ``n = 0``.
    """
    model, nothing = stream.model(stream.data(10)), stream.data(0)
    model.posterior(stream.points)
    before = fingerprint(model)
    model.update(*nothing.astuple()).retract(*nothing.astuple())
    assert_untouched(model, before)
    conditioned = condition_on(model, nothing)
    assert_same_posterior(conditioned, model, stream.points)


@law
@orderless
def the_prior_comes_before_the_data(stream: ModelStream) -> None:
    """Check that a model without observations is the prior, and can be updated like any other.

    Where it is not: the memory must begin empty, and `process` must solve for zero observations.
    """
    data = stream.data(10)
    prior = stream.settled(data[:0])
    assert_count(prior, 0)
    mean, covariance = moments(prior, stream.points)
    s, constant = stream.setting, getattr(prior.mean_module, "constant", mean.new_zeros(()))
    constant = constant.detach().unsqueeze(-1) if s.outputs == 1 else constant.detach()
    expected = constant.expand(*s.batch_shape, s.outputs)
    assert_close(mean, expected.unsqueeze(-2).expand_as(mean))
    posterior_variance = moments(stream.settled(data), stream.points)[1].diagonal(dim1=-2, dim2=-1)
    scale = prior.outcome_scale() / stream.settled(data).outcome_scale()
    relative = posterior_variance * scale.unsqueeze(-1).square().to(posterior_variance)
    below = relative < covariance.diagonal(dim1=-2, dim2=-1)
    expect(below.all(), "Expected variances after observations below those of the prior.")
    assert_same_model(refreshed(prior.update(*data.astuple())), stream.settled(data), stream.points)


@law
@of_fixed_size
def memory_does_not_grow_with_the_stream(stream: ModelStream) -> None:
    """Check that all that a model holds is as large after 600 observations as after 2,700.

    Where it grows: something keeps rows, or an autograd graph; or the model has the trait
    `growing`, or `spreading`.
    """
    model = stream.model(stream.data(10))

    def stream_on(n: int) -> int:
        model.update(*stream.data(n).astuple()).posterior(stream.points)
        model.update(*stream.data(3).astuple()).posterior(stream.points)
        return held_bytes(model)

    before = stream_on(600)  # enough for caches to be made again, as by the others
    after = stream_on(1_500), stream_on(600)
    if stream.case.spreading:  # at least 4 discs of 0.45 cover the square; at most 9 lie apart
        expect(max(after) < 4 * before, f"Expected at most {4 * before} bytes, got {after}.")
    else:
        expect(after == (before, before), f"Expected {before} bytes, as before, got {after}.")
    assert_count(model, 2_719)


@law
def what_is_remembered_is_detached(stream: ModelStream) -> None:
    """Check that a memory of observations with gradients holds none of their graph.

    Where it does: `detach` what enters memory, and solve under ``torch.no_grad()``.
    """
    model, more = stream.model(stream.data(10)), stream.data(3)
    X, Y, Yvar = (None if t is None else t.clone().requires_grad_() for t in more.astuple())
    model.update(X, Y, Yvar)  # type: ignore[arg-type]
    process = model.eval().process(model.transform_inputs(stream.points).double())
    inputs = model.transform_inputs(stream.points).double().detach()
    for part in (process.mean(inputs), process.variance(inputs)):
        expect(not part.requires_grad, "Expected a process without gradients to observations.")


@law
def training_inputs_are_the_latest_observed(stream: ModelStream) -> None:
    """Check that `train_inputs` begin with what was observed, in the shapes of BoTorch's.

    Where they do not: leave the latest inputs to `StreamingGP`.
    """
    data, more = stream.data(10), stream.data(3)
    model = stream.model(data).update(*more.astuple())
    outputs = (model.num_outputs,) if model.num_outputs > 1 else ()
    observed = torch.cat((data.X, more.X), -2)
    observed = observed.unsqueeze(-3) if outputs else observed
    for each in (model, condition_on(model, stream.data(2))):
        (X,) = each.train_inputs
        like = (X.dtype, X.device) == (observed.dtype, observed.device)
        expect(like, f"Expected train_inputs like X, got {X.dtype} on {X.device}.")
        shape = (*each.batch_shape, *outputs)
        expect(X.shape[:-2] == shape, f"Expected train_inputs of batch shape {shape}: {X.shape}.")
        same = torch.equal(X[..., :13, :], observed.expand(*X.shape[:-2], 13, X.shape[-1]))
        expect(same, "Expected train_inputs to begin with the inputs that were observed.")


@law
def whether_gradients_are_recorded_changes_no_update(stream: ModelStream) -> None:
    """Check that updates under ``no_grad`` and ``inference_mode`` are as any, gradients included.

    Where they are not: put `keeps_tensors` before each method that keeps tensors.
    """
    data, more, X = stream.data(10), stream.data(3), stream.points
    model, silent, twin = (stream.model(data) for _ in range(3))
    with torch.inference_mode():
        inside = more.X.clone(), more.Y.clone(), None if more.Yvar is None else more.Yvar.clone()
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
    """Compute mean and variance in transformed units, and the gradient of their sum."""
    inputs = model.transform_inputs(X).double().requires_grad_()
    process = model.eval().process(inputs)
    mean, variance = process.mean(inputs), process.variance(inputs)
    (gradient,) = torch.autograd.grad((mean + variance).sum(), inputs)
    return mean.detach(), variance.detach(), gradient


# --- memories add, and observations leave -------------------------------------------------------


@law
@orderless
@of_statistics
@that_merge
def merging_shards_is_one_stream(stream: ModelStream) -> None:
    """Check that merged models of parts are the model of all, and share nothing afterwards.

    Where they are not: `merged` of the inference must add both memories, and return a new value.
    """
    data = stream.data(10)
    shards = [stream.model(data[:4]), stream.model(data[4:7], seed=2), stream.model(data[7:])]
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
@that_merge
def a_merged_model_predicts_by_its_memory(stream: ModelStream) -> None:
    """Check that the posterior after a merge is that which is solved for now.

    Where it is not: `merged` keeps or solves a cache in the units from before.
    """
    data = stream.data(10)
    for own in (data[:0], data[:4]):
        model, other = stream.model(own), stream.model(data, seed=2)
        model.posterior(stream.points)
        model.merge(other)
        assert_same_posterior(model, _without_cache(model), stream.points)


@law
@orderless
@of_statistics
@that_merge
def merging_shards_that_went_further_is_one_stream(stream: ModelStream) -> None:
    """Check the same of parts in regions of their own, of which one began without observations.

    Where it is broken: places that only the other memory has must be taken over.
    """
    near, far = stream.data(10)[:6], stream.data(6)
    left = replace(far, X=far.X - 0.4)
    right = replace(far, X=far.X + 0.4)
    merged = stream.model(near).update(*left.astuple())
    merged.merge(stream.model(near[:0]).update(*right.astuple()))
    streamed = stream.model(near).update(*left.astuple()).update(*right.astuple())
    assert_same_model(refreshed(merged), refreshed(streamed), stream.points, factor=10)


@law
@orderless
@of_statistics
@that_retract
def retracting_undoes_updating(stream: ModelStream) -> None:
    """Check that `retract` undoes `update` with the same arguments.

    Where it does not: `observe` must respect the ``sign`` of a batch, in the cache too; or the
    model's `can_retract` is False, and `observe` raises UnsupportedError.
    """
    data, wrong = stream.data(10), stream.data(4)
    model, never = stream.model(data), stream.model(data)
    model.posterior(stream.points)
    model.update(*wrong.astuple())
    model.posterior(stream.points)
    expect(model.retract(*wrong.astuple()) is model, "Expected retract to return the model itself.")
    assert_same_model(model, never, stream.points)


@law
def a_window_that_empties_fills_again(stream: ModelStream) -> None:
    """Check that a model goes on after `clear`, `forget` and `merge` as if nothing had been there.

    Where a batch cannot be taken out of what is left, that is said, and the model goes on, too.
    Where it does not: what counts rows must be right when there are none.
    """
    data, batch, more = stream.data(10)[:6], stream.data(4), stream.data(3)
    for emptied in _emptied(stream, data):
        refilled = copy.deepcopy(emptied).update(*batch.astuple())
        before = fingerprint(refilled)
        try:
            refilled.retract(*batch.astuple())
            expected = [more]
        except UnsupportedError:
            assert_untouched(refilled, before)
            expected = [batch, more]
        refilled.update(*more.astuple())
        assert_count(refilled, emptied.num_observations + sum(map(len, expected)))
        # what was taken out may have moved points, a window's edge or a hand-over
        if stream.case.in_order or stream.case.hands_over:
            moments(refilled, stream.points)
        else:
            for rows in expected:
                emptied.update(*rows.astuple())
            assert_same_posterior(refilled, emptied, stream.points)


def _emptied(stream: ModelStream, data: ExampleData) -> Iterator[StreamingGP]:
    """Yield models that hold no rows any more, unless their rows outlast the verb."""
    yield stream.settled(data).clear()
    with contextlib.suppress(UnsupportedError):
        yield stream.settled(data).forget(0.9)
    with contextlib.suppress(UnsupportedError):
        yield stream.settled(data).merge(stream.settled(data))


@law
@orderless
@of_forgetting
@that_retract
@that_forget
def what_was_never_in_is_not_taken_out(stream: ModelStream) -> None:
    """Check that rows which were never put in, or forgotten since, cannot be taken out.

    Where features miss some of the prior such rows may pass for what they took in, but it solves,
    unless their outcomes are larger than all of those. Where they can: `check_remainder` and
    `check_outcomes` of `bo_stream/models/memory.py` find them in statistics.
    """
    data, other = stream.data(10), stream.data(8)
    model, forgetful = stream.settled(data), stream.settled(data).forget(0.5)
    wrong, far = replace(other, X=torch.rand_like(other.X)), replace(data[:3], Y=data[:3].Y + 1e3)
    tried = [(model, wrong), (forgetful, data[:5])]
    if stream.case.noise not in ("labels", "counts") and not stream.case.sites:
        tried.append((model, far))
    for each, rows in tried:
        each.posterior(stream.points)
        before = fingerprint(each)
        if stream.case.residual and rows is not far:
            with contextlib.suppress(InputDataError):
                refreshed(copy.deepcopy(each).retract(*rows.astuple())).posterior(stream.points)
        else:
            with refused(InputDataError, about="in memory"):
                each.retract(*rows.astuple())
        assert_untouched(each, before)


@law
@of_forgetting
@that_merge
@that_forget
def forgetting_half_of_everything_twice_is_everything_once(stream: ModelStream) -> None:
    """Check that twice the same memory, of which half is forgotten, is that memory.

    Where it is not: `scale` of the memory must scale all sums, and counts with them.
    """
    data = stream.data(10)
    model, once = stream.model(data), stream.model(data)
    model.merge(stream.model(data))
    expect(model.forget(0.5) is model, "Expected forget to return the model itself.")
    assert_same_model(model, once, stream.points)


@law
@not_for(lambda traits: traits.can_retract and traits.can_merge and traits.can_forget)
def what_is_not_supported_is_refused(stream: ModelStream) -> None:
    """Check that verbs which a model does not support raise UnsupportedError, and change nothing.

    Where they do not: raise UnsupportedError in the method of the inference or the memory.
    """
    data, case = stream.data(10), stream.case
    model, other = stream.model(data), stream.model(data[:6])
    model.posterior(stream.points)
    before = fingerprint(model)
    verbs: list[tuple[bool, Callable[[], Any]]] = [
        (case.can_retract, lambda: model.retract(*data[6:].astuple())),
        (case.can_merge, lambda: model.merge(other)),
        (case.can_forget, lambda: model.forget(0.5)),
    ]
    for supported, verb in verbs:
        if not supported:
            with refused(UnsupportedError):
                verb()
            assert_untouched(model, before)


@law
def another_kind_of_model_cannot_be_merged(stream: ModelStream) -> None:
    """Check that a model of another class is refused by `merge`.

    Where it is not: leave the checks of `merge` to `StreamingGP`.
    """
    data = stream.data(10)
    model = stream.model(data)
    before = fingerprint(model)
    other = OSGPR if type(model) is not OSGPR else LocalGP
    X, Y = data.X[..., :5, :], torch.rand_like(data.Y[..., :5, :])
    for stranger in (other(X, Y), SingleTaskGP(X, Y)):
        with refused(UnsupportedError):
            model.merge(stranger)
    assert_untouched(model, before)


# --- nothing else changes it --------------------------------------------------------------------


@law
def what_is_kept_between_calls_is_what_would_be_computed_anew(stream: ModelStream) -> None:
    """Check that a cached posterior is that which is solved for now, whatever came between.

    Where it is not: a cache must know the state of the hyperparameters that it is of
    (`prior.state()`, `prior.is_in`), and the memory that it is of.
    """
    model, more = stream.model(stream.data(10)), stream.data(6)
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


_THEIRS = ("botorch", "gpytorch", "torch")


@law
def what_is_handed_out_is_a_copy(stream: ModelStream) -> None:
    """Check that writing into a tensor that a property returns changes nothing in the model.

    Where it does: ``clone`` what the property returns.
    """
    model = stream.model(stream.data(10))
    own = [c for c in type(model).__mro__ if c.__module__.partition(".")[0] not in _THEIRS]
    parts = (each for c in own for each in vars(c).items())
    names = {name for name, part in parts if isinstance(part, property) and name[0] != "_"}
    tensors = [model.outcome_scale(), *(getattr(model, name) for name in sorted(names))]
    before = fingerprint(model)
    for value in tensors:
        if isinstance(value, Tensor) and value.numel() > 0:
            value.detach()[(0,) * value.ndim] += 1
    assert_untouched(model, before)


WIDER = ("._cache.wider", "._cache.mean.wider")


def _kept(model: StreamingGP) -> dict[str, Any]:
    """Copy all that a model holds but posteriors kept for queries outside a grid's bounds."""
    everything = fingerprint(model).items()
    return {path: value for path, value in everything if not path.startswith(WIDER)}


@law
def a_query_outside_leaves_no_trace(stream: ModelStream) -> None:
    """Check that posteriors far outside the data change neither later posteriors nor updates.

    Where they do: what a query of `process` needs must not enter the memory.
    """
    model, more, outside = stream.model(stream.data(10)), stream.data(3), 1.0 + stream.points
    model.posterior(stream.points)
    never, before = copy.deepcopy(model), _kept(model)
    seen = moments(model, outside)
    moments(model, 0.5 + outside)
    assert_same_contents(_kept(model), before)
    assert_same_posterior(model, never, stream.points, bits=True)
    for first, again in zip(seen, moments(model, outside), strict=True):
        if not torch.equal(first, again):
            raise AssertionError(f"Expected equal posteriors, got {first} and {again}.")
    if not stream.labels:
        moments(model.condition_on_observations(1.0 + more.X, more.Y), 1.0 + more.X)
    for each in (model, never):
        each.update(*more.astuple())
    assert_same_posterior(model, never, stream.points, bits=True)
    assert_same_posterior(model, never, outside)


@law
def an_objective_that_needs_the_data_is_refused(stream: ModelStream) -> None:
    """Check that a fit by another objective than the marginal likelihood is refused.

    Where it is not: leave `compute_custom_loss` to `StreamingGP`.
    """
    model = stream.model(stream.data(10))
    if isinstance(model.likelihood, _GaussianLikelihoodBase):
        mll = LeaveOneOutPseudoLikelihood(model.likelihood, model)
        with refused(UnsupportedError, about=r"mll .* LeaveOneOutPseudoLikelihood"):
            model.compute_custom_loss(mll)
    with refused(UnsupportedError, about=r"mll .* PredictiveLogLikelihood"):
        model.compute_custom_loss(PredictiveLogLikelihood(model.likelihood, model, num_data=5))


@law
def entering_and_leaving_training_changes_nothing(stream: ModelStream) -> None:
    """Check that a second change to training mode and back changes nothing.

    Where it does: `refitted` of the inference must return what it was given when nothing moved.
    """
    model = stream.model(stream.data(10)).update(*stream.data(5).astuple())
    refreshed(model).posterior(stream.points)
    before = fingerprint(model)
    refreshed(model).posterior(stream.points)
    assert_untouched(model, before)


# --- copies and files ---------------------------------------------------------------------------


@law
def a_copy_goes_on_as_the_original(stream: ModelStream) -> None:
    """Check that copies by ``deepcopy``, ``pickle`` and `save` go on as the model, to the bit.

    Where they do not: all that a posterior or an update depends on must be an attribute of the
    model, its memory or its inference, of an importable class; name classes of your own in
    `trusted`.
    """
    data, more = stream.data(10), stream.data(5)
    model = stream.built(data[:6])

    def saved(model: StreamingGP) -> StreamingGP:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "model.safetensors"
            model.save(path)
            return type(model).load(path, trusted=stream.case.trusted)

    ways: tuple[Callable[[StreamingGP], StreamingGP], ...]
    ways = (copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each)), saved)
    for asked_before in (False, True):
        if asked_before:
            model.update(*data[6:].astuple())
            model.posterior(stream.points)
        # what no posterior was asked of holds nothing that only some ways would lose
        twins = [way(model) for way in (ways if asked_before else ways[-1:])]
        for twin in twins:
            assert_count(twin, model.num_observations)
        if asked_before:
            _assert_equal(twins, model, stream.points)
        for each in (model, *twins):
            each.update(*more.astuple())
        _assert_equal(twins, model, stream.points)
    for each in (model, *twins):
        refreshed(each)
    _assert_equal(twins, model, stream.points)


def _assert_equal(twins: Sequence[StreamingGP], model: StreamingGP, X: Tensor) -> None:
    expected = moments(model, X)
    for twin in twins:
        assert_same_moments(moments(twin, X), expected, bits=True)


@law
def state_dict_holds_hyperparameters_only(stream: ModelStream) -> None:
    """Check that a `state_dict` has no sizes of the data, and leaves the memory where it is loaded.

    Where it does not: the memory must be no buffer and no parameter.
    """
    other = stream.data(10)
    data = other[:6]
    source, target = stream.model(data), stream.model(other, seed=2)
    state = source.state_dict()
    shapes = {name: value.shape for name, value in state.items()}
    expected = {name: value.shape for name, value in target.state_dict().items()}
    expect(shapes == expected, f"Expected shapes {expected} whatever the data, got {shapes}.")
    count = target.num_observations
    target.load_state_dict(state)
    assert_count(target, count)
    assert_same_posterior(refreshed(target), stream.model(other), stream.points)
