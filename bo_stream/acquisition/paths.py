"""Posterior functions, for Thompson sampling and for entropies of the optimum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, UnsupportedError
from botorch.models.deterministic import DeterministicModel
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.sampling.pathwise.paths import SamplePath
from botorch.sampling.pathwise.posterior_samplers import DrawMatheronPaths
from botorch.sampling.pathwise.prior_samplers import draw_kernel_feature_paths
from botorch.sampling.pathwise.update_strategies import gaussian_update
from torch import Size, Tensor
from torch.nn import ModuleList
from torch.nn.functional import embedding_bag

from bo_stream.acquisition.feature_nipv import CHUNK_NUMBERS
from bo_stream.acquisition.path_terms import Constant, Features, Mean, sum_of
from bo_stream.acquisition.process_paths import Terms, draw_terms, shape_of
from bo_stream.acquisition.weight_space import anywhere, feature_process, weight_space
from bo_stream.allocation.allocator import checked_number
from bo_stream.bases.basis import Basis
from bo_stream.bases.grid.gram import CellGram, outer_product, ravel
from bo_stream.bases.grid.interpolation import GridBasis, InterpolationBasis
from bo_stream.bases.grid.mesh import PAIR_DEGREES, STENCIL, Grid, legendre
from bo_stream.bases.grid.mesh import weights as cubic_weights
from bo_stream.bases.grid.statistics import KroneckerPullBack
from bo_stream.bases.spectral import RandomDraws
from bo_stream.models.base import StreamingGP
from bo_stream.models.checks import check_inputs
from bo_stream.models.wiski.observation_space import ObservationSpaceProcess
from bo_stream.process.process import ConditionedProcess, PosteriorProcess, WeightSpaceProcess

KEPT_NUMBERS = 32_000_000
"""Up to this many interpolation weights are kept; beyond it they are computed at each use."""


class Sites(ABC):
    """N inputs of one basis with r features z and m outputs."""

    basis: Basis

    @abstractmethod
    def linear(self, weights: Tensor) -> Tensor:
        """``z(x)ᵀ w`` of k functions at all sites, ``m x r x k -> m x k x N``."""

    @abstractmethod
    def quadratic(self, matrices: Tensor) -> Tensor:
        """``z(x)ᵀ M z(x)`` of k symmetric forms at all sites, ``k x m x r x r -> k x m x N``."""

    @abstractmethod
    def feature(self, site: int) -> Tensor:
        """Features of one site, ``m x r x 1``."""


def sites(basis: Basis, X: Tensor) -> Sites:
    """The sites ``N x d``, in transformed inputs."""
    if isinstance(basis, InterpolationBasis):
        return _GridSites.of(basis, X)
    return _DenseSites(basis, X)


@dataclass(frozen=True)
class _DenseSites(Sites):
    """Of any basis: the features are computed at each use, in chunks.

    Cost O(N r) a function, O(N r²) a form.
    """

    basis: Basis
    X: Tensor

    def _chunks(self) -> Iterator[Tensor]:
        size = max(1, CHUNK_NUMBERS // self.basis.rank)
        return (self.basis.features(X) for X in self.X.split(size))

    def linear(self, weights: Tensor) -> Tensor:
        return torch.cat([weights.mT @ features.mT for features in self._chunks()], -1)

    def quadratic(self, matrices: Tensor) -> Tensor:
        return torch.cat([((z @ matrices) * z).sum(-1) for z in self._chunks()], -1)

    def feature(self, site: int) -> Tensor:
        return self.basis.features(self.X[site : site + 1]).mT


@dataclass(frozen=True)
class _Located:
    """Sites of one chunk on the grid.

    Attributes:
        nodes: Flat indices of the nodes around each site, ``N x 4^d``.
        weights: Their interpolation weights, ``N x 4^d``.
    """

    nodes: Tensor
    weights: Tensor

    @classmethod
    def of(cls, grid: Grid, X: Tensor) -> _Located:
        cell, t = grid.locate(X)
        corner = torch.cartesian_prod(*[torch.arange(STENCIL, device=X.device)] * grid.dim)
        nodes = cell.unsqueeze(-2) + corner.reshape(-1, grid.dim)
        return cls(ravel(nodes, grid.size), outer_product(cubic_weights(t)))

    def interpolate(self, values: Tensor) -> Tensor:
        """Node values to site values, ``m x k x p -> m x k x N``."""
        table = values.flatten(0, -2).mT.contiguous()
        bags = embedding_bag(self.nodes, table, per_sample_weights=self.weights, mode="sum")
        return bags.mT.unflatten(0, values.shape[:-1])


@dataclass(frozen=True)
class _GridSites(Sites):
    """Of an interpolation basis, without its N x r features.

    A function of the basis is interpolated from its node values, and a quadratic form is a
    polynomial in each cell. Cost O(4^d N + p Σ r_i) a function of p nodes, O(7^d N + (7 g)^d g²) a
    form.

    Attributes:
        basis: The basis.
        X: ``N x d``.
        located: Interpolation weights, or None where they would be too many to keep.
    """

    basis: InterpolationBasis
    X: Tensor
    located: tuple[_Located, ...] | None

    @classmethod
    def of(cls, basis: InterpolationBasis, X: Tensor) -> _GridSites:
        keep = X.shape[0] * STENCIL**basis.grid.dim <= KEPT_NUMBERS
        return cls(basis, X, tuple(_locate(basis.grid, X)) if keep else None)

    def linear(self, weights: Tensor) -> Tensor:
        values = node_values(self.basis, weights)
        located = _locate(self.basis.grid, self.X) if self.located is None else self.located
        return torch.cat([chunk.interpolate(values) for chunk in located], -1)

    def quadratic(self, matrices: Tensor) -> Tensor:
        coefficients = cell_polynomials(self.basis, matrices)
        size = max(1, CHUNK_NUMBERS // coefficients.shape[-1])
        return torch.cat([self._evaluate(coefficients, X) for X in self.X.split(size)], -1)

    def _evaluate(self, coefficients: Tensor, X: Tensor) -> Tensor:
        cell, t = self.basis.grid.locate(X)
        chosen = coefficients[..., ravel(cell, self.basis.grid.cells), :]
        return (chosen * outer_product(legendre(t))).sum(-1)

    def feature(self, site: int) -> Tensor:
        return self.basis.features(self.X[site : site + 1]).mT


def _locate(grid: Grid, X: Tensor) -> Iterator[_Located]:
    size = max(1, CHUNK_NUMBERS // STENCIL**grid.dim)
    return (_Located.of(grid, chunk) for chunk in X.split(size))


def node_values(basis: InterpolationBasis, weights: Tensor) -> Tensor:
    """Values of k functions at the grid's nodes, ``m x r x k -> m x k x p``. Cost O(k p Σ r_i)."""
    roots = basis.roots
    sizes = [root.shape[-1] for root in roots]
    scaled = weights * basis.scale.sqrt()[..., None, None]
    tensor = weights.new_zeros(*weights.mT.shape[:-1], *sizes).flatten(-len(sizes))
    tensor[..., ravel(basis.index, sizes)] = scaled.mT
    for root in roots:
        tensor = (tensor.unflatten(-1, (root.shape[-1], -1)).mT @ root.mT.unsqueeze(-3)).flatten(-2)
    return tensor


def cell_polynomials(basis: InterpolationBasis, matrices: Tensor) -> Tensor:
    """Legendre coefficients of k forms ``z(x)ᵀ M z(x)`` in each cell, ``k x m x cells x 7^d``.

    The form at x is ``⟨M, Rᵀ g(x) R⟩`` with g(x) the gram of one observation at x, linear in its
    moments: the coefficients are the adjoint of the pull-back, which differentiation gives.

    Args:
        basis: The basis.
        matrices: The symmetric M, ``k x m x r x r``.
    """
    grid, batch = basis.grid, basis.scale.shape
    zeros = matrices.new_zeros(*batch, grid.num_cells, PAIR_DEGREES**grid.dim)
    with torch.enable_grad():
        moments = zeros.requires_grad_()
        gram = KroneckerPullBack(basis, grid).congruence(CellGram(moments, grid.cells))
        adjoints = [
            torch.autograd.grad(gram, moments, matrix, retain_graph=True)[0] for matrix in matrices
        ]
    return torch.stack(adjoints)


def sample_paths(model: StreamingGP, n: int, seed: int | None = None) -> SamplePaths:
    """Draw n functions from the posterior, each of them one function of all inputs.

    Continuous, and differentiable where the kernel's own sample paths are. On a grid (``WISKI``)
    ``f(x) = prior mean + z(x)ᵀ w`` with w drawn from the weight posterior, without further
    approximation: cost O(n r²), then O(q r) a function at q points. With inducing points, centres
    or a decoupled basis a function of the prior is drawn in random frequencies of its own, 1,024
    of them, and moved to the posterior by Matheron's rule (Wilson et al., 2020): over many
    draws the mean and the covariance are the posterior's, while one draw is normal only in so far
    as 1,024 cosines are. Cost O(n M²), then O(q (M + 1024) d).

    Args:
        model: Any but ``LocalGP``; it may be conditioned on hypothetical observations. Kernels
            beyond a grid: RBF, Matérn, rational quadratic, periodic and constant ones, their sums,
            products and multiples.
        n: Number of functions.
        seed: Of a generator of its own; torch's global one if omitted.

    Returns:
        A deterministic model of batch shape ``n x model.batch_shape``, in the outcomes' units, that
        later changes of the model leave as it is. Under a likelihood that is not Gaussian they are
        functions of the latent process, as ``model.posterior`` is.

    Raises:
        ValueError: n is less than one.
        UnsupportedError: A ``LocalGP``, or a kernel whose spectral measure is not known.

    Example:
        >>> paths = sample_paths(model, n=16, seed=0)
        >>> X, values = optimize_posterior_samples(paths, bounds)
        >>> X, value = optimize_acqf(PosteriorMean(paths.path(0)), bounds, q=1, num_restarts=4)
    """
    return _draw(model, Size([checked_number("n", n)]), seed)


def mean_path(model: StreamingGP) -> SamplePaths:
    """Take the posterior mean as such a function: on a grid O(r) a point instead of O(r²).

    Undoing an outcome transform that is not affine makes it the posterior median.

    Args:
        model: Any.

    Returns:
        A deterministic model of the model's batch shape.
    """
    process = _folded(model)
    if not isinstance(process, WeightSpaceProcess) or not isinstance(process.basis, GridBasis):
        return _paths(model, (Mean(process),), shape_of(process))
    terms = Constant(process.prior_mean), Features(process.basis, process.weights.mean)
    return _paths(model, terms, shape_of(process))


@torch.no_grad()
def _draw(model: StreamingGP, sample_shape: Size, seed: int | None) -> SamplePaths:
    process, device = _folded(model), model.train_targets.device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    shape = Size((*sample_shape, *shape_of(process)))
    terms = draw_terms(process, RandomDraws(shape, device, generator))
    return _paths(model, terms, shape)


def _folded(model: StreamingGP) -> PosteriorProcess:
    """The posterior; on a grid with what it supposes folded into its weights."""
    process = base = feature_process(model)
    while isinstance(base, ConditionedProcess):
        base = base.base
    in_features = isinstance(base, WeightSpaceProcess) and isinstance(base.basis, GridBasis)
    if in_features or isinstance(base, ObservationSpaceProcess):
        return weight_space(process, anywhere(model))
    return process


def _paths(model: StreamingGP, terms: Terms, shape: Size) -> SamplePaths:
    return SamplePaths(
        terms,
        shape,
        ModuleList(_frozen(model, "input_transform", "stem")),
        next(iter(_frozen(model, "outcome_transform")), None),
        model._input_dim,
    )


def _frozen(model: StreamingGP, *names: str) -> list[Any]:
    """Copies of those modules that a model has, which learn nothing more."""
    modules = (model._modules.get(name) for name in names)
    return [deepcopy(module).eval() for module in modules if module is not None]


class SamplePaths(DeterministicModel):
    """Functions drawn from a posterior, as a model without uncertainty.

    The batch shape is that of the draws, then the model's: inputs ``q x d`` are evaluated by every
    function, inputs ``n x q x d`` each by its own. Made by :func:`sample_paths`.
    """

    def __init__(
        self,
        terms: Terms,
        shape: Size,
        input_transforms: ModuleList,
        outcome_transform: OutcomeTransform | None,
        input_dim: int,
        outputs: list[int] | None = None,
    ) -> None:
        """Keep what makes up the functions.

        Args:
            terms: Parts of each function, in transformed units, that add up to it.
            shape: ``sample_shape x batch_shape x m``.
            input_transforms: Applied to inputs, one after the other.
            outcome_transform: Undone on values.
            input_dim: Width d of the inputs.
            outputs: Those to keep; all m if omitted.
        """
        super().__init__()
        self._terms = terms
        self._shape = shape
        self._transforms = (input_transforms, outcome_transform)
        self._input_dim = input_dim
        self._outputs = list(range(shape[-1])) if outputs is None else outputs

    @property
    def num_outputs(self) -> int:
        """Number m of outputs."""
        return len(self._outputs)

    @property
    def batch_shape(self) -> Size:
        """Shape of the draws, then of the model."""
        return self._shape[:-1]

    def forward(self, X: Tensor) -> Tensor:
        """Values in the outcomes' units, ``... x q x d -> ... x q x m``.

        The leading dimensions broadcast with the batch shape.

        Raises:
            BotorchTensorDimensionError: X has the wrong width.
            InputDataError: X lies outside the model's grid.
        """
        check_inputs(X, self._input_dim, X)
        input_transforms, outcome_transform = self._transforms
        inputs = X
        for transform in input_transforms:
            inputs = transform(inputs)
        values = sum_of(self._terms, inputs.double()).mT
        if outcome_transform is not None:
            values, _ = outcome_transform.untransform(values)
        return values[..., self._outputs].to(X.dtype)

    def path(self, i: int | slice) -> SamplePaths:
        """The i-th function alone, with the model's own batch shape; or a slice of all."""
        terms = tuple(term.map(lambda drawn: drawn[i]) for term in self._terms)
        shape = torch.empty(self._shape, device="meta")[i].shape
        return SamplePaths(terms, shape, *self._transforms, self._input_dim, self._outputs)

    def subset_output(self, idcs: list[int]) -> SamplePaths:
        """The same functions, some of their outputs."""
        outputs = [self._outputs[i] for i in idcs]
        return SamplePaths(self._terms, self._shape, *self._transforms, self._input_dim, outputs)


class _AsMatheronPath(SamplePath):
    """The same functions by the conventions of BoTorch's pathwise sampling."""

    def __init__(self, paths: SamplePaths) -> None:
        super().__init__()
        self.paths = paths

    def forward(self, X: Tensor) -> Tensor:
        """``... x q x d -> ... x q``; for m > 1 outputs ``q x d`` or ``... x 1 x q x d``.

        Values of m > 1 outputs are ``... x m x q``.

        Raises:
            BotorchTensorDimensionError: Each of m > 1 outputs has inputs of its own.
        """
        if self.paths.num_outputs == 1:
            return self.paths(X).squeeze(-1)
        if X.ndim > 2 and X.shape[-3] != 1:
            raise BotorchTensorDimensionError(
                f"Expected X of shape `... x 1 x q x d` for {self.paths.num_outputs} outputs, got "
                f"{tuple(X.shape)}: pass X.unsqueeze(-3)."
            )
        return self.paths(X if X.ndim == 2 else X.squeeze(-3)).mT

    def set_ensemble_as_batch(self, ensemble_as_batch: bool) -> None:
        """Nothing to do: no model here is an ensemble."""


@DrawMatheronPaths.register(StreamingGP)  # type: ignore[untyped-decorator]
def _draw_matheron_paths(
    model: StreamingGP,
    *,
    sample_shape: Size,
    prior_sampler: Any = draw_kernel_feature_paths,
    update_strategy: Any = gaussian_update,
) -> SamplePath:
    """For ``get_matheron_path_model``, hence for Thompson sampling and entropy search.

    Raises:
        UnsupportedError: Another sampler or update than BoTorch's defaults.
    """
    if prior_sampler is not draw_kernel_feature_paths or update_strategy is not gaussian_update:
        raise UnsupportedError(
            f"Expected draw_matheron_paths without prior_sampler and update_strategy, for a "
            f"{type(model).__name__} draws its functions in its own way."
        )
    return _AsMatheronPath(_draw(model, sample_shape, None))
