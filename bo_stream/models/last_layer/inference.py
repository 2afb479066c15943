"""The memory of a Bayesian last layer, and the posterior from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, UnsupportedError
from gpytorch.kernels import Kernel
from torch import Tensor
from torch.nn import Linear, Module, Sequential, Tanh

from bo_stream.bases.inducing import Basis, frozen, in_dtype
from bo_stream.models.checks import check_instance
from bo_stream.models.inference import Inference, Prior, SolvedWeights
from bo_stream.models.memory import (
    HoldsStatistics,
    Observations,
    WhitenedMemory,
    check_remainder,
    never_in,
)
from bo_stream.process import PosteriorProcess, WeightSpaceProcess
from bo_stream.tensors import is_same
from bo_stream.warnings import MOST_RESIDUAL, warn_of_few_features
from bo_stream.weights import (
    InformationForm,
    MatrixMap,
    log_marginal_likelihood,
    solve,
    weighted_statistics,
)

WIDTH = 64
"""Features, and hidden units, of the default network."""

START = 2.0
"""Output scale to begin with: the features of the default network have squares of about a half."""

_PROBES = 4
_SEED = 0
_SAME = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Largest difference, relative to the features, that counts as rounding."""


def layer_features(network: Module, X: Tensor) -> Tensor:
    """Compute ``φ(x) = [network(x), 1]``, ``... x n x d -> ... x n x r``, float64."""
    values: Tensor = network(X.flatten(0, -2)).to(torch.float64)
    values = values.unflatten(0, X.shape[:-1])
    return torch.cat((values, torch.ones_like(values[..., :1])), -1)


class NetworkKernel(Kernel):
    """Kernel ``φ(x)ᵀ φ(x') / r`` of a network's features and the constant 1.

    The network is in evaluation mode always: what it says of an input depends on no other.
    """

    def __init__(self, network: Module) -> None:
        super().__init__()
        self.network = network.eval()

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all but the network."""
        super().train(mode)
        self.network.eval()
        return self

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        """Evaluate the kernel."""
        own, others = (layer_features(self.network, x).to(x) for x in (x1, x2))
        rank = own.shape[-1]
        return (own * others).sum(-1) / rank if diag else own @ others.mT / rank


@dataclass(frozen=True)
class LayerBasis(Basis):
    """Whitened features ``z(x) = s φ(x)``, which carry the whole prior.

    Attributes:
        network: Frozen.
        scale: s, prior standard deviation of the weights of φ, ``batch_shape x m``.
        size: Number r of features.
    """

    network: Module
    scale: Tensor
    size: int

    @property
    def rank(self) -> int:
        """Number r of features, the constant among them."""
        return self.size

    def features(self, X: Tensor) -> Tensor:
        """Compute ``s φ(x)``, ``... x n x d -> ... x m x n x r``."""
        return layer_features(self.network, X).unsqueeze(-3) * self.scale[..., None, None]


def default_network(dim: int, width: int = WIDTH) -> Sequential:
    """Make a perceptron of two hidden tanh layers of ``width`` units, the same at each call.

    The first layer's units change sign inside the unit cube; the second layer's variances are
    those of Glorot and Bengio (2010).
    """
    generator = torch.Generator().manual_seed(_SEED)
    layers = [torch.nn.utils.skip_init(Linear, n, width, dtype=torch.float64) for n in (dim, width)]
    with torch.no_grad():
        first, second = layers
        first.weight.normal_(0.0, 2.0 / dim**0.5, generator=generator)
        centres = torch.rand(width, dim, generator=generator, dtype=torch.float64)
        first.bias.copy_(-(first.weight * centres).sum(-1))
        second.weight.normal_(0.0, width**-0.5, generator=generator)
        second.bias.zero_()
    return Sequential(first, Tanh(), second, Tanh())


@torch.no_grad()
def check_network(network: Module, inputs: Tensor) -> int:
    """Count the features of a network, if it maps each input to features of its own.

    It is moved to the dtype and device of the first inputs, ``... x n x d``, and into evaluation
    mode. The constant feature is counted, too.
    """
    check_instance("network", network, Module, "torch.nn.Sequential(torch.nn.Linear(d, 64), ...)")
    dim, generator = inputs.shape[-1], torch.Generator().manual_seed(_SEED)
    inside = torch.rand(2 * _PROBES, dim, generator=generator).to(inputs)
    X = torch.cat((inputs.detach().reshape(-1, dim)[:_PROBES], inside))[: 2 * _PROBES]
    values = _values(network.to(inputs).eval(), X)
    if not bool(values.isfinite().all()):
        raise UnsupportedError(
            f"Expected network to return finite features, got NaN or infinity at {X.tolist()}."
        )
    one_by_one = torch.cat([_values(network, x) for x in X.split(1)])
    most = _SAME.get(X.dtype, 1e-2) * (1.0 + float(values.abs().max()))
    if not torch.allclose(one_by_one, values, rtol=0.0, atol=most):
        raise UnsupportedError(
            "Expected network to map each input to features of its own, got features that are "
            "random or depend on the other inputs of a batch, in evaluation mode. Take "
            "normalisations with running statistics, and Dropout as a module."
        )
    return values.shape[-1] + 1


def _values(network: Module, X: Tensor) -> Tensor:
    """Compute features at inputs, and check their shape."""
    try:
        values = network(X)
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        raise BotorchTensorDimensionError(
            f"Expected network to map inputs `n x {X.shape[-1]}` to features `n x r`, got an error "
            f"at inputs of shape {tuple(X.shape)}: {error}"
        ) from error
    fits = isinstance(values, Tensor) and values.ndim == 2 and values.is_floating_point()
    if not fits or len(values) != len(X) or values.shape[-1] == 0:
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise BotorchTensorDimensionError(
            f"Expected network to map inputs of shape {tuple(X.shape)} to features of shape "
            f"`{len(X)} x r`, got {got}."
        )
    return values


# --- the memory of a Bayesian last layer, and the posterior from it ------------------------------


RIDGE = 1e-6
"""Weight of the identity where rows say how features changed, in parts of the features' squares."""

_NOTHING = 1e-9
"""Part of an observation that counts as none."""


@dataclass(frozen=True)
class LastLayerMemory(HoldsStatistics):
    """Statistics of all observations in features φ, and the latest observations as rows.

    Attributes:
        network: φ when the statistics were last expressed, frozen, but for the constant.
        statistics: Of all observations, in φ itself: prior variances of weights are not in them.
        rows: The latest ones, at most ``window``.
        weight: How many times each of these counts, ``n``.
        window: Number of rows to hold.
    """

    network: Module
    statistics: WhitenedMemory
    rows: Observations
    weight: Tensor
    window: int

    @classmethod
    def empty(
        cls, network: Module, X: Tensor, batch: torch.Size, rank: int, window: int
    ) -> LastLayerMemory:
        """Begin without observations, of inputs like X and outputs ``batch_shape x m``."""
        rows = Observations.none(X, batch)
        none, shared = rows.targets, rows.targets[..., :1, :]
        features = none.new_zeros(*shared.shape, rank)
        statistics = WhitenedMemory(weighted_statistics(features, none, shared, shared))
        return cls(frozen(network), statistics, rows, none.new_zeros(0), window)

    @property
    def rank(self) -> int:
        """Number r of features, the constant among them."""
        return self.statistics.learned.gram.shape[-1]

    def features(self, X: Tensor) -> Tensor:
        """Compute φ, ``batch x n x d -> batch x 1 x n x r``."""
        return layer_features(self.network, X).unsqueeze(-3)

    def after(self, data: Observations, features: Tensor) -> LastLayerMemory:
        """Add or take out a batch of these features, if it is in memory. Cost O(n r²).

        Raises:
            InputDataError: The rest would be of no observations, or more are to be taken out that
                are not among the rows than were not kept.
        """
        statistics = self.statistics.observed(features, data)
        if data.sign > 0.0:
            one = self.weight.new_ones(len(data))
            return self.joined(statistics, (self.rows, self.weight), (data, one))
        check_remainder(statistics, self.statistics)
        weight, missing = self.weight.clone(), 0
        for i in range(len(data)):  # each observation takes one from its like, the latest first
            like = weight * self.rows.like(data.rows(slice(i, i + 1)), weight > _NOTHING)
            missing += not bool(like.any())
            later = like.flip(0).cumsum(0).flip(0) - like
            weight -= like.minimum((1.0 - later).clamp_min(0.0))
        if bool((self.counts - self.weight.sum() < missing - 0.5).any()):
            raise never_in()
        held = torch.nonzero(weight > _NOTHING).flatten()
        return replace(self, statistics=statistics, rows=self.rows.rows(held), weight=weight[held])

    def joined(
        self,
        statistics: WhitenedMemory,
        former: tuple[Observations, Tensor],
        later: tuple[Observations, Tensor],
    ) -> Self:
        """Hold the last rows of two batches with the weights of these, as many as may be."""
        left = max(0, self.window - len(later[0]))
        first = slice(max(0, len(former[0]) - left), None)
        last = slice(max(0, len(later[0]) - self.window), None)
        rows = Observations.joined([former[0].rows(first), later[0].rows(last)])
        weight = torch.cat((former[1][first], later[1][last]))
        return replace(self, statistics=statistics, rows=rows, weight=weight)

    def at(self, network: Module) -> LastLayerMemory:
        """Express the memory in another state of the network; see :class:`Carried`."""
        mine, theirs = ((*n.parameters(), *n.buffers()) for n in (network, self.network))
        pairs = zip(mine, theirs, strict=True)
        if is_same(tuple(a.detach().to(b.dtype) for a, b in pairs), theirs):
            return self
        moved = frozen(network)
        features = layer_features(moved, self.rows.X).unsqueeze(-3)
        return replace(self, network=moved, statistics=self.carried().into(features))

    @torch.no_grad()
    def carried(self) -> Carried:
        """Prepare the statistics for a change of features. Cost O(w r² + r³) for w rows."""
        others, former = self.statistics.scale(0.0), None
        counts, held = self.counts, float(self.weight.sum())
        if bool((counts - held > _NOTHING * (1.0 + counts)).any()):
            features = self.features(self.rows.X)
            rows = _observed(others, features, self.rows, self.weight)
            others, former = self.statistics + rows.scale(-1.0), _regressed(features)
        return Carried(self.rows, self.weight, others, former)

    def scale(self, factor: float) -> LastLayerMemory:
        """Let every observation count ``factor`` times."""
        statistics = self.statistics.scale(factor)
        return replace(self, statistics=statistics, weight=self.weight * factor)

    def to(self, device: torch.device) -> LastLayerMemory:
        """Move the memory to another device."""
        moved = super().to(device)
        return replace(moved, network=frozen(self.network).to(device))


@dataclass(frozen=True)
class Carried:
    """A memory as it goes over to other features ψ of the same number.

    Rows that are stored have their features ψ(x): exact. Of the others there are sums of φ only.
    They count as if theirs were ``A φ(x)``, with A the regression of ψ on φ over the rows, from
    which it departs to the identity in directions that rows say nothing of. Counts, sums and
    squares of outcomes stay exact. Differentiable in ψ.

    Attributes:
        rows: Those stored, w.
        weight: How many times each counts, ``w``.
        others: Statistics of the other observations in φ.
        former: Φ, φ at the rows, and ``Φ (Φᵀ Φ + ε I)⁻¹``, ``batch x 1 x w x r`` each; None without
            other observations.
    """

    rows: Observations
    weight: Tensor
    others: WhitenedMemory
    former: tuple[Tensor, Tensor] | None

    def into(self, features: Tensor) -> WhitenedMemory:
        """Return all statistics in ψ, ``batch x 1 x w x r`` at the rows. Cost O(w r² + r³)."""
        start = self.others
        if self.former is not None:
            before, regression = self.former
            change = (features - before).mT @ regression
            A = change + torch.eye(change.shape[-1], dtype=change.dtype, device=change.device)
            T = MatrixMap(A.mT)
            start = start.map(lambda s: s.pull_back(T))
        return _observed(start, features, self.rows, self.weight)

    def only(self, index: Tensor, share: float = 1.0) -> Carried:
        """Drop all rows but those at ``k`` indices, and all but a share of the others' weight."""
        former = None if self.former is None else _regressed(self.former[0][..., index, :])
        return Carried(self.rows.rows(index), self.weight[index], self.others.scale(share), former)


def _regressed(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return Φ and ``Φ (Φᵀ Φ + ε I)⁻¹``, ``... x w x r`` each."""
    gram = features.mT @ features
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    ridge = RIDGE * diagonal.mean(-1, keepdim=True).clamp_min(1.0)
    factor = torch.linalg.cholesky(gram + torch.diag_embed(ridge.expand_as(diagonal)))
    return features, torch.cholesky_solve(features.mT, factor).mT


def _observed(
    memory: WhitenedMemory, features: Tensor, rows: Observations, weight: Tensor
) -> WhitenedMemory:
    """Add rows that count some times each."""
    if len(rows) == 0:
        return memory
    return memory.observed_by(lambda y, D, w: weighted_statistics(features, y, D, w * weight), rows)


# --- exact Bayesian linear regression on a network's features ------------------------------------


Cached = SolvedWeights | None


FEW_FEATURES = "few features"


@dataclass(frozen=True)
class LastLayerInference(Inference[LastLayerMemory, SolvedWeights]):
    """Weights of the features φ have the prior N(0, s² I); given the network all is conjugate."""

    defers_reads: ClassVar[bool] = True
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
            memory, scale = memory.at(network_of(prior)), weight_scale(prior, memory.rank)
            basis = LayerBasis(memory.network, scale, memory.rank)
            evidence = prior.evidence(whitened(memory.statistics, scale))
            weights = solve(evidence)
            _warn_of_few_features(evidence, weights.mean, prior)
            process = WeightSpaceProcess(basis, weights, prior.mean.unsqueeze(-1).clone())
            cache = SolvedWeights(prior.state(), process)
        return cache.process, cache

    def objective(
        self, memory: LastLayerMemory, cache: Cached, prior: Prior
    ) -> tuple[Tensor, Cached]:
        """Return :meth:`log_marginal_likelihood`; UnsupportedError: see :func:`check_unshared`."""
        check_unshared(prior)
        return self.log_marginal_likelihood(memory, cache, prior)

    def log_marginal_likelihood(
        self, memory: LastLayerMemory, cache: Cached, prior: Prior
    ) -> tuple[Tensor, Cached]:
        """Return the log marginal likelihood of all observations; see :class:`Carried`.

        Cost O(r³) while the network is not learned, else O(w r² + r³) for w rows, and the network.
        """
        network = network_of(prior)
        if is_learned(network):
            carried = memory.carried()
            features = features_now(network, carried.rows.X)
            return likelihood_from(carried.into(features), prior), cache
        return likelihood_from(memory.at(network).statistics, prior), cache

    def merged(
        self, memory: LastLayerMemory, cache: Cached, other: LastLayerMemory, prior: Prior
    ) -> tuple[LastLayerMemory, Cached]:
        """Add the statistics, both in the features of this model's network as it is now."""
        mine, theirs = (each.at(network_of(prior)) for each in (memory, other))
        statistics = mine.statistics + theirs.statistics
        former, later = ((each.rows, each.weight) for each in (theirs, mine))
        return mine.joined(statistics, former, later), None

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


def is_learned(network: Module) -> bool:
    """Say whether a fit would move the network."""
    return any(parameter.requires_grad for parameter in network.parameters())


def check_unshared(prior: Prior) -> None:
    """Check that a fit learns the network from the data of one batch element.

    Raises:
        UnsupportedError: It would learn the network of several from the data of all.
    """
    if prior.batch_shape.numel() > 1 and is_learned(network_of(prior)):
        raise UnsupportedError(
            "Expected a model without batch_shape to learn its network, got batch_shape "
            f"{tuple(prior.batch_shape)}: batch elements share the network, which would be learned "
            "from the data of all, so that folds of a cross-validation would know the outcomes "
            "held out of them. Build one model per batch element or fold, or freeze the network by "
            "requires_grad_(False): fit_gpytorch_mll then learns the rest of each element apart."
        )


def weight_scale(prior: Prior, rank: int) -> Tensor:
    """Return the prior standard deviation s of the weights of φ, ``batch_shape x m``."""
    kernel: Any = prior.kernel
    return (prior.per_output(kernel.outputscale) / rank).sqrt()


def whitened(memory: WhitenedMemory, scale: Tensor) -> WhitenedMemory:
    """Return statistics of φ as those of ``s φ``."""
    root = scale[..., None, None]
    return memory.map(lambda s: replace(s, gram=s.gram * root.square(), moment=s.moment * root))


def features_now(network: Module, X: Tensor) -> Tensor:
    """Compute φ, ``batch x n x d -> batch x 1 x n x r``, differentiable in the network."""
    return in_dtype(network, X.dtype, lambda own: layer_features(own, X)).unsqueeze(-3)


def likelihood_from(statistics: WhitenedMemory, prior: Prior) -> Tensor:
    """Return the log marginal likelihood from statistics of φ, ``batch_shape x m``. Cost O(r³)."""
    scale = weight_scale(prior, statistics.learned.gram.shape[-1])
    evidence = prior.evidence(whitened(statistics, scale))
    weights = solve(evidence)
    return log_marginal_likelihood(evidence, weights.mean, weights.log_precision())
