"""Learning beyond a refit: stems, inducing points, and hyperparameters along with a stream."""

from bo_stream.learning.online import OnlineLearner
from bo_stream.learning.points import learn_points
from bo_stream.learning.pretraining import pretrain
from bo_stream.learning.stochastic import maximise_stochastically

__all__ = ["OnlineLearner", "learn_points", "maximise_stochastically", "pretrain"]
