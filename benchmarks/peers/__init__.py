"""Models and loops of others that ours are compared with."""
