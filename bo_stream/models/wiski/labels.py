"""What classes that come later would have seen, from what the known ones have seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from bo_stream.bases.grid.gram import NodeGram
from bo_stream.bases.grid.statistics import NodeStatistics
from bo_stream.models.memory import Observations
from bo_stream.models.outcomes.labels import DirichletScores
from bo_stream.models.wiski.memory import GridMemory, StreamMemory
from bo_stream.models.wiski.rows import RowMemory


def with_unseen_classes(
    memory: RowMemory | StreamMemory, classes: int, scores: DirichletScores
) -> RowMemory | StreamMemory:
    """Add outputs to a memory: classes that none of the observations had.

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
    """Apply a rule to the numbers of grams, ``... x outputs x rows x columns``."""
    blocks = zip(*(gram.blocks for gram in grams), strict=True)
    strips = zip(*(gram.strips for gram in grams), strict=True)
    return NodeGram(
        tuple(replace(same[0], moments=rule(*(b.moments for b in same))) for same in blocks),
        tuple(rule(*same) for same in strips),
    )


def _appended(first: NodeStatistics, last: NodeStatistics, classes: int) -> NodeStatistics:
    """Append as many copies of the last's output to those of the first as are missing."""
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
