"""Data-parallel training: the steps of many processes are those of one that has all rows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError, ModelFittingError, UnsupportedError
from gpytorch.likelihoods import BernoulliLikelihood, LaplaceLikelihood
from gpytorch.mlls import VariationalELBO
from torch import Tensor
from torch.utils.data import TensorDataset

from bo_stream import (
    OSGPR,
    OSVGP,
    QSGP,
    QSRVM,
    WISKI,
    Chevron,
    DecoupledGP,
    FourierFeatures,
    InducingAtData,
)
from bo_stream.collective import ALONE, Collective
from bo_stream.distributed import Processes, data_parallel
from bo_stream.distributed import training as module
from bo_stream.errors import UsageError
from bo_stream.models.base import StreamingGP
from tests.distributed.threads import together

Data = tuple[Tensor, Tensor]
STEPS = 25
SAME = {"rtol": 1e-6, "atol": 1e-6}
PARTS = ((slice(0, 30), slice(0, 0)), (slice(30, 60), slice(60, None)))
"""Rows of each of two processes in each of two updates; the first has none in the second."""


def field(n: int, seed: int) -> Data:
    X = torch.quasirandom.SobolEngine(2, scramble=True, seed=seed).draw(n, dtype=torch.float64)
    noise = 0.1 * torch.randn(n, 1, generator=torch.Generator().manual_seed(seed)).double()
    return X, torch.sin(6.0 * X[:, :1]) * torch.cos(4.0 * X[:, 1:]) + noise


def labels(n: int, seed: int) -> Data:
    X, Y = field(n, seed)
    return X, (Y > 0.0).double()


def two_outputs(n: int, seed: int) -> Data:
    X, Y = field(n, seed)
    return X, torch.cat((Y, 1.0 - Y.square()), -1)


@dataclass(frozen=True)
class Case:
    """A model of some first rows, and where its rows come from."""

    build: Callable[[Tensor, Tensor], Any]
    data: Callable[[int, int], Data] = field


def decoupled(**options: Any) -> Callable[[Tensor, Tensor], DecoupledGP]:
    return lambda X, Y: DecoupledGP(X, Y, num_mean=30, num_covar=8, batch_size=20, **options)


CASES = {
    "few functions drawn": Case(
        lambda X, Y: QSGP(
            X,
            Y,
            basis=FourierFeatures(160),
            batch_size=20,
            functions=50,
            control_points=15,
            initial_points=30,
            freeze_steps=5,
            hyper_rate=0.02,
        )
    ),
    "functions at data": Case(
        lambda X, Y: QSGP(
            X,
            Y,
            basis=InducingAtData(60),
            covariance=Chevron(3),
            batch_size=20,
            functions=25,
            control_points=15,
        )
    ),
    "relevance": Case(lambda X, Y: QSRVM(X, Y, batch_size=20, freeze_steps=5)),
    "labels": Case(
        lambda X, Y: QSGP(
            X,
            Y,
            BernoulliLikelihood(),
            basis=FourierFeatures(80),
            batch_size=20,
            initial_points=30,
            freeze_steps=5,
        ),
        labels,
    ),
    "spectral": Case(decoupled(), two_outputs),
    "hybrid": Case(decoupled(parametrization="hybrid")),
    "direct": Case(decoupled(parametrization="direct", mean_rate=None)),
    "decoupled labels": Case(decoupled(likelihood=BernoulliLikelihood()), labels),
    "online labels": Case(
        lambda X, Y: OSVGP(X, Y, BernoulliLikelihood(), max_points=25, hyper_steps=22), labels
    ),
    "online outliers": Case(
        lambda X, Y: OSVGP(
            X, Y, LaplaceLikelihood(), inducing_points=X[:20], beta=0.7, hyper_steps=5
        )
    ),
}


def learned(model: StreamingGP) -> dict[str, Tensor]:
    """Posterior, bound, variational parameters and hyperparameters."""
    X = field(25, 9)[0]
    posterior = model.posterior(X)
    found = {"mean": posterior.mean.detach(), "variance": posterior.variance.detach()}
    memory = model._memory
    if isinstance(model, QSGP | QSRVM):
        found |= {"q(w)": memory.progress.coefficients, "scales": memory.progress.log_scale}
    if isinstance(model, DecoupledGP):
        found |= {"a": memory.posterior.coefficients, "alpha": memory.posterior.alpha.points}
    if isinstance(model, OSVGP):
        found |= {"Z": model.inducing_points, "gram": memory.statistics.learned.gram}
    return found | {name: p.detach() for name, p in model.named_parameters()}


def trained(case: Case, rank: int | None, collective: Collective = ALONE) -> dict[str, Tensor]:
    """What a process has learned from its rows, or one process from all of them."""
    (X, Y), (first_X, first_Y) = case.data(70, 2), case.data(30, 1)
    model = case.build(first_X, first_Y)
    module._check_same(module._described(model), collective)
    module._join(model, collective)
    processes = Processes(model, collective)
    for update in range(2):
        own = [part[update] for part in (PARTS if rank is None else PARTS[rank : rank + 1])]
        processes.update(torch.cat([X[s] for s in own]), torch.cat([Y[s] for s in own]))
    if not isinstance(model, OSVGP):
        processes.fit(STEPS, progress=False)
    found = {**learned(model), "bound": model.elbo() / 100.0}
    if isinstance(model, DecoupledGP):
        model.optimize_posterior(progress=False)
        if case.data is not labels:
            model.fit_collapsed(3, progress=False)
        # the mean's coefficients are then as large as the inverse of K_alpha's smallest eigenvalue
        best = {name: value for name, value in learned(model).items() if name != "a"}
        found |= {f"best {name}": value for name, value in best.items()}
        found["best bound"] = model.elbo() / 100.0
    module._leave(model)
    assert torch.equal(learned(model)["mean"], found.get("best mean", found["mean"]))
    return found


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], **tolerance: float) -> None:
    for name, value in other.items():
        torch.testing.assert_close(one[name], value, msg=lambda m, n=name: f"{n}: {m}", **tolerance)


@pytest.mark.matrix
@pytest.mark.parametrize("name", list(CASES))
def test_two_processes_take_the_steps_of_one_that_has_all_rows(name: str) -> None:
    case = CASES[name]
    one = trained(case, None)
    parts = together(2, lambda collective: trained(case, collective.rank, collective))
    for part in parts:
        assert_same(part, one, **SAME)
    assert_same(parts[0], parts[1], rtol=0.0, atol=0.0)  # bit by bit
    untrained = case.build(*case.data(30, 1))
    moved = [p.detach() - one[name] for name, p in untrained.named_parameters() if p.requires_grad]
    if name != "functions at data":  # whose hyperparameters stay
        assert max(float(change.abs().max()) for change in moved) > 1e-2


def test_processes_without_rows_take_part() -> None:
    """One of three has no rows at all, and a minibatch of one row leaves two without."""
    X, Y = field(2, 1)

    def work(collective: Collective) -> dict[str, Tensor]:
        model = QSGP(X, Y, basis=FourierFeatures(20), batch_size=1, initial_points=0)
        module._join(model, collective)
        Processes(model, collective).fit(5, progress=False)
        module._leave(model)
        return learned(model)

    one = work(ALONE)
    for part in together(3, work):
        assert_same(part, one, **SAME)


@pytest.mark.parametrize("name", ["few functions drawn", "relevance", "spectral", "hybrid"])
def test_processes_that_clear_their_models_go_on_together(name: str) -> None:
    case = CASES[name]
    X, Y = case.data(70, 2)

    def work(collective: Collective) -> dict[str, Tensor]:
        model = case.build(*case.data(30, 1))
        module._join(model, collective)
        processes = Processes(model, collective)
        model.clear()
        assert model.num_observations == 0
        rank, size = collective.rank, collective.size
        own = slice(70 * rank // size, 70 * (rank + 1) // size)
        processes.update(X[own], Y[own])
        processes.fit(5, progress=False)
        assert model.num_observations == 70
        module._leave(model)
        return learned(model)

    one = work(ALONE)
    for part in together(2, work):
        assert_same(part, one, **SAME)


def test_all_end_by_the_clock_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose time does not pass, so that the steps are the limit for all."""
    X, Y = field(20, 1)
    first: list[int] = []
    steps = iter(range(10**9))
    clock = lambda: 0.0 if threading.get_ident() in first else float(next(steps))  # noqa: E731
    monkeypatch.setattr("bo_stream.models.stochastic.training.time.monotonic", clock)

    def work(collective: Collective) -> int:
        if collective.rank == 0:
            first.append(threading.get_ident())
        model = QSGP(X, Y, basis=FourierFeatures(20), initial_points=0)
        module._join(model, collective)
        return Processes(model, collective).fit(7, 3.0, progress=False).steps

    assert together(3, work) == [7, 7, 7]


# --- what is refused ----------------------------------------------------------------------------

ROWS = field(12, 3)


def small(**options: Any) -> QSGP:
    return QSGP(*ROWS, **{"basis": FourierFeatures(10), "update_steps": 1, **options})


def shorter_scale() -> QSGP:
    model = small()
    model.covar_module.base_kernel.lengthscale = 0.1
    return model


OTHERS: dict[str, tuple[Callable[[], StreamingGP], str]] = {
    "seed": (lambda: small(seed=3), "has option.schedule.seed 3, process 0 has 0"),
    "functions": (
        lambda: small(basis=FourierFeatures(10, seed=1)),
        "layout.choice.seed 1, process 0 has 0",
    ),
    "batch": (lambda: small(batch_size=4), "option.schedule.batch_size 4, process 0 has None"),
    "hyperparameter": (shorter_scale, r"covar_module.base_kernel.raw_lengthscale \[\["),
    "inputs": (lambda: QSGP(field(12, 3)[0][:, :1], ROWS[1]), "has shape .* of 1 inputs"),
    "class": (lambda: DecoupledGP(*ROWS), "has class .*DecoupledGP, process 0 has .*QSGP"),
    "rows": (lambda: small().update(*field(2, 5)), "memory.replay.count 14, process 0 has 12"),
    "first rows": (
        lambda: QSGP(*field(12, 4), basis=FourierFeatures(10), update_steps=1),
        "Process 1 has",
    ),
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_processes_with_another_model_are_refused_in_all_of_them(name: str) -> None:
    build, message = OTHERS[name]
    models: list[StreamingGP] = [small(), build()]

    def work(collective: Collective) -> None:
        with pytest.raises(UsageError, match=message):
            module._check_same(module._described(models[collective.rank]), collective)

    together(2, work)


def test_processes_with_another_version_are_refused() -> None:
    model = small()

    def work(collective: Collective) -> None:
        torch_version = "1.0" if collective.rank == 1 else "2.0"
        described = {**module._described(model), "torch": torch_version}
        with pytest.raises(UsageError, match=r"Process 1 has torch 1\.0, process 0 has 2\.0"):
            module._check_same(described, collective)

    together(2, work)


def test_models_that_are_the_same_are_taken_whatever_was_asked_of_one() -> None:
    """Posteriors leave caches, which are none of a model's content."""
    models = [
        OSVGP(*labels(12, 1), BernoulliLikelihood(), max_points=8),
        OSVGP(*labels(12, 1), BernoulliLikelihood(), max_points=8),
    ]
    models[0].posterior(ROWS[0])
    models[0].elbo()
    together(2, lambda c: module._check_same(module._described(models[c.rank]), c))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: WISKI(*ROWS, grid_size=[8, 8]), "got a WISKI.*bo_stream.distributed.ingest"),
        (lambda: OSGPR(*ROWS), "got a OSGPR"),
        (lambda: small(max_rows=20), "without max_rows"),
        (lambda: QSGP.from_dataset(TensorDataset(*ROWS)), "of a Dataset"),
        (lambda: small().condition_on_observations(*(t[:1] for t in ROWS)), "conditioned on"),
    ],
)
def test_a_model_that_cannot_be_trained_so_is_refused(
    build: Callable[[], StreamingGP], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message), data_parallel(build()):
        pass


def test_rows_that_one_process_cannot_take_change_nothing_anywhere() -> None:
    X, Y = ROWS

    def work(collective: Collective) -> dict[str, Tensor]:
        model = small()
        module._join(model, collective)
        before, processes = learned(model), Processes(model, collective)
        wrong = Y.clone()
        wrong[3] = torch.nan
        if collective.rank == 1:
            with pytest.raises(InputDataError, match="NaN"):
                processes.update(X, wrong)
        else:
            with pytest.raises(UsageError, match=r"Process 1 cannot take its rows: .*NaN"):
                processes.update(X, Y)
        assert model.num_observations == len(X)
        assert_same(learned(model), before, rtol=0.0, atol=0.0)
        processes.update(X[:0], Y[:0])  # no rows of any
        assert model.num_observations == len(X)
        processes.update(X, Y)
        return learned(model)

    first, second = together(2, work)
    assert_same(first, second, rtol=0.0, atol=0.0)


def test_a_training_that_diverges_does_so_everywhere() -> None:
    def work(collective: Collective) -> float:
        model = small(learning_rate=1e200, initial_points=0)
        module._join(model, collective)
        with pytest.raises(ModelFittingError, match="diverged"):
            Processes(model, collective).fit(200, progress=False)
        return float(model.elbo())

    values = together(2, work)
    assert values[0] == values[1]


def test_a_group_that_exists_is_taken_and_left(tmp_path: Path) -> None:
    """A group of this process alone, which no fit from outside can use for its gradients."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = small()
        with data_parallel(model) as processes:
            assert isinstance(model._memory.replay.collective, module.ProcessGroup)
            processes.update(*field(9, 5))
            mll = VariationalELBO(model.likelihood, model, num_data=21)
            with pytest.raises(UnsupportedError, match="fit_gpytorch_mll after the block"):
                model.train().compute_custom_loss(mll)
            with pytest.raises(UnsupportedError, match="save it after the block"):
                model.eval().save(tmp_path / "model.safetensors")
            assert deepcopy(model).elbo() == model.elbo()
        model.save(tmp_path / "model.safetensors")
        assert_same(learned(QSGP.load(tmp_path / "model.safetensors")), learned(model))
        assert torch.distributed.is_initialized()
        assert bool(model.train().compute_custom_loss(mll).isfinite())
    finally:
        torch.distributed.destroy_process_group()
    assert_same(learned(model.eval()), learned(small().update(*field(9, 5))), rtol=0.0, atol=0.0)


def test_an_online_model_has_no_fit() -> None:
    model = OSVGP(*labels(12, 1), BernoulliLikelihood(), max_points=8)
    with data_parallel(model) as processes, pytest.raises(UnsupportedError, match="in update"):
        processes.fit(3)


def test_without_torchrun_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in module._ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    model = small()
    with data_parallel(model) as processes:
        assert (processes.rank, processes.size) == (0, 1)
        processes.update(*field(9, 5))
        processes.fit(5, progress=False)
    expected = small().update(*field(9, 5))
    expected.fit(5, progress=False)
    assert_same(learned(model), learned(expected), rtol=0.0, atol=0.0)
    assert model.num_observations == 21


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in module._ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match=r"without WORLD_SIZE.*torchrun"), data_parallel(small()):
        pass
    with pytest.raises(UsageError, match="timeout"), data_parallel(small(), timeout=0.0):
        pass
