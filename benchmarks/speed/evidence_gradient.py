"""The log marginal likelihood of an exact model with its gradient: closed form against autograd.

Evaluations take turns, as BoTorch's fit calls them (``get_loss_closure_with_grads``): of BoTorch's
``SingleTaskGP``, all by autograd; of ``AutoGP`` with a kernel that is differentiated by autograd,
while the evidence's gradient in the kernel's matrix is in closed form; and of ``AutoGP`` as it is.

Then of a ``WISKI`` with many features behind a stem of 26 inputs: steps of ``OnlineLearner`` in
features that the kernel whitens again, against the same with the prior covariance in full; and
evaluations of ``pretrain``'s objective in the space of its rows, against the weights' by autograd.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from copy import deepcopy

import torch
from botorch.models import SingleTaskGP
from botorch.optim.closures import get_loss_closure_with_grads
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood

from benchmarks.common.harness import processor_seconds, start, timings
from benchmarks.common.report import Claim, at_least, finish, table
from bo_stream import WISKI, AutoGP, LinearStem, OnlineLearner, learning
from bo_stream.bases.grid.contraction import expected_log_prior
from bo_stream.models.wiski.cache import batch_log_marginal_likelihood
from bo_stream.weights import evidence_of, log_marginal_likelihood, solve

FASTER = 1.25
"""Times faster than GPyTorch at every size, at least."""

SAME = 1e-10
"""Largest difference of a gradient from autograd's, relative to the largest entry."""


STEP_FASTER = 3.0
"""Times faster a step of a learner with ``FEATURES`` features, at least."""

BATCH_FASTER = 2.0
"""Times faster an evaluation of ``pretrain``'s objective, at least."""

FEATURES = 1_024
INPUTS, ROWS, BATCH = 26, 675, 20
SAME_STEPS = 1e-6
"""Largest relative difference of two learners' densities, which part by Adam's first steps."""


class AutogradRBF(RBFKernel):
    """The squared-exponential kernel as GPyTorch differentiates it."""


class AutogradMatern(MaternKernel):
    """A Matérn kernel as GPyTorch differentiates it."""


def kernel_of(name: str, d: int, autograd: bool) -> Kernel:
    """A scaled kernel of d lengthscales of ``√d / 2``."""
    if name == "RBF":
        base = (AutogradRBF if autograd else RBFKernel)(ard_num_dims=d)
    else:
        base = (AutogradMatern if autograd else MaternKernel)(nu=2.5, ard_num_dims=d)
    base.lengthscale = 0.5 * d**0.5
    return ScaleKernel(base)


def evaluations(name: str, n: int, d: int) -> dict[str, Callable[[], torch.Tensor]]:
    """Functions that evaluate loss and gradients, and return all gradients in one tensor."""
    X = torch.rand(n, d)
    Y = (6.0 * X).sin().sum(-1, keepdim=True) + 0.1 * torch.randn(n, 1)
    models = {
        "GPyTorch": SingleTaskGP(X, Y, covar_module=kernel_of(name, d, autograd=True)),
        "kernel by autograd": AutoGP(
            X, Y, covar_module=kernel_of(name, d, autograd=True), families="exact"
        ),
        "closed form": AutoGP(
            X, Y, covar_module=kernel_of(name, d, autograd=False), families="exact"
        ),
    }

    def evaluation(model: AutoGP | SingleTaskGP) -> Callable[[], torch.Tensor]:
        model.train()
        parameters = dict(sorted(model.named_parameters()))
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
        closure = get_loss_closure_with_grads(mll, parameters)
        return lambda: torch.cat([g.flatten() for g in closure()[1] if g is not None])

    return {kind: evaluation(model) for kind, model in models.items()}


def stemmed(nodes: int) -> tuple[WISKI, torch.Tensor, torch.Tensor]:
    """WISKI behind a stem, with a feature for each node of a square grid, and rows to come."""
    X = 2.0 * torch.rand(10 * ROWS, INPUTS) - 1.0
    Z = X @ torch.randn(INPUTS, 2) / INPUTS**0.5
    Y = (6.0 * Z[:, :1]).sin() * (5.0 * Z[:, 1:]).cos() + 0.1 * torch.randn(len(X), 1)
    model = WISKI(
        X[:ROWS],
        Y[:ROWS],
        stem=LinearStem(INPUTS, 2),
        grid_size=nodes,
        covar_module=ScaleKernel(RBFKernel(ard_num_dims=2)),
    )
    model.covar_module.base_kernel.lengthscale = 0.64 / nodes
    model.likelihood.noise = 1e-3
    return model, X[ROWS:], Y[ROWS:]


def steps(nodes: int) -> dict[str, Callable[[], float]]:
    """Steps of a learner with the prior covariance in full and with features whitened again."""
    model, X, Y = stemmed(nodes)

    def step(few: int) -> Callable[[], float]:
        learner = OnlineLearner(deepcopy(model))
        rows = zip(X.split(BATCH), Y.split(BATCH), strict=True)

        def run() -> float:
            before, learning.FEW_FEATURES = learning.FEW_FEATURES, few
            try:
                return learner.step(*next(rows))
            finally:
                learning.FEW_FEATURES = before

        return run

    return {"in full": step(2**30), "whitened": step(0)}


def batches(nodes: int) -> dict[str, Callable[[], torch.Tensor]]:
    """Evaluations of ``pretrain``'s objective, with all gradients in one tensor."""
    model, X, Y = stemmed(nodes)
    inputs = model.coordinates(X[:ROWS]).detach().requires_grad_()
    leaves = [inputs, model.covar_module.base_kernel.raw_lengthscale]
    basis = model.inference.basis(model.memory.grid, model.prior)
    noise = torch.full((1, ROWS), 1e-3)

    def by_weights() -> torch.Tensor:
        features, residual = basis.features(inputs), Y[:ROWS].mT
        with torch.no_grad():
            evidence = evidence_of(features, residual, noise)
            posterior = solve(evidence)
            mean = posterior.mean
            value = log_marginal_likelihood(evidence, mean, posterior.log_precision())
            moment = posterior.covariance() + mean @ mean.mT
        linear = (features @ mean).squeeze(-1)
        spread = ((features @ moment) * features).sum(-1)
        misfit = (residual.square() - 2.0 * residual * linear + spread) / noise + noise.log()
        prior = expected_log_prior(basis, model.inference.kernel(model.prior), moment)
        expected = prior + 0.5 * misfit.sum(-1)
        return value - (expected - expected.detach())

    def as_now() -> torch.Tensor:
        kernel = model.inference.kernel(model.prior)
        return batch_log_marginal_likelihood(inputs, Y[:ROWS].mT, noise, basis, kernel)

    def gradients(value: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return lambda: torch.cat([g.flatten() for g in torch.autograd.grad(value().sum(), leaves)])

    return {"by weights": gradients(by_weights), "by rows": gradients(as_now)}


def behind_a_stem(nodes: int, repeats: int) -> list[Claim]:
    """How many times faster a step and an evaluation are."""
    claims = []
    case = f"{nodes**2:,} features"
    learners, evaluated = steps(nodes), batches(nodes)
    for _ in range(2):
        first, second = (step() for step in learners.values())
        if abs(first - second) > SAME_STEPS * max(1.0, abs(first)):
            raise RuntimeError(f"Densities of two learners are {first} and {second}.")
    weights, rows = (task() for task in evaluated.values())
    error = float((weights - rows).abs().max() / weights.abs().max())
    if error > SAME:
        raise RuntimeError(f"The gradients differ by {error:.1e} of the largest entry.")
    for name, tasks, least in (
        ("a step of OnlineLearner", {**learners}, STEP_FASTER),
        (f"an evaluation of pretrain, {ROWS} rows", {**evaluated}, BATCH_FASTER),
    ):
        times = timings({**tasks}, repeats, 1, clock=processor_seconds)
        before, now = (statistics.median(each) for each in times.values())
        detail = f"{1e3 * now:.1f} ms instead of {1e3 * before:.1f} ms"
        claims.append(at_least(f"{name}, {case}", before / now, least, "times faster", detail))
    return claims


def main() -> None:
    """Run it."""
    options = start(__doc__)
    sizes = options.pick((100, 300, 1000), (20,))
    dims = options.pick((2, 6, 20, 100), (2,))
    repeats = options.pick({100: 41, 300: 21, 1000: 7}, {20: 2})
    rows: list[list[str]] = []
    claims: list[Claim] = []
    for name in ("RBF", "Matern 5/2"):
        for n in sizes:
            for d in dims:
                tasks = evaluations(name, n, d)
                peer, before, now = (task() for task in tasks.values())
                error = max(float((now - g).abs().max() / g.abs().max()) for g in (peer, before))
                if error > SAME:
                    raise RuntimeError(f"The gradients differ by {error:.1e} of the largest entry.")
                times = timings({**tasks}, repeats[n], 2, clock=processor_seconds)
                ms = [1e3 * statistics.median(each) for each in times.values()]
                case = f"{name}, n = {n:,}, d = {d}"
                rows.append(
                    [case, *(f"{t:.2f}" for t in ms), *(f"{t / ms[-1]:.2f}" for t in ms[:-1])]
                )
                detail = f"{ms[1] / ms[2]:.2f} times faster than with autograd through the kernel"
                claims.append(at_least(case, ms[0] / ms[2], FASTER, "times faster", detail))
    nodes = options.pick(round(FEATURES**0.5), 18)
    claims += behind_a_stem(nodes, options.pick(15, 2))
    header = [f"{kind}, ms" for kind in tasks] + ["first ratio", "second ratio"]
    print(table(["an evaluation", *header], rows))
    finish("evidence_gradient", claims, options, {"sizes": sizes, "dims": dims})


if __name__ == "__main__":
    main()
