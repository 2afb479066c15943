"""Tests of models with decoupled bases."""
