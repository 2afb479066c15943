"""Where to measure: maps, surveys, kernels of places."""
