"""Allocators: online selection of inducing points, alone or in a model."""

from bo_stream.allocation.allocator import Allocator, GreedyVariance, KMeans, Random, UniformGrid
from bo_stream.allocation.cover_tree import CoverTree
from bo_stream.allocation.oips import (
    OIPS,
    Isolation,
    Novelty,
    expected_points_bound,
    nystroem_error_bound,
)

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
