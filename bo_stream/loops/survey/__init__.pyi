"""What is public, and where it is defined: the package reads this file at run time, too."""

from .model import SurveyModelSettings as SurveyModelSettings
from .model import survey_model as survey_model
from .replay import FinishedSurvey as FinishedSurvey
from .replay import RoundScore as RoundScore
from .replay import replay_survey as replay_survey
from .results import Told as Told
from .settings import ReplayPlan as ReplayPlan
from .settings import SurveySettings as SurveySettings
from .survey import Survey as Survey
from .survey import SurveyStatus as SurveyStatus
from .survey import load_survey as load_survey
from .survey import save_survey as save_survey
from .tables import read_table as read_table
