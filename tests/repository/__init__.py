"""Tests of the repository as a whole: what is public, and files that former versions wrote."""
