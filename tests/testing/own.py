"""The model that the page on models of one's own shows, as a module."""

from __future__ import annotations

import sys
from types import ModuleType

from tests.support.documents import ROOT, blocks

PAGE = ROOT / "docs" / "own-models.md"
CODE = blocks(PAGE)[0].code
NAME = "cosines"


def page_module() -> ModuleType:
    """The first block of the page, which a file may name as ``cosines``."""
    if NAME not in sys.modules:
        module = sys.modules[NAME] = ModuleType(NAME)
        exec(compile(CODE, PAGE.name, "exec"), module.__dict__)
    return sys.modules[NAME]
