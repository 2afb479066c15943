"""Predictions of a run's model, and its results as files."""

from __future__ import annotations

import io
import json
import math
import platform
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from botorch.posteriors.gpytorch import GPyTorchPosterior
from gpytorch.module import Module
from matplotlib.figure import Figure
from torch import Tensor

from bo_stream.acquisition import mean_path
from bo_stream.acquisition.criteria import sites
from bo_stream.acquisition.feature_nipv import in_weight_space, weight_space
from bo_stream.diagnostics.trust import PICTURE, RECORD, TrustReport, report
from bo_stream.diagnostics.validation import ProgressiveValidation
from bo_stream.loops.models import MODELS
from bo_stream.models.base import StreamingGP
from bo_stream.process.observation_space import ObservationSpaceProcess
from bo_stream.process.process import ROWS, ConditionedProcess, PosteriorProcess
from bo_stream.storage.archive import atomic_write, package_version

_HALF_WIDTH_95 = 1.959963984540054


@torch.no_grad()
def predict(model: StreamingGP, X: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the marginal means and variances of ``model.posterior(X)``, ``n`` each, float64.

    Where the process is all in the weights of its features, the cost on a grid of d inputs is
    O(n 4^d) and one quadratic form, without ``n x r`` features.

    Args:
        model: Model of one output with an affine outcome transform.
        X: Inputs, ``n x d``.
    """
    process, inputs = process_at(model, X)
    if _in_features_only(process):
        space = weight_space(process)
        points = sites(space.basis, inputs)
        mean = points.linear(space.weights.mean)[0, 0]
        variance = points.quadratic(space.weights.covariance().unsqueeze(0))[0, 0]
    else:
        mean, variance = (value[0] for value in process.marginals(inputs))
    scale = model.outcome_scale().squeeze()
    return _in_units(model, X, mean), scale.square() * variance.clamp_min(0.0)


def process_at(model: StreamingGP, X: Tensor) -> tuple[PosteriorProcess, Tensor]:
    """Return the posterior process, and inputs ``n x d`` as it takes them, in float64."""
    inputs = model.transform_inputs(X).double()
    return model.process(inputs), inputs


@torch.no_grad()
def predict_mean(model: StreamingGP, X: Tensor) -> Tensor:
    """Compute the means of :func:`predict` alone, ``n``.

    In O(n r) where all is in r features, and in O(n k) where k observations are stored as rows.
    """
    if _in_features_only(model.process()):
        return mean_path(model)(X).squeeze(-1)
    process, inputs = process_at(model, X)
    rule = process.regression if isinstance(process, ObservationSpaceProcess) else process.mean
    mean = torch.cat([rule(rows)[0] for rows in inputs.split(ROWS, -2)], -1)
    return _in_units(model, X, mean).to(X)


def _in_units(model: StreamingGP, X: Tensor, mean: Tensor) -> Tensor:
    """Return means of the process at X, ``n``, in units of the outcomes."""
    first = cast(GPyTorchPosterior, model.posterior(X[:1])).mean.double().squeeze()
    return first + model.outcome_scale().squeeze() * (mean - mean[0])


def _in_features_only(process: PosteriorProcess) -> bool:
    """Return whether a process is in the weights of its features, rather than of few rows."""
    base = process.base if isinstance(process, ConditionedProcess) else process
    return in_weight_space(process) and not isinstance(base, ObservationSpaceProcess)


@dataclass(frozen=True)
class Score:
    """Scores of the predictions of held-out outcomes.

    Attributes:
        observations: Number of observations so far.
        rmse: Root mean squared error of the mean, in units of the target.
        rmse_sd: ``rmse`` over the standard deviation of the held-out outcomes.
        mae: Mean absolute error of the mean, in units of the target.
        mae_sd: ``mae`` over that standard deviation.
        nll: Mean negative log density of an outcome, noise included, in nats.
        coverage: Share of outcomes in their 95 % interval, noise included.
        wrong: Share of outcomes on the other side of a threshold than the mean; None without one.
    """

    observations: int
    rmse: float
    rmse_sd: float
    mae: float
    mae_sd: float
    nll: float
    coverage: float
    wrong: float | None = None


@torch.no_grad()
def score(model: StreamingGP, X: Tensor, Y: Tensor, threshold: float | None = None) -> Score:
    """Score the predictions, as of :func:`predict`, of held-out outcomes ``n x 1`` at ``n x d``.

    A threshold is in the units of the outcomes.
    """
    mean, variance = predict(model, X)
    noise = model.noise_at(model.transform_inputs(X).double()).squeeze(-2)
    variance = variance + noise * model.outcome_scale().square().squeeze()
    truth = Y.double().squeeze(-1)
    error, deviation = truth - mean, float(truth.std())
    rmse, mae = float(error.square().mean().sqrt()), float(error.abs().mean())
    density = 0.5 * (error.square() / variance + variance.log() + math.log(2.0 * math.pi))
    inside = error.abs() <= _HALF_WIDTH_95 * variance.sqrt()
    wrong = None
    if threshold is not None:
        wrong = float(((mean > threshold) != (truth > threshold)).double().mean())
    return Score(
        round(model.num_observations),
        rmse,
        rmse / deviation,
        mae,
        mae / deviation,
        float(density.mean()),
        float(inside.double().mean()),
        wrong,
    )


def mean_over_run(curve: Sequence[Score]) -> Score:
    """Average scores over the observations between the first and the last of them.

    Each measure is taken to change linearly from one score to the next. The number of observations
    is the last one's.

    Args:
        curve: Scores at growing numbers of observations, one or more.
    """
    last = curve[-1]
    if len(curve) == 1:
        return last
    at = [score.observations for score in curve]
    means: dict[str, Any] = {
        field.name: float(np.trapezoid([getattr(score, field.name) for score in curve], at))
        / (at[-1] - at[0])
        for field in fields(Score)
        if getattr(last, field.name) is not None
    }
    return replace(last, **{**means, "observations": last.observations})


# --- writing of results: files that are replaced together, pictures ------------------------------


_PACKAGES = ("bo-stream", "torch", "botorch", "gpytorch", "linear-operator", "numpy", "scipy")


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Replace files, given as contents by name, once all are on the disk, or none.

    Raises:
        OSError: The disk is full or the folder cannot be written; the old files stand.
    """
    with ExitStack() as stack:
        for name, content in files.items():
            file = stack.enter_context(atomic_write(folder / name))
            file.write(content)
            file.flush()


def write_picture(path: Path, draw: Callable[[], Figure]) -> None:
    """Draw a picture and write it; if it cannot be drawn, warn and leave none."""
    try:
        figure, file = draw(), io.BytesIO()
        figure.savefig(file, format="png", dpi=150)
    except Exception as error:  # of any kind: the results are there
        path.unlink(missing_ok=True)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        warnings.warn(f"{path.name} could not be drawn ({reason}).", RuntimeWarning, stacklevel=2)
    else:
        write_files(path.parent, {path.name: file.getvalue()})


def write_trust(
    folder: Path, model: StreamingGP, record: ProgressiveValidation
) -> TrustReport | None:
    """Write trust.json and trust.png, a report on a model; if there can be none, warn."""
    try:
        result = report(model, record)
    except Exception as error:  # of any kind: the results are there
        for name in (RECORD, PICTURE):
            (folder / name).unlink(missing_ok=True)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        warnings.warn(f"{RECORD} could not be written ({reason}).", RuntimeWarning, stacklevel=2)
        return None
    write_files(folder, {RECORD: result.to_json()})
    write_picture(folder / PICTURE, result.plot)
    return result


def record_file(content: Mapping[str, Any], seconds: float, notes: list[str]) -> bytes:
    """Return a run's record as a JSON file, with time, memory, versions and texts of warnings."""
    peak_memory_mib = None
    if sys.platform != "win32":
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak_memory_mib = round(peak / (1024.0 if sys.platform != "darwin" else 1024.0**2))
    circumstances = {
        "seconds": round(seconds, 3),
        "threads": torch.get_num_threads(),
        "peak_memory_mib": peak_memory_mib,
        "versions": {"python": platform.python_version()}
        | {name: package_version(name) for name in _PACKAGES},
        "warnings": notes,
    }
    return (json.dumps({**content, **circumstances}, indent=2) + "\n").encode()


def model_record(name: str, model: StreamingGP) -> dict[str, Any]:
    """Return size, hyperparameters and log of a model of a kind in ``MODELS`` as plain values."""
    return {
        "class": type(model).__name__,
        **MODELS[name].describe(model),
        "likelihood": _parameters(model.likelihood),
        "kernel": _parameters(model.covar_module),
        "outcome_scale": model.outcome_scale().tolist(),
        "numerical_log": [asdict(event) for event in model.numerical_log],
    }


def _parameters(module: Module) -> dict[str, Any]:
    """Return constrained values by name."""
    values = {
        name: parameter if constraint is None else constraint.transform(parameter)
        for name, parameter, constraint in module.named_parameters_and_constraints()
    }
    return {name.replace("raw_", ""): value.tolist() for name, value in values.items()}
