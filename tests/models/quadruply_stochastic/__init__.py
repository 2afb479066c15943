"""Tests of quadruply stochastic models."""
