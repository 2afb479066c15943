"""Inference that is handed over from one family to the next as the stream grows."""

from __future__ import annotations

import math
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from botorch.exceptions.errors import BotorchError, UnsupportedError
from botorch.exceptions.warnings import BotorchWarning
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from bo_stream.likelihoods.binomial import BinomialLikelihood
from bo_stream.models.auto.exact import ExactMemory
from bo_stream.models.auto.families import (
    COMPARABLE,
    EXACT,
    MEAN_ERROR,
    MOST_EXACT,
    OSGPR,
    VARIANCE_RATIO,
    ExactPosterior,
    begin,
    exact_inference,
    most_exact,
)
from bo_stream.models.inducing.inference import MAX_POINTS, InducingCache
from bo_stream.models.inducing.sites import SiteInference
from bo_stream.models.inference import Inference, Prior
from bo_stream.models.memory import Memory, Observations
from bo_stream.models.wiski.inference import check_in_grid
from bo_stream.process import PosteriorProcess
from bo_stream.warnings import users_stack_level


class HandOverWarning(BotorchWarning):
    """A model stays in its family, for no other one could be begun, or it is far from exact since.

    The attribute ``history`` of the model has the numbers.
    """


@dataclass(frozen=True)
class HandOver:
    """A move from one family to another, and what it cost.

    Attributes:
        observations: In memory when it happened.
        before: Name of the family before.
        after: Name of the family since.
        seconds: That it took, on the clock, the comparison left out.
        mean_error: Largest difference of the posterior means from the exact posterior's at rows
            that are stored, in prior standard deviations; NaN if the likelihood has no exact one,
            or if there are more than ``COMPARABLE`` rows.
        variance_error: Largest difference of the posterior variances from the exact posterior's
            there, in prior variances; NaN as ``mean_error``.
        deviation: Largest difference of the means in posterior standard deviations of the exact
            process: at those rows, in the middle between each and its nearest other input, and at
            points all over the box of the inputs. A standard deviation counts as no less than a
            tenth of the noise's, and 1e-4 of the prior's. NaN as ``mean_error``.
        least_ratio: Least ratio of the posterior variances to the exact ones there, of both no less
            than the square of such a standard deviation; NaN as ``mean_error``.
        largest_ratio: Largest such ratio; NaN as ``mean_error``.
    """

    observations: float
    before: str
    after: str
    seconds: float
    mean_error: float
    variance_error: float
    deviation: float = math.nan
    least_ratio: float = math.nan
    largest_ratio: float = math.nan

    @property
    def excess(self) -> float:
        """The larger of both errors in its limit, ``MEAN_ERROR`` or ``VARIANCE_RATIO``; or NaN.

        That of ratios is by their logarithms.
        """
        if math.isnan(self.deviation):
            return math.nan
        logs = max(abs(math.log(ratio)) for ratio in (self.least_ratio, self.largest_ratio))
        return max(self.deviation / MEAN_ERROR, logs / math.log(VARIANCE_RATIO))


@dataclass(frozen=True)
class AutoMemory(Memory):
    """The memory of the family that is in use, and all rows while these can be stored.

    Attributes:
        family: Its name.
        inference: Of the family.
        inner: Its memory.
        rows: All observations, while they are stored beside it; None in the exact family, whose own
            memory they are, and once there were too many.
        history: All moves.
        again: Number of observations from which on a move is tried again, where none could be made.
        waits_until: Number of observations to which it stays exact: a dearer family would follow.
    """

    family: str
    inference: Inference[Any, Any]
    inner: Any
    rows: ExactMemory | None
    history: tuple[HandOver, ...] = ()
    again: float = 0.0
    waits_until: int = 0

    @property
    def held(self) -> ExactMemory | None:
        """All observations as rows, if they are stored."""
        return self.inner if self.family == EXACT else self.rows

    @property
    def totals(self) -> Tensor:
        """``[Y, 1]ᵀ [Y, 1]`` of all observations, ``... x m x 2 x 2``."""
        totals: Tensor = self.inner.totals
        return totals

    def known_sums(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """See :meth:`Memory.known_sums`."""
        sums: tuple[Tensor, Tensor, Tensor] | None = self.inner.known_sums()
        return sums


@dataclass(frozen=True)
class AutoInference(Inference[AutoMemory, Any]):
    """Inference of the family that the memory is in, which an update can change.

    A cache is that of the family in use.

    Attributes:
        families: Names of those allowed, in the order in which they are tried.
        max_exact: Most observations that are stored exactly, where other families are allowed.
        max_rows: Most observations that are stored as rows alongside another family's memory.
        box: Box in which the inputs of the process lie, ``2 x d``; None where it is not known.
        options: Of the streaming families, see :func:`begin`.
        default_exact: Default of ``max_exact``, by the first family that follows; where that is
            used, later families have numbers of their own, see :func:`most_exact`.
    """

    defers_reads: ClassVar[bool] = True

    families: tuple[str, ...]
    max_exact: int
    max_rows: int
    box: Tensor | None
    options: dict[str, Any]
    default_exact: int = 0

    def start(self, prior: Prior, like: Tensor) -> AutoMemory:
        """Begin with no observations, in the first of the families.

        Args:
            prior: The hyperparameters.
            like: Inputs of the process, ``... x d``, of the observations' dtype and device.
        """
        family = self.families[0]
        inference, inner = begin(family, prior, like, self.box, self.options)
        rows, columns = None, prior.outcomes.columns
        if family != EXACT:
            rows = ExactMemory.empty(like.double(), prior.shape, columns)
        return AutoMemory(family, inference, inner, rows)

    def observe(
        self, memory: AutoMemory, cache: Any, data: Observations, prior: Prior
    ) -> tuple[AutoMemory, Any]:
        """Put a batch into the family's memory; move on if the rows have become too many."""
        if data.sign > 0.0:
            memory, cache = self._decided(memory, cache, prior, data.X.shape[-2])
        rows = memory.rows
        if rows is not None:
            rows = rows.after(data)
        inner, cache = memory.inference.observe(memory.inner, cache, data, prior)
        if rows is not None and len(rows) > self.max_rows:
            rows = None
        return self._moved_on(replace(memory, inner=inner, rows=rows), cache, prior)

    def _decided(
        self, memory: AutoMemory, cache: Any, prior: Prior, more: int
    ) -> tuple[AutoMemory, Any]:
        """Leave the exact family at once if it waits, and could not be compared with more rows."""
        waits = memory.family == EXACT and memory.waits_until > 0
        if waits and len(memory.inner) + more > COMPARABLE:
            return self._moved_on(memory, cache, prior, may_wait=False)
        return memory, cache

    def _moved_on(
        self, memory: AutoMemory, cache: Any, prior: Prior, may_wait: bool = True
    ) -> tuple[AutoMemory, Any]:
        """Leave the exact family for the next that can be begun, if there are too many rows.

        One that is off by more than ``MEAN_ERROR`` or ``VARIANCE_RATIO`` is taken only where no
        other is nearer, nor twice as many inducing points. Another one would follow before it is
        cheaper than the exact family: the model stays exact until then if it may wait, and unless
        ``max_exact`` was chosen by the user.
        """
        others = [family for family in self.families if family != EXACT]
        waits = may_wait and self.max_exact == self.default_exact
        most = max(self.max_exact, memory.again, memory.waits_until if waits else 0)
        if memory.family != EXACT or len(memory.inner) <= most or not others:
            return memory, cache
        exact = None  # solved once, for all are compared with it
        with suppress(NotPSDError):
            if len(memory.inner) <= COMPARABLE:
                _, cache = self.process(memory, cache, prior)
            exact = ExactPosterior.of(memory.inner, cache, prior, self.box)
        reasons: list[str] = []
        best: tuple[AutoMemory, Any, list[warnings.WarningMessage], tuple[str, ...]] | None = None
        least = math.nan
        dim = memory.inner.rows.X.shape[-1]
        candidates: list[tuple[str, dict[str, Any], int]] = [
            (family, {}, most_exact((EXACT, family), prior, dim, self.box) if waits else 0)
            for family in others
        ]
        if OSGPR in others and "max_points" not in self.options:  # once more, with twice as many
            candidates.append((OSGPR, {"max_points": 2 * MAX_POINTS}, MOST_EXACT if waits else 0))
        model: Any = prior.model
        said = model._said
        for i, (family, options, least_rows) in enumerate(candidates):
            if i > 0 and len(memory.inner) <= least_rows:
                return replace(memory, waits_until=least_rows), cache
            with warnings.catch_warnings(record=True) as warned:  # given if the family is taken
                warnings.simplefilter("always")
                try:
                    found = self._moved(family, memory, prior, options, exact)
                except (BotorchError, NotPSDError, ValueError) as error:
                    reasons.append(f"{family}: {error}")
                    continue
                finally:
                    now_said, model._said = model._said, said
            excess = found[0].history[-1].excess  # NaN where it is not known
            if best is None or not excess >= least:
                best, least = (*found, warned, now_said), excess
            if not excess > 1.0:
                break
        if best is not None:  # with the warnings on the way to it, and of no other
            memory, cache, warned, model._said = best
            for each in warned:
                warnings.warn(each.message, stacklevel=users_stack_level())
            return memory, cache
        warnings.warn(
            f"The model stays exact at {len(memory.inner)} observations, at a cost that grows with "
            f"their cube, for no other family could be begun. {' '.join(reasons)}",
            HandOverWarning,
            stacklevel=users_stack_level(),
        )
        return replace(memory, again=2.0 * len(memory.inner)), cache

    def moved_to(
        self,
        family: str,
        memory: AutoMemory,
        cache: Any,
        prior: Prior,
        options: dict[str, Any],
    ) -> tuple[AutoMemory, Any]:
        """Move to a family by way of all rows, and compare its posterior with the exact one.

        Raises:
            BotorchError: The family cannot take the model, or the rows are no longer stored.
            ValueError: An option is out of range, or the memory would become too large.
        """
        rows = memory.held
        if rows is None:
            raise UnsupportedError(
                f"Expected a model that holds its observations, {self.max_rows} at most (max_rows),"
                f" got one of {float(memory.counts.max()):g}. Build another from the data."
            )
        exact = ExactPosterior.of(rows, cache if memory.family == EXACT else None, prior, self.box)
        return self._moved(family, memory, prior, options, exact)

    def _moved(
        self,
        family: str,
        memory: AutoMemory,
        prior: Prior,
        options: dict[str, Any],
        exact: ExactPosterior | None,
    ) -> tuple[AutoMemory, Any]:
        """Move by way of all rows, which are stored, and say so where it is far from exact."""
        rows, begun = cast(ExactMemory, memory.held), time.perf_counter()
        inference, inner, own = self._of_rows(family, rows, prior, {**self.options, **options})
        process, own = inference.process(inner, own, prior, rows.rows.X)
        seconds = time.perf_counter() - begun
        errors = (math.nan,) * 5 if exact is None else exact.discrepancy(process)
        total = float(memory.counts.reshape(-1)[0])
        move = HandOver(total, memory.family, family, seconds, *errors)
        if move.excess > 1.0:
            warnings.warn(
                f"Since it moved from {move.before} to {move.after} at {move.observations:,.0f} "
                f"observations, the model's posterior means are up to {move.deviation:.2g} "
                "posterior standard deviations from the exact process's, and its variances "
                f"{move.least_ratio:.2g} to {move.largest_ratio:.2g} times the exact ones (history "
                "has these numbers). Raise max_exact, max_points or grid_size, or allow more "
                "families.",
                HandOverWarning,
                stacklevel=users_stack_level(),
            )
        kept = rows if family != EXACT and len(rows) <= self.max_rows else None
        return AutoMemory(family, inference, inner, kept, (*memory.history, move)), own

    def _of_rows(
        self, family: str, rows: ExactMemory, prior: Prior, options: dict[str, Any]
    ) -> tuple[Inference[Any, Any], Any, Any]:
        """Begin a family and put rows into it."""
        like = rows.rows.X.to(prior.model.train_targets)
        inference, inner = begin(family, prior, like, self.box, options)
        if family == EXACT:
            return inference, rows, None
        return inference, *self._filled(inference, inner, rows, prior)

    def _filled(
        self, inference: Inference[Any, Any], inner: Any, rows: ExactMemory, prior: Prior
    ) -> tuple[Any, Any]:
        """Put rows into an empty memory of a streaming family, each as many times as it counts.

        Those of the least weight come first and are scaled before the next ones come.
        Hyperparameters stay, but those of a likelihood that no exact model could learn: under it
        each batch takes the family's steps.
        """
        taking: Any = inference
        if isinstance(taking, SiteInference) and exact_inference(prior.likelihood) is not None:
            taking = replace(taking, hyper_steps=0)
        cache, order = None, rows.weight.argsort(dim=-1, stable=True)
        data = rows.rows.at(order)
        weight = rows.weight.gather(-1, order).reshape(-1, len(rows))[0]
        values, numbers = weight.unique_consecutive(return_counts=True)
        following, start = [*values.tolist()[1:], 1.0], 0
        for value, after, number in zip(values.tolist(), following, numbers.tolist(), strict=True):
            batch = data.rows(slice(start, start + number))
            inner, cache = taking.observe(inner, cache, batch, prior)
            start += number
            if value != after:
                inner, cache = inner.scale(value / after), None
        return inner, cache

    def merged(
        self, memory: AutoMemory, cache: Any, other: AutoMemory, prior: Prior
    ) -> tuple[AutoMemory, Any]:
        """Join rows while both are exact, else statistics of the family that one of them is in.

        Raises:
            UnsupportedError: They are in two streaming families and hold no rows.
            ValueError: The memory would become too large.
        """
        if memory.family == other.family == EXACT:
            memory, cache = self._decided(memory, cache, prior, len(other.inner))
        mine, theirs = memory.held, other.held
        rows = None if mine is None or theirs is None else mine.followed_by(theirs)
        if memory.family == other.family == EXACT:
            return self._moved_on(replace(memory, inner=rows), None, prior)
        first, second = (memory, other) if memory.family != EXACT else (other, memory)
        if first.family != second.family and second.held is None:
            first, second = second, first
        inner = second.inner
        if second.held is not None and len(second.held) == 0:  # nothing that a family begins from
            inner = first.inference.cleared(first.inner, prior)
        elif first.family != second.family:
            if second.held is None or first.family not in self.families:
                raise UnsupportedError(
                    f"Cannot merge a model in family {memory.family} with one in {other.family} "
                    "that no longer holds its observations: give both the same families."
                )
            _, inner, _ = self._of_rows(first.family, second.held, prior, self.options)
        inner, cache = first.inference.merged(first.inner, None, inner, prior)
        if rows is not None and len(rows) > self.max_rows:
            rows = None
        return replace(first, inner=inner, rows=rows, history=memory.history), cache

    # --- the family in use answers ------------------------------------------------------------

    def process(
        self, memory: AutoMemory, cache: Any, prior: Prior, X: Tensor | None = None
    ) -> tuple[PosteriorProcess, Any]:
        """Return the posterior of the family in use."""
        return memory.inference.process(memory.inner, cache, prior, X)

    def feature_process(
        self, memory: AutoMemory, cache: Any, prior: Prior, X: Tensor | None = None
    ) -> tuple[PosteriorProcess, Any]:
        """Return the posterior of the family in use, in the weights of features."""
        return memory.inference.feature_process(memory.inner, cache, prior, X)

    def check_reach(self, process: PosteriorProcess, X: Tensor | None) -> None:
        """Check that inputs are inside the grid, where the family in use has one."""
        check_in_grid(process, X)

    def objective(self, memory: AutoMemory, cache: Any, prior: Prior) -> tuple[Tensor, Any]:
        """Return the objective of the family in use."""
        return memory.inference.objective(memory.inner, cache, prior)

    def log_marginal_likelihood(
        self, memory: AutoMemory, cache: Any, prior: Prior
    ) -> tuple[Tensor, Any]:
        """Return the log marginal likelihood of the family in use, or its bound."""
        return memory.inference.log_marginal_likelihood(memory.inner, cache, prior)

    def refitted(self, memory: AutoMemory, cache: Any, prior: Prior) -> tuple[AutoMemory, Any]:
        """Let the family in use follow new hyperparameters.

        Counts that are still stored enter again, together, if these have changed: their sites
        become those of the batch. Cost as of a hand-over.
        """
        solved = cache.solved if isinstance(cache, InducingCache) else None
        inner, cache = memory.inference.refitted(memory.inner, cache, prior)
        counts = isinstance(prior.likelihood, BinomialLikelihood)
        changed = solved is None or not prior.is_in(solved.state)
        if counts and changed and memory.rows is not None and len(memory.rows) > 0:
            inner = memory.inference.cleared(inner, prior)
            inner, cache = self._filled(memory.inference, inner, memory.rows, prior)
        return replace(memory, inner=inner), cache

    def cleared(self, memory: AutoMemory, prior: Prior) -> AutoMemory:
        """Begin again in the first of the families."""
        like = prior.model.train_targets.new_empty(0, prior.model._process_dim)
        return replace(self.start(prior, like), history=memory.history)

    def moved(self, memory: AutoMemory, cache: Any, device: torch.device) -> tuple[AutoMemory, Any]:
        """Return memory and cache on another device."""
        inner, cache = memory.inference.moved(memory.inner, cache, device)
        rows = None if memory.rows is None else memory.rows.to(device)
        return replace(memory, inner=inner, rows=rows), cache
