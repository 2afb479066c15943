"""What is public, and where it is defined: the package reads this file at run time, too."""

from .asynchronous import run_asynchronously as run_asynchronously
from .optimizer import Best as Best
from .optimizer import Optimizer as Optimizer
from .optimizer import load_optimizer as load_optimizer
from .optimizer import save_optimizer as save_optimizer
from .region import TrustRegion as TrustRegion
from .region import maximize_paths as maximize_paths
from .region import region_candidates as region_candidates
from .trials import OptimizationSettings as OptimizationSettings
from .trials import Trial as Trial
