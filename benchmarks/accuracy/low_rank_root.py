"""The WISKI paper's low-rank root of the data against WISKI's eigenvectors of the prior.

The paper keeps ``WᵀW ≈ L Lᵀ`` of rank r (by Lanczos; here also by its largest eigenvectors and by
pivoted Cholesky) and updates L and its pseudo-inverse in place with every observation, after Gill
et al. (1974). WISKI here keeps the whole ``WᵀW`` and truncates the prior to its r largest
eigenvectors. Both are held against the interpolated kernel without any truncation, after a stream
of single observations, at equal rank; errors are the largest over the test points, in prior sd
(mean) and prior variance (variance). [Stanton2021, section 4.2 and A.3]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from gpytorch.kernels import RBFKernel
from gpytorch.means import ZeroMean
from linear_operator import to_linear_operator
from linear_operator.utils.lanczos import lanczos_tridiag
from torch import Tensor

from benchmarks.accuracy.accuracy import NOISE, Problem, covariance, draw
from benchmarks.common.harness import Options, interleave, start
from benchmarks.common.report import Claim, at_most, finish, stated
from bo_stream import WISKI
from bo_stream.bases.grid.mesh import Grid, outer_product

LENGTHSCALE = 0.2
ROOTS: dict[str, Callable[[Tensor, int], Tensor]] = {}


def root(function: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """Put a root decomposition on the list."""
    ROOTS[function.__name__] = function
    return function


@root
def eigen(gram: Tensor, rank: int) -> Tensor:
    """The best root of a rank, ``p x r``."""
    values, vectors = torch.linalg.eigh(gram)
    return vectors[:, -rank:] * values[-rank:].clamp_min(0.0).sqrt()


@root
def lanczos(gram: Tensor, rank: int) -> Tensor:
    """By r steps of Lanczos' iteration, orthogonalised anew, ``p x r``."""
    start_vector = gram.sum(-1, keepdim=True)
    Q, T = lanczos_tridiag(
        gram.matmul, rank, gram.dtype, gram.device, gram.shape, init_vecs=start_vector
    )
    values, vectors = torch.linalg.eigh(T)
    return Q @ vectors * values.clamp_min(0.0).sqrt()


@root
def cholesky(gram: Tensor, rank: int) -> Tensor:
    """By r steps of pivoted Cholesky, ``p x r``."""
    factor: Tensor = to_linear_operator(gram).pivoted_cholesky(rank, error_tol=0.0)
    return factor.nan_to_num(0.0)  # steps beyond the gram's own rank


@dataclass
class LowRankRoot:
    """The paper's model, in dense formulas.

    Attributes:
        K: Prior covariance of the nodes, ``p x p``.
        L: ``p x r``.
        J: Its pseudo-inverse, transposed, ``p x r``.
        moment: ``Wᵀy``, ``p x 1``.
        projected: Whether predictions see only the part of it that L can have made.
    """

    K: Tensor
    L: Tensor
    J: Tensor
    moment: Tensor
    projected: bool = False

    @classmethod
    def of(cls, K: Tensor, W: Tensor, Y: Tensor, rank: int, kind: str) -> LowRankRoot:
        """From a batch."""
        L = ROOTS[kind](W.mT @ W, rank)
        return cls(K, L, torch.linalg.pinv(L).mT, W.mT @ Y)

    def update(self, w: Tensor, y: Tensor) -> None:
        """One observation with weights ``1 x p``. Cost O(p r)."""
        p = self.J.mT @ w.mT
        length = p.square().sum()
        if length > 0:
            grown = ((1.0 + length).sqrt() - 1.0) / length
            shrunk = ((1.0 + length).rsqrt() - 1.0) / length
            self.L = self.L + grown * (self.L @ p) @ p.mT
            self.J = self.J + shrunk * (self.J @ p) @ p.mT
        self.moment = self.moment + w.mT @ y

    def posterior(self, W: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of ``n x p`` weights. Cost O(p² r)."""
        KL = self.K @ self.L
        Q = torch.eye(self.L.shape[-1]) + self.L.mT @ KL / NOISE
        half = torch.linalg.solve_triangular(torch.linalg.cholesky(Q), KL.mT, upper=False)
        covariance_W = self.K @ W.mT - half.mT @ (half @ W.mT) / NOISE
        moment = self.L @ (self.J.mT @ self.moment) if self.projected else self.moment
        mean = covariance_W.mT @ moment / NOISE
        return mean.squeeze(-1), (W.mT * covariance_W).sum(0)


@dataclass(frozen=True)
class Stream:
    """A problem on a grid, the first observations of which come as a batch."""

    problem: Problem
    grid: Grid
    first: int

    def weights(self, X: Tensor) -> Tensor:
        """Dense interpolation weights, ``n x p``."""
        rows = [self.grid.interpolation_matrix(i, X[:, i]) for i in range(self.grid.dim)]
        sizes = {row.shape[-1] for row in rows}
        if len(sizes) != 1:
            raise ValueError("Expected a grid of equal sides.")
        return outer_product(torch.stack(rows, -2))

    def prior(self) -> Tensor:
        """Covariance of the nodes, ``p x p``."""
        nodes = torch.cartesian_prod(*(self.grid.nodes(i) for i in range(self.grid.dim)))
        return covariance("RBF", LENGTHSCALE, nodes, nodes)

    def paper(self, rank: int, kind: str) -> LowRankRoot:
        """The paper's model after the whole stream."""
        X, Y = self.problem.X, self.problem.Y
        W = self.weights(X)
        model = LowRankRoot.of(self.prior(), W[: self.first], Y[: self.first], rank, kind)
        for i in range(self.first, len(Y)):
            model.update(W[i : i + 1], Y[i : i + 1])
        return model

    def wiski(self, rank: int) -> WISKI:
        """WISKI after the whole stream."""
        kernel = RBFKernel()
        kernel.lengthscale = LENGTHSCALE
        X, Y = self.problem.X, self.problem.Y
        model = WISKI(
            X[: self.first],
            Y[: self.first],
            covar_module=kernel,
            mean_module=ZeroMean(),
            outcome_transform=None,
            bounds=self.grid.bounds,
            grid_size=self.grid.size,
            tolerance=0.0,
            max_rank=rank,
        )
        model.likelihood.noise = NOISE
        for i in range(self.first, len(Y)):
            model.update(X[i : i + 1], Y[i : i + 1])
        return model

    def truth(self) -> tuple[Tensor, Tensor]:
        """The posterior of the interpolated kernel."""
        W, test = self.weights(self.problem.X), self.weights(self.problem.test_X)
        K = self.prior()
        cross = test @ K @ W.mT
        factor = torch.linalg.cholesky(W @ K @ W.mT + NOISE * torch.eye(len(W)))
        half = torch.linalg.solve_triangular(factor, cross.mT, upper=False)
        white = torch.linalg.solve_triangular(factor, self.problem.Y, upper=False)
        return (half.mT @ white).squeeze(-1), ((test @ K) * test).sum(-1) - half.square().sum(0)


def errors(found: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Largest errors of mean and variance."""
    mean, variance = (float((a - b).abs().max()) for a, b in zip(found, truth, strict=True))
    return mean, variance


def by_rank(stream: Stream, ranks: tuple[int, ...]) -> list[Claim]:
    """Errors at equal ranks."""
    truth, test = stream.truth(), stream.weights(stream.problem.test_X)
    claims = []
    for rank in ranks:
        posterior = stream.wiski(rank).posterior(stream.problem.test_X)
        own = errors((posterior.mean.squeeze(-1), posterior.variance.squeeze(-1)), truth)
        theirs = {}
        for kind in ROOTS:
            model = stream.paper(rank, kind)
            theirs[kind] = errors(model.posterior(test), truth)
            theirs[f"{kind}, projected"] = errors(
                replace(model, projected=True).posterior(test), truth
            )
        best = min(mean for mean, _ in theirs.values())
        listed = "; ".join(f"{kind} {m:.1e}, {v:.1e}" for kind, (m, v) in theirs.items())
        detail = f"prior {own[0]:.1e}, {own[1]:.1e}; {listed}"
        claims.append(
            at_most(f"rank {rank}: error over the best root's", own[0] / best, 1.0, "", detail)
        )
    return claims


def by_time(stream: Stream, rank: int, repeats: int) -> Claim:
    """Seconds of an update and the next posterior at one point, at equal rank."""
    X, Y = stream.problem.X[:1], stream.problem.Y[:1]
    w = stream.weights(X)
    wiski, paper = stream.wiski(rank), stream.paper(rank, "eigen")

    def own() -> object:
        return wiski.update(X, Y).posterior(X).variance

    def theirs() -> object:
        paper.update(w, Y)
        return paper.posterior(w)

    medians = interleave({"own": own, "theirs": theirs}, repeats)
    detail = f"{1e3 * medians['own']:.1f} ms; {1e3 * medians['theirs']:.1f} ms"
    return stated(
        f"rank {rank}: time over the paper's root's", medians["own"] / medians["theirs"], "", detail
    )


def run(options: Options) -> list[Claim]:
    """Errors and times."""
    size, n, first = options.pick((30, 1_500, 1_000), (12, 40, 20))
    ranks = options.pick((64, 128, 256, 450), (10, 20))
    problem = draw("RBF", 2, LENGTHSCALE, n, options.pick(200, 10), seed=0)
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    stream = Stream(problem, Grid.over(bounds, (size, size)), first)
    return [*by_rank(stream, ranks), by_time(stream, ranks[1], options.pick(20, 2))]


def main() -> None:
    """Run it."""
    options = start(__doc__)
    finish("low_rank_root", run(options), options, {"noise": NOISE, "lengthscale": LENGTHSCALE})


if __name__ == "__main__":
    main()
