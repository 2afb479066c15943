"""Outcomes as a model takes them: the interface, their transforms, and some of several outputs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, cast

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.input import InputTransform
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
from gpytorch import Module
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel
from gpytorch.priors import Prior
from torch import Tensor

from bo_stream.models.checks import check_finite, check_instance, checked_observations
from bo_stream.models.memory import Measured, Memory, Targets
from bo_stream.models.outcomes.noise import NoiseFloor
from bo_stream.process import PosteriorProcess
from bo_stream.tensors import map_tensors

if TYPE_CHECKING:
    from bo_stream.models.inference import Prior


def check_outputs_exist(outputs: list[int], of: int, name: str = "idcs") -> None:
    """Check indices of outputs.

    Raises:
        UnsupportedError: An index is out of range or repeated, or there are none.
    """
    if not outputs or len(set(outputs)) != len(outputs) or not all(0 <= i < of for i in outputs):
        raise UnsupportedError(
            f"Expected {name} to hold distinct outputs in 0 to {of - 1}, got {outputs}."
        )


def chosen_outputs(output_indices: list[int], of: int) -> list[int] | None:
    """Count the outputs that a posterior is asked for from the first; None: all, in their order.

    Indices say nothing to a model of one output, as in BoTorch, whose ``ModelList`` counts them
    over all its models where it gives them noise variances.

    Raises:
        UnsupportedError: An index is out of range or repeated.
    """
    if of == 1:
        return None
    chosen = [i + of if -of <= i < 0 else i for i in output_indices]
    check_outputs_exist(chosen, of, "output_indices")
    return None if chosen == list(range(of)) else chosen


def subset_module(
    module: torch.nn.Module, batch_shape: torch.Size, of: int, outputs: list[int]
) -> torch.nn.Module:
    """Copy a gpytorch module of batch shape ``batch_shape x of`` for some outputs.

    A module that all outputs share is copied as it is.
    """
    copied = deepcopy(module)
    if of == 1:
        return copied
    old = torch.Size((*batch_shape, of))
    new = torch.Size((*batch_shape, *([len(outputs)] if len(outputs) > 1 else [])))
    dimensions = dict[torch.nn.Module, int]()  # of what each constraint or prior is for
    for part in copied.modules():
        for name, constraint in getattr(part, "_constraints", {}).items():
            dimensions[constraint] = getattr(part, name.removesuffix("_constraint")).dim()
        for prior, value_of, _ in getattr(part, "_priors", {}).values():
            dimensions[prior] = value_of(part).dim()
    for part in copied.modules():
        if isinstance(part, Kernel) and part.batch_shape != old:
            continue  # shared by all outputs
        if isinstance(part, InputTransform) or not isinstance(part, Module | Prior | Interval):
            continue  # a transform or a layer of a network: its values are not of outputs
        for parameter in part._parameters.values():
            if parameter is not None and parameter.shape[: len(old)] == old:
                parameter.data = _pick(parameter.data, len(old) - 1, outputs)
        for store in (part._buffers, part.__dict__):
            for name, value in store.items():
                if name == "active_dims":
                    continue  # as many as inputs, not as outputs
                if isinstance(value, Tensor) and value.dim() < dimensions.get(part, 0):
                    continue  # the same for all outputs
                if isinstance(value, Tensor) and value.shape[: len(old)] == old:
                    store[name] = _pick(value, len(old) - 1, outputs)
        for name in ("batch_shape", "_batch_shape"):
            if part.__dict__.get(name) == old and len(old) >= dimensions.get(part, 0):
                part.__dict__[name] = new
    return copied


def subset_moments(
    moments: dict[str, Any], batch_shape: torch.Size, of: int, outputs: list[int]
) -> dict[str, Any]:
    """Copy Adam's state for the parameters that :func:`subset_module` leaves."""
    copied = deepcopy(moments)
    old = torch.Size((*batch_shape, of))
    for state in copied["state"].values() if of > 1 else ():
        for name, value in state.items():
            if value.shape[: len(old)] == old:
                state[name] = _pick(value, len(old) - 1, outputs)
    return copied


def _pick(value: Tensor, dimension: int, outputs: list[int]) -> Tensor:
    chosen = value.index_select(dimension, torch.tensor(outputs, device=value.device))
    return chosen.squeeze(dimension) if len(outputs) == 1 else chosen


# --- outcome transforms in a stream: fixed ones first --------------------------------------------


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
    be learned again from the running sums, exactly, at any time.

    Attributes:
        transform: That was checked, or None.
    """

    transform: torch.nn.Module | None

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
    def of(cls, transform: torch.nn.Module | None) -> OutcomeChain:
        """Check a transform, step by step.

        Raises:
            UnsupportedError: It has state other than a final ``Standardize``.
        """
        chain = cls(transform)
        for step in (*chain.fixed, chain.standardize):
            if step is None:
                continue
            check_instance("outcome_transform", step, OutcomeTransform, "Standardize(m=1)")
            if isinstance(step, StratifiedStandardize):
                fault = "its scale depends on the task, so statistics cannot be rescaled"
            elif isinstance(step, _FIXED) and step._outputs is not None:
                fault = (
                    "BoTorch cannot undo it on some outputs only; use one model per output "
                    "(ModelList)"
                )
            elif step is chain.standardize or isinstance(step, _FIXED):
                continue
            elif isinstance(step, Standardize):
                fault = "a Standardize must be the last of a chain, or it cannot follow the stream"
            else:
                fault = "only Log, Power and Bilog, then Standardize, are known to work in a stream"
            raise UnsupportedError(
                f"outcome_transform {type(step).__name__} cannot be used in a stream: {fault}."
            )
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

    def log_slope(self, Y: Tensor) -> Tensor:
        """Sum the logarithms of the slopes of the fixed part at outcomes, not differentiable."""
        total, Y = torch.zeros((), dtype=torch.float64, device=Y.device), Y.detach().double()
        for step in self.fixed:
            size = Y.abs()
            if isinstance(step, Power):
                logs = math.log(abs(step.power)) + (step.power - 1.0) * size.log()
            else:
                logs = -(size.log() if isinstance(step, Log) else size.log1p())
            total, (Y, _) = total + logs.sum(), step(Y)
        return total

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
        means, stdvs = (getattr(self.standardize, name).squeeze(-2) for name in ("means", "stdvs"))
        stays = (totals[..., 1, 1] == 0.0) & (stdvs > 0.0)  # no observations any more
        mean = torch.where(stays, means.to(mean), mean)
        stdv = torch.where(stays, stdvs.to(stdv), stdv)
        chosen = self.standardize._outputs
        if chosen is not None:
            left = [i for i in range(mean.shape[-1]) if i not in chosen]
            mean[..., left], stdv[..., left] = 0.0, 1.0
        like = self.standardize.means
        self.standardize.means = mean.unsqueeze(-2).to(like)
        self.standardize.stdvs = stdv.unsqueeze(-2).to(like)
        self.standardize._stdvs_sq = self.standardize.stdvs.square()
        self.standardize._is_trained = torch.tensor(True, device=like.device)


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


def subset_transform(transform: OutcomeTransform, outputs: list[int]) -> OutcomeTransform:
    """Copy an outcome transform for some outputs.

    BoTorch's own ``subset_output`` leaves in ``Standardize(m, outputs)`` the indices of the whole.
    """
    whole = deepcopy(transform)
    standardize = OutcomeChain(whole).standardize
    if standardize is None or standardize._outputs is None:
        return whole.subset_output(outputs)
    chosen, standardize._outputs = standardize._outputs, None
    part = whole.subset_output(outputs)
    own = cast(Standardize, OutcomeChain(part).standardize)
    own._outputs = [k for k, i in enumerate(outputs) if i in chosen]
    return part


# --- the interface of outcomes -------------------------------------------------------------------


class NoiseAtInputs(Protocol):
    """Noise variance that depends on the inputs, in units of the process; differentiable."""

    def __call__(self, inputs: Tensor, /) -> Tensor:
        """Map inputs of the process, ``... x q x d``, to ``... x m x q``."""
        ...

    def select(self, outputs: list[int], /) -> NoiseAtInputs:
        """Return the noise of some of the outputs."""
        ...


Drawing = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]
"""Maps values of the process, ``S x ... x m x q``, and a seed to outcomes of the same shape, with
their noise variances where these are not the model's own.
"""


class Outcomes(ABC):
    """How outcomes are stored in memory as targets, and what the process is told of these.

    A value: methods return what has changed, and leave this one as it is.

    Attributes:
        shift: Subtracted from outcomes after the fixed part of their transform, ``batch x m``.
        floor: How small known noise variances may be.
    """

    shift: Tensor
    floor: NoiseFloor
    columns: ClassVar[int] = 1
    """Columns of Y for an output: two for counts."""

    # --- what is observed ------------------------------------------------------------------

    checked = checked_observations

    @abstractmethod
    def encode(self, prior: Prior, Y: Tensor, Yvar: Tensor | None, infers_noise: bool) -> Targets:
        """Transform outcomes and noise variances to the memory's units.

        Args:
            prior: The hyperparameters.
            Y: ``batch x n x m``, of fitting shape, dtype and device.
            Yvar: Known noise variances shaped as Y; NaN: unknown.
            infers_noise: Whether observations without a known variance have the inferred one.

        Returns:
            Targets (see there) and noise variances (1 where unknown), ``batch x m x n`` each, and
            where the noise is known, ``batch x 1 x n``.

        Raises:
            InputDataError: The likelihood cannot have such outcomes; a variance is missing.
            UnsupportedError: The likelihood takes no known variances.
        """

    @abstractmethod
    def standardized(
        self, chain: OutcomeChain, level: Tensor | None, data: Measured
    ) -> tuple[Tensor, Tensor]:
        """Return outcomes and noise variances as the process has them, ``batch x m x n`` each.

        Args:
            chain: The outcome transform.
            level: Noise variance of observations without a known one, ``batch x m``, if any.
            data: Targets and noise variances as :meth:`encode` gives them.
        """

    @abstractmethod
    def target_map(self, chain: OutcomeChain, mean: Tensor) -> Tensor:
        """Return C with ``[targets, 1] @ C`` the standardised outcomes less the prior mean.

        Args:
            chain: The outcome transform.
            mean: Of the process, ``batch x m``.

        Returns:
            ``batch x m x 2 x 1``.
        """

    # --- what is predicted, and what a fantasy observes ---------------------------------------

    @abstractmethod
    def noise_level(self, prior: Prior, memory: Memory) -> Tensor:
        """Return the variance of Gaussian noise, inferred or the mean known one, ``batch x m``.

        Raises:
            UnsupportedError: The likelihood has no Gaussian noise.
        """

    @abstractmethod
    def noise_variance(self, prior: Prior, memory: Memory) -> Tensor:
        """Return the variance of a real outcome given the process, ``batch x m``.

        Raises:
            UnsupportedError: Outcomes are labels or counts.
        """

    @abstractmethod
    def moments(
        self, prior: Prior, mean: Tensor, variance: Tensor, noise: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return mean and variance of outcomes at single points, in units of the process.

        Args:
            prior: The hyperparameters.
            mean: Of the process there, ``... x m x q``.
            variance: Of the process there, shaped as mean.
            noise: Gives the noise variances there.
        """

    @abstractmethod
    def log_density(
        self,
        prior: Prior,
        targets: Tensor,
        mean: Tensor,
        variance: Tensor,
        noise: Callable[[], Tensor],
    ) -> Tensor:
        """Return the log density of outcomes at single points, ``... x m x q``.

        Args:
            prior: The hyperparameters.
            targets: Outcomes in units of the process, ``...' x m x q``.
            mean: As for :meth:`moments`.
            variance: As there.
            noise: As there.

        Raises:
            InputDataError: The likelihood cannot have such outcomes.
        """

    @abstractmethod
    def pseudo_observations(
        self,
        prior: Prior,
        memory: Memory,
        process: PosteriorProcess,
        inputs: Tensor,
        targets: Tensor,
        noise: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return Gaussian outcomes and noise variances that a fantasy conditions the process on.

        Args:
            prior: The hyperparameters.
            memory: Of real observations.
            process: That is conditioned.
            inputs: Transformed, ``... x q x d``.
            targets: Hypothetical outcomes in units of the process, ``... x m x q``.
            noise: Their variances, or None for the model's noise level.

        Returns:
            Two tensors that broadcast to ``... x m x q``.
        """

    @abstractmethod
    def drawing(self, prior: Prior, observation_noise: Tensor | None) -> Drawing | None:
        """Return how outcomes are drawn given the process; None: by adding Gaussian noise.

        Args:
            prior: The hyperparameters.
            observation_noise: Variances to add, or None for the model's own.

        Raises:
            UnsupportedError: Variances are given for outcomes that have none to add.
        """

    # --- outputs that come and go --------------------------------------------------------------

    def outputs_with(self, other: object) -> int:
        """Return the number of outputs after a merge, for which one of the two may get more.

        Args:
            other: Outcomes of the other model, if it is one.

        Raises:
            UnsupportedError: The two cannot be merged.
        """
        return self.shift.shape[-1]

    def grown(self, outputs: int) -> Self:
        """Return the units of more outputs, which all observations had and none named."""
        return self

    def select(self, outputs: list[int]) -> Self:
        """Return the units of some of the outputs."""
        return map_tensors(self, lambda value: value[..., outputs])

    # --- the units of the memory, as they follow a stream: by default they stay ------------------

    rescales: ClassVar[bool]
    """Whether targets in memory can be standardised again."""

    def initialized(self, targets: Tensor, scale: Tensor, zeros_apart: bool, share: float) -> Self:
        """Set the floor of known noise by the variance of the first outcomes.

        Args:
            targets: These, after the fixed part of their transform, ``batch x n x m``.
            scale: Standard deviation by which the outcome transform divides, ``batch x m``.
            zeros_apart: Whether observations without noise are a group of their own.
            share: Smallest positive known noise variance, in parts of the outcomes' variance.
        """
        return self

    def prepared_for(
        self, prior: Prior, memory: Memory, Y: Tensor, Yvar: Tensor | None, sign: float
    ) -> Self:
        """Let shift and floor follow the stream before a batch enters or leaves; warn of raises.

        Args:
            prior: The hyperparameters.
            memory: That the batch is put into, or taken out of.
            Y: ``batch x n x m``.
            Yvar: Known noise variances shaped as Y; NaN: unknown.
            sign: 1 to put in, −1 to take out.

        Raises:
            UnsupportedError: It is not known to what variances that are taken out were raised; see
                :meth:`NoiseFloor.check_retractable`.
        """
        return self

    def with_observations(self, is_found: bool) -> Self:
        """Say whether there are observations in memory; else the next ones set the shift."""
        return self

    def settled(self, totals: Tensor) -> Self:
        """Let the noise of observations said to have none follow the outcomes' variance.

        Returns:
            These outcomes where that changes nothing.
        """
        return self

    def merged(self, other: Self) -> Self:
        """Return the outcomes of two memories together; the other's shift if this one has none."""
        return self


# --- moments of outcomes at single points --------------------------------------------------------


@dataclass(frozen=True)
class Predictive:
    """Mean and variance of outcomes at single points, ``... x q x m`` each.

    Attributes:
        mean: Of a label, its probability; of counts, the positives of a hypothetical survey.
        variance: Of the outcome, noise included.
    """

    mean: Tensor
    variance: Tensor
