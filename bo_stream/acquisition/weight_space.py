"""Posterior processes as one Gaussian over a basis's weights."""

from __future__ import annotations

import torch
from botorch.exceptions.errors import UnsupportedError

from bo_stream.linalg import safe_cholesky, solve_lower
from bo_stream.models.base import StreamingGP
from bo_stream.process.observation_space import ObservationSpaceProcess
from bo_stream.process.process import ConditionedProcess, PosteriorProcess, WeightSpaceProcess
from bo_stream.weights import WeightPosterior


def weight_space(process: PosteriorProcess) -> WeightSpaceProcess:
    """Fold hypothetical observations into a process's weight posterior; exact.

    Cost nothing for a model's own process, O(q r²) for each batch of q hypothetical observations.

    Raises:
        UnsupportedError: The basis has a residual, or the process is a selection of outputs.
    """
    space = explained(process)
    if space is None:
        raise UnsupportedError(
            f"Acquisition in feature space cannot use a {type(process).__name__}: call "
            "subset_output first, and condition_on_observations or fantasize on the model it "
            "returns."
        )
    if space.basis.has_residual:
        raise UnsupportedError(
            "Acquisition in feature space needs a basis that carries its whole kernel, got "
            f"{type(space.basis).__name__}, which leaves a residual. Use BoTorch's own "
            "acquisition functions, such as qNegIntegratedPosteriorVariance, with this model."
        )
    return space


def explained(process: PosteriorProcess) -> WeightSpaceProcess | None:
    """Fold hypothetical observations into a process's weight posterior, whatever its basis leaves.

    Exact for the part of the process that its features explain. None for a process without
    features. Cost as of :func:`weight_space`.
    """
    if isinstance(process, ConditionedProcess):
        base = explained(process.base)
        return None if base is None else _conditioned(base, process)
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


def lives_in_features(model: StreamingGP) -> bool:
    """Tell whether :func:`weight_space` accepts a model's posterior."""
    return in_weight_space(model.process())


def _conditioned(base: WeightSpaceProcess, process: ConditionedProcess) -> WeightSpaceProcess:
    """Condition the weights: covariance ``S (I − A Aᵀ) Sᵀ`` with ``A = (z S)ᵀ L⁻ᵀ``.

    ``T = I − A (I + R)⁻¹ Aᵀ`` with ``R Rᵀ = I − Aᵀ A`` is a root of ``I − A Aᵀ``: multiply out.
    """
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
