"""A sum of kernels over ten inputs: as good as the exact GP with it, in constant time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from gpytorch.kernels import AdditiveKernel, Kernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from benchmarks.common.harness import best_peer, interleave, seconds, start
from benchmarks.common.report import Claim, at_least, at_most, finish, stated
from benchmarks.peers.peers import PEERS
from benchmarks.speed.update import FLAT, Q, conditioned, predict
from bo_stream import WISKI

D = 10
PAIR = (0, 1)
NOISE = 0.2
"""Standard deviation of the noise; that of the function is about 2."""
WORSE = 1.05
FASTER = 10.0
BOUNDS = torch.tensor([[0.0] * D, [1.0] * D])


@dataclass(frozen=True)
class Sizes:
    """Of one run: points to fit and to test, steps of a fit, points of both streams, repeats."""

    n: int
    test: int
    steps: int
    small: int
    large: int
    repeats: int


def truth(X: Tensor) -> Tensor:
    """A function of each input, of rising frequency, and one of a pair, ``n x 10 -> n x 1``."""
    frequencies = torch.linspace(2.0, 9.0, D)
    single = torch.sin(frequencies * X).sum(-1)
    pair = 2.0 * torch.cos(6.0 * X[:, PAIR[0]] * X[:, PAIR[1]])
    return (single + pair).unsqueeze(-1)


def draw(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Uniform points with noisy values."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(n, D, generator=generator)
    return X, truth(X) + NOISE * torch.randn(n, 1, generator=generator)


def kernel() -> Kernel:
    """One scaled kernel for each input and one for the pair, with BoTorch's priors."""
    groups = [*((i,) for i in range(D)), PAIR]
    parts = [get_covar_module_with_dim_scaled_prior(len(g), active_dims=g) for g in groups]
    return AdditiveKernel(*(ScaleKernel(part) for part in parts))


def fitted(model: Model, steps: int) -> float:
    """Seconds of the fit."""
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    options = {"options": {"maxiter": steps}}
    return seconds(lambda: fit_gpytorch_mll(mll, optimizer_kwargs=options))


def error(model: Model, X: Tensor) -> float:
    """Root mean square distance of the posterior mean from the truth."""
    with torch.no_grad():
        return float((model.posterior(X).mean - truth(X)).square().mean().sqrt())


def quality(ours: WISKI, exact: SingleTaskGP, sizes: Sizes) -> Claim:
    """The error of both, each after its own fit; the exact one begins where WISKI's ended."""
    test_X, _ = draw(sizes.test, seed=1)
    times = {"WISKI": fitted(ours, sizes.steps)}
    for part in ("covar_module", "mean_module", "likelihood"):
        getattr(exact, part).load_state_dict(getattr(ours, part).state_dict())
    times["exact"] = fitted(exact, sizes.steps)
    errors = {"WISKI": error(ours, test_X), "exact": error(exact, test_X)}
    found = ", ".join(f"{name} {errors[name]:.4f}, fit {times[name]:.1f} s" for name in errors)
    name = f"error over the exact GP's, {D} inputs, n = {sizes.n:,}"
    detail = f"{found}; rank {ours.rank}"
    return at_most(name, errors["WISKI"] / errors["exact"], WORSE, "", detail)


def speed(ours: WISKI, exact: SingleTaskGP, sizes: Sizes) -> Claim:
    """An update of 3 points and the next posterior, beside exact conditioning."""
    new, test_X = draw(Q, seed=2), draw(Q, seed=3)[0]
    predict(exact, test_X)

    def task(name: str) -> Callable[[], None]:
        def run() -> None:
            with PEERS[name]():
                conditioned(exact, *new, test_X)

        return run

    tasks = {name: task(name) for name in PEERS}
    tasks["WISKI"] = lambda: predict(ours.update(*new), test_X)
    medians = interleave(tasks, sizes.repeats)
    peer, best = best_peer(medians, PEERS)
    times = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in medians.items())
    name = f"update and posterior at {Q} points, n = {sizes.n:,}"
    ratio = best / medians["WISKI"]
    return at_least(name, ratio, FASTER, "times faster", f"{times}; {peer} quoted")


def streamed(like: WISKI, n: int) -> WISKI:
    """A model of the same hyperparameters after n points."""
    model = WISKI(*draw(1_000, seed=4), covar_module=kernel(), bounds=BOUNDS)
    model.load_state_dict(like.state_dict())
    if n > 1_000:
        model.update(*draw(n - 1_000, seed=5))
    return model.eval()


def flatness(like: WISKI, sizes: Sizes) -> list[Claim]:
    """The same update after a short and after a long stream; how fast a stream is taken in."""
    models = {n: streamed(like, n) for n in (sizes.small, sizes.large)}
    new, test_X = draw(Q, seed=2), draw(100, seed=3)[0]

    def task(model: WISKI) -> Callable[[], None]:
        return lambda: predict(model.update(*new), test_X)

    tasks = {f"n = {n:,}": task(model) for n, model in models.items()}
    medians = interleave(tasks, sizes.repeats, warmup=3)
    short, long = medians.values()
    times = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in medians.items())
    name = f"time of an update, n = {sizes.large:,} over n = {sizes.small:,}"
    batch = draw(sizes.large, seed=6)
    rate = sizes.large / seconds(lambda: models[sizes.large].update(*batch))
    return [at_most(name, long / short, FLAT, "", times), stated("ingest", rate, "a second")]


def main() -> None:
    """Run it."""
    options = start(__doc__)
    sizes = options.pick(
        Sizes(n=2_000, test=2_000, steps=200, small=1_000, large=100_000, repeats=25),
        Sizes(n=60, test=50, steps=2, small=1_000, large=1_200, repeats=1),
    )
    data = draw(sizes.n, seed=0)
    ours = WISKI(*data, covar_module=kernel(), bounds=BOUNDS)
    exact = SingleTaskGP(*data, covar_module=kernel())
    claims = [quality(ours, exact, sizes), speed(ours, exact, sizes), *flatness(ours, sizes)]
    finish("additive", claims, options, asdict(sizes))


if __name__ == "__main__":
    main()
