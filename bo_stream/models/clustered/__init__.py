"""Clustered data with guaranteed separation (Terenin et al., 2024)."""
