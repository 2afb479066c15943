"""The error for what a user of the loops can correct."""

from __future__ import annotations


class UsageError(ValueError):
    """An error for data, a setting or a file that cannot be used; the message says what to do.

    The command line shows it as one line and exits with code 2.
    """
