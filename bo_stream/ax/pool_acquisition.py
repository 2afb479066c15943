"""Ax's acquisition for pools: the best untried candidates, chosen one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from ax.core.search_space import SearchSpaceDigest
from ax.exceptions.core import SearchSpaceExhausted
from ax.exceptions.core import UnsupportedError as AxUnsupportedError
from botorch.acquisition.acquisition import AcquisitionFunction, OneShotAcquisitionFunction
from botorch.acquisition.monte_carlo import SampleReducingMCAcquisitionFunction
from botorch.acquisition.multi_objective.base import MultiObjectiveMCAcquisitionFunction
from botorch.sampling.normal import SobolQMCNormalSampler
from torch import Tensor

from bo_stream.acquisition import PoolSelector
from bo_stream.ax.acquisition import INTEGRATED, StreamAcquisition
from bo_stream.ax.pool import CANDIDATE, MC_POINTS, POOL, Pool
from bo_stream.models.base import StreamingGP

CHOICES = "choices"
"""Option of an acquisition, set by the adapter at each trial: :class:`Choices`."""

SAMPLED = (SampleReducingMCAcquisitionFunction, MultiObjectiveMCAcquisitionFunction)
"""Acquisition functions whose input constructors take a sampler."""

SCREENING_SAMPLES = 32
"""Posterior samples with which most of a large pool's candidates are ruled out."""

CHUNK = 4096
"""Candidates that are evaluated at once."""

FINALISTS = 16_384
"""Candidates that are evaluated with all samples; a pool of no more is not screened."""


class PoolAcquisition(StreamAcquisition):
    """An acquisition of Ax that proposes the best untried candidates of a pool.

    Several at once are chosen one after the other, each given those before. Integrated variance is
    minimised in closed form, by :class:`PoolSelector`; any other function is evaluated at all
    candidates, in chunks and without gradients. Where there are many, one that samples is first
    evaluated with few samples, and with all of them at some thousand; see :func:`best_of`.

    Attributes:
        picks: Rows of the last proposals.
    """

    picks: list[int]

    def optimize(  # type: ignore[override]  # as Ax calls it
        self, n: int, search_space_digest: SearchSpaceDigest, **given: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose n candidates; overrides ``Acquisition.optimize``, a search of the search space.

        Constraints, rounding and options of that search have no effect.

        Raises:
            SearchSpaceExhausted: Fewer than n are left.
            UnsupportedError: Another set of candidates, a way of sampling them, or an acquisition
                function that is for a search only.
        """
        if any(given.get(name) is not None for name in ("candidate_set", "sampling_strategy")):
            raise AxUnsupportedError(
                "Expected a pool alone to choose from, got in_sample or a sampling strategy too. "
                "Leave them out of model_gen_options."
            )
        if isinstance(self.acqf, OneShotAcquisitionFunction):
            raise AxUnsupportedError(
                f"{type(self.acqf).__name__} cannot be evaluated at single candidates of a pool. "
                "Take another acquisition function."
            )
        choices, fixed = self._choices, given.get("fixed_features") or {}
        untried = choices.untried & agrees(choices.X, fixed)
        check_enough(n, int(untried.sum()), choices.pool, bool(fixed))
        self.picks = self._pick(n, untried)
        X = choices.X[self.picks]
        return X, self.evaluate(X.unsqueeze(-2)).detach(), X.new_ones(n)

    @property
    def metadata(self) -> list[dict[str, Any]]:
        """Return the pool and the name of each of the last proposals, which Ax stores."""
        pool = self._choices.pool
        return [{POOL: pool.name, CANDIDATE: pool.name_at(row)} for row in self.picks]

    @property
    def _choices(self) -> Choices:
        choices: Choices = self.options[CHOICES]
        return choices

    def _pick(self, n: int, allowed: Tensor) -> list[int]:
        """Return rows of the n best candidates among some, ``N`` bools."""
        choices, pending = self._choices, self.X_pending
        if not (isinstance(self.acqf, INTEGRATED) and isinstance(self.acqf.model, StreamingGP)):
            rows = allowed.nonzero().squeeze(-1)
            return rows[best_of(self.acqf, choices.X[rows], n, self._screening)].tolist()
        model, points = self.acqf.model, self.options[MC_POINTS]
        if pending is None:
            selector = choices.selector(model, choices.X, points)
        else:
            conditioned = model.condition_on_observations(
                pending, pending.new_zeros(len(pending), 1)
            )
            selector = PoolSelector(conditioned, choices.X, points)
        return selector.select(n, exclude=~allowed).tolist()

    def _screening(self) -> AcquisitionFunction | None:
        """Make the function with few samples and nothing pending; None: it does not sample."""
        if not isinstance(self.acqf, SAMPLED):
            return None
        ((kind, options),) = self.botorch_acqf_classes_with_options
        sampler = SobolQMCNormalSampler(torch.Size([SCREENING_SAMPLES]), seed=0)
        cheap = {**options, "sampler": sampler, "X_pending": None}
        return self._construct_botorch_acquisition(kind, cheap, self._model)


@dataclass(frozen=True)
class Choices:
    """The candidates of a pool at a trial.

    Attributes:
        pool: The pool.
        X: Its candidates as the model's inputs, ``N x d``.
        untried: Which of them no trial has had, ``N`` bools.
        selector: Makes the selector of a model, ``N x d`` candidates and ``M x d`` points, or
            returns the last one if it is of these.
    """

    pool: Pool
    X: Tensor
    untried: Tensor
    selector: Callable[[StreamingGP, Tensor, Tensor], PoolSelector]


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
        acqf: Acquisition function; takes pending points if n > 1, and its own are put back.
        X: Candidates, ``N x d``.
        n: Number of places in X to return, at most N and ``FINALISTS``.
        screening: Makes the cheaper function; None: there is none.
    """
    cheap = screening() if len(X) > FINALISTS else None
    if cheap is None:
        return _greedy(acqf, X, n)
    order = values(cheap, X).argsort(descending=True)
    best, rest = order[: FINALISTS // 2], order[FINALISTS // 2 :]
    drawn = torch.randperm(len(rest), generator=torch.Generator().manual_seed(0))
    others = rest[drawn[: FINALISTS - len(best)].to(rest.device)]
    places = torch.cat((best, others)).sort().values
    return places[_greedy(acqf, X[places], n)]


def _greedy(acqf: AcquisitionFunction, X: Tensor, n: int) -> Tensor:
    if n == 1:  # also of a function that takes no pending points
        return values(acqf, X).argmax(keepdim=True)
    picks = X.new_empty(0, dtype=torch.long)
    pending = acqf.X_pending
    for _ in range(n):
        worth = values(acqf, X)
        worth[picks] = -torch.inf
        picks = torch.cat((picks, worth.argmax(keepdim=True)))
        acqf.set_X_pending(X[picks] if pending is None else torch.cat((pending, X[picks])))
    acqf.set_X_pending(pending)
    return picks


@torch.no_grad()
def values(acqf: AcquisitionFunction, X: Tensor) -> Tensor:
    """Evaluate an acquisition function at single candidates, ``N x d -> N``."""
    return torch.cat([acqf(chunk.unsqueeze(-2)) for chunk in X.split(CHUNK)])


def agrees(X: Tensor, fixed: dict[int, float]) -> Tensor:
    """Return which of ``N x d`` inputs have the fixed values, up to rounding; ``N`` bools."""
    agreeing = torch.ones(len(X), dtype=torch.bool, device=X.device)
    for column, value in fixed.items():
        agreeing &= torch.isclose(X[:, column], X.new_tensor(value), rtol=1e-9, atol=1e-12)
    return agreeing


def check_enough(wanted: int, left: int, pool: Pool, fixed: bool) -> None:
    """Check that a pool has as many candidates left as are wanted; some parameters may be fixed.

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
