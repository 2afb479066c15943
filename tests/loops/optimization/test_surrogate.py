"""Which features a grid model has while a loop refits it, and between refits."""

from __future__ import annotations

import pytest
from gpytorch.kernels import RBFKernel

from bo_stream import WISKI
from bo_stream.loops.optimization import surrogate
from tests.problems import observations


def test_a_refit_learns_with_all_features_and_leaves_few(monkeypatch: pytest.MonkeyPatch) -> None:
    model = WISKI(*observations(20).astuple(), covar_module=RBFKernel(), grid_size=9)
    model.likelihood.noise = 0.5
    surrogate.thin(model)
    few, ranks = model.rank, list[int]()
    monkeypatch.setattr(surrogate, "relearn", lambda model, _: ranks.append(model.rank))
    surrogate.learn(model)
    assert ranks[0] > few == model.rank
