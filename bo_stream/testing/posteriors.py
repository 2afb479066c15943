"""Laws of posteriors, of models of hypothetical observations, and of the objective of a fit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.posteriors.posterior import Posterior
from botorch.posteriors.transformed import TransformedPosterior
from botorch.sampling.normal import SobolQMCNormalSampler
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

from bo_stream.models.base import StreamingGP
from bo_stream.testing.streams import (
    ModelStream,
    assert_close,
    assert_gradients,
    assert_same_posterior,
    assert_untouched,
    central_differences,
    centre,
    condition_on,
    expect,
    fingerprint,
    gaussian,
    joint_covariance,
    law,
    moments,
    of_exact_objectives,
    of_gaussian_noise,
    of_outcomes,
    refreshed,
    refused,
    without_residual,
)

# --- hypothetical observations ------------------------------------------------------------------


@law
@without_residual
@of_gaussian_noise
def conditioning_is_updating_a_copy(stream: ModelStream) -> None:
    """Check that conditioning on observations predicts as a copy that is updated by them.

    Where it does not: `process` must have the prior of the kernel (else the model has the trait
    `residual`), and `observe` the noise that `noise_at` says.
    """
    data, more = stream.data(10), stream.data(3)
    model = stream.model(data)
    scale = model.outcome_scale().unsqueeze(-2).to(more.Y)
    noise = None
    if stream.case.noise in ("known", "mixed") and more.Yvar is not None:
        level = model.noise_at(model.transform_inputs(more.X).double()).mT.to(more.Y)
        noise = torch.where(more.Yvar.isnan(), level, more.Yvar / scale.square())
    conditioned = condition_on(model, more, noise)
    updated = copy.deepcopy(model).update(*more.astuple())
    assert_same_posterior(conditioned, updated, stream.points)


@law
@of_outcomes
@of_gaussian_noise
def conditioning_leaves_the_model_as_it_is(stream: ModelStream) -> None:
    """Check that conditioning and fantasies change nothing in the model, refused ones included.

    Where they do: `condition` of a process must return a new process, and share no tensor that is
    written to.
    """
    model, more = stream.model(stream.data(10)), stream.data(3)
    model.posterior(stream.points, observation_noise=True)
    before = fingerprint(model)
    conditioned = model.condition_on_observations(more.X, more.Y)
    conditioned.posterior(stream.points)
    fantasy = model.fantasize(more.X, stream.sampler())
    fantasy.posterior(stream.points).rsample(torch.Size([2]))
    fantasy.condition_on_observations(more.X, more.Y).posterior(stream.points)
    wide = torch.cat((more.X, more.X), -1)
    for X, Y in ((wide, more.Y), (more.X, more.Y[..., :2, :]), (more.X, more.Y / 0.0)):
        with refused(BotorchTensorDimensionError, InputDataError):
            model.condition_on_observations(X, Y)
    with refused(RuntimeError, InputDataError):
        model.fantasize(more.X, lambda posterior: posterior.mean * math.nan)  # type: ignore[arg-type]
    assert_untouched(model, before)


@law
def what_is_hypothetical_stays_when_the_model_moves_on(stream: ModelStream) -> None:
    """Check that a conditioned model predicts the same after its model was updated and refitted.

    Where it does not: a process must hold copies of what it depends on, hyperparameters included.
    """
    model, more = stream.model(stream.data(10)), stream.data(3)
    conditioned = condition_on(model, more)

    def fantasies() -> tuple[Tensor, Tensor]:
        return moments(conditioned.fantasize(more.X + 0.01, stream.sampler()), stream.points)

    before, imagined = moments(conditioned, stream.points), fantasies()
    shifted = stream.data(4)
    other = 1.0 - shifted.Y if stream.labels and stream.case.sites else 2.0 + 3.0 * shifted.Y
    if stream.case.noise == "counts":
        other = 3.0 * shifted.Y
    hyper = [parameter.detach().clone() for parameter in model.parameters()]
    model.update(shifted.X, other, None if shifted.Yvar is None else 4.0 * shifted.Yvar)
    with torch.no_grad():  # they have the model's learned noise, which an update may move
        for parameter, value in zip(model.parameters(), hyper, strict=True):
            parameter.copy_(value)
    after = fantasies()
    refreshed(model).posterior(stream.points)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    pairs = zip((*moments(conditioned, stream.points), *after), (*before, *imagined), strict=True)
    for actual, expected in pairs:
        if not torch.equal(actual, expected):
            raise AssertionError(f"Expected moments as before, {expected}, got {actual}.")


@law
@of_gaussian_noise
def conditioning_twice_is_conditioning_once(stream: ModelStream) -> None:
    """Check that conditioning on one batch after another is conditioning on both.

    Where it is not: `condition` of a process must be that of `PosteriorProcess`.
    """
    model, more = stream.model(stream.data(10)), stream.data(4)
    twice = condition_on(condition_on(model, more[:1]), more[1:])
    assert_same_posterior(twice, condition_on(model, more), stream.points)


@law
@of_gaussian_noise
def conditioning_the_own_mean_leaves_the_mean(stream: ModelStream) -> None:
    """Check that observing what is predicted moves no prediction.

    Where it does: mean and covariance of the process are not of one Gaussian process.
    """
    model, X = stream.model(stream.data(10)), stream.data(3).X
    conditioned = model.condition_on_observations(X, centre(model.posterior(X)))
    assert_close(moments(conditioned, stream.points)[0], moments(model, stream.points)[0])


@law
def variance_never_grows(stream: ModelStream) -> None:
    """Check that observing, really or hypothetically, makes some variances smaller and none larger.

    Where it does not: precisions must add; or the model has the trait `blended`.
    """
    model, more = stream.model(stream.data(10)), stream.data(3)
    before = gaussian(model.posterior(stream.points)).variance
    conditioned = condition_on(model, more)
    fantasy = conditioned.fantasize(more.X, stream.sampler())
    updated = copy.deepcopy(model).update(*more.astuple())
    slack = 1e-12 if stream.exact else 1e-5
    after = {"conditioning": conditioned, "a fantasy": fantasy, "an update": updated}
    case = stream.case
    finds_sites_again = case.sites and (case.rows or case.settling or case.growing)
    if case.blended or finds_sites_again:
        del after["an update"]
    for what, each in after.items():
        ratio = gaussian(each.posterior(stream.points)).variance / before
        if not bool((ratio <= 1.0 + slack).all()) or not bool((ratio < 0.999).any()):
            raise AssertionError(
                f"Expected variances that {what} makes smaller, got {ratio} times those before."
            )


@law
@of_outcomes
@of_gaussian_noise
def fantasies_are_each_alone(stream: ModelStream) -> None:
    """Check that fantasies of a batch are those of each input, conditioned on the same draws.

    Where they are not: the process must broadcast over leading dimensions of inputs.
    """
    model, batch = stream.model(stream.data(10)), 2
    X = stream.inputs(3, batch)
    draws = stream.sampler()(model.posterior(X, observation_noise=True))
    shape = (3, *X.shape[:-1], stream.setting.outputs)
    expect(draws.shape == shape, f"Expected draws of shape {shape}, got {tuple(draws.shape)}.")
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
def fantasies_have_the_batch_shape_of_their_posteriors(stream: ModelStream) -> None:
    """Check that batch shapes are those of BoTorch's ``SingleTaskGP``, after whatever verbs.

    Where they are not: leave `batch_shape` to `StreamingGP`.
    """
    model, s = stream.model(stream.data(10)), stream.setting
    X = stream.inputs(2, *(() if s.batch_shape else (5,)))
    wide = X.expand(4, *X.shape)
    fantasy = model.fantasize(X, stream.sampler(4))
    again = fantasy.fantasize(wide, stream.sampler(3))
    theirs, theirs_again = _shapes_of_single_task_gp(s.batch_shape, s.outputs, X.shape)
    conditioned = condition_on(model, stream.data(3))
    twice, known = condition_on(conditioned, stream.data(2)), fantasy.with_known_points(X)
    found: dict[str, tuple[torch.Size, Sequence[int]]] = {
        "a fantasy": (fantasy.batch_shape, theirs),
        "a fantasy of a fantasy": (again.batch_shape, theirs_again),
        "a fantasy of known points": (known.batch_shape, fantasy.batch_shape),
        "an output of a fantasy": (fantasy.subset_output([0]).batch_shape, fantasy.batch_shape),
        "the model": (model.batch_shape, s.batch_shape),
        "a conditioned model": (conditioned.batch_shape, s.batch_shape),
        "one conditioned twice": (twice.batch_shape, s.batch_shape),
        "one of known points": (model.with_known_points(X).batch_shape, s.batch_shape),
    }
    for each in (fantasy, again):
        mean = gaussian(each.posterior(stream.points[..., :1, :])).mean
        found[f"a posterior of {each.batch_shape}"] = (mean.shape[:-2], each.batch_shape)
    for what, (shape, expected) in found.items():
        said = f"Expected batch shape {tuple(expected)} of {what}, got {tuple(shape)}."
        expect(tuple(shape) == tuple(expected), said)


@cache
def _shapes_of_single_task_gp(
    batch_shape: tuple[int, ...], outputs: int, shape: torch.Size
) -> tuple[torch.Size, torch.Size]:
    """Batch shapes of an exact model's fantasies of inputs of a shape, and of theirs in turn."""
    with torch.random.fork_rng(devices=[]):
        X = torch.rand(*batch_shape, 5, shape[-1], dtype=torch.float64)
        model = SingleTaskGP(X, torch.randn(*X.shape[:-1], outputs).to(X))
        model.posterior(X)  # which fills the caches that conditioning needs
        new = torch.rand(shape, dtype=torch.float64)
        fantasy = model.fantasize(new, SobolQMCNormalSampler(torch.Size([4])))
        sampler = SobolQMCNormalSampler(torch.Size([3]))
        return fantasy.batch_shape, fantasy.fantasize(new.expand(4, *shape), sampler).batch_shape


@law
def what_is_hypothetical_cannot_be_put_into_memory(stream: ModelStream) -> None:
    """Check that a conditioned model refuses fits, and all verbs that change the memory.

    Where it does not: leave them to `StreamingGP`, or ask whether the model is conditioned.
    """
    model, more = stream.model(stream.data(10)), stream.data(3)
    conditioned = condition_on(model, more)
    conditioned.posterior(stream.points)
    before = fingerprint(conditioned)
    mll = MarginalLogLikelihood(conditioned.likelihood, conditioned)
    verbs: list[Callable[[], Any]] = [
        lambda: conditioned.update(*more.astuple()),
        lambda: conditioned.retract(*more.astuple()),
        lambda: conditioned.merge(model),
        lambda: model.merge(conditioned),
        lambda: conditioned.forget(0.5),
        lambda: fit_gpytorch_mll(mll),
    ]
    for verb in verbs:
        with refused(UnsupportedError, about="hypothetical"):
            verb()
    assert_untouched(conditioned, before)


@law
def points_that_are_evaluated_once_change_nothing(stream: ModelStream) -> None:
    """Check that posteriors and gradients after `with_known_points` are those of the model.

    Where they are not: `at` of a process must give of points together what it gives of each.
    """
    model, points = stream.model(stream.data(10)), stream.points
    baseline, pending = points[..., :-2, :], points[..., -2:, :]
    X = stream.inputs(2, 3)
    first, last = (part.expand(3, *part.shape) for part in (baseline, pending))

    def between(others: Tensor) -> Tensor:
        return torch.cat((first, others, last), -2)

    known = model.with_known_points(baseline, pending)
    *ours, slope = _moments_and_slope(known, X, between)
    *theirs, expected = _moments_and_slope(model, X, between)
    for actual, other in zip(ours, theirs, strict=True):
        assert_close(actual, other)
    assert_close(slope, expected, factor=float(expected.abs().max()))
    one_sided = torch.cat((first, X), -2), torch.cat((X, last), -2)
    for others in (X, baseline, points, *one_sided, between(X)[..., 1:-1, :]):
        assert_same_posterior(known, model, others)
    for part in (model.with_known_points(baseline), model.with_known_points(last=pending)):
        assert_same_posterior(part, model, between(X))
    more = stream.data(2)
    assert_same_posterior(condition_on(known, more), condition_on(model, more), between(X))
    with refused(UnsupportedError):
        known.update(*more.astuple())


def _moments_and_slope(
    model: StreamingGP, X: Tensor, extend: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a posterior's moments, and the gradient of their sum of unequal weights."""
    X = X.clone().requires_grad_()
    posterior = gaussian(model.posterior(extend(X)))
    mean, covariance = posterior.mean, joint_covariance(posterior)
    weights = [torch.linspace(0.3, 1.0, part.numel()).to(part) for part in (mean, covariance)]
    value = mean.flatten() @ weights[0] + covariance.flatten() @ weights[1]
    (gradient,) = torch.autograd.grad(value, X)
    return mean.detach(), covariance.detach(), gradient


# --- posteriors ---------------------------------------------------------------------------------


@law
def posterior_follows_the_inputs(stream: ModelStream) -> None:
    """Check shape, dtype and device; each input batch is alone; joint and marginal agree.

    Where they do not: arithmetic is in float64, and ends in the dtype of X; features and
    covariances broadcast over leading dimensions.
    """
    s = stream.setting
    model = stream.model(stream.data(10))
    X = stream.inputs(4, 3)
    posterior = model.posterior(X)
    draws, normal = posterior.rsample(torch.Size([2])), gaussian(posterior)
    expect(model.batch_shape == s.batch_shape, f"Expected batch_shape {s.batch_shape}.")
    expect(model.num_outputs == s.outputs, f"Expected num_outputs of {s.outputs}.")
    shape = (3, *s.batch_shape, 4, s.outputs)
    for what, tensor, expected in (
        ("mean", normal.mean, shape),
        ("variance", normal.variance, shape),
        ("draws", draws, (2, *shape)),
    ):
        found = (tuple(tensor.shape), tensor.dtype, tensor.device.type)
        wanted = (expected, s.dtype, s.device)
        expect(found == wanted, f"Expected {what} of {wanted}, got {found}.")
    marginal = joint_covariance(normal).diagonal(dim1=-2, dim2=-1).mT
    assert_close(normal.variance, marginal)
    mean, covariance = moments(model, X[2])
    assert_close(normal.mean[2], mean)
    assert_close(joint_covariance(normal)[2], covariance)


@law
def the_prior_is_that_of_the_kernel(stream: ModelStream) -> None:
    """Check that without observations the covariance is that of `covar_module`.

    Where it is not: the features z must have ``z(x)ᵀ z(x') + residual = k(x, x')``; or the trait
    `prior_error` says how near they are.
    """
    model, X = stream.model(stream.data(0)), stream.points
    inputs = model.transform_inputs(X).double().detach()
    own = model.process(inputs).covariance(inputs).detach()
    kernel = copy.deepcopy(model.covar_module).double().requires_grad_(False)
    wide = inputs if model.num_outputs == 1 else inputs.unsqueeze(-3)
    dense = kernel(wide).to_dense()
    expected = (dense.unsqueeze(-3) if model.num_outputs == 1 else dense).expand_as(own)
    rounding = 1e-12 if stream.exact else 1e-6
    most = max(stream.case.prior_error(model), rounding)
    error = float((own - expected).abs().max() / expected.abs().max())
    expect(error <= most, f"Expected covar_module's covariance to {most:.2g}, got {error:.2g}.")


@law
def posterior_of_one_set_serves_every_batch_element(stream: ModelStream) -> None:
    """Check that inputs without a batch shape are those of every batch element.

    Where they are not: features and covariances must broadcast against the batch shape.
    """
    batch, d = torch.Size(stream.setting.batch_shape), stream.case.input_dim
    model = stream.model(stream.data(10))
    with torch.no_grad():  # elements that are alike would hide which one is asked
        for raw in model.covar_module.parameters():
            if batch and raw.shape[: len(batch)] == batch:
                steps = 0.3 * torch.arange(batch.numel()).to(raw)
                raw += steps.view(*batch, *[1] * (raw.ndim - len(batch)))
    fantasies = model.fantasize(stream.points[..., :1, :], stream.sampler(2))
    for n in {4, *batch[-1:]}:  # n points of n elements: shapes alone do not tell which is which
        X = torch.rand(n, d).to(stream.points)
        whole = X.expand(*batch, n, d)
        for each in (model, fantasies):
            for found, expected in zip(moments(each, X), moments(each, whole), strict=True):
                assert_close(found, expected)
            one, own = (each.process_inputs(inputs) for inputs in (X, whole))
            known = each.process(own).marginals(own)
            for found, expected in zip(each.process(one).marginals(one), known, strict=True):
                assert_close(found.expand_as(expected), expected)


@law
@of_outcomes
def gradients_are_those_of_differences(stream: ModelStream) -> None:
    """Check gradients of posteriors and of fantasies in X against central differences, in float64.

    Where they differ: nothing between X and the moments may be detached; or the posterior has
    kinks, which the trait `is_smooth_at` says.
    """
    if not stream.exact:
        return
    model, T = stream.model(stream.data(10)), stream.points[..., :2, :]

    def sums(posterior: Posterior, X: Tensor) -> Tensor:
        normal = gaussian(posterior)
        parts = (part.sin().movedim(-X.ndim, 0) for part in (normal.mean, normal.variance))
        return torch.stack([part.flatten(1).sum(-1) for part in parts], -1)

    def of_fantasies(X: Tensor) -> Tensor:
        fantasy = model.fantasize(X, stream.sampler(2))
        fantasy = fantasy.fantasize(X + 0.1, stream.sampler(2))
        return sums(fantasy.posterior(T), X)

    X = stream.smooth_points(model, 2, low=0.1, high=0.8, shifts=(0.0, 0.1))
    assert_gradients(lambda X: sums(model.posterior(X), X), X)
    assert_gradients(of_fantasies, X)


@law
@of_exact_objectives
def the_objective_has_the_gradient_of_differences(stream: ModelStream) -> None:
    """Check the gradient of `log_marginal_likelihood` along a direction of all hyperparameters.

    Where it differs: `objective` of the inference must be computed from `prior`, not from a cache,
    and nothing in it may be detached.
    """
    if not stream.exact:
        return
    model = stream.model(stream.data(10))
    learned = [(p, p.detach().clone()) for p in model.parameters() if p.requires_grad]
    directions = [0.2 * torch.randn_like(start) for _, start in learned]
    value = model.log_marginal_likelihood().sum()
    slopes = torch.autograd.grad(value, [p for p, _ in learned], materialize_grads=True)
    slope = sum(float((g * d).sum()) for g, d in zip(slopes, directions, strict=True))

    def at(step: Tensor) -> Tensor:
        with torch.no_grad():
            for (parameter, start), direction in zip(learned, directions, strict=True):
                parameter.copy_(start + float(step) * direction)
        return model.log_marginal_likelihood().sum()

    difference = float(central_differences(at, torch.zeros(1).double()))
    near = abs(slope - difference) <= 1e-5 * max(1.0, abs(difference))
    expect(near, f"Expected a slope of {difference:.9g}, as by differences, got {slope:.9g}.")


@law
@of_outcomes
@of_gaussian_noise
def outcomes_are_predicted_with_their_noise(stream: ModelStream) -> None:
    """Check that `predictive` and `log_predictive` are those of the posterior with its noise.

    Where they are not: leave both to `StreamingGP`; `noise` of the inference says where it varies.
    """
    model, X = stream.model(stream.data(10)), stream.points
    noisy = model.posterior(X, observation_noise=True)
    Y = noisy.rsample(torch.Size([3])).detach()
    if isinstance(noisy, TransformedPosterior):
        with refused(UnsupportedError, about="outcome_transform"):
            model.log_predictive(X, Y)
        return
    predicted, expected = model.predictive(X), gaussian(noisy)
    assert_close(predicted.mean, expected.mean)
    assert_close(predicted.variance, expected.variance)
    normal = torch.distributions.Normal(expected.mean, expected.variance.sqrt())
    assert_close(model.log_predictive(X, Y), normal.log_prob(Y))


@law
@of_gaussian_noise
def observation_noise_is_added_to_the_variance(stream: ModelStream) -> None:
    """Check that `observation_noise` adds the model's noise, or that which is given.

    Where it does not: leave `posterior` to `StreamingGP`.
    """
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
def fantasies_take_the_noise_they_are_given(stream: ModelStream) -> None:
    """Check that draws and conditioning have a given noise: per point or for all, in a batch.

    Where they have not: leave `fantasize` to `StreamingGP`.
    """
    model, s, T = stream.model(stream.data(10)), stream.setting, stream.points
    X = stream.inputs(3, 2)
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
def a_posterior_transform_sees_the_outcomes(stream: ModelStream) -> None:
    """Check that a posterior transform is applied last, to outcomes in their units.

    Where it is not: leave `posterior` to `StreamingGP`.
    """
    model, X = stream.model(stream.data(10)), stream.points
    posterior = model.posterior(X)
    if isinstance(posterior, TransformedPosterior):
        return
    weights = torch.linspace(-1.0, 2.0, stream.setting.outputs).to(X)
    transform = ScalarizedPosteriorTransform(weights)
    scalarized = gaussian(model.posterior(X, posterior_transform=transform))
    assert_close(scalarized.mean.squeeze(-1), gaussian(posterior).mean @ weights)
    assert_close(scalarized.variance.squeeze(-1), gaussian(posterior).variance @ weights.square())


@law
@of_outcomes
def some_outputs_are_as_among_all(stream: ModelStream) -> None:
    """Check that some of the outputs are predicted and updated as they are among all.

    Where they are not: `select` of the memory must select outputs everywhere, and copy.
    """
    model, more = stream.model(stream.data(10)), stream.data(3)
    conditioned = model.condition_on_observations(more.X, more.Y)
    fantasy = model.fantasize(more.X, stream.sampler())
    last = stream.setting.outputs - 1
    chosen = ([last],) if last == 0 else ([last], list(range(last, -1, -1)))
    for whole in (model, conditioned, fantasy):
        full = whole.posterior(stream.points)
        centres, variances = centre(full), gaussian(full).variance
        for kept in chosen:
            part = whole.subset_output(kept)
            found = part.num_outputs
            expect(found == len(kept), f"Expected {len(kept)} outputs, got {found}.")
            asked = whole.posterior(stream.points, output_indices=kept)
            for each in (asked, part.posterior(stream.points)):
                assert_close(centre(each), centres[..., kept])
                assert_close(gaussian(each).variance, variances[..., kept])
    lost = more if stream.setting.outputs == 1 else replace(more, Y=more.Y[..., 1:])
    lost = lost if lost.Yvar is None else replace(lost, Yvar=lost.Yvar[..., -1:])
    before = fingerprint(model)
    part = model.subset_output([last])
    whole_state = model.state_dict()
    for name, value in part.state_dict().items():
        shared = value.numel() > 0 and value.data_ptr() == whole_state[name].data_ptr()
        expect(not shared, f"Expected an output with a {name} of its own, got that of all.")
    part.update(*lost.astuple())
    assert_untouched(model, before)
    whole = copy.deepcopy(model).update(*more.astuple())
    assert_same_posterior(refreshed(part), refreshed(whole).subset_output([last]), stream.points)
