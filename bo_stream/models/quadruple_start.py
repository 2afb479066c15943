"""How a quadruply stochastic model is built, and the data and functions that its steps draw."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any, Self

import torch
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.types import _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean
from torch import Tensor
from torch.utils.data import Dataset

from bo_stream.models.dataset_replay import DatasetReplay
from bo_stream.models.latent_choice import latent_kernel
from bo_stream.models.outcome_model import check_likelihood
from bo_stream.models.quadruple_choice import (
    StepOptions,
    check_arithmetic,
    check_unbatched,
    choose_transform,
)
from bo_stream.models.quadruple_memory import QuadrupleMemory
from bo_stream.models.quadruple_posterior import QuadruplePosterior
from bo_stream.models.quadruple_progress import Schedule
from bo_stream.models.replay import Batch, StreamReplay, generator_at
from bo_stream.models.sampled_gradient import Drawn
from bo_stream.models.site_noise import check_log_concave
from bo_stream.models.weight_layout import FourierFeatures, InducingAtData, layout_of

BATCH_SIZE = 500
"""Observations of a step where the user does not say."""

FUNCTIONS = 20_000
"""Functions of a draw where the user does not say."""

_ROWS = 2048
_FIRST_ROWS = 1024
_SUPPORT_PLACE = 2**40
"""Of the random numbers that choose support points, beyond those of all steps."""


class QuadrupleStart(QuadruplePosterior):
    """The parts of a constructor, and what there is to draw."""

    _schedule: Schedule
    _fixed: list[str]
    _has_begun: bool
    batch_size: int | None
    functions: int | None
    control_points: int
    update_steps: int
    initial_points: int
    empirical_bayes: bool

    def _start(
        self,
        X: Tensor,
        Y: Tensor,
        likelihood: Likelihood | None,
        transform: OutcomeTransform | _DefaultType | None,
        arithmetic: torch.dtype,
    ) -> None:
        """Check the first observations; take shapes and outcome transform from them."""
        check_unbatched(X)
        self.arithmetic = check_arithmetic(arithmetic)
        self._begin(X, Y, None, choose_transform(transform, likelihood))
        self._without_reference()
        self._solved = None

    def _choose_modules(
        self,
        inputs: Tensor,
        likelihood: Likelihood | None,
        kernel: Kernel | None,
        mean: Mean | None,
    ) -> None:
        dim, shape = inputs.shape[-1], self._parameter_shape
        kernel = latent_kernel(dim, shape) if kernel is None else kernel
        self._set_modules(dim, None, None, kernel, mean)
        if likelihood is not None:
            check_likelihood(likelihood, shape)
            check_log_concave(likelihood)
            self.likelihood = deepcopy(likelihood)
        self._fixed = [name for name, p in self.named_parameters() if not p.requires_grad]
        self.beta, self.fantasy_steps = 1.0, 1

    def _choose_steps(self, options: StepOptions, learns: bool, columns: int, seed: int) -> None:
        self.batch_size, self.functions = options.batch_size, options.functions
        self.control_points, self.update_steps = options.control_points, options.update_steps
        self.initial_points, self.empirical_bayes = options.initial_points, learns
        self.columns, self._has_begun = columns, False
        self._schedule = Schedule(
            0,
            options.learning_rate,
            options.hyper_rate,
            options.freeze_steps,
            options.half_life,
            seed,
        )

    def _begin_memory(
        self, choice: FourierFeatures | InducingAtData, X: Tensor, max_rows: int | None
    ) -> None:
        """No weights and no observations yet."""
        X = X.detach().double()
        layout = layout_of(choice, self.covar_module, X, self._num_outputs)
        like = Batch(X[:0], X.new_zeros(0, self._num_outputs))
        replay = StreamReplay.empty(like, max_rows, self._schedule.seed)
        self._set_memory(QuadrupleMemory(replay, layout, self._empty(X)))

    def _first_update(self, X: Tensor, Y: Tensor) -> None:
        """Weights as in the prior, for a layout that has functions already, and the first steps."""
        self._check_observations(X, Y, None)
        self._set_memory(self._filled(self._memory, self.coordinates(X).double()))
        if X.shape[-2] > 0:
            self._observe(X, Y, None, 1.0)

    @classmethod
    def from_dataset(cls, dataset: Dataset[Any], **options: Any) -> Self:
        """A model that learns from a ``torch.utils.data.Dataset``, read a minibatch at a time.

        It begins with a minibatch of it: transforms are of that, and so are functions at the data.
        Its n is the data set's length. It takes no updates.

        Args:
            dataset: Has a length; items are pairs of an input, ``d``, and an outcome, ``m``.
            options: The constructor's.

        Raises:
            InputDataError: It is empty, or its items are no pairs.
            UnsupportedError: It can only be iterated.
        """
        replay = DatasetReplay.of(dataset)
        size = min(options.get("batch_size") or _FIRST_ROWS, replay.held)
        first = replay.draw(size, generator_at(options.get("seed", 0), _SUPPORT_PLACE))
        model = cls(first.X, first.Y, **options)
        model._set_memory(replace(model._memory, replay=replay))
        return model

    def _in_units(self, rows: Batch) -> Batch:
        """In units of the process, and float64; those of a stream are so already."""
        if not isinstance(self._memory.replay, DatasetReplay):
            return rows
        rows = rows.map(lambda tensor: tensor.to(self.train_targets))
        self._check_observations(rows.X, rows.Y, None)
        entered = self._observations(rows.X, rows.Y, None, 1.0)
        return Batch(entered.X, entered.targets.mT)

    def _check_sizes(self) -> None:
        """Check what a step draws.

        Raises:
            ValueError: It is more than there is.
        """
        held, size = self._memory.replay.held, self._memory.progress.posterior.size
        for name, asked, there in (
            ("batch_size", self.batch_size, held),
            ("functions", self.functions, size),
        ):
            if asked is not None and asked > there:
                raise ValueError(
                    f"Expected {name}, drawn in a step, to be at most the {there} that there are, "
                    f"got {asked}."
                )

    def _some_rows(self, most: int) -> Batch:
        """Rows to look at before there are steps, the same at all times while they are held."""
        replay = self._memory.replay
        size = min(most, replay.held)
        return self._in_units(replay.draw(size, generator_at(self._schedule.seed, _SUPPORT_PLACE)))

    @property
    def _drawn_functions(self) -> int:
        size = self._memory.progress.posterior.size
        return min(FUNCTIONS, size) if self.functions is None else self.functions

    def _data(self, generator: torch.Generator) -> Drawn:
        replay = self._memory.replay
        size = min(BATCH_SIZE, replay.held) if self.batch_size is None else self.batch_size
        rows = self._in_units(replay.draw(size, generator))
        X, targets = rows.X.to(self.arithmetic), rows.Y.mT.to(self.arithmetic)
        return Drawn(X, targets, float(replay.count))
