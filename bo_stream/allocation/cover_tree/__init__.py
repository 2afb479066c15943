"""The cover tree of Terenin et al. (2024)."""
