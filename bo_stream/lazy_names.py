"""Names of a package that are imported when they are first asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]], along: Sequence[str] = ()
) -> Callable[[str], Any]:
    """A package's ``__getattr__`` (PEP 562).

    Importing the package costs nothing then; a name is imported with all that it needs at its first
    use, and is an attribute like any other from then on.

    Args:
        package: Its ``__name__``.
        homes: Module, below the package, to the names that come from it; a module without names is
            an attribute itself.
        along: Modules below the package that are imported with any of the names, for they register
            with another package what these names can do.
    """
    places = {name: module for module, names in homes.items() for name in names}

    def imported(name: str) -> Any:
        if name in homes:
            return importlib.import_module(f"{package}.{name}")
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        for module in along:
            importlib.import_module(f"{package}.{module}")
        value = getattr(importlib.import_module(f"{package}.{places[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return imported
