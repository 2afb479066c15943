"""Functions of the user's own, named ``package.module:function``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bo_stream.errors import UsageError


def import_function(name: str, what: str) -> Callable[..., Any]:
    """Import ``package.module:function``; modules in the working directory are found too.

    A module that cannot be imported, or has no such function, is a ``UsageError``; ``what`` names
    the function's purpose in it.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"Expected {what} as package.module:function, got {name!r}.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises
        raise UsageError(
            f"{what} {name!r}: module {module_name!r} cannot be imported "
            f"({type(error).__name__}: {error}). Run from its folder, or install it."
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        found = "nothing" if function is None else f"a {type(function).__name__}"
        raise UsageError(
            f"{what} {name!r}: expected a function named {attribute!r} in {module_name!r}, found "
            f"{found}."
        )
    return function
