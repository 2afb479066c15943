"""Acquisition: integrated variance, pools, posterior functions, and labels to ask for."""

from bo_stream.acquisition.cached_baseline import evaluate_known_points_once
from bo_stream.acquisition.feature_nipv import FeatureNIPV
from bo_stream.acquisition.labels import PredictiveEntropy, qBALD, select_labels_from_pool
from bo_stream.acquisition.paths import SamplePaths, mean_path, sample_paths
from bo_stream.acquisition.pool import PoolSelector, select_from_pool

__all__ = [
    "FeatureNIPV",
    "PoolSelector",
    "PredictiveEntropy",
    "SamplePaths",
    "evaluate_known_points_once",
    "mean_path",
    "qBALD",
    "sample_paths",
    "select_from_pool",
    "select_labels_from_pool",
]
