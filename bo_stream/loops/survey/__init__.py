"""Adaptive surveys of prevalence, by ``ask`` and ``tell``, in a folder that keeps all results."""

from typing import TYPE_CHECKING

from bo_stream.lazy_names import lazy_names

if TYPE_CHECKING:
    from bo_stream.loops.survey.folder import load_survey, save_survey
    from bo_stream.loops.survey.model import SurveyModelSettings, survey_model
    from bo_stream.loops.survey.replay import FinishedSurvey, RoundScore, replay_survey
    from bo_stream.loops.survey.replay_plan import ReplayPlan
    from bo_stream.loops.survey.results import Told
    from bo_stream.loops.survey.settings import SurveySettings
    from bo_stream.loops.survey.survey import Survey, SurveyStatus
    from bo_stream.loops.survey.tables import read_table

__all__ = [
    "FinishedSurvey",
    "ReplayPlan",
    "RoundScore",
    "Survey",
    "SurveyModelSettings",
    "SurveySettings",
    "SurveyStatus",
    "Told",
    "load_survey",
    "read_table",
    "replay_survey",
    "save_survey",
    "survey_model",
]

if not TYPE_CHECKING:  # to a type checker, a name that is not there is an error
    __getattr__ = lazy_names(
        __name__,
        {
            "folder": ("load_survey", "save_survey"),
            "model": ("SurveyModelSettings", "survey_model"),
            "replay": ("FinishedSurvey", "RoundScore", "replay_survey"),
            "replay_plan": ("ReplayPlan",),
            "results": ("Told",),
            "settings": ("SurveySettings",),
            "survey": ("Survey", "SurveyStatus"),
            "tables": ("read_table",),
        },
    )


def __dir__() -> list[str]:
    """List all public names, imported or not."""
    return sorted({*globals(), *__all__})
