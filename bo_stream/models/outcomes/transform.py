"""Outcome transforms in a stream: fixed ones first, then a standardisation that may move."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.outcome import (
    Bilog,
    ChainedOutcomeTransform,
    Log,
    OutcomeTransform,
    Power,
    Standardize,
    StratifiedStandardize,
)
from botorch.posteriors.posterior import Posterior
from torch import Tensor
from torch.nn import Module

from bo_stream.models.checks import check_finite, check_instance

LEAST_SPREAD = 1e-18
"""Least standard deviation that models standardise by unless they are given a transform; float32
holds its square."""

_BOTORCHS_LEAST = 1e-8
"""That of BoTorch's ``Standardize``, which takes outcomes of a smaller unit for constant."""

_FIXED = (Log, Power, Bilog)
_ROUNDING = 1e-9


def default_standardize(outputs: int, batch_shape: torch.Size) -> Standardize:
    """Make the standardisation of outcomes in any unit, spread by ``LEAST_SPREAD`` or more."""
    return Standardize(m=outputs, batch_shape=batch_shape, min_stdv=LEAST_SPREAD)


@dataclass(frozen=True)
class OutcomeChain:
    """An outcome transform split into its fixed part and the standardisation behind it.

    The memory holds outcomes after the fixed part. The standardisation is affine in them, so it can
    be learned anew from the running sums, exactly, at any time.

    Attributes:
        transform: That was checked, or None.
    """

    transform: Module | None

    @cached_property
    def _parts(self) -> tuple[tuple[OutcomeTransform, ...], Standardize | None]:
        """The elementary transforms, first to last: the fixed ones, and a final standardisation."""
        steps: list[OutcomeTransform] = []
        left = [] if self.transform is None else [self.transform]
        while left:
            part = left.pop(0)
            if isinstance(part, ChainedOutcomeTransform):
                left = [*part.values(), *left]
            else:
                steps.append(cast(OutcomeTransform, part))
        if steps and isinstance(last := steps[-1], Standardize):
            return tuple(steps[:-1]), last
        return tuple(steps), None

    @property
    def fixed(self) -> tuple[OutcomeTransform, ...]:
        """The steps before a standardisation, elementwise and without state."""
        return self._parts[0]

    @property
    def standardize(self) -> Standardize | None:
        """The last step, if it standardises."""
        return self._parts[1]

    @classmethod
    def of(cls, transform: Module | None) -> OutcomeChain:
        """Check a transform, step by step.

        Raises:
            UnsupportedError: It has state other than a final ``Standardize``.
        """
        chain = cls(transform)
        for step in (*chain.fixed, chain.standardize):
            if step is not None:
                _check_step(step, step is chain.standardize)
        return chain

    def to_targets(self, Y: Tensor, Yvar: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Apply the fixed part to ``... x n x m`` outcomes and known noise variances.

        Raises:
            InputDataError: Outcomes are not finite after it.
            UnsupportedError: A fixed transform cannot carry noise variances.
        """
        fixed, _ = self._parts
        for step in fixed:
            try:
                Y, Yvar = step(Y, Yvar)
            except NotImplementedError as error:
                raise UnsupportedError(
                    f"{type(step).__name__} cannot transform noise variances: leave out Yvar "
                    "(train_Yvar, noise), or transform Y and Yvar yourself."
                ) from error
        if fixed:
            check_finite("Y after its outcome transform", Y)
        return Y, Yvar

    def untransform(self, posterior: Posterior, outputs: list[int] | None = None) -> Posterior:
        """Undo the fixed part on a posterior.

        Args:
            posterior: Of outcomes after the fixed part.
            outputs: Those that it is of; None: all.
        """
        fixed, _ = self._parts
        for step in reversed(fixed):
            own = step if outputs is None else step.subset_output(outputs)
            posterior = own.untransform_posterior(posterior)
        return posterior

    def offset_and_scale(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and deviation that standardise, shaped like ``like``; 0 and 1 without any."""
        _, standardize = self._parts
        if standardize is None:
            return torch.zeros_like(like), torch.ones_like(like)
        means = standardize.means.to(like).squeeze(-2)
        return means.expand_as(like), standardize.stdvs.to(like).squeeze(-2).expand_as(like)

    def standardized(self, Y: Tensor, like: Tensor) -> Tensor:
        """Return outcomes, ``... x n x m``, in the units of the process.

        Args:
            Y: In original units.
            like: As in :meth:`offset_and_scale`.

        Raises:
            InputDataError: They are not finite after the transform.
        """
        targets, _ = self.to_targets(Y, None)
        offset, scale = self.offset_and_scale(like)
        return (targets - offset.unsqueeze(-2)) / scale.unsqueeze(-2)

    def learn(self, totals: Tensor, shift: Tensor) -> None:
        """Standardise by the running sums, as ``Standardize`` would by all outcomes.

        Args:
            totals: ``[Y, 1]ᵀ [Y, 1]`` of the outcomes less ``shift``, ``batch x m x 2 x 2``.
            shift: ``batch x m``.
        """
        if self.standardize is None:
            return
        mean, stdv = _moments(totals, self.standardize)
        mean = mean + shift
        chosen = self.standardize._outputs
        if chosen is not None:
            left = [i for i in range(mean.shape[-1]) if i not in chosen]
            mean[..., left], stdv[..., left] = 0.0, 1.0
        _assign(self.standardize, mean.unsqueeze(-2), stdv.unsqueeze(-2))


def _moments(totals: Tensor, standardize: Standardize) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation; too few observations left by forgetting keep the last one."""
    count = totals[..., 1, 1]
    mean = totals[..., 0, 1] / torch.where(count > 0, count, 1.0)
    squares = totals[..., 0, 0] - count * mean.square()
    stdv = (squares.clamp_min(0.0) / (count - 1.0).clamp_min(1.0)).sqrt()
    sure = squares > _ROUNDING * totals[..., 0, 0]  # no rounding error of equal outcomes
    usable = (stdv >= standardize._min_stdv) & (count > 1.0) & (sure | (stdv >= _BOTORCHS_LEAST))
    faded = (count < 2.0) & sure
    last = standardize.stdvs.to(stdv).squeeze(-2)
    return mean, torch.where(faded, last, torch.where(usable, stdv, 1.0))


def _assign(standardize: Standardize, means: Tensor, stdvs: Tensor) -> None:
    like = standardize.means
    standardize.means = means.to(like)
    standardize.stdvs = stdvs.to(like)
    standardize._stdvs_sq = standardize.stdvs.square()
    standardize._is_trained = torch.tensor(True, device=like.device)


def _check_step(step: OutcomeTransform, is_last_standardize: bool) -> None:
    check_instance("outcome_transform", step, OutcomeTransform, "Standardize(m=1)")
    if isinstance(step, StratifiedStandardize):
        fault = "its scale depends on the task, so statistics cannot be rescaled"
    elif isinstance(step, _FIXED) and step._outputs is not None:
        fault = "BoTorch cannot undo it on some outputs only; use one model per output (ModelList)"
    elif is_last_standardize or isinstance(step, _FIXED):
        return
    elif isinstance(step, Standardize):
        fault = "a Standardize must be the last of a chain, or it cannot follow the stream"
    else:
        fault = "only Log, Power and Bilog, then Standardize, are known to work in a stream"
    raise UnsupportedError(
        f"outcome_transform {type(step).__name__} cannot be used in a stream: {fault}."
    )
