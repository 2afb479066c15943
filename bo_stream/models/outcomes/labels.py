"""Labels as noisy observations of one latent score per class, and classes that come later."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError, UnsupportedError
from torch import Tensor
from torch.nn.functional import one_hot, pad

from bo_stream.models.checks import check_inputs, check_shape, check_type
from bo_stream.models.memory import Memory
from bo_stream.models.outcomes.base import Drawing
from bo_stream.models.outcomes.gaussian import GaussianOutcomes
from bo_stream.tensors import map_tensors

if TYPE_CHECKING:
    from bo_stream.models.base import StreamingGP
    from bo_stream.models.inference import Prior

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
