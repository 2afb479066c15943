"""Likelihoods of outcomes: sites, expected log probabilities, and predictive probabilities."""
