"""Local Gaussian processes: many small exact models, the baseline of streaming papers."""

from __future__ import annotations

from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.means import Mean
from torch import Tensor

from bo_stream.allocation.allocator import checked_number
from bo_stream.models.base import StreamingGP
from bo_stream.models.inference import InferenceOption
from bo_stream.models.local.inference import LocalInference, LocalMemory, scaled_priors


class LocalGP(StreamingGP):
    """Small exact Gaussian processes side by side, each of the newest data near its centre.

    An observation goes to the local model whose centre (the mean of its inputs) is most like it, by
    the kernel's correlation, or begins a new one; a full model drops its oldest observation.
    Predictions are averages of the nearest models, weighted by the same correlation (Nguyen-Tuong,
    Seeger and Peters, 2008), as the marginals of one joint process that can be conditioned.
    Hyperparameters are shared. Each batch element and output has local models of its own.

    - Memory: O(C s²) for C models of s observations.
    - Update: O(n C) to find the models, O(s³) for each that took an observation.
    - A fantasy: O(q s²) for each model near, and one q x q factor.
    - Exact: while there is one model that is not full, the exact GP.
    - Approximate: a model knows nothing of the others' data; what was dropped is lost, but for the
      standardisation of the outcomes, which is of all of them. Observations stay where they were
      put when hyperparameters move; up to 64 of one update are routed by the same centres.
    - Learned: hyperparameters by the sum of the models' marginal likelihoods, of the data held.
    - ``merge``: each local model of the other joins the one of this model whose centre is most like
      its own, as an observation would, or stays one of its own. A model that gets too full drops
      the oldest, its own first.
    - When: a baseline. Learn the hyperparameters from a first batch: while lengthscales are too
      long, all data are alike and one model keeps the newest of them.

    Example:
        >>> model = LocalGP(train_X, train_Y)
        >>> fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> model.update(new_X, new_Y).posterior(test_X).mean
    """

    _memory: LocalMemory
    _inference: LocalInference
    max_size = InferenceOption[int](fixed=True)
    nearest = InferenceOption[int](fixed=True)

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None = None,
        likelihood: _GaussianLikelihoodBase | None = None,
        covar_module: Kernel | None = None,
        mean_module: Mean | None = None,
        outcome_transform: OutcomeTransform | _DefaultType | None = DEFAULT,
        input_transform: InputTransform | None = None,
        max_size: int = 100,
        w_gen: float = 0.5,
        nearest: int = 3,
        max_models: int = 256,
    ) -> None:
        """Build the model and put the first observations into memory.

        Args:
            train_X: First inputs, ``batch_shape x n x d``; n may be 0.
            train_Y: First outcomes, ``batch_shape x n x m``.
            train_Yvar: Known noise variances, shaped as train_Y; NaN in a row: unknown. Where the
                averages of models lie several standard deviations of known noise from the outcomes,
                the model says so once (``CoarsePointsWarning``).
            likelihood: As for :class:`~bo_stream.WISKI`.
            covar_module: Any of gpytorch's kernels, as for :class:`~bo_stream.OSGPR`.
            mean_module: ``ConstantMean`` (default) or ``ZeroMean``.
            outcome_transform: As for :class:`~bo_stream.WISKI`; default ``Standardize``.
            input_transform: Any, as for :class:`~bo_stream.OSGPR`.
            max_size: Largest number s of observations of a local model.
            w_gen: Correlation with the most similar centre below which a new model begins, in (0,
                1).
            nearest: How many models predict at an input.
            max_models: Largest number of models; then the most similar one takes any observation.

        Raises:
            ValueError: A number is out of range; and all errors that :class:`~bo_stream.OSGPR`
                raises.
        """
        self._begin(train_X, train_Y, train_Yvar, outcome_transform)
        inputs = self._set_inputs_and_modules(
            train_X, train_Yvar, input_transform, likelihood, covar_module, mean_module
        )
        max_size, nearest = checked_number("max_size", max_size), checked_number("nearest", nearest)
        max_models = checked_number("max_models", max_models)
        if not 0.0 < w_gen < 1.0:
            raise ValueError(f"Expected w_gen in (0, 1), a correlation, got {w_gen}.")
        self._inference = LocalInference(w_gen, max_models, max_size, nearest)
        dim, device = inputs.shape[-1], train_X.device
        self._memory = LocalMemory.empty(self._output_batch, max_size, dim, device)
        self._take_first(train_X, train_Y, train_Yvar, inputs, covar_module is not None)

    @property
    def num_models(self) -> Tensor:
        """Number of local models, ``batch_shape x m``."""
        return self._memory.alive.sum(0)

    @property
    def centres(self) -> Tensor:
        """Mean of the inputs of each local model, ``batch_shape x m x C x d``; transformed inputs.

        Beyond :attr:`num_models` they are 0.
        """
        return self._memory.centres.to(self.train_targets)

    def solved_gram(self) -> Tensor:
        """Return what the observations add to the identity in the matrices that a posterior solves.

        ``S K S`` of each local model, S the root of the noise precision, ``C x batch_shape x m x s
        x s``.
        """
        return scaled_priors(self._memory, self.prior)
