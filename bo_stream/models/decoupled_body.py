"""What a decoupled model remembers, how it learns and what it predicts: the body of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NoReturn, Self

import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from torch import Tensor

from bo_stream.bases.inducing import frozen
from bo_stream.models.dataset_replay import DatasetReplay
from bo_stream.models.decoupled_bound import Draw, Expanded, drawn_columns, exact_bound
from bo_stream.models.decoupled_choice import DecoupledOptions
from bo_stream.models.decoupled_learner import DecoupledLearner
from bo_stream.models.decoupled_memory import DecoupledMemory
from bo_stream.models.decoupled_process import KernelExpansion, ShiftedProcess
from bo_stream.models.decoupled_start import input_scale
from bo_stream.models.hyperparameters import Hyperparameters
from bo_stream.models.kept_process import KeptProcess
from bo_stream.models.kernel_copy import in_dtype
from bo_stream.models.latent_outcomes import LatentOutcomes
from bo_stream.models.memory import Observations
from bo_stream.models.outcome_model import OutcomeModel
from bo_stream.models.replay import Batch, StreamReplay
from bo_stream.models.solved_gp import SolvedGP
from bo_stream.models.training import train
from bo_stream.module_state import State
from bo_stream.process import WeightSpaceProcess
from bo_stream.variational import ExpectedLogProb
from bo_stream.weights import WeightPosterior

ROWS = 2048
"""Observations that are visited at a time."""


class DecoupledBody(LatentOutcomes, SolvedGP[KeptProcess]):
    """A variational model with one basis for its mean and another for its covariance."""

    _memory: DecoupledMemory
    _options: DecoupledOptions

    def _nothing(self, inputs: Tensor) -> DecoupledMemory:
        like = inputs[..., :0, :].double()
        posterior = self._options.start(self._output_batch, like)
        outcomes = like.new_zeros(*self._batch_shape, 0, self._num_outputs)
        replay = StreamReplay.empty(
            Batch(like, outcomes), self._options.max_rows, self._options.schedule.seed
        )
        unit = float(input_scale(inputs.double()).mean())
        return DecoupledMemory(posterior, replay, 0, unit)

    def _projected(self, inputs: Tensor) -> Tensor:
        return inputs

    # --- memory -------------------------------------------------------------------------------

    def _set_memory(self, memory: DecoupledMemory) -> None:
        self._memory, self._solved = memory, None

    def _take(self, data: Observations) -> None:
        replay = self._memory.replay.plus(Batch(data.X, data.targets.mT))
        learner = self._learner(replace(self._memory, replay=replay), growing=False)
        learner.grow(data.X)
        train(learner, self._options.update_steps, None, progress=False)
        self._adopt(learner)

    def _learner(self, memory: DecoupledMemory, growing: bool) -> DecoupledLearner:
        options = self._options
        return DecoupledLearner(
            memory,
            self._copied(),
            self._fixed,
            self._entered,
            options.growth,
            options.schedule,
            options.learned(memory.unit),
            growing,
        )

    def _copied(self) -> Hyperparameters:
        """The model's own, to be moved apart from it."""
        return Hyperparameters(self.covar_module, self.mean_module, self.likelihood)

    @property
    def _fixed(self) -> list[str]:
        """Names of hyperparameters that stay."""
        return [name for name, p in self.named_parameters() if not p.requires_grad]

    @property
    def _weight(self) -> float:
        """Observations that came for each that is held."""
        replay = self._memory.replay
        return replay.count / max(replay.held, 1)

    @torch.no_grad()
    def _adopt(self, learner: DecoupledLearner) -> None:
        self._take_over(learner.hyper)
        self._set_memory(learner.memory)

    @torch.no_grad()
    def _take_over(self, hyper: Hyperparameters) -> None:
        for name, value in hyper.rounded(self._dtype).named_parameters():
            self.get_parameter(name).copy_(value)

    def _entered(self, batch: Batch) -> Observations:
        """What was drawn, in units of the process: a stream's is so already."""
        if isinstance(self._memory.replay, DatasetReplay):
            batch = batch.map(lambda tensor: tensor.to(self.train_targets))
            self._check_observations(batch.X, batch.Y, None)
            return self._observations(batch.X, batch.Y, None, 1.0)
        targets = batch.Y.mT
        unknown = torch.zeros_like(targets[..., :1, :], dtype=torch.bool)
        return Observations(batch.X, targets, torch.ones_like(targets), unknown, 1.0)

    def _check_retractable(self, X: Tensor) -> None:
        if X.shape[-2] > 0:
            raise UnsupportedError(
                "A DecoupledGP cannot retract observations: its steps have learned from them. "
                "Build it anew without them."
            )

    def merge(self, other: Self) -> NoReturn:
        """Refused: steps on one model's data cannot be added to another's.

        Raises:
            UnsupportedError: Always.
        """
        self._targets_of(other)
        raise UnsupportedError(
            "DecoupledGPs cannot be merged: their posteriors are not sums over data. Update one "
            "with the other's data."
        )

    # --- the bound ----------------------------------------------------------------------------

    def _check_observed(self) -> None:
        if self._memory.replay.held == 0:
            raise InputDataError(
                "Expected observations to learn from, got an empty stream. Give train_X and "
                "train_Y, or update the model first."
            )

    @property
    def num_steps(self) -> int:
        """Steps taken so far, by updates and fits."""
        return self._memory.steps

    @torch.no_grad()
    def elbo(self) -> Tensor:
        """The bound on the log marginal likelihood, ``batch_shape x m``, without m if that is 1.

        Exact for the observations that are held; of a sample its unbiased scaling to all n. Cost
        O(n (M_α d + M_β²) + M_α² d + M_β³). [Cheng2017, eq. 9 and 10]
        """
        return self._from_per_output(self._of_hyperparameters(self._bound))

    def elbo_estimate(self, generator: torch.Generator | None = None) -> Tensor:
        """One unbiased draw of :meth:`elbo`, at the cost of a step.

        Args:
            generator: Of minibatch and columns, on the CPU; torch's own if omitted.

        Raises:
            InputDataError: There are no observations.
            ValueError: Fewer are held than ``batch_size``.
        """
        self._check_observed()
        if generator is None:
            generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
        replay, schedule = self._memory.replay, self._options.schedule
        data = self._entered(replay.draw(schedule.size(replay.held), generator))
        index = drawn_columns(self._memory.posterior, schedule.columns, generator)
        weight = replay.count / len(data)

        def draw(hyper: Hyperparameters) -> Tensor:
            expanded, expected = self._expanded(hyper), self._expected(hyper, data)
            return Draw.of(expanded, data.X, expected, weight, index).value

        return self._from_per_output(self._of_hyperparameters(draw))

    def _log_marginal_likelihood(self) -> Tensor:
        return self._learning_objective()

    def _learning_objective(self) -> Tensor:
        return self._of_hyperparameters(self._bound)

    def _of_hyperparameters(self, rule: Callable[[Hyperparameters], Tensor]) -> Tensor:
        """What a rule makes of them in float64, differentiable in the model's own."""
        own = Hyperparameters.shared(self.covar_module, self.mean_module, self.likelihood)
        return in_dtype(own, torch.float64, rule)

    def _expanded(self, hyper: Hyperparameters) -> Expanded:
        constant = hyper.constant(self._output_batch)
        return Expanded(self._memory.posterior, hyper.covar_module, constant, self._num_outputs)

    def _expected(self, hyper: Hyperparameters, data: Observations) -> ExpectedLogProb:
        outcomes = OutcomeModel(hyper.likelihood, self._num_outputs)
        return outcomes.expected_log_prob(data.targets)

    def _bound(self, hyper: Hyperparameters) -> Tensor:
        return exact_bound(self._expanded(hyper), self._batches(hyper), self._weight)

    def _batches(self, hyper: Hyperparameters) -> Iterator[tuple[Tensor, ExpectedLogProb]]:
        for batch in self._memory.replay.chunks(ROWS):
            data = self._entered(batch)
            yield data.X, self._expected(hyper, data)

    # --- the posterior ------------------------------------------------------------------------

    @torch.no_grad()
    def _solve(self, state: State) -> KeptProcess:
        kernel = frozen(self.covar_module)
        constant = self._prior_mean().clone()
        now = Expanded(self._memory.posterior, kernel, constant, self._num_outputs)
        weights = WeightPosterior.of(now.remaining, now.weights[1])
        base = WeightSpaceProcess(now.basis, weights, constant.unsqueeze(-1))
        expansion = KernelExpansion(kernel, self._memory.posterior.alpha, now.coefficients)
        return KeptProcess(state, ShiftedProcess(base, expansion))
