"""What classes that come later would have seen, from what the known ones have seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from torch import Tensor

from bo_stream.bases.grid.gram import NodeGram
from bo_stream.bases.grid.statistics import NodeStatistics
from bo_stream.models.checks import check_floating_point
from bo_stream.models.memory import GridMemory, Observations
from bo_stream.models.wiski.memory import StreamMemory
from bo_stream.models.wiski.rows import RowMemory

MAX_CLASSES = 1000
"""Most classes that a label may bring in: a larger one is an identifier, or an error."""


@dataclass(frozen=True)
class DirichletScores:
    """Labels as noisy observations of one latent score per class.

    With ``α = α_ε + 1`` for the class of the label and ``α_ε`` for every other, a gamma variable's
    log is matched by a normal of variance ``log(1 + 1/α)`` and mean ``log α`` less half of it.
    Source: Milios, Camoriano, Michiardi, Rosasco and Filippone (2018), eq. 5 and 6.

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
    def hit_target(self) -> float:
        """Target of the label's own class."""
        return math.log1p(self.alpha_epsilon) - 0.5 * self.hit_noise

    @property
    def miss_target(self) -> float:
        """Target of every other class."""
        return math.log(self.alpha_epsilon) - 0.5 * self.miss_noise

    def of(self, labels: Tensor, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Targets and noise variances, ``... x n -> ... x n x classes`` each."""
        hit = torch.nn.functional.one_hot(labels, classes).bool()
        everywhere = torch.ones(hit.shape, dtype=torch.float64, device=hit.device)
        targets = (self.miss_target * everywhere).masked_fill(hit, self.hit_target)
        noise = (self.miss_noise * everywhere).masked_fill(hit, self.hit_noise)
        return targets.to(dtype), noise.to(dtype)


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
    """As many as the largest label tells.

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
    """The constructor's labels, from which the model takes its classes; see :func:`checked_labels`.

    Raises:
        UnsupportedError: A batch of inputs.
    """
    check_floating_point("train_X", X)
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
    _check_whole(values, name)
    return values.long()


def _check_whole(values: Tensor, name: str) -> None:
    if values.is_complex():
        raise InputDataError(f"Expected {name} to be whole numbers, got {values.dtype}.")
    bad = (values < 0) | (values != values.double().floor()) | ~torch.isfinite(values)
    if bool(bad.any()):
        raise InputDataError(
            f"Expected {name} to be whole numbers from 0, one for each class, got "
            f"{values[bad].unique().tolist()[:5]}."
        )


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


def with_unseen_classes(
    memory: RowMemory | StreamMemory, classes: int, scores: DirichletScores
) -> RowMemory | StreamMemory:
    """The memory with more outputs: classes that none of the observations had.

    To such a class every observation is a miss. Those statistics need not be kept in advance: each
    observation is a hit of one class and a miss of the m - 1 others, so summed over the known
    classes its precision is ``1/hit + (m-1)/miss`` whatever its label, and the sums of all
    observations are those over classes divided by that. Exact, and additive like the memory itself,
    hence equal to having known the classes from the start. Cost O(7^d p), or O(n) for rows.

    Args:
        memory: Of all the known classes, at least one.
        classes: How many there are to be.
        scores: Of labels; the targets of new outputs are shifted to zero.
    """
    if isinstance(memory, RowMemory):
        return replace(memory, rows=_with_misses(memory.rows, classes, scores))
    current, *earlier = (_extended(part, classes, scores) for part in memory)
    return replace(memory, current=current, earlier=tuple(earlier))


def _with_misses(rows: Observations, classes: int, scores: DirichletScores) -> Observations:
    """Observations that all miss the further classes, with targets of zero."""
    *batch, known, n = rows.targets.shape
    shape = (*batch, classes - known, n)
    return replace(
        rows,
        targets=torch.cat((rows.targets, rows.targets.new_zeros(shape)), -2),
        noise=torch.cat((rows.noise, rows.noise.new_full(shape, scores.miss_noise)), -2),
    )


def _extended(memory: GridMemory, classes: int, scores: DirichletScores) -> GridMemory:
    known = memory.known
    return GridMemory(
        memory.grid,
        _padded(memory.learned, classes),
        None if known is None else _appended(known, _missed(known, scores), classes),
    )


def _missed(statistics: NodeStatistics, scores: DirichletScores) -> NodeStatistics:
    """Statistics of an output that all observations miss, with targets of zero."""
    known = statistics.moment.shape[-3]
    precision = 1.0 / scores.hit_noise + (known - 1) / scores.miss_noise
    factor = 1.0 / (precision * scores.miss_noise)
    count = statistics.count[..., :1]

    def share(values: Tensor, output: int) -> Tensor:
        return values.sum(output, keepdim=True) * factor

    one = torch.zeros(2, 2).to(count)
    one[1, 1] = 1.0
    return replace(
        statistics,
        gram=_gram_of(lambda values: share(values, -3), statistics.gram),
        moment=share(statistics.moment, -3) * one[1],
        energy=share(statistics.energy, -3) * one,
        totals=count[..., None, None] * one,
        log_noise=count * math.log(scores.miss_noise),
        noise_sum=count * scores.miss_noise,
    )


def _gram_of(rule: Callable[..., Tensor], *grams: NodeGram) -> NodeGram:
    """A gram whose numbers, ``... x outputs x rows x columns``, are a rule's of those of others."""
    blocks = zip(*(gram.blocks for gram in grams), strict=True)
    strips = zip(*(gram.strips for gram in grams), strict=True)
    return NodeGram(
        tuple(replace(same[0], moments=rule(*(b.moments for b in same))) for same in blocks),
        tuple(rule(*same) for same in strips),
    )


def _appended(first: NodeStatistics, last: NodeStatistics, classes: int) -> NodeStatistics:
    """The outputs of the first, then as many copies of the last's one as are missing."""
    more = classes - first.moment.shape[-3]

    def join(a: Tensor, b: Tensor, output: int) -> Tensor:
        return torch.cat((a, *[b] * more), output)

    return replace(
        first,
        gram=_gram_of(lambda a, b: join(a, b, -3), first.gram, last.gram),
        moment=join(first.moment, last.moment, -3),
        energy=join(first.energy, last.energy, -3),
        totals=join(first.totals, last.totals, -3),
        log_noise=join(first.log_noise, last.log_noise, -1),
        noise_sum=join(first.noise_sum, last.noise_sum, -1),
    )


def _padded(statistics: NodeStatistics, classes: int) -> NodeStatistics:
    """Statistics of no observations, whose one gram all outputs share, for more outputs."""
    empty = statistics.scale(0.0)
    one = replace(
        empty,
        moment=empty.moment[..., :1, :, :],
        energy=empty.energy[..., :1, :, :],
        totals=empty.totals[..., :1, :, :],
        log_noise=empty.log_noise[..., :1],
        noise_sum=empty.noise_sum[..., :1],
    )
    padded = _appended(statistics, one, classes)
    return replace(padded, gram=statistics.gram)
