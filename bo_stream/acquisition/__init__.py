"""Acquisition in feature space: integrated variance, pool selection, posterior functions."""

from bo_stream.acquisition.feature_nipv import FeatureNIPV

__all__ = ["FeatureNIPV"]
