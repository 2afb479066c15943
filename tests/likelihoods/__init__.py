"""Tests of likelihoods."""
