"""From a model's own units to those of the outcomes, for variances."""

from __future__ import annotations

from typing import Any

from botorch.acquisition.objective import PosteriorTransform, ScalarizedPosteriorTransform
from botorch.exceptions.errors import UnsupportedError
from torch import Tensor

from bo_stream.models.streaming_gp import StreamingGP


def check_scalar(model: StreamingGP, posterior_transform: PosteriorTransform | None) -> None:
    """Check that the variance of interest is that of a weighted sum of independent outputs.

    Raises:
        UnsupportedError: Several outputs without a posterior transform, or one of another kind.
    """
    if posterior_transform is None and model.num_outputs > 1:
        raise UnsupportedError(
            f"Expected a posterior_transform for a model of {model.num_outputs} outputs, got None. "
            "Pass ScalarizedPosteriorTransform(weights), or model.subset_output([i]) as the model."
        )
    known = posterior_transform is None or isinstance(
        posterior_transform, ScalarizedPosteriorTransform
    )
    if not known:
        raise UnsupportedError(
            "Expected posterior_transform to be a ScalarizedPosteriorTransform, got "
            f"{type(posterior_transform).__name__}: any other has a variance that depends on the "
            "observations to come. Use BoTorch's qNegIntegratedPosteriorVariance."
        )


def variance_factors(model: StreamingGP, posterior_transform: PosteriorTransform | None) -> Tensor:
    """From variances of the model to those of the scalarised outcome, ``batch_shape x m``."""
    scale = model.outcome_scale().double()
    if isinstance(posterior_transform, ScalarizedPosteriorTransform):
        weights: Any = posterior_transform.weights
        scale = scale * weights.to(scale)
    return scale.square()
