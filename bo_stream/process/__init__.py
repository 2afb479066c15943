"""The posterior as a Gaussian process, its joint distributions, and a cached baseline."""
