"""Decoupled Gaussian processes (Cheng and Boots, 2017)."""
