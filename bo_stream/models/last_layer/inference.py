"""Exact Bayesian linear regression on a network's features, and the steps that learn these."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module

from bo_stream.bases.inducing import in_dtype
from bo_stream.models.inference import Inference, SolvedWeights
from bo_stream.models.last_layer.memory import Carried, LastLayerMemory
from bo_stream.models.last_layer.network import LayerBasis, layer_features
from bo_stream.models.memory import Observations, WhitenedMemory
from bo_stream.models.prior import Hyperparameters, Prior
from bo_stream.models.stochastic.optimisers import ConstrainedAdam
from bo_stream.process.process import PosteriorProcess, WeightSpaceProcess
from bo_stream.sufficient_statistics import Whitened
from bo_stream.warnings import warn_of_few_features
from bo_stream.weights import InformationForm, log_marginal_likelihood, solve

Cached = SolvedWeights | None


FEW_FEATURES = "few features"

MOST_RESIDUAL = 3.0
"""Root mean square residual, in standard deviations of the known noise, that needs no warning."""


@dataclass(frozen=True)
class LastLayerInference(Inference[LastLayerMemory, SolvedWeights]):
    """Weights of the features φ have the prior N(0, s² I); given the network all is conjugate."""

    restarts: ClassVar[bool] = False

    def observe(
        self, memory: LastLayerMemory, cache: Cached, data: Observations, prior: Prior
    ) -> tuple[LastLayerMemory, Cached]:
        """Add a batch to the statistics, in the features of the network as it is now. O(n r²)."""
        memory = memory.at(network_of(prior))
        features = memory.features(data.X)
        after = memory.after(data, features)
        if cache is None:
            return after, None
        basis: Any = cache.process.basis
        if not cache.can_take(data, basis) or not prior.is_in(cache.state):
            return after, None
        z = features * basis.scale[..., None, None]
        return after, cache.after(z, *prior.standardized(data))

    def process(
        self, memory: LastLayerMemory, cache: Cached, prior: Prior, X: Tensor | None = None
    ) -> tuple[PosteriorProcess, SolvedWeights]:
        """Solve for the weights, in O(r³), unless kept."""
        if cache is None or not prior.is_in(cache.state):
            cache = SolvedWeights(prior.state(), self._solve(memory.at(network_of(prior)), prior))
        return cache.process, cache

    def _solve(self, memory: LastLayerMemory, prior: Prior) -> WeightSpaceProcess:
        scale = weight_scale(prior, memory.rank)
        basis = LayerBasis(memory.network, scale, memory.rank)
        evidence = prior.evidence(whitened(memory.statistics, scale))
        weights = solve(evidence)
        _warn_of_few_features(evidence, weights.mean, prior)
        return WeightSpaceProcess(basis, weights, prior.mean.unsqueeze(-1).clone())

    def objective(
        self, memory: LastLayerMemory, cache: Cached, prior: Prior
    ) -> tuple[Tensor, Cached]:
        """Return the log marginal likelihood of all observations; see :class:`Carried`.

        Cost O(r³) while the network is not learned, else O(w r² + r³) for w rows, and the network.
        """
        network = network_of(prior)
        if any(parameter.requires_grad for parameter in network.parameters()):
            return likelihood_of(memory.carried(), prior), cache
        return likelihood_from(memory.at(network).statistics, prior), cache

    def merged(
        self, memory: LastLayerMemory, cache: Cached, other: LastLayerMemory, prior: Prior
    ) -> tuple[LastLayerMemory, Cached]:
        """Add the statistics, both in the features of this model's network as it is now."""
        network = network_of(prior)
        return memory.at(network).plus(other.at(network)), None

    def cleared(self, memory: LastLayerMemory, prior: Prior) -> LastLayerMemory:
        """Keep the size of the window."""
        X, rank, window = memory.rows.X, memory.rank, memory.window
        return LastLayerMemory.empty(network_of(prior), X, prior.shape, rank, window)


@torch.no_grad()
def _warn_of_few_features(evidence: InformationForm, mean: Tensor, prior: Prior) -> None:
    """Warn once where all noise is known, and residuals of the posterior mean are far above it.

    With ``(I + gram) mean = moment`` their sum of squares over the noise is ``energy − meanᵀ
    (moment + mean)``.
    """
    model = prior.model
    if prior.inferred_noise is not None or model.training or model.has_said(FEW_FEATURES):
        return
    squares = evidence.energy - (mean * (evidence.moment + mean)).sum((-2, -1))
    residual = float((squares / evidence.count.clamp_min(1.0)).max().clamp_min(0.0).sqrt())
    if residual > MOST_RESIDUAL:
        model.says(FEW_FEATURES)
        warn_of_few_features(residual, mean.shape[-2])


def network_of(prior: Prior) -> Module:
    """Return the network as it is now."""
    kernel: Any = prior.kernel
    network: Module = kernel.base_kernel.network
    return network


def weight_scale(prior: Prior, rank: int) -> Tensor:
    """Return the prior standard deviation s of the weights of φ, ``batch_shape x m``."""
    kernel: Any = prior.kernel
    return (prior.per_output(kernel.outputscale) / rank).sqrt()


def whitened(memory: WhitenedMemory, scale: Tensor) -> WhitenedMemory:
    """Return statistics of φ as those of ``s φ``."""
    root = scale[..., None, None]

    def rule(statistics: Whitened) -> Whitened:
        gram, moment = statistics.gram * root.square(), statistics.moment * root
        return replace(statistics, gram=gram, moment=moment)

    return memory.map(rule)


def likelihood_of(carried: Carried, prior: Prior) -> Tensor:
    """Return the log marginal likelihood, differentiable in the network, ``batch_shape x m``."""
    X = carried.rows.X
    features = in_dtype(network_of(prior), X.dtype, lambda network: layer_features(network, X))
    return likelihood_from(carried.into(features.unsqueeze(-3)), prior)


def likelihood_from(statistics: WhitenedMemory, prior: Prior) -> Tensor:
    """Return the log marginal likelihood from statistics of φ, ``batch_shape x m``. Cost O(r³)."""
    scale = weight_scale(prior, statistics.learned.gram.shape[-1])
    evidence = prior.evidence(whitened(statistics, scale))
    weights = solve(evidence)
    return log_marginal_likelihood(evidence, weights.mean, weights.log_precision())


class LayerSteps:
    """Steps of Adam on network and hyperparameters; what ``train`` of stochastic models takes.

    A step's estimate is the log marginal likelihood of some rows, drawn without replacement, and of
    the same share of the observations that are not held, over that share.
    """

    def __init__(
        self, memory: LastLayerMemory, prior: Prior, rate: float, batch_size: int, seed: int
    ) -> None:
        """Begin with a memory at its own network; the prior's modules are learned in place."""
        self._prior, self._carried = prior, memory.carried()
        self._hyper = Hyperparameters.shared(prior.kernel, prior.mean_module, prior.likelihood)
        self._parameters = [p for p in self._hyper.parameters() if p.requires_grad]
        self._ascent = ConstrainedAdam(self._hyper, self._parameters, rate)
        self._size = min(batch_size, len(memory.rows))
        self._generator = torch.Generator().manual_seed(seed)
        self.num_steps, self.learning_rate = 0, rate
        self.num_data = float(memory.counts.sum())

    @property
    def is_valid(self) -> bool:
        """Whether all hyperparameters are finite, and positive where they have to be."""
        return self._hyper.are_valid

    def take_step(self) -> float:
        """Take a step; returns its estimate of the log marginal likelihood."""
        rows = len(self._carried.rows)
        carried, share = self._carried, self._size / rows
        if self._size < rows:
            index = torch.randperm(rows, generator=self._generator)[: self._size]
            carried = carried.thinned(index.to(carried.weight.device))
        estimate = likelihood_of(carried, self._prior).sum() / share
        self._ascent.ascend((estimate + self._hyper.log_prior()) / self.num_data)
        self.num_steps += 1
        return float(estimate.detach())

    @torch.no_grad()
    def bound(self) -> float:
        """Compute what the steps raise, of all rows at once. Cost O(w r² + r³), and the network."""
        likelihood = likelihood_of(self._carried, self._prior).sum()
        return float(likelihood + self._hyper.log_prior())

    def keep_better(self, state: Any, bound: float) -> bool:
        """Go back to a copy where its bound was larger; say whether what was learned is kept."""
        if self.bound() < bound:
            self.restore(state)
            return False
        return True

    def learned_state(self) -> Any:
        """Copy the hyperparameters, the moments, and the number of steps."""
        values = [p.detach().clone() for p in self._parameters]
        return values, deepcopy(self._ascent.moments()), self.num_steps

    @torch.no_grad()
    def restore(self, state: Any) -> None:
        """Go back to a copy."""
        values, moments, self.num_steps = state
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)
        self._ascent = ConstrainedAdam(self._hyper, self._parameters, self.learning_rate, moments)
