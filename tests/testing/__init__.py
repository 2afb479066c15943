"""Tests of what checks models."""
