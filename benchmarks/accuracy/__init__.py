"""Errors of models against exact ones and peers."""
