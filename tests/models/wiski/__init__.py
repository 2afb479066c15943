"""Tests of grid models."""
