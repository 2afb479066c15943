"""Learning beyond a refit: stems, inducing points, and hyperparameters along with a stream."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.exceptions.warnings import OptimizationWarning
from botorch.optim.closures.core import ForwardBackwardClosure
from botorch.optim.core import OptimizationResult
from botorch.optim.fit import fit_gpytorch_mll_scipy
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor
from torch.nn import Parameter

from bo_stream.bases.grid.contraction import Rewhitening, prior_covariance
from bo_stream.errors import check_whole
from bo_stream.linalg import safe_cholesky, solve_lower
from bo_stream.models.base import StreamingGP
from bo_stream.models.checks import check_instance
from bo_stream.models.clustered.clustered import ClusteredGP
from bo_stream.models.inducing.osgpr import OSGPR
from bo_stream.models.lbfgs import fit_in_logarithms
from bo_stream.models.outcomes.gaussian import GaussianOutcomes
from bo_stream.models.stochastic.budget import ConstrainedAdam, check_rate
from bo_stream.models.wiski.cache import FEW_FEATURES, SolvedSubspace, Subspace, SubspacePrior
from bo_stream.models.wiski.dirichlet import DirichletWISKI
from bo_stream.models.wiski.grid_model import GridModel
from bo_stream.models.wiski.wiski import WISKI

__all__ = ["OnlineLearner", "learn_points", "maximise_stochastically", "pretrain"]

_LEAST_POINTS = 10
"""Fewest points to learn a stem from."""


def pretrain(
    model: GridModel,
    X: Tensor,
    Y: Tensor,
    Yvar: Tensor | None = None,
    maxiter: int = 200,
    report: Callable[[int, float], None] | None = None,
) -> OptimizationResult:
    """Learn the stem and all hyperparameters by the marginal likelihood of a batch, by L-BFGS-B.

    The stem is calibrated on the batch at every step (a batch norm, through which gradients flow).
    Afterwards the model's memory holds exactly this batch, projected by the learned stem. Cost
    O(n r² + r³) an iteration, O(n² r + n³) for n < r. [Stanton2021, section 5.1, where Adam takes
    200 steps]

    Args:
        model: With a stem; its memory is cleared first.
        X: ``n x d``.
        Y: ``n x m``.
        Yvar: Known noise variances shaped as Y; NaN: unknown.
        maxiter: Most iterations.
        report: Called after each with its number and the loss: the negative log posterior of the
            hyperparameters, a point.

    Returns:
        BoTorch's, with the last loss in ``fval``.

    Raises:
        InputDataError: Fewer than ten points, the cases in which ``update`` raises one, or a stem
            that was led out of the grid's cube; nothing is changed then.
        UnsupportedError: The model has no stem, is of counts, or is conditioned on hypothetical
            observations.
    """
    model._check_not_conditioned("pretrain")
    _check_normal(model)
    model.standardized(X, Y, Yvar)  # raises what update would, before anything is dropped
    if model._modules.get("stem") is None:
        raise UnsupportedError(
            "Expected a model with a stem to pretrain, got one without. Learn its hyperparameters "
            "by botorch.fit.fit_gpytorch_mll."
        )
    if X.shape[-2] < _LEAST_POINTS:
        raise InputDataError(
            f"Expected at least {_LEAST_POINTS} points to pretrain a stem on, got {X.shape[-2]}."
        )
    maxiter = check_whole("maxiter", maxiter)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)

    def likelihood() -> Tensor:
        return model.batch_log_marginal_likelihood(X, Y, Yvar, recalibrate=True)

    with _all_undone_on_error(model):
        model.clear().update(X, Y, Yvar).train()
        result = _minimise(
            fit_gpytorch_mll_scipy,  # in logarithms a stem's fits end higher as often as lower
            mll,
            lambda: -_with_priors(mll, likelihood()) / X.shape[-2],
            options={"maxiter": maxiter},
            callback=None if report is None else lambda _, last: report(last.step, last.fval),
        )
        model.zero_grad()
        with torch.no_grad():
            likelihood()  # calibrates the learned stem
        model.clear().update(X, Y, Yvar).eval()
        return result


@contextmanager
def _all_undone_on_error(model: StreamingGP) -> Iterator[None]:
    """Undo what a block that raises has done to parameters and memory, and leave training mode."""
    before = deepcopy(model.state_dict())
    try:
        with model._undone_on_error():
            yield
    except BaseException:
        model.zero_grad()
        model.load_state_dict(before)
        model.eval()
        raise


def learn_points(model: OSGPR, maxiter: int = 30) -> OptimizationResult:
    """Learn inducing points and hyperparameters of an OSGPR together, by L-BFGS-B, in place.

    They move up the online bound. Observations before the window are known by their statistics at
    the old points, the window's rows as they are: a long window is what the points are learned
    from. Unlike a refit, in which these rows have their full covariance, an iteration costs
    O(M³ + window M²), so that a window of thousands of rows is cheap. Source: the bound of Bui,
    Nguyen and Turner (2017, eq. 7), learned as Titsias (2009) does.

    Args:
        model: With observations and inducing points.
        maxiter: Most iterations.

    Returns:
        BoTorch's, with the last loss in ``fval``: the negative bound and log priors, a point.

    Raises:
        UnsupportedError: It is no ``OSGPR``, or conditioned on hypothetical observations.
        ValueError: The model has no observations, or more points than ``max_points``.
    """
    check_instance("model", model, OSGPR, "OSGPR(X, Y)")
    maxiter = check_whole("maxiter", maxiter)
    model._check_not_conditioned("learn_points")
    count = len(model.inducing_points)
    if count == 0:
        raise ValueError("Expected a model with observations to learn points from, got none.")
    if count > model.max_points:
        raise ValueError(
            f"Expected at most max_points = {model.max_points} inducing points to learn, got "
            f"{count}. Raise max_points, or place fewer by place_points."
        )
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    points = Parameter(model.inducing_points.double())

    def loss() -> Tensor:
        return -_with_priors(mll, model.bound_at(points)) / model.num_observations

    with _all_undone_on_error(model):
        model.train()
        state, start = deepcopy(model.state_dict()), loss().detach()
        others, options = {"inducing_points": points}, {"maxiter": maxiter}
        result = _minimise(fit_in_logarithms, mll, loss, others, options=options)
        with torch.no_grad():
            if not bool(loss() <= start):
                model.load_state_dict(state)
                points.copy_(model.inducing_points)
        model.zero_grad()
        model.place_points(points)
        model.eval()
        return result


def maximise_stochastically(
    model: ClusteredGP,
    steps: int = 100,
    learning_rate: float = 0.05,
    probes: int = 10,
    batch_size: int = 1000,
    tolerance: float | None = None,
    seed: int = 0,
) -> ClusteredGP:
    """Learn a model's hyperparameters by Adam on stochastic gradients, in place.

    Each step follows an unbiased estimate of the gradient of the log marginal likelihood and the
    log priors; no matrix is factorised. Cost of a step O(M²) for each iteration of conjugate
    gradients. [Terenin2024, appendix B.2]

    Args:
        model: Not conditioned on hypothetical observations; left in evaluation mode.
        steps: Number of steps, 0 or more.
        learning_rate: Adam's step, 0 or more; for positive parameters in their logarithms.
        probes: Hutchinson's probes in a step.
        batch_size: Centres whose rows of the kernel are differentiated in a step.
        tolerance: Relative residual at which conjugate gradients stop, in (0, 1); the model's if
            omitted.
        seed: Seed of probes and rows.

    Returns:
        The model.

    Raises:
        UnsupportedError: It is no ``ClusteredGP``, or conditioned on hypothetical observations.
        ValueError: A number is out of range.
    """
    check_instance("model", model, ClusteredGP, "ClusteredGP(X, Y)")
    model._check_not_conditioned("maximise_stochastically")
    steps = check_whole("steps", steps, least=0)
    probes = check_whole("probes", probes)
    batch_size = check_whole("batch_size", batch_size)
    if tolerance is not None and not 0.0 < tolerance < 1.0:
        raise ValueError(f"Expected tolerance in (0, 1), got {tolerance}.")
    generator = torch.Generator().manual_seed(seed)
    ascent = ConstrainedAdam(model, _hyperparameters(model), learning_rate)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    count = max(model.num_observations, 1.0)
    model.train()
    try:
        for _ in range(steps):
            objective = model.stochastic_objective(probes, batch_size, generator, tolerance)
            ascent.ascend(_with_priors(mll, objective) / count)
    finally:
        model.eval()
    return model


def _minimise(
    fit: Callable[..., OptimizationResult],
    mll: ExactMarginalLogLikelihood,
    loss: Callable[[], Tensor],
    others: Mapping[str, Parameter] = MappingProxyType({}),
    **kwargs: Any,
) -> OptimizationResult:
    """Minimise a scalar loss in a model's learnable parameters, and in others, by L-BFGS-B.

    Reaching the most iterations is no failure. ``fit`` is BoTorch's ``fit_gpytorch_mll_scipy`` or a
    function that takes the same arguments, of which ``kwargs`` are some.
    """
    parameters = {name: p for name, p in mll.named_parameters() if p.requires_grad} | dict(others)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizationWarning)
        closure = ForwardBackwardClosure(loss, parameters)
        return fit(mll, parameters=parameters, closure=closure, **kwargs)


def _check_normal(model: GridModel) -> None:
    """Check that a model's outcomes have normal noise, as those of counts do not."""
    if not isinstance(model.outcomes, GaussianOutcomes):
        raise UnsupportedError(
            "Expected model to be one of outcomes with normal noise, or of labels, got a "
            f"{type(model).__name__} with a {type(model.likelihood).__name__}. Refit it by "
            "botorch.fit.fit_gpytorch_mll."
        )


def _stem_parameters(model: StreamingGP) -> list[Parameter]:
    """Return the learnable parameters of the stem, none where there is no stem."""
    stem = model._modules.get("stem")
    return [] if stem is None else [p for p in stem.parameters() if p.requires_grad]


def _hyperparameters(model: StreamingGP) -> list[Parameter]:
    """Return the learnable parameters of kernel, mean and likelihood."""
    own = {id(p) for p in _stem_parameters(model)}
    return [p for p in model.parameters() if p.requires_grad and id(p) not in own]


def _with_priors(mll: ExactMarginalLogLikelihood, log_likelihood: Tensor) -> Tensor:
    """Add the log priors of all hyperparameters to a log likelihood, and sum over outputs."""
    return mll._add_other_terms(log_likelihood.clone(), []).sum()


# --- learning along with a stream: one gradient step of the stem, then one of the kernel ---------


LEFT_OUT = 1e-3
"""Prior variance that may lie outside the features, as a fraction of the noise variance."""

_UNTIL = 2.0
"""Features are chosen again when this many times as much lies outside."""


class OnlineLearner:
    """Feeds a stream to a model and lets it learn with every batch, at constant cost.

    A step is algorithm 1 of [Stanton2021]: the stem moves up the gradient of the log predictive
    density of the new observations, which is the gradient of the marginal likelihood with all
    earlier projections fixed (eq. 18 in the form of A.5); the observations enter the memory by the
    new stem; then the hyperparameters move up the gradient of the marginal likelihood (eq. 13).

    Exact: both gradients, up to features that carry a thousandth of the noise variance
    (:class:`OnlineObjective`). Approximate: earlier observations keep the projections they were
    observed with, so a stem that has moved far no longer agrees with its memory; :meth:`refresh`
    projects the stored ones again, at most ``keep`` of them. On the UCI streams of
    ``benchmarks/accuracy/uci.py`` :meth:`relearn` while the first 2,000 are stored, then a stem
    that stays (``stem_learning_rate=0``), does better than stepping the stem throughout. Outcomes
    are standardised as the model has them, and by the first points where it was built empty.

    Cost of a step of q points: O(q (7^k + r²) + r³) regardless of the number of earlier
    observations, with k grid dimensions and as few features r as the noise allows.

    Example:
        >>> learner = OnlineLearner(model)
        >>> for x, y in stream:
        ...     learner.step(x, y)
    """

    def __init__(
        self,
        model: WISKI | DirichletWISKI,
        learning_rate: float = 0.005,
        stem_learning_rate: float = 0.0005,
        keep: int = 0,
        seed: int = 0,
    ) -> None:
        """Start with fresh moments of Adam.

        Args:
            model: On a grid, of outcomes or of labels, with or without a stem.
            learning_rate: Adam's step for the hyperparameters; 0: they stay.
            stem_learning_rate: Adam's step for the stem's parameters; 0: they stay.
            keep: Most observations to store, a uniform sample of the stream; of what came since the
                model's last ``forget``, ``retract`` or ``clear``, if there was one: of no use where
                each step forgets.
            seed: Seed of that sample.

        Raises:
            UnsupportedError: Another model; noise that depends on the inputs is not learned so, nor
                are counts. Or a budget for a model with a batch shape.
            ValueError: A rate that is negative or not finite, or a budget that is no whole number
                from 0.
        """
        if not isinstance(model, WISKI | DirichletWISKI):
            raise UnsupportedError(
                f"Expected model to be a WISKI or a DirichletWISKI, got a {type(model).__name__}. "
                "Refit others from time to time: fit_gpytorch_mll."
            )
        _check_normal(model)
        check_rate("learning_rate", learning_rate)
        check_rate("stem_learning_rate", stem_learning_rate)
        keep = check_whole("keep", keep, least=0)
        if keep > 0 and len(model.batch_shape) > 0:
            raise UnsupportedError(
                f"Expected keep = 0 for a model with a batch shape, {tuple(model.batch_shape)}, "
                f"got {keep}. Make a model for each element."
            )
        self.model = model.eval()
        is_raw = bool((model.outcome_scale() == 1.0).all())  # else it was cleared
        can = model.prior.chain.standardize is not None
        self._standardizes = can and model.num_observations == 0.0 and is_raw
        self._mll = ExactMarginalLogLikelihood(model.likelihood, model)
        self._keep, self._seen, self._generator = keep, 0, torch.Generator().manual_seed(seed)
        self._stored: list[StoredObservation] = []
        self._removals = model._removals
        self._kernel = ConstrainedAdam(model, _hyperparameters(model), learning_rate)
        self._stem = ConstrainedAdam(model, _stem_parameters(model), stem_learning_rate)

    def step(self, X: Tensor, Y: Tensor, Yvar: Tensor | None = None) -> float:
        """Observe a batch and learn from it. Bad input raises and changes nothing.

        [Stanton2021, algorithm 1]

        Args:
            X: ``q x d``.
            Y: ``q x m``.
            Yvar: Known noise variances shaped as Y; NaN: unknown.

        Returns:
            The log density of Y that the model predicted before (progressive validation), a point
            and in units of the outcomes; 0 of no points, which change nothing.

        Raises:
            InputDataError: The cases in which ``update`` raises one; a label of a class that is
                new, which has no density yet: give it to ``model.update``; a stem of one's own
                whose step led the batch out of the grid's cube: it stays as it was.
        """
        if X.shape[-2] == 0:
            self.model.update(X, Y, Yvar)  # checks them
            return 0.0
        objective, stem = OnlineObjective(self.model), _stem_parameters(self.model)
        previous, moments = [p.detach().clone() for p in stem], self._stem.moments()
        with torch.set_grad_enabled(self._stem.learns):
            density = objective.log_density(X, Y, Yvar)
        self._stem.ascend(density)
        try:
            self.model.update(X, Y, Yvar)
        except BaseException:
            with torch.no_grad():
                for parameter, value in zip(stem, previous, strict=True):
                    parameter.copy_(value)
            self._stem.restore(moments)
            raise
        if self._standardizes:
            self.model.train().eval()  # by all so far
            objective = OnlineObjective(self.model)
            self._standardizes = bool((self.model.outcome_scale() == 1.0).all())
        self.offer(X, Y, Yvar)
        if self._kernel.learns:
            count = max(self.model.num_observations, 1.0)
            value = _with_priors(self._mll, objective.log_marginal_likelihood())
            self._kernel.ascend(value / count)
        return float(density.detach()) / X.shape[-2]

    def offer(self, X: Tensor, Y: Tensor, Yvar: Tensor | None = None) -> None:
        """Sample observations to store, as :meth:`step` does with its own.

        For the observations of a pretraining, which entered the memory by the present stem. Source:
        Vitter (1985), algorithm R.
        """
        if self._keep == 0:
            return
        self._drop_removed()
        Y = Y.unsqueeze(-1) if Y.ndim < X.ndim else Y  # labels may come so
        variances = [None] * len(X) if Yvar is None else [one.clone() for one in Yvar]
        for x, y, noise, at in zip(X, Y, variances, self.model.coordinates(X), strict=True):
            self._seen += 1
            index = len(self._stored)
            if index == self._keep:
                index = int(torch.randint(self._seen, (), generator=self._generator))
            if index < self._keep:  # append, or replace one
                observation = StoredObservation(x.clone(), y.clone(), noise, at.clone())
                self._stored[index : index + 1] = [observation]

    def _drop_removed(self) -> None:
        """Begin the sample again where the model has taken out or forgotten observations."""
        if self._removals != self.model._removals:
            self._stored, self._seen, self._removals = [], 0, self.model._removals

    def relearn(self, maxiter: int = 200) -> None:
        """Learn the stem and all hyperparameters again from the stored observations; refresh these.

        As :func:`bo_stream.learning.pretrain` in ``maxiter`` iterations on the stored observations.
        While all are stored the model is afterwards the pretrained one; others stay where they
        were projected. Cost O(keep · r² + r³) an iteration, regardless of the stream's length.

        Raises:
            InputDataError: Fewer than ten observations are stored, as after ``forget``, ``retract``
                or ``clear`` of the model; nothing is changed then.
            UnsupportedError: The model has no stem, or observations on several grids, after
                ``refine``; nothing is changed then.
        """
        self._drop_removed()
        if not self._stored:
            raise InputDataError(
                "Expected kept observations, got none: give keep a budget, and take more steps "
                "after forget, retract or clear of the model, which kept ones do not survive."
            )
        learned = deepcopy(self.model)
        pretrain(learned, *_columns(self._stored), maxiter)
        with _all_undone_on_error(self.model):
            self.model.load_state_dict(learned.state_dict())
            self.model.eval()
            self.refresh()

    def refresh(self, n_kept: int | None = None) -> None:
        """Project n stored observations, or all, again, by the present stem. Cost O(n 7^k).

        Exact for these, the longest stored first: the memory is as if they had entered it by this
        stem. All others stay where they were projected when they came. With a budget for the whole
        stream the model equals one that is built from the stream by the present stem. None are
        stored from before the model's last ``forget``, ``retract`` or ``clear``.
        """
        self._drop_removed()
        most = len(self._stored)
        if n_kept is not None and check_whole("n_kept", n_kept, least=0) > most:
            raise ValueError(f"Expected n_kept from 0 to the {most} kept, got {n_kept}.")
        some = self._stored[:n_kept]
        if not some:
            return
        X, Y, Yvar = _columns(some)
        self.model.reproject(X, Y, torch.stack([one.coordinates for one in some]), Yvar)
        for one, coordinates in zip(some, self.model.coordinates(X), strict=True):
            one.coordinates = coordinates


class OnlineObjective:
    """A model at its present hyperparameters, in features that were chosen at earlier ones.

    A kernel that has moved a little is, in those features, another prior of their weights. So
    neither its eigenvectors nor the memory in them are computed again until too much of its
    variance lies outside. Valid until a hyperparameter changes; observations may come in between.

    Of many features the posterior is solved once: observations that come in between change it by
    low rank, so that both functions share one factorisation. None is differentiated.

    Cost: O(r³), with as few features r as leave out ``left_out`` of the noise variance. Of many it
    is one Cholesky factor, and its inverse for the gradient of the marginal likelihood.
    """

    def __init__(self, model: WISKI | DirichletWISKI, left_out: float = LEFT_OUT) -> None:
        """Take the model's earlier features, or choose new ones."""
        self._model = model
        self._left_out = left_out
        self._kernel = model.inference.kernel(model.prior)
        self._choose_features()

    def _choose_features(self) -> None:
        """Choose features unless enough of the kernel is in the earlier ones."""
        model, subspace = self._model, self._subspace
        if subspace is not None:
            self._prior = self._prior_of(subspace)
            if isinstance(self._prior, Rewhitening):
                variance = self._prior.variance()
            else:
                variance = self._prior.diagonal(dim1=-2, dim2=-1)
            most = _UNTIL * (self._left_out * model.noise_level()).maximum(subspace.missed)
            if bool((subspace.outside(variance, self._kernel.scale()) <= most).all()):
                return
        subspace, model._cache = model.inference.following(
            model.memory, model._cache, model.prior, self._left_out
        )
        self._prior = self._prior_of(subspace)

    def _prior_of(self, subspace: Subspace) -> Tensor | Rewhitening:
        """Return the covariance of few features' weights, or how many are whitened again."""
        few = subspace.basis.rank <= FEW_FEATURES
        return (prior_covariance if few else Rewhitening.of)(subspace.basis, self._kernel)

    def log_density(self, X: Tensor, Y: Tensor, Yvar: Tensor | None = None) -> Tensor:
        """``log p(Y | memory)`` of a batch in units of the outcomes, differentiable in the stem.

        Summed over points, outputs and batch elements. Cost O(r³ + q r² + q³), without r³ where
        neither memory nor hyperparameters have changed but by small updates. X is
        ``... x q x d``, Y and Yvar are ``... x q x m``. [Stanton2021, eq. A.5]
        """
        model, (subspace, posterior) = self._model, self._posterior()
        outcomes, noise = model.standardized(X, Y, Yvar)
        features = subspace.basis.features(model.observation_inputs(X))
        mean, covariance = posterior.at(features, model.prior)
        innovation = outcomes - model.prior.mean.unsqueeze(-1).detach() - mean
        factor = safe_cholesky(covariance + torch.diag_embed(noise.detach()))
        white = solve_lower(factor, innovation.unsqueeze(-1))
        logs = factor.diagonal(dim1=-2, dim2=-1).log().sum()
        constant = 0.5 * innovation.numel() * math.log(2.0 * math.pi)
        normal = -0.5 * white.square().sum() - logs - constant
        scale = outcomes.shape[-1] * model.outcome_scale().log().sum()
        return normal - scale + model.prior.chain.log_slope(Y)

    def log_marginal_likelihood(self) -> Tensor:
        """Return the log marginal likelihood of all observations, ``batch_shape x m``.

        Differentiable in the hyperparameters.
        """
        model = self._model
        value = self._posterior()[1].log_marginal_likelihood(self._kernel, model.prior)
        return model._from_per_output(value)

    @property
    def _subspace(self) -> Subspace | None:
        return None if self._model._cache is None else self._model._cache.subspace

    def _posterior(self) -> tuple[Subspace, SubspacePrior | SolvedSubspace]:
        """Return the features, and the posterior in them: solved unless the model has it."""
        model = self._model
        if self._subspace is None:  # the memory was changed other than by a small batch
            self._choose_features()
        cache = model._cache
        subspace, followed, prior = cache.subspace, cache.followed, self._prior
        if not isinstance(prior, Rewhitening):
            return subspace, SubspacePrior(subspace.memory, prior)
        if followed is None or not (
            followed.whitening is prior or followed.is_of(subspace, model.prior)
        ):
            followed = SolvedSubspace.of(subspace, prior, model.prior)
            model._cache = replace(cache, followed=followed)
        return subspace, followed


@dataclass
class StoredObservation:
    """An observation that was sampled from a stream.

    Attributes:
        X: Input, ``d``.
        Y: Outcomes, ``m``.
        Yvar: Known noise variances, ``m``, or None.
        coordinates: Its position on the grid when it entered the memory, ``k``.
    """

    X: Tensor
    Y: Tensor
    Yvar: Tensor | None
    coordinates: Tensor


def _columns(stored: Sequence[StoredObservation]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return X, ``n x d``, Y, ``n x m``, and noise variances, ``n x m``, NaN where unknown."""
    X, Y = torch.stack([one.X for one in stored]), torch.stack([one.Y for one in stored])
    if all(one.Yvar is None for one in stored):
        return X, Y, None
    unknown = torch.full_like(Y[0], torch.nan)
    return X, Y, torch.stack([unknown if one.Yvar is None else one.Yvar for one in stored])
