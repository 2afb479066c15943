"""Searches: regret and processor time."""
