"""Active sampling by ask and tell: late, in part, in any order, corrected, withdrawn, saved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bo_stream import WISKI, select_from_pool
from bo_stream.errors import UsageError
from bo_stream.loops.run import ASKING
from bo_stream.loops.sampling import ActiveSampling, SamplingSettings
from bo_stream.loops.sampling.replay import PoolSplit, SamplingReplay
from tests.comparisons import assert_untouched, fingerprint
from tests.loops.small import QUICK, small_map
from tests.loops.test_models import FEWER

pytestmark = pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short")

FEW = SamplingSettings(q=3, initial=6, grid=(12,), refit=0.0)
BOX = torch.tensor([[5.0, 40.0], [9.0, 46.0]], dtype=torch.float64)
SITES = BOX[0] + torch.rand(
    60, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
) * (BOX[1] - BOX[0])


def measured(places: Sequence[int]) -> Tensor:
    return torch.sin(SITES[list(places)]).sum(-1)


def begun(settings: SamplingSettings = FEW) -> ActiveSampling:
    """A sampling that was told its first values."""
    sampling = ActiveSampling(SITES, settings, bounds=BOX)
    first = sampling.ask(settings.initial)
    sampling.tell(first, measured(first))
    return sampling


def known(sampling: ActiveSampling) -> tuple[Any, ...]:
    state = sampling.state
    return (*map(list, (state.picks, state.outcomes, state.pending, state.refits, state.outliers)),)


def test_the_first_candidates_are_drawn_by_the_seed_and_none_twice() -> None:
    sampling, again = ActiveSampling(SITES, FEW), ActiveSampling(SITES, FEW)
    first = [*sampling.ask(4), *sampling.ask(2), *sampling.ask()]
    assert first == again.ask(9)
    assert len(set(first)) == 9
    assert first != ActiveSampling(SITES, replace(FEW, seed=1)).ask(9)
    assert sampling.state.pending == first
    with pytest.raises(UsageError, match="6 values are needed, 0 were told"):
        _ = sampling.model


def test_a_replay_is_the_same_as_asking_and_telling() -> None:
    """The replay has no outcome that it was not told."""
    data, settings = small_map(), QUICK.resolved(120, 2)
    split = PoolSplit.of(data, settings)
    replay = SamplingReplay(split, settings)
    list(replay.run())
    unit = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    sampling = ActiveSampling(split.pool_X, settings, split.test_X, unit)
    places = list(range(settings.initial))
    for _ in range(1 + (settings.steps or 0)):
        sampling.tell(places, split.pool_Y[places])
        places = sampling.ask(settings.q)
    assert sampling.state.picks == replay.state.picks
    assert sampling.state.refits == replay.state.refits
    assert torch.equal(sampling.predict(split.test_X)[0], replay.sampling.predict(split.test_X)[0])


@pytest.mark.parametrize("model", ["auto", "osgpr"])
def test_what_is_pending_counts_as_measured(model: str) -> None:
    sampling = begun(replace(FEW, model=model, grid=None, outliers=0.0))
    waiting = sampling.ask(4)
    told, future = torch.tensor(sampling.state.picks), copy.deepcopy(sampling.model)
    X = (SITES - BOX[0]) / (BOX[1] - BOX[0])
    both = select_from_pool(future, X, 8, X, exclude=told)
    assert [*waiting, *sampling.ask(4)] == both.tolist()


def test_results_come_in_parts_in_any_order_and_unasked() -> None:
    one, other = begun(), begun()
    places = one.ask(6)
    assert other.ask(6) == places
    one.tell(places, measured(places))
    for place in reversed(places):
        other.tell([place], measured([place]))
        other.tell([place], measured([place]))  # once more changes nothing
    assert other.state.pending == []
    for found, expected in zip(other.predict(SITES), one.predict(SITES), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    free = next(place for place in range(60) if place not in one.state.picks)
    one.tell([free], measured([free]))
    assert one.observations == one.model.num_observations == 13


def test_a_wrong_value_is_taken_out_again() -> None:
    one, other = begun(), begun()
    places = one.ask(6)
    one.tell(places, measured(places))
    wrong = measured(places)
    wrong[2] += 0.5
    other.tell(places, wrong)
    assert float((other.predict(SITES)[0] - one.predict(SITES)[0]).abs().max()) > 0.01
    other.tell(places[1:4], measured(places[1:4]))
    assert other.observations == other.model.num_observations == 12
    for found, expected in zip(other.predict(SITES), one.predict(SITES), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)


def test_a_first_value_may_be_corrected_before_there_is_a_model() -> None:
    sampling, expected = ActiveSampling(SITES, FEW, bounds=BOX), begun()
    first = sampling.ask(6)
    sampling.tell(first[:4], measured(first[:4]) + 1.0)
    sampling.tell(first[:4], measured(first[:4]))
    sampling.tell(first[4:], measured(first[4:]))
    assert torch.equal(sampling.predict(SITES)[0], expected.predict(SITES)[0])


@pytest.mark.parametrize("model", ["osgpr", "clustered"])
def test_a_model_that_cannot_take_a_value_out_says_so(model: str) -> None:
    sampling = begun(replace(FEW, model=model, model_options=FEWER[model], grid=None))
    place, before, state = sampling.state.picks[0], fingerprint(sampling.model), known(sampling)
    with pytest.raises(UsageError, match=f"Model {model} of 2 inputs cannot take a value out"):
        sampling.tell([place], [7.0])
    assert_untouched(sampling.model, before)
    assert known(sampling) == state


def test_an_outlier_that_is_corrected_returns_at_the_next_refit() -> None:
    settings = replace(FEW, initial=100, refit=1.05, outliers=7.0, q=10)
    data = small_map(160)
    X = torch.from_numpy(data.X)
    y = torch.from_numpy(data.y)
    wrong = y.clone()
    wrong[50] += 10.0 * y.std()
    sampling = ActiveSampling(X, settings)
    sampling.tell(range(100), wrong[:100])
    assert sampling.outliers == [50]
    sampling.tell([50], y[50:51])
    assert sampling.model.num_observations == 99
    sampling.tell(range(100, 110), y[100:110])
    assert sampling.outliers == []
    assert sampling.model.num_observations == 110


def test_what_is_withdrawn_may_be_asked_for_again() -> None:
    sampling = begun()
    places = sampling.ask(3)
    sampling.withdraw(places[1:])
    assert sampling.state.pending == places[:1]
    assert sampling.ask(2) == places[1:]  # the first still counts as measured
    with pytest.raises(UsageError, match="Candidate 99 is not pending"):
        sampling.withdraw([places[0], 99])
    assert sampling.state.pending == places


def test_values_keep_their_digits() -> None:
    """In torch's default dtype, float32, they would be off by 0.03."""
    sampling = ActiveSampling(SITES, replace(FEW, initial=40), bounds=BOX)
    places = sampling.ask(40)
    values = 1e6 + 1e-3 * measured(places)
    sampling.tell(places, values.tolist())
    assert sampling.state.outcomes == values.tolist()
    direct = WISKI(
        ((SITES - BOX[0]) / (BOX[1] - BOX[0]))[places],
        values.unsqueeze(-1),
        covar_module=copy.deepcopy(sampling.model.covar_module),
        mean_module=copy.deepcopy(sampling.model.mean_module),
        likelihood=copy.deepcopy(sampling.model.likelihood),
        grid_size=12,
    )
    expected = direct.posterior((SITES - BOX[0]) / (BOX[1] - BOX[0])).mean.squeeze(-1)
    torch.testing.assert_close(sampling.predict(SITES)[0], expected, rtol=0.0, atol=1e-7)


class TestFiles:
    @pytest.mark.parametrize("told", [0, 3, 9])
    def test_what_was_saved_goes_on_to_the_same_choices(self, tmp_path: Path, told: int) -> None:
        sampling = ActiveSampling(SITES, FEW, bounds=BOX)
        places = sampling.ask(6)
        sampling.tell(places[:told], measured(places[:told]))
        if told > 6:
            sampling.tell(places, measured(places))
            places = sampling.ask(3)
            sampling.tell(places[:1], measured(places[:1]))
        for _ in range(2):  # the second in place of the first
            sampling.save(tmp_path / "folder")
        again = ActiveSampling.load(tmp_path / "folder", SITES, bounds=BOX)
        assert known(again) == known(sampling)
        assert again.settings == sampling.settings
        assert again.ask(5) == sampling.ask(5)
        again.tell(places, measured(places))
        sampling.tell(places, measured(places))
        assert known(again) == known(sampling)

    def test_other_inputs_and_damage_are_refused(self, tmp_path: Path) -> None:
        sampling = begun()
        with pytest.raises(UsageError, match="no sampling to resume"):
            ActiveSampling.load(tmp_path, SITES, bounds=BOX)
        sampling.save(tmp_path)
        for given in ({"candidates": SITES.flip(0), "bounds": BOX}, {"candidates": SITES}):
            with pytest.raises(UsageError, match="other candidates, points or bounds"):
                ActiveSampling.load(tmp_path, **given)
        sampling.state.pending = [3, 3]
        sampling.save(tmp_path)
        with pytest.raises(UsageError, match=r"contradicts itself: 6 picks.*2 pending of 60"):
            ActiveSampling.load(tmp_path, SITES, bounds=BOX)
        index = tmp_path / ASKING.name
        index.write_bytes(index.read_bytes().replace(b'"picks"', b'"pecks"'))
        with pytest.raises(UsageError, match="damaged"):
            ActiveSampling.load(tmp_path, SITES, bounds=BOX)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda s: s.ask(0), "q of at least 1, got 0"),
        (lambda s: s.ask(55), "at most the 54 candidates that are neither told nor pending, got 5"),
        (lambda s: s.tell([1, 2], [0.5]), "value for each of 2 candidates, got 1"),
        (lambda s: s.tell([1, 60], [0.5, 0.5]), "from 0 to 59, got 60"),
        (lambda s: s.tell([1, -1], [0.5, 0.5]), "from 0 to 59, got -1"),
        (lambda s: s.tell([1, 1], [0.5, 0.5]), "Candidate 1 is named twice"),
        (lambda s: s.tell([1, 2], [0.5, float("nan")]), "finite values, got nan of candidate 2"),
    ],
)
def test_bad_input_changes_nothing(act: Callable[[ActiveSampling], object], message: str) -> None:
    sampling = begun()
    before, state = fingerprint(sampling.model), known(sampling)
    with pytest.raises(UsageError, match=message):
        act(sampling)
    assert_untouched(sampling.model, before)
    assert known(sampling) == state


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"candidates": SITES[:5]}, "at least 6 candidates, the settings' initial, got 5"),
        ({"candidates": SITES[:, 0]}, "candidates of shape `n x d`"),
        ({"points": SITES[:, :1]}, "points of shape `n x d`, the same d for all"),
        ({"candidates": SITES / SITES.new_tensor([0.0, 1.0])}, "finite candidates.* in row 0"),
        ({"bounds": BOX + 1.0}, "inputs within the bounds"),
        ({"bounds": BOX.flip(0)}, "the first are less than the second"),
        ({"candidates": SITES * SITES.new_tensor([0.0, 1.0])}, "the same everywhere"),
        ({"settings": replace(FEW, grid=(1,))}, "cannot be built: .*grid_size"),
        ({"settings": replace(FEW, grid=(9, 9, 9))}, "grid to be one number or 2"),
    ],
)
def test_bad_arguments(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ActiveSampling(**{"candidates": SITES, "settings": FEW, **given})
