"""Tests of posterior processes."""
