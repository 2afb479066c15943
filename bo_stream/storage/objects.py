"""Models in files: tensors as arrays, and the objects around them in JSON.

The JSON describes a tree of nodes. ``null``, truth values, numbers and texts stand for themselves,
and each other node is an object with one of these keys first:

=================  =================================================================================
``tensor``         name of an array; ``view`` is [size, stride, offset] where it is not the whole
``parameter``      as ``tensor``, of a module's parameter
``object``         class; ``state`` has the attributes, ``slots`` those in slots
``list``, ``tuple``, ``set``, ``frozenset``, ``size``    items
``slice``          its start, stop and step
``dict``, ``ordered``    entries: an object if all keys are texts, otherwise pairs
``float``          a number that is not finite
``dtype``, ``device``, ``type``, ``function``    name
``method``         name, and ``of`` its object; ``static``: and ``of`` its class
``partial``        function, and its ``args`` and ``keywords``
``array``, ``number``    a tensor that was NumPy's
``same``           the ``id`` of a node before
=================  =================================================================================

Classes and functions have short names; ``names`` lists their full names, and only trusted ones are
looked up (:mod:`bo_stream.storage.trusted`). An object is made without its constructor
and given its attributes, so that nothing in a file is ever called.
"""

from __future__ import annotations

import copyreg
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from bo_stream.storage.archive import (
    archive_bytes,
    atomic_write,
    one_line,
    read_archive,
    read_archive_bytes,
)
from bo_stream.storage.trusted import (
    Trusted,
    UntrustedError,
    check_trusted,
    method_of,
    name_of,
    present_fields,
    resolve_all,
)

T = TypeVar("T")
Node = Any

_OBJECTS = "objects.json"
_DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
}  # fmt: skip
_NEW = getattr(copyreg, "__newobj__")  # noqa: B009  # what mypy does not know
_CHILDREN = ("_parameters", "_buffers", "_modules")
"""Attributes with the parts of modules: tensors are named as in a ``state_dict``."""


def write_model(path: str | Path, model: object, about: Mapping[str, Any]) -> None:
    """Write a model, with further entries of the header.

    Raises:
        OSError: The file cannot be written; an old one stays.
        ValueError: The model has a value that a file cannot have.
    """
    content = model_bytes(model, about)
    with atomic_write(path) as file:
        file.write(content)


def model_bytes(model: object, about: Mapping[str, Any]) -> bytes:
    """Return the bytes of the file that :func:`write_model` would write, with its ValueError."""
    writer = _Writer()
    document = {"model": writer.node(model, ""), "names": writer.names}
    content = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    writer.arrays[_OBJECTS] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return archive_bytes({"class": type(model).__name__, **about}, writer.arrays)


def read_model(
    path: str | Path,
    kind: type[T],
    map_location: str | torch.device | None,
    trusted: Sequence[Trusted] = (),
) -> T:
    """Read a model that :func:`write_model` wrote; nothing in the file is called.

    Its tensors are on the device ``map_location``, or on those that they were on if that is None.
    The file may also name the caller's own classes and functions ``trusted``.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It is of another format, version or class, is damaged, or names a
            class or function that is not trusted; this machine lacks the device; or
            ``trusted`` is no list of classes and functions.
    """
    check_trusted(trusted)
    if map_location is not None and (reason := _why_missing(map_location)):
        raise ValueError(
            "Expected map_location to be a device of this machine, such as 'cpu', got "
            f"{str(map_location)!r}: {reason}."
        )
    about, arrays = read_archive(Path(path))
    if about.get("class") != kind.__name__:
        raise ValueError(f"{path} holds a {about.get('class')}, expected a {kind.__name__}.")
    return _built(path, arrays, kind, map_location, trusted)


def read_model_bytes(
    content: bytes, name: str, kind: type[T], trusted: Sequence[Trusted] = ()
) -> T:
    """Read a model from the bytes of :func:`model_bytes`; nothing in them is called.

    Args:
        content: The bytes.
        name: Name of the content, for messages.
        kind: Class of the model, or a base class of it.
        trusted: The caller's own classes and functions, as in :func:`read_model`.

    Raises:
        ValueError: They are of another format, version or class, damaged, or name a class or
            function that is not trusted; this machine lacks the device that they were on; or
            ``trusted`` is no list of classes and functions.
    """
    check_trusted(trusted)
    _, arrays = read_archive_bytes(content, name)
    return _built(name, arrays, kind, None, trusted)


def _built(
    path: str | Path,
    arrays: dict[str, Tensor],
    kind: type[T],
    map_location: str | torch.device | None,
    trusted: Sequence[Trusted],
) -> T:
    """Build the model that the arrays of a file, or of bytes with a name, describe."""
    try:
        document = json.loads(arrays.pop(_OBJECTS).numpy().tobytes())
        names = resolve_all(document["names"], trusted)
        model = _Reader(arrays, names, map_location, trusted).value(document["model"])
    except (UntrustedError, MissingDeviceError) as error:
        raise ValueError(f"{path} {error}") from error
    except Exception as error:  # whatever is wrong with the tree, the file is at fault
        raise ValueError(
            f"{path} cannot be built by this version of bo_stream, torch, GPyTorch and BoTorch: "
            f"{one_line(error)}."
        ) from error
    if not isinstance(model, kind):
        raise ValueError(f"{path} holds a {type(model).__name__}, expected a {kind.__name__}.")
    return model


# --- writing -----------------------------------------------------------------------------------


class _Writer:
    """Describes values as nodes; collects storages of tensors as arrays, by name."""

    def __init__(self) -> None:
        self.arrays = {_OBJECTS: torch.empty(0)}  # its name is taken
        self.names: dict[str, str] = {}  # full names of classes and functions, by those in nodes
        self._short: dict[str, str] = {}
        self._nodes: dict[int, tuple[object, Node, str]] = {}  # the object, lest its id is reused
        self._ids: set[str] = set()
        self._storages: dict[tuple[int, torch.dtype], str] = {}  # names of arrays
        self._memory: set[int] = set()  # addresses of arrays; numbers of two dtypes may share one

    def node(self, value: Any, path: str) -> Node:
        """Describe a value, to which attributes lead along a path.

        Raises:
            ValueError: A file cannot have it.
        """
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if id(value) in self._nodes:
            _, node, first = self._nodes[id(value)]
            if "id" not in node:
                node["id"] = first if first not in self._ids else f"{first} {len(self._ids)}"
                self._ids.add(node["id"])
            return {"same": node["id"]}
        if kind in _ENCODERS:
            return _ENCODERS[kind](self, value, path)
        if isinstance(value, type):
            return {"type": self._name(value, path)}
        if isinstance(value, np.generic):
            return {"number": self.node(torch.from_numpy(np.asarray(value)), path)}
        return self._object(value, path)

    def _kept(self, value: object, node: Node, path: str) -> Node:
        self._nodes[id(value)] = value, node, path
        return node

    def _items(self, values: Iterable[Any], path: str) -> list[Node]:
        return [self.node(each, f"{path}.{number}") for number, each in enumerate(values)]

    def _list(self, value: list[Any], path: str) -> Node:
        node = self._kept(value, {"list": []}, path)
        node["list"] += self._items(value, path)
        return node

    def _dict(self, value: dict[Any, Any], path: str) -> Node:
        tag = "dict" if type(value) is dict else "ordered"
        node = self._kept(value, {tag: None}, path)
        if all(type(key) is str for key in value):
            node[tag] = self._entries(value, path)
        else:
            node[tag] = [
                [self.node(key, path), self.node(each, f"{path}.{key}")]
                for key, each in value.items()
            ]
        return node

    def _entries(self, value: Mapping[str, Any], path: str) -> dict[str, Node]:
        prefix = f"{path}." if path else ""
        return {
            key: self.node(each, path if key in _CHILDREN else prefix + key)
            for key, each in value.items()
        }

    def _object(self, value: Any, path: str) -> Node:
        kind = type(value)
        try:
            made, given, state, *items = (*value.__reduce_ex__(2), None, None)[:5]
        except TypeError as error:  # as of locks and generators
            raise _unkept(value, path) from error
        if made is not _NEW or given != (kind,) or any(each for each in items):
            raise _unkept(value, path)
        node = self._kept(value, {"object": self._name(kind, path)}, path)
        state, slots = state if isinstance(state, tuple) else (state, None)
        if isinstance(value, torch.nn.Module):
            state = {
                name: each
                for name, each in state.items()
                if name not in _FRESH
                or type(each) is not type(_FRESH[name])
                or each != _FRESH[name]
            }
        node["state"] = self._entries(state or {}, path)
        if slots:
            node["slots"] = self._entries(slots, path)
        return node

    def _name(self, value: Any, path: str) -> str:
        full = name_of(value)
        if full is None:
            raise _unkept(value, path)
        if full not in self._short:
            short = full.rpartition(".")[2]
            short = short if short not in self.names else f"{short} {len(self.names)}"
            self._short[full], self.names[short] = short, full
        return self._short[full]

    def _function(self, value: Any, path: str) -> Node:
        qualname = getattr(value, "__qualname__", "")
        owner, _, name = qualname.rpartition(".")
        kind = getattr(value, "__globals__", {}).get(owner)
        attribute = vars(kind).get(name) if isinstance(kind, type) else None
        if isinstance(attribute, staticmethod) and attribute.__func__ is value:
            return {"static": name, "of": self._name(kind, path)}
        return {"function": self._name(value, path)}

    def _method(self, value: MethodType, path: str) -> Node:
        if isinstance(value.__self__, type):
            raise _unkept(value, path)
        return {"method": value.__func__.__name__, "of": self.node(value.__self__, path)}

    def _partial(self, value: partial[Any], path: str) -> Node:
        args, keywords = self._items(value.args, path), self._entries(value.keywords, path)
        return {"partial": self.node(value.func, path), "args": args, "keywords": keywords}

    def _tensor(self, value: Tensor, path: str) -> Node:
        if value.layout is not torch.strided or value.dtype not in _DTYPES:
            raise _unkept(value, path)
        name = self._storage(value, path)
        tag = "tensor" if type(value) is Tensor else "parameter"
        node: Node = {tag: name}
        view, whole = (value.shape, value.stride(), value.storage_offset()), self.arrays[name]
        if view != (whole.shape, whole.stride(), 0):
            node["view"] = view
        if value.requires_grad != (tag == "parameter"):
            node["grad"] = value.requires_grad
        if value.device.type != "cpu":
            node["device"] = str(value.device)
        return self._kept(value, node, path)

    def _storage(self, value: Tensor, path: str) -> str:
        """Return the name of the array with the values that a tensor is a view of."""
        storage = value.untyped_storage()
        key = storage._cdata, value.dtype
        if key not in self._storages:
            count, values = storage.nbytes() // value.element_size(), value.detach()
            row_by_row = torch.empty(value.shape, device="meta").stride()
            if value.numel() != count or value.stride() != row_by_row:
                values = value.new_empty(0).detach().set_(storage, 0, (count,), (1,))
            name = path if path not in self.arrays else f"{path} {len(self.arrays)}"
            values = values.resolve_conj().cpu()
            here = values.data_ptr()
            self.arrays[name] = values.clone() if here in self._memory else values
            self._memory.add(here)
            self._storages[key] = name
            self._kept(storage, None, path)
        return self._storages[key]


_ENCODERS: dict[type, Callable[[_Writer, Any, str], Node]] = {
    Tensor: _Writer._tensor,
    torch.nn.Parameter: _Writer._tensor,
    list: _Writer._list,
    dict: _Writer._dict,
    OrderedDict: _Writer._dict,
    tuple: lambda writer, value, path: {"tuple": writer._items(value, path)},
    set: lambda writer, value, path: writer._kept(
        value, {"set": writer._items(sorted(value, key=repr), path)}, path
    ),
    frozenset: lambda writer, value, path: {
        "frozenset": writer._items(sorted(value, key=repr), path)
    },
    torch.Size: lambda writer, value, path: {"size": [*value]},
    slice: lambda writer, value, path: {
        "slice": writer._items((value.start, value.stop, value.step), path)
    },
    torch.dtype: lambda writer, value, path: {"dtype": str(value).removeprefix("torch.")},
    torch.device: lambda writer, value, path: {"device": str(value)},
    np.ndarray: lambda writer, value, path: {
        "array": writer.node(torch.from_numpy(np.array(value, order="C")), path)
    },
    FunctionType: _Writer._function,
    BuiltinFunctionType: _Writer._function,
    MethodType: _Writer._method,
    partial: _Writer._partial,
}

_FRESH = vars(torch.nn.Module())
"""Attributes of a new module of torch."""


def _unkept(value: object, path: str) -> ValueError:
    kind = type(value).__name__
    name = getattr(value, "__qualname__", "")
    return ValueError(
        f"Expected a model of tensors, plain values and objects of importable classes, got at "
        f"{path or 'the model itself'} a {kind}{f' {name}' if name else ''}, which a file cannot "
        "keep."
    )


# --- reading -----------------------------------------------------------------------------------


class MissingDeviceError(Exception):
    """A file has tensors of a device that this machine lacks."""


def _why_missing(device: str | torch.device) -> str | None:
    """Return why this machine has no such device; None if it has it."""
    try:
        torch.empty(0, device=device)
    except Exception as error:  # its class depends on the kind of device
        return one_line(error)
    return None


class _Reader:
    """Builds the values that nodes describe, from arrays that are removed as they are read."""

    def __init__(
        self,
        arrays: dict[str, Tensor],
        names: Mapping[str, Trusted],
        map_location: str | torch.device | None,
        trusted: Sequence[Trusted],
    ) -> None:
        self._arrays, self._names, self._trusted = arrays, names, trusted
        self._device = map_location
        self._known: dict[str, Any] = {}
        self._storages: dict[tuple[str, str], Tensor] = {}

    def value(self, node: Node) -> Any:
        """Build the value that a node describes."""
        if not isinstance(node, dict):
            if isinstance(node, list):
                raise ValueError("a list where a node should be")
            return node
        tag = next(iter(node))
        if tag not in _DECODERS:
            raise ValueError(f"a node of an unknown kind, {tag[:80]!r}")
        made = _DECODERS[tag](self, node)
        return self._known.setdefault(node["id"], made) if "id" in node else made

    def _keep(self, node: Node, value: T) -> T:
        """Make a value known before its parts are read, which may refer to it."""
        if "id" in node:
            self._known[node["id"]] = value
        return value

    def _items(self, nodes: Iterable[Node]) -> list[Any]:
        return [self.value(each) for each in nodes]

    def _list(self, node: Node) -> list[Any]:
        made: list[Any] = self._keep(node, [])
        made += self._items(node["list"])
        return made

    def _set(self, node: Node) -> set[Any]:
        made: set[Any] = self._keep(node, set())
        made |= {*self._items(node["set"])}
        return made

    def _dict(self, node: Node, tag: str, made: dict[Any, Any]) -> dict[Any, Any]:
        self._keep(node, made)
        if isinstance(node[tag], dict):
            for key, each in node[tag].items():
                made[key] = self.value(each)
        else:
            for key, each in node[tag]:
                made[self.value(key)] = self.value(each)
        return made

    def _named(self, name: str, kind: type | tuple[type, ...]) -> Any:
        result = self._names[name]
        if not isinstance(result, kind):
            raise ValueError(f"{name} is a {type(result).__name__}")
        return result

    def _object(self, node: Node) -> Any:
        """Make an object without its constructor, and give it its attributes."""
        kind: Any = self._named(node["object"], type)
        made = self._keep(node, object.__new__(kind))
        state = {name: self.value(each) for name, each in node["state"].items()}
        state = present_fields(kind, state)
        if isinstance(made, torch.nn.Module):
            state |= {k: v for k, v in vars(torch.nn.Module()).items() if k not in state}
        elif is_dataclass(made):
            needed = {each.name for each in fields(made) if each.default is MISSING}
            if missing := sorted(needed - state.keys()):
                raise ValueError(f"its {kind.__name__} has no {', '.join(missing)}")
        if hasattr(kind, "__setstate__"):
            made.__setstate__(state)
        else:
            vars(made).update(state)
        for name, each in node.get("slots", {}).items():
            object.__setattr__(made, name, self.value(each))
        return made

    def _partial(self, node: Node) -> partial[Any]:
        keywords = {name: self.value(each) for name, each in node["keywords"].items()}
        return partial(self.value(node["partial"]), *self._items(node["args"]), **keywords)

    def _tensor(self, node: Node) -> Tensor:
        values = self._view(node, "tensor")
        return values.requires_grad_() if node.get("grad") else values

    def _view(self, node: Node, tag: str) -> Tensor:
        """Build a tensor on a storage, which others may share."""
        name, device = node[tag], node.get("device", "cpu")
        if (name, device) not in self._storages:
            on = device if self._device is None else self._device
            if _why_missing(on) is not None:
                raise MissingDeviceError(
                    f"was on {on}, which this machine lacks: load it with map_location='cpu', or "
                    "move the model to the CPU before it is saved."
                )
            self._storages[name, device] = self._arrays.pop(name).to(on)
        whole = self._storages[name, device]
        size, stride, offset = node.get("view", (whole.shape, whole.stride(), 0))
        whole.as_strided(size, stride, offset)  # raises where a view is beyond its storage
        return whole.new_empty(0).set_(whole.untyped_storage(), offset, size, stride)


_DECODERS: dict[str, Callable[[_Reader, Node], Any]] = {
    "tensor": _Reader._tensor,
    "parameter": lambda reader, node: torch.nn.Parameter(
        reader._view(node, "parameter"), requires_grad=node.get("grad", True)
    ),
    "object": _Reader._object,
    "list": _Reader._list,
    "tuple": lambda reader, node: tuple(reader._items(node["tuple"])),
    "set": _Reader._set,
    "frozenset": lambda reader, node: frozenset(reader._items(node["frozenset"])),
    "size": lambda reader, node: torch.Size(node["size"]),
    "slice": lambda reader, node: slice(*reader._items(node["slice"])),
    "dict": lambda reader, node: reader._dict(node, "dict", {}),
    "ordered": lambda reader, node: reader._dict(node, "ordered", OrderedDict()),
    "float": lambda reader, node: float(node["float"]),
    "dtype": lambda reader, node: _dtype(node["dtype"]),
    "device": lambda reader, node: torch.device(node["device"]),
    "type": lambda reader, node: reader._named(node["type"], type),
    "function": lambda reader, node: reader._named(
        node["function"], (FunctionType, BuiltinFunctionType)
    ),
    "method": lambda reader, node: method_of(
        reader.value(node["of"]), node["method"], reader._trusted
    ),
    "static": lambda reader, node: method_of(
        reader._named(node["of"], type), node["static"], reader._trusted
    ),
    "partial": _Reader._partial,
    "array": lambda reader, node: reader.value(node["array"]).numpy(),
    "number": lambda reader, node: reader.value(node["number"]).numpy()[()],
    "same": lambda reader, node: reader._known[node["same"]],
}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name[:80]!r} is no dtype")
    return found
