"""A generation strategy that streams, ready for Ax's client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ax.adapter.registry import Generators
from ax.generation_strategy.generation_node import GenerationNode
from ax.generation_strategy.generation_strategy import GenerationStrategy
from ax.generation_strategy.generator_spec import GeneratorSpec
from ax.generation_strategy.transition_criterion import MinTrials
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
from botorch.acquisition.logei import qLogExpectedImprovement, qLogNoisyExpectedImprovement
from botorch.acquisition.monte_carlo import qUpperConfidenceBound
from botorch.acquisition.multi_objective.logei import (
    qLogNoisyExpectedHypervolumeImprovement,
)
from botorch.models.model import Model

from bo_stream.acquisition import FeatureNIPV
from bo_stream.ax.generator import StreamGenerators, surrogate_spec
from bo_stream.ax.surrogate import REFIT
from bo_stream.models.wiski import WISKI

ACQUISITIONS: dict[str, type[AcquisitionFunction]] = {
    "qUCB": qUpperConfidenceBound,
    "qLogEI": qLogExpectedImprovement,
    "qLogNEI": qLogNoisyExpectedImprovement,
    "qLogNEHVI": qLogNoisyExpectedHypervolumeImprovement,
    "qNIPV": qNegIntegratedPosteriorVariance,
    "FeatureNIPV": FeatureNIPV,
}
"""By the name that a user may give instead of the class."""

INITIALIZATION = 5
SEARCH = {"num_restarts": 8, "raw_samples": 256}
"""Of the acquisition function; Ax's own are 20 and 1,024."""


def generation_strategy(
    model: type[Model] = WISKI,
    model_options: Mapping[str, Any] | None = None,
    acquisition: str | type[AcquisitionFunction] | None = None,
    acquisition_options: Mapping[str, Any] | None = None,
    initialization: int = INITIALIZATION,
    refit: float = REFIT,
    search: Mapping[str, Any] | None = None,
    seed: int | None = None,
) -> GenerationStrategy:
    """Sobol points, then candidates from models that take each new observation only.

    For ``client.set_generation_strategy``. What a trial costs does not grow with the number of
    those before, but for Ax's own reading of its data. Parameters that Ax's transforms make more
    inputs of than :class:`WISKI` takes (four) get :class:`OSGPR` instead; the log says so.

    Args:
        model: :class:`WISKI`, :class:`OSGPR`, or another streaming model. One for each metric.
        model_options: Further arguments of its constructor, such as ``grid_size``.
        acquisition: A class of BoTorch, or one of ``ACQUISITIONS`` by name. Default: Ax's choice,
            qLogNEI for one objective and qLogNEHVI for several.
        acquisition_options: Further arguments of it, such as ``beta``.
        initialization: Sobol trials, existing ones counted.
        refit: Hyperparameters are learned anew whenever the observations have become this many
            times as many as at the last refit; 0: once.
        search: Options of ``optimize_acqf``, such as ``num_restarts``; beside or instead of
            ``SEARCH``.
        seed: Of the Sobol points.

    Raises:
        ValueError: No such acquisition, or a number out of range.

    Example:
        >>> client.set_generation_strategy(generation_strategy(WISKI, acquisition="qUCB"))
    """
    _check(initialization, refit)
    first = GenerationNode(
        "Sobol",
        [GeneratorSpec(Generators.SOBOL, generator_kwargs={"seed": seed})],
        transition_criteria=[
            MinTrials(initialization, transition_to="Stream", use_all_trials_in_exp=True)
        ],
    )
    spec = GeneratorSpec(
        StreamGenerators.BO_STREAM,
        generator_kwargs={
            "surrogate_spec": surrogate_spec(model, model_options),
            "botorch_acqf_class": _acquisition(acquisition),
            "botorch_acqf_options": dict(acquisition_options or {}),
            "refit": refit,
            "learned": {},
            "units": {},
        },
        generator_gen_kwargs={
            "model_gen_options": {"optimizer_kwargs": {**SEARCH, **(search or {})}}
        },
    )
    return GenerationStrategy(name="bo_stream", nodes=[first, GenerationNode("Stream", [spec])])


def _acquisition(given: str | type[AcquisitionFunction] | None) -> type[AcquisitionFunction] | None:
    if not isinstance(given, str):
        return given
    if given not in ACQUISITIONS:
        names = ", ".join(ACQUISITIONS)
        raise ValueError(f"Expected acquisition to be a class or one of {names}, got {given!r}.")
    return ACQUISITIONS[given]


def _check(initialization: int, refit: float) -> None:
    if initialization < 1:
        raise ValueError(f"Expected initialization of at least 1 trial, got {initialization}.")
    if refit != 0.0 and not refit > 1.0:
        raise ValueError(f"Expected refit above 1 (a growth factor), or 0 for once, got {refit}.")
