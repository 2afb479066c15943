"""Processor time and memory of verbs, and the table of costs."""
