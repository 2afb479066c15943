"""Fits and pictures of these tests are drafts, unless a test asks for whole ones."""

from tests.support.drafts import drafts, whole_fits, whole_in_integration, whole_pictures

__all__ = ["drafts", "whole_fits", "whole_in_integration", "whole_pictures"]
