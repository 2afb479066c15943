"""What a model of class labels predicts, and how labels are supposed."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal, Self

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.utils import fantasize as fantasize_flag
from botorch.sampling.base import MCSampler
from torch import Tensor

from bo_stream.likelihoods.softmax import SoftmaxMoments, sampled_softmax, softmax_moments
from bo_stream.models.checks import check_inputs
from bo_stream.models.memory import Targets
from bo_stream.models.wiski.grid_gp import GridGP
from bo_stream.models.wiski.labels import (
    DirichletScores,
    check_known,
    check_no_variances,
    checked_labels,
)


class LabelPosterior(GridGP):
    """A grid model whose outputs are class scores and whose observations are labels."""

    _scores: DirichletScores
    _num_classes: int | None
    _has_all_classes: bool

    @abstractmethod
    def _with_classes(self, classes: int) -> Self:
        """This model with more classes."""

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

    # --- prediction ---------------------------------------------------------------------------

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

    # --- supposing ----------------------------------------------------------------------------

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
