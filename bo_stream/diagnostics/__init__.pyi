"""What is public, and where it is defined: the package reads this file at run time, too."""

from .alarms import Alarm as Alarm
from .certificate import Estimate as Estimate
from .certificate import Stability as Stability
from .certificate import Verdict as Verdict
from .certificate import condition_limit as condition_limit
from .certificate import condition_number as condition_number
from .certificate import stability as stability
from .certificate import stability_of_points as stability_of_points
from .certificate import stability_of_precision as stability_of_precision
from .certificate import trace_limit as trace_limit
from .cross_validation import leave_one_out as leave_one_out
from .cross_validation import without as without
from .trust import TrustReport as TrustReport
from .trust import report as report
from .validation import ProgressiveValidation as ProgressiveValidation
