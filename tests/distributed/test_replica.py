"""Replicas: what each asks for, sends, takes, and says of what it cannot use."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from botorch.models.transforms.input import Normalize
from gpytorch.kernels import AdditiveKernel, RBFKernel, ScaleKernel

from bo_stream import OSGPR, WISKI, BayesianLastLayer, BinomialLikelihood
from bo_stream.distributed import BestPoint, MemoryStore, Replica, ReplicaWarning
from bo_stream.distributed import deltas as deltas_module
from bo_stream.distributed.deltas import Listing, counted_key, delta_key, name_of, sealed
from bo_stream.errors import UsageError
from bo_stream.models.base import StreamingGP
from bo_stream.models.wiski.memory import StreamMemory
from tests.distributed.replicas import (
    BOX,
    Point,
    assert_same,
    expected,
    height,
    is_in,
    points,
    settings,
    settle,
    state,
    told,
)

UNLEARNED = settings(initial=10_000)
"""Of a search that never learns hyperparameters."""


def replicas(store: MemoryStore, names: str = "AB", **changes: Any) -> list[Replica]:
    own = dataclasses.replace(UNLEARNED, **changes)
    return [Replica(own, store, name) for name in names]


def some(count: int, seed: int = 0) -> list[Point]:
    return points(count, random.Random(seed))


# --- deltas ---------------------------------------------------------------------------------------


def test_observations_reach_all_once_and_cost_a_few_hundred_bytes() -> None:
    a, b = replicas(MemoryStore())
    ledger = told(a, some(3))
    sent = a.exchange()
    assert (sent.sent, sent.deltas, b.observations) == (3, 0, 0)
    assert sent.bytes_sent < 600
    taken = b.exchange()
    assert (taken.sent, taken.deltas, b.observations) == (0, 1, 3)
    assert taken.bytes_taken == sent.bytes_sent
    assert not a.exchange().changed
    assert not b.exchange().changed
    assert_same(b.model, expected(b, ledger))


def test_many_observations_travel_as_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas_module, "MOST_ROWS", 20)
    store = MemoryStore()
    a, b = replicas(store)
    ledger = told(a, some(500))
    ledger += told(b, some(400, 1)) + told(b, some(7, 2))
    settle([a, b])
    assert isinstance(a.model._memory, StreamMemory)
    late = Replica(UNLEARNED, store, "late")
    for replica in (a, b, late):
        assert_same(replica.model, expected(replica, ledger))
        assert replica.best().X == a.best().X
    best = min(ledger, key=lambda pair: pair[1])
    assert late._best.X[0].tolist() == UNLEARNED.to_unit_cube([best[0]])[0].tolist()


@pytest.mark.parametrize("counts", [(290, 11), (150, 150), (299, 1, 1)])
def test_rows_become_statistics_at_the_same_count_for_all(counts: tuple[int, ...]) -> None:
    store = MemoryStore()
    all_of = replicas(store, "ABC"[: len(counts)])
    for i, (replica, count) in enumerate(zip(all_of, counts, strict=True)):
        told(replica, some(count, i))
        replica.exchange()
    settle(all_of)
    late = Replica(UNLEARNED, store, "late")
    kinds = {type(replica.model._memory) for replica in (*all_of, late)}
    assert len(kinds) == 1
    for replica in all_of:
        assert_same(replica.model, late.model)


def test_a_delta_is_sent_again_as_it_was_when_it_is_not_known_to_be_there() -> None:
    class Silent(MemoryStore):
        broken = False

        def __setitem__(self, key: str, value: bytes) -> None:
            super().__setitem__(key, value)
            if self.broken:
                raise OSError("no answer")

    store = Silent()
    a, b = replicas(store)
    ledger = told(a, some(2))
    store.broken = True
    with pytest.raises(OSError, match="no answer"):
        a.exchange()
    store.broken = False
    b.exchange()
    ledger += told(a, some(1, 1))
    settle([a, b])
    assert len(Listing.of(store).deltas) == 2


def test_a_delta_that_arrived_is_not_taken_again_when_the_next_one_fails() -> None:
    class Failing(MemoryStore):
        broken: tuple[bool, ...] = ()

        def __setitem__(self, key: str, value: bytes) -> None:
            fails, self.broken = bool(self.broken[:1] == (True,)), self.broken[1:]
            if fails:
                raise OSError("no way")
            super().__setitem__(key, value)

    store = Failing()
    a, b = replicas(store)
    ledger = told(a, some(2))
    store.broken = (True,)
    with pytest.raises(OSError, match="no way"):
        a.exchange()
    ledger += told(a, some(1, 1))
    store.broken = (False, True)
    with pytest.raises(OSError, match="no way"):
        a.exchange()
    settle([a, b])
    assert len(Listing.of(store).deltas) == 2
    for replica in (a, b):
        assert_same(replica.model, expected(replica, ledger))


# --- snapshots ------------------------------------------------------------------------------------


def test_a_compacted_store_is_what_it_was() -> None:
    store = MemoryStore()
    a, b = replicas(store)
    ledger = []
    for seed in range(4):
        ledger += told(a, some(2, seed)) + told(b, some(1, 10 + seed))
        a.exchange()
        b.exchange()
    behind = Replica(UNLEARNED, store, "behind")
    ledger += told(a, some(2, 20))
    a.exchange()
    former = {key: store[key] for key in Listing.of(store).deltas.values()}
    assert b.compact() == 9
    assert not Listing.of(store).deltas
    assert b.compact() == 0
    store.update(former)  # as one leaves them that is killed before it has removed them
    assert a.compact() == 9
    ledger += told(b, some(1, 21))
    b.exchange()
    caught_up = behind.exchange()
    assert caught_up.restarted
    assert not behind.exchange().restarted
    settle([a, b])
    for replica in (a, b, behind, Replica(UNLEARNED, store, "late")):
        assert_same(replica.model, expected(replica, ledger))
    assert a.compact() == 1
    assert len([key for key in store if key.startswith(("snapshot/", "clock/"))]) == 2


def test_any_mapping_is_a_store() -> None:
    store: dict[str, bytes] = {}
    a, b = (Replica(UNLEARNED, store, name) for name in "AB")
    ledger = told(a, some(2))
    a.exchange()
    a.compact()
    ledger += told(b, some(1, 1))
    settle([a, b])
    assert_same(a.model, expected(a, ledger))
    assert_same(b.model, expected(b, ledger))


def test_exchanges_compact_by_themselves() -> None:
    store = MemoryStore()
    a = Replica(UNLEARNED, store, "A", compact_above=3)
    removed = []
    for seed in range(6):
        told(a, some(1, seed))
        removed.append(a.exchange().removed)
    assert removed == [0, 0, 0, 4, 0, 0]


def test_what_is_held_is_kept_while_the_store_shows_only_a_part_of_it() -> None:
    store = Interrupted("none")
    a, b = replicas(store)
    told(b, some(3, 1))
    b.exchange()
    b.compact()
    store.hidden = {delta_key((a.run, 1)), *Listing.of(store).clocks}
    told(a, some(2))
    a.exchange()
    store.hidden = {delta_key((a.run, 1))}
    with pytest.warns(ReplicaWarning, match="1 deltas are neither in the store nor"):
        assert not a.exchange().restarted
    assert a.observations == 2
    store.hidden = set()
    assert a.exchange().restarted
    assert a.observations == 5


class Interrupted(MemoryStore):
    """Calls another replica just after a key of some kind was written, and hides some keys."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.other, self.hidden = kind, list[Callable[[], object]](), set[str]()

    def __setitem__(self, key: str, value: bytes) -> None:
        super().__setitem__(key, value)
        if key.startswith(self.kind) and self.other:
            self.other.pop()()

    def __iter__(self) -> Iterator[str]:
        return iter([key for key in super().__iter__() if key not in self.hidden])


@pytest.mark.parametrize("kind", ["snapshot/", "clock/"])
def test_two_that_compact_at_once_lose_nothing_though_each_sees_what_the_other_does_not(
    kind: str,
) -> None:
    store = Interrupted(kind)
    a, b = replicas(store)
    ledger = []
    for seed in range(2):
        for replica in (a, b):
            ledger += told(replica, some(2, 10 * seed + (replica is a)))
            replica.exchange()
    removed = []

    def meanwhile() -> None:
        store.hidden = {delta_key((a.run, 2))}
        removed.append(b.compact())

    store.hidden = {delta_key((b.run, 2))}
    store.other.append(meanwhile)
    removed.append(a.compact())
    store.hidden = set()
    assert removed == [3, 0]
    assert len(Listing.of(store).clocks) == 1
    ledger += told(a, some(1, 2))
    settle([a, b])
    late = Replica(UNLEARNED, store, "late")
    for replica in (a, b, late):
        assert_same(replica.model, expected(replica, ledger))
    assert a.compact() == 2
    assert not Listing.of(store).deltas
    assert_same(Replica(UNLEARNED, store, "later").model, late.model)


@pytest.mark.parametrize("kind", ["snapshot/", "clock/"])
def test_two_that_compact_the_same_at_once_leave_it_there(kind: str) -> None:
    store = Interrupted(kind)
    a, b = replicas(store)
    ledger = told(a, some(2)) + told(b, some(3, 1))
    settle([a, b])
    store.other.append(b.compact)
    a.compact()
    assert not Listing.of(store).deltas
    late = Replica(UNLEARNED, store, "late")
    assert_same(late.model, expected(late, ledger))
    ledger += told(late, some(1, 2))
    late.exchange()
    assert late.compact() == 1
    assert len(Listing.of(store).clocks) == 1
    later = Replica(UNLEARNED, store, "later")
    assert_same(later.model, expected(later, ledger))


def test_a_snapshot_that_is_withdrawn_was_relied_on_by_nobody() -> None:
    store = Interrupted("clock/")
    a, b = replicas(store)
    ledger = told(a, some(2)) + told(b, some(3, 1))
    settle([a, b])

    def meanwhile() -> None:
        store.hidden = {delta_key((a.run, 1))}  # which is in the snapshot, as b sees
        b.compact()
        store.hidden = set()
        store[counted_key("clock", 9, a.run)] = b"torn"

    store.other.append(meanwhile)
    assert a.compact() == 0  # for it cannot know what is in the torn one
    with pytest.warns(ReplicaWarning, match="left out"):
        late = Replica(UNLEARNED, store, "late")
    assert_same(late.model, expected(late, ledger))


def test_what_vanishes_while_it_is_read_is_found_in_the_snapshot() -> None:
    class Compacting(MemoryStore):
        meanwhile: Callable[[], object] | None = None

        def __getitem__(self, key: str) -> bytes:
            if self.meanwhile is not None and key.startswith("delta/"):
                action, self.meanwhile = self.meanwhile, None
                action()
            return super().__getitem__(key)

    store = Compacting()
    a, b = replicas(store)
    ledger = told(a, some(2))
    a.exchange()
    ledger += told(a, some(2, 1))
    a.exchange()
    store.meanwhile = a.compact
    assert b.exchange().restarted
    assert_same(b.model, expected(b, ledger))


# --- hyperparameters ------------------------------------------------------------------------------


def test_all_take_the_hyperparameters_of_the_most_observations() -> None:
    store = MemoryStore()
    a, b, c = replicas(store, "ABC", initial=8, refit=2.0)
    ledger = told(a, some(8))
    assert a.exchange().learned
    first = state(a)
    assert b.exchange().adopted
    assert not b.exchange().learned
    ledger += told(b, some(9, 1))
    assert b.exchange().learned
    assert c.exchange().adopted
    assert a.exchange().adopted
    second = state(a)
    assert not is_in(a, first)
    for replica in (a, b, c):
        assert is_in(replica, second)
        assert replica.model.tolerance == a.model.tolerance
        assert_same(replica.model, expected(replica, ledger))
    b.compact()
    assert len(Listing.of(store).learned) == 1
    assert_same(Replica(b.settings, store, "late").model, a.model)


# --- points ---------------------------------------------------------------------------------------


def test_first_points_are_of_a_sobol_sequence_of_each_replicas_own() -> None:
    store, asked = MemoryStore(), list[tuple[float, ...]]()
    for name in ("node-7", "node-3", "node-12", "node-1"):  # each joins when others have begun
        replica = Replica(UNLEARNED, store, name)
        own = replica.ask(3) + replica.ask(5)
        for column in UNLEARNED.to_unit_cube(own).T:  # one in each eighth
            assert sorted((column * 8).long().tolist()) == [*range(8)]
        replica.tell(own[:2], [x[0] for x in own[:2]])
        replica.exchange()
        asked += own
    assert len(set(asked)) == len(asked)


def test_replicas_that_know_the_same_ask_for_different_points_within_the_bounds() -> None:
    store = MemoryStore()
    a, b = replicas(store, initial=8, q=2)
    told(a, some(8))
    settle([a, b])
    before = torch.get_rng_state()
    asked = [x for replica in (a, b) for _ in range(2) for x in replica.ask()]
    assert torch.equal(torch.get_rng_state(), before)
    assert len(set(asked)) == 8
    for x in asked:
        assert all(low <= value <= high for value, (low, high) in zip(x, BOX, strict=True))
    same = MemoryStore()
    same.update(store)
    again = Replica(a.settings, store, "C")
    twin = Replica(a.settings, same, "C", model=a._template)
    assert again.ask() == twin.ask()


def test_points_do_not_depend_on_the_units_of_outcomes() -> None:
    own = dataclasses.replace(UNLEARNED, initial=12, q=3)
    asked = []
    for unit in (1.0, 2.0**-16, 2.0**40):
        a = Replica(own, MemoryStore(), "A")
        X = some(12)
        a.tell(X, [unit * height(x) for x in X])
        assert a.exchange().learned
        asked.append(a.ask())
    for points_in_units in asked[1:]:
        for x, expected_x in zip(points_in_units, asked[0], strict=True):
            assert x == pytest.approx(expected_x, abs=1e-4)


def test_the_best_point_is_that_of_the_best_mean() -> None:
    a, b = replicas(MemoryStore(), maximize=True)
    with pytest.raises(UsageError, match="no best point yet"):
        a.best()
    ledger = told(a, some(30))
    a.exchange()
    b.exchange()
    found = b.best()
    assert isinstance(found, BestPoint)
    means = expected(b, ledger).posterior(UNLEARNED.to_unit_cube([x for x, _ in ledger])).mean
    assert pytest.approx(ledger[int(means.argmax())][0]) == found.X
    assert found.mean == pytest.approx(float(means.max()))


@pytest.mark.usefixtures("whole_fits", "whole_searches")
def test_a_search_of_replicas_finds_the_minimum() -> None:
    all_of = replicas(MemoryStore(), initial=6, refit=2.0)
    for _ in range(10):
        for replica in all_of:
            told(replica, replica.ask())
            replica.exchange()
    lowest = min(height(x) for x in some(4_000, 3))
    spread = max(height(x) for x in some(4_000, 3)) - lowest
    assert height(all_of[0].best().X) < lowest + 0.1 * spread


# --- what is refused, and what is told ------------------------------------------------------------


@pytest.mark.parametrize(
    ("X", "Y", "message"),
    [
        ([(0.0, 15.0)], [1.0, 2.0], "n points of 2 numbers and Y of n outcomes"),
        ([(0.0, 15.0, 1.0)], [1.0], "n points of 2 numbers"),
        ([("a", "b")], [1.0], "n points of 2 numbers"),
        ([(0.0, 15.0), (0.0, 9.0)], [1.0, 2.0], r"points within .* got \[0.0, 9.0\]"),
        ([(0.0, float("nan"))], [1.0], "points within"),
        ([(0.0, 15.0)], [float("inf")], "finite outcomes"),
        ([(0.0, 15.0)], [-1e80], "at most 1e\\+75"),
    ],
)
def test_bad_outcomes_change_nothing(X: list[Any], Y: list[float], message: str) -> None:
    a, _ = replicas(MemoryStore())
    ledger = told(a, some(2))
    with pytest.raises(UsageError, match=message):
        a.tell(X, Y)
    a.tell([], [])
    assert a.exchange().sent == 2
    assert_same(a.model, expected(a, ledger))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"acquisition": "qLogEI"}, "cannot know which points others evaluate"),
        ({"model": "osgpr", "grid": None}, "model wiski"),
        ({"bounds": ((0.0, 1.0),) * 5, "grid": None}, "at most 4 inputs"),
        ({"model_options": {"max_exact": 100}}, "options of wiski"),
    ],
)
def test_settings_that_need_a_driver_or_another_model(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Replica(settings(**changes), MemoryStore(), "A")


@pytest.mark.parametrize("name", ["", "a b", ".a", "-a", "a/b", "ä", "a" * 101])
def test_names_are_checked(name: str) -> None:
    with pytest.raises(UsageError, match="name of a replica"):
        Replica(UNLEARNED, MemoryStore(), name)


def none(dim: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    like = {"dtype": torch.float64}
    return torch.empty(0, dim, **like), torch.empty(0, 1, **like)


def unit_cube(dim: int = 2) -> torch.Tensor:
    return torch.tensor([[0.0] * dim, [1.0] * dim], dtype=torch.float64)


def layer(dim: int, **options: Any) -> BayesianLastLayer:
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(dim, 24), torch.nn.Tanh()).double()
    return BayesianLastLayer(*none(dim), network, **options)


def frozen(dim: int, window: int = 0) -> BayesianLastLayer:
    model = layer(dim, window=window)
    model.network.requires_grad_(False)
    return model


BAD: dict[str, tuple[Callable[[], StreamingGP], str]] = {
    "inducing points": (
        lambda: OSGPR(*none(), inducing_points=torch.rand(5, 2, dtype=torch.float64), window=0),
        "depend on hyperparameters",
    ),
    "counts": (
        lambda: WISKI(
            none()[0],
            torch.empty(0, 2, dtype=torch.float64),
            likelihood=BinomialLikelihood(),
            bounds=unit_cube(),
        ),
        "likelihood is not Gaussian",
    ),
    "learned network": (lambda: layer(2, window=0), "network is learned"),
    "window": (lambda: frozen(2, window=8), "window=0"),
    "input transform": (
        lambda: WISKI(
            *none(), bounds=unit_cube(), input_transform=Normalize(2, bounds=unit_cube())
        ),
        "transforms inputs",
    ),
    "observations": (lambda: WISKI(torch.rand(3, 2).double(), torch.rand(3, 1).double()), "has 3"),
    "inputs": (lambda: WISKI(*none(3), bounds=unit_cube(3), grid_size=6), "the 2 inputs"),
    "small grid": (lambda: WISKI(*none(), bounds=0.5 * unit_cube()), "not cover the unit cube"),
    "dtype": (
        lambda: WISKI(none()[0].float(), none()[1].float(), bounds=unit_cube().float()),
        "float64",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_models_that_do_not_qualify(case: str) -> None:
    build, message = BAD[case]
    with pytest.raises(UsageError, match=message) as caught:
        Replica(UNLEARNED, MemoryStore(), "A", model=build())
    assert "no hyperparameter changes" in str(caught.value)


def additive(dim: int) -> WISKI:
    parts = [ScaleKernel(RBFKernel(active_dims=(i,))) for i in range(dim)]
    return WISKI(
        *none(dim), covar_module=AdditiveKernel(*parts), bounds=unit_cube(dim), grid_size=8
    )


@pytest.mark.parametrize("build", [additive, frozen])
@pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")
def test_models_of_more_inputs(build: Callable[[int], StreamingGP]) -> None:
    own = settings(bounds=((-1.0, 1.0),) * 6, grid=None, initial=20)
    store = MemoryStore()
    a, b = (Replica(own, store, name, model=build(6)) for name in "AB")
    generator = torch.Generator().manual_seed(0)
    X = 2.0 * torch.rand(40, 6, generator=generator, dtype=torch.float64) - 1.0
    Y = (X.square().sum(-1) + X[:, 0]).tolist()
    a.tell(X[:25].tolist(), Y[:25])
    b.tell(X[25:].tolist(), Y[25:])
    settle([a, b])
    whole = a._template.update(own.to_unit_cube(X.tolist()), -torch.tensor(Y).double()[:, None])
    whole.load_state_dict(a.model.state_dict())
    at = torch.rand(20, 6, generator=generator, dtype=torch.float64)
    for model in (b.model, whole):
        torch.testing.assert_close(a.model.posterior(at).mean, model.posterior(at).mean)
        torch.testing.assert_close(a.model.posterior(at).variance, model.posterior(at).variance)
    assert all(-1.0 <= value <= 1.0 for value in a.ask()[0])


def test_a_store_of_another_search_is_refused_by_what_differs() -> None:
    store = MemoryStore()
    Replica(UNLEARNED, store, "A")
    for changes, message in (
        ({"bounds": ((0.0, 1.0), (0.0, 1.0))}, "that of replica 'A'; they differ in bounds"),
        ({"maximize": True}, "maximize: here True, there False"),
        ({"grid": (13,)}, r"grid_size: here \[13, 13\], there \[12, 12\]"),
        ({"kernel": "matern32"}, r"covar_module.base_kernel.nu: here 1.5, there 2.5"),
    ):
        with pytest.raises(UsageError, match=message):
            Replica(dataclasses.replace(UNLEARNED, **changes), store, "B")
    assert {name_of(run) for run in Listing.of(store).runs} == {"A"}


def damaged(store: MemoryStore, key: str) -> None:
    value = store._values[key]
    store._values[key] = value[:-1] + bytes([value[-1] ^ 1])


def test_damaged_foreign_and_strange_records_are_named_and_left_out() -> None:
    store = MemoryStore()
    a, b = replicas(store)
    told(a, some(2))
    a.exchange()
    ledger = told(a, some(2, 1))
    a.exchange()
    first, _ = Listing.of(store).deltas.values()
    whole = store._values[first]
    damaged(store, first)
    foreign = first.replace("A.", "Z.")
    store[foreign] = sealed(foreign, "0123456789abcdef", {}, {})
    store["notes.txt"] = b"hello"
    with pytest.warns(ReplicaWarning) as caught:
        found = b.exchange()
    said = [str(warning.message) for warning in caught]
    assert said == [*found.remarks]
    assert len(said) == 3
    assert "notes.txt in the store is not a record" in said[0]
    assert f"{first} is left out" in said[1]
    assert "damaged" in said[1]
    assert f"{foreign} is left out: it belongs to a search with other settings" in said[2]
    assert_same(b.model, expected(b, ledger))
    assert b.exchange().remarks == found.remarks  # in the report always, as a warning once
    store._values[first] = whole
    assert b.exchange().deltas == 1
    assert b.observations == 4


@pytest.mark.parametrize("kind", ["snapshot/", "clock/"])
def test_a_damaged_snapshot_is_named_with_what_is_missing(kind: str) -> None:
    store = MemoryStore()
    (a,) = replicas(store, "A")
    told(a, some(3))
    a.exchange()
    a.compact()
    ledger = told(a, some(1, 1))
    a.exchange()
    damaged(store, next(key for key in store if key.startswith(kind)))
    with pytest.warns(ReplicaWarning) as caught:
        late = Replica(UNLEARNED, store, "late")
    said = [str(warning.message) for warning in caught]
    assert said[0].startswith(kind)
    assert said[1:] == (
        [
            "1 deltas are neither in the store nor in a snapshot that can be read "
            f"({a.run}: 1): their observations are missing here."
        ]
        if kind == "snapshot/"
        else []
    )
    assert_same(late.model, expected(late, ledger))
    assert late.compact() == 0
    assert not a.exchange().changed
    assert a.observations == 4


def test_damaged_hyperparameters_are_named_and_the_next_best_count() -> None:
    store = MemoryStore()
    a, b = replicas(store, initial=4, refit=1.5)
    told(a, some(4))
    a.exchange()
    kept = state(a)
    told(a, some(4, 1))
    assert a.exchange().learned
    key = Listing.of(store).learned[-1]
    damaged(store, key)
    b.settings = dataclasses.replace(b.settings, initial=10_000)
    with pytest.warns(ReplicaWarning, match=f"{key} is left out"):
        assert b.exchange().adopted
    assert is_in(b, kept)


def test_two_of_one_name_are_told_and_nothing_is_lost() -> None:
    store = MemoryStore()
    first = Replica(UNLEARNED, store, "A")
    ledger = told(first, some(2))
    second = Replica(UNLEARNED, store, "A")
    with pytest.raises(UsageError, match=r"Another replica of the name 'A' has started .* process"):
        first.exchange()
    with pytest.warns(ReplicaWarning, match="Another replica of the name 'A', process"):
        second.exchange()
    ledger += told(second, some(1, 1))
    second.exchange()
    late = Replica(UNLEARNED, store, "late")
    for replica in (second, late):
        assert_same(replica.model, expected(replica, ledger))


@pytest.mark.parametrize("initial", [2, 10_000])
@pytest.mark.parametrize("compacts", [False, True])
def test_no_run_of_a_name_asks_again_for_points_of_an_earlier_one(
    initial: int, compacts: bool
) -> None:
    store, asked = MemoryStore(), list[Point]()
    for _ in range(3):  # each sends several points at once, and is started again
        replica = Replica(dataclasses.replace(UNLEARNED, initial=initial), store, "A")
        own = replica.ask(2) + replica.ask(4)
        told(replica, own)
        replica.exchange()
        if compacts:
            replica.compact()
        asked += own
    assert len(set(asked)) == len(asked) == 18


def test_one_that_died_goes_on_under_its_name() -> None:
    store = MemoryStore()
    first = Replica(UNLEARNED, store, "A")
    asked = first.ask()
    ledger = told(first, asked)
    first.exchange()
    told(first, first.ask())  # and dies
    second = Replica(UNLEARNED, store, "A")
    assert second.observations == 1
    assert second.ask() != asked
    ledger += told(second, some(1))
    assert second.exchange().remarks == ()
    assert_same(second.model, expected(second, ledger))
