"""Loops of choosing, observing and updating, in runs that can be stopped and resumed."""
