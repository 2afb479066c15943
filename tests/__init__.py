"""Tests: laws over a registry of models, and equalities with independent computations."""
