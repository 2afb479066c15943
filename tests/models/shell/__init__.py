"""Tests of the verbs that all models share."""
