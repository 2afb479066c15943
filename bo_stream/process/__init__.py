"""The posterior as a Gaussian process again, and what is kept of it between evaluations."""
