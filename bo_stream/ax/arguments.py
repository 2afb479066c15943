"""What a strategy is asked for is checked when it is made, not at the first trial of a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ax.generation_strategy.generation_strategy import GenerationStrategy
from ax.storage.json_store.encoder import object_to_json
from ax.storage.json_store.registry import (
    CORE_CLASS_ENCODER_REGISTRY,
    CORE_ENCODER_REGISTRY,
)
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.input_constructors import get_acqf_input_constructor
from botorch.acquisition.logei import qLogNoisyExpectedImprovement
from botorch.acquisition.multi_objective.logei import qLogNoisyExpectedHypervolumeImprovement
from botorch.models.model import Model
from botorch.optim.optimize import (
    optimize_acqf,
    optimize_acqf_discrete,
    optimize_acqf_discrete_local_search,
    optimize_acqf_mixed,
)
from botorch.optim.optimize_mixed import optimize_acqf_mixed_alternating

from bo_stream.models.osgpr import OSGPR
from bo_stream.models.wiski import WISKI

SEARCHES: tuple[Callable[..., Any], ...] = (
    optimize_acqf,
    optimize_acqf_mixed,
    optimize_acqf_mixed_alternating,
    optimize_acqf_discrete,
    optimize_acqf_discrete_local_search,
)
"""BoTorch's functions, of which Ax takes one that fits the search space."""

AXS_OWN = {
    *("acq_function", "acq_function_sequence", "bounds", "q", "choices", "discrete_choices"),
    *("discrete_dims", "cat_dims", "fixed_features", "fixed_features_list", "X_avoid"),
    *("inequality_constraints", "equality_constraints", "batch_initial_conditions"),
    *("post_processing_func", "return_best_only", "return_full_tree", "return_acq_values"),
}
"""Arguments of them that Ax gives, or that it could not use the result of."""

DATA = {"self", "train_X", "train_Y", "train_Yvar", "outcome_transform", "input_transform"}
"""Arguments of a model that Ax gives."""


def check_model(model: type[Model] | None, options: Mapping[str, Any]) -> None:
    """Check that there is such a model with such options.

    Args:
        model: None: WISKI or OSGPR.
        options: Further arguments of its constructor.

    Raises:
        ValueError: It is no class of models, or it has no such argument.
    """
    if model is not None and not (inspect.isclass(model) and issubclass(model, Model)):
        raise ValueError(
            f"Expected model to be a class of models, such as bo_stream.OSGPR, got {model!r}."
        )
    kinds: tuple[Callable[..., Any], ...] = (WISKI, OSGPR)
    if model is not None:
        kinds = (model, model.construct_inputs)
    _check_names("model_options", options, _names(kinds) - DATA)


def check_search(options: Mapping[str, Any]) -> None:
    """Check that some search of Ax has such options.

    Raises:
        ValueError: None has.
    """
    _check_names("search", options, _names(SEARCHES) - AXS_OWN - {"ic_gen_kwargs"})


def check_acquisition(kind: type[AcquisitionFunction] | None, options: Mapping[str, Any]) -> None:
    """Check that Ax can make an acquisition function with such options.

    Args:
        kind: Its class. None: Ax's choice.
        options: Further arguments of its input constructor.

    Raises:
        ValueError: It has no such argument, or BoTorch no input constructor for it.
    """
    default = (qLogNoisyExpectedImprovement, qLogNoisyExpectedHypervolumeImprovement)
    try:
        makers = [_maker(each) for each in (default if kind is None else (kind,))]
    except RuntimeError as error:
        raise ValueError(f"Expected an acquisition that Ax can construct: {error}") from error
    _check_names("acquisition_options", options, _names(makers) - {"model"})


def check_storable(strategy: GenerationStrategy) -> None:
    """Check that Ax can store a strategy, which it would do at the first trial.

    Raises:
        ValueError: It cannot.
    """
    try:
        object_to_json(strategy, CORE_ENCODER_REGISTRY, CORE_CLASS_ENCODER_REGISTRY)
    except Exception as error:
        raise ValueError(
            f"Ax could not store this strategy ({error}). Give plain values in model_options, "
            "acquisition_options and search. For a kernel or another module write a class of "
            "models whose constructor makes it, and give that to "
            "ax.storage.botorch_modular_registry.register_model."
        ) from error


def _maker(kind: type[AcquisitionFunction]) -> Callable[..., Any]:
    """The input constructor itself, which BoTorch wraps in a function of any arguments."""
    wrapped = get_acqf_input_constructor(kind)
    maker: Callable[..., Any] = inspect.getclosurevars(wrapped).nonlocals.get("f", wrapped)
    return maker


def _names(functions: Iterable[Callable[..., Any]]) -> set[str]:
    parameters = [p for each in functions for p in inspect.signature(each).parameters.values()]
    return {p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD}


def _check_names(argument: str, given: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(
            f"Expected {argument} to be some of {', '.join(sorted(known))}, got "
            f"{', '.join(unknown)}."
        )
