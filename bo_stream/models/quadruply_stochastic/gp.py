"""A model of very many basis functions that learns from a few data and a few functions a step."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any, Self

import torch
from botorch.exceptions.errors import InputDataError
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.types import _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean
from torch import Tensor
from torch.utils.data import Dataset

from bo_stream.bases.inducing import frozen
from bo_stream.likelihoods.outcome_model import OutcomeModel, check_likelihood
from bo_stream.likelihoods.sites import ExpectedLogProb
from bo_stream.models.hyperparameters import Hyperparameters
from bo_stream.models.latent_choice import latent_kernel
from bo_stream.models.outcomes.likelihood import LikelihoodOutcomes
from bo_stream.models.quadruply_stochastic.choice import (
    FourierFeatures,
    InducingAtData,
    StepOptions,
    check_arithmetic,
    check_unbatched,
    choose_transform,
    layout_of,
)
from bo_stream.models.quadruply_stochastic.memory import QuadrupleMemory, Schedule
from bo_stream.models.quadruply_stochastic.posterior import QuadruplePosterior
from bo_stream.models.quadruply_stochastic.sampled_gradient import (
    SAMPLE,
    ControlPoints,
    Drawn,
    Estimator,
    SampledGradient,
)
from bo_stream.models.quadruply_stochastic.site_noise import check_log_concave
from bo_stream.models.quadruply_stochastic.steps import Steps
from bo_stream.models.quadruply_stochastic.weight_posterior import (
    full_bound,
    full_divergence,
    log_precision,
)
from bo_stream.models.stochastic.replay import Batch, DatasetReplay, StreamReplay, generator_at
from bo_stream.models.stochastic.start import learn_first_hyperparameters
from bo_stream.models.stochastic.training import Training, train
from bo_stream.tensors import is_same, state_of

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
        self._units = LikelihoodOutcomes.of(self._units.shift)
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


_BOUND_ROWS = 2048


class QuadrupleBound(QuadrupleStart):
    """What the weights are worth."""

    @torch.no_grad()
    def elbo(self) -> Tensor:
        """The bound on the log marginal likelihood of all data, ``m``, without m if that is 1.

        Of all that are held, in nats and in transformed units. Cost O(n p). Where S is not
        diagonal, and functions are more than ``DETERMINED``, it lacks ``½ log |S|``, a constant.
        """
        return self._from_per_output(self._learning_objective())

    @torch.no_grad()
    def elbo_estimate(self, generator: torch.Generator | None = None) -> Tensor:
        """One unbiased draw of :meth:`elbo`, from the data and functions of one step.

        For other likelihoods than the Gaussian it is on average below the bound, the less the more
        functions are drawn. [Evans2020, theorem 3]

        Args:
            generator: On the CPU; torch's own if omitted.

        Raises:
            InputDataError: There are no data.
            ValueError: More data or functions for a step than there are.
        """
        generator = self._checked_generator(generator)
        data, estimator = self._data(generator), self._estimator(self._hyper())
        leaves = estimator.leaves(estimator.draws(generator), data, learns=False)
        return self._from_per_output(estimator.value(leaves, data, learns=False).double())

    def elbo_gradient_estimate(
        self, generator: torch.Generator | None = None
    ) -> tuple[Tensor, SampledGradient]:
        """One unbiased draw of :meth:`elbo`, ``m``, and of its gradient in the weights.

        The gradient is that of the functions drawn; of all others it is 0. Args and errors as
        :meth:`elbo_estimate`.
        """
        generator = self._checked_generator(generator)
        estimator = self._estimator(self._hyper())
        return estimator.sampled(self._data(generator), generator)

    def _checked_generator(self, generator: torch.Generator | None) -> torch.Generator:
        if self._memory.replay.count == 0:
            raise InputDataError("Expected data to draw from, got an empty stream.")
        self._check_sizes()
        if generator is not None:
            return generator
        return torch.Generator().manual_seed(int(torch.randint(2**62, ())))

    def _hyper(self) -> Hyperparameters:
        """A copy that learns nothing."""
        hyper = Hyperparameters(self.covar_module, self.mean_module, self.likelihood)
        return hyper.requires_grad_(False)

    def _estimator(self, hyper: Hyperparameters) -> Estimator:
        progress = self._memory.progress
        return Estimator(
            progress.posterior,
            progress.control,
            hyper,
            lambda hyper: self._basis(hyper.covar_module),
            self._drawn_functions,
            self._determinant(exact=True),
        )

    @torch.no_grad()
    def _determinant(self, exact: bool) -> Tensor | None:
        """``log |S|`` where S is not diagonal, or 0 for it."""
        basis = self._basis(frozen(self.covar_module))
        if basis.is_diagonal or exact:
            return log_precision(basis)
        return torch.zeros(1, dtype=torch.float64, device=self._device)

    def _log_marginal_likelihood(self) -> Tensor:
        return self._learning_objective()

    def _learning_objective(self) -> Tensor:
        """The bound at the weights as they are, differentiable in the hyperparameters."""
        kernel, posterior = self.covar_module, self._memory.progress.posterior
        process = self._process_of(kernel, self._prior.mean)
        index = torch.arange(posterior.size)
        measured = self._diagonal(process.basis, index)
        apart = full_divergence(process.basis, posterior, measured)
        replay = self._memory.replay
        return full_bound(
            process, self._outcomes_of_all(), replay.count / max(replay.held, 1), apart
        )

    def _outcomes_of_all(self) -> Iterator[tuple[Tensor, ExpectedLogProb]]:
        model = OutcomeModel(self.likelihood, self._num_outputs)
        for rows in map(self._in_units, self._memory.replay.chunks(_BOUND_ROWS)):
            yield rows.X, model.expected_log_prob(rows.Y.mT.double())


class QuadrupleGP(QuadrupleBound):
    """Learning by steps on data and functions that are drawn."""

    @property
    def num_steps(self) -> int:
        """Steps taken so far, by updates and fits."""
        return self._memory.progress.steps

    def fit(
        self, steps: int | None = None, seconds: float | None = None, progress: bool = True
    ) -> Training:
        """Learn weights, and hyperparameters where ``empirical_bayes``; another call goes on.

        The first call learns hyperparameters by an exact GP of ``initial_points`` observations, and
        begins the weights anew for them. After Ctrl-C the model is as it was at the last check.

        Args:
            steps: Most steps to take.
            seconds: Begin no step after so many; of both limits the first to be reached counts, of
                neither a default of steps.
            progress: Whether to draw a bar, where standard error is a terminal.

        Raises:
            InputDataError: There are no data.
            ModelFittingError: The bound diverged; the model is as it was when it was good.
            UnsupportedError: The model supposes data.
            ValueError: A limit is negative; more data or functions for a step than there are.
        """
        self._check_not_supposed("fit")
        if self._memory.replay.count == 0:
            raise InputDataError("Expected data to fit, got an empty stream: call update first.")
        self._check_sizes()
        if not self._has_begun:
            self._begin_hyperparameters()
        self._place_support()
        return self._train(steps, seconds, progress, self.empirical_bayes)

    def _begin_hyperparameters(self) -> None:
        """Learn them by an exact GP, and begin the weights anew."""
        if self.initial_points > 0 and self.empirical_bayes:
            rows = self._some_rows(self.initial_points)
            modules = (self.covar_module, self.mean_module, self.likelihood)
            learn_first_hyperparameters(*modules, rows)
            self._set_memory(self._anew(self._memory, rows.X))
        self._has_begun = True

    @torch.no_grad()
    def _place_support(self) -> None:
        """Support points of the control variate, if draws leave functions out.

        Anew when the kernel has moved, or they would be of ever less use. Cost O(s p) then for s
        points, unless the weights are zero.
        """
        progress = self._memory.progress
        wanted = self.control_points > 0 and self._prior.is_gaussian
        if not wanted or self._drawn_functions >= progress.posterior.size:
            progress.control = None
            return
        kernel, control = frozen(self.covar_module), progress.control
        if control is None or not is_same(state_of(kernel), state_of(control.basis.kernel)):
            rows = self._some_rows(SAMPLE * self.control_points)
            basis = self._memory.layout.basis(kernel, progress.precisions)
            sample = rows.X.to(self.arithmetic), rows.Y.mT.to(self.arithmetic)
            progress.control = ControlPoints.of(
                basis, self.control_points, sample, self._memory.replay.count, progress.posterior
            )

    def _learn_from_new(self) -> None:
        if self.update_steps > 0:
            self._check_sizes()
            self._place_support()
            self._train(self.update_steps, None, progress=False, learns=False)

    def _train(
        self, steps: int | None, seconds: float | None, progress: bool, learns: bool
    ) -> Training:
        learner = self._learner(learns, exact=steps != self.update_steps)
        try:
            return train(learner, steps, seconds, progress=progress)
        finally:
            self._adopt(learner, learns)

    def _learner(self, learns: bool, exact: bool) -> Steps:
        """What takes steps; it moves the weights in place.

        Args:
            learns: Whether hyperparameters are learned too.
            exact: Whether its bounds include ``log |S|`` where S is not diagonal.
        """
        hyper = self._hyper()
        return Steps(
            self._memory.progress,
            hyper,
            self._memory.layout,
            self._data,
            self._memory.replay.count,
            replace(self._schedule, functions=self._drawn_functions),
            hyper.learned(self._fixed) if learns else [],
            self._determinant(exact),
        )

    @torch.no_grad()
    def _adopt(self, learner: Steps, learns: bool) -> None:
        progress = learner.progress
        if learns:
            progress.moments = learner.moments
            for name, learned in learner.hyper.named_parameters():
                self.get_parameter(name).copy_(learned)
        self._set_memory(replace(self._memory, progress=progress))
