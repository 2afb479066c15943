"""qNIPV in the space of features: the posterior as one Gaussian over weights, at a lower cost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.input_constructors import acqf_input_constructor
from botorch.acquisition.objective import PosteriorTransform, ScalarizedPosteriorTransform
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError, UnsupportedError
from botorch.utils.transforms import concatenate_pending_points, t_batch_mode_transform
from torch import Tensor

from bo_stream.bases.grid.contraction import MeshPullBack
from bo_stream.bases.grid.interpolation import GridBasis, integrated_gram
from bo_stream.bases.grid.statistics import accumulate, zero_statistics
from bo_stream.bases.inducing import Basis
from bo_stream.linalg import row_product, safe_cholesky, solve_lower
from bo_stream.models.base import StreamingGP
from bo_stream.models.checks import check_finite, check_type
from bo_stream.observation_space import ObservationSpaceProcess
from bo_stream.process import ConditionedProcess, PosteriorProcess, WeightSpaceProcess
from bo_stream.tensors import outside_inference_mode
from bo_stream.weights import WeightPosterior


def weight_space(process: PosteriorProcess) -> WeightSpaceProcess:
    """Fold hypothetical observations into a process's weight posterior; exact.

    Free for a model's own process, O(q r²) for each batch of q hypothetical observations.

    Raises:
        UnsupportedError: The basis has a residual, or the process is a selection of outputs.
    """
    space = explained(process)
    if space is None:
        raise UnsupportedError(
            f"Acquisition in feature space cannot use a {type(process).__name__}. Use BoTorch's "
            "own acquisition functions, such as qNegIntegratedPosteriorVariance, with this model; "
            "of conditioned outputs call subset_output first, then condition_on_observations or "
            "fantasize."
        )
    if space.basis.has_residual:
        raise UnsupportedError(
            "Acquisition in feature space needs a basis that carries its whole kernel, got "
            f"{type(space.basis).__name__}, which leaves a residual. Use BoTorch's own "
            "acquisition functions, such as qNegIntegratedPosteriorVariance, with this model."
        )
    return space


def explained(process: PosteriorProcess) -> WeightSpaceProcess | None:
    """Fold hypothetical observations into a process's weight posterior, of any basis.

    Exact for the part of the process that its features explain. None for a process without
    features. Cost as :func:`weight_space`.
    """
    if isinstance(process, ConditionedProcess):
        base = explained(process.base)
        if base is None:
            return None
        # covariance S (I − A Aᵀ) Sᵀ with A = (z S)ᵀ L⁻ᵀ; T = I − A (I + R)⁻¹ Aᵀ with
        # R Rᵀ = I − Aᵀ A is a root of I − A Aᵀ: multiply out
        root = base.weights.root
        own = isinstance(process.base, WeightSpaceProcess)
        features = process.points.prior if own else base.basis.features(process.points.X)
        whitened = solve_lower(process.factor, features @ root)
        identity = torch.eye(whitened.shape[-2]).to(whitened)
        inner = safe_cholesky(identity - whitened @ whitened.mT) + identity
        along = root @ whitened.mT
        mean = base.weights.mean + along @ process.whitened_innovation
        folded = root - along @ solve_lower(inner, whitened)
        return WeightSpaceProcess(base.basis, WeightPosterior.of(mean, folded), base.prior_mean)
    if isinstance(process, ObservationSpaceProcess):
        return explained(process.in_weights)
    return process if isinstance(process, WeightSpaceProcess) else None


def in_weight_space(process: PosteriorProcess) -> bool:
    """Tell whether :func:`weight_space` accepts a process."""
    while isinstance(process, ConditionedProcess):
        process = process.base
    if isinstance(process, WeightSpaceProcess):
        return not process.basis.has_residual
    return isinstance(process, ObservationSpaceProcess) and not process.prior.has_residual


# --- negative integrated posterior variance in feature space -------------------------------------


CHUNK_NUMBERS = 4_000_000
"""Numbers in one chunk of a function that is evaluated at many points."""

FEW_POINTS = 2048
"""Up to this many points are summed in feature space, more in the grid's cells."""


class FeatureNIPV(AcquisitionFunction):
    """Minus the mean posterior variance after observing X, at a cost without integration points.

    With features z, weight posterior root S and ``G = Σ_i weight_i z(x_i) z(x_i)ᵀ``,
    ``value = −tr(M) + tr(C⁻¹ ζ M ζᵀ)`` where ``M = Sᵀ G S``, ``ζ = z(X) S``, ``C = ζ ζᵀ + noise``.
    G is computed once; over a box it is exact. Equal to BoTorch's
    ``qNegIntegratedPosteriorVariance`` on the same model, in the squared units of the outcomes,
    also after hypothetical observations. Differentiable in X. [Seo2000; Stanton2021, section 5.4]

    Cost O(q r² + q² r) for each of b candidate sets and any measure; O(N r² + r³) once for N
    integration points, O(r³) for a box, and again whenever the model has changed.

    Example:
        >>> acquisition = FeatureNIPV(model, bounds=bounds)
        >>> X, value = optimize_acqf(acquisition, bounds, q=6, num_restarts=4, raw_samples=64)
    """

    model: StreamingGP

    def __init__(
        self,
        model: StreamingGP,
        mc_points: Tensor | None = None,
        bounds: Tensor | None = None,
        weights: Tensor | None = None,
        X_pending: Tensor | None = None,
        posterior_transform: PosteriorTransform | None = None,
    ) -> None:
        """Integrate over exactly one of ``mc_points`` and ``bounds``.

        Args:
            model: A model whose basis leaves no residual, such as ``WISKI``.
            mc_points: Points to average the variance over, ``N x d``.
            bounds: The box to average it over instead, ``2 x d``, before the input transform.
                Uniform in transformed inputs, so also before an affine one such as ``Normalize``.
            weights: Non-negative weights of ``mc_points``, ``N``; only their ratios matter.
            X_pending: Points that will be observed in any case, ``n x d``.
            posterior_transform: A ``ScalarizedPosteriorTransform``, required for several outputs:
                the variance is then of the weighted sum of outputs, as in BoTorch.

        Raises:
            BotorchTensorDimensionError: Shapes do not fit the model.
            InputDataError: Values that are not finite, negative weights, or points too far outside
                the model's bounds.
            UnsupportedError: A list of models, several outputs without ``posterior_transform``, a
                posterior transform of another kind, an outcome transform other than
                ``Standardize``, or a basis with a residual.
            ValueError: Both or none of ``mc_points`` and ``bounds``, or lower bounds not below
                upper ones.
        """
        super().__init__(model=model)
        if not isinstance(model, StreamingGP):
            raise UnsupportedError(
                f"Expected one streaming model, got a {type(model).__name__}: FeatureNIPV is about "
                "the variance of one output. Of a list of models pass one, model.models[i]; with "
                "others use BoTorch's qNegIntegratedPosteriorVariance."
            )
        if model.prior.chain.fixed:
            names = ", ".join(type(step).__name__ for step in model.prior.chain.fixed)
            raise UnsupportedError(
                f"Expected a model whose outcome_transform is Standardize or None, got {names}: "
                "the variance would depend on the observations to come. Transform Y yourself "
                "instead."
            )
        check_scalar(model, posterior_transform)
        self.posterior_transform = posterior_transform
        self.measure = _measure(model, mc_points, bounds, weights)
        self.set_X_pending(X_pending)
        self._integrate(self.measure.corners)

    @concatenate_pending_points
    @t_batch_mode_transform()  # type: ignore[arg-type]
    def forward(self, X: Tensor) -> Tensor:
        """Return minus the mean variance after each candidate set, ``b x q x d -> b``."""

        def value() -> Tensor:
            self.model.eval()
            inputs = self.model.hypothetical_inputs(X)
            corners = box_of(torch.cat((self.measure.corners, inputs.detach().flatten(0, -2))))
            if self.model.feature_process(corners) is not self._process:
                self._integrate(corners)  # the model has changed, or X needs a wider basis
            variance = self._gram.diagonal(dim1=-2, dim2=-1).sum(-1)

            # less the reduction by the observations at X
            noise = self.model.noise_at(inputs)
            rows = self._space.weights.row_product(self._space.basis.features(inputs))
            covariance = rows @ rows.mT + torch.diag_embed(noise.expand(rows.shape[:-1]))
            projected = row_product(rows, self._gram) @ rows.mT
            solved = torch.cholesky_solve(projected, safe_cholesky(covariance, is_new=True))
            variance = variance - solved.diagonal(dim1=-2, dim2=-1).sum(-1)
            factors = variance_factors(self.model, self.posterior_transform)
            return -(variance * factors).sum(-1).to(X.dtype)

        result: Tensor = self.model._read_once(value)
        return result

    def _integrate(self, corners: Tensor) -> None:
        """Store the posterior in a basis that reaches the corners, and ``Sᵀ G S`` in it."""
        self._process = self.model.feature_process(corners)
        with outside_inference_mode():
            self._space = weight_space(self._process)
            root = self._space.weights.root
            self._gram = root.mT @ self.measure.gram(self._space.basis) @ root


@acqf_input_constructor(FeatureNIPV)
def construct_inputs_feature_nipv(
    model: StreamingGP,
    bounds: list[tuple[float, float]] | None = None,
    mc_points: Tensor | None = None,
    X_pending: Tensor | None = None,
    posterior_transform: PosteriorTransform | None = None,
) -> dict[str, Any]:
    """Return the arguments of a :class:`FeatureNIPV` for BoTorch's input constructors.

    ``bounds`` hold a pair for each input, and ``mc_points`` take precedence over them.
    """
    use_box = mc_points is None and bounds is not None
    return {
        "model": model,
        "mc_points": mc_points,
        "bounds": torch.as_tensor(bounds, dtype=torch.float64).mT if use_box else None,
        "X_pending": X_pending,
        "posterior_transform": posterior_transform,
    }


@dataclass(frozen=True)
class PointMeasure:
    """Weighted points as a probability measure over transformed inputs.

    Attributes:
        points: ``N x d``.
        weights: Weights that sum to one, ``N``.
    """

    points: Tensor
    weights: Tensor

    @cached_property  # each evaluation asks, and must not look at all points
    def corners(self) -> Tensor:
        """Lower and upper corner of the points, ``2 x d``."""
        return box_of(self.points)

    def gram(self, basis: Basis) -> Tensor:
        """Compute the mean of ``z zᵀ``, ``... x m x r x r``: its trace with Σ is the mean variance.

        Cost O(N r²), and O(N 7^d + (7 g)^d g²) for many points on a grid.
        """
        if isinstance(basis, GridBasis) and self.points.shape[0] > FEW_POINTS:
            mesh = basis.grid  # the points are weighted observations of zero
            statistics = zero_statistics(mesh, torch.Size(), 1, 1, self.points.device)
            weights = self.weights.unsqueeze(0)
            ones = torch.ones_like(self.points[:, 0]).unsqueeze(0)
            zeros = torch.zeros_like(ones)
            statistics = accumulate(statistics, mesh, self.points, zeros, ones, weights)
            return MeshPullBack(basis, mesh).congruence(statistics.gram)
        size = max(1, CHUNK_NUMBERS // basis.rank)
        chunks = zip(self.points.split(size), self.weights.split(size), strict=True)
        pairs = ((basis.features(X), w.unsqueeze(-1)) for X, w in chunks)
        return torch.stack([z.mT @ (z * w) for z, w in pairs]).sum(0)


@dataclass(frozen=True)
class BoxMeasure:
    """The uniform probability measure over a box of transformed inputs.

    Attributes:
        corners: Lower and upper corner, ``2 x d``.
    """

    corners: Tensor

    def gram(self, basis: Basis) -> Tensor:
        """Compute the mean of ``z zᵀ`` exactly, dimension by dimension. Cost O(r²).

        Raises:
            UnsupportedError: The basis has no closed form.
        """
        if not isinstance(basis, GridBasis):
            raise UnsupportedError(
                f"Expected an interpolation basis for an exact integral over bounds, got "
                f"{type(basis).__name__}. Pass mc_points drawn from the box instead."
            )
        return integrated_gram(basis, self.corners)


def _measure(
    model: StreamingGP, mc_points: Tensor | None, bounds: Tensor | None, weights: Tensor | None
) -> PointMeasure | BoxMeasure:
    """Return the measure of the points, or of the box that the input transform makes of bounds."""
    if mc_points is not None and bounds is None:
        points = listed_inputs(model, "mc_points", mc_points)
        shares = checked_weights("mc_points", points, weights)
        return PointMeasure(points, shares / shares.sum())
    if bounds is None or mc_points is not None:
        given = "none" if bounds is None else "both"
        raise ValueError(f"Expected exactly one of mc_points and bounds, got {given}.")
    if weights is not None:
        raise ValueError("Expected weights only with mc_points, got weights and bounds.")
    if not model.maps_boxes:
        raise UnsupportedError(
            "Expected mc_points for a model whose stem or input_transform bends boxes: the image "
            "of a box of bounds is no box. Draw mc_points from the bounds."
        )
    corners = listed_inputs(model, "bounds", bounds)
    if corners.shape[0] != 2:
        raise BotorchTensorDimensionError(
            f"Expected bounds of shape `2 x {model.input_dim}` (lower, upper), got "
            f"{tuple(bounds.shape)}."
        )
    if not bool((bounds[0] < bounds[1]).all()):
        raise ValueError(f"Expected bounds with lower < upper, got {bounds.tolist()}.")
    return BoxMeasure(box_of(corners))


def checked_weights(name: str, points: Tensor, weights: Tensor | None) -> Tensor:
    """Return weights of ``N x d`` points as they are given, ``N``, or ones.

    Raises:
        BotorchTensorDimensionError: Another number of weights than of points.
        InputDataError: Weights that are not finite, negative, or all zero.
    """
    count = points.shape[0]
    if weights is None:
        return points.new_ones(count)
    if weights.shape != (count,):
        raise BotorchTensorDimensionError(
            f"Expected weights of shape `{count}`, one for each of {name}, got "
            f"{tuple(weights.shape)}."
        )
    check_finite("weights", weights)
    if bool((weights < 0).any()) or not bool((weights > 0).any()):
        raise InputDataError(
            "Expected weights to be zero or more, and positive somewhere, got "
            f"{int((weights < 0).sum())} negative and {int((weights > 0).sum())} positive ones."
        )
    return weights.detach().to(points)


def box_of(points: Tensor) -> Tensor:
    """Return the lower and upper corner of ``N x d`` points, ``2 x d``."""
    return torch.stack((points.amin(0), points.amax(0)))


def variance_factors(model: StreamingGP, posterior_transform: PosteriorTransform | None) -> Tensor:
    """Return the factors from the model's to the scalarised variances, ``batch_shape x m``."""
    scale = model.outcome_scale().double()
    if isinstance(posterior_transform, ScalarizedPosteriorTransform):
        weights: Any = posterior_transform.weights
        scale = scale * weights.to(scale)
    return scale.square()


def listed_inputs(model: StreamingGP, name: str, X: Tensor) -> Tensor:
    """Check ``N x d`` inputs of any floating dtype, and transform them; float64.

    Raises:
        BotorchTensorDimensionError: Another shape.
        InputDataError: No rows, or values that are not finite.
        UnsupportedError: The model's input transform makes several inputs of each.
    """
    check_type(name, X, X)
    if X.ndim != 2 or X.shape[-1] != model.input_dim:
        raise BotorchTensorDimensionError(
            f"Expected {name} of shape `N x {model.input_dim}`, got {tuple(X.shape)}."
        )
    if X.shape[0] == 0:
        raise InputDataError(f"Expected {name} to hold at least one point, got none.")
    check_finite(name, X)
    model.eval()
    inputs = model.process_inputs(X.detach().to(model.train_targets))
    if inputs.shape[0] != X.shape[0]:
        raise UnsupportedError(
            f"Expected a model of one input for each of {name}, got one whose input_transform "
            f"{type(model.input_transform).__name__} makes {inputs.shape[0] // X.shape[0]}. Use "
            "BoTorch's qNegIntegratedPosteriorVariance and optimize_acqf_discrete."
        )
    return inputs


def check_scalar(model: StreamingGP, posterior_transform: PosteriorTransform | None) -> None:
    """Check that the posterior transform is a weighted sum of independent outputs, or not needed.

    Raises:
        UnsupportedError: Several outputs without a posterior transform, or one of another kind.
    """
    if posterior_transform is None and model.num_outputs > 1:
        raise UnsupportedError(
            f"Expected a posterior_transform for a model of {model.num_outputs} outputs, got None. "
            "Pass ScalarizedPosteriorTransform(weights), or model.subset_output([i]) as the model."
        )
    if not isinstance(posterior_transform, ScalarizedPosteriorTransform | None):
        raise UnsupportedError(
            "Expected posterior_transform to be a ScalarizedPosteriorTransform, got "
            f"{type(posterior_transform).__name__}: any other has a variance that depends on the "
            "observations to come. Use BoTorch's qNegIntegratedPosteriorVariance."
        )
