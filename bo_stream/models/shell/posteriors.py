"""From hyperparameters and memory to a posterior, and to a model of hypothetical observations."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.exceptions.errors import BotorchTensorDimensionError
from botorch.models.model import FantasizeMixin, Model
from botorch.models.utils import fantasize as fantasize_flag
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.posteriors.posterior import Posterior
from botorch.sampling.base import MCSampler
from torch import Tensor

from bo_stream.models.checks import (
    check_finite,
    check_hypothetical,
    check_inputs,
    check_noise,
    check_sampler,
)
from bo_stream.models.inference import Solve
from bo_stream.models.outcomes.base import NoiseAtInputs
from bo_stream.models.outcomes.prediction import drawn
from bo_stream.models.outcomes.selection import chosen_outputs
from bo_stream.models.outcomes.transform import OutcomeChain
from bo_stream.models.prior import Prior
from bo_stream.process.cached_baseline import CachedBaseline
from bo_stream.process.process import PosteriorProcess
from bo_stream.tensors import outside_inference_mode

if TYPE_CHECKING:
    from bo_stream.models.base import StreamingGP

M = TypeVar("M", bound="StreamingGP")
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


# --- what a model holds --------------------------------------------------------------------


def prior_of(model: StreamingGP) -> Prior:
    """View the hyperparameters as they are now, and the units of the outcomes."""
    return Prior(
        model.covar_module,
        model.mean_module,
        model.likelihood,
        chain_of(model),
        model._units,
        model._batch_shape,
        model._num_outputs,
        model,
    )


def chain_of(model: StreamingGP) -> OutcomeChain:
    """View the outcome transform as a chain of steps."""
    return OutcomeChain(model._modules.get("outcome_transform"))


# --- inputs --------------------------------------------------------------------------------


def transform_inputs(
    model: StreamingGP, X: Tensor, input_transform: torch.nn.Module | None = None
) -> Tensor:
    """Inputs as the process takes them: transformed, then projected by a stem, if there is one.

    Differentiable.

    Args:
        model: Itself.
        X: ``... x d``.
        input_transform: Instead of the model's own.
    """
    inputs: Tensor = Model.transform_inputs(model, X, input_transform)
    stem = getattr(model, "stem", None)
    return inputs if stem is None else stem(inputs)


def process_inputs(model: StreamingGP, X: Tensor) -> Tensor:
    """Check inputs and transform them as the process takes them, differentiable, float64.

    A one-to-many input transform (``InputPerturbation``, ``AppendFeatures``) gives several rows
    for each of X, whose width need not be that of observed inputs.

    Args:
        model: Itself.
        X: ``... x q x d``.

    Returns:
        ``... x q' x d'``.

    Raises:
        BotorchTensorDimensionError: X has the wrong width or too few dimensions.
        InputDataError: X has a wrong dtype or device, or is not finite after the transform.
    """
    check_query(model, X, finite=True)
    inputs: Tensor = transform_inputs(model, X)
    if inputs is not X:
        check_finite("X after its input transform", inputs)
    if inputs.shape[-1] != model._process_dim:
        raise BotorchTensorDimensionError(
            f"Expected X that input_transform {type(model.input_transform).__name__} turns "
            f"into {model._process_dim} inputs, got {inputs.shape[-1]} from X of shape "
            f"{tuple(X.shape)}."
        )
    return inputs.to(torch.float64)


def hypothetical_inputs(model: StreamingGP, X: Tensor) -> Tensor:
    """Transform inputs of hypothetical observations: :meth:`process_inputs` as in a fantasy.

    A transform that is not applied to fantasies (``transform_on_fantasize=False``), such as
    ``InputPerturbation``, leaves them alone, as it leaves alone what is observed.

    Args and errors as there.
    """
    with fantasize_flag():
        return process_inputs(model, X)


def check_query(model: StreamingGP, X: Tensor, finite: bool = False) -> None:
    """Check inputs that a model is asked about; ``finite`` looks at the values, too."""
    transform = getattr(model, "input_transform", None)
    any_width = transform is not None and transform.is_one_to_many
    like = next(model.covar_module.parameters())
    check_inputs(X, None if any_width else model._input_dim, like, finite)


def leave_training(model: StreamingGP) -> None:
    """Put a model into evaluation mode, which ends a refit, if it is not."""
    if model.training:
        model.eval()


# --- the process ---------------------------------------------------------------------------


@keeps_tensors
def process(model: StreamingGP, X: Tensor | None = None) -> PosteriorProcess:
    """Return the posterior as a process; solved once, then kept until something changes.

    The process is over transformed inputs, in transformed outcome units.

    Args:
        model: Itself.
        X: Transformed inputs, ``... x d``, that the process must be able to take.

    Raises:
        InputDataError: X is not finite; on a grid, too far outside.
    """
    if X is not None:
        check_finite("X", X)
    return solved(model, model._inference.process, X)


@keeps_tensors
def feature_process(model: StreamingGP, X: Tensor | None = None) -> PosteriorProcess:
    """Return the posterior as a process in the weights of features, however many rows.

    For acquisition in feature space. That of most models is :meth:`process`; a model that is
    conditioned on hypothetical observations has one process only.

    Args:
        model: Itself.
        X: As for :meth:`process`.
    """
    if X is not None:
        check_finite("X", X)
    return solved(model, model._inference.feature_process, X)


def solved(model: StreamingGP, solve: Solve, X: Tensor | None) -> PosteriorProcess:
    """Return a process that can take X, which is finite."""
    if model._conditioned_process is not None:
        model._inference.check_reach(model._conditioned_process, X)
        return model._conditioned_process
    with torch.no_grad():
        found, model._cache = solve(model._memory, model._cache, prior_of(model), X)
    return found


# --- the posterior -------------------------------------------------------------------------


@keeps_tensors
def posterior(
    model: StreamingGP,
    X: Tensor,
    output_indices: list[int] | None = None,
    observation_noise: bool | Tensor = False,
    posterior_transform: PosteriorTransform | None = None,
) -> Posterior:
    """Return the joint posterior of q points and m outputs.

    Beyond ``DENSE_LIMIT`` points the covariance stays lazy: marginal variances then take
    O(q r) memory. Inputs a little outside the bounds are taken too; they change nothing.

    Args:
        model: Itself.
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
    leave_training(model)
    inputs = process_inputs(model, X)
    if isinstance(observation_noise, Tensor):
        check_noise("observation_noise", observation_noise, inputs.to(X), model._num_outputs)
    chosen = chosen_outputs(output_indices, model._num_outputs) if output_indices else None
    joint = _process_at(model, X, inputs).joint(inputs)
    if isinstance(observation_noise, Tensor):
        noise: Tensor | None = observation_noise.to(torch.float64).mT
    else:
        noise = noise_at(model, inputs) if observation_noise else None
    offset, scale = offset_and_scale(model)
    if chosen is not None:
        joint, offset, scale = (
            joint.select(chosen),
            offset[..., chosen, :],
            scale[..., chosen, :],
        )
        noise = None if noise is None else noise[..., chosen, :]
    normal = joint.distribution(offset, scale, noise, X.dtype)
    found = chain_of(model).untransform(GPyTorchPosterior(normal), chosen)
    return found if posterior_transform is None else posterior_transform(found, X=X)


def _process_at(model: StreamingGP, X: Tensor, inputs: Tensor) -> PosteriorProcess | CachedBaseline:
    """Return the process, or the known points of it that surround X."""
    process = solved(model, model._inference.process, inputs)
    for known in model._known:
        if process is known.process and known.surround(X):
            return known
    return process


def offset_and_scale(model: StreamingGP) -> tuple[Tensor, Tensor]:
    """Outcomes are ``offset + scale ·`` what the process has, ``batch_shape x m x 1``."""
    offset, scale = chain_of(model).offset_and_scale(model._units.shift)
    return offset.unsqueeze(-1), scale.unsqueeze(-1)


def standardized_outcomes(model: StreamingGP, Y: Tensor) -> Tensor:
    """Return outcomes, ``... x n x m``, in units of the process."""
    return chain_of(model).standardized(Y, model._units.shift)


@keeps_tensors
def marginals(model: StreamingGP, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, and mean and variance of the process at single points, ``... x m x q`` each."""
    leave_training(model)
    inputs = process_inputs(model, X)
    process = solved(model, model._inference.process, inputs)
    mean, variance = torch.broadcast_tensors(*process.marginals(inputs))
    return inputs, mean, variance


# --- noise ---------------------------------------------------------------------------------


def noise_at(model: StreamingGP, inputs: Tensor) -> Tensor:
    """Variance of the noise of an observation at inputs, in transformed units.

    The noise level, unless a model's noise depends on the inputs; differentiable then. Of
    real outcomes under another likelihood their variance given the process.

    Args:
        model: Itself.
        inputs: After :meth:`transform_inputs`, ``... x q x d``.

    Returns:
        Broadcastable to ``... x m x q``, float64.

    Raises:
        UnsupportedError: A likelihood of labels or counts.
    """
    noise = _noise(model, inputs)
    if noise is not None:
        return noise(inputs)
    return model._units.noise_variance(prior_of(model), model._memory).detach().unsqueeze(-1)


def _noise(
    model: StreamingGP, X: Tensor | None = None, process: PosteriorProcess | None = None
) -> NoiseAtInputs | None:
    """Noise as it depends on the inputs, or None; see :meth:`Inference.noise`."""
    if model._conditioned_process is not None:
        return model._conditioned_noise
    return _varying_noise(model, X, process) if model._inference.noise_varies else None


@keeps_tensors
@torch.no_grad()
def _varying_noise(
    model: StreamingGP, X: Tensor | None, process: PosteriorProcess | None
) -> NoiseAtInputs | None:
    if X is not None:
        check_finite("X", X)
    noise: NoiseAtInputs | None
    noise, model._cache = model._inference.noise(
        model._memory, model._cache, prior_of(model), X, process
    )
    return noise


# --- hypothetical observations -------------------------------------------------------------


@keeps_tensors
def condition_on_observations(
    model: M, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any
) -> M:
    """Condition on hypothetical observations Y at X; this model stays as it is.

    O(q) cross-covariances and one q x q factor; differentiable in X and Y. Equal to ``update``
    on a copy. The returned model predicts and fantasises, but cannot be updated.

    Args:
        model: Itself.
        X: ``batch_shape x q x d``.
        Y: ``batch_shape' x q x m`` in original units, broadcast against X.
        noise: Variances shaped as Y, in transformed units (see :meth:`transformed_noise`); the
            model's own if omitted.
        kwargs: Ignored, for BoTorch's callers.

    Raises:
        BotorchTensorDimensionError: A wrong width, number of rows or batch shape.
        InputDataError: A wrong dtype or device, NaN or infinity, or a negative noise.
    """
    leave_training(model)
    inputs = hypothetical_inputs(model, X)
    check_hypothetical(inputs.to(X), Y, noise, model._num_outputs * model._units.columns)
    targets = standardized_outcomes(model, Y.to(torch.float64)).mT
    given = None if noise is None else noise.to(torch.float64).mT
    process = solved(model, model._inference.process, inputs)
    told = pseudo_observations(model, process, inputs, targets, given)
    return with_process(model, process.condition(inputs, *told), X)


def fantasize(
    model: M,
    X: Tensor,
    sampler: MCSampler,
    observation_noise: Tensor | None = None,
    **kwargs: Any,
) -> M:
    """Condition on hypothetical observations that are drawn from the posterior at X.

    Under another likelihood than a Gaussian one, the process is drawn by the sampler, and
    outcomes from the likelihood of each draw with the sampler's seed, the same for every batch
    of inputs. Gradients flow through the points, and through the draws of a continuous
    likelihood; a draw of labels or counts is a step in X.

    Args:
        model: Itself.
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
    check_query(model, X)
    check_sampler(sampler)
    drawing = model._units.drawing(prior_of(model), observation_noise)
    if drawing is None:
        if observation_noise is None and model._inference.noise_varies:
            observation_noise = noise_at(model, hypothetical_inputs(model, X)).mT.to(X)
        return FantasizeMixin.fantasize(model, X, sampler, observation_noise, **kwargs)
    return condition_on_observations(model, X, *drawn(model, X, sampler, drawing))


def pseudo_observations(
    model: StreamingGP,
    process: PosteriorProcess,
    inputs: Tensor,
    targets: Tensor,
    noise: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return Gaussian outcomes and noise variances that the process is conditioned on.

    Args:
        model: Itself.
        process: The posterior.
        inputs: After :meth:`transform_inputs`, ``... x q x d``, float64.
        targets: In the units of the process, ``... x m x q``, float64.
        noise: Shaped as targets, or None for the model's own.
    """
    varying = _noise(model, inputs) if noise is None else None
    noise = noise if varying is None else varying(inputs)
    return model._units.pseudo_observations(
        prior_of(model), model._memory, process, inputs, targets, noise
    )


def with_process(model: M, process: PosteriorProcess, X: Tensor | None = None) -> M:
    """Return a model with this process that shares hyperparameters and memory.

    Args:
        model: Itself.
        process: The posterior.
        X: Inputs that it was conditioned at, ``... x q x d``, if it was.
    """
    stem, conditioned = getattr(model, "stem", None), shallow_copy(model)
    if X is not None:
        asked = (*model._latest.hypothetical, X.detach())
        conditioned._latest = replace(model._latest, hypothetical=asked)
    conditioned._conditioned_process = process
    conditioned._conditioned_noise = _noise(model, process=process)
    if stem is not None and model._conditioned_process is None:
        conditioned.stem = deepcopy(stem)  # this one's may go on learning
    return conditioned


def shallow_copy(model: M) -> M:
    """Return a model with the same tensors, whose attributes are its own."""
    copy = object.__new__(type(model))
    copy.__dict__.update(model.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        copy.__dict__[name] = dict(model.__dict__[name])
    return copy
