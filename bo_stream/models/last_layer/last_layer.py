"""A Bayesian last layer: linear regression, exact and streaming, on the features of a network."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import torch
from botorch.exceptions.errors import InputDataError, ModelFittingError
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.kernels import ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.means import Mean
from torch import Tensor
from torch.nn import Module

from bo_stream.errors import check_whole
from bo_stream.models.base import StreamingGP, keeps_tensors
from bo_stream.models.inference import Hyperparameters, Prior
from bo_stream.models.last_layer.inference import (
    START,
    LastLayerInference,
    LastLayerMemory,
    NetworkKernel,
    check_network,
    check_unshared,
    default_network,
    features_now,
    likelihood_from,
    network_of,
)
from bo_stream.models.memory import WhitenedMemory
from bo_stream.models.stochastic.budget import (
    ConstrainedAdam,
    check_rate,
    judgement_said,
    maximise_inside,
)
from bo_stream.models.stochastic.start import set_noise
from bo_stream.models.stochastic.training import Training, check_limits, train

WINDOW = 4096
"""Rows that are stored beside the statistics."""

HELD_OUT = 0.1
"""Share of the rows that no step learns from, by default."""

LEAST_HELD_OUT, MOST_HELD_OUT = 30, 1000
"""Numbers of such rows."""

ENOUGH = 120
"""Rows from which on some are held out."""

HEAD_ITERATIONS = 20
"""Of L-BFGS on output scale, noise and mean while the network stays as it is."""

EAGER = 0.25
"""Noise to begin with, in parts of the best for the first network: with less noise a network learns
faster, and rows held out say where it learns noise."""

_GROWTH = 1.25
"""Steps at a look at rows that are held out, in parts of those at the look before."""

_PATIENCE, _WORSE = 3, 3.0
"""Looks after the best one at which a training ends, by then after some twice as many steps, and
nats below its score from which they count: of odds of 1 to 20 that they are as good."""


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
      The noise that is learned with a network from fewer than 120 rows, of which ``fit`` holds
      none out, is too small: learn it once more when others have come, with
      ``model.network.requires_grad_(False)``, at O(r³) a step.
    - Learned: network and hyperparameters together, by the marginal likelihood: ``fit`` (Adam), or
      BoTorch's ``fit_gpytorch_mll`` for small ones (L-BFGS on all rows). Both refuse to learn the
      network from several batch elements, as in BoTorch's ``batch_cross_validation``: it would know
      of each what was held out of it. While it is frozen, ``fit_gpytorch_mll`` learns each apart.
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
        window = check_whole("window", window, least=0)
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
        held_out: float = HELD_OUT,
        seed: int = 0,
        progress: bool = True,
    ) -> Training:
        """Learn network, output scale, noise and mean from the rows, by Adam; in place.

        A step raises the log marginal likelihood of ``batch_size`` rows. Some rows are held out of
        the steps, and the model that gives them the largest likelihood given the others is kept, of
        those looked at whenever there were a quarter more steps. After three looks at models that
        are worse than it, by 3 nats and more, the training ends: a network that learns its rows by
        heart is stopped. Output scale, noise and mean of a model that is looked at are set by the
        rows held out. At the end the memory, of all rows, is carried over to the new features; see
        the class for what is exact. Another call goes on from there. Where no model was better than
        the one before the call, that is kept. A look costs the network at all rows, and some twenty
        solves in O(r³).

        Args:
            steps: Most steps to take.
            seconds: Begin no step after so many; of both limits the first to be reached counts, of
                neither a default of steps.
            learning_rate: Of Adam.
            batch_size: Rows of a step; as many as there are, if these are fewer.
            held_out: Share of the rows to judge by: at least 30 and at most 1,000 of them, of fewer
                than 120 rows none; then, or where it is 0, all models are judged by the likelihood
                of all rows, times the priors, and only that of the last step.
            seed: Of the draws of rows.
            progress: Whether to draw a bar, where standard error is a terminal.

        Returns:
            What was done, with the trace of the bound. A ``ShortTrainingWarning`` says where it has
            not come far.

        Raises:
            InputDataError: No observation is stored as a row.
            ModelFittingError: The likelihood diverged; the model is as it was when it was good.
            UnsupportedError: The model is conditioned on hypothetical data, or has several batch
                elements and a network that is not frozen.
            ValueError: A limit is negative, the rate negative or not finite, the batch size not
                positive, a number of steps or rows not whole, or the share held out not in
                [0, 0.5].
        """
        self._check_not_conditioned("fit")
        check_unshared(self.prior)
        began = time.monotonic()
        if not 0.0 <= held_out <= 0.5:
            raise ValueError(f"Expected held_out to be a share in [0, 0.5], got {held_out}.")
        steps = None if steps is None else check_whole("steps", steps, least=0)
        check_limits(steps, seconds)
        check_rate("learning_rate", learning_rate)
        batch_size = check_whole("batch_size", batch_size)
        if self.num_rows == 0:
            raise InputDataError(
                "Expected observations that are stored as rows to learn from, got none: call "
                f"update first, with a window above 0 (window={self.window})."
            )
        count = min(max(int(held_out * self.num_rows), LEAST_HELD_OUT), MOST_HELD_OUT)
        count = count if held_out > 0.0 and self.num_rows >= ENOUGH else 0
        self.train()
        try:
            learner = LayerSteps(self._memory, self.prior, learning_rate, batch_size, count, seed)
            try:
                with torch.enable_grad():
                    training = train(
                        learner,
                        steps,
                        seconds,
                        progress=progress,
                        started=began,
                        is_over=learner.look,
                    )
            except ModelFittingError:
                learner.keep_best()
                raise
            ended = time.monotonic()
            kept = training.steps == 0 or learner.keep_best()
        finally:
            self.eval()
        final = time.monotonic() - ended
        training = replace(training, seconds=training.seconds + final, final=final, is_kept=kept)
        return training if kept and learner.is_over else judgement_said(training, seconds)


class LayerSteps:
    """Steps of Adam on network and hyperparameters; what ``train`` of stochastic models takes.

    A step's estimate is the log marginal likelihood of some rows, drawn without replacement, and of
    the same share of the observations that are not stored, over that share.

    A network of many weights can learn few rows by heart, and the marginal likelihood of the rows
    that it learned from does not say so. Of rows that no step has drawn it does: the model is
    judged by ``log p(held out | others) = log p(all) − log p(others)``, their conditional marginal
    likelihood (Lotfi et al., 2022), and the best state is kept.
    """

    def __init__(
        self,
        memory: LastLayerMemory,
        prior: Prior,
        rate: float,
        batch_size: int,
        held_out: int,
        seed: int,
    ) -> None:
        """Begin with a memory at its own network; the prior's modules are learned in place.

        Args:
            memory: With the rows to learn from.
            prior: With the modules to learn.
            rate: Of Adam.
            batch_size: Rows of a step.
            held_out: Number of rows to judge by; 0: by the bound of all rows.
            seed: Of the draws of rows.
        """
        self.prior, self._all = prior, memory.carried()
        self._hyper = Hyperparameters.shared(prior.kernel, prior.mean_module, prior.likelihood)
        self._parameters = self._hyper.moving
        self._ascent = ConstrainedAdam(self._hyper, self._parameters, rate)
        self._generator = torch.Generator().manual_seed(seed)
        self._learning, self._index, counts = self._all, None, memory.counts
        if held_out > 0:
            order = torch.randperm(len(memory.rows), generator=self._generator)
            self._index = order[held_out:].to(counts.device)
            self._learning = self._all.only(self._index)
            counts = counts - memory.weight[order[:held_out].to(counts.device)].sum()
        self._size = min(batch_size, len(self._learning.rows))
        self.num_steps, self.learning_rate = 0, rate
        self.num_data = float(counts.sum())
        self._best, self._state, self._is_learned = self.score(), self.learned_state(), False
        self._next, self._worse = 0, 0

    @property
    def is_valid(self) -> bool:
        """Whether all hyperparameters are finite, and positive where they have to be."""
        return self._hyper.are_valid

    def take_step(self) -> float:
        """Take a step; return its estimate of the log marginal likelihood.

        The first one begins with noise that suits the network: steps move it too slowly, and while
        it is far too small the network learns noise.
        """
        if self.num_steps == 0:
            self.learn_noise()
        carried, rows = self._learning, len(self._learning.rows)
        share = self._size / rows
        if self._size < rows:
            index = torch.randperm(rows, generator=self._generator)[: self._size]
            carried = carried.only(index.to(carried.weight.device), share)
        features = features_now(network_of(self.prior), carried.rows.X)
        estimate = likelihood_from(carried.into(features), self.prior).sum() / share
        self._ascent.ascend((estimate + self._hyper.log_prior()) / self.num_data)
        self.num_steps += 1
        return float(estimate.detach())

    def learn_noise(self) -> None:
        """Move the noise to its best for the network as it is, or below where rows are held out."""
        likelihood = self._hyper.likelihood
        self._move(likelihood, judged=False)
        if self._index is None or not isinstance(likelihood, GaussianLikelihood):
            return
        if likelihood.raw_noise.requires_grad:
            set_noise(likelihood, EAGER * likelihood.noise.detach())

    def judge_head(self) -> None:
        """Move output scale, noise and mean to their best for the rows held out, given the others.

        By the rows that the network has learned from the noise would be too small.
        """
        self._move(self._hyper, judged=True)

    def _move(self, module: Module, judged: bool) -> None:
        """Move a module's parameters, those of the network left out. Cost O(r³) an iteration.

        With a normal prior of unit variance around where they are: what rows say next to nothing
        of, as of the mean and of the output scale given many others, stays near.

        Args:
            module: With parameters to learn.
            judged: Whether to raise the likelihood of the rows held out, given the others; else
                that of the others.
        """
        network = {id(parameter) for parameter in network_of(self.prior).parameters()}
        moved = [p for p in module.parameters() if p.requires_grad and id(p) not in network]
        if not moved:
            return
        (others, whole), start = self._statistics(), [p.detach().clone() for p in moved]

        def bound() -> Tensor:
            raised = likelihood_from(others, self.prior)
            if judged:
                raised = likelihood_from(whole, self.prior) - raised
            moves = sum((p - at).square().sum() for p, at in zip(moved, start, strict=True))
            return (raised.sum() + self._hyper.log_prior() - 0.5 * moves) / self.num_data

        with torch.enable_grad():
            maximise_inside(self._hyper, moved, bound, HEAD_ITERATIONS)

    @torch.no_grad()
    def _statistics(self) -> tuple[WhitenedMemory, WhitenedMemory]:
        """Return the statistics of what steps learn from, and of everything. O(w r² + r³)."""
        features = features_now(network_of(self.prior), self._all.rows.X)
        whole = self._all.into(features)
        if self._index is None:
            return whole, whole
        return self._learning.into(features[..., self._index, :]), whole

    @torch.no_grad()
    def score(self) -> float:
        """Compute the log likelihood of rows held out given the others; without, the bound of all.

        Cost O(w r² + r³), and the network at all rows.
        """
        others, whole = self._statistics()
        value = likelihood_from(whole, self.prior).sum()
        if self._index is None:
            return float(value + self._hyper.log_prior())
        return float(value - likelihood_from(others, self.prior).sum())

    def look(self) -> bool:
        """Judge the model now and then, and take the best down; say whether to end."""
        if self._index is not None and self.num_steps >= self._next:
            self._next = math.ceil(_GROWTH * self.num_steps)
            gain = self._take_if_best()
            self._worse = 0 if gain > 0.0 else self._worse + (not gain >= -_WORSE)  # or NaN
        return self.is_over

    @property
    def is_over(self) -> bool:
        """Whether the model has been worse than the best at three looks since then."""
        return self._worse >= _PATIENCE

    def _take_if_best(self) -> float:
        """Copy the state, with the head set by the rows held out, if its score is the best.

        Returns:
            By how much it is above the best one before.
        """
        now = self.learned_state()
        if self._index is not None:
            self.judge_head()
        score = self.score()
        gain = score - self._best
        if gain > 0.0:
            self._best, self._state, self._is_learned = score, self.learned_state(), True
        self.restore(now)
        return gain

    def keep_best(self) -> bool:
        """Go back to the best state; say whether that is of what was learned."""
        self._take_if_best()
        self.restore(self._state)
        return self._is_learned

    def learned_state(self) -> Any:
        """Copy the hyperparameters, the moments, and the number of steps."""
        values = [p.detach().clone() for p in self._parameters]
        return values, self._ascent.moments(), self.num_steps

    @torch.no_grad()
    def restore(self, state: Any) -> None:
        """Go back to a copy."""
        values, moments, self.num_steps = state
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)
        self._ascent = ConstrainedAdam(self._hyper, self._parameters, self.learning_rate, moments)
