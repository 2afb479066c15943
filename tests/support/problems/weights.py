"""Small problems of weight space: a learner of a few functions, and the same by dense formulas."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import ConstantMean
from torch import Tensor

from bo_stream.bases.spectral import PointBasis, SampledBasis
from bo_stream.models.inference import Hyperparameters
from bo_stream.models.quadruply_stochastic.function_process import ControlPoints
from bo_stream.models.quadruply_stochastic.memory import (
    FourierFeatures,
    InducingAtData,
    Layout,
    Progress,
    QuadruplyStochasticMemory,
    Schedule,
)
from bo_stream.models.quadruply_stochastic.steps import Data, Steps
from bo_stream.models.stochastic.replay import Batch, StreamReplay
from tests.oracles.weight_space import WeightSpace

SIZE, DATA = 12, 15


Z = torch.linspace(0.0, 1.0, SIZE, dtype=torch.float64).unsqueeze(-1)
LAYOUTS = {
    "fourier": Layout(FourierFeatures(SIZE), Z[:0], 2),
    "inducing": Layout(InducingAtData(SIZE), Z, 2),
    "relevance": Layout(InducingAtData(SIZE), Z, 2),
}


def dense_precision(basis: SampledBasis) -> Tensor:
    """S of all functions, ``m x p x p``, or with 1 for m."""
    index = torch.arange(basis.size)
    if isinstance(basis, PointBasis):
        return basis.precision(index, index)
    return torch.diag_embed(basis.precision_diagonal(index))


@dataclass
class Problem:
    """Two outputs of one input, a random posterior, and minibatches with replacement."""

    kind: str
    columns: int = 0
    drawn: int = SIZE
    rows: int = DATA
    controlled: bool = False
    support: int = 5
    sample: int = DATA
    likelihood: Likelihood | None = None

    def __post_init__(self) -> None:
        batch = torch.Size([2])
        self.X = torch.rand(DATA, 1, dtype=torch.float64)
        self.Y = torch.randn(2, DATA, dtype=torch.float64)
        kernel = ScaleKernel(RBFKernel(batch_shape=batch), batch_shape=batch).double()
        kernel.base_kernel.lengthscale = torch.tensor([0.2, 0.1]).reshape(2, 1, 1)
        kernel.outputscale = torch.tensor([0.7, 1.6])
        likelihood = self.likelihood or GaussianLikelihood(batch_shape=batch)
        if isinstance(likelihood, GaussianLikelihood):
            likelihood.noise = torch.tensor([[0.3], [0.5]])
        mean = ConstantMean(batch_shape=batch)
        mean.constant = torch.tensor([0.2, -0.4])
        self.hyper = Hyperparameters(kernel, mean, likelihood)
        self.precisions = 0.5 + torch.rand(2, SIZE, dtype=torch.float64)
        self.steps = self._steps()

    def basis(self, hyper: Hyperparameters) -> SampledBasis:
        precisions = self.precisions if self.kind == "relevance" else None
        return LAYOUTS[self.kind].basis(hyper.covar_module, precisions)

    @property
    def is_gaussian(self) -> bool:
        return isinstance(self.hyper.likelihood, GaussianLikelihood)

    def _progress(self) -> Progress:
        k, full = self.columns, self.columns if self.is_gaussian else SIZE
        coefficients = 0.4 * torch.randn(2, SIZE, 1 + k, dtype=torch.float64)
        below = torch.arange(SIZE).unsqueeze(-1) > torch.arange(k)
        coefficients[..., 1:] *= below
        squares = torch.rand(2, SIZE, dtype=torch.float64) + 0.1
        log_scale = 0.3 * torch.randn(2, full, dtype=torch.float64) - 1.0
        precisions = self.precisions if self.kind == "relevance" else None
        squares = squares if self.is_gaussian else None
        return Progress.start(coefficients, log_scale, squares, precisions)

    def _steps(self) -> Steps:
        progress = self._progress()
        if self.controlled:
            kept = self.basis(Hyperparameters(*self._modules()))
            sample = self.X[: self.sample], self.Y[:, : self.sample]
            progress.control = ControlPoints.of(kept, self.support, sample, DATA, progress)
        schedule = Schedule(
            self.rows, self.drawn, 0, 0, 0, 0, 0.1, 0.01, 1e9, torch.float64, seed=0
        )
        rows = Batch(self.X, self.Y.mT)
        replay = StreamReplay.empty(rows).plus(rows)
        memory = QuadruplyStochasticMemory(replay, LAYOUTS[self.kind], progress)
        learns = self.kind != "inducing"
        return Steps(memory, self.hyper, None, schedule, learns, exact=True)

    def _modules(self) -> tuple[ScaleKernel, ConstantMean, Likelihood]:
        return self.hyper.covar_module, self.hyper.mean_module, self.hyper.likelihood

    def data(self, generator: torch.Generator) -> Data:
        if self.rows == DATA:
            return self.X, self.Y
        index = torch.randint(DATA, (self.rows,), generator=generator)
        return self.X[index], self.Y[:, index]

    # --- dense ---------------------------------------------------------------------------------

    def dense(self, output: int) -> tuple[WeightSpace, Tensor, Tensor]:
        """The problem of one output, the mean of its weights and the root of their covariance."""
        index, basis = torch.arange(SIZE), self.basis(self.hyper)
        Phi = basis.functions(self.X, index)
        S = dense_precision(basis)
        Phi, S = (t.expand(2, *t.shape[1:])[output] for t in (Phi, S))
        y = self.Y[output] - self.hyper.mean_module.constant[output]
        noise = torch.ones((), dtype=torch.float64)
        if self.is_gaussian:
            noise = self.hyper.likelihood.noise[output, 0]
        space = WeightSpace(Phi, S, y, noise)
        return space, *self._weights(output, space)

    def _weights(self, output: int, space: WeightSpace) -> tuple[Tensor, Tensor]:
        posterior = self.steps.progress
        k, log_scale = self.columns, posterior.log_scale[output]
        if self.is_gaussian:
            assert posterior.mean_squares is not None
            squares = DATA * posterior.mean_squares[output]
            own = squares / space.noise + space.precision.diagonal()
            diagonal = torch.cat((log_scale.exp(), own[k:].rsqrt()))
        else:
            diagonal = log_scale.exp()
        C = torch.diag(diagonal)
        below = torch.ones(SIZE, SIZE).tril(-1)[:, :k]
        C[:, :k] = C[:, :k] + posterior.coefficients[output, :, 1:] * below
        return posterior.coefficients[output, :, 0], C.detach()
