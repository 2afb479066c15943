"""The one place for tolerances, under the name by which tests know it: that of the laws."""

from __future__ import annotations

from bo_stream.testing.comparisons import GRADIENT_TOLERANCE as GRADIENT_TOLERANCE
from bo_stream.testing.comparisons import TOLERANCE as TOLERANCE
from bo_stream.testing.comparisons import assert_close as assert_close
