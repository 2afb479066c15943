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
# # From a malaria survey to the next thirty clusters
#
# A national survey has tested young children for malaria in some hundreds of clusters. Where is
# prevalence above 10 %? The survey answers for its clusters and for the average of the country. A
# programme must decide for every place. A geostatistical model fills the gaps, says how sure it is,
# and so where thirty more clusters would settle most.
#
# This tutorial goes the whole way: check the data, map prevalence, test the map, choose thirty
# clusters, take in their results, write a report. It needs no knowledge of Gaussian processes.
#
# The data are those of the Tanzanian survey of 2015 as the R package RiskMap (MIT licence) has
# them: `tz_malaria.csv`, a row a cluster, and `tz_grid.npz`, a grid of 10 km over the country. Set
# the environment variable `BO_STREAM_DATA` to the folder that has these two files. Without it the
# tutorial makes up a country of its own: all cells run, and the numbers in the text are not
# theirs. With `SMOKE_TEST` set it runs in seconds, at sizes too small to mean anything.

# %%
import os
import tempfile
from datetime import date
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy.spatial import cKDTree

from bo_stream.loops.survey.findings import find
from bo_stream.loops.survey.maps import draw_calibration, draw_classes, draw_values
from bo_stream.loops.survey.model import coverage, held_out_counts
from bo_stream.loops.survey.report import headline, survey_page
from bo_stream.loops.survey.settings import SurveySettings
from bo_stream.loops.survey.survey import Survey

SMOKE_TEST = bool(os.environ.get("SMOKE_TEST"))
pd.options.display.float_format = "{:.3g}".format
plt.switch_backend(plt.get_backend())  # a notebook shows figures from now on
plt.rcParams["figure.dpi"] = 75


# %% [markdown]
# ## 1. Two tables, and their units
#
# The cells of the grid know their position in metres (UTM zone 36S) only; the clusters know it in
# metres and in degrees. So the clusters teach the conversion: a polynomial of degree five fits
# them to a few centimetres. In the grid, -9999 stands for a missing value. We leave missing values
# empty: a survey fills them from the nearest cell that has one, and says so.


# %%
def degrees(metres, clusters):
    """Longitude and latitude of UTM positions, by a polynomial that fits the clusters."""

    def terms(table):
        x, y = (table["utm_x"] - 7.5e5) / 5e5, (table["utm_y"] - 9.3e6) / 5e5
        return np.stack([x**i * y**j for i in range(6) for j in range(6 - i)], axis=1)

    places = clusters[["Long", "Lat"]].to_numpy()
    slopes = np.linalg.lstsq(terms(clusters), places, rcond=None)[0]
    error = np.abs(terms(clusters) @ slopes - places).max()
    print(f"positions from metres: at most {111_000 * error:.2f} m off at the clusters")
    return terms(metres) @ slopes


def tanzania(folder):
    """Cells and clusters of Tanzania, in the units of their files."""
    clusters = pd.read_csv(folder / "tz_malaria.csv")
    with np.load(folder / "tz_grid.npz") as file:
        cells = pd.DataFrame(file["X"], columns=file["columns"].tolist())
    cells = cells.replace(-9999.0, np.nan)
    cells[["longitude", "latitude"]] = degrees(cells, clusters)
    clusters = clusters.rename(
        columns={"Long": "longitude", "Lat": "latitude", "Ex": "examined", "Pf": "positive"}
    )
    clusters["id"] = "C" + clusters["cluster.number"].astype(str)
    return cells, clusters


def made_up():
    """Cells and clusters of a country that does not exist, with the same columns and traps."""
    random = np.random.default_rng(1)
    side = np.arange(30) / 5
    cells = pd.DataFrame(
        {"longitude": np.repeat(31 + side, 30), "latitude": np.tile(-9 + side, 30)}
    )
    for name, mean, spread in (("EVI", 0.3, 0.06), ("Precipitation", 950, 200), ("ITN", 0.6, 0.06)):
        waves = random.standard_normal((2, 40))
        waves = cells[["longitude", "latitude"]].to_numpy() @ waves + 6 * random.random(40)
        cells[name] = mean + spread * np.sin(waves).sum(1) / 4.5
    cells["Temperature"] = 28.0 - 3.0 * np.sin(cells["longitude"])
    logit = (cells["EVI"] - 0.3) / 0.06 + (cells["Precipitation"] - 1150) / 200 - 1.5
    cells["truth"] = 1 / (1 + np.exp(-logit))
    clusters = cells.sample(200, random_state=2).reset_index(drop=True)
    clusters["examined"] = random.integers(8, 20, len(clusters))
    clusters["positive"] = random.binomial(clusters["examined"], clusters["truth"])
    clusters["id"] = [f"C{row}" for row in range(len(clusters))]
    clusters["ITN"] *= 100
    clusters["Temperature"] += 4.7
    return cells, clusters


source = os.environ.get("BO_STREAM_DATA")
cells, clusters = tanzania(Path(source)) if source else made_up()
if SMOKE_TEST:
    cells, clusters = cells[::9].reset_index(drop=True), clusters[:40]
cells["id"] = [f"G{row}" for row in range(len(cells))]
examined, positive = clusters["examined"].sum(), clusters["positive"].sum()
print(f"{len(clusters)} clusters: {examined:,} children examined, {positive} positive", end=", ")
print(f"{100 * positive / examined:.0f} %; {len(cells):,} cells")

# %% [markdown]
# Both tables have covariates of the same names. That is no proof that they are the same quantity.
# Each cluster lies in or beside a cell, so they can be compared.

# %%
names = ["EVI", "Precipitation", "ITN", "Temperature"]
places = ["longitude", "latitude"]
_, nearest = cKDTree(cells[places]).query(clusters[places])
beside = cells.loc[nearest, names].reset_index(drop=True)
pd.DataFrame(
    {
        "in the survey": clusters[names].median(),
        "in the cell": beside.median(),
        "typical ratio": (clusters[names].reset_index(drop=True) / beside).median(),
        "typical difference": (clusters[names].reset_index(drop=True) - beside).median(),
        "correlation": clusters[names].reset_index(drop=True).corrwith(beside),
    }
)

# %% [markdown]
# Greenness (EVI) and rain agree. Bed nets (ITN) are per cent in one table and a share in the
# other: divide. Temperature differs by five degrees: it is another product, and no division mends
# that. A model that learned at 32 degrees would be asked about 28 everywhere. We leave it out.
#
# What happens if nobody looks? The survey notices what it can:

# %%
covariates = ["EVI", "Precipitation", "ITN"]
settings = SurveySettings(threshold=0.1, covariates=covariates, minimum_distance=20.0, trials=15)
results = clusters[["id", *places, *covariates, "examined", "positive"]].copy()
for warning in Survey(cells, settings).tell(results).warnings:
    print(warning)

results["ITN"] /= 100

# %% [markdown]
# ## 2. What is known after the survey
#
# `Survey` takes the list of places that could be surveyed, here the cells, and the settings: the
# goal is to tell places above 10 % from those below. `tell` takes results; the clusters are places
# outside the list, so they bring their position and covariates along. Counts enter as counts: 1 of
# 8 and 5 of 40 are the same share and not the same evidence.

# %%
survey = Survey(cells, settings)
told = survey.tell(results)
print(f"{len(told.new)} results, {len(told.outside)} of them outside the list")
for note in survey.status().notes:
    print(note)

predictions = survey.predictions()
draw_values(
    predictions, predictions["prevalence"].to_numpy(), "predicted prevalence", "YlOrBr", mark=0.1
)

# %% [markdown]
# The black line in the scale is the threshold. Where does the model not know? The 95 % interval of
# prevalence says so. It is wide where there are no clusters, and where prevalence is high.

# %%
width = (predictions["upper"] - predictions["lower"]).to_numpy()
draw_values(predictions, width, "width of the 95 % interval", "BuPu")

# %% [markdown]
# For the decision only one thing counts: on which side of 10 % is a place? A place is called above
# if its prevalence is so with a probability of 90 %, below if that probability is 10 % or less.

# %%
labels = {"above": "above 10 %", "uncertain": "uncertain", "below": "below 10 %"}
draw_classes(predictions, labels, survey.pending)  # none is pending yet

# %% [markdown]
# ## 3. Can this map be believed?
#
# Ask it what it has not seen. The clusters are divided into ten parts; each part is predicted by a
# model of the other nine. For every cluster there is then an interval for its count, and we look
# how many counts fell inside. Counts are whole numbers, so an interval holds somewhat more than its
# nominal 95 %: the number it should hold is printed, too.

# %%
folds = 3 if SMOKE_TEST else 10
held_out = held_out_counts(survey.fit, *survey.observations, folds=folds)
for level in (50, 95):
    inside, expected = coverage(held_out, level)
    print(f"{level} % intervals: {100 * inside:.0f} % inside, {100 * expected:.0f} % expected")
draw_calibration(held_out)

# %% [markdown]
# A diamond is the mean of a tenth of the clusters, sorted by prediction: they should lie on the
# line. Single clusters need not: with 14 children, chance alone moves a share far.
#
# ## 4. The next thirty clusters
#
# What would thirty more clusters bring? Before anyone has travelled the model can say what to
# expect: how much of the uncertainty is left after one round, and after a second one.

# %%
q = 5 if SMOKE_TEST else 30
rounds = survey.forecast(rounds=2, q=q)
rounds["left"] = rounds["total"] / rounds["total"].iloc[0]
rounds

# %% [markdown]
# It is sober, and useful: a country of this size is not settled by thirty clusters of 15 children.
# Now it is known what a round is worth before it is paid for.
#
# Which thirty cells would settle most? Not the thirty most uncertain ones: these are neighbours,
# and one answers for all. `ask` chooses one after the other, each in view of those before it, by
# how much a result there is expected to lower the uncertainty about the side of 10 %, summed over
# the whole country. Two clusters are at least 20 km apart, as the settings say.

# %%
chosen = survey.ask(q)
chosen.head(8)

# %%
draw_classes(predictions, labels, chosen)

# %% [markdown]
# The numbers are the order of choice, which is the order of worth: if money ends after ten, the
# first ten are the right ten. Roads, budgets and districts enter by the settings `cost`, `budget`,
# `base` with `cost_per_km`, `stratum` with `quotas`, `reachable`.
#
# ## 5. Results come in
#
# Teams come back one by one. Half of the clusters are told now; one of them with a slip, which is
# corrected later by telling it again; one could not be reached. Nobody has surveyed these places,
# so we draw the counts from the map itself. (They are made up: do not read them as malaria.)

# %%
random = np.random.default_rng(5)
known = predictions.set_index("id").loc[chosen["id"]]
found = chosen[["id"]].assign(examined=15)
found["positive"] = random.binomial(15, known["prevalence"])

first = found[: q // 2].copy()
first.loc[0, "positive"] = 15  # a slip of the pen
survey.tell(first)
told = survey.tell(found[: q // 2])
print("corrected:", told.corrected, "unchanged:", len(told.unchanged))
survey.withdraw([chosen["id"].iloc[-1]])
print(f"{len(survey.pending)} clusters are still pending")

# %% [markdown]
# A fault in a table is named by row and column, and nothing of the table is taken in:

# %%
try:
    survey.tell(found[q // 2 :].assign(positive=16))
except ValueError as error:
    print(error)

survey.tell(found[q // 2 : -1])
updated = survey.predictions()
counts = pd.DataFrame(
    {
        "after the survey": predictions["class"].value_counts(),
        f"after {q - 1} more": updated["class"].value_counts(),
    }
)
counts

# %% [markdown]
# ## 6. A page for those who decide
#
# `find` computes everything that a report shows, `survey_page` makes one HTML file of it: maps,
# calibration, a look ahead, settings and caveats in plain words. It needs no internet and can be
# printed.

# %%
findings = find(survey, "Malaria in young children", rounds=1, q=q)
print(headline(findings))
with tempfile.TemporaryDirectory() as folder:
    page = Path(folder) / "report.html"
    page.write_bytes(survey_page(findings, date(2016, 1, 31)))
    print(f"report.html: {page.stat().st_size / 2**20:.1f} MiB")

# %% [markdown]
# ## 7. The same from the command line
#
# No Python is needed for all this. A folder is a survey; it keeps all that was ever told.
#
# ```
# bo-stream survey start cells.csv --threshold 0.1 --covariates EVI Precipitation ITN --out tanzania
# bo-stream survey tell tanzania clusters.csv
# bo-stream survey next tanzania -q 30
# bo-stream survey tell tanzania results.csv
# bo-stream survey report tanzania
# ```
#
# `docs/choosing/surveys.md` has more: costs, travel, districts, wrong results.
