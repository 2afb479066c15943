"""Files as the present version writes them, kept to be read by later ones.

    python -m tests.repository.former_files

writes ``former_files.tar.xz`` beside this module: a file of each case of ``tests/laws/cases.py``
and of models with further kernels, transforms and points, each with further observations and the
posteriors before and after these; a checkpoint of each command, a survey, an ingest, a replica's
ledger, and an experiment of Ax as JSON and in a database. Only written again when a format changes
on purpose: what users have on disk does not change with it.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from botorch.models.transforms import Warp
from gpytorch.kernels import (
    Kernel,
    MaternKernel,
    PeriodicKernel,
    ProductKernel,
    RBFKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from bo_stream import OSGPR, WISKI
from bo_stream.ax import close_storage, storage_config
from bo_stream.cli import app
from bo_stream.distributed import FolderStore, Replica, ingest
from bo_stream.loops.optimization import OptimizationSettings
from bo_stream.mapping import map_inputs, map_kernel, survey_kernel
from bo_stream.models.base import StreamingGP
from bo_stream.testing.streams import moments
from tests.ax.experiments import after, run, started
from tests.laws.cases import CASES
from tests.laws.registry import Stream
from tests.support.problems import observations

ARCHIVE = Path(__file__).with_name("former_files.tar.xz")
FIRST, MORE = 14, 4
"""Observations in the file of a model, and further ones."""


Build = Callable[[Tensor, Tensor], StreamingGP]
BOX = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()


def _grid(kernel: Callable[[], Kernel]) -> Build:
    """Return a builder of a model on a grid of few nodes."""
    return lambda X, Y: WISKI(X, Y, covar_module=kernel(), grid_size=8, bounds=BOX)


def _on_a_map(kernel: Callable[[Tensor], Kernel]) -> Build:
    """Return a builder of a model of longitude and latitude."""
    return lambda X, Y: OSGPR(X, Y, covar_module=kernel(X), input_transform=map_inputs(X))


UNIT: dict[str, Build] = {
    **{
        f"WISKI, Matérn {nu}": _grid(lambda nu=nu: ScaleKernel(MaternKernel(nu, ard_num_dims=2)))
        for nu in (0.5, 1.5, 2.5)
    },
    "WISKI, periodic": _grid(
        lambda: ProductKernel(PeriodicKernel(active_dims=(0,)), RBFKernel(active_dims=(1,)))
    ),
    "OSGPR, warped": lambda X, Y: OSGPR(
        X, Y, input_transform=Warp(d=2, indices=[0, 1], bounds=BOX)
    ),
}
LINE: dict[str, Build] = {
    "WISKI, spectral mixture": lambda X, Y: WISKI(
        X, Y, covar_module=SpectralMixtureKernel(num_mixtures=2), grid_size=12
    ),
}
MAP: dict[str, Build] = {
    "OSGPR, map": _on_a_map(map_kernel),
    "OSGPR, survey": _on_a_map(survey_kernel),
}
FURTHER: tuple[tuple[dict[str, Build], Callable[[Tensor], Tensor]], ...] = (
    (UNIT, lambda X: X),
    (LINE, lambda X: X[:, :1]),
    (MAP, lambda X: X + X.new_tensor((33.0, -13.0))),
)
"""Models whose files name what no case does, and what makes their inputs of the unit square's."""


def write_models(folder: Path) -> None:
    """Write a file of each model, ``expected.safetensors`` and ``models.json`` of file to class."""
    expected: dict[str, Tensor] = {}
    classes: dict[str, str] = {}

    def keep(name: str, model: StreamingGP, points: Tensor, *more: Tensor | None) -> None:
        file = re.sub(r"\W+", "_", name)
        model.save(folder / f"{file}.safetensors")
        classes[file] = type(model).__name__
        mean, variance = moments(model, points)
        model.update(*more)
        after = moments(model, points)
        tensors = dict(
            zip(("points", "X", "Y", "Yvar"), (points, *more, *(None,) * 2), strict=False)
        )
        tensors |= {"mean": mean, "variance": variance}
        tensors |= {"mean after": after[0], "variance after": after[1]}
        expected.update({f"{file}/{k}": v.clone() for k, v in tensors.items() if v is not None})

    for case in CASES:
        torch.manual_seed(0)
        stream = Stream(case, case.settings[0])
        data = stream.data(FIRST + MORE)
        keep(case.name, stream.model(data[:FIRST]), stream.points, *data[FIRST:].astuple())
    for builders, inputs in FURTHER:
        for name, build in builders.items():
            torch.manual_seed(0)
            data, points = observations(FIRST + MORE), torch.rand(5, 2).double()
            X = inputs(data.X)
            model = build(X[:FIRST], data.Y[:FIRST]).eval()
            keep(name, model, inputs(points), X[FIRST:], data.Y[FIRST:])
    save_file({name: value.contiguous() for name, value in expected.items()}, folder / "expected")
    (folder / "models.json").write_text(json.dumps(classes, indent=1))


def write_commands(folder: Path) -> None:
    """Run each command for a step or a round, and leave its folder as it is then."""
    with _inside(folder):
        random = np.random.default_rng(0)
        X = random.uniform(size=(60, 2))
        np.savez("map.npz", X=X, y=np.sin(5.0 * X).sum(1))
        _run("sample", "map.npz", "--steps", "2", "-q", "3", "--initial", "5", "--out", "sample")
        optimize = ("optimize", "Branin", "--noise", "1", "--initial", "4", "-q", "2")
        _run(*optimize, "--steps", "2", "--out", "optimize")
        rows = [f"V{i},{33 + x:.4f},{y - 13:.4f}" for i, (x, y) in enumerate(X)]
        Path("villages.csv").write_text("\n".join(("id,longitude,latitude", *rows)) + "\n")
        start = ("survey", "start", "villages.csv", "--threshold", "0.1", "--out", "survey")
        _run(*start, "--yes")
        counts = [f"V{i},50,{positive}" for i, positive in enumerate(random.integers(0, 12, 20))]
        Path("results.csv").write_text("\n".join(("id,examined,positive", *counts)) + "\n")
        _run("survey", "tell", "survey", "results.csv")
        _run("survey", "next", "survey", "-q", "3")
        for picture in (*Path().rglob("*.png"), *Path().rglob("*.html")):
            picture.unlink()


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _run(*arguments: str) -> None:
    result = CliRunner().invoke(app, arguments)
    if result.exit_code:
        raise RuntimeError(f"{arguments}: {result.output}") from result.exception


def write_records(folder: Path) -> None:
    """Write an ingest with its source and its model, and the folder that two replicas share."""
    with _inside(folder):
        random = np.random.default_rng(0)
        X = random.uniform(size=(200, 2))
        table = pd.DataFrame(X, columns=["lon", "lat"]).assign(heat=np.sin(5.0 * X).sum(1))
        table[:100].to_csv("day-0.csv", index=False)
        model = WISKI(*_nothing(), bounds=BOX, grid_size=8)
        ingest(model, "day-*.csv", x=["lon", "lat"], y="heat", record="record")
        model.save("ingested.safetensors")
        table[100:].to_csv("day-1.csv", index=False)  # for later
        for name, seed in (("anna", 0), ("ben", 1)):
            replica = Replica(REPLICAS, FolderStore("shared"), name)
            places = np.random.default_rng(seed).uniform(size=(7, 2)).tolist()
            replica.tell(places, [sum(place) for place in places])
            replica.exchange()


REPLICAS = OptimizationSettings(bounds=((0.0, 1.0), (0.0, 1.0)), acquisition="TS", initial=4)


def _nothing() -> tuple[Tensor, Tensor]:
    return torch.empty(0, 2).double(), torch.empty(0, 1).double()


def write_experiments(folder: Path) -> None:
    """Write an experiment of Ax as JSON, and another one in a database."""
    after(6).save_to_json_file(str(folder / "experiment.json"))
    close_storage()
    run(started(storage=storage_config(folder / "experiments.db")), 6)
    close_storage()


def write(archive: Path = ARCHIVE) -> None:
    """Write all files anew."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for part in (write_models, write_commands, write_records, write_experiments):
            folder = root / part.__name__.removeprefix("write_")
            folder.mkdir()
            part(folder)
        with tarfile.open(archive, "w:xz") as tar:
            for path in sorted(root.rglob("*")):
                tar.add(path, path.relative_to(root), recursive=False, filter=_without_owner)


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def unpacked(folder: Path, archive: Path = ARCHIVE) -> Path:
    """Unpack all files below a folder, and return it."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder


if __name__ == "__main__":
    write()
