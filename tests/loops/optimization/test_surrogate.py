"""Which features a grid model has while a loop refits it, and between refits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpytorch.kernels import RBFKernel

from bo_stream import WISKI
from bo_stream.diagnostics.validation import ProgressiveValidation
from bo_stream.loops.optimization import optimizer
from bo_stream.loops.optimization.optimizer import load_optimizer, save_optimizer
from tests.loops.optimizing import started
from tests.support.problems import observations


def test_a_refit_learns_with_all_features_and_leaves_few(monkeypatch: pytest.MonkeyPatch) -> None:
    model = WISKI(*observations(20).astuple(), covar_module=RBFKernel(), grid_size=9)
    model.likelihood.noise = 0.5
    optimizer.thin(model)
    few, ranks = model.rank, list[int]()
    monkeypatch.setattr(optimizer, "relearn", lambda model: ranks.append(model.rank))
    optimizer.learn(model)
    assert ranks[0] > few == model.rank


def test_outcomes_are_predicted_before_they_enter() -> None:
    optimizer = started(steps=3)
    optimizer.best()
    record = optimizer.surrogate.validation
    assert record.rows == 3  # the model was built of the four first ones
    assert optimizer.surrogate.model is not None
    assert len(optimizer.surrogate.held) == 7


def test_a_model_in_other_units_has_a_record_of_its_own() -> None:
    optimizer = started(steps=2)
    optimizer.best()
    assert optimizer.surrogate.validation.rows == 2
    (trial,) = optimizer.ask()
    optimizer.tell(trial.key, 1e9)
    optimizer.best()
    assert optimizer.surrogate.validation.rows == 0


def test_the_record_is_saved_with_the_model(tmp_path: Path) -> None:
    optimizer = started(steps=2)
    optimizer.best()
    save_optimizer(tmp_path, optimizer)
    loaded, _ = load_optimizer(tmp_path)
    assert loaded.surrogate.validation.state() == optimizer.surrogate.validation.state()


def test_an_interrupt_in_an_update_puts_no_outcome_in_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = started(steps=2)
    optimizer.best()
    observe = ProgressiveValidation.observe

    def interrupted(*args: Any) -> None:
        observe(*args)
        raise KeyboardInterrupt

    (trial,) = optimizer.ask()
    optimizer.tell(trial.key, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(ProgressiveValidation, "observe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.best()
    optimizer.best()
    model = optimizer.surrogate.model
    assert model is not None
    assert model.num_observations == len(optimizer.surrogate.held) == 7
