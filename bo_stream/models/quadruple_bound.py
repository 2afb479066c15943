"""The bound of a quadruply stochastic model: of all data, or one unbiased draw."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from bo_stream.bases.inducing import frozen
from bo_stream.models.full_bound import full_bound, full_divergence, log_precision
from bo_stream.models.hyperparameters import Hyperparameters
from bo_stream.models.outcome_model import OutcomeModel
from bo_stream.models.quadruple_start import QuadrupleStart
from bo_stream.models.sampled_gradient import Estimator, SampledGradient
from bo_stream.variational import ExpectedLogProb

_ROWS = 2048


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
        process = self._process_of(kernel, self._prior_mean())
        index = torch.arange(posterior.size)
        measured = self._diagonal(process.basis, index)
        apart = full_divergence(process.basis, posterior, measured)
        replay = self._memory.replay
        return full_bound(
            process, self._outcomes_of_all(), replay.count / max(replay.held, 1), apart
        )

    def _outcomes_of_all(self) -> Iterator[tuple[Tensor, ExpectedLogProb]]:
        model = OutcomeModel(self.likelihood, self._num_outputs)
        for rows in map(self._in_units, self._memory.replay.chunks(_ROWS)):
            yield rows.X, model.expected_log_prob(rows.Y.mT.double())
