"""The log marginal likelihood of an exact model with its gradient: closed form against autograd.

Evaluations take turns, as BoTorch's fit calls them (``get_loss_closure_with_grads``): of BoTorch's
``SingleTaskGP``, all by autograd; of ``AutoGP`` with a kernel that is differentiated by autograd,
while the evidence's gradient in the kernel's matrix is in closed form; and of ``AutoGP`` as it is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from botorch.models import SingleTaskGP
from botorch.optim.closures import get_loss_closure_with_grads
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood

from benchmarks.common.harness import processor_seconds, start, timings
from benchmarks.common.report import Claim, at_least, finish, table
from bo_stream import AutoGP

FASTER = 1.25
"""Times faster than GPyTorch at every size, at least."""

SAME = 1e-10
"""Largest difference of a gradient from autograd's, relative to the largest entry."""


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
    header = [f"{kind}, ms" for kind in tasks] + ["first ratio", "second ratio"]
    print(table(["an evaluation", *header], rows))
    finish("evidence_gradient", claims, options, {"sizes": sizes, "dims": dims})


if __name__ == "__main__":
    main()
