"""What is public, and where it is defined: the package reads this file at run time, too."""

from .asynchronous import run_asynchronously as run_asynchronously
from .objectives import OptimizationSettings as OptimizationSettings
from .objectives import Trial as Trial
from .optimizer import Best as Best
from .optimizer import Optimizer as Optimizer
from .optimizer import load_optimizer as load_optimizer
from .optimizer import save_optimizer as save_optimizer
