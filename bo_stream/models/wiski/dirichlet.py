"""DirichletWISKI: streaming classification, one Gaussian process on a grid per class."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Self

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.input import InputTransform
from botorch.models.utils import fantasize as fantasize_flag
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from botorch.sampling.base import MCSampler
from botorch.utils.datasets import SupervisedDataset
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.means import ConstantMean, Mean
from torch import Size, Tensor

from bo_stream.bases.grid.statistics import check_room
from bo_stream.bases.stems import Stem
from bo_stream.likelihoods.softmax import SoftmaxMoments, sampled_softmax, softmax_moments
from bo_stream.models.checks import check_inputs, check_instance
from bo_stream.models.construction import check_stem, choose_likelihood
from bo_stream.models.memory import Targets
from bo_stream.models.outcomes.gaussian import GaussianOutcomes
from bo_stream.models.wiski.grid_gp import GridGP
from bo_stream.models.wiski.labels import (
    DirichletScores,
    check_alpha,
    check_known,
    check_no_variances,
    check_num_classes,
    checked_first_labels,
    checked_labels,
    number_of_classes,
    with_unseen_classes,
)
from bo_stream.models.wiski.resolution import GridSize
from bo_stream.tensors import keeps_tensors

OUTPUTSCALE = 6.0
"""At the start. Scores lie between about -7 (surely not) and 0."""

MEAN = -3.0
"""At the start."""


class DirichletWISKI(GridGP):
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

    _scores: DirichletScores
    _num_classes: int | None
    _has_all_classes: bool
    _units: GaussianOutcomes

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
        shift = _longer(self._units.shift, more, self._scores.miss_target)
        floor = self._units.floor.map(lambda v: _longer(v, more, float(v[0])))
        model._units = replace(self._units, shift=shift, floor=floor)
        model.likelihood = choose_likelihood(None, shift, torch.Size([classes]))
        model._refresh_fixed_noise()
        return model

    def _become(self, model: DirichletWISKI) -> Self:
        self.__dict__.update(model.__dict__)
        return self

    def _select_memory(self, outputs: list[int]) -> None:
        super()._select_memory(outputs)
        self._has_all_classes = False

    @property
    def alpha_epsilon(self) -> float:
        """Concentration of the classes that a label does not name."""
        return self._scores.alpha_epsilon

    def _check_has_all_classes(self, verb: str) -> None:
        if not self._has_all_classes:
            raise UnsupportedError(
                f"{verb} needs the scores of all classes, got a model of some (subset_output). Use "
                "it on the original model."
            )

    def _check_observations(self, X: Tensor, Y: Tensor, Yvar: Tensor | None) -> None:
        check_no_variances(Yvar)
        check_inputs(X, self._input_dim, self.train_targets)
        labels = checked_labels(Y, X)
        check_known(labels, self.num_outputs, fixed=self._num_classes is not None)
        super()._check_observations(X, *self._scores.of(labels, self.num_outputs, X.dtype))

    def _measured(self, Y: Tensor, Yvar: Tensor | None) -> Targets:
        # the constructor passes scores with their noise, which is least for the label's class
        labels = Y.reshape(-1).long() if Yvar is None else Yvar.argmin(-1)
        return super()._measured(*self._scores.of(labels, self.num_outputs, torch.float64))

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
        self.eval()
        inputs = self.process_inputs(X)
        mean, variance = torch.broadcast_tensors(*self.process(inputs).marginals(inputs))
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
        self._check_has_all_classes("class_probabilities")
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
        """A model that supposes labels at X; this one stays as it is, its memory is shared.

        Equal to ``update`` on a copy, at O(q) cross-covariances and one q x q factor a class;
        differentiable in X. The returned model predicts and supposes, but cannot be updated.

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
        self._check_has_all_classes("condition_on_labels")
        check_inputs(X, self._input_dim, self.train_targets)
        known = checked_labels(labels, X)
        check_known(known, self.num_outputs, fixed=self._num_classes is not None)
        scores, noise = self._scores.of(known, self.num_outputs, torch.float64)
        return self.condition_on_observations(X, scores.to(X), noise=noise.to(X))

    def fantasize(
        self,
        X: Tensor,
        sampler: MCSampler,
        observation_noise: Tensor | None = None,
        **kwargs: Any,
    ) -> Self:
        """A model that supposes labels drawn from their joint posterior at X.

        Scores are drawn by the sampler, and a label from the softmax of each by Gumbel noise from
        the sampler's seed, the same for every batch element. The draw is a step in X: gradients
        flow through where the labels are supposed, not through which; for those that are exact see
        :meth:`suppose_each_label`.

        Args:
            X: ``... x q x d``.
            sampler: Of normal samples; its shape comes first in the returned model's batches.
            observation_noise: None: a label's noise is known.
            kwargs: Ignored, for BoTorch's callers.

        Raises:
            UnsupportedError: ``observation_noise`` is given, or the model has the scores of some
                classes only.
        """
        self._check_has_all_classes("fantasize")
        check_no_variances(observation_noise)
        return self.condition_on_labels(X, self._drawn_labels(X, sampler))

    @torch.no_grad()
    def _drawn_labels(self, X: Tensor, sampler: MCSampler) -> Tensor:
        self._check_fantasy(X, sampler)
        if X.shape[-2] == 0:
            return X.new_empty(*sampler.sample_shape, *X.shape[:-1], 1)
        with fantasize_flag():
            scores = sampler(self.posterior(X))
        samples = sampler.sample_shape
        batches = scores.ndim - len(samples) - 2
        shape = (*samples, *[1] * batches, *scores.shape[-2:])
        generator = torch.Generator().manual_seed(sampler.seed)
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64).to(scores.device)
        gumbel = -(-uniform.clamp_min(1e-300).log()).log()
        return (scores + gumbel).argmax(-1, keepdim=True)

    def suppose_each_label(self, X: Tensor) -> tuple[Self, Tensor]:
        """Models that suppose each possible label at one point, and how probable it is.

        An expectation over the label is exactly the sum over the first dimension weighted by these
        probabilities; all is differentiable in X.

        Args:
            X: ``... x 1 x d``.

        Returns:
            A model with leading batch dimensions ``m x ...``, and ``m x ...`` probabilities.

        Raises:
            UnsupportedError: More than one point; suppose them one after the other.
        """
        self._check_has_all_classes("suppose_each_label")
        check_inputs(X, self._input_dim, self.train_targets)
        if X.shape[-2] != 1:
            raise UnsupportedError(
                f"Expected X of one point, `... x 1 x d`, got {X.shape[-2]}: use "
                "suppose_each_label on the model it returns for the next."
            )
        with fantasize_flag():
            probabilities = self.label_moments(X).probabilities.squeeze(-2).movedim(-1, 0)
        classes = torch.arange(self.num_outputs, device=X.device)
        labels = classes.view(-1, *[1] * (probabilities.ndim - 1), 1, 1)
        model = self.condition_on_labels(X, labels.expand(*probabilities.shape, 1, 1))
        return model, probabilities.to(X)


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


def _longer(values: Tensor, more: int, value: float) -> Tensor:
    return torch.cat((values, values.new_full((more,), value)))
