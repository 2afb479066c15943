"""Choice among the candidates of a pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from ax.core.search_space import SearchSpaceDigest
from ax.exceptions.core import SearchSpaceExhausted, UnsupportedError
from botorch.acquisition.acquisition import AcquisitionFunction, OneShotAcquisitionFunction
from botorch.acquisition.monte_carlo import SampleReducingMCAcquisitionFunction
from botorch.acquisition.multi_objective.base import MultiObjectiveMCAcquisitionFunction
from botorch.generation.sampling import SamplingStrategy
from botorch.sampling.normal import SobolQMCNormalSampler
from torch import Tensor

from bo_stream.acquisition import PoolSelector
from bo_stream.ax.acquisition import StreamAcquisition
from bo_stream.ax.nipv import INTEGRATED
from bo_stream.ax.pool import Pool
from bo_stream.ax.transforms import metadata_of
from bo_stream.models.base import StreamingGP

CHUNK = 4096
"""Candidates that are evaluated at once."""

FINALISTS = 16_384
"""Candidates that are evaluated with all samples; a pool of no more is not screened."""


@torch.no_grad()
def best_of(
    acqf: AcquisitionFunction,
    X: Tensor,
    n: int,
    screening: Callable[[], AcquisitionFunction | None],
) -> Tensor:
    """Choose n candidates one after the other, each the best given those before.

    Of more than ``FINALISTS`` candidates only as many are evaluated where there is a cheaper
    function: half of them the best by that one, the others drawn at random. So the choice is the
    best of all as far as the two functions agree, and in any case the best of thousands.

    Args:
        acqf: Takes pending points if n > 1; its own are put back.
        X: Candidates, ``N x d``.
        n: How many, at most N and ``FINALISTS``.
        screening: Makes the cheaper function; None: there is none.

    Returns:
        Places in X, ``n``.
    """
    cheap = screening() if len(X) > FINALISTS else None
    if cheap is None:
        return _greedy(acqf, X, n)
    places = _finalists(values(cheap, X))
    return places[_greedy(acqf, X[places], n)]


def _greedy(acqf: AcquisitionFunction, X: Tensor, n: int) -> Tensor:
    picks = X.new_empty(0, dtype=torch.long)
    pending = acqf.X_pending if n > 1 else None
    for _ in range(n):
        worth = values(acqf, X)
        worth[picks] = -torch.inf
        picks = torch.cat((picks, worth.argmax(keepdim=True)))
        if n > 1:
            acqf.set_X_pending(_joined(pending, X[picks]))
    if n > 1:
        acqf.set_X_pending(pending)
    return picks


def _finalists(worth: Tensor) -> Tensor:
    """Half of them the best, the others drawn from the rest, in ascending order."""
    order = worth.argsort(descending=True)
    best, rest = order[: FINALISTS // 2], order[FINALISTS // 2 :]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randperm(len(rest), generator=generator)[: FINALISTS - len(best)]
    return torch.cat((best, rest[drawn.to(rest.device)])).sort().values


@torch.no_grad()
def values(acqf: AcquisitionFunction, X: Tensor) -> Tensor:
    """Of single candidates, ``N x d -> N``."""
    return torch.cat([acqf(chunk.unsqueeze(-2)) for chunk in X.split(CHUNK)])


def _joined(pending: Tensor | None, picks: Tensor) -> Tensor:
    return picks if pending is None else torch.cat((pending, picks))


CHOICES = "choices"
"""Option of an acquisition, set by the adapter at each trial: :class:`Choices`."""

SAMPLED = (SampleReducingMCAcquisitionFunction, MultiObjectiveMCAcquisitionFunction)
"""Acquisition functions whose input constructors take a sampler."""

SCREENING_SAMPLES = 32
"""Posterior samples with which most of a large pool's candidates are ruled out."""


class KeptSelector:
    """A pool's selector, kept as long as it is for the same model and points."""

    def __init__(self) -> None:
        """Begin with none."""
        self._of: tuple[object, ...] = ()
        self._selector: PoolSelector | None = None

    def get(self, model: StreamingGP, X: Tensor, mc_points: Tensor) -> PoolSelector:
        """The selector of a model, ``N x d`` candidates and ``M x d`` points."""
        asked = (model, X, mc_points)
        same = len(self._of) == len(asked) and all(
            one is other for one, other in zip(self._of, asked, strict=True)
        )
        if self._selector is None or not same:
            self._of, self._selector = asked, PoolSelector(model, X, mc_points)
        return self._selector


@dataclass(frozen=True)
class Choices:
    """What a pool offers at a trial.

    Attributes:
        pool: In the user's parameters.
        X: As the model's inputs, ``N x d``.
        untried: Which of them no trial has had, ``N`` bools.
        selector: Kept from trial to trial.
    """

    pool: Pool
    X: Tensor
    untried: Tensor
    selector: KeptSelector


class PoolAcquisition(StreamAcquisition):
    """Proposes candidates of a pool, the best untried ones by the acquisition function.

    Several at once are chosen one after the other, each given those before. Integrated variance is
    minimised in closed form, by :class:`PoolSelector`; any other function is evaluated at all
    candidates, in chunks and without gradients. Where there are many, one that samples is first
    evaluated with few samples, and with all of them at some thousand; see :func:`best_of`.

    Attributes:
        picks: Rows of the last proposals.
    """

    picks: list[int]

    def optimize(
        self,
        n: int,
        search_space_digest: SearchSpaceDigest,
        inequality_constraints: list[tuple[Tensor, Tensor, float]] | None = None,
        equality_constraints: list[tuple[Tensor, Tensor, float]] | None = None,
        fixed_features: dict[int, float] | None = None,
        rounding_func: Callable[[Tensor], Tensor] | None = None,
        optimizer_options: dict[str, Any] | None = None,
        candidate_set: Tensor | None = None,
        sampling_strategy: SamplingStrategy | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose n candidates; what else Ax gives is for a search in the whole search space.

        Raises:
            SearchSpaceExhausted: Fewer than n are left.
            UnsupportedError: Another set of candidates, a way of sampling them, or an acquisition
                function that is for a search only.
        """
        self._check(candidate_set, sampling_strategy)
        choices = self._choices
        untried = choices.untried & agrees(choices.X, fixed_features or {})
        check_enough(n, int(untried.sum()), choices.pool, bool(fixed_features))
        self.picks = self._pick(n, untried.nonzero().squeeze(-1))
        X = choices.X[self.picks]
        return X, self.evaluate(X.unsqueeze(-2)).detach(), X.new_ones(n)

    @property
    def metadata(self) -> list[dict[str, Any]]:
        """Which candidates the last proposals are."""
        pool = self._choices.pool
        return [metadata_of(pool.name, pool.name_at(row)) for row in self.picks]

    @property
    def _choices(self) -> Choices:
        choices: Choices = self.options[CHOICES]
        return choices

    def _check(
        self, candidate_set: Tensor | None, sampling_strategy: SamplingStrategy | None
    ) -> None:
        if candidate_set is not None or sampling_strategy is not None:
            raise UnsupportedError(
                "Expected a pool alone to choose from, got in_sample or a sampling strategy too. "
                "Leave them out of model_gen_options."
            )
        if isinstance(self.acqf, OneShotAcquisitionFunction):
            raise UnsupportedError(
                f"{type(self.acqf).__name__} cannot be evaluated at single candidates of a pool. "
                "Take another acquisition function."
            )

    def _pick(self, n: int, rows: Tensor) -> list[int]:
        """The n best of some rows."""
        if isinstance(self.acqf, INTEGRATED) and isinstance(self.acqf.model, StreamingGP):
            return self._pick_in_closed_form(self.acqf.model, n, rows)
        places = best_of(self.acqf, self._choices.X[rows], n, self._screening)
        return rows[places].tolist()

    def _pick_in_closed_form(self, model: StreamingGP, n: int, rows: Tensor) -> list[int]:
        choices, points = self._choices, self.options["mc_points"]
        excluded = torch.ones_like(choices.untried)
        excluded[rows] = False
        if self.X_pending is None:
            selector = choices.selector.get(model, choices.X, points)
        else:
            nothing = self.X_pending.new_zeros(len(self.X_pending), 1)
            supposing = model.condition_on_observations(self.X_pending, nothing)
            selector = PoolSelector(supposing, choices.X, points)
        return selector.select(n, exclude=excluded).tolist()

    def _screening(self) -> AcquisitionFunction | None:
        """The function with few samples and nothing pending; None where it does not sample."""
        if not isinstance(self.acqf, SAMPLED):
            return None
        ((kind, options),) = self.botorch_acqf_classes_with_options
        sampler = SobolQMCNormalSampler(torch.Size([SCREENING_SAMPLES]), seed=0)
        cheap = {**options, "sampler": sampler, "X_pending": None}
        return self._construct_botorch_acquisition(kind, cheap, self._model)


def agrees(X: Tensor, fixed: dict[int, float]) -> Tensor:
    """Which of ``N x d`` inputs have the fixed values, up to rounding; ``N`` bools."""
    agreeing = torch.ones(len(X), dtype=torch.bool, device=X.device)
    for column, value in fixed.items():
        agreeing &= torch.isclose(X[:, column], X.new_tensor(value), rtol=1e-9, atol=1e-12)
    return agreeing


def check_enough(wanted: int, left: int, pool: Pool, fixed: bool) -> None:
    """Check that a pool has enough candidates left.

    Args:
        wanted: How many are asked for.
        left: How many there are.
        pool: The pool.
        fixed: Whether parameters are fixed for these trials.

    Raises:
        SearchSpaceExhausted: It has not.
    """
    if left >= wanted:
        return
    which = " and have the fixed parameters" if fixed else ""
    raise SearchSpaceExhausted(
        f"Asked for {wanted} of the candidates of pool {pool.name!r} that no trial has had{which}, "
        f"and {left} of {len(pool)} are left. Stop here, ask for fewer, or register a larger table "
        "with register_pool(Pool.of(candidates, name=...), replace=True)."
    )
