"""Ids of sites in tables that went through a spreadsheet, which takes them for numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

MOST_COMPARED = 5000
"""Number of sites up to which an unknown id is compared with all ids, letter by letter."""

CLOSE = 0.75
"""Least share of letters that an id has in common with one that may be meant."""

_NUMBER = re.compile(r"\+?([0-9]+)(?:\.([0-9]*))?(?:[eE]([+-]?[0-9]{1,4}))?")


def spreadsheet_number(site: str) -> str | None:
    """Return what is left of an id where a spreadsheet takes it for a number, None if it does not.

    As in ``062``, ``62`` and ``62.0``, which are all ``62e0``: digits without zeros at either end,
    and the power of ten.
    """
    found = _NUMBER.fullmatch(site)
    if found is None:
        return None
    whole, part, power = found.group(1), found.group(2) or "", int(found.group(3) or 0)
    digits = (whole + part).lstrip("0")
    short = digits.rstrip("0")
    return f"{short or 0}e{power - len(part) + len(digits) - len(short) if short else 0}"


def as_listed(ids: Iterable[str], listed: Iterable[str]) -> dict[str, list[str]]:
    """Find the listed ids that a spreadsheet may have turned into those of a table.

    Args:
        ids: Of the table.
        listed: Of the list.

    Returns:
        By each id of the table that is one number with others: the listed ones, in their order.
    """
    by_number: dict[str, list[str]] = {}
    for site in listed:
        number = spreadsheet_number(site)
        if number is not None:
            by_number.setdefault(number, []).append(site)
    numbers = {site: spreadsheet_number(site) for site in ids}
    return {s: by_number[n] for s, n in numbers.items() if n is not None and n in by_number}


def meant(site: str, listed: Sequence[str]) -> str | None:
    """Return the listed id that an unknown one may stand for, None if there is none like it.

    It has the same letters and numbers but for case, signs and leading zeros; or the same numbers
    and most of the letters, in the same order. Numbers that differ are other sites' numbers.
    """
    bare = _bare(site)
    same = next((other for other in listed if bare and _bare(other) == bare), None)
    if same is not None or len(listed) > MOST_COMPARED:
        return same
    digits = _digits(site)
    alike = [other for other in listed if _digits(other) == digits]
    return next(iter(get_close_matches(site, alike, n=1, cutoff=CLOSE)), None)


def _digits(site: str) -> str:
    return re.sub(r"\D+", "", site).lstrip("0")


def _bare(site: str) -> str:
    """Reduce an id to small letters and numbers without leading zeros."""
    return re.sub(r"(?<!\d)0+(?=\d)", "", re.sub(r"[\W_]+", "", site.casefold()))
