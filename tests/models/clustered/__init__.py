"""Tests of models of clustered data."""
