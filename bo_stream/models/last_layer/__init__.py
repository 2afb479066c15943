"""Bayesian linear regression on the last features of a network that is learned along."""
