"""All laws, and their product with all cases and settings."""

from __future__ import annotations

from tests.laws import conditioning, memory, persistence, posterior
from tests.laws.cases import STREAMS
from tests.laws.registry import LAWS, applies

SUBJECTS = (memory, conditioning, posterior, persistence)
"""Importing a subject puts its laws on the list."""

PRODUCT = [(law, stream) for law in LAWS for stream in STREAMS if applies(law, stream.case)]
