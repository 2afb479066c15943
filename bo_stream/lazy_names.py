"""Lazy import of a package's public names (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]], along: Sequence[str] = ()
) -> Callable[[str], Any]:
    """Make a package's ``__getattr__``, which imports a name's module at its first use.

    Args:
        package: Its ``__name__``.
        homes: Module, below the package, to the names that come from it; a module without names is
            an attribute itself.
        along: Modules below the package that are imported with any name: they register what the
            names can do with another package.
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
