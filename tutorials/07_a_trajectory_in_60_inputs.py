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
# # A trajectory in 60 inputs, watched as it learns
#
# A rover shall drive from one corner of a field to the other, around what lies in its way. Its path
# is a smooth curve with thirty control points, and so it has sixty inputs. A simulator says what a
# path costs, and nothing else: no gradient, no map.
#
# Bayesian optimization is known for few inputs. In sixty no number of evaluations fills the box:
# each of its corners is far from all that was tried. What one can do is to search near the best
# path so far, in a *trust region*: a box about it that grows while the search succeeds and shrinks
# while it fails (TuRBO; Eriksson et al., 2019). A model of the evaluations nearby is all that this
# needs, so a step costs nearly the same after two thousand evaluations as after three hundred.
#
# Here the search runs first by `Optimizer`, then as a loop of some 25 lines, written with the
# parts that it is made of. This runs in two minutes on two cores. With the environment variable
# `SMOKE_TEST` set it runs in seconds, at sizes too small to mean anything.

# %%
import os
import time
import warnings

import matplotlib.pyplot as plt
import numpy as np
import torch
from botorch.exceptions.warnings import OptimizationWarning
from botorch.fit import fit_gpytorch_mll
from gpytorch.mlls import ExactMarginalLogLikelihood
from scipy.interpolate import BSpline
from torch.quasirandom import SobolEngine

from bo_stream import AutoGP, sample_paths
from bo_stream.loops.optimization import (
    OptimizationSettings,
    Optimizer,
    TrustRegion,
    maximize_paths,
    region_candidates,
)

SMOKE_TEST = bool(os.environ.get("SMOKE_TEST"))
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
plt.rcParams.update({"figure.dpi": 80, "figure.constrained_layout.use": True, "font.size": 9})
# a fit that is stopped early is meant here, and BoTorch tells of it every time
warnings.simplefilter("ignore", OptimizationWarning)

# %% [markdown]
# ## 1. The field
#
# The path is a cubic B-spline over the unit square, looked at in 500 places. It costs its length,
# and 21 times its length within an obstacle. An end that is not where it should be costs ten times
# its distance, in each direction. The kind of problem is that of Wang et al. (2018).

# %%
POINTS, D = 30, 60
START, GOAL = (0.05, 0.05), (0.95, 0.95)
ends = torch.tensor([START, GOAL])
random = np.random.default_rng(0)
discs, radii = random.uniform(0.1, 0.9, (15, 2)), random.uniform(0.04, 0.1, 15)
clear = (np.linalg.norm(discs[:, None] - ends.numpy(), axis=-1) > 0.15).all(1)
discs, radii = torch.tensor(discs[clear]), torch.tensor(radii[: clear.sum()])
knots = np.r_[[0.0] * 3, np.linspace(0.0, 1.0, POINTS - 2), [1.0] * 3]
spline = torch.tensor(BSpline.design_matrix(np.linspace(0.0, 1.0, 500), knots, 3).toarray())


def path(X):
    """Places on the paths of inputs, ``... x 60 -> ... x 500 x 2``."""
    return spline @ X.reshape(*X.shape[:-1], POINTS, 2)


def cost(X):
    """What the paths cost, ``... x 60 -> ...``."""
    places = path(X)
    lengths = places.diff(dim=-2).norm(dim=-1)
    middles = (places[..., 1:, :] + places[..., :-1, :]) / 2.0
    inside = (torch.cdist(middles, discs) < radii).any(-1)
    off = (places[..., [0, -1], :] - ends).abs().sum((-2, -1))
    return (lengths * (1.0 + 20.0 * inside)).sum(-1) + 10.0 * off


def draw_field(axes, title):
    """Obstacles, start and goal."""
    for centre, radius in zip(discs.tolist(), radii.tolist(), strict=True):
        axes.add_patch(plt.Circle(centre, radius, color="0.8"))
    axes.plot(*START, "o", color="black", ms=6)
    axes.plot(*GOAL, "*", color="black", ms=10)
    axes.set(title=title, xlim=(0, 1), ylim=(0, 1), aspect="equal", xticks=[], yticks=[])


straight = torch.linspace(0.05, 0.95, POINTS).repeat_interleave(2)
some = torch.rand(5, D)
figure, axes = plt.subplots(1, 2, figsize=(8, 4))
draw_field(axes[0], f"the straight line costs {cost(straight):.1f}")
axes[0].plot(*path(straight).T, color="tab:red")
draw_field(axes[1], f"five random paths cost {cost(some).min():.0f} to {cost(some).max():.0f}")
for one in path(some):
    axes[1].plot(*one.T, lw=0.9)

# %% [markdown]
# ## 2. Ask and tell
#
# In more than ten inputs `Optimizer` searches a region of its own accord; `search="region"` names
# it. It begins with the middle of the box, here a path that stays at one place, and with Sobol
# points, together twice as many as there are inputs. Then it proposes ten paths at a time.

# %%
BATCH, TOTAL = 10, 160 if SMOKE_TEST else 2_000
settings = OptimizationSettings(bounds=((0.0, 1.0),) * D, q=BATCH, search="region")
optimizer = Optimizer(settings)
paths, costs, seconds = torch.empty(0, D), torch.empty(0), []
while len(costs) < TOTAL:
    begin = time.perf_counter()
    trials = optimizer.ask()
    seconds.append(time.perf_counter() - begin)
    X = torch.tensor([trial.X for trial in trials])
    Y = cost(X)
    for trial, y in zip(trials, Y.tolist(), strict=True):
        optimizer.tell(trial.key, y)
    paths, costs = torch.cat((paths, X)), torch.cat((costs, Y))
print(f"the best of {len(costs):,} paths costs {costs.min():.2f}")
print(f"ten paths are chosen in {1e3 * np.median(seconds[-20:]):.0f} ms (median of the last 20)")

# %% [markdown]
# The best path so far, as it learns. Behind it are the last ten that were tried: they show how wide
# the search was then.

# %%
moments = [2 * D, 130, 140, 150, TOTAL] if SMOKE_TEST else [2 * D, 200, 500, 1_000, 2_000]


def draw_learning(paths, costs):
    """The best path, and the last ones that were tried, at some moments."""
    _, axes = plt.subplots(1, len(moments), figsize=(3 * len(moments), 3.3))
    for panel, n in zip(axes, moments, strict=True):
        best = costs[:n].argmin()
        draw_field(panel, f"after {n:,}: {costs[best]:.1f}")
        for one in path(paths[n - BATCH : n]):
            panel.plot(*one.T, color="tab:orange", lw=0.5, alpha=0.6)
        panel.plot(*path(paths[best]).T, color="tab:blue", lw=1.8)


draw_learning(paths, costs)

# %% [markdown]
# The ends come to where they should be, and obstacles are left behind. It all comes from costs:
# nobody told the search that the inputs are points of a curve. What stays is detours: to undo a
# loop many control points have to move at once, by way of paths that are worse.
#
# ## 3. The loop, written out
#
# What happens in a step? Five parts are public, and a loop of one's own can be made of them.
#
# - An exact model of the 300 evaluations nearest to the best one, and of the newest ten: here
#   `AutoGP`, but any model of the package will do.
# - `TrustRegion` is told whether the newest ten are better than all before. They are compared by
#   posterior means, so that noise is no success. Its `bounds` are a box about the best path, longer
#   in inputs of long lengthscales.
# - `region_candidates` draws candidates in the box: perturbations of the best path in few inputs,
#   and steps along differences of good paths.
# - `sample_paths(model, 10, at=candidates)` draws ten functions from the posterior, jointly at all
#   candidates. (Thompson sampling: each function gets one evaluation.)
# - `maximize_paths` climbs on each function from its best candidate, within the box.
#
# Costs are positive and span two orders of magnitude, so the model has their logarithms. It
# maximises, so they are negative. Hyperparameters are learned again every fifty evaluations, in a
# few steps from where they are.

# %%
BOX = torch.tensor([[0.0] * D, [1.0] * D])
generator = torch.Generator().manual_seed(0)
X = SobolEngine(D, scramble=True, seed=0).draw(2 * D, dtype=torch.float64)
Y = -cost(X).log().unsqueeze(-1)
model = AutoGP(X, Y, bounds=BOX, families="exact")
region = TrustRegion(dim=D, batch=BATCH)
sides, learned_at = [], 0
while len(X) < TOTAL:
    distances = (X - X[Y.argmax()]).norm(dim=-1)
    distances[-BATCH:] = 0.0  # the newest are always in
    rows = distances.argsort()[:300]
    model.clear()
    model.update(X[rows], Y[rows])
    if len(X) >= learned_at + 50:
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
        fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 10}})
        learned_at = len(X)
    with torch.no_grad():
        means = model.posterior(X[rows]).mean.flatten()
    newest = rows >= len(X) - BATCH
    region.update(means[newest], means[~newest])
    if region.has_collapsed:
        region.restart()
    sides.append(region.length)
    good = X[rows[means.argsort(descending=True)]]  # the best first
    bounds = region.bounds(model, good[0])
    candidates = region_candidates(good, bounds, 500, generator)
    functions = sample_paths(model, BATCH, at=candidates)
    with torch.no_grad():
        starts = candidates[functions(candidates).squeeze(-1).argmax(-1)]
    new = maximize_paths(functions, starts, bounds, iterations=20)
    X, Y = torch.cat((X, new)), torch.cat((Y, -cost(new).log().unsqueeze(-1)))
own = (-Y).exp().flatten()
print(f"the best of {len(own):,} paths costs {own.min():.2f}")

# %%
draw_learning(X, own)

# %% [markdown]
# How far each has come, with random paths beside them, and how long the region's sides were: a step
# up is three successes in sequence, a step down a number of failures.

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.6))
count = np.arange(1, TOTAL + 1)
by_chance = cost(torch.rand(TOTAL, D, generator=generator))
for values, name, style in (
    (costs, "Optimizer", {"color": "tab:blue"}),
    (own, "the loop written out", {"color": "tab:green"}),
    (by_chance, "random paths", {"color": "0.6", "ls": "--"}),
):
    axes[0].plot(count, values[:TOTAL].cummin(0).values, label=name, **style)
axes[0].axhline(1.27, color="0.5", lw=1, ls=":")
axes[0].set(title="cost of the best path (dotted: were there no obstacles)", yscale="log")
axes[0].set(xlabel="evaluations")
axes[0].legend()
axes[1].step(2 * D + BATCH * np.arange(len(sides)), sides, color="tab:green", where="post")
axes[1].set(title="mean side of the loop's region", xlabel="evaluations", yscale="log")
axes[1].minorticks_off()
axes[1].set_yticks([0.1, 0.2, 0.4, 0.8, 1.6], ["0.1", "0.2", "0.4", "0.8", "1.6"])
for panel in axes:
    panel.grid(alpha=0.3)

# %% [markdown]
# Both go down into one basin after another, and which one they come to is a matter of the first
# points: another seed goes around the other side of an obstacle. `Optimizer` ended at 2.7 with
# `seed=1` and at 3.6 with `seed=2`. One run of each says nothing of which of the two is better, and
# where evaluations are cheap, several seeds are worth their price.
#
# What `Optimizer` does beyond the loop: it takes outcomes late, out of order, amended or failed, is
# saved and goes on to the same points; it finds a scale for outcomes of any sign; some points leave
# the region by leaps, along inputs that promise most; and when a region has collapsed it begins
# again, wide, or elsewhere.
#
# ## When to use it
#
# - From some eleven inputs on, to a hundred, where hundreds to thousands of evaluations can be had.
#   In four to ten the default searches the whole box first, and then a region.
# - For one outcome without constraints.
# - As a command: `bo-stream optimize mine:cost --bounds '...' -q 10 --steps 200 --workers 4`.
# - Its cost, its regret and its peers are on the page
#   [I have four to a hundred inputs](../docs/choosing/many-inputs.md).
