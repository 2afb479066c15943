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
# # An experiment with Ax that streams, is killed, goes on, and is analysed
#
# Ax keeps the books of an experiment: its parameters, its trials, what became of each, and where
# they are stored. For every new trial its own strategies build a Gaussian process of all data and
# fit it from the start, which at a thousand trials takes seconds, and at three thousand minutes.
#
# `bo_stream.ax.generation_strategy()` is a strategy for Ax's `Client` whose model stays between
# trials and takes each new outcome once. Everything else remains Ax's. Here a coffee roaster is
# tuned with it: we run trials, kill the process, go on from its database, correct what was reported
# wrongly, and look at what was learned.
#
# This needs `pip install '.[ax,sql]'` and runs in two to three minutes on two cores. With the
# environment variable `SMOKE_TEST` set it runs in seconds, at sizes too small to mean anything.

# %%
import inspect
import logging
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from linear_operator.utils.warnings import NumericalWarning

logging.disable(logging.INFO)
from ax.adapter.cross_validation import cross_validate
from ax.api.client import Client
from ax.api.configs import RangeParameterConfig
from ax.utils.common.logger import set_stderr_log_level

from bo_stream import GridResolutionWarning
from bo_stream.ax import close_storage, generation_strategy, storage_config

logging.disable(logging.NOTSET)
set_stderr_log_level(logging.ERROR)  # Ax tells of every trial otherwise

SMOKE_TEST = bool(os.environ.get("SMOKE_TEST"))
plt.rcParams.update({"figure.dpi": 80, "figure.constrained_layout.use": True, "font.size": 9})
# joint samples at points that nearly coincide need a jitter, of which BoTorch tells every time
warnings.simplefilter("ignore", NumericalWarning)
if SMOKE_TEST:  # seven noisy trials may ask for a lengthscale that no grid has
    warnings.simplefilter("ignore", GridResolutionWarning)
logging.getLogger("bo_stream.ax").addHandler(logging.StreamHandler(sys.stdout))
logging.getLogger("bo_stream.ax").setLevel(logging.INFO)

# %% [markdown]
# ## 1. The experiment
#
# The roaster has three settings: the drum's temperature, how long a batch stays in it, and how much
# air goes through, which matters by its logarithm. Tasters give each batch points; two batches of
# the same settings differ by about one point. The best settings have 87 points.


# %%
def points(temperature, minutes, airflow):
    """What a batch is worth, without the tasters' noise."""
    browned = (temperature - 212) / 12 + (minutes - 11) / 2
    baked = (minutes - 11) / 3 - (temperature - 212) / 20
    smoke = math.log(airflow / 0.5)
    return 87 - 4 * browned**2 - 3 * baked**2 - 2 * smoke**2 + math.cos(2.5 * smoke) - 1


def taste(temperature, minutes, airflow):
    """What the tasters say."""
    return points(temperature, minutes, airflow) + random.gauss(0, 1)


# %% [markdown]
# The rest is Ax as always, but for `set_generation_strategy`. `storage_config` keeps every trial in
# a file of sqlite; a URL of a server's database does as well. We put this into a script, because we
# are going to kill it.

# %%
SCRIPT = """
import sys

from ax.api.client import Client
from ax.api.configs import RangeParameterConfig

from bo_stream.ax import generation_strategy, storage_config
from roaster import taste

client = Client(storage_config=storage_config(sys.argv[1]), random_seed=0)
client.configure_experiment(
    [
        RangeParameterConfig("temperature", (180, 240), parameter_type="float"),
        RangeParameterConfig("minutes", (6, 18), parameter_type="float"),
        RangeParameterConfig("airflow", (0.05, 5), parameter_type="float", scaling="log"),
    ],
    name="roaster",
)
client.configure_optimization("points")
client.set_generation_strategy(generation_strategy(acquisition="qLogNEI", seed=0))
while True:
    for index, settings in client.get_next_trials(max_trials=1).items():
        client.complete_trial(index, {"points": taste(**settings)})
        print(index, flush=True)
"""

temporary = tempfile.TemporaryDirectory()
folder = Path(temporary.name)
sources = [inspect.getsource(function) for function in (points, taste)]
(folder / "roaster.py").write_text("\n\n".join(["import math", "import random", *sources]))
(folder / "experiment.py").write_text(SCRIPT)
database = folder / "roaster.db"
KILLED_AFTER = 7 if SMOKE_TEST else 30

process = subprocess.Popen(
    [sys.executable, "-W", "ignore", folder / "experiment.py", database],
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
)
for line in process.stdout:
    if int(line) == KILLED_AFTER - 1:
        process.send_signal(signal.SIGKILL)
        break
process.stdout.close()
print(f"killed after trial {line.strip()}, exit status {process.wait()}")

# %% [markdown]
# ## 2. Going on
#
# Each trial is in the database as soon as the call that made or completed it returns. What the
# model had learned is stored with the trials, the model is not: it is built once of all outcomes,
# with the hyperparameters and on the schedule that the killed process had, and takes one at a time
# from then on. A trial that had been asked for and not completed is still there, as running.

# %%
client = Client.load_from_database("roaster", storage_config=storage_config(database))
trials = client.summarize()
print(trials["trial_status"].value_counts().to_string())
for index in trials["trial_index"][trials["trial_status"] == "RUNNING"]:
    client.mark_trial_abandoned(int(index))  # what it would have said is lost


def go_on(client, count):
    """Some more trials; seconds that each took to be found."""
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        ((index, settings),) = client.get_next_trials(max_trials=1).items()
        seconds.append(time.perf_counter() - start)
        client.complete_trial(index, {"points": taste(**settings)})
    return seconds


go_on(client, 3 if SMOKE_TEST else 30)
best, prediction, *_ = client.get_best_parameterization()
print({name: round(value, 2) for name, value in best.items()})
print(f"worth {points(**best):.2f} points, predicted {prediction['points'][0]:.2f}")

# %%
trials = client.summarize().dropna(subset=["points"])
worth = [points(*row) for row in trials[["temperature", "minutes", "airflow"]].to_numpy()]
figure, axes = plt.subplots(figsize=(7, 3.2))
axes.plot(trials["trial_index"], trials["points"], ".", color="0.6", label="tasted")
axes.plot(trials["trial_index"], worth, "o", ms=4, label="worth, without noise")
axes.axvline(KILLED_AFTER - 0.5, color="tab:red", ls="--", label="killed")
axes.set(
    xlabel="trial",
    ylabel="points",
    ylim=(60, 90),
    title="the first five are Sobol points (below 60: not shown)",
)
axes.legend(loc="lower right")
axes.grid(alpha=0.3)

# %% [markdown]
# ## 3. Late, wrong, failed
#
# Trials may be completed in any order. A value that is reported anew takes the place of the old
# one; a failed trial leaves no trace in the model. Each time the model is what it would be if it
# were built of the present data.

# %%
first, second, third = client.get_next_trials(max_trials=3).items()
client.complete_trial(third[0], {"points": taste(**third[1])})
client.mark_trial_failed(second[0])
client.complete_trial(first[0], {"points": 8.6})  # a slip of the pen
go_on(client, 1)
client.attach_data(first[0], {"points": 86.0})
go_on(client, 1)
surrogate = client._generation_strategy.adapter.generator.surrogate
print(type(surrogate.model).__name__, "has", int(surrogate.model.num_observations), "outcomes")

# %% [markdown]
# ## 4. What was learned
#
# Cross-validation asks how well each outcome is predicted from all others. Ax's own builds a model
# for each. Here they come in closed form from the model there is. `client.compute_analyses()` draws
# Ax's own pictures from the same numbers, in a notebook as interactive ones.

# %%
start = time.perf_counter()
left_out = cross_validate(client._generation_strategy.adapter)
print(f"{len(left_out)} predictions in {time.perf_counter() - start:.2f} s")
tasted = np.array([result.observed.data.means[0] for result in left_out])
expected = np.array([result.predicted.means[0] for result in left_out])
spread = np.array([result.predicted.covariance[0, 0] for result in left_out]) ** 0.5

temperatures = np.linspace(180, 240, 41)
cuts = {airflow: [] for airflow in (0.15, best["airflow"], 2.0)}
for airflow, cut in cuts.items():
    asked = [
        {"temperature": t, "minutes": best["minutes"], "airflow": airflow} for t in temperatures
    ]
    cut += [values["points"] for values in client.predict(asked)]

figure, axes = plt.subplots(1, 2, figsize=(10, 3.8))
axes[0].errorbar(expected, tasted, xerr=2 * spread, fmt=".", color="tab:blue", ecolor="0.8")
axes[0].axline((80, 80), slope=1, color="0.5", lw=1)
axes[0].set(xlabel="predicted from all others", ylabel="tasted", title="cross-validation")
for (airflow, cut), colour in zip(cuts.items(), ("C0", "C1", "C2"), strict=True):
    mean, error = np.array(cut).T
    truth = [points(t, best["minutes"], airflow) for t in temperatures]
    axes[1].plot(temperatures, mean, color=colour, label=f"airflow {airflow:.2f}")
    axes[1].fill_between(temperatures, mean - 2 * error, mean + 2 * error, color=colour, alpha=0.2)
    axes[1].plot(temperatures, truth, "--", color=colour, lw=1)
axes[1].set(xlabel="temperature", ylabel="points", title="predicted, and the truth (dashed)")
axes[1].legend()
for each in axes:
    each.grid(alpha=0.3)
close_storage()
temporary.cleanup()

# %% [markdown]
# ## 5. A thousand trials and more
#
# What a trial costs does not grow with those before, but for Ax's own reading of its data. Earlier
# measurements come in by `attach_trial` and `complete_trial`. (This client keeps nothing on disk.)

# %%
many = Client(random_seed=0)
many.configure_experiment(
    [
        RangeParameterConfig("temperature", (180, 240), parameter_type="float"),
        RangeParameterConfig("minutes", (6, 18), parameter_type="float"),
        RangeParameterConfig("airflow", (0.05, 5), parameter_type="float", scaling="log"),
    ]
)
many.configure_optimization("points")
many.set_generation_strategy(generation_strategy(acquisition="qLogNEI", seed=0))
generator = np.random.default_rng(0)


def attach(client, count):
    """Completed trials at random settings."""
    for _ in range(count):
        settings = {
            "temperature": generator.uniform(180, 240),
            "minutes": generator.uniform(6, 18),
            "airflow": math.exp(generator.uniform(math.log(0.05), math.log(5))),
        }
        client.complete_trial(client.attach_trial(settings), {"points": taste(**settings)})


counts = [10, 20] if SMOKE_TEST else [50, 100, 200, 400, 800, 1200]
typical = []
for count in counts:
    attach(many, count - len(many.summarize()))
    typical.append(np.median(go_on(many, 4)[1:]))  # the first may learn hyperparameters

figure, axes = plt.subplots(figsize=(6, 3.2))
axes.plot(counts, typical, "o-")
axes.set(
    xlabel="completed trials", ylabel="seconds", title="to find the next trial", ylim=(0, None)
)
axes.grid(alpha=0.3)
print(f"at {counts[-1]} trials: {typical[-1]:.2f} s")

# %% [markdown]
# ## Where to go from here
#
# - `model`, `model_options`, `acquisition_options`, `refit` and `search` of `generation_strategy`
#   are the knobs. In more than ten parameters a region is searched.
# - Several objectives, outcome constraints, choice parameters and standard errors work as in Ax.
# - `python -m benchmarks.optimization.ax_trials` compares the time of a trial with Ax's default.
