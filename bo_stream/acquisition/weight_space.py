"""Posterior processes as one Gaussian over a basis's weights, and changes of its covariance."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from torch import Tensor

from bo_stream.bases.basis import Basis
from bo_stream.bases.grid.interpolation import GridBasis
from bo_stream.linalg import safe_cholesky, solve_lower
from bo_stream.models.base import StreamingGP
from bo_stream.models.wiski.observation_space import ObservationSpaceProcess
from bo_stream.process.process import ConditionedProcess, PosteriorProcess, WeightSpaceProcess
from bo_stream.weights import WeightPosterior

AGREEMENT = 1e-10
"""Frobenius norm of a difference, per square root of the rank r, that counts as rounding error."""

_SPARE = 8
_PROBES = 4


def weight_space(process: PosteriorProcess) -> WeightSpaceProcess:
    """Fold hypothetical observations into a process's weight posterior; exact.

    Cost nothing for a model's own process, O(q r²) for each batch of q hypothetical observations.

    Raises:
        UnsupportedError: The basis has a residual, or the process is a selection of outputs.
    """
    folded = _fold(process)
    if folded.basis.has_residual:
        raise UnsupportedError(
            "Acquisition in feature space needs a basis that carries its whole kernel, got "
            f"{type(folded.basis).__name__}, which leaves a residual. Use BoTorch's own acquisition"
            " functions, such as qNegIntegratedPosteriorVariance, with this model."
        )
    return folded


def in_weight_space(process: PosteriorProcess) -> bool:
    """Tell whether :func:`weight_space` accepts a process."""
    while isinstance(process, ConditionedProcess):
        process = process.base
    if isinstance(process, WeightSpaceProcess):
        return not process.basis.has_residual
    return isinstance(process, ObservationSpaceProcess)


def lives_in_features(model: StreamingGP) -> bool:
    """Tell whether :func:`weight_space` accepts a model's posterior."""
    return in_weight_space(model.process())


def check_inside(basis: Basis, X: Tensor) -> None:
    """Check that a basis which cannot grow holds transformed inputs.

    Raises:
        InputDataError: An input lies outside the grid's box.
    """
    if isinstance(basis, GridBasis) and not basis.grid.contains(X):
        raise InputDataError(
            "X lies outside the box of the model's grid at the time these functions were drawn, "
            f"{basis.grid.bounds.tolist()} in transformed inputs. Build the model with wider "
            "bounds."
        )


def _fold(process: PosteriorProcess) -> WeightSpaceProcess:
    if isinstance(process, WeightSpaceProcess):
        return process
    if isinstance(process, ObservationSpaceProcess):
        return process.in_weights
    if isinstance(process, ConditionedProcess):
        return _conditioned(_fold(process.base), process)
    raise UnsupportedError(
        f"Acquisition in feature space cannot use a {type(process).__name__}: call subset_output "
        "first, and condition_on_observations or fantasize on the model it returns."
    )


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


@dataclass(frozen=True)
class WeightCovariance:
    """A covariance ``Σ − V Vᵀ`` of weights, never formed.

    Attributes:
        weights: Posterior with covariance Σ, ``m x r x r``.
        downdate: V, ``m x r x k``.
    """

    weights: WeightPosterior
    downdate: Tensor

    @classmethod
    def of(cls, weights: WeightPosterior) -> WeightCovariance:
        """Return Σ alone."""
        return cls(weights, weights.base_root[..., :0])

    def times(self, columns: Tensor) -> Tensor:
        """Multiply by columns, ``m x r x k``. Cost O(k r²)."""
        explained = columns.mT @ self.downdate @ self.downdate.mT
        return self.weights.covariance_times(columns) - explained.mT

    def without(self, direction: Tensor) -> WeightCovariance:
        """Subtract ``v vᵀ``, v ``m x r x 1``."""
        return replace(self, downdate=torch.cat((self.downdate, direction), -1))


def same(first: WeightCovariance, second: WeightCovariance) -> bool:
    """Tell whether two covariances agree to rounding, from random probes. Cost O(r²)."""
    probes = _columns(first.downdate, _PROBES, seed=1)
    return _negligible(_difference(first, second, probes))


def low_rank_change(
    old: WeightCovariance, new: WeightCovariance, rank: int
) -> tuple[Tensor, Tensor] | None:
    """Find the change ``− U diag(λ) Uᵀ`` of a covariance, None where its rank is much larger.

    U is ``m x r x k``, and λ, ``m x k``, positive where the variance becomes smaller. A randomised
    range finder and a check with fresh probes; exact to rounding. Cost O(r² rank). Source: Halko,
    Martinsson and Tropp (2011), algorithms 4.1 and 5.3.
    """
    width = rank + _SPARE
    if 4 * width > old.downdate.shape[-2]:
        return None
    sketch = _difference(old, new, _columns(old.downdate, width, seed=2))
    basis = torch.linalg.qr(sketch).Q
    inner = basis.mT @ _difference(old, new, basis)
    amounts, vectors = torch.linalg.eigh(0.5 * (inner + inner.mT))
    directions = basis @ vectors
    probes = _columns(old.downdate, _PROBES, seed=1)
    found = directions @ (amounts.unsqueeze(-1) * (directions.mT @ probes))
    negligible = _negligible(_difference(old, new, probes) - found)
    return (directions, amounts) if negligible else None


def _difference(old: WeightCovariance, new: WeightCovariance, columns: Tensor) -> Tensor:
    return old.times(columns) - new.times(columns)


def _columns(like: Tensor, count: int, seed: int) -> Tensor:
    """Draw standard normal columns, ``r x count``, equal at every call."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randn(like.shape[-2], count, generator=generator, dtype=like.dtype)
    return columns.to(like.device)


def _negligible(images: Tensor) -> bool:
    """Tell whether a matrix is rounding error by its images of probes.

    Their mean square length is its squared Frobenius norm.
    """
    return bool(images.square().mean() <= AGREEMENT**2)
