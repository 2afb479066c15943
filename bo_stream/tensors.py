"""Values made of tensors: mapping, comparison with a state, conditions, modes of autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass, replace
from functools import cached_property, wraps
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
P = ParamSpec("P")

State = tuple[Tensor, ...]
"""Parameters and buffers of a module at some time."""


def map_tensors(value: T, rule: Callable[[Tensor], Tensor]) -> T:
    """Apply a rule to all tensors of a value: of a dataclass's fields, of a tuple or of a list.

    Values of other types stay as they are.
    """
    item: Any = value
    if isinstance(item, Tensor):
        return cast(T, rule(item))
    if isinstance(item, tuple | list):
        return cast(T, type(item)([map_tensors(part, rule) for part in item]))
    if is_dataclass(item) and not isinstance(item, type):
        changes = {f.name: map_tensors(getattr(item, f.name), rule) for f in fields(item) if f.init}
        return cast(T, replace(item, **changes))
    return value


def zip_tensors(rule: Callable[[Tensor, Tensor], Tensor], first: T, second: T) -> T:
    """Apply a rule to the tensors of two values of equal structure, as :func:`map_tensors`.

    Values of other types are taken from ``first``.
    """
    one, other = cast(Any, first), cast(Any, second)
    if isinstance(one, Tensor):
        return cast(T, rule(one, other))
    if isinstance(one, tuple | list):
        pairs = zip(one, other, strict=True)
        return cast(T, type(one)([zip_tensors(rule, a, b) for a, b in pairs]))
    if is_dataclass(one) and not isinstance(one, type):
        names = [f.name for f in fields(one) if f.init]
        changes = {n: zip_tensors(rule, getattr(one, n), getattr(other, n)) for n in names}
        return cast(T, replace(one, **changes))
    return first


def state_of(module: torch.nn.Module) -> State:
    """Copy all parameters and buffers of a module."""
    return tuple(tensor.detach().clone() for tensor in _tensors(module))


def is_in(module: torch.nn.Module, state: State) -> bool:
    """Return whether a module's parameters and buffers equal a state."""
    return is_same(_tensors(module), state)


def _tensors(module: torch.nn.Module) -> State:
    """List parameters and buffers, those of a shared module each time that it is met.

    In a fifth of the time of ``parameters()`` and ``buffers()``: every verb of a model asks.
    """
    found: list[Tensor | None] = []
    modules: list[torch.nn.Module | None] = [module]
    for each in modules:
        if each is not None:
            found += each._parameters.values()
            found += each._buffers.values()
            modules += each._modules.values()
    return tuple(tensor for tensor in found if tensor is not None)


def is_same(first: State, second: State) -> bool:
    """Return whether two states are equal in shape, device and value; on a device by one read.

    Hyperparameters are compared by value: GPyTorch sets them through ``.data``, of which version
    counters do not know.
    """
    elsewhere: list[tuple[Tensor, Tensor]] = []
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        if a.is_cpu and b.is_cpu:
            if not torch.equal(a, b):
                return False
        elif a.shape == b.shape and a.device == b.device:
            elsewhere.append((a, b))
        else:
            return False
    if any(a.dtype != b.dtype for a, b in elsewhere):
        return False
    if not elsewhere:
        return True
    with torch.no_grad():
        pairs = [(a.flatten().double(), b.flatten().double()) for a, b in elsewhere]
        one, other = map(torch.cat, zip(*pairs, strict=True))
        return none_set(one != other)


def broadcast_shapes(*shapes: Sequence[int]) -> torch.Size:
    """Compute the shape that shapes broadcast to.

    ``torch.broadcast_shapes`` takes seven times as long, and half a second when it is first called:
    it imports a library for symbols.

    Raises:
        ValueError: They do not broadcast.
    """
    return torch.Size(np.broadcast_shapes(*map(tuple, shapes)))


# --- conditions on values, for which the host waits where these are on a device ------------------


class _Expected:
    """Flags of a call that are expected not to be set, and have not been read yet."""

    def __init__(self) -> None:
        self.flags: list[Tensor] = []
        self.is_open = True

    def close(self, number: Tensor | None = None) -> tuple[bool, float]:
        """Read all flags and a number at once, and no more from now on.

        Returns:
            Whether no flag is set, and the number, or 0 without one.
        """
        flags, self.flags, self.is_open = self.flags, [], False
        if not flags:
            return True, 0.0 if number is None else float(number)
        flag = torch.cat([each.flatten() != 0 for each in flags]).any()
        if number is None:
            return not bool(flag), 0.0
        is_set, read = torch.stack([flag.double(), number.detach().double()]).tolist()
        return not is_set, read


class _UnexpectedError(Exception):
    """A flag is set that was expected not to be."""


_expected: ContextVar[_Expected | None] = ContextVar("expected", default=None)


def none_set(flags: Tensor, is_worth_a_wait: bool = True) -> bool:
    """Return whether none of some flags is set; within :func:`read_at_once` yes, to begin with.

    Not for what would end the process if it were set, as a wrong index does on a GPU.

    Args:
        flags: On any device.
        is_worth_a_wait: Whether to wait for a device for them alone, outside of
            :func:`read_at_once`; if not, none is taken to be set there.
    """
    expected = _expected.get()
    if expected is None and not (is_worth_a_wait or flags.is_cpu):
        return True
    if expected is None or not expected.is_open or flags.is_cpu:
        return not bool(flags.any())
    expected.flags.append(flags.detach())
    return True


def read_expected(number: Tensor | None = None) -> float:
    """Read what :func:`none_set` has been asked so far, and a number, if given, with it.

    From now on each flag is read at once. To be called before a tensor that exists already is
    changed in place.
    """
    expected = _expected.get()
    if expected is None or not expected.is_open:
        return 0.0 if number is None else float(number)
    none, read = expected.close(number)
    if not none:
        raise _UnexpectedError
    return read


def read_at_once(call: Callable[[], T], undo: Callable[[], None]) -> T:
    """Make a call for which the host waits once: what is usual is expected, and read at the end.

    Where something else is found, or raised after it, the call is undone and made again, each flag
    read where it is asked for. A call within another is a part of that one, as long as nothing of
    that was read.
    """
    within = _expected.get()
    if within is not None and within.is_open:
        return call()
    expected = _Expected()
    token = _expected.set(expected)
    try:
        result = call()
        read_expected()
    except Exception as error:
        if not isinstance(error, _UnexpectedError) and (
            not expected.is_open or expected.close()[0]
        ):
            raise
        undo()
    except BaseException:  # nobody knows yet what the call found
        undo()
        raise
    else:
        return result
    finally:
        _expected.reset(token)
    return call()


# --- modes of autograd ---------------------------------------------------------------------------


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Compute tensors that may be stored: autograd refuses tensors of ``torch.inference_mode``.

    Whether gradients are recorded does not change.
    """
    differentiated = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(differentiated):
        yield


def cached_for_autograd(method: Callable[[Any], T]) -> cached_property[T]:
    """Cache a property of tensors, which are computed as :func:`outside_inference_mode` does.

    Whichever mode asks first, later gradients can flow through what is computed from them.
    """

    @wraps(method)
    def computed(owner: Any) -> T:
        with outside_inference_mode():
            return method(owner)

    return cached_property(computed)


def first_derivatives_only(backward: Callable[P, T]) -> Callable[P, T]:
    """Let an autograd function's ``backward`` refuse to be differentiated again.

    ``once_differentiable`` of torch refuses only where the gradient that comes in is differentiated
    itself; elsewhere it takes the one that goes out for a constant, and second derivatives are
    wrong without a word. This one refuses ``create_graph=True``.
    """

    @wraps(backward)
    def once(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "Expected a first derivative, got create_graph=True: this gradient is in closed "
                "form and cannot be differentiated again. Take differences of gradients instead."
            )
        return backward(*args, **kwargs)

    return once
