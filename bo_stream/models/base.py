"""The streaming Gaussian process: what a model owns, and its verbs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, ParamSpec, Self, TypeGuard, TypeVar

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    DeprecationError,
    InputDataError,
    UnsupportedError,
)
from botorch.models.model import FantasizeMixin, Model
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.models.utils import fantasize as fantasize_flag
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.posteriors.posterior import Posterior
from botorch.sampling.base import MCSampler
from botorch.utils.datasets import SupervisedDataset
from botorch.utils.types import _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood, Likelihood
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.means import ConstantMean, Mean
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood
from gpytorch.models.gp import GP
from torch import Tensor

from bo_stream.bases.kernels import Stem, TransformedKernel, default_kernel
from bo_stream.models.botorch_hooks import BoTorchHooks, LatestInputs
from bo_stream.models.checks import (
    check_finite,
    check_hypothetical,
    check_inputs,
    check_kernel,
    check_mergeable,
    check_noise,
    check_objective,
    spelled,
)
from bo_stream.models.construction import (
    adapt_priors,
    check_first_observations,
    check_learned,
    check_mean,
    check_outputs,
    check_stem,
    checked_projection,
    choose_likelihood,
    conditioned_inputs,
    first_projected,
    first_transformed,
    fixed_noise,
    keeps_boxes,
    learn_bounds,
    observed_inputs,
    restore_products,
    split_transform,
    warn_of_scaling,
)
from bo_stream.models.fitting import LastFit, hyperparameters
from bo_stream.models.inference import Inference, Prior, Solve, move_priors
from bo_stream.models.memory import Observations, Targets
from bo_stream.models.outcomes.base import (
    Drawing,
    NoiseAtInputs,
    OutcomeChain,
    Outcomes,
    Predictive,
    check_outputs_exist,
    chosen_outputs,
    default_standardize,
    subset_module,
    subset_transform,
)
from bo_stream.models.outcomes.gaussian import GaussianOutcomes, first_totals, shifted_targets
from bo_stream.models.outcomes.likelihood import CountOutcomes
from bo_stream.process import (
    CachedBaseline,
    ConditionedProcess,
    Joint,
    PosteriorProcess,
    SelectedProcess,
    arrangements,
)
from bo_stream.storage.objects import read_model, write_model
from bo_stream.storage.trusted import Trusted
from bo_stream.tensors import map_tensors, outside_inference_mode, read_at_once, read_expected
from bo_stream.warnings import NumericalEvent, NumericalLog, with_event

P = ParamSpec("P")
R = TypeVar("R")

_SAME = 1e-6
"""Difference of values of an input transform, over the largest, that is taken for rounding."""


def keeps_tensors(method: Callable[P, R], is_at_inputs: bool = False) -> Callable[P, R]:
    """Run a method outside inference mode, with copies of arguments that were made inside it.

    Autograd refuses tensors made under ``torch.inference_mode``: a method that keeps tensors, in
    memory or in a cache, would spoil every later gradient.

    Args:
        method: Of a model.
        is_at_inputs: Whether its first argument is inputs, for which a device is waited for once:
            see :meth:`StreamingGP._read_once`.
    """

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        within, call = torch.is_inference_mode_enabled(), method
        X = (args[1] if len(args) > 1 else kwargs.get("X")) if is_at_inputs else None
        if isinstance(X, Tensor) and not X.is_cpu:
            call = _reading_once(method)
        if not within and not any(map(_is_inference, (*args, *kwargs.values()))):
            return call(*args, **kwargs)
        with outside_inference_mode():
            arguments = [_normal(value) for value in args]
            options = {name: _normal(value) for name, value in kwargs.items()}
            return call(*arguments, **options)  # type: ignore[arg-type]

    return run


def waits_once(method: Callable[P, R]) -> Callable[P, R]:
    """Run a method at inputs X as :func:`keeps_tensors` does, waiting for a device once."""
    return keeps_tensors(method, is_at_inputs=True)


def _reading_once(method: Callable[P, R]) -> Callable[P, R]:
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        model: Any = args[0]
        result: R = model._read_once(partial(method, *args, **kwargs))
        return result

    return call


def _is_inference(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor made under ``torch.inference_mode``."""
    return isinstance(value, Tensor) and value.is_inference()


def _normal(value: object) -> object:
    """Copy a tensor made under ``torch.inference_mode``, and return any other value."""
    return value.clone() if _is_inference(value) else value


class StreamingGP(BoTorchHooks, FantasizeMixin):
    """A Gaussian process whose memory of the data has a fixed size.

    ``update`` puts observations into memory, in place; ``condition_on_observations`` (hence
    ``fantasize``) returns a model that is conditioned on hypothetical data and shares the memory.
    Arithmetic is in float64, whatever the dtype of inputs and outputs. Gradients of posteriors flow
    to inputs, not to hyperparameters; those are learned from ``compute_custom_loss``.

    A model is for one thread at a time, as modules of torch are. What another thread reads during
    an update may be of neither state; give it a ``deepcopy``.

    Models are final classes below this one: a constructor and a few properties. What differs
    between them is stored in :attr:`outcomes`, :attr:`memory` and :attr:`inference`, and in a cache
    of what was derived from these under one state of the hyperparameters. What only routines of
    BoTorch and GPyTorch ask for is in :class:`BoTorchHooks`.
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
    _outcomes: Outcomes
    _memory: Any
    _inference: Inference[Any, Any]
    _cache: Any = None

    # set in a model that is conditioned on hypothetical observations or keeps known points
    _conditioned_process: PosteriorProcess | None
    _conditioned_noise: NoiseAtInputs | None = None
    _known: tuple[CachedBaseline, ...] = ()

    _numerical_log: NumericalLog = ()
    _said: tuple[str, ...] = ()  # plain values, which a saved model may hold
    _removals: int = 0  # how often observations were taken out, or came to count in part
    _first_values: Mapping[str, Tensor] = MappingProxyType(
        {}
    )  # of hyperparameters; a refit's start
    _last_fit: LastFit | None = None
    _outcomes_argument: ClassVar[str] = "train_Y"  # of the constructor

    # --- construction: the steps of a constructor, in their order --------------------------

    def _begin(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None,
        outcome_transform: OutcomeTransform | _DefaultType | None,
    ) -> None:
        """Check the first observations; take shapes and outcome transform from them."""
        check_first_observations(train_X, train_Y, train_Yvar)
        GP.__init__(self)
        self._conditioned_process = self._cache = None
        self._num_outputs = train_Y.shape[-1]
        self._batch_shape = train_X.shape[:-2]
        self._input_dim = train_X.shape[-1]
        if isinstance(outcome_transform, _DefaultType):
            outcome_transform = default_standardize(self._num_outputs, self._batch_shape)
        if outcome_transform is not None:
            check_outputs(outcome_transform, self._num_outputs)
            OutcomeChain.of(outcome_transform)
            self.outcome_transform = outcome_transform
        targets, _ = self._outcome_chain.to_targets(train_Y, train_Yvar)
        self._outcomes = GaussianOutcomes.of(targets)

    def _first_inputs(
        self, X: Tensor, transform: InputTransform | None, stem: Stem | None = None
    ) -> Tensor:
        """Let the input transform and the stem, if any, learn from the first inputs; apply them."""
        inputs = X
        if transform is not None:
            self.input_transform = transform
            inputs = first_transformed(X, transform)
        check_stem(stem)
        if stem is not None:
            self.stem = stem
            inputs = first_projected(inputs, stem)
        self._process_dim = inputs.shape[-1]
        return inputs

    def _set_modules(
        self,
        dim: int,
        Yvar: Tensor | None,
        likelihood: _GaussianLikelihoodBase | None,
        covar_module: Kernel | None,
        mean_module: Mean | None,
        box: Tensor | None = None,
    ) -> None:
        """Set kernel, mean and likelihood; default: BoTorch's, of ``dim`` inputs in a box."""
        aug_batch = self._parameter_shape
        if covar_module is not None:
            check_kernel(covar_module, dim, aug_batch)
        self.covar_module = (
            default_kernel(dim, aug_batch, box) if covar_module is None else covar_module
        )
        self.mean_module = (
            ConstantMean(batch_shape=aug_batch) if mean_module is None else mean_module
        )
        self.likelihood = choose_likelihood(likelihood, Yvar, aug_batch)
        check_mean(self.mean_module, aug_batch)

    def _learn_transform(self, learned: InputTransform | None, inputs: Tensor) -> Tensor:
        """Make a learnable input transform a part of the kernel, as which memory follows it.

        Args:
            learned: What :func:`split_transform` left of the user's, or None.
            inputs: As the process takes them.

        Returns:
            Inputs as the user's kernel has them.
        """
        if learned is None:
            return inputs
        learn_bounds(inputs, learned)
        transformed = observed_inputs(inputs, learned)
        check_learned(learned, inputs, transformed)
        adapt_priors(learned)
        self.covar_module = TransformedKernel(self.covar_module, learned)
        return transformed

    def _set_inputs_and_modules(
        self,
        X: Tensor,
        Yvar: Tensor | None,
        transform: InputTransform | None,
        likelihood: _GaussianLikelihoodBase | None,
        covar_module: Kernel | None,
        mean_module: Mean | None,
    ) -> Tensor:
        """Take these, or BoTorch's defaults; return the first inputs as the kernel has them."""
        transform, learned = split_transform(transform)
        inputs = self._first_inputs(X, transform)
        self._set_modules(inputs.shape[-1], Yvar, likelihood, covar_module, mean_module)
        return self._learn_transform(learned, inputs)

    def _standardize_first(self, X: Tensor, Y: Tensor, Yvar: Tensor | None) -> None:
        """Move to the first observations' dtype and device; learn the standardisation."""
        targets, _ = self._outcome_chain.to_targets(Y, Yvar)
        self.to(X)
        centre = self._outcomes.shift  # about their mean: sums of squares lose no digits
        if targets.shape[-2] > 0:
            centre = targets.detach().to(torch.float64).mean(-2)
        self._standardize_by(first_totals(targets, centre), centre)
        if self._inference.restarts and "stem" not in self._modules:
            self._first_values = hyperparameters(self)
        fixed = isinstance(self.likelihood, FixedNoiseGaussianLikelihood)
        self._outcomes = self._outcomes.initialized(
            targets, self.outcome_scale(), zeros_apart=fixed, share=self._inference.least_noise
        )

    def _take_first(
        self,
        X: Tensor,
        Y: Tensor,
        Yvar: Tensor | None,
        inputs: Tensor,
        custom_kernel: bool,
        box: Tensor | None = None,
    ) -> None:
        """Put the first observations into memory; warn where BoTorch would of their scaling."""
        self._standardize_first(X, Y, Yvar)
        if X.shape[-2] > 0:
            self._observe(X, Y, Yvar, 1.0)
        warn_of_scaling(inputs, self._standardized(Y.double()), custom_kernel, box)

    # --- observations: into memory, and out of it ------------------------------------------

    @waits_once
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
        Y, Yvar, outputs = self._outcomes.checked(self, X, Y, Yvar, "update")
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
        where the memory tells, and the model stays as it was. Rows that the memory cannot tell from
        others count as those; a grid model that still stores its few first observations as rows
        finds each of them. What is taken out of other memories counts once, also after ``forget``.
        Exact only while stem and input transform are as they were at the update: observations are
        taken out where these put them now.
        """
        self._check_not_conditioned("retract")
        Y, Yvar, _ = self._outcomes.checked(self, X, Y, Yvar, "retract")
        self._check_retractable(X)
        if X.shape[-2] > 0:
            with self._undone_on_error():
                self._observe(X, Y, Yvar, -1.0)
                self._outcomes = self._outcomes.with_observations(self.num_observations > 1e-6)
            self._removals += 1
        return self

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
        self._removals += factor < 1.0
        return self

    @keeps_tensors
    def clear(self) -> Self:
        """Drop all observations; hyperparameters, inducing points and standardisation stay.

        Raises:
            UnsupportedError: The model is conditioned on hypothetical data.
        """
        self._check_not_conditioned("clear")
        self._outcomes = self._outcomes.with_observations(False)
        self._latest = LatestInputs()
        self._set_memory(self._inference.cleared(self._memory, self.prior))
        self._removals += 1
        return self

    @keeps_tensors
    def merge(self, other: StreamingGP) -> Self:
        """Add another model's memory to this one's, in place; hyperparameters stay as they are.

        See the class for what is exact.

        Raises:
            UnsupportedError: Another class, shape or transform, or a model that is conditioned on
                hypothetical data.
            ValueError: The memory would become too large.
        """
        units = getattr(other, "_outcomes", None)
        outputs = self._outcomes.outputs_with(units)
        if not isinstance(units, Outcomes):
            raise UnsupportedError(f"Expected other to be a model, got {type(other).__name__}.")
        alike = other._shallow_copy()
        alike._grow(outputs)
        with self._undone_on_error(), torch.no_grad():
            self._grow(outputs)
            check_mergeable(self, alike)
            self._check_not_conditioned("merge")
            other._check_not_conditioned("merge")
            both = self._outcomes.merged(alike._outcomes)
            theirs = alike._memory.map_targets(shifted_targets(alike._outcomes.shift - both.shift))
            mine, self._outcomes = self._outcomes, both
            if both.shift is not mine.shift or both.floor.zero is not mine.floor.zero:
                self._cache = None  # it was solved in other units
            self._memory, self._cache = self._inference.merged(
                self._memory, self._cache, theirs, self.prior
            )
            self._refresh_fixed_noise()
            self._latest = other._latest.followed_by(self._latest)
        return self

    @torch.no_grad()
    def coordinates(self, X: Tensor) -> Tensor:
        """Inputs of observations as they enter memory now, ``... x d -> ... x k``."""
        transform, stem = getattr(self, "input_transform", None), getattr(self, "stem", None)
        inputs = (X if transform is None else observed_inputs(X, transform)).detach()
        return inputs if stem is None else checked_projection(stem(inputs))

    def _check_not_conditioned(self, verb: str) -> None:
        """Check that a model is one of real observations, for a verb that changes its memory."""
        if self.is_conditioned:
            raise UnsupportedError(
                f"{verb} needs a model of real observations, got one that is conditioned on "
                "hypothetical ones (condition_on_observations, fantasize) or keeps known points "
                "(with_known_points). Use it on the original model."
            )

    def _check_retractable(self, X: Tensor) -> None:
        """Check that a memory holds as many observations as are taken out at X, ``... x n x d``."""
        if X.shape[-2] > self.num_observations + 0.5:
            raise InputDataError(
                f"Expected X to hold at most the {self.num_observations:g} observations in "
                f"memory, got {X.shape[-2]}. Retract only what was given to update."
            )

    @torch.no_grad()
    def _observe(self, X: Tensor, Y: Tensor, Yvar: Tensor | None, sign: float) -> None:
        """Put checked observations into memory, or take them out if the sign is negative."""
        former, latest, prior = self._outcomes, self._latest, self.prior
        units = former.prepared_for(prior, self._memory, Y, Yvar, sign)
        if units is not former:
            self._outcomes, prior = units, replace(prior, outcomes=units)
            if units.floor.zero is not former.floor.zero:
                self._cache = None
        infers = self._has_learned_noise() or self._inference.noise_varies
        targets = units.encode(prior, Y, Yvar, infers)
        data = Observations(self.coordinates(X).to(torch.float64), *targets, sign)
        if not (X.is_cpu or self._inference.defers_reads):
            read_expected()
        self._memory, self._cache = self._inference.observe(self._memory, self._cache, data, prior)
        self._refresh_fixed_noise()
        self._latest = latest.with_rows(X) if sign > 0.0 else latest.without(X, lambda rows: rows)

    def _observations(self, X: Tensor, Y: Tensor, Yvar: Tensor | None, sign: float) -> Observations:
        """Return checked observations as a memory takes them."""
        return Observations(self.coordinates(X).to(torch.float64), *self._measured(Y, Yvar), sign)

    def _measured(self, Y: Tensor, Yvar: Tensor | None) -> Targets:
        """Targets less the shift, noise variances, and where these are known."""
        return self._outcomes.encode(self.prior, Y, Yvar, self._has_learned_noise())

    def _set_memory(self, memory: Any) -> None:
        """Replace the memory, and drop what was derived from it."""
        self._memory, self._cache = memory, None

    def _refresh_fixed_noise(self) -> None:
        """Keep a fixed-noise likelihood at the mean known variance, for BoTorch's fantasies."""
        if isinstance(self.likelihood, FixedNoiseGaussianLikelihood):
            read_expected()
            level = self._from_per_output(self.noise_level()).unsqueeze(-1)
            self.likelihood.noise_covar.noise = level.to(self._dtype)

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """Put the memory, its units and what depends on their number back if anything raises.

        The sums of a grid change in place and are not put back: all checks raise before that.
        """
        outputs, units, likelihood = self._num_outputs, self._outcomes, self.likelihood
        memory, cache, latest = self._memory, self._cache, self._latest
        try:
            yield
        except BaseException:
            self._num_outputs, self._outcomes, self.likelihood = outputs, units, likelihood
            self._memory, self._cache, self._latest = memory, cache, latest
            raise

    def _grow(self, outputs: int) -> None:
        """Take outputs that all observations had and none named: classes without a label so far."""
        if outputs == self._num_outputs:
            return
        units = self._outcomes.grown(outputs)
        if units is self._outcomes:  # none that can grow: those of a merge are compared afterwards
            return
        memory = self._inference.grown(self._memory, self.prior, outputs)
        self._outcomes, self._num_outputs = units, outputs
        self._set_memory(memory)
        self.likelihood = fixed_noise(self._parameter_shape, self._outcomes.shift)
        self._refresh_fixed_noise()

    def _has_learned_noise(self) -> bool:
        """Say whether observations without a known variance have that of the likelihood."""
        return isinstance(self.likelihood, GaussianLikelihood)

    # --- the posterior: from hyperparameters and memory ------------------------------------

    def transform_inputs(self, X: Tensor, input_transform: torch.nn.Module | None = None) -> Tensor:
        """Inputs as the process takes them: transformed, then projected by a stem, if there is one.

        Differentiable.

        Args:
            X: ``... x d``.
            input_transform: Instead of the model's own.
        """
        inputs: Tensor = Model.transform_inputs(self, X, input_transform)
        stem = getattr(self, "stem", None)
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
        self._check_query(X, finite=True)
        return self._checked_inputs(X, self.transform_inputs(X))

    def _checked_inputs(self, X: Tensor, inputs: Tensor) -> Tensor:
        """Check transformed inputs of X; float64."""
        if inputs is not X:
            check_finite("X after its input transform", inputs)
        if inputs.shape[-1] != self._process_dim:
            raise BotorchTensorDimensionError(
                f"Expected X that input_transform {type(self.input_transform).__name__} turns "
                f"into {self._process_dim} inputs, got {inputs.shape[-1]} from X of shape "
                f"{tuple(X.shape)}."
            )
        return inputs.to(torch.float64)

    def hypothetical_inputs(self, X: Tensor) -> Tensor:
        """Transform inputs of hypothetical observations: :meth:`process_inputs` as in a fantasy.

        A transform that is not applied to fantasies (``transform_on_fantasize=False``), such as
        ``InputPerturbation``, leaves them alone.

        Args and errors as there.
        """
        with fantasize_flag():
            return self.process_inputs(X)

    def observation_inputs(self, X: Tensor) -> Tensor:
        """Transform inputs of observations, real or hypothetical ones; differentiable, float64.

        By each transform that is applied to training inputs, as they enter memory; by others as
        :meth:`hypothetical_inputs`, which they are while BoTorch conditions on a fantasy.

        Args and errors as :meth:`process_inputs`.
        """
        transform, stem = getattr(self, "input_transform", None), getattr(self, "stem", None)
        if transform is None or fantasize_flag.on():
            return self.process_inputs(X)
        self._check_query(X, finite=True)
        inputs = conditioned_inputs(X, transform)
        return self._checked_inputs(X, inputs if stem is None else stem(inputs))

    @keeps_tensors
    def process(self, X: Tensor | None = None) -> PosteriorProcess:
        """Return the posterior as a process; solved once, then kept until something changes.

        The process is over transformed inputs, in transformed outcome units.

        Args:
            X: Transformed inputs, ``... x q x d``, that the process must be able to take.

        Raises:
            BotorchTensorDimensionError: X is not as wide as transformed inputs are.
            InputDataError: X is not finite; on a grid, too far outside.
        """
        self._check_transformed(X)
        return self._solved(self._inference.process, X)

    @keeps_tensors
    def feature_process(self, X: Tensor | None = None) -> PosteriorProcess:
        """Return the posterior as a process in the weights of features, however many rows.

        For acquisition in feature space. That of most models is :meth:`process`; a model that is
        conditioned on hypothetical observations has one process only.

        Args:
            X: As for :meth:`process`.

        Raises:
            BotorchTensorDimensionError: As :meth:`process`.
            InputDataError: As :meth:`process`.
        """
        self._check_transformed(X)
        return self._solved(self._inference.feature_process, X)

    def _check_transformed(self, X: Tensor | None) -> None:
        """Check transformed inputs of which a process is asked for, if any."""
        if X is None:
            return
        if X.ndim < 2 or X.shape[-1] != self._process_dim:
            raise BotorchTensorDimensionError(
                f"Expected X of shape `... x q x {self._process_dim}`, as model.process_inputs "
                f"transforms inputs, got {tuple(X.shape)}. Give those, or ask model.posterior(X)."
            )
        check_finite("X", X)

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
        return self._outcomes.noise_variance(self.prior, self._memory).detach().unsqueeze(-1)

    @waits_once
    def posterior(  # type: ignore[override]  # no further arguments
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
            output_indices: Outputs of several to keep, negative ones counted from the last; all if
                omitted.
            observation_noise: True adds the model's noise; a tensor ``... x (q or 1) x m`` of
                variances of all outputs, in transformed units, is added instead (see
                :meth:`transformed_noise`).
            posterior_transform: Applied last.

        Raises:
            BotorchTensorDimensionError: X has the wrong width or too few dimensions.
            InputDataError: X has a wrong dtype or device, is not finite, or is too far outside the
                bounds; a variance is negative or not finite.
            UnsupportedError: One of several outputs is out of range or repeated.
        """
        self._leave_training()
        inputs = self.process_inputs(X)
        if isinstance(observation_noise, Tensor):
            check_noise("observation_noise", observation_noise, inputs.to(X), self._num_outputs)
        chosen = chosen_outputs(output_indices, self._num_outputs) if output_indices else None
        process = self._solved(self._inference.process, inputs)
        joint = self._around(X, process).joint(inputs)
        result = self._outcome_posterior(X, inputs, joint, observation_noise, chosen)
        return result if posterior_transform is None else posterior_transform(result, X=X)

    def _around(self, X: Tensor, process: PosteriorProcess) -> PosteriorProcess | CachedBaseline:
        """Return those known points of a process that surround X, else the process itself."""
        known = (each for each in self._known if process is each.process and each.surround(X))
        return next(known, process)

    def _outcome_posterior(
        self,
        X: Tensor,
        inputs: Tensor,
        joint: Joint,
        observation_noise: bool | Tensor = False,
        chosen: list[int] | None = None,
    ) -> Posterior:
        """Return the posterior of outcomes from the joint distribution of the process.

        Args:
            X: As for :meth:`posterior`.
            inputs: X as :meth:`process_inputs` returns it.
            joint: Of the process at the inputs.
            observation_noise: As for :meth:`posterior`, checked.
            chosen: Outputs, or None for all.
        """
        if isinstance(observation_noise, Tensor):
            noise: Tensor | None = observation_noise.to(torch.float64).mT
        else:
            noise = self.noise_at(inputs) if observation_noise else None
        chain = self._outcome_chain
        offset, scale = (t.unsqueeze(-1) for t in chain.offset_and_scale(self._outcomes.shift))
        if chosen is not None:
            joint, offset, scale = (
                joint.select(chosen),
                offset[..., chosen, :],
                scale[..., chosen, :],
            )
            noise = None if noise is None else noise[..., chosen, :]
        normal = joint.distribution(offset, scale, noise, X.dtype)
        return chain.untransform(GPyTorchPosterior(normal), chosen)

    def predictive(self, X: Tensor) -> Predictive:
        """Mean and variance of outcomes at single points; differentiable in X.

        Of the likelihood's marginal: in closed form where gpytorch has one (Bernoulli, Gaussian),
        else by quadrature. Cost as that of a posterior's variances.

        Args:
            X: ``... x q x d``.

        Raises:
            BotorchTensorDimensionError: X has the wrong width or too few dimensions.
            InputDataError: X has a wrong dtype or device, or is not finite.
            UnsupportedError: An outcome transform other than ``Standardize``.
        """
        inputs, mean, variance = self._marginals(X)
        noise = partial(self.noise_at, inputs)
        mean, variance = self._outcomes.moments(self.prior, mean, variance, noise)
        offset, scale = self._offset_and_scale()
        return Predictive((offset + scale * mean).mT.to(X), (scale.square() * variance).mT.to(X))

    def log_predictive(self, X: Tensor, Y: Tensor) -> Tensor:
        """Log density, or log probability, of each outcome at its point, ``... x q x m``.

        In closed form as :meth:`predictive`, and of a Laplace likelihood; else by quadrature, which
        is rough where the process is many times less certain than the likelihood is wide.

        Args:
            X: ``... x q x d``.
            Y: ``...' x q x m``, leading dimensions broadcast against those of X.

        Raises:
            BotorchTensorDimensionError: A wrong width, number of rows or batch shape.
            InputDataError: A wrong dtype or device, NaN or infinity; outcomes that the likelihood
                cannot have.
            UnsupportedError: An outcome transform other than ``Standardize``.
        """
        inputs, mean, variance = self._marginals(X)
        check_hypothetical(mean.mT.to(X), Y, None, self.num_outputs * self._outcomes.columns)
        targets, noise = self._standardized(Y.to(torch.float64)).mT, partial(self.noise_at, inputs)
        density = self._outcomes.log_density(self.prior, targets, mean, variance, noise)
        return (density - self._offset_and_scale()[1].log()).mT.to(X)

    @property
    def _outcome_chain(self) -> OutcomeChain:
        """View the outcome transform as a chain of steps."""
        return OutcomeChain(self._modules.get("outcome_transform"))

    @waits_once
    def _marginals(self, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, and mean and variance of the process at single points, ``... x m x q`` each."""
        self._leave_training()
        inputs = self.process_inputs(X)
        process = self._solved(self._inference.process, inputs)
        mean, variance = torch.broadcast_tensors(*process.marginals(inputs))
        return inputs, mean, variance

    def _offset_and_scale(self) -> tuple[Tensor, Tensor]:
        """Outcomes are ``offset + scale ·`` what the process has, ``batch_shape x m x 1``."""
        offset, scale = self._outcome_chain.offset_and_scale(self._outcomes.shift)
        return offset.unsqueeze(-1), scale.unsqueeze(-1)

    def _standardized(self, Y: Tensor) -> Tensor:
        """Return outcomes, ``... x n x m``, in units of the process."""
        return self._outcome_chain.standardized(Y, self._outcomes.shift)

    def _leave_training(self) -> None:
        """Put a model into evaluation mode, which ends a refit, if it is not."""
        if self.training:
            self.eval()

    def _check_query(self, X: Tensor, finite: bool = False) -> None:
        """Check inputs that a model is asked about; ``finite`` looks at the values, too."""
        transform = getattr(self, "input_transform", None)
        any_width = transform is not None and transform.is_one_to_many
        like = next(self.covar_module.parameters())
        check_inputs(X, None if any_width else self._input_dim, like, finite)

    def _solved(self, solve: Solve, X: Tensor | None) -> PosteriorProcess:
        """Return a process that can take X, which is finite."""
        if self._conditioned_process is not None:
            self._inference.check_reach(self._conditioned_process, X)
            return self._conditioned_process
        if not (self._inference.defers_reads or (X is not None and X.is_cpu)):
            read_expected()
        with torch.no_grad():
            memory = self._memory
            found, cache = solve(memory, self._cache, self.prior, X)
        self._keep_cache(cache, memory)
        return found

    def _keep_cache(self, cache: Any, memory: Any) -> None:
        """Keep the cache of a memory, unless another thread has updated the model meanwhile."""
        if self._memory is memory:
            self._cache = cache

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
        memory = self._memory
        noise, cache = self._inference.noise(memory, self._cache, self.prior, X, process)
        self._keep_cache(cache, memory)
        return noise

    def _pseudo_observations(
        self,
        process: PosteriorProcess,
        inputs: Tensor,
        targets: Tensor,
        noise: Tensor | None,
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
        return self._outcomes.pseudo_observations(
            self.prior, self._memory, process, inputs, targets, noise
        )

    def _drawn(
        self,
        X: Tensor,
        inputs: Tensor,
        process: PosteriorProcess,
        sampler: MCSampler,
        drawing: Drawing,
    ) -> tuple[Tensor, Tensor | None]:
        """Draw outcomes from their joint posterior at X, ``sample_shape x ... x q x m``.

        Counts have two columns. Second, their noise variances where these are not the model's own.
        """
        if X.shape[-2] == 0:
            width = self.num_outputs * self._outcomes.columns
            nothing = X.new_empty(*sampler.sample_shape, *X.shape[:-1], width)
            return nothing, None
        joint = self._around(X, process).joint(inputs)
        samples = sampler(self._outcome_posterior(X, inputs, joint))
        values = self._standardized(samples.to(torch.float64)).mT
        kept = values.shape[values.ndim - len(self._batch_shape) - 2 :]
        flat = values.reshape(sampler.sample_shape.numel(), -1, *kept)
        outcomes, noise = drawing(flat, sampler.seed)
        offset, scale = self._offset_and_scale()
        Y = (offset + scale * outcomes.view(*values.shape[:-2], *outcomes.shape[-2:])).mT.to(X)
        return Y, None if noise is None else noise.view(values.shape).mT.to(X)

    # --- hypothetical observations: a model beside this one --------------------------------

    @waits_once
    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> Self:
        """Condition on hypothetical observations Y at X; this model stays as it is.

        O(q) cross-covariances and one q x q factor; differentiable in X and Y; exact in the
        posterior as it is. Under a Gaussian likelihood it is equal to ``update`` on a copy for an
        exact GP, on a grid, in a last layer, and at inducing points while every input is one. It is
        not where an update projects on fewer inducing points, moves inputs to centres, reaches one
        local model or takes steps, nor under another likelihood, where an update finds the Gaussian
        observations that stand for the outcomes again. The returned model predicts and fantasises,
        but cannot be updated.

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
        inputs = self.observation_inputs(X)
        process = self._solved(self._inference.process, inputs)
        return self._conditioned(X, inputs, process, Y, noise)

    def _conditioned(
        self,
        X: Tensor,
        inputs: Tensor,
        process: PosteriorProcess,
        Y: Tensor,
        noise: Tensor | None,
    ) -> Self:
        """Condition a solved process on Y at X, whose transformed inputs are checked."""
        check_hypothetical(inputs.to(X), Y, noise, self._num_outputs * self._outcomes.columns)
        targets = self._standardized(Y.to(torch.float64)).mT
        known = None if noise is None else noise.to(torch.float64).mT
        pseudo = self._pseudo_observations(process, inputs, targets, known)
        return self._with_process(process.condition(inputs, *pseudo), X)

    @waits_once
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
            kwargs: Ignored, for BoTorch's callers.

        Raises:
            BotorchTensorDimensionError: X has the wrong width or too few dimensions.
            InputDataError: X has a wrong dtype or device, is not finite, or is too far outside the
                bounds; a variance is negative or not finite.
            UnsupportedError: ``sampler`` draws nothing; ``observation_noise`` is given and the
                likelihood is not Gaussian.
        """
        if observation_noise is not None and not isinstance(observation_noise, Tensor):
            raise DeprecationError(
                f"Expected observation_noise to be a tensor of variances or None, got "
                f"{observation_noise!r}."
            )
        self._leave_training()
        inputs = self.hypothetical_inputs(X)
        # any function of a posterior will do
        if not callable(sampler) or isinstance(sampler, type):
            raise UnsupportedError(
                "Expected sampler to be an instance of MCSampler, such as "
                f"SobolQMCNormalSampler(torch.Size([4])), got {spelled(sampler)}."
            )
        noise, drawing = observation_noise, self._outcomes.drawing(self.prior, observation_noise)
        process = self._solved(self._inference.process, inputs)
        if drawing is not None:
            drawn = self._drawn(X, inputs, process, sampler, drawing)
            return self._conditioned(X, inputs, process, *drawn)
        if noise is None and self._inference.noise_varies:
            noise = self.noise_at(inputs).mT.to(X)
        elif noise is None and isinstance(self.likelihood, FixedNoiseGaussianLikelihood):
            noise = self.noise_level().unsqueeze(-2).to(X)  # 1 x m, the mean of those known
        elif noise is not None:
            check_noise("observation_noise", noise, inputs.to(X), self._num_outputs)
        if X.shape[-2] == 0:
            shape = (*sampler.sample_shape, *X.shape[:-2], *self.batch_shape, 0, self.num_outputs)
            Y = X.new_empty(shape)
        else:
            joint, added = self._around(X, process).joint(inputs), True if noise is None else noise
            Y = sampler(self._outcome_posterior(X, inputs, joint, added))
        noise = None if noise is None else noise.expand(Y.shape[1:])
        return self._conditioned(X, inputs, process, Y, noise)

    @keeps_tensors
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
        transform = getattr(self, "input_transform", None)
        if transform is not None:
            raise UnsupportedError(
                "get_fantasy_model cannot know whether its inputs are transformed "
                "(ModelListGP.condition_on_observations leaves out the model's "
                f"{type(transform).__name__}). Use condition_on_observations of each "
                "model and build the list from what they return."
            )
        self._leave_training()
        check_inputs(inputs, self._input_dim, self.train_targets, finite=True)
        rows = self._as_rows(targets)
        variances = None if noise is None else self._as_rows(noise)
        check_hypothetical(inputs, rows, variances, self.num_outputs * self._outcomes.columns)
        known = None if variances is None else variances.double().mT
        X = inputs.double()
        process = self._solved(self._inference.process, X)
        told = self._pseudo_observations(process, X, rows.double().mT, known)
        return self._with_process(process.condition(X, *told), inputs)

    def _as_rows(self, values: Tensor) -> Tensor:
        """Bring GPyTorch's ``... (x m if m > 1) x q`` to ``... x q x m``."""
        return values.unsqueeze(-1) if self.num_outputs == 1 else values.mT

    @keeps_tensors
    def with_known_points(self, first: Tensor | None = None, last: Tensor | None = None) -> Self:
        """Evaluate k points once, for joint posteriors of them and others; return a model.

        For acquisition functions with a baseline, which BoTorch puts before the candidates, and
        with pending points, which it puts after them: the candidates then cost O(q r² + k q r) a
        batch instead of O((k + q) r²). Posteriors are those of this model as it is now; gradients
        flow to what is between the known points, not to them. Like a fantasy model, it cannot be
        updated.

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
                self._check_query(X)
        known = arrangements(first, last)
        inputs = [self.process_inputs(X) for X, _ in known]
        process = self._solved(self._inference.process, inputs[0] if inputs else None)
        prepared = self._with_process(process)
        prepared._known = tuple(
            CachedBaseline.of(X, leading, process, own)
            for (X, leading), own in zip(known, inputs, strict=True)
        )
        return prepared

    def _with_process(self, process: PosteriorProcess, X: Tensor | None = None) -> Self:
        """Return a model with this process that shares hyperparameters and memory.

        Args:
            process: The posterior.
            X: Inputs that it was conditioned at, ``... x q x d``, if it was.
        """
        stem, conditioned = getattr(self, "stem", None), self._shallow_copy()
        if X is not None:
            asked = (*self._latest.hypothetical, X.detach())
            conditioned._latest = replace(self._latest, hypothetical=asked)
        conditioned._conditioned_process = process
        conditioned._conditioned_noise = self._noise(process=process)
        if stem is not None and self._conditioned_process is None:
            conditioned.stem = deepcopy(stem)  # this one's may go on learning
        return conditioned

    def _read_once(self, call: Callable[[], R]) -> R:
        """Make a call that looks at values of the model, waiting for its device once.

        See :func:`~bo_stream.tensors.read_at_once`, which may make it twice; on the host once.
        """
        if next(self.covar_module.parameters()).is_cpu:
            return call()
        before = self._shallow_copy().__dict__

        def undo() -> None:
            self.__dict__.clear()
            self.__dict__.update(before)

        return read_at_once(call, undo)

    def _shallow_copy(self) -> Self:
        """Return a model with the same tensors, whose attributes are its own."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        for name in ("_parameters", "_buffers", "_modules"):
            copy.__dict__[name] = dict(self.__dict__[name])
        return copy

    # --- hyperparameters: fits from the memory ---------------------------------------------

    @keeps_tensors
    def log_marginal_likelihood(self) -> Tensor:
        """Return the log evidence of all observations, ``batch_shape (x m if m > 1)``.

        In units of transformed outcomes; differentiable in the hyperparameters. Cost as a step of a
        refit, regardless of how many observations there were.
        """
        memory = self._memory
        value, cache = self._inference.log_marginal_likelihood(memory, self._cache, self.prior)
        self._keep_cache(cache, memory)
        return self._from_per_output(value)

    def compute_custom_loss(self, mll: MarginalLogLikelihood, **kwargs: Any) -> Tensor:
        """BoTorch's hook for fitting: the negative MLL per observation, from the memory alone.

        Args:
            mll: Gives the priors of all hyperparameters.
            kwargs: Ignored, for BoTorch's callers.

        Raises:
            UnsupportedError: ``mll`` is another objective than the marginal likelihood and its
                evidence lower bound.
        """
        check_objective(mll)

        def learned() -> Tensor:
            if not self._inference.defers_reads:
                read_expected()
            memory = self._memory
            value, cache = self._inference.objective(memory, self._cache, self.prior)
            self._keep_cache(cache, memory)
            return value

        objective = self._from_per_output(self._read_once(learned))
        value = ExactMarginalLogLikelihood._add_other_terms(mll, objective.clone(), [])
        return -value / self._from_per_output(self._counts()).clamp_min(1.0)

    @keeps_tensors
    def train(self, mode: bool = True) -> Self:
        """Training mode; entering it begins a refit, for which outcomes are re-standardised."""
        if mode and not self.is_conditioned and self._outcomes.rescales:
            self._standardize_by(self._memory.totals, self._outcomes.shift)
            settled = self._outcomes.settled(self._memory.totals)
            if settled is not self._outcomes:
                self._outcomes = settled
                self._cache = None
            self._refresh_fixed_noise()
        was_training = self.training
        torch.nn.Module.train(self, mode)
        outcome_transform = self._modules.get("outcome_transform")
        if mode and outcome_transform is not None:
            outcome_transform.eval()  # a caller's outcomes are transformed, never learned from
        input_transform = self._modules.get("input_transform")
        if mode and input_transform is not None:
            for part in input_transform.modules():
                if getattr(part, "learn_coefficients", False):
                    part.eval()  # nor are a caller's inputs
        if was_training and not mode and not self.is_conditioned:
            with torch.no_grad():
                self._memory, self._cache = self._inference.refitted(
                    self._memory, self._cache, self.prior
                )
        return self

    def _standardize_by(self, totals: Tensor, shift: Tensor) -> None:
        """Learn the standardisation, in a copy: conditioned models keep their own."""
        if "outcome_transform" in self._modules:
            self.outcome_transform = deepcopy(self.outcome_transform).eval()
        self._outcome_chain.learn(totals, shift)

    def eval(self) -> Self:
        """Set evaluation mode, which ends a refit."""
        return self.train(False)

    # --- units: a user's and those of the process ------------------------------------------

    def outcome_scale(self) -> Tensor:
        """Factor from transformed to target units, ``batch_shape x m``; 1 without Standardize."""
        return self._outcome_chain.offset_and_scale(self._outcomes.shift)[1].clone()

    def transformed_noise(self, Yvar: Tensor) -> Tensor:
        """Noise variances from original to transformed units, as ``noise`` is expected to be in.

        Args:
            Yvar: ``... x q x m``, as :meth:`update` takes them.

        Raises:
            UnsupportedError: Variances in transformed units depend on the outcomes.
        """
        if self._outcome_chain.fixed:
            names = ", ".join(type(step).__name__ for step in self._outcome_chain.fixed)
            raise UnsupportedError(
                f"Expected outcome_transform to be Standardize or None, got {names}: what variance "
                "the transformed outcomes have depends on the outcomes. Transform it yourself."
            )
        return Yvar / self.outcome_scale().unsqueeze(-2).square().to(Yvar)

    def noise_level(self) -> Tensor:
        """Return the learned noise variance, or the mean known one, ``batch_shape x m``.

        Where all that are known are zero: what they are raised to.

        Raises:
            UnsupportedError: The likelihood has no Gaussian noise.
        """
        return self._outcomes.noise_level(self.prior, self._memory)

    def noise_given(
        self,
        inputs: Tensor,
        mean: Tensor,
        variance: Tensor,
        trials: Tensor | None = None,
    ) -> Tensor:
        """Noise variances of hypothetical observations, given the moments of the process there.

        Of counts those of observations of the logit with the same expected information, in units of
        the process; else :meth:`noise_at`, whatever the moments.

        Args:
            inputs: After :meth:`transform_inputs`, ``n x d``.
            mean: Of the process at each, ``n``.
            variance: Of the process at each, ``n``.
            trials: Examined at each, ``n``, of a model of counts; default: its likelihood's, else
                the rounded mean of those observed.

        Returns:
            Broadcastable to ``m x n``, float64.

        Raises:
            UnsupportedError: Trials of a model that is not of counts; a model of labels; or one of
                counts that knows of no number of trials.
        """
        if isinstance(self._outcomes, CountOutcomes):
            return self._outcomes.survey_noise(self.prior, mean, variance, trials)
        if trials is not None:
            raise UnsupportedError(
                "Expected trials only of a model of counts, with a BinomialLikelihood, got trials "
                f"for a {type(self).__name__} with a {type(self.likelihood).__name__}."
            )
        return self.noise_at(inputs).double()

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
        Y, Yvar, _ = self._outcomes.checked(self, X, Y, Yvar, "standardized")
        return self.prior.standardized(self._measured(Y, Yvar))

    # --- what differs between models ---------------------------------------------------------

    @property
    def outcomes(self) -> Outcomes:
        """Return the units of what the memory holds, and how outcomes depend on the process."""
        return self._outcomes

    @property
    def memory(self) -> Any:
        """Return what is left of the data, a frozen value of the family's class of memory."""
        return self._memory

    @property
    def inference(self) -> Any:
        """Return the family's way from a memory to a posterior, a frozen :class:`Inference`."""
        return self._inference

    @property
    def prior(self) -> Prior:
        """View the hyperparameters as they are now, and the units of the outcomes."""
        return Prior(
            self.covar_module,
            self.mean_module,
            self.likelihood,
            self._outcome_chain,
            self._outcomes,
            self._batch_shape,
            self._num_outputs,
            self,
        )

    @property
    def is_conditioned(self) -> bool:
        """Whether the model is conditioned on hypothetical observations, or keeps known points."""
        return self._conditioned_process is not None

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
    def input_dim(self) -> int:
        """Number d of inputs, before any transform."""
        return self._input_dim

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

    @keeps_tensors
    def subset_output(self, idcs: list[int]) -> Self:
        """Return a model of some of the outputs, with its own hyperparameters and memory.

        Args:
            idcs: Indices of the outputs to keep.

        Raises:
            UnsupportedError: An index is out of range or repeated.
        """
        outputs = self.num_outputs
        check_outputs_exist(idcs, outputs)
        part = self._shallow_copy()
        part._num_outputs = len(idcs)
        if self._conditioned_process is not None:
            part._conditioned_process = SelectedProcess(self._conditioned_process, tuple(idcs))
        if self._conditioned_noise is not None:
            part._conditioned_noise = self._conditioned_noise.select(idcs)
        own: torch.nn.Module | None
        for name, module in self._modules.items():
            if name in ("covar_module", "mean_module", "likelihood"):
                own = subset_module(getattr(self, name), self._batch_shape, outputs, idcs)
            elif isinstance(module, OutcomeTransform):
                own = subset_transform(module, idcs)
            elif isinstance(module, Model):
                own = module.subset_output(idcs)
            else:  # stem and input transform
                own = deepcopy(module)
            part._modules[name] = own
        whole = self._outcomes.columns > 1  # of counts, there is one output
        part._set_memory(deepcopy(self._memory) if whole else self._memory.select(idcs))
        part._outcomes = self._outcomes.select(idcs)
        return part

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the memory along to another device, where it stays in float64, and all priors."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        move_priors(self, fn)
        device = fn(torch.empty(0, dtype=self._dtype, device=self._outcomes.shift.device)).device
        if device != self._outcomes.shift.device:
            self._outcomes, self._latest = map_tensors(
                (self._outcomes, self._latest), lambda value: value.to(device)
            )
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
        """Return what a file says of the model besides its class; see :func:`describe_file`."""
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
        with outside_inference_mode():
            model = read_model(path, cls, map_location, trusted)
            restore_products(model)
        return model

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        keep_transforms: bool = True,
        assign: bool = False,
    ) -> Any:
        """Load hyperparameters and transforms; the memory stays, with outcomes in original units.

        Args:
            state_dict: Of a model of the same structure; holds no data.
            strict: Whether the keys must match.
            keep_transforms: Ignored: nothing depends on it here.
            assign: As in torch.

        Raises:
            UnsupportedError: The memory has observations, whose inputs are transformed, and the
                input transform of the state is another one.
        """
        transform = self._modules.get("input_transform")
        if transform is not None and self.num_observations > 0.0:
            for path, part in transform.named_modules(prefix="input_transform"):
                if not getattr(part, "is_one_to_many", False):  # else of queries only
                    self._check_transform(part.state_dict(prefix=f"{path}."), state_dict)
        return torch.nn.Module.load_state_dict(self, state_dict, strict=strict, assign=assign)

    def _check_transform(self, own: Mapping[str, Tensor], loaded: Mapping[str, Any]) -> None:
        """Check that values to be loaded are, but for rounding, those of inputs in memory."""
        for name, values in own.items():
            if name not in loaded or values.numel() == 0:
                continue
            mine, other = values.double(), loaded[name].to(values).double()
            rounding = _SAME * float(mine.abs().max())
            if mine.shape != other.shape or bool(((mine - other).abs() > rounding).any()):
                raise UnsupportedError(
                    f"Expected a state_dict with {name} as in this model, whose "
                    f"{self.num_observations:g} observations are in memory as transformed: "
                    f"{values.tolist()}, got {loaded[name].tolist()}. Build the model with the "
                    "other one's transform, as Normalize(d, bounds=...) with the bounds that it "
                    "learned, then load the state."
                )

    @classmethod
    def construct_inputs(cls, training_data: SupervisedDataset, **kwargs: Any) -> dict[str, Any]:
        """Constructor arguments from a data set; further keyword arguments are passed on."""
        arguments = super().construct_inputs(training_data)
        outcomes = arguments.pop("train_Y")
        return {cls._outcomes_argument: outcomes, **arguments, **kwargs}
