"""The generator of the standard gest-api, called as drivers call it, and driven by one of them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import gest_api
import numpy as np
import pandas as pd
import pytest
import torch
from gest_api.vocs import VOCS, ContinuousVariable

from bo_stream.errors import UsageError
from bo_stream.gest import Generator
from bo_stream.loops.optimization import OptimizationSettings, Optimizer, save_optimizer
from tests.loops.optimizing import QUICK, started
from tests.support.drafts import *  # noqa: F403 (fixtures, by their names in __all__)

QUICKLY: dict[str, Any] = {"initial": 4, "num_restarts": 2, "raw_samples": 16, "grid": (24,)}
Point = dict[str, Any]


def line(objective: str = "MINIMIZE", **more: Any) -> VOCS:
    """One variable."""
    return VOCS(variables={"x": [-2.0, 3.0]}, objectives={"f": objective}, **more)


def measured(point: Point) -> Point:
    return {**point, "f": (point["x"] - 0.7) ** 2}


def run(generator: Generator, steps: int = 3, q: int = 2) -> list[Point]:
    """Ask, measure and tell, and return the points of all steps."""
    generator.ingest([measured(point) for point in generator.suggest(4)])
    points: list[Point] = []
    for _ in range(steps):
        points += generator.suggest(q)
        generator.ingest([measured(point) for point in points[-q:]])
    return points


def statuses(generator: Generator) -> list[str]:
    return [trial.status for trial in generator.optimizer.ledger]


# --- the standard -------------------------------------------------------------------------------


def test_is_a_generator_of_the_standard_that_names_its_points() -> None:
    vocs = line(constants={"alpha": 0.5}, observables=["t"])
    generator = Generator(vocs, q=3, **QUICKLY)
    assert isinstance(generator, gest_api.Generator)
    assert generator.returns_id
    assert [len(generator.suggest(n)) for n in (1, np.int64(2), None)] == [1, 2, 3]
    points = generator.suggest(2)
    assert [point["_id"] for point in points] == [6, 7]
    for point in points:
        assert set(point) == {"x", "alpha", "_id"}
        assert isinstance(point["x"], float)
        assert point["alpha"] == 0.5


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", True, math.nan])
def test_a_number_of_points_that_is_none_is_refused(count: Any) -> None:
    generator = Generator(line(), **QUICKLY)
    with pytest.raises(ValueError, match="Expected num_points to be a whole number"):
        generator.suggest(count)
    assert len(generator.optimizer.ledger) == 0


def test_suggests_what_the_optimizer_would_ask_for() -> None:
    bounds = {"bounds": ((-2.0, 3.0),)}
    optimizer = Optimizer(OptimizationSettings(**bounds, **QUICKLY, seed=3))
    expected = []
    for count in (4, 2, 2):
        trials = optimizer.ask(count)
        for trial in trials:
            optimizer.tell(trial.key, measured({"x": trial.X[0]})["f"])
        expected += [trial.X[0] for trial in trials]
    points = run(Generator(line(), **QUICKLY, seed=3), steps=2)
    assert [point["x"] for point in points] == expected[4:]


@pytest.mark.usefixtures("whole_fits")
@pytest.mark.parametrize(("objective", "best"), [("MINIMIZE", 0.7), ("MAXIMIZE", -2.0)])
def test_finds_the_best_point_in_the_direction_of_the_vocs(objective: str, best: float) -> None:
    generator = Generator(line(objective), **QUICKLY)
    run(generator, steps=4)
    assert generator.optimizer.best().trial.X[0] == pytest.approx(best, abs=0.1)


@pytest.mark.parametrize("options", [{"model": "osgpr"}, {"model": "wiski", "grid": (24,)}])
def test_explores_where_nothing_is_known(options: dict[str, Any]) -> None:
    """Both with a model that is a process of features alone and with one that is not."""
    generator = Generator(line("EXPLORE"), **{**QUICKLY, "grid": None, **options})
    known = [-2.0, -1.6, -1.2, -0.8, -0.4, 0.0]
    generator.ingest([measured({"x": x}) for x in known])
    points = [point["x"] for point in generator.suggest(2)]
    assert min(points) > 0.0
    assert abs(points[0] - points[1]) > 0.3  # each counts on the other


REFUSED: list[tuple[Callable[[], VOCS], str]] = [
    (lambda: VOCS(variables={}, objectives={"f": "MINIMIZE"}), "at least one variable"),
    (lambda: VOCS(variables={"x": [0, 1]}), "one objective, got 0: none"),
    (
        lambda: VOCS(variables={"x": [0, 1]}, objectives={"f": "MINIMIZE", "g": "MAXIMIZE"}),
        r"one objective, got 2: f, g\. For several objectives use Ax with bo_stream\.ax",
    ),
    (lambda: line(constraints={"c": ["LESS_THAN", 0.0]}), "without constraints, got c.*use Ax"),
    (
        lambda: VOCS(variables={"x": {"a", "b"}}, objectives={"f": "MINIMIZE"}),
        "continuous variables, got x of 2 values.*use Ax",
    ),
    (
        lambda: VOCS(variables={"x": [0, 1], "c": "CONTEXTUAL"}, objectives={"f": "MINIMIZE"}),
        "got c, a ContextualVariable.*fixed_features",
    ),
    (
        lambda: VOCS(
            variables={"x": ContinuousVariable(domain=[0, math.inf])}, objectives={"f": "MINIMIZE"}
        ),
        "finite bounds of x",
    ),
    (
        lambda: VOCS(
            variables={"x": ContinuousVariable(domain=[0, 1], dtype=(float, (2,)))},
            objectives={"f": "MINIMIZE"},
        ),
        "x to be a float, got dtype .* one variable for each entry",
    ),
    (lambda: line(constants={"x": 1.0}), "a name of their own each.* got x twice"),
    (lambda: line(constants={"f": 1.0}), "got f twice"),
    (lambda: VOCS(variables={"f": [0, 1]}, objectives={"f": "MINIMIZE"}), "got f twice"),
    (lambda: VOCS(variables={"_id": [0, 1]}, objectives={"f": "MINIMIZE"}), "got _id twice"),
]


@pytest.mark.parametrize(("vocs", "message"), REFUSED)
def test_a_vocs_that_it_cannot_take_is_refused_with_what_to_use_instead(
    vocs: Callable[[], VOCS], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Generator(vocs())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 3}, "Expected settings among .*acquisition.* got batch"),
        ({"maximize": True}, "Bounds and direction are the VOCS's"),
        ({"model": "none"}, "Expected model"),
        ({"q": 0}, "Expected q to be a whole number of at least 1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Generator(line(), **settings)


def test_an_objective_to_explore_has_its_own_acquisition() -> None:
    with pytest.raises(UsageError, match="acquisition of its own, got 'TS'"):
        Generator(line("EXPLORE"), acquisition="TS")
    assert len(Generator(line("EXPLORE"), acquisition="random").suggest(7)) == 7


# --- results ------------------------------------------------------------------------------------


def test_results_come_in_any_order_late_or_never() -> None:
    generator = Generator(line(), **QUICKLY)
    first = generator.suggest(4)
    generator.ingest([measured(point) for point in reversed(first[1:])])
    (more,) = generator.suggest(1)
    generator.ingest([measured(more)])
    assert statuses(generator) == ["pending", "told", "told", "told", "told"]


@pytest.mark.parametrize(
    "value",
    [
        None,
        math.nan,
        math.inf,
        -math.inf,
        1e300,
        10**400,
        -(10**400),
        pd.NA,
        pd.NaT,
        np.ma.masked,
        np.ma.masked_array([1.0], [True]),
        "missing",
    ],
    ids=lambda value: f"{value:.3g}" if isinstance(value, float) else str(value)[:8],
)
def test_a_result_without_a_finite_objective_is_a_failure(value: Any) -> None:
    generator = Generator(line(), **QUICKLY)
    points = generator.suggest(4)
    failed = points[0] if isinstance(value, str) else {**points[0], "f": value}
    generator.ingest([failed, *map(measured, points[1:])])
    (near,) = generator.suggest(1)
    assert statuses(generator) == ["failed", "told", "told", "told", "pending"]
    assert near["x"] != points[0]["x"]
    generator.ingest([measured(points[0])])  # it worked after all
    assert statuses(generator)[0] == "told"


def test_a_later_result_corrects_an_earlier_one() -> None:
    generator = Generator(line(), **QUICKLY)
    points = generator.suggest(4)
    generator.ingest([measured(point) for point in points])
    generator.ingest([{**points[1], "f": 5.0}, measured(points[2])])
    ledger = generator.optimizer.ledger
    assert ledger[1].Y == 5.0
    assert measured(points[2])["f"] == ledger[2].Y
    generator.ingest([{**points[1], "f": math.nan}])
    assert statuses(generator) == ["told", "withdrawn", "told", "told"]
    generator.ingest([{**points[1], "f": math.nan}])
    generator.ingest([{**points[1], "f": 4.0}])
    assert ledger[1].Y == 4.0


def test_points_of_ones_own_come_without_an_id() -> None:
    generator = Generator(line(), **QUICKLY)
    waiting = generator.suggest(1)
    own = [{"x": x, "f": (x - 0.7) ** 2} for x in (-1.0, 0.0, 2.0)]
    generator.ingest([*own, {"x": 1.0, "f": None, "_id": None}])
    assert statuses(generator) == ["pending", "told", "told", "told", "failed"]
    generator.ingest([{"x": waiting[0]["x"], "f": 0.1, "_id": math.nan}])  # from a table
    assert statuses(generator) == ["told", "told", "told", "told", "failed"]
    assert generator.optimizer.ledger[0].Y == 0.1
    missing = (np.float32("nan"), pd.NA, pd.NaT, np.ma.masked)
    for key, nothing in enumerate(missing, 5):
        generator.ingest([{"x": 0.1 * key, "f": 0.3, "_id": nothing}])
        assert generator.optimizer.ledger[key].Y == 0.3


@pytest.mark.parametrize(
    "value",
    [
        np.float32(1.5),
        np.array([1.5]),
        torch.tensor(1.5, requires_grad=True),
        Decimal("1.5"),
        [1.5],
    ],
)
def test_an_objective_is_a_number_of_any_class(value: Any) -> None:
    generator = Generator(line(), **QUICKLY)
    generator.ingest([{"x": 0.5, "f": value}])
    assert generator.optimizer.ledger[0].Y == 1.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_id": 9}, "No point with _id 9"),
        ({"_id": -1}, "Expected _id to be a whole number of at least 0, got -1"),
        ({"_id": "a"}, "Expected _id to be a whole number"),
        ({"x": 2.5}, r"got \(2\.5,\) with its _id"),
        ({"x": None}, "Variable x of a result: expected one number"),
        ({"x": math.nan}, "Variable x of a result: the value is nan"),
        ({"f": "high"}, "Expected the objective f of a result to be one number, got 'high'"),
        ({"f": "3.5"}, "objective f of a result to be one number, got '3.5'. Leave it out"),
        ({"f": b"3.5"}, "Expected the objective f"),
        ({"f": True}, "Expected the objective f of a result to be one number, got True"),
        ({"f": np.bool_(True)}, "Expected the objective f"),
        ({"f": [1.0, 2.0]}, "Expected the objective f"),
        ({"alpha": 2.0}, "Expected the constant alpha to be 1.0, got 2.0"),
        ({"_id": None, "x": 3.5}, r"Expected x within \[-2, 3\], got 3.5"),
    ],
)
def test_a_result_that_cannot_be_is_refused_and_nothing_is_ingested(
    change: Point, message: str
) -> None:
    generator = Generator(line(constants={"alpha": 1.0}), **QUICKLY)
    points = [measured(point) for point in generator.suggest(2)]
    with pytest.raises(ValueError, match=message):
        generator.ingest([points[0], {**points[1], **change}])
    del points[1]["x"]
    with pytest.raises(ValueError, match="got one without x"):
        generator.ingest([points[0], points[1]])
    assert statuses(generator) == ["pending", "pending"]


@pytest.mark.parametrize(
    ("results", "got"),
    [
        ({"x": 0.0, "f": 1.0}, "got a dict."),
        (pd.DataFrame({"x": [0.0], "f": [1.0]}), "got a DataFrame."),
        (None, "got a NoneType."),
        ("xf", "got a str with a str in it."),
        ([{"x": 0.0, "f": 1.0}, None], "got a list with a NoneType in it."),
    ],
)
def test_results_that_are_no_dictionaries_are_refused(results: Any, got: str) -> None:
    generator = Generator(line(), **QUICKLY)
    message = f"list of dictionaries, one for each point, {got} Of a DataFrame give to_dict"
    with pytest.raises(UsageError, match=message):
        generator.ingest(results)
    assert statuses(generator) == []


def test_points_that_a_driver_rounds_are_still_the_same() -> None:
    generator = Generator(line(), **QUICKLY)
    (point,) = generator.suggest(1)
    rounded = {"x": np.float32(point["x"]), "f": np.float32(2.0), "_id": np.int64(point["_id"])}
    generator.ingest([rounded])
    assert generator.optimizer.ledger[0].Y == 2.0


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["MINIMIZE", "EXPLORE"])
def test_goes_on_after_a_stop_to_the_same_points(tmp_path: Path, objective: str) -> None:
    generator = Generator(line(objective), tmp_path / "run", **QUICKLY)
    run(generator, steps=1)
    pending = generator.suggest(1)
    generator.finalize()
    again = Generator.load(tmp_path / "run", line(objective))
    results = [measured(point) for point in pending]
    for one in (generator, again):
        one.ingest(results)
    assert again.suggest(2) == generator.suggest(2)
    again.finalize()  # to the same folder
    assert len(Generator.load(tmp_path / "run", line(objective)).optimizer.pending) == 2


def test_finalize_without_a_folder_brings_the_model_up_to_date() -> None:
    generator = Generator(line(), **QUICKLY)
    generator.finalize()
    run(generator, steps=1)
    generator.finalize()
    assert len(generator.optimizer.surrogate.held) == 6


@pytest.mark.parametrize(
    "vocs",
    [
        line("MAXIMIZE"),
        VOCS(variables={"z": [-2.0, 3.0]}, objectives={"f": "MINIMIZE"}),
        VOCS(variables={"x": [-2.0, 4.0]}, objectives={"f": "MINIMIZE"}),
    ],
)
def test_a_folder_of_another_vocs_is_refused(tmp_path: Path, vocs: VOCS) -> None:
    Generator(line(), **QUICKLY).save(tmp_path)
    with pytest.raises(UsageError, match=r"is of the VOCS .*'x'.* with bounds"):
        Generator.load(tmp_path, vocs)


def test_a_folder_of_other_constants_is_refused(tmp_path: Path) -> None:
    def constants(beam: float, fields: Any = (1.0, 2.0), **more: Any) -> VOCS:
        return line(constants={"beam": beam, "fields": np.array(fields), "code": math.sin, **more})

    Generator(constants(0.5), **QUICKLY).save(tmp_path)
    Generator.load(tmp_path, constants(0.5))
    others = [line(), constants(0.6), constants(0.5, (1.0, 3.0)), constants(0.5, charge=1)]
    for other in others:
        with pytest.raises(UsageError, match=r"is of the VOCS .*'beam': 0\.5.* with bounds"):
            Generator.load(tmp_path, other)
    before = {"variables": ["x"], "objectives": {"f": "MinimizeObjective"}}
    save_optimizer(tmp_path, Generator(constants(0.5), **QUICKLY).optimizer, {"vocs": before})
    Generator.load(tmp_path, constants(0.6))  # of a version that did not store constants


def test_a_folder_of_no_generator_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no optimization to resume"):
        Generator.load(tmp_path, line())
    save_optimizer(tmp_path, started(QUICK))
    with pytest.raises(UsageError, match="holds no generator"):
        Generator.load(tmp_path, line())


# --- a driver -----------------------------------------------------------------------------------

DRIVEN = """
import json
import math

from gest_api.vocs import VOCS
from libensemble import Ensemble
from libensemble.alloc_funcs.start_only_persistent import only_persistent_gens
from libensemble.specs import AllocSpecs, ExitCriteria, GenSpecs, LibeSpecs, SimSpecs

from bo_stream.gest import Generator


def measure(point):
    if point["x"] > 0.9:
        return {"f": math.nan}
    return {"f": point["scale"] * ((point["x"] - 0.3) ** 2 + (point["y"] - 1.0) ** 2)}


if __name__ == "__main__":
    vocs = VOCS(
        variables={"x": [0.0, 1.0], "y": [-2.0, 2.0]},
        objectives={"f": "MINIMIZE"},
        constants={"scale": 2.0},
    )
    generator = Generator(vocs, "run", initial=6, num_restarts=2, raw_samples=32)
    generator.ingest([{"x": 0.5, "y": 0.0, "scale": 2.0, "f": 2.08}])
    ensemble = Ensemble(
        libE_specs=LibeSpecs(comms="local", nworkers=2, gen_on_manager=True, final_gen_send=True),
        sim_specs=SimSpecs(simulator=measure, vocs=vocs),
        gen_specs=GenSpecs(generator=generator, initial_batch_size=6, batch_size=2, vocs=vocs),
        alloc_specs=AllocSpecs(alloc_f=only_persistent_gens),
        exit_criteria=ExitCriteria(sim_max=16),
    )
    H, _, flag = ensemble.run()
    done = H[H["sim_ended"]]
    rows = [[int(row["_id"]), float(row["x"]), float(row["f"])] for row in done]
    print(json.dumps({"flag": int(flag), "rows": rows}))
"""


@pytest.mark.integration
def test_libensemble_drives_it_on_two_workers(tmp_path: Path) -> None:
    (tmp_path / "driven.py").write_text(DRIVEN)
    done = subprocess.run(
        [sys.executable, "driven.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["flag"] == 0
    assert len(said["rows"]) >= 16
    vocs = VOCS(
        variables={"x": [0.0, 1.0], "y": [-2.0, 2.0]},
        objectives={"f": "MINIMIZE"},
        constants={"scale": 2.0},
    )
    ledger = Generator.load(tmp_path / "run", vocs).optimizer.ledger
    assert ledger[0].origin == "hand"
    for key, x, f in said["rows"]:
        trial = ledger[key]
        assert trial.X[0] == x
        assert (trial.status, trial.Y) == (("failed", None) if math.isnan(f) else ("told", f))
    assert min(f for _, _, f in said["rows"] if not math.isnan(f)) < 0.5


# --- many variables ------------------------------------------------------------------------------


def test_many_variables_are_searched_in_a_region(tmp_path: Path) -> None:
    names = [f"x{i}" for i in range(12)]
    vocs = VOCS(variables={name: [-2.0, 3.0] for name in names}, objectives={"f": "MINIMIZE"})

    def bowl_at(point: Point) -> Point:
        return {**point, "f": sum((point[name] - 0.7) ** 2 for name in names)}

    generator = Generator(vocs, tmp_path / "run", initial=8, q=4)
    assert generator.optimizer.settings.search == "region"
    for count in (8, 4, 4):
        generator.ingest([bowl_at(point) for point in generator.suggest(count)])
    generator.finalize()
    loaded = Generator.load(tmp_path / "run", vocs)
    assert loaded.suggest() == generator.suggest()
