"""The families of models and the operations whose costs ``cost_model.py`` measures and fits."""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from botorch.models.model import Model
from botorch.optim.closures import get_loss_closure_with_grads
from botorch.optim.fit import fit_gpytorch_mll_scipy
from botorch.sampling.normal import SobolQMCNormalSampler
from gpytorch.kernels import AdditiveKernel, Kernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood, VariationalELBO
from torch import Tensor

from benchmarks.common.harness import tensor_bytes
from bo_stream import (
    OSGPR,
    OSVGP,
    QSGP,
    WISKI,
    AutoGP,
    BinomialLikelihood,
    ClusteredGP,
    DecoupledGP,
    DirichletWISKI,
    LocalGP,
    ProductMatern,
)
from bo_stream.costs import problem_of
from bo_stream.costs import speeds as probed

OPERATIONS = ("update", "refit", "posterior", "fantasy")
RESTARTS, SAMPLES, TESTED = 10, 16, 20
MOST_UPDATES, LONGEST = 65, 0.5
"""Updates in a row: as many as fill a model's inducing points anew, and seconds."""

STOCHASTIC = ("DecoupledGP", "QSGP")
COUNTS = ("exact, counts", "WISKI, counts", "WISKI, sum, counts", "OSVGP, counts")
"""Families of models of counts."""
EXAMINED = 20.0
"""People of each row of counts."""

Clock = Callable[[], float]
Objective = VariationalELBO | ExactMarginalLogLikelihood
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        family: A key of ``FAMILIES``.
        n: Observations in the model.
        d: Inputs.
        q: Points of an update, of a fantasy, and of each of the ten batches of a posterior.
        m: Outputs.
        lengthscale: Over √d, of a sum over √group; None: a fit finds it.
        rough: Whether the kernel is Matérn-5/2 and not squared-exponential.
        function: What is observed, by its key in ``FUNCTIONS``.
        noise: Standard deviation, in parts of the function's.
        group: Inputs of each part of a kernel that is a sum.
    """

    family: str
    n: int
    d: int
    q: int = 1
    m: int = 1
    lengthscale: float | None = 0.3
    rough: bool = False
    function: str = "waves"
    noise: float = 0.1
    group: int = 1


def waves(X: Tensor) -> Tensor:
    """A smooth function that varies along every input."""
    rates = 2.0 + torch.arange(X.shape[-1]) % 3
    return (rates * X + rates).sin().sum(-1) + (3.0 * X.mean(-1)).cos()


def valley(X: Tensor) -> Tensor:
    """Rosenbrock's function in logarithms: a long bent valley."""
    Z = 4.0 * X - 2.0
    steps = 100.0 * (Z[..., 1:] - Z[..., :-1].square()).square() + (1.0 - Z[..., :-1]).square()
    return (1.0 + steps.sum(-1)).log() if X.shape[-1] > 1 else (1.0 + Z.square().sum(-1)).log()


def funnel(X: Tensor) -> Tensor:
    """Ackley's funnel without its ripples."""
    return -(-2.0 * (X - 0.4).square().mean(-1).sqrt()).exp()


FUNCTIONS: dict[str, Function] = {"waves": waves, "valley": valley, "funnel": funnel}


@dataclass(frozen=True)
class Rows:
    """Draws rows of a setting: inputs in the unit cube and noisy outcomes."""

    setting: Setting

    def draw(self, n: int, seed: int) -> tuple[Tensor, Tensor]:
        """Draw n inputs, ``n x d``, and outcomes, ``n x m``."""
        generator = torch.Generator().manual_seed(seed)
        X = torch.rand(n, self.setting.d, generator=generator)
        columns = [FUNCTIONS[self.setting.function](X.roll(i, -1)) for i in range(self.setting.m)]
        if self.setting.family == "DirichletWISKI":
            return X, self._classes(columns[0], generator)
        if self.setting.family in COUNTS:
            return X, self._counts(columns[0], generator)
        Y = torch.stack(columns, -1)
        Y = (Y - Y.mean(0)) / Y.std(0) if n > 1 else Y
        Y = Y + self.setting.noise * torch.randn(Y.shape, generator=generator)
        return X, (Y > 0.0).double() if self.setting.family == "OSVGP" else Y

    def _counts(self, scores: Tensor, generator: torch.Generator) -> Tensor:
        """Draw positives of so many examined, ``n x 2``."""
        scores = (scores - scores.mean()) / scores.std() if len(scores) > 1 else scores
        examined = torch.full_like(scores, EXAMINED)
        positives = torch.binomial(examined, scores.sigmoid(), generator=generator)
        return torch.stack((positives, examined), -1)

    def _classes(self, scores: Tensor, generator: torch.Generator) -> Tensor:
        """Cut the function's range into as many classes as there are outputs, at least two."""
        noisy = scores / scores.std() + 0.2 * torch.randn(scores.shape, generator=generator)
        count = max(2, self.setting.m)
        return (noisy[:, None] > torch.linspace(-1.0, 1.0, count + 1)[1:-1]).sum(-1).double()


def kernel_of(setting: Setting, scaled: bool = False) -> Kernel | None:
    """Make the kernel of a setting, one for each output; None for a model's own default."""
    if "sum" in setting.family:
        return _sum_of_kernels(setting)
    if setting.lengthscale is None:
        return None
    rough = ProductMatern if "WISKI" in setting.family else MaternKernel
    kind = rough if setting.rough else RBFKernel
    shape = torch.Size([setting.m] if setting.m > 1 and not scaled else [])
    kernel = kind(ard_num_dims=setting.d, batch_shape=shape)
    kernel.lengthscale = setting.lengthscale * setting.d**0.5
    return ScaleKernel(kernel) if scaled else kernel


def _sum_of_kernels(setting: Setting) -> Kernel:
    """One kernel of each input, or of each group of so many."""
    parts = []
    for i in range(0, setting.d, setting.group):
        part = RBFKernel(active_dims=tuple(range(i, i + setting.group)))
        part.lengthscale = (setting.lengthscale or 0.3) * setting.group**0.5
        parts.append(ScaleKernel(part))
    return AdditiveKernel(*parts)


def _unit_cube(d: int) -> Tensor:
    return torch.tensor([[0.0] * d, [1.0] * d])


def _grid_of_counts(setting: Setting, X: Tensor, Y: Tensor) -> WISKI:
    kernel, bounds = kernel_of(setting, True), _unit_cube(setting.d)
    return WISKI(X, Y, None, BinomialLikelihood(), kernel, bounds=bounds)


Build = Callable[[Setting, Tensor, Tensor], Model]

FAMILIES: dict[str, Build] = {
    "exact": lambda s, X, Y: AutoGP(X, Y, covar_module=kernel_of(s), families="exact"),
    "WISKI": lambda s, X, Y: WISKI(X, Y, covar_module=kernel_of(s), bounds=_unit_cube(s.d)),
    "WISKI, sum": lambda s, X, Y: WISKI(X, Y, covar_module=kernel_of(s), bounds=_unit_cube(s.d)),
    "OSGPR": lambda s, X, Y: OSGPR(X, Y, covar_module=kernel_of(s)),
    "OSVGP": lambda s, X, Y: OSVGP(X, Y, BernoulliLikelihood(), covar_module=kernel_of(s, True)),
    "exact, counts": lambda s, X, Y: AutoGP(
        X, Y, None, BinomialLikelihood(), kernel_of(s, True), families="exact"
    ),
    "WISKI, counts": _grid_of_counts,
    "WISKI, sum, counts": _grid_of_counts,
    "OSVGP, counts": lambda s, X, Y: OSVGP(
        X, Y, BinomialLikelihood(), covar_module=kernel_of(s, True)
    ),
    "DirichletWISKI": lambda s, X, Y: DirichletWISKI(
        X, Y, covar_module=kernel_of(s, True), bounds=_unit_cube(s.d)
    ),
    "ClusteredGP": lambda s, X, Y: ClusteredGP(X, Y, covar_module=kernel_of(s)),
    "LocalGP": lambda s, X, Y: LocalGP(X, Y, covar_module=kernel_of(s)),
    "DecoupledGP": lambda s, X, Y: DecoupledGP(
        X, Y, covar_module=kernel_of(s, True), initial_points=0
    ),
    "QSGP": lambda s, X, Y: QSGP(X, Y, covar_module=kernel_of(s, True), initial_points=0),
}


@dataclass(frozen=True)
class Measured:
    """Seconds of each operation, bytes held, and sizes found, in one setting.

    Attributes:
        speeds: Seconds of the probes of ``bo_stream.costs`` just before and
            just after, in the mean: on a machine that others use, too, they say how much it slowed.
        lengthscale: Geometric mean of the kernel's, where a fit found them.
    """

    setting: Setting
    seconds: dict[str, float]
    bytes: int
    sizes: dict[str, float]
    speeds: dict[str, float]
    lengthscale: float | None = None


def built(setting: Setting) -> Model:
    """Build the model of a setting, at given hyperparameters or those that a fit finds.

    After a fit there is an update, as in a loop: what the fit alone needs is dropped.
    """
    X, Y = Rows(setting).draw(setting.n, 0)
    fits = setting.lengthscale is None and setting.family not in STOCHASTIC
    first = setting.n - 1 if fits else setting.n
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FAMILIES[setting.family](setting, X[:first], Y[:first])
        for parameter in _noises(model):
            model.likelihood.noise = torch.full_like(parameter, max(setting.noise, 0.02) ** 2)
        if fits:
            _fit(model, setting)
            model.update(X[first:], Y[first:])
        if setting.family in STOCHASTIC:
            model.fit(steps=20, progress=False)
    return model.eval()


def _noises(model: Model) -> list[Tensor]:
    likelihood = model.likelihood
    learned = any("raw_noise" in name for name, _ in likelihood.named_parameters())
    return [likelihood.noise] if learned else []


def measured(setting: Setting, clock: Clock = time.process_time, repeats: int = 3) -> Measured:
    """Measure a setting: of each operation the fastest of some repeats."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = built(setting)
        _ = model.posterior(torch.rand(1, setting.d)).variance
        held = tensor_bytes(model)
        operations: dict[str, Callable[[], Callable[[], float]]] = {
            "update": lambda: _updating(model, setting, clock),
            "refit": lambda: _refitting(model, setting, clock),
            "posterior": lambda: _predicting(model, setting, clock),
            "fantasy": lambda: _fantasizing(model, setting, clock),
        }
        before = probed.__wrapped__(0, clock)
        seconds = {name: _fastest(prepare(), repeats) for name, prepare in operations.items()}
        after = probed.__wrapped__(0, clock)  # again, though they were timed before
    speeds = {kind: (before[kind] + after[kind]) / 2.0 for kind in before}
    learned = problem_of(1, setting.d, 1, 1, None, None, False, True, None, model.covar_module)
    lengthscale = learned.lengthscale if setting.lengthscale is None else None
    return Measured(setting, seconds, held, sizes_of(model), speeds, lengthscale)


def _fastest(run: Callable[[], float], repeats: int, longest: float = 2.0) -> float:
    """The least of some runs, fewer where they take long."""
    found, begin = [run()], time.perf_counter()
    while len(found) < repeats and time.perf_counter() - begin < longest:
        found.append(run())
    return min(found)


def _timed(task: Callable[[], object], clock: Clock, least: float = 0.05) -> float:
    """Seconds of one call, the mean of as many as take long enough to be timed."""
    calls, begin = 0, clock()
    while True:
        task()
        calls += 1
        elapsed = clock() - begin
        if (elapsed > least and calls >= 3) or elapsed > 2.0:
            return elapsed / calls


def _updating(model: Model, setting: Setting, clock: Clock) -> Callable[[], float]:
    """An update of q points, and the posterior of one point after it."""
    q, at = setting.q, torch.rand(1, setting.d)
    drawn = (Rows(setting).draw(max(2, q), 100 + i) for i in range(MOST_UPDATES))
    batches = [(X[:q], Y[:q]) for X, Y in drawn]

    def run() -> float:
        now, begin = copy.deepcopy(model), clock()
        for taken, (X, Y) in enumerate(batches):
            if taken == 1:  # the first one is not timed
                begin = clock()
            now.update(X, Y)
            with torch.no_grad():
                _ = now.posterior(at).variance
            if taken >= 6 and clock() - begin > LONGEST:
                break
        return (clock() - begin) / taken

    return run


def _refitting(model: Model, setting: Setting, clock: Clock) -> Callable[[], float]:
    """One evaluation of the objective of a fit with its gradient, or one step of learning."""

    def run() -> float:
        now = copy.deepcopy(model)
        if setting.family in STOCHASTIC:
            now.fit(steps=3, progress=False)
            return _timed(lambda: now.fit(steps=5, progress=False), clock) / 5
        return _evaluating(now, setting, clock)

    return run


def _objective(model: Model, setting: Setting) -> tuple[Objective, dict[str, Tensor]]:
    """The objective of a fit, in training mode, and the parameters that it learns."""
    if setting.family in ("OSVGP", *COUNTS):
        mll = VariationalELBO(model.likelihood, model, setting.n)
    else:
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
    mll.train()
    return mll, {name: p for name, p in mll.named_parameters() if p.requires_grad}


def _fit(model: Model, setting: Setting, most: int = 60) -> None:
    """Find hyperparameters, from ones that are a little off."""
    mll, parameters = _objective(model, setting)
    _move(parameters, 0.2)
    fit_gpytorch_mll_scipy(mll, parameters=parameters, options={"maxiter": most})
    mll.eval()


def _evaluating(model: Model, setting: Setting, clock: Clock, evaluations: int = 9) -> float:
    """Median seconds of an evaluation at the model's hyperparameters, which move a little."""
    mll, parameters = _objective(model, setting)
    closure = get_loss_closure_with_grads(mll, parameters)
    closure()
    found = []
    for step in range(evaluations):
        _move(parameters, 0.01 * (-1.0) ** step)
        begin = clock()
        closure()
        found.append(clock() - begin)
    return statistics.median(found)


@torch.no_grad()
def _move(parameters: dict[str, Tensor], by: float) -> None:
    for parameter in parameters.values():
        parameter += by


def _predicting(model: Model, setting: Setting, clock: Clock) -> Callable[[], float]:
    """Mean and variance with their gradient at ten batches of q points."""
    X = torch.rand(RESTARTS, setting.q, setting.d)

    def ask() -> None:
        at = X.clone().requires_grad_()
        posterior = model.posterior(at)
        torch.autograd.grad(posterior.mean.sum() + posterior.variance.sum(), at)

    ask()
    return lambda: _timed(ask, clock)


def _fantasizing(model: Model, setting: Setting, clock: Clock) -> Callable[[], float]:
    """Sixteen fantasies of q points, and their mean and variance at twenty points."""
    X, test_X = torch.rand(setting.q, setting.d), torch.rand(TESTED, setting.d)
    sampler = SobolQMCNormalSampler(torch.Size([SAMPLES]), seed=0)

    @torch.no_grad()
    def ask() -> None:
        posterior = model.fantasize(X, sampler).posterior(test_X)
        _ = posterior.mean, posterior.variance

    ask()
    return lambda: _timed(ask, clock)


def sizes_of(model: Model) -> dict[str, float]:
    """Say how many features, centres or local models there are."""
    found: dict[str, float] = {}
    for symbol, name in {"r": "rank", "C": "num_models"}.items():
        if (value := getattr(model, name, None)) is not None:
            found[symbol] = float(torch.as_tensor(value).double().max())
    for name in ("inducing_points", "centres"):
        if (points := getattr(model, name, None)) is not None and "C" not in found:
            found["M"] = float(points.shape[-2])
    return found
