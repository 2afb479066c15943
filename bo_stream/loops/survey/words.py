"""Numbers of a survey in words."""

from __future__ import annotations


def per_cent(share: float) -> str:
    """Write a share as per cent, with two digits below ten."""
    value = 100.0 * share
    digits = 0 if abs(value) >= 9.95 or value == 0.0 else 1 if abs(value) >= 0.095 else 2
    return f"{value:,.{digits}f} %"
