"""What all replicas of a search have in common: the box, and the model that they begin with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from bo_stream.distributed.likeness import parts_of
from bo_stream.errors import UsageError
from bo_stream.loops.models import AUTO, KERNELS, MOST_ON_GRID, build_model, checked_model
from bo_stream.loops.optimization.settings import OptimizationSettings
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
    """The facts that decide what statistics mean.

    Attributes:
        facts: Name to plain value: the bounds, the sense, and all of the model.
    """

    facts: Mapping[str, Any]

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
        return cls(facts | {name: _plain(value) for name, value in parts_of(template)})

    @property
    def digest(self) -> str:
        """Digest of the facts, by which a record says to which search it belongs."""
        text = json.dumps(self.facts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def difference(self, facts: Mapping[str, Any]) -> str:
        """Name the first fact in which another search differs."""
        for name in (*self.facts, *facts):
            mine, theirs = self.facts.get(name), facts.get(name)
            if mine != theirs:
                return f"{name}: here {mine!r}, there {theirs!r}"
        return "nothing"


def _plain(value: object) -> Any:
    """Return numbers as lists, which JSON keeps as they are, and many of them as a digest."""
    if isinstance(value, Tensor):
        if value.numel() > _MOST_SPELLED:
            content = value.detach().cpu().contiguous().numpy().tobytes()
            return f"{tuple(value.shape)} {hashlib.sha256(content).hexdigest()[:16]}"
        value = [str(number) for number in value.detach().flatten().tolist()]
    return json.loads(json.dumps(value))


def template_of(settings: OptimizationSettings, model: StreamingGP | None) -> StreamingGP:
    """Return the model without observations that all replicas begin with.

    Args:
        settings: Of the search.
        model: A model of one's own, which is copied; None: ``WISKI`` as the settings say.

    Raises:
        UsageError: The statistics of the model depend on hyperparameters, or on the order in which
            observations come; or it is not one of an outcome over the unit cube without
            observations.
    """
    if model is None:
        return _on_grid(settings)
    fault = _fault(settings, model)
    if fault is not None:
        raise UsageError(
            f"This {type(model).__name__} cannot be a replica's: {fault}. {_QUALIFIED}"
        )
    return deepcopy(model).eval()


def _on_grid(settings: OptimizationSettings) -> StreamingGP:
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
    """Say why a model does not qualify; None if it does."""
    if type(model) not in (WISKI, BayesianLastLayer):
        return "its statistics depend on hyperparameters, or on the order of the observations"
    if not isinstance(model._units, GaussianOutcomes):
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
    return _misfit(settings, model)


def _misfit(settings: OptimizationSettings, model: StreamingGP) -> str | None:
    """Say why a model does not fit the settings; None if it does."""
    if model.num_outputs != 1 or model.batch_shape:
        return f"expected one outcome, got {model.num_outputs}, and batches {model.batch_shape}"
    if model._input_dim != settings.dim:
        return f"expected the {settings.dim} inputs of the bounds, got {model._input_dim}"
    if isinstance(model, WISKI):
        low, high = model.bounds
        if not bool((low <= 0.0).all() and (high >= 1.0).all()):
            return f"its grid does not cover the unit cube: its bounds are {model.bounds.tolist()}"
    dtype = next(model.parameters()).dtype
    if dtype != getattr(torch, settings.dtype):
        return f"expected {settings.dtype} as in the settings, got {dtype}"
    return None
