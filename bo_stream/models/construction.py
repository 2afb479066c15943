"""The steps of a model's constructor, and what it checks and chooses, one question a function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError, UnsupportedError
from botorch.models.transforms.input import (
    ChainedInputTransform,
    FilterFeatures,
    InputTransform,
    ReversibleInputTransform,
    Warp,
)
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.models.utils import fantasize as fantasize_flag
from botorch.models.utils import validate_input_scaling
from botorch.models.utils.gpytorch_modules import get_gaussian_likelihood_with_lognormal_prior
from botorch.utils.transforms import normalize
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.means import ConstantMean, Mean, ZeroMean
from torch import Size, Tensor

from bo_stream.bases.kernels import Stem, as_product, default_kernel, radial_parts
from bo_stream.models.checks import (
    check_batch_shape,
    check_finite,
    check_instance,
    check_observations,
    check_type,
)
from bo_stream.warnings import warn_of_product

if TYPE_CHECKING:
    from bo_stream.models.base import StreamingGP


def keeps_boxes(transform: InputTransform | None) -> bool:
    """Say whether the image of a box is a box, between the images of its corners."""
    if isinstance(transform, ChainedInputTransform):
        parts: list[Any] = list(transform.values())
        return all(keeps_boxes(part) for part in parts)
    return transform is None or isinstance(transform, ReversibleInputTransform | FilterFeatures)


def is_learnable(transform: InputTransform) -> bool:
    """Say whether an input transform has parameters that a fit would move.

    Raises:
        UnsupportedError: It is no input transform.
    """
    check_instance("input_transform", transform, InputTransform, "Normalize(d)")
    return any(parameter.requires_grad for parameter in transform.parameters())


def split_transform(
    transform: InputTransform | None,
) -> tuple[InputTransform | None, InputTransform | None]:
    """Split an input transform into a fixed one and, behind it, one that is learned.

    Args:
        transform: Of a chain the first part with parameters to learn begins the second.

    Returns:
        Either is None where there is nothing for it to do.
    """
    if transform is None or not is_learnable(transform):
        return transform, None
    if not isinstance(transform, ChainedInputTransform):
        return None, transform
    parts: dict[str, Any] = dict(transform.items())
    first = next(i for i, part in enumerate(parts.values()) if is_learnable(part))
    names = list(parts)
    fixed = {name: parts[name] for name in names[:first]}
    learned = {name: parts[name] for name in names[first:]}
    return (ChainedInputTransform(**fixed) if fixed else None), ChainedInputTransform(**learned)


def adapt_priors(transform: InputTransform) -> None:
    """Give the priors of ``Warp`` closures that a file can hold, and that serve many outputs.

    BoTorch's are lambdas. GPyTorch adds a prior's terms by the leading dimensions of its parameter
    to the objectives of as many outputs: those of a warp, which all outputs share, must be 1.
    """
    warps: list[Any] = [part for part in transform.modules() if isinstance(part, Warp)]
    for warp in warps:
        for name, (read, write) in _CLOSURES.items():
            if name in warp._priors:
                warp.register_prior(name, warp._priors[name][0], read, write)


def _concentration0(warp: Any) -> Tensor:
    return _shared(warp.concentration0)


def _concentration1(warp: Any) -> Tensor:
    return _shared(warp.concentration1)


def _shared(values: Tensor) -> Tensor:
    return values.view(1, 1, 1, -1)


def _set_concentration0(warp: Any, value: Tensor) -> None:
    warp._set_concentration(i=0, value=value.flatten())


def _set_concentration1(warp: Any, value: Tensor) -> None:
    warp._set_concentration(i=1, value=value.flatten())


_CLOSURES = {
    "concentration0_prior": (_concentration0, _set_concentration0),
    "concentration1_prior": (_concentration1, _set_concentration1),
}


def check_learned(transform: InputTransform, inputs: Tensor, transformed: Tensor) -> None:
    """Check that a learnable transform can be a part of the kernel.

    Args:
        transform: With parameters to learn.
        inputs: Before it.
        transformed: After it.

    Raises:
        UnsupportedError: It gives other shapes, is left out in some modes, or differs between the
            elements of a batch.
    """
    for part in transform.modules():
        if not isinstance(part, InputTransform) or isinstance(part, ChainedInputTransform):
            continue
        always = part.transform_on_train and part.transform_on_eval and part.transform_on_fantasize
        if part.is_one_to_many or not always:
            raise UnsupportedError(
                f"Expected every part of input_transform from the first learnable one on to be "
                f"applied always, one row of each, got {type(part).__name__}. Put it before the "
                "learnable one."
            )
        batch_shape: Any = getattr(part, "batch_shape", ())
        if len(batch_shape) > 0:
            raise UnsupportedError(
                f"Expected a learnable {type(part).__name__} without batch_shape, got "
                f"{tuple(batch_shape)}. Use one model per batch element."
            )
    if transformed.shape != inputs.shape:
        raise UnsupportedError(
            f"Expected a learnable input_transform to leave the shape of its inputs, got "
            f"{tuple(transformed.shape)} of {tuple(inputs.shape)} from {type(transform).__name__}."
        )


# --- the steps of a model's constructor, and what it checks and chooses --------------------------


_MARGIN = 0.1
_INSIDE = 256
_MOST_CORNERS = 10


def check_first_observations(X: Tensor, Y: Tensor, Yvar: Tensor | None) -> None:
    """Check the constructor's data, from which the model takes its shapes, dtype and device."""
    for name, tensor in (("train_X", X), ("train_Y", Y)):
        check_type(name, tensor)
        if tensor.ndim < 2:
            raise BotorchTensorDimensionError(
                f"Expected {name} of shape `batch_shape x n x width`, got {tuple(tensor.shape)}. "
                f"Use {name}.unsqueeze(-1) for a single input or output."
            )
        if tensor.shape[-1] == 0:
            raise BotorchTensorDimensionError(
                f"Expected {name} of one column or more, got shape {tuple(tensor.shape)}."
            )
    check_observations(
        X, Y, Yvar, dim=X.shape[-1], outputs=Y.shape[-1], batch_shape=X.shape[:-2], like=X
    )


def check_outputs(transform: torch.nn.Module, outputs: int) -> None:
    """Check a transform of outcomes, and that those that standardise have as many as the data."""
    check_instance("outcome_transform", transform, OutcomeTransform, "Standardize(m=1)")
    for module in transform.modules():
        means = getattr(module, "means", None)
        if isinstance(means, Tensor) and means.shape[-1] != outputs:
            raise BotorchTensorDimensionError(
                f"Expected outcome_transform with m={outputs} as train_Y, got m={means.shape[-1]}."
            )


def check_rank(tolerance: float, max_rank: int) -> tuple[float, int]:
    """Check the options of the truncation."""
    if not 0.0 <= tolerance < 1.0:
        raise ValueError(f"Expected tolerance in [0, 1), got {tolerance}.")
    if max_rank < 1:
        raise ValueError(f"Expected max_rank of at least 1, got {max_rank}.")
    return tolerance, max_rank


def check_mean(mean: Mean, shape: torch.Size) -> None:
    """Check that the mean is affine in the target column of ones, and of the outputs.

    Args:
        mean: That was given as ``mean_module``.
        shape: ``batch_shape (x m if m > 1)`` of the model.
    """
    if not isinstance(mean, ConstantMean | ZeroMean):
        raise UnsupportedError(
            f"mean_module {type(mean).__name__} cannot be learned once the data are gone. Expected "
            "ConstantMean or ZeroMean; subtract any other mean from Y yourself."
        )
    check_batch_shape("mean_module", mean.batch_shape, shape)


def choose_likelihood(
    likelihood: _GaussianLikelihoodBase | None, Yvar: Tensor | None, aug_batch: torch.Size
) -> _GaussianLikelihoodBase:
    """Return the likelihood given, or BoTorch's default for this kind of noise."""
    if likelihood is not None:
        if not isinstance(likelihood, GaussianLikelihood):
            raise UnsupportedError(
                f"Expected likelihood to be a GaussianLikelihood, got "
                f"{type(likelihood).__name__}. Give known noise variances as train_Yvar."
            )
        check_batch_shape("likelihood", likelihood.noise.shape[:-1], aug_batch)
        return likelihood
    if Yvar is None or bool(Yvar.isnan().any()):
        return get_gaussian_likelihood_with_lognormal_prior(batch_shape=aug_batch)
    return fixed_noise(aug_batch, Yvar)


def fixed_noise(aug_batch: torch.Size, like: Tensor) -> FixedNoiseGaussianLikelihood:
    """Return BoTorch's likelihood of known noise, whose level is set by the observations."""
    start = torch.full((*aug_batch, 1), 1e-2, dtype=like.dtype, device=like.device)
    return FixedNoiseGaussianLikelihood(noise=start, batch_shape=aug_batch)


def choose_box(
    bounds: Tensor | None,
    X: Tensor,
    inputs: Tensor,
    transform: InputTransform | None,
    stem: Stem | None = None,
) -> Tensor:
    """Choose the box to cover, ``2 x d`` in transformed inputs, float64 on the CPU.

    Given bounds are transformed like inputs. Without any: the unit cube if it holds the inputs,
    else their box with a margin, whose corners are numbers of the inputs' dtype, so that a model
    which is given them has the same box. Where a posterior is of several inputs for each of X
    (``InputPerturbation``), the box holds them too.

    Args:
        bounds: ``2 x d``, before the transform, or None.
        X: First inputs, ``... x n x d``.
        inputs: X transformed as observations are.
        transform: Of inputs.
        stem: That projects the inputs to the unit cube, if there is one.

    Raises:
        InputDataError: Bounds are not finite, before the transform or after it.
        ValueError: Bounds are given with a stem.
    """
    if stem is not None:
        if bounds is not None:
            raise ValueError(
                "Expected no bounds with a stem: the grid covers the cube it projects to."
            )
        return torch.tensor([[0.0] * stem.k, [1.0] * stem.k], dtype=torch.float64)
    if bounds is not None:
        return _given_box(bounds, inputs, transform)
    box = _box_of_data(inputs)
    each = _asked_inputs(X.detach().flatten(0, -2), transform)
    if each is None or each.shape[-1] != box.shape[-1]:
        return box
    moves = (each - inputs.detach().flatten(0, -2).unsqueeze(-2)).flatten(0, -2).double().cpu()
    return torch.stack((box[0] + moves.amin(0).clamp_max(0), box[1] + moves.amax(0).clamp_min(0)))


def _box_of_data(inputs: Tensor) -> Tensor:
    dim = inputs.shape[-1]
    unit = torch.tensor([[0.0] * dim, [1.0] * dim], dtype=torch.float64)
    flat = inputs.detach().reshape(-1, dim).to(torch.float64).cpu()
    if flat.shape[0] == 0 or bool(((flat >= 0.0) & (flat <= 1.0)).all()):
        return unit
    low, high = flat.amin(0), flat.amax(0)
    width = torch.where(high > low, high - low, torch.ones_like(low))
    box = torch.stack((low - _MARGIN * width, high + _MARGIN * width))
    return box.to(inputs.dtype).to(torch.float64)


@torch.no_grad()
def _asked_inputs(X: Tensor, transform: InputTransform | None) -> Tensor | None:
    """Transform inputs as a posterior does, ``n x d -> n x k x d'``, if k may be more than 1."""
    if transform is None or not transform.is_one_to_many or len(X) == 0:
        return None
    inputs: Tensor = transform.eval()(X)
    return inputs.unflatten(0, (len(X), -1))


def _given_box(bounds: Tensor, inputs: Tensor, transform: InputTransform | None) -> Tensor:
    box = torch.as_tensor(bounds, dtype=inputs.dtype, device=inputs.device)
    if box.ndim != 2 or box.shape[0] != 2:
        raise BotorchTensorDimensionError(
            f"Expected bounds of shape `2 x d` (lower, upper), got {tuple(box.shape)}."
        )
    check_finite("bounds", box)
    if transform is not None:
        points = _points_of(box)
        images, each = observed_inputs(points, transform), _asked_inputs(points, transform)
        images = images.flatten(0, -2)  # of all elements of a batched transform
        if each is not None and each.shape[-1] == images.shape[-1]:
            images = torch.cat((images, each.flatten(0, -2)))
        box = torch.stack((images.amin(0), images.amax(0)))
        if not bool(box.isfinite().all()):
            raise InputDataError(
                f"Expected bounds that input_transform {type(transform).__name__} maps to finite "
                f"values, got {bounds.tolist()}, mapped to {box.tolist()}. Give bounds that are "
                "inside what it takes: above 0 for a logarithm."
            )
    if box.shape[-1] != inputs.shape[-1]:
        raise BotorchTensorDimensionError(
            f"Expected bounds of shape `2 x {inputs.shape[-1]}` as train_X, got "
            f"{tuple(bounds.shape)}."
        )
    if not bool((box[0] < box[1]).all()):
        raise ValueError(f"Expected bounds with lower < upper, got {bounds.tolist()}.")
    return box.detach().to(torch.float64).cpu()


def _points_of(box: Tensor) -> Tensor:
    """Corners of a ``2 x d`` box and points inside: a transform need not be monotone."""
    d = box.shape[-1]
    inside = torch.quasirandom.SobolEngine(d).draw(_INSIDE, dtype=torch.float64).to(box)
    shares = torch.cat((torch.eye(2)[:, :1].expand(2, d).to(box), inside))
    if d <= _MOST_CORNERS:
        corners = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * d).reshape(-1, d)
        shares = torch.cat((shares, corners.to(box)))
    return torch.where(shares == 1.0, box[1], box[0] + shares * (box[1] - box[0]))


def warn_of_scaling(
    inputs: Tensor, standardized: Tensor, custom_kernel: bool, box: Tensor | None = None
) -> None:
    """BoTorch's warnings about inputs outside the unit cube and outcomes of another scale.

    Args:
        inputs: As the kernel has them, ``... x n x d``.
        standardized: Outcomes after their transform, ``... x n x m``.
        custom_kernel: Whether the kernel was given, which may suit any scale.
        box: ``2 x d`` in the place of the unit cube, if bounds were given.
    """
    if inputs.shape[-2] == 0:
        return
    scaled = inputs if box is None else normalize(inputs, box.to(inputs))
    validate_input_scaling(scaled, standardized.to(inputs), None, check_nans_only=custom_kernel)


def first_transformed(X: Tensor, transform: InputTransform) -> Tensor:
    """Let an input transform learn its bounds from the first inputs and apply it.

    Raises:
        UnsupportedError: It has parameters to learn.
        InputDataError: It must learn its bounds but there are no inputs.
    """
    if is_learnable(transform):
        raise UnsupportedError(
            f"input_transform {type(transform).__name__} has parameters to learn, but what this "
            "model keeps of its inputs cannot be transformed again. Use AutoGP, OSGPR, OSVGP, "
            "ClusteredGP or LocalGP, or freeze the transform by requires_grad_(False)."
        )
    learn_bounds(X, transform)
    return observed_inputs(X, transform)


def learn_bounds(X: Tensor, transform: InputTransform) -> None:
    """Let an input transform learn from the first inputs what is no parameter.

    Raises:
        InputDataError: It must, but there are no inputs.
    """
    transform.to(X)
    if X.shape[-2] > 0:
        transform.train()
        with torch.no_grad():
            transform(X)
    for part in transform.modules():  # Warp comes before the Normalize in it, which is its own
        learns = any(getattr(inner, "learn_coefficients", False) for inner in part.modules())
        if X.shape[-2] == 0 and learns and not isinstance(part, ChainedInputTransform):
            raise InputDataError(
                f"{type(part).__name__} must learn its bounds, but train_X is empty. Give it "
                "bounds."
            )


def observed_inputs(X: Tensor, transform: InputTransform | None) -> Tensor:
    """Inputs of observations as they enter memory."""
    if transform is None:
        return X
    transform.eval()
    with torch.no_grad():
        inputs: Tensor = transform.preprocess_transform(X)
    return inputs


def conditioned_inputs(X: Tensor, transform: InputTransform) -> Tensor:
    """Transform inputs of observations by each transform of training inputs, or of fantasies."""
    if isinstance(transform, ChainedInputTransform):
        parts: Any = transform.values()
        for part in parts:
            X = conditioned_inputs(X, part)
        return X
    if transform.transform_on_train:
        inputs: Tensor = transform.preprocess_transform(X)
        return inputs
    with fantasize_flag():
        return transform(X)


def check_stem(stem: object) -> None:
    """Check that a stem is one.

    Raises:
        UnsupportedError: It is not.
    """
    if stem is not None and not isinstance(stem, Stem):
        raise UnsupportedError(
            f"Expected stem to be a LinearStem, an MLPStem, a RandomProjection, or of a class of "
            f"your own that inherits from bo_stream.bases.kernels.Stem, got {type(stem).__name__}."
        )


def first_projected(inputs: Tensor, stem: Stem) -> Tensor:
    """Calibrate a stem on the first inputs, if that is still to be done, and apply it.

    Raises:
        BotorchTensorDimensionError: The stem takes another number of inputs.
        InputDataError: It is not calibrated and there are fewer than two inputs.
    """
    if inputs.shape[-1] != stem.d:
        raise BotorchTensorDimensionError(
            f"Expected stem to take the {inputs.shape[-1]} (transformed) inputs of train_X, got "
            f"one of d={stem.d}."
        )
    stem.to(inputs)
    if not bool(stem.calibrated):
        stem.calibrate(inputs)
    with torch.no_grad():
        return checked_projection(stem(inputs))


def checked_projection(coordinates: Tensor) -> Tensor:
    """Check that a stem's coordinates lie in the unit cube.

    Raises:
        InputDataError: They do not.
    """
    if not bool(((coordinates >= 0.0) & (coordinates <= 1.0)).all()):
        raise InputDataError(
            "Expected stem to project into the unit cube, which the grid covers, got coordinates "
            f"from {float(coordinates.min()):g} to {float(coordinates.max()):g}. End it with a "
            "sigmoid, as the stems of this package do."
        )
    return coordinates


def product_kernel(kernel: Kernel | None, dim: int) -> Kernel | None:
    """Return a kernel for a grid: that given, or a copy with products, which is said once.

    Args:
        kernel: That was given as ``covar_module``.
        dim: Number of inputs as the kernel has them.
    """
    parts = radial_parts(kernel, dim)
    if kernel is None or not parts:
        return kernel
    warn_of_product(parts)
    return as_product(kernel, dim)


def restore_products(model: StreamingGP) -> None:
    """Give a model of a file the kernels by which it computed, in place, and say so.

    In older files the ``covar_module`` of a grid can be a Matérn kernel of the distance, for which
    the grid had the product. Posteriors are what they were when the file was written.
    """
    for part in model.modules():
        memory = getattr(part, "_memory", None)
        inference = getattr(memory, "inference", getattr(part, "_inference", None))
        if inference is not None and inference.on_grid:
            dim: Any = part._process_dim
            kernel: Any = product_kernel(part.covar_module, dim)
            part.covar_module = kernel


def latent_kernel(dim: int, batch_shape: Size, box: Tensor | None = None) -> Kernel:
    """BoTorch's kernel with dimension-scaled priors, of a ``2 x d`` box, and an output scale."""
    return ScaleKernel(default_kernel(dim, batch_shape, box), batch_shape=batch_shape)
