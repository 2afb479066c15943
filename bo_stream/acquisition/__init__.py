"""Acquisition: criteria, pools and sites, posterior functions, and labels to ask for."""

from bo_stream.acquisition.constraints import SiteConstraints
from bo_stream.acquisition.criteria import (
    Criterion,
    ExceedanceEntropy,
    ExpectedLoss,
    IntegratedVariance,
    Misclassification,
    TargetedVariance,
)
from bo_stream.acquisition.feature_nipv import FeatureNIPV
from bo_stream.acquisition.labels import PredictiveEntropy, qBALD, select_labels_from_pool
from bo_stream.acquisition.lookahead import evaluate_known_points_once
from bo_stream.acquisition.paths import SamplePaths, mean_path, sample_paths
from bo_stream.acquisition.pool import PoolSelector, select_from_pool
from bo_stream.acquisition.site_choice import SiteChoice, select_sites

__all__ = [
    "Criterion",
    "ExceedanceEntropy",
    "ExpectedLoss",
    "FeatureNIPV",
    "IntegratedVariance",
    "Misclassification",
    "PoolSelector",
    "PredictiveEntropy",
    "SamplePaths",
    "SiteChoice",
    "SiteConstraints",
    "TargetedVariance",
    "evaluate_known_points_once",
    "mean_path",
    "qBALD",
    "sample_paths",
    "select_from_pool",
    "select_labels_from_pool",
    "select_sites",
]
