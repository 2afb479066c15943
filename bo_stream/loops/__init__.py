"""Loops that choose, observe and update, with checkpoints that resume to the same next choice."""
