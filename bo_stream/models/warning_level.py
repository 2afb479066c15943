"""Where a warning should point: at the user's line, not at a library's."""

from __future__ import annotations

import sys

_LIBRARIES = ("bo_stream", "torch", "gpytorch", "botorch")


def users_stack_level() -> int:
    """``stacklevel`` for a ``warnings.warn`` beside this call, of the first frame not a library's.

    A model is put into evaluation mode by gpytorch's modules and by BoTorch's fits as often as by a
    user.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_librarys(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_librarys(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES
