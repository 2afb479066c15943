"""The one error that a user of the loops can mend."""

from __future__ import annotations


class UsageError(ValueError):
    """Data, a setting or a file that cannot be used; the message says what to do about it.

    The command line shows it as one line and exits with code 2.
    """
