"""A pretend accelerator: a torch device whose tensors lie in host memory.

It stands in for a GPU where there is none, to find code that mixes devices. The device is torch's
``PrivateUse1`` backend under the name ``pretend``. Every operation runs the CPU's kernel on the
memory itself, so that results are those of the CPU to the bit. What a GPU refuses is refused: an
operation on tensors of two devices, NumPy's view of a tensor, a generator of the CPU. What makes
the host wait for a GPU is counted in ``SYNCS``, by the name of its cause.

It does not see what depends on ``tensor.is_cuda``, nondeterministic sums, other algorithms of
CUDA's libraries (but for ``lstsq``), memory limits or times.

It is made of private functions of torch, so it is for the release ``TESTED_TORCH`` only, and it
stays for the life of the process: :func:`install` it in one that does nothing else.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_flatten, tree_unflatten

NAME = "pretend"
TESTED_TORCH = "2.13"

SYNCS: Counter[str] = Counter()
"""How often the host would have waited for the device, by cause."""

_DLPACK_CPU, _DLPACK_EXTENSION = 1, 12
_DEVICE_TYPE_OFFSET = 8  # bytes from the start of a DLTensor: after its data pointer

_SIZED_BY_VALUES = frozenset(
    {
        *("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
        *("repeat_interleave", "histc", "_linalg_eigh", "_linalg_svd", "linalg_eig"),
    }
)
"""Operations that wait: the result's size depends on values, or the solver looks at a status."""

_INDEXING = frozenset({"index", "index_put_", "_index_put_impl_", "_unsafe_index"})
"""Operations that take indices of the CPU, which are uploaded."""


def why_missing() -> str | None:
    """Why there can be no pretend device in this process, or None if there can."""
    if not torch.__version__.startswith(f"{TESTED_TORCH}."):
        return f"the pretend device is tested with torch {TESTED_TORCH}, not {torch.__version__}"
    try:
        from torch.utils.backend_registration import (  # noqa: F401
            _setup_privateuseone_for_python_backend,
        )
    except ImportError:
        return "this torch has no backends in Python"
    return None


def accelerator() -> torch.device:
    """Return the device of CUDA if there is one, else the pretend one, which is installed."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    install()
    return torch.device(NAME)


def install() -> None:
    """Register the device, once in a process.

    Raises:
        RuntimeError: This torch is not the one that it is made for.
    """
    if _libraries:
        return
    if reason := why_missing():
        raise RuntimeError(reason)
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
    fallback, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallback.fallback(_computed_on_the_host, "PrivateUse1")
    for name, rule in (_RULES | {name: _view(op) for name, op in _VIEWS.items()}).items():
        aten.impl(name, rule, "PrivateUse1")
    _libraries.extend((fallback, aten))
    _teach_storages()
    torch.Generator = _Generator  # type: ignore[assignment, misc]


_libraries: list[torch.library.Library] = []
"""They take their registrations back when they are collected, so they are kept."""


# --- tensors ------------------------------------------------------------------------------------

_address = ctypes.pythonapi.PyCapsule_GetPointer
_address.restype, _address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _relabelled(tensor: Tensor, device_type: int) -> Tensor:
    """Another tensor of the same memory, whose device is another: by its DLPack capsule."""
    capsule = torch._C._to_dlpack(tensor)
    label = _address(capsule, b"dltensor") + _DEVICE_TYPE_OFFSET
    ctypes.c_int32.from_address(label).value = device_type
    return torch._C._from_dlpack(capsule)


def _lifted(tensor: Tensor) -> Tensor:
    return _relabelled(tensor, _DLPACK_EXTENSION)


def _lowered(tensor: Tensor) -> Tensor:
    return _relabelled(tensor, _DLPACK_CPU)


def _is_pretend(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


# --- operations with a rule of their own --------------------------------------------------------


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    memory_format = memory_format or torch.contiguous_format
    return _lifted(torch.empty(size, dtype=dtype, memory_format=memory_format, device="cpu"))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return _lifted(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copied(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """``target.copy_(source)`` where one of them is pretended.

    Between devices it waits, but for memory that is sent without blocking: a stream takes it.
    """
    sent = non_blocking and _is_pretend(target)
    if source.numel() > 0 and not sent and not (_is_pretend(source) and _is_pretend(target)):
        SYNCS["copy"] += 1
    low = [_lowered(t) if _is_pretend(t) else t for t in (source, target)]
    low[1].copy_(low[0])
    return target


def _item(tensor: Tensor) -> Any:
    SYNCS["item"] += 1
    return _lowered(tensor).item()


def _equal(first: Tensor, second: Tensor) -> bool:
    SYNCS["equal"] += first.shape == second.shape  # else no value is looked at
    _refuse_mixture("aten::equal", (first, second))
    return torch.equal(_lowered(first), _lowered(second))


def _resized(tensor: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
    if tuple(tensor.shape) != tuple(size):
        tensor.data = _lifted(torch.empty(size, dtype=tensor.dtype, device="cpu"))
    return tensor


def _set_to_storage(tensor: Tensor, storage: Any) -> Tensor:
    size = storage.nbytes() // tensor.element_size()
    return torch.ops.aten.set_.source_Storage_storage_offset(tensor, storage, 0, [size], [1])


_RULES: dict[str, Callable[..., Any]] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "_copy_from": _copied,
    "_local_scalar_dense": _item,
    "equal": _equal,
    "resize_": _resized,
    "set_.source_Storage": _set_to_storage,
}

_VIEWS: dict[str, OpOverload] = {
    "as_strided": torch.ops.aten.as_strided.default,
    "view": torch.ops.aten.view.default,
    "unfold": torch.ops.aten.unfold.default,
    "_reshape_alias": torch.ops.aten._reshape_alias.default,
    "set_.source_Tensor": torch.ops.aten.set_.source_Tensor,
    "set_.source_Storage_storage_offset": torch.ops.aten.set_.source_Storage_storage_offset,
}
"""Operations that touch shapes only: the CPU's kernel does them to a tensor of any device."""


def _view(operation: OpOverload) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return lambda *args, **kwargs: operation.redispatch(keys, *args, **kwargs)


# --- all other operations -----------------------------------------------------------------------


def _computed_on_the_host(operation: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """An operation's results, by the CPU's kernel, after the checks and counts of a GPU."""
    flat, structure = tree_flatten((args, kwargs))
    _refuse_mixture(operation.name(), _operands(operation, args, flat))
    _refuse_foreign_generators(operation.name(), flat)
    if operation.overloadpacket.__name__ in _SIZED_BY_VALUES:
        SYNCS[operation.overloadpacket.__name__] += 1
    written = _written(operation, args, kwargs)
    low = [_as_on_host(x, resizable=id(x) in written) for x in flat]
    host_args, host_kwargs = tree_unflatten(low, structure)
    if operation.overloadpacket.__name__ == "linalg_lstsq":
        host_kwargs["driver"] = "gels"  # CUDA has no other, which needs full rank
    result = operation(*_with_wrapped_numbers(operation, host_args), **host_kwargs)
    originals = {id(y): x for x, y in zip(flat, low, strict=True) if id(x) in written}
    for host, original in ((y, originals[id(y)]) for y in low if id(y) in originals):
        if host.shape != original.shape:
            original.data = _lifted(host)
    if not operation._schema.returns:
        return None
    results, structure = tree_flatten(result)
    return tree_unflatten([_as_on_device(t, originals) for t in results], structure)


def _operands(operation: OpOverload, args: tuple[Any, ...], flat: list[Any]) -> list[Tensor]:
    """The tensors that must be on one device: all but the indices of an indexing operation."""
    tensors = [x for x in flat if isinstance(x, Tensor)]
    if operation.overloadpacket.__name__ not in _INDEXING or not _is_pretend(args[0]):
        return tensors
    indices = [i for i in args[1] if i is not None]
    if operation.overloadpacket.__name__.endswith("_"):  # to read, torch copies them itself
        SYNCS["index of the host"] += sum(not _is_pretend(i) and i.numel() > 0 for i in indices)
    return [t for t in tensors if not any(t is i for i in indices)]


def _refuse_mixture(name: str, tensors: Iterable[Tensor]) -> None:
    """Raise if tensors are on two devices; numbers, tensors of no dimension, may be anywhere."""
    wide = [t for t in tensors if t.ndim > 0 or _is_pretend(t)]
    if any(map(_is_pretend, wide)) and not all(map(_is_pretend, wide)):
        devices = ", ".join(f"{tuple(t.shape)} on {t.device}" for t in wide)
        raise RuntimeError(f"Expected all tensors on one device in {name}, got {devices}.")


def _refuse_foreign_generators(name: str, values: list[Any]) -> None:
    for value in values:
        if isinstance(value, _HostGenerator) and value._cdata not in _generators:
            raise RuntimeError(f"Expected a generator of device {NAME} in {name}, got a CPU's.")


def _written(operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Identities of the arguments that the operation writes to."""
    found = set()
    for place, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found |= {id(v) for v in tree_flatten(value)[0] if _is_pretend(v)}
    return found


def _as_on_host(value: Any, resizable: bool) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if not _is_pretend(value):
        return value
    if resizable and value.shape == (0,):
        return torch.empty(0, dtype=value.dtype)  # an ``out`` that the operation may make longer
    return _lowered(value)


def _as_on_device(value: Any, originals: dict[int, Tensor]) -> Any:
    if not isinstance(value, Tensor) or _is_pretend(value):
        return value
    return originals[id(value)] if id(value) in originals else _lifted(value)


def _with_wrapped_numbers(operation: OpOverload, args: Sequence[Any]) -> list[Any]:
    """Numbers where the schema has a tensor, which torch had wrapped, wrapped again."""
    is_double = any(isinstance(a, Tensor) and a.dtype == torch.float64 for a in args)
    return [
        torch.tensor(value, dtype=torch.float64 if is_double else None)
        if isinstance(value, int | float) and str(argument.type) == "Tensor"
        else value
        for value, argument in zip(args, operation._schema.arguments, strict=False)
    ]


# --- what torch asks of a backend ---------------------------------------------------------------


class _Backend:
    """The module ``torch.pretend``: one device, with the CPU's random numbers."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """The generator is the CPU's, which is seeded beside it."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def device(self, device: Any) -> AbstractContextManager[None]:
        return nullcontext()


_HostGenerator = torch.Generator
_generators: dict[int, torch.Generator] = {}
"""Those that were made for the pretend device, by identity."""


class _GeneratorType(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _HostGenerator)


class _Generator(metaclass=_GeneratorType):
    """``torch.Generator``, which makes generators of the pretend device too."""

    def __new__(cls, device: Any = "cpu") -> Any:
        if torch.device(device).type != NAME:
            return _HostGenerator(device)
        generator = _HostGenerator()
        _generators[generator._cdata] = generator
        return generator


def _teach_storages() -> None:
    """Let storages be copied to the device and back, as saving, loading and copying do it."""
    storage = torch.UntypedStorage
    clone, cpu, to = storage.clone, storage.cpu, storage.to

    def content(s: Any) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=s.device).set_(s)

    def moved(s: Any, device: Any = None, non_blocking: bool = False) -> Any:
        if s.device.type == NAME:
            return s
        return _lifted(content(s).clone()).untyped_storage()

    def cloned(s: Any) -> Any:
        return content(s).clone().untyped_storage() if s.device.type == NAME else clone(s)

    def fetched(s: Any) -> Any:
        return content(s).cpu().untyped_storage() if s.device.type == NAME else cpu(s)

    def sent(s: Any, *, device: Any, non_blocking: bool = False) -> Any:
        return moved(s) if torch.device(device).type == NAME else to(s, device=device)

    storage.clone, storage.cpu, storage.to = cloned, fetched, sent
    setattr(storage, NAME, moved)
