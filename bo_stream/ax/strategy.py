"""A generation strategy that streams, ready for Ax's client.

:func:`generation_strategy` checks all that it is given at once, so that nothing is refused only
when the first model is built or the first trial stored.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ax.generation_strategy.generation_node import GenerationNode
from ax.generation_strategy.generation_strategy import GenerationStrategy
from ax.generation_strategy.generator_spec import GeneratorSpec
from ax.storage.json_store.encoder import object_to_json
from ax.storage.json_store.registry import CORE_CLASS_ENCODER_REGISTRY, CORE_ENCODER_REGISTRY
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
from botorch.acquisition.input_constructors import get_acqf_input_constructor
from botorch.acquisition.logei import qLogExpectedImprovement, qLogNoisyExpectedImprovement
from botorch.acquisition.monte_carlo import qUpperConfidenceBound
from botorch.acquisition.multi_objective.logei import qLogNoisyExpectedHypervolumeImprovement
from botorch.models.model import Model
from botorch.optim.optimize import (
    optimize_acqf,
    optimize_acqf_discrete,
    optimize_acqf_discrete_local_search,
    optimize_acqf_mixed,
)
from botorch.optim.optimize_mixed import optimize_acqf_mixed_alternating
from torch import Tensor

from bo_stream.acquisition import FeatureNIPV
from bo_stream.ax.acquisition import INTEGRATED, check_options
from bo_stream.ax.generator import StreamGenerators, surrogate_spec
from bo_stream.ax.initialization import EnoughTrials, PoolStart
from bo_stream.ax.pool import MC_POINTS, POOL, Candidates, Pool, handle, pool_named
from bo_stream.ax.pool_acquisition import PoolAcquisition
from bo_stream.models.auto.auto import AutoGP
from bo_stream.models.auto.families import OPTIONS
from bo_stream.models.base import StreamingGP
from bo_stream.models.inducing.osgpr import OSGPR
from bo_stream.models.wiski.wiski import WISKI

ACQUISITIONS: dict[str, type[AcquisitionFunction]] = {
    "qUCB": qUpperConfidenceBound,
    "qLogEI": qLogExpectedImprovement,
    "qLogNEI": qLogNoisyExpectedImprovement,
    "qLogNEHVI": qLogNoisyExpectedHypervolumeImprovement,
    "qNIPV": qNegIntegratedPosteriorVariance,
    "FeatureNIPV": FeatureNIPV,
}
"""Acquisition functions by the name that a user may give instead of the class."""

STREAM = "Stream"
"""Name of the node whose models stream."""

INITIALIZATION = 5

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
    "ic_gen_kwargs",
}
"""Arguments of them that Ax gives, or that it could not use the result of."""

DATA = {"self", "train_X", "train_Y", "train_Yvar", "outcome_transform", "input_transform"}
"""Arguments of a model that Ax gives."""


def generation_strategy(
    model: type[Model] | None = None,
    model_options: Mapping[str, Any] | None = None,
    acquisition: str | type[AcquisitionFunction] | None = None,
    acquisition_options: Mapping[str, Any] | None = None,
    initialization: int = INITIALIZATION,
    refit: float | None = None,
    search: Mapping[str, Any] | None = None,
    seed: int | None = None,
    pool: str | Pool | Candidates | None = None,
    winsorize: bool = True,
) -> GenerationStrategy:
    """Return a strategy of Sobol points, then candidates from models that take only what is new.

    For ``client.set_generation_strategy``. The cost of a trial does not grow with the number of
    those before, but for Ax's own reading of its data: about 0.4 ms of each. A snapshot takes 2 ms
    a trial, nearly all of it in Ax's own code too.

    Args:
        model: A streaming model, such as :class:`WISKI` or :class:`OSGPR`. One for each metric.
            Default: :class:`AutoGP`, for any parameters: exact for the first hundreds of trials,
            then on a grid where Ax's transforms make at most four inputs of the parameters, else at
            inducing points. For qNIPV and FeatureNIPV, which are cheap in features: WISKI where
            there are at most four inputs, else OSGPR.
        model_options: Further arguments of its constructor, such as ``max_exact``.
        acquisition: A class of BoTorch, or one of ``ACQUISITIONS`` by name. Default: Ax's choice,
            qLogNEI for one objective and qLogNEHVI for several.
        acquisition_options: Its further arguments, such as ``beta``. Those of qNIPV and
            FeatureNIPV: ``mc_points``, a table of points in the experiment's own parameters as
            ``pool`` is one, over which the variance is averaged; or ``num_mc_points``, how many to
            draw from the search space or the pool; and ``metric``, whose variance it is if not the
            only objective's.
        initialization: Number of Sobol trials, existing ones counted, those that failed or were
            abandoned not. They go on until each metric of the objectives and constraints has an
            outcome.
        refit: Growth of the number of observations since the last refit at which hyperparameters
            are learned anew; 0: once. Default: at every trial up to 100 observations, then whenever
            those beyond have become 1.3 times as many.
        search: Options of BoTorch's ``optimize_acqf``, or of the search for choices that Ax takes
            instead; beside or instead of Ax's own ``{"num_restarts": 20, "raw_samples": 1024}``.
        seed: Seed of the Sobol points.
        pool: All candidates, as a :class:`Pool`, what :meth:`Pool.of` takes, or the name of a
            registered one; those of former trials are not proposed again. Ax stores its name only:
            a process that loads the experiment calls :func:`register_pool` itself.
        winsorize: Whether outcomes far on the bad side, such as penalties, are clipped as in Ax's
            default. Those of a strategy for qNIPV or FeatureNIPV are not.

    Raises:
        ValueError: No such model, acquisition or option; a number out of range; a table that is
            no pool; or something that Ax cannot store.

    Example:
        >>> client.set_generation_strategy(generation_strategy(OSGPR, acquisition="qUCB"))
    """
    if initialization < 1:
        raise ValueError(f"Expected initialization of at least 1 trial, got {initialization}.")
    if refit is not None and refit != 0.0 and not refit > 1.0:
        raise ValueError(f"Expected refit above 1 (a growth factor), or 0 for once, got {refit}.")
    _check_names("search", search or {}, SEARCHES, AXS_OWN)
    if isinstance(acquisition, str) and acquisition not in ACQUISITIONS:
        raise ValueError(
            f"Expected acquisition to be a class or one of {', '.join(ACQUISITIONS)}, got "
            f"{acquisition!r}."
        )
    kind = ACQUISITIONS[acquisition] if isinstance(acquisition, str) else acquisition
    options = dict(acquisition_options or {})
    integrates = kind is not None and issubclass(kind, INTEGRATED)
    default: type[StreamingGP] = WISKI if integrates else AutoGP
    check_model(model, model_options or {}, default)
    if kind is not None and integrates:
        check_options(kind, options)
        points = options.get(MC_POINTS)
        if points is not None and not isinstance(points, Tensor):
            options[MC_POINTS] = handle(points)
    else:
        check_acquisition(kind, options)
    arguments: dict[str, Any] = {
        "surrogate_spec": surrogate_spec(model, model_options, default),
        "botorch_acqf_class": kind,
        "botorch_acqf_options": options,
        "refit": refit,
        "learned": {},
        "units": {},
        "cutoffs": {},
        "winsorize": winsorize,
    }
    if pool is None:
        sobol = GeneratorSpec(StreamGenerators.QUASI_RANDOM, generator_kwargs={"seed": seed})
        after = EnoughTrials(initialization, transition_to=STREAM)
        first = GenerationNode("Sobol", [sobol], transition_criteria=[after])
    else:
        name = handle(pool)
        pool_named(name).check_distinct()
        first_seed = secrets.randbits(31) if seed is None else seed
        first = PoolStart(name, initialization, STREAM, first_seed)
        arguments |= {"acquisition_class": PoolAcquisition, "acquisition_options": {POOL: name}}
    spec = GeneratorSpec(
        StreamGenerators.BO_STREAM,
        generator_kwargs=arguments,
        generator_gen_kwargs={"model_gen_options": {"optimizer_kwargs": dict(search or {})}},
    )
    strategy = GenerationStrategy(name="bo_stream", nodes=[first, GenerationNode(STREAM, [spec])])
    check_storable(strategy)
    return strategy


def check_model(
    model: type[Model] | None, options: Mapping[str, Any], default: type[StreamingGP] = AutoGP
) -> None:
    """Check that there is such a model, or the default if None, with such options.

    A default of WISKI may become OSGPR once the number of inputs is known.

    Raises:
        ValueError: It is no class of models, or it has no such argument.
    """
    if model is not None and not (inspect.isclass(model) and issubclass(model, Model)):
        raise ValueError(
            f"Expected model to be a class of models, such as bo_stream.OSGPR, got {model!r}."
        )
    default_makers = (WISKI, OSGPR) if default is WISKI else (default,)
    makers = default_makers if model is None else (model, model.construct_inputs)
    further = OPTIONS if AutoGP in makers else ()
    _check_names("model_options", options, makers, DATA, further)


def check_acquisition(kind: type[AcquisitionFunction] | None, options: Mapping[str, Any]) -> None:
    """Check that Ax can make an acquisition function, or its choice if None, with such options.

    Raises:
        ValueError: It has no such argument, or BoTorch no input constructor for it.
    """
    default = (qLogNoisyExpectedImprovement, qLogNoisyExpectedHypervolumeImprovement)
    try:
        makers = [_input_constructor(each) for each in (default if kind is None else (kind,))]
    except RuntimeError as error:
        raise ValueError(f"Expected an acquisition that Ax can construct: {error}") from error
    _check_names("acquisition_options", options, makers, {"model"})


def _input_constructor(kind: type[AcquisitionFunction]) -> Callable[..., Any]:
    """Return an input constructor, which BoTorch wraps in a function of any arguments."""
    wrapped = get_acqf_input_constructor(kind)
    maker: Callable[..., Any] = inspect.getclosurevars(wrapped).nonlocals.get("f", wrapped)
    return maker


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


def _check_names(
    argument: str,
    given: Iterable[str],
    functions: Iterable[Callable[..., Any]],
    others: set[str],
    further: Iterable[str] = (),
) -> None:
    """Check that names are further ones, or of arguments of some functions, without others."""
    arguments = [p for each in functions for p in inspect.signature(each).parameters.values()]
    known = {p.name for p in arguments if p.kind is not inspect.Parameter.VAR_KEYWORD} - others
    known |= set(further)
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(
            f"Expected {argument} to be some of {', '.join(sorted(known))}, got "
            f"{', '.join(unknown)}."
        )
