"""What tests share: comparisons, tolerances, problems, and which of them run."""
