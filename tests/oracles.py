"""Dense formulas written naively from the papers; they share no code with the package.

Everything is differentiable, costs what it costs, and takes leading batch dimensions. Targets are
``... x n`` and noise is ``... x n``; kernels are gpytorch's modules, read by closed formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from botorch.models.model import Model
from botorch.models.transforms.outcome import ChainedOutcomeTransform, Standardize
from botorch.posteriors.gpytorch import GPyTorchPosterior
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    MaternKernel,
    PeriodicKernel,
    ProductKernel,
    RBFKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from gpytorch.likelihoods import GaussianLikelihood
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor

DenseKernel = Callable[[Tensor, Tensor], Tensor]


# --- interpolation ------------------------------------------------------------------------------


def grid_nodes(lower: float, upper: float, size: int) -> Tensor:
    """The box cut into ``size − 3`` cells, and one node more beyond each end."""
    cell = (upper - lower) / (size - 3)
    return torch.tensor([lower + (k - 1) * cell for k in range(size)], dtype=torch.float64)


def keys_kernel(s: Tensor) -> Tensor:
    """The cubic convolution kernel with a = −1/2 at a distance in cells. [Keys1981, eq. 15]"""
    s = s.abs()
    near = 1.5 * s**3 - 2.5 * s**2 + 1.0
    far = -0.5 * s**3 + 2.5 * s**2 - 4.0 * s + 2.0
    return torch.where(s <= 1.0, near, torch.where(s < 2.0, far, torch.zeros_like(s)))


def line_weights(x: Tensor, lower: float, upper: float, size: int) -> Tensor:
    """One-dimensional interpolation weights of all nodes, ``... -> ... x size``."""
    nodes = grid_nodes(lower, upper, size).to(x)
    return keys_kernel((x.unsqueeze(-1) - nodes) / (nodes[1] - nodes[0]))


def interpolation_weights(X: Tensor, bounds: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """W: weights of all nodes in row-major order, ``... x n x d -> ... x n x p``."""
    W = torch.ones_like(X[..., :1])
    for i, size in enumerate(sizes):
        line = line_weights(X[..., i], float(bounds[0, i]), float(bounds[1, i]), size)
        W = (W.unsqueeze(-1) * line.unsqueeze(-2)).flatten(-2)
    return W


def node_inputs(bounds: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """All nodes in row-major order, ``p x d``."""
    lines = [grid_nodes(float(bounds[0, i]), float(bounds[1, i]), s) for i, s in enumerate(sizes)]
    return torch.tensor(list(product(*(line.tolist() for line in lines))), dtype=torch.float64)


# --- kernels ------------------------------------------------------------------------------------


def dense_kernel(kernel: Kernel, X: Tensor, X2: Tensor) -> Tensor:
    """A gpytorch kernel by closed formula, Matérn as a product over dimensions."""
    if isinstance(kernel, ScaleKernel):
        return kernel.outputscale[..., None, None] * dense_kernel(kernel.base_kernel, X, X2)
    if isinstance(kernel, ProductKernel):
        result = dense_kernel(kernel.kernels[0], X, X2)
        for part in kernel.kernels[1:]:
            result = result * dense_kernel(part, X, X2)
        return result
    if isinstance(kernel, AdditiveKernel):
        return sum(dense_kernel(part, X, X2) for part in kernel.kernels)
    dims = range(X.shape[-1]) if kernel.active_dims is None else kernel.active_dims.tolist()
    if isinstance(kernel, PeriodicKernel):
        return _periodic(kernel, X[..., dims], X2[..., dims])
    if isinstance(kernel, SpectralMixtureKernel):
        return _spectral_mixture(kernel, X[..., dims], X2[..., dims])
    result = 1.0
    for column, i in enumerate(dims):
        lengthscale = kernel.lengthscale[..., 0, column if kernel.ard_num_dims else 0]
        distance = (X[..., :, None, i] - X2[..., None, :, i]).abs()
        result = result * _correlation(kernel, distance / lengthscale[..., None, None])
    return result


def _correlation(kernel: Kernel, r: Tensor) -> Tensor:
    if isinstance(kernel, RBFKernel):
        return torch.exp(-(r**2) / 2.0)
    assert isinstance(kernel, MaternKernel)
    s = math.sqrt(2.0 * kernel.nu) * r
    polynomial = {0.5: 1.0, 1.5: 1.0 + s, 2.5: 1.0 + s + s**2 / 3.0}[kernel.nu]
    return polynomial * torch.exp(-s)


def _periodic(kernel: PeriodicKernel, X: Tensor, X2: Tensor) -> Tensor:
    """``exp(−2 Σ_i sin²(π τ_i / p_i) / λ_i)``, τ = x − x'. [gpytorch's documentation]"""
    exponent = 0.0
    for i in range(X.shape[-1]):
        column = i if kernel.ard_num_dims else 0
        period = kernel.period_length[..., 0, column][..., None, None]
        lengthscale = kernel.lengthscale[..., 0, column][..., None, None]
        difference = X[..., :, None, i] - X2[..., None, :, i]
        exponent = exponent - 2.0 * torch.sin(math.pi * difference / period) ** 2 / lengthscale
    return torch.exp(exponent)


def _spectral_mixture(kernel: SpectralMixtureKernel, X: Tensor, X2: Tensor) -> Tensor:
    """``Π_i Σ_j w_j exp(−2 π² τ_i² s_ij²) cos(2 π τ_i μ_ij)``. [WilsonAdams2013, eq. 11 and 12]

    The order of product and sum is gpytorch's, not the paper's; they agree in one dimension.
    """
    result = 1.0
    for i in range(X.shape[-1]):
        difference = X[..., :, None, i] - X2[..., None, :, i]
        line = 0.0
        for j in range(kernel.num_mixtures):
            weight = kernel.mixture_weights[..., j][..., None, None]
            mean = kernel.mixture_means[..., j, 0, i][..., None, None]
            scale = kernel.mixture_scales[..., j, 0, i][..., None, None]
            decay = torch.exp(-2.0 * (math.pi * difference * scale) ** 2)
            line = line + weight * decay * torch.cos(2.0 * math.pi * difference * mean)
        result = result * line
    return result


def interpolated_kernel(
    kernel: Kernel, bounds: Tensor, sizes: tuple[int, ...], rank: int | None = None
) -> DenseKernel:
    """``k̃(x, x') = w(x)ᵀ K w(x')``; with a rank, K in its largest Kronecker eigenvectors only.

    The eigenvectors are constants: gradients are those of ``P K(θ) P`` with P fixed.
    """
    nodes = node_inputs(bounds, sizes)
    K = dense_kernel(kernel, nodes, nodes).to(torch.float64)
    if rank is not None:
        E = largest_eigenvectors(kernel, bounds, sizes, rank)
        K = E @ (E.mT @ K @ E) @ E.mT

    def covariance(X: Tensor, X2: Tensor) -> Tensor:
        W, W2 = (interpolation_weights(x, bounds, sizes) for x in (X, X2))
        return W @ K @ W2.mT

    return covariance


def additive_interpolated_kernel(
    kernel: Kernel, cover: Callable[[tuple[int, ...]], tuple[Tensor, tuple[int, ...]]]
) -> DenseKernel:
    """The sum of the parts' interpolated kernels, each from a grid over the inputs it acts on.

    Args:
        kernel: A sum, scaled as a whole or not; each part names its inputs.
        cover: Bounds and nodes per dimension of the grid over some inputs.
    """
    if isinstance(kernel, AdditiveKernel):
        parts = [additive_interpolated_kernel(part, cover) for part in kernel.kernels]
        return lambda X, X2: sum(part(X, X2) for part in parts)
    if isinstance(kernel, ScaleKernel):
        base = additive_interpolated_kernel(kernel.base_kernel, cover)
        return lambda X, X2: kernel.outputscale[..., None, None] * base(X, X2)
    dims = list(kernel.active_dims)
    bounds, sizes = cover(tuple(int(i) for i in dims))
    lines = node_inputs(bounds, sizes)
    nodes = torch.zeros(len(lines), max(dims) + 1, dtype=torch.float64)
    nodes[:, dims] = lines
    K = dense_kernel(kernel, nodes, nodes).to(torch.float64)

    def covariance(X: Tensor, X2: Tensor) -> Tensor:
        W, W2 = (interpolation_weights(x[..., dims], bounds, sizes) for x in (X, X2))
        return W @ K @ W2.mT

    return covariance


@torch.no_grad()
def kronecker_eigenpairs(
    kernel: Kernel, bounds: Tensor, sizes: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """All eigenvalues and eigenvectors of K as products of one-dimensional ones, largest first."""
    values, vectors = torch.ones(1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    origin = bounds[:1].to(torch.float64)
    scale = dense_kernel(kernel, origin, origin).to(torch.float64)
    for i, size in enumerate(sizes):
        line = origin.repeat(size, 1)
        line[:, i] = grid_nodes(float(bounds[0, i]), float(bounds[1, i]), size)
        own_values, own_vectors = torch.linalg.eigh(dense_kernel(kernel, line, line) / scale)
        values = torch.kron(values, own_values)
        vectors = torch.kron(vectors, own_vectors)
    order = values.argsort(descending=True)
    return scale.squeeze() * values[order], vectors[:, order]


def largest_eigenvectors(
    kernel: Kernel, bounds: Tensor, sizes: tuple[int, ...], rank: int
) -> Tensor:
    """The eigenvectors of the ``rank`` largest eigenvalues of K, ``p x rank``."""
    return kronecker_eigenpairs(kernel, bounds, sizes)[1][:, :rank]


# --- Gaussian processes -------------------------------------------------------------------------


@dataclass(frozen=True)
class DenseGP:
    """The exact Gaussian process: a kernel, a constant mean, and all the data.

    Attributes:
        kernel: ``... x n x d, ... x n' x d -> ... x n x n'``.
        mean: Constant prior mean, ``... x 1``.
        X: ``... x n x d``.
        y: ``... x n``.
        noise: Variances, ``... x n``.
    """

    kernel: DenseKernel
    mean: Tensor
    X: Tensor
    y: Tensor
    noise: Tensor

    def noisy_covariance(self) -> Tensor:
        """``k(X, X) + N``."""
        return self.kernel(self.X, self.X) + torch.diag_embed(self.noise)

    def posterior(self, T: Tensor) -> tuple[Tensor, Tensor]:
        """Mean ``... x t`` and covariance ``... x t x t``. [Rasmussen & Williams, eq. 2.23–24]"""
        cross = self.kernel(T, self.X)
        gain = torch.linalg.solve(self.noisy_covariance(), cross.mT).mT
        mean = self.mean + (gain @ (self.y - self.mean).unsqueeze(-1)).squeeze(-1)
        return mean, self.kernel(T, T) - gain @ cross.mT

    def log_marginal_likelihood(self) -> Tensor:
        """[Rasmussen & Williams, eq. 2.30], ``...``."""
        covariance = self.noisy_covariance()
        residual = (self.y - self.mean).unsqueeze(-1)
        misfit = (residual.mT @ torch.linalg.solve(covariance, residual))[..., 0, 0]
        n = self.X.shape[-2]
        return -0.5 * (misfit + torch.logdet(covariance) + n * math.log(2.0 * math.pi))

    def condition(self, X: Tensor, y: Tensor, noise: Tensor) -> DenseGP:
        """The same process with more data."""
        return replace(
            self,
            X=torch.cat((self.X, X), -2),
            y=torch.cat((self.y, y), -1),
            noise=torch.cat((self.noise, noise), -1),
        )

    def without(self, rows: list[int]) -> DenseGP:
        """The same process with less data: all but some rows."""
        left = [i for i in range(self.X.shape[-2]) if i not in rows]
        return replace(
            self, X=self.X[..., left, :], y=self.y[..., left], noise=self.noise[..., left]
        )


def heteroscedastic_stream(
    mean: DenseGP, noise: DenseGP, batches: list[tuple[Tensor, Tensor]]
) -> tuple[DenseGP, DenseGP]:
    """Processes of y and of its log noise variance, each batch predicted, then put into both.

    Log squares as measurements: ψ(1/2) + log 2 and ψ'(1/2) are the mean and variance of log χ².
    """
    for X, y in batches:
        m, covariance = mean.posterior(X)
        g, uncertainty = noise.posterior(X)
        expected = torch.exp(g + 0.5 * uncertainty.diagonal(dim1=-2, dim2=-1))
        share = expected / (expected + covariance.diagonal(dim1=-2, dim2=-1))
        measured = torch.log(share * (y - m) ** 2) + 1.2703628454614782
        noise = noise.condition(X, measured, math.pi**2 / 2.0 / share**2)
        mean = mean.condition(X, y, expected)
    return mean, noise


def condition_in_turn(
    mean: Tensor, covariance: Tensor, rows: list[int], y: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """A joint normal conditioned on noisy values of some of its entries, one after another."""
    for row, value, variance in zip(rows, y, noise, strict=True):
        gain = covariance[:, row] / (covariance[row, row] + variance)
        mean = mean + gain * (value - mean[row])
        covariance = covariance - torch.outer(gain, covariance[row])
    return mean, covariance


def integrated_posterior_variance(gp: DenseGP, X: Tensor, noise: Tensor, points: Tensor) -> Tensor:
    """Mean variance at ``points`` once X (``q x d``) is observed with variances ``noise`` (q).

    The variance does not depend on what is observed. The negative of it is qNIPV.
    """
    conditioned = gp.condition(X, torch.zeros_like(noise), noise)
    return conditioned.posterior(points)[1].diagonal(dim1=-2, dim2=-1).mean(-1)


def standardization(Y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and Bessel-corrected standard deviation of ``... x n x m`` outcomes, ``... x 1 x m``."""
    n = Y.shape[-2]
    mean = Y.sum(-2, keepdim=True) / n
    return mean, ((Y - mean).square().sum(-2, keepdim=True) / (n - 1)).sqrt()


def in_order(values: Tensor, outputs: int) -> Tensor:
    """``... x n x m`` outcomes as the targets ``... x n`` (one output) or ``... x m x n``."""
    return values.squeeze(-1) if outputs == 1 else values.mT


# --- classification -----------------------------------------------------------------------------


def dirichlet_observations(
    labels: list[int], classes: int, alpha_epsilon: float
) -> tuple[Tensor, Tensor]:
    """Scores and noise variances, ``n x classes`` each. [Milios et al., 2018, eq. 5 and 6]"""
    alpha = torch.tensor(
        [[alpha_epsilon + (label == k) for k in range(classes)] for label in labels],
        dtype=torch.float64,
    ).view(-1, classes)
    noise = torch.log(1.0 / alpha + 1.0)
    return torch.log(alpha) - noise / 2.0, noise


def softmax_expectations(mean: Tensor, variance: Tensor, order: int = 120) -> tuple[Tensor, Tensor]:
    """``E softmax(f)`` and the expected entropy of it, on a grid of all m scores at once."""
    nodes, weights = (torch.from_numpy(a) for a in hermegauss(order))
    weights = weights / weights.sum()
    scores = torch.cartesian_prod(
        *(mu + v.sqrt() * nodes for mu, v in zip(mean, variance, strict=True))
    )
    joint = torch.cartesian_prod(*[weights] * len(mean)).prod(-1)
    p = scores.softmax(-1)
    return joint @ p, joint @ -(p * scores.log_softmax(-1)).sum(-1)


def label_information(scores: Tensor) -> float:
    """Mutual information of q labels with scores that were drawn jointly, ``S x q x m``.

    ``H(E Π p) - E Σ H(p)`` over all ``m^q`` joint labels.
    """
    p = scores.softmax(-1)
    q, m = p.shape[1:]
    joint = 0.0
    for labels in product(range(m), repeat=q):
        probability = float(math.prod(p[:, i, k] for i, k in enumerate(labels)).mean())
        joint -= probability * math.log(probability)
    return joint + float((p * p.log()).sum((-2, -1)).mean())


# --- the same for a model -----------------------------------------------------------------------


def reference(
    model: Model,
    X: Tensor,
    Y: Tensor,
    Yvar: Tensor | None = None,
    kernel: DenseKernel | None = None,
    rank: int | None = None,
) -> DenseGP:
    """The dense process, in transformed units, that a grid model with these data must equal.

    Hyperparameters, bounds and grid size are the model's (read from gpytorch's modules), the data
    are all given here. Differentiable in the hyperparameters. Inputs and outcomes are those after
    any transform but a standardisation.

    Args:
        model: A model with ``covar_module``, ``mean_module``, ``likelihood`` and a grid.
        X: ``... x n x d``.
        Y: ``... x n x m``.
        Yvar: Known noise variances; NaN or None where the likelihood's noise is meant.
        kernel: Instead of the interpolated kernel.
        rank: Keep the largest eigenvectors only.
    """
    X, Y = X.to(torch.float64), Y.to(torch.float64)
    m = Y.shape[-1]
    centre, scale = standardization(Y) if standardizes(model) else (0.0 * Y[..., :1, :], 1.0)
    y = in_order((Y - centre) / scale, m)
    noise = torch.full_like(Y, math.nan) if Yvar is None else Yvar.to(torch.float64)
    noise = in_order(noise / scale**2, m)
    if isinstance(model.likelihood, GaussianLikelihood):
        noise = torch.where(noise.isnan(), model.likelihood.noise.to(torch.float64), noise)
    if kernel is None:
        bounds = model.bounds.to(torch.float64)
        kernel = interpolated_kernel(model.covar_module, bounds, model.grid_size, rank)
    constant = getattr(model.mean_module, "constant", torch.zeros(()))
    return DenseGP(kernel, constant.to(torch.float64).unsqueeze(-1), lift(X, m), y, noise)


def standardizes(model: Model) -> bool:
    """Whether the model's outcome transform is, or ends in, a ``Standardize``."""
    transform = getattr(model, "outcome_transform", None)
    if isinstance(transform, ChainedOutcomeTransform):
        transform = list(transform.values())[-1]
    return isinstance(transform, Standardize)


def lift(X: Tensor, outputs: int) -> Tensor:
    """Inputs with a dimension for the outputs where there are several."""
    return X if outputs == 1 else X.unsqueeze(-3)


def reference_posterior(
    model: Model, X: Tensor, Y: Tensor, T: Tensor, Yvar: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Mean ``... x t x m``, covariance ``... x m x t x t`` of :func:`reference`, in Y's units."""
    m = Y.shape[-1]
    gp = reference(model, X, Y, Yvar, **kwargs)
    mean, covariance = gp.posterior(lift(T.to(torch.float64), m))
    mean = mean.unsqueeze(-1) if m == 1 else mean.mT
    covariance = covariance.unsqueeze(-3) if m == 1 else covariance
    if standardizes(model):
        centre, scale = standardization(Y.to(torch.float64))
        mean = centre + scale * mean
        covariance = scale.mT.unsqueeze(-1) ** 2 * covariance
    return mean, covariance


def joint_covariance(posterior: GPyTorchPosterior) -> Tensor:
    """A posterior's covariance as ``... x m x t x t``; outputs must be independent."""
    distribution = posterior.distribution
    covariance = distribution.covariance_matrix
    if not isinstance(distribution, MultitaskMultivariateNormal):
        return covariance.unsqueeze(-3)
    t, m = distribution.event_shape
    if distribution._interleaved:
        blocks = covariance.unflatten(-1, (t, m)).unflatten(-3, (t, m))
    else:
        blocks = covariance.unflatten(-1, (m, t)).unflatten(-3, (m, t))
        blocks = blocks.transpose(-1, -2).transpose(-3, -4)
    own = torch.stack([blocks[..., :, a, :, a] for a in range(m)], -3)
    between = [blocks[..., :, a, :, b] for a in range(m) for b in range(m) if a != b]
    assert not any(block.any() for block in between)
    return own


# --- cover tree ---------------------------------------------------------------------------------


def paper_cover_tree(X: np.ndarray, resolution: float) -> np.ndarray:
    """The finest centres by the paper's loops and its bound on neighbours. [Terenin2024, alg. 9]

    Without the optional steps.
    """
    root = X.mean(0)
    depth = math.ceil(math.log2(np.linalg.norm(X - root, axis=1).max() / resolution))
    centres, families, neighbours = [root], [list(range(len(X)))], [[0]]
    for level in range(1, depth + 1):
        radius = 2.0 ** (depth - level) * resolution
        below: list[np.ndarray] = []
        below_families: list[list[int]] = []
        children: list[list[int]] = [[] for _ in centres]
        parents: list[int] = []
        for p in range(len(centres)):
            while families[p]:
                centre = X[families[p][0]]
                taken = []
                for r in neighbours[p]:
                    near = [i for i in families[r] if np.linalg.norm(X[i] - centre) <= radius]
                    taken += near
                    families[r] = [i for i in families[r] if i not in near]
                children[p].append(len(below))
                parents.append(p)
                below.append(centre)
                below_families.append(taken)
        bound = 4.0 * (1.0 - 0.5 ** (depth - level)) * radius
        neighbours = [
            [
                c
                for r in neighbours[parents[i]]
                for c in children[r]
                if np.linalg.norm(below[c] - below[i]) <= bound
            ]
            for i in range(len(below))
        ]
        centres, families = below, below_families
    return np.array(centres)


def oips(K: Tensor, rho: float) -> list[int]:
    """Accept what no accepted point is correlated with by rho. [Galy-Fajou2021, algorithm 1]"""
    scale = K.diagonal().sqrt()
    likeness = K / scale / scale.unsqueeze(-1)
    chosen: list[int] = []
    for i in range(len(K)):
        if all(float(likeness[i, j]) < rho for j in chosen):
            chosen.append(i)
    return chosen


# --- inducing points ----------------------------------------------------------------------------


@dataclass(frozen=True)
class SGPR:
    """Batch sparse regression, densely. [Titsias2009, eq. 6 and 9]

    Attributes:
        K: Prior covariance of the n data, ``n x n``.
        cross: Between data and inducing points, ``n x M``.
        inner: Of the inducing points, ``M x M``.
        y: Outcomes less the prior mean, ``n``.
        noise: Variances, ``n``.
    """

    K: Tensor
    cross: Tensor
    inner: Tensor
    y: Tensor
    noise: Tensor

    def bound(self) -> Tensor:
        """log N(y; 0, Q + D) − ½ tr(D⁻¹ (K − Q))."""
        Q = self.cross @ torch.linalg.solve(self.inner, self.cross.mT)
        normal = torch.distributions.MultivariateNormal(
            torch.zeros_like(self.y), Q + torch.diag(self.noise)
        )
        return normal.log_prob(self.y) - 0.5 * ((self.K - Q).diagonal() / self.noise).sum()

    def predict(self, test_cross: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and covariance at t points: their covariance with Z, ``t x M``, and prior."""
        A = self.inner + self.cross.mT @ (self.cross / self.noise.unsqueeze(-1))
        mean = test_cross @ torch.linalg.solve(A, self.cross.mT @ (self.y / self.noise))
        explained = test_cross @ torch.linalg.solve(self.inner, test_cross.mT)
        return mean, test - explained + test_cross @ torch.linalg.solve(A, test_cross.mT)


def two_basis_bound(
    K: Tensor,
    cross: Tensor,
    inner: Tensor,
    y: Tensor,
    noise: float | Tensor,
    rank: int,
    nugget: float = 1e-9,
) -> Tensor:
    """The bound at the best mean of all functions and the best covariance of so many of them.

    Functions are the prior's eigenfunctions in the span of the inducing points: all for the mean,
    the leading ones for the covariance, whose bound is Titsias's but for the mean's misfit.

    Args:
        K: Prior covariance of the n data, ``n x n``.
        cross: Between data and inducing points, ``n x M``.
        inner: Of the inducing points, ``M x M``.
        y: Outcomes less the prior mean, ``n``.
        noise: Variance.
        rank: Functions of the covariance.
        nugget: Noise of the inducing points' values, in parts of their variance.
    """
    n, sigma2 = len(y), torch.as_tensor(noise).to(y)
    half = torch.linalg.cholesky(inner + nugget * torch.diag(inner.diagonal()))
    features = torch.linalg.solve(half, cross.mT).mT
    _, directions = torch.linalg.eigh((features.mT @ features).detach())
    z = (features @ directions).flip(-1)
    fit = y @ torch.linalg.solve(z @ z.mT + sigma2 * torch.eye(n).to(y), y)
    few = z[:, :rank]
    learned = torch.logdet(torch.eye(rank).to(y) + few.mT @ few / sigma2)
    left = (K.diagonal() - few.square().sum(-1)).sum()
    constant = n * (2.0 * torch.pi * sigma2).log()
    return -0.5 * (fit + learned + constant + left / sigma2)


def online_bound(
    old_X: Tensor,
    old_y: Tensor,
    old_Z: Tensor,
    old_kernel: DenseKernel,
    X: Tensor,
    y: Tensor,
    Z: Tensor,
    kernel: DenseKernel,
    noise: float,
) -> Tensor:
    """The collapsed online bound of new data after a batch of old ones. [Bui2017, eq. 7]

    The old posterior of the values at the old points, over their old prior, is a likelihood of
    pseudo-outcomes ``D S⁻¹ m`` with covariance ``D = (S⁻¹ − K'⁻¹)⁻¹``.
    """
    eye = torch.eye(len(old_Z), dtype=X.dtype)
    K_old, cross = old_kernel(old_Z, old_Z), old_kernel(old_X, old_Z)
    A = K_old + cross.mT @ cross / noise
    S = K_old @ torch.linalg.solve(A, K_old)
    m = K_old @ torch.linalg.solve(A, cross.mT @ old_y / noise)
    S_inverse, K_inverse = torch.linalg.solve(S, eye), torch.linalg.solve(K_old, eye)
    D = torch.linalg.inv(S_inverse - K_inverse)
    pseudo = D @ S_inverse @ m
    both = torch.cat((kernel(X, Z), kernel(old_Z, Z)))
    Q = both @ torch.linalg.solve(kernel(Z, Z), both.mT)
    covariance = Q + torch.block_diag(noise * torch.eye(len(X), dtype=X.dtype), D)
    normal = torch.distributions.MultivariateNormal(torch.zeros(len(both)).to(X), covariance)
    n = len(X)
    missed_new = (kernel(X, X) - Q[:n, :n]).diagonal().sum() / noise
    missed_old = (torch.linalg.solve(D, kernel(old_Z, old_Z) - Q[n:, n:])).diagonal().sum()
    log_determinants = torch.logdet(S) - torch.logdet(K_old) - torch.logdet(D)
    constant = len(old_Z) * math.log(2.0 * math.pi)
    quadratic = m @ S_inverse @ D @ S_inverse @ m - m @ S_inverse @ m
    delta = -0.5 * (log_determinants - quadratic - constant)
    return normal.log_prob(torch.cat((y, pseudo))) - 0.5 * (missed_new + missed_old) + delta


# --- local models -------------------------------------------------------------------------------


def local_groups(X: Tensor, kernel: DenseKernel, w_gen: float, size: int) -> list[list[int]]:
    """Rows that each local model holds after all came one by one. [NguyenTuong2008, algorithm 1]"""
    groups: list[list[int]] = []
    for i, x in enumerate(X):
        likeness = [correlation(kernel, x[None], centre(X[rows]))[0, 0] for rows in groups]
        if groups and max(likeness) >= w_gen:
            rows = groups[likeness.index(max(likeness))]
            rows.append(i)
            del rows[:-size]
        else:
            groups.append([i])
    return groups


def correlation(kernel: DenseKernel, A: Tensor, B: Tensor) -> Tensor:
    variances = kernel(A, A).diagonal()[:, None] * kernel(B, B).diagonal()
    return kernel(A, B) / variances.sqrt()


def centre(X: Tensor) -> Tensor:
    return X.mean(0, keepdim=True)


def blended_models(
    models: list[tuple[Tensor, Tensor, Tensor]], kernel: DenseKernel, nearest: int, T: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and covariance at T of exact GPs of (X, y, noise), weighted by likeness to centres."""
    likeness = torch.cat([correlation(kernel, T, centre(X)) for X, _, _ in models], -1)
    weights = torch.zeros_like(likeness)
    for row, values in zip(weights, likeness, strict=True):
        best = values.argsort(descending=True)[:nearest]
        row[best] = values[best] / values[best].sum()
    mean, covariance = torch.zeros(len(T)).to(T), torch.zeros(len(T), len(T)).to(T)
    for w, (X, y, noise) in zip(weights.mT, models, strict=True):
        gain = torch.linalg.solve(kernel(X, X) + noise.diag(), kernel(X, T)).mT
        mean += w * (gain @ y)
        covariance += torch.outer(w, w).sqrt() * (kernel(T, T) - gain @ kernel(X, T))
    return mean, covariance


# --- other likelihoods --------------------------------------------------------------------------


LogProb = Callable[[Tensor], Tensor]
"""``log p(y | f)`` of n outcomes at values of f, ``k x n`` to ``k x n``."""


def log_probs(name: str, y: Tensor, noise: float = 0.5, freedom: float = 5.0) -> LogProb:
    """Of some outcomes, by the formulas of their distributions."""

    def log_prob(f: Tensor) -> Tensor:
        if name == "bernoulli":
            return torch.special.log_ndtr((2.0 * y - 1.0) * f)
        if name == "poisson":
            rate = torch.nn.functional.softplus(f)
            return y * rate.log() - rate - torch.lgamma(y + 1.0)
        if name == "laplace":
            return -(y - f).abs() / math.sqrt(noise) - math.log(2.0 * math.sqrt(noise))
        if name == "gaussian":
            return -0.5 * ((y - f) ** 2 / noise + math.log(2.0 * math.pi * noise))
        assert name == "student"
        constant = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
        tail = (freedom + 1) / 2 * torch.log1p((y - f) ** 2 / (freedom * noise))
        return constant - 0.5 * math.log(freedom * math.pi * noise) - tail

    return log_prob


def expectation(log_prob: LogProb, mean: Tensor, variance: Tensor) -> Tensor:
    """``E log p(y | f)`` of each outcome, by the trapezoidal rule over 18 standard deviations.

    Where log p has a kink the error is below 1e-5, and that of the slopes below 5e-3.
    """
    t = torch.linspace(-9.0, 9.0, 3001, dtype=torch.float64).unsqueeze(-1)
    weights = torch.exp(-0.5 * t**2) * (t[1] - t[0]) / math.sqrt(2.0 * math.pi)
    return (weights * log_prob(mean + variance.sqrt() * t)).sum(0)


def variational_optimum(
    mean: Tensor, covariance: Tensor, log_prob: LogProb, power: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, covariance and bound of the best normal q of n values, by L-BFGS over all its numbers.

    Maximises ``power Σ E_q log p(y | f) − KL(q ‖ N(mean, covariance))``.
    """
    n, root = len(mean), torch.linalg.cholesky(covariance)
    centre = torch.zeros(n, dtype=torch.float64, requires_grad=True)
    lower = torch.eye(n, dtype=torch.float64).requires_grad_()

    def bound() -> Tensor:
        L = lower.tril()
        m, S = mean + root @ centre, root @ L
        data = expectation(log_prob, m, S.square().sum(-1)).sum()
        log_determinant = L.diagonal().abs().log().sum()
        return power * data - 0.5 * (centre @ centre + L.square().sum() - n) + log_determinant

    optimiser = torch.optim.LBFGS(
        [centre, lower],
        max_iter=500,
        tolerance_grad=1e-10,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = -bound()
        loss.backward()
        return loss

    optimiser.step(closure)
    with torch.no_grad():
        S = root @ lower.tril()
        return mean + root @ centre, S @ S.mT, bound()


@dataclass(frozen=True)
class Normal:
    """A joint normal distribution.

    Attributes:
        mean: ``n``.
        covariance: ``n x n``.
    """

    mean: Tensor
    covariance: Tensor

    def divergence(self, other: Normal) -> Tensor:
        """KL of this from another."""
        p, q = (
            torch.distributions.MultivariateNormal(d.mean, 0.5 * (d.covariance + d.covariance.mT))
            for d in (self, other)
        )
        return torch.distributions.kl_divergence(p, q)

    def given_values(self, prior: Tensor, cross: Tensor, inner: Tensor, constant: float) -> Normal:
        """Values elsewhere, where this is of values at inducing points: their prior covariances."""
        gain = torch.linalg.solve(inner, cross.mT).mT
        mean = constant + gain @ (self.mean - constant)
        return Normal(mean, prior - gain @ (inner - self.covariance) @ gain.mT)


def uncollapsed_bound(
    q_new: Normal,
    q_old: Normal,
    log_prob: LogProb,
    X: Tensor,
    Z: Tensor,
    old_Z: Tensor,
    kernel: DenseKernel,
    old_kernel: DenseKernel,
    constant: float,
    beta: float = 1.0,
) -> Tensor:
    """The uncollapsed online bound with its three divergences. [Stanton2021, eq. A.7 and A.8]"""
    inner, a = kernel(Z, Z), old_Z

    def prior(K: Tensor) -> Normal:
        return Normal(torch.full((len(K),), constant, dtype=K.dtype), K)

    at_data = q_new.given_values(kernel(X, X), kernel(X, Z), inner, constant)
    at_old = q_new.given_values(kernel(a, a), kernel(a, Z), inner, constant)
    data = expectation(log_prob, at_data.mean, at_data.covariance.diagonal()).sum()
    divergences = (
        q_new.divergence(prior(inner))
        + at_old.divergence(q_old)
        - at_old.divergence(prior(old_kernel(a, a)))
    )
    return data - beta * divergences


def moments_given_outcomes(mean: Tensor, covariance: Tensor, log_prob: LogProb) -> Normal:
    """Exact posterior mean and covariance of two values, by tensor-product quadrature."""
    nodes, weights = (torch.from_numpy(a) for a in hermegauss(120))
    grid = torch.cartesian_prod(nodes, nodes)
    values = mean + grid @ torch.linalg.cholesky(covariance).mT
    mass = torch.cartesian_prod(weights, weights).prod(-1) * log_prob(values).sum(-1).exp()
    mass = mass / mass.sum()
    centre = mass @ values
    return Normal(centre, (values - centre).mT @ ((values - centre) * mass.unsqueeze(-1)))


# --- a cap on inducing points -------------------------------------------------------------------


def exchanged(
    correlations: Tensor, kept: list[int], waiting: list[int], better: float, most: int
) -> list[int]:
    """Indices that are kept after exchanges, everything computed anew for each."""
    kept, waiting = list(kept), list(waiting)
    for _ in range(min(most, len(waiting))):
        inner = correlations[kept][:, kept]
        own = 1.0 / torch.linalg.inv(inner).diagonal()
        cross = correlations[kept][:, waiting]
        left = 1.0 - (cross * torch.linalg.solve(inner, cross)).sum(0)
        if left.max() <= better * own.min():
            break
        del kept[int(own.argmin())]
        kept.append(waiting.pop(int(left.argmax())))
    return kept


# --- clustered data -----------------------------------------------------------------------------


def moved_to_nearest(X: Tensor, Z: Tensor) -> Tensor:
    """Each input replaced by the nearest centre, ``... x n x d``. [Terenin2024, eq. 22]"""
    squares = (X.unsqueeze(-2) - Z).square().sum(-1)
    return Z[squares.argmin(-1)]


def kl_of_normals(m1: Tensor, C1: Tensor, m2: Tensor, C2: Tensor) -> Tensor:
    """KL(N(m1, C1) ‖ N(m2, C2)) of vectors."""
    move = m2 - m1
    misfit = move @ torch.linalg.solve(C2, move) + torch.linalg.solve(C2, C1).trace()
    return 0.5 * (misfit - len(m1) + torch.logdet(C2) - torch.logdet(C1))


# --- decoupled bases ----------------------------------------------------------------------------


def averaged_kernel(
    lengthscale: Tensor, scale: float, A: Tensor, factors: Tensor, B: Tensor, factors2: Tensor
) -> Tensor:
    """The generalised SE-ARD kernel, entry by entry. [Cheng2017, eq. 19]"""
    result = torch.empty(len(A), len(B), dtype=A.dtype)
    for i, j in product(range(len(A)), range(len(B))):
        l1, l2 = lengthscale * factors[i], lengthscale * factors2[j]
        total = l1**2 + l2**2
        size = (2.0 * l1 * l2 / total).sqrt().prod()
        result[i, j] = scale * size * torch.exp(-((A[i] - B[j]) ** 2 / total).sum())
    return result


@dataclass(frozen=True)
class DecoupledOracle:
    """A decoupled Gaussian process by its formulas. [Cheng2017, eq. 8 to 10]

    Attributes:
        alpha: ``K_α``, ``M_α x M_α``.
        a: ``M_α``.
        beta: ``K_β``, ``M_β x M_β``.
        B: ``M_β x M_β``.
        constant: Prior mean.
    """

    alpha: Tensor
    a: Tensor
    beta: Tensor
    B: Tensor
    constant: float = 0.0

    def mean(self, cross: Tensor) -> Tensor:
        """From ``k(x, α)``."""
        return self.constant + cross @ self.a

    def covariance(self, prior: Tensor, cross: Tensor) -> Tensor:
        """From ``k(x, x')`` and ``k(x, β)``; ``(B⁻¹ + K_β)⁻¹ = B (I + K_β B)⁻¹``."""
        eye = torch.eye(len(self.beta), dtype=prior.dtype)
        inner = self.B @ torch.linalg.inv(eye + self.beta @ self.B)
        return prior - cross @ inner @ cross.mT

    def divergence(self) -> Tensor:
        """Of q from the prior. [eq. 9]"""
        eye = torch.eye(len(self.beta), dtype=self.beta.dtype)
        whole = eye + self.beta @ self.B
        inner = self.B @ torch.linalg.inv(whole)
        traced = (self.beta @ inner).trace()
        return 0.5 * (self.a @ self.alpha @ self.a + torch.logdet(whole) - traced)

    def bound(
        self, prior: Tensor, alpha: Tensor, beta: Tensor, log_prob: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Of all outcomes, from ``k(x, x)``, ``k(x, α)``, ``k(x, β)``; by quadrature. [eq. 10]"""
        variance = self.covariance(prior, beta).diagonal()
        return expectation(log_prob, self.mean(alpha), variance).sum() - self.divergence()


def hybrid_divergence(
    K: Tensor, m: Tensor, S: Tensor, cross: Tensor, alpha: Tensor, a: Tensor
) -> Tensor:
    """Of the hybrid parametrization, ``−log |K⁻¹ S|`` halved. [Cheng2017, eq. 14, corrected]

    Args:
        K: Prior covariance of the shared values.
        m: Their part of the mean.
        S: Their posterior covariance.
        cross: ``k(X̃, α_r)``.
        alpha: ``K_α_r``.
        a: Of the residual functions.
    """
    inner = torch.linalg.inv(K)
    mean = 0.5 * m @ inner @ m + m @ inner @ cross @ a + 0.5 * a @ alpha @ a
    spread = (S @ inner).trace() - len(K) - torch.logdet(inner @ S)
    return mean + 0.5 * spread


# --- weight space -------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightSpace:
    """``y ~ N(Φ w, noise I)``, ``w ~ N(0, S⁻¹)``, with everything dense. [Evans2020, section 2]

    Attributes:
        functions: Φ, ``n x p``.
        precision: S, ``p x p``.
        y: ``n``.
        noise: Their variance.
    """

    functions: Tensor
    precision: Tensor
    y: Tensor
    noise: Tensor

    def loss_of_mean(self, mean: Tensor) -> Tensor:
        """``L_μ`` of eq. 2."""
        f = self.functions @ mean
        return (f.square() - 2.0 * self.y * f).sum() / self.noise + mean @ self.precision @ mean

    def loss_of_covariance(self, C: Tensor) -> Tensor:
        """``L_Σ`` of eq. 2, of a root ``Σ = C Cᵀ``."""
        spread = (self.functions @ C).square().sum() / self.noise
        return spread + (self.precision @ C @ C.mT).trace() - torch.logdet(C @ C.mT)

    def constant(self) -> Tensor:
        """``L_const`` of eq. 2."""
        n, p = self.functions.shape
        logs = n * (2.0 * math.pi * self.noise).log() - torch.logdet(self.precision)
        return logs - p + self.y.square().sum() / self.noise

    def bound(self, mean: Tensor, C: Tensor) -> Tensor:
        """Eq. 2."""
        losses = self.loss_of_mean(mean) + self.loss_of_covariance(C) + self.constant()
        return -0.5 * losses

    def posterior(self) -> Normal:
        """Of the weights, in closed form."""
        precision = self.functions.mT @ self.functions / self.noise + self.precision
        mean = torch.linalg.solve(precision, self.functions.mT @ self.y) / self.noise
        return Normal(mean, torch.linalg.inv(precision))

    def log_marginal_likelihood(self) -> Tensor:
        """``log p(y)``."""
        K = self.functions @ torch.linalg.solve(self.precision, self.functions.mT)
        K = K + self.noise * torch.eye(len(self.y), dtype=K.dtype)
        return torch.distributions.MultivariateNormal(torch.zeros_like(self.y), K).log_prob(self.y)

    def best_diagonal(self) -> Tensor:
        """Proposition 1: entries of the diagonal of C where its columns hold nothing else."""
        own = self.functions.square().sum(0) + self.noise * self.precision.diagonal()
        return (self.noise / own).sqrt()

    def with_function(self, values: Tensor, cross: Tensor, own: Tensor) -> WeightSpace:
        """One function more: its values at the data, and its row and entry of S. [appendix G]"""
        functions = torch.cat((self.functions, values.unsqueeze(-1)), -1)
        top = torch.cat((self.precision, cross.unsqueeze(-1)), -1)
        bottom = torch.cat((cross, own.reshape(1))).unsqueeze(0)
        return replace(self, functions=functions, precision=torch.cat((top, bottom)))


def bound_of_likelihood(
    functions: Tensor, precision: Tensor, mean: Tensor, C: Tensor, log_prob: LogProb
) -> Tensor:
    """The bound for any likelihood: eq. 5 with its standard deviation, by quadrature, less KL."""
    data = expectation(log_prob, functions @ mean, (functions @ C).square().sum(-1)).sum()
    prior = torch.linalg.inv(precision)
    return data - kl_of_normals(mean, C @ C.mT, torch.zeros_like(mean), prior)


def bound_of_single_functions(
    functions: Tensor, mean: Tensor, diagonal: Tensor, log_prob: LogProb
) -> Tensor:
    """Theorem 3, corrected, for a diagonal C: expected over draws of one of p functions.

    ``φ μ + φ C ε`` is estimated by ``p (φ_i μ_i + φ_i c_i ε_i)``.
    """
    p = functions.shape[-1]
    each = [
        expectation(
            log_prob,
            p * functions[:, i] * mean[i],
            (p * functions[:, i] * diagonal[i]).square(),
        ).sum()
        for i in range(p)
    ]
    return torch.stack(each).mean()
