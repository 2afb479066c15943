"""Quadruply stochastic Gaussian processes (Evans and Nair, 2020)."""
