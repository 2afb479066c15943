"""Negative integrated posterior variance in feature space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.input_constructors import acqf_input_constructor
from botorch.acquisition.objective import PosteriorTransform
from botorch.exceptions.errors import UnsupportedError
from botorch.models.model import Model
from botorch.utils.transforms import concatenate_pending_points, t_batch_mode_transform
from torch import Tensor

from bo_stream.acquisition.measures import Measure, box_measure, box_of, point_measure
from bo_stream.acquisition.units import check_scalar, variance_factors
from bo_stream.acquisition.weight_space import feature_process, weight_space
from bo_stream.linalg import row_product, safe_cholesky
from bo_stream.models.streaming_gp import StreamingGP
from bo_stream.process import PosteriorProcess, WeightSpaceProcess


@dataclass(frozen=True)
class _Integrated:
    """A process and its measure's gram in posterior coordinates.

    Attributes:
        process: What the model returned, to see whether it has changed.
        space: The same, as a weight posterior with root S.
        gram: ``Sᵀ G S``, ``... x m x r x r``.
    """

    process: PosteriorProcess
    space: WeightSpaceProcess
    gram: Tensor

    def variance(self) -> Tensor:
        """Mean variance before any candidate, ``tr(Sᵀ G S)``, ``... x m``."""
        return self.gram.diagonal(dim1=-2, dim2=-1).sum(-1)

    def reduction(self, X: Tensor, noise: Tensor) -> Tensor:
        """By how much observations at ``... x q x d`` reduce it, ``... x m``."""
        rows = row_product(self.space.features(X), self.space.weights.root)
        covariance = rows @ rows.mT + torch.diag_embed(noise.expand(rows.shape[:-1]))
        explained = row_product(rows, self.gram) @ rows.mT
        solved = torch.cholesky_solve(explained, safe_cholesky(covariance))
        return solved.diagonal(dim1=-2, dim2=-1).sum(-1)


class FeatureNIPV(AcquisitionFunction):
    """Minus the mean posterior variance after observing X, at a cost without integration points.

    With features z, weight posterior root S and ``G = Σ_i weight_i z(x_i) z(x_i)ᵀ``,
    ``value = −tr(M) + tr(C⁻¹ ζ M ζᵀ)`` where ``M = Sᵀ G S``, ``ζ = z(X) S``, ``C = ζ ζᵀ + noise``.
    G is computed once; over a box it is exact. Equal to BoTorch's
    ``qNegIntegratedPosteriorVariance`` on the same model (Seo et al., 2000), in the squared units
    of the outcomes; the model may suppose data. Differentiable in X.

    Cost O(q r² + q² r) for each of b candidate sets, whatever the measure; O(N r² + r³) once for N
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
        """Give exactly one of ``mc_points`` and ``bounds``.

        Args:
            model: A model whose basis leaves no residual, such as ``WISKI``.
            mc_points: Points to average the variance over, ``N x d``.
            bounds: The box to average it over instead, ``2 x d``, before the input transform.
                Uniform in transformed inputs, so also before an affine one such as ``Normalize``.
            weights: Non-negative weights of ``mc_points``, ``N``; only their ratios matter.
            X_pending: Points that will be observed in any case, ``n x d``.
            posterior_transform: A ``ScalarizedPosteriorTransform``, required for several outputs:
                the variance is then that of the weighted sum of outputs, as in BoTorch.

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
        _check_kind(model)
        _check_affine(model)
        check_scalar(model, posterior_transform)
        self.posterior_transform = posterior_transform
        self.measure = _measure(model, mc_points, bounds, weights)
        self.set_X_pending(X_pending)
        self._integrated = self._integrate(self.measure.corners)

    def _integrate(self, corners: Tensor) -> _Integrated:
        process = feature_process(self.model, corners)
        space = weight_space(process, corners)
        root = space.weights.root
        return _Integrated(process, space, root.mT @ self.measure.gram(space.basis) @ root)

    def _current(self, X: Tensor) -> _Integrated:
        """Integrate anew if the model has changed, or where X needs a wider basis."""
        inputs = box_of(torch.cat((self.measure.corners, X.detach().flatten(0, -2))))
        if feature_process(self.model, inputs) is not self._integrated.process:
            self._integrated = self._integrate(inputs)
        return self._integrated

    @concatenate_pending_points
    @t_batch_mode_transform()  # type: ignore[arg-type]
    def forward(self, X: Tensor) -> Tensor:
        """Evaluate candidate sets.

        Args:
            X: ``b x q x d``.

        Returns:
            Minus the mean variance, ``b``.
        """
        self.model.eval()
        inputs = self.model.hypothetical_inputs(X)
        integrated = self._current(inputs)
        noise = self.model.noise_at(inputs)
        variance = integrated.variance() - integrated.reduction(inputs, noise)
        factors = variance_factors(self.model, self.posterior_transform)
        return -(variance * factors).sum(-1).to(X.dtype)


@acqf_input_constructor(FeatureNIPV)
def construct_inputs_feature_nipv(
    model: StreamingGP,
    bounds: list[tuple[float, float]] | None = None,
    mc_points: Tensor | None = None,
    X_pending: Tensor | None = None,
    posterior_transform: PosteriorTransform | None = None,
) -> dict[str, Any]:
    """BoTorch's way to build a :class:`FeatureNIPV`; ``mc_points`` take precedence over ``bounds``.

    Args:
        model: See there.
        bounds: A pair of lower and upper bound per input.
        mc_points: See there.
        X_pending: See there.
        posterior_transform: See there.

    Raises:
        UnsupportedError: A list of models.
    """
    _check_kind(model)
    use_box = mc_points is None and bounds is not None
    return {
        "model": model,
        "mc_points": mc_points,
        "bounds": torch.as_tensor(bounds).to(model.train_targets).mT if use_box else None,
        "X_pending": X_pending,
        "posterior_transform": posterior_transform,
    }


def _check_kind(model: Model) -> None:
    if not isinstance(model, StreamingGP):
        raise UnsupportedError(
            f"Expected one streaming model, got a {type(model).__name__}: FeatureNIPV is about the "
            "variance of one output. Of a list of models pass one, model.models[i]; with others "
            "use BoTorch's qNegIntegratedPosteriorVariance."
        )


def _check_affine(model: StreamingGP) -> None:
    if model._outcomes.fixed:
        names = ", ".join(type(step).__name__ for step in model._outcomes.fixed)
        raise UnsupportedError(
            f"Expected a model whose outcome_transform is Standardize or None, got {names}: the "
            "variance would depend on the observations to come. Transform Y yourself instead."
        )


def _measure(
    model: StreamingGP, mc_points: Tensor | None, bounds: Tensor | None, weights: Tensor | None
) -> Measure:
    if mc_points is not None and bounds is None:
        return point_measure(model, mc_points, weights)
    if bounds is None or mc_points is not None:
        given = "none" if bounds is None else "both"
        raise ValueError(f"Expected exactly one of mc_points and bounds, got {given}.")
    if weights is not None:
        raise ValueError("Expected weights only with mc_points, got weights and bounds.")
    return box_measure(model, bounds)
