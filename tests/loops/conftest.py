"""Fits, searches and pictures of these tests are drafts, unless a test asks for whole ones."""

from tests.support.drafts import (
    drafts,
    small_pictures,
    whole_fits,
    whole_in_integration,
    whole_pictures,
    whole_searches,
)

__all__ = [
    "drafts",
    "small_pictures",
    "whole_fits",
    "whole_in_integration",
    "whole_pictures",
    "whole_searches",
]
