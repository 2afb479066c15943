"""Where inducing points go, in a stream: allocators, alone or in a model."""

from bo_stream.allocation.allocator import Allocator
from bo_stream.allocation.bounds import expected_points_bound, nystroem_error_bound
from bo_stream.allocation.cover_tree import CoverTree
from bo_stream.allocation.greedy_variance import GreedyVariance
from bo_stream.allocation.isolation import Isolation
from bo_stream.allocation.kmeans import KMeans
from bo_stream.allocation.novelty import Novelty
from bo_stream.allocation.oips import OIPS
from bo_stream.allocation.random import Random
from bo_stream.allocation.uniform_grid import UniformGrid

__all__ = [
    "OIPS",
    "Allocator",
    "CoverTree",
    "GreedyVariance",
    "Isolation",
    "KMeans",
    "Novelty",
    "Random",
    "UniformGrid",
    "expected_points_bound",
    "nystroem_error_bound",
]
