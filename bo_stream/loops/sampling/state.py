"""The state of active sampling, and outcomes that are set aside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import torch
from botorch.exceptions.errors import InputDataError
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.posteriors.posterior import Posterior
from torch import Tensor

from bo_stream.diagnostics.cross_validation import leave_one_out
from bo_stream.diagnostics.validation import ProgressiveValidation
from bo_stream.errors import UsageError, plain
from bo_stream.loops.models import KERNELS, MODELS
from bo_stream.loops.run import ModelFile
from bo_stream.loops.sampling.settings import SamplingSettings
from bo_stream.models.base import StreamingGP
from bo_stream.models.fitting import relearn


@dataclass
class SamplingState:
    """State that determines the next choice, with the candidates and the settings.

    Attributes:
        model: Model of the picks without the outliers; None: there is none yet.
        picks: Candidates that were told, in the order of telling.
        outcomes: Their outcomes.
        pending: Candidates that were asked for and not told, in the order of asking.
        refits: Numbers of observations at which the hyperparameters were learned.
        kernel: Name of the model's kernel; empty while there is no model.
        kernels: Name of the kernel after each refit.
        unlikely: Names of kernels that were clearly less likely than another, with the number of
            observations at which they were.
        onto_grid_at: Number of observations at which an exact model went onto a grid; None: it has
            not.
        outliers: Positions in ``picks``, in order, of those that the model is without: outliers at
            the last refit, and later ones that wait for the next.
        validation: Record of how well each outcome was predicted, outliers included.
    """

    model: StreamingGP | None = None
    picks: list[int] = field(default_factory=list)
    outcomes: list[float] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    refits: list[int] = field(default_factory=list)
    outliers: list[int] = field(default_factory=list)
    kernel: str = ""
    kernels: list[str] = field(default_factory=list)
    unlikely: dict[str, int] = field(default_factory=dict)
    onto_grid_at: int | None = None
    validation: ProgressiveValidation = field(default_factory=ProgressiveValidation)

    def record(self) -> dict[str, Any]:
        """Return all but the model, as values for JSON."""
        names = [field.name for field in fields(self) if field.name not in ("model", "validation")]
        values = {name: getattr(self, name) for name in names}
        return {**values, "validation": self.validation.state()}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> SamplingState:
        """Read a record of :meth:`record`, without a model."""
        onto_grid_at = record["onto_grid_at"]
        return cls(
            None,
            **{name: [int(n) for n in record[name]] for name in _POSITIONS},
            outcomes=[float(value) for value in record["outcomes"]],
            kernel=str(record["kernel"]),
            kernels=[str(name) for name in record["kernels"]],
            unlikely={str(name): int(n) for name, n in record.get("unlikely", {}).items()},
            onto_grid_at=None if onto_grid_at is None else int(onto_grid_at),
            validation=ProgressiveValidation.of_state(record["validation"]),
        )

    def load_model(
        self, file: ModelFile | None, path: Path, settings: SamplingSettings, candidates: int
    ) -> None:
        """Check a state that was read, and load its model.

        Args:
            file: Of the model, next to the index; None: there is no model.
            path: Index that the state is from.
            settings: Of the sampling.
            candidates: Number of candidates.

        Raises:
            UsageError: The state does not agree with itself, its model or the number of candidates,
                or the model cannot be read.
        """
        observations = None if file is None else file.observations
        told, picks, outliers = len(self.picks), set(self.picks), set(self.outliers)
        known = [*self.picks, *self.pending]
        agrees = (
            self.outliers == sorted(outliers)
            and outliers <= set(range(told))
            and set(known) <= set(range(candidates))
            and len(set(known)) == len(known)
            and told == len(self.outcomes)
            and (observations is None or told == observations + len(outliers))
            and (self.kernel in KERNELS if observations is not None else not self.kernel)
            and len(self.kernels) == len(self.refits)
        )
        if not agrees:
            raise UsageError(
                f"{path} contradicts itself: {told:,} picks, {len(picks):,} of them distinct, "
                f"{len(self.outliers):,} outliers, {len(self.outcomes):,} outcomes, "
                f"{len(self.pending):,} pending of {candidates:,} candidates, and a model of "
                f"{observations or 0:,} observations."
            )
        if file is not None:
            self.model = file.read(path.parent, MODELS[settings.model].model, settings.device)


def as_numbers(outcomes: Sequence[float] | Tensor) -> Tensor:
    """Return told outcomes as one row in float64; texts, None and the like are a ``UsageError``."""
    try:
        return torch.as_tensor(outcomes, dtype=torch.float64).reshape(-1)
    except (TypeError, ValueError, RuntimeError) as error:
        each = outcomes if isinstance(outcomes, Sequence) else ()
        wrong = next((y for y in each if not isinstance(plain(y), int | float)), outcomes)
        raise UsageError(
            f"Expected outcomes as numbers, one for each candidate, got {wrong!r}."
        ) from error


_POSITIONS = ("picks", "pending", "refits", "outliers")


# --- outliers of a model: observations far from what all others predict --------------------------


_ONE_IN = 100
"""Least number of observations per outlier: if there are more, the noise is heavy-tailed."""

_FIRST_FROM = 20
"""Number of observations from which one may be an outlier: fewer hardly tell the noise."""

_MOST_PASSES = 3
"""Most changes of the set of outliers in a refit."""


def most_outliers(observations: int) -> int:
    """Return the largest number of outliers among so many observations."""
    return max(observations // _ONE_IN, int(observations >= _FIRST_FROM))


def leave_outliers_out(
    model: StreamingGP, X: Tensor, Y: Tensor, outliers: Sequence[int], threshold: float
) -> list[int]:
    """Take outliers out of a model after a refit, and learn again where that changes them.

    An outlier is an observation more than ``threshold`` standard deviations of the posterior
    predictive distribution, noise included, from its mean given all other observations in the
    model. Fewer than 20 observations have none, fewer than 200 at most one, and others at most one
    in a hundred: if there are more, the noise is heavy-tailed. It returns to the model once it is
    no outlier any more, because observations near it agree or because the hyperparameters are
    others. The refit before is to all new observations, so that hyperparameters which were learned
    from few do not rule out what contradicts them. Without outliers the model stays as it is, at
    the cost of a leave-one-out prediction of all observations, O(n r²) on a grid.

    Args:
        model: Model of the observations without the previous outliers, changed in place. It
            retracts exactly, as WISKI does.
        X: Inputs of all observations, outliers included, ``n x d``.
        Y: Their outcomes, ``n x 1``.
        outliers: Previous outliers, as rows of X, in increasing order.
        threshold: Number of standard deviations.

    Returns:
        The outliers, which the model is without, as rows of X, in increasing order.
    """
    previous = list(outliers)
    for _ in range(_MOST_PASSES):
        deviations = _deviations(model, X, Y, previous)
        largest = deviations.argsort(descending=True, stable=True)[: most_outliers(len(X))]
        result = sorted(largest[deviations[largest] > threshold].tolist())
        if result == previous:
            break
        new = [i for i in result if i not in previous]
        back = [i for i in previous if i not in result]
        if new:
            model.retract(X[new], Y[new])
        if back:
            model.update(X[back], Y[back])
        relearn(model)
        previous = result
    return previous


@torch.no_grad()
def _deviations(model: StreamingGP, X: Tensor, Y: Tensor, outliers: Sequence[int]) -> Tensor:
    """Compute standardised leave-one-out errors, ``n``.

    They are zero for all observations in the model where rounding hides how much each weighs.
    """
    out = torch.zeros(len(X), dtype=torch.bool, device=X.device)
    out[list(outliers)] = True
    deviations = torch.zeros_like(Y[:, 0])
    try:
        others = leave_one_out(model, X[~out], Y[~out]).posterior
        deviations[~out] = _standardized(others, Y[~out])
    except InputDataError:
        model.log_event("leave-one-out predictions that rounding hides")
    deviations[out] = deviations_from_prediction(model, X[out], Y[out])
    return deviations


@torch.no_grad()
def deviations_from_prediction(model: StreamingGP, X: Tensor, Y: Tensor) -> Tensor:
    """Compute standardised errors, ``n``, of predictions of outcomes that are not in a model.

    Inputs are ``n x d``, outcomes ``n x 1``; the predictive distributions include the noise.
    """
    return _standardized(model.posterior(X, observation_noise=True), Y)


def _standardized(posterior: Posterior, Y: Tensor) -> Tensor:
    normal = cast(GPyTorchPosterior, posterior)
    return ((Y[:, 0] - normal.mean.reshape(-1)).abs()) / normal.variance.reshape(-1).sqrt()
