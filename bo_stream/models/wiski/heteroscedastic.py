"""WISKI with a noise variance that is learned as a function of the inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.means import Mean
from torch import Tensor

from bo_stream.bases.kernels import Stem
from bo_stream.models.base import keeps_tensors
from bo_stream.models.construction import (
    check_rank,
    choose_box,
    fixed_noise,
    product_kernel,
    warn_of_scaling,
)
from bo_stream.models.inference import InferenceOption
from bo_stream.models.wiski.grid_model import GridModel
from bo_stream.models.wiski.heteroscedastic_inference import (
    FIRST_ROWS,
    Entry,
    HeteroscedasticInference,
    Memories,
    centre,
    noise_gp,
    noise_kernel,
    observed,
)
from bo_stream.models.wiski.inference import GridInference
from bo_stream.models.wiski.resolution import MAX_DIM, GridSize, check_dim
from bo_stream.models.wiski.wiski import WISKI


class HeteroscedasticWISKI(GridModel):
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
      elsewhere, ``model.clear().update(X, Y)`` enters them again.
    - Learned: hyperparameters of both models by one ``fit_gpytorch_mll``, which maximises the sum
      of both marginal likelihoods.
    - First observations (20 and more into an empty memory): noise by ``rounds`` rounds of fits to
      copies (``learn_first_noise``); the model's own hyperparameters stay, but for the constant
      mean of the noise model.
    - Given noise: while every observation came with Yvar, predictions have the mean of these for
      noise, as WISKI's do, and so have the first observations without. Where the constructor is
      given them all, the prior of the noise model is about their mean from then on.
    - Fantasies have the noise of their inputs; hypothetical outcomes teach nothing about noise.
    - When: the noise varies by a factor of two and more, and there are some hundred observations.

    Example:
        >>> model = HeteroscedasticWISKI(train_X, train_Y)
        >>> fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> model.update(new_X, new_Y).posterior(test_X, observation_noise=True).variance
    """

    rounds = InferenceOption[int]()
    _memory: Memories
    _inference: HeteroscedasticInference

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
            covar_module: Of the mean; as for :class:`WISKI`.
            mean_module: As for :class:`WISKI`.
            outcome_transform: As for :class:`WISKI`. The noise is that of transformed outcomes.
            input_transform: As for :class:`WISKI`.
            bounds: As for :class:`WISKI`.
            grid_size: As for :class:`WISKI`.
            tolerance: As for :class:`WISKI`.
            max_rank: As for :class:`WISKI`.
            stem: As for :class:`WISKI`. It must not learn on; the noise depends on its projection.
            noise_covar_module: Of the log noise variance. Default: a scaled RBF kernel; with more
                than four inputs give a sum.
            noise_grid_size: Nodes per dimension of the noise model.
            rounds: How often mean and noise are fitted in turn to the first observations; 0: they
                enter with the noise of the noise model's prior.

        Raises:
            BotorchTensorDimensionError: As :class:`WISKI`.
            InputDataError: As for :class:`WISKI`.
            UnsupportedError: As :class:`WISKI`; the rows with unknown noise differ within a batch;
                or more than four inputs without a ``noise_covar_module``.
            ValueError: As :class:`WISKI`; or ``rounds`` is negative.
        """
        if rounds < 0:
            raise ValueError(f"Expected rounds of at least 0, got {rounds}.")
        self._begin(train_X, train_Y, None, outcome_transform)
        rank = check_rank(tolerance, max_rank)
        inputs = self._first_inputs(train_X, input_transform, stem)
        covar_module = product_kernel(covar_module, inputs.shape[-1])
        dim = check_dim(inputs.shape[-1], covar_module)
        box = choose_box(bounds, train_X, inputs, input_transform, stem)
        self._set_modules(dim, None, None, covar_module, mean_module, box)
        mean, memory = GridInference.start(self.prior, box, grid_size, rank, train_X)
        kernel, aug_batch = noise_covar_module, self._parameter_shape
        if kernel is None:
            if dim > MAX_DIM:
                raise UnsupportedError(
                    f"Expected noise_covar_module with {dim} inputs, for the default one needs a "
                    f"single grid of 1 to {MAX_DIM}, got None. Give a sum of kernels with at most "
                    f"{MAX_DIM} active_dims each, as in covar_module."
                )
            kernel = noise_kernel(dim, aug_batch, box)
        nothing, none = train_X.new_empty(*self._batch_shape, 0, dim), train_Y[..., :0, :]
        noise_model = noise_gp(
            nothing, none, none, kernel, memory.grid.bounds.to(train_X), noise_grid_size
        )
        self._modules["noise_model"] = noise_model
        self._inference = HeteroscedasticInference(mean, noise_model._inference, rounds)
        self._memory = Memories(memory, noise_model._memory)
        self._standardize_first(train_X, train_Y, None)
        given, scaled = None if bounds is None else box, self._standardized(train_Y.double())
        warn_of_scaling(inputs, scaled, covar_module is not None, given)
        level = self.noise_level().detach() * self.outcome_scale().square()
        self.likelihood = fixed_noise(aug_batch, train_Y)
        centre(noise_model, level.log())
        self.to(train_X)
        entry = self.observe(train_X, train_Y, train_Yvar)
        if len(entry.log_squares) >= FIRST_ROWS and rounds > 0:
            centre(noise_model, entry.log_squares.targets.mean(-1))
        known, X = self._memory.given_noise(), entry.observations.X
        if known is not None and len(entry.log_squares) == 0:
            uncertainty = noise_model.process(X).variance(X)  # the mean of exp(g) is what was given
            centre(noise_model, (known.log() - 0.5 * uncertainty).mean(-1))

    @property
    def noise_model(self) -> WISKI:
        """The model of the log noise variance, as it is now; it shares its hyperparameters."""
        part: Any = self._modules["noise_model"]
        model: WISKI = part._shallow_copy()
        model._inference, model._memory = self._inference.log_noise, self._memory.noise
        model._cache = None if self._cache is None else self._cache.noise
        noise: Any = self._conditioned_noise
        model._conditioned_process = None if noise is None else noise.process
        return model

    @keeps_tensors
    def observe(self, X: Tensor, Y: Tensor, Yvar: Tensor | None = None) -> Entry:
        """Update, and return what entered, for :meth:`withdraw`.

        An update predicts the observations, then puts them into both memories. Rows with known
        noise teach the noise model nothing.
        """
        plain, entries = self._inference, list[Entry]()
        self._inference = replace(plain, record=entries.append)
        try:
            self.update(X, Y, Yvar)
        finally:
            self._inference = plain
        if entries:
            return entries[0]
        nothing = observed(self.coordinates(X), *(Y.to(torch.float64).mT,) * 2)
        return Entry(nothing, nothing)

    @keeps_tensors
    def withdraw(self, entry: Entry) -> Self:
        """Take an entry out of both memories: undoes :meth:`observe`, exactly.

        What entered after it was predicted with it, and stays as it entered.

        Raises:
            InputDataError: It holds more observations than are in memory.
            UnsupportedError: The model is conditioned on hypothetical data.
        """
        self._check_not_conditioned("withdraw")
        self._check_retractable(entry.observations.X)
        if len(entry.observations) > 0:
            with torch.no_grad():
                self._memory, self._cache = self._inference.entered(
                    self._memory, self._cache, entry.negated(), self.prior
                )
            self._refresh_fixed_noise()
            self._latest = self._latest.without(entry.observations.X, self.coordinates)
        return self

    @property
    def tolerance(self) -> float:
        """Part of the kernel's trace that may be left out."""
        return self._inference.mean.tolerance

    @property
    def max_rank(self) -> int:
        """Cap on the number of features."""
        return self._inference.mean.max_rank
