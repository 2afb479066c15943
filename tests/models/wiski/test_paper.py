"""The paper's formulas with their slips mended against the exact GP, and as they are printed."""

from __future__ import annotations

import math

import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.means import ZeroMean
from torch import Tensor

from bo_stream import WISKI
from bo_stream.testing.streams import assert_close
from tests.oracles.gaussian_process import DenseGP
from tests.oracles.interpolation import interpolation_weights, node_inputs
from tests.oracles.kernels import dense_kernel
from tests.oracles.wiski import Caches

NOISE, SIZES = 0.04, (7, 7)
BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)

pytestmark = pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")


def weights(X: Tensor) -> Tensor:
    return interpolation_weights(X, BOUNDS, SIZES)


def kernel() -> RBFKernel:
    made = RBFKernel().double()
    made.lengthscale = 0.25
    return made


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    X = torch.rand(30, 2, dtype=torch.float64)
    return X, (5.0 * X).sin().sum(-1) + NOISE**0.5 * torch.randn(30).double()


def caches(X: Tensor, y: Tensor) -> Caches:
    nodes = node_inputs(BOUNDS, SIZES)
    return Caches(dense_kernel(kernel(), nodes, nodes).detach(), weights(X), y, NOISE)


def exact(paper: Caches) -> DenseGP:
    """With the interpolated kernel, of which weights are the inputs."""
    noise = torch.full_like(paper.y, NOISE)
    return DenseGP(lambda w, v: w @ paper.K @ v.mT, torch.zeros(1), paper.W, paper.y, noise)


def streamed(X: Tensor, y: Tensor) -> WISKI:
    """On the grid from the first row on, a row at a time, with every eigenvector of K."""
    options = {"covar_module": kernel(), "mean_module": ZeroMean(), "outcome_transform": None}
    grid = {"bounds": BOUNDS, "grid_size": 7, "tolerance": 0.0, "max_rank": math.prod(SIZES)}
    model = WISKI(X[:1], y[:1, None], **options, **grid)
    with torch.no_grad():
        model.likelihood.noise = NOISE
    for i in range(1, len(X)):
        model.update(X[i : i + 1], y[i : i + 1, None])
    return model.eval()


def test_the_likelihood_of_eq_13_needs_a_variance_and_the_other_sign(
    data: tuple[Tensor, Tensor],
) -> None:
    """``log |K̃ + σ² I| = n log σ² + log |Q|``, and K comes with σ⁻² in M."""
    paper, model = caches(*data), streamed(*data)
    constant = 0.5 * len(data[1]) * math.log(2.0 * math.pi)
    expected = exact(paper).log_marginal_likelihood() + constant
    assert_close(paper.log_marginal_likelihood(), expected, factor=10)
    assert_close(model.log_marginal_likelihood().detach().squeeze() + constant, expected, factor=10)
    assert abs(paper.log_marginal_likelihood(printed=True) - expected) > 100.0


def test_the_variance_of_eq_15_has_a_factor_too_many(data: tuple[Tensor, Tensor]) -> None:
    """``σ² wᵀ M w = wᵀ K (w − L b)``: the σ² is used up by the σ⁻² of M."""
    paper, T = caches(*data), torch.rand(5, 2, dtype=torch.float64)
    mean, covariance = exact(paper).posterior(weights(T))
    assert_close(paper.mean(weights(T)), mean)
    assert_close(paper.covariance(weights(T)), covariance)
    assert_close(paper.covariance(weights(T), printed=True), NOISE * covariance)
    posterior = streamed(*data).posterior(T)
    assert_close(posterior.mean.squeeze(-1).detach(), mean)
    assert_close(posterior.distribution.covariance_matrix.detach(), covariance)


def test_the_gradient_of_eq_18_is_that_of_a_5(data: tuple[Tensor, Tensor]) -> None:
    """Only with 1 / σ² before the squares is it that of the marginal likelihood."""
    X, y = data
    past = caches(X[:-1], y[:-1])
    w = weights(X[-1:])[0].requires_grad_()
    whole = exact(caches(X, y))
    whole = DenseGP(
        whole.kernel, whole.mean, torch.cat((past.W, w.unsqueeze(0))), whole.y, whole.noise
    )
    (expected,) = torch.autograd.grad(whole.log_marginal_likelihood(), w)
    (mended,) = torch.autograd.grad(past.newest(w, y[-1]), w)
    (printed,) = torch.autograd.grad(past.newest(w, y[-1], printed=True), w)
    size = expected.abs().max()
    assert_close(mended / size, expected / size, factor=100)
    assert (printed - expected).abs().max() > 0.1 * size
