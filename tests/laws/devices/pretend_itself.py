"""The pretend device is refused what a GPU is, and counts what waits; ``test_laws`` runs this."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.laws.devices import pretend

pretend.install()


def near(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64)


def far(*shape: int) -> Tensor:
    return near(*shape).to(pretend.NAME)


def waits(function: Callable[[], Any]) -> Counter[str]:
    """What the host waited for while a function ran."""
    pretend.SYNCS.clear()
    function()
    return Counter(pretend.SYNCS)


def solved(A: Tensor, B: Tensor) -> Tensor:
    """Views, products, a factorisation, writes into a part, and indexing."""
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    factor = torch.linalg.cholesky(A @ A.mT + identity)
    result = torch.linalg.solve_triangular(factor, B.exp(), upper=False)
    result = result * 3.0**0.5  # no single number
    result[..., 1:, :] += 1.0
    chosen = torch.tensor([2, 0], device=A.device)
    return torch.cat((result.mT.reshape(-1), result[..., chosen, :].sum((-2, -1)).flatten()))


def test_results_and_gradients_are_the_hosts_to_the_bit() -> None:
    A, B = near(3, 4, 4).requires_grad_(), near(3, 4, 2).requires_grad_()
    far_A, far_B = (t.detach().to(pretend.NAME).requires_grad_() for t in (A, B))
    expected, found = solved(A, B), solved(far_A, far_B)
    assert found.device.type == pretend.NAME
    assert torch.equal(found.cpu(), expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    for leaf, own in ((far_A, A), (far_B, B)):
        assert leaf.grad.device.type == pretend.NAME
        assert torch.equal(leaf.grad.cpu(), own.grad)


MIXTURES: dict[str, Callable[[], Any]] = {
    "a sum": lambda: far(3) + near(3),
    "a sum, turned": lambda: near(3) + far(3),
    "a product": lambda: far(3, 3) @ near(3, 3),
    "rows together": lambda: torch.cat((far(3), near(3))),
    "a choice": lambda: torch.where(far(3) > 0.5, near(3), 0.0),
    "a write": lambda: far(3).add_(near(3)),
    "a write to the host": lambda: near(3).add_(far(3)),
    "a comparison": lambda: torch.equal(far(3), near(3)),
    "an index of the device": lambda: near(3)[torch.tensor([1]).to(pretend.NAME)],
    "a solve": lambda: torch.linalg.solve_triangular(far(2, 2), near(2, 2), upper=False),
}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_operations_on_two_devices_are_refused(mixture: str) -> None:
    with pytest.raises(RuntimeError, match=r"device"):
        MIXTURES[mixture]()


def test_numpy_is_refused() -> None:
    with pytest.raises(TypeError, match="convert"):
        far(3).numpy()


def test_generators_belong_to_a_device() -> None:
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device=pretend.NAME, generator=torch.Generator())
    own = [torch.Generator(pretend.NAME).manual_seed(seed) for seed in (1, 1, 2)]
    one, same, other = (torch.rand(3, device=pretend.NAME, generator=g) for g in own)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert isinstance(torch.Generator(), torch.Generator)


def test_numbers_may_lie_anywhere() -> None:
    X = far(3)
    for number in (2.0, torch.tensor(2.0)):
        assert torch.equal((X * number).cpu(), X.cpu() * 2.0)
    assert (X[torch.tensor([0, 2])]).shape == (2,)


WAITS: dict[str, tuple[Callable[[Tensor], Any], dict[str, int]]] = {
    "nothing": (lambda X: (X @ X.mT).exp()[..., 1:].sum(), {}),
    "a number": (lambda X: float(X.sum()), {"item": 1}),
    "a decision": (lambda X: bool((X > 0.0).any()), {"item": 1}),
    "a list": (lambda X: X.tolist(), {"copy": 1}),
    "a fetch": (lambda X: X.cpu(), {"copy": 1}),
    "a send": (lambda X: near(3).to(X), {"copy": 1}),
    "a send without blocking": (lambda X: near(3).to(X.device, non_blocking=True), {}),
    "a comparison": (lambda X: torch.equal(X, X.clone()), {"equal": 1}),
    "a size by values": (lambda X: (X > 0.5).nonzero(), {"nonzero": 1}),
    "an index of the host": (lambda X: X[torch.tensor([1])], {"copy": 1}),
    "a write there": (
        lambda X: X.index_put_((torch.tensor([1]),), X[0, 0]),
        {"index of the host": 1},
    ),
}


@pytest.mark.parametrize("cause", WAITS)
def test_what_waits_is_counted(cause: str) -> None:
    function, expected = WAITS[cause]
    X = far(3, 3)
    assert waits(lambda: function(X)) == expected


def test_modules_and_files_move(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2).to(pretend.NAME)
    twin = copy.deepcopy(module)
    torch.save({"module": module, "view": module.weight[0]}, tmp_path / "file.pt")
    X = torch.rand(4, 3)
    expected = module(X.to(pretend.NAME)).detach().cpu()
    assert torch.equal(twin(X.to(pretend.NAME)).detach().cpu(), expected)
    for device in ("cpu", pretend.NAME):
        content = torch.load(tmp_path / "file.pt", map_location=device, weights_only=False)
        assert content["view"].device.type == device
        assert torch.equal(content["module"](X.to(device)).detach().cpu(), expected)


def test_least_squares_are_cudas() -> None:
    """Which needs full rank: its only driver is gels."""
    A, B = near(5, 3), near(5, 2)
    expected = torch.linalg.lstsq(A, B, driver="gels").solution
    found = torch.linalg.lstsq(A.to(pretend.NAME), B.to(pretend.NAME)).solution
    assert torch.equal(found.cpu(), expected)
