"""What the spatial resolution ε of a cover tree costs: accuracy, centres, stability, iterations.

As figures 4, 6 and 7 of the paper (Terenin et al., 2024); ``--only`` runs one of them.

Figure 4: 1,000 inputs uniform in [-5, 5]^d, an RBF kernel of variance 1 and lengthscale 0.5 √d,
outcomes drawn from the prior with a noise variance of 0.01. The Wasserstein distance is the one of
order 2 between the exact posterior and the clustered one, both Gaussian at a set of points,
in closed form, divided by the root of their number: 500 of the inputs, and 500 other points.
Iterations are those of conjugate gradients until the relative residual is 1e-6, for ``K + Λ``
without a preconditioner and for the model's own preconditioned system.

Figure 6: sparse regression (the collapsed bound, in float64) at the centres of ``ClusteredGP`` on
modis_lst, at the same hyperparameters. These are learned at the two coarser resolutions by the
steps of ``clustered.py``. The jitter is the smallest at which both Cholesky factors exist.

Figure 7: sparse regression on subsets of modis_lst, N rows and M points, by three ways to choose
points, one order of the rows; points moved by the gradient where that takes seconds.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from gpytorch.means import ZeroMean
from torch import Tensor

from benchmarks.accuracy.allocators import Result, result_of
from benchmarks.accuracy.clustered import (
    RESOLUTIONS,
    STEPS,
    Errors,
    Split,
    empty_model,
    errors_of,
    learn,
    load,
    rms,
)
from benchmarks.common.harness import Options, start
from benchmarks.common.report import Claim, at_least, at_most, finish, stated
from benchmarks.peers.placements import contenders
from benchmarks.peers.sparse_problem import problem_of
from bo_stream import ClusteredGP
from bo_stream.bases.inducing import frozen, kernel_matrix
from bo_stream.diagnostics import condition_number
from bo_stream.diagnostics.certificate import TRUSTED
from bo_stream.models.clustered.solver import ConjugateGradients
from bo_stream.warnings import CoarsePointsWarning

DIMENSIONS = (1, 2, 4, 8)
RADII = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
INPUTS, POINTS, REPEATS = 1_000, 500, 5
NOISE = 0.01
RESIDUAL, MOST = 1e-6, 10_000
"""Of conjugate gradients: the relative residual at which they end, and the most iterations."""

SMALL = (0.0, *(10.0**-i for i in range(14, 0, -1)))
"""Jitters that are tried, relative to the prior variance."""

GPFLOW = 1e-6
"""Jitter that GPflow adds unless it is asked for another."""
ROWS, BLOCK = 4_096, 1_024

SIZES, COUNTS = (1_250, 5_000, 20_000), (64, 256, 1_024)
"""Rows N and points M of figure 7."""
WAYS = ("CoverTree", "KMeans", "Optimised")
MOST_ROWS, MOST_POINTS = 5_000, 256
"""Of points that are moved by the gradient."""


# --- figure 4 -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """What a resolution costs.

    Attributes:
        centres: Their number M.
        at_inputs: Wasserstein distance at inputs, in prior standard deviations.
        elsewhere: The same at other points.
        condition: Condition number of K_ZZ, at most ``TRUSTED``.
        solved: Condition number of ``I + R K R``, R² the precisions of the clusters.
        plain: Iterations of conjugate gradients for ``K + Λ``.
        preconditioned: Iterations for ``I + R K R`` with the model's preconditioner.
    """

    centres: float
    at_inputs: float
    elsewhere: float
    condition: float
    solved: float
    plain: float
    preconditioned: float


@dataclass(frozen=True)
class Gaussian:
    """A Gaussian distribution of n values: mean ``n``, and F with covariance ``F Fᵀ``."""

    mean: Tensor
    factor: Tensor

    @classmethod
    def of(cls, mean: Tensor, covariance: Tensor) -> Gaussian:
        """Factorise a covariance by its eigenvectors."""
        values, vectors = torch.linalg.eigh(covariance)
        return cls(mean, vectors * values.clamp_min(0.0).sqrt())

    def distance(self, other: Gaussian) -> float:
        """Compute the Wasserstein distance of order 2 over √n.

        Its square is ``|m − m'|² + min |F − F' U|²`` over rotations U, the polar factor of
        ``F'ᵀ F``: without differences of traces.
        """
        left, _, right = torch.linalg.svd(other.factor.mT @ self.factor)
        apart = self.factor - other.factor @ (left @ right)
        total = (self.mean - other.mean).square().sum() + apart.square().sum()
        return float((total / len(self.mean)).sqrt())


def iterations(
    matrix: Tensor, right: Tensor, preconditioner: Callable[[Tensor], Tensor] = lambda r: r
) -> int:
    """Count iterations of conjugate gradients for one column, ``M x 1``."""
    solution, residual = torch.zeros_like(right), right.clone()
    scaled = preconditioner(residual)
    direction, product = scaled, float((residual * scaled).sum())
    for count in range(1, MOST + 1):
        image = matrix @ direction
        step = product / float((direction * image).sum())
        solution, residual = solution + step * direction, residual - step * image
        if float(residual.norm()) <= RESIDUAL * float(right.norm()):
            return count
        scaled = preconditioner(residual)
        before, product = product, float((residual * scaled).sum())
        direction = scaled + product / before * direction
    return MOST


@torch.no_grad()
def costs_of(dim: int, radii: tuple[float, ...], inputs: int, seed: int) -> list[Cost]:
    """Draw a set and measure every resolution on it."""
    generator = torch.Generator().manual_seed(seed)
    kernel = ScaleKernel(RBFKernel())
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.0, 0.5 * math.sqrt(dim)
    kernel = frozen(kernel)
    X, others = (10.0 * torch.rand(n, dim, generator=generator) - 5.0 for n in (inputs, POINTS))
    root = torch.linalg.cholesky(between(kernel, X, X) + NOISE * torch.eye(inputs))
    Y = root @ torch.randn(inputs, 1, generator=generator)
    places = (X[:POINTS], others[:inputs])
    exact = [exact_posterior(kernel, X, Y, root, place) for place in places]
    return [cost_of(kernel, X, Y, radius, places, exact) for radius in radii]


def between(kernel: Kernel, A: Tensor, B: Tensor) -> Tensor:
    """Compute the covariances of two sets of points."""
    return kernel_matrix(kernel, A, B, 1).squeeze(0)


def exact_posterior(kernel: Kernel, X: Tensor, Y: Tensor, root: Tensor, at: Tensor) -> Gaussian:
    """Compute the exact posterior by dense formulas; ``root`` is that of the outcomes."""
    half = torch.linalg.solve_triangular(root, between(kernel, X, at), upper=False)
    mean = half.mT @ torch.linalg.solve_triangular(root, Y, upper=False)
    return Gaussian.of(mean.squeeze(-1), between(kernel, at, at) - half.mT @ half)


def cost_of(
    kernel: Kernel,
    X: Tensor,
    Y: Tensor,
    radius: float,
    places: tuple[Tensor, Tensor],
    exact: list[Gaussian],
) -> Cost:
    """Measure one resolution on one set."""
    model = ClusteredGP(
        X[:0],
        Y[:0],
        covar_module=kernel,
        mean_module=ZeroMean(),
        outcome_transform=None,
        resolution=radius,
        solver="cholesky",
    )
    model.likelihood.noise = NOISE
    process = model.eval().update(X, Y).process()
    ours = [Gaussian.of(process.mean(T).squeeze(0), process.covariance(T)[0]) for T in places]
    Z = model.centres
    nearest = torch.cdist(X, Z).argmin(-1)
    sizes = torch.bincount(nearest, minlength=len(Z)).double()
    means = torch.zeros(len(Z), 1).index_add(0, nearest, Y) / sizes.clamp_min(1.0).unsqueeze(-1)
    K, some = between(kernel, Z, Z), sizes > 0.0
    root = (sizes / NOISE).sqrt().unsqueeze(-1)
    Q = root * K * root.mT + torch.eye(len(Z))
    W = ConjugateGradients.of(Q).deflation
    inner = (K + torch.diag(NOISE / sizes.clamp_min(1.0)))[some][:, some]
    return Cost(
        len(Z),
        *(mine.distance(true) for mine, true in zip(ours, exact, strict=True)),
        min(condition_number(K).value, TRUSTED),
        condition_number(Q).value,
        iterations(inner, means[some]),
        iterations(Q, root * means, lambda r: r - W @ (W.mT @ r)),
    )


def figure_4(options: Options, settings: dict[str, object]) -> Iterator[Claim]:
    """State medians over sets, by dimension and resolution; all go into the settings."""
    radii = options.pick(RADII, (0.5, 4.0))
    inputs, repeats = options.pick((INPUTS, REPEATS), (40, 1))
    found: dict[int, list[Cost]] = {}
    for dim in DIMENSIONS:
        sets = [costs_of(dim, radii, inputs, seed) for seed in range(repeats)]
        found[dim] = [
            Cost(**{k: statistics.median(vars(c)[k] for c in column) for k in vars(column[0])})
            for column in zip(*sets, strict=True)
        ]
    settings["radii"] = radii
    settings["costs"] = {dim: [vars(cost) for cost in costs] for dim, costs in found.items()}
    names = {
        "centres": "centres",
        "at_inputs": "Wasserstein distance at inputs",
        "elsewhere": "Wasserstein distance at other points",
        "condition": "condition number of K_ZZ",
        "solved": "condition number of the model's system",
        "plain": "iterations without a preconditioner",
        "preconditioned": "iterations with the model's preconditioner",
    }
    for key, name in names.items():
        for dim, costs in found.items():
            each = zip(radii, costs, strict=True)
            detail = ", ".join(f"{radius:g}: {vars(cost)[key]:.3g}" for radius, cost in each)
            value = float(vars(costs[0])[key])
            yield stated(f"{name}, d = {dim}, resolution {radii[0]:g}", value, "", detail)
    for key in ("at_inputs", "elsewhere"):
        worst = max(vars(costs[0])[key] / vars(costs[-1])[key] for costs in found.values())
        yield at_most(f"{names[key]}: finest over coarsest, largest of all d", worst, 1.0)
    for key in ("centres", "condition", "plain"):
        worst = min(vars(costs[0])[key] / vars(costs[-1])[key] for costs in found.values())
        yield at_least(f"{names[key]}: finest over coarsest, smallest of all d", worst, 1.0)


# --- figure 6 -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sparse:
    """Sparse regression by the collapsed bound at M points, in float64.

    Attributes:
        kernel: Of the function.
        Z: Points, ``M x d``.
        noise: Its variance.
        mean: Constant prior mean.
        gram: ``K_Zf K_fZ``.
        moment: ``K_Zf (y − mean)``, ``M x 1``.
    """

    kernel: Kernel
    Z: Tensor
    noise: float
    mean: float
    gram: Tensor
    moment: Tensor

    @classmethod
    def of(cls, model: ClusteredGP, split: Split) -> Sparse:
        """Take centres and hyperparameters of a model and sum over all training rows."""
        kernel, Z = frozen(model.covar_module, torch.float64), model.centres.double()
        mean, noise = float(model.mean_module.constant), float(model.likelihood.noise)
        gram, moment = torch.zeros(len(Z), len(Z)), torch.zeros(len(Z), 1)
        for X, Y in zip(split.train.X.split(ROWS), split.train.Y.split(ROWS), strict=True):
            rows = between(kernel, X.double(), Z)
            for i in range(0, len(Z), BLOCK):  # the lower triangle, by blocks
                gram[i:, i : i + BLOCK].addmm_(rows[:, i:].mT, rows[:, i : i + BLOCK])
            moment += rows.mT @ (Y.double() - mean)
        return cls(kernel, Z, noise, mean, gram.tril() + gram.tril(-1).mT, moment)

    def weights(self, jitter: float) -> Tensor | None:
        """Solve for the weights of ``k(x, Z)`` in the mean; None where a factor does not exist."""
        K = between(self.kernel, self.Z, self.Z)
        K.diagonal().add_(jitter * float(K.diagonal().mean()))
        root, failed = torch.linalg.cholesky_ex(K)
        if failed:
            return None
        half = torch.linalg.solve_triangular(root, self.gram, upper=False)
        inner = torch.linalg.solve_triangular(root, half.mT, upper=False) / self.noise
        inner.diagonal().add_(1.0)
        inner, failed = torch.linalg.cholesky_ex(inner)
        if failed:
            return None
        right = torch.linalg.solve_triangular(root, self.moment, upper=False) / self.noise
        solved = torch.cholesky_solve(right, inner)
        return torch.linalg.solve_triangular(root.mT, solved, upper=True)

    def errors(self, weights: Tensor, split: Split) -> Errors:
        """Compute the errors of the mean."""

        def predicted(X: Tensor) -> Tensor:
            parts = (between(self.kernel, x.double(), self.Z) @ weights for x in X.split(ROWS))
            return self.mean + torch.cat(list(parts))

        return Errors(*(rms(predicted(r.X) - r.Y) for r in (split.gaps, split.between)))


@torch.no_grad()
def sparse_claims(name: str, split: Split, model: ClusteredGP) -> Iterator[Claim]:
    """Compare sparse regression with the model whose centres it takes."""
    ours, peer = errors_of(split, model), Sparse.of(model, split)
    tried = ((jitter, peer.weights(jitter)) for jitter in SMALL)
    least, weights = next((jitter, found) for jitter, found in tried if found is not None)
    by_jitter = {"the least jitter": peer.errors(weights, split)}
    yield stated(f"{name}: relative jitter of sparse regression in float64", least)
    if least < GPFLOW and (usual := peer.weights(GPFLOW)) is not None:
        by_jitter["a jitter of 1e-6"] = peer.errors(usual, split)
    for where in ("between", "gaps"):
        yield stated(f"{name}: RMSE by clusters, {where}", vars(ours)[where], "sd")
        for which, errors in by_jitter.items():
            value = vars(errors)[where]
            yield stated(f"{name}: RMSE by sparse regression, {where}, {which}", value, "sd")


def figure_6(options: Options, settings: dict[str, object]) -> Iterator[Claim]:
    """Learn at the two coarser resolutions, then compare at all."""
    split = load(options)
    settings["rows"], settings["steps"] = len(split.train.X), STEPS[:2]
    radii, steps = options.pick((RESOLUTIONS, STEPS[:2]), ((0.5, 0.3, 0.2), (2, 1)))
    state: dict[str, Tensor] = {}
    for radius, count in zip(radii, steps, strict=False):
        model = empty_model("RBF", radius, split.train)
        if state:
            model.load_state_dict(state)
        state = learn(model.update(split.train.X, split.train.Y), count).state_dict()
    for radius in radii:
        model = empty_model("RBF", radius, split.train)
        model.load_state_dict(state)
        model.update(split.train.X, split.train.Y)
        yield from sparse_claims(f"{radius:g}, {len(model.centres):,} centres", split, model)


# --- figure 7 -----------------------------------------------------------------------------------


def figure_7(options: Options, settings: dict[str, object]) -> Iterator[Claim]:
    """Measure sparse regression at all pairs of sizes."""
    sizes, counts = options.pick((SIZES, COUNTS), ((100, 200), (9, 16)))
    problem = problem_of("modis_lst", options)
    settings["modis_lst"] = problem.settings() | {"sizes": sizes, "counts": counts}
    for way in WAYS:
        found: dict[tuple[int, int], Result] = {}
        for N in sizes:
            part = replace(problem, X=problem.X[:N], Y=problem.Y[:N])
            contender = contenders(part, options)[way]
            for M in counts:
                if way != "Optimised" or (N <= MOST_ROWS and M <= MOST_POINTS):
                    found[N, M] = result_of(part, contender.place(part, M, 0))
        yield from grid_claims(way, found)


def grid_claims(way: str, found: dict[tuple[int, int], Result]) -> Iterator[Claim]:
    """State a grid, and how far it goes along each size."""
    for (N, M), result in found.items():
        label = f"{way}, N = {N:,}, M = {M:,}"
        yield stated(f"{label}: condition number of K_ZZ", result.condition, "", str(result))
        yield stated(f"{label}: RMSE", result.rmse, "sd")
    sizes, counts = (sorted({key[axis] for key in found}) for axis in (0, 1))
    rows = [(found[N, counts[0]], found[N, counts[-1]]) for N in sizes]
    columns = [(found[sizes[0], M], found[sizes[-1], M]) for M in counts]
    for name, pairs in (("M", rows), ("N", columns)):
        worst = max(last.rmse / first.rmse for first, last in pairs)
        yield at_most(f"{way}: RMSE at the largest {name} over the smallest's", worst, 1.0)
        ratios = [last.condition / first.condition for first, last in pairs]
        detail = ", ".join(f"{ratio:.2g}" for ratio in ratios)
        label = f"{way}: condition number at the largest {name} over the smallest's, largest ratio"
        yield stated(label, max(ratios), "", detail)


FIGURES: dict[str, Callable[[Options, dict[str, object]], Iterator[Claim]]] = {
    "4": figure_4,
    "6": figure_6,
    "7": figure_7,
}


def main() -> None:
    """Run it."""
    values = {"only": ("4,6,7", "figures to run, with commas between")}
    options = start(__doc__, values=values)
    warnings.simplefilter("ignore", CoarsePointsWarning)
    claims, settings = list[Claim](), dict[str, object](repeats=REPEATS, noise=NOISE)
    for figure in options.values["only"].split(","):
        for claim in FIGURES[figure](options, settings):
            claims.append(replace(claim, name=f"figure {figure}: {claim.name}"))
            print(*claims[-1].row(), sep=" | ", flush=True)
    finish("resolution", claims, options, settings)


if __name__ == "__main__":
    main()
