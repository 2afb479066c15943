"""Posterior functions, for Thompson sampling and for entropies of the optimum.

Pathwise conditioning (Matheron's rule): for jointly normal (f, u), ``f(·) + cov(f(·), u)
cov(u, u)⁻¹ (u' − u)`` has the law of f given that u has the law of u'. [Wilson2020, eq. 11 and 13]
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import partial, singledispatch
from typing import Any

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError, UnsupportedError
from botorch.models.deterministic import DeterministicModel
from botorch.sampling.pathwise.paths import SamplePath
from botorch.sampling.pathwise.posterior_samplers import DrawMatheronPaths
from botorch.sampling.pathwise.prior_samplers import draw_kernel_feature_paths
from botorch.sampling.pathwise.update_strategies import gaussian_update
from gpytorch.kernels import Kernel
from torch import Size, Tensor

from bo_stream.acquisition.feature_nipv import in_weight_space, weight_space
from bo_stream.bases.grid.interpolation import GridBasis
from bo_stream.bases.inducing import (
    Basis,
    FunctionBasis,
    InducingBasis,
    InducingFunctions,
    kernel_variance,
)
from bo_stream.bases.spectral import FourierFunctions, KernelFunctions, RandomDraws, draw_prior
from bo_stream.errors import check_seed, check_whole
from bo_stream.linalg import (
    by_columns,
    row_product,
    solve_columns,
    solve_columns_transposed,
    stack_rows,
)
from bo_stream.models.base import StreamingGP, keeps_tensors
from bo_stream.models.checks import check_inputs, check_instance
from bo_stream.models.clustered.solver import ClusteredProcess, cross_matrix
from bo_stream.models.decoupled.posterior import KernelExpansion, ShiftedProcess
from bo_stream.models.local import LocalProcess
from bo_stream.models.quadruply_stochastic.function_process import FunctionProcess
from bo_stream.observation_space import (
    ObservationSpaceProcess,
    drawn_mean,
)
from bo_stream.process import (
    ConditionedProcess,
    Points,
    PosteriorProcess,
    SelectedProcess,
    WeightSpaceProcess,
)
from bo_stream.tensors import broadcast_shapes, map_tensors


def sample_paths(
    model: StreamingGP,
    n: int,
    seed: int | None = None,
    at: Tensor | None = None,
    spread: Tensor | None = None,
) -> SamplePaths:
    """Draw n functions from the posterior, each of them one function of all inputs.

    Continuous, and differentiable where the kernel's own sample paths are. On a grid (``WISKI``)
    ``f(x) = prior mean + z(x)ᵀ w`` with w drawn from the weight posterior, without further
    approximation: cost O(n r²), then O(q r) a function at q points. With inducing points, centres
    or a decoupled basis a function of the prior is drawn in random frequencies of its own, 1,024
    of them, and moved to the posterior by Matheron's rule (Wilson et al., 2020): over many
    draws the mean and the covariance are the posterior's, while one draw is normal only in so far
    as 1,024 cosines are. Cost O(n M²), then O(q (M + 1024) d).

    With N inputs ``at`` there are no frequencies, and any kernel will do. The values v there, and
    at the rows of an exact model (``AutoGP``), are one joint draw from the posterior, and each
    function is the posterior mean given its own v (Rasmussen and Williams, 2006, eq. 2.19): normal
    everywhere, of the posterior's law at these points but for 1e-8 of their variances, and of less
    variance the farther from them. First derivatives only. Cost O((M + N)³ + n (M + N)²) of an
    exact model of M rows, O(N³ + N² M + n N²) of M inducing points, then O(q (M + N) d) a function
    where the kernel is an RBF or a Matérn one; else q covariances with all points. Functions that
    are sums of known ones (of ``WISKI``, ``BayesianLastLayer``, ``QSGP`` in Fourier features) are
    exact everywhere: ``at`` changes nothing there but that they can be evaluated at these inputs.

    Args:
        model: Any, ``LocalGP`` only with ``at``: its functions jump where its mean does. It may be
            conditioned on hypothetical observations. Kernels beyond a grid without ``at``: RBF,
            Matérn, rational quadratic, periodic and constant ones, their sums, products and
            multiples.
        n: Number of functions.
        seed: Seed of a generator of its own; torch's global one if omitted.
        at: Inputs, ``N x d`` or ``batch_shape x N x d``, N > 0, in the user's units, of the model's
            dtype and device, such as the candidates of a search.
        spread: For each function the factor of its deviation from the posterior mean, ``n``: 0 is
            the mean, 1 (default) a draw.

    Returns:
        A deterministic model of batch shape ``n x model.batch_shape``, in the outcomes' units, that
        later changes of the model leave as it is. Under a likelihood that is not Gaussian they are
        functions of the latent process, as ``model.posterior`` is. Their values at the inputs are
        ``paths(at)``.

    Raises:
        BotorchTensorDimensionError: ``at`` has another shape, or no rows.
        InputDataError: ``at`` has a wrong dtype or device, is not finite, or is out of reach of
            the model's grid.
        ValueError: n is less than one, the seed is not from 0 to 2**63 - 1, or ``spread`` is not n
            finite numbers.
        UnsupportedError: The model is none of this package's; or, without ``at``, it is a
            ``LocalGP``, or its kernel's spectral measure is not known.

    Example:
        >>> paths = sample_paths(model, n=16, seed=0)
        >>> X, values = optimize_posterior_samples(paths, bounds)
        >>> X, value = optimize_acqf(PosteriorMean(paths.path(0)), bounds, q=1, num_restarts=4)
        >>> best = candidates[sample_paths(model, n=16, at=candidates)(candidates).argmax(-2)]
    """
    check_instance("model", model, StreamingGP, "AutoGP(X, Y)")
    n = check_whole("n", n)
    seed = None if seed is None else check_seed(seed)
    is_fit = isinstance(spread, Tensor) and spread.shape == (n,) and bool(spread.isfinite().all())
    if not (spread is None or is_fit):
        raise ValueError(f"Expected spread to be a tensor of {n} finite numbers, got {spread}.")
    return _draw(model, Size([n]), seed, at, spread)


@keeps_tensors
def mean_path(model: StreamingGP) -> SamplePaths:
    """Return the posterior mean as one function: on a grid O(r) a point instead of O(r²).

    A deterministic model of the model's batch shape. Undoing an outcome transform that is not
    affine makes it the posterior median.

    Raises:
        UnsupportedError: The model is none of this package's.
    """
    check_instance("model", model, StreamingGP, "AutoGP(X, Y)")
    process = model.process()
    if in_weight_space(process):
        process = _folded(model)
    return SamplePaths(model, _mean_terms(process), _shape_of(process))


def _mean_terms(process: PosteriorProcess) -> _Terms:
    """Return the posterior mean in terms."""
    terms: _Terms = (PathTerm(process.mean),)
    if isinstance(process, WeightSpaceProcess) and not process.basis.has_residual:
        features = PathTerm(partial(_features, process.basis), (process.weights.mean,))
        terms = PathTerm(partial(_value, process.prior_mean)), features
    elif isinstance(process, ObservationSpaceProcess):
        rule, drawn = process.prior.weighted(process.images, process.representer_weights)
        terms = (PathTerm(rule, (drawn,)),)
    return terms


@keeps_tensors
@torch.no_grad()
def _draw(
    model: StreamingGP,
    sample_shape: Size,
    seed: int | None,
    at: Tensor | None = None,
    spread: Tensor | None = None,
) -> SamplePaths:
    process, inputs = (_folded(model), None) if at is None else _posterior_at(model, at)
    device = model.train_targets.device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    shape = Size((*sample_shape, *_shape_of(process)))
    draws = RandomDraws(shape, device, generator)
    spread = None if spread is None else spread.to(device, torch.float64)
    if inputs is None:
        terms = _draw_terms(process, draws)
        if spread is not None:
            factor = spread.reshape(-1, *[1] * len(shape))
            terms = (PathTerm(partial(_deviating, _mean_terms(process)), (factor, *terms)),)
        return SamplePaths(model, terms, shape)
    rule, drawn = drawn_mean(process, inputs, replace(draws, spread=spread))
    return SamplePaths(model, (PathTerm(rule, (drawn,)),), shape)


def _posterior_at(model: StreamingGP, at: Tensor) -> tuple[PosteriorProcess, Tensor | None]:
    """Return the posterior and transformed inputs, or None where its functions are exact anywhere.

    Raises:
        BotorchTensorDimensionError: Inputs have a wrong shape, or no rows.
        InputDataError: They are not of the model's dtype and device, not finite or out of reach.
    """
    check_inputs(at, model.input_dim, model.train_targets, finite=True, name="at")
    batch, ahead = model.batch_shape, at.shape[:-2]
    pairs = zip(reversed(ahead), reversed(batch), strict=False)
    fits = len(ahead) <= len(batch) and all(a in (1, b) for a, b in pairs)
    if not fits or at.shape[-2] == 0:
        raise BotorchTensorDimensionError(
            f"Expected at of shape `N x {model.input_dim}` with N > 0, its leading dimensions none "
            f"or those of the model, {tuple(batch)}, got {tuple(at.shape)}."
        )
    try:
        inputs = model.process_inputs(at)
        process = model.process(inputs)
        base = process
        while isinstance(base, ConditionedProcess | SelectedProcess | ShiftedProcess):
            base = base.base
        if isinstance(base, FunctionProcess):
            exact = base.noise is None or not isinstance(base.basis, KernelFunctions)
        else:
            exact = in_weight_space(base)
        if exact:
            return _folded(model, inputs), None
        if isinstance(base, ObservationSpaceProcess) and base is not process:
            inputs = stack_rows(base.told.X, inputs)
        return process, inputs
    except InputDataError as error:
        raise InputDataError(f"Of the inputs at: {error}") from error


def _folded(model: StreamingGP, inputs: Tensor | None = None) -> PosteriorProcess:
    """Return the posterior, on a grid with hypothetical observations folded into its weights."""
    process = model.feature_process(inputs)
    return weight_space(process) if in_weight_space(process) else process


class SamplePaths(DeterministicModel):
    """Functions drawn from a posterior, as a model without uncertainty.

    The batch shape is the draws', then the model's: inputs ``q x d`` are evaluated by every
    function, inputs ``n x q x d`` each by its own. Made by :func:`sample_paths`.
    """

    def __init__(self, model: StreamingGP, terms: _Terms, shape: Size) -> None:
        """Keep terms of functions of shape ``sample_shape x batch_shape x m``, and the transforms.

        The terms of a function add up to it, in transformed units.
        """
        super().__init__()
        modules = [model._modules.get(n) for n in ("input_transform", "stem", "outcome_transform")]
        copies: list[Any] = [None if each is None else deepcopy(each).eval() for each in modules]
        self._transforms = [each for each in copies[:2] if each is not None], copies[2]
        self._terms, self._shape = terms, shape
        self._input_dim = model.input_dim
        self._outputs = list(range(shape[-1]))

    @property
    def num_outputs(self) -> int:
        """Number m of outputs."""
        return len(self._outputs)

    @property
    def batch_shape(self) -> Size:
        """Shape of the draws, then of the model."""
        return self._shape[:-1]

    def forward(self, X: Tensor) -> Tensor:
        """Evaluate the functions in the outcomes' units, ``... x q x d -> ... x q x m``.

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
        values = _sum_of(self._terms, inputs.double()).mT
        if outcome_transform is not None:
            values, _ = outcome_transform.untransform(values)
        return values[..., self._outputs].to(X.dtype)

    def path(self, i: int | slice) -> SamplePaths:
        """Return the i-th function alone, of the model's own batch shape; or a slice of all."""
        some = copy(self)
        some._terms = map_tensors(self._terms, lambda drawn: drawn[i])
        some._shape = torch.empty(self._shape, device="meta")[i].shape
        return some

    def subset_output(self, idcs: list[int]) -> SamplePaths:
        """Return some outputs of the functions."""
        some = copy(self)
        some._outputs = [self._outputs[i] for i in idcs]
        return some


class _AsMatheronPath(SamplePath):
    """Drawn functions by the conventions of BoTorch's pathwise sampling."""

    def __init__(self, paths: SamplePaths) -> None:
        super().__init__()
        self.paths = paths

    def forward(self, X: Tensor) -> Tensor:
        """Evaluate one output, ``... x q x d -> ... x q``, or m > 1 outputs, ``... x m x q``.

        Raises:
            BotorchTensorDimensionError: Each of m > 1 outputs has inputs of its own, instead of
                ``q x d`` or ``... x 1 x q x d``.
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
        """Do nothing: no model here is an ensemble."""


@DrawMatheronPaths.register(StreamingGP)  # type: ignore[untyped-decorator]
def _draw_matheron_paths(
    model: StreamingGP,
    *,
    sample_shape: Size,
    prior_sampler: Any = draw_kernel_feature_paths,
    update_strategy: Any = gaussian_update,
) -> SamplePath:
    """Draw functions for ``get_matheron_path_model``: Thompson sampling and entropy search.

    Raises:
        UnsupportedError: Another sampler or update than BoTorch's defaults.
    """
    if prior_sampler is not draw_kernel_feature_paths or update_strategy is not gaussian_update:
        raise UnsupportedError(
            f"Expected draw_matheron_paths without prior_sampler and update_strategy, for a "
            f"{type(model).__name__} draws its functions in its own way."
        )
    return _AsMatheronPath(_draw(model, sample_shape, None))


# --- functions of processes ----------------------------------------------------------------------


@dataclass(frozen=True)
class PathTerm:
    """A function of each draw, batch element and output, in transformed units.

    Attributes:
        function: Takes ``drawn``, then inputs; a function or method of a module, to be pickled.
        drawn: Tensors of leading dimensions ``sample_shape x batch_shape x m``, or objects of such.
    """

    function: Callable[..., Tensor]
    drawn: tuple[Tensor | FourierFunctions | PathTerm, ...] = ()

    def __call__(self, X: Tensor) -> Tensor:
        """Evaluate at transformed inputs, float64, ``... x n x d -> ... x m x n``."""
        return self.function(*self.drawn, X)


_Terms = tuple[PathTerm, ...]


def _sum_of(terms: Sequence[PathTerm], X: Tensor) -> Tensor:
    """Evaluate the sum of some functions, ``... x m x n``."""
    total: Any = sum(torch.broadcast_tensors(*(term(X) for term in terms)))
    return total


def _shape_of(process: Any) -> Size:
    """Return the ``batch_shape x m`` of a process."""
    if isinstance(process, ConditionedProcess):
        return broadcast_shapes(_shape_of(process.base), process.whitened_innovation.shape[:-2])
    if isinstance(process, SelectedProcess):
        return Size((*_shape_of(process.base)[:-1], len(process.outputs)))
    if isinstance(process, ShiftedProcess):
        return _shape_of(process.base)
    shape: Size = process.prior_mean.shape[:-1]
    if isinstance(process, WeightSpaceProcess):  # hypothetical observations are in its weights
        return broadcast_shapes(shape, process.weights.mean.shape[:-2])
    return shape


@singledispatch
def _draw_terms(process: PosteriorProcess, draws: RandomDraws) -> _Terms:
    """Draw functions from a process; their values are the sums of the terms.

    Args:
        process: What ``model.process`` returned.
        draws: Random numbers, whose shape ends in the process's own ``batch_shape x m``.

    Raises:
        UnsupportedError: The process or its kernel has no functions in closed form.
    """
    if isinstance(process, LocalProcess):
        raise UnsupportedError(
            "LocalGP has no functions to draw, for its nearest models change abruptly from place "
            "to place: name the points that matter, as at=X, draw values at points by "
            "model.posterior(X).rsample(), or take OSGPR, ClusteredGP or WISKI."
        )
    raise UnsupportedError(
        f"Functions cannot be drawn from a {type(process).__name__}: draw values at points by "
        "model.posterior(X).rsample()."
    )


@_draw_terms.register
def _(process: WeightSpaceProcess, draws: RandomDraws) -> _Terms:
    """Draw weights from their posterior, and the basis's residual from its prior."""
    mean, root = process.weights.mean, process.weights.root
    weights = mean + row_product(root, draws.normal(root.shape[-1], 1))
    constant = PathTerm(partial(_value, process.prior_mean))
    return constant, *_of_weights(process.basis, weights, draws)


@_draw_terms.register
def _(process: ObservationSpaceProcess, draws: RandomDraws) -> _Terms:
    """Draw in the weights of the process's features."""
    return _draw_terms(process.in_weights, draws)


@_draw_terms.register
def _(process: ClusteredProcess, draws: RandomDraws) -> _Terms:
    """``g(x) + k(x, Z) (K + Λ)⁻¹ (u − g(Z) − ε)``, by square roots of precisions."""
    prior = draw_prior(process.kernel, process.Z.shape[-1], process.outputs, draws)
    terms = PathTerm(partial(_value, process.prior_mean)), PathTerm(operator.call, (prior,))
    if len(process.Z) == 0:
        return terms
    noisy = process.root.mT * prior(process.Z.double()).unsqueeze(-1)
    noisy = noisy + draws.normal(len(process.Z), 1)
    batch = process.solution.ndim - 2
    drawn = by_columns(process.solver.solve, noisy.to(process.solution), batch)
    weights = process.root.mT * (process.solution - drawn)
    weighted = partial(_weighted_kernels, process.kernel, process.Z, process.outputs)
    return *terms, PathTerm(weighted, (weights,))


@_draw_terms.register
def _(process: ShiftedProcess, draws: RandomDraws) -> _Terms:
    """Draw from the base, and add the shift."""
    return *_draw_terms(process.base, draws), PathTerm(process.shift.__call__)


@_draw_terms.register
def _(process: FunctionProcess, draws: RandomDraws) -> _Terms:
    """Draw weights from their posterior, and the augmentation's part from its prior."""
    moments = process.weights
    weights = moments.mean + moments.scale * draws.normal(moments.mean.shape[-1])
    columns = row_product(moments.rows.double(), draws.normal(moments.rows.shape[-1], 1))
    weighted = partial(_weighted_functions, process)
    terms = (
        PathTerm(partial(_value, process.prior_mean)),
        PathTerm(weighted, (weights.double() + columns.squeeze(-1),)),
    )
    basis = process.basis
    if process.noise is None or not isinstance(basis, KernelFunctions):
        return terms
    prior = draw_prior(basis.kernel, basis.Z.shape[-1], basis.outputs, draws)
    return *terms, PathTerm(partial(_augmented, process), (prior,))


@_draw_terms.register
def _(process: ConditionedProcess, draws: RandomDraws) -> _Terms:
    """``f(x) + cov(x, X) C⁻¹ (Y − f(X) − ε)`` with f a function of the base, ``C = F Fᵀ``."""
    base, points, factor = process.base, process.points, process.factor
    terms = _draw_terms(base, draws)
    own = _noise_in(factor, base.variance_at(points))
    values = _sum_of(terms, points.X.double()) - base.mean_at(points)
    values = (values + own.sqrt() * draws.normal(factor.shape[-1])).unsqueeze(-1)
    missing = process.whitened_innovation - solve_columns(factor, values)
    update = partial(_update, base, points)
    return *terms, PathTerm(update, (solve_columns_transposed(factor, missing),))


@_draw_terms.register
def _(process: SelectedProcess, draws: RandomDraws) -> _Terms:
    """Draw functions of all outputs of the base, and keep some of them."""
    shape = Size((*draws.shape[:-1], _shape_of(process.base)[-1]))
    terms = _draw_terms(process.base, replace(draws, shape=shape))
    return (PathTerm(partial(_selected, list(process.outputs)), terms),)


@singledispatch
def _of_weights(basis: Basis, weights: Tensor, draws: RandomDraws) -> _Terms:
    """Return ``z(x)ᵀ w`` with weights ``... x m x r x 1``, and a draw of the residual."""
    if not basis.has_residual:
        return (PathTerm(partial(_features, basis), (weights,)),)
    raise UnsupportedError(
        f"Functions cannot be drawn in a {type(basis).__name__}: draw values at points by "
        "model.posterior(X).rsample()."
    )


@_of_weights.register
def _(basis: InducingBasis, weights: Tensor, draws: RandomDraws) -> _Terms:
    """``g(x) + k(x, Z) L⁻ᵀ (w − L⁻¹ (g(Z) + e))`` with g from the prior, e the jitter's noise."""
    prior = draw_prior(basis.kernel, basis.Z.shape[-1], basis.outputs, draws)
    term = PathTerm(operator.call, (prior,))
    if basis.rank == 0:
        return (term,)
    own = _noise_in(basis.root, kernel_variance(basis.kernel, basis.Z, basis.outputs))
    values = prior(basis.Z) + own.sqrt() * draws.normal(basis.rank)
    missing = weights - solve_columns(basis.root, values.unsqueeze(-1))
    a = solve_columns_transposed(basis.root, missing)
    weighted = partial(_weighted_kernels, basis.kernel, basis.Z, basis.outputs)
    return term, PathTerm(weighted, (a,))


@_of_weights.register
def _(basis: FunctionBasis, weights: Tensor, draws: RandomDraws) -> _Terms:
    """Matheron's rule for functions β, combinations of them, and noisy ones."""
    kernel, outputs = basis.kernel, basis.outputs
    prior = draw_prior(kernel, basis.functions.points.shape[-1], outputs, draws)
    term = PathTerm(operator.call, (prior,))
    if basis.rank == 0:
        return (term,)
    values = prior.of(basis.functions, kernel, outputs).unsqueeze(-1)
    covariance = basis.functions.with_functions(kernel, basis.functions, outputs)
    if basis.combination is not None:
        values = row_product(basis.combination.mT, values)
        covariance = basis.combination.mT @ covariance @ basis.combination
    own = _noise_in(basis.factor, covariance.diagonal(dim1=-2, dim2=-1))
    values = values + (own.sqrt() * draws.normal(basis.rank)).unsqueeze(-1)
    a = solve_columns_transposed(basis.factor, weights - solve_columns(basis.factor, values))
    a = a if basis.combination is None else row_product(basis.combination, a)
    expansion = partial(_expansion, kernel, basis.functions)
    return term, PathTerm(expansion, (a.squeeze(-1),))


def _value(value: Tensor, X: Tensor) -> Tensor:
    """Return a prior mean, ``... x m x 1``, equal for every draw."""
    return value


def _features(basis: Basis, weights: Tensor, X: Tensor) -> Tensor:
    """Evaluate ``z(x)ᵀ w`` with w ``... x m x r x 1``. Cost O(n r) besides the features."""
    if isinstance(basis, GridBasis) and not basis.grid.contains(X):
        raise InputDataError(
            "X lies outside the box of the model's grid at the time these functions were drawn, "
            f"{basis.grid.bounds.tolist()} in transformed inputs. Build the model with wider "
            "bounds."
        )
    return row_product(basis.features(X), weights).squeeze(-1)


def _weighted_kernels(
    kernel: Kernel, Z: Tensor, outputs: int, weights: Tensor, X: Tensor
) -> Tensor:
    """Evaluate ``Σ_i a_i k(x, z_i)`` with a ``... x m x M x 1``, M > 0. Cost O(n M d)."""
    cross = cross_matrix(kernel, X.to(Z), Z, outputs)
    return row_product(cross, weights.to(cross)).squeeze(-1).double()


def _expansion(kernel: Kernel, functions: InducingFunctions, weights: Tensor, X: Tensor) -> Tensor:
    """Evaluate ``Σ_i a_i cov(x, i)`` with linear functionals i, a ``... x m x M``."""
    return KernelExpansion(kernel, functions, weights)(X)


def _update(process: PosteriorProcess, points: Points, weights: Tensor, X: Tensor) -> Tensor:
    """Evaluate ``Σ_i a_i cov(f(x), f(x_i))`` of a process, a ``... x m x q x 1``."""
    cross = process.cross_covariance(process.at(X), points)
    return row_product(cross, weights).squeeze(-1)


def _weighted_functions(process: FunctionProcess, weights: Tensor, X: Tensor) -> Tensor:
    """Evaluate ``φ(x)ᵀ w`` of very many functions φ, w ``... x m x p``. Cost O(n p)."""
    return process.weighted(process.at(X), weights)


def _augmented(process: FunctionProcess, functions: FourierFunctions, X: Tensor) -> Tensor:
    """Evaluate ``a(x) f(x)`` with f from the prior and a the augmentation's factor. Cost O(n p)."""
    return process.augmentation_factor(process.at(X)) * functions(X)


def _selected(outputs: list[int], *terms_and_inputs: Any) -> Tensor:
    """Evaluate some outputs of a sum of functions."""
    *terms, X = terms_and_inputs
    return _sum_of(terms, X)[..., outputs, :]


def _deviating(mean: _Terms, spread: Tensor, *terms_and_inputs: Any) -> Tensor:
    """Evaluate the sum of some functions, its deviation from the mean multiplied by a factor."""
    *terms, X = terms_and_inputs
    centre = _sum_of(mean, X)
    return centre + spread * (_sum_of(terms, X) - centre)


def _noise_in(factor: Tensor, variance: Tensor) -> Tensor:
    """Return the diagonal of ``F Fᵀ`` beyond a variance: noise and jitter, ``... x m x n``."""
    return (factor.square().sum(-1) - variance).clamp_min(0.0)
