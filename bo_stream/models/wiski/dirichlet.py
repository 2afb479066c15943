"""DirichletWISKI: streaming classification, one Gaussian process on a grid per class."""

from __future__ import annotations

from typing import Any, Self

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.input import InputTransform
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from botorch.utils.datasets import SupervisedDataset
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.means import ConstantMean, Mean
from torch import Size, Tensor

from bo_stream.bases.grid.statistics import check_room
from bo_stream.models.checks import check_inputs, check_instance
from bo_stream.models.construction import check_stem, choose_likelihood
from bo_stream.models.stems import Stem
from bo_stream.models.wiski.grid_choice import GridSize
from bo_stream.models.wiski.label_posterior import LabelPosterior
from bo_stream.models.wiski.labels import (
    DirichletScores,
    check_alpha,
    check_known,
    check_num_classes,
    checked_first_labels,
    checked_labels,
    number_of_classes,
    with_unseen_classes,
)
from bo_stream.tensors import keeps_tensors

OUTPUTSCALE = 6.0
"""At the start. Scores lie between about -7 (surely not) and 0."""

MEAN = -3.0
"""At the start."""


def default_kernel(dim: int) -> Kernel:
    """BoTorch's kernel with dimension-scaled priors and an output scale."""
    kernel = ScaleKernel(get_covar_module_with_dim_scaled_prior(dim))
    kernel.outputscale = OUTPUTSCALE
    return kernel


def default_mean() -> Mean:
    """A constant."""
    mean = ConstantMean()
    mean.constant = MEAN
    return mean


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


class DirichletWISKI(LabelPosterior):
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

    ``posterior`` is that of the scores. ``condition_on_observations`` supposes scores, as BoTorch
    has it; :meth:`condition_on_labels` supposes labels, and ``fantasize`` draws them.

    Example:
        >>> model = DirichletWISKI(train_X, labels)
        >>> fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> model.update(new_X, new_labels).class_probabilities(test_X)
    """

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
            mean_module: As there. Default: one constant for all classes.
            input_transform: As there.
            bounds: As there.
            grid_size: As there.
            tolerance: As there. A label is noisy: less than this is never seen.
            max_rank: As there.
            stem: As there.

        Raises:
            BotorchTensorDimensionError: Shapes do not fit together.
            InputDataError: As in :class:`~bo_stream.WISKI`; labels that are no whole numbers from
                0, or beyond ``num_classes`` or ``MAX_CLASSES``.
            UnsupportedError: A batch of models; a kernel or mean per class where later classes may
                come; and as in :class:`~bo_stream.WISKI`.
            ValueError: ``num_classes`` or ``alpha_epsilon`` out of range; as there.
        """
        self._num_classes = check_num_classes(num_classes)
        self._scores = DirichletScores(check_alpha(alpha_epsilon))
        self._has_all_classes = True
        labels = checked_first_labels(train_X, train_labels)
        classes = num_classes or number_of_classes(labels, at_least=2)
        check_known(labels, classes, fixed=True)
        if num_classes is None:
            check_shared(covar_module, mean_module)
        check_stem(stem)
        dim = train_X.shape[-1] if stem is None else stem.k
        scores, noise = self._scores.of(labels, classes, train_X.dtype)
        super().__init__(
            train_X,
            scores,
            noise,
            covar_module=default_kernel(dim) if covar_module is None else covar_module,
            mean_module=default_mean() if mean_module is None else mean_module,
            outcome_transform=None,
            input_transform=input_transform,
            bounds=bounds,
            grid_size=grid_size,
            tolerance=tolerance,
            max_rank=max_rank,
            stem=stem,
        )

    # --- memory -------------------------------------------------------------------------------

    @keeps_tensors
    def update(self, X: Tensor, labels: Tensor, Yvar: Tensor | None = None) -> Self:
        """Put n labels into memory, in place. Cost O(n m (7^d + r²)), whatever came before.

        A label beyond the known classes brings in all up to it, as if they had been there from the
        start, unless the classes were fixed. Inputs outside the bounds grow the grid. Bad input
        raises and changes nothing.

        Args:
            X: ``n x d``; n = 0 changes nothing.
            labels: ``n`` or ``n x 1``, whole numbers from 0, of any dtype.
            Yvar: None: a label's noise is known from ``alpha_epsilon``.

        Raises:
            BotorchTensorDimensionError: Shapes do not fit the model.
            InputDataError: Dtype, device, NaN, infinity, inputs too far outside; labels that are no
                whole numbers from 0, beyond ``MAX_CLASSES``, or of an unknown class where the
                classes are fixed.
            UnsupportedError: The model supposes data, lacks some classes, or Yvar is given.
            ValueError: The grown grid, or that of so many classes, is too large for memory.
        """
        self._check_has_all_classes("update")
        classes = self._num_outputs
        if self._num_classes is None and self._supposed is None:
            check_inputs(X, self._input_dim, self.train_targets)
            classes = number_of_classes(checked_labels(labels, X), at_least=classes)
        grown = self._with_classes(classes)
        return self._become(super(DirichletWISKI, grown).update(X, labels, Yvar))

    @keeps_tensors
    def retract(self, X: Tensor, labels: Tensor, Yvar: Tensor | None = None) -> Self:
        """Take labels out of memory: undoes :meth:`update` with the same arguments.

        Classes stay known. Args and errors as there; also InputDataError for labels of an unknown
        class, or more than are in memory.
        """
        self._check_has_all_classes("retract")
        return super().retract(X, labels, Yvar)

    @keeps_tensors
    def merge(self, other: Self) -> Self:
        """Add another model's memory to this one's, in place, with the classes of both.

        Exact as in :class:`~bo_stream.WISKI`; what one of them has not met is a miss there.

        Raises:
            UnsupportedError: Another class, ``alpha_epsilon``, shape or transform, a model that
                supposes data or lacks some classes, or more classes than this one's fixed ones.
        """
        if not isinstance(other, DirichletWISKI):
            raise UnsupportedError(f"Expected other to be a model of labels, got {type(other)}.")
        self._check_same_labels(other)
        classes = max(self._num_outputs, other._num_outputs)
        mine, theirs = self._with_classes(classes), other._with_classes(classes)
        return self._become(super(DirichletWISKI, mine).merge(theirs))

    def _check_same_labels(self, other: DirichletWISKI) -> None:
        for model in (self, other):
            model._check_has_all_classes("merge")
            model._check_not_supposed("merge")
        if self._scores != other._scores:
            raise UnsupportedError(
                f"Cannot merge models with different alpha_epsilon: {self.alpha_epsilon} and "
                f"{other.alpha_epsilon}."
            )
        if self._num_classes is not None and other._num_outputs > self._num_classes:
            raise UnsupportedError(
                f"Cannot merge a model of {other._num_outputs} classes into one that was built "
                f"with num_classes={self._num_classes}."
            )

    @classmethod
    def construct_inputs(cls, training_data: SupervisedDataset, **kwargs: Any) -> dict[str, Any]:
        """Constructor arguments from a data set whose Y are labels, ``n x 1``."""
        arguments = super().construct_inputs(training_data)
        return {"train_labels": arguments.pop("train_Y"), **arguments, **kwargs}

    def _with_classes(self, classes: int) -> DirichletWISKI:
        """This model, or one that shares all but its memory, which has more classes."""
        if classes == self._num_outputs:
            return self
        check_room(self._memory.grid, classes)
        model, more = self._shallow_copy(), classes - self._num_outputs
        model._set_memory(with_unseen_classes(self._memory, classes, self._scores))
        model._num_outputs = classes
        model._shift = _longer(self._shift, more, self._scores.miss_target)
        model._noise_floor = self._noise_floor.map(lambda v: _longer(v, more, float(v[0])))
        model.likelihood = choose_likelihood(None, model._shift, torch.Size([classes]))
        model._refresh_fixed_noise()
        return model

    def _become(self, model: DirichletWISKI) -> Self:
        self.__dict__.update(model.__dict__)
        return self

    def _select_memory(self, outputs: list[int]) -> None:
        super()._select_memory(outputs)
        self._has_all_classes = False


def _longer(values: Tensor, more: int, value: float) -> Tensor:
    return torch.cat((values, values.new_full((more,), value)))
