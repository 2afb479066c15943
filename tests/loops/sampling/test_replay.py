from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from bo_stream.acquisition import select_from_pool
from bo_stream.errors import UsageError
from bo_stream.loops.models import KERNELS, MODELS
from bo_stream.loops.run import predict
from bo_stream.loops.sampling.campaign import PoolSplit, SamplingReplay
from bo_stream.loops.sampling.settings import Settings, Strategy
from tests.loops.small import LONG, QUICK, map_with_an_artefact, small_map

pytestmark = pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short")


def begin(settings: Settings = QUICK) -> SamplingReplay:
    data = small_map()
    resolved = settings.resolved(*data.X.shape)
    return SamplingReplay(PoolSplit.of(data, resolved), resolved)


def test_the_split_divides_the_rows_without_overlap_and_by_seed_alone() -> None:
    data = small_map()
    split = PoolSplit.of(data, QUICK)
    rows = split.pool_rows
    assert (split.pool_X.shape, split.test_X.shape) == ((60, 2), (40, 2))
    torch.testing.assert_close(split.pool_X, torch.from_numpy(data.unit_X)[rows])
    torch.testing.assert_close(split.pool_Y[:, 0], torch.from_numpy(data.y)[rows])
    distance = torch.cdist(split.pool_X, split.test_X)
    assert distance.min() > 0.0
    assert torch.equal(rows, PoolSplit.of(data, replace(QUICK, strategy="random")).pool_rows)
    assert not torch.equal(rows, PoolSplit.of(data, replace(QUICK, seed=1)).pool_rows)


def test_a_target_that_float32_does_not_tell_apart_is_refused() -> None:
    data = small_map()
    far, in_float32 = replace(data, y=data.y + 1e7), replace(QUICK, dtype="float32")
    with pytest.raises(UsageError, match=r"up to 1e\+07 .* dtype float32, .* to steps of 1.2"):
        PoolSplit.of(far, in_float32)
    assert PoolSplit.of(data, in_float32).pool_Y.dtype == torch.float32
    assert PoolSplit.of(far, QUICK).pool_Y.std() > 0.1


@pytest.mark.parametrize(
    ("factor", "message"), [(1e-20, "of at least 1e-18"), (1e80, r"at most 1e\+75 in size")]
)
def test_a_target_in_a_unit_that_no_model_takes_is_refused(factor: float, message: str) -> None:
    data = small_map()
    with pytest.raises(UsageError, match=rf"{message}.* in another unit"):
        PoolSplit.of(replace(data, y=factor * data.y), QUICK)


def test_a_run_picks_each_site_once_and_learns() -> None:
    loop = begin()
    steps = [(loop.steps_done, chosen) for chosen in loop.run()]
    assert [number for number, _ in steps] == [0, 1, 2, 3, 4]
    assert [len(chosen) for _, chosen in steps] == [5, 3, 3, 3, 3]
    assert [score.observations for score in loop.curve] == [5, 11, 17]
    assert loop.state.picks == [i for _, chosen in steps for i in chosen]
    assert len(set(loop.state.picks)) == 17
    assert loop.finished
    assert loop.sampling.model.num_observations == 17
    assert loop.curve[-1].rmse < loop.curve[0].rmse


def test_the_model_has_seen_the_picks_and_nothing_else() -> None:
    loop = begin(replace(QUICK, refit=0.0))
    list(loop.run())
    model = copy.deepcopy(loop.sampling.model)
    picks = loop.state.picks
    model.retract(loop.split.pool_X[picks], loop.split.pool_Y[picks])
    assert model.num_observations == pytest.approx(0.0, abs=1e-9)
    posterior = model.posterior(loop.split.test_X)
    prior = model.covar_module(loop.split.test_X[:1]).to_dense().item()
    scale = model.outcome_scale().item() ** 2
    torch.testing.assert_close(
        posterior.variance, torch.full_like(posterior.variance, prior * scale), rtol=0.05, atol=0.0
    )


def test_each_choice_is_the_greedy_one_for_the_model_at_that_time() -> None:
    loop = begin()
    loop.advance()
    while not loop.finished:
        taken = torch.tensor(loop.state.picks)
        split = loop.split
        expected = select_from_pool(loop.sampling.model, split.pool_X, 3, split.test_X, taken)
        assert loop.advance() == expected.tolist()


def test_refits_at_geometrically_growing_numbers_of_observations() -> None:
    loop = begin(replace(QUICK, steps=15, refit=1.5))
    list(loop.run())
    assert loop.state.refits == [5, 8, 14, 23, 35]  # the first multiple reached, in steps of 3
    never = begin(replace(QUICK, refit=0.0))
    list(never.run())
    assert never.state.refits == [5]


@pytest.mark.parametrize("strategy", ["chosen", "random"])
def test_an_artefact_is_left_out_at_the_refit_that_finds_it(strategy: Strategy) -> None:
    data, row = map_with_an_artefact(LONG)
    settings = replace(LONG, strategy=strategy).resolved(*data.X.shape)
    loops = [
        SamplingReplay(PoolSplit.of(data, s), s)
        for s in (settings, replace(settings, outliers=0.0))
    ]
    for loop in loops:
        list(loop.run())
    without, kept = loops
    assert (without.outlying_rows(), kept.outlying_rows()) == ([row], [])
    assert row in without.picked_rows()
    assert without.sampling.model.num_observations == 119
    assert without.curve[-1].observations == 120
    noise = [float(loop.sampling.model.noise_level().detach()) for loop in loops]
    assert noise[0] < 0.25 * noise[1]
    assert without.curve[-1].rmse < kept.curve[-1].rmse


def test_an_outcome_far_from_its_prediction_waits_for_the_refit() -> None:
    """And is learned from there before it is found to be an outlier."""
    settings = replace(LONG, strategy="random", q=10, steps=3, pool=130, refit=1.25)
    data, row = map_with_an_artefact(settings, place=105)
    resolved = settings.resolved(*data.X.shape)
    loop = SamplingReplay(PoolSplit.of(data, resolved), resolved)
    counts = [loop.sampling.model.num_observations for _ in loop.run()]
    assert (counts, loop.state.refits) == ([100, 109, 119, 129], [100, 130])
    assert (loop.outlying_rows(), loop.state.outliers) == ([row], [105])


@pytest.mark.usefixtures("whole_fits")
def test_one_of_a_few_dozen_outcomes_may_wait() -> None:
    settings = replace(LONG, initial=30, steps=2, pool=40, refit=2.0, strategy="random")
    data, row = map_with_an_artefact(settings, place=33)
    resolved = settings.resolved(*data.X.shape)
    loop = SamplingReplay(PoolSplit.of(data, resolved), resolved)
    counts = [loop.sampling.model.num_observations for _ in loop.run()]
    assert counts == [30, 34, 39]
    assert (loop.outlying_rows(), loop.state.outliers) == ([row], [33])


def test_a_surprise_that_the_refit_explains_is_learned_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = replace(LONG, strategy="random", q=10, steps=3, pool=130, refit=1.25)
    data, _ = map_with_an_artefact(settings, place=105)
    resolved = settings.resolved(*data.X.shape)
    loop = SamplingReplay(PoolSplit.of(data, resolved), resolved)
    monkeypatch.setattr(
        "bo_stream.loops.sampling.sampling.leave_outliers_out", lambda *args: args[3]
    )
    counts = [loop.sampling.model.num_observations for _ in loop.run()]
    assert counts == [100, 109, 119, 130]
    assert loop.state.outliers == []


@pytest.mark.parametrize("strategy", ["chosen", "random"])
def test_without_outliers_the_choices_and_scores_are_those_without_the_treatment(
    strategy: Strategy,
) -> None:
    data, settings = small_map(160), replace(LONG, steps=3, strategy=strategy)
    runs = []
    for threshold in (7.0, 0.0):
        resolved = replace(settings, outliers=threshold).resolved(*data.X.shape)
        loop = SamplingReplay(PoolSplit.of(data, resolved), resolved)
        list(loop.run())
        assert loop.state.outliers == []
        runs.append((loop.state.picks, loop.state.refits, loop.curve))
    assert runs[0] == runs[1]


def test_random_choice_starts_from_the_same_points_and_goes_on_in_random_order() -> None:
    chosen, random = begin(), begin(replace(QUICK, strategy="random"))
    chosen.advance(), random.advance()
    assert chosen.curve == random.curve
    list(random.run())
    assert random.state.picks == list(range(17))
    assert random.picked_rows() == random.split.pool_rows[:17].tolist()


@pytest.mark.usefixtures("whole_fits")
def test_choosing_leaves_less_variance_than_random_choice() -> None:
    settings = replace(QUICK, steps=8, refit=0.0)  # so that both have the same hyperparameters
    chosen, random = begin(settings), begin(replace(settings, strategy="random"))
    left = []
    for loop in (chosen, random):
        list(loop.run())
        left.append(predict(loop.sampling.model, loop.split.test_X)[1].mean())
    assert left[0] < 0.9 * left[1]


@pytest.mark.matrix
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_and_both_dtypes(kernel: str, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    loop = begin(replace(QUICK, kernel=kernel, dtype=name, steps=1))
    list(loop.run())
    assert loop.split.pool_X.dtype == dtype
    assert loop.curve[-1].rmse_sd < 1.5


@pytest.mark.cuda
@pytest.mark.integration
def test_on_cuda() -> None:
    loop = begin(replace(QUICK, device="cuda"))
    list(loop.run())
    assert len(set(loop.state.picks)) == 17


def test_the_grid_is_the_one_asked_for() -> None:
    loop = begin(replace(QUICK, grid=(9, 7)))
    loop.advance()
    model = loop.sampling.model
    assert MODELS["auto"].describe(model)["grid_size"] == (9, 7)


def test_a_model_that_cannot_be_built_is_the_user_s_to_mend() -> None:
    with pytest.raises(UsageError, match="grid_size"):
        begin(replace(QUICK, grid=(1,)))
