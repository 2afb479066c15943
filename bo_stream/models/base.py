"""The streaming Gaussian process: every verb of a model, over a memory of fixed size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, Self, TypeVar

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError, UnsupportedError
from botorch.models.gpytorch import GPyTorchModel
from botorch.models.model import FantasizeMixin
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.models.utils import fantasize as fantasize_flag
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.posteriors.posterior import Posterior
from botorch.sampling.base import MCSampler
from botorch.utils.datasets import SupervisedDataset
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood, Likelihood
from gpytorch.means import Mean
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models.gp import GP
from torch import Tensor

from bo_stream.bases.stems import Stem
from bo_stream.models import construction, fitting
from bo_stream.models.checks import (
    check_finite,
    check_hypothetical,
    check_inputs,
    check_mergeable,
    check_noise,
    check_sampler,
)
from bo_stream.models.construction import (
    checked_projection,
    choose_likelihood,
    observed_inputs,
)
from bo_stream.models.inference import Inference, Solve
from bo_stream.models.input_transforms import (
    LatestInputs,
    TrainInputs,
    UnkeptOutcomes,
    check_not_train_inputs,
    keeps_boxes,
)
from bo_stream.models.memory import Observations, Targets
from bo_stream.models.outcomes import prediction, selection
from bo_stream.models.outcomes.base import NoiseAtInputs, Outcomes
from bo_stream.models.outcomes.selection import chosen_outputs
from bo_stream.models.outcomes.transform import OutcomeChain
from bo_stream.models.prior import Prior, move_priors
from bo_stream.process.cached_baseline import CachedBaseline, arrangements
from bo_stream.process.process import ConditionedProcess, PosteriorProcess, SelectedProcess
from bo_stream.storage.objects import read_model, write_model
from bo_stream.storage.trusted import Trusted
from bo_stream.tensors import outside_inference_mode
from bo_stream.warnings import NumericalEvent, NumericalLog, with_event

P = ParamSpec("P")
T = TypeVar("T")


def keeps_tensors(method: Callable[P, T]) -> Callable[P, T]:
    """Run a method outside inference mode, with copies of arguments that were made inside it.

    Autograd refuses tensors made under ``torch.inference_mode``: a method that keeps tensors, in
    memory or in a cache, would spoil every later gradient.
    """

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        within = torch.is_inference_mode_enabled()
        if not within and not any(map(_is_inference, (*args, *kwargs.values()))):
            return method(*args, **kwargs)
        with outside_inference_mode():
            arguments = [_normal(value) for value in args]
            options = {name: _normal(value) for name, value in kwargs.items()}
            return method(*arguments, **options)  # type: ignore[arg-type]

    return run


def _is_inference(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_inference()


def _normal(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


class StreamingGP(GPyTorchModel, GP, FantasizeMixin):
    """A Gaussian process whose memory of the data has a fixed size.

    ``update`` puts observations into memory, in place; ``condition_on_observations`` (hence
    ``fantasize``) returns a model that is conditioned on hypothetical data and shares the memory.
    Arithmetic is in float64, whatever the dtype of inputs and outputs. Gradients of posteriors flow
    to inputs, not to hyperparameters; those are learned from ``compute_custom_loss``.

    Methods whose subject has a file of its own (construction, fits, outcomes at single points, some
    of the outputs) are functions there, of the model, and are named here.
    """

    likelihood: Likelihood
    covar_module: Kernel
    mean_module: Mean
    outcome_transform: OutcomeTransform
    _num_outputs: int
    _batch_shape: torch.Size
    _input_dim: int
    _process_dim: int
    _memory: Any
    _units: Outcomes
    _inference: Inference[Any, Any]
    _cache: Any = None
    _conditioned_process: PosteriorProcess | None
    _conditioned_noise: NoiseAtInputs | None = None
    _known: tuple[CachedBaseline, ...] = ()
    _numerical_log: NumericalLog = ()
    _said: tuple[str, ...] = ()  # plain values, which a saved model may hold
    _is_fitting: bool = False
    _latest: LatestInputs = LatestInputs()
    _outcomes_argument: ClassVar[str] = "train_Y"  # of the constructor
    _has_transformed_inputs: bool = True  # whoever asks is sent to _original_train_inputs

    # --- construction: the steps of a constructor, in their order ------------------------------

    _begin = construction.begin
    _first_inputs = construction.first_inputs
    _set_modules = construction.set_modules
    _learn_transform = construction.learn_transform
    _set_inputs_and_modules = construction.set_inputs_and_modules
    _standardize_first = construction.standardize_first
    _take_first = construction.take_first

    # --- memory ------------------------------------------------------------------------------

    @keeps_tensors
    def update(self, X: Tensor, Y: Tensor, Yvar: Tensor | None = None) -> Self:
        """Put n observations into memory, in place, at a cost that no earlier ones add to.

        Bad input raises and changes nothing. See the class for the cost and for what is exact.

        Args:
            X: ``batch_shape x n x d``; n = 0 changes nothing.
            Y: ``batch_shape x n x m``. For a classifier labels, ``n`` or ``n x 1``: whole numbers
                from 0, of any dtype. One beyond the known classes brings in all up to it, as if
                they had been there from the start, unless the classes were fixed.
            Yvar: Known noise variances shaped as Y; NaN: unknown. None with labels.

        Raises:
            BotorchTensorDimensionError: Shapes do not fit the model.
            InputDataError: Dtype, device, NaN, infinity, negative variance; on a grid, inputs too
                far outside; labels that are none, or of an unknown class where these are fixed.
            UnsupportedError: The model is conditioned on hypothetical data, or lacks some classes;
                variances are given that it does not take.
            ValueError: The memory would become too large.
        """
        self._check_not_conditioned("update")
        Y, Yvar, outputs = self._units.checked(self._prior, X, Y, Yvar, "update")
        if X.shape[-2] > 0:
            with self._undone_on_error():
                self._grow(outputs)
                self._observe(X, Y, Yvar, 1.0)
        return self

    @keeps_tensors
    def retract(self, X: Tensor, Y: Tensor, Yvar: Tensor | None = None) -> Self:
        """Take observations out of memory: undoes :meth:`update` with the same arguments.

        Args and errors as there; also InputDataError if more are taken out than are in, or if the
        rest would be of no observations at all, so that they cannot have been in. This is found
        where the memory tells, and the model stays as it was. Rows whose place others could have
        taken are taken for those; not so by a grid model that still holds its few first
        observations as rows, which finds each of them.
        """
        self._check_not_conditioned("retract")
        Y, Yvar, _ = self._units.checked(self._prior, X, Y, Yvar, "retract")
        self._check_retractable(X)
        if X.shape[-2] > 0:
            with self._undone_on_error():
                self._observe(X, Y, Yvar, -1.0)
                self._units = self._units.found(self.num_observations > 1e-6)
        return self

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """Put the memory, its units and what depends on their number back if anything raises."""
        outputs, units, likelihood = self._num_outputs, self._units, self.likelihood
        memory, cache = self._memory, self._cache
        try:
            yield
        except BaseException:
            self._num_outputs, self._units, self.likelihood = outputs, units, likelihood
            self._memory, self._cache = memory, cache
            raise

    def _grow(self, outputs: int) -> None:
        """Take outputs that all observations had and none named: classes without a label so far."""
        if outputs == self._num_outputs:
            return
        units = self._units.grown(outputs)
        if units is self._units:  # none that can grow: those of a merge are compared afterwards
            return
        memory = self._inference.grown(self._memory, self._prior, outputs)
        self._units, self._num_outputs = units, outputs
        self._set_memory(memory)
        self.likelihood = choose_likelihood(None, self._units.shift, self._parameter_shape)
        self._refresh_fixed_noise()

    def _check_retractable(self, X: Tensor) -> None:
        if X.shape[-2] > self.num_observations + 0.5:
            raise InputDataError(
                f"Expected X to hold at most the {self.num_observations:g} observations in "
                f"memory, got {X.shape[-2]}. Retract only what was given to update."
            )

    @torch.no_grad()
    def _observe(self, X: Tensor, Y: Tensor, Yvar: Tensor | None, sign: float) -> None:
        """Put checked observations into memory, or take them out if the sign is negative."""
        former, latest = self._units.floor.zero, self._latest
        self._units = self._units.before(self._prior, self._memory, Y, Yvar, sign)
        if self._units.floor.zero is not former:
            self._set_memory(self._memory)
        data = self._observations(X, Y, Yvar, sign, learns=True)
        self._memory, self._cache = self._inference.observe(
            self._memory, self._cache, data, self._prior
        )
        self._refresh_fixed_noise()
        self._latest = latest.with_rows(X) if sign > 0.0 else latest.without(X, lambda rows: rows)

    @keeps_tensors
    def forget(self, factor: float) -> Self:
        """Let every past observation count ``factor`` times: exponential forgetting.

        Args:
            factor: In (0, 1].

        Raises:
            ValueError: The factor is out of range.
            UnsupportedError: The model is conditioned on hypothetical data.
        """
        self._check_not_conditioned("forget")
        if not 0.0 < factor <= 1.0:
            raise ValueError(f"Expected factor in (0, 1], got {factor}.")
        self._set_memory(self._memory.scale(factor))
        return self

    def _set_memory(self, memory: Any) -> None:
        """Replace the memory, and drop what was derived from it."""
        self._memory, self._cache = memory, None

    @keeps_tensors
    def clear(self) -> Self:
        """Drop all observations; hyperparameters, places and standardisation stay.

        Raises:
            UnsupportedError: The model is conditioned on hypothetical data.
        """
        self._check_not_conditioned("clear")
        self._units = self._units.found(False)
        self._latest = LatestInputs()
        self._set_memory(self._inference.cleared(self._memory, self._prior))
        return self

    @keeps_tensors
    def merge(self, other: Self) -> Self:
        """Add another model's memory to this one's, in place; hyperparameters stay as they are.

        See the class for what is exact.

        Raises:
            UnsupportedError: Another class, shape or transform, or a model that is conditioned on
                hypothetical data.
            ValueError: The memory would become too large.
        """
        outputs = self._units.outputs_with(getattr(other, "_units", None))
        if not isinstance(other, StreamingGP):
            raise UnsupportedError(f"Expected other to be a model, got {type(other).__name__}.")
        alike = other._shallow_copy()
        alike._grow(outputs)
        with self._undone_on_error(), torch.no_grad():
            self._grow(outputs)
            check_mergeable(self, alike)
            self._check_not_conditioned("merge")
            other._check_not_conditioned("merge")
            both = self._units.merged(alike._units)
            theirs = alike._memory.map_targets(_shifted_targets(alike._units.shift - both.shift))
            self._memory, self._cache = self._inference.merged(
                self._memory, self._cache, theirs, self._prior
            )
            self._units = both
            self._refresh_fixed_noise()
        self._latest = other._latest.followed_by(self._latest)
        return self

    def _check_not_conditioned(self, verb: str) -> None:
        if self._conditioned_process is not None:
            raise UnsupportedError(
                f"{verb} needs a model of real observations, got one that is conditioned on "
                "hypothetical ones (condition_on_observations, fantasize) or keeps known points "
                "(with_known_points). Use it on the original model."
            )

    # --- shape and state ---------------------------------------------------------------------

    @property
    def maps_boxes(self) -> bool:
        """Whether a box of inputs is one after :meth:`transform_inputs` too."""
        return self._stem is None and keeps_boxes(self._input_transform)

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
    def train_targets(self) -> Tensor:
        """An empty tensor of the model's dtype and device: outcomes are not kept.

        Those functions of BoTorch that read them raise UnsupportedError.
        """
        return next(self.covar_module.parameters()).new_empty(0).as_subclass(UnkeptOutcomes)

    @property
    def train_inputs(self) -> tuple[Tensor]:
        """Inputs of the latest observations, as they came, for functions of BoTorch that ask.

        At most ``LATEST`` of them and those of hypothetical observations, the last one last,
        ``batch_shape (x m if m > 1) x k x d``. For predictive entropy searches, which compare
        optima with the function there (single-objective ones do not depend on them), for max-value
        entropy searches, multi-objective joint ones and ``ProximalAcquisitionFunction``.
        """
        X = self._latest.expanded(self.batch_shape, self.train_targets, self._input_dim)
        if self.num_outputs > 1:
            X = X.unsqueeze(-3).expand(*self.batch_shape, self.num_outputs, *X.shape[-2:])
        return (TrainInputs.of(X, partial(self._last_input, X)),)

    @property
    def _original_train_inputs(self) -> Tensor:  # type: ignore[override]
        """The inputs of :attr:`train_inputs`, where BoTorch asks for those before transforms.

        Raises:
            UnsupportedError: There are none, so that BoTorch starts its search without a baseline.
        """
        (X,) = self.train_inputs
        if X.shape[-2] == 0:
            raise UnsupportedError("Expected a model that has observed something, got an empty one")
        return X

    @torch.no_grad()
    def _last_input(self, X: Tensor) -> Tensor:
        """Transform the last of some inputs as ``ProximalAcquisitionFunction`` expects it."""
        if self.batch_shape or X.shape[-2] == 0:
            raise UnsupportedError(
                "ProximalAcquisitionFunction needs the last input of a model with observations and "
                f"without a batch shape, got {X.shape[-2]} and {tuple(self.batch_shape)}: take "
                "PenalizedAcquisitionFunction with a GaussianPenalty around a point of your own."
            )
        last: Tensor = self.transform_inputs(X.reshape(-1, X.shape[-1])[-1:])
        return last.squeeze(-2)

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.covar_module.parameters()).dtype

    @property
    def _device(self) -> torch.device:
        return next(self.covar_module.parameters()).device

    @property
    def _outcomes(self) -> OutcomeChain:
        return OutcomeChain(self._modules.get("outcome_transform"))

    @property
    def _input_transform(self) -> InputTransform | None:
        transform: Any = self._modules.get("input_transform")
        return transform

    @property
    def _stem(self) -> Stem | None:
        stem: Any = self._modules.get("stem")
        return stem

    def _from_per_output(self, value: Tensor) -> Tensor:
        return value.squeeze(-1) if self.num_outputs == 1 else value

    # --- units of outcomes, and noise --------------------------------------------------------

    def outcome_scale(self) -> Tensor:
        """Factor from transformed to target units, ``batch_shape x m``; 1 without Standardize."""
        return self._outcomes.offset_and_scale(self._units.shift)[1].clone()

    def transformed_noise(self, Yvar: Tensor) -> Tensor:
        """Noise variances from original to transformed units, as ``noise`` is expected to be in.

        Args:
            Yvar: ``... x q x m``, as :meth:`update` takes them.

        Raises:
            UnsupportedError: Variances in transformed units depend on the outcomes.
        """
        if self._outcomes.fixed:
            names = ", ".join(type(step).__name__ for step in self._outcomes.fixed)
            raise UnsupportedError(
                f"Expected outcome_transform to be Standardize or None, got {names}: what variance "
                "the transformed outcomes have depends on the outcomes. Transform it yourself."
            )
        return Yvar / self.outcome_scale().unsqueeze(-2).square().to(Yvar)

    def noise_at(self, inputs: Tensor) -> Tensor:
        """Variance of the noise of an observation at inputs, in transformed units.

        The noise level, unless a model's noise depends on the inputs; differentiable then. Of
        real outcomes under another likelihood their variance given the process.

        Args:
            inputs: After :meth:`transform_inputs`, ``... x q x d``.

        Returns:
            Broadcastable to ``... x m x q``, float64.

        Raises:
            UnsupportedError: A likelihood of labels or counts.
        """
        noise = self._noise(inputs)
        if noise is not None:
            return noise(inputs)
        return self._units.noise_variance(self._prior, self._memory).detach().unsqueeze(-1)

    def _noise(
        self, X: Tensor | None = None, process: PosteriorProcess | None = None
    ) -> NoiseAtInputs | None:
        """Noise as it depends on the inputs, or None; see :meth:`Inference.noise`."""
        if self._conditioned_process is not None:
            return self._conditioned_noise
        return self._varying_noise(X, process) if self._inference.noise_varies else None

    @keeps_tensors
    @torch.no_grad()
    def _varying_noise(
        self, X: Tensor | None, process: PosteriorProcess | None
    ) -> NoiseAtInputs | None:
        if X is not None:
            check_finite("X", X)
        noise: NoiseAtInputs | None
        noise, self._cache = self._inference.noise(
            self._memory, self._cache, self._prior, X, process
        )
        return noise

    def noise_level(self) -> Tensor:
        """Return the learned noise variance, or the mean known one, ``batch_shape x m``.

        Where all that are known are zero: what they are raised to.

        Raises:
            UnsupportedError: The likelihood has no Gaussian noise.
        """
        return self._units.noise_level(self._prior, self._memory)

    def _refresh_fixed_noise(self) -> None:
        """Keep a fixed-noise likelihood at the mean known variance, for BoTorch's fantasies."""
        if isinstance(self.likelihood, FixedNoiseGaussianLikelihood):
            level = self._from_per_output(self.noise_level()).unsqueeze(-1)
            self.likelihood.noise_covar.noise = level.to(self._dtype)

    @property
    def _prior(self) -> Prior:
        """The hyperparameters as they are now, and the units of the outcomes."""
        return Prior(
            self.covar_module,
            self.mean_module,
            self.likelihood,
            self._outcomes,
            self._units,
            self._batch_shape,
            self._num_outputs,
            self,
        )

    @torch.no_grad()
    def coordinates(self, X: Tensor) -> Tensor:
        """Inputs of observations as they enter memory now, ``... x d -> ... x k``."""
        transform, stem = self._input_transform, self._stem
        inputs = (X if transform is None else observed_inputs(X, transform)).detach()
        return inputs if stem is None else checked_projection(stem(inputs))

    def calibrated_inputs(self, X: Tensor) -> Tensor:
        """Inputs as the process takes them by a stem that is calibrated on them, differentiable.

        Args:
            X: ``... x n x d``.
        """
        stem = self._stem
        if stem is None:
            return self.hypothetical_inputs(X)
        return stem.calibrated_forward(observed_inputs(X, self._input_transform))

    @torch.no_grad()
    def standardized(
        self, X: Tensor, Y: Tensor, Yvar: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Outcomes and noise variances as the process has them, ``batch x m x n`` each, float64.

        Args:
            X: ``batch_shape x n x d``.
            Y: ``batch_shape x n x m``.
            Yvar: Known noise variances shaped as Y; NaN: unknown.
        """
        Y, Yvar, _ = self._units.checked(self._prior, X, Y, Yvar, "standardized")
        return self._prior.standardized(self._observations(X, Y, Yvar, 1.0))

    def _standardized(self, Y: Tensor) -> Tensor:
        return self._outcomes.standardized(Y, self._units.shift)

    def _observations(
        self, X: Tensor, Y: Tensor, Yvar: Tensor | None, sign: float, learns: bool = False
    ) -> Observations:
        targets, noise, known = self._measured(Y, Yvar, learns)
        return Observations(self.coordinates(X).to(torch.float64), targets, noise, known, sign)

    def _measured(self, Y: Tensor, Yvar: Tensor | None, learns: bool = False) -> Targets:
        """Targets less the shift, noise variances, and where these are known."""
        infers = isinstance(self.likelihood, GaussianLikelihood)
        infers = infers or (learns and self._inference.noise_varies)
        return self._units.encode(self._prior, Y, Yvar, infers)

    # --- prediction --------------------------------------------------------------------------

    @keeps_tensors
    def process(self, X: Tensor | None = None) -> PosteriorProcess:
        """Return the posterior as a process; solved once, then kept until something changes.

        The process is over transformed inputs, in transformed outcome units.

        Args:
            X: Transformed inputs, ``... x d``, that the process must be able to take.

        Raises:
            InputDataError: X is not finite; on a grid, too far outside.
        """
        if X is not None:
            check_finite("X", X)
        return self._solved(self._inference.process, X)

    @keeps_tensors
    def feature_process(self, X: Tensor | None = None) -> PosteriorProcess:
        """Return the posterior as a process in the weights of features, however many rows.

        For acquisition in feature space. That of most models is :meth:`process`; a model that is
        conditioned on hypothetical observations has one process only.

        Args:
            X: As for :meth:`process`.
        """
        if X is not None:
            check_finite("X", X)
        return self._solved(self._inference.feature_process, X)

    def _solved(self, solve: Solve, X: Tensor | None) -> PosteriorProcess:
        """Return a process that can take X, which is finite."""
        if self._conditioned_process is not None:
            self._inference.check_reach(self._conditioned_process, X)
            return self._conditioned_process
        with torch.no_grad():
            process, self._cache = solve(self._memory, self._cache, self._prior, X)
        return process

    def forward(self, X: Tensor) -> MultivariateNormal:
        """Return the posterior at transformed inputs, in transformed units.

        Raises:
            UnsupportedError: X is :attr:`train_inputs`, at which BoTorch expects the prior.
        """
        check_not_train_inputs(X)
        joint = self.process(X).joint(X.to(torch.float64))
        zero = torch.zeros_like(joint.mean[..., :1])
        return joint.distribution(zero, zero + 1.0, None, X.dtype)

    @keeps_tensors
    def posterior(  # type: ignore[override]
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
    ) -> Posterior:
        """Return the joint posterior of q points and m outputs.

        Beyond ``DENSE_LIMIT`` points the covariance stays lazy: marginal variances then take
        O(q r) memory. Inputs a little outside the bounds are taken too; they change nothing.

        Args:
            X: ``batch_shape x q x d``; more leading dimensions broadcast. A one-to-many input
                transform makes more points of each.
            output_indices: Outputs to keep, negative ones counted from the last; all if omitted.
            observation_noise: True adds the model's noise; a tensor ``... x (q or 1) x m`` of
                variances of all outputs, in transformed units, is added instead (see
                :meth:`transformed_noise`).
            posterior_transform: Applied last.

        Raises:
            BotorchTensorDimensionError: X has the wrong width or too few dimensions.
            InputDataError: X has a wrong dtype or device, is not finite, or is too far outside the
                bounds; a variance is negative or not finite.
            UnsupportedError: An output is out of range or repeated.
        """
        self._leave_training()
        inputs = self.process_inputs(X)
        if isinstance(observation_noise, Tensor):
            check_noise("observation_noise", observation_noise, inputs.to(X), self.num_outputs)
        chosen = chosen_outputs(output_indices, self.num_outputs) if output_indices else None
        joint = self._process_at(X, inputs).joint(inputs)
        if isinstance(observation_noise, Tensor):
            noise: Tensor | None = observation_noise.to(torch.float64).mT
        else:
            noise = self.noise_at(inputs) if observation_noise else None
        offset, scale = self._offset_and_scale()
        if chosen is not None:
            joint, offset, scale = (
                joint.select(chosen),
                offset[..., chosen, :],
                scale[..., chosen, :],
            )
            noise = None if noise is None else noise[..., chosen, :]
        normal = joint.distribution(offset, scale, noise, X.dtype)
        posterior = self._outcomes.untransform(GPyTorchPosterior(normal), chosen)
        return posterior if posterior_transform is None else posterior_transform(posterior, X=X)

    predictive, log_predictive = prediction.predictive, prediction.log_predictive

    @keeps_tensors
    def _marginals(self, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, and mean and variance of the process at single points, ``... x m x q`` each."""
        self._leave_training()
        inputs = self.process_inputs(X)
        process = self._solved(self._inference.process, inputs)
        mean, variance = torch.broadcast_tensors(*process.marginals(inputs))
        return inputs, mean, variance

    def _offset_and_scale(self) -> tuple[Tensor, Tensor]:
        """Outcomes are ``offset + scale ·`` what the process has, ``batch_shape x m x 1``."""
        offset, scale = self._outcomes.offset_and_scale(self._units.shift)
        return offset.unsqueeze(-1), scale.unsqueeze(-1)

    def transform_inputs(self, X: Tensor, input_transform: torch.nn.Module | None = None) -> Tensor:
        """Inputs as the process takes them: transformed, then projected by a stem, if there is one.

        Differentiable.

        Args:
            X: ``... x d``.
            input_transform: Instead of the model's own.
        """
        inputs: Tensor = super().transform_inputs(X, input_transform)
        stem = self._stem
        return inputs if stem is None else stem(inputs)

    def process_inputs(self, X: Tensor) -> Tensor:
        """Check inputs and transform them as the process takes them, differentiable, float64.

        A one-to-many input transform (``InputPerturbation``, ``AppendFeatures``) gives several rows
        for each of X, whose width need not be that of observed inputs.

        Args:
            X: ``... x q x d``.

        Returns:
            ``... x q' x d'``.

        Raises:
            BotorchTensorDimensionError: X has the wrong width or too few dimensions.
            InputDataError: X has a wrong dtype or device, or is not finite after the transform.
        """
        self._check_inputs(X, finite=True)
        inputs: Tensor = self.transform_inputs(X)
        if inputs is not X:
            check_finite("X after its input transform", inputs)
        if inputs.shape[-1] != self._process_dim:
            raise BotorchTensorDimensionError(
                f"Expected X that input_transform {type(self._input_transform).__name__} turns "
                f"into {self._process_dim} inputs, got {inputs.shape[-1]} from X of shape "
                f"{tuple(X.shape)}."
            )
        return inputs.to(torch.float64)

    def hypothetical_inputs(self, X: Tensor) -> Tensor:
        """Transform inputs of hypothetical observations: :meth:`process_inputs` as in a fantasy.

        A transform that is not applied to fantasies (``transform_on_fantasize=False``), such as
        ``InputPerturbation``, leaves them alone, as it leaves alone what is observed.

        Args and errors as there.
        """
        with fantasize_flag():
            return self.process_inputs(X)

    def _check_inputs(self, X: Tensor, finite: bool = False) -> None:
        transform = self._input_transform
        any_width = transform is not None and transform.is_one_to_many
        check_inputs(X, None if any_width else self._input_dim, self.train_targets, finite)

    def _process_at(self, X: Tensor, inputs: Tensor) -> PosteriorProcess | CachedBaseline:
        """Return the process, or the known points of it that surround X."""
        process = self._solved(self._inference.process, inputs)
        for known in self._known:
            if process is known.process and known.surround(X):
                return known
        return process

    @keeps_tensors
    def with_known_points(self, first: Tensor | None = None, last: Tensor | None = None) -> Self:
        """Evaluate k points once, for joint posteriors of them and others; return a model.

        For acquisition functions with a baseline, which BoTorch puts before the candidates, and
        with pending points, which it puts after them: the candidates then cost O(q r² + k q r) a
        batch instead of O((k + q) r²). Posteriors are those of this model as it is now; gradients
        flow to what is between the known points, not to them. As a fantasy
        model it cannot be updated.

        Args:
            first: Those before the others, ``batch_shape x k x d``.
            last: Those after the others, ``batch_shape x k' x d``.

        Raises:
            BotorchTensorDimensionError: One has the wrong width or too few dimensions.
            InputDataError: One has a wrong dtype or device, is not finite, or is outside the
                bounds.
        """
        self._leave_training()
        for X in (first, last):
            if X is not None:
                self._check_inputs(X)
        known = arrangements(first, last)
        inputs = [self.process_inputs(X) for X, _ in known]
        process = self._solved(self._inference.process, inputs[0] if inputs else None)
        model = self._with_process(process)
        model._known = tuple(
            CachedBaseline.of(X, leading, process, own)
            for (X, leading), own in zip(known, inputs, strict=True)
        )
        return model

    # --- fantasies ---------------------------------------------------------------------------

    @keeps_tensors
    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> Self:
        """Condition on hypothetical observations Y at X; this model stays as it is.

        O(q) cross-covariances and one q x q factor; differentiable in X and Y. Equal to ``update``
        on a copy. The returned model predicts and fantasises, but cannot be updated.

        Args:
            X: ``batch_shape x q x d``.
            Y: ``batch_shape' x q x m`` in original units, broadcast against X.
            noise: Variances shaped as Y, in transformed units (see :meth:`transformed_noise`); the
                model's own if omitted.
            kwargs: Ignored, for BoTorch's callers.

        Raises:
            BotorchTensorDimensionError: A wrong width, number of rows or batch shape.
            InputDataError: A wrong dtype or device, NaN or infinity, or a negative noise.
        """
        self._leave_training()
        inputs = self.hypothetical_inputs(X)
        check_hypothetical(inputs.to(X), Y, noise, self.num_outputs)
        targets = self._standardized(Y.to(torch.float64)).mT
        given = None if noise is None else noise.to(torch.float64).mT
        process = self._solved(self._inference.process, inputs)
        told = self._pseudo_observations(process, inputs, targets, given)
        return self._with_process(process.condition(inputs, *told), X)

    def fantasize(
        self,
        X: Tensor,
        sampler: MCSampler,
        observation_noise: Tensor | None = None,
        **kwargs: Any,
    ) -> Self:
        """Condition on hypothetical observations that are drawn from the posterior at X.

        Under another likelihood than a Gaussian one, the process is drawn by the sampler, and
        outcomes from the likelihood of each draw with the sampler's seed, the same for every batch
        of inputs. Gradients flow through the points, and through the draws of a continuous
        likelihood; a draw of labels or counts is a step in X.

        Args:
            X: ``batch_shape x q x d``.
            sampler: Of normal samples; its shape comes first in the returned model's batches.
            observation_noise: Variances ``batch_shape x (q or 1) x m`` in transformed units; the
                model's own if omitted. None with a likelihood that is not Gaussian.
            kwargs: For BoTorch.

        Raises:
            BotorchTensorDimensionError: X has the wrong width or too few dimensions.
            InputDataError: X has a wrong dtype or device, is not finite, or is too far outside the
                bounds; a variance is negative or not finite.
            UnsupportedError: ``sampler`` draws nothing; ``observation_noise`` is given and the
                likelihood is not Gaussian.
        """
        self._check_inputs(X)
        check_sampler(sampler)
        drawing = self._units.drawing(self._prior, observation_noise)
        if drawing is None:
            if observation_noise is None and self._inference.noise_varies:
                observation_noise = self.noise_at(self.hypothetical_inputs(X)).mT.to(X)
            model: Self = super().fantasize(X, sampler, observation_noise, **kwargs)
            return model
        return self.condition_on_observations(X, *self._drawn(X, sampler, drawing))

    _drawn = prediction.drawn

    def get_fantasy_model(
        self, inputs: Tensor, targets: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> Self:
        """Condition on hypothetical observations in transformed units, as ``ModelListGP`` asks.

        Args:
            inputs: ``batch_shape x q x d``.
            targets: Outcomes in transformed units, ``batch_shape' (x m if m > 1) x q``.
            noise: Variances shaped as targets, in transformed units; the model's own if omitted.
            kwargs: Ignored, for BoTorch's callers.

        Raises:
            BotorchTensorDimensionError: A wrong width, number of rows or batch shape.
            InputDataError: A wrong dtype or device, NaN or infinity, or a negative noise.
            UnsupportedError: The model has an input transform, which ``ModelListGP`` leaves out.
        """
        if self._input_transform is not None:
            raise UnsupportedError(
                "get_fantasy_model cannot know whether its inputs are transformed "
                "(ModelListGP.condition_on_observations leaves out the model's "
                f"{type(self._input_transform).__name__}). Use condition_on_observations of each "
                "model and build the list from what they return."
            )
        self._leave_training()
        check_inputs(inputs, self._input_dim, self.train_targets, finite=True)
        rows = self._as_rows(targets)
        variances = None if noise is None else self._as_rows(noise)
        check_hypothetical(inputs, rows, variances, self.num_outputs)
        known = None if variances is None else variances.double().mT
        X = inputs.double()
        process = self._solved(self._inference.process, X)
        told = self._pseudo_observations(process, X, rows.double().mT, known)
        return self._with_process(process.condition(X, *told), inputs)

    def _as_rows(self, values: Tensor) -> Tensor:
        """Bring GPyTorch's ``... (x m if m > 1) x q`` to ``... x q x m``."""
        return values.unsqueeze(-1) if self.num_outputs == 1 else values.mT

    def _pseudo_observations(
        self, process: PosteriorProcess, inputs: Tensor, targets: Tensor, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return Gaussian outcomes and noise variances that the process is conditioned on.

        Args:
            process: The posterior.
            inputs: After :meth:`transform_inputs`, ``... x q x d``, float64.
            targets: In the units of the process, ``... x m x q``, float64.
            noise: Shaped as targets, or None for the model's own.
        """
        varying = self._noise(inputs) if noise is None else None
        noise = noise if varying is None else varying(inputs)
        return self._units.pseudo_observations(
            self._prior, self._memory, process, inputs, targets, noise
        )

    def _with_process(self, process: PosteriorProcess, X: Tensor | None = None) -> Self:
        """Return a model with this process that shares hyperparameters and memory.

        Args:
            process: The posterior.
            X: Inputs that it was conditioned at, ``... x q x d``, if it was.
        """
        model = self._shallow_copy()
        if X is not None:
            model._latest = self._latest.with_hypothetical(X)
        model._conditioned_process, model._conditioned_noise = process, self._noise(process=process)
        if self._stem is not None and self._conditioned_process is None:
            model.stem = deepcopy(self._stem)  # this one's may go on learning
        return model

    def _shallow_copy(self) -> Self:
        """Return a model with the same tensors, whose attributes are its own."""
        model = object.__new__(type(self))
        model.__dict__.update(self.__dict__)
        for name in ("_parameters", "_buffers", "_modules"):
            model.__dict__[name] = dict(self.__dict__[name])
        return model

    # --- some of the outputs, another device -------------------------------------------------

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

    # --- learning ----------------------------------------------------------------------------

    def log_marginal_likelihood(self) -> Tensor:
        """Return that of all observations in transformed units, ``batch_shape (x m if m > 1)``.

        Differentiable in the hyperparameters. Cost as a refit's step, whatever came before.
        """
        value, self._cache = self._inference.log_marginal_likelihood(
            self._memory, self._cache, self._prior
        )
        return self._from_per_output(value)

    compute_custom_loss = fitting.compute_custom_loss
    train = keeps_tensors(fitting.train)
    _fit = fitting.fit

    def _learning_objective(self) -> Tensor:
        value, self._cache = self._inference.objective(self._memory, self._cache, self._prior)
        return value

    @property
    def custom_fit(self) -> Callable[..., MarginalLogLikelihood]:
        """BoTorch's hook for fitting: batch elements and outputs apart, see :func:`fit_elements`.

        Raises:
            AttributeError: Such a fit is under way, for which BoTorch shall use its own routine.
        """
        if self._is_fitting:
            raise AttributeError("custom_fit is absent during a fit.")
        return self._fit

    def _standardize_by(self, totals: Tensor) -> None:
        """Learn the standardisation, in a copy: conditioned models keep their own."""
        if "outcome_transform" in self._modules:
            self.outcome_transform = deepcopy(self.outcome_transform).eval()
        self._outcomes.learn(totals, self._units.shift)

    def _leave_training(self) -> None:
        if self.training:
            self.eval()

    def eval(self) -> Self:
        """Evaluation mode."""
        return self.train(False)

    # --- storage -----------------------------------------------------------------------------

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
        about = {
            "dtype": str(self._dtype).removeprefix("torch."),
            "observations": self.num_observations,
            "outputs": self.num_outputs,
            "dimensions": self._input_dim,
        }
        write_model(path, self, about)

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
        return read_model(path, cls, map_location, trusted)


def _shifted_targets(shift: Tensor) -> Tensor:
    """Return the map of target columns [Y, 1] to [Y + shift, 1], ``... x m x 2 x 2``."""
    matrix = torch.eye(2, dtype=shift.dtype, device=shift.device).repeat(*shift.shape, 1, 1)
    matrix[..., 1, 0] = shift
    return matrix
