"""A Bayesian last layer: linear regression, exact and streaming, on the features of a network."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from botorch.exceptions.errors import InputDataError, ModelFittingError
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.kernels import ScaleKernel
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.means import Mean
from torch import Tensor
from torch.nn import Module

from bo_stream.allocation.allocator import checked_number
from bo_stream.models.base import StreamingGP, keeps_tensors
from bo_stream.models.last_layer.inference import (
    START,
    LastLayerInference,
    LastLayerMemory,
    LayerSteps,
    NetworkKernel,
    check_network,
    default_network,
)
from bo_stream.models.stochastic.budget import judgement_said
from bo_stream.models.stochastic.training import Training, train

WINDOW = 4096
"""Rows that are stored beside the statistics."""


class BayesianLastLayer(StreamingGP):
    """The process ``f(x) = μ + wᵀ φ(x)`` with the last features φ of a network, w exact.

    A network, shared by batch elements and outputs, maps inputs to r − 1 features; with the
    constant 1 they are φ. Their weights have the prior N(0, ρ²/r I), ρ² the output scale of each
    output, and are integrated over in closed form, as is done in DNGO (Snoek et al., 2015).

    - Memory: O(r²) statistics of φ, the network, and the ``window`` latest observations.
    - Update: O(n r²) for n observations, and n evaluations of the network; the next posterior
      conditions the last one on few of them, else it solves once in O(r³).
    - A fantasy: O(q r²), the network at q inputs, and one q x q factor.
    - A step of ``fit``: O(b r² + r³) for b rows, and the network at them with its gradient.
    - Exact: while the network stays as it is, everything: any stream equals one batch, updates,
      retractions, merges and fantasies are exact; output scale, noise, mean and standardisation of
      outcomes may change at any time. After the network has changed: all observations that are
      stored as rows, hence all of a stream that is not longer than the window.
    - Approximate: what came before the window, after the network has changed. It counts as if its
      features were the linear map of the old ones that fits the new ones best at the window's rows.
      The noise that is learned with a network from few rows is too small: learn it once more when
      others have come, with ``model.network.requires_grad_(False)``, at O(r³) a step.
    - Learned: network and hyperparameters together, by the marginal likelihood: ``fit`` (Adam), or
      BoTorch's ``fit_gpytorch_mll`` for small ones (L-BFGS on all rows).
    - ``merge`` takes over the other's statistics in this model's features, by the other's rows.
    - When: more data than inducing points can hold and a function that a network learns well. What
      the features do not tell apart has no variance of its own: far from all data, and for a
      network that was learned from few, the variance is too small.

    Example:
        >>> model = BayesianLastLayer(train_X, train_Y, network)
        >>> model.fit(steps=1000)
        >>> model.update(new_X, new_Y).posterior(test_X).mean
    """

    _memory: LastLayerMemory
    _inference: LastLayerInference

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        network: Module | None = None,
        train_Yvar: Tensor | None = None,
        likelihood: _GaussianLikelihoodBase | None = None,
        mean_module: Mean | None = None,
        outcome_transform: OutcomeTransform | _DefaultType | None = DEFAULT,
        input_transform: InputTransform | None = None,
        window: int = WINDOW,
    ) -> None:
        """Build the model and put the first observations into memory.

        Args:
            train_X: First inputs, ``batch_shape x n x d``; n may be 0.
            train_Y: First outcomes, ``batch_shape x n x m``.
            network: Maps transformed inputs ``n x d`` to features ``n x (r − 1)``, each input on
                its own; it is a part of the kernel, in evaluation mode always, and of the dtype
                and device of train_X from now on. A file of a model with layers of your own is
                loaded with their classes in ``trusted``. Default: two tanh layers of 64 units, for
                inputs in the unit cube.
            train_Yvar: As for :class:`~bo_stream.OSGPR`. Where the features leave outcomes several
                standard deviations of known noise from the posterior mean, the model says so once
                (``CoarsePointsWarning``).
            likelihood: As for :class:`~bo_stream.WISKI`.
            mean_module: ``ConstantMean`` (default) or ``ZeroMean``.
            outcome_transform: As for :class:`~bo_stream.WISKI`; default ``Standardize``.
            input_transform: One without parameters to learn: the network learns them.
            window: How many of the latest observations to hold as rows: those that the network is
                learned from.

        Raises:
            BotorchTensorDimensionError: Shapes do not fit together, those of the network included.
            UnsupportedError: A network whose features of an input depend on others; and all errors
                that :class:`~bo_stream.OSGPR` raises.
        """
        self._begin(train_X, train_Y, train_Yvar, outcome_transform)
        inputs = self._first_inputs(train_X, input_transform)
        window = checked_number("window", window, least=0)
        is_default, dim = network is None, inputs.shape[-1]
        network = default_network(dim) if network is None else network
        rank = check_network(network, inputs)
        kernel = ScaleKernel(NetworkKernel(network), batch_shape=self._parameter_shape)
        kernel.outputscale = torch.full_like(kernel.outputscale, START)
        self._set_modules(dim, train_Yvar, likelihood, kernel, mean_module)
        self._inference = LastLayerInference()
        self._memory = LastLayerMemory.empty(network, inputs, self._output_batch, rank, window)
        self._take_first(train_X, train_Y, train_Yvar, inputs, not is_default)

    @property
    def network(self) -> Module:
        """The network that is learned, a part of ``covar_module``."""
        network: Module = self.covar_module.base_kernel.network
        return network

    @property
    def rank(self) -> int:
        """Number r of features, the constant among them."""
        return self._memory.rank

    @property
    def window(self) -> int:
        """Most observations to hold as rows."""
        return self._memory.window

    @property
    def num_rows(self) -> int:
        """Observations that are stored as rows."""
        return len(self._memory.rows)

    @keeps_tensors
    def fit(
        self,
        steps: int | None = None,
        seconds: float | None = None,
        learning_rate: float = 3e-3,
        batch_size: int = 1024,
        seed: int = 0,
        progress: bool = True,
    ) -> Training:
        """Learn network, output scale, noise and mean from the rows, by Adam; in place.

        A step raises the log marginal likelihood of ``batch_size`` rows. Then the memory is carried
        over to the new features; see the class for what is exact. Another call goes on from there.
        Where that likelihood of all rows, times the priors, is smaller than before the call, the
        model goes back to what it was: two evaluations, each at the cost of a step of all rows.

        Args:
            steps: Most steps to take.
            seconds: Begin no step after so many; of both limits the first to be reached counts, of
                neither a default of steps.
            learning_rate: Of Adam.
            batch_size: Rows of a step; as many as there are, if these are fewer.
            seed: Of the draws of rows.
            progress: Whether to draw a bar, where standard error is a terminal.

        Returns:
            What was done, with the trace of the bound. A ``ShortTrainingWarning`` says where it has
            not come far.

        Raises:
            InputDataError: No observation is stored as a row.
            ModelFittingError: The likelihood diverged; the model is as it was when it was good.
            UnsupportedError: The model is conditioned on hypothetical data.
            ValueError: A limit or the rate is negative, or the batch size not positive.
        """
        self._check_not_conditioned("fit")
        began = time.monotonic()
        batch_size = checked_number("batch_size", batch_size)
        if self.num_rows == 0:
            raise InputDataError(
                "Expected observations that are stored as rows to learn from, got none: call "
                f"update first, with a window above 0 (window={self.window})."
            )
        self.train()
        try:
            learner = LayerSteps(self._memory, self.prior, learning_rate, batch_size, seed)
            before, bound = learner.learned_state(), learner.bound()
            try:
                with torch.enable_grad():
                    training = train(learner, steps, seconds, progress=progress, started=began)
            except ModelFittingError:
                learner.keep_better(before, bound)
                raise
            ended = time.monotonic()
            kept = learner.keep_better(before, bound)
        finally:
            self.eval()
        final = time.monotonic() - ended
        training = replace(training, seconds=training.seconds + final, final=final, is_kept=kept)
        return judgement_said(training, seconds)
