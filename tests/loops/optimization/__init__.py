"""Tests of optimization runs."""
