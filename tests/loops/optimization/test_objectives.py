from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from botorch.test_functions import Branin, Hartmann

from bo_stream.errors import UsageError
from bo_stream.loops.optimization.objectives import find_objective

OWN = "tests.loops.functions"


def test_test_functions_are_botorch_s() -> None:
    for name, theirs in (("branin", Branin()), ("Hartmann", Hartmann(dim=3))):
        dim = 3 if name == "Hartmann" else None
        ours = find_objective(name, dim, 0.0, None, 0)
        X = [low + 0.3 * (high - low) for low, high in ours.bounds]
        assert ours.bounds == tuple(map(tuple, theirs.bounds.T.tolist()))
        assert ours.optimum == pytest.approx(theirs.optimal_value)
        assert ours.evaluate(X, 0, 0) == float(theirs(torch.tensor([X], dtype=torch.float64)))


def test_noise_is_drawn_by_seed_key_and_attempt() -> None:
    def draw(seed: int, key: int, attempt: int) -> Any:
        return find_objective("Branin", None, 2.0, None, seed).evaluate([0.0, 1.0], key, attempt)

    assert draw(0, 3, 1) == draw(0, 3, 1)
    assert len({draw(0, 3, 1), draw(1, 3, 1), draw(0, 4, 1), draw(0, 3, 2)}) == 4
    objective = find_objective("Branin", None, 2.0, None, 0)
    clean = objective.noiseless([0.0, 1.0])
    noise = [objective.evaluate([0.0, 1.0], key, 0) - clean for key in range(2000)]
    assert np.std(noise) == pytest.approx(2.0, rel=0.1)


def test_a_function_of_one_s_own() -> None:
    objective = find_objective(f"{OWN}:bowl", None, 0.0, ((0, 1), (2, 3)), 4)
    assert objective.bounds == ((0.0, 1.0), (2.0, 3.0))
    assert objective.evaluate((0.7, 2.7), 0, 0) == pytest.approx(4.0)
    assert objective.noiseless((0.7, 2.7)) is None
    assert (objective.dim, objective.seed) == (2, 4)  # which a resumed run is compared with


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("Brannin", {}, "No test function 'Brannin'. Expected one of Ackley, .*Branin"),
        ("AckleyMixed", {}, "No test function 'AckleyMixed'"),
        ("mine", {"bounds": ((0.0, 1.0),)}, "'mine'. Expected .*, or package.module:function"),
        ("Branin", {"dim": 3}, "Branin has a fixed number of inputs: leave out --dim"),
        ("Hartmann", {"dim": 2}, "Hartmann cannot have --dim 2"),
        ("Ackley", {"dim": 0}, "Expected --dim to be a whole number of at least 1, got 0"),
        ("Branin", {"noise": -1.0}, "--noise of at least 0"),
        ("Branin", {"bounds": ((0.0, 1.0),)}, "--bounds are for functions of your own"),
        (f"{OWN}:bowl", {}, "Say the bounds of each input"),
        (f"{OWN}:bowl", {"bounds": ((1.0, 0.0),)}, "low < high"),
        (f"{OWN}:bowl", {"bounds": ((0.0, 1.0),), "dim": 1}, "--dim and --noise are for test"),
        (f"{OWN}:bow", {"bounds": ((0.0, 1.0),)}, "a function named 'bow' .* found nothing"),
        (f"{OWN}:NUMBER", {"bounds": ((0.0, 1.0),)}, "found a float"),
        ("nowhere.at:all", {"bounds": ((0.0, 1.0),)}, "module 'nowhere.at' cannot be imported"),
        (":f", {"bounds": ((0.0, 1.0),)}, "Expected FUNCTION as package.module:function"),
    ],
)
def test_what_cannot_be_optimised_is_said(
    function: str, options: dict[str, Any], message: str
) -> None:
    every = {"dim": None, "noise": 0.0, "bounds": None, "seed": 0, **options}
    with pytest.raises(UsageError, match=message):
        find_objective(function, **every)


def test_a_module_that_ends_the_process_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ending_script.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"imported .SystemExit: 0.\. Put what it does as a scr"):
        find_objective("ending_script:cost", None, 0.0, ((0.0, 1.0),), 0)
