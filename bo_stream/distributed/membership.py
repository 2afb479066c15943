"""The facts that replicas of a search share, and the runs that take part in it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

import torch
from torch import Tensor

from bo_stream.distributed.deltas import (
    Listing,
    Store,
    UnusableError,
    VanishedError,
    name_of,
    opened,
    sealed,
)
from bo_stream.distributed.sums import parts_of
from bo_stream.errors import UsageError
from bo_stream.loops.models import AUTO, KERNELS, MOST_ON_GRID, build_model, checked_model
from bo_stream.loops.optimization.objectives import OptimizationSettings
from bo_stream.loops.optimization.optimizer import thin
from bo_stream.models.base import StreamingGP
from bo_stream.models.last_layer.last_layer import BayesianLastLayer
from bo_stream.models.outcomes.gaussian import GaussianOutcomes
from bo_stream.models.wiski.wiski import WISKI

_QUALIFIED = (
    "Replicas exchange statistics that no hyperparameter changes. These are those of WISKI on the "
    "unit cube, with one to four inputs or a covar_module that is a sum of kernels over groups of "
    "them, and of BayesianLastLayer(window=0) with a network that is not learned."
)
_MOST_SPELLED = 12


@dataclass(frozen=True)
class Search:
    """The facts that decide whether statistics of replicas add up.

    Attributes:
        facts: Name to plain value: the bounds, the sense, and all of the model.
        digest: Digest of the facts, which is in each record of the search.
    """

    facts: Mapping[str, Any]
    digest: str

    @classmethod
    def of(cls, settings: OptimizationSettings, template: StreamingGP) -> Self:
        """List the facts of a search with the model that :func:`template_of` returned."""
        facts: dict[str, Any] = {
            "bounds": [list(pair) for pair in settings.bounds],
            "maximize": settings.maximize,
            "dtype": settings.dtype,
            "model": type(template).__name__,
        }
        if isinstance(template, WISKI):
            facts["grid_size"] = _plain(template.grid_size)
            facts |= {"max_rank": template.max_rank, "tolerance": template.tolerance}
        facts |= {name: _plain(value) for name, value in parts_of(template)}
        text = json.dumps(facts, sort_keys=True)
        return cls(facts, hashlib.sha256(text.encode()).hexdigest()[:16])


def _plain(value: object) -> Any:
    """Return a value as JSON has it; of many numbers return a digest."""
    if isinstance(value, Tensor):
        if value.numel() > _MOST_SPELLED:
            content = value.detach().cpu().contiguous().numpy().tobytes()
            return f"{tuple(value.shape)} {hashlib.sha256(content).hexdigest()[:16]}"
        value = [str(number) for number in value.detach().flatten().tolist()]
    return json.loads(json.dumps(value))


def template_of(settings: OptimizationSettings, model: StreamingGP | None) -> StreamingGP:
    """Return the model without observations that all replicas begin with.

    Args:
        settings: Settings of the search.
        model: A model of the user's own, which is copied; None: ``WISKI`` by the settings.

    Raises:
        UsageError: The statistics of the model depend on hyperparameters, or on the order in which
            observations come; or it is not one of an outcome over the unit cube without
            observations.
    """
    if model is not None:
        fault = _fault(settings, model)
        if fault is not None:
            raise UsageError(
                f"This {type(model).__name__} cannot be a replica's: {fault}. {_QUALIFIED}"
            )
        return deepcopy(model).eval()
    name = "wiski" if settings.model == AUTO else settings.model
    if name != "wiski" or settings.dim > MOST_ON_GRID:
        raise UsageError(
            f"Expected settings of model wiski (or auto) and at most {MOST_ON_GRID} inputs, or a "
            f"model as an argument, got model {settings.model} and {settings.dim} inputs. "
            f"{_QUALIFIED}"
        )
    like: dict[str, Any] = {"dtype": getattr(torch, settings.dtype), "device": settings.device}
    X, Y = torch.empty(0, settings.dim, **like), torch.empty(0, 1, **like)
    kernel = KERNELS[settings.kernel](settings.dim).to(X)
    options = checked_model(name, settings.model_options)
    return build_model(name, options, X, Y, kernel, settings.grid).eval()


def _fault(settings: OptimizationSettings, model: StreamingGP) -> str | None:
    """Return why a model does not qualify or fit the settings; None if it does."""
    if type(model) not in (WISKI, BayesianLastLayer):
        return "its statistics depend on hyperparameters, or on the order of the observations"
    if not isinstance(model.outcomes, GaussianOutcomes):
        return "its likelihood is not Gaussian"
    if isinstance(model, BayesianLastLayer):
        if any(parameter.requires_grad for parameter in model.network.parameters()):
            return "its network is learned: say model.network.requires_grad_(False)"
        if model.window > 0:
            return "it holds the latest rows: build it with window=0"
    if getattr(model, "input_transform", None) is not None or getattr(model, "stem", None):
        return "it transforms inputs, by what it learns from the first: a replica scales them"
    if model.num_observations > 0:
        return f"it has {model.num_observations:g} observations: call clear(), or build it without"
    if model.num_outputs != 1 or model.batch_shape:
        return f"expected one outcome, got {model.num_outputs}, and batches {model.batch_shape}"
    if model.input_dim != settings.dim:
        return f"expected the {settings.dim} inputs of the bounds, got {model.input_dim}"
    if isinstance(model, WISKI):
        low, high = model.bounds
        if not bool((low <= 0.0).all() and (high >= 1.0).all()):
            return f"its grid does not cover the unit cube: its bounds are {model.bounds.tolist()}"
    dtype = next(model.parameters()).dtype
    if dtype != getattr(torch, settings.dtype):
        return f"expected {settings.dtype} as in the settings, got {dtype}"
    return None


# --- the runs that take part in a search ----------------------------------------------------------


class Membership:
    """A run among the runs in a store.

    A run that starts later takes over the name of an earlier one, as when a replica died and comes
    back. If the earlier run is alive, its next exchange raises an error, and the later run warns at
    the exchange in which it sees a delta that the earlier one has sent since.

    Attributes:
        run: The run.
    """

    def __init__(self, run: str, search: Search, store: Store) -> None:
        """Enter the list of runs.

        Raises:
            UsageError: The store has another search.
        """
        self.run, self._store = run, store
        listing = Listing.of(store)
        for other in listing.runs:
            about = self._about(other)
            if about and about.get("search") != search.digest:
                here, there = search.facts, about.get("facts", {})
                differences = (
                    f"{name}: here {here.get(name)!r}, there {there.get(name)!r}"
                    for name in (*here, *there)
                    if here.get(name) != there.get(name)
                )
                raise UsageError(
                    f"The store has another search, that of replica {name_of(other)!r}; they "
                    f"differ in {next(differences, 'nothing')}. Use the same settings and model, "
                    "or another store."
                )
        self._previous = [other for other in listing.runs if name_of(other) == name_of(run)]
        self._sent = {dot for dot in listing.deltas if dot[0] in self._previous}
        about = {
            "facts": dict(search.facts),
            "host": platform.node(),
            "process": os.getpid(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        key = f"replica/{run}"
        store[key] = sealed(key, search.digest, about, {})

    def _about(self, run: str) -> dict[str, Any]:
        """Read the description of a run; return nothing where it cannot be read."""
        try:
            return opened(self._store, f"replica/{run}", None)[0]
        except (VanishedError, UnusableError):
            return {}

    def position(self) -> tuple[int, int]:
        """Return the index of this replica's name among all names, and the number of names."""
        names = sorted({name_of(run) for run in (*Listing.of(self._store).runs, self.run)})
        return names.index(name_of(self.run)), len(names)

    def still_alive(self, listing: Listing) -> list[str]:
        """Return a remark on each previous run that has sent further deltas since the last call."""
        new = {dot for dot in listing.deltas if dot[0] in self._previous} - self._sent
        self._sent |= new
        return [
            f"Another replica of the name {name_of(run)!r}, {self._spelled(run)}, still sends "
            "deltas. Nothing is lost; give each replica a name of its own."
            for run in sorted({run for run, _ in new})
        ]

    def check_alone(self, listing: Listing) -> None:
        """Raise a ``UsageError`` if another replica has taken this name since."""
        name = name_of(self.run)
        for run in listing.runs:
            if name_of(run) == name and run not in (*self._previous, self.run):
                raise UsageError(
                    f"Another replica of the name {name!r} has started after this one: "
                    f"{self._spelled(run)}. Its outcomes and those of this one are all in the "
                    "store. Give each replica a name of its own."
                )

    def _spelled(self, run: str) -> str:
        about = self._about(run)
        where = (about.get(name, "?") for name in ("process", "host", "started"))
        return "process {} on {}, started {}".format(*where)


# --- hyperparameters and the standardisation of outcomes -----------------------------------------


def set_from(model: StreamingGP, arrays: Mapping[str, Tensor]) -> None:
    """Set a model's hyperparameters and standardisation, and compute again what depends on them.

    Args:
        model: The model.
        arrays: Values by name, as of its ``state_dict``.

    Raises:
        ValueError: The arrays are of another model, or not finite; the model does not change.
    """
    own = model.state_dict()
    if own.keys() != arrays.keys():
        names = sorted(own.keys() ^ arrays.keys())
        raise ValueError(f"expected the hyperparameters of the model, but {', '.join(names)}")
    for name, value in own.items():
        given = arrays[name]
        if given.shape != value.shape or given.dtype != value.dtype:
            raise ValueError(
                f"expected {name} of shape {tuple(value.shape)} and {value.dtype}, got "
                f"{tuple(given.shape)} and {given.dtype}"
            )
    for name, _ in model.named_parameters():
        if not bool(arrays[name].isfinite().all()):
            raise ValueError(f"{name} is not finite")
    model.load_state_dict(dict(arrays))
    thin(model)
