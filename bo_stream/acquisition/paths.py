"""Posterior functions, for Thompson sampling and for entropies of the optimum."""

from __future__ import annotations

from copy import deepcopy
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

from bo_stream.acquisition.process_paths import PathTerm, draw_terms, mean_terms, shape_of, sum_of
from bo_stream.acquisition.weight_space import (
    anywhere,
    in_weight_space,
    weight_space,
)
from bo_stream.allocation.allocator import checked_number
from bo_stream.bases.spectral import RandomDraws
from bo_stream.models.base import StreamingGP
from bo_stream.models.checks import check_inputs
from bo_stream.process.process import PosteriorProcess


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
        seed: Seed of a generator of its own; torch's global one if omitted.

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
    """Return the posterior mean as one function: on a grid O(r) a point instead of O(r²).

    Undoing an outcome transform that is not affine makes it the posterior median.

    Args:
        model: Any.

    Returns:
        A deterministic model of the model's batch shape.
    """
    process = _folded(model)
    return _paths(model, mean_terms(process), shape_of(process))


@torch.no_grad()
def _draw(model: StreamingGP, sample_shape: Size, seed: int | None) -> SamplePaths:
    process, device = _folded(model), model.train_targets.device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    shape = Size((*sample_shape, *shape_of(process)))
    return _paths(model, draw_terms(process, RandomDraws(shape, device, generator)), shape)


def _folded(model: StreamingGP) -> PosteriorProcess:
    """Return the posterior, on a grid with hypothetical observations folded into its weights."""
    process, X = model.feature_process(), anywhere(model)
    return weight_space(process, X) if in_weight_space(process, X) else process


def _paths(model: StreamingGP, terms: tuple[PathTerm, ...], shape: Size) -> SamplePaths:
    return SamplePaths(
        terms,
        shape,
        ModuleList(_frozen(model, "input_transform", "stem")),
        next(iter(_frozen(model, "outcome_transform")), None),
        model._input_dim,
    )


def _frozen(model: StreamingGP, *names: str) -> list[Any]:
    """Copy those of some modules that a model has, to learn nothing more."""
    modules = (model._modules.get(name) for name in names)
    return [deepcopy(module).eval() for module in modules if module is not None]


class SamplePaths(DeterministicModel):
    """Functions drawn from a posterior, as a model without uncertainty.

    The batch shape is that of the draws, then the model's: inputs ``q x d`` are evaluated by every
    function, inputs ``n x q x d`` each by its own. Made by :func:`sample_paths`.
    """

    def __init__(
        self,
        terms: tuple[PathTerm, ...],
        shape: Size,
        input_transforms: ModuleList,
        outcome_transform: OutcomeTransform | None,
        input_dim: int,
        outputs: list[int] | None = None,
    ) -> None:
        """Keep the parts of the functions.

        Args:
            terms: Parts of each function, in transformed units, that add up to it.
            shape: ``sample_shape x batch_shape x m``.
            input_transforms: Applied to inputs, one after the other.
            outcome_transform: Undone on values.
            input_dim: Width d of the inputs.
            outputs: Outputs to keep; all m if omitted.
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
        values = sum_of(self._terms, inputs.double()).mT
        if outcome_transform is not None:
            values, _ = outcome_transform.untransform(values)
        return values[..., self._outputs].to(X.dtype)

    def path(self, i: int | slice) -> SamplePaths:
        """Return the i-th function alone, of the model's own batch shape; or a slice of all."""
        terms = tuple(term.map(lambda drawn: drawn[i]) for term in self._terms)
        shape = torch.empty(self._shape, device="meta")[i].shape
        return SamplePaths(terms, shape, *self._transforms, self._input_dim, self._outputs)

    def subset_output(self, idcs: list[int]) -> SamplePaths:
        """Return some outputs of the functions."""
        outputs = [self._outputs[i] for i in idcs]
        return SamplePaths(self._terms, self._shape, *self._transforms, self._input_dim, outputs)


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
