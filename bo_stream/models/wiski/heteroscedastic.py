"""WISKI with a noise variance that is learned as a function of the inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.sampling.base import MCSampler
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.means import Mean
from torch import Tensor

from bo_stream.bases.stems import Stem
from bo_stream.models.construction import choose_likelihood
from bo_stream.models.outcomes.gaussian import GaussianOutcomes
from bo_stream.models.outcomes.noise import NOISE_FLOOR
from bo_stream.models.wiski.grid_gp import GridGP
from bo_stream.models.wiski.inference import grid_of
from bo_stream.models.wiski.log_noise import (
    Entry,
    FirstBatch,
    LearnedNoise,
    centre,
    expected_exponential,
    learn_first_noise,
    noise_gp,
    noise_kernel,
    observed,
    predicted_noise,
)
from bo_stream.models.wiski.resolution import MAX_DIM, GridSize
from bo_stream.models.wiski.rows import joined
from bo_stream.process.process import PosteriorProcess
from bo_stream.tensors import keeps_tensors

FIRST_ROWS = 20
"""Fewer first observations are not enough to fit a noise model to."""


class HeteroscedasticWISKI(GridGP):
    """A streaming Gaussian process on a grid whose noise depends on the inputs.

    A second grid model, ``noise_model``, learns the log noise variance g from the log squared
    residuals of observations that are predicted before they enter: ``log e² = g(x) + log χ²``,
    taken as normal with the variance π²/2 (Harvey, Ruiz and Shephard, 1994). An observation enters
    the mean's memory with the noise variance ``E[exp g(x)]`` of that time.

    - Memory, cost of an update and of a fantasy: twice :class:`WISKI`'s, and an update predicts
      first: O(n r²) with the solve that a posterior needs.
    - Exact: the mean, given the noise variances that entered: it is WISKI's with these as Yvar.
      ``merge``, ``forget``, ``refine``, and :meth:`withdraw` of an :class:`Entry`.
    - Approximate: the noise variances, and those of old observations are of their time. Hence
      order and batch sizes matter; a large update is predicted as a whole. If the data are kept
      elsewhere, ``model.clear().update(X, Y)`` enters them anew.
    - Learned: hyperparameters of both models by one ``fit_gpytorch_mll``, which maximises the sum
      of both marginal likelihoods.
    - First observations (20 and more into an empty memory): noise by ``rounds`` rounds of fits to
      copies, see :func:`bo_stream.models.wiski.log_noise.learn_first_noise`; the model's own
      hyperparameters stay, but for the constant mean of the noise model.
    - Fantasies have the noise of their inputs; what is supposed teaches nothing about noise.
    - When: the noise varies by a factor of two and more, and there are some hundred observations.

    Example:
        >>> model = HeteroscedasticWISKI(train_X, train_Y)
        >>> fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> model.update(new_X, new_Y).posterior(test_X, observation_noise=True).variance
    """

    noise_model: GridGP
    _units: GaussianOutcomes

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None = None,
        covar_module: Kernel | None = None,
        mean_module: Mean | None = None,
        outcome_transform: OutcomeTransform | _DefaultType | None = DEFAULT,
        input_transform: InputTransform | None = None,
        bounds: Tensor | None = None,
        grid_size: GridSize | None = None,
        tolerance: float = 1e-9,
        max_rank: int = 1024,
        stem: Stem | None = None,
        noise_covar_module: Kernel | None = None,
        noise_grid_size: GridSize | None = None,
        rounds: int = 2,
    ) -> None:
        """Build both models and put the first observations into memory.

        Args:
            train_X: ``batch_shape x n x d``; n may be 0, which gives the prior.
            train_Y: ``batch_shape x n x m``.
            train_Yvar: Known noise variances, ``batch_shape x n x m``; NaN in a row: learned.
            covar_module: Of the mean; as for :class:`WISKI`, like all arguments up to ``stem``.
            mean_module: See there.
            outcome_transform: See there. The noise is that of outcomes after ``Log`` and the like.
            input_transform: See there.
            bounds: See there.
            grid_size: See there.
            tolerance: See there.
            max_rank: See there.
            stem: See there. It must not learn on; the noise depends on its projection.
            noise_covar_module: Of the log noise variance. Default: a scaled RBF kernel; with more
                than four inputs give a sum.
            noise_grid_size: Nodes per dimension of the noise model.
            rounds: How often mean and noise are fitted in turn to the first observations; 0: they
                enter with the noise of the noise model's prior.

        Raises:
            BotorchTensorDimensionError: As :class:`WISKI`, like all but the last.
            InputDataError: See there.
            UnsupportedError: See there; the rows with unknown noise differ within a batch; or more
                than four inputs without a ``noise_covar_module``.
            ValueError: See there; or ``rounds`` is negative.
        """
        if rounds < 0:
            raise ValueError(f"Expected rounds of at least 0, got {rounds}.")
        super().__init__(
            train_X,
            train_Y,
            covar_module=covar_module,
            mean_module=mean_module,
            outcome_transform=outcome_transform,
            input_transform=input_transform,
            bounds=bounds,
            grid_size=grid_size,
            tolerance=tolerance,
            max_rank=max_rank,
            stem=stem,
        )
        GridGP.clear(self)  # they set the units; they enter below, with their noise
        self._units = replace(self._units, is_found=train_Y.shape[-2] > 0, zeros_apart=False)
        self.rounds = rounds
        aug_batch = self._parameter_shape
        level = self.noise_level().detach() * self.outcome_scale().square()
        self.likelihood = choose_likelihood(None, train_Y, aug_batch)
        kernel = noise_covar_module
        if kernel is None:
            _check_default_noise(self._inference.dim)
            kernel = noise_kernel(self._inference.dim, aug_batch)
        nothing = train_X.new_empty(*self._batch_shape, 0, self._inference.dim)
        no_squares = train_Y[..., :0, :]
        self.noise_model = noise_gp(
            nothing, no_squares, no_squares, kernel, self.bounds, noise_grid_size
        )
        centre(self.noise_model, level.log())
        self.to(train_X)
        entry = self.observe(train_X, train_Y, train_Yvar)
        if entry.log_squares.X.shape[-2] >= FIRST_ROWS and rounds > 0:
            centre(self.noise_model, entry.log_squares.targets.mean(-1))

    @keeps_tensors
    def update(self, X: Tensor, Y: Tensor, Yvar: Tensor | None = None) -> Self:
        """Predict n observations, then put them into both memories, in place.

        Cost O(n (7^d + r²)), whatever came before, and O(r³) where the posterior has to be solved
        anew. Bad input raises and changes nothing.

        Args:
            X: ``batch_shape x n x d``; n = 0 changes nothing.
            Y: ``batch_shape x n x m``.
            Yvar: Known noise variances shaped as Y; NaN in a row: learned. Rows with known noise
                teach the noise model nothing.

        Raises:
            BotorchTensorDimensionError: Shapes do not fit the model.
            InputDataError: Dtype, device, NaN, infinity, negative variance, inputs too far outside.
            UnsupportedError: The model supposes data, or NaN is in other rows of Yvar in another
                element of a batch.
            ValueError: The grown grid is too large for memory.
        """
        self.observe(X, Y, Yvar)
        return self

    def observe(self, X: Tensor, Y: Tensor, Yvar: Tensor | None = None) -> Entry:
        """The same as :meth:`update`; returns what entered, for :meth:`withdraw`."""
        self._check_not_supposed("update")
        self._check_observations(X, Y, Yvar)
        if X.shape[-2] > 0 and self._units.awaits:
            targets, *_ = self._units.encode(self._outcomes, Y, Yvar, infers_noise=True)
            self._units = self._units.referring_to(targets, self.outcome_scale())
        self._settle_noise_floor(Y, Yvar, 1.0)
        entry = self._entry(X, Y, Yvar)
        if X.shape[-2] > 0:
            self._enter(entry)
            self._latest = self._latest.with_rows(X)
        return entry

    def withdraw(self, entry: Entry) -> Self:
        """Take an entry out of both memories: undoes :meth:`observe`, exactly.

        What entered after it was predicted with it, and stays as it entered.

        Raises:
            InputDataError: It holds more observations than are in memory.
            UnsupportedError: The model supposes data.
        """
        self._check_not_supposed("withdraw")
        self._check_retractable(entry.observations.X)
        if entry.observations.X.shape[-2] > 0:
            self._enter(entry.negated())
            self._latest = self._latest.without(entry.observations.X, self.coordinates)
        return self

    @keeps_tensors
    def retract(self, X: Tensor, Y: Tensor, Yvar: Tensor | None = None) -> Self:
        """Take observations with known noise out of memory; others by :meth:`withdraw`.

        Args:
            X: As for :meth:`update`.
            Y: See there.
            Yvar: Known noise variances that they entered with.

        Raises:
            UnsupportedError: A noise variance is not given: what was learned when the observation
                entered cannot be found again.
            InputDataError: More are taken out than are in, and as :meth:`update`.
        """
        self._check_not_supposed("retract")
        self._check_observations(X, Y, Yvar)
        if Y.numel() > 0 and (Yvar is None or bool(Yvar.isnan().any())):
            raise UnsupportedError(
                "retract needs Yvar: the noise variances that were learned when the observations "
                "entered are not kept. Put them in by entry = model.observe(X, Y), and take them "
                "out by model.withdraw(entry)."
            )
        return super().retract(X, Y, Yvar)

    def _entry(self, X: Tensor, Y: Tensor, Yvar: Tensor | None) -> Entry:
        chain, units = self._outcomes, self._units
        targets, noise, known = units.encode(chain, Y, Yvar, infers_noise=True)
        inputs, rows = self.coordinates(X), _unknown_rows(known)
        self._check_room(inputs)
        learned = self._learned_noise(inputs, targets, noise, rows)
        noise = noise.index_copy(-1, rows, learned.noise.maximum(self._least_learned_noise()))
        return Entry(
            observed(inputs, targets, noise),
            observed(inputs[..., rows, :], learned.log_squares, learned.variances),
        )

    def _check_room(self, inputs: Tensor) -> None:
        """Raise before anything is changed if a grid cannot grow to hold the inputs."""
        for model in (self, self.noise_model):
            model._memory.covering(inputs.to(torch.float64))

    def _learned_noise(
        self, inputs: Tensor, targets: Tensor, noise: Tensor, rows: Tensor
    ) -> LearnedNoise:
        if len(rows) == 0:
            return LearnedNoise(*(noise[..., rows],) * 3)
        targets = targets + self._units.shift.unsqueeze(-1)
        if self.num_observations == 0 and self.rounds > 0 and len(rows) >= FIRST_ROWS:
            Yvar = noise.index_fill(-1, rows, torch.nan)
            first = FirstBatch(inputs, targets, Yvar, rows)
            return learn_first_noise(self, self.noise_model, first, self.rounds)
        return predicted_noise(self, self.noise_model, inputs[..., rows, :], targets[..., rows])

    def _enter(self, entry: Entry) -> None:
        self._take(entry.observations)
        if entry.log_squares.X.shape[-2] > 0:
            self.noise_model._take(entry.log_squares)

    def noise_at(self, inputs: Tensor) -> Tensor:
        """Expected variance of the noise at inputs, in transformed units; differentiable.

        Args:
            inputs: After :meth:`transform_inputs`, ``... x q x d``.

        Returns:
            ``... x m x q``, float64.
        """
        process = self.noise_model.process(inputs)
        points = process.at(inputs)
        noise = expected_exponential(process.mean_at(points), process.variance_at(points))
        scale = self.outcome_scale().unsqueeze(-1)
        return noise.maximum(self._least_learned_noise()) / scale.square()

    def _least_learned_noise(self) -> Tensor:
        """Smallest variance that is predicted, in the memory's units, ``batch_shape x m x 1``."""
        return NOISE_FLOOR * self.outcome_scale().square().unsqueeze(-1)

    def fantasize(
        self,
        X: Tensor,
        sampler: MCSampler,
        observation_noise: Tensor | None = None,
        **kwargs: Any,
    ) -> Self:
        """Suppose draws from the posterior at X, with the noise of X.

        Args:
            X: ``batch_shape x q x d``.
            sampler: Draws the supposed outcomes.
            observation_noise: Other variances, ``batch_shape x (q or 1) x m``, in transformed
                units.
            kwargs: For BoTorch.
        """
        if observation_noise is None:
            observation_noise = self.noise_at(self.hypothetical_inputs(X)).mT.to(X)
        return super().fantasize(X, sampler, observation_noise, **kwargs)

    @keeps_tensors
    def merge(self, other: Self) -> Self:
        """Add another model's memories to this one's; see :meth:`GridGP.merge`."""
        matrix = self._targets_of(other)
        memory = joined(self._memory, other._memory.map_targets(matrix))
        mine, theirs = self.noise_model, other.noise_model
        noise = joined(mine._memory, theirs._memory.map_targets(mine._targets_of(theirs)))
        self._set_merged(memory, other)
        self.noise_model._set_merged(noise, other.noise_model)
        return self

    @keeps_tensors
    def forget(self, factor: float) -> Self:
        """Let every past observation and residual count ``factor`` times, in (0, 1]."""
        super().forget(factor)
        self.noise_model.forget(factor)
        return self

    @keeps_tensors
    def clear(self) -> Self:
        """Drop all observations and residuals; hyperparameters and standardisation stay."""
        super().clear()
        self.noise_model.clear()
        return self

    def _supposing(self, process: PosteriorProcess) -> Self:
        model = super()._supposing(process)
        if self._supposed is None:  # this one's noise model may go on learning
            box = (grid_of(process) or self._memory.grid).bounds.to(self._device)
            model.noise_model = self.noise_model._supposing(self.noise_model.process(box))
        return model

    def _select_memory(self, outputs: list[int]) -> None:
        super()._select_memory(outputs)
        self.noise_model = self.noise_model.subset_output(outputs)

    def _learning_objective(self) -> Tensor:
        return super()._learning_objective() + self.noise_model._learning_objective()


def _check_default_noise(dim: int) -> None:
    if dim > MAX_DIM:
        raise UnsupportedError(
            f"Expected noise_covar_module with {dim} inputs, for the default one needs a single "
            f"grid of 1 to {MAX_DIM}, got None. Give a sum of kernels with at most {MAX_DIM} "
            "active_dims each, as in covar_module."
        )


def _unknown_rows(known: Tensor) -> Tensor:
    """Indices of the rows whose noise is to be learned, from ``batch x 1 x n``."""
    flat = known.flatten(0, -2)
    if bool((flat != flat[:1]).any()):
        raise UnsupportedError(
            "Expected NaN in the same rows of Yvar in every element of a batch, got others. Use "
            "one model per element."
        )
    return (~flat[0]).nonzero().squeeze(-1)
