"""Active sampling: ask for sites, tell measured values, at the same cost each time."""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
import torch
from botorch.utils.transforms import normalize
from torch import Tensor

from bo_stream.acquisition import Misclassification, PoolSelector, select_sites
from bo_stream.acquisition.feature_nipv import in_weight_space
from bo_stream.acquisition.pool import thinned
from bo_stream.errors import UsageError, as_whole, check_whole
from bo_stream.loops.models import (
    AUTO,
    EXACT,
    KERNELS,
    LEARNED,
    MOST_ON_GRID,
    RETRACTING,
    SMOOTHNESS,
    build_model,
    refit_is_due,
    retracts,
)
from bo_stream.loops.optimization.trials import LARGEST
from bo_stream.loops.run import ASKING, ModelFile, from_record, predict
from bo_stream.loops.sampling.settings import SamplingSettings, check_outcomes
from bo_stream.loops.sampling.state import (
    SamplingState,
    as_numbers,
    deviations_from_prediction,
    leave_outliers_out,
    most_outliers,
)
from bo_stream.models.auto.auto import AutoGP
from bo_stream.models.base import StreamingGP
from bo_stream.models.fitting import hyperparameters, relearn, set_hyperparameters

SOME_POINTS = 2048
"""Number of points that stand for all where each has a covariance with every candidate."""

SOME_CANDIDATES = 512
"""Number of candidates of which the expected wrong calls are computed at each choice."""

LEAST_FOR_SMOOTHNESS = 40
"""Least number of values from which the smoothness is learned: fewer hardly tell it."""

LIKELIER = 5.0
"""Nats by which the log marginal likelihood of another kernel must be larger: chance favours a
smooth one by less, and where it is a tie the rough one predicts no worse."""

UNLIKELY_UNTIL = 3
"""Factor by which observations must have grown before a kernel that was ``LIKELIER`` nats less
likely is tried again: differences grow with the number of observations."""

_COMPARED = (EXACT, "WISKI")
"""Families of models whose marginal likelihoods are comparable, for they are exact."""


class ActiveSampling:
    """Candidates to choose from, the observations so far, and a streaming model of them.

    ``ask`` chooses candidates, ``tell`` takes their measured values: late, in part, in any order,
    unasked, or again if they were wrong. Candidates that were asked for and not told are pending:
    the others are chosen as if these had been measured. What cannot be is a ``UsageError``, and
    changes nothing. For positives out of examined there is
    :class:`bo_stream.loops.survey.Survey`.

    The first ``initial`` candidates are drawn at random, by the seed. Later ones reduce the
    posterior variance most, averaged over the points: greedy qNIPV over a pool, as in the WISKI
    paper's malaria study. With goal ``exceedance`` they spare most expected wrong calls about the
    threshold at the points (:class:`bo_stream.Misclassification`), among ``SOME_CANDIDATES``: those
    of the most uncertain calls, and as many drawn.

    Model ``auto`` is exact while that is cheapest. With at most four inputs it then goes onto a
    grid, all observations at once: kernels of the distance become products over inputs, and the
    hyperparameters are learned again. Off the grid ``SOME_POINTS`` of the points, spread evenly
    over them, stand for all.

    The choices are a function of candidates, settings and observations, in their order, so that a
    state which was saved and loaded goes on to the same ones. On a grid the cost of a choice and of
    an update does not grow with the number of observations. Refits come at geometrically growing
    numbers of them, and leave outliers out of the model (:func:`leave_outliers_out`). With kernel
    ``learned`` they choose the smoothness, too.

    Attributes:
        settings: As given.
        state: Pending candidates, observations, and the model.

    Example:
        >>> sampling = ActiveSampling(wells, SamplingSettings(q=5, initial=20))
        >>> picks = sampling.ask(20)
        >>> sampling.tell(picks, [measure(wells[pick]) for pick in picks])
        >>> mean, variance = sampling.predict(map_points)
    """

    def __init__(
        self,
        candidates: Tensor,
        settings: SamplingSettings,
        points: Tensor | None = None,
        bounds: Tensor | None = None,
        state: SamplingState | None = None,
    ) -> None:
        """Begin, or go on with a state of the same candidates.

        Args:
            candidates: ``N x d``, in any units.
            settings: Of the sampling.
            points: Where the values are to be known, ``M x d``; default: at the candidates.
            bounds: Box of all inputs, ``2 x d``; default: the least that has candidates and points.
            state: Pending candidates, observations and model; default: none.

        Raises:
            UsageError: Shapes do not fit together, an input is not finite or outside the bounds,
                there are fewer candidates than ``initial``, or the settings' model cannot be built.
        """
        like = torch.empty(0, dtype=getattr(torch, settings.dtype), device=settings.device)
        candidates = _checked_inputs("candidates", candidates)
        dim = candidates.shape[-1]
        points = candidates if points is None else _checked_inputs("points", points, dim)
        both = torch.cat((candidates, points))
        box = torch.stack((both.amin(0), both.amax(0)))
        box = box if bounds is None else _checked_inputs("bounds", bounds, dim)
        if len(box) != 2 or not bool((box[0] < box[1]).all()):
            raise UsageError(
                f"Expected bounds `2 x d` of which the first are less than the second, got "
                f"{box.tolist()}. An input that is the same everywhere is to be left out."
            )
        outside = ((both < box[0]) | (both > box[1])).any(-1)
        if bool(outside.any()):
            raise UsageError(f"Expected inputs within the bounds, got {both[outside][0].tolist()}.")
        settings.check_inputs(dim)
        self.settings, self._bounds = settings, box
        self._outlier_threshold = settings.outlier_threshold(dim)
        self._X, self._points = (
            normalize(inputs, box.to(inputs)).to(like) for inputs in (candidates, points)
        )
        # Families that the model goes through, one after the other; None: as its class does.
        onto_grid = settings.model == AUTO and settings.grid is None and dim <= MOST_ON_GRID
        self._families: tuple[str | None, ...] = (EXACT, "WISKI") if onto_grid else (None,)
        self._first_kernel = settings.kernel
        if settings.kernel == LEARNED:
            self._first_kernel = SMOOTHNESS[0] if settings.learns_smoothness else "matern52"
        self.state = SamplingState() if state is None else state
        self._positions = {pick: i for i, pick in enumerate(self.state.picks)}
        self._most_exact: dict[str, int] = {}  # observations of an exact model, by kernel
        if state is not None:
            return
        if len(candidates) < settings.initial:
            raise UsageError(
                f"Expected at least {settings.initial:,} candidates, the settings' initial, got "
                f"{len(candidates):,}."
            )
        with warnings.catch_warnings():  # a model is built to see that it can be
            warnings.simplefilter("ignore")
            for family in self._families:
                self._built(self._X[:2], self._X[:2, :1], self._first_kernel, family)

    # --- verbs ------------------------------------------------------------------------------------

    def ask(self, q: int | None = None) -> list[int]:
        """Choose the next q candidates (default: as in the settings); they are pending from now on.

        Returns:
            Their row numbers among the candidates, in the order of choice.

        Raises:
            UsageError: Fewer are left.
        """
        count = self.settings.q if q is None else check_whole("q", q, 1)
        left = len(self._X) - len(self.state.picks) - len(self.state.pending)
        if count > left:
            raise UsageError(
                f"Expected q of at most the {left:,} candidates that are neither told nor pending, "
                f"got {count:,}."
            )
        told, pending = torch.tensor(self.state.picks), torch.tensor(self.state.pending)
        if self.state.model is None:
            # the next of a random order that are neither told nor pending
            generator = torch.Generator().manual_seed(self.settings.seed)
            known = {*self.state.picks, *self.state.pending}
            order = torch.randperm(len(self._X), generator=generator).tolist()
            chosen = [pick for pick in order if pick not in known][:count]
        elif self.settings.goal == "map":
            chosen = self._selector.select(count, exclude=told, pending=pending).tolist()
        else:
            criterion = Misclassification(float(self.settings.threshold or 0.0), "latent")
            free = torch.ones(len(self._X), dtype=torch.bool)
            free[told] = False
            free[pending.long()] = False
            some = torch.cat((self._uncertain(criterion, free, count), pending.long()))
            waiting = torch.arange(len(some) - len(pending), len(some))
            choice = select_sites(
                self.model, self._X[some], count, criterion, self._targets, pending=waiting
            )
            chosen = some[choice.indices.cpu()].tolist()
        self.state.pending.extend(chosen)
        return chosen

    def tell(self, picks: Sequence[int], outcomes: Sequence[float] | Tensor) -> None:
        """Take in measured values: new ones, or corrected ones in place of previous ones.

        A value that was told before changes nothing. A corrected one is put into the model, and the
        previous one taken out, exactly; the hyperparameters stay until the next refit. In place of
        an outlier it is judged as a new one is.

        Args:
            picks: Candidates, each once, asked for or not.
            outcomes: Value of each.

        Raises:
            UsageError: A candidate is not in the list or named twice, a value is no finite number
                or above 1e75 in size, the numbers of both differ, values differ by too little for
                the dtype or any model, or a value is another one and the model cannot retract.
        """
        values, state = self._checked(picks, outcomes), self.state
        new = [pick for pick in values if pick not in self._positions]
        corrected = [
            pick
            for pick, value in values.items()
            if pick in self._positions and value != state.outcomes[self._positions[pick]]
        ]
        name, dim = self.settings.model, self._X.shape[-1]
        if corrected and state.model is not None and not retracts(name, dim):
            raise UsageError(
                f"Model {name} of {dim} inputs cannot take a value out, but candidate "
                f"{corrected[0]} was told to have another one before. Models "
                f"{RETRACTING} of at most four inputs can; or begin again and tell all "
                "values."
            )
        positions = [self._positions[pick] for pick in corrected]
        in_model = [i for i in positions if i not in state.outliers]
        if state.model is not None and in_model:
            state.model.retract(*self._rows(in_model))
        for i, pick in zip(positions, corrected, strict=True):
            state.outcomes[i] = values[pick]
        self._update(in_model)
        state.outliers = [i for i in state.outliers if i not in positions]
        self._take_in([i for i in positions if i not in in_model])
        if new:
            self._add(new, [values[pick] for pick in new])

    def withdraw(self, picks: Sequence[int]) -> None:
        """Give up pending candidates; they may be asked for again.

        Raises:
            UsageError: One is not pending.
        """
        given = _positions(picks)
        strange = next((pick for pick in given if pick not in self.state.pending), None)
        if strange is not None:
            raise UsageError(f"Candidate {strange} is not pending: nothing to withdraw.")
        self.state.pending = [pick for pick in self.state.pending if pick not in given]

    # --- what is known ----------------------------------------------------------------------------

    @property
    def model(self) -> StreamingGP:
        """Model of the observations, outliers left out, for inputs in the unit cube.

        Raises:
            UsageError: Fewer than ``initial`` values were told.
        """
        if self.state.model is None:
            raise UsageError(
                f"There is no model yet: {self.settings.initial:,} values are needed, "
                f"{self.observations:,} were told."
            )
        return self.state.model

    @property
    def observations(self) -> int:
        """Number of values that were told, outliers included."""
        return len(self.state.picks)

    @property
    def outliers(self) -> list[int]:
        """Candidates whose values the model is without, in the order of telling."""
        return [self.state.picks[i] for i in self.state.outliers]

    def predict(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Compute posterior means and variances, without noise.

        Args:
            X: Inputs in the units of the candidates, ``n x d``.

        Returns:
            ``n`` each, in float64.

        Raises:
            UsageError: Fewer than ``initial`` values were told, X has another shape, no rows, or an
                input that is not finite.
        """
        X = _checked_inputs("X", X, self._X.shape[-1])
        return predict(self.model, normalize(X, self._bounds.to(X)).to(self._X))

    # --- choosing ---------------------------------------------------------------------------------

    @cached_property
    def _selector(self) -> PoolSelector:
        """Selector of the present model; its caches between choices only save time."""
        points = self._points
        if not in_weight_space(self.model.process()):  # some stand for all
            points = points[thinned(points, SOME_POINTS)]
        return PoolSelector(self.model, self._X, points)

    @cached_property
    def _targets(self) -> Tensor:
        """Points that stand for all, at which expected wrong calls are counted."""
        return self._points[thinned(self._points, SOME_CANDIDATES)]

    @torch.no_grad()
    def _uncertain(self, criterion: Misclassification, free: Tensor, count: int) -> Tensor:
        """Return free candidates, half of them those of the most uncertain calls, half drawn."""
        index = free.nonzero().squeeze(-1)
        most = max(SOME_CANDIDATES, 2 * count)
        if len(index) <= most:
            return index
        unsure = criterion.current(*predict(self.model, self._X[index])).cpu()
        order = unsure.argsort(descending=True, stable=True)
        seed = self.settings.seed + 1_000_003 * self.observations
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randperm(len(index) - most // 2, generator=generator)
        return index[torch.cat((order[: most // 2], order[most // 2 :][drawn[: most // 2]]))]

    # --- learning ---------------------------------------------------------------------------------

    def _checked(
        self, picks: Sequence[int], outcomes: Sequence[float] | Tensor
    ) -> dict[int, float]:
        """Return values by candidate."""
        chosen, exact = _positions(picks), as_numbers(outcomes)
        values = exact.to(self._X.dtype)
        if len(chosen) != len(values):
            raise UsageError(
                f"Expected a value for each of {len(chosen):,} candidates, got {len(values):,}."
            )
        strange = next((p for p in chosen if not 0 <= p < len(self._X)), None)
        if strange is not None:
            raise UsageError(
                f"Expected candidates from 0 to {len(self._X) - 1:,}, got {strange:,}."
            )
        if len(set(chosen)) < len(chosen):
            twice = next(pick for pick in chosen if chosen.count(pick) > 1)
            raise UsageError(f"Candidate {twice} is named twice: which of its values counts?")
        most = min(LARGEST, torch.finfo(self._X.dtype).max)
        odd = next((i for i, y in enumerate(exact.tolist()) if not abs(y) <= most), None)
        if odd is not None:
            raise UsageError(
                f"Expected finite values of at most {most:.3g} in size, got {float(exact[odd])} "
                f"of candidate {chosen[odd]}. Leave out those that are not known."
            )
        told = [*self.state.outcomes, *exact.tolist()]
        if len(told) >= self.settings.initial:
            check_outcomes(told, self.settings.dtype, all_of_them=False)
        return dict(zip(chosen, values.tolist(), strict=True))

    def _add(self, picks: list[int], outcomes: list[float]) -> None:
        """Take in values of candidates that had none, and learn if that is due."""
        state, first = self.state, self.observations
        X, Y = self._X[picks], self._column(outcomes)
        began = time.perf_counter()
        if state.model is not None:
            state.validation.add(state.model, X, Y)
        self._positions.update({pick: first + i for i, pick in enumerate(picks)})
        state.picks.extend(picks)
        state.outcomes.extend(outcomes)
        state.pending = [pick for pick in state.pending if pick not in self._positions]
        self._take_in(range(first, self.observations))
        if state.model is not None:
            state.validation.add_time(len(picks), time.perf_counter() - began)
        if state.model is None and self.observations >= self.settings.initial:
            rows = self._rows(range(self.observations))
            state.kernel = self._first_kernel
            state.model = self._built(*rows, state.kernel, self._families[0])
        if state.model is not None:
            self._learn_if_due()

    def _built(
        self, X: Tensor, Y: Tensor, kernel: str, family: str | tuple[str, ...] | None
    ) -> StreamingGP:
        """Build a model of rows."""
        settings, module = self.settings, KERNELS[kernel](X.shape[-1]).to(X)
        options = settings.model_options
        if family == EXACT:  # where it ends is decided here
            options = {name: value for name, value in options.items() if name != "max_exact"}
        return build_model(settings.model, options, X, Y, module, settings.grid, family)

    def _rebuilt(self, kernel: str, family: str | None) -> StreamingGP:
        """Build a model of all observations but outliers, with the present hyperparameters.

        Those that the other kernel does not have, or in another shape, are left out.
        """
        out = set(self.state.outliers)
        rows = self._rows([i for i in range(self.observations) if i not in out])
        model = self._built(*rows, kernel, family)
        own, present = hyperparameters(model), hyperparameters(self.model)
        shared = {n: v for n, v in present.items() if n in own and own[n].shape == v.shape}
        model.train()
        set_hyperparameters(model, shared)
        last = self.model._last_fit
        if last is not None and kernel != self.state.kernel:  # two starts of this one: not yet
            last = replace(last, raced=0.0, loss=math.nan)
        model._last_fit = last
        return model.eval()

    def _rows(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return n observations as inputs ``n x d`` and outcomes ``n x 1``."""
        X = self._X[[self.state.picks[i] for i in positions]]
        return X, self._column([self.state.outcomes[i] for i in positions])

    def _column(self, outcomes: list[float]) -> Tensor:
        return torch.tensor(outcomes, dtype=torch.float64).to(self._X).unsqueeze(-1)

    def _update(self, positions: Sequence[int]) -> None:
        if positions and self.state.model is not None:
            self.state.model.update(*self._rows(positions))

    def _take_in(self, positions: Sequence[int]) -> None:
        """Update the model; outcomes far from its prediction wait for the next refit."""
        state, threshold, waiting = self.state, self._outlier_threshold, list[int]()
        room = most_outliers(self.observations - len(positions)) - len(state.outliers)
        if state.model is not None and positions and threshold and room > 0:
            far = deviations_from_prediction(state.model, *self._rows(positions)) > threshold
            waiting = [i for i, is_far in zip(positions, far.tolist(), strict=True) if is_far]
        self._update([i for i in positions if i not in waiting[:room]])
        state.outliers = sorted([*state.outliers, *waiting[:room]])

    def _learn_if_due(self) -> None:
        """Take in outcomes that wait for a refit, learn from them, and leave outliers out."""
        state, threshold = self.state, self._outlier_threshold
        outgrown = False
        if len(self._families) > 1 and self._family == EXACT:  # maybe cheaper on a grid by now
            if state.kernel not in self._most_exact:
                empty = self._built(self._X[:0], self._X[:0, :1], state.kernel, (EXACT, "WISKI"))
                self._most_exact[state.kernel] = cast(AutoGP, empty).max_exact
            outgrown = self.observations > self._most_exact[state.kernel]
        last = state.refits[-1] if state.refits else 0
        if not outgrown and not refit_is_due(self.observations, last, self.settings.refit):
            return
        self._update([i for i in state.outliers if i >= last])
        state.outliers = [i for i in state.outliers if i < last]
        if outgrown:  # with hyperparameters that were learned once, if there are no refits
            self._take(state.kernel, self._rebuilt(state.kernel, "WISKI"))
            state.onto_grid_at, state.unlikely = self.observations, {}
        learns = bool(self.settings.refit) or not state.refits
        if learns:
            relearn(self.model)
        if threshold:
            X, Y = self._rows(range(self.observations))
            state.outliers = leave_outliers_out(self.model, X, Y, state.outliers, threshold)
        if learns:
            self._learn_smoothness()
        state.refits.append(self.observations)
        state.kernels.append(state.kernel)

    @property
    def _family(self) -> str:
        """Family that the model is in."""
        return str(getattr(self.model, "family", type(self.model).__name__))

    def _take(self, kernel: str, model: StreamingGP) -> None:
        """Go on with another model of the same observations."""
        self.state.kernel, self.state.model = kernel, model
        self.__dict__.pop("_selector", None)

    def _learn_smoothness(self) -> None:
        """Go over to a rougher or smoother kernel while the values are ``LIKELIER`` nats likelier.

        With kernel ``learned``, once ``LEAST_FOR_SMOOTHNESS`` values were told. Hyperparameters are
        learned for each kernel that is tried, which takes as long as the refit itself: kernels that
        were clearly less likely rest (``UNLIKELY_UNTIL``).
        """
        few = self.observations < LEAST_FOR_SMOOTHNESS
        if few or not self.settings.learns_smoothness or self._family not in _COMPARED:
            return
        state, n = self.state, self.observations
        resting = {name for name, lost_at in state.unlikely.items() if n < UNLIKELY_UNTIL * lost_at}
        best, tried = _evidence(self.model), {state.kernel} | resting
        while True:
            position = SMOOTHNESS.index(state.kernel)
            nearest = SMOOTHNESS[max(0, position - 1) : position + 2]
            kernel = next((name for name in nearest if name not in tried), None)
            if kernel is None:
                return
            tried.add(kernel)
            other = self._rebuilt(kernel, self._family if len(self._families) > 1 else None)
            relearn(other)
            evidence = _evidence(other)
            if evidence > best + LIKELIER:
                state.unlikely[state.kernel] = n
                best = evidence
                self._take(kernel, other)
            elif evidence < best - LIKELIER:
                state.unlikely[kernel] = n

    # --- files ------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write all but the inputs to a folder, in place of an earlier state.

        Raises:
            OSError: The folder cannot be written; the earlier state stands.
        """
        content = {
            "settings": asdict(self.settings),
            "inputs": self._fingerprint,
            "state": self.state.record(),
        }
        models = {} if self.state.model is None else {"sampling": self.state.model}
        ASKING.save(folder, content, models)

    @classmethod
    def load(
        cls,
        folder: Path,
        candidates: Tensor,
        points: Tensor | None = None,
        bounds: Tensor | None = None,
    ) -> ActiveSampling:
        """Go on with a saved state; nothing in the folder is executed.

        Args:
            folder: Of :meth:`save`.
            candidates: As they were, like the other arguments.
            points: As they were.
            bounds: As they were.

        Raises:
            UsageError: There is nothing, or it is damaged, or of other inputs.
        """
        with ASKING.opened(folder) as content:
            settings = from_record(SamplingSettings, content["settings"])
            state, files = SamplingState.of_record(content["state"]), content["models"]
            file = from_record(ModelFile, files["sampling"]) if files else None
            inputs = content["inputs"]
        sampling = cls(candidates, settings, points, bounds, state)
        if inputs != sampling._fingerprint:
            raise UsageError(
                f"{folder} is of other candidates, points or bounds. Give those that the sampling "
                "began with, in the same order."
            )
        state.load_model(file, folder / ASKING.name, settings, len(candidates))
        return sampling

    @property
    def _fingerprint(self) -> str:
        """SHA-256 of the scaled inputs."""
        digest = hashlib.sha256()
        for inputs in (self._X, self._points):
            digest.update(np.ascontiguousarray(inputs.cpu().numpy()).tobytes())
        return digest.hexdigest()


@torch.no_grad()
def _evidence(model: StreamingGP) -> float:
    """Return the log marginal likelihood of a model's observations."""
    return float(model.log_marginal_likelihood().sum())


def _positions(picks: Sequence[int]) -> list[int]:
    """Return row numbers of candidates, which may be numbers of NumPy or torch, as ints."""
    positions = []
    if not isinstance(picks, Iterable) or getattr(picks, "shape", None) == ():
        raise UsageError(f"Expected candidates as a list of whole numbers, got {picks!r}.")
    for pick in picks:
        position = as_whole(pick)
        if position is None:
            raise UsageError(f"Expected candidates as whole numbers, from 0, got {pick!r}.")
        positions.append(position)
    return positions


def _checked_inputs(name: str, given: object, dim: int | None = None) -> Tensor:
    """Return inputs of width d as they are, or in float64 if they are whole numbers."""
    if not isinstance(given, Tensor):
        raise UsageError(f"Expected {name} as a tensor, got a {type(given).__name__}.")
    inputs = given if given.is_floating_point() else given.double()
    if inputs.ndim != 2 or dim not in (None, inputs.shape[-1]) or 0 in inputs.shape:
        raise UsageError(
            f"Expected {name} of shape `n x d`, the same d for all, got {tuple(inputs.shape)}."
        )
    bad = (~torch.isfinite(inputs)).any(-1)
    if bool(bad.any()):
        raise UsageError(
            f"Expected finite {name}, got {inputs[bad][0].tolist()} in row {int(bad.nonzero()[0])}."
        )
    return inputs
