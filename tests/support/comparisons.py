"""Moments, contents and gradients of models, and assertions that they are equal: the laws'."""

from __future__ import annotations

from bo_stream.testing.comparisons import assert_gradient as assert_gradient
from bo_stream.testing.comparisons import assert_same_contents as assert_same_contents
from bo_stream.testing.comparisons import assert_same_model as assert_same_model
from bo_stream.testing.comparisons import assert_same_posterior as assert_same_posterior
from bo_stream.testing.comparisons import assert_untouched as assert_untouched
from bo_stream.testing.comparisons import central_differences as central_differences
from bo_stream.testing.comparisons import centre as centre
from bo_stream.testing.comparisons import contents as contents
from bo_stream.testing.comparisons import fingerprint as fingerprint
from bo_stream.testing.comparisons import gaussian as gaussian
from bo_stream.testing.comparisons import held_bytes as held_bytes
from bo_stream.testing.comparisons import joint_covariance as joint_covariance
from bo_stream.testing.comparisons import moments as moments
from bo_stream.testing.comparisons import refreshed as refreshed
