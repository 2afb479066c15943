"""The product of all laws with all cases and settings."""

from __future__ import annotations

from bo_stream.testing import LAWS
from bo_stream.testing.streams import applies
from tests.laws.cases import STREAMS

PRODUCT = [
    (law, stream) for law in LAWS.values() for stream in STREAMS if applies(law, stream.case)
]
