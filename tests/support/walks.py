"""How far a reader walks who follows one call through the package: files, switches, depth."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import bo_stream
from bo_stream.linalg import row_product

PACKAGE = str(Path(bo_stream.__file__).parent)

OPERATION = row_product.__code__
"""What stands for ``@`` and calls nothing of the package: nobody opens it to follow a call."""


@dataclass(frozen=True)
class Walk:
    """The functions of the package that a call runs through.

    Attributes:
        functions: How many there are.
        files: How many files they are in.
        switches: Calls from one of these files to another.
        depth: Most of them that are under way at a time.
    """

    functions: int
    files: int
    switches: int
    depth: int


def walk(call: Callable[[], object]) -> Walk:
    """Follow a call. Comprehensions, lambdas and products count as part of where they stand."""
    codes: set[object] = set()
    switches, depth, deepest = 0, 0, 0
    stack: list[str] = []

    def follow(frame: FrameType, event: str, _: object) -> None:
        nonlocal switches, depth, deepest
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or code.co_name.startswith("<"):
            return
        if code is OPERATION:
            return
        if event == "call":
            switches += bool(stack) and stack[-1] != code.co_filename
            stack.append(code.co_filename)
            codes.add(code)
            deepest = max(deepest, len(stack))
        elif event == "return" and stack:
            stack.pop()

    former = sys.getprofile()
    sys.setprofile(follow)
    try:
        call()
    finally:
        sys.setprofile(former)
    files = {code.co_filename for code in codes}
    return Walk(len(codes), len(files), switches, deepest)
