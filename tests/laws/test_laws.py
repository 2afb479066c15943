"""Every model obeys every law: the product law x case x setting."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest

import bo_stream.models
from bo_stream.models.base import StreamingGP
from tests.laws.cases import CASES
from tests.laws.product import PRODUCT
from tests.laws.registry import Law, Stream

pytestmark = pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")


def marks(law: Law, stream: Stream) -> list[pytest.MarkDecorator]:
    """Return the markers of a law on a stream: its factors, and the family of its model."""
    factors = (law.__name__, stream.case.name, str(stream.setting))
    return [pytest.mark.matrix(*factors), getattr(pytest.mark, stream.case.family)]


@pytest.mark.parametrize(
    ("law", "stream"),
    [
        pytest.param(law, stream, id=f"{law.__name__}-{stream}", marks=marks(law, stream))
        for law, stream in PRODUCT
    ],
)
def test_law(law: Law, stream: Stream) -> None:
    law(stream)


def models() -> set[type[StreamingGP]]:
    """All models of the package: the classes that nothing is derived from."""
    found = set()
    for module in pkgutil.walk_packages(bo_stream.models.__path__, "bo_stream.models."):
        for _, member in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(member, StreamingGP) and not member.__subclasses__():
                found.add(member)
    return found


def test_every_model_is_in_the_registry() -> None:
    of_each = {case.name.partition(",")[0]: case for case in CASES}
    streams = [Stream(case, case.settings[0]) for case in of_each.values()]
    registered = {type(stream.model(stream.data(3))) for stream in streams}
    assert registered == models()
    assert {kind.__name__ for kind in registered} == of_each.keys()
