"""Acquisition in feature space: integrated variance, pool selection, posterior functions."""

from bo_stream.acquisition.feature_nipv import FeatureNIPV
from bo_stream.acquisition.paths import SamplePaths, mean_path, sample_paths
from bo_stream.acquisition.pool import PoolSelector, select_from_pool

__all__ = [
    "FeatureNIPV",
    "PoolSelector",
    "SamplePaths",
    "mean_path",
    "sample_paths",
    "select_from_pool",
]
