"""Replicas of a search: without a driver, each chooses points and exchanges statistics."""

from __future__ import annotations

import hashlib
import json
import warnings
import zlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from bo_stream.distributed.deltas import (
    BestPoints,
    Delta,
    Listing,
    Store,
    UnusableError,
    VanishedError,
    VectorClock,
    count_of,
    counted_key,
    name_of,
    new_run,
    opened,
    sealed,
)
from bo_stream.distributed.gathering import Gathering, Membership, Outbox, compact
from bo_stream.distributed.sums import parts_of
from bo_stream.errors import UsageError, check_whole
from bo_stream.loops.models import (
    AUTO,
    KERNELS,
    MOST_ON_GRID,
    build_model,
    checked_model,
    refit_is_due,
)
from bo_stream.loops.optimization.acquisition import Situation, best_points
from bo_stream.loops.optimization.optimizer import learn, thin
from bo_stream.loops.optimization.trials import FEWEST, LARGEST, OptimizationSettings
from bo_stream.loops.run import predict_mean
from bo_stream.models.base import StreamingGP
from bo_stream.models.last_layer.last_layer import BayesianLastLayer
from bo_stream.models.outcomes.gaussian import GaussianOutcomes
from bo_stream.models.wiski.wiski import WISKI
from bo_stream.warnings import users_stack_level

CHOICES = ("TS", "random")
"""Acquisitions that do not depend on the points that others evaluate at the time."""

_ATTEMPTS = 10
"""How often a store is listed again because it was compacted while it was read."""


class ReplicaWarning(UserWarning):
    """Something in a store cannot be used, or two replicas have one name."""


@dataclass(frozen=True)
class BestPoint:
    """The best point so far.

    Attributes:
        X: The point with the best posterior mean among the points of the ``SHORTLIST`` best
            outcomes of all replicas, as far as they were exchanged.
        mean: Posterior mean at the point.
    """

    X: tuple[float, ...]
    mean: float


@dataclass(frozen=True)
class Exchanged:
    """The result of an exchange.

    Attributes:
        sent: Number of observations that were sent.
        deltas: Number of deltas that were read, without those in a snapshot.
        restarted: Whether the model began again from a snapshot.
        learned: Whether hyperparameters were learned here.
        adopted: Whether other hyperparameters than before are in use.
        removed: Number of deltas that were put into a snapshot and removed.
        bytes_sent: Number of bytes that were written.
        bytes_taken: Number of bytes that were read.
        remarks: Records that were left out, with the reasons; each is also warned of once, by a
            ``ReplicaWarning``.
    """

    sent: int
    deltas: int
    restarted: bool
    learned: bool
    adopted: bool
    removed: int
    bytes_sent: int
    bytes_taken: int
    remarks: tuple[str, ...]

    @property
    def changed(self) -> bool:
        """Whether anything was sent, taken, learned or adopted."""
        return self.sent + self.deltas > 0 or self.restarted or self.learned or self.adopted


class Replica:
    """One of many workers that optimise a function together, without a driver.

    A replica has a model of all observations that it knows. It asks for points by Thompson
    sampling: each maximises a function drawn from the posterior, so that replicas which know the
    same choose different points. It sends its observations as *deltas*, each once, and reads deltas
    of others from the store, each once, in any order. Hyperparameters and the standardisation of
    outcomes are exchanged as one record; of several records the one from the most observations
    counts, of equally many the one of the last name. Replicas with the same deltas and the same
    record have the same posterior but for rounding.

    Nothing is locked and nobody is waited for. A replica that dies loses the observations that it
    has not sent; another one of its name goes on with all that is in the store.

    - An exchange: a listing of the store, the new deltas (few observations as themselves, many as
      statistics), and a new posterior, as after an update.
    - Exact: the posterior of all deltas, in any order; see the model's class.
    - Models: statistics must not depend on hyperparameters: ``WISKI`` on the unit cube (the
      default, one to four inputs), or ``BayesianLastLayer`` with a network that is not learned.

    Example:
        >>> settings = OptimizationSettings(bounds=((0.0, 1.0), (0.0, 1.0)), acquisition="TS")
        >>> replica = Replica(settings, FolderStore("shared/search"), name="worker-7")
        >>> while not enough(replica.best()):
        ...     X = replica.ask()
        ...     replica.tell(X, [measure(x) for x in X])
        ...     replica.exchange()

    Attributes:
        settings: Settings of the search; ``acquisition`` is ``TS`` or ``random``, and no
            acquisition looks at pending points.
        store: Store in which deltas are exchanged.
        name: Name of the replica.
        run: Name of this run of the replica.
        model: Model over the unit cube, of outcomes whose large values are good.
    """

    def __init__(
        self,
        settings: OptimizationSettings,
        store: Store,
        name: str,
        model: StreamingGP | None = None,
        compact_above: int = 1000,
    ) -> None:
        """Join the search in a store, or begin one, and read all observations there.

        Args:
            settings: The same as in the other replicas; seeds may differ.
            store: ``FolderStore``, ``MemoryStore``, or any mapping of texts to bytes.
            name: Name of this replica alone; letters, digits, dots, dashes and underscores.
            model: Without observations, the same in all replicas, for more than four inputs; it is
                copied. Default: ``WISKI``, by the settings.
            compact_above: Number of deltas in the store above which an exchange puts them into a
                snapshot.

        Raises:
            UsageError: The settings need a driver, the model does not qualify, or the store has
                another search; the message names the first difference.
        """
        if settings.acquisition not in CHOICES:
            raise UsageError(
                f"Expected acquisition of a replica to be one of {', '.join(CHOICES)}, got "
                f"{settings.acquisition!r}: it cannot know which points others evaluate."
            )
        check_whole("compact_above", compact_above, 1)
        self.settings, self.store, self.name, self.run = settings, store, name, new_run(name)
        # each run of the name has other points: none asks again for what an earlier one evaluated
        earlier = sum(name_of(run) == name for run in Listing.of(store).runs)
        self._seed, self._asked = f"{settings.seed} {name}{' again' * earlier}", 0
        self._template = template_of(settings, model)
        facts, self._compact_above = _facts_of(settings, self._template), compact_above
        text = json.dumps(facts, sort_keys=True)  # its digest is in each record of the search
        self._search = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._members = Membership(self.run, self._search, facts, store)
        self._gathering = Gathering(store, self._search, self._template)
        self._outbox = Outbox(self.run, self._search, self._template)
        self.model = deepcopy(self._template)
        self._best = self._observations([], []).best()
        self._clock, self._warned = VectorClock(), set[str]()
        self._learned, self._unsent = "", dict[str, bytes]()  # records of hyperparameters
        self.exchange()

    # --- points -------------------------------------------------------------------------------

    @property
    def observations(self) -> int:
        """Number of observations in the model."""
        return round(self.model.num_observations)

    def ask(self, q: int | None = None) -> list[tuple[float, ...]]:
        """Choose q points (default: as in the settings) within the bounds.

        While fewer than ``initial`` observations are known the points are of a Sobol sequence,
        which each run of a replica scrambles in its own way; then each maximises a function drawn
        from the posterior. They depend on the seed of the settings, the name, the numbers of its
        earlier runs and of the points of this one, and the model, not on torch's global random
        state.
        """
        count = self.settings.q if q is None else q
        check_whole("q", count, 1)
        few = self.observations < max(self.settings.initial, FEWEST)
        is_random = few or self.settings.acquisition == "random"
        if is_random:
            seed = zlib.crc32(self._seed.encode()) % 2**31
            engine = SobolEngine(self.settings.dim, scramble=True, seed=seed)
            points = engine.fast_forward(self._asked).draw(count, dtype=torch.float64)
        else:
            seed = zlib.crc32(f"{self._seed} {self._asked}".encode()) % 2**31
            X, means = self._means()
            situation = Situation(
                self.model,
                X,
                means[0].item(),
                X_pending=None,
                beta=self.settings.beta,
                seed=seed,
                centre=float(means.mean()),
                unit=float(self.model.outcome_scale()),
            )
            points = best_points(self.settings, situation, count)
        self._asked += count
        return self.settings.from_unit_cube(points)

    def _means(self) -> tuple[Tensor, Tensor]:
        """Return the best points and their posterior means, the largest mean first."""
        means, order = predict_mean(self.model, self._best.X).sort(descending=True, stable=True)
        return self._best.X[order], means

    def best(self) -> BestPoint:
        """Return the point of the best posterior mean; without outcomes raise a ``UsageError``."""
        if len(self._best.Y) == 0:
            raise UsageError("There is no best point yet: no outcome was told.")
        X, means = self._means()
        return BestPoint(
            self.settings.from_unit_cube(X[:1])[0], self.settings.sign * float(means[0])
        )

    # --- outcomes -----------------------------------------------------------------------------

    def tell(self, X: Sequence[Sequence[float]], Y: Sequence[float]) -> None:
        """Add the outcomes of n points to the model; the next exchange sends them to others.

        Args:
            X: ``n x d``, within the bounds; points of :meth:`ask` or others.
            Y: ``n``. A point whose evaluation failed is left out.

        Raises:
            UsageError: A point is not within the bounds, or an outcome is not finite; then nothing
                is added.
        """
        observed = self._observations(X, Y)
        if observed.observations == 0:
            return
        observed.put_into(self.model, self._template)
        self._best = BestPoints.joined((self._best, observed.best()))
        self._outbox.add(observed)

    def _observations(self, X: Sequence[Sequence[float]], Y: Sequence[float]) -> Delta:
        """Check observations, and return them in the unit cube, with large outcomes good."""
        try:
            points = torch.as_tensor(X, dtype=torch.float64).reshape(len(X), self.settings.dim)
            values = torch.as_tensor(Y, dtype=torch.float64).reshape(len(X))
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"Expected X of n points of {self.settings.dim} numbers and Y of n outcomes, got "
                f"{X!r} and {Y!r}."
            ) from error
        low, high = torch.tensor(self.settings.bounds, dtype=torch.float64).T
        for point in points:
            if not bool(((low <= point) & (point <= high)).all()):
                raise UsageError(
                    f"Expected points within {self.settings.bounds}, got {point.tolist()}."
                )
        for value in values.tolist():
            if not abs(value) <= LARGEST:
                raise UsageError(
                    f"Expected finite outcomes of at most {LARGEST:g} in size, got {value}. Leave "
                    "out a point whose evaluation failed."
                )
        inside = self.settings.to_unit_cube(points.tolist())
        return Delta(inside, self.settings.sign * values.unsqueeze(-1).to(inside))

    # --- the others ---------------------------------------------------------------------------

    def exchange(self) -> Exchanged:
        """Send new observations, read further ones of others, and learn hyperparameters when due.

        Raises:
            UsageError: Another replica of this name has started after this one; the observations
                of this one are in the store. Or the store changes faster than it can be read.
            OSError: The store cannot be reached; nothing is lost, and the next exchange goes on.
        """
        self._send_learned()
        sent = bytes_sent = 0
        for dot, count, size in self._outbox.send(self.store):
            self._clock = self._clock.plus([dot])  # at once: the next one may fail
            sent, bytes_sent = sent + count, bytes_sent + size
        for _ in range(_ATTEMPTS):
            listing = Listing.of(self.store)
            try:
                gathered = self._gathering.missing(self._clock, listing)
                break
            except VanishedError as error:  # the store was compacted meanwhile
                vanished = error
        else:
            raise UsageError(
                f"Records vanish from the store faster than they can be read ({vanished}, at the "
                f"{_ATTEMPTS}th attempt). Nothing but replicas may remove what is in it."
            )
        strange = [f"{key} in the store is not a record of replicas." for key in listing.foreign]
        remarks = [*strange, *gathered.remarks, *self._members.still_alive(listing)]
        if gathered.delta is not None:
            model = self.model._shallow_copy().clear() if gathered.restarts else self.model
            gathered.delta.put_into(model, self._template)
            earlier = () if gathered.restarts else (self._best,)
            best = BestPoints.joined((*earlier, gathered.delta.best()))
            self.model, self._best = model, best
        self._clock = gathered.clock
        adopted = self._adopt(listing, remarks)
        learned = self._learn()
        for remark in remarks:
            if remark not in self._warned:
                self._warned.add(remark)
                warnings.warn(remark, ReplicaWarning, stacklevel=users_stack_level())
        self._members.check_alone(listing)
        removed = self.compact() if len(listing.deltas) > self._compact_above else 0
        return Exchanged(
            sent=sent,
            deltas=gathered.deltas,
            restarted=gathered.restarts,
            learned=learned > 0,
            adopted=adopted > 0,
            removed=removed,
            bytes_sent=bytes_sent + learned,
            bytes_taken=gathered.bytes + adopted,
            remarks=tuple(remarks),
        )

    def compact(self) -> int:
        """Put all deltas in the store into a snapshot; return the number of removed deltas.

        Any replica may compact at any time; of several that do at once one or none succeeds.
        """
        return compact(self._gathering, self.run)

    def _send_learned(self) -> None:
        while self._unsent:
            key = next(iter(self._unsent))
            self.store[key] = self._unsent[key]
            del self._unsent[key]

    def _adopt(self, listing: Listing, remarks: list[str]) -> int:
        """Set the latest hyperparameters; return the size of their record, 0 if already in use."""
        for key in reversed(listing.learned):
            if key <= self._learned:
                break
            try:
                _, arrays, size = opened(self.store, key, self._search)
                _set_from(self.model, arrays)
            except VanishedError:
                continue
            except UnusableError as error:
                remarks.append(str(error))
                continue
            except ValueError as error:
                remarks.append(f"{key} is left out: {error}.")
                continue
            self._learned = key
            return size
        return 0

    def _learn(self) -> int:
        """Learn hyperparameters when due, and send them; return the size of their record, or 0."""
        count, before = self.observations, self._learned and count_of(self._learned)
        least = max(self.settings.initial, FEWEST)
        if count < least or not refit_is_due(count, before or 0, self.settings.refit):
            return 0
        learn(self.model)
        key, state = counted_key("learned", count, self.run), self.model.state_dict()
        arrays = {name: value.detach().cpu().clone() for name, value in state.items()}
        content = sealed(key, self._search, {}, arrays)
        self._learned, self._unsent[key] = key, content
        self._send_learned()
        return len(content)


# --- the model that all replicas begin with, and the facts that they share ------------------------


_QUALIFIED = (
    "Replicas exchange statistics that no hyperparameter changes. These are those of WISKI on the "
    "unit cube, with one to four inputs or a covar_module that is a sum of kernels over groups of "
    "them, and of BayesianLastLayer(window=0) with a network that is not learned."
)
_MOST_SPELLED = 12


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


def _facts_of(settings: OptimizationSettings, template: StreamingGP) -> dict[str, Any]:
    """List the facts that decide whether statistics of replicas add up, as plain values by name.

    They are the bounds, the sense, and all of the model that :func:`template_of` returned.
    """
    facts: dict[str, Any] = {
        "bounds": [list(pair) for pair in settings.bounds],
        "maximize": settings.maximize,
        "dtype": settings.dtype,
        "model": type(template).__name__,
    }
    if isinstance(template, WISKI):
        facts["grid_size"] = _plain(template.grid_size)
        facts |= {"max_rank": template.max_rank, "tolerance": template.tolerance}
    return facts | {name: _plain(value) for name, value in parts_of(template)}


def _plain(value: object) -> Any:
    """Return a value as JSON has it; of many numbers return a digest."""
    if isinstance(value, Tensor):
        if value.numel() > _MOST_SPELLED:
            content = value.detach().cpu().contiguous().numpy().tobytes()
            return f"{tuple(value.shape)} {hashlib.sha256(content).hexdigest()[:16]}"
        value = [str(number) for number in value.detach().flatten().tolist()]
    return json.loads(json.dumps(value))


def _set_from(model: StreamingGP, arrays: Mapping[str, Tensor]) -> None:
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
