"""Exact posterior functions, for Thompson sampling and for entropies of the optimum."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from botorch.models.deterministic import DeterministicModel
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.sampling.pathwise.paths import SamplePath
from botorch.sampling.pathwise.posterior_samplers import DrawMatheronPaths
from torch import Size, Tensor

from bo_stream.acquisition.weight_space import anywhere, check_inside, weight_space
from bo_stream.linalg import row_product
from bo_stream.models.streaming_gp import StreamingGP
from bo_stream.models.validation import check_inputs
from bo_stream.process import WeightSpaceProcess


def sample_paths(model: StreamingGP, n: int, seed: int | None = None) -> SamplePaths:
    """Draw n functions from the posterior, each of them exact everywhere at once.

    ``f(x) = prior mean + z(x)ᵀ w`` with w drawn from the weight posterior: no random Fourier
    features, no grid of test points. Cost O(n r²), then O(q r) a function at q points.

    Args:
        model: A model whose basis leaves no residual, such as ``WISKI``; it may suppose data.
        n: Number of functions.
        seed: Of a generator of its own; torch's global one if omitted.

    Returns:
        A deterministic model of batch shape ``n x model.batch_shape``, in the outcomes' units, that
        later changes of the model leave as it is.

    Raises:
        ValueError: n is less than one.
        UnsupportedError: The basis leaves a residual.

    Example:
        >>> paths = sample_paths(model, n=16, seed=0)
        >>> X, values = optimize_posterior_samples(paths, bounds)
        >>> X, value = optimize_acqf(PosteriorMean(paths.path(0)), bounds, q=1, num_restarts=4)
    """
    if n < 1:
        raise ValueError(f"Expected n of at least 1, got {n}.")
    return _draw(model, Size([n]), seed)


def mean_path(model: StreamingGP) -> SamplePaths:
    """The posterior mean as such a function: O(r) a point, where a posterior costs O(r²).

    Undoing an outcome transform that is not affine makes it the posterior median.

    Args:
        model: As for :func:`sample_paths`.

    Returns:
        A deterministic model of the model's batch shape.

    Raises:
        UnsupportedError: The basis leaves a residual.
    """
    space = _weight_space(model)
    return _paths(model, space, space.weights.mean)


def _draw(model: StreamingGP, sample_shape: Size, seed: int | None) -> SamplePaths:
    space = _weight_space(model)
    mean, root = space.weights.mean, space.weights.root
    generator = None if seed is None else torch.Generator(mean.device).manual_seed(seed)
    shape = (*sample_shape, *mean.shape)
    noise = torch.randn(shape, generator=generator, dtype=mean.dtype, device=mean.device)
    return _paths(model, space, mean + torch.einsum("...rs,...sk->...rk", root, noise))


def _weight_space(model: StreamingGP) -> WeightSpaceProcess:
    return weight_space(model.process(), anywhere(model))


def _paths(model: StreamingGP, space: WeightSpaceProcess, weights: Tensor) -> SamplePaths:
    return SamplePaths(
        space,
        weights.detach(),
        _frozen(model._modules.get("input_transform")),
        _frozen(model._modules.get("outcome_transform")),
        model._input_dim,
    )


def _frozen(transform: Any) -> Any:
    return None if transform is None else deepcopy(transform).eval()


class SamplePaths(DeterministicModel):
    """Functions drawn from a posterior, as a model without uncertainty.

    The batch shape is that of the draws, then the model's: inputs ``q x d`` are evaluated by every
    function, inputs ``n x q x d`` each by its own. Made by :func:`sample_paths`.
    """

    def __init__(
        self,
        space: WeightSpaceProcess,
        weights: Tensor,
        input_transform: InputTransform | None,
        outcome_transform: OutcomeTransform | None,
        input_dim: int,
        outputs: list[int] | None = None,
    ) -> None:
        """Keep what makes up the functions.

        Args:
            space: The basis and the prior mean.
            weights: ``sample_shape x ... x m x r x 1``.
            input_transform: Applied to inputs.
            outcome_transform: Undone on values.
            input_dim: Width d of the inputs.
            outputs: Those to keep; all m if omitted.
        """
        super().__init__()
        self._space = space
        self._weights = weights
        self._transforms = (input_transform, outcome_transform)
        self._input_dim = input_dim
        self._outputs = list(range(weights.shape[-3])) if outputs is None else outputs

    @property
    def num_outputs(self) -> int:
        """Number m of outputs."""
        return len(self._outputs)

    @property
    def batch_shape(self) -> Size:
        """Shape of the draws, then of the model."""
        return self._weights.shape[:-3]

    def forward(self, X: Tensor) -> Tensor:
        """Values in the outcomes' units, ``... x q x d -> ... x q x m``.

        The leading dimensions broadcast with the batch shape.

        Raises:
            BotorchTensorDimensionError: X has the wrong width.
            InputDataError: X lies outside the model's grid.
        """
        check_inputs(X, self._input_dim, X)
        input_transform, outcome_transform = self._transforms
        inputs = X if input_transform is None else input_transform(X)
        values = self._latent(inputs.double())
        if outcome_transform is not None:
            values, _ = outcome_transform.untransform(values)
        return values[..., self._outputs].to(X.dtype)

    def _latent(self, X: Tensor) -> Tensor:
        """Values in transformed units, ``... x q x m``."""
        check_inside(self._space.basis, X)
        values = row_product(self._space.features(X), self._weights).squeeze(-1)
        return (self._space.prior_mean + values).mT

    def path(self, i: int | slice) -> SamplePaths:
        """The i-th function alone, with the model's own batch shape; or a slice of all."""
        return self._with(self._weights[i], self._outputs)

    def subset_output(self, idcs: list[int]) -> SamplePaths:
        """The same functions, some of their outputs."""
        return self._with(self._weights, [self._outputs[i] for i in idcs])

    def _with(self, weights: Tensor, outputs: list[int]) -> SamplePaths:
        return SamplePaths(self._space, weights, *self._transforms, self._input_dim, outputs)


class _AsMatheronPath(SamplePath):
    """The same functions by the conventions of BoTorch's pathwise sampling."""

    def __init__(self, paths: SamplePaths) -> None:
        super().__init__()
        self.paths = paths

    def forward(self, X: Tensor) -> Tensor:
        """``... x q x d -> ... x q``; for m > 1 outputs ``... x 1 x q x d -> ... x m x q``."""
        if self.paths.num_outputs == 1:
            return self.paths(X).squeeze(-1)
        return self.paths(X.squeeze(-3)).mT

    def set_ensemble_as_batch(self, ensemble_as_batch: bool) -> None:
        """Nothing to do: no model here is an ensemble."""


@DrawMatheronPaths.register(StreamingGP)  # type: ignore[untyped-decorator]
def _draw_matheron_paths(model: StreamingGP, *, sample_shape: Size, **_: Any) -> SamplePath:
    """For ``get_matheron_path_model``, hence for Thompson sampling and entropy search."""
    return _AsMatheronPath(_draw(model, sample_shape, None))
