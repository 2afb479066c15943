"""O-SVGP: a streaming sparse variational Gaussian process for any likelihood."""

from __future__ import annotations

from copy import copy, deepcopy
from typing import Any, Self

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean
from torch import Tensor

from bo_stream.allocation.allocator import Allocator
from bo_stream.bases.inducing import InducingBasis
from bo_stream.likelihoods.outcome_model import check_likelihood
from bo_stream.models.hyperparameters import Hyperparameters, subset_moments
from bo_stream.models.inducing.inducing_gp import MAX_POINTS, InducingGP
from bo_stream.models.inducing.memory import InducingMemory, Missed
from bo_stream.models.inducing.online_update import Natural, OnlineUpdate, unit_noise
from bo_stream.models.inducing.points import basis_of_independent
from bo_stream.models.input_transforms import split_transform
from bo_stream.models.latent_choice import check_steps, check_transform, latent_kernel
from bo_stream.models.memory import Observations, WhitenedMemory
from bo_stream.models.objective import NoiseGroup
from bo_stream.models.outcomes.likelihood import LikelihoodOutcomes
from bo_stream.models.stochastic.optimisers import Ascent

ROUND = 20
"""Steps of the hyperparameters before the inducing points are placed anew for them."""


class OSVGP(InducingGP[InducingMemory]):
    """Streaming sparse inference for outcomes that are not normal: labels, counts, outliers.

    An outcome enters the memory as a Gaussian *site* at its function value, found by natural
    gradients of the uncollapsed online bound (Bui, Nguyen and Turner, 2017); from then on it acts
    as a Gaussian observation, as in :class:`~bo_stream.OSGPR`, which this model equals where the
    likelihood is Gaussian.

    - Memory: O(M²) for M inducing points Z, and Z. Data are not kept, but for the latest
      inputs in ``train_inputs``.
    - Update: O(n M² + M³) for n outcomes, times the natural-gradient steps, up to
      ``natural_steps``, that work with ``min(n, M)`` numbers each.
    - A fantasy: as of OSGPR, after one evaluation of the likelihood at the supposed outcomes.
    - Exact: with a Gaussian likelihood all that is exact in OSGPR. With any, the optimum of the
      bound for the batch, if the likelihood is log-concave (Bernoulli, Laplace, Poisson).
    - Approximate: the posterior is normal; sites of earlier batches stay as they were found, so
      that a stream differs a little from its batch, and ``elbo`` bounds the likelihood of the last
      batch times those sites, not of all data; a site of negative precision (Student-t, at
      outliers) is held at zero. What is approximate in OSGPR.
    - Learned: kernel and mean from memory alone, sites held, by
      ``fit_gpytorch_mll(VariationalELBO(model.likelihood, model, num_data))``, whose ``num_data``
      does not matter; kernel, mean and the likelihood's parameters by ``hyper_steps`` steps of Adam
      on the online bound in each update. A fit leaves the likelihood's parameters alone, for they
      need the outcomes, which are gone.
    - When: labels, counts, heavy tails, in any number of inputs. For Gaussian noise OSGPR.

    ``posterior`` is that of the latent process, as BoTorch's ``SingleTaskVariationalGP`` has it;
    :meth:`predictive` and :meth:`log_predictive` are of outcomes.

    Example:
        >>> model = OSVGP(train_X, labels, BernoulliLikelihood(), hyper_steps=100)
        >>> model.hyper_steps = 2
        >>> model.update(new_X, new_labels).predictive(test_X).mean
    """

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        likelihood: Likelihood | None = None,
        covar_module: Kernel | None = None,
        mean_module: Mean | None = None,
        outcome_transform: OutcomeTransform | None = None,
        input_transform: InputTransform | None = None,
        inducing_points: Tensor | None = None,
        allocator: Allocator | _DefaultType | None = DEFAULT,
        max_points: int = MAX_POINTS,
        beta: float = 1.0,
        natural_steps: int = 20,
        natural_rate: float = 1.0,
        hyper_steps: int = 0,
        learning_rate: float = 0.02,
        fantasy_steps: int = 1,
    ) -> None:
        """Build the model and put the first outcomes into memory.

        Args:
            train_X: ``batch_shape x n x d``; n may be 0, which gives the prior.
            train_Y: ``batch_shape x n x m``, in the likelihood's support: labels 0 and 1 for a
                ``BernoulliLikelihood``, whole numbers from 0 for a ``PoissonLikelihood``.
            likelihood: A ``GaussianLikelihood``, or any of gpytorch's of one function value an
                outcome, of batch shape ``batch_shape x m`` (without m if that is 1) or none.
                Default: BoTorch's Gaussian one. It is copied, and the copy's parameters require no
                gradients: see ``hyper_steps``.
            covar_module: As for :class:`~bo_stream.OSGPR`. Default: BoTorch's, with an output
                scale, for nothing else scales the process.
            mean_module: ``ConstantMean`` (default) or ``ZeroMean``.
            outcome_transform: None: the likelihood is of outcomes as they are. ``Standardize``, for
                a likelihood of real outcomes: by the first ones (train_Y), for good.
            input_transform: As for :class:`~bo_stream.OSGPR`.
            inducing_points: As for :class:`~bo_stream.OSGPR`.
            allocator: As there.
            max_points: As there.
            beta: Weight of the divergences in the bound, in (0, 1]; 1 is Bui's. Less counts every
                outcome ``1 / beta`` times: all variances are too small for it, and a stream of
                single points forgets its prior sooner (Stanton et al., 2021, appendix B).
            natural_steps: Most natural-gradient steps on a batch; fewer where it has converged.
            natural_rate: Of a step, in (0, 1]; halved where one would lower the bound.
            hyper_steps: Steps of Adam on all hyperparameters in an update; 0: they stay.
            learning_rate: Of those.
            fantasy_steps: Natural-gradient steps on supposed outcomes. One is within a few
                hundredths of a standard deviation of the exact posterior where the process has one
                of about 1, and rough where nothing is known of a process of large scale; three are
                enough there.

        Raises:
            BotorchTensorDimensionError: Shapes do not fit together.
            InputDataError: Wrong dtypes or devices, NaN, infinities; outcomes that the likelihood
                cannot have.
            UnsupportedError: A mean, likelihood or transform that a stream cannot represent.
            ValueError: An option is out of range; as for :class:`~bo_stream.OSGPR`.
        """
        check_transform(outcome_transform, likelihood)
        check_steps(beta, natural_rate, natural_steps, hyper_steps, fantasy_steps)
        self._begin(train_X, train_Y, None, outcome_transform)
        self._units = LikelihoodOutcomes.of(self._units.shift, beta, fantasy_steps)
        input_transform, learned = split_transform(input_transform)
        inputs = self._first_inputs(train_X, input_transform)
        if covar_module is None:
            covar_module = latent_kernel(inputs.shape[-1], self._parameter_shape)
        self._set_modules(inputs.shape[-1], None, None, covar_module, mean_module)
        self._learn_transform(learned, inputs)
        if likelihood is not None:
            check_likelihood(likelihood, self._parameter_shape)
            self.likelihood = deepcopy(likelihood)
        self.beta, self.natural_steps, self.natural_rate = beta, natural_steps, natural_rate
        self.hyper_steps, self.learning_rate = hyper_steps, learning_rate
        self._fixed = [name for name, p in self.named_parameters() if not p.requires_grad]
        self._moments: dict[str, Any] | None = None
        self.likelihood.requires_grad_(False)
        self._begin_points(inducing_points, allocator, max_points, train_X)
        self._standardize_first(train_X, train_Y, None)
        self._check_observations(train_X, train_Y, None)
        if train_X.shape[-2] > 0:
            self._observe(train_X, train_Y, None, 1.0)

    @torch.no_grad()
    def _take(self, data: Observations) -> None:
        hyper = Hyperparameters(self.covar_module, self.mean_module, self.likelihood)
        steps = self.hyper_steps if data.sign > 0 else 0
        ascent = Ascent(hyper, hyper.learned(self._fixed), self.learning_rate, self._moments)
        for first in range(0, steps, ROUND):
            update, _ = self._online_update(hyper, data, moved=first > 0)
            update.learn(ascent, min(ROUND, steps - first))
        update, allocator = self._online_update(hyper.rounded(self._dtype), data, moved=steps > 0)
        new = update.remembered(update.fit())
        if data.sign < 0.0:
            self._check_solvable(new)
        if steps > 0:
            self._adopt(hyper, ascent)
        self._remember(new, update.basis, allocator)

    def _online_update(
        self, hyper: Hyperparameters, data: Observations, moved: bool
    ) -> tuple[OnlineUpdate, Allocator | None]:
        """The update at hyperparameters that may have moved from the model's, Z placed for them."""
        memory, basis = self._current()
        if moved:
            basis = basis_of_independent(hyper.covar_module, basis.Z, self._num_outputs)
            memory = memory.in_basis(basis)
        allocator = copy(self._allocator)
        if allocator is not None and data.sign > 0:
            memory, basis = self._placed(allocator, memory, basis, data.X)
        natural = Natural(self.beta, self.natural_steps, self.natural_rate)
        return OnlineUpdate(memory, basis, hyper, data, natural), allocator

    def _adopt(self, hyper: Hyperparameters, ascent: Ascent) -> None:
        self._moments = ascent.moments()
        for name, learned in hyper.named_parameters():
            self.get_parameter(name).copy_(learned)

    def _check_retractable(self, X: Tensor) -> None:
        super()._check_retractable(X)
        if X.shape[-2] > 0 and not self._prior.is_gaussian:
            raise UnsupportedError(
                f"retract needs a Gaussian likelihood, got {type(self.likelihood).__name__}: what "
                "an outcome left in memory depends on all that was there when it came. Build the "
                "model anew, or forget."
            )

    def _targets_of(self, other: Self) -> Tensor:
        matrix = super()._targets_of(other)
        mine, theirs = (m._outcomes.offset_and_scale(m._counts()) for m in (self, other))
        if not all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)):
            raise UnsupportedError(
                "Expected a model whose outcomes are standardised alike, got another mean or "
                "standard deviation: sites cannot change their units. Standardise Y yourself, the "
                "same for both, and leave out outcome_transform."
            )
        return matrix

    def _select_memory(self, outputs: list[int]) -> None:
        if self._moments is not None:
            of = self._units.shift.shape[-1]
            self._moments = subset_moments(self._moments, self._batch_shape, of, outputs)
        super()._select_memory(outputs)

    def _groups(self, memory: WhitenedMemory) -> list[NoiseGroup]:
        return [unit_noise(memory.learned)]

    def _missed_variance(self, missed: Missed) -> Tensor:
        return missed.learned

    def _nothing_in(self, basis: InducingBasis) -> InducingMemory:
        return InducingMemory.empty(basis, self._output_batch)
