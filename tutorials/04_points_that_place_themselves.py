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
# # Inducing points that place themselves, and what stability buys
#
# A float drifts through a bay and measures the temperature of the water every few minutes. Nobody
# knows where it will go. We want a map of all that it has seen, at any time, at a cost that does
# not grow with the number of readings.
#
# A grid would have to cover waters that the float may never reach, and with six inputs instead of
# two there is no grid at all. `bo_stream.OSGPR` keeps what it has learned at *inducing points*: a
# few places at which the readings so far are summed up (Bui, Nguyen and Turner, 2017). The question
# is where to put them. Here they place themselves.
#
# This runs in about two minutes on two cores. With the environment variable `SMOKE_TEST` set it
# runs in seconds, at sizes too small to mean anything.

# %%
import os
import time
import warnings
from copy import deepcopy

import matplotlib.pyplot as plt
import numpy as np
import torch
from botorch.acquisition.logei import qLogExpectedImprovement
from botorch.exceptions.errors import UnsupportedError
from botorch.fit import fit_gpytorch_mll
from botorch.optim import optimize_acqf
from botorch.test_functions import Hartmann
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from scipy.interpolate import CubicSpline
from torch.quasirandom import SobolEngine

from bo_stream import OSGPR, WISKI, ClusteredGP, CoarsePointsWarning, select_from_pool
from bo_stream.allocation import OIPS, CoverTree, KMeans
from bo_stream.diagnostics import stability

SMOKE_TEST = bool(os.environ.get("SMOKE_TEST"))
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
plt.rcParams.update({"figure.dpi": 80, "figure.constrained_layout.use": True, "font.size": 9})

# %% [markdown]
# ## 1. The float
#
# It is simulated. It drifts about its home bay in the west, is carried through the strait into the
# basin in the east, and after two thirds of its time it comes back the way it went. A reading
# has an error of 0.2 degrees. The temperature is that above or below the bay's average.

# %%
N, BATCH = (600, 50) if SMOKE_TEST else (6_000, 50)
NOISE = 0.2
STATIONS = np.array(
    [(2, 2), (3.5, 4), (2, 6), (4.5, 6.5), (8, 5), (11, 4), (14, 5.5), (15.5, 8),
     (13, 9), (15, 6), (13, 4.6), (9, 4.8), (5, 6.3), (3, 4.5), (2.2, 2.5)]
)  # fmt: skip


def drift(n):
    """Where the float is at n moments, ``n x 2``, in km: a course, and eddies about it."""
    random = np.random.default_rng(3)
    moments = np.linspace(0.0, 1.0, n)
    course = CubicSpline(np.linspace(0.0, 1.0, len(STATIONS)), STATIONS)(moments)
    size, pace = random.normal(size=(40, 1, 2)), random.uniform(60, 400, (40, 1, 1))
    eddies = size * np.sin(pace * moments[:, None])
    return torch.from_numpy(course + 0.12 * eddies.sum(0))


WAVES = np.random.default_rng(1).normal(size=(200, 4))


def temperature(X):
    """Of the water, ``n x 2 -> n x 1``, in degrees from the bay's average."""
    phase = X @ torch.from_numpy(WAVES[:, :2].T / 1.6) + torch.from_numpy(2.0 * np.pi * WAVES[:, 2])
    return 0.12 * (phase.cos() @ torch.from_numpy(WAVES[:, 3:]))


X = drift(N)
Y = temperature(X) + NOISE * torch.randn(N, 1)
TURN = 2 * N // 3  # from here on it comes back

east, north = torch.linspace(-1, 18, 115), torch.linspace(0, 11, 67)
pixels = torch.cartesian_prod(north, east).flip(-1)
LIMITS = (-3.0, 3.0)


def draw(axes, values, title, opacity=1.0, **options):
    """Values at the pixels as a map."""
    shown = axes.imshow(
        values.reshape(len(north), len(east)), extent=(-1, 18, 0, 11), origin="lower",
        alpha=np.reshape(opacity, (len(north), len(east))) if np.ndim(opacity) else opacity,
        **{"vmin": LIMITS[0], "vmax": LIMITS[1], "cmap": "RdYlBu_r", **options},
    )  # fmt: skip
    axes.set(title=title, xlabel="km east", ylabel="km north", xlim=(-1, 18), ylim=(0, 11))
    axes.label_outer()
    return shown


figure, axes = plt.subplots(figsize=(8, 4.4))
plt.colorbar(draw(axes, temperature(pixels), f"the bay, and {N:,} readings"), label="degrees")
for name, part, colour in (("out", X[:TURN], "black"), ("back", X[TURN:], "white")):
    axes.plot(*part.T, color=colour, lw=0.9, label=name)
axes.plot(*X[0], "o", color="black", ms=6)
_ = axes.legend(loc="lower right", facecolor="0.75")

# %% [markdown]
# ## 2. Points where they are needed
#
# `OSGPR` asks an *allocator* where its points should be, at every update. By default every reading
# that the others do not determine becomes a point, and more than 512 are thinned. Here we want few,
# and see where they go: `OIPS(0.9)` (Galy-Fajou and Opper, 2021) is a rule of one line. A reading
# whose place has a correlation of less than 0.9 with every inducing point becomes one itself. What
# the kernel holds for alike needs no second point; what is new gets one.
#
# Readings come in batches of 50. The hyperparameters are learned anew whenever there are twice as
# many as the last time, though all but the 512 latest readings are gone by then.

# %%
FIRST = 100 if SMOKE_TEST else 300
MOMENTS = [N // 4, N // 2, N]


def kernel():
    """With a lengthscale of 1 km to begin with."""
    radial = RBFKernel()
    radial.lengthscale = 1.0
    return ScaleKernel(radial)


def learn(model):
    """Hyperparameters, from what the model remembers."""
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))


@torch.no_grad()
def error(model, n=N):
    """RMSE on the way of the first n readings, against the truth."""
    way = X[:n:10]
    return (model.posterior(way).mean - temperature(way)).square().mean().sqrt().item()


def voyage(model, first=0, learns=False):
    """The stream: readings, points, error and seconds of each batch, and the model at times."""
    log, stages, learned_at = [], {}, first
    for rows in torch.arange(first, N).split(BATCH):
        start = time.perf_counter()
        model.update(X[rows], Y[rows])
        seconds = time.perf_counter() - start
        n = int(rows[-1]) + 1
        if learns and n >= 2 * learned_at:
            learn(model)
            learned_at = n
        log.append((n, len(model.inducing_points), error(model, n), seconds))
        if n in MOMENTS:
            stages[n] = deepcopy(model)
    return np.array(log), stages


model = OSGPR(
    X[:FIRST], Y[:FIRST], covar_module=kernel(), outcome_transform=None, allocator=OIPS(0.9)
)
learn(model)
log, stages = voyage(model, FIRST, learns=True)

lengthscale = model.covar_module.base_kernel.lengthscale.item()
noise = model.noise_level().sqrt().item()
print(f"learned: lengthscale {lengthscale:.2f} km, a reading's error {noise:.2f} degrees")
print(f"an update of {BATCH} readings took {1e3 * np.median(log[:, 3]):.1f} ms")

# %% [markdown]
# The customary way is to choose the points once: k-means of the readings at hand when the model is
# made. For comparison, a model with as many points as OIPS has in the end, and from the start with
# the hyperparameters that were learned above.


# %%
def informed(**options):
    """A model without readings that has the hyperparameters learned above."""
    modules = ("covar_module", "mean_module", "likelihood")
    taken = {name: deepcopy(getattr(model, name)) for name in modules}
    return OSGPR(X[:0], Y[:0], outcome_transform=None, **taken, **options).eval()


means = KMeans(len(model.inducing_points)).update(X[:0], X[:FIRST], model.covar_module)
fixed = informed(inducing_points=means)
fixed_log, fixed_stages = voyage(fixed)
for name, way in (("OIPS", log), ("fixed", fixed_log)):
    print(f"{name:5}: {way[-1, 1]:.0f} points, error on the way {way[-1, 2]:.3f} degrees")


def draw_known(axes, model, title):
    """A model's mean, faded where it knows no more than at first, and its points."""
    with torch.no_grad():
        posterior = model.posterior(pixels)
        prior = informed().posterior(pixels[:1]).variance.sqrt().item()
    known = (1.0 - posterior.variance.sqrt() / prior).clamp(0, 1)
    draw(axes, posterior.mean, title, known)
    axes.plot(*model.inducing_points.T, "o", ms=3.5, mfc="white", mec="black", mew=0.7)


# %%
figure, axes = plt.subplots(2, 3, figsize=(12.5, 5.4), sharex=True, sharey=True)
for row, name, models in zip(axes, ("OIPS", "fixed"), (stages, fixed_stages), strict=True):
    for panel, (n, stage) in zip(row, models.items(), strict=True):
        panel.plot(*X[:n].T, color="0.5", lw=0.4)
        draw_known(panel, stage, f"{name}: {n:,} readings, {len(stage.inducing_points)} points")

# %% [markdown]
# Colour fades where the model does not know. The points of OIPS follow the float, as far apart as
# the learned lengthscale allows. The fixed points crowd where the voyage began, and what was
# measured elsewhere has no place to be kept.

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.6))
for history, name, style in ((log, "OIPS", "-"), (fixed_log, "fixed", "--")):
    axes[0].plot(history[:, 0], history[:, 1], style, label=name)
    axes[1].plot(history[:, 0], history[:, 2], style, label=name)
axes[0].set(title="inducing points", xlabel="readings", ylim=(0, None))
axes[1].set(title="error on the way so far", xlabel="readings", ylabel="degrees", ylim=(0, None))
for panel in axes:
    panel.axvspan(TURN, N, color="0.92", label="on the way back", zorder=0)
    panel.grid(alpha=0.3)
_ = axes[0].legend(loc="lower right")

# %% [markdown]
# On the way back a third of all readings come in, but only a tenth of the points, where the float
# passes beside its old course: the number of points grows with the region, not with the readings.
# (At the very start the lengthscale is not known well. When it is learned anew, points that have
# become too much alike are dropped.)
#
# ## 3. A cap, and what goes
#
# Memory and time grow with the square of the number of points, so there may be a limit:
# `max_points`, 512 unless said otherwise. Once it is reached a new point can only enter in place of
# another: of the one that the others explain best, and only if the new one is explained less than
# half as well. So what goes is what is nearly known from its neighbours, and an outlier costs one
# point, not the map. A model whose points leave out more than the noise says so
# (`CoarsePointsWarning`). Here that is what we want to see, and the warning is switched off.

# %%
caps = [10, 15] if SMOKE_TEST else [15, 30, 45]
capped = {f"at most {cap}": informed(allocator=OIPS(0.9), max_points=cap) for cap in caps}
capped["no cap"] = informed(allocator=OIPS(0.9))

figure, axes = plt.subplots(1, len(capped), figsize=(4 * len(capped), 2.7), sharey=True)
for panel, (name, other) in zip(axes, capped.items(), strict=True):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CoarsePointsWarning)
        voyage(other)
    points = f"{len(other.inducing_points)} points"
    draw_known(panel, other, f"{name}: {points}, error {error(other):.2f} degrees")

# %% [markdown]
# With too few points the map is coarse, but it is a map of the whole voyage. (Without a cap there
# are more points than above, and the map is better, for these models knew the lengthscale from the
# start.)
#
# ## 4. What stability buys
#
# Whatever the points are, the model factorises the matrix of their covariances. Two points close to
# each other have nearly equal rows in it, and a computer that rounds to 16 digits (or 7, in
# float32) cannot tell whether it is a covariance matrix at all. The usual remedy is *jitter*: a
# little noise that nobody measured, added until it works.
#
# A careless choice first: every twentieth reading. `stability` says what is sure of the matrix,
# before readings are taken in, and `numerical_log` what a model had to do. (`stability_of_points`
# needs no model, only a kernel and the points.)

# %%
careless = informed(inducing_points=X[::20])
print(stability(careless, X))
careless.update(X, Y)
print()
print("had to do:", *careless.numerical_log or ["nothing"], sep="\n  ")

# %% [markdown]
# A cover tree (Terenin et al., 2024) gives points with two promises: every reading has a point no
# farther than the resolution, and no two points are nearer to each other than that. ("Its bound"
# below is what follows from the separation alone, for the worst arrangement that there could be;
# for a kernel as smooth as ours that is very far from the truth.)

# %%
tree = CoverTree(0.6).insert(X)
careful = informed(inducing_points=tree.centres)
print(stability(careful, X))
careful.update(X, Y)
print()
print("had to do:", *careful.numerical_log or ["nothing"], sep="\n  ")
print(f"errors: careless {error(careless):.3f}, careful {error(careful):.3f} degrees")

figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), sharex=True, sharey=True)
for panel, points, name in zip(
    axes, (X[::20], tree.centres), ("every twentieth reading", "cover tree"), strict=True
):
    panel.plot(*X.T, color="0.75", lw=0.5)
    panel.plot(*points.T, "o", ms=3.5, mfc="white", mec="black", mew=0.7)
    panel.set(title=f"{name}: {len(points)} points", aspect="equal", xlabel="km east")
_ = axes[0].set_ylabel("km north")

# %% [markdown]
# Three times as many points have made the map no better, only dearer and unsafe: they lie where
# others lie already.
#
# Where more detail is wanted points must be close, and then no choice of them helps.
# `ClusteredGP` does: readings are moved to their nearest centre of a cover tree, where they count
# together as one with less noise. What it factorises is the identity plus something positive, whose
# size is set by how much was measured and how well, and not by how close the centres are.
#
# For the same centres at finer and finer resolutions: what sparse regression needs in float64,
# whether its matrix can be factorised in float32 at all, and what `ClusteredGP` makes of the
# readings in float32.

# %%
resolutions = [1.0, 0.7] if SMOKE_TEST else [1.4, 1.0, 0.7, 0.5, 0.35, 0.25, 0.18]
sizes, clustered_conditions, sparse_conditions = [], [], []
print("        km  centres |  OSGPR: jitter  error  float32 | ClusteredGP, float32: error  log")
for resolution in resolutions:
    clustered = ClusteredGP(
        X[:0], Y[:0], covar_module=deepcopy(model.covar_module),
        mean_module=deepcopy(model.mean_module), likelihood=deepcopy(model.likelihood),
        outcome_transform=None, resolution=resolution, arithmetic=torch.float32,
    )  # fmt: skip
    clustered.eval().update(X, Y)
    Z = clustered.centres
    sparse = informed(inducing_points=Z, max_points=len(Z)).update(X, Y)
    jitter = max((event.jitter for event in sparse.numerical_log), default=0.0)
    with torch.no_grad():
        fails = torch.linalg.cholesky_ex(model.covar_module(Z).to_dense().float()).info > 0
    print(
        f"{resolution:10} {len(Z):8} | {jitter:14.0e} {error(sparse):6.3f} "
        f"{'fails' if fails else 'works':>8} | {error(clustered):27.3f}  "
        f"{'; '.join(map(str, clustered.numerical_log)) or 'empty'}"
    )
    sizes.append(len(Z))
    clustered_conditions.append(stability(clustered))
    sparse_conditions.append(stability(sparse))

# %%
figure, axes = plt.subplots(figsize=(7, 4.2))
for verdicts, name, style in (
    (sparse_conditions, "OSGPR: the points' covariance", "s--"),
    (clustered_conditions, "ClusteredGP: identity plus it", "o-"),
):
    values = [min(verdict.condition.value, 1e18) for verdict in verdicts]
    axes.plot(sizes, values, style, label=name)
axes.plot(sizes, [v.float64.limit for v in sparse_conditions], color="0.3", lw=1)
axes.plot(sizes, [v.float32.limit for v in sparse_conditions], color="0.3", lw=1)
for limit, dtype in (
    (sparse_conditions[0].float64.limit, 64),
    (sparse_conditions[0].float32.limit, 32),
):
    axes.annotate(
        f"float{dtype}: sure below this", (sizes[0], limit), (0, 4), textcoords="offset points"
    )
axes.set(
    title="Condition number of what is factorised", xlabel="centres", xscale="log", yscale="log"
)
axes.set_xticks(sizes, [str(size) for size in sizes])
axes.minorticks_off()
axes.grid(alpha=0.3)
_ = axes.legend(loc="upper left")

# %% [markdown]
# In float64 sparse regression gets by, with a little jitter at the end, and its map is the better
# one, for it moves no reading. In float32 it would have failed from the fifth row on.
# `ClusteredGP` runs in float32 throughout without any jitter, because its condition number stops
# growing, and its error falls as readings are moved less far. The lines are what a theorem promises
# for any matrix of that size; above them a factorisation may succeed, and `numerical_log` says
# whether it did. So: `OSGPR` in float64 for the best map, `ClusteredGP` where a fit must not fail
# or where float32 is what there is.
#
# ## 5. Six inputs
#
# Nothing above depends on there being two inputs. Another task: an instrument has six knobs, each
# from 0 to 1, and the best setting is looked for. (It is Hartmann's function, whose best value is
# 3.32.) With six inputs a grid has too many nodes, and the model on a grid says so:

# %%
hartmann = Hartmann(dim=6, negate=True)
BOX = torch.stack((torch.zeros(6), torch.ones(6)))


def measure(settings):
    """The outcome at some settings, with an error of 0.1."""
    return hartmann(settings).unsqueeze(-1) + 0.1 * torch.randn(len(settings), 1)


first = SobolEngine(6, scramble=True, seed=0).draw(40, dtype=torch.float64)
outcomes = measure(first)
try:
    WISKI(first, outcomes)
except UnsupportedError as reason:
    print(reason)

# %% [markdown]
# `OSGPR` does not mind. It is BoTorch as ever: `qLogExpectedImprovement` asks for the joint
# posterior of four settings and its gradient, `optimize_acqf` finds four, each in view of those
# before it, and `update` takes their outcomes in. A search needs detail where the best settings
# crowd. So no allocator is given here: every run that the others do not already determine is an
# inducing point, which is the exact process, until there are `max_points` of them.
#
# Three searches from the same forty runs, and three that go on at random:

# %%
ROUNDS, REPEATS = (2, 1) if SMOKE_TEST else (20, 3)


def most_promising(model, tried):
    """Four settings."""
    with torch.no_grad():
        best_mean = model.posterior(tried.unsqueeze(-2)).mean.max().item()
    improvement = qLogExpectedImprovement(model, best_f=best_mean)
    return optimize_acqf(improvement, BOX, q=4, num_restarts=4, raw_samples=128, sequential=True)[0]


def at_random(model, tried):
    """Four settings."""
    return torch.rand(4, 6)


def campaign(choose):
    """The model, the settings tried, and the true value of the one recommended after each round."""
    knobs = OSGPR(first, outcomes)
    learn(knobs)
    tried, learned_at, progress = first, len(first), []
    for _ in range(ROUNDS):
        picks = choose(knobs, tried)
        knobs.update(picks, measure(picks))
        tried = torch.cat((tried, picks))
        if len(tried) >= 1.3 * learned_at:
            learn(knobs)
            learned_at = len(tried)
        with torch.no_grad():
            recommended = knobs.posterior(tried.unsqueeze(-2)).mean.flatten().argmax()
        progress.append(hartmann(tried[recommended].unsqueeze(0)).item())
    return knobs, tried, progress


start = time.perf_counter()
searches = [campaign(most_promising) for _ in range(REPEATS)]
took = (time.perf_counter() - start) / (REPEATS * ROUNDS)
by_chance = [campaign(at_random) for _ in range(REPEATS)]
knobs, tried, _ = searches[0]
print(f"{len(tried)} runs, {len(knobs.inducing_points)} points, {took:.1f} s a round")

figure, axes = plt.subplots(figsize=(6.5, 3.8))
runs = len(first) + 4 * np.arange(1, ROUNDS + 1)
for campaigns, name, style in (
    (searches, "four at a time by qLogEI", {"color": "tab:blue", "marker": "o"}),
    (by_chance, "random settings", {"color": "tab:orange", "marker": "s", "ls": "--"}),
):
    ends = [progress[-1] for _, _, progress in campaigns]
    print(f"recommended in the end by {name}: {np.round(ends, 2)} of 3.32")
    for i, (_, _, progress) in enumerate(campaigns):
        axes.plot(runs, progress, ms=3, lw=1.2, label=name if i == 0 else None, **style)
axes.axhline(3.32, color="0.5", lw=1, ls=":")
axes.set(title="True value of the setting recommended", xlabel="runs", ylabel="value")
axes.set_ylim(1.0, 3.5)
axes.grid(alpha=0.3)
_ = axes.legend(loc="lower right")

# %% [markdown]
# Fantasies work too, far from all inducing points as well as near: the conditioned model
# knows what they would teach. Which eight of some hundred settings would tell most about the
# instrument everywhere, and how much of the uncertainty would go?

# %%
offered, anywhere = torch.rand(200, 6), torch.rand(300, 6)
eight = select_from_pool(knobs, offered, q=8, mc_points=anywhere)
with torch.no_grad():
    for name, rows in (("the eight chosen", eight), ("eight at random", torch.arange(8))):
        conditioned = knobs.condition_on_observations(
            offered[rows], knobs.posterior(offered[rows]).mean
        )
        left = (
            conditioned.posterior(anywhere).variance.mean()
            / knobs.posterior(anywhere).variance.mean()
        )
        print(f"{name}: {100 * (1 - left):.1f} % of the mean variance would go")

# %% [markdown]
# ## 6. Where to go next
#
# - `OSVGP` places its points in the same way, for labels, counts and outliers.
# - Other allocators of `bo_stream.allocation`: `GreedyVariance` has the lowest condition numbers
#   with several inputs; `CoverTree(1.0, per_lengthscale=0.5)` follows the lengthscale as it is
#   learned. `benchmarks/accuracy/allocators.py` compares them all.
# - One faulty position should not get a point: `OIPS(0.8, isolation=Isolation())` accepts none that
#   is alone.
# - `optimize_points` moves the points by the gradient of the bound.
# - `ClusteredGP(..., solver="cg")` factorises nothing; `resolve` changes its resolution in the
#   stream.
# - `bo-stream sample` and `bo-stream optimize` take `--model osgpr` and `--model clustered`.
