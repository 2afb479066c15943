# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Bayesian optimization with thousands of noisy observations
#
# Bayesian optimization is known for problems where a dozen evaluations are all one can afford. But
# where a measurement is cheap and noisy (a simulation with random numbers, an online experiment, a
# robot that tries again and again) it takes thousands of them to tell a good setting from a lucky
# one. An exact Gaussian process stands in the way: its cost grows with the cube of the number of
# observations.
#
# `bo_stream.WISKI` is a BoTorch model that keeps sums over a grid instead of the data. Taking an
# observation, learning hyperparameters and predicting cost the same after ten thousand observations
# as after a hundred. Here we optimise with it in three ways: a loop by hand with BoTorch's
# `optimize_acqf`; an `Optimizer` for results that come late, out of order or wrong; and Thompson
# sampling of a hundred points at a time.
#
# This runs in two to three minutes on two cores. With the environment variable `SMOKE_TEST` set
# it runs in seconds, at sizes too small to mean anything.

# %%
import os
import tempfile
import time
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from botorch.acquisition import qUpperConfidenceBound
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.test_functions import Branin
from gpytorch.mlls import ExactMarginalLogLikelihood
from linear_operator.utils.warnings import NumericalWarning
from torch.quasirandom import SobolEngine

from bo_stream import WISKI
from bo_stream.errors import UsageError
from bo_stream.loops.optimization import (
    OptimizationSettings,
    Optimizer,
    load_optimizer,
    save_optimizer,
)

SMOKE_TEST = bool(os.environ.get("SMOKE_TEST"))
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
plt.rcParams.update({"figure.dpi": 80, "figure.constrained_layout.use": True, "font.size": 9})
# joint samples at points that nearly coincide need a jitter, of which BoTorch tells every time
warnings.simplefilter("ignore", NumericalWarning)

# %% [markdown]
# ## 1. A function that one cannot see
#
# Branin's function has two inputs and three minima, all equally good: 0.398. A measurement has
# noise of standard deviation 20. The sign is turned, because BoTorch maximises; the model's inputs
# are the unit square.

# %%
function = Branin()
NOISE = 20.0
OPTIMUM = function.optimal_value
minima = (function.optimizers - function.bounds[0]) / (function.bounds[1] - function.bounds[0])
bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
generator = torch.Generator().manual_seed(0)


def truth(X):
    """Branin's function, without noise."""
    return function.evaluate_true(function.bounds[0] + X * function.bounds.diff(dim=0))


def measure(X):
    """What a measurement at X gives, for a model that maximises."""
    noise = NOISE * torch.randn(len(X), generator=generator)
    return -(truth(X) + noise).unsqueeze(-1)


axis = torch.linspace(0, 1, 101)
pixels = torch.cartesian_prod(axis, axis)


def contours(axes, values, title, **options):
    """Values at the pixels as filled contours, with the three minima."""
    shown = axes.contourf(axis, axis, values.reshape(101, 101).mT, 20, **options)
    plt.colorbar(shown, ax=axes, shrink=0.8)
    axes.plot(*minima.mT, "*", color="red", ms=9, mec="white", mew=0.5)
    axes.set(title=title, aspect="equal", xlabel="x0", ylabel="x1")


some = torch.rand(400, 2, generator=generator)
figure, axes = plt.subplots(1, 2, figsize=(10, 4))
contours(axes[0], truth(pixels), "the function, and its minima")
order = truth(some).argsort()
axes[1].plot(-measure(some)[order], ".", color="0.6", label="measured")
axes[1].plot(truth(some)[order], color="tab:blue", label="without noise")
axes[1].set(title="400 random points, sorted", xlabel="rank", ylabel="value")
axes[1].legend()
axes[1].grid(alpha=0.3)

# %% [markdown]
# The noise is larger than all that the best hundred points differ by. The lowest outcome says
# little; a model must average.
#
# ## 2. A loop by hand
#
# One step: find the points of the best upper confidence bound with BoTorch's `optimize_acqf`,
# measure, `update` the model, and now and then learn the hyperparameters with `fit_gpytorch_mll`.
# Nothing here is special to `WISKI` but `update`, which changes the model in place at a cost that
# does not depend on what it has seen. (`condition_on_observations` is for hypothetical data: it
# leaves the model as it is.)


# %%
def fit(model):
    """Learn the hyperparameters, from where they stand."""
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))


def choose(model, q=3, seed=0):
    """The q points of the best upper confidence bound, one after the other."""
    acquisition = qUpperConfidenceBound(
        model, beta=2.0, sampler=SobolQMCNormalSampler(torch.Size([64]), seed=seed)
    )
    points, _ = optimize_acqf(
        acquisition, bounds, q=q, num_restarts=4, raw_samples=128, sequential=True
    )
    return points


def best_of(model, X):
    """Of the points X the one of the largest posterior mean."""
    with torch.no_grad():
        return X[model.posterior(X.unsqueeze(-2)).mean.flatten().argmax()].unsqueeze(0)


X = SobolEngine(2, scramble=True, seed=0).draw(10, dtype=torch.float64)
Y = measure(X)
model = WISKI(X, Y, bounds=bounds)
fit(model)

fitted_at, regret, seconds = len(X), [], []
for step in range(3 if SMOKE_TEST else 60):
    start = time.perf_counter()
    picks = choose(model, seed=step)
    found = measure(picks)
    X, Y = torch.cat((X, picks)), torch.cat((Y, found))
    model.update(picks, found)
    if len(X) >= 1.3 * fitted_at:
        fit(model)
        fitted_at = len(X)
    seconds.append(time.perf_counter() - start)
    regret.append((truth(best_of(model, X)) - OPTIMUM).item())

noise = (model.noise_level().sqrt() * model.outcome_scale()).item()
print(f"{model.num_observations:.0f} observations in {sum(seconds):.0f} s")
print(f"regret {regret[-1]:.2f}, noise learned: {noise:.1f}; {model.rank} features")

# %%
with torch.no_grad():
    posterior = model.posterior(pixels)
figure, axes = plt.subplots(1, 3, figsize=(14, 3.8))
contours(axes[0], -posterior.mean, "posterior mean of the function")
contours(axes[1], posterior.variance.sqrt(), "its standard deviation", cmap="magma")
axes[1].plot(*X.mT, ".", color="white", ms=3)
lowest = torch.cummin(-Y.flatten(), 0)[1]
lucky = (truth(X[lowest]) - OPTIMUM)[12::3]
axes[2].plot(13 + 3 * np.arange(len(regret)), regret, label="best posterior mean")
axes[2].plot(13 + 3 * np.arange(len(lucky)), lucky, "--", color="0.6", label="lowest outcome")
axes[2].set(title="regret", xlabel="observations", yscale="log")
axes[2].legend()
axes[2].grid(alpha=0.3)

# %% [markdown]
# White dots are the points measured. Right: by how much the true value exceeds the optimum at the
# point of the best posterior mean, and at the point of the lowest outcome, which is the luckiest
# rather than the best.
#
# ## 3. What a step costs
#
# The same step, refit included, for `WISKI` and for BoTorch's `SingleTaskGP` with the same kernel,
# on more and more random observations. Each begins at hyperparameters that were learned from all
# but the last three observations.


# %%
def step_seconds(model, take):
    """One whole step: take three observations, learn, choose."""
    new_X = torch.rand(3, 2, generator=generator)
    new_Y = measure(new_X)
    start = time.perf_counter()
    model = take(model, new_X, new_Y)
    fit(model)
    choose(model)
    return time.perf_counter() - start


def rebuilt(model, new_X, new_Y):
    """An exact model of all data with the hyperparameters of the former one."""
    (old_X,), old_Y = (
        model.train_inputs,
        model.outcome_transform.untransform(model.train_targets.unsqueeze(-1))[0],
    )
    larger = SingleTaskGP(torch.cat((old_X, new_X)), torch.cat((old_Y, new_Y)))
    for name in ("covar_module", "mean_module", "likelihood"):
        getattr(larger, name).load_state_dict(getattr(model, name).state_dict())
    return larger


def streamed(model, new_X, new_Y):
    """The same model, updated."""
    return model.update(new_X, new_Y)


sizes = [40, 80] if SMOKE_TEST else [100, 200, 400, 800, 1600]
stream_sizes = sizes if SMOKE_TEST else [*sizes, 3200, 6400, 12800]
costs = {"WISKI": [], "SingleTaskGP": []}
for n in stream_sizes:
    many = torch.rand(n, 2, generator=generator)
    outcomes = measure(many)
    wiski = WISKI(many, outcomes, bounds=bounds)
    fit(wiski)
    if n in sizes:
        exact = SingleTaskGP(many, outcomes)
        for name in ("covar_module", "mean_module", "likelihood"):
            getattr(exact, name).load_state_dict(getattr(wiski, name).state_dict())
        costs["SingleTaskGP"].append(step_seconds(exact, rebuilt))
    costs["WISKI"].append(step_seconds(wiski, streamed))

figure, axes = plt.subplots(figsize=(6, 3.8))
axes.loglog(sizes, costs["SingleTaskGP"], "s--", color="tab:orange", label="SingleTaskGP")
axes.loglog(stream_sizes, costs["WISKI"], "o-", color="tab:blue", label="WISKI")
axes.set(title="one step: update, refit, choice", xlabel="observations", ylabel="seconds")
axes.legend()
axes.grid(alpha=0.3, which="both")

# %% [markdown]
# Up to a hundred observations or so the exact model costs no more, and it needs no grid. Its cost
# then grows, while that of `WISKI` does not. (It varies: an optimiser of the likelihood or of the
# acquisition function needs more iterations at one time than at another.)
#
# ## 4. Results that come late, out of order, or wrong
#
# In a laboratory one does not wait for every result. `Optimizer` keeps a ledger: `ask` gives trials
# with keys, in the units of your own bounds, and `tell` takes an outcome by its key whenever it
# comes. Points without an outcome count as pending, and others are chosen to be of use beside them.
# It maximises or minimises, as you say; so here no sign is turned.

# %%
settings = OptimizationSettings(
    bounds=((-5.0, 10.0), (0.0, 15.0)), q=4, kernel="rbf", acquisition="qLogEI", initial=8
)
optimizer = Optimizer(settings)


def laboratory(trial):
    """One noisy outcome of a trial, to be minimised."""
    value = function.evaluate_true(torch.tensor([trial.X]))
    return (value + NOISE * torch.randn(1, generator=generator)).item()


for trial in optimizer.ask(8):
    optimizer.tell(trial.key, laboratory(trial))

first, second = optimizer.ask(), optimizer.ask()  # eight points are out, none is back
for trial in reversed(second):
    optimizer.tell(trial.key, laboratory(trial))
print("pending:", [trial.key for trial in optimizer.pending])

optimizer.tell(first[0].key, laboratory(first[0]))  # late
optimizer.fail(first[1].key, "the sample was lost")
optimizer.tell(first[2].key, 999.0)  # a slip
try:
    optimizer.tell(first[2].key, 9.99)
except UsageError as error:
    print("refused:", error)
optimizer.amend(first[2].key, 9.99)  # corrected
optimizer.withdraw(second[0].key)  # the wrong machine was measured: out of the model again
print("pending:", [trial.key for trial in optimizer.pending])

best = optimizer.best()
print(f"trial {best.trial.key} is the best so far, its posterior mean {best.mean:.1f}")

# %% [markdown]
# The model follows the ledger by differences: an amended outcome is taken out of its sums and put
# in anew, which is exact. An optimizer that was saved goes on to the same points as one that was
# not.

# %%
with tempfile.TemporaryDirectory() as folder:
    save_optimizer(Path(folder), optimizer)
    again, _ = load_optimizer(Path(folder))
same = [trial.X for trial in again.ask()] == [trial.X for trial in optimizer.ask()]
print(f"the same next points: {same}")

# %% [markdown]
# ## 5. A hundred points at a time
#
# Where many can be measured in parallel, choosing them one after the other takes long. Thompson
# sampling draws a function from the posterior for each, and goes to where that function is best.
# `WISKI`'s posterior functions are exact everywhere at once, not only on a set of candidates, and
# can be maximised by their gradient.

# %%
BATCH, ROUNDS = (10, 2) if SMOKE_TEST else (100, 20)
sampler = Optimizer(
    OptimizationSettings(
        bounds=settings.bounds,
        q=BATCH,
        kernel="rbf",
        acquisition="TS",
        initial=BATCH,
        num_restarts=2,
    )
)
rounds, progress, seconds = [], [], []
for _ in range(ROUNDS):
    start = time.perf_counter()
    trials = sampler.ask()
    seconds.append(time.perf_counter() - start)
    for trial in trials:
        sampler.tell(trial.key, laboratory(trial))
    rounds.append(torch.tensor([trial.X for trial in trials]))
    best = torch.tensor([sampler.best().trial.X])
    progress.append((function.evaluate_true(best) - OPTIMUM).item())
print(f"{len(sampler.ledger):,} observations; the last {BATCH} were chosen in {seconds[-1]:.1f} s")
print(f"regret {progress[-1]:.3f}")

# %%
figure, axes = plt.subplots(1, 4, figsize=(15, 3.5))
moments = [0, ROUNDS // 4, ROUNDS - 1]
for panel, moment in zip(axes, moments, strict=False):
    panel.plot(*rounds[moment].mT, ".", ms=4)
    panel.plot(*function.optimizers.mT, "*", color="red", ms=9, mec="white", mew=0.5)
    panel.set(title=f"round {moment + 1}", xlim=(-5, 10), ylim=(0, 15), xlabel="x0", ylabel="x1")
axes[3].plot(BATCH * np.arange(1, ROUNDS + 1), progress, "o-", ms=3)
axes[3].set(title="regret at the best posterior mean", xlabel="observations", yscale="log")
axes[3].grid(alpha=0.3)

# %% [markdown]
# The first round is Sobol points. Later ones gather where the best point may lie, each place in
# proportion to how probable that is. The minimum in the middle is as good as the others, but the
# model came to think a little less of it, and Thompson sampling spends few measurements on what is
# probably not the best.
#
# ## When to use it
#
# - One to four inputs: the model lives on a grid. With more, project them or use another model.
# - From some hundreds of observations on. Below, `SingleTaskGP` is as fast or faster (in three
#   inputs more so than in two), and exact.
# - A function that varies over much less than a tenth of the box asks for a finer grid than the
#   default; the model then warns and names one that would do.
#
# The loop of section 4 is also a command, with worker processes, a checkpoint to go on from and a
# picture of its progress: `bo-stream optimize Branin --noise 20 --steps 300 --batch 3 --out run`.
