"""Seconds of every verb on the CPU and on an accelerator, beside what its arithmetic takes there.

    python -m benchmarks.speed.device --device cuda

Bytes and floating-point operations are those of the tensor operations that a verb dispatches, each
operand read and each result written once; the roofline is the longer of the two times that they
take at the speeds of a large copy and of a large product of matrices, measured in the same run.
Without an accelerator the columns of the CPU alone are there.
"""

from __future__ import annotations

import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from botorch.acquisition.logei import qLogExpectedImprovement
from botorch.sampling.normal import SobolQMCNormalSampler
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.common.harness import Options, seconds, start
from benchmarks.common.report import finish, stated, table
from bo_stream import OSGPR, QSGP, WISKI, AutoGP, DecoupledGP, FourierFeatures, ProductMatern
from bo_stream.acquisition import FeatureNIPV, sample_paths, select_from_pool
from bo_stream.models.base import StreamingGP
from tests.laws.devices import pretend

HOST = torch.device("cpu")
Verb = Callable[[], object]


# --- what a verb asks of a device -----------------------------------------------------------------


class Work(TorchDispatchMode):
    """Counts the tensor operations of a call, their bytes and their floating-point operations.

    Attributes:
        operations: Number of those that read or write memory; views do neither.
        bytes: Of all operands and results.
        flops: Of products, factorizations and solves, and one for each number of any other result.
    """

    operations = 0
    bytes = 0
    flops = 0.0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        if not operation.is_view:
            operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            results = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            self.operations += 1
            self.bytes += sum(t.numel() * t.element_size() for t in (*operands, *results))
            self.flops += _flops(operation.overloadpacket.__name__, operands, results)
        return result


def _flops(name: str, operands: list[Tensor], results: list[Tensor]) -> float:
    """Floating-point operations of one operation, by the usual counts of dense linear algebra."""
    elements = float(max((t.numel() for t in results), default=0))
    if name in {"mm", "bmm", "mv", "dot", "addmm", "baddbmm"}:
        first = operands[1] if name.endswith("addmm") or name == "baddbmm" else operands[0]
        return 2.0 * elements * first.shape[-1]
    if name in {"linalg_cholesky_ex", "cholesky"}:
        return elements * operands[0].shape[-1] / 3.0
    if name in {"linalg_solve_triangular", "triangular_solve", "cholesky_solve"}:
        return elements * max(t.shape[-2] for t in operands) * (2.0 if "cholesky" in name else 1.0)
    if name in {"_linalg_eigh", "_linalg_svd"}:
        return 9.0 * elements * operands[0].shape[-1]
    return elements


@dataclass(frozen=True)
class Ceiling:
    """What a device does at most: bytes a second and floating-point operations a second."""

    bytes: float
    flops: float

    @classmethod
    def measured(cls, device: torch.device, options: Options) -> Ceiling:
        """Measure a large copy and a large product of matrices in float64."""
        large = device.type != "cpu"
        numbers = options.pick(2**27 if large else 2**24, 2**12)
        side = options.pick(8192 if large else 1536, 64)
        copying = median_seconds(torch.rand(numbers, device=device).clone, device)
        matrix = torch.rand(side, side, device=device)
        multiplying = median_seconds(lambda: matrix @ matrix, device)
        return cls(16.0 * numbers / copying, 2.0 * side**3 / multiplying)

    def seconds(self, work: Work) -> float:
        """Compute the time that no program of this work can undercut."""
        return max(work.bytes / self.bytes, work.flops / self.flops)


def synchronize(device: torch.device) -> None:
    """Wait until all that was asked of a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(verb: Verb, device: torch.device, budget: float = 0.5, most: int = 40) -> float:
    """Median seconds of a call, the device's work included, after two calls that warm up."""

    def run() -> None:
        verb()
        synchronize(device)

    times: list[float] = []
    while len(times) < most and (len(times) < 5 or sum(times) < budget):
        synchronize(device)
        times.append(seconds(run))
        if len(times) > 2 and times[-1] > budget:
            break
    return statistics.median(times[2:])


@contextmanager
def waits(device: torch.device) -> Iterator[list[int]]:
    """Count how often the host waits for the device: the list's one number, when it is left."""
    found = [0]
    if device.type != "cuda":
        counted = Counter[str]() if device.type == "cpu" else pretend.SYNCS
        before = counted.total()
        yield found
        found[0] = counted.total() - before
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found[0] = sum("synchronizing" in str(warning.message) for warning in caught)


# --- the verbs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Sizes of one run.

    Attributes:
        rows: Of the models of fixed size.
        exact: Of the exact model.
        grids: Points a dimension of the grid in three inputs and of that in two.
        points: Inducing points of O-SGPR.
        many: Rows of a large update; a large posterior has ten times, a pool a hundred times these.
        functions: Of the stochastic models.
        batch: Rows of a step of theirs.
    """

    rows: int
    exact: int
    grids: tuple[int, int]
    points: int
    many: int
    functions: int
    batch: int


def rows(n: int, d: int, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Uniform points of the unit cube, ``n x d``, and a smooth function with noise, ``n x 1``."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(n, d, generator=generator)
    Y = torch.sin(4.0 * X).sum(-1, keepdim=True) + 0.1 * torch.randn(n, 1, generator=generator)
    return X.to(device), Y.to(device)


def unit_box(d: int, device: torch.device) -> Tensor:
    """Bounds of the unit cube, ``2 x d``."""
    return torch.tensor([[0.0] * d, [1.0] * d], device=device)


def models(
    sizes: Sizes,
) -> dict[str, tuple[int, Callable[[torch.device], StreamingGP]]]:
    """By name, the number of inputs of each model that is measured, and how to build it."""

    def grid(d: int, size: int, lengthscale: float, device: torch.device) -> WISKI:
        kernel = ScaleKernel(RBFKernel(ard_num_dims=d)).to(device)
        kernel.base_kernel.lengthscale = lengthscale
        X, Y = rows(sizes.rows, d, device)
        bounds = unit_box(d, device)
        return WISKI(X, Y, covar_module=kernel, grid_size=size, bounds=bounds, max_rank=4096)

    def inducing(device: torch.device) -> OSGPR:
        X, Y = rows(sizes.rows, 3, device)
        kernel = ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=3)).to(device)
        points = X[: sizes.points]
        return OSGPR(X, Y, inducing_points=points, covar_module=kernel, allocator=None)

    def exact(device: torch.device) -> AutoGP:
        kernel = ScaleKernel(ProductMatern(nu=2.5, ard_num_dims=3)).to(device)
        X, Y = rows(sizes.exact, 3, device)
        return AutoGP(X, Y, covar_module=kernel, bounds=unit_box(3, device), families="exact")

    return {
        "WISKI, 3 inputs": (3, lambda device: grid(3, sizes.grids[0], 0.25, device)),
        "WISKI, 2 inputs": (2, lambda device: grid(2, sizes.grids[1], 0.04, device)),
        "OSGPR": (3, inducing),
        "AutoGP, exact": (3, exact),
    }


def verbs(model: StreamingGP, d: int, sizes: Sizes, device: torch.device) -> dict[str, Verb]:
    """What a loop asks of a model."""
    few, many = rows(3, d, device, seed=1), rows(sizes.many, d, device, seed=2)
    at, wide = rows(5, d, device, seed=3)[0], rows(10 * sizes.many, d, device, seed=4)[0]
    fifty, pool = rows(50, d, device, seed=5)[0], rows(max(sizes.many, 50), d, device, seed=8)[0]
    X8, Y8 = (t.unflatten(0, (8, 3)) for t in rows(24, d, device, seed=6))
    X256, Y256 = (t.unflatten(0, (-1, 4)) for t in rows(1024, d, device, seed=7))

    def predict(X: Tensor, of: Any = model) -> Tensor:
        posterior = of.posterior(X)
        return posterior.mean + posterior.variance

    def updated(X: Tensor, Y: Tensor) -> None:
        model.update(X, Y)
        predict(at)

    def evidence() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            value = model.compute_custom_loss(ExactMarginalLogLikelihood(model.likelihood, model))
            return torch.autograd.grad(value, list(model.parameters()), allow_unused=True)

    def gradient(acquisition: Any, X: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = X.clone().requires_grad_()
            return torch.autograd.grad(acquisition(leaf).sum(), leaf)[0]

    sampler = SobolQMCNormalSampler(torch.Size([128]), seed=0)
    improvement = qLogExpectedImprovement(model, 1.0, sampler)
    starts = rows(10, d, device, seed=9)[0].unsqueeze(-2)
    found: dict[str, Verb] = {
        "update of 3, posterior of 5": lambda: updated(*few),
        f"posterior of {10 * sizes.many:,}": lambda: predict(wide),
        "8 fantasies of 3, posterior of 50": lambda: predict(
            fifty, model.condition_on_observations(X8, Y8)
        ),
        "256 fantasies of 4, posterior of 50": lambda: predict(
            fifty, model.condition_on_observations(X256, Y256)
        ),
        "evidence and its gradient": evidence,
        "qLogEI at 10 starts, gradient": lambda: gradient(improvement, starts),
        f"128 paths at {len(pool):,} points": lambda: sample_paths(model, 128, seed=0)(pool),
    }
    if not isinstance(model, AutoGP):  # an exact model would grow
        found[f"update of {sizes.many:,}, posterior of 5"] = lambda: updated(*many)
    if isinstance(model, WISKI):
        reduction = FeatureNIPV(model, mc_points=wide)
        candidates = rows(24, d, device, seed=11)[0].unflatten(0, (4, 6))
        sites = rows(100 * sizes.many, d, device, seed=10)[0]
        found["FeatureNIPV at 4 x 6, gradient"] = lambda: gradient(reduction, candidates)
        found[f"10 of a pool of {len(sites):,}"] = lambda: select_from_pool(model, sites, 10, wide)
    return found


def steps(sizes: Sizes, device: torch.device) -> dict[str, Verb]:
    """Ten minibatch steps of each stochastic model."""
    X, Y = rows(max(sizes.rows, 4 * sizes.batch), 8, device)
    functions = QSGP(
        X, Y, basis=FourierFeatures(sizes.functions), batch_size=sizes.batch, update_steps=0,
        initial_points=0, freeze_steps=0,
    )  # fmt: skip
    decoupled = DecoupledGP(
        X, Y, num_mean=min(sizes.functions, len(X)), num_covar=min(256, len(X) // 4),
        batch_size=sizes.batch, update_steps=0, initial_points=0,
    )  # fmt: skip
    return {
        f"QSGP, {sizes.functions:,} functions": lambda: functions.fit(10, progress=False),
        "DecoupledGP": lambda: decoupled.fit(10, progress=False),
    }


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One verb as it was measured.

    Attributes:
        model: The model.
        verb: What it did.
        host, there: Seconds on the CPU and on the accelerator.
        operations: Number of tensor operations, views not counted.
        waits: How often the host waited for the accelerator.
        bytes, flops: What the operations read and write, and compute.
        least: Seconds that this takes on the accelerator at least.
    """

    model: str
    verb: str
    host: float
    there: float
    operations: int
    waits: int
    bytes: int
    flops: float
    least: float

    def cells(self) -> list[str]:
        """Write the row."""
        return [
            f"{self.model}: {self.verb}", f"{1e3 * self.host:,.2f}", f"{1e3 * self.there:,.2f}",
            f"{self.host / self.there:.3g}", str(self.operations), str(self.waits),
            f"{1e-6 * self.bytes:,.3g}", f"{1e-9 * self.flops:,.3g}", f"{1e3 * self.least:.3g}",
            f"{100 * self.least / self.there:.2g}",
        ]  # fmt: skip


HEADER = [
    "verb", "CPU, ms", "device, ms", "times faster", "operations", "waits", "MB", "Gflop",
    "roofline, ms", "share of it, %",
]  # fmt: skip


def measured(sizes: Sizes, device: torch.device, ceiling: Ceiling) -> Iterator[Row]:
    """Measure each verb on the CPU and on the device."""
    for name, (d, build) in models(sizes).items():
        host, there = build(HOST), build(device)
        title = f"{name}, rank {host.rank}" if isinstance(host, WISKI) else name
        on_host, on_device = verbs(host, d, sizes, HOST), verbs(there, d, sizes, device)
        for verb in on_host:
            yield compared(title, verb, on_host[verb], on_device[verb], device, ceiling)
    on_host, on_device = steps(sizes, HOST), steps(sizes, device)
    for model in on_host:
        yield compared(model, "10 steps", on_host[model], on_device[model], device, ceiling)


def compared(
    model: str, verb: str, host: Verb, there: Verb, device: torch.device, ceiling: Ceiling
) -> Row:
    """Measure one verb."""
    with torch.no_grad():
        on_host, on_device = median_seconds(host, HOST), median_seconds(there, device)
        with Work() as work:  # type: ignore[no-untyped-call]
            host()
        with waits(device) as waited:
            there()
    asked = work.operations, waited[0], work.bytes, work.flops
    row = Row(model, verb, on_host, on_device, *asked, ceiling.seconds(work))
    print(" | ".join(row.cells()), flush=True)
    return row


def main() -> None:
    """Measure, print the table, and write it."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    options = start(__doc__, values={"device": (default, "the accelerator: cuda, cpu, pretend")})
    if options.values["device"] == "pretend":
        pretend.install()
    device = torch.device(options.values["device"])
    warnings.simplefilter("ignore")
    sizes = options.pick(
        Sizes(3_000, 1_000, (10, 64), 512, 1_000, 10_000, 1_024),
        Sizes(60, 40, (6, 8), 12, 40, 64, 16),
    )
    ceiling = Ceiling.measured(device, options)
    print(f"A copy moves {ceiling.bytes / 1e9:,.0f} GB/s, a product {ceiling.flops / 1e9:,.0f}")
    found = list(measured(sizes, device, ceiling))
    print(table(HEADER, [row.cells() for row in found]), "\n")
    claims = [
        stated("bytes of a copy", ceiling.bytes / 1e9, "GB/s"),
        stated("a product of matrices", ceiling.flops / 1e9, "Gflop/s"),
    ]
    for row in found:
        name, times = f"{row.model}: {row.verb}", (1e3 * row.host, 1e3 * row.there)
        detail = "{:.3g} ms on the CPU, {:.3g} ms on the device".format(*times)
        claims.append(stated(name, row.host / row.there, "times faster", detail))
    accelerator = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    settings = {"device": accelerator, "sizes": str(sizes), "verbs": [asdict(row) for row in found]}
    finish("device", claims, options, settings)


if __name__ == "__main__":
    main()
