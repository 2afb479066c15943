"""Tests of sampling runs."""
