"""An experiment in a database, which each call leaves complete."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ax.api.client import Client
from ax.core.generator_run import GeneratorRun
from ax.storage.sqa_store.encoder import Encoder
from pandas.testing import assert_frame_equal

from bo_stream import OSGPR
from bo_stream.ax import close_storage, storage_config
from tests.ax.experiments import (
    NEARLY_WITHOUT_NOISE,
    family_of,
    loss,
    model_of,
    run,
    started,
    surrogate_of,
    watch,
)
from tests.ax.reloads import (
    SEARCH_ENDS,
    assert_equal_posteriors,
    executed,
    from_database,
    from_json,
    next_candidate,
)

pytestmark = [*NEARLY_WITHOUT_NOISE, pytest.mark.integration]

READING = 1e-12
"""More than pandas, with which Ax reads its data, loses of a number: some of its last digits."""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """Return the path of a database that is not there yet."""
    close_storage()
    yield tmp_path / "experiments.db"
    close_storage()


def test_the_next_candidate_is_that_of_an_uninterrupted_run(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = started(storage=storage_config(file), refit=1.5)
    run(client, 8)
    other = from_database(file)
    traffic = watch(monkeypatch)
    ours = next_candidate(client)
    assert (traffic.built, traffic.entered) == ([], [1])
    client.mark_trial_abandoned(8)
    theirs = next_candidate(other)
    assert (traffic.built, traffic.entered) == ([8], [1])
    assert_equal_posteriors(client, other, 1e-8)
    assert theirs == pytest.approx(ours, abs=SEARCH_ENDS)
    other.complete_trial(8, {"loss": loss(theirs)})
    next_candidate(other)
    assert (traffic.built, traffic.entered) == ([8], [1, 1])


@pytest.mark.parametrize("reloads", [{2}, {5}, {0, 1, 2, 3, 4, 5}], ids=["before", "after", "all"])
@pytest.mark.parametrize("way", ["JSON", "database"])
def test_a_reload_goes_over_the_hand_over_as_an_uninterrupted_run(
    way: str, reloads: set[int], file: Path
) -> None:
    """The models are on a grid from the sixth trial on, whether built of it or brought there."""
    options: dict[str, Any] = {"model_options": {"max_exact": 5}, "refit": 1.3}
    client = started(**options)
    other = started(storage=storage_config(file) if way == "database" else None, **options)
    run(client, 3)
    run(other, 3)
    families = []
    for trial in range(6):
        if trial in reloads:
            other = from_database(file) if way == "database" else from_json(other, file.parent)
        expected = next_candidate(client)
        assert next_candidate(other) == pytest.approx(expected, abs=SEARCH_ENDS)
        families.append((family_of(client), family_of(other)))
        for each in (client, other):
            each.complete_trial(3 + trial, {"loss": loss(expected)})
    assert families == [("exact", "exact")] * 3 + [("WISKI", "WISKI")] * 3


def test_a_reloaded_experiment_is_what_was_stored(file: Path) -> None:
    client = started(storage=storage_config(file), model=OSGPR, model_options={"max_points": 32})
    run(client, 6)
    other = from_database(file)
    assert trials_of(other) == trials_of(client)
    ours, theirs = (each._experiment.lookup_data().df for each in (client, other))
    assert_frame_equal(theirs, ours, rtol=READING, atol=0.0)
    assert candidates_of(other) == candidates_of(client)
    assert next_candidate(other) == pytest.approx(next_candidate(client), abs=SEARCH_ENDS)
    model = model_of(other)
    assert isinstance(model, OSGPR)
    assert model.max_points == 32
    counts = [surrogate_of(each).learned["loss"]["count"] for each in (client, other)]
    assert counts == [6, 6]


def trials_of(client: Client) -> list[Any]:
    return [
        (trial.index, trial.status.name, trial.arms[0].parameters)
        for trial in client._experiment.trials.values()
    ]


def candidates_of(client: Client) -> list[Any]:
    runs = client._generation_strategy._generator_runs
    return [(r.arms[0].parameters, r._generator_key, r._generation_node_name) for r in runs]


@pytest.mark.parametrize("way", ["JSON", "database"])
def test_outcomes_come_back_with_all_their_digits(way: str, file: Path) -> None:
    """Ax writes ten decimals."""
    values = [1.23456789012345e-13, 0.1 + 0.2, 1.0 / 3.0 * 1e9, -9.87654321987654e200]
    client = started(storage=storage_config(file) if way == "database" else None)
    for value in values:
        for index in client.get_next_trials(1):
            client.complete_trial(index, {"loss": (value, 1e-14)})
    other = from_database(file) if way == "database" else from_json(client, file.parent)
    data = other._experiment.lookup_data().df
    assert data["mean"].tolist() == pytest.approx(values, rel=READING)
    assert data["sem"].tolist() == pytest.approx([1e-14] * 4, rel=READING)


def test_a_trial_writes_what_is_new(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ax's own encoder writes all candidates again with each."""
    written: list[GeneratorRun] = []
    encode = Encoder.generator_run_to_sqa

    def counted(self: Encoder, generator_run: GeneratorRun, *args: Any, **kwargs: Any) -> Any:
        written.append(generator_run)
        return encode(self, generator_run, *args, **kwargs)

    monkeypatch.setattr(Encoder, "generator_run_to_sqa", counted)
    client = started(storage=storage_config(file))
    counts = []
    for _ in range(6):
        written.clear()
        run(client, 1)
        counts.append(len(written))
    assert len(set(counts)) == 1
    reloaded = from_database(file)
    written.clear()
    run(reloaded, 1)
    assert len(written) == counts[0]
    assert len(candidates_of(from_database(file))) == 7


def test_options_changed_on_the_way_are_stored(file: Path) -> None:
    client = started(storage=storage_config(file))
    run(client, 4)
    (spec,) = client._generation_strategy.nodes_by_name["Stream"].generator_specs
    spec.generator_kwargs["refit"] = 3.0
    run(client, 1)
    (stored,) = from_database(file)._generation_strategy.nodes_by_name["Stream"].generator_specs
    assert stored.generator_kwargs["refit"] == 3.0


def test_one_database_at_a_time(file: Path) -> None:
    storage_config(file)
    storage_config(str(file))
    storage_config(f"sqlite:///{file}")
    with pytest.raises(ValueError, match=r"experiments\.db.*call bo_stream\.ax\.close_storage"):
        storage_config(file.with_name("others.db"))
    close_storage()
    storage_config(file.with_name("others.db"))


def test_files_that_are_no_database(file: Path) -> None:
    file.write_text("The quick brown fox, which is no database.\n" * 100)
    with pytest.raises(ValueError, match=r"experiments\.db.* cannot be opened: file is not a data"):
        storage_config(file)
    with pytest.raises(ValueError, match="Expected database in a folder that exists"):
        storage_config(file / "nowhere" / "experiments.db")
    storage_config(file.with_name("others.db"))


def test_without_sqlalchemy_the_error_names_the_extra() -> None:
    done = executed(
        """
import sys
sys.modules["sqlalchemy"] = None
import bo_stream.ax
try:
    bo_stream.ax.storage_config("experiments.db")
except ImportError as error:
    print(error)
"""
    )
    assert done.returncode == 0, done.stderr
    assert "needs sqlalchemy: run pip install 'bo-stream[sql]'" in done.stdout
