"""The families of an automatic model: which can take it, and how near each is to the exact one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from torch import Tensor

from bo_stream.allocation.oips import Novelty
from bo_stream.bases.inducing import as_read, differentiable_matrix, kernel_matrix
from bo_stream.bases.kernels import stacked_variance
from bo_stream.costs import problem_of
from bo_stream.errors import check_whole
from bo_stream.likelihoods.binomial import BinomialLikelihood
from bo_stream.likelihoods.sites import Sites
from bo_stream.models.auto.exact import ExactCache, ExactInference, ExactMemory
from bo_stream.models.construction import check_rank
from bo_stream.models.inducing.inference import MAX_POINTS, CollapsedInference, empty_memory
from bo_stream.models.inducing.osgpr import WINDOW
from bo_stream.models.inducing.sites import SiteInference
from bo_stream.models.inference import Inference, Prior
from bo_stream.models.memory import Observations
from bo_stream.models.outcomes.likelihood import WINDOW as SITES_WINDOW
from bo_stream.models.outcomes.likelihood import fit_held, held_bound
from bo_stream.models.wiski.inference import GridInference
from bo_stream.models.wiski.resolution import check_dim
from bo_stream.process import PosteriorProcess
from bo_stream.recommendation import exact_until


@dataclass(frozen=True)
class SiteExactInference(ExactInference):
    """The normal posterior of the largest bound, given all rows (Opper and Archambeau, 2009).

    It depends on the rows and the hyperparameters, not on the order in which rows came. The sites
    in the memory are those of a row that counts once.
    """

    def observe(
        self, memory: ExactMemory, cache: ExactCache | None, data: Observations, prior: Prior
    ) -> tuple[ExactMemory, None]:
        """Append rows, or take rows out, and find the sites of all. Cost O(n³) a step."""
        return self.sited(memory.after(data), prior), None

    def process(
        self, memory: ExactMemory, cache: ExactCache | None, prior: Prior, X: Tensor | None = None
    ) -> tuple[PosteriorProcess, ExactCache]:
        """Find the sites at the hyperparameters as they are, and solve, unless cached."""
        if cache is None or not prior.is_in(cache.state):
            memory = self.sited(memory, prior)
        return super().process(memory, cache, prior, X)

    @torch.no_grad()
    def sited(self, memory: ExactMemory, prior: Prior) -> ExactMemory:
        """Find the sites of all rows again, from those that they have. Cost O(n³) a step."""
        rows, weight = memory.rows, memory.weight.unsqueeze(-2)
        if len(rows) == 0:
            return memory
        covariance = kernel_matrix(as_read(prior.kernel), rows.X, rows.X, prior.num_outputs)
        fit = fit_held(_weighted(memory), covariance, prior, memory.weight)
        sites = Sites(fit.sites.precision / weight, fit.sites.shift / weight)
        return replace(memory, rows=replace(rows, sites=sites))

    def objective(
        self, memory: ExactMemory, cache: ExactCache | None, prior: Prior
    ) -> tuple[Tensor, ExactCache | None]:
        """Return the bound at its optimum; see :func:`held_bound`."""
        X = memory.rows.X
        covariance = differentiable_matrix(prior.kernel, X, X, prior.num_outputs)
        return held_bound(_weighted(memory), covariance, prior, memory.weight), cache

    def refitted(
        self, memory: ExactMemory, cache: ExactCache | None, prior: Prior
    ) -> tuple[ExactMemory, ExactCache | None]:
        """Find the sites for new hyperparameters, so that later steps begin near them."""
        if cache is not None and prior.is_in(cache.state):
            return memory, cache
        return self.sited(memory, prior), cache


def _weighted(memory: ExactMemory) -> Observations:
    """Return the rows with sites that count as often as they do."""
    rows, weight = memory.rows, memory.weight.unsqueeze(-2)
    if rows.sites is None:
        return rows
    sites = Sites(rows.sites.precision * weight, rows.sites.shift * weight)
    return replace(rows, sites=sites)


# --- the families that a model can move through: which can take it, and how each is begun --------


EXACT, WISKI, OSGPR, OSVGP = "exact", "WISKI", "OSGPR", "OSVGP"
FAMILIES = (EXACT, WISKI, OSGPR, OSVGP)
"""Names of all, in the order in which they are tried."""

TOLERANCE, MAX_RANK = 1e-9, 1024
"""Truncation tolerance and largest rank of a grid model: :class:`~bo_stream.WISKI`'s defaults."""

NATURAL_STEPS, LEARNING_RATE = 20, 0.02
"""Most natural-gradient steps of an update and learning rate of hyperparameters:
:class:`~bo_stream.OSVGP`'s defaults.
"""

OPTIONS = ("grid_size", "tolerance", "max_rank", "max_points", "window", "hyper_steps")
"""Names of the streaming families' options."""

MOST_EXACT = 2000
"""Most observations that are stored exactly by default, where another family is allowed."""

MOST_COUNTS = 512
"""Most rows of counts that are stored exactly: a step of sites costs several exact posteriors."""

Begun = tuple[Inference[Any, Any], Any]
"""An inference, and a memory of no observations."""


def is_gaussian(likelihood: Likelihood | None) -> bool:
    """Say whether the noise of a likelihood, by default the Gaussian one, is normal."""
    return likelihood is None or isinstance(likelihood, _GaussianLikelihoodBase)


def exact_inference(likelihood: Likelihood) -> ExactInference | None:
    """Return the inference from all rows under a likelihood; None: there is none."""
    if isinstance(likelihood, BinomialLikelihood):
        return SiteExactInference()
    return ExactInference() if is_gaussian(likelihood) else None


def checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """Check names of options, and return a copy.

    Raises:
        TypeError: One is of no family.
        ValueError: One is out of range.
    """
    for name in options:
        if name not in OPTIONS:
            raise TypeError(f"Expected options {', '.join(OPTIONS)}, got {name!r}.")
    check_rank(options.get("tolerance", TOLERANCE), options.get("max_rank", MAX_RANK))
    check_whole("max_points", options.get("max_points", 1))
    for name in ("window", "hyper_steps"):
        check_whole(name, options.get(name, 0), least=0)
    return dict(options)


def allowed_families(
    names: tuple[str, ...] | None, prior: Prior, dim: int, box: Tensor | None
) -> tuple[str, ...]:
    """Check families that are named, or find all that can take a model; exact ones come first.

    Raises:
        UnsupportedError: One that is named cannot take it.
        ValueError: There is none, or an unknown one.
    """
    if names is None:
        able = []
        for name in FAMILIES:
            with suppress(UnsupportedError):
                check_family(name, prior, dim, box)
                able.append(name)
        return tuple(able)
    if not names or not set(names) <= set(FAMILIES):
        raise ValueError(f"Expected families to be some of {', '.join(FAMILIES)}, got {names!r}.")
    for name in names:
        check_family(name, prior, dim, box)
    return tuple(sorted(names, key=lambda name: name != EXACT))


def most_exact(families: Sequence[str], prior: Prior, dim: int, box: Tensor | None) -> int:
    """Choose up to how many observations are stored exactly before the next family follows.

    It is the number up to which :func:`bo_stream.recommend` puts the exact model before that
    family, the second of those given, and at most ``MOST_EXACT``.
    """
    if EXACT not in families or len(families) == 1:
        return MOST_EXACT
    bounded, kernel = box is not None, prior.kernel
    if not is_gaussian(prior.likelihood):
        return MOST_COUNTS
    problem = problem_of(1, dim, prior.num_outputs, 1, None, None, False, bounded, None, kernel)
    return min(max(exact_until(problem, families[:2]), 1), MOST_EXACT)


def check_family(family: str, prior: Prior, dim: int, box: Tensor | None) -> None:
    """Check that a family can take a model.

    Args:
        family: One of ``FAMILIES``.
        prior: Kernel and likelihood of the model.
        dim: Number of inputs as the process has them.
        box: Box in which the inputs lie, ``2 x d``; None where it is not known.

    Raises:
        UnsupportedError: It cannot.
    """
    able: tuple[str, ...] = FAMILIES[:3] if is_gaussian(prior.likelihood) else (OSVGP,)
    if isinstance(prior.likelihood, BinomialLikelihood):
        able = EXACT, OSVGP
    if family not in able:
        raise UnsupportedError(
            f"Expected families to be some of {', '.join(able)} with a "
            f"{type(prior.likelihood).__name__}, got {family}, which cannot take it."
        )
    if family == WISKI:
        check_dim(dim, prior.kernel)
        if box is None:
            raise UnsupportedError(
                "Expected bounds, the box of all inputs, with family WISKI: its grid cannot grow "
                "far beyond. Give bounds, or take OSGPR."
            )


def begin(
    family: str, prior: Prior, like: Tensor, box: Tensor | None, options: dict[str, Any]
) -> Begun:
    """Begin with no observations.

    Args:
        family: One of ``FAMILIES``.
        prior: The hyperparameters.
        like: Inputs of the process, of whose dtype and device observations will be, ``... x d``.
        box: Box in which the inputs lie, ``2 x d``; None where it is not known.
        options: Of the family's public model: ``grid_size``, ``tolerance``, ``max_rank``;
            ``max_points``, ``window``; ``hyper_steps``, and ``fixed``, the names of
            the likelihood's parameters that stay.

    Raises:
        UnsupportedError: The family cannot take the model.
        ValueError: An option is out of range, or the memory would become too large.
    """
    check_family(family, prior, like.shape[-1], box)
    exact = exact_inference(prior.likelihood)
    if family == EXACT and exact is not None:
        return exact, ExactMemory.empty(like.double(), prior.shape, prior.outcomes.columns)
    if family == WISKI and box is not None:
        rank = (options.get("tolerance", TOLERANCE), options.get("max_rank", MAX_RANK))
        return GridInference.start(prior, box, options.get("grid_size"), rank, like)
    most = options.get("max_points", MAX_POINTS)
    memory = empty_memory(like.new_zeros(0, like.shape[-1]), prior, Novelty(most))
    if family == OSGPR:
        return CollapsedInference(most, options.get("window", WINDOW)), memory
    steps, fixed = options.get("hyper_steps", 0), options.get("fixed", ())
    window = options.get("window", SITES_WINDOW)
    inference = SiteInference(most, 1.0, NATURAL_STEPS, 1.0, steps, LEARNING_RATE, fixed, window)
    return inference, memory


# --- how far a posterior is from the exact one, in what a user sees of it ------------------------


COMPARED = 256
"""Most points of each kind at which a posterior is compared with the exact one."""

COMPARABLE = 2048
"""Most rows of which the exact posterior is computed only to be compared with."""

MEAN_ERROR = 0.4
"""Error of the mean, in posterior standard deviations, that is small.

With :data:`VARIANCE_RATIO` it separates, in twelve models fitted to functions of two to four inputs
(``benchmarks/accuracy/hand_overs.py``), five grids that follow the exact posterior (means off by
0.01 to 0.31, variances 0.86 to 1.04 times) from seven that do not (0.66 to 3.6; 0.40 to 1.25). Of
these six passed at 0.05 prior standard deviations at rows. A normal distribution that is off by
both limits is at a divergence of 0.1 nats.
"""

VARIANCE_RATIO = 1.0 / 0.75
"""Ratio of variances, or its inverse, that is small."""

RESOLVED = 0.1
"""Standard deviations below this part of the noise's count as much: the posteriors of functions
without noise are so narrow at rows that nothing an outcome can show would be told apart."""

ROUNDING = 1e-4
"""The same in the prior's standard deviations: what float64 leaves of a variance near zero."""


@dataclass(frozen=True)
class ExactPosterior:
    """The exact posterior at rows, in the middle between neighbouring ones, and in the box.

    Attributes:
        points: ``... x p x d``, of which the first are rows.
        rows: Their number.
        mean: ``... x m x p``.
        variance: The same way.
        prior_variance: The same way.
        floor: Least variance that counts, ``... x m x 1`` or shaped as the others.
    """

    points: Tensor
    rows: int
    mean: Tensor
    variance: Tensor
    prior_variance: Tensor
    floor: Tensor

    @classmethod
    @torch.no_grad()
    def of(
        cls, rows: ExactMemory, cache: Any, prior: Prior, box: Tensor | None
    ) -> ExactPosterior | None:
        """Solve, unless that is cached, and predict. Cost O(n³).

        Args:
            rows: Observations n.
            cache: Of the exact inference.
            prior: The hyperparameters.
            box: That inputs lie in, ``2 x d``; None: that of the rows.

        Returns:
            None without rows, with more than :data:`COMPARABLE`, or where the likelihood has no
            exact posterior.
        """
        inference = exact_inference(prior.likelihood)
        if inference is None or not 0 < len(rows) <= COMPARABLE:
            return None
        process, cache = inference.process(rows, cache, prior)
        some, points = comparison_points(rows.rows.X, box)
        mean, variance = process.marginals(points)
        kernel, stacked = as_read(prior.kernel), points.unsqueeze(-3)
        scale = stacked_variance(kernel, stacked, prior.num_outputs)
        noise = prior.standardized(rows.rows.told)[1].amin(-1, keepdim=True)
        floor = torch.maximum(RESOLVED**2 * noise, ROUNDING**2 * scale)
        return cls(points, some, mean, variance, scale, floor)

    @torch.no_grad()
    def discrepancy(self, process: PosteriorProcess) -> tuple[float, float, float, float, float]:
        """Compare another posterior with it.

        Returns:
            ``mean_error`` to ``largest_ratio`` of a
            :class:`~bo_stream.models.auto.inference.HandOver`.
        """
        mean, variance = process.marginals(self.points)
        error, exact = (mean - self.mean).abs(), torch.maximum(self.variance, self.floor)
        ratio = torch.maximum(variance, self.floor) / exact
        scale, at = self.prior_variance[..., : self.rows], slice(self.rows)
        return (
            float((error[..., at] / scale.sqrt()).max()),
            float(((variance - self.variance)[..., at].abs() / scale).max()),
            float((error / exact.sqrt()).max()),
            float(ratio.min()),
            float(ratio.max()),
        )


def comparison_points(X: Tensor, box: Tensor | None) -> tuple[int, Tensor]:
    """Choose rows, midpoints between each and its nearest other input, and points in a box.

    Args:
        X: Inputs of rows, ``... x n x d``, n at least 1.
        box: ``2 x d``; None: that of the rows.

    Returns:
        The number of rows, and the points, ``... x p x d``, rows first.
    """
    n, d = X.shape[-2:]
    index = torch.linspace(0, n - 1, min(COMPARED, n)).long().to(X.device)
    some, flat = X[..., index, :], X.flatten(0, -2)
    limits = torch.stack((flat.amin(0), flat.amax(0)))
    width = torch.where(limits[1] > limits[0], limits[1] - limits[0], 1.0)
    apart = torch.cdist(some / width, X / width)
    apart = torch.where(apart > 0.0, apart, torch.inf)  # an input that is there twice is none
    nearest = X.gather(-2, apart.argmin(-1, keepdim=True).expand(some.shape))
    limits = limits if box is None else box.to(X)
    inside = torch.quasirandom.SobolEngine(d).draw(COMPARED, dtype=X.dtype).to(X.device)
    inside = (limits[0] + (limits[1] - limits[0]) * inside).expand(*X.shape[:-2], COMPARED, d)
    return len(index), torch.cat((some, 0.5 * (some + nearest), inside), -2)
