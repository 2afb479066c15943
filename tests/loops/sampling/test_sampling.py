"""Active sampling by ask and tell: late, in part, in any order, corrected, withdrawn, saved."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from botorch.models import SingleTaskGP
from gpytorch.kernels import MaternKernel
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from bo_stream import (
    WISKI,
    AutoGP,
    Misclassification,
    ProductMatern,
    select_from_pool,
    select_sites,
)
from bo_stream.errors import UsageError
from bo_stream.loops.run import ASKING
from bo_stream.loops.sampling import ActiveSampling, SamplingSettings
from bo_stream.loops.sampling.campaign import PoolSplit, SamplingReplay
from bo_stream.loops.sampling.state import SamplingState
from bo_stream.models.base import StreamingGP
from bo_stream.models.fitting import learned_values
from bo_stream.testing.streams import assert_untouched, fingerprint
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


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_positions_may_be_numbers_of_any_kind(kind: Callable[[list[int]], Sequence[int]]) -> None:
    sampling = ActiveSampling(SITES, FEW)
    first = sampling.ask(np.int64(5))  # type: ignore[arg-type]
    assert len(first) == 5
    sampling.tell(kind(first[:2]), measured(first[:2]))
    sampling.withdraw(kind(first[2:4]))
    assert sampling.state.pending == first[4:]
    assert sampling.state.picks == first[:2]
    for odd in (first[4] + 0.7, True, "1"):
        with pytest.raises(UsageError, match="Expected candidates as whole numbers, from 0, got"):
            sampling.withdraw([odd])  # type: ignore[list-item]
        with pytest.raises(UsageError, match="Expected candidates as whole numbers, from 0, got"):
            sampling.tell([odd], [1.0])  # type: ignore[list-item]


def test_whole_numbers_as_inputs_are_scaled_as_others_are() -> None:
    sites = (10.0 * SITES).round()
    whole = [ActiveSampling(X, FEW, bounds=10.0 * BOX) for X in (sites, sites.long())]
    half = ActiveSampling(sites.long(), FEW, bounds=10.0 * BOX + torch.tensor([[-0.5], [0.5]]))
    for sampling in (*whole, half):
        first = sampling.ask(FEW.initial)
        sampling.tell(first, measured(first))
    torch.testing.assert_close(whole[1].predict(sites.long()), whole[0].predict(sites))
    torch.testing.assert_close(half.predict(sites.long()), half.predict(sites))
    assert not torch.equal(half._X, whole[0]._X)


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


@pytest.mark.parametrize("place", [50, 102], ids=["of a refit", "that waits for one"])
def test_an_outlier_that_is_corrected_returns(place: int) -> None:
    """At once, or at a refit if the other value is wrong, too."""
    settings = replace(FEW, initial=100, refit=1.1, outliers=7.0, q=10)
    data = small_map(160)
    X, y = torch.from_numpy(data.X), torch.from_numpy(data.y)
    wrong = y.clone()
    wrong[place] += 10.0 * y.std()
    sampling = ActiveSampling(X, settings)
    sampling.tell(range(100), wrong[:100])
    sampling.tell(range(100, 105), wrong[100:105])
    assert sampling.outliers == [place]
    sampling.tell([place], wrong[place : place + 1] + 1.0)
    assert sampling.outliers == [place]
    assert sampling.model.num_observations == 104
    sampling.tell([place], y[place : place + 1])
    assert sampling.outliers == []
    assert sampling.model.num_observations == 105
    expected = copy.deepcopy(sampling.model)
    expected.retract(sampling._X[[place]], y[[place], None])
    expected.update(sampling._X[[place]], y[[place], None])
    torch.testing.assert_close(
        sampling.model.posterior(sampling._X).mean, expected.posterior(sampling._X).mean
    )
    sampling.tell(range(105, 110), y[105:110])
    assert sampling.outliers == []
    assert sampling.model.num_observations == 110


def test_without_refits_nothing_is_left_out() -> None:
    data, settings = small_map(160), replace(FEW, initial=100, outliers=7.0)
    X, wrong = torch.from_numpy(data.X), torch.from_numpy(data.y)
    wrong[[50, 102]] += 10.0 * wrong.std()
    sampling = ActiveSampling(X, settings)
    sampling.tell(range(100), wrong[:100])
    sampling.tell(range(100, 105), wrong[100:105])
    assert sampling.outliers == []
    assert sampling.model.num_observations == 105


def test_outcomes_that_float32_does_not_tell_apart_are_refused() -> None:
    sampling = ActiveSampling(SITES, replace(FEW, dtype="float32"), bounds=BOX)
    first = sampling.ask(6)
    sampling.tell(first[:5], 1e8 + measured(first[:5]))  # too few to know how they differ
    state = known(sampling)
    with pytest.raises(UsageError, match=r"too little for dtype float32.*Take dtype float64, or"):
        sampling.tell(first[5:], 1e8 + measured(first[5:]))
    assert known(sampling) == state
    sampling.tell(first, measured(first))
    assert sampling.model.num_observations == 6
    equal = ActiveSampling(SITES, replace(FEW, dtype="float32"), bounds=BOX)
    equal.tell(first, [0.1] * 6)
    assert equal.model.num_observations == 6


@pytest.mark.parametrize("unit", [1e-19, 1e-170])
def test_outcomes_that_models_take_for_equal_are_warned_of(unit: float) -> None:
    sampling = ActiveSampling(SITES, FEW, bounds=BOX)
    first = sampling.ask(6)
    with pytest.warns(NumericalWarning, match=r"deviation of at least 1e-18, .* in another unit"):
        sampling.tell(first, unit * measured(first))
    others = ActiveSampling(SITES, FEW, bounds=BOX)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NumericalWarning)
        others.tell(others.ask(6), [0.003, *[0.003 + 4e-19] * 5])  # equal but for rounding
    assert others.model.num_observations == 6


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
        (lambda s: s.ask(0), "q to be a whole number of at least 1, got 0"),
        (lambda s: s.ask(55), "at most the 54 candidates that are neither told nor pending, got 5"),
        (lambda s: s.tell([1, 2], [0.5]), "value for each of 2 candidates, got 1"),
        (lambda s: s.tell([1, 60], [0.5, 0.5]), "from 0 to 59, got 60"),
        (lambda s: s.tell([1, -1], [0.5, 0.5]), "from 0 to 59, got -1"),
        (lambda s: s.tell([1, 1], [0.5, 0.5]), "Candidate 1 is named twice"),
        (lambda s: s.tell([1, 2], [0.5, float("nan")]), "finite values .*, got nan of candidate 2"),
        (
            lambda s: s.tell([1, 2], [0.5, 1e76]),
            r"at most 1e\+75 in size, got 1e\+76 of candidate 2",
        ),
        (lambda s: s.tell([1, 2], [0.5, "x"]), "outcomes as numbers, .*, got 'x'"),
        (lambda s: s.tell([1, 2], [0.5, None]), "outcomes as numbers, .*, got None"),
        (lambda s: s.tell(1, 0.5), "candidates as a list of whole numbers, got 1"),
        (lambda s: s.withdraw(torch.tensor(1)), r"candidates as a list .*, got tensor\(1\)"),
        (lambda s: s.predict(SITES[:, :1]), r"X of shape `n x d`, .*, got \(60, 1\)"),
        (lambda s: s.predict(SITES[:0]), r"X of shape `n x d`, .*, got \(0, 2\)"),
        (lambda s: s.predict(SITES[0]), r"X of shape `n x d`, .*, got \(2,\)"),
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
        ({"bounds": BOX.tolist()}, "bounds as a tensor, got a list"),
        ({"bounds": BOX[:, :1]}, r"bounds of shape `n x d`, .*, got \(2, 1\)"),
        ({"candidates": SITES.numpy()}, "candidates as a tensor, got a ndarray"),
        ({"bounds": BOX.flip(0)}, "the first are less than the second"),
        ({"candidates": SITES * SITES.new_tensor([0.0, 1.0])}, "the same everywhere"),
        ({"settings": replace(FEW, grid=(1,))}, "cannot be built: .*grid_size"),
        ({"settings": replace(FEW, grid=(9, 9, 9))}, "grid to be one number or 2"),
    ],
)
def test_bad_arguments(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ActiveSampling(**{"candidates": SITES, "settings": FEW, **given})


# --- exact, then on a grid; smoothness; wrong calls -----------------------------------------------

STAGED = SamplingSettings(
    q=10, initial=40, model_options={"max_exact": 60}, kernel="matern32", outliers=0.0
)


def family(sampling: ActiveSampling) -> str:
    assert isinstance(sampling.model, AutoGP)
    return sampling.model.family


def test_the_model_is_exact_with_its_kernel_and_then_on_a_grid_with_the_product() -> None:
    X = torch.rand(100, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    Y = torch.sin(6.0 * X).sum(-1)
    sampling = ActiveSampling(X, STAGED)
    sampling.tell(range(60), Y[:60])
    module = sampling.model.covar_module
    assert family(sampling) == "exact"
    assert isinstance(module.base_kernel, MaternKernel)
    unit = (X - X.amin(0)) / (X.amax(0) - X.amin(0))
    exact = SingleTaskGP(
        unit[:60], Y[:60, None], covar_module=copy.deepcopy(module), outcome_transform=None
    )
    offset, scale = (float(value) for value in sampling.model._offset_and_scale())
    exact.set_train_data(targets=(Y[:60] - offset) / scale, strict=False)
    exact.mean_module.load_state_dict(sampling.model.mean_module.state_dict())
    exact.likelihood.noise = sampling.model.likelihood.noise.detach()
    expected = offset + scale * exact.eval().posterior(unit[60:]).mean.squeeze(-1)
    torch.testing.assert_close(sampling.predict(X[60:])[0], expected, rtol=1e-6, atol=1e-6)
    sampling.tell(range(60, 70), Y[60:70])
    assert family(sampling) == "WISKI"
    assert isinstance(sampling.model.covar_module.base_kernel, ProductMatern)
    assert sampling.state.onto_grid_at == sampling.model.num_observations == 70
    assert sampling.state.refits == [60, 70]
    error = (sampling.predict(X[70:])[0] - Y[70:]).square().mean().sqrt()
    assert float(error) < 0.2 * float(Y.std())


def test_a_model_of_another_kernel_knows_the_last_fit() -> None:
    X = torch.rand(60, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sampling = ActiveSampling(X, STAGED)
    sampling.tell(range(60), torch.sin(6.0 * X).sum(-1))
    former = sampling.model._last_fit
    assert former is not None
    former = sampling.model._last_fit = replace(former, raced=60.0)
    own = sampling.state.kernel
    other = "matern52" if own == "matern32" else "matern32"
    for kernel, name, raced in ((own, "exact", 60.0), (other, "WISKI", 0.0)):
        model = sampling._rebuilt(kernel, name)
        last = model._last_fit
        assert last is not None
        assert last.scales is former.scales
        assert last.raced == raced  # of another kernel no two starts were compared
        assert last.is_at(learned_values(model))


def test_a_given_grid_is_there_from_the_start() -> None:
    assert family(begun()) == "WISKI"


@pytest.mark.usefixtures("whole_fits")
@pytest.mark.parametrize("told", [50, 70], ids=["exact", "on the grid"])
def test_a_staged_sampling_is_saved_and_goes_on_to_the_same_choices(
    told: int, tmp_path: Path
) -> None:
    X = torch.rand(120, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    Y = torch.sin(6.0 * X).sum(-1)
    sampling = ActiveSampling(X, replace(STAGED, kernel="learned"))
    sampling.tell(range(told), Y[:told])
    sampling.save(tmp_path)
    again = ActiveSampling.load(tmp_path, X)
    for _ in range(2):
        picks = sampling.ask()
        assert again.ask() == picks
        sampling.tell(picks, Y[picks])
        again.tell(picks, Y[picks])
    assert known(again) == known(sampling)
    assert again.state.kernels == sampling.state.kernels
    assert again.state.onto_grid_at == sampling.state.onto_grid_at
    assert torch.equal(again.predict(X)[0], sampling.predict(X)[0])


def test_the_smoothness_is_learned() -> None:
    """A smooth function has a smooth kernel, and independent increments the roughest."""
    x = torch.linspace(0.0, 1.0, 120, dtype=torch.float64).unsqueeze(-1)
    steps = torch.randn(120, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = []
    for Y in (torch.sin(12.0 * x[:, 0]), steps.cumsum(0)):
        sampling = ActiveSampling(x, SamplingSettings(initial=120, outliers=0.0))
        sampling.tell(range(120), Y)
        assert sampling.state.kernels == [sampling.state.kernel]
        found.append(sampling.state.kernel)
    assert found[0] in ("matern52", "rbf")
    assert found[1] == "matern12"


@pytest.mark.parametrize(
    ("less", "unlikely", "learned"),
    [
        (10.0, {"matern32": 180}, [60, 60, 90, 180, 180]),
        (1.0, {}, [60, 60, 90, 90, 180, 180]),
    ],
    ids=["clearly", "hardly"],
)
def test_a_kernel_that_was_clearly_less_likely_rests_until_observations_have_trebled(
    less: float,
    unlikely: dict[str, int],
    learned: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    learned_at: list[int] = []

    def evidence(model: StreamingGP) -> float:
        return 0.0 if model.covar_module.base_kernel.nu == 0.5 else -less

    where = "bo_stream.loops.sampling.sampling"
    monkeypatch.setattr(f"{where}.relearn", lambda m: learned_at.append(m.num_observations))
    monkeypatch.setattr(f"{where}._evidence", evidence)
    x = torch.linspace(0.0, 1.0, 200, dtype=torch.float64).unsqueeze(-1)
    sampling = ActiveSampling(x, SamplingSettings(initial=60, refit=1.5, outliers=0.0))
    for first, last in ((0, 60), (60, 90), (90, 180)):
        sampling.tell(range(first, last), x[first:last, 0])
        sampling.save(tmp_path)
        sampling = ActiveSampling.load(tmp_path, x)
    assert sampling.state.kernels == ["matern12"] * 3
    assert sampling.state.unlikely == unlikely
    assert learned_at == learned


def test_a_state_that_was_saved_before_kernels_rested_can_be_read() -> None:
    state = SamplingState(kernel="rbf", unlikely={"matern52": 60})
    record = state.record()
    assert SamplingState.of_record(record).unlikely == state.unlikely
    del record["unlikely"]
    assert SamplingState.of_record(record).unlikely == {}


def test_few_values_do_not_choose_the_smoothness() -> None:
    x = torch.linspace(0.0, 1.0, 30, dtype=torch.float64).unsqueeze(-1)
    sampling = ActiveSampling(x, SamplingSettings(initial=30, outliers=0.0))
    sampling.tell(range(30), torch.sin(12.0 * x[:, 0]))
    assert sampling.state.kernel == "matern12"


def test_wrong_calls_are_spared_as_select_sites_does_it() -> None:
    settings = SamplingSettings(q=4, initial=20, goal="exceedance", threshold=0.3, kernel="rbf")
    sampling = ActiveSampling(SITES, settings, bounds=BOX)
    first = sampling.ask(20)
    sampling.tell(first, measured(first))
    picks = sampling.ask()
    X = (SITES - BOX[0]) / (BOX[1] - BOX[0])
    criterion = Misclassification(0.3, "latent")
    told = torch.tensor(first)
    both = select_sites(sampling.model, X, 8, criterion, X, exclude=told).indices.tolist()
    assert picks == both[:4]
    assert sampling.ask() == both[4:]  # the first four are pending
    unsure = criterion.current(*sampling.predict(SITES))
    assert unsure[picks].mean() > unsure.mean()


def test_of_many_candidates_the_uncertain_ones_and_as_many_others_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bo_stream.loops.sampling.sampling.SOME_CANDIDATES", 20)
    settings = SamplingSettings(q=2, initial=12, goal="exceedance", threshold=0.3, kernel="rbf")
    sampling = ActiveSampling(SITES, settings, bounds=BOX)
    first = sampling.ask(12)
    sampling.tell(first, measured(first))
    free = torch.ones(60, dtype=torch.bool)
    free[first] = False
    criterion = Misclassification(0.3, "latent")
    some = sampling._uncertain(criterion, free, 2)
    unsure = criterion.current(*sampling.predict(SITES)).masked_fill(~free, -1.0)
    assert len(some) == len(set(some.tolist())) == 20
    assert set(unsure.argsort(descending=True)[:10].tolist()) <= set(some.tolist())
    assert bool(free[some].all())
    assert set(sampling.ask()) <= set(some.tolist())
