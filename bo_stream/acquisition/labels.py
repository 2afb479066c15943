"""Where a label would teach most: mutual information with the scores, and predictive entropy."""

from __future__ import annotations

from abc import abstractmethod

import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.exceptions.errors import UnsupportedError
from botorch.sampling.base import MCSampler
from botorch.sampling.normal import SobolQMCNormalSampler
from botorch.utils.transforms import concatenate_pending_points, t_batch_mode_transform
from torch import Tensor

from bo_stream.acquisition.joint_labels import (
    MAX_CONFIGURATIONS,
    JointEntropies,
    joint_entropies,
)
from bo_stream.models.label_posterior import LabelPosterior
from bo_stream.models.softmax import SoftmaxMoments

NUM_SAMPLES = 128


class LabelAcquisition(AcquisitionFunction):
    """An entropy of the labels at q points.

    One point: deterministic, by quadrature, O(m r²) and O(m T H). More, pending points counted:
    from joint draws of the scores, all joint labels enumerated while there are at most
    ``max_configurations`` of them, else as many drawn.
    """

    def __init__(
        self,
        model: LabelPosterior,
        sampler: MCSampler | None = None,
        X_pending: Tensor | None = None,
        max_configurations: int = MAX_CONFIGURATIONS,
    ) -> None:
        """Keep what it needs.

        Args:
            model: A model of labels, such as ``DirichletWISKI``, that has the scores of all
                classes; it may suppose labels.
            sampler: Of normal samples, for more than one point. Default: 128 of a Sobol sequence.
            X_pending: Points whose labels have been asked for, ``p x d``.
            max_configurations: Joint labels that are enumerated.

        Raises:
            UnsupportedError: Another model.
            ValueError: ``max_configurations`` less than one.
        """
        check_label_model(model)
        check_configurations(max_configurations)
        super().__init__(model=model)
        self._labels = model
        self.sampler = sampler or SobolQMCNormalSampler(torch.Size([NUM_SAMPLES]), seed=0)
        self.max_configurations = max_configurations
        self.set_X_pending(X_pending)

    @concatenate_pending_points
    @t_batch_mode_transform()  # type: ignore[arg-type]
    def forward(self, X: Tensor) -> Tensor:
        """The value of asking for the labels at q points, ``... x q x d -> ...``, in nats."""
        if X.shape[-2] == 1:
            return self._of_one(self._labels.label_moments(X)).squeeze(-1).to(X)
        draws = self.sampler(self._labels.posterior(X)).double().softmax(-1)
        generator = torch.Generator().manual_seed(self.sampler.seed)
        return self._of_several(joint_entropies(draws, self.max_configurations, generator)).to(X)

    @abstractmethod
    def _of_one(self, moments: SoftmaxMoments) -> Tensor:
        """The value of single labels."""

    @abstractmethod
    def _of_several(self, entropies: JointEntropies) -> Tensor:
        """The value of joint labels."""


class qBALD(LabelAcquisition):
    """The mutual information of q labels with the latent scores: Bayesian active learning.

    Asks where the model is unsure for want of labels, not where the classes overlap. Never
    negative, and at most the labels' entropy. Source: Houlsby et al. (2011); for q > 1 Kirsch, van
    Amersfoort and Gal (2019).

    Example:
        >>> X, value = optimize_acqf(qBALD(model), bounds, q=3, num_restarts=4, raw_samples=64)
    """

    def _of_one(self, moments: SoftmaxMoments) -> Tensor:
        return moments.information

    def _of_several(self, entropies: JointEntropies) -> Tensor:
        return entropies.joint - entropies.expected


class PredictiveEntropy(LabelAcquisition):
    """The entropy of q labels: uncertainty sampling.

    High also where the classes overlap, however much is known there.
    """

    def _of_one(self, moments: SoftmaxMoments) -> Tensor:
        return moments.entropy

    def _of_several(self, entropies: JointEntropies) -> Tensor:
        return entropies.joint


def check_label_model(model: LabelPosterior) -> None:
    """Check that a model has class scores, all of them.

    Raises:
        UnsupportedError: It has not.
    """
    if not isinstance(model, LabelPosterior):
        raise UnsupportedError(
            f"Expected model to be one of labels, such as DirichletWISKI, got "
            f"{type(model).__name__}."
        )
    model._check_has_all_classes("An acquisition function of labels")


def check_configurations(max_configurations: int) -> None:
    """Check how many joint labels may be enumerated."""
    if max_configurations < 1:
        raise ValueError(f"Expected max_configurations of at least 1, got {max_configurations}.")
