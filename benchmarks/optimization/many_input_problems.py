"""Functions of 12 to 100 inputs, to be minimised: known ones, a rover's path, and simulators."""

from __future__ import annotations

import numpy as np
import torch
from botorch.test_functions import Ackley, Hartmann, Levy, Rosenbrock, SyntheticTestFunction
from scipy.interpolate import BSpline
from torch import Tensor

from benchmarks.optimization.problems import Problem
from benchmarks.optimization.simulators import lander, mirror, pendulum

LOW, HIGH = -5.0, 10.0
"""Of each input of Ackley's, Levy's and Rosenbrock's functions: no least value is in the middle."""


def wide(d: int) -> list[tuple[float, float]]:
    """Bounds of d inputs from ``LOW`` to ``HIGH``."""
    return [(LOW, HIGH)] * d


class EmbeddedHartmann(SyntheticTestFunction):
    """Hartmann's function of six inputs among twenty, of which the other fourteen do nothing."""

    INPUTS = (0, 3, 7, 11, 13, 17)
    _optimal_value = -3.32237
    _check_grad_at_opt = False

    def __init__(self) -> None:
        """On the unit cube."""
        self.dim, self.continuous_inds = 20, list(range(20))
        super().__init__(bounds=[(0.0, 1.0)] * 20)
        self._hartmann = Hartmann(6)

    def _evaluate_true(self, X: Tensor) -> Tensor:
        return self._hartmann.evaluate_true(X[..., list(self.INPUTS)])


class Rover(SyntheticTestFunction):
    """Cost of a rover's path over the unit square, by the 30 control points of a cubic B-spline.

    The path is to lead from ``START`` to ``GOAL``. Its length counts, 21 times within discs; a
    distance of its ends from where they should be counts ten times (sum of absolute values). The
    kind of Wang et al. (2018), with fifteen discs drawn once, less those near an end. The least
    value is not known; a straight line would be 1.27 long.
    """

    START, GOAL = (0.05, 0.05), (0.95, 0.95)
    POINTS, STEPS, DEGREE = 30, 500, 3
    WITHIN_DISCS, OFF_THE_ENDS = 20.0, 10.0

    def __init__(self) -> None:
        """On the unit cube, as (x, y) of one control point after the other."""
        self.dim = 2 * self.POINTS
        self.continuous_inds = list(range(self.dim))
        super().__init__(bounds=[(0.0, 1.0)] * self.dim)
        generator = np.random.default_rng(0)
        centres = generator.uniform(0.1, 0.9, (15, 2))
        radii = generator.uniform(0.04, 0.1, 15)
        ends = np.array([self.START, self.GOAL])
        far = (np.linalg.norm(centres[:, None] - ends, axis=-1) > 0.15).all(1)
        self._centres = torch.tensor(centres[far])
        self._radii = torch.tensor(radii[: far.sum()])
        self._ends = torch.tensor(ends)
        inner = np.linspace(0.0, 1.0, self.POINTS - self.DEGREE + 1)
        knots = np.r_[[0.0] * self.DEGREE, inner, [1.0] * self.DEGREE]
        at = np.linspace(0.0, 1.0, self.STEPS)
        self._basis = torch.tensor(BSpline.design_matrix(at, knots, self.DEGREE).toarray())

    def _evaluate_true(self, X: Tensor) -> Tensor:
        path = self._basis @ X.reshape(*X.shape[:-1], self.POINTS, 2)
        lengths = path.diff(dim=-2).norm(dim=-1)
        middles = (path[..., 1:, :] + path[..., :-1, :]) / 2.0
        inside = (torch.cdist(middles, self._centres) < self._radii).any(-1)
        off = (path[..., [0, -1], :] - self._ends).abs().sum((-2, -1))
        cost = (lengths * (1.0 + self.WITHIN_DISCS * inside)).sum(-1)
        return cost + self.OFF_THE_ENDS * off


PROBLEMS = {
    "Ackley-20": Problem(Ackley(20, bounds=wide(20)), 0.0, 0.0),
    "Ackley-20, noise 0.5": Problem(Ackley(20, bounds=wide(20)), 0.5, 0.0),
    "Hartmann-6 in 20": Problem(EmbeddedHartmann(), 0.0, -3.32237),
    "Levy-20": Problem(Levy(20, bounds=wide(20)), 0.0, 0.0),
    "Rosenbrock-20": Problem(Rosenbrock(20, bounds=wide(20)), 0.0, 0.0),
    "Ackley-100": Problem(Ackley(100, bounds=wide(100)), 0.0, 0.0),
    "rover-60": Problem(Rover(), 0.0, 0.0),
    "lander-12": Problem(lander(), 0.0, 0.0),
    "pendulum-40": Problem(pendulum(), 0.0, 0.0),
    "mirror-80": Problem(mirror(), 0.0, 0.0),
}
"""By name, which ends with the number of inputs; of the last four the least value is not known.

Their optimum is zero here, so that a regret is a value.
"""

LEAST_UNKNOWN = tuple(PROBLEMS)[-4:]
