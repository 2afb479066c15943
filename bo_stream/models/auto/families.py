"""The families that a model can move through: which can take it, and how each is begun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from botorch.exceptions.errors import UnsupportedError
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from torch import Tensor

from bo_stream.allocation.allocator import checked_number
from bo_stream.allocation.novelty import Novelty
from bo_stream.likelihoods.binomial import BinomialLikelihood
from bo_stream.models.auto.exact import ExactInference, ExactMemory
from bo_stream.models.auto.sites import SiteExactInference
from bo_stream.models.construction import check_rank
from bo_stream.models.held_sites import WINDOW as SITES_WINDOW
from bo_stream.models.inducing.inference import (
    MAX_POINTS,
    CollapsedInference,
    empty_memory,
)
from bo_stream.models.inducing.osgpr import WINDOW
from bo_stream.models.inducing.sites import SiteInference
from bo_stream.models.inference import Inference
from bo_stream.models.prior import Prior
from bo_stream.models.wiski.inference import GridInference
from bo_stream.models.wiski.resolution import check_dim
from bo_stream.recommendation.problem import problem_of
from bo_stream.recommendation.recommend import exact_until

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
"""Most observations that are held exactly by default, where another family is allowed."""

MOST_COUNTS = 512
"""Most rows of counts that are held so: a step of sites costs several exact posteriors."""

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
    checked_number("max_points", options.get("max_points", 1))
    for name in ("window", "hyper_steps"):
        checked_number(name, options.get(name, 0), least=0)
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
        return tuple(name for name in FAMILIES if _takes(name, prior, dim, box))
    if not names or not set(names) <= set(FAMILIES):
        raise ValueError(f"Expected families to be some of {', '.join(FAMILIES)}, got {names!r}.")
    for name in names:
        check_family(name, prior, dim, box)
    return tuple(sorted(names, key=lambda name: name != EXACT))


def _takes(family: str, prior: Prior, dim: int, box: Tensor | None) -> bool:
    try:
        check_family(family, prior, dim, box)
    except UnsupportedError:
        return False
    return True


def most_exact(families: Sequence[str], prior: Prior, dim: int, box: Tensor | None) -> int:
    """Choose up to how many observations are held exactly before the next family follows.

    It is the number up to which :func:`bo_stream.recommend` puts the exact model before that
    family, and at most ``MOST_EXACT``.
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
    able = _able(prior.likelihood)
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


def _able(likelihood: Likelihood) -> tuple[str, ...]:
    """Return the families that can take a likelihood."""
    if isinstance(likelihood, BinomialLikelihood):
        return EXACT, OSVGP
    return FAMILIES[:3] if is_gaussian(likelihood) else (OSVGP,)


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
            hyperparameters that stay.

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
