"""Gradient steps for what a refit cannot learn: stems, and hyperparameters along with a stream."""

from bo_stream.learning.online import OnlineLearner
from bo_stream.learning.pretraining import pretrain
from bo_stream.learning.stochastic import maximise_stochastically

__all__ = ["OnlineLearner", "maximise_stochastically", "pretrain"]
