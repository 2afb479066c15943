"""Learning beyond a refit: stems, inducing points, and hyperparameters along with a stream."""

from bo_stream.learning.fits import learn_points, maximise_stochastically, pretrain
from bo_stream.learning.online import OnlineLearner

__all__ = ["OnlineLearner", "learn_points", "maximise_stochastically", "pretrain"]
