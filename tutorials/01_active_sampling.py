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
# # Where to survey next: active sampling of a prevalence map
#
# A malaria programme wants a map of prevalence. Every site surveyed costs a day's work, so each
# should teach as much as possible about the whole country. A Gaussian process (kriging, to a
# geostatistician) says how uncertain the map still is, and so which sites would help most. We
# choose six of them, survey them, update the map, and choose again.
#
# An exact Gaussian process slows down with every site that it has seen. `bo_stream.WISKI` does
# not: it keeps sums over a grid instead of the data, so a step costs the same after a million
# readings as after ten, and its hyperparameters can still be learned. It is a BoTorch model: what
# you know of BoTorch applies.
#
# This runs in under a minute on two cores. With the environment variable `SMOKE_TEST` set it runs
# in seconds, at sizes too small to mean anything.

# %%
import os
import tempfile
import time
from copy import deepcopy
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from gpytorch.kernels import ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import GammaPrior

from bo_stream import WISKI, ProductMatern
from bo_stream.acquisition import FeatureNIPV, PoolSelector, sample_paths, select_from_pool
from bo_stream.loops.datasets import read_dataset, simulated_prevalence

SMOKE_TEST = bool(os.environ.get("SMOKE_TEST"))
torch.manual_seed(0)
plt.rcParams.update({"figure.dpi": 80, "figure.constrained_layout.use": True, "font.size": 9})

# %% [markdown]
# ## 1. The map
#
# The map is simulated: prevalence in a made-up country of about 1,000 by 1,000 km, at one site for
# each of some 4,000 pixels. To use a map of your own, set the environment variable `BO_STREAM_DATA`
# to an `.npz` file with the sites' coordinates `X` (`n x 2`) and the prevalence `y` (`n` numbers
# between 0 and 1).
#
# A survey tests 100 people, so a reading is the prevalence with sampling error. We draw what a team
# would find at every site beforehand, and look at it only where a team has been.

# %%
path = os.environ.get("BO_STREAM_DATA")
data = read_dataset(path) if path else simulated_prevalence()
most = 250 if SMOKE_TEST else 5_000
rows = np.random.default_rng(0).permutation(len(data.y))[:most]

sites = data.X[rows]
truth = torch.from_numpy(data.y[rows]).unsqueeze(-1)
X = torch.from_numpy(data.unit_X[rows])  # the model's inputs: the unit square
bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)

found = np.random.default_rng(1).binomial(100, truth.clamp(0, 1).numpy())
readings = torch.from_numpy(found / 100)
print(f"{data.source}: {len(X):,} sites, mean prevalence {truth.mean():.2f}")


# %% [markdown]
# One function draws every map below.


# %%
def draw(axes, values, title, label, limits=None, colours="viridis"):
    """Values at all sites as a map with its colour bar."""
    low, high = limits or (None, None)
    side = 72 * min(axes.bbox.width, axes.bbox.height) / axes.figure.dpi
    dots = axes.scatter(
        *sites.T, c=np.ravel(values), s=0.9 * side**2 / len(sites), marker="s", linewidths=0,
        vmin=low, vmax=high, cmap=colours,
    )  # fmt: skip
    axes.set(title=title, aspect="equal", xlabel=data.columns[0], ylabel=data.columns[1])
    axes.label_outer()
    plt.colorbar(dots, ax=axes, label=label, shrink=0.75)


def mark(axes, index, **style):
    """Sites on a map."""
    look = {"ms": 3, "mfc": "white", "mec": "black", "mew": 0.5, **style}
    axes.plot(*sites[index].T, "o", **look)


shown = tuple(np.quantile(truth, (0.005, 0.995)))
figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharex=True, sharey=True)
draw(axes[0], truth, "the truth", "prevalence", shown)
draw(axes[1], readings, "what surveys of 100 people would find", "prevalence", shown)

# %% [markdown]
# ## 2. Ten sites
#
# We begin with ten random sites. The kernel is a product of Matérn-5/2, one a coordinate. Ten
# sites cannot tell those lengthscales, so we say what we believe: about a fifth of the country, and
# a tenth of the variance from sampling error. The data will correct us later.
#
# `grid_size` and `max_rank` trade accuracy for speed. Left out, the model takes a finer grid and
# twice as many features, several times as slow; `interpolation_error()` says what the grid costs.
# If a map turns out rougher than its grid can follow, a refit warns and names a grid that would do.

# %%
GRID, RANK = (30, 100) if SMOKE_TEST else (50, 512)
first = torch.arange(10)  # the sites are in random order


def matern():
    """The kernel: prior beliefs as in the WISKI paper's malaria study."""
    kernel = ProductMatern(nu=2.5, ard_num_dims=2, lengthscale_prior=GammaPrior(3.0, 6.0))
    kernel.lengthscale = 0.2
    return ScaleKernel(kernel, outputscale_prior=GammaPrior(2.0, 0.15))


def ten_site_model():
    """A model of the ten first sites, with the hyperparameters that we believe in."""
    model = WISKI(
        X[first], readings[first], covar_module=matern(), bounds=bounds,
        grid_size=GRID, max_rank=RANK,
    )  # fmt: skip
    model.likelihood.noise = 0.1
    return model.eval()


model = ten_site_model()
print(f"{model.num_observations:.0f} readings, grid {model.grid_size}, {model.rank} features")
print(f"interpolation error at most {model.interpolation_error():.1e} of the prior variance")


# %% [markdown]
# `posterior` is BoTorch's. The prior is the same model with its ten readings taken out again, which
# `retract` does. A draw of `sample_paths` is one map that the model holds possible.


# %%
@torch.no_grad()
def predict(model):
    """Posterior mean and standard deviation at all sites."""
    posterior = model.posterior(X)
    return posterior.mean, posterior.variance.sqrt()


prior = deepcopy(model).retract(X[first], readings[first])
stages = {"prior": prior, "after ten sites": model}
figure, axes = plt.subplots(2, 3, figsize=(11.5, 7), sharex=True, sharey=True)
for row, (name, stage) in zip(axes, stages.items(), strict=True):
    mean, deviation = predict(stage)
    possible = sample_paths(stage, 1, seed=2)(X).detach()
    draw(row[0], mean, f"{name}: mean", "prevalence", shown)
    draw(row[1], deviation, f"{name}: sd", "sd of prevalence", (0, 0.2), "magma")
    draw(row[2], possible, f"{name}: one possible map", "prevalence", shown)
for panel in axes[1, :2]:
    mark(panel, first)

# %% [markdown]
# ## 3. Which sites next?
#
# We want a good map *everywhere*, so we look for the sites whose readings will leave the least
# variance on average over the country. A Gaussian process's variance depends on where it is
# observed but not on what is found there, so this can be said in advance. BoTorch calls the average
# (with a minus sign) `qNegIntegratedPosteriorVariance`; `FeatureNIPV` is the same number, computed
# from the model's features at a cost that does not depend on how many points it averages over. For
# each site: by how much would one reading there lower the average variance?

# %%
acquisition = FeatureNIPV(model, mc_points=X)
with torch.no_grad():
    after_one = -acquisition(X.unsqueeze(-2))
    now = model.posterior(X).variance.mean()
gain = 100 * (now - after_one) / now

# %% [markdown]
# A team visits six sites on a trip. The six sites with the largest gains would all be neighbours,
# each making the others needless. `select_from_pool` chooses one after the other, each in view of
# those before it.
#
# `condition_on_observations` takes hypothetical readings and leaves the model as it is; any value
# will do, since we only look at the standard deviation.

# %%
six = select_from_pool(model, X, q=6, mc_points=X, exclude=first)
conditioned = model.condition_on_observations(X[six], model.posterior(X[six]).mean)

figure, axes = plt.subplots(1, 3, figsize=(13, 3.9), sharex=True, sharey=True)
draw(axes[0], predict(model)[1], "sd now", "sd of prevalence", (0, 0.2), "magma")
draw(axes[1], gain, "what one reading is worth", "variance saved (%)", None, "cividis")
draw(axes[2], predict(conditioned)[1], "sd after these six", "sd of prevalence", (0, 0.2), "magma")
for panel in axes:
    mark(panel, first)
for order, site in enumerate(six.tolist(), start=1):
    for panel in axes[1:]:
        panel.annotate(
            str(order), sites[site], ha="center", va="center", fontsize=8,
            bbox={"boxstyle": "circle,pad=0.15", "fc": "tab:red", "ec": "white"}, color="white",
        )  # fmt: skip

# %% [markdown]
# White dots are the sites surveyed, red numbers the six chosen, in order. The gain is not the
# standard deviation: the border is as uncertain as any place, but a reading there says little about
# the rest of the country.
#
# ## 4. The loop
#
# Choose, survey, update; and learn the hyperparameters anew whenever the readings are half as many
# again. `fit_gpytorch_mll` works as on any BoTorch model, though this one has not kept its data. A
# `PoolSelector` makes the same choices as `select_from_pool`, faster when they are repeated.

# %%
BUDGET, EVERY = (46, 12) if SMOKE_TEST else (310, 30)
FIT = {"options": {"ftol": 1e-5}}  # a refit starts from the last one and need not be exact


def campaign(model, choose):
    """Survey six sites at a time until the budget is spent."""
    chosen, fitted_at = first, 25
    maps, steps, refits = {len(first): predict(model)}, [], []
    while len(chosen) < BUDGET:
        start = time.perf_counter()
        picks = choose(chosen)
        model.update(X[picks], readings[picks])
        chosen = torch.cat((chosen, picks))
        steps.append((len(chosen), time.perf_counter() - start))
        if len(chosen) >= 1.5 * fitted_at:
            mll = ExactMarginalLogLikelihood(model.likelihood, model)
            fit_gpytorch_mll(mll, optimizer_kwargs=FIT)
            fitted_at = len(chosen)
            refits.append((len(chosen), time.perf_counter() - start))
        if (len(chosen) - len(first)) % EVERY == 0:
            maps[len(chosen)] = predict(model)
    return chosen, maps, steps, refits


selector = PoolSelector(model, X, mc_points=X)
chosen, maps, steps, refits = campaign(model, lambda taken: selector.select(6, exclude=taken))

lengthscales = model.covar_module.base_kernel.lengthscale.detach().squeeze(0)
noise = (model.noise_level().sqrt() * model.outcome_scale()).item()
print(f"{model.num_observations:.0f} readings, lengthscales {lengthscales.numpy().round(2)}")
print(f"noise: standard deviation {noise:.3f}")

# %% [markdown]
# A survey of 100 people has a sampling error of 0.05 or a little less, and the model has found that
# out by itself. Here is the map as it grows, with the sites surveyed.

# %%
moments = [list(maps)[i] for i in (1, 3, -1)]
figure, axes = plt.subplots(2, 3, figsize=(11.5, 7), sharex=True, sharey=True)
for column, count in zip(axes.T, moments, strict=True):
    mean, deviation = maps[count]
    draw(column[0], mean, f"mean after {count} sites", "prevalence", shown)
    draw(column[1], deviation, f"sd after {count} sites", "sd of prevalence", (0, 0.12), "magma")
    mark(column[1], chosen[:count], ms=2.5)

# %% [markdown]
# How far is each map from the truth? For comparison, three campaigns that begin with the same ten
# sites and go on at random, through the same loop.


# %%
def error(maps):
    """Root mean squared error of each map's mean."""
    return [(mean - truth).square().mean().sqrt().item() for mean, _ in maps.values()]


def random_campaign(seed):
    """The maps of a campaign whose sites are drawn at random."""
    later = len(first) + torch.randperm(
        len(X) - len(first), generator=torch.Generator().manual_seed(seed)
    )
    order = torch.cat((first, later))
    return campaign(ten_site_model(), lambda taken: order[len(taken) : len(taken) + 6])[1]


by_chance = [random_campaign(seed) for seed in range(1 if SMOKE_TEST else 3)]

figure, axes = plt.subplots(figsize=(6.5, 4))
for history in by_chance:
    (line,) = axes.plot(list(history), error(history), "s--", color="tab:orange", ms=3, lw=1)
line.set_label("random sites")
axes.plot(list(maps), error(maps), "o-", color="tab:blue", ms=4, label="chosen sites")
axes.set(title="Error of the map", xlabel="sites surveyed", ylabel="RMSE of the prevalence")
axes.set_ylim(bottom=0)
axes.legend()
axes.grid(alpha=0.3)

# %% [markdown]
# On this map a hundred chosen sites are worth some two hundred random ones. The choice pays most
# while sites are few. Later all campaigns come to much the same: what is left is sampling error and
# the variation from one pixel to the next, which no choice of sites removes.
#
# ## 5. What it costs
#
# Left, the seconds of each step of our campaign: choosing six sites out of thousands, and the
# update. A few steps take longer, those after a refit, when the choice must be computed anew.
#
# Right, we go on as a national programme might for decades, with repeated surveys at random sites,
# and time six more readings and the next posterior at 500 sites. Beside it stands an exact Gaussian
# process, BoTorch's `SingleTaskGP`, given all readings anew. No hyperparameters are learned here.


# %%
def survey(count):
    """Further surveys of 100 people, at random sites."""
    where = torch.randint(len(X), (count,))
    tested = np.random.default_rng(count).binomial(100, truth[where].clamp(0, 1).numpy())
    return X[where], torch.from_numpy(tested / 100)


def seconds(task, *arguments):
    """The median duration of a task in three."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        task(*arguments)
        times.append(time.perf_counter() - start)
    return float(np.median(times))


@torch.no_grad()
def stream_step(model, new_X, new_Y):
    """Six more readings, and the next posterior."""
    posterior = model.update(new_X, new_Y).posterior(X[:500])
    return posterior.mean, posterior.variance


@torch.no_grad()
def exact_step(all_X, all_Y):
    """The exact posterior."""
    posterior = SingleTaskGP(all_X, all_Y, covar_module=matern()).posterior(X[:500])
    return posterior.mean, posterior.variance


lasting = deepcopy(model)
sizes = [100, 1_000] if SMOKE_TEST else [1_000, 3_000, 10_000, 30_000, 100_000, 300_000]
stream_seconds = []
for size in sizes:
    lasting.update(*survey(size - int(lasting.num_observations)))
    stream_step(lasting, *survey(6))
    stream_seconds.append(seconds(stream_step, lasting, *survey(6)))

exact_sizes = [50, 100] if SMOKE_TEST else [250, 500, 1_000, 2_000]
exact_seconds = [seconds(exact_step, *survey(size)) for size in exact_sizes]

figure, axes = plt.subplots(1, 2, figsize=(10.5, 3.8))
axes[0].plot(*zip(*steps, strict=True), "o", ms=3, label="a step: choose six, update")
axes[0].plot(*zip(*refits, strict=True), "^", color="tab:red", ms=5, label="with a refit")
axes[0].set(title="Our campaign", xlabel="sites surveyed", ylabel="seconds", yscale="log")
axes[1].plot(sizes, stream_seconds, "o-", label="WISKI: update and posterior")
axes[1].plot(exact_sizes, exact_seconds, "s--", color="tab:orange", label="exact: posterior")
axes[1].set(title="Six more readings", xlabel="readings so far", ylabel="seconds", yscale="log")
axes[1].set_xscale("log")
for panel in axes:
    panel.grid(alpha=0.3, which="both")
    panel.legend()

# %% [markdown]
# ## 6. Two teams, and a faulty reading
#
# What the model remembers of its data are sums. So two teams can each build a model of their own,
# and `merge` adds one to the other: the same as if one team had seen everything. Only models need
# to be exchanged, not readings. (What both have seen would count twice.)
#
# Readings are standardised inside the model, by their mean and spread at the last refit. To compare
# without a refit we have the merged model standardise anew, which is what `train` does.


# %%
def team(index):
    """A model of some sites, with the hyperparameters that our campaign has learned."""
    return WISKI(
        X[index], readings[index], covar_module=deepcopy(model.covar_module),
        likelihood=deepcopy(model.likelihood), bounds=bounds, grid_size=GRID, max_rank=RANK,
    )  # fmt: skip


in_west = X[chosen, 0] < X[:, 0].median()
west, east = chosen[in_west], chosen[~in_west]
merged = team(west).merge(team(east)).train().eval()
together = team(torch.cat((west, east))).eval()

for name, ours, theirs in zip(("mean", "sd"), predict(merged), predict(together), strict=True):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-8)
    print(f"merged against together, {name}: at most {(ours - theirs).abs().max():.0e} apart")

figure, axes = plt.subplots(1, 3, figsize=(13, 3.9), sharex=True, sharey=True)
stages = {"west": (team(west), west), "east": (team(east), east), "both": (merged, chosen)}
for panel, (name, (stage, index)) in zip(axes, stages.items(), strict=True):
    draw(panel, predict(stage)[1], f"{name}: sd", "sd of prevalence", (0, 0.2), "magma")
    mark(panel, index)

# %% [markdown]
# Then it turns out that a reading was faulty: a broken batch of tests, everyone positive. `retract`
# takes it out again, exactly but for rounding, whatever else has come in since.

# %%
before = predict(model)[0]
place = chosen[(truth[chosen, 0] - 0.3).abs().argmin()].reshape(1)
everyone = torch.ones(1, 1, dtype=torch.float64)

model.update(X[place], everyone)
wrong = predict(model)[0]
model.retract(X[place], everyone)
right = predict(model)[0]
torch.testing.assert_close(right, before, rtol=0, atol=1e-8)

figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharex=True, sharey=True)
change = (-0.15, 0.15)
draw(
    axes[0], wrong - before, "change by the faulty reading", "change of the mean", change, "RdBu_r"
)
draw(axes[1], right - before, "left of it after retract", "change of the mean", change, "RdBu_r")
for panel in axes:
    mark(panel, place)
print(f"the mean changed by up to {(wrong - before).abs().max():.2f};", end=" ")
print(f"after retract by {(right - before).abs().max():.0e}")

# %% [markdown]
# ## 7. Saving, and going on
#
# `save` writes the whole model. The file is no larger after hundreds of thousands of readings.
# Whoever loads it goes on where we stopped: the next six sites are the same.

# %%
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "campaign.safetensors"
    for saved in (lasting, model):
        saved.save(file)
        size = file.stat().st_size / 2**20
        print(f"{saved.num_observations:,.0f} readings: {size:.1f} MiB")
    loaded = WISKI.load(file)

ours, theirs = (select_from_pool(m, X, 6, mc_points=X, exclude=chosen) for m in (model, loaded))
assert torch.equal(ours, theirs)
print("next sites:", ours.tolist())

# %% [markdown]
# ## 8. Where to go next
#
# - `bo-stream sample` runs this loop as a command, on this map or on yours, with checkpoints,
#   scores on held-out sites, and pictures:
#   `bo-stream sample survey.csv --x lon lat --y prevalence --compare random`.
# - Not every place counts the same: `FeatureNIPV(..., weights=population)` averages over people
#   instead of sites. Not every site costs the same: `select_from_pool(..., costs=hours)` chooses by
#   gain per hour.
# - There need be no list of candidates: give `FeatureNIPV(model, bounds=bounds)` to BoTorch's
#   `optimize_acqf`.
# - A prevalence lies between 0 and 1, and surveys differ in size. Give known sampling variances as
#   `train_Yvar` and `Yvar`, or model the logit of the prevalence.
# - Prevalence changes from year to year: `forget(factor)` lets old readings count for less.
# - To find a hot spot rather than map the country, use any of BoTorch's acquisition functions on
#   the same model.
