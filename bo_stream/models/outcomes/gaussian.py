"""Outcomes stored as targets with Gaussian noise: real ones, and labels by scores of classes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError, UnsupportedError
from torch import Tensor
from torch.distributions import Normal
from torch.nn.functional import one_hot, pad

from bo_stream.models.checks import check_inputs, check_shape, check_type
from bo_stream.models.memory import Measured, Memory, Targets
from bo_stream.models.outcomes.base import Drawing, OutcomeChain, Outcomes
from bo_stream.models.outcomes.noise import (
    LEAST_NOISE,
    NOISE_FLOOR,
    NoiseFloor,
    known_noise,
    outcome_variance,
    typical_variance,
    warn_of_raised,
)
from bo_stream.process import PosteriorProcess
from bo_stream.tensors import map_tensors
from bo_stream.weights import target_columns

if TYPE_CHECKING:
    from bo_stream.models.base import StreamingGP
    from bo_stream.models.inference import Prior


@dataclass(frozen=True)
class GaussianOutcomes(Outcomes):
    """Outcomes less a shift, with noise variances above a floor: what a memory holds.

    Targets are in the units of the outcomes, which may be standardised again at any time, exactly.

    Attributes:
        shift: Subtracted from outcomes after the fixed part of their transform, ``batch x m``: sums
            of squares of what is far from zero would lose digits.
        floor: How small known noise variances may be.
        is_found: Whether the shift was taken from observations.
        zeros_apart: Whether observations without noise are a group of their own.
    """

    rescales: ClassVar[bool] = True

    shift: Tensor
    floor: NoiseFloor
    is_found: bool
    zeros_apart: bool = False

    @classmethod
    def of(cls, targets: Tensor) -> Self:
        """Take the shift from the first targets, ``batch x n x m``; the floor is set later."""
        shift = targets.detach().to(torch.float64).mean(-2)  # so that sums keep digits
        if targets.shape[-2] == 0:
            shift = torch.zeros_like(shift)
        return cls(shift, NoiseFloor.of(torch.ones_like(shift)), targets.shape[-2] > 0)

    def noise_level(self, prior: Prior, memory: Memory) -> Tensor:
        """Return the inferred noise variance, or the mean of the positive known ones.

        Where all that are known are zero: what they are raised to.
        """
        inferred = prior.inferred_noise
        if inferred is not None:
            return inferred
        scale, mean = prior.scale, memory.mean_known_noise()
        if mean is not None:
            return (mean / scale.square()).clamp_min(LEAST_NOISE)
        return prior.zero_noise if self.floor.any_zero else torch.full_like(scale, NOISE_FLOOR)

    def noise_variance(self, prior: Prior, memory: Memory) -> Tensor:
        """Return the noise level."""
        return self.noise_level(prior, memory)

    def moments(
        self, prior: Prior, mean: Tensor, variance: Tensor, noise: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Add the noise variance; see :class:`Outcomes`.

        Raises:
            UnsupportedError: The transformed outcomes are no multiples of those observed.
        """
        if prior.chain.fixed:
            names = ", ".join(type(step).__name__ for step in prior.chain.fixed)
            raise UnsupportedError(
                f"Expected outcome_transform to be Standardize or None, got {names}: outcomes have "
                "another distribution than the transformed ones. Use posterior."
            )
        return mean, variance + noise()

    def log_density(
        self,
        prior: Prior,
        targets: Tensor,
        mean: Tensor,
        variance: Tensor,
        noise: Callable[[], Tensor],
    ) -> Tensor:
        """Return the normal log density; see :class:`Outcomes`."""
        mean, variance = self.moments(prior, mean, variance, noise)
        density: Tensor = Normal(mean, variance.sqrt(), validate_args=False).log_prob(targets)
        return density

    def pseudo_observations(
        self,
        prior: Prior,
        memory: Memory,
        process: PosteriorProcess,
        inputs: Tensor,
        targets: Tensor,
        noise: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return targets and variances as they are; see :class:`Outcomes`."""
        if noise is None:
            noise = self.noise_level(prior, memory).detach().unsqueeze(-1)
        return targets, noise

    def drawing(self, prior: Prior, observation_noise: Tensor | None) -> Drawing | None:
        """Return None: outcomes are drawn by adding Gaussian noise; see :class:`Outcomes`."""
        return None

    def with_observations(self, is_found: bool) -> Self:
        """Say whether there are observations in memory; see :class:`Outcomes`."""
        return replace(self, is_found=is_found)

    def initialized(self, targets: Tensor, scale: Tensor, zeros_apart: bool, share: float) -> Self:
        """Set the floor by the variance of the first outcomes; see :class:`Outcomes`."""
        totals = first_totals(targets, self.shift)
        scale, variance = scale.square(), outcome_variance(totals)
        variance = torch.where(variance > 0.0, variance.minimum(scale), scale)
        floor = NoiseFloor.of(variance, share, typical_variance(targets.detach().double().mT))
        return replace(self, floor=floor, zeros_apart=zeros_apart)

    def prepared_for(
        self, prior: Prior, memory: Memory, Y: Tensor, Yvar: Tensor | None, sign: float
    ) -> Self:
        """Let shift and floor follow the stream; see :class:`Outcomes`."""
        units = self
        if not self.is_found and Y.shape[-2] > 0:  # the first that enter an empty model
            first = prior.chain.to_targets(Y.detach(), None)[0].to(torch.float64)
            shift = self.shift + (first.mT - self.shift.unsqueeze(-1)).mean(-1)
            units = replace(self, shift=shift, is_found=True)
            units = units.initialized(first, prior.scale, self.zeros_apart, self.floor.share)
        if Yvar is None:
            return units
        targets, variances = prior.chain.to_targets(Y.detach(), Yvar)
        assert variances is not None  # noqa: S101 (a transform returns those that it was given)
        noise = variances.detach().double().mT
        zeros = (noise == 0.0).all(-2, keepdim=True) & self.zeros_apart
        noise = torch.where(zeros, torch.inf, noise)  # those that are kept apart are not raised
        if sign < 0.0:
            units.floor.check_retractable(noise)
            return units
        floor = units.floor
        if bool(zeros.any()):
            floor = floor.with_zeros(memory.totals + first_totals(targets, units.shift))
            how = "follows" if floor.share >= NOISE_FLOOR else "falls with"
            warn_of_raised(
                f"{int(zeros.sum()):,} variances that are zero or less than what float64 resolves",
                floor.zero,
                f", which {how} the outcomes' variance at each refit",
            )
        if bool(floor.below(noise).any()):
            floor = floor.for_update(noise, memory.totals + first_totals(targets, units.shift))
        return replace(units, floor=floor)

    def encode(self, prior: Prior, Y: Tensor, Yvar: Tensor | None, infers_noise: bool) -> Targets:
        """Subtract the shift and raise small variances; see :class:`Outcomes`."""
        targets, variances = prior.chain.to_targets(Y.detach(), Yvar)
        shifted = targets.to(torch.float64).mT - self.shift.unsqueeze(-1)
        if variances is None and infers_noise:
            unknown = torch.zeros_like(shifted[..., :1, :], dtype=torch.bool)
            return Targets(shifted, torch.ones_like(shifted), unknown)
        apart = self.zeros_apart and not infers_noise
        return Targets(shifted, *known_noise(shifted, variances, self.floor, infers_noise, apart))

    def standardized(
        self, chain: OutcomeChain, level: Tensor | None, data: Measured
    ) -> tuple[Tensor, Tensor]:
        """Standardise targets and their variances; see :class:`Outcomes`."""
        offset, scale = (t.unsqueeze(-1) for t in chain.offset_and_scale(self.shift))
        outcomes = (data.targets + self.shift.unsqueeze(-1) - offset) / scale
        variances = data.noise / scale.square()
        if level is None:
            return outcomes, variances
        return outcomes, torch.where(data.known, variances, level.unsqueeze(-1))

    def target_map(self, chain: OutcomeChain, mean: Tensor) -> Tensor:
        """Standardise and subtract the prior mean; see :class:`Outcomes`."""
        offset, scale = chain.offset_and_scale(self.shift)
        constant = (self.shift - offset) / scale - mean
        return torch.stack((scale.reciprocal().expand_as(constant), constant), -1).unsqueeze(-1)

    def settled(self, totals: Tensor) -> Self:
        """Let the noise of zeros follow the outcomes; see :class:`Outcomes`."""
        settled = self.floor.settled(totals) if self.floor.any_zero else self.floor
        same = torch.equal(settled.zero, self.floor.zero)
        return self if same else replace(self, floor=settled)

    def merged(self, other: Self) -> Self:
        """Return the units after a merge: the other's shift if this model has none yet."""
        first = self if self.is_found else other
        floor = first.floor.joined(other.floor)
        return replace(self, shift=first.shift, floor=floor, is_found=first.is_found)


def first_totals(targets: Tensor, shift: Tensor) -> Tensor:
    """``[Y, 1]ᵀ [Y, 1]`` of the first outcomes less their shift, ``batch x m x 2 x 2``."""
    columns = target_columns(targets.detach().to(torch.float64).mT - shift.unsqueeze(-1))
    return columns.mT @ columns


def shifted_targets(shift: Tensor) -> Tensor:
    """Return the map of target columns [Y, 1] to [Y + shift, 1], ``... x m x 2 x 2``."""
    matrix = torch.eye(2, dtype=shift.dtype, device=shift.device).repeat(*shift.shape, 1, 1)
    matrix[..., 1, 0] = shift
    return matrix


# --- labels, as Gaussian observations of one latent score per class ------------------------------


MAX_CLASSES = 1000
"""Most classes that a label may bring in: a larger one is an identifier, or an error."""


@dataclass(frozen=True)
class DirichletScores:
    """Labels as noisy observations of one latent score per class.

    With ``α = α_ε + 1`` for the class of the label and ``α_ε`` for every other, a gamma variable's
    log is matched by a normal of variance ``log(1 + 1/α)`` and mean ``log α`` less half of it.
    [Milios2018, eq. 5 and 6; Stanton2021, appendix A.5]

    Attributes:
        alpha_epsilon: α_ε, positive.
    """

    alpha_epsilon: float

    @property
    def hit_noise(self) -> float:
        """Noise variance of the label's own class."""
        return math.log1p(1.0 / (1.0 + self.alpha_epsilon))

    @property
    def miss_noise(self) -> float:
        """Noise variance of every other class."""
        return math.log1p(1.0 / self.alpha_epsilon)

    @property
    def miss_target(self) -> float:
        """Target of every other class."""
        return math.log(self.alpha_epsilon) - 0.5 * self.miss_noise

    def of(self, labels: Tensor, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Targets and noise variances, ``... x n -> ... x n x classes`` each."""
        hit = one_hot(labels, classes).bool()
        everywhere = torch.ones(hit.shape, dtype=torch.float64, device=hit.device)
        hit_target = math.log1p(self.alpha_epsilon) - 0.5 * self.hit_noise
        targets = (self.miss_target * everywhere).masked_fill(hit, hit_target)
        noise = (self.miss_noise * everywhere).masked_fill(hit, self.hit_noise)
        return targets.to(dtype), noise.to(dtype)


@dataclass(frozen=True)
class LabelOutcomes(GaussianOutcomes):
    """Labels whose scores are observed with Gaussian noise that is known from their class.

    Attributes:
        scores: Of labels.
        num_classes: Number of classes that was fixed, or None where labels may bring in more.
        is_whole: Whether there are the scores of all classes.
    """

    scores: DirichletScores = DirichletScores(0.01)
    num_classes: int | None = None
    is_whole: bool = True

    def checked(
        self, model: StreamingGP, X: Tensor, Y: Tensor, Yvar: Tensor | None, verb: str
    ) -> tuple[Tensor, Tensor | None, int]:
        """Return the scores of labels and their noise variances, ``n x m`` each, and m."""
        self.check_whole(verb)
        check_no_variances(Yvar)
        check_inputs(X, model._input_dim, next(model.covar_module.parameters()), finite=True)
        check_shape("X", X, (None, model._input_dim))
        labels, outputs = checked_labels(Y, X), model._num_outputs
        if verb == "update" and self.num_classes is None:
            outputs = number_of_classes(labels, at_least=outputs)
        check_known(labels, outputs, fixed=self.num_classes is not None)
        return *self.scores.of(labels, outputs, torch.float64), outputs

    def known_labels(self, labels: Tensor, X: Tensor) -> Tensor:
        """Return labels of known classes as integers, ``... x n``; see :func:`checked_labels`."""
        known = checked_labels(labels, X)
        check_known(known, self.shift.shape[-1], fixed=self.num_classes is not None)
        return known

    def drawing(self, prior: Prior, observation_noise: Tensor | None) -> Drawing | None:
        """Return draws from the softmax of the scores, by Gumbel noise; see :class:`Outcomes`."""
        self.check_whole("fantasize")
        check_no_variances(observation_noise)
        return self._draw

    @torch.no_grad()
    def _draw(self, scores: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Draw a label from each column of scores, ``S x ... x m x q``.

        The noise is the same for all batch elements.
        """
        samples, classes, q = scores.shape[0], *scores.shape[-2:]
        shape = (samples, *[1] * (scores.ndim - 3), q, classes)
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64).to(scores.device)
        gumbel = -(-uniform.clamp_min(1e-300).log()).log()
        labels = (scores.mT + gumbel).argmax(-1)
        targets, noise = self.scores.of(labels, classes, torch.float64)
        return targets.mT.contiguous(), noise.mT.contiguous()

    def moments(
        self, prior: Prior, mean: Tensor, variance: Tensor, noise: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Refuse: a label is no real number.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "Expected a model of real outcomes, got one of labels, which have no mean, variance or "
            "density: use class_probabilities."
        )

    def prepared_for(
        self, prior: Prior, memory: Memory, Y: Tensor, Yvar: Tensor | None, sign: float
    ) -> Self:
        """Take the shift from the first scores; their noise is never too small."""
        return super().prepared_for(prior, memory, Y, None, sign)

    def check_whole(self, verb: str) -> None:
        """Check that there are the scores of all classes.

        Raises:
            UnsupportedError: There are those of some.
        """
        if not self.is_whole:
            raise UnsupportedError(
                f"{verb} needs the scores of all classes, got a model of some (subset_output). Use "
                "it on the original model."
            )

    def outputs_with(self, other: object) -> int:
        """Return the classes of both; see :class:`Outcomes`."""
        if not isinstance(other, LabelOutcomes):
            raise UnsupportedError(
                f"Expected other to be a model of labels, got one of {type(other).__name__}."
            )
        self.check_whole("merge")
        other.check_whole("merge")
        mine, theirs = self.shift.shape[-1], other.shift.shape[-1]
        if self.scores != other.scores:
            raise UnsupportedError(
                "Cannot merge models with different alpha_epsilon: "
                f"{self.scores.alpha_epsilon} and {other.scores.alpha_epsilon}."
            )
        if self.num_classes is not None and theirs > self.num_classes:
            raise UnsupportedError(
                f"Cannot merge a model of {theirs} classes into one that was built with "
                f"num_classes={self.num_classes}."
            )
        return max(mine, theirs)

    def grown(self, outputs: int) -> Self:
        """Return the units of more classes, which every label has missed."""
        more = outputs - self.shift.shape[-1]
        if more == 0:
            return self
        shift = pad(self.shift, (0, more), value=self.scores.miss_target)
        floor = map_tensors(self.floor, lambda t: pad(t, (0, more), value=float(t[0])))
        return replace(self, shift=shift, floor=floor)

    def select(self, outputs: list[int]) -> Self:
        """Return the units of some classes, which take no labels."""
        return replace(super().select(outputs), is_whole=False)


def check_alpha(alpha_epsilon: float) -> float:
    """Check the concentration of classes that a label does not name."""
    if not 0.0 < alpha_epsilon < math.inf:
        raise ValueError(f"Expected alpha_epsilon positive and finite, got {alpha_epsilon}.")
    return float(alpha_epsilon)


def check_num_classes(num_classes: int | None) -> int | None:
    """Check a fixed number of classes."""
    if num_classes is not None and (not isinstance(num_classes, int) or num_classes < 2):
        raise ValueError(
            f"Expected num_classes to be an integer of at least 2, or None for classes that may "
            f"come later, got {num_classes!r}."
        )
    return num_classes


def number_of_classes(labels: Tensor, at_least: int) -> int:
    """Count as many classes as the largest label tells.

    Raises:
        InputDataError: More than ``MAX_CLASSES`` and than ``at_least``.
    """
    classes = max(at_least, int(labels.max()) + 1) if labels.numel() else at_least
    if classes > max(at_least, MAX_CLASSES):
        raise InputDataError(
            f"Expected labels below {MAX_CLASSES}, for each number up to the largest is a class of "
            f"its own, got {classes - 1}. Number the classes from 0 without gaps."
        )
    return classes


def checked_first_labels(X: Tensor, labels: Tensor) -> Tensor:
    """Check the constructor's labels, which tell the classes; see :func:`checked_labels`.

    Raises:
        UnsupportedError: A batch of inputs.
    """
    check_type("train_X", X)
    if X.ndim > 2:
        raise UnsupportedError(
            f"Expected train_X of shape `n x d`, got {tuple(X.shape)}: the streams of a batch meet "
            "their classes at different times. Use one model for each."
        )
    if X.ndim < 2:
        raise BotorchTensorDimensionError(
            f"Expected train_X of shape `n x d`, got {tuple(X.shape)}."
        )
    return checked_labels(labels, X, "train_labels")


def checked_labels(labels: Tensor, X: Tensor, name: str = "labels") -> Tensor:
    """Labels of checked inputs as integers, ``... x n``.

    Args:
        labels: ``n`` or ``... x n x 1``: whole numbers from 0, of any dtype.
        X: ``... x n x d``; leading dimensions broadcast.
        name: Of the argument.

    Raises:
        BotorchTensorDimensionError: Another shape.
        InputDataError: No tensor, another device, or values that are no whole numbers from 0.
    """
    if not isinstance(labels, Tensor):
        raise InputDataError(f"Expected {name} to be a torch.Tensor, got {type(labels).__name__}.")
    if labels.device != X.device:
        raise InputDataError(f"Expected {name} on {X.device} as X, got {labels.device}.")
    column = labels.unsqueeze(-1) if labels.ndim == 1 else labels
    if column.ndim < 2 or column.shape[-2:] != (X.shape[-2], 1):
        raise BotorchTensorDimensionError(
            f"Expected {name} of shape `n` or `... x n x 1` with n = {X.shape[-2]} as X, got "
            f"{tuple(labels.shape)}."
        )
    values = column.squeeze(-1).detach()
    if values.is_complex():
        raise InputDataError(f"Expected {name} to be whole numbers, got {values.dtype}.")
    bad = (values < 0) | (values != values.double().floor()) | ~torch.isfinite(values)
    if bool(bad.any()):
        raise InputDataError(
            f"Expected {name} to be whole numbers from 0, one for each class, got "
            f"{values[bad].unique().tolist()[:5]}."
        )
    return values.long()


def check_no_variances(Yvar: Tensor | None) -> None:
    """Check that no noise is given with labels."""
    if Yvar is not None:
        raise UnsupportedError(
            "Expected no Yvar with labels: their noise is known from alpha_epsilon."
        )


def check_known(labels: Tensor, classes: int, fixed: bool) -> None:
    """Check that no label is beyond the known classes.

    Raises:
        InputDataError: One is.
    """
    highest = int(labels.max()) if labels.numel() else 0
    if highest >= classes:
        remedy = (
            f"the model was built with num_classes={classes}; build it with more, or with "
            "num_classes=None"
            if fixed
            else "a new class enters by update"
        )
        raise InputDataError(
            f"Expected labels of the known classes, 0 to {classes - 1}, got {highest}: {remedy}."
        )
