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
from bo_stream.models.construction import warn_of_scaling
from bo_stream.models.input_transforms import split_transform
from bo_stream.models.local.inference import LocalInference, scaled_priors
from bo_stream.models.local.memory import LocalMemory, Router


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
            train_X: ``batch_shape x n x d``; n may be 0, which gives the prior.
            train_Y: ``batch_shape x n x m``.
            train_Yvar: Known noise variances, ``batch_shape x n x m``; NaN in a row: unknown,
                learned.
            likelihood: A ``GaussianLikelihood``; default: BoTorch's with a log-normal prior, or
                fixed noise where every variance is known.
            covar_module: Any of gpytorch's kernels, of batch shape ``batch_shape x m`` (without m
                if that is 1) or none. Default: BoTorch's own default.
            mean_module: ``ConstantMean`` (default) or ``ZeroMean``.
            outcome_transform: As for :class:`WISKI`; default ``Standardize``.
            input_transform: Any. One with parameters to learn (``Warp``) becomes a part of the
                kernel, ``covar_module.input_transform``, and is learned with it.
            max_size: Largest number s of observations of a local model.
            w_gen: Correlation with the most similar centre below which a new model begins, in (0,
                1).
            nearest: How many models predict at an input.
            max_models: Largest number of models; then the most similar one takes any observation.

        Raises:
            BotorchTensorDimensionError: Shapes do not fit together.
            InputDataError: Wrong dtypes or devices, NaN, infinities, negative variances.
            UnsupportedError: A mean, likelihood or transform that a stream cannot represent.
            ValueError: A number is out of range.
        """
        self._begin(train_X, train_Y, train_Yvar, outcome_transform)
        input_transform, learned = split_transform(input_transform)
        inputs = self._first_inputs(train_X, input_transform)
        self._set_modules(inputs.shape[-1], train_Yvar, likelihood, covar_module, mean_module)
        inputs = self._learn_transform(learned, inputs)
        _check(max_size, w_gen, nearest, max_models)
        self._inference = LocalInference(Router(w_gen, max_models), max_size, nearest)
        dim, device = inputs.shape[-1], train_X.device
        self._memory = LocalMemory.empty(self._output_batch, max_size, dim, device)
        self._standardize_first(train_X, train_Y, train_Yvar)
        if train_X.shape[-2] > 0:
            self._observe(train_X, train_Y, train_Yvar, 1.0)
        warn_of_scaling(inputs, self._standardized(train_Y.double()), covar_module is not None)

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

    @property
    def max_size(self) -> int:
        """Largest number s of observations of a local model."""
        return self._inference.max_size

    @property
    def nearest(self) -> int:
        """How many local models predict at an input."""
        return self._inference.nearest

    def solved_gram(self) -> Tensor:
        """Return what the observations add to the identity in the matrices that a posterior solves.

        ``S K S`` of each local model, S the root of the noise precision, ``C x batch_shape x m x s
        x s``.
        """
        return scaled_priors(self._memory, self._prior)


def _check(max_size: int, w_gen: float, nearest: int, max_models: int) -> None:
    for name, number in (("max_size", max_size), ("nearest", nearest), ("max_models", max_models)):
        checked_number(name, number)
    if not 0.0 < w_gen < 1.0:
        raise ValueError(f"Expected w_gen in (0, 1), a correlation, got {w_gen}.")
