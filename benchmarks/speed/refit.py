"""A refit by ``fit_gpytorch_mll``: faster than exact, and as good by the exact likelihood."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from benchmarks.common.data import levy
from benchmarks.common.harness import Options, best_peer, interleave, start
from benchmarks.common.report import Claim, at_least, at_most, finish, stated, times
from benchmarks.peers.peers import KERNELS, exact, product_kernel
from bo_stream import WISKI

D = 3
FASTER = 20.0
NATS_A_POINT = 0.01


class Refit:
    """A task that fits a fresh copy of a model and keeps the last one fitted."""

    def __init__(self, model: Model) -> None:
        """Hold the model as it is before the fit."""
        self.fresh = model
        self.fitted = model

    def __call__(self) -> None:
        """Fit from the same start."""
        self.fitted = copy.deepcopy(self.fresh)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(self.fitted.likelihood, self.fitted))


def models(kernel: str, X: Tensor, Y: Tensor) -> dict[str, Model]:
    """WISKI; the exact GP of the same product kernel; for Matern also BoTorch's own kernel."""
    bounds = torch.tensor([[0.0] * D, [1.0] * D])
    found: dict[str, Model] = {
        "WISKI": WISKI(X, Y, covar_module=product_kernel(kernel, D), bounds=bounds),
        "exact": exact(kernel, X, Y),
    }
    if kernel != "RBF":
        found["exact, own Matern"] = exact(kernel, X, Y, own=True)
    return found


def likelihood_per_point(model: SingleTaskGP) -> float:
    """The exact log marginal likelihood, priors left out, in nats a point, standardised units."""
    model.train()
    with torch.no_grad():
        value = model.likelihood(model(*model.train_inputs)).log_prob(model.train_targets)
    return float(value) / model.train_targets.shape[-1]


def at_hyperparameters_of(fitted: WISKI, target: SingleTaskGP) -> SingleTaskGP:
    """An exact model of the same data with WISKI's lengthscales, noise and mean."""
    target.likelihood.noise = fitted.likelihood.noise.detach()
    target.mean_module.constant.data.copy_(fitted.mean_module.constant.detach())
    target.covar_module.lengthscale = fitted.covar_module.lengthscale.detach()
    return target


def refit(kernel: str, n: int, repeats: int) -> list[Claim]:
    """Speed and the likelihood reached."""
    X, Y = levy(n, D)
    tasks = {name: Refit(model) for name, model in models(kernel, X, Y).items()}
    timed: dict[str, Callable[[], None]] = dict(tasks)
    medians = interleave(timed, repeats, warmup=0)
    peer, peer_seconds = best_peer(medians, [name for name in tasks if name != "WISKI"])
    each = ", ".join(f"{name} {value:.2f} s" for name, value in medians.items())
    wiski = tasks["WISKI"].fitted
    assert isinstance(wiski, WISKI)
    best = likelihood_per_point(tasks["exact"].fitted)
    reached = likelihood_per_point(at_hyperparameters_of(wiski, exact(kernel, X, Y)))
    detail = f"{each}; faster peer {peer}; grid {wiski.grid_size}, rank {wiski.rank}"
    own = float(wiski.log_marginal_likelihood().detach()) / n
    scales = ", ".join(f"{v:.3f}" for v in wiski.covar_module.lengthscale.reshape(-1).tolist())
    return [
        at_least(
            f"refit, {kernel}, n = {n:,}",
            peer_seconds / medians["WISKI"],
            FASTER,
            "times faster",
            detail,
        ),
        *times(f"refit, {kernel}, n = {n:,}", peer_seconds, medians["WISKI"]),
        at_most(
            f"exact log likelihood lost, {kernel}",
            best - reached,
            NATS_A_POINT,
            "nats a point",
            f"exact fit {best:.5f}, at WISKI's fit {reached:.5f}; lengthscales {scales}",
        ),
        stated(
            f"WISKI's own log likelihood, {kernel}", own, "nats a point", f"exact {reached:.5f}"
        ),
    ]


def main() -> None:
    """Run it."""
    options: Options = start(__doc__)
    n, repeats = options.pick(3_000, 40), options.pick(1, 1)
    claims = [claim for kernel in KERNELS for claim in refit(kernel, n, repeats)]
    finish("refit", claims, options, {"n": n, "repeats": repeats})


if __name__ == "__main__":
    main()
