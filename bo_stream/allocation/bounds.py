"""How many inducing points OIPS takes, and how much they miss, by the theorems of its paper."""

from __future__ import annotations

import math

from bo_stream.allocation.numbers import checked_number


def expected_points_bound(
    n: int, d: int, rho: float, lengthscale: float, side: float = 1.0
) -> float:
    """Bound on the expected number of points that OIPS selects of n uniform ones in a cube.

    Selected points are ``r = lengthscale √(−2 log rho)`` apart, so that balls of radius r / 2 about
    them are disjoint, and nothing in them can be selected again. At least one of the 2^d orthants
    of each lies in the cube. With α the share of the cube that this is, one more point is selected
    with probability at most ``1 − α M``: ``E[M] <= (1 − (1 − α)^n) / α``.

    Source: Galy-Fajou and Opper (2021), theorem 1, corrected: their "inscribed hypercube" of side
    ``r √d / 2`` is more than the ball holds from d = 5 on, cubes in balls of radius r overlap, the
    domain's corners are forgotten, and the recursion is not normalised by its volume.

    Args:
        n: Inputs, uniform in ``[0, side]^d``.
        d: Dimensions.
        rho: OIPS' threshold, in (0, 1).
        lengthscale: Of the RBF kernel ``exp(−|x − x'|² / (2 lengthscale²))``.
        side: Of the cube.

    Raises:
        ValueError: A number is out of range.
    """
    _check_rho(rho)
    n, d = checked_number("n", n, least=0), checked_number("d", d)
    for name, length in (("lengthscale", lengthscale), ("side", side)):
        if not 0.0 < length < math.inf:
            raise ValueError(f"Expected {name} to be positive and finite, got {length}.")
    reach = min(lengthscale * math.sqrt(-2.0 * math.log(rho)) / 2.0, side)
    orthant = math.pi ** (d / 2) / math.gamma(d / 2 + 1.0) * (reach / 2.0) ** d
    share = orthant / side**d
    return -math.expm1(n * math.log1p(-share)) / share


def nystroem_error_bound(n: int, points: int, rho: float) -> float:
    """Bound on ``‖K_X − Q_X‖`` of n inputs of a correlation kernel, given OIPS' points.

    ``(n − M) (1 − rho² / (1 + M (M − 1) rho))``, in parts of the prior variance. Source:
    Galy-Fajou and Opper (2021), theorem 2.

    Args:
        n: Inputs that the points were selected from.
        points: Number M of points.
        rho: OIPS' threshold, in (0, 1).

    Raises:
        ValueError: A number is out of range.
    """
    _check_rho(rho)
    n, points = checked_number("n", n), checked_number("points", points)
    if points > n:
        raise ValueError(f"Expected points of at most n = {n}, the inputs, got {points}.")
    return (n - points) * (1.0 - rho**2 / (1.0 + points * (points - 1) * rho))


def _check_rho(rho: float) -> None:
    if not 0.0 < rho < 1.0:
        raise ValueError(f"Expected rho in (0, 1), a correlation, got {rho}.")
