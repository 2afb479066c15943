"""What classes that come later would have seen, from what the known ones have seen."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from bo_stream.bases.grid.statistics import NodeStatistics
from bo_stream.models.memory import Observations
from bo_stream.models.outcomes.labels import DirichletScores
from bo_stream.models.wiski.memory import GridMemory
from bo_stream.models.wiski.rows import Memory, RowMemory
from bo_stream.tensors import map_tensors, zip_tensors


def with_unseen_classes(memory: Memory, classes: int, scores: DirichletScores) -> Memory:
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
    return memory.each(lambda part: _extended(part, classes, scores))


def _with_misses(rows: Observations, classes: int, scores: DirichletScores) -> Observations:
    """Let observations miss the further classes, with targets of zero."""
    known, n = rows.targets.shape
    targets = rows.targets.new_zeros(classes - known, n)
    noise = torch.full_like(targets, scores.miss_noise)
    return replace(
        rows, targets=torch.cat((rows.targets, targets)), noise=torch.cat((rows.noise, noise))
    )


def _extended(memory: GridMemory, classes: int, scores: DirichletScores) -> GridMemory:
    empty, known = memory.learned, memory.known
    more = classes - empty.moment.shape[0]
    padded = _appended(empty, map_tensors(empty.scale(0.0), lambda value: value[:1]), more)
    # its one gram is that of all outputs
    return replace(
        memory,
        learned=replace(padded, gram=empty.gram),
        known=None if known is None else _appended(known, _missed(known, scores), more),
    )


def _missed(statistics: NodeStatistics, scores: DirichletScores) -> NodeStatistics:
    """Compute statistics of an output that all observations miss, with targets of zero."""
    known = statistics.moment.shape[0]
    precision = 1.0 / scores.hit_noise + (known - 1) / scores.miss_noise
    factor = 1.0 / (precision * scores.miss_noise)
    shared = map_tensors(statistics, lambda value: value.sum(0, keepdim=True) * factor)
    count = statistics.count[:1]
    one = torch.zeros(2, 2).to(count)
    one[1, 1] = 1.0
    return replace(
        shared,
        moment=shared.moment * one[1],
        energy=shared.energy * one,
        totals=count[..., None, None] * one,
        log_noise=count * math.log(scores.miss_noise),
        noise_sum=count * scores.miss_noise,
    )


def _appended(first: NodeStatistics, last: NodeStatistics, copies: int) -> NodeStatistics:
    """Append so many copies of one output's statistics to those of others."""
    return zip_tensors(lambda a, b: torch.cat((a, *[b] * copies)), first, last)
