"""A module's state is compared by value."""

from __future__ import annotations

import copy

import torch

from bo_stream.tensors import is_in, is_same, state_of


def test_a_state_is_compared_by_value() -> None:
    module = torch.nn.Linear(2, 1)
    before = state_of(module)
    assert is_same(before, state_of(module))
    assert is_same(before, state_of(copy.deepcopy(module)))
    with torch.no_grad():
        module.weight[0, 0] += 1e-6
    assert not is_same(before, state_of(module))
    assert not is_same(before, state_of(module.double()))
    assert not is_same(before, state_of(torch.nn.Linear(2, 2)))


def test_a_state_has_the_buffers_of_all_parts() -> None:
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    before = state_of(module)
    assert is_in(module, before)
    module[0].running_mean += 1e-6
    assert not is_in(module, before)
