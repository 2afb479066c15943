"""Acquisition in feature space: integrated variance, pool selection, posterior functions."""
