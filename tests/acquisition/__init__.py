"""Tests of the acquisition functions."""
