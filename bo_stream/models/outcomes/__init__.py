"""Outcomes between a user and a memory: their transform, their noise, their likelihood."""
