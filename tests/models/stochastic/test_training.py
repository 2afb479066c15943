"""The training loop, on a learner whose bound is written down for each of its steps."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from botorch.exceptions.errors import ModelFittingError
from linear_operator.utils.errors import NotPSDError
from rich.console import Console

from bo_stream.models.stochastic import training
from bo_stream.models.stochastic.training import (
    DEFAULT_STEPS,
    WINDOW,
    Training,
    tracked,
    train,
    waiting,
)

Bound = Callable[[int], float]


@dataclass
class Learner:
    """Counts its steps.

    Attributes:
        bound: Of a step.
        learning_rate: Named in errors.
        num_steps: So far.
        num_data: Of the bound.
        is_valid: Whether what it learned is.
        copies: Steps at which its state was copied.
    """

    bound: Bound
    learning_rate: float = 0.3
    num_steps: int = 0
    num_data: float = 1000.0
    is_valid: bool = True
    copies: list[int] = field(default_factory=list)

    def take_step(self) -> float:
        self.num_steps += 1
        return self.bound(self.num_steps)

    def learned_state(self) -> int:
        self.copies.append(self.num_steps)
        return self.num_steps

    def restore(self, state: int) -> None:
        self.num_steps = state


def run(learner: Learner, steps: int | None = None, seconds: float | None = None) -> Training:
    return train(learner, steps, seconds, progress=False)


def rising(step: int) -> float:
    return -1000.0 / step


def at(when: int, value: float, otherwise: Bound = rising) -> Bound:
    return lambda step: value if step == when else otherwise(step)


def raising(when: int, error: BaseException) -> Bound:
    def bound(step: int) -> float:
        if step == when:
            raise error
        return rising(step)

    return bound


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes whenever the time is asked for."""
    seconds = itertools.count()
    monkeypatch.setattr(training.time, "monotonic", lambda: float(next(seconds)))


def test_takes_the_steps_it_is_given_and_traces_the_smoothed_bound() -> None:
    learner = Learner(float)
    done = run(learner, steps=120)
    assert (done.steps, learner.num_steps) == (120, 120)
    late = [(step, step - 0.5 * (WINDOW - 1)) for step in (50, 100, 120)]
    assert list(done.trace) == late
    assert learner.copies == [0, 50, 100]


def test_another_call_goes_on() -> None:
    learner = Learner(rising)
    run(learner, steps=50)
    assert run(learner, steps=50).trace[0][0] == learner.num_steps == 100


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("limits", [(4, None), (9, 4.0), (None, 4.0)])
def test_says_before_each_step_what_part_of_the_limit_is_spent(
    limits: tuple[int | None, float | None],
) -> None:
    told = list[float]()
    train(Learner(rising), *limits, progress=False, before_step=told.append, started=0.0)
    assert told == [0.0, 0.25, 0.5, 0.75]


def test_a_default_where_no_limit_is_given() -> None:
    assert run(Learner(rising)).steps == DEFAULT_STEPS


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("steps", "taken"), [(None, 16), (3, 3), (1000, 16)])
def test_stops_at_the_first_limit_reached(steps: int | None, taken: int) -> None:
    done = run(Learner(rising), steps=steps, seconds=16.0)
    assert done.steps == taken
    assert done.seconds >= taken


@pytest.mark.parametrize("limit", [{"steps": 0}, {"seconds": 0.0}])
def test_no_step_at_a_limit_of_zero(limit: dict[str, float]) -> None:
    learner = Learner(rising)
    assert run(learner, **limit).steps == learner.num_steps == 0


@pytest.mark.parametrize("limit", [{"steps": -1}, {"seconds": -0.5}, {"seconds": math.nan}])
def test_refuses_a_negative_limit(limit: dict[str, float]) -> None:
    (name,) = limit
    with pytest.raises(ValueError, match=name):
        run(Learner(rising), **limit)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bound_that_is_not_finite_restores_and_says_so(value: float) -> None:
    learner = Learner(at(137, value))
    with pytest.raises(ModelFittingError, match=r"near step 137.*after step 100.*got 0\.3.*0\.1"):
        run(learner, steps=200)
    assert learner.num_steps == 100


def test_a_failed_factorisation_is_a_divergence() -> None:
    for error in (NotPSDError("no factor"), torch.linalg.LinAlgError("singular")):
        learner = Learner(raising(70, error))
        with pytest.raises(ModelFittingError, match="a step failed") as caught:
            run(learner, steps=200)
        assert caught.value.__cause__ is error
        assert learner.num_steps == 50


@pytest.mark.parametrize("start", [3, 60, 145])
def test_an_exploding_bound_goes_back_to_where_it_was_good(start: int) -> None:
    """Also where the first steps explode, and where a check falls within the explosion."""
    learner = Learner(lambda step: -1000.0 * 1.5 ** max(step - start, 0))
    with pytest.raises(ModelFittingError, match="the bound fell from"):
        run(learner, steps=10_000)
    assert learner.num_steps == start // 50 * 50


def test_a_slow_explosion_does_not_keep_what_is_bad_already() -> None:
    learner = Learner(lambda step: -1000.0 * 1.02 ** max(step - 300, 0))
    with pytest.raises(ModelFittingError, match="the bound fell from"):
        run(learner, steps=10_000)
    assert learner.num_steps == 300


@pytest.mark.parametrize("level", [-1e6, -1000.0, 0.0, 1000.0])
def test_first_steps_may_fall_but_have_to_recover(level: float) -> None:
    """An explosion within the first estimates, before there is a mean of theirs to fall from."""
    unit = abs(level) + Learner.num_data

    def fallen(depth: float, until: int) -> Bound:
        return lambda step: level - depth * unit * (1 < step <= until)

    for fine in (fallen(1e6, until=80), fallen(1.5, until=300)):
        assert run(Learner(fine), steps=300).steps == 300
    learner = Learner(fallen(2.5, until=300))
    with pytest.raises(ModelFittingError, match=r"near step 100.*the bound fell from"):
        run(learner, steps=300)
    assert learner.num_steps == 0


def test_what_the_last_step_broke_is_found() -> None:
    """No estimate of the bound comes after it."""
    learner = Learner(rising)

    def breaking(step: int) -> float:
        learner.is_valid = step < 3
        return rising(step)

    learner.bound = breaking
    with pytest.raises(ModelFittingError, match="no longer finite"):
        run(learner, steps=3)
    assert learner.num_steps == 0


def test_what_is_broken_is_not_kept() -> None:
    """Though the bound can still be estimated."""
    learner = Learner(rising)

    def breaking(step: int) -> float:
        learner.is_valid = step != 100
        return rising(step)

    learner.bound = breaking
    with pytest.raises(ModelFittingError, match=r"near step 100.*after step 50"):
        run(learner, steps=200)
    assert learner.num_steps == 50


def test_noise_is_no_explosion() -> None:
    """However wide the estimates, around a bound of any size or sign."""
    for level, deviation in itertools.product((-1e6, 0.0, 3.0), (0.0, 1.0, 1e7)):
        draws = level + deviation * torch.randn(3000, dtype=torch.float64)
        values = draws.tolist()
        learner = Learner(lambda step, values=values: values[step - 1])
        assert run(learner, steps=3000).steps == 3000


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("of another kind")])
def test_an_interrupt_leaves_the_last_checked_state(error: BaseException) -> None:
    learner = Learner(raising(137, error))
    with pytest.raises(type(error)):
        run(learner, steps=200)
    assert learner.num_steps == 100
    learner.bound = rising
    assert run(learner, steps=7).trace[-1][0] == 107


def captured(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> io.StringIO:
    """What is drawn on standard error."""
    screen = io.StringIO()
    monkeypatch.setattr(
        training,
        "Console",
        lambda **_: Console(file=screen, force_terminal=terminal, width=120, highlight=False),
    )
    return screen


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
def test_draws_a_bar_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, wanted: bool
) -> None:
    screen = captured(monkeypatch, terminal)
    train(Learner(lambda _: -12.5), 1200, None, progress=wanted)
    drawn = screen.getvalue()
    assert ("step 1,200" in drawn and "bound -12.5" in drawn) is (terminal and wanted)
    assert terminal or drawn == ""


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
def test_other_work_is_shown_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, wanted: bool
) -> None:
    screen = captured(monkeypatch, terminal)
    if not terminal:  # before release 15 of Rich a bar that is disabled ends with an empty line
        monkeypatch.setattr("rich.progress.Progress.stop", lambda bar: bar.console.print())
    assert list(tracked(iter("abc"), 3, wanted)) == ["a", "b", "c"]
    drawn = screen.getvalue()
    assert terminal or drawn == ""
    assert ("all data" in drawn and "100%" in drawn) is (terminal and wanted)
    with waiting("an exact GP", wanted):
        pass
    assert ("an exact GP" in screen.getvalue()) is (terminal and wanted)
