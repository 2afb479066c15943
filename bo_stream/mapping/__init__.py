"""Maps: positions in kilometres, covariates, their default kernel and screening."""

from bo_stream.likelihoods.binomial import empirical_logits
from bo_stream.mapping.covariates import fill_missing, map_inputs
from bo_stream.mapping.kernel import map_kernel, survey_kernel
from bo_stream.mapping.mean_function import Regressor, out_of_fold
from bo_stream.mapping.positions import Kilometres, kilometres
from bo_stream.mapping.screening import screen_covariates

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
