"""Read-only attributes of a class that functions of the model compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

T = TypeVar("T")


class Attribute(property, Generic[T]):
    """A read-only attribute of several classes that a function of the model computes."""

    if TYPE_CHECKING:

        def __init__(self, fget: Callable[[Any], T]) -> None: ...

        def __get__(self, instance: Any, owner: type | None = None, /) -> T: ...  # type: ignore[override]
