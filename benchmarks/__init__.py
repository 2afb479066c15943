"""Benchmarks: one claim a file, run as ``python -m benchmarks.NAME [--smoke]``."""
