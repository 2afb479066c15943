"""Tests of models with inducing points."""
