"""What ``evaluate_known_points_once`` saves qLogNEI with its gradient, by the baseline's length.

The baseline is evaluated once instead of beside every candidate. With all observations in it, as
BoTorch has it by default, that is most of the cost; ``prune_baseline=True`` leaves few points.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from botorch.acquisition.logei import qLogNoisyExpectedImprovement
from botorch.sampling import SobolQMCNormalSampler
from torch import Tensor

from benchmarks.common.harness import Options, interleave, start
from benchmarks.common.report import Claim, finish, stated
from benchmarks.optimization.problems import PROBLEMS, D
from bo_stream import WISKI
from bo_stream.acquisition import evaluate_known_points_once


@dataclass(frozen=True)
class Sizes:
    """Observations, baseline points, candidate batches, points in each, repeats."""

    n: int
    baseline: int
    batches: int
    q: int
    repeats: int


def criterion(model: WISKI, baseline: Tensor, prune: bool) -> qLogNoisyExpectedImprovement:
    """qLogNEI with base samples of its own, the same for every call."""
    sampler = SobolQMCNormalSampler(torch.Size([128]), seed=0)
    return qLogNoisyExpectedImprovement(model, baseline, sampler=sampler, prune_baseline=prune)


def evaluation(acqf: qLogNoisyExpectedImprovement, X: Tensor) -> Callable[[], Tensor]:
    """A task that takes the criterion's value and gradient at batches of candidates."""

    def task() -> Tensor:
        inputs = X.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(acqf(inputs).sum(), inputs)
        return gradient

    return task


def saved(model: WISKI, baseline: Tensor, X: Tensor, prune: bool, repeats: int) -> Claim:
    """How many times cheaper the criterion is with its baseline evaluated once."""
    plain, cached = (criterion(model, baseline, prune) for _ in range(2))
    tasks = {
        "plain": evaluation(plain, X),
        "cached": evaluation(evaluate_known_points_once(cached), X),
    }
    medians = interleave(tasks, repeats)
    points = len(plain.X_baseline)
    return stated(
        f"qLogNEI with {points} baseline points{', pruned' if prune else ''}, times cheaper",
        medians["plain"] / medians["cached"],
        detail=f"{1e3 * medians['plain']:.1f} and {1e3 * medians['cached']:.1f} ms",
    )


def claims_of(options: Options) -> tuple[list[Claim], Sizes]:
    """All that is measured."""
    sizes = options.pick(Sizes(2_000, 320, 10, 3, 15), Sizes(60, 20, 2, 2, 1))
    X = torch.rand(sizes.n, D)
    Y = PROBLEMS["Levy"].measure(X, torch.Generator().manual_seed(0))
    model = WISKI(X, Y, bounds=torch.tensor([[0.0] * D, [1.0] * D])).eval()
    candidates = torch.rand(sizes.batches, sizes.q, D)
    baselines = (sizes.baseline, max(2, sizes.baseline // 16))
    return [
        saved(model, X[:k], candidates, prune, sizes.repeats)
        for k in baselines
        for prune in (False, True)
    ], sizes


def main() -> None:
    """Run it."""
    options = start(__doc__)
    claims, sizes = claims_of(options)
    finish("cached_baseline", claims, options, vars(sizes))


if __name__ == "__main__":
    main()
