"""Maps: positions in kilometres, covariates, their default kernel and screening."""

from bo_stream.likelihoods.binomial import empirical_logits
from bo_stream.mapping.covariates import fill_missing, map_inputs, screen_covariates
from bo_stream.mapping.kernel import (
    Kilometres,
    Regressor,
    kilometres,
    map_kernel,
    out_of_fold,
    survey_kernel,
)

__all__ = [
    "Kilometres",
    "Regressor",
    "empirical_logits",
    "fill_missing",
    "kilometres",
    "map_inputs",
    "map_kernel",
    "out_of_fold",
    "screen_covariates",
    "survey_kernel",
]
