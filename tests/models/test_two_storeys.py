"""Every model is one class directly below ``StreamingGP``; what differs is held, not inherited."""

from __future__ import annotations

import ast
import inspect
from functools import cached_property
from pathlib import Path

import pytest

import bo_stream
from bo_stream.models.base import StreamingGP
from bo_stream.models.outcomes.base import Outcomes
from bo_stream.models.prior import Inference, InferenceOption

FOLDER = Path(inspect.getfile(StreamingGP)).parent
PUBLIC = [getattr(bo_stream, name) for name in bo_stream.__all__]
MODELS = sorted(
    (each for each in PUBLIC if isinstance(each, type) and issubclass(each, StreamingGP)),
    key=lambda model: model.__name__,
)
MODELS = [model for model in MODELS if model is not StreamingGP]
OWNED = {"_memory", "_inference", "_cache", "_units", "_latest"}


def below(kind: type) -> set[type]:
    """All subclasses of the package that are imported."""
    found = {each for each in kind.__subclasses__() if each.__module__.startswith("bo_stream.")}
    return found.union(*map(below, found))


def test_there_are_ten_models_or_more() -> None:
    assert len(MODELS) >= 10


def test_models_are_directly_below_the_shell_and_nothing_is_below_them() -> None:
    assert below(StreamingGP) == set(MODELS)
    assert {model.__name__: model.__bases__ for model in MODELS} == {
        model.__name__: (StreamingGP,) for model in MODELS
    }


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_no_implemented_method_is_overridden(model: type[StreamingGP]) -> None:
    methods = (property, cached_property, classmethod, staticmethod)
    own = {
        name
        for name, value in vars(model).items()
        if inspect.isfunction(value) or isinstance(value, methods)
    }
    assert own & vars(StreamingGP).keys() == set()


def assigned(function: ast.FunctionDef) -> set[str]:
    """Attributes of ``self`` that a method sets."""
    targets: list[ast.expr] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets.append(node.target)
    parts = [part for target in targets for part in ast.walk(target)]
    return {
        part.attr
        for part in parts
        if isinstance(part, ast.Attribute)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_only_what_a_model_owns_is_set_after_construction(model: type[StreamingGP]) -> None:
    (tree,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(tree, ast.ClassDef)
    methods = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    later = {name: assigned(node) for node in methods if (name := node.name) != "__init__"}
    options = {name for name, value in vars(model).items() if isinstance(value, InferenceOption)}
    assert {name: fields for name, fields in later.items() if fields - OWNED - options} == {}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_file_opens_with_its_model(model: type[StreamingGP]) -> None:
    """Before it are imports and constants only; it is the class that a user imports."""
    tree = ast.parse(Path(inspect.getfile(model)).read_text(encoding="utf-8"))
    made = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    assert made[0].name == model.__name__


def test_what_is_held_is_stateless_or_a_value() -> None:
    """An inference and the outcomes are frozen: a call that raises has changed nothing."""
    for kind in (Inference, Outcomes):
        for each in below(kind):
            assert inspect.isabstract(each) or each.__dataclass_params__.frozen, each  # type: ignore[attr-defined]


def test_the_folder_of_models_has_few_entries_and_says_what_each_is() -> None:
    entries = {path.name for path in FOLDER.iterdir() if path.suffix == ".py" or path.is_dir()}
    entries -= {"__pycache__", "__init__.py"}
    assert len(entries) <= 18
    said = (FOLDER / "__init__.py").read_text(encoding="utf-8")
    names = {name.removesuffix(".py") for name in entries}
    assert {name for name in names if f"\n- ``{name}``: " not in said} == set()
