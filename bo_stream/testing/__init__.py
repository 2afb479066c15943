"""Checks for whoever writes a model of their own: the laws that every model obeys."""

from bo_stream.testing.check import BrokenLawError, Check, check_model, model_checks
from bo_stream.testing.streams import LAWS, SETTINGS, Setting, Traits

__all__ = [
    "LAWS",
    "SETTINGS",
    "BrokenLawError",
    "Check",
    "Setting",
    "Traits",
    "check_model",
    "model_checks",
]
