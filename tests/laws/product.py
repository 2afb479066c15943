"""The product of all laws with all cases and settings: all laws of a stream, then of the next."""

from __future__ import annotations

from bo_stream.testing import LAWS
from bo_stream.testing.streams import applies
from tests.laws.cases import STREAMS

PRODUCT = [
    (law, stream) for stream in STREAMS for law in LAWS.values() if applies(law, stream.case)
]
