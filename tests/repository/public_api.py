"""Every public path, with its signature and defaults, as text that can be compared.

    python -m tests.repository.public_api

writes ``public_api.txt`` beside this module. A line that is gone, or has another signature, breaks
somebody's program: :mod:`tests.repository.test_public_api` compares, and names the lines. Where
that is meant, write the file again, and say so in the changelog.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SNAPSHOT = Path(__file__).with_name("public_api.txt")
ROOT = Path(__file__).resolve().parents[2] / "bo_stream"


def lines() -> list[str]:
    """List what each package or module that has an ``__all__`` exports, sorted."""
    return sorted({line for package in _packages() for line in _of_package(package)})


def _packages() -> Iterator[str]:
    for path in ROOT.rglob("*.py"):
        if "__all__ = " in path.read_text(encoding="utf-8"):
            parts = path.relative_to(ROOT.parent).with_suffix("").parts
            yield ".".join(parts).removesuffix(".__init__")


def _of_package(package: str) -> Iterator[str]:
    module = importlib.import_module(package)
    for name in module.__all__:
        yield from _of_value(f"{package}.{name}", getattr(module, name))


def _of_value(path: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        yield f"{path}{_signature(value)}"
        for name, member in inspect.getmembers_static(value):
            ours = _owner(value, name).startswith("bo_stream")
            if ours and not name.startswith("_"):
                yield from _of_member(f"{path}.{name}", member)
    elif callable(value):
        yield f"{path}{_signature(value)}"
    else:
        yield f"{path}: {type(value).__name__}"


def _of_member(path: str, member: Any) -> Iterator[str]:
    bound = not isinstance(member, staticmethod)
    member = getattr(member, "__func__", member)
    if inspect.isfunction(member):
        yield f"{path}{_signature(member, skip=int(bound))}"
    elif not inspect.isclass(member):
        yield f"{path}: attribute"


def _owner(kind: type, name: str) -> str:
    """Name the module of the class that defines an attribute; of an enumeration's own, nothing."""
    owners = (base.__module__ for base in kind.__mro__ if name in vars(base))
    return next(owners, "")


def _signature(value: Any, skip: int = 0) -> str:
    """Return parameters with their defaults, without annotations and without the first ones."""
    try:
        parameters = list(inspect.signature(value).parameters.values())[skip:]
    except (TypeError, ValueError):
        return "(...)"
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    text = re.sub(r" at 0x[0-9a-f]+", "", str(inspect.Signature(bare)))
    return re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(lines()) + "\n")
