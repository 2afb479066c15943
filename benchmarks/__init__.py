"""Benchmarks: one claim a file, run as ``python -m benchmarks.NAME [--smoke]``."""

import os

# Threads that wait must not spin: with another process on the cores a small product then takes
# a hundred times as long, on either side of a comparison. Read once, when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
