"""DirichletWISKI: streaming classification, one Gaussian process on a grid per class."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Self

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.input import InputTransform
from botorch.models.utils import fantasize as fantasize_flag
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.means import ConstantMean, Mean
from torch import Size, Tensor

from bo_stream.bases.kernels import Stem, default_kernel
from bo_stream.likelihoods.sites import SoftmaxMoments, sampled_softmax, softmax_moments
from bo_stream.models.checks import check_inputs, check_instance
from bo_stream.models.construction import (
    check_rank,
    choose_box,
    product_kernel,
    warn_of_scaling,
)
from bo_stream.models.inference import InferenceOption
from bo_stream.models.outcomes.gaussian import (
    DirichletScores,
    LabelOutcomes,
    check_alpha,
    check_known,
    check_num_classes,
    checked_first_labels,
    number_of_classes,
)
from bo_stream.models.wiski.grid_model import GridModel
from bo_stream.models.wiski.inference import GridInference
from bo_stream.models.wiski.memory import WiskiMemory
from bo_stream.models.wiski.resolution import GridSize, check_dim

OUTPUTSCALE = 6.0
"""At the start. Scores lie between about -7 (surely not) and 0."""

MEAN = -3.0
"""At the start."""


class DirichletWISKI(GridModel):
    """A streaming classifier: a Gaussian process per class on one grid, with known noise.

    A label is a noisy observation of every class's latent score (Milios et al., 2018; Stanton,
    Maddox, Delbridge and Wilson, 2021, section 5.2 and A.5), so that classification is the
    regression of :class:`~bo_stream.WISKI` with m outputs, and as little is kept of the data.
    Class probabilities are the mean of the softmax of the scores.

    - Memory: O(m 7^d p) for m classes and p grid nodes, fixed until a class appears.
    - Update: O(n m 7^d) for n labels, and O(n m r²) for the whitened statistics; the next
      posterior solves once in O(m r³), r = ``rank``.
    - A fantasy: O(q) cross-covariances and one q x q factor per class, for each set of labels.
    - Exact: the posterior over scores, given the kernel on the grid and α_ε; updates, retractions,
      merges; a class that comes late has the posterior it would have had from the start.
    - Approximate: the kernel as in :class:`~bo_stream.WISKI`; and the likelihood: a label's gamma
      variables are taken as log-normal, so probabilities depend on ``alpha_epsilon``.
    - Learned: the kernel and the mean, by default one for all classes, by
      ``fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))``.
    - When: labels that keep coming, in up to four inputs or through a stem, and up to some tens of
      classes.

    ``posterior`` is that of the scores. ``condition_on_observations`` takes scores, as BoTorch
    has it; :meth:`condition_on_labels` takes labels, and ``fantasize`` draws them.

    Example:
        >>> model = DirichletWISKI(train_X, labels)
        >>> fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> model.update(new_X, new_labels).class_probabilities(test_X)
    """

    tolerance = InferenceOption[float]()
    max_rank = InferenceOption[int]()
    _memory: WiskiMemory
    _inference: GridInference
    _outcomes: LabelOutcomes
    _outcomes_argument = "train_labels"

    def __init__(
        self,
        train_X: Tensor,
        train_labels: Tensor,
        num_classes: int | None = None,
        alpha_epsilon: float = 0.01,
        covar_module: Kernel | None = None,
        mean_module: Mean | None = None,
        input_transform: InputTransform | None = None,
        bounds: Tensor | None = None,
        grid_size: GridSize | None = None,
        tolerance: float = 1e-5,
        max_rank: int = 512,
        stem: Stem | None = None,
    ) -> None:
        """Build the model and put the first labels into memory.

        Args:
            train_X: ``n x d``; n may be 0, which gives the prior.
            train_labels: ``n`` or ``n x 1``, whole numbers from 0, of any dtype.
            num_classes: Classes 0 to ``num_classes - 1``, and no others. None: as many as the
                largest label so far tells, at least two; later labels may bring more.
            alpha_epsilon: Concentration of the classes that a label does not name: the smaller, the
                surer a label.
            covar_module: As in :class:`~bo_stream.WISKI`; of batch shape ``num_classes`` for a
                kernel per class, where that is given. Default: BoTorch's own, scaled, one for all.
            mean_module: As in :class:`~bo_stream.WISKI`. Default: one constant for all classes.
            input_transform: As in :class:`~bo_stream.WISKI`.
            bounds: As in :class:`~bo_stream.WISKI`.
            grid_size: As in :class:`~bo_stream.WISKI`.
            tolerance: As in :class:`~bo_stream.WISKI`. A label is noisy: less is never seen.
            max_rank: As in :class:`~bo_stream.WISKI`.
            stem: As in :class:`~bo_stream.WISKI`.

        Raises:
            BotorchTensorDimensionError: Shapes do not fit together.
            InputDataError: As in :class:`~bo_stream.WISKI`; labels that are no whole numbers from
                0, or beyond ``num_classes`` or ``MAX_CLASSES``.
            UnsupportedError: A batch of models; a kernel or mean per class where later classes may
                come; and as in :class:`~bo_stream.WISKI`.
            ValueError: ``num_classes`` or ``alpha_epsilon`` is out of range; and as in
                :class:`~bo_stream.WISKI`.
        """
        classes, labels = (
            check_num_classes(num_classes),
            checked_first_labels(train_X, train_labels),
        )
        scores = DirichletScores(check_alpha(alpha_epsilon))
        present = classes or number_of_classes(labels, at_least=2)
        check_known(labels, present, fixed=True)
        if classes is None:
            check_shared(covar_module, mean_module)
        targets, noise = scores.of(labels, present, train_X.dtype)
        self._begin(train_X, targets, noise, None)
        self._outcomes = replace(LabelOutcomes.of(targets), scores=scores, num_classes=classes)
        rank = check_rank(tolerance, max_rank)
        inputs = self._first_inputs(train_X, input_transform, stem)
        covar_module = product_kernel(covar_module, inputs.shape[-1])
        dim = check_dim(inputs.shape[-1], covar_module)
        box = choose_box(bounds, train_X, inputs, input_transform, stem)
        if covar_module is None:
            covar_module = ScaleKernel(default_kernel(dim, torch.Size(), box))
            covar_module.outputscale = OUTPUTSCALE
        if mean_module is None:
            mean_module = ConstantMean()
            mean_module.constant = MEAN
        self._set_modules(dim, noise, None, covar_module, mean_module)
        self._inference, self._memory = GridInference.start(
            self.prior, box, grid_size, rank, train_X
        )
        self._standardize_first(train_X, targets, noise)
        self._observe(train_X, *scores.of(labels, present, torch.float64), 1.0)
        warn_of_scaling(inputs, targets.double(), custom_kernel=True)

    @property
    def alpha_epsilon(self) -> float:
        """Concentration of the classes that a label does not name."""
        return self._outcomes.scores.alpha_epsilon

    # --- prediction -------------------------------------------------------------------------------

    def marginals(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances of the scores at single points, ``... x q x m`` each, float64.

        Differentiable in X. Cost O(q m r²), without a q x q matrix.

        Args:
            X: ``... x q x d``.

        Raises:
            BotorchTensorDimensionError: X has the wrong width or too few dimensions.
            InputDataError: X has a wrong dtype or device, is not finite, or is too far outside the
                bounds.
        """
        _, mean, variance = self._marginals(X)
        return mean.mT, variance.clamp_min(0.0).mT

    def label_moments(self, X: Tensor) -> SoftmaxMoments:
        """Class probabilities and expected entropy at single points; deterministic.

        Args and errors as :meth:`marginals`.
        """
        return softmax_moments(*self.marginals(X))

    def class_probabilities(
        self,
        X: Tensor,
        method: Literal["quadrature", "sampling"] = "quadrature",
        num_samples: int = 256,
        seed: int | None = None,
    ) -> Tensor:
        """Posterior mean of the softmax of the scores, ``... x q x m``; differentiable in X.

        Args:
            X: ``... x q x d``.
            method: ``"quadrature"`` is deterministic, with an error below 1e-8 for deviations of
                scores up to about ten; ``"sampling"`` draws scores, as in Milios et al. (2018,
                eq. 8), with an error of about ``0.3 / sqrt(num_samples)``.
            num_samples: For sampling.
            seed: For sampling: of a generator of its own; torch's global one if omitted.

        Raises:
            BotorchTensorDimensionError: X has the wrong width or too few dimensions.
            InputDataError: X has a wrong dtype or device, is not finite, or is too far outside the
                bounds.
            UnsupportedError: The model has the scores of some classes only.
            ValueError: Another method, or ``num_samples`` less than one.
        """
        self._outcomes.check_whole("class_probabilities")
        if method == "quadrature":
            return self.label_moments(X).probabilities.to(X)
        if method != "sampling" or num_samples < 1:
            raise ValueError(
                "Expected method to be 'quadrature' or 'sampling' with num_samples of at least 1, "
                f"got {method!r} and {num_samples}."
            )
        return sampled_softmax(*self.marginals(X), num_samples, seed).to(X)

    # --- hypothetical labels ----------------------------------------------------------------------

    def condition_on_labels(self, X: Tensor, labels: Tensor) -> Self:
        """Condition on hypothetical labels at X; this model stays as it is, its memory is shared.

        Equal to ``update`` on a copy, at O(q) cross-covariances and one q x q factor a class;
        differentiable in X. The returned model predicts and fantasises, but cannot be updated.

        Args:
            X: ``... x q x d``.
            labels: ``q`` or ``...' x q x 1``, of known classes; leading dimensions broadcast
                against those of X.

        Raises:
            BotorchTensorDimensionError: A wrong width, number of rows or batch shape.
            InputDataError: A wrong dtype or device, NaN or infinity; labels that are no whole
                numbers from 0, or of unknown classes.
            UnsupportedError: The model has the scores of some classes only.
        """
        self._outcomes.check_whole("condition_on_labels")
        check_inputs(X, self._input_dim, self.train_targets)
        known = self._outcomes.known_labels(labels, X)
        scores, noise = self._outcomes.scores.of(known, self.num_outputs, torch.float64)
        return self.condition_on_observations(X, scores.to(X), noise=noise.to(X))

    def condition_on_each_label(self, X: Tensor) -> tuple[Self, Tensor]:
        """Condition on each possible label at one point; say how probable each is.

        An expectation over the label is exactly the sum over the first dimension weighted by these
        probabilities; all is differentiable in X.

        Args:
            X: ``... x 1 x d``.

        Returns:
            A model with leading batch dimensions ``m x ...``, and ``m x ...`` probabilities.

        Raises:
            UnsupportedError: More than one point; condition on one after the other.
        """
        self._outcomes.check_whole("condition_on_each_label")
        check_inputs(X, self._input_dim, self.train_targets)
        if X.shape[-2] != 1:
            raise UnsupportedError(
                f"Expected X of one point, `... x 1 x d`, got {X.shape[-2]}: use "
                "condition_on_each_label on the model it returns for the next."
            )
        with fantasize_flag():
            probabilities = self.label_moments(X).probabilities.squeeze(-2).movedim(-1, 0)
            classes = torch.arange(self.num_outputs, device=X.device)
            labels = classes.view(-1, *[1] * (probabilities.ndim - 1), 1, 1)
            model = self.condition_on_labels(X, labels.expand(*probabilities.shape, 1, 1))
        return model, probabilities.to(X)


def check_shared(kernel: Kernel | None, mean: Mean | None) -> None:
    """Check that modules are not per class.

    Raises:
        UnsupportedError: One is.
    """
    if kernel is not None:
        check_instance("covar_module", kernel, Kernel, "ScaleKernel(RBFKernel(ard_num_dims=d))")
    if mean is not None:
        check_instance("mean_module", mean, Mean, "ConstantMean()")
    for name, module in (("covar_module", kernel), ("mean_module", mean)):
        shape = getattr(module, "batch_shape", Size())
        if len(shape) > 0:
            raise UnsupportedError(
                f"Expected {name} without batch shape where later classes may come, got one of "
                f"{tuple(shape)}: a class that comes late has the kernel and mean of all. Pass "
                "num_classes for modules per class."
            )
