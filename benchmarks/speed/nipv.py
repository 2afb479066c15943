"""qNIPV with its gradient: BoTorch's on the exact GP and on WISKI, and ours in feature space."""

from __future__ import annotations

from collections.abc import Callable

import torch
from botorch.acquisition import AcquisitionFunction
from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
from botorch.models.model import Model
from torch import Tensor

from benchmarks.common.data import levy
from benchmarks.common.harness import best_peer, interleave, seconds, start
from benchmarks.common.report import Claim, at_least, at_most, finish, stated, times
from benchmarks.peers.peers import KERNELS, PEERS, exact, product_kernel
from bo_stream import WISKI
from bo_stream.acquisition import FeatureNIPV

D = 3
BATCHES, Q = 4, 6
OURS = ("BoTorch's on WISKI", "FeatureNIPV", "FeatureNIPV, many points")
Evaluated = tuple[Tensor, Tensor]


def evaluate(acquisition: AcquisitionFunction, X: Tensor) -> Evaluated:
    """Values, ``b``, and their gradient in X, ``b x q x d``."""
    X = X.detach().clone().requires_grad_()
    values = acquisition(X)
    (gradient,) = torch.autograd.grad(values.sum(), X)
    return values.detach(), gradient


def exact_task(name: str, model: Model, mc: Tensor, X: Tensor) -> Callable[[], Evaluated]:
    """BoTorch's qNIPV on the exact GP, stock or repaired."""

    def run() -> Evaluated:
        with PEERS[name]():
            return evaluate(qNegIntegratedPosteriorVariance(model, mc_points=mc), X)

    return run


def warm_exact(kernel: str, X: Tensor, Y: Tensor, own: bool) -> Model:
    """The exact GP with its caches filled, hyperparameters frozen as a loop would."""
    model = exact(kernel, X, Y, own).eval().requires_grad_(False)
    _ = model.posterior(X[:2]).variance
    return model


def acquisitions(model: WISKI, few: Tensor, many: Tensor) -> dict[str, AcquisitionFunction]:
    """The three on WISKI, in the order of :data:`OURS`."""
    built = (
        qNegIntegratedPosteriorVariance(model, mc_points=few),
        FeatureNIPV(model, mc_points=few),
        FeatureNIPV(model, mc_points=many),
    )
    return dict(zip(OURS, built, strict=True))


def on_wiski(
    built: dict[str, AcquisitionFunction], X: Tensor, repeats: int
) -> tuple[dict[str, float], dict[str, Evaluated]]:
    """Medians, and values with gradients, of the three."""
    tasks = {name: lambda a=a: evaluate(a, X) for name, a in built.items()}
    results = {name: task() for name, task in tasks.items()}
    return interleave(tasks, repeats, warmup=2), results


def nipv(kernel: str, sizes: dict[str, int]) -> list[Claim]:
    """All of it for one kernel."""
    data = levy(sizes["n"], D)
    few, many = torch.rand(sizes["mc"], D), torch.rand(sizes["many"], D)
    X = torch.rand(BATCHES, Q, D)
    bounds = torch.tensor([[0.0] * D, [1.0] * D])
    model = WISKI(*data, covar_module=product_kernel(kernel, D), bounds=bounds).eval()
    peer_model = warm_exact(kernel, *data, own=True)
    built = acquisitions(model, few, many)
    tasks = {name: exact_task(name, peer_model, few, X) for name in PEERS}
    peers = interleave(tasks, sizes["exact_repeats"])
    ours, results = on_wiski(built, X, sizes["repeats"])
    oracle = exact_task("repaired", warm_exact(kernel, *data, own=False), few, X)()
    building = [seconds(lambda mc=mc: FeatureNIPV(model, mc_points=mc)) for mc in (few, many)]
    return [
        *speed_claims(kernel, model, peers, ours),
        *agreement(kernel, results, oracle),
        *(
            stated(f"FeatureNIPV, building it, {len(mc):,} points, {kernel}", 1e3 * time, "ms")
            for mc, time in zip((few, many), building, strict=True)
        ),
    ]


def speed_claims(
    kernel: str, model: WISKI, peers: dict[str, float], ours: dict[str, float]
) -> list[Claim]:
    """How many times faster, and whether more points cost more."""
    peer, best = best_peer(peers, PEERS)
    theirs, feature, many = (ours[name] for name in OURS)
    exact_times = ", ".join(f"{name} {value:.2f} s" for name, value in peers.items())
    each = ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in ours.items())
    where = f"exact: {exact_times}, quoted {peer}; grid {model.grid_size}, rank {model.rank}"
    return [
        at_least(f"BoTorch's qNIPV on WISKI, {kernel}", best / theirs, 30.0, "times faster", where),
        at_least(f"FeatureNIPV, {kernel}", best / feature, 300.0, "times faster", each),
        at_most(
            f"FeatureNIPV, 100 times the points, {kernel}", many / feature, 1.1, "times the cost"
        ),
        *times(f"BoTorch's qNIPV, {kernel}", best, theirs),
        stated(f"FeatureNIPV, {kernel}: bo_stream", feature, "s"),
        stated(f"FeatureNIPV, 100 times the points, {kernel}: bo_stream", many, "s"),
    ]


def agreement(kernel: str, results: dict[str, Evaluated], oracle: Evaluated) -> list[Claim]:
    """Ours equals BoTorch's on the same model, and is near the exact GP's."""
    (theirs, their_gradient), (values, gradient) = (results[name] for name in OURS[:2])
    exact_error = float(((values - oracle[0]) / oracle[0]).abs().max())
    return [
        at_most(
            f"FeatureNIPV against BoTorch's on WISKI, {kernel}", _relative(values, theirs), 1e-8
        ),
        at_most(f"the same, gradient, {kernel}", _relative(gradient, their_gradient), 1e-6),
        stated(f"FeatureNIPV against exact (repaired), {kernel}", exact_error, "relative"),
    ]


def _relative(value: Tensor, other: Tensor) -> float:
    return float((value - other).abs().max() / other.abs().max())


def main() -> None:
    """Run it."""
    options = start(__doc__)
    full = {"n": 1_500, "mc": 2_000, "many": 200_000, "exact_repeats": 3, "repeats": 50}
    tiny = {"n": 40, "mc": 20, "many": 2_000, "exact_repeats": 1, "repeats": 2}
    sizes = options.pick(full, tiny)
    claims = [claim for kernel in KERNELS for claim in nipv(kernel, sizes)]
    finish("nipv", claims, options, sizes)


if __name__ == "__main__":
    main()
