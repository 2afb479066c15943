"""Where to put M inducing points: stability and accuracy of all allocators, as M grows.

As the paper's figure 5 (Terenin et al., 2024): batch sparse regression with an RBF kernel on two
sets, 20,000 training rows of modis_lst (2-D; 5,000 other training rows, between them, held out) and
powerplant (4-D; a fifth held out). Hyperparameters are learned once for each set, with 512 points
by greedy variance, and are the same for all contenders: only Z differs. Inputs are then divided by
the learned lengthscales, so that k-means and the cover tree measure distances as the kernel does.
OIPS' threshold and the cover tree's resolution are searched for until about M points come out; for
these two and for random rows the numbers are medians over three orders of the rows. "Optimised"
begins at the means of k-means and moves them by 20 steps along the gradient of the bound on all
rows, up to 512 points: more take many minutes.

The condition number is that of K_ZZ, without jitter; beyond 10¹³ it is only known to be larger, and
is compared as 10¹³. A uniform grid is for the plane: in four dimensions most of its points would
lie where no data are. Draws ``allocators.png`` beside the results.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.common.harness import Options, start
from benchmarks.common.report import Claim, at_most, finish, stated
from benchmarks.common.small_multiples import Line, Measure, Style, draw
from benchmarks.peers.placements import SEEDS, contenders
from benchmarks.peers.sparse_problem import Problem, problem_of
from bo_stream.bases.inducing import kernel_matrix
from bo_stream.diagnostics import condition_number
from bo_stream.diagnostics.certificate import TRUSTED

SIZES = (64, 128, 256, 512, 1024)
SMOKE_SIZES = (9, 16)
LOST = 1.05
"""RMSE of the cover tree over that of the best allocator without gradients."""

STYLES = {
    "CoverTree": Style("#d55e00", "o", wide=True),
    "OIPS": Style("#0072b2", "s"),
    "GreedyVariance": Style("#009e73", "^"),
    "KMeans": Style("#cc79a7", "v"),
    "Random": Style("#888888", "x"),
    "UniformGrid": Style("#b8860b", "P"),
    "Optimised": Style("#000000", "D"),
}
MEASURES = (
    Measure("condition number of K_ZZ", "lower is safer", logarithmic=True, ceiling=TRUSTED),
    Measure("RMSE, held-out rows", "lower is better"),
    Measure("NLPD, held-out rows", "lower is better"),
    Measure("ELBO a training row", "higher is better"),
)


# --- what they reach ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """How some points did, or the median over several choices of them.

    Attributes:
        points: Their number.
        condition: Of K_ZZ without jitter, at most ``TRUSTED``.
        jitter: That K_ZZ took, relative to its diagonal.
        rmse: Of the rows held out, in sd of the target.
        nlpd: Their mean negative log density.
        elbo: A training row.
    """

    points: float
    condition: float
    jitter: float
    rmse: float
    nlpd: float
    elbo: float

    def __str__(self) -> str:
        jitter = f", jitter {self.jitter:.0e}" if self.jitter else ""
        return (
            f"{self.points:g}: {self.condition:.1e}{jitter}, RMSE {self.rmse:.4f}, NLPD "
            f"{self.nlpd:.4f}, ELBO {self.elbo:.4f}"
        )


@torch.no_grad()
def result_of(problem: Problem, Z: Tensor) -> Result:
    """Of batch sparse regression at the points Z."""
    model = problem.model(Z)
    parts = [model.process().marginals(rows) for rows in problem.test_X.split(1_000)]
    mean, variance = (torch.cat(part, -1).mT for part in zip(*parts, strict=True))
    error = problem.test_Y - mean
    density = torch.distributions.Normal(mean, (variance + problem.noise).sqrt())
    condition = condition_number(kernel_matrix(problem.kernel, Z, Z, 1)).value
    return Result(
        points=len(Z),
        condition=min(condition, TRUSTED),
        jitter=max((event.jitter for event in model.numerical_log), default=0.0),
        rmse=float(error.square().mean().sqrt()),
        nlpd=-float(density.log_prob(problem.test_Y).mean()),
        elbo=float(model.elbo()) / len(problem.X),
    )


def median(results: list[Result]) -> Result:
    """Of each number by itself."""
    return Result(**{k: statistics.median(vars(r)[k] for r in results) for k in vars(results[0])})


def measured(problem: Problem, options: Options) -> dict[str, list[Result]]:
    """Results of every contender at all sizes."""
    found: dict[str, list[Result]] = {}
    sizes = options.pick(SIZES, SMOKE_SIZES)
    for name, contender in contenders(problem, options).items():
        for M in (size for size in sizes if size <= contender.most):
            seeds = range(contender.seeds)
            each = [result_of(problem, contender.place(problem, M, seed)) for seed in seeds]
            found.setdefault(name, []).append(median(each))
            print(f"{problem.name}, {name}, {found[name][-1]}", flush=True)
    return found


# --- what is claimed ----------------------------------------------------------------------------


def claims_of(problem: Problem, found: dict[str, list[Result]]) -> Iterator[Claim]:
    """The cover tree against its peers, and every number."""
    tree = found["CoverTree"]
    for peer in ("Random", "KMeans"):
        pairs = list(zip(tree, found[peer], strict=True))
        yield at_most(
            f"{problem.name}: condition number by CoverTree over that by {peer}, largest of all M",
            max(ours.condition / theirs.condition for ours, theirs in pairs),
            1.0,
            "",
            ", ".join(f"{ours.condition:.1e}/{theirs.condition:.1e}" for ours, theirs in pairs),
        )
    rivals = [results for name, results in found.items() if name != "Optimised"]
    best = [min(result.rmse for result in column) for column in zip(*rivals, strict=True)]
    yield at_most(
        f"{problem.name}: RMSE by CoverTree over the best without gradients, largest of all M",
        max(ours.rmse / least for ours, least in zip(tree, best, strict=True)),
        LOST,
        "",
        ", ".join(f"{ours.rmse:.4f}/{least:.4f}" for ours, least in zip(tree, best, strict=True)),
    )
    for name, results in found.items():
        last = results[-1]
        yield stated(
            f"{problem.name}: condition number by {name}, {last.points:g} points",
            last.condition,
            "",
            "; ".join(str(result) for result in results),
        )


def lines_of(results: list[Result]) -> list[Line]:
    """One for each measure."""
    measures = ("condition", "rmse", "nlpd", "elbo")
    return [[(r.points, getattr(r, measure)) for r in results] for measure in measures]


def main() -> None:
    """Run it."""
    options = start(__doc__)
    sizes = options.pick(SIZES, SMOKE_SIZES)
    claims, panels, settings = list[Claim](), {}, dict[str, object](sizes=sizes, seeds=SEEDS)
    for name in ("modis_lst", "powerplant"):
        problem = problem_of(name, options)
        settings[name] = problem.settings()
        found = measured(problem, options)
        claims += claims_of(problem, found)
        panels[f"{name} ({problem.dim}-D)"] = {way: lines_of(r) for way, r in found.items()}
    picture = f"allocators{'.smoke' if options.smoke else ''}.png"
    draw(panels, MEASURES, STYLES, sizes, options.out / picture)
    finish("allocators", claims, options, settings)


if __name__ == "__main__":
    main()
