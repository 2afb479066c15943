"""What a quadruply stochastic model remembers, and how many features it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from bo_stream.bases.spectral import FourierBasis, PointBasis, RelevanceBasis, SampledBasis
from bo_stream.errors import check_one_of, check_whole
from bo_stream.models.outcomes.base import subset_module, subset_moments
from bo_stream.models.quadruply_stochastic.function_process import ControlPoints
from bo_stream.models.stochastic.replay import HoldsRows, Replay


@dataclass(frozen=True)
class FourierFeatures:
    """Random Fourier features, for RBF and Matérn kernels.

    Attributes:
        count: Number of features, even: a cosine and a sine of each frequency. Up to 10⁷; more are
            nearer to the kernel, and cost memory but no time in a step. Of more than the data
            determine a diagonal covariance makes the variance too large: then fewer predict a
            better density.
        seed: Of the frequencies.
    """

    count: int = 20_000
    seed: int = 0

    def __post_init__(self) -> None:
        if check_whole("count", self.count, 2) % 2 != 0:
            raise ValueError(f"Expected an even count of Fourier features, got {self.count}.")


@dataclass(frozen=True)
class InducingAtData:
    """Kernel functions at the data, for any kernel.

    Attributes:
        max_points: Most of them; data beyond add none.
    """

    max_points: int = 100_000

    def __post_init__(self) -> None:
        check_whole("max_points", self.max_points)


@dataclass(frozen=True)
class MeanField:
    """A posterior covariance of weights that is diagonal: none of its columns is dense.

    QSGP-0 of [Evans2020, section 2.2, table 2].
    """

    columns: ClassVar[int] = 0


@dataclass(frozen=True)
class Chevron:
    """A posterior covariance of weights whose root has a few dense columns.

    QSGP-100 of [Evans2020, section 2.2, table 2] is ``Chevron(100)``.

    Attributes:
        columns: How many; the first functions are theirs. Memory and time are this many times
            those of ``MeanField``.
    """

    columns: int

    def __post_init__(self) -> None:
        check_whole("columns", self.columns)


@dataclass(frozen=True)
class Schedule:
    """Sizes and rates of steps; see :class:`~bo_stream.QSGP` for the defaults.

    Attributes:
        batch_size: Observations of a step.
        functions: Basis functions m̃ of a draw.
        control_points: Of the control variate.
        update_steps: Of an update.
        initial_points: Observations of the exact GP before the first step of a fit.
        freeze_steps: Steps before the hyperparameters begin to move.
        learning_rate: AdaGrad's, of the weights.
        hyper_rate: Adam's, of the hyperparameters; 0: they stay.
        half_life: Steps in which both rates fall to half.
        arithmetic: Dtype of steps, and of what is stored of weights.
        seed: Of all draws.
    """

    batch_size: int | None
    functions: int | None
    control_points: int
    update_steps: int
    initial_points: int
    freeze_steps: int
    learning_rate: float
    hyper_rate: float
    half_life: float
    arithmetic: torch.dtype
    seed: int

    def __post_init__(self) -> None:
        least = {"batch_size": 1, "functions": 1, "control_points": 0, "update_steps": 0}
        for name, lowest in {**least, "initial_points": 0, "freeze_steps": 0}.items():
            value = getattr(self, name)
            if value is not None:
                check_whole(name, value, lowest)
        for name in ("learning_rate", "half_life"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"Expected {name} to be positive, got {getattr(self, name)}.")
        if not self.hyper_rate >= 0.0:
            raise ValueError(f"Expected hyper_rate to be at least 0, got {self.hyper_rate}.")
        check_one_of("arithmetic", self.arithmetic, (torch.float32, torch.float64))


# --- memory of a quadruply stochastic model: observations to draw from, functions ----------------


@dataclass(frozen=True)
class QuadruplyStochasticMemory(HoldsRows):
    """Observations, functions, and weights; steps move the tensors of the progress in place.

    Attributes:
        replay: Observations in units of the process, ``n x d`` and ``n x m``.
        layout: The functions.
        progress: Of learning.
        begun: Whether there was a call to fit.
    """

    replay: Replay
    layout: Layout
    progress: Progress
    begun: bool = False

    def basis(self, kernel: Kernel) -> SampledBasis:
        """Return the functions of a kernel, and of their own precisions if they have any."""
        return self.layout.basis(kernel, self.progress.precisions)

    @property
    def counts(self) -> Tensor:
        """Number n of observations that came, ``m``."""
        like = self.progress.coefficients
        return like.new_full((len(like),), float(self.replay.count), dtype=torch.float64)

    def select(self, outputs: list[int]) -> Self:
        """Copy for some of the outputs."""
        of, layout = len(self.progress.coefficients), replace(self.layout, outputs=len(outputs))
        progress = self.progress.map(lambda t: t[outputs])
        if progress.moments is not None:
            progress.moments = subset_moments(progress.moments, torch.Size(), of, outputs)
        control = progress.control
        if control is not None:
            kernel: Any = subset_module(control.basis.kernel, torch.Size(), of, outputs)
            basis = layout.basis(kernel, progress.precisions)
            progress.control = control.select(outputs, of, basis)
        return replace(self, replay=self.replay.select(outputs), layout=layout, progress=progress)

    def to(self, device: torch.device) -> Self:
        """Move to another device; Adam and the control variate begin again there."""
        progress = self.progress.map(lambda t: t.to(device))
        return replace(
            self,
            replay=self.replay.to(device),
            layout=replace(self.layout, points=self.layout.points.to(device)),
            progress=replace(progress, moments=None, control=None),
        )


@dataclass(frozen=True)
class Layout:
    """The functions of a model, as they are now: Fourier features, or kernel functions at points.

    Attributes:
        choice: Of the user.
        points: Where kernel functions are, ``p x d``; none of Fourier features.
        outputs: m.
    """

    choice: FourierFeatures | InducingAtData
    points: Tensor
    outputs: int

    @property
    def size(self) -> int:
        """Number p of functions."""
        choice = self.choice
        return choice.count if isinstance(choice, FourierFeatures) else len(self.points)

    def basis(self, kernel: Kernel, precisions: Tensor | None) -> SampledBasis:
        """Return the functions of a kernel, with precisions ``m x p`` where they have their own."""
        if isinstance(self.choice, FourierFeatures):
            return FourierBasis(kernel, self.choice.count, self.choice.seed)
        if precisions is None:
            return PointBasis(kernel, self.points, self.outputs)
        return RelevanceBasis(kernel, self.points, self.outputs, precisions)

    @property
    def room(self) -> int:
        """Number of inputs that can become points."""
        choice = self.choice
        return 0 if isinstance(choice, FourierFeatures) else choice.max_points - len(self.points)

    def grown(self, X: Tensor) -> Layout:
        """Add inputs, ``n x d``, as points, as many as there is room for."""
        if self.room <= 0:
            return self
        return replace(self, points=torch.cat((self.points, X[: self.room].to(self.points))))


@dataclass
class Progress:
    """Weights and the optimisers' state: what steps change, beside the hyperparameters.

    ``w ~ N(μ, C Cᵀ)`` with C lower triangular, diagonal beyond its first k columns. What learns
    moves the tensors in place. O(m p (2 k + 3)) numbers. [Evans2020, section 2.2]

    Attributes:
        coefficients: μ, then the columns below the diagonal, ``m x p x (1 + k)``.
        log_scale: Logarithms of entries of the diagonal that are learned by steps: the first k of
            them, or all, ``m x k`` or ``m x p``.
        mean_squares: Of the functions at the data, where entries of the diagonal beyond the first k
            follow from them by Proposition 1, ``m x p``; None where those are learned.
        coefficient_slopes: AdaGrad's sums of squared gradients in the coefficients.
        scale_slopes: The same in the learned scales.
        precisions: Of functions that have their own, ``m x p``, else None.
        control: Support points, once there are any.
        moments: Of Adam.
        steps: Taken so far.
    """

    coefficients: Tensor
    log_scale: Tensor
    mean_squares: Tensor | None
    coefficient_slopes: Tensor
    scale_slopes: Tensor
    precisions: Tensor | None = None
    control: ControlPoints | None = None
    moments: dict[str, Any] | None = None
    steps: int = 0

    @classmethod
    def start(
        cls,
        coefficients: Tensor,
        log_scale: Tensor,
        mean_squares: Tensor | None,
        precisions: Tensor | None = None,
    ) -> Progress:
        """Begin before the first step."""
        slopes = torch.zeros_like(coefficients), torch.zeros_like(log_scale)
        return cls(coefficients, log_scale, mean_squares, *slopes, precisions)

    @property
    def size(self) -> int:
        """Number p of weights."""
        return self.coefficients.shape[1]

    def map(self, rule: Callable[[Tensor], Tensor]) -> Progress:
        """Apply a rule to all tensors of the weights, ``m x ...``, but not to support points."""
        tensors = {name: t for name, t in vars(self).items() if isinstance(t, Tensor)}
        mapped: dict[str, Any] = {name: rule(tensor) for name, tensor in tensors.items()}
        return replace(self, **mapped)

    def clone(self) -> Progress:
        """Copy what steps move."""
        copy = self.map(torch.clone)
        if (control := self.control) is not None:
            copy.control = replace(control, values=control.values.clone())
        return copy

    def learned_scale(self, index: Tensor) -> Tensor:
        """Return what is learned of the diagonal, ``m x k``; zeros where it is not."""
        learned = self.log_scale.shape[-1]
        if learned == 0:
            return torch.zeros_like(self.coefficients[:, index, 0])
        return self.log_scale[:, index.clamp_max(learned - 1)] * (index < learned)

    def dense_columns(self, index: Tensor) -> Tensor:
        """Return mean and dense columns of C of some weights, ``m x k x (1 + k)``."""
        scale = self.learned_scale(index)
        return Slice.of(index, self.coefficients[:, index], scale, scale.exp()).columns

    @torch.enable_grad()
    def drawn(
        self, index: Tensor, precision: Tensor, count: float, likelihood: Likelihood
    ) -> tuple[Tensor, Tensor, Slice]:
        """Copy coefficients and learned scales of some functions, to be differentiated in.

        With the slice that is made of them, of n = ``count`` data and with the diagonal of S, ``m x
        k``. Where the bound is best in the diagonal, by Proposition 1, it has no slope in it.
        """
        coefficients = self.coefficients[:, index].requires_grad_()
        log_scale, best = self.learned_scale(index).requires_grad_(), None
        if self.mean_squares is not None:
            best = proposition_1(self.mean_squares[:, index], precision, count, likelihood.noise)
        return coefficients, log_scale, Slice.of(index, coefficients, log_scale, best)

    def grown(self, first: Progress) -> Progress:
        """Add functions as another progress has them before its first step, with all scales."""
        names = ["coefficients", "coefficient_slopes", "mean_squares", "precisions"]
        changes: dict[str, Any] = {}
        if self.mean_squares is None:
            names += ["log_scale", "scale_slopes"]
        else:
            changes["log_scale"] = scales = self.log_scale.clone()
            room = scales[:, self.size :]
            room[:, : first.log_scale.shape[-1]] = first.log_scale[:, : room.shape[-1]]
        for name in names:
            old, new = getattr(self, name), getattr(first, name)
            changes[name] = new if old is None else torch.cat((old, new), 1)
        return replace(self, **changes)


@dataclass(frozen=True)
class Slice:
    """Mean and root C of the covariance of some functions' weights.

    Attributes:
        columns: The mean and the dense columns of C, diagonal included, ``m x k x (1 + columns)``.
        scale: Entries of the diagonal of C where its column is diagonal, else 0, ``m x k``.
        log_diagonal: Logarithms of all entries of the diagonal, ``m x k``.
    """

    columns: Tensor
    scale: Tensor
    log_diagonal: Tensor

    @classmethod
    def of(
        cls, index: Tensor, coefficients: Tensor, log_scale: Tensor, measured: Tensor | None
    ) -> Slice:
        """Build C's rows of some functions, ``k``, differentiable in what is learned.

        Of coefficients ``m x k x (1 + columns)`` and logarithms of the diagonal, ``m x k``, which
        may be anything where ``measured`` is the diagonal by Proposition 1.
        """
        columns = torch.arange(coefficients.shape[-1] - 1, device=index.device)
        below, on = index.unsqueeze(-1) > columns, index.unsqueeze(-1) == columns
        is_dense, log_diagonal = index < len(columns), log_scale
        if measured is not None:
            log_diagonal = torch.where(is_dense, log_scale, measured.log())
        diagonal = log_diagonal.exp()
        rows = coefficients[..., 1:] * below + diagonal.unsqueeze(-1) * on
        joined = torch.cat((coefficients[..., :1], rows), -1)
        return cls(joined, diagonal * ~is_dense, log_diagonal)


@torch.no_grad()
def proposition_1(mean_squares: Tensor, precision: Tensor, count: float, noise: Tensor) -> Tensor:
    """Compute the best entries of a diagonal C, ``m x k``. [Evans2020, proposition 1].

    Of functions with mean squares at n = ``count`` data and diagonal entries of S, ``m x k`` each,
    and of a noise variance, ``m`` or ``m x 1``.
    """
    noise, precision = noise.reshape(-1, 1).to(mean_squares), precision.to(mean_squares)
    return (noise / (count * mean_squares + noise * precision)).sqrt()
