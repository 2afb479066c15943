"""Classes are abstract or final, nothing implemented is overridden, and editors find each verb."""

from __future__ import annotations

import ast
import inspect
import sys
from abc import ABC
from functools import cached_property
from pathlib import Path
from typing import Any

import jedi
import pytest

import bo_stream
from bo_stream.models.base import StreamingGP
from bo_stream.models.botorch_hooks import BoTorchHooks
from bo_stream.models.inducing.osgpr import InducingModel
from bo_stream.models.inference import Inference, InferenceOption
from bo_stream.models.outcomes.base import Outcomes
from bo_stream.models.quadruply_stochastic.qsgp import QuadruplyStochasticModel
from bo_stream.models.wiski.grid_model import GridModel

FOLDER = Path(inspect.getfile(StreamingGP)).parent
PUBLIC = [getattr(bo_stream, name) for name in bo_stream.__all__]
MODELS = sorted(
    (each for each in PUBLIC if isinstance(each, type) and issubclass(each, StreamingGP)),
    key=lambda model: model.__name__,
)
MODELS = [model for model in MODELS if model is not StreamingGP]
OWNED = {"_memory", "_inference", "_cache", "_outcomes", "_latest"}
METHODS = (property, cached_property, classmethod, staticmethod)


def below(kind: type) -> set[type]:
    """All subclasses of the package that are imported."""
    found = {each for each in kind.__subclasses__() if each.__module__.startswith("bo_stream.")}
    return found.union(*map(below, found))


def test_there_are_ten_models_or_more() -> None:
    assert len(MODELS) >= 10


def ours(kind: type) -> list[type]:
    """Classes of the package that a class is or inherits from, nearest first."""
    return [each for each in kind.__mro__ if each.__module__.startswith("bo_stream.")]


def methods(kind: type) -> dict[str, Any]:
    """Functions that a class itself defines, those of properties and of class methods included."""
    own = {}
    for name, value in vars(kind).items():
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if inspect.isfunction(function) or isinstance(value, METHODS):
            own[name] = function
    return own


def is_abstract(kind: type) -> bool:
    return ABC in kind.__bases__ or kind is StreamingGP


def test_classes_are_abstract_or_final() -> None:
    """Between the models and ``StreamingGP`` are abstract classes, and below a model is nothing."""
    for kind in below(StreamingGP) | set(MODELS):
        assert is_abstract(kind) or not below(kind), kind
        assert is_abstract(kind) or kind in MODELS, kind
    abstract = {kind for kind in below(StreamingGP) if is_abstract(kind)}
    assert abstract == {GridModel, InducingModel, QuadruplyStochasticModel}
    assert [kind for kind in ours(StreamingGP) if kind is not StreamingGP] == [BoTorchHooks]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_no_implemented_method_is_overridden(model: type[StreamingGP]) -> None:
    seen: dict[str, Any] = {}
    for kind in ours(model):
        for name, function in methods(kind).items():
            implemented = not getattr(function, "__isabstractmethod__", False)
            assert name in ("__init__",) or not (name in seen and implemented), (kind, name)
            seen[name] = function


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_method_is_written_in_its_class(model: type[StreamingGP]) -> None:
    """Help, tracebacks and profiles then name the class; two classes do not share a function."""
    for kind in ours(model):
        for name, function in methods(kind).items():
            written = inspect.unwrap(function)
            if inspect.isfunction(written):
                assert written.__qualname__ == f"{kind.__name__}.{name}", (kind, name)
                assert written.__module__ == kind.__module__, (kind, name)


VERBS = (
    "clear", "condition_on_observations", "fantasize", "forget", "log_marginal_likelihood",
    "log_predictive", "merge", "noise_level", "posterior", "predictive", "process", "retract",
    "save", "subset_output", "update", "with_known_points",
)  # fmt: skip
"""Public verbs of all models."""


def test_an_editor_reaches_the_definition_and_its_docstring() -> None:
    """As jedi does, on which most editors stand: no second jump by name."""
    lines = ["from bo_stream.models.wiski.wiski import WISKI", *(f"WISKI.{verb}" for verb in VERBS)]
    script = jedi.Script("\n".join(lines))
    for line, verb in enumerate(VERBS, start=2):
        (place,) = script.goto(line, len("WISKI.") + 1, follow_imports=True)
        assert place.module_path == Path(inspect.getfile(StreamingGP)), verb
        assert place.get_line_code().strip().startswith(f"def {verb}("), verb
        assert place.docstring(raw=True) == inspect.getdoc(getattr(StreamingGP, verb)), verb


def test_an_editor_knows_the_type_of_what_a_verb_returns() -> None:
    lines = (
        "from bo_stream.models.wiski.wiski import WISKI",
        "def look(model: WISKI, X, Y):",
        "    after = model.update(X, Y).forget(0.9)",
        "    after",
    )
    (place,) = jedi.Script("\n".join(lines)).infer(4, 6)
    assert (
        place.name == "StreamingGP"
    )  # completion goes on: jedi loses which one through a decorator


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
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    later = {name: assigned(node) for node in functions if (name := node.name) != "__init__"}
    options = {name for name, value in vars(model).items() if isinstance(value, InferenceOption)}
    assert {name: fields for name, fields in later.items() if fields - OWNED - options} == {}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_file_opens_with_its_model(model: type[StreamingGP]) -> None:
    """Before it are imports and constants only; it is a model, or the abstract class of some."""
    tree = ast.parse(Path(inspect.getfile(model)).read_text(encoding="utf-8"))
    made = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    first = getattr(sys.modules[model.__module__], made[0].name)
    assert issubclass(first, StreamingGP)
    assert first.__module__ == model.__module__


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
