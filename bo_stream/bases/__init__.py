"""Bases: features, a root of the prior over their weights, and the maps between them."""
