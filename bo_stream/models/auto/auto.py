"""A model that is exact at first and moves to the family that suits when that is cheaper."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Self

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.means import Mean
from torch import Tensor

from bo_stream.errors import check_whole
from bo_stream.likelihoods.outcome_model import check_likelihood
from bo_stream.models.auto.families import (
    EXACT,
    FAMILIES,
    allowed_families,
    checked_options,
    is_gaussian,
    most_exact,
)
from bo_stream.models.auto.families import OSGPR as SPARSE
from bo_stream.models.auto.families import OSVGP as VARIATIONAL
from bo_stream.models.auto.families import WISKI as ON_GRID
from bo_stream.models.auto.inference import AutoInference, AutoMemory, HandOver
from bo_stream.models.base import StreamingGP, keeps_tensors
from bo_stream.models.construction import choose_box, latent_kernel, product_kernel, split_transform
from bo_stream.models.inducing.osgpr import OSGPR, OSVGP
from bo_stream.models.inference import Hyperparameters, InferenceOption
from bo_stream.models.outcomes.base import default_standardize
from bo_stream.models.outcomes.likelihood import REAL, check_transform, latent_columns, outcomes_of
from bo_stream.models.wiski.wiski import WISKI

STEPS, FIRST = 5, 20
"""Steps in which an update learns a likelihood's own parameters, and how many times as many the
first observations take."""


class AutoGP(StreamingGP):
    """A Gaussian process that is exact while that is cheapest, and streams from then on.

    All observations are stored, and the posterior, its gradients, fantasies and the marginal
    likelihood are those of the exact Gaussian process (Rasmussen and Williams, 2006), until there
    are more than ``max_exact``. The update that brings in one more hands all of them over to the
    first streaming family that can take the model: :class:`~bo_stream.WISKI`, if ``bounds`` are
    known, the kernel is a product over inputs, and one grid can take these, or a sum of kernels
    over few inputs each; else :class:`~bo_stream.OSGPR`. The kernel and its hyperparameters stay as
    they are. Labels and heavy tails are of
    :class:`~bo_stream.OSVGP` from the first observation on. Counts are stored, too: the posterior
    is the normal one of the largest bound given all rows, and :class:`~bo_stream.OSVGP` follows,
    with a ``window`` of the latest 300 outcomes, which can be retracted.

    - Memory: O(n d + n²) for n observations while exact; then that of the family, and the rows
      themselves while there are at most ``max_rows``.
    - Update: O(n²) for each observation while exact, O(n³) after a change of hyperparameters; then
      that of the family.
    - A step of a refit: O(n³) while exact; then that of the family.
    - The hand-over: as an update of the family by all rows, and one exact posterior. What it took
      and how far the new posterior is from the exact one, at rows, between them and in the box,
      is in :attr:`history`. Where a mean is off by more than 0.4 posterior standard deviations, or
      a variance by more than a factor of 4/3, the family that is nearest is taken, of inducing
      points up to twice as many as by default unless ``max_points`` is given; if that is so still,
      a :class:`~bo_stream.HandOverWarning` says how far. Unless ``max_exact`` is given, the model
      stays exact meanwhile where the next of them would be dearer.
    - Exact: everything, until the hand-over; the hand-over itself in the data.
    - Approximate: from then on what is so in the family. Of counts that are still stored as rows
      the sites are found again, together, after each fit; between fits a stream is off its batch as
      in OSVGP.
    - ``merge``: rows join while both models are exact, else as in the family that one of them is
      in, which then takes the other's rows.
    - When: always, to begin with.

    Example:
        >>> model = AutoGP(train_X, train_Y)
        >>> fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> model.update(new_X, new_Y).posterior(test_X).mean
    """

    _memory: AutoMemory
    _inference: AutoInference
    families = InferenceOption[tuple[str, ...]](fixed=True)
    max_exact = InferenceOption[int]()
    max_rows = InferenceOption[int](fixed=True)

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None = None,
        likelihood: Likelihood | None = None,
        covar_module: Kernel | None = None,
        mean_module: Mean | None = None,
        outcome_transform: OutcomeTransform | _DefaultType | None = DEFAULT,
        input_transform: InputTransform | None = None,
        bounds: Tensor | None = None,
        families: str | Sequence[str] | None = None,
        max_exact: int | None = None,
        max_rows: int = 4096,
        **options: Any,
    ) -> None:
        """Build the model and put the first observations into memory.

        Args:
            train_X: First inputs, ``batch_shape x n x d``; n may be 0.
            train_Y: First outcomes, ``batch_shape x n x m``.
            train_Yvar: Known noise variances, shaped as train_Y; NaN in a row: unknown.
            likelihood: A ``GaussianLikelihood`` (default: BoTorch's, or fixed noise where every
                variance is known), or any that :class:`~bo_stream.OSVGP` takes, which is copied;
                parameters of its own are learned in each update then, of counts that are stored
                in a fit.
            covar_module: Any of gpytorch's kernels, of batch shape ``batch_shape x m`` (without m
                if that is 1) or none. Default: BoTorch's own default, for the box of ``bounds``. A
                ``MaternKernel`` of several inputs is no product and goes to no grid; with
                ``"WISKI"`` in ``families`` a copy with a :class:`~bo_stream.ProductMatern` is
                taken, with a warning.
            mean_module: ``ConstantMean`` (default) or ``ZeroMean``.
            outcome_transform: Default: ``Standardize``, learned again at each refit, under a
                likelihood by the first outcomes (train_Y) and for good, by none in a model built
                empty; none for labels and counts. Else as for :class:`~bo_stream.WISKI`.
            input_transform: Any. One with parameters to learn (``Warp``) becomes a part of the
                kernel and is learned with it.
            bounds: The box of all inputs to come, ``2 x d``, before the input transform. The
                default kernel's lengthscales and their prior are relative to its sides; without
                it there is no grid.
            families: Names of those allowed, of ``"exact"``, ``"WISKI"``, ``"OSGPR"``, ``"OSVGP"``:
                in the order in which they are tried. One name: the model stays in that family.
                Default: all that can take the model.
            max_exact: Most observations that are stored exactly. Default: where a step of the
                family that follows is as cheap, see :func:`bo_stream.recommend`, and at most 2,000;
                512 of counts.
            max_rows: Most observations that are stored as rows beside a streaming family, so that
                :meth:`move_to` can begin another.
            options: Of the streaming families: ``grid_size``, ``tolerance``, ``max_rank`` as of
                WISKI; ``max_points``, ``window`` as of OSGPR, but that OSVGP holds 300 outcomes by
                default; ``hyper_steps`` as of OSVGP.

        Raises:
            BotorchTensorDimensionError: Shapes do not fit together.
            InputDataError: Wrong dtypes or devices, NaN, infinities, negative variances.
            TypeError: An option of no family.
            UnsupportedError: A mean, likelihood or transform that a stream cannot represent, or a
                family, named, that cannot take the model.
            ValueError: An option is out of range, or a family is not known.
        """
        chosen = checked_options(options)
        max_rows = check_whole("max_rows", max_rows, least=0)
        gaussian = is_gaussian(likelihood)
        if not gaussian:  # real outcomes are standardised, labels and counts are not
            if isinstance(outcome_transform, _DefaultType):
                real = isinstance(likelihood, REAL) and train_Y.ndim > 1
                shape = train_Y.shape
                outcome_transform = default_standardize(shape[-1], shape[:-2]) if real else None
            check_transform(outcome_transform, likelihood)
        latent_Y = latent_columns(train_Y, likelihood)
        self._begin(train_X, latent_Y, train_Yvar, outcome_transform)
        input_transform, learned = split_transform(input_transform)
        inputs = self._first_inputs(train_X, input_transform)
        box = None if bounds is None else choose_box(bounds, train_X, inputs, input_transform)
        of_kernel = None if learned is not None else box  # a learnable transform has its own
        if not gaussian and covar_module is None:
            covar_module = latent_kernel(inputs.shape[-1], self._parameter_shape, of_kernel)
        names = (families,) if isinstance(families, str) else families
        names = None if names is None else tuple(names)
        if names is not None and ON_GRID in names:
            covar_module = product_kernel(covar_module, inputs.shape[-1])
        given = likelihood if isinstance(likelihood, _GaussianLikelihoodBase) else None
        custom = covar_module is not None
        dim = inputs.shape[-1]
        self._set_modules(dim, train_Yvar, given, covar_module, mean_module, of_kernel)
        inputs = self._learn_transform(learned, inputs)
        if likelihood is not None and not gaussian:
            self._outcomes = outcomes_of(likelihood, self._outcomes.shift)
            check_likelihood(likelihood, self._parameter_shape)
            self.likelihood = deepcopy(likelihood)
        self.to(train_X)
        kind = self.prior, self._process_dim, box
        allowed = allowed_families(names, *kind)
        if not gaussian:
            chosen = _with_steps(self, chosen, in_fits=allowed[0] == EXACT)
        default = 0 if max_exact is not None else most_exact(allowed, *kind)
        most = check_whole("max_exact", default if max_exact is None else max_exact)
        self._inference = AutoInference(allowed, most, max_rows, box, chosen, default)
        self._memory = self._inference.start(self.prior, inputs)
        if gaussian:
            self._take_first(train_X, train_Y, train_Yvar, inputs, custom, of_kernel)
            return
        self._standardize_first(train_X, latent_Y, None)
        if train_X.shape[-2] > 0:
            self._observe(train_X, train_Y, train_Yvar, 1.0)
        if "hyper_steps" not in options and self.family != EXACT:
            begun: Any = self._memory.inference
            begun = replace(begun, hyper_steps=chosen["hyper_steps"] // FIRST)
            self._memory = replace(self._memory, inference=begun)

    @property
    def family(self) -> str:
        """Name of the family that the model is in: ``"exact"``, or that of a streaming one."""
        return self._memory.family

    @property
    def history(self) -> tuple[HandOver, ...]:
        """All hand-overs, with what they cost and the error that they brought in."""
        return self._memory.history

    @keeps_tensors
    @torch.no_grad()
    def move_to(self, family: str, **options: Any) -> Self:
        """Move to another family, or to the same with other options, in place.

        Exact in the data, all of which must still be stored: at most ``max_rows``, or all of an
        exact model. Hyperparameters stay. Cost O(n³), for the comparison with the exact posterior.

        Args:
            family: One of :attr:`families`.
            options: As of the constructor.

        Raises:
            TypeError: An option of no family.
            UnsupportedError: The model is fixed to other families, cannot be of that family, is
                conditioned on hypothetical data, or does not hold its observations any more.
            ValueError: An option is out of range, or the memory would become too large.
        """
        self._check_not_conditioned("move_to")
        chosen = checked_options(options)
        if family not in self.families:
            raise UnsupportedError(
                f"Expected family to be one of {', '.join(self.families)}, got {family!r}. Build "
                f"the model with families that hold it, of {', '.join(FAMILIES)}."
            )
        self._memory, self._cache = self._inference.moved_to(
            family, self._memory, self._cache, self.prior, chosen
        )
        return self

    @keeps_tensors
    def truncate(self, left_out: float) -> Self:
        """Truncate features as :meth:`WISKI.truncate`; without effect in a family without a grid.

        Args:
            left_out: Prior variance that may be left out, as a fraction of the noise variance.

        Raises:
            ValueError: It is not in [0, 1).
            UnsupportedError: The model is conditioned on hypothetical data.
        """
        self._check_not_conditioned("truncate")
        if not 0.0 <= left_out < 1.0:
            raise ValueError(f"Expected left_out in [0, 1), got {left_out}.")
        if self.family == ON_GRID:
            grid: Any = self._memory.inference
            grid = grid.truncated(left_out, self._memory.inner, self.prior)
            self._set_memory(replace(self._memory, inference=grid))
        return self


def _with_steps(model: AutoGP, options: dict[str, Any], in_fits: bool) -> dict[str, Any]:
    """Add how a likelihood's own parameters are learned: in updates, where a fit cannot.

    A fit can while all rows are stored; the updates of the family that follows then go on.
    """
    fixed = Hyperparameters.fixed_of(model.likelihood)
    learns = any(p.requires_grad for p in model.likelihood.parameters())
    model.likelihood.requires_grad_(learns and in_fits)
    steps = STEPS * learns * (1 if in_fits else FIRST)
    return {"hyper_steps": steps, **options, "fixed": fixed}


# --- an automatic model as the public model of the family that it is in --------------------------


_CLASSES: dict[str, type[StreamingGP]] = {ON_GRID: WISKI, SPARSE: OSGPR, VARIATIONAL: OSVGP}


def family_model(model: StreamingGP) -> StreamingGP:
    """Return the public model of an :class:`~bo_stream.AutoGP`'s family, to be asked, not updated.

    It shares hyperparameters, memory and cache. An exact model, and any other, is returned as it
    is. So what is written for WISKI or OSGPR holds for an AutoGP that has become one.
    """
    if not isinstance(model, AutoGP) or model.family not in _CLASSES:
        return model
    shared = model._shallow_copy()
    view = object.__new__(_CLASSES[model.family])
    view.__dict__.update(shared.__dict__)
    memory = model._memory
    view._inference, view._memory, view._cache = memory.inference, memory.inner, model._cache
    return view
