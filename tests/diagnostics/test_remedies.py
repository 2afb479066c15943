"""The line of code of each alarm runs for every model, and keeps its likelihood and outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from botorch.models.transforms.input import Normalize
from botorch.models.transforms.outcome import Bilog, ChainedOutcomeTransform, Log, Standardize
from gpytorch.likelihoods import BernoulliLikelihood, StudentTLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

import bo_stream
from bo_stream import (
    OSVGP,
    WISKI,
    AutoGP,
    BayesianLastLayer,
    BinomialLikelihood,
    DecoupledGP,
    DirichletWISKI,
)
from bo_stream.allocation import Novelty
from bo_stream.diagnostics import Alarm, ProgressiveValidation
from bo_stream.diagnostics.alarms import Innovations, _relearning, find_alarms
from bo_stream.diagnostics.approximation import ApproximationGap, approximation_gap, rebuilt
from bo_stream.diagnostics.sketches import UnitChange
from bo_stream.models.base import StreamingGP
from bo_stream.testing.streams import ExampleData
from tests.laws.cases import CASES
from tests.laws.registry import Stream, shared_out

pytestmark = pytest.mark.filterwarnings("ignore")

UNBATCHED = [[each for each in case.settings if not each.batch_shape] for case in CASES]
STREAMS = [  # the most outputs of each
    Stream(case, max(settings, key=lambda setting: setting.outputs))
    for case, settings in zip(CASES, UNBATCHED, strict=True)
    if settings
]
UNIT = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


def names_of(model: StreamingGP, **rows: Any) -> dict[str, Any]:
    """What a remedy may name."""
    steps = (Bilog, ChainedOutcomeTransform, Log, Standardize)
    transforms = {each.__name__: each for each in steps}
    models = {name: getattr(bo_stream, name) for name in (type(model).__name__, "OSGPR", "OSVGP")}
    fits = {
        "ExactMarginalLogLikelihood": ExactMarginalLogLikelihood,
        "fit_gpytorch_mll": lambda mll: mll.model.posterior(UNIT.to(model.train_targets)),
    }
    kinds = {"StudentTLikelihood": StudentTLikelihood, "Novelty": Novelty}
    others = {"model": model, "torch": torch, "np": np, "bounds": UNIT}
    return {**transforms, **models, **fits, **kinds, **others, **rows}


def alarm_of(illness: str, model: StreamingGP, data: ExampleData) -> Alarm | None:
    """Ring an alarm of a record; None where such models have none."""
    record, outputs = ProgressiveValidation(), model.num_outputs
    record.add(model, *data.astuple())
    for test in record.drift:
        test.signals = []
    if illness != "dead input" and not record.drift:
        return None
    quiet = Innovations(1000, 0.0, 1.0, 0, 0.0)
    gap: ApproximationGap | str = "none"
    innovations, effects = [quiet] * outputs, [1.0] * data.X.shape[-1]
    if illness in ("outcomes", "inputs"):
        powers = (3,) * (outputs if illness == "outcomes" else len(effects))
        record.units.change = UnitChange(illness, powers, 30)
    elif illness == "units of one":
        record.units.change = UnitChange("outcomes", (*(0,) * (outputs - 1), -3), 30)
    elif illness == "repeated rows":
        record.repeated.counts = dict.fromkeys(record.repeated.counts, 2)
    elif illness == "approximation":
        gap = approximation_gap(model, *data.astuple())
        if isinstance(gap, str):
            return None
        gap = ApproximationGap(100, 1.0, 1.0, [], [])
    elif illness == "drift":
        record.drift[0].signals = [[60, 40, 1]]
    elif illness == "dead input":
        effects[1:] = [0.0] * len(effects[1:])
    else:
        innovations = [Innovations(1000, 0.1, *LAST[illness])] * outputs
    (alarm,) = find_alarms(model, record, innovations, gap, effects)
    return alarm


LAST = {"noise": (3.0, 0, 0.0), "skew": (1.0, 0, 1.0), "bilog": (1.0, 0, -1.0), "tails": (1, 99, 0)}
"""Scale, number of far ones and skew of innovations."""

ILLNESSES = (
    *("outcomes", "inputs", "units of one", "repeated rows", "approximation", "drift"),
    *("dead input", *LAST),
)


def rows_of(values: dict[str, Any]) -> set[tuple[float, ...]]:
    """The rows of X, Y and Yvar, each once."""
    parts = [values[name] for name in ("X", "Y", "Yvar") if values[name] is not None]
    return set(map(tuple, torch.cat(parts, -1).nan_to_num(-1.0).tolist()))


@pytest.mark.parametrize("stream", shared_out(STREAMS))
def test_remedies_are_lines_that_run_for_every_model(stream: Stream) -> None:
    data = stream.data(120)
    old, new = data[:60], data[60:]
    for illness in ILLNESSES:
        model = stream.model(old)
        alarm = alarm_of(illness, model, new)
        if alarm is None:
            continue
        model.update(*new.astuple())
        kind, outputs, count = type(model.likelihood), model.num_outputs, model.num_observations
        rows = {"": data, "_old": old, "_new": new}
        values = {
            f"{name}{age}": value
            for age, part in rows.items()
            for name, value in zip(("X", "Y", "Yvar"), part.astuple(), strict=True)
        }
        if alarm.name == "repeated rows":
            values |= {n: None if v is None else torch.cat((v, v)) for n, v in values.items()}
        names = names_of(model, **values)
        exec(alarm.remedy.replace("seconds=60", "steps=2"), names)
        mended = names["model"]
        assert isinstance(mended, StreamingGP)
        assert mended.num_outputs == outputs
        if illness not in ("skew", "bilog", "tails"):  # these are of another likelihood
            assert type(mended.likelihood) is kind, alarm.remedy
        if alarm.name == "units":
            assert mended.num_observations == pytest.approx(count, rel=1e-6)
        if alarm.name == "repeated rows":
            assert rows_of(names) == rows_of(values)
            assert len(names["X"]) == len(data)


# --- the same model, in its own words -----------------------------------------------------------

X = torch.tensor([[0.1, 0.2], [0.5, 0.4], [0.9, 0.9], [0.3, 0.7]], dtype=torch.float64)
REAL = X.prod(-1, keepdim=True)
LABELS, COUNTS = (REAL > 0.2).double(), torch.tensor([[1.0, 4.0]] * 4).double()
FROZEN = StudentTLikelihood().requires_grad_(False)
WIDE = torch.tensor([[-1.0, -2.0], [2.0, 3.0]], dtype=torch.float64)
LIKELIHOOD = "likelihood=model.likelihood"
OWN: list[tuple[Callable[[Tensor], StreamingGP], Tensor, str]] = [
    (lambda Y: WISKI(X, Y), REAL, ""),
    (lambda Y: WISKI(X, Y, bounds=WIDE), REAL, "bounds=model.bounds[:, [1]]"),
    (
        lambda Y: WISKI(X, Y, likelihood=BinomialLikelihood(), bounds=WIDE),
        COUNTS,
        f"{LIKELIHOOD}, bounds=model.bounds[:, [1]]",
    ),
    (lambda Y: WISKI(X, Y, input_transform=Normalize(2, bounds=WIDE)), REAL, ""),
    (lambda Y: DirichletWISKI(X, Y), LABELS, ""),
    (lambda Y: DirichletWISKI(X, Y, num_classes=3), LABELS, "num_classes=3"),
    (lambda Y: AutoGP(X, Y), REAL, ""),
    (lambda Y: AutoGP(X, Y, bounds=WIDE), REAL, "bounds=bounds[:, [1]]"),
    (lambda Y: AutoGP(X, Y, likelihood=BinomialLikelihood()), COUNTS, LIKELIHOOD),
    (lambda Y: OSVGP(X, Y), REAL, ""),
    (lambda Y: OSVGP(X, Y, BernoulliLikelihood()), LABELS, LIKELIHOOD),
    (
        lambda Y: OSVGP(X, Y, StudentTLikelihood(), outcome_transform=Standardize(1)),
        REAL,
        f"{LIKELIHOOD}.requires_grad_(), outcome_transform=Standardize(1)",
    ),
    (lambda Y: OSVGP(X, Y, FROZEN), REAL, LIKELIHOOD),
    (lambda Y: DecoupledGP(X, Y, StudentTLikelihood()), REAL, LIKELIHOOD),
]


@pytest.mark.parametrize(("build", "outcomes", "own"), OWN)
def test_a_model_is_built_again_with_what_is_its_own(
    build: Callable[[Tensor], StreamingGP], outcomes: Tensor, own: str
) -> None:
    model = build(outcomes)
    line = rebuilt(model, inputs="[:, [1]]")
    assert line == f"model = {type(model).__name__}(X[:, [1]], Y{own and ', ' + own})"
    names = names_of(model, X=X, Y=outcomes, bounds=WIDE)
    exec(line, names)
    again = names["model"]
    assert type(again.likelihood) is type(model.likelihood)
    assert again.num_outputs == model.num_outputs
    if "model.bounds" in own:
        bounds: Any = model.bounds
        assert torch.equal(again.bounds, bounds[:, [1]])


def test_a_likelihood_learns_on_in_a_model_that_is_built_again() -> None:
    model = OSVGP(X, REAL, StudentTLikelihood(), hyper_steps=1)
    names = names_of(model, X=X, Y=REAL)
    exec(rebuilt(model, "hyper_steps=1"), names)
    assert not torch.equal(names["model"].likelihood.noise, model.likelihood.noise)


def test_known_noise_of_a_last_layer_is_corrected_as_noise() -> None:
    """Its third argument is the network."""
    model = BayesianLastLayer(X, REAL, train_Yvar=0.1 * REAL)
    line = _relearning(model, 3.0, 0.1 * REAL)
    assert line == "model = BayesianLastLayer(X, Y, train_Yvar=3 * Yvar)"
