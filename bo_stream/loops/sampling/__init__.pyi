"""What is public, and where it is defined: the package reads this file at run time, too."""

from .sampling import ActiveSampling as ActiveSampling
from .settings import SamplingSettings as SamplingSettings
