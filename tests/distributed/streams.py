"""Models to sum, data for them, and what "the same as one stream" means."""

from __future__ import annotations

import copy
from pathlib import Path

import pyarrow as pa
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from pyarrow import csv, parquet
from torch import Tensor

from bo_stream import WISKI
from bo_stream.models.base import StreamingGP
from tests.support.problems import Observations

SAME = 1e-10
"""Relative difference of sums in another order."""

UNIT = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


def grid_model(data: Observations | None = None, **options: object) -> WISKI:
    """A model on a grid of 9 x 9 nodes over the unit square, of some observations or none."""
    none = torch.empty(0, 2, dtype=torch.float64), torch.empty(0, 1, dtype=torch.float64)
    chosen: dict[str, object] = {"bounds": UNIT, "grid_size": 9}
    return WISKI(*(none if data is None else data.astuple()), **{**chosen, **options})


def assert_same(a: StreamingGP, b: StreamingGP, X: Tensor) -> None:
    """Equal posterior, objective, gradient of the objective, and count, to :data:`SAME`."""
    assert a.num_observations == b.num_observations
    for found, expected in zip(_numbers(a, X), _numbers(b, X), strict=True):
        size = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(found, expected, rtol=0.0, atol=SAME * size)


def _numbers(model: StreamingGP, X: Tensor) -> list[Tensor]:
    model = copy.deepcopy(model)  # for a fit standardises anew
    posterior = model.posterior(X)
    numbers = [posterior.mean.detach(), posterior.variance.detach()]
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss = model.compute_custom_loss(ExactMarginalLogLikelihood(model.likelihood, model)).sum()
    gradient = torch.autograd.grad(loss, parameters)
    return [*numbers, loss.detach(), *gradient]


SIZES = (120, 60, 170)
"""Rows of the parts of a stream."""

GROUPS = 3 + 2 + 4
"""Row groups of files of these parts."""


# --- files ----------------------------------------------------------------------------------------

COLUMNS: dict[str, object] = {"x": ["a", "b"], "y": "value"}
"""Arguments of an ingest of :func:`table`."""


def table(data: Observations, **more: object) -> pa.Table:
    """Observations as a table, with further columns."""
    values = {"a": data.X[:, 0], "b": data.X[:, 1], "value": data.Y[:, 0]}
    if data.Yvar is not None:
        values["variance"] = data.Yvar[:, 0]
    return pa.table({name: each.numpy() for name, each in values.items()} | more)


def write_files(folder: Path, parts: list[Observations], suffix: str = "parquet") -> Path:
    """A folder of a file a part; of parquet, of row groups of 50 rows."""
    folder.mkdir(exist_ok=True)
    for number, part in enumerate(parts):
        path = folder / f"part-{number:02d}.{suffix}"
        if suffix == "csv":
            csv.write_csv(table(part), path)
        else:
            parquet.write_table(table(part), path, row_group_size=50)
    return folder


def parts_of(data: Observations, sizes: tuple[int, ...]) -> list[Observations]:
    """Consecutive parts of so many rows."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [data[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def streamed(model: StreamingGP, parts: list[Observations]) -> StreamingGP:
    """A copy of a model that took in the parts one after another."""
    model = copy.deepcopy(model)
    for part in parts:
        model.update(*part.astuple())
    return model
