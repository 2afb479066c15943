"""Beyond one process: statistics from many files, replicas, and training on many processes."""
