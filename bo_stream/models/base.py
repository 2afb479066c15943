"""The streaming Gaussian process: what a model owns, and where each of its verbs is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from botorch.models.gpytorch import GPyTorchModel
from botorch.models.model import FantasizeMixin
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.datasets import SupervisedDataset
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models.gp import GP
from torch import Tensor

from bo_stream.bases.stems import Stem
from bo_stream.models.inference import Inference
from bo_stream.models.input_transforms import keeps_boxes
from bo_stream.models.outcomes import prediction, selection
from bo_stream.models.outcomes.base import NoiseAtInputs, Outcomes
from bo_stream.models.prior import move_priors
from bo_stream.models.shell import construction, fitting, hooks, posteriors, units, updates
from bo_stream.models.shell.attribute import Attribute
from bo_stream.models.shell.hooks import UnkeptOutcomes
from bo_stream.models.shell.updates import LatestInputs
from bo_stream.process.cached_baseline import CachedBaseline
from bo_stream.process.process import ConditionedProcess, PosteriorProcess, SelectedProcess
from bo_stream.storage.objects import read_model, write_model
from bo_stream.storage.trusted import Trusted
from bo_stream.warnings import NumericalEvent, NumericalLog, with_event


class StreamingGP(GPyTorchModel, GP, FantasizeMixin):
    """A Gaussian process whose memory of the data has a fixed size.

    ``update`` puts observations into memory, in place; ``condition_on_observations`` (hence
    ``fantasize``) returns a model that is conditioned on hypothetical data and shares the memory.
    Arithmetic is in float64, whatever the dtype of inputs and outputs. Gradients of posteriors flow
    to inputs, not to hyperparameters; those are learned from ``compute_custom_loss``.

    The class is a table of contents: a method is a function of the model in the file of its
    subject, mostly in ``bo_stream/models/shell``, and is named here. What differs between models is
    held in ``_units``, ``_memory``, ``_inference`` and ``_cache``.
    """

    # hyperparameters, and transforms where there are any
    covar_module: Kernel
    mean_module: Mean
    likelihood: Likelihood
    input_transform: InputTransform
    stem: Stem
    outcome_transform: OutcomeTransform

    # shape
    _batch_shape: torch.Size
    _num_outputs: int
    _input_dim: int
    _process_dim: int  # of inputs after their transform and the stem

    # what differs between models: units of outcomes, what is left of the data, how it becomes a
    # posterior, and what was derived from it under one state of the hyperparameters
    _units: Outcomes
    _memory: Any
    _inference: Inference[Any, Any]
    _cache: Any = None

    # set in a model that is conditioned on hypothetical observations or keeps known points
    _conditioned_process: PosteriorProcess | None
    _conditioned_noise: NoiseAtInputs | None = None
    _known: tuple[CachedBaseline, ...] = ()

    _latest: LatestInputs = LatestInputs()
    _numerical_log: NumericalLog = ()
    _said: tuple[str, ...] = ()  # plain values, which a saved model may hold
    _first_values: Mapping[str, Tensor] = MappingProxyType(
        {}
    )  # of hyperparameters; a refit's start
    _is_fitting: bool = False
    _outcomes_argument: ClassVar[str] = "train_Y"  # of the constructor
    _has_transformed_inputs: bool = True  # whoever asks is sent to _original_train_inputs

    # --- construction: the steps of a constructor, in their order --------------------------

    _begin = construction.begin
    _first_inputs = construction.first_inputs
    _set_modules = construction.set_modules
    _learn_transform = construction.learn_transform
    _set_inputs_and_modules = construction.set_inputs_and_modules
    _standardize_first = construction.standardize_first
    _take_first = construction.take_first

    # --- observations: into memory, and out of it ------------------------------------------

    update = updates.update
    retract = updates.retract
    forget = updates.forget
    clear = updates.clear
    merge = updates.merge
    coordinates = updates.coordinates

    _check_not_conditioned = updates.check_not_conditioned
    _check_retractable = updates.check_retractable
    _observe = updates.observe
    _observations = updates.observations
    _measured = updates.measured
    _set_memory = updates.set_memory
    _refresh_fixed_noise = updates.refresh_fixed_noise
    _undone_on_error = updates.undone_on_error

    # --- the posterior: from hyperparameters and memory ------------------------------------

    transform_inputs = posteriors.transform_inputs
    process_inputs = posteriors.process_inputs
    hypothetical_inputs = posteriors.hypothetical_inputs
    process = posteriors.process
    feature_process = posteriors.feature_process
    noise_at = posteriors.noise_at
    posterior = posteriors.posterior  # type: ignore[assignment]  # no further arguments
    predictive = prediction.predictive
    log_predictive = prediction.log_predictive

    _prior = Attribute(posteriors.prior_of)
    _outcomes = Attribute(posteriors.chain_of)
    _marginals = posteriors.marginals
    _offset_and_scale = posteriors.offset_and_scale
    _standardized = posteriors.standardized_outcomes
    _leave_training = posteriors.leave_training

    # --- hypothetical observations: a model beside this one --------------------------------

    condition_on_observations = posteriors.condition_on_observations
    fantasize = posteriors.fantasize
    get_fantasy_model = hooks.get_fantasy_model
    with_known_points = hooks.with_known_points

    _with_process = posteriors.with_process
    _shallow_copy = posteriors.shallow_copy

    # --- hyperparameters: fits from the memory ---------------------------------------------

    log_marginal_likelihood = fitting.log_marginal_likelihood
    compute_custom_loss = fitting.compute_custom_loss
    train = fitting.train

    _fit = fitting.fit
    _standardize_by = fitting.standardize_by

    @property
    def custom_fit(self) -> Callable[..., MarginalLogLikelihood]:
        """BoTorch's hook for fitting: batch elements and outputs apart, see :func:`fit_elements`.

        Raises:
            AttributeError: Such a fit is under way, for which BoTorch shall use its own routine.
        """
        if self._is_fitting:
            raise AttributeError("custom_fit is absent during a fit.")
        return self._fit

    def eval(self) -> Self:
        """Evaluation mode."""
        return self.train(False)

    # --- units: a user's and those of the process ------------------------------------------

    outcome_scale = units.outcome_scale
    transformed_noise = units.transformed_noise
    noise_level = units.noise_level
    noise_given = units.noise_given
    standardized = units.standardized
    calibrated_inputs = units.calibrated_inputs

    # --- training data, for routines of BoTorch that read them -----------------------------

    @property
    def train_targets(self) -> Tensor:
        """An empty tensor of the model's dtype and device: outcomes are not kept.

        Those functions of BoTorch that read them raise UnsupportedError.
        """
        return next(self.covar_module.parameters()).new_empty(0).as_subclass(UnkeptOutcomes)

    train_inputs = Attribute(hooks.train_inputs)
    _original_train_inputs = Attribute(hooks.original_train_inputs)
    forward = hooks.forward

    # --- shape, and what is on record ------------------------------------------------------

    @property
    def maps_boxes(self) -> bool:
        """Whether a box of inputs is one after :meth:`transform_inputs` too."""
        transform = getattr(self, "input_transform", None)
        return getattr(self, "stem", None) is None and keeps_boxes(transform)

    @property
    def batch_shape(self) -> torch.Size:
        """Batch shape of a posterior at inputs without one: the data's, or that of fantasies.

        A model that is conditioned on hypothetical observations has their batch shape, broadcast
        with the data's. Hyperparameters and memory keep the data's.
        """
        process = self._conditioned_process
        while isinstance(process, SelectedProcess):
            process = process.base
        return process.batch_shape if isinstance(process, ConditionedProcess) else self._batch_shape

    @property
    def _parameter_shape(self) -> torch.Size:
        """Batch shape of hyperparameters of every output, ``batch_shape (x m if m > 1)``."""
        outputs = (self._num_outputs,) if self._num_outputs > 1 else ()
        return torch.Size((*self._batch_shape, *outputs))

    @property
    def _output_batch(self) -> torch.Size:
        return torch.Size((*self._batch_shape, self._num_outputs))

    @property
    def num_outputs(self) -> int:
        """Number m of outputs."""
        return self._num_outputs

    @property
    def num_observations(self) -> float:
        """Observations in memory; not whole after :meth:`forget`."""
        return float(self._counts().reshape(-1)[0])

    def _counts(self) -> Tensor:
        return self._memory.counts

    @property
    def numerical_log(self) -> NumericalLog:
        """Each jitter and each fallback that this model ever used; empty for a healthy one.

        Fantasies and posteriors of conditioned processes, which leave nothing behind, are not in.
        """
        return self._numerical_log

    def log_event(
        self, what: str, size: int = 0, jitter: float = 0.0, observations: float | None = None
    ) -> None:
        """Put a jitter or a fallback on record; see :class:`NumericalEvent`.

        Args:
            what: Was done.
            size: Of the matrix, or the number of points.
            jitter: Relative to the mean of the diagonal.
            observations: In memory; by default as many as are in it now.
        """
        observations = self.num_observations if observations is None else observations
        event = NumericalEvent(what, size, jitter, observations)
        self._numerical_log = with_event(self._numerical_log, event)

    def has_said(self, what: str) -> bool:
        """Say whether a user has been told of something that is said once."""
        return what in self._said

    def says(self, what: str) -> None:
        """Remember that a user has been told."""
        self._said = (*self._said, what)

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.covar_module.parameters()).dtype

    def _from_per_output(self, value: Tensor) -> Tensor:
        return value.squeeze(-1) if self.num_outputs == 1 else value

    # --- some of the outputs, another device -----------------------------------------------

    subset_output = selection.subset_output

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the memory along to another device, where it stays in float64, and all priors."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        move_priors(self, fn)
        device = fn(torch.empty(0, dtype=self._dtype, device=self._units.shift.device)).device
        if device != self._units.shift.device:
            self._units = self._units.map(lambda value: value.to(device))
            self._latest = self._latest.to(device)
            self._memory, self._cache = self._inference.moved(self._memory, self._cache, device)
        return self

    # --- files, and states of the hyperparameters ------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the whole model, memory included; a crash leaves an old file whole.

        The file is one of ``safetensors``: other programs can read its tensors, and
        :func:`bo_stream.describe_file` what it says of itself.

        Args:
            path: Of the file, by custom ``*.safetensors``.

        Raises:
            OSError: The file cannot be written.
            ValueError: The model holds what is neither a tensor, a plain value nor an object of an
                importable class, such as a lambda.
        """
        write_model(path, self, self._description())

    def _description(self) -> dict[str, Any]:
        """Return what a file says of the model beside its class; see :func:`describe_file`."""
        return {
            "dtype": str(self._dtype).removeprefix("torch."),
            "observations": self.num_observations,
            "outputs": self.num_outputs,
            "dimensions": self._input_dim,
        }

    @classmethod
    def load(
        cls,
        path: str | Path,
        map_location: str | torch.device | None = None,
        trusted: Sequence[Trusted] = (),
    ) -> Self:
        """Read a model that :meth:`save` wrote, without running anything that the file brings.

        The file may name classes of this package, of torch, GPyTorch and BoTorch that compute; a
        file that names anything else is refused. It decides the numbers: a file from elsewhere can
        still hold a wrong model, or a very large one.

        Args:
            path: Of the file.
            map_location: Device of the tensors; default: where they were.
            trusted: Classes and functions of your own (a kernel, a likelihood, a transform) that
                the file may name.

        Raises:
            OSError: The file cannot be opened.
            ValueError: The file is of another format, version or class, is damaged, or names what
                is not trusted.
        """
        model = read_model(path, cls, map_location, trusted)
        construction.restore_products(model)
        return model

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        keep_transforms: bool = True,
        assign: bool = False,
    ) -> Any:
        """Load hyperparameters and transforms; the memory stays, for it is in original units.

        Args:
            state_dict: Of a model of the same structure; holds no data.
            strict: Whether the keys must match.
            keep_transforms: Ignored: nothing depends on it here.
            assign: As in torch.
        """
        return torch.nn.Module.load_state_dict(self, state_dict, strict=strict, assign=assign)

    @classmethod
    def construct_inputs(cls, training_data: SupervisedDataset, **kwargs: Any) -> dict[str, Any]:
        """Constructor arguments from a data set; further keyword arguments are passed on."""
        arguments = super().construct_inputs(training_data)
        outcomes = arguments.pop("train_Y")
        return {cls._outcomes_argument: outcomes, **arguments, **kwargs}
