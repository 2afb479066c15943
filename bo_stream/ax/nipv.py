"""Integrated variance of one metric, over points that the user's parameters name."""

from __future__ import annotations

from typing import Any, cast

import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
from botorch.acquisition.input_constructors import acqf_input_constructor
from botorch.acquisition.objective import PosteriorTransform
from botorch.exceptions.errors import UnsupportedError
from botorch.models.model import Model, ModelList
from botorch.models.model_list_gp_regression import ModelListGP
from botorch.utils.sampling import draw_sobol_samples
from torch import Tensor

from bo_stream.acquisition import FeatureNIPV
from bo_stream.acquisition.weight_space import lives_in_features
from bo_stream.bases.grid.interpolation import GridBasis
from bo_stream.models.base import StreamingGP

INTEGRATED = (FeatureNIPV, qNegIntegratedPosteriorVariance)
"""Acquisition functions that average a variance over points."""

NUM_MC_POINTS = 256
"""Number of points that the variance is averaged over where none are given."""

OPTIONS = ("mc_points", "num_mc_points", "metric")


class StreamNIPV(qNegIntegratedPosteriorVariance):
    """BoTorch's integrated variance, with an input constructor that takes ``mc_points`` too."""


@acqf_input_constructor(StreamNIPV)
def construct_inputs_stream_nipv(
    model: Model,
    bounds: list[tuple[float, float]] | None = None,
    mc_points: Tensor | None = None,
    num_mc_points: int = NUM_MC_POINTS,
    X_pending: Tensor | None = None,
    posterior_transform: PosteriorTransform | None = None,
) -> dict[str, Any]:
    """Construct the arguments of a :class:`StreamNIPV`, as BoTorch's own takes no ``mc_points``.

    Args:
        model: Model of one output, or of several with a posterior transform.
        bounds: Lower and upper bound of each input, to draw points from.
        mc_points: Points instead, ``N x d``, as the model takes its inputs.
        num_mc_points: Number of points to draw.
        X_pending: Points that will be observed in any case, ``n x d``.
        posterior_transform: Transform of several outputs to one.

    Raises:
        UnsupportedError: Several outputs without a posterior transform, or a list of models.
        ValueError: Neither points nor bounds.
    """
    many = model.num_outputs > 1 and posterior_transform is None
    if many or isinstance(model, ModelList | ModelListGP):
        raise UnsupportedError(
            f"Expected a model of one output to integrate its variance, got a "
            f"{type(model).__name__} of {model.num_outputs}. Pass one of model.models, or "
            "model.subset_output([i])."
        )
    if mc_points is None:
        if bounds is None:
            raise ValueError("Expected mc_points, or bounds to draw them from, got neither.")
        mc_points = points_of_box(bounds, num_mc_points)
    return {
        "model": model,
        "mc_points": mc_points,
        "X_pending": X_pending,
        "posterior_transform": posterior_transform,
    }


def points_of_box(bounds: list[tuple[float, float]], count: int) -> Tensor:
    """Draw Sobol points, the same at each trial, ``count x d``, float64."""
    box = torch.as_tensor(bounds, dtype=torch.float64).mT
    return draw_sobol_samples(box, n=count, q=1, seed=0).squeeze(-2)


def integrated_variance(
    kind: type[AcquisitionFunction],
    model: Model,
    bounds: list[tuple[float, float]],
    mc_points: Tensor | None,
    X_pending: Tensor | None,
) -> AcquisitionFunction:
    """Make a :class:`FeatureNIPV` where the model allows one, else an equal :class:`StreamNIPV`.

    Args:
        kind: One of ``INTEGRATED``.
        model: Model of one metric.
        bounds: Bounds of the inputs: without ``mc_points`` the average is over this box.
        mc_points: Points to average over, ``N x d``.
        X_pending: Points that will be observed in any case, ``n x d``.
    """
    if issubclass(kind, FeatureNIPV) and isinstance(model, StreamingGP):
        if mc_points is not None and lives_in_features(model):
            return FeatureNIPV(model, mc_points.to(model.train_targets), X_pending=X_pending)
        if mc_points is None and _integrates_boxes(model):
            box = torch.as_tensor(bounds).to(model.train_targets).mT
            return FeatureNIPV(model, bounds=box, X_pending=X_pending)
    points = points_of_box(bounds, NUM_MC_POINTS) if mc_points is None else mc_points
    return StreamNIPV(model, points, X_pending=X_pending)


def _integrates_boxes(model: StreamingGP) -> bool:
    if not (model.maps_boxes and lives_in_features(model)):
        return False
    return isinstance(getattr(model.feature_process(), "basis", None), GridBasis)


def model_of_metric(model: Model, metrics: list[str], metric: str) -> Model:
    """Return the model of one of several metrics, given in the order of the model's outputs."""
    place = metrics.index(metric)
    if isinstance(model, ModelList | ModelListGP):
        return cast(Model, model.models[place])
    return model if model.num_outputs == 1 else model.subset_output([place])


def chosen_metric(
    kind: type[AcquisitionFunction], given: Any, metrics: list[str], objectives: list[str]
) -> str:
    """Return the metric whose variance is integrated: the only objective, unless one is named.

    Args:
        kind: Class of the acquisition function.
        given: Name of a metric, or None.
        metrics: Names of all that are modelled.
        objectives: Names of the objectives' metrics.

    Raises:
        UnsupportedError: There are several objectives, and none is named.
        ValueError: No such metric.
    """
    if given is not None and given not in metrics:
        raise ValueError(f"Expected metric to be one of {', '.join(metrics)}, got {given!r}.")
    if given is None and len(objectives) != 1:
        raise UnsupportedError(
            f"{kind.__name__} is about the variance of one metric, and the objectives are of "
            f"{', '.join(objectives)}. Name one, as in "
            f"acquisition_options={{'metric': {objectives[0]!r}}}."
        )
    return objectives[0] if given is None else str(given)


def check_options(kind: type[AcquisitionFunction], options: dict[str, Any]) -> None:
    """Check the names of options.

    Raises:
        ValueError: One is unknown, both points and their number are given, or there are none.
    """
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ValueError(
            f"Expected options of {kind.__name__} among {', '.join(OPTIONS)}, got "
            f"{', '.join(unknown)}."
        )
    if options.get("mc_points") is not None and options.get("num_mc_points") is not None:
        raise ValueError("Expected one of mc_points and num_mc_points, got both.")
    count = options.get("num_mc_points", 1)
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"Expected num_mc_points of at least 1, got {count}.")
