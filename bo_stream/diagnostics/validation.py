"""Progressive validation: each batch of a stream is predicted before the model learns from it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, UnsupportedError
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from torch import Tensor

from bo_stream.diagnostics.sketches import (
    RepeatedRows,
    Reservoir,
    SignTest,
    UnitTest,
    threshold_for,
)
from bo_stream.likelihoods.counts import prevalence
from bo_stream.likelihoods.outcome_model import OutcomeModel
from bo_stream.linalg import safe_cholesky
from bo_stream.models.base import StreamingGP
from bo_stream.models.checks import check_instance
from bo_stream.models.outcomes.gaussian import LabelOutcomes, checked_labels
from bo_stream.models.outcomes.likelihood import REAL, CountOutcomes, LikelihoodOutcomes

Array = NDArray[np.float64]

JOINT = 512
"""Most rows of a batch that are whitened jointly, by a Cholesky factor of their covariance."""

_FARTHEST = 38.0
"""Largest normal score: beyond it the PIT is 0 or 1 in float64."""

_LEAST_PROBABILITY = 1e-12
"""Probability that counts for a label of a class that the model does not know."""


@dataclass(frozen=True)
class PredictedBatch:
    """Outcomes of n rows and m outputs, and a model's predictions of them, ``n x m`` each.

    Outcomes are in original units; with a transform that is no standardisation, such as ``Log``,
    ``Power`` or ``Bilog``, they are transformed outcomes. For labels of several classes m is 1.

    Attributes:
        outcome: What was observed.
        mean: Predictive mean; None for labels of several classes.
        deviation: Predictive standard deviation, noise included; None for labels and counts.
        error: Outcome less mean; of labels the root of the Brier score, which is not signed.
        log_density: Log density, or log probability, of the outcome.
        pit: Probability integral transform: predictive probability of an outcome of at most the
            observed one; None for labels and counts.
        innovations: Standard normal and independent of each other under the model, of Gaussian
            outcomes ``L⁻¹ (y − mean)`` with ``L Lᵀ`` the joint predictive covariance of the batch,
            in the order of its rows; else normal scores of the PIT. None for labels and counts.
        tested: Number of leading rows whose innovations are independent.
    """

    outcome: Array
    mean: Array | None
    deviation: Array | None
    error: Array
    log_density: Array
    pit: Array | None
    innovations: Array | None
    tested: int

    def __len__(self) -> int:
        return len(self.outcome)


@torch.no_grad()
def predict_batch(
    model: StreamingGP, X: Tensor, Y: Tensor, Yvar: Tensor | None = None
) -> PredictedBatch:
    """Predict outcomes at their inputs, and compare; the model stays as it is.

    The cost is a posterior's variances at n points and, up to ``JOINT`` of them, their joint
    covariance, and O(n³). In a larger batch the further rows' innovations are errors over
    predictive standard deviations, which are not independent and enter no sequential test.

    Args:
        model: Without batch shape, not conditioned on hypothetical observations.
        X: ``n x d``, as for :meth:`StreamingGP.update`.
        Y: ``n x m``, or labels.
        Yvar: Known noise variances shaped as Y; NaN: unknown.

    Raises:
        UnsupportedError: A model with a batch shape.
        BotorchTensorDimensionError, InputDataError: As :meth:`StreamingGP.update`.
    """
    check_validated(model)
    model._leave_training()
    if isinstance(model.outcomes, LabelOutcomes):
        return _labels(model, X, Y)
    inputs = model.observation_inputs(X)
    if isinstance(model.outcomes, LikelihoodOutcomes) and not model.prior.is_gaussian:
        return _under_likelihood(model, inputs, X, Y)
    outcomes, noise = model.standardized(X, Y, all_variances(model, X, Y, Yvar))
    return _gaussian(model, inputs, outcomes, noise)


def check_validated(model: StreamingGP) -> None:
    """Check that a model can be validated.

    Raises:
        UnsupportedError: It is none of this package's, has a batch shape, or is conditioned on
            hypothetical observations.
    """
    check_instance("model", model, StreamingGP, "AutoGP(X, Y)")
    model._check_not_conditioned("Validation")
    if model.batch_shape:
        raise UnsupportedError(
            f"Expected a model without batch shape, got {tuple(model.batch_shape)}: its elements "
            "are different models. Validate a model of one of them."
        )


def all_variances(model: StreamingGP, X: Tensor, Y: Tensor, Yvar: Tensor | None) -> Tensor | None:
    """Return Yvar with unknown noise variances predicted, if a model's noise depends on the inputs.

    For other models Yvar stays as it is.
    """
    if not model.inference.noise_varies:
        return Yvar
    predicted = model.noise_at(model.observation_inputs(X)).mT
    variances = (predicted * model.outcome_scale().square().unsqueeze(-2)).to(Y).expand_as(Y)
    return variances if Yvar is None else torch.where(Yvar.isnan(), variances, Yvar)


def _gaussian(
    model: StreamingGP, inputs: Tensor, outcomes: Tensor, noise: Tensor
) -> PredictedBatch:
    """Compare with normal predictions; outcomes and noise are ``m x n`` in process units."""
    process = model.process(inputs)
    tested = min(JOINT, inputs.shape[-2])
    joint = process.joint(inputs[:tested])
    mean, covariance = joint.mean, joint.covariance() + torch.diag_embed(noise[:, :tested])
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    errors = (outcomes[:, :tested] - mean).unsqueeze(-1)
    whitened = torch.linalg.solve_triangular(safe_cholesky(covariance), errors, upper=False)
    innovations = whitened.squeeze(-1)
    if tested < inputs.shape[-2]:
        further = process.marginals(inputs[tested:])
        mean = torch.cat((mean, further[0]), -1)
        variance = torch.cat((variance, further[1] + noise[:, tested:]), -1)
        later = (outcomes - mean)[:, tested:] / variance[:, tested:].sqrt()
        innovations = torch.cat((innovations, later), -1)
    ratio = _array((outcomes - mean) / variance.sqrt())
    offset, scale = model._offset_and_scale()
    deviation = _array(scale * variance.sqrt())
    outcome, center = _array(offset + scale * outcomes), _array(offset + scale * mean)
    density = -0.5 * ratio**2 - np.log(deviation) - 0.5 * np.log(2.0 * np.pi)
    return PredictedBatch(
        outcome,
        center,
        deviation,
        outcome - center,
        density,
        ndtr(ratio),
        _array(innovations),
        tested,
    )


def _under_likelihood(model: StreamingGP, inputs: Tensor, X: Tensor, Y: Tensor) -> PredictedBatch:
    """Compare with the marginals of a likelihood: all of real outcomes, less of others."""
    predictive, density = model.predictive(X), model.log_predictive(X, Y)
    outcome, mean = rows_of(Y), rows_of(predictive.mean)
    if isinstance(model.outcomes, CountOutcomes):  # positives, expected of those examined in a row
        outcome, mean = outcome[:, :1], rows_of(prevalence(model, X).mean) * outcome[:, 1:]
    if not isinstance(model.likelihood, REAL):
        return PredictedBatch(outcome, mean, None, outcome - mean, rows_of(density), None, None, 0)
    marginals = model.process(inputs).marginals(inputs)
    targets = model._standardized(Y.to(torch.float64)).mT
    likelihood = OutcomeModel.of(model.likelihood, model.num_outputs)
    pit = _array(likelihood.distribution_function(targets, *marginals)).clip(0.0, 1.0)
    scores = np.clip(ndtri(pit), -_FARTHEST, _FARTHEST)
    deviation = rows_of(predictive.variance.sqrt())
    return PredictedBatch(
        outcome, mean, deviation, outcome - mean, rows_of(density), pit, scores, min(1, len(pit))
    )


def _labels(model: StreamingGP, X: Tensor, Y: Tensor) -> PredictedBatch:
    """Compare labels with the probabilities of their classes."""
    kind: Any = model
    probabilities = rows_of(kind.class_probabilities(X))
    labels = checked_labels(Y, X).cpu().numpy()
    hits = np.zeros((len(labels), max(probabilities.shape[-1], int(labels.max(initial=0)) + 1)))
    hits[np.arange(len(labels)), labels] = 1.0
    missing = hits.shape[-1] - probabilities.shape[-1]
    probabilities = np.pad(probabilities, ((0, 0), (0, missing)))
    brier = np.sqrt(((hits - probabilities) ** 2).sum(-1, keepdims=True))
    given = (hits * probabilities).sum(-1, keepdims=True)
    density = np.log(given.clip(_LEAST_PROBABILITY))
    return PredictedBatch(labels[:, None] * 1.0, None, None, brier, density, None, None, 0)


def _array(value: Tensor) -> Array:
    """Return ``m x n`` as ``n x m`` in NumPy."""
    return rows_of(value.mT)


def rows_of(value: Tensor) -> Array:
    """Copy a tensor to NumPy in float64."""
    return np.asarray(value.detach().to("cpu", torch.float64).numpy())


# --- progressive validation -----------------------------------------------------------------------


SAMPLE = 500
"""Rows of the reservoir: an exact Gaussian process of them takes a fraction of a second."""

WINDOW = 1000
"""Latest rows by which alarms judge the model as it is now."""

_BINS = 20
"""Bins of the histogram of probability integral transforms."""

GROWTH = 1.25
"""Factor by which the numbers of rows at the ends of two intervals differ, at least."""

_FALSE_ALARMS = 1e-5
"""Mean number of false alarms of the drift test an observation, at most."""


@dataclass
class Interval:
    """Sums over consecutive rows of a stream; lists hold a number for each output.

    Attributes:
        rows: Number of rows of the record at its end.
        observations: Number of observations in the model after them.
        count: Number of rows.
        squares: Sum of squared errors.
        nll: Sum of negative log densities, in nats.
        within_50: Number of outcomes in their central 50 % interval.
        within_95: Number of outcomes in their central 95 % interval.
        steps: Number of timed batches.
        timed: Number of rows in them.
        seconds: Time of predicting and updating them.
        bytes: Size of the model's memory and caches at the end; 0 before that.
    """

    rows: int
    observations: float
    count: int
    squares: list[float]
    nll: list[float]
    within_50: list[int]
    within_95: list[int]
    steps: int = 0
    timed: int = 0
    seconds: float = 0.0
    bytes: int = 0


class ProgressiveValidation:
    """A record of how well a model predicts its stream, of fixed size.

    It is fed before each update: the model predicts a batch, the record compares, then the model
    learns. This is also called prequential validation (Dawid, 1984). No row counts twice, and none
    is predicted by a model that has observed it. The record has sums over intervals of
    geometrically growing length, a histogram, a sequential test for a drift (:class:`SignTest`) for
    each output, a fair sample of 500 rows, the innovations of the latest 1,000 rows, and a count of
    repeated rows. A row costs its prediction and some microseconds, regardless of the record's
    length.

    After the model was mended (other hyperparameters, units, likelihood) begin a new record, or the
    alarms are about the earlier model.

    Attributes:
        false_alarms: Mean number of false alarms of the drift test an observation, at most.
        intervals: Sums over the stream.
        histogram: Counts of probability integral transforms, ``m x 20``.
        drift: Test of each output.
        reservoir: Sample of rows: inputs, outcomes, noise variances (NaN: unknown).
        repeated: Count of repeated rows.
        units: Test for a change of units.
        innovations: Innovations of the latest rows, ``m`` each.

    Example:
        >>> record = ProgressiveValidation()
        >>> for X, Y in stream:
        ...     record.observe(model, X, Y)
        >>> print(report(model, record))
    """

    def __init__(self, false_alarms: float = _FALSE_ALARMS, seed: int = 0) -> None:
        """Begin an empty record.

        Args:
            false_alarms: Of the drift test, in [1e-9, 1). A lower rate finds a drift later: a shift
                of one standard deviation takes about 40 observations at 1e-5.
            seed: Of the sample of rows. torch's generator is not used.

        Raises:
            ValueError: The rate is out of range.
        """
        if not 1e-9 <= false_alarms < 1.0:
            raise ValueError(f"Expected false_alarms in [1e-9, 1), got {false_alarms}.")
        self.false_alarms = false_alarms
        self.intervals: list[Interval] = []
        self.histogram: list[list[int]] = []
        self.drift: list[SignTest] = []
        self.reservoir = Reservoir(SAMPLE, seed)
        self.repeated = RepeatedRows()
        self.units = UnitTest()
        self.innovations: deque[list[float]] = deque(maxlen=WINDOW)
        self._widths: list[int] = []
        self._end = 0

    # --- the stream ----------------------------------------------------------------------------

    def observe(self, model: StreamingGP, X: Tensor, Y: Tensor, Yvar: Tensor | None = None) -> None:
        """Predict a batch, put it into the model, and record both with their time.

        Args:
            model: Changed in place by :meth:`StreamingGP.update`.
            X: As there, ``n x d``.
            Y: As there, ``n x m``, or labels.
            Yvar: As there.

        Raises:
            UnsupportedError: A model with a batch shape; and all errors of ``update``. Neither the
                model nor the record has changed then.
        """
        began = time.perf_counter()
        compared = self._compared(model, X, Y, Yvar)
        model.update(X, Y, Yvar)
        seconds = time.perf_counter() - began
        self._add(model, X, Y, Yvar, *compared)
        self.add_time(len(X), seconds)

    def add(
        self,
        model: StreamingGP,
        X: Tensor,
        Y: Tensor,
        Yvar: Tensor | None = None,
    ) -> None:
        """Predict a batch that the model has not seen, and record it; the model stays as it is.

        Args:
            model: As it is before it learns from the batch.
            X: ``n x d``.
            Y: ``n x m``, or labels.
            Yvar: Known noise variances shaped as Y; NaN: unknown.

        Raises:
            UnsupportedError: A model with a batch shape; and all errors of ``update``. The record
                has not changed then.
        """
        self._add(model, X, Y, Yvar, *self._compared(model, X, Y, Yvar))

    def add_time(self, rows: int, seconds: float) -> None:
        """Record the seconds that it took to predict the last rows and to learn from them."""
        if self.intervals and rows > 0:
            now = self.intervals[-1]
            now.steps += 1
            now.timed += rows
            now.seconds += seconds

    def _compared(
        self, model: StreamingGP, X: Tensor, Y: Tensor, Yvar: Tensor | None
    ) -> tuple[PredictedBatch, Array, Array]:
        """Predict a batch; return the gain by inputs in previous units, and their exponents."""
        batch = predict_batch(model, X, Y, Yvar)
        widths = [X.shape[-1], batch.outcome.shape[-1]]
        if self._widths not in ([], widths):
            raise BotorchTensorDimensionError(
                f"Expected a batch of {self._widths[0]} inputs and {self._widths[1]} outputs as "
                f"the record's others, got {widths[0]} and {widths[1]}. Begin a record for each "
                "model."
            )
        powers, sampled = None, self.reservoir.rows
        if batch.pit is not None:
            earlier = None if sampled is None else sampled[:, : self.inputs]
            powers = self.units.powers_of(rows_of(X), earlier)
        if powers is None:
            return batch, np.zeros(len(batch)), np.zeros(X.shape[-1])
        usual = X / torch.as_tensor(10.0**powers).to(X)
        gain = predict_batch(model, usual, Y, Yvar).log_density - batch.log_density
        return batch, gain.sum(-1), powers

    def _add(
        self,
        model: StreamingGP,
        X: Tensor,
        Y: Tensor,
        Yvar: Tensor | None,
        batch: PredictedBatch,
        gain: Array,
        powers: Array,
    ) -> None:
        """Record a predicted batch; gain and exponents are of inputs in previous units."""
        if len(batch) == 0:
            return
        inputs, outcomes = rows_of(X), rows_of(Y).reshape(len(batch), -1)
        known = np.full_like(outcomes, np.nan) if Yvar is None else rows_of(Yvar)
        self._widths = [inputs.shape[-1], batch.outcome.shape[-1]]
        self.repeated.add(np.concatenate((inputs, outcomes), -1))
        self.reservoir.add(np.concatenate((inputs, outcomes, known), -1))

        # the sums of the present interval; the next one begins where that is long enough
        outputs, total = batch.outcome.shape[-1], self.rows + len(batch)
        if self.rows == self._end:
            self._end = max(16, int(GROWTH * (self.rows + 1)))
            zeros, counts = [0.0] * outputs, [0] * outputs
            self.intervals.append(Interval(0, 0.0, 0, zeros, zeros, counts, counts))
        now = self.intervals[-1]
        now.rows, now.count = total, now.count + len(batch)
        now.observations = model.num_observations
        now.squares = np.add(now.squares, (batch.error**2).sum(0)).tolist()
        now.nll = np.subtract(now.nll, batch.log_density.sum(0)).tolist()
        if batch.pit is not None:
            distance = np.abs(batch.pit - 0.5)
            now.within_50 = np.add(now.within_50, (distance <= 0.25).sum(0)).tolist()
            now.within_95 = np.add(now.within_95, (distance <= 0.475).sum(0)).tolist()
        if total >= self._end:
            now.bytes, self._end = model_bytes(model), total
        if batch.innovations is None or batch.pit is None:
            return

        # the tests, and the window of innovations
        outputs = batch.pit.shape[-1]
        if not self.drift:
            threshold = threshold_for(self.false_alarms / outputs)
            self.drift = [SignTest(threshold) for _ in range(outputs)]
            self.histogram = [[0] * _BINS for _ in range(outputs)]
        tested = batch.innovations[: batch.tested].T
        for test, column in zip(self.drift, tested, strict=True):
            test.observe(column.tolist(), len(batch))
        self.innovations.extend(batch.innovations[-WINDOW:].tolist())
        bins = np.minimum((batch.pit * _BINS).astype(int), _BINS - 1)
        for own, column in zip(self.histogram, bins.T, strict=True):
            own[:] = np.add(own, np.bincount(column, minlength=_BINS)).tolist()
        deviation = batch.deviation
        if deviation is not None and np.isfinite(deviation).all():
            earlier, same_units = self.sampled_outcomes, not model.prior.chain.fixed
            deviation = deviation * float(same_units)
            self.units.add(inputs, outcomes, batch.innovations, deviation, gain, powers, earlier)

    # --- the content ---------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Number of rows so far."""
        return self.intervals[-1].rows if self.intervals else 0

    @property
    def outputs(self) -> int:
        """Number m of outputs; 0 before any row."""
        return self._widths[1] if self._widths else 0

    @property
    def inputs(self) -> int:
        """Number d of inputs; 0 before any row."""
        return self._widths[0] if self._widths else 0

    @property
    def sampled_outcomes(self) -> Array:
        """Outcomes of the sample, ``N x m``, or labels, ``N x 1``."""
        rows = self.reservoir.rows
        if rows is None:
            return np.zeros((0, self.outputs))
        width = (rows.shape[-1] - self.inputs) // 2
        return rows[:, self.inputs : self.inputs + width]

    def sample(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the sample of rows as X, Y and Yvar, as ``update`` takes them.

        Args:
            like: A tensor of their dtype and device.
        """
        if self.reservoir.rows is None or not self._widths:
            raise ValueError("Expected a record of at least one row, got an empty one.")
        rows = torch.as_tensor(self.reservoir.rows, dtype=like.dtype, device=like.device)
        width = (rows.shape[-1] - self.inputs) // 2
        X, Y, Yvar = rows.split((self.inputs, width, width), -1)
        return X, Y, None if bool(Yvar.isnan().all()) else Yvar

    def state(self) -> dict[str, Any]:
        """Return the whole record as plain values that JSON can write."""
        counts = [list(item) for item in self.repeated.counts.items()]
        return {
            "false_alarms": self.false_alarms,
            "intervals": [asdict(interval) for interval in self.intervals],
            "histogram": [list(counts) for counts in self.histogram],
            "drift": [asdict(test) for test in self.drift],
            "reservoir": self.reservoir.state(),
            "repeated": {"size": self.repeated.size, "counts": counts},
            "units": self.units.state(),
            "innovations": list(self.innovations),
            "widths": list(self._widths),
            "end": self._end,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """Build a record from :meth:`state`; it goes on as the saved one would have."""
        record, repeated = cls(state["false_alarms"]), state["repeated"]
        record.intervals = [Interval(**interval) for interval in state["intervals"]]
        record.histogram = [list(counts) for counts in state["histogram"]]
        # of a former version rows are not in the state of a test
        record.drift = [SignTest(**{"rows": record.rows, **test}) for test in state["drift"]]
        record.reservoir = Reservoir.of_state(state["reservoir"])
        counts = {int(digest): int(number) for digest, number in repeated["counts"]}
        record.repeated = RepeatedRows(int(repeated["size"]), counts)
        record.units = UnitTest.of_state(state["units"])
        record.innovations = deque(state["innovations"], maxlen=WINDOW)
        record._widths, record._end = list(state["widths"]), int(state["end"])
        return record


def model_bytes(model: StreamingGP) -> int:
    """Count the bytes of all tensors in a model's memory and cache."""
    pending: list[Any] = [model.memory, model._cache]
    seen: set[int] = set()
    storages: dict[int, int] = {}
    while pending:
        item = pending.pop()
        if id(item) in seen or isinstance(item, StreamingGP | type) or callable(item):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, Mapping):
            pending.extend(item.values())
        elif isinstance(item, list | tuple):
            pending.extend(item)
        else:
            pending.extend(getattr(item, "__dict__", {}).values())
    return sum(storages.values())
