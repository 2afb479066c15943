"""Generators and generation strategies for Ax.

:func:`generation_strategy` checks its arguments and the names of options at once. Most values of
options are checked where they are used: when the first model is built, or the first candidate
chosen.
"""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from ax.adapter.registry import Cont_X_trans, GeneratorRegistryBase, GeneratorSetup, MBM_X_trans
from ax.adapter.transforms.derelativize import Derelativize
from ax.analysis.analysis import Analysis
from ax.analysis.best_trials import BestTrials
from ax.analysis.diagnostics import DiagnosticAnalysis
from ax.analysis.healthcheck.predictable_metrics import PredictableMetricsAnalysis
from ax.analysis.plotly.sensitivity import SensitivityAnalysisPlot
from ax.analysis.plotly.utility_progression import UtilityProgressionAnalysis
from ax.analysis.summary import Summary
from ax.core.search_space import SearchSpaceDigest
from ax.generation_strategy.generation_node import GenerationNode
from ax.generation_strategy.generation_strategy import GenerationStrategy
from ax.generation_strategy.generator_spec import GeneratorSpec
from ax.generation_strategy.transition_criterion import TransitionCriterion
from ax.generators.random.sobol import SobolGenerator
from ax.generators.torch.botorch_modular.acquisition import Acquisition
from ax.generators.torch.botorch_modular.generator import BoTorchGenerator
from ax.generators.torch.botorch_modular.surrogate import SurrogateSpec
from ax.generators.torch.botorch_modular.utils import ModelConfig
from ax.generators.torch_base import TorchGenResults, TorchOptConfig
from ax.storage.json_store.encoder import object_to_json
from ax.storage.json_store.registry import CORE_CLASS_ENCODER_REGISTRY, CORE_ENCODER_REGISTRY
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
from botorch.acquisition.input_constructors import get_acqf_input_constructor
from botorch.acquisition.logei import qLogExpectedImprovement, qLogNoisyExpectedImprovement
from botorch.acquisition.monte_carlo import qUpperConfidenceBound
from botorch.acquisition.multi_objective.logei import qLogNoisyExpectedHypervolumeImprovement
from botorch.models.model import Model
from botorch.models.transforms.outcome import Standardize
from botorch.optim.optimize import (
    optimize_acqf,
    optimize_acqf_discrete,
    optimize_acqf_discrete_local_search,
    optimize_acqf_mixed,
)
from botorch.optim.optimize_mixed import optimize_acqf_mixed_alternating
from torch import Tensor

from bo_stream.acquisition import FeatureNIPV
from bo_stream.ax.acquisition import (
    INTEGRATED,
    PoolAcquisition,
    StreamAcquisition,
    best_observed,
    check_options,
)
from bo_stream.ax.adapters import MIDDLE, QuasiRandomAdapter, StreamAdapter
from bo_stream.ax.initialization import SEARCHES, EnoughTrials, PoolStart, RegionSuits
from bo_stream.ax.pool import MC_POINTS, POOL, Candidates, Pool, handle, pool_named
from bo_stream.ax.region import RegionAdapter, RegionGenerator
from bo_stream.ax.surrogate import ASKED_FOR, Moments, RefitRecord, StreamSurrogate
from bo_stream.ax.transforms import (
    ExactCandidates,
    FiniteOutcomes,
    OutcomeUnits,
    ReportedMetrics,
    SteadyWinsorize,
)
from bo_stream.errors import check_seed, check_whole, plain
from bo_stream.models.auto.auto import AutoGP
from bo_stream.models.auto.families import OPTIONS
from bo_stream.models.base import StreamingGP
from bo_stream.models.inducing.osgpr import OSGPR
from bo_stream.models.wiski.wiski import WISKI

_RELATIVE_TO_MEASURED = {
    "Derelativize": {"use_raw_status_quo": True},
    "SteadyWinsorize": {"derelativize_with_raw_status_quo": True},
}
"""Options of transforms: as in Ax's default, a bound relative to the status quo is relative to its
measured outcome, not to the predicted one."""


def surrogate_spec(
    model: type | None = None,
    model_options: Mapping[str, Any] | None = None,
    default: type = AutoGP,
) -> SurrogateSpec:
    """Return Ax's specification of a model that standardises its outcomes itself.

    Args:
        model: A streaming model of BoTorch.
        model_options: Further arguments of its constructor.
        default: Model where none is given: :class:`AutoGP`, or :class:`WISKI`, which
            :class:`OSGPR` replaces for more inputs than a grid takes.
    """
    config = ModelConfig(
        botorch_model_class=model or default,
        model_options=dict(model_options or {}),
        outcome_transform_classes=[Standardize],
        name=default.__name__ if model is None else f"{model.__name__}{ASKED_FOR}",
    )
    return SurrogateSpec(model_configs=[config])


class StreamGenerator(BoTorchGenerator):
    """Ax's modular generator, whose surrogate is a :class:`StreamSurrogate`."""

    def __init__(
        self,
        surrogate_spec: SurrogateSpec | None = None,
        acquisition_class: type[Acquisition] | None = None,
        acquisition_options: dict[str, Any] | None = None,
        botorch_acqf_class: type[AcquisitionFunction] | None = None,
        botorch_acqf_options: dict[str, Any] | None = None,
        refit_on_cv: bool = False,
        warm_start_refit: bool = True,
        refit: float | None = None,
        learned: dict[str, RefitRecord] | None = None,
        units: dict[str, float] | None = None,
        cutoffs: dict[str, list[float | None]] | None = None,
        winsorize: bool = True,
    ) -> None:
        """Make a generator without a model; the first seven arguments are ``BoTorchGenerator``'s.

        For ``refit`` and ``learned`` see :class:`StreamSurrogate`. ``units`` and ``cutoffs`` (lower
        and upper, or None) of the metrics, by name, are written by the transforms when a metric is
        first seen or they change; ``winsorize``: outliers on the bad side are clipped.
        """
        super().__init__(
            surrogate_spec=surrogate_spec or _default_spec(),
            acquisition_class=acquisition_class or StreamAcquisition,
            acquisition_options=acquisition_options,
            botorch_acqf_class=botorch_acqf_class,
            botorch_acqf_options=botorch_acqf_options,
            refit_on_cv=refit_on_cv,
            warm_start_refit=warm_start_refit,
        )
        self.refit, self.winsorize = refit, winsorize
        self.learned: dict[str, RefitRecord] = {} if learned is None else learned
        self.units: dict[str, float] = {} if units is None else units
        self.cutoffs: dict[str, list[float | None]] = {} if cutoffs is None else cutoffs
        self._surrogate = StreamSurrogate(
            surrogate_spec=self.surrogate_spec,
            refit_on_cv=refit_on_cv,
            warm_start_refit=warm_start_refit,
            refit=refit,
            learned=self.learned,
            units=self.units,
        )

    def gen(
        self, n: int, search_space_digest: SearchSpaceDigest, torch_opt_config: TorchOptConfig
    ) -> TorchGenResults:
        """Generate candidates; overrides ``BoTorchGenerator.gen`` to name candidates of a pool."""
        results = super().gen(n, search_space_digest, torch_opt_config)
        if isinstance(self._acquisition, PoolAcquisition):
            return replace(results, candidate_metadata=list(self._acquisition.metadata))
        return results

    def _get_state(self) -> dict[str, Any]:
        """Return the state that Ax stores with each generator run, and gives to the next generator.

        Overrides ``Generator._get_state``, which returns nothing. The values are the same objects
        as long as the generator lives: Ax builds another generator for other values.
        """
        return {"learned": self.learned, "units": self.units, "cutoffs": self.cutoffs}

    def predict_without(
        self, name: str, gone: Tensor, X: Tensor, observation_noise: bool
    ) -> Moments | None:
        """Predict a metric given all its rows except some; see :class:`LeaveOutModel`."""
        surrogate = cast(StreamSurrogate, self.surrogate)
        return surrogate.predict_without(name, gone, X, observation_noise)

    def best_point(
        self, search_space_digest: SearchSpaceDigest, torch_opt_config: TorchOptConfig
    ) -> Tensor | None:
        """Return the feasible observed point of the best posterior mean; None: many objectives.

        Overrides ``BoTorchGenerator.best_point``, which Ax calls with every candidate and which
        computes the joint posterior at all data. Marginal means cost O(n r), and the acquisition
        has them already.
        """
        if torch_opt_config.is_moo:
            return None
        last = self._acquisition
        if isinstance(last, StreamAcquisition) and last.config is torch_opt_config:
            return last.best
        return best_observed(self.surrogate, search_space_digest, torch_opt_config)


_default_spec = surrogate_spec  # an argument of ``StreamGenerator`` has the name


class StreamGenerators(GeneratorRegistryBase):
    """Generators by the names in a ``GeneratorSpec``: for models that stream, and before them."""

    BO_STREAM = "BoStream"
    QUASI_RANDOM = "BoStreamSobol"
    REGION = "BoStreamRegion"

    @property
    def GENERATOR_KEY_TO_GENERATOR_SETUP(self) -> dict[str, GeneratorSetup]:
        """Return the generators, their adapters and their transforms.

        Overrides ``GeneratorRegistryBase.GENERATOR_KEY_TO_GENERATOR_SETUP``, Ax's own generators.
        Transforms of Ax that learn from all outcomes at every trial are not among them: they would
        change rows of the data. Learned values are in the state that Ax stores after each
        candidate, and not a second time in the arguments.
        """
        return {
            "BoStream": GeneratorSetup(
                adapter_class=StreamAdapter,
                generator_class=StreamGenerator,
                transforms=[
                    FiniteOutcomes,
                    ReportedMetrics,
                    ExactCandidates,
                    *MBM_X_trans,
                    Derelativize,
                    SteadyWinsorize,
                    OutcomeUnits,
                ],
                standard_adapter_kwargs={
                    "expand_model_space": False,
                    "transform_configs": _RELATIVE_TO_MEASURED,
                },
                not_saved_generator_kwargs=["learned", "units", "cutoffs"],
            ),
            "BoStreamSobol": GeneratorSetup(
                adapter_class=QuasiRandomAdapter,
                generator_class=SobolGenerator,
                transforms=Cont_X_trans,
            ),
            "BoStreamRegion": GeneratorSetup(
                adapter_class=RegionAdapter,
                generator_class=RegionGenerator,
                transforms=[FiniteOutcomes, ReportedMetrics, *Cont_X_trans],
                standard_adapter_kwargs={
                    "expand_model_space": False,
                    "fit_tracking_metrics": False,
                },
                not_saved_generator_kwargs=["region"],
            ),
        }


# --- a generation strategy that streams, ready for Ax's client -----------------------------------


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

REGION = "Region"
"""Name of the node that searches a region."""

FIRST_TRIALS = 5
"""Number of Sobol trials before models of the whole space."""

_OPTIMIZERS: tuple[Callable[..., Any], ...] = (
    optimize_acqf,
    optimize_acqf_mixed,
    optimize_acqf_mixed_alternating,
    optimize_acqf_discrete,
    optimize_acqf_discrete_local_search,
)
"""BoTorch's functions, of which Ax takes one that fits the search space."""

_AXS_OWN = {
    *("acq_function", "acq_function_sequence", "bounds", "q", "choices", "discrete_choices"),
    *("discrete_dims", "cat_dims", "fixed_features", "fixed_features_list", "X_avoid"),
    *("inequality_constraints", "equality_constraints", "batch_initial_conditions"),
    *("post_processing_func", "return_best_only", "return_full_tree", "return_acq_values"),
    "ic_gen_kwargs",
}
"""Arguments of these functions that Ax gives, or whose result it could not use."""

DATA = {"self", "train_X", "train_Y", "train_Yvar", "outcome_transform", "input_transform"}
"""Arguments of a model that Ax gives."""


def generation_strategy(
    model: type[Model] | None = None,
    model_options: Mapping[str, Any] | None = None,
    acquisition: str | type[AcquisitionFunction] | None = None,
    acquisition_options: Mapping[str, Any] | None = None,
    initialization: int | None = None,
    refit: float | None = None,
    search: str | Mapping[str, Any] | None = None,
    seed: int | None = None,
    pool: str | Pool | Candidates | None = None,
    winsorize: bool = True,
) -> GenerationStrategy:
    """Return a strategy of Sobol points, then candidates from models that take only new rows.

    Where a region is searched, the first trial of an experiment is the middle of the space.
    For ``client.set_generation_strategy``. The cost of a trial does not grow with the number of
    earlier trials, except for Ax's own reading of its data: about 0.4 ms of each. A snapshot takes
    2 ms a trial, nearly all of it in Ax's own code too.

    Args:
        model: A streaming model, such as :class:`WISKI` or :class:`OSGPR`. One for each metric.
            Default: :class:`AutoGP`, for any parameters: exact for the first hundreds of trials,
            then on a grid where Ax's transforms make at most four inputs of the parameters, else at
            inducing points. For qNIPV and FeatureNIPV, which are cheap in features: WISKI where
            there are at most four inputs, else OSGPR.
        model_options: Further arguments of its constructor, such as ``max_exact``.
        acquisition: A class of BoTorch, or one of ``ACQUISITIONS`` by name. Default: Ax's choice,
            qLogNEI for one objective and qLogNEHVI for several.
        acquisition_options: Its further arguments, such as ``beta``. Arguments of qNIPV and
            FeatureNIPV are ``mc_points``, a table of points in the experiment's own parameters like
            ``pool``, over which the variance is averaged; or ``num_mc_points``, the number of
            points to draw from the search space or the pool; and ``metric``, the metric whose
            variance it is, by default the only objective's.
        initialization: Number of Sobol trials, counting existing ones, but not failed or abandoned
            ones. They go on until each metric of the objectives and constraints has an outcome.
            Default: 5; where a region is searched twice the number p of parameters in up to 20,
            else the larger of 40 and p.
        refit: Growth of the number of observations since the last refit at which hyperparameters
            are learned again; 0: once. Default: at every trial up to 100 observations, then
            whenever the number beyond 100 has become 1.3 times as large.
        search: A name in ``SEARCHES``: ``box``, all of the search space; or ``region``, a trust
            region about the best point, with draws of an exact model of the nearest outcomes, for
            one objective without constraints of outcomes and for parameters that have an order. Or
            options of the search of the box, those of BoTorch's ``optimize_acqf`` or of the search
            for choices that Ax takes instead; besides or instead of Ax's own
            ``{"num_restarts": 20, "raw_samples": 1024}``. Default: ``region`` in more than
            ``MOST_IN_WHOLE_SPACE`` parameters, where it can be and none of the arguments of models,
            acquisition, refit and pool is given. The generation node of a trial, ``Region`` or
            ``Stream``, says which it is, the log ``bo_stream.ax`` why, unless an argument decides.
        seed: Seed of the Sobol points.
        pool: All candidates, as a :class:`Pool`, an argument of :meth:`Pool.of`, or the name of a
            registered one; candidates of previous trials are not proposed again. Ax stores its name
            only: a process that loads the experiment calls :func:`register_pool` itself.
        winsorize: Whether outcomes far on the bad side, such as penalties, are clipped as in Ax's
            default; never in a strategy for qNIPV or FeatureNIPV.

    Raises:
        ValueError: No such model, acquisition, search or option; an argument that a region does not
            take; a number out of range; a table that is no pool; or something that Ax cannot store.

    Example:
        >>> client.set_generation_strategy(generation_strategy(OSGPR, acquisition="qUCB"))
    """
    for_box = {
        "model": model,
        "model_options": model_options,
        "acquisition": acquisition,
        "acquisition_options": acquisition_options,
        "refit": refit,
        "pool": pool,
    }
    given = [name for name, value in for_box.items() if value is not None]
    of_search = dict(search) if isinstance(search, Mapping) else {}
    search = "box" if isinstance(search, Mapping) else search
    if search not in (None, *SEARCHES):
        raise ValueError(
            f"Expected search to be one of {', '.join(SEARCHES)}, or options of the search of the "
            f"box, got {search!r}."
        )
    if search == "region" and given:
        raise ValueError(
            "A region is searched with draws of an exact model of the nearest outcomes: leave out "
            f"{' and '.join(given)}, or search the box."
        )
    if initialization is not None:
        initialization = check_whole("initialization", initialization, 1)
    seed, refit = None if seed is None else check_seed(seed), plain(refit)
    is_growth = isinstance(refit, int | float) and (refit == 0.0 or refit > 1.0)
    if refit is not None and not is_growth:
        raise ValueError(f"Expected refit above 1 (a growth factor), or 0 for once, got {refit!r}.")
    for name in ("model_options", "acquisition_options"):
        if not isinstance(for_box[name], Mapping | None):
            raise ValueError(
                f"Expected {name} to be a mapping of names to values, got {for_box[name]!r}."
            )
    _check_names("search", of_search, _OPTIMIZERS, _AXS_OWN)
    for name in ("num_restarts", "raw_samples"):
        if name in of_search:
            of_search[name] = check_whole(name, of_search[name], 1)
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
    count = FIRST_TRIALS if initialization is None else initialization
    regions: list[GenerationNode] = []
    if pool is None:
        is_named, may_suit = search == "region", search is None and not given
        criteria: list[TransitionCriterion] = [EnoughTrials(STREAM, count)]
        of_first: dict[str, Any] = {}
        if is_named or may_suit:
            otherwise = [RegionSuits(STREAM, suits=False)] if may_suit else []
            criteria = [
                RegionSuits(REGION, named=is_named),
                EnoughTrials(REGION, initialization),
                *otherwise,
                *(criteria if may_suit else []),
            ]
            region = GeneratorSpec(StreamGenerators.REGION, generator_kwargs={"region": {}})
            regions = [GenerationNode(REGION, [region], transition_criteria=otherwise)]
            of_first = {"model_gen_options": {MIDDLE: is_named}}
        sobol = GeneratorSpec(
            StreamGenerators.QUASI_RANDOM,
            generator_kwargs={"seed": seed},
            generator_gen_kwargs=of_first,
        )
        first = GenerationNode("Sobol", [sobol], transition_criteria=criteria)
    else:
        name = handle(pool)
        pool_named(name).check_distinct()
        first_seed = secrets.randbits(31) if seed is None else seed
        first = PoolStart(name, count, STREAM, first_seed)
        arguments |= {"acquisition_class": PoolAcquisition, "acquisition_options": {POOL: name}}
    spec = GeneratorSpec(
        StreamGenerators.BO_STREAM,
        generator_kwargs=arguments,
        generator_gen_kwargs={"model_gen_options": {"optimizer_kwargs": of_search}},
    )
    streams = [] if search == "region" else [GenerationNode(STREAM, [spec])]
    strategy = GenerationStrategy(name="bo_stream", nodes=[first, *regions, *streams])
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
    kinds = default if kind is None else (kind,)
    try:
        wrapped = [get_acqf_input_constructor(each) for each in kinds]
    except RuntimeError as error:
        raise ValueError(f"Expected an acquisition that Ax can construct: {error}") from error
    # BoTorch wraps an input constructor in a function of any arguments
    makers = [inspect.getclosurevars(each).nonlocals.get("f", each) for each in wrapped]
    _check_names("acquisition_options", options, makers, {"model"})


def check_storable(strategy: GenerationStrategy) -> None:
    """Check that Ax can store a strategy, before it fails to at the first trial.

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
    """Check that names are arguments of some functions except ``others``, or are ``further``."""
    arguments = [p for each in functions for p in inspect.signature(each).parameters.values()]
    known = {p.name for p in arguments if p.kind is not inspect.Parameter.VAR_KEYWORD} - others
    known |= set(further)
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(
            f"Expected {argument} to be some of {', '.join(sorted(known))}, got "
            f"{', '.join(unknown)}."
        )


# --- a choice of Ax's analyses for experiments of thousands of trials ----------------------------


def analyses(*metrics: str) -> list[Analysis]:
    """Return Ax's analyses of progress, best trials, sensitivity and fit.

    For ``client.compute_analyses``, whose default also draws contours and the effect of each trial.
    Ax predicts contours at a point for each pair of trials and looks each point up among all
    trials, O(n³): from some hundred trials on this takes longer than everything else. The effects
    are a trace for each trial: 15 s at 500 trials, where all analyses here took 4.5 s, and 17 s at
    2,000 trials (processor time, three inputs).

    Args:
        metrics: Metrics whose sensitivity to the parameters is analysed.

    Example:
        >>> client.compute_analyses(analyses("loss"))
    """
    return [
        UtilityProgressionAnalysis(),
        BestTrials(),
        Summary(),
        *(SensitivityAnalysisPlot(metric_name=metric) for metric in metrics),
        DiagnosticAnalysis(),
        PredictableMetricsAnalysis(),
    ]
