"""The model of a survey: fitted, cached, what it predicts, and which calls follow from that."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from gpytorch.means import ConstantMean
from gpytorch.priors import NormalPrior
from numpy.typing import NDArray
from torch import Tensor

import bo_stream
from bo_stream.errors import UsageError, check_whole
from bo_stream.likelihoods.binomial import BinomialLikelihood
from bo_stream.likelihoods.counts import counts, prevalence
from bo_stream.likelihoods.outcome_model import Outliers
from bo_stream.loops.run import CheckpointFormat, ModelFile, from_record
from bo_stream.loops.survey.columns import listed_as
from bo_stream.loops.survey.settings import SurveySettings
from bo_stream.mapping import Units, map_inputs, survey_kernel
from bo_stream.models.base import StreamingGP
from bo_stream.models.fitting import hyperparameters, relearn, set_hyperparameters, total_loss
from bo_stream.models.inducing.osgpr import OSVGP
from bo_stream.storage.archive import FileFormat, describe_file, read_index

_MEAN_SD = 3.0
"""Standard deviation of the prior of the mean logit, about the logit of the prevalence of all
people examined."""

FIRST_ROUNDS, ROUNDS = 3, 1
"""How often hyperparameters and sites are learned in turn, at most, without and with ``former``;
the first time is the one from each start."""

_SMOOTH = (5.0, 0.3)
"""Factors of length scale and output scale of position that make of the kernel's first values the
start for a smooth map, most of which is in the covariates."""

_SETTLED = 0.05
"""Gain of the objective by a round, in nats, from which another one is worth its time."""

_CONCENTRATION_STEPS, _CONCENTRATION_RATE = 10, 0.1
"""Steps of Adam, in each such round, in which the concentration of beta-binomial counts moves, and
their size: few large ones, for the kernel, which they move along, is learned again afterwards."""


@dataclass(frozen=True, kw_only=True)
class SurveyModelSettings:
    """Settings of a survey's model.

    Attributes:
        trials: Expected number of people examined at a site; None: the mean of those so far.
        overdispersion: Whether counts at a site vary more than binomial ones, as where whole
            households are examined; what differs between sites is in the kernel.
        outliers: Share of sites whose prevalence has nothing to do with that of sites like
            them, but is distributed as in all results, in [0, 1): a few villages that jump, or were
            entered wrongly, leave the rest of the map alone, and smooth. Of 0, 0.01 and 0.1 the
            last is the safest (``python -m benchmarks.maps.outliers``).
        max_points: Largest number of inducing points; with fewer sites in the results each is one.
        units: Of positions: ``"degrees"``, or ``"kilometres"`` or ``"metres"`` on a map projection.
    """

    trials: int | None = None
    overdispersion: bool = False
    outliers: float = 0.1
    max_points: int = 1024
    units: Units = "degrees"

    def __post_init__(self) -> None:
        check_whole("max_points", self.max_points, 1)
        if not 0.0 <= self.outliers < 1.0:
            raise UsageError(
                f"Expected outliers as a share of the sites in [0, 1), got {self.outliers}."
            )


def survey_model(
    sites: Tensor,
    X: Tensor,
    Y: Tensor,
    settings: SurveyModelSettings | None = None,
    former: StreamingGP | None = None,
) -> StreamingGP:
    """Fit a Gaussian process of the logit of prevalence to counts.

    An :class:`~bo_stream.OSVGP` with a :class:`~bo_stream.BinomialLikelihood` with outliers and the
    kernel of :func:`~bo_stream.mapping.survey_kernel`. Its hyperparameters maximise the evidence
    lower bound and their priors: sites of the likelihood and hyperparameters are learned in turn,
    each given the other. The bound has several maxima, of small rough parts and of large smooth
    ones: of two starts, of which one stands for a smooth map, the one that is better after one such
    round goes on; and sites have, with outliers, so that a round that ends lower is taken back.
    Cost O(n³) a step for n results up to ``max_points``.

    Args:
        sites: ``N x d``, all sites that are to be mapped, surveyed or not: longitude and latitude,
            or east and north, then covariates, without missing values. They make the units of the
            inputs.
        X: ``n x d``, inputs of the results.
        Y: ``n x 2``, ``[positives, examined]`` of each.
        settings: Default: those of the class.
        former: The model of earlier results with the same sites, from whose hyperparameters the fit
            starts, instead of the kernel's first values; it is not changed. Where it has as many
            results as there are now, or more, there is no other start.

    Returns:
        The model, of one output; :func:`bo_stream.prevalence` gives its prevalences.

    Raises:
        InputDataError: Positions are not in the settings' units, covariates are missing, rows are
            no counts.
    """
    settings = settings or SurveyModelSettings()
    positives, examined = Y.double().sum(0)
    logit = float(torch.logit((positives + 0.5) / (examined + 1.0)))
    mean = ConstantMean(constant_prior=NormalPrior(logit, _MEAN_SD))
    mean.initialize(constant=logit)
    others = Outliers.like(Y[:, 0].double(), Y[:, 1].double(), settings.outliers)
    likelihood = BinomialLikelihood(
        settings.trials,
        settings.overdispersion,
        outliers=others.share,
        outlier_beta=(others.a, others.b),
    )
    model = OSVGP(
        X[:0],
        Y[:0],
        likelihood,
        covar_module=survey_kernel(sites, units=settings.units),
        mean_module=mean.to(Y),
        input_transform=map_inputs(sites, units=settings.units),
        max_points=settings.max_points,
        learning_rate=_CONCENTRATION_RATE,
        window=0,  # all results enter as one batch
    )
    starts = [model]
    if former is None or float(former.num_observations) < len(X):
        starts.append(deepcopy(model))
        position = starts[-1].covar_module.kernels[0]
        position.base_kernel.lengthscale = _SMOOTH[0] * position.base_kernel.lengthscale.detach()
        position.outputscale = _SMOOTH[1] * position.outputscale.detach()
    if former is not None:
        set_hyperparameters(model, hyperparameters(former))
    if len(X) == 0:
        return model
    ends = []
    for start in starts:
        start.update(X, Y)
        start.hyper_steps = _CONCENTRATION_STEPS if settings.overdispersion else 0
        ends.append(_round(start, X, Y))
    model, loss = min(ends, key=lambda end: end[1])
    for _ in range(1, FIRST_ROUNDS if former is None else ROUNDS):
        again, reached = _round(deepcopy(model), X, Y)
        gain = loss - reached
        if gain > 0.0:
            model, loss = again, reached
        if gain < _SETTLED:
            break
    if settings.overdispersion:
        model.hyper_steps = 0
        relearn(model)
        model.clear().update(X, Y)
    return model


def _round(model: OSVGP, X: Tensor, Y: Tensor) -> tuple[OSVGP, float]:
    """Learn hyperparameters, in place, then sites; return the model and its loss in nats."""
    relearn(model)
    model.clear().update(X, Y)
    return model, total_loss(model)


# --- the model of a survey -----------------------------------------------------------------------


MODEL = CheckpointFormat(
    "model.json", "model", FileFormat("bo_stream survey model", 1, True), ("survey",)
)


class ModelCache:
    """A model and the fingerprint of the facts that it was built from.

    A file that is missing, damaged, of other facts or of another version is passed over: the model
    is a function of the facts.

    Attributes:
        folder: Where the model is stored; None: in memory only.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Begin without a model in memory; the folder is read when a model is asked for."""
        self.folder = folder
        self._cached: tuple[str, StreamingGP] | None = None

    def model(self, facts: str, build: Callable[[], StreamingGP]) -> StreamingGP:
        """Return the model of the facts of a fingerprint, built unless cached."""
        if self._cached is None or self._cached[0] != facts:
            stored = self._read(facts)
            self._cached = facts, build() if stored is None else stored
            if stored is None:
                self._write()
        return self._cached[1]

    def move_to(self, folder: Path) -> None:
        """Store the model in a folder from now on."""
        self.folder = folder
        self._write()

    def _write(self) -> None:
        """Write the model; if that fails it will be built again when it is needed."""
        if self.folder is None or self._cached is None:
            return
        facts, model = self._cached
        try:
            MODEL.save(self.folder, {"facts": facts}, {"survey": model})
        except OSError as error:
            reason = error.strerror or str(error)
            warnings.warn(
                f"The model could not be kept in {self.folder} ({reason}).",
                RuntimeWarning,
                stacklevel=2,
            )

    def _read(self, facts: str) -> StreamingGP | None:
        if self.folder is None:
            return None
        try:
            content = read_index(self.folder / MODEL.name, MODEL.format)
            if content["facts"] != facts:
                return None
            file = from_record(ModelFile, content["models"]["survey"])
            kind = getattr(bo_stream, describe_file(self.folder / file.name)["class"])
            return file.read(self.folder, kind, "cpu") if issubclass(kind, StreamingGP) else None
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None


# --- predictions of prevalence at sites, as tables and as words ----------------------------------


ROWS = 4096
"""Number of sites that are predicted at a time."""

_QUANTILES = {"lower": 0.025, "q25": 0.25, "q75": 0.75, "upper": 0.975}


@torch.no_grad()
def predict_prevalence(model: StreamingGP, X: Tensor, settings: SurveySettings) -> pd.DataFrame:
    """Predict prevalence at sites.

    Args:
        model: Of the logit of prevalence.
        X: Sites, ``n x d``.
        settings: Of the survey: threshold, certainty and miss cost.

    Returns:
        A row a site: prevalence (mean), sd, lower, q25, q75, upper (quantiles), and with a
        threshold exceedance (probability of a prevalence above it) and class (above, below or
        uncertain).
    """
    parts = []
    for part in X.split(ROWS):
        rates = prevalence(model, part)
        quantiles = rates.quantile(torch.tensor(list(_QUANTILES.values())))
        values = {
            "prevalence": rates.mean,
            "sd": rates.variance.clamp_min(0.0).sqrt(),
            **dict(zip(_QUANTILES, quantiles.unbind(), strict=True)),
        }
        if settings.threshold is not None:
            values["exceedance"] = rates.exceedance(settings.threshold)
        parts.append(pd.DataFrame({name: v.reshape(-1).numpy() for name, v in values.items()}))
    table = pd.concat(parts, ignore_index=True)
    if settings.threshold is None:
        return table
    chance, (below, above) = table["exceedance"], settings.calls
    classes = np.select([chance >= above, chance <= below], ["above", "below"], "uncertain")
    return table.assign(**{"class": classes})


@torch.no_grad()
def exceedances(model: StreamingGP, X: Tensor, threshold: float) -> NDArray[np.float64]:
    """Compute the probability of a prevalence above a threshold at sites, ``n x d``, alone."""
    parts = [prevalence(model, part).exceedance(threshold).reshape(-1) for part in X.split(ROWS)]
    chances: NDArray[np.float64] = torch.cat(parts).numpy()
    return chances


def reasons(predictions: pd.DataFrame, threshold: float | None) -> list[str]:
    """Say of each predicted site what is not known about it."""
    columns = ("prevalence", "lower", "upper")
    spans = [
        f"prevalence {_in_two_digits(mean)} ({_in_two_digits(low)} to {_in_two_digits(high)})"
        for mean, low, high in zip(*(predictions[name] for name in columns), strict=True)
    ]
    if threshold is None:
        return spans
    chances: Sequence[float] = predictions["exceedance"].tolist()
    return [
        f"{span}; above {as_set(threshold)} with probability {chance:.2f}"
        for span, chance in zip(spans, chances, strict=True)
    ]


def _in_two_digits(share: float) -> str:
    """Write a share in per cent, to two digits."""
    return f"{float(f'{100.0 * share:.2g}'):g} %"


def per_cent(share: float) -> str:
    """Write a share as per cent, with two digits below ten."""
    value = 100.0 * share
    digits = 0 if abs(value) >= 9.95 or value == 0.0 else 1 if abs(value) >= 0.095 else 2
    return f"{value:,.{digits}f} %"


def as_set(share: float) -> str:
    """Write a share of the settings as per cent, with all digits that it was given."""
    return f"{100.0 * share:.10g} %"


# --- counts of a survey predicted by models that have not seen them ------------------------------


_LEVELS = (50, 95)
"""Per cent of the central intervals."""

Fit = Callable[[Tensor, Tensor], StreamingGP]


@torch.no_grad()
def held_out_counts(fit: Fit, X: Tensor, Y: Tensor, folds: int = 10, seed: int = 0) -> pd.DataFrame:
    """Predict the count of each row by a model of the rows in other folds.

    Costs one fit a fold, and O(examined^1.5) a row.

    Args:
        fit: Makes a model of the logit of prevalence, with a ``BinomialLikelihood``, from X and Y.
        X: Inputs, ``n x d``.
        Y: Rows ``[positives, examined]``, ``n x 2``.
        folds: Number of folds, drawn at random; at most n.
        seed: Of the folds.

    Returns:
        A row a row of X, in its order: ``examined``, ``positive``, ``expected`` (mean of the
        predicted count), and for each of the levels 50 and 95 per cent ``low_50``, ``high_50``,
        the bounds of the central interval, both inside, and ``chance_50``, the probability that
        the model gives to it. Counts are whole numbers: it is more than the level.
    """
    n = len(X)
    generator = torch.Generator().manual_seed(seed)
    fold = torch.randperm(n, generator=generator) % min(folds, n)
    columns: dict[str, Tensor] = {}
    for number in fold.unique().tolist():
        held = fold == number
        with torch.enable_grad():  # a fit needs gradients
            model = fit(X[~held], Y[~held])
        predicted = counts(model, X[held], Y[held, 1:])
        parts = {"expected": predicted.mean}
        for level in _LEVELS:
            low, high = predicted.interval(level / 100.0)
            below = torch.where(low > 0.0, predicted.cdf((low - 1.0).clamp_min(0.0)), 0.0)
            parts |= {f"low_{level}": low, f"high_{level}": high}
            parts[f"chance_{level}"] = predicted.cdf(high) - below
        for name, values in parts.items():
            columns.setdefault(name, Y.new_empty(n))[held] = values.squeeze(-1)
    told = {"examined": Y[:, 1].tolist(), "positive": Y[:, 0].tolist()}
    return pd.DataFrame(told | {name: values.tolist() for name, values in columns.items()})


def coverage(held_out: pd.DataFrame, level: int) -> tuple[float, float]:
    """Compute the share of counts inside their intervals, and the share the models expected.

    Args:
        held_out: Of ``held_out_counts``, with one row at least.
        level: 50 or 95, per cent.
    """
    inside = held_out["positive"].between(held_out[f"low_{level}"], held_out[f"high_{level}"])
    return float(inside.mean()), float(held_out[f"chance_{level}"].mean())


@torch.no_grad()
def log_scores(model: StreamingGP, X: Tensor, Y: Tensor) -> Tensor:
    """Compute the log probability, in nats, that a model gives to each count, ``n``.

    Args:
        model: Of the logit of prevalence.
        X: Inputs, ``n x d``.
        Y: Rows ``[positives, examined]``, ``n x 2``.
    """
    parts = [
        counts(model, inputs, rows[:, 1:]).log_prob(rows[:, :1])
        for inputs, rows in zip(X.split(ROWS), Y.split(ROWS), strict=True)
    ]
    return torch.cat(parts).squeeze(-1)


# --- calls of a survey: which sites are above the threshold, which below, which uncertain --------


ABOVE, UNCERTAIN, BELOW = "above", "uncertain", "below"

_NUMBERS = ("prevalence", "lower", "upper", "probability")


def calls_table(predictions: pd.DataFrame, labels: pd.DataFrame) -> pd.DataFrame:
    """List the sites with their calls: those above first, then uncertain ones, then those below.

    Sites above and uncertain ones are in the order of falling probability, sites below of rising
    one, so that the surest calls of each kind come first.

    Args:
        predictions: Of a survey with a threshold, a row a site: ``id``, position, ``class``,
            ``prevalence``, ``lower``, ``upper``, ``exceedance``, ``examined``, ``positive``,
            ``date``.
        labels: Other columns of the list of sites, such as name and district, indexed by id; see
            ``Survey.labels``. Sites that are not in it have empty ones.

    Returns:
        ``id``, the labels (with ``listed_`` before a name that another column of this table has),
        position, ``call`` (above, uncertain or below), ``prevalence`` (mean), ``lower`` and
        ``upper`` (95 % interval), ``probability`` (of a prevalence above the threshold),
        ``examined`` and ``positive`` (NaN where not surveyed), ``date`` (of the result).

    Raises:
        ValueError: The predictions have no threshold.
    """
    if "class" not in predictions:
        raise ValueError("Expected predictions with a threshold, got none: there are no calls.")
    renamed = predictions.rename(columns={"class": "call", "exceedance": "probability"})
    place = ["longitude", "latitude"] if "longitude" in predictions else ["east", "north"]
    numbers = renamed[[*place, "call", *_NUMBERS, "examined", "positive", "date"]]
    names = listed_as(labels, ["id", *numbers.columns])
    described = (
        labels.set_axis(list(names.values()), axis=1)
        .reindex(predictions["id"])
        .reset_index(drop=True)
    )
    table = pd.concat(
        (predictions[["id"]].reset_index(drop=True), described, numbers.reset_index(drop=True)),
        axis=1,
    )
    rank = table["call"].map({ABOVE: 0, UNCERTAIN: 1, BELOW: 2})
    rising = table["probability"].where(table["call"] == BELOW, -table["probability"])
    return table.iloc[np.lexsort((rising, rank))].reset_index(drop=True)


def chances_of_wrong_calls(chances: NDArray[np.float64], cut: float) -> NDArray[np.float64]:
    """Compute the probability of each call that it is wrong.

    Args:
        chances: Probability of a prevalence above the threshold, of each site.
        cut: That from which on a site is called above; see ``SurveySettings.cheaper_above``.
    """
    return np.where(chances >= cut, 1.0 - chances, chances)


# --- the stopping rule of a survey: how many more sites until few enough calls are wrong ---------


RATE = 0.65
"""Rate b at which the expected share of wrong calls falls with the number n of results, ``n^−b``.

That of 32 replays of ``benchmarks/maps/stopping.py`` (seeds 0 to 2 and 5 to 9), in the middle: half
of them had rates of 0.49 to 0.75 from the fourth round on.
"""

_WITHIN = (
    "in three of four replays it took two thirds to one and a half times as many, in the others a "
    "quarter to more than three times"
)
"""How rough the forecast is after the first random sites: of the 20 replays of seeds 15 to 19."""


@dataclass(frozen=True)
class Stopping:
    """Expected share of wrong calls today, and the share to be reached.

    Every site of the list is called, surveyed or not: above from the probability ``1 / (1 + w)`` of
    a prevalence above the threshold on, w the cost of a miss in false alarms, else below. The share
    is the mean over all sites of the probability that the call is wrong. It is the model's own: how
    far to trust it, calibration says.

    The model does not predict later shares: its look ahead fixes today's hyperparameters, but each
    fit moves them, and these steps decide. The share s is taken to fall as in replays,
    ``s ∝ n^−b`` with the number n of results and b ``RATE``.

    Attributes:
        target: Share to be reached.
        share: Expected share of wrong calls today.
        results: Number n of sites with results.
        pending: Number of sites that are asked for and have no result yet.
        left: Number of sites of the list without a result that may be surveyed, pending ones too.
    """

    target: float
    share: float
    results: int
    pending: int
    left: int

    @property
    def reached(self) -> bool:
        """Whether the survey may end today."""
        return self.share <= self.target

    @property
    def more(self) -> int | None:
        """Number of further sites, pending ones included, until then; None: more than are left.

        ``n ((s / target)^(1 / b) − 1)``.
        """
        if self.reached:
            return 0
        growth = math.log(self.share / self.target) / RATE
        if growth > math.log1p(self.left / self.results):
            return None
        return math.ceil(self.results * math.expm1(growth))

    def in_words(self) -> str:
        """Say in a sentence or two how far it is."""
        now, line = per_cent(self.share), as_set(self.target)
        rule = f"at most {line} of all calls are to be wrong; today {now} are expected to be"
        if self.reached:
            return f"Stopping rule reached: {rule}. You may end the survey here."
        if self.left == 0:
            return f"Stopping rule: {rule}, and no site is left to survey."
        if self.more is None:
            return f"Stopping rule: {rule}. It takes more than the {self.left:,} sites left."
        until = f"Until then roughly {self.more:,} more sites"
        if self.pending > self.more:
            enough = f"The {self.pending:,} pending ones may be enough"
            until = f"{enough} (roughly {self.more:,} are needed)"
        elif self.pending:
            until += f", the {self.pending:,} pending ones among them"
        return f"Stopping rule: {rule}. {until}; {_WITHIN}."
