"""Constraints on the sites of a round: costs, a budget, travel, distances, strata, reachability."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from torch import Tensor

from bo_stream.models.checks import check_finite

_ROUNDING = 1e-9
"""A round may exceed its budget by this fraction: sums of costs are rounded."""

_EXACT = "donot_use_mm_for_euclid_dist"
_POSITIONS = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class SiteConstraints:
    """The cost that a round of sites may have, and where they may be. Lengths are in kilometres.

    Attributes:
        costs: Cost of each of N candidates, ``N``: zero or more, positive without a ``base``.
        budget: Most that a round may cost, sites and travel together.
        positions: Of each candidate on a plane, ``N x 2``; see ``bo_stream.mapping.kilometres``.
        minimum_distance: Least distance between two sites, of this round, pending or ``earlier``.
        earlier: Positions of sites that were observed before, ``k x 2``.
        strata: Number of the stratum of each candidate, ``N`` integers.
        quotas: Most sites of a stratum in this round; strata without a quota have no limit.
        unreachable: Candidates that cannot be visited, ``N`` bools.
        base: Position where the round trip through all sites of a round begins and ends, ``2``.
        cost_per_km: Cost of a kilometre of the trip, in the units of ``costs``.

    Raises:
        BotorchTensorDimensionError: Shapes do not fit together.
        InputDataError: Values that are not finite, negative or not positive where they must be, or
            quotas of strata that no candidate is in.
        ValueError: An option that needs another one which is missing.
    """

    costs: Tensor | None = None
    budget: float | None = None
    positions: Tensor | None = None
    minimum_distance: float = 0.0
    earlier: Tensor | None = None
    strata: Tensor | None = None
    quotas: Mapping[int, int] | None = None
    unreachable: Tensor | None = None
    base: Tensor | None = None
    cost_per_km: float = 0.0

    def __post_init__(self) -> None:
        """Check all that can be checked without the pool."""
        needs = (
            ("minimum_distance", self.minimum_distance != 0.0, "positions", self.positions),
            ("earlier", self.earlier is not None, "positions", self.positions),
            ("base", self.base is not None, "positions", self.positions),
            ("cost_per_km", self.cost_per_km != 0.0, "base", self.base),
            ("quotas", self.quotas is not None, "strata", self.strata),
        )
        for name, given, other, value in needs:
            if given and value is None:
                raise ValueError(f"Expected {other} along with {name}, got {other}=None.")
        if self.budget is not None and self.costs is None and self.cost_per_km == 0.0:
            raise ValueError(
                "Expected costs, or base and cost_per_km, along with a budget, got neither: "
                "nothing would cost anything."
            )
        for name in ("minimum_distance", "cost_per_km"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise InputDataError(f"Expected {name} to be zero or more and finite, got {value}.")
        if self.budget is not None and not 0.0 < self.budget < math.inf:
            raise InputDataError(f"Expected a positive, finite budget, got {self.budget}.")
        self._check_tensors()

    def _check_tensors(self) -> None:
        """Check shapes, values, and quotas of strata."""
        count = self.count
        shapes = {
            "costs": (self.costs, (count,)),
            "positions": (self.positions, (count, 2)),
            "strata": (self.strata, (count,)),
            "unreachable": (self.unreachable, (count,)),
            "base": (self.base, (2,)),
        }
        for name, (value, shape) in shapes.items():
            if value is not None and tuple(value.shape) != shape:
                raise BotorchTensorDimensionError(
                    f"Expected {name} of shape {shape}, got {tuple(value.shape)}."
                )
        if self.earlier is not None and (self.earlier.ndim != 2 or self.earlier.shape[1] != 2):
            raise BotorchTensorDimensionError(
                f"Expected earlier of shape `k x 2`, got {tuple(self.earlier.shape)}."
            )
        for name in ("costs", "positions", "earlier", "base"):
            if getattr(self, name) is not None:
                check_finite(name, getattr(self, name))
        if self.unreachable is not None and self.unreachable.dtype != torch.bool:
            raise InputDataError(
                f"Expected unreachable to hold bools, got {self.unreachable.dtype}."
            )
        if self.costs is not None:
            bad = self.costs < 0.0 if self.cost_per_km > 0.0 else self.costs <= 0.0
            if bool(bad.any()):
                first = int(bad.nonzero()[0])
                least = "zero or more" if self.cost_per_km > 0.0 else "positive"
                raise InputDataError(
                    f"Expected costs to be {least}, got costs[{first}] = "
                    f"{float(self.costs[first]):g}. Use unreachable for candidates that cannot be "
                    "chosen."
                )
        if self.strata is not None and (
            self.strata.is_floating_point() or self.strata.dtype == torch.bool
        ):
            raise InputDataError(f"Expected strata to hold integers, got {self.strata.dtype}.")
        if self.quotas is None or self.strata is None:
            return
        known = set(self.strata.unique().tolist())
        if unknown := sorted(set(self.quotas) - known):
            asked, there = (
                f"{listed[:10]}{' and more' if len(listed) > 10 else ''}"
                for listed in (unknown, sorted(known))
            )
            raise InputDataError(
                f"Expected quotas of strata that candidates are in, {there}, got {asked}."
            )
        for stratum, quota in self.quotas.items():
            if quota < 0 or quota != int(quota):
                raise InputDataError(
                    f"Expected quotas to be whole numbers from 0, got {quota} of stratum {stratum}."
                )

    @property
    def count(self) -> int | None:
        """Number N of candidates that the constraints are for; None: for any number."""
        lists = (self.costs, self.positions, self.strata, self.unreachable)
        return next((len(values) for values in lists if values is not None), None)


@dataclass(frozen=True, eq=False)
class Round:
    """The sites of a round so far, and what may be added to them.

    Attributes:
        constraints: Of all sites.
        allowed: Candidates that nothing but the budget forbids, ``N`` bools.
        spent: Cost of the round so far.
        left: Sites that quotas leave to each stratum with one.
        tour: Positions of the round trip, from the base to the base, ``k x 2``; none without base.
    """

    constraints: SiteConstraints
    allowed: Tensor
    spent: float = 0.0
    left: Mapping[int, int] = field(default_factory=dict)
    tour: Tensor | None = None

    @classmethod
    def begin(
        cls, constraints: SiteConstraints, available: Tensor, pending: Tensor, like: Tensor
    ) -> Round:
        """Begin a round without sites.

        Args:
            constraints: Of all sites.
            available: Candidates that are neither excluded nor pending, ``N`` bools.
            pending: Indices of sites that were requested and are not observed yet.
            like: A tensor of the dtype and device to compute in.

        Raises:
            BotorchTensorDimensionError: The constraints are of another number of candidates.
        """
        if constraints.count not in (None, len(available)):
            raise BotorchTensorDimensionError(
                f"Expected constraints of {len(available)} candidates, those of pool, got "
                f"{constraints.count}."
            )
        moved: dict[str, Any] = {}
        for name, value in vars(constraints).items():
            if isinstance(value, Tensor):
                whole = name in ("strata", "unreachable")  # which are no real numbers
                moved[name] = value.to(like.device) if whole else value.to(like)
        c = replace(constraints, **moved)
        allowed = available.clone()
        if c.unreachable is not None:
            allowed &= ~c.unreachable
        tour = None if c.base is None else c.base.expand(2, 2)
        start = cls(c, allowed, 0.0, dict(c.quotas or {}), tour)
        if c.positions is not None and c.minimum_distance > 0.0:
            start = start._away_from(c.positions[pending])
            start = start if c.earlier is None else start._away_from(c.earlier)
        return start._within_quotas()

    def offers(self) -> tuple[Tensor | None, Tensor]:
        """Return what each candidate adds to the round's cost, and which may be added, ``N`` each.

        Travel by cheapest insertion: the shortest detour between two stops of the trip that follow
        each other. No costs, None, where nothing costs.
        """
        c = self.constraints
        costs = c.costs
        if c.positions is not None and self.tour is not None and c.cost_per_km > 0.0:
            reach = torch.cdist(c.positions, self.tour, compute_mode=_EXACT)
            legs = torch.linalg.vector_norm(self.tour.diff(dim=0), dim=-1)
            detour = (reach[:, :-1] + reach[:, 1:] - legs).amin(-1).clamp_min(0.0)
            travel = c.cost_per_km * detour
            costs = travel if costs is None else costs + travel
        if c.budget is None or costs is None:
            return costs, self.allowed
        return costs, self.allowed & (self.spent + costs <= c.budget * (1.0 + _ROUNDING))

    def visiting(self, i: int, cost: float) -> Round:
        """Add a candidate at a cost."""
        c = self.constraints
        allowed = self.allowed.clone()
        allowed[i] = False
        new = replace(self, allowed=allowed, spent=self.spent + cost)
        if c.positions is not None:
            here = c.positions[i : i + 1]
            if self.tour is not None:
                reach = torch.linalg.vector_norm(self.tour - here, dim=-1)
                legs = torch.linalg.vector_norm(self.tour.diff(dim=0), dim=-1)
                after = int((reach[:-1] + reach[1:] - legs).argmin()) + 1
                tour = torch.cat((self.tour[:after], here, self.tour[after:]))
                new = replace(new, tour=tour)
            if c.minimum_distance > 0.0:
                new = new._away_from(here)
        if c.strata is not None and int(c.strata[i]) in self.left:
            stratum = int(c.strata[i])
            new = replace(new, left={**self.left, stratum: self.left[stratum] - 1})
            new = new._within_quotas()
        return new

    def _away_from(self, positions: Tensor) -> Round:
        """Forbid all candidates that are too near to any of some positions, ``k x 2``."""
        c, allowed = self.constraints, self.allowed.clone()
        assert c.positions is not None  # noqa: S101 (a minimum distance needs them)
        for some in positions.split(_POSITIONS):
            gap = torch.cdist(c.positions, some, compute_mode=_EXACT)
            allowed &= (gap >= c.minimum_distance).all(-1)
        return replace(self, allowed=allowed)

    def _within_quotas(self) -> Round:
        """Forbid all candidates of strata whose quota is used up."""
        full = [stratum for stratum, left in self.left.items() if left <= 0]
        strata = self.constraints.strata
        if not full or strata is None:
            return self
        used = torch.isin(strata, torch.tensor(full, device=strata.device))
        return replace(self, allowed=self.allowed & ~used)
