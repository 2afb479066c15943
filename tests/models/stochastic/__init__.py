"""Tests of what models that learn by steps share."""
