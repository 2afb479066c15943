"""Allocators: online selection of inducing points, alone or in a model."""

from bo_stream.allocation.allocator import Allocator
from bo_stream.allocation.cover_tree import CoverTree
from bo_stream.allocation.novelty import Novelty
from bo_stream.allocation.oips import OIPS, Isolation, expected_points_bound, nystroem_error_bound
from bo_stream.allocation.simple import GreedyVariance, KMeans, Random, UniformGrid

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
