"""Tests of interpolation on grids."""
