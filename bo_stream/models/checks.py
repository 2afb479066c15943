"""Check arguments at the door, before anything is changed."""

from __future__ import annotations

import math
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError, UnsupportedError
from gpytorch.kernels import AdditiveKernel, Kernel, ProductKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood, VariationalELBO
from torch import Tensor

from bo_stream.tensors import none_set

if TYPE_CHECKING:
    from bo_stream.models.base import StreamingGP
    from bo_stream.models.outcomes.base import Outcomes


def check_instance(name: str, value: object, kind: type | UnionType, example: str) -> None:
    """Check that an argument is an instance of a class, or of one of several.

    Args:
        name: Of the argument.
        value: That was given.
        kind: The class, or a union of classes.
        example: What to pass, as code.

    Raises:
        UnsupportedError: It is none, or a class instead of an instance of it.
    """
    if not isinstance(value, kind):
        kinds = " or ".join(one.__name__ for one in get_args(kind) or (kind,))
        raise UnsupportedError(
            f"Expected {name} to be an instance of {kinds}, such as {example}, got "
            f"{spelled(value)}."
        )


def spelled(value: object) -> str:
    """Spell what was given in place of an instance, for a message: of a module its class."""
    if isinstance(value, torch.nn.Module):
        return f"a {type(value).__name__}"
    return f"the class {value.__name__}" if isinstance(value, type) else repr(value)


def check_kernel(kernel: Kernel, dim: int, shape: torch.Size) -> None:
    """Check that a kernel is one of a model's inputs and outputs.

    Args:
        kernel: That was given as ``covar_module``.
        dim: Number of inputs as the kernel has them.
        shape: ``batch_shape (x m if m > 1)`` of the model.

    Raises:
        UnsupportedError: It is no kernel, or one of another number of inputs or batch shape, or
            has several values at an input.
    """
    check_instance("covar_module", kernel, Kernel, "ScaleKernel(RBFKernel(ard_num_dims=d))")
    check_batch_shape("covar_module", kernel.batch_shape, shape)
    _check_active(kernel, dim)
    X = torch.empty(1, dim)
    for part in kernel.modules():
        values = part.num_outputs_per_input(X, X) if isinstance(part, Kernel) else 1
        if values != 1:
            raise UnsupportedError(
                f"Expected covar_module of one value at an input, got a {type(part).__name__} of "
                f"{values}. Outputs are independent: give a kernel of batch shape "
                "`batch_shape x m`, or of none."
            )


def check_batch_shape(name: str, given: torch.Size, shape: torch.Size) -> None:
    """Check that a module's batch shape broadcasts to a model's.

    Raises:
        UnsupportedError: It does not.
    """
    fits = len(given) <= len(shape) and all(
        own in (1, size) for own, size in zip(reversed(given), reversed(shape), strict=False)
    )
    if not fits:
        raise UnsupportedError(
            f"Expected {name} of batch shape {tuple(shape)}, `batch_shape x m` without m if that "
            f"is 1, or of none, got {tuple(given)}."
        )


def _check_active(kernel: Kernel, width: int) -> None:
    """Check a kernel that chooses its active inputs among ``width``."""
    active: torch.Tensor | None = kernel.active_dims
    if active is not None and int(active.max()) >= width:
        raise UnsupportedError(
            f"Expected active_dims of {type(kernel).__name__} below {width}, the number of inputs "
            f"that it gets, got {active.tolist()}."
        )
    _check_width(kernel, width if active is None else len(active))


def _check_width(kernel: Kernel, width: int) -> None:
    """Check a kernel of ``width`` active inputs, and those that it is known to be made of."""
    if kernel.ard_num_dims not in (None, width):
        raise UnsupportedError(
            f"Expected ard_num_dims={width} of {type(kernel).__name__}, the number of inputs that "
            f"it gets, got {kernel.ard_num_dims}."
        )
    if isinstance(kernel, ScaleKernel):
        _check_width(kernel.base_kernel, width)  # whose active inputs it has chosen itself
    elif isinstance(kernel, AdditiveKernel | ProductKernel):
        for part in kernel.kernels:
            _check_active(part, width)


def check_observations(
    X: Tensor,
    Y: Tensor,
    Yvar: Tensor | None,
    *,
    dim: int,
    outputs: int,
    batch_shape: torch.Size,
    like: Tensor,
    columns: int = 1,
) -> None:
    """Check a batch of observations for a model.

    Args:
        X: Expected ``batch_shape x n x dim``.
        Y: Expected ``batch_shape x n x outputs``.
        Yvar: Expected shape of Y; non-negative, NaN where unknown.
        dim: Input width.
        outputs: Width of Y.
        batch_shape: The model's.
        like: A tensor of the model's dtype and device.
        columns: Columns of Y that are of the same output: two of counts.

    Raises:
        BotorchTensorDimensionError: A wrong number of dimensions, width or number of rows.
        InputDataError: A wrong dtype or device, NaN, infinity, an outcome whose square is none, or
            a negative variance.
    """
    for name, tensor in (("X", X), ("Y", Y)):
        check_type(name, tensor, like)
    check_shape("X", X, (*batch_shape, None, dim))
    check_shape("Y", Y, (*batch_shape, X.shape[-2], outputs))
    with torch.no_grad():  # one read for inputs and squares of outcomes
        outcomes = Y.flatten()
        sums = X.sum() + outcomes.dot(outcomes)
    if not _is_finite(sums):
        check_finite("X", X)
        check_complete(Y, outputs // columns)
    if Yvar is not None:
        check_type("Yvar", Yvar, like)
        check_shape("Yvar", Yvar, tuple(Y.shape))
        unknown = Yvar.isnan()
        if bool((unknown.any(-1) != unknown.all(-1)).any()):
            raise InputDataError(
                "Expected NaN (unknown noise) in Yvar for all outputs of a row or for none, got "
                "rows with both. Use one model per output (botorch.models.ModelList) instead."
            )
        if bool((Yvar < 0).any() | Yvar.isinf().any()):
            raise InputDataError(
                "Expected Yvar to hold variances, zero or more and finite (NaN where unknown), got "
                "a negative or infinite value."
            )


def checked_observations(
    outcomes: Outcomes,
    model: StreamingGP,
    X: Tensor,
    Y: Tensor,
    Yvar: Tensor | None,
    verb: str,
) -> tuple[Tensor, Tensor | None, int]:
    """Check observations; return what is observed of each output, of labels their scores.

    Args:
        outcomes: Units of the model's outcomes, whose method this is.
        model: That is to take them.
        X: Inputs as they were given.
        Y: Outcomes as they were given.
        Yvar: Their noise variances as they were given.
        verb: What is done with them; ``update`` may bring in new classes.

    Returns:
        Outcomes, ``batch x n x m``, their noise variances, and the number m of outputs.

    Raises:
        BotorchTensorDimensionError: Shapes do not fit the model.
        InputDataError: A wrong dtype or device, NaN, infinity, a negative variance; they are
            no labels, or of unknown classes.
        UnsupportedError: There are variances of labels, or scores of some classes only.
    """
    check_observations(
        X,
        Y,
        Yvar,
        dim=model._input_dim,
        outputs=model._num_outputs * outcomes.columns,
        columns=outcomes.columns,
        batch_shape=model._batch_shape,
        like=next(model.covar_module.parameters()),
    )
    return Y, Yvar, model._num_outputs


def check_type(name: str, tensor: object, like: Tensor | None = None) -> None:
    """Check that an argument is a floating-point tensor, of the model's dtype and device.

    Args:
        name: Of the argument.
        tensor: That was given.
        like: Has the model's dtype and device; None: there is no model yet, any will do.

    Raises:
        InputDataError: It is not.
    """
    if not isinstance(tensor, Tensor):
        raise InputDataError(
            f"Expected {name} to be a torch.Tensor, got {type(tensor).__name__}. Convert it with "
            f"torch.as_tensor({name})."
        )
    if not tensor.is_floating_point():
        raise InputDataError(
            f"Expected {name} to be floating point, got {tensor.dtype}. Use {name}.double()."
        )
    if like is not None and (tensor.dtype != like.dtype or tensor.device != like.device):
        raise InputDataError(
            f"Expected {name} as {like.dtype} on {like.device} as the model (and X), got "
            f"{tensor.dtype} on {tensor.device}. Convert it with "
            f"{name}.to(dtype={like.dtype}, device='{like.device}')."
        )


def _is_finite(value: Tensor) -> bool:
    """Return whether a value is finite."""
    return math.isfinite(float(value)) if value.is_cpu else none_set(~value.isfinite())


def check_finite(name: str, tensor: Tensor) -> None:
    """Check that an argument has neither NaN nor infinities."""
    values = tensor.detach()
    if _is_finite(values.sum()):  # or else it may have overflowed
        return
    bad = ~torch.isfinite(values)
    if bool(bad.any()):
        raise InputDataError(
            f"Expected {name} to be finite, got NaN or infinity in {int(bad.sum())} of "
            f"{tensor.numel()} values. Drop those rows first."
        )


LARGEST_OUTCOME = 1e150
"""Size of outcomes up to which sums of their squares are finite."""


def check_complete(Y: Tensor, outputs: int) -> None:
    """Check that outcomes, ``... x n x width``, are finite, and say what to do where some are not.

    Args:
        Y: The outcomes.
        outputs: Number of outputs m that they are of.

    Raises:
        InputDataError: NaN, an infinity, or what has no square. Rows that lack some of several
            outputs are of use to a model for each output, which the message names.
    """
    finite = torch.isfinite(Y.detach())
    some = finite.any(-1) & ~finite.all(-1)
    if outputs > 1 and bool(some.any()):
        raise InputDataError(
            f"Expected Y to be finite, got NaN or infinity in {int((~finite).sum())} of "
            f"{Y.numel()} values; {int(some.sum())} rows lack some of their {outputs} outputs. "
            "Outputs are independent: make a model of each output from the rows that have it, as "
            "in ModelListGP(*(AutoGP(X[has], Y[has, i : i + 1]) for i, has in "
            "enumerate(Y.isfinite().mT))), and update each with rows of its own."
        )
    check_finite("Y", Y)
    largest = float(Y.detach().abs().max())
    if largest > LARGEST_OUTCOME:
        raise InputDataError(
            f"Expected outcomes Y of at most {LARGEST_OUTCOME:g} in size, whose squares are "
            f"summed, got {largest:g}. Leave out such rows, if they stand for a failure, or give Y "
            "in another unit."
        )


_OBJECTIVES = (
    ExactMarginalLogLikelihood.forward,
    VariationalELBO.forward,
    MarginalLogLikelihood.forward,  # which only carries a model and its priors
)


def check_objective(mll: MarginalLogLikelihood) -> None:
    """Check that an objective of a fit is one that a memory without the data determines.

    Raises:
        UnsupportedError: It is neither the marginal likelihood nor its evidence lower bound.
    """
    if type(mll).forward not in _OBJECTIVES:
        raise UnsupportedError(
            "Expected mll to be an ExactMarginalLogLikelihood or a VariationalELBO, got a "
            f"{type(mll).__name__}: it needs every observation, and these models do not keep them. "
            "Fit by the marginal likelihood, and compare fits by "
            "bo_stream.diagnostics.leave_one_out."
        )


def check_inputs(
    X: Tensor, dim: int | None, like: Tensor, finite: bool = False, name: str = "X"
) -> None:
    """Check inputs to a prediction: ``... x q x dim``, of the model's dtype and device.

    Args:
        X: Inputs.
        dim: Their width; None: any.
        like: A tensor of the model's dtype and device.
        finite: Whether to look at the values, too, for which a device waits.
        name: Of the argument.
    """
    check_type(name, X, like)
    if X.ndim < 2 or dim not in (None, X.shape[-1]):
        width = "d" if dim is None else dim
        raise BotorchTensorDimensionError(
            f"Expected {name} of shape `batch_shape x q x {width}`, got {tuple(X.shape)}."
        )
    if finite:
        check_finite(name, X)


def check_hypothetical(X: Tensor, Y: Tensor, noise: Tensor | None, outputs: int) -> None:
    """Check hypothetical observations at checked inputs X.

    Args:
        X: ``... x q x d``, of the model's dtype and device.
        Y: Expected ``...' x q x outputs``, leading dimensions broadcast against those of X.
        noise: Expected non-negative, to broadcast against Y.
        outputs: Number of outputs m.

    Raises:
        BotorchTensorDimensionError: A wrong width, number of rows or batch shape.
        InputDataError: A wrong dtype or device, NaN or infinity, or a negative variance.
    """
    check_type("Y", Y, X)
    _check_rows("Y", Y, X, {X.shape[-2]}, outputs)
    check_finite("Y", Y)
    if noise is not None:
        check_noise("noise", noise, X, outputs)


def check_noise(name: str, noise: Tensor, X: Tensor, outputs: int) -> None:
    """Check noise variances at checked inputs X.

    Args:
        name: Of the argument.
        noise: Expected ``...' x (q or 1) x outputs``, not negative.
        X: ``... x q x d``, of the model's dtype and device.
        outputs: Number of outputs m.

    Raises:
        BotorchTensorDimensionError: A wrong width, number of rows or batch shape.
        InputDataError: A wrong dtype or device, NaN or infinity, or a negative variance.
    """
    check_type(name, noise, X)
    _check_rows(name, noise, X, {X.shape[-2], 1}, outputs)
    if bool((noise < 0).any() | ~noise.isfinite().all()):
        raise InputDataError(
            f"Expected {name} to hold variances, zero or more and finite, got a negative, "
            "infinite or NaN value."
        )


def _check_rows(name: str, tensor: Tensor, X: Tensor, rows: set[int], outputs: int) -> None:
    fits = tensor.ndim >= 2 and tensor.shape[-1] == outputs and tensor.shape[-2] in rows
    pairs = zip(reversed(tensor.shape[:-2]), reversed(X.shape[:-2]), strict=False)
    if not fits or not all(a == b or 1 in (a, b) for a, b in pairs):
        raise BotorchTensorDimensionError(
            f"Expected {name} of shape `... x {X.shape[-2]} x {outputs}` to broadcast against X of "
            f"shape {tuple(X.shape)}, got {tuple(tensor.shape)}."
        )


def check_shape(name: str, tensor: Tensor, expected: tuple[int | None, ...]) -> None:
    """Check the shape of an argument; None: any size."""
    shape = tuple(tensor.shape)
    wrong = len(shape) != len(expected) or any(
        want is not None and have != want for have, want in zip(shape, expected, strict=False)
    )
    if wrong:
        readable = " x ".join("n" if size is None else str(size) for size in expected)
        raise BotorchTensorDimensionError(
            f"Expected {name} of shape `{readable}` (batch_shape x n x width), got {shape}."
        )


def check_mergeable(model: StreamingGP, other: StreamingGP) -> None:
    """Check that two memories speak of the same quantities.

    Raises:
        UnsupportedError: They differ in class, shape, transforms or kind of noise, or in a
            standardisation that cannot be learned again.
    """
    mine, theirs = _signature(model), _signature(other)
    for name, value in mine.items():
        if value != theirs[name]:
            raise UnsupportedError(
                f"Cannot merge models with different {name}: {value} and {theirs[name]}."
            )
    units = (m._outcome_chain.offset_and_scale(m._outcomes.shift) for m in (model, other))
    alike = all(torch.equal(mine, theirs) for mine, theirs in zip(*units, strict=True))
    if not model._outcomes.rescales and not alike:
        raise UnsupportedError(
            "Expected a model whose outcomes are standardised alike, got another mean or "
            "standard deviation: sites cannot change their units. Standardise Y yourself, the "
            "same for both, and leave out outcome_transform."
        )


def _signature(model: StreamingGP) -> dict[str, Any]:
    transform, stem = getattr(model, "input_transform", None), getattr(model, "stem", None)
    state = {} if transform is None else transform.state_dict()
    state.pop("_perturbations", None)  # BoTorch's InputPerturbation keeps what it last added
    is_known = isinstance(model.likelihood, FixedNoiseGaussianLikelihood)
    return {
        "class": type(model).__name__,
        "batch_shape": tuple(model.batch_shape),
        "number of outputs": model.num_outputs,
        "number of inputs": model._input_dim,
        "outcome transforms": [
            (type(step).__name__, step._outputs, getattr(step, "power", None))
            for step in model._outcome_chain.fixed
        ],
        "input transform": (type(transform).__name__, {k: v.tolist() for k, v in state.items()}),
        "stem": {} if stem is None else {k: v.tolist() for k, v in stem.state_dict().items()},
        "kind of noise": "known" if is_known else "learned",
        "likelihood": type(model.likelihood).__name__,
    }
