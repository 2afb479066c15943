"""Several processes: executors, replicas, data parallel fits."""
