"""Tests of local models."""
