"""Checks of the numbers that allocators are made with."""

from __future__ import annotations


def checked_number(name: str, value: int, least: int = 1) -> int:
    """A whole number of at least ``least``.

    Raises:
        ValueError: It is smaller.
    """
    if int(value) != value or value < least:
        raise ValueError(f"Expected {name} to be a whole number of at least {least}, got {value}.")
    return int(value)
