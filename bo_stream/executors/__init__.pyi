"""What is public, and where it is defined: the package reads this file at run time, too."""

from .dask import DaskExecutor as DaskExecutor
from .engine import LostTaskError as LostTaskError
from .engine import LostTaskWarning as LostTaskWarning
from .engine import WaitingWarning as WaitingWarning
from .engine import check_picklable as check_picklable
from .engine import check_workers as check_workers
from .processes import ProcessExecutor as ProcessExecutor
from .processes import executor_of as executor_of
from .ray import RayExecutor as RayExecutor
from .submitit import SubmititExecutor as SubmititExecutor
