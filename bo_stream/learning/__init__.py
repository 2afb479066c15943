"""Learning beyond a refit: stems, inducing points, and hyperparameters along with a stream."""

from bo_stream.learning.online import OnlineLearner, learn_points, maximise_stochastically, pretrain

__all__ = ["OnlineLearner", "learn_points", "maximise_stochastically", "pretrain"]
