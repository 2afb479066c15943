"""Learning hyperparameters from the memory, where a run must not end if that fails."""

from __future__ import annotations

import warnings

from botorch.exceptions.errors import ModelFittingError
from botorch.exceptions.warnings import OptimizationWarning
from botorch.fit import fit_gpytorch_mll
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood

from bo_stream.models.streaming_gp import StreamingGP

_FIT_OPTIONS = {"maxiter": 25, "ftol": 1e-7}
"""L-BFGS-B's; a refit starts from the last one's optimum and need not be exact."""


def relearn(model: StreamingGP) -> None:
    """Learn hyperparameters; where that fails, those from before serve on: a run must not end.

    A failure is in the model's ``numerical_log``, and a warning.
    """
    try:
        learn_hyperparameters(model)
    except ModelFittingError as error:
        model.eval()
        model.log_event("a refit that failed")
        warnings.warn(
            f"The hyperparameters could not be relearned and stay as they were: {error}",
            RuntimeWarning,
            stacklevel=2,
        )


def learn_hyperparameters(model: StreamingGP) -> None:
    """Maximise the marginal likelihood from the model's memory, starting where it stands.

    A line search that stalls near the optimum counts as its end: L-BFGS-B never leaves a point for
    a worse one.
    """
    gaussian = isinstance(model.likelihood, _GaussianLikelihoodBase)
    kind = ExactMarginalLogLikelihood if gaussian else MarginalLogLikelihood
    mll = kind(model.likelihood, model)
    fit_gpytorch_mll(
        mll,
        optimizer_kwargs={"options": _FIT_OPTIONS},
        max_attempts=1,
        warning_handler=lambda warning: issubclass(warning.category, OptimizationWarning),
    )
