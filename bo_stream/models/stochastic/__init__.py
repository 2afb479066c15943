"""Learning in steps: the loop, the data that steps draw from, and optimisers."""
