"""A report on a model and its stream: can it still be trusted, and if not, what is to be done?"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bo_stream.diagnostics.alarms import (
    FEWEST,
    Alarm,
    Cost,
    Validation,
    find_alarms,
)
from bo_stream.diagnostics.approximation import (
    ApproximationGap,
    UsedCapacity,
    approximation_gap,
    capacity_of,
    certificate_of,
    sensitivities,
)
from bo_stream.diagnostics.certificate import Stability
from bo_stream.diagnostics.cross_validation import check_validated
from bo_stream.diagnostics.validation import ProgressiveValidation
from bo_stream.models.auto.inference import HandOver
from bo_stream.models.base import StreamingGP
from bo_stream.storage.archive import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS = 10_000
"""Most of the rows given to :func:`report` that are predicted; of more, a random sample."""

PICTURE, RECORD = "trust.png", "trust.json"


def report(
    model: StreamingGP,
    validation: ProgressiveValidation | None = None,
    X: Tensor | None = None,
    Y: Tensor | None = None,
    Yvar: Tensor | None = None,
    path: str | Path | None = None,
) -> TrustReport:
    """Report whether a model can be trusted, from the record of its stream or from held-out rows.

    The scores of its predictions; tests for drift, wrong noise, heavy tails and skew, repeated
    rows, and a change of units; the gap between its approximation and an exact Gaussian process on
    a sample of 500 rows; inputs without effect; the certificate of its linear system; what its
    posterior rests on; time and memory with their forecast. The cost does not depend on the length
    of the stream.

    Args:
        model: Stays as it is. Without batch shape.
        validation: Record that was fed along the stream. Alarms are of its latest 1,000 rows.
        X: Instead of a record: inputs that the model has not seen, ``n x d``.
        Y: Their outcomes, ``n x m``, or labels. At most ``MOST_ROWS`` are predicted.
        Yvar: Their known noise variances.
        path: Folder for ``trust.png`` and ``trust.json``; None: they are not written.

    Raises:
        ValueError: Both a record and rows, or only one of X and Y.
        UnsupportedError: A model with a batch shape, or conditioned on hypothetical observations.
        InputDataError, BotorchTensorDimensionError: Rows that ``update`` would refuse.
        OSError: The folder cannot be written.

    Example:
        >>> result = report(model, record, path="run")
        >>> for alarm in result.alarms:
        ...     print(alarm.name, alarm.remedy)
    """
    check_validated(model)
    if (X is None) != (Y is None) or (X is not None and validation is not None):
        arguments = {"validation": validation, "X": X, "Y": Y}
        given = ", ".join(name for name, value in arguments.items() if value is not None)
        raise ValueError(
            "Expected either validation, the record of the stream, or held-out rows X and Y, got "
            f"{given}."
        )
    if X is not None and Y is not None:
        if len(X) > MOST_ROWS:  # some of them, in their order
            generator = torch.Generator().manual_seed(0)
            rows = torch.randperm(len(X), generator=generator)[:MOST_ROWS].sort().values
            rows = rows.to(X.device)
            X, Y, Yvar = X[rows], Y[rows], None if Yvar is None else Yvar[rows]
        validation = ProgressiveValidation()
        validation.add(model, X, Y, Yvar)

    record = None if validation is None or validation.rows == 0 else validation
    gap: ApproximationGap | str = "no rows were validated"
    effects: list[float] = []
    if record is not None:
        X, Y, Yvar = record.sample(model.train_targets.as_subclass(Tensor))
        gap, effects = approximation_gap(model, X, Y, Yvar), sensitivities(model, X)
    summary = None if record is None else Validation.of(record)
    innovations = [] if summary is None else summary.innovations
    moves: tuple[HandOver, ...] = getattr(model, "history", ())
    since = moves[-1].observations if moves else 0.0
    untested: str | None = None
    if record is None:
        untested = "No rows were validated: there are no scores and no alarms."
    elif record.rows < FEWEST:
        untested = f"Only {record.rows} rows were validated: alarms need {FEWEST}."
    elif not record.drift:
        untested = (
            "Outcomes are labels or counts: they have an error and a log probability, but no "
            "intervals, innovations, drift test or alarms of noise and tails."
        )
    result = TrustReport(
        type(model).__name__,
        model.num_observations,
        find_alarms(model, record, innovations, gap, effects),
        summary,
        gap,
        certificate_of(model),
        capacity_of(model),
        effects,
        None if record is None else Cost.of(record.intervals, since),
        untested,
        moves,
    )
    if path is not None:
        result.save(path)
    return result


@dataclass(frozen=True)
class TrustReport:
    """The result of :func:`report`.

    Attributes:
        model: Name of the model's class.
        observations: Number of observations in the model.
        alarms: What is wrong; empty where nothing is known to be.
        validation: Scores and tests over the stream; None without any row.
        gap: Distance from an exact Gaussian process of some rows; or why it is not known.
        stability: Certificate of the linear system; or why there is none.
        capacity: What the posterior rests on; None where that is not known.
        sensitivity: Effect of each input on the posterior mean, in standard deviations.
        cost: Time and memory with a forecast; None where too few steps were timed.
        untested: The parts that could not be judged, in words.
        hand_overs: Moves of an :class:`~bo_stream.AutoGP` from one family to another.
    """

    model: str
    observations: float
    alarms: tuple[Alarm, ...]
    validation: Validation | None
    gap: ApproximationGap | str
    stability: Stability | str
    capacity: UsedCapacity | None
    sensitivity: list[float]
    cost: Cost | None
    untested: str | None
    hand_overs: tuple[HandOver, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether no alarm rings."""
        return not self.alarms

    @property
    def sufficient(self) -> bool | None:
        """Whether features, points or centres suffice; None where that is not known."""
        if isinstance(self.gap, str):
            return None
        return all(alarm.name != "approximation" for alarm in self.alarms)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON; infinite or missing numbers are None."""
        content = asdict(self)
        content["healthy"], content["sufficient"] = self.healthy, self.sufficient
        plain: dict[str, Any] = _plain(content)
        return plain

    def plot(self) -> Figure:
        """Draw it: scores, calibration, innovations, gap, inputs, cost, and the alarms."""
        from bo_stream.diagnostics.pictures import draw_report  # matplotlib takes half a second

        return draw_report(self)

    def save(self, folder: str | Path) -> None:
        """Write ``trust.png`` and ``trust.json`` into a folder, which is made if necessary.

        Raises:
            OSError: They cannot be written; the old files stand.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / RECORD) as file:
            file.write(self.to_json())
        with atomic_write(folder / PICTURE) as file:
            self.plot().savefig(file, format="png", dpi=120)

    def to_json(self) -> bytes:
        """Return :meth:`as_dict` as a file in JSON."""
        return (json.dumps(self.as_dict(), indent=2, allow_nan=False) + "\n").encode()

    def __str__(self) -> str:
        alarms = [str(alarm) for alarm in self.alarms] or ["none"]
        scores = None if self.validation is None else self.validation.total
        coverage: str | None = None
        cost: str | None = None
        if scores is not None and scores.coverage_50 is not None and scores.coverage_95 is not None:
            halves, most = _numbers(scores.coverage_50), _numbers(scores.coverage_95)
            coverage = f"{halves} of 0.5, {most} of 0.95"
        if isinstance(self.gap, str):
            gap = f"not compared: {self.gap}"
        else:
            gap = (
                f"means {self.gap.mean:.2g} predictive standard deviations from the exact ones, "
                f"deviations {self.gap.deviation:.3g} of them, on {self.gap.rows} rows"
            )
        if self.cost is not None:
            cost = (
                f"{1e3 * self.cost.seconds:.3g} ms an observation, "
                f"{1e3 * self.cost.seconds_ahead:.3g} ms at ten times as many; "
                f"{self.cost.bytes / 2**20:.3g} MiB"
            )
        rows = [
            ("model", f"{self.model}, {self.observations:,.0f} observations"),
            ("alarms", "\n".join([alarms[0], *(f"{'':<15}{text}" for text in alarms[1:])])),
            ("RMSE", None if scores is None else _numbers(scores.rmse)),
            ("NLL", None if scores is None else _numbers(scores.nll)),
            ("coverage", coverage),
            ("approximation", gap),
            ("rests on", None if self.capacity is None else str(self.capacity)),
            ("cost", cost),
            ("not judged", self.untested),
        ]
        return "\n".join(f"{name:<15}{text}" for name, text in rows if text is not None)


def _numbers(values: list[float]) -> str:
    return " ".join(f"{value:.3g}" for value in values)


def _plain(value: Any) -> Any:
    """Replace tuples by lists and numbers that are not finite by None, all the way down."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
