"""Fits, searches and pictures of these tests are drafts, unless a test asks for whole ones."""

from tests.support.drafts import *  # noqa: F403 (fixtures, by their names in __all__)
