"""What ``torch.compile`` saves of a process's moments at some points, and of their gradient.

Each process is compiled as one graph, by torch's default backend, which wants a C++ compiler. Times
are those of the processor; seconds of the first calls, which compile, are stated apart. Not of
``QSGP``: the integers that its frequencies are made of are too large for that backend.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import torch
from torch import Tensor

from benchmarks.common.harness import Options, processor_seconds, start, timings
from benchmarks.common.report import Claim, finish, stated
from bo_stream import WISKI, AutoGP, BayesianLastLayer, DecoupledGP
from bo_stream.models.base import StreamingGP


@dataclass(frozen=True)
class Sizes:
    """Observations, the exact model's, inputs, candidate batches, points in each, repeats."""

    n: int
    exact: int
    dim: int
    batches: int
    q: int
    repeats: int


def models(sizes: Sizes) -> dict[str, StreamingGP]:
    """Those whose moments are one graph."""
    X = torch.rand(sizes.n, sizes.dim)
    Y = torch.sin(6.0 * X).sum(-1, keepdim=True) + 0.1 * torch.randn(sizes.n, 1)
    bounds, few = torch.tensor([[0.0] * sizes.dim, [1.0] * sizes.dim]), slice(sizes.exact)
    bases = {"num_mean": sizes.exact, "num_covar": sizes.exact // 2}
    return {
        "WISKI": WISKI(X, Y, bounds=bounds),
        "exact AutoGP": AutoGP(X[few], Y[few], bounds=bounds),
        "DecoupledGP": DecoupledGP(X, Y, **bases),
        "BayesianLastLayer": BayesianLastLayer(X, Y),
    }


def gradient_of(rule: Callable[[Tensor], Tensor], points: Tensor) -> Callable[[], Tensor]:
    """A task that takes a sum and its gradient."""

    def task() -> Tensor:
        X = points.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(rule(X).sum(), X)
        return gradient

    return task


def claims_of(
    name: str, model: StreamingGP, points: Tensor, repeats: int, backend: str
) -> list[Claim]:
    """What is saved of one model's moments."""
    process = model.process()

    def moments(X: Tensor) -> Tensor:
        return torch.stack(process.marginals(X))

    gradient_of(moments, points)()  # what is cached is there then
    torch.compiler.reset()
    compiled = torch.compile(moments, fullgraph=True, backend=backend)
    began = time.perf_counter()
    with torch.no_grad():
        compiled(points)
    gradient_of(compiled, points)()
    claims = [stated(f"{name}: compiling, gradient too", time.perf_counter() - began, "s")]
    tasks: dict[str, dict[str, Callable[[], object]]] = {
        "moments": {"eager": lambda: moments(points), "compiled": lambda: compiled(points)},
        "gradient": {
            "eager": gradient_of(moments, points),
            "compiled": gradient_of(compiled, points),
        },
    }
    for what, both in tasks.items():
        with torch.set_grad_enabled(what == "gradient"):
            found = timings(both, repeats, clock=processor_seconds)
        eager, fast = (median(found[way]) for way in ("eager", "compiled"))
        detail = f"{1e3 * eager:.2f} and {1e3 * fast:.2f} ms"
        claims.append(stated(f"{name}: {what}, times faster compiled", eager / fast, "", detail))
    return claims


def main() -> None:
    """Run it."""
    options: Options = start(__doc__)
    sizes = options.pick(Sizes(3_000, 200, 3, 10, 3, 51), Sizes(40, 20, 2, 2, 2, 1))
    points, backend = (
        torch.rand(sizes.batches, sizes.q, sizes.dim),
        options.pick("inductor", "eager"),
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # nothing was compiled before
        claims = [
            claim
            for name, model in models(sizes).items()
            for claim in claims_of(name, model, points, sizes.repeats, backend)
        ]
    finish("compiled", claims, options, asdict(sizes))


if __name__ == "__main__":
    main()
