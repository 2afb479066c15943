"""Whatever happens to an optimizer, in the end it knows what its ledger says, and nothing else.

A world sends it outcomes late, in any order, twice, amended and withdrawn, lets evaluations fail,
and kills it: it then goes on from its last checkpoint, and what came since is sent again or lost.
Meanwhile a dict keeps the ledger by the plainest rules. The models are those whose memory does not
depend on the order of arrival. Inducing points that an allocator places do; those that stay do not,
if no row is held beside them and the kernel stays too: a move of it approximates what came before.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream import OSGPR, AutoGP
from bo_stream.errors import UsageError
from bo_stream.loops.models import MODELS, unit_cube
from bo_stream.loops.optimization import Optimizer, load_optimizer, save_optimizer
from bo_stream.loops.optimization.optimizer import Surrogate, thin
from bo_stream.loops.optimization.region_search import RegionSurrogate
from bo_stream.loops.optimization.trials import Ledger, OptimizationSettings
from bo_stream.loops.run import predict
from bo_stream.models.base import StreamingGP

pytestmark = [
    pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short"),
    pytest.mark.filterwarnings("ignore:The grid of .* is coarser than the noise"),
]

EVENTS, FEW_EVENTS = 500, 200
"""What happens in a world, and in one of a run that takes no integration tests."""

ON_GRID = OptimizationSettings(
    bounds=((-2.0, 3.0), (0.0, 2.0)),
    initial=4,
    acquisition="random",
    model="wiski",
    kernel="rbf",
    grid=(10, 9),
    refit=0.0,
)
HANDED_OVER = replace(ON_GRID, model="auto", grid=None, model_options={"max_exact": 40})


FIXED_POINTS = replace(ON_GRID, model="osgpr", grid=None)


def at_fixed_points(
    X: Tensor, Y: Tensor, kernel: Kernel, options: Mapping[str, Any]
) -> StreamingGP:
    axis = torch.linspace(0.0, 1.0, 6).to(X)
    Z = torch.cartesian_prod(axis, axis)
    return OSGPR(X, Y, covar_module=kernel, inducing_points=Z, window=0, **options)


def handed_to_a_grid(
    X: Tensor, Y: Tensor, kernel: Kernel, options: Mapping[str, Any]
) -> StreamingGP:
    """An AutoGP that goes to no inducing points, even where the grid is far from exact."""
    families = ("exact", "WISKI")
    return AutoGP(X, Y, covar_module=kernel, bounds=unit_cube(X), families=families, **options)


def noise_of(key: int) -> float | None:
    """The noise variance of a trial's outcomes: of every third one it is known."""
    return None if key % 3 else 0.01 * (1 + key % 5)


@dataclass
class World:
    """An optimizer, what happens to it, and what it should know.

    Attributes:
        expected: Status and outcome of each trial, by key.
        saved: The same at the last checkpoint.
        unsent: Outcomes that are on their way.
        sent: Outcomes that were delivered, and may be once more.
    """

    settings: OptimizationSettings
    folder: Path
    random: random.Random
    optimizer: Optimizer = field(init=False)
    expected: dict[int, tuple[str, float | None]] = field(default_factory=dict)
    saved: dict[int, tuple[str, float | None]] = field(default_factory=dict)
    unsent: list[tuple[int, float]] = field(default_factory=list)
    sent: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = Optimizer(self.settings)
        for Y in (0.0, 1.0):  # all others lie between: the unit stays
            key = self.optimizer.register([0.5 + Y, 0.5]).key
            self.optimizer.tell(key, Y)
            self.expected[key] = ("told", Y)
        self.ask()
        self.save()

    def ask(self) -> None:
        for trial in self.optimizer.ask(self.random.randint(1, 3)):
            self.expected[trial.key] = ("pending", None)
            self.unsent.append((trial.key, self.value(trial.X)))

    def value(self, X: Sequence[float]) -> float:
        """A smooth function of values between 0 and 1, with noise."""
        return 0.5 + 0.4 * math.sin(X[0]) * math.cos(X[1]) + 0.1 * (self.random.random() - 0.5)

    def deliver(self) -> None:
        """Outcomes come in any order; some stay for long."""
        if self.unsent:
            message = self.unsent.pop(self.random.randrange(len(self.unsent)))
            self._tell(*message)
            self.sent.append(message)

    def deliver_again(self) -> None:
        if self.sent:
            self._tell(*self.random.choice(self.sent))

    def _tell(self, key: int, Y: float) -> None:
        status, known = self.expected[key]
        if status == "withdrawn" or (status == "told" and known != Y):
            with pytest.raises(UsageError, match=f"Trial {key} was"):
                self.optimizer.tell(key, Y, Yvar=noise_of(key))
        else:
            self.optimizer.tell(key, Y, Yvar=noise_of(key))
            self.expected[key] = ("told", Y)

    def amend(self) -> None:
        key, Y = self._some(), self.random.random()
        self.optimizer.amend(key, Y, noise_of(key))
        self.expected[key] = ("told", Y)

    def withdraw(self) -> None:
        key = self._some()
        self.optimizer.withdraw(key)
        self.expected[key] = ("withdrawn", None)

    def fail(self) -> None:
        key = self._some()
        if self.expected[key][0] in ("told", "withdrawn"):
            with pytest.raises(UsageError, match="it cannot fail any more"):
                self.optimizer.fail(key, "no power")
        else:
            self.optimizer.fail(key, "no power")
            self.expected[key] = ("failed", None)

    def retry(self) -> None:
        failed = [key for key, (status, _) in self.expected.items() if status == "failed"]
        if failed:
            key = self.random.choice(failed)
            self.optimizer.retry(key)
            self.expected[key] = ("pending", None)

    def _some(self) -> int:
        return self.random.randrange(2, len(self.expected))

    def look(self) -> None:
        """The model is brought to the ledger."""
        self.optimizer.best()

    def save(self) -> None:
        save_optimizer(self.folder, self.optimizer)
        self.saved = dict(self.expected)

    def die(self) -> None:
        """What came since the checkpoint is gone; outcomes of trials that are known come again."""
        self.optimizer, _ = load_optimizer(self.folder)
        self.expected = dict(self.saved)
        messages = [m for m in self.sent + self.unsent if m[0] in self.expected]
        self.sent, self.unsent = [], messages

    def run(self, events: int) -> None:
        weights = {
            self.ask: 30, self.deliver: 50, self.deliver_again: 8, self.amend: 5, self.withdraw: 2,
            self.fail: 3, self.retry: 3, self.look: 5, self.save: 5, self.die: 2,
        }  # fmt: skip
        happening = self.random.choices(list(weights), list(weights.values()), k=events)
        for event in happening:
            event()


def in_order(optimizer: Optimizer) -> StreamingGP:
    """The model of the final ledger, built at once, with the same hyperparameters and units."""
    surrogate = Surrogate(optimizer.settings)
    model = surrogate.follow(Ledger(optimizer.ledger))
    assert model is not None
    assert optimizer.surrogate.model is not None
    assert surrogate.unit == optimizer.surrogate.unit
    model.load_state_dict(optimizer.surrogate.model.state_dict())
    thin(model)
    return model


def in_order_at_fixed_points(optimizer: Optimizer) -> StreamingGP:
    """The same under a kernel that is known before the outcomes come."""
    surrogate, settings = optimizer.surrogate, optimizer.settings
    told = sorted(optimizer.ledger.with_status("told"), key=lambda trial: trial.key)
    X = settings.to_unit_cube([trial.X for trial in told])
    Y = settings.sign / surrogate.unit * X.new_tensor([[trial.Y] for trial in told])
    noise = [[math.nan if trial.Yvar is None else trial.Yvar] for trial in told]
    known = {"train_Yvar": X.new_tensor(noise) / surrogate.unit**2}
    assert surrogate.model is not None
    model = at_fixed_points(X, Y, deepcopy(surrogate.model.covar_module), known)
    model.load_state_dict(surrogate.model.state_dict())
    return model


def check(
    settings: OptimizationSettings,
    seed: int,
    folder: Path,
    built: Callable[[Optimizer], StreamingGP] = in_order,
    events: int = EVENTS,
) -> None:
    world = World(settings, folder, random.Random(seed))
    world.run(events)
    optimizer = world.optimizer
    optimizer.best()
    assert {t.key: (t.status, t.Y) for t in optimizer.ledger} == world.expected
    told = {key: Y for key, (status, Y) in world.expected.items() if status == "told"}
    assert len(told) > events // 10
    known = {key: noise for key in told if key > 1 and (noise := noise_of(key)) is not None}
    if isinstance(optimizer.surrogate, RegionSurrogate):
        rows = optimizer.surrogate.trials
        values = {key: settings.sign * float(rows.Y[key]) for key in rows.with_outcome().tolist()}
        noise = {key: float(rows.Yvar[key]) for key in values if not rows.Yvar[key].isnan()}
    else:
        values, noise = optimizer.surrogate.held, optimizer.surrogate.noise
    assert values == told
    assert noise == known
    X = torch.rand(100, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert optimizer.surrogate.model is not None
    for got, expected in zip(
        predict(optimizer.surrogate.model, X), predict(built(optimizer), X), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)


def test_in_the_end_the_model_is_that_of_the_ledger(tmp_path: Path) -> None:
    check(ON_GRID, 0, tmp_path, events=FEW_EVENTS)


@pytest.mark.integration
@pytest.mark.parametrize("seed", range(10))
def test_ten_seeds_of_inducing_points_that_stay(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = replace(MODELS["osgpr"], options={}, build=at_fixed_points)
    monkeypatch.setitem(MODELS, "osgpr", kind)
    check(FIXED_POINTS, seed, tmp_path, in_order_at_fixed_points)


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore::bo_stream.HandOverWarning")
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    "settings", [replace(ON_GRID, refit=2.0), HANDED_OVER], ids=["grid", "handed over"]
)
def test_ten_seeds(
    settings: OptimizationSettings, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "auto", replace(MODELS["auto"], build=handed_to_a_grid))
    check(settings, seed, tmp_path)
