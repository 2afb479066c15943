"""Tests of the bases."""
