"""Training of one model on many processes by torch.distributed, each with its own rows."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from itertools import count
from typing import Any, NoReturn

import torch
from botorch.exceptions.errors import UnsupportedError
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from bo_stream.collective import ALONE, Collective
from bo_stream.diagnostics.approximation import BY_STEPS
from bo_stream.errors import UsageError
from bo_stream.models.base import StreamingGP, keeps_tensors
from bo_stream.models.inducing.sites import SiteInference
from bo_stream.models.stochastic.replay import HoldsRows, StreamReplay
from bo_stream.models.stochastic.training import ShardedReplay, Training
from bo_stream.storage.archive import package_version

TIMEOUT = 300.0
"""Seconds after which a silent process counts as lost, by default."""

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PLAIN = (bool, int, float, str, torch.dtype)
_SHOWN = 8

_stores: dict[tuple[str, ...], tuple[Store, Iterator[int]]] = {}
"""Where processes find each other, and the numbers of their groups, by environment.

Kept until the process ends: without torchrun the first process serves it to the others.
"""


class LostProcessError(RuntimeError):
    """An error for a process that takes no part in the training any more."""


@contextmanager
def data_parallel(
    model: StreamingGP, timeout: float = TIMEOUT, backend: str | None = None
) -> Iterator[Processes]:
    """Train a model on all processes that torchrun has started, each with its own rows.

    All processes build the same model and enter the block. In it an update takes each process's own
    rows, and a step is the step that one process with all rows would take with the same seed, up to
    rounding: each process computes its rows' part of the bound and of the statistics, and the parts
    are summed. So after every verb all have the same posterior. The first rows of the model are
    divided among the processes. After the block a process has its own rows only, which stand for
    all. Without torchrun there is one process.

    Models are :class:`~bo_stream.QSGP`, :class:`~bo_stream.QSRVM`, :class:`~bo_stream.DecoupledGP`
    and :class:`~bo_stream.OSVGP`. Verbs that read all observations (``fit``, ``fit_collapsed``,
    ``optimize_posterior``, ``elbo``) and ``clear`` must be called by all processes, in the same
    order; ``save`` only after the block. Posteriors are each process's own business.

    Args:
        model: Model with the same class, options, hyperparameters, seed and observations on all
            processes.
        timeout: Seconds to wait for another process; then it counts as lost. A group that exists
            already has its own timeout.
        backend: Backend of torch.distributed; None: ``nccl`` for a model on a GPU, else ``gloo``.

    Yields:
        The processes, with ``rank``, ``size``, ``update`` and ``fit``.

    Raises:
        LostProcessError: A process did not come, was killed, or is silent.
        UnsupportedError: A model that cannot be trained so, with what to use instead.
        UsageError: The processes' models or versions differ.

    Example:
        >>> with data_parallel(model, timeout=60) as processes:
        ...     processes.update(X, Y)
        ...     processes.fit(steps=1000)
    """
    _check_trainable(model)
    device = next(model.parameters()).device
    with _collective(device, timeout, backend) as collective:
        _check_same(_described(model), collective)
        _join(model, collective)
        try:
            yield Processes(model, collective)
            collective.sum(torch.zeros(1))  # nobody leaves before all have their last sum
        finally:
            _leave(model)


class Processes:
    """Processes that train a model together; see :func:`data_parallel`.

    Attributes:
        model: This process's copy.
        rank: Number of this process, from 0.
        size: Number of processes.
    """

    def __init__(self, model: StreamingGP, collective: Collective) -> None:
        """Store a model whose sums over rows are sums over all processes."""
        self.model, self._collective = model, collective
        self.rank, self.size = collective.rank, collective.size

    def update(self, X: Tensor, Y: Tensor) -> None:
        """Add rows of each process, in the order of ranks; see the model's ``update``.

        Args:
            X: Inputs of this process, ``... x n x d``; n may be 0 in some processes.
            Y: ``... x n x m``.

        Raises:
            ModelFittingError: A step diverged, in all processes.
            UsageError: Another process cannot add its rows; then no process has changed its model,
                as with errors of ``update`` in this process.
        """
        problem: Exception | None = None
        try:
            self.model._check_not_conditioned("update")
            Y, _, _ = self.model.outcomes.checked(self.model, X, Y, None, "update")
            self.model._observations(X, Y, None, 1.0)
        except Exception as error:
            problem = error
        reasons = _texts("" if problem is None else str(problem) or repr(problem), self._collective)
        if problem is not None:
            raise problem
        for rank, reason in enumerate(reasons):
            if reason:
                raise UsageError(f"Process {rank} cannot take its rows: {reason}")
        if self._collective.total(X.shape[-2], X.device) > 0:
            _observe(self.model, X, Y)

    def fit(
        self, steps: int | None = None, seconds: float | None = None, progress: bool = True
    ) -> Training:
        """Take steps together, as the model's ``fit``; the first process draws the bar.

        Raises:
            UnsupportedError: The model learns in ``update`` only.
        """
        if not isinstance(self.model, BY_STEPS):
            raise UnsupportedError(
                f"A {type(self.model).__name__} learns in update (hyper_steps): it has no fit."
            )
        return self.model.fit(steps, seconds, progress=progress and self.rank == 0)


class ProcessGroup(Collective):
    """The default process group of torch.distributed."""

    def __init__(self, device: torch.device) -> None:
        """Use the existing group; NCCL sums on the model's device, others on the CPU."""
        super().__init__(torch.distributed.get_rank(), torch.distributed.get_world_size())
        is_nccl = torch.distributed.get_backend() == "nccl"
        self._device = device if is_nccl else torch.device("cpu")

    def sum(self, value: Tensor) -> Tensor:
        """Sum a tensor over the processes.

        Raises:
            LostProcessError: One of them is gone or silent.
            UnsupportedError: The value is to be differentiated.
        """
        if value.requires_grad:
            raise UnsupportedError(
                "A sum over processes has no gradient: inside data_parallel hyperparameters are "
                "learned by fit and update. Call fit_gpytorch_mll after the block."
            )
        total = value.detach().to(self._device).clone(memory_format=torch.contiguous_format)
        try:
            if total.numel() > 0:
                torch.distributed.all_reduce(total)
        except RuntimeError as error:
            raise LostProcessError(
                f"Process {self.rank} of {self.size} waits for one that has ended or is silent; "
                f"the model is as it was at its last check. ({_reason(error)})"
            ) from error
        return total.to(value.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessGroup:
        """Return the group itself: there is one."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "A model inside data_parallel cannot be saved, for it has processes: save it after the "
            "block, in one of them."
        )


@keeps_tensors
@torch.no_grad()
def _observe(model: StreamingGP, X: Tensor, Y: Tensor) -> None:
    with model._undone_on_error():
        model._observe(X, Y, None, 1.0)


# --- the group ------------------------------------------------------------------------------------


@contextmanager
def _collective(device: torch.device, timeout: float, backend: str | None) -> Iterator[Collective]:
    """Use the default process group, or begin and end one by torchrun's environment."""
    if not timeout > 0.0:
        raise UsageError(f"Expected timeout in seconds to be positive, got {timeout}.")
    if torch.distributed.is_initialized():
        yield ProcessGroup(device)
        return
    missing = [name for name in _ENVIRONMENT if name not in os.environ]
    if missing == [*_ENVIRONMENT]:
        yield ALONE
        return
    if missing:
        raise UsageError(
            f"Expected the environment that torchrun makes, got one without {', '.join(missing)}. "
            "Run: torchrun --nproc-per-node 2 train.py"
        )
    name = backend or ("nccl" if device.type == "cuda" else "gloo")
    try:
        _begin_group(name, timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        raise LostProcessError(
            f"Expected {os.environ['WORLD_SIZE']} processes within {timeout:g} s at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {_reason(error)}"
        ) from error
    try:
        yield ProcessGroup(device)
    finally:
        torch.distributed.destroy_process_group()


def _begin_group(backend: str, timeout: timedelta) -> None:
    """Begin the default group, whose processes must not find the addresses of the one before."""
    environment = tuple(os.environ[name] for name in _ENVIRONMENT)
    if environment not in _stores:
        found, _, _ = next(rendezvous("env://", timeout=timeout))
        _stores[environment] = found, count()
    store, numbers = _stores[environment]
    store.set_timeout(timeout)
    torch.distributed.init_process_group(
        backend,
        store=PrefixStore(f"bo_stream {next(numbers)}", store),
        rank=int(environment[0]),
        world_size=int(environment[1]),
        timeout=timeout,
    )


def _reason(error: Exception) -> str:
    """Return the first sentence of an error of torch, without the line of its source."""
    line = (str(error).strip().splitlines() or [repr(error)])[0]
    return re.sub(r"^\[[^]]*\]\s*", "", line).split(". ")[0]


def _texts(text: str, collective: Collective) -> list[str]:
    """Return the text of each process."""
    own = torch.tensor(list(text.encode()), dtype=torch.int32).unsqueeze(-1)
    lengths = collective.counts(len(own), own.device)
    joined = bytes(collective.first(own).flatten().tolist())
    ends = [sum(lengths[: rank + 1]) for rank in range(collective.size)]
    return [joined[end - length : end].decode() for end, length in zip(ends, lengths, strict=True)]


# --- models that are the same ---------------------------------------------------------------------


def _check_trainable(model: StreamingGP) -> None:
    """Check that a model can be trained on many processes, alone and unconditioned."""
    model._check_not_conditioned("data_parallel")
    memory, name = model.memory, type(model).__name__
    if isinstance(model.inference, SiteInference):
        if model.inference.window > 0:
            raise UnsupportedError(
                f"Expected an {name} that holds no outcomes, got one with window="
                f"{model.inference.window}: build it with window=0."
            )
        return
    if not isinstance(memory, HoldsRows):
        raise UnsupportedError(
            f"Expected a QSGP, QSRVM, DecoupledGP or OSVGP, got a {name}. Where statistics of "
            "observations add, as in WISKI, bo_stream.distributed.ingest puts them together."
        )
    if not isinstance(memory.replay, StreamReplay) or memory.replay.capacity is not None:
        raise UnsupportedError(
            f"Expected a {name} that holds all its rows, got one of a Dataset or with max_rows: "
            "build it from tensors without max_rows, and give each process fewer rows."
        )


def _check_same(described: Mapping[str, str], collective: Collective) -> None:
    """Check that all processes have the versions and the model that the first describes."""
    first, *others = (json.loads(text) for text in _texts(json.dumps(described), collective))
    for rank, other in enumerate(others, 1):
        for name in (*first, *(name for name in other if name not in first)):
            if first.get(name) != other.get(name):
                raise UsageError(
                    f"Process {rank} has {name} {other.get(name, 'none')}, process 0 has "
                    f"{first.get(name, 'none')}. Expected the same model on all processes: build "
                    "it with the same options, seed and first observations, and then let each "
                    "update it with its own rows inside the block."
                )


def _described(model: StreamingGP) -> dict[str, str]:
    """Describe all that steps depend on by name: small values as they are, others by a digest."""
    kind = type(model)
    about = {
        "bo_stream": package_version("bo-stream"),
        "torch": torch.__version__,
        "class": f"{kind.__module__}.{kind.__name__}",
        "shape": f"{tuple(model._output_batch)} of {model.input_dim} inputs",
    }
    about |= _parts("option", model.inference)
    about |= {name: _formatted(value) for name, value in model.state_dict().items()}
    return about | _parts("memory", model.memory)


def _parts(name: str, value: Any) -> dict[str, str]:
    """Describe the tensors and plain values that a value is made of, each by its name."""
    if isinstance(value, Tensor):
        return {name: _formatted(value)}
    if isinstance(value, StreamReplay):
        rows = value.at(torch.arange(value.held))
        return _parts(name, {"count": value.count, "X": rows.X, "Y": rows.Y})
    if value is None or isinstance(value, _PLAIN):
        return {name: repr(value)}
    inner: Mapping[Any, Any]
    if isinstance(value, dict):
        inner = value
    elif isinstance(value, tuple | list):
        inner = dict(enumerate(value))
    elif isinstance(value, torch.nn.Module):
        inner = value.state_dict()
    elif is_dataclass(value):
        inner = {field.name: getattr(value, field.name) for field in fields(value)}
    else:  # without attributes that are derived from the others
        own = getattr(value, "__dict__", {})
        inner = {key: part for key, part in own.items() if not key.startswith("_")}
    parts = {name: type(value).__name__}
    for key, part in inner.items():
        parts |= _parts(f"{name}.{key}", part)
    return parts


def _formatted(value: Tensor) -> str:
    if value.numel() <= _SHOWN:
        return f"{value.tolist()}"
    bits = value.detach().cpu().contiguous()
    content = f"{bits.dtype} {tuple(bits.shape)}".encode() + bits.numpy().tobytes()
    return f"of digest {hashlib.sha256(content).hexdigest()[:16]}"


def _join(model: StreamingGP, collective: Collective) -> None:
    """Let a model's sums over rows be sums over all processes."""
    memory, inference = model.memory, model.inference
    if isinstance(inference, SiteInference):
        model._inference = replace(inference, collective=collective)
    else:
        shards = ShardedReplay.shared_out(memory.replay, collective)
        model._set_memory(replace(memory, replay=shards))


def _leave(model: StreamingGP) -> None:
    """Undo :func:`_join`; the posterior stays."""
    memory, inference = model.memory, model.inference
    if isinstance(inference, SiteInference):
        model._inference = replace(inference, collective=ALONE)
    else:
        model._set_memory(replace(memory, replay=memory.replay.left_alone))
