"""The error for mistakes that a user of the loops can correct, and checks that raise it."""

from __future__ import annotations

from collections.abc import Iterable


class UsageError(ValueError):
    """An error for data, a setting or a file that cannot be used; the message says what to do.

    The command line shows it as one line and exits with code 2.
    """


def check_whole(name: str, value: int, least: int) -> None:
    """Raise a ``UsageError`` unless a number is whole and not below the least."""
    if not isinstance(value, int):
        raise UsageError(
            f"Expected {name} to be a whole number of at least {least}, got {value!r}."
        )
    if value < least:
        raise UsageError(f"Expected {name} of at least {least}, got {value}.")


def check_one_of(name: str, value: object, choices: Iterable[object]) -> None:
    """Raise a ``UsageError`` unless a value is one of the choices."""
    choices = tuple(choices)
    if value not in choices:
        known = ", ".join(map(str, choices))
        raise UsageError(f"Expected {name} to be one of {known}, got {value!r}.")
