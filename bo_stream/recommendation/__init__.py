"""Which family of models for which problem, from a table of measured costs."""
