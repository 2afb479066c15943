"""Adaptive surveys of prevalence: ask for sites, tell counts, in a folder that keeps all."""
