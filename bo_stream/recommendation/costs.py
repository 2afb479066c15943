"""Predicted seconds and bytes, from the table that ``benchmarks/speed/cost_model.py`` fits.

A family's cost of an operation is a sum of terms: a coefficient, times a product of sizes such as
``n n d``, times the speed of the machine at that kind of work.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from bo_stream.bases.grid.resolution import DEFAULT_SIZES
from bo_stream.recommendation.problem import Problem

OPERATIONS = ("update", "refit", "posterior", "fantasy")
COUNTED = ("exact", "WISKI", "OSVGP")
"""Families whose costs with counts are others than with Gaussian outcomes or labels."""

Sizes = dict[str, float]


@dataclass(frozen=True)
class Term:
    """A coefficient times a product of sizes.

    Attributes:
        kind: One of ``KINDS`` of ``calibration``; empty for bytes.
        symbols: The sizes that are multiplied, ``"n n d"`` for n² d; empty for a constant.
        coefficient: Seconds on the machine of the table, or bytes.
    """

    kind: str
    symbols: str
    coefficient: float

    def at(self, sizes: Sizes) -> float:
        """Evaluate the term."""
        return self.coefficient * math.prod(sizes[symbol] for symbol in self.symbols.split())


class CostTable:
    """The table of costs.

    Attributes:
        speeds: Seconds of the probes of ``calibration`` on the machine of the table.
        limits: Defaults of the models that sizes depend on.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        """Read the record of a file."""
        self.speeds: dict[str, float] = record["speeds"]
        self.limits: dict[str, int] = record["limits"]
        self._sizes: dict[str, Any] = record["sizes"]
        self._terms = {
            family: {name: [Term(*term) for term in terms] for name, terms in operations.items()}
            for family, operations in record["terms"].items()
        }

    @classmethod
    @cache
    def shipped(cls) -> CostTable:
        """Read the table of the package, once a process."""
        text = files("bo_stream.recommendation").joinpath("costs.json").read_text("utf-8")
        return cls(json.loads(text))

    def seconds(
        self, family: str, problem: Problem, speeds: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Predict the seconds of each of ``OPERATIONS``.

        Args:
            family: A model's name.
            problem: What it is used for.
            speeds: Seconds of the probes on this machine; None: as on that of the table.
        """
        stage, sizes = self.stage(family, problem), self.sizes(family, problem)
        factors = {kind: speeds[kind] / self.speeds[kind] for kind in speeds} if speeds else {}
        return {
            name: sum(
                factors.get(term.kind, 1.0) * term.at(sizes) for term in self._terms[stage][name]
            )
            for name in OPERATIONS
        }

    def bytes(self, family: str, problem: Problem) -> float:
        """Predict the bytes that the model holds, between operations."""
        sizes = self.sizes(family, problem)
        return sum(term.at(sizes) for term in self._terms[self.stage(family, problem)]["bytes"])

    def stage(self, family: str, problem: Problem) -> str:
        """Name the row of the table: few observations are held as rows, sums and counts differ."""
        if family == "OSGPR":
            return "OSGPR" if problem.n > self.limits["window"] else "OSGPR, rows"
        name = f"{family}, sum" if family == "WISKI" and len(problem.groups) > 1 else family
        if problem.likelihood == "binomial" and family in COUNTED:
            name = f"{name}, counts"
        if family not in ("WISKI", "DirichletWISKI"):
            return name
        held = problem.n <= min(self.limits["rows"], self._nodes(problem))
        return f"{name}, rows" if held else name

    def sizes(self, family: str, problem: Problem) -> Sizes:
        """Predict the sizes that costs depend on.

        Returns:
            n, d, q and m of the problem; w rows of a window and b of a minibatch. Of a grid model:
            g grids of p nodes, c of them around an input, k entries of the kernel's factors, r
            features, f of them in a fit. M inducing points or centres, a = 1 while new ones enter,
            else 0. C local models of s rows.
        """
        n, limits = problem.n, self.limits
        sizes = {"n": float(n), "d": float(problem.d), "q": float(problem.q), "m": float(problem.m)}
        window = limits["counts" if problem.likelihood == "binomial" else "window"]
        sizes["w"], sizes["b"] = float(min(n, window)), float(min(n, limits["batch"]))
        if family in ("WISKI", "DirichletWISKI"):
            sides = [(len(group), _sides(matern)[len(group)]) for group, matern in _parts(problem)]
            sizes["g"], sizes["p"] = float(len(sides)), float(self._nodes(problem))
            sizes["c"] = float(sum(7**inputs for inputs, _ in sides))
            sizes["k"] = float(sum(inputs * side**2 for inputs, side in sides))
            each = [self._count(family, len(g), problem, matern) for g, matern in _parts(problem)]
            sizes["r"] = min(sum(each), sizes["p"], float(limits[f"{family} rank"]))
            sizes["f"] = min(sizes["r"], float(limits["learning"]))
        elif family in ("OSGPR", "OSVGP"):
            count = self._count("OSGPR", problem.d, problem, any(problem.matern))
            sizes["M"] = min(n, count)
            sizes["a"] = float(n < count or count > 0.8 * limits["points"])
        elif family == "ClusteredGP":
            sizes["M"], sizes["a"] = self._centres(problem), float(n <= limits["centres"])
        elif family == "LocalGP":
            sizes["C"] = max(
                1.0, min(self._count("LocalGP", problem.d, problem, any(problem.matern)), n / 2.0)
            )
            sizes["s"] = min(float(limits["local"]), n / sizes["C"])
        return sizes

    def interpolation_error(self, problem: Problem) -> float:
        """Predict the largest error of WISKI's covariance, in parts of the prior variance."""
        return max(
            self._count("error", len(group), problem, matern) for group, matern in _parts(problem)
        )

    def _nodes(self, problem: Problem) -> int:
        """Count the nodes of default grids."""
        return sum(_sides(matern)[len(group)] ** len(group) for group, matern in _parts(problem))

    def _count(self, name: str, d: int, problem: Problem, matern: bool) -> float:
        """Interpolate what was found at some lengthscales and d, in logarithms."""
        curves = self._sizes[name]["rough" if matern else "smooth"]
        x = [math.log(value) for value in self._sizes["lengthscales"]]
        at = math.log(problem.lengthscale / d**0.5)
        known = sorted(int(key) for key in curves)
        ends = [_interpolated(x, [math.log(v) for v in curves[str(key)]], at) for key in known]
        return math.exp(_interpolated([float(key) for key in known], ends, float(d)))

    def _centres(self, problem: Problem) -> float:
        """Interpolate how many centres there are beyond the first thousand observations."""
        most, n = self.limits["centres"], problem.n
        if n <= most:
            return float(n)
        record = self._sizes["centres"]
        known = sorted(int(key) for key in record if key != "n")
        x = [math.log(value) for value in record["n"]]
        ends = [_interpolated(x, [math.log(v) for v in record[str(d)]], math.log(n)) for d in known]
        return math.exp(_interpolated([float(d) for d in known], ends, float(problem.d)))


def _parts(problem: Problem) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Yield the inputs of each part of the kernel, and whether it is Matérn."""
    yield from zip(problem.groups, problem.matern, strict=True)


def _sides(matern: bool) -> dict[int, int]:
    """Return the nodes of a dimension of a default grid, by its number of inputs."""
    return DEFAULT_SIZES["rough" if matern else "smooth"]


def _interpolated(x: Sequence[float], y: Sequence[float], at: float) -> float:
    """Interpolate linearly; constant beyond the ends."""
    if len(x) == 1 or at <= x[0]:
        return y[0]
    if at >= x[-1]:
        return y[-1]
    i = bisect.bisect_right(x, at)
    share = (at - x[i - 1]) / (x[i] - x[i - 1])
    return y[i - 1] + share * (y[i] - y[i - 1])
