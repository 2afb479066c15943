"""Hyperparameters to begin with: by the median trick, an exact process, and few functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import torch
from botorch.exceptions.warnings import BotorchWarning, OptimizationWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim.closures import get_loss_closure_with_grads
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, LaplaceLikelihood, Likelihood
from gpytorch.means import ConstantMean, Mean
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor
from torch.nn import Module

from bo_stream.bases.inducing import InducingFunctions, kernel_variance
from bo_stream.collective import Collective
from bo_stream.likelihoods.binomial import BinomialLikelihood, empirical_logits
from bo_stream.linalg import cholesky_with_nugget, solve_lower
from bo_stream.models.inference import Hyperparameters
from bo_stream.models.stochastic.budget import maximise
from bo_stream.models.stochastic.replay import Batch
from bo_stream.warnings import warn_of_small_outcomes


@torch.enable_grad()
def learn_first_hyperparameters(
    kernel: Kernel,
    mean: Mean,
    likelihood: Likelihood,
    rows: Batch,
    maxiter: int | None = None,
    seconds: float | None = None,
) -> None:
    """Set kernel, mean and the noise of real outcomes by maximum marginal likelihood, in place.

    Of transformed inputs ``... x n x d`` and outcomes ``... x n x m``. Those of other likelihoods,
    labels or counts, are taken for real ones, positives of a number by their empirical logits: what
    is learned of lengthscales serves to begin with. Each batch element and output is fitted for
    itself, where no hyperparameter is of several and there is no limit of time: BoTorch's fit of
    each for itself has none.
    Cost O(n³) a step of L-BFGS, of which there are as many as it takes, or ``maxiter``, and none is
    begun after so many seconds, but the first. [Evans2020, section I.1]
    """
    own = isinstance(likelihood, GaussianLikelihood)
    counts = isinstance(likelihood, BinomialLikelihood)
    exact = SingleTaskGP(
        rows.X,
        empirical_logits(*rows.Y.split(1, -1))[0] if counts else rows.Y,
        likelihood=deepcopy(likelihood).double() if own else None,
        covar_module=deepcopy(kernel).double(),
        mean_module=deepcopy(mean).double(),
        outcome_transform=None,
    ).to(rows.X)
    objective = ExactMarginalLogLikelihood(exact.likelihood, exact)
    learned = {name: p for name, p in objective.named_parameters() if p.requires_grad}
    batch = exact.train_targets.shape[:-1]
    together = seconds is not None or any(p.shape[: len(batch)] != batch for p in learned.values())
    limits: dict[str, Any] = {} if maxiter is None else {"options": {"maxiter": maxiter}}
    options: dict[str, Any] = {}
    if seconds is not None:
        limits["timeout_sec"], options["max_attempts"] = seconds, 1
        options["warning_handler"] = lambda w: issubclass(w.category, OptimizationWarning)
    closure = get_loss_closure_with_grads(objective.train(), learned) if together else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BotorchWarning)
        fit_gpytorch_mll(objective, closure, optimizer_kwargs=limits, **options)
    with torch.no_grad():
        kernel.load_state_dict(exact.covar_module.state_dict())
        if counts:
            mean.load_state_dict(exact.mean_module.state_dict())
        if isinstance(likelihood, GaussianLikelihood | LaplaceLikelihood):
            mean.load_state_dict(exact.mean_module.state_dict())
            share = 1.0 if own else 0.5
            likelihood.noise = (share * exact.likelihood.noise).reshape(likelihood.noise.shape)


@torch.no_grad()
def agree(modules: Iterable[Module], collective: Collective) -> None:
    """Let all processes have the parameters of the first, in place.

    Searches of each process for itself end apart by rounding, where their machines differ.
    """
    for module in modules:
        for parameter in module.parameters():
            parameter.copy_(collective.agreed(parameter.detach()))


_NUGGET = 1e-6
"""Noise of the values that features are made of, in parts of their variance."""

_ITERATIONS = 50
"""Of L-BFGS."""

_FARTHEST = 10.0
"""Largest change of a logarithm."""


@torch.no_grad()
def scale_bound(
    hyper: Hyperparameters, data: Batch, span: int, rank: int, total: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the bound at the best mean of S functions and covariance of M, by scale and noise.

    Functions are the prior's eigenfunctions in the span of values at S inputs, chosen evenly; the
    covariance's are the leading ones. With M = S the collapsed bound of Titsias (2009). Cost
    O(n S² + S³).

    Args:
        hyper: Kernel and mean.
        data: n inputs, ``... x n x d``, with real outcomes.
        span: Functions S of the mean, or as many as there are inputs.
        rank: Functions M of the covariance, or as many.
        total: Observations that the data stand for.

    Returns:
        The bound per observation, ``... x m``, without its constant, of a prior variance in parts
        of what it was and a noise variance, ``... x m`` each; differentiable in both.
    """
    batch, kernel, outputs = data.targets.shape[:-1], hyper.covar_module, data.targets.shape[-2]
    points = data.X[..., :: max(-(-data.X.shape[-2] // span), 1), :]
    values = InducingFunctions(points.unsqueeze(-3).expand(*batch, -1, -1), None)
    root = cholesky_with_nugget(values.with_functions(kernel, values, outputs), _NUGGET)
    features = solve_lower(root, values.with_values(kernel, data.X, outputs))
    targets = data.targets - hyper.constant(batch).unsqueeze(-1)
    spectrum, directions = torch.linalg.eigh(features @ features.mT)
    pulls = (directions.mT @ (features @ targets.unsqueeze(-1))).squeeze(-1).square()
    spectrum, first = spectrum.clamp_min(0.0), max(spectrum.shape[-1] - rank, 0)
    left = kernel_variance(kernel, data.X, outputs).sum(-1) - spectrum[..., first:].sum(-1)
    left, squares, weight = left.clamp_min(0.0), targets.square().sum(-1), total / len(data)

    def bound(scale: Tensor, noise: Tensor) -> Tensor:
        share = (weight * scale / noise).unsqueeze(-1)
        signal = 1.0 + share * spectrum
        explained = (share * pulls / signal).sum(-1)
        misfit = weight * (squares + scale * left - explained) / noise
        learned = signal[..., first:].log().sum(-1)
        return -0.5 * (noise.log() + (learned + misfit) / (weight * len(data)))

    return bound


def set_scales(hyper: Hyperparameters, data: Batch, span: int, rank: int, total: int) -> None:
    """Set output scale and noise to the best that so few functions can have, in place; others stay.

    An exact process's are those of a model that can explain all that it calls signal. Of one that
    cannot, what is left weighs by the output scale over the noise, and steps lower that slowly
    (kin40k: 1.8 and 0.013 of an exact process, 0.14 and 0.09 here, 0.13 and 0.06 in the end). The
    output scale becomes no larger: nothing that is left asks for that. Arguments are those of
    :func:`scale_bound`; hyperparameters in float64.
    """
    kernel, likelihood = hyper.covar_module, hyper.likelihood
    if not isinstance(likelihood, GaussianLikelihood) or rank == 0:
        return
    scaled = isinstance(kernel, ScaleKernel) and kernel.raw_outputscale.requires_grad
    noisy = likelihood.raw_noise.requires_grad
    if not (scaled or noisy):
        return
    with torch.no_grad():
        bound = scale_bound(hyper, data, span, rank, total)
        noise = likelihood.noise.detach().squeeze(-1)
        first = kernel.outputscale.detach() if isinstance(kernel, ScaleKernel) else noise
    log_scale = torch.zeros_like(first, requires_grad=scaled)
    log_noise = torch.zeros_like(noise, requires_grad=noisy)
    outputs = data.targets.shape[-2]

    def objective() -> Tensor:
        values = log_scale.clamp_max(0.0).exp(), noise * log_noise.exp()
        # ... x m: hyperparameters have no m where that is 1
        return bound(*(v.unsqueeze(-1) if outputs == 1 else v for v in values)).sum()

    maximise(objective, [t for t in (log_scale, log_noise) if t.requires_grad], _ITERATIONS)
    with torch.no_grad():
        near = [(t.isfinite() & (t.abs() < _FARTHEST)).all() for t in (log_scale, log_noise)]
        if scaled and bool(near[0]):
            kernel.outputscale = first * log_scale.clamp_max(0.0).exp()
        if noisy and bool(near[1]):
            set_noise(likelihood, (noise * log_noise.exp()).unsqueeze(-1))


@torch.no_grad()
def set_noise(likelihood: GaussianLikelihood, noise: Tensor) -> None:
    """Set a noise variance, shaped as the likelihood's, strictly inside its bounds; in place."""
    constraint = likelihood.noise_covar.raw_noise_constraint
    low, high = constraint.lower_bound.to(noise), constraint.upper_bound.to(noise)
    likelihood.noise = torch.minimum(torch.maximum(noise, 1.001 * low + 1e-9), 0.999 * high)


_PAIRS = 1000
"""Inputs whose distances are looked at."""


def input_scale(X: Tensor) -> Tensor:
    """Compute the standard deviation of each input, ``d``; 1 where it does not vary."""
    flat = X.reshape(-1, X.shape[-1])
    if len(flat) < 2:
        return X.new_ones(X.shape[-1])
    scale = flat.std(0)
    return torch.where(scale > 0.0, scale, torch.ones_like(scale))


LEAST_FIRST_NOISE, _SMALL = 1e-4, 10.0
"""Least noise variance that is guessed; variance of outcomes, over it, below which there is a
warning."""


@torch.no_grad()
def guess(
    kernel: ScaleKernel | None,
    mean: Mean | None,
    likelihood: Likelihood | None,
    X: Tensor,
    Y: Tensor,
    real: bool,
) -> None:
    """Set hyperparameters by the first observations; None: not to be set. [Cheng2017, C.2].

    Lengthscales become the median distance, in standard deviations of each input, where the paper
    has one unit for all; output scale and noise become the outcomes' variance.

    Args:
        kernel: Of a kernel with a lengthscale for each input.
        mean: Its prior mean.
        likelihood: Of the outcomes.
        X: First inputs, ``... x n x d``.
        Y: Their outcomes, ``... x n x m``.
        real: Whether the likelihood is Gaussian; else outcomes say little of the process's scale.
    """
    if X.shape[-2] < 2:
        return
    if kernel is not None:
        scale, base = input_scale(X), kernel.base_kernel
        median = torch.pdist((X / scale).reshape(-1, X.shape[-1])[:_PAIRS]).median()
        if float(median) > 0.0:
            base.lengthscale = (median * scale).expand_as(base.lengthscale).to(base.lengthscale)
        if real:
            kernel.outputscale = _of_outputs(Y.var(-2), kernel.outputscale).clamp_min(1e-6)
    if isinstance(likelihood, GaussianLikelihood):
        level, variance = likelihood.noise.squeeze(-1), Y.var(-2)
        small = variance[(variance > 0.0) & (variance < _SMALL * LEAST_FIRST_NOISE)]
        if len(small) > 0:
            warn_of_small_outcomes(float(small.min()), LEAST_FIRST_NOISE, variance.shape[-1])
        likelihood.noise = _of_outputs(variance, level).clamp_min(LEAST_FIRST_NOISE).unsqueeze(-1)
    if isinstance(mean, ConstantMean) and real:
        mean.constant = _of_outputs(Y.mean(-2), mean.constant)


def _of_outputs(value: Tensor, like: Tensor) -> Tensor:
    """Shape ``batch_shape x m`` as a hyperparameter has it: without m if that is 1."""
    value = value.squeeze(-1) if value.shape[-1] == 1 else value
    return value.expand_as(like).to(like)
