"""Greedy choice of labels from a pool, against trying every candidate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from torch import Tensor

from bo_stream import (
    WISKI,
    DirichletWISKI,
    PredictiveEntropy,
    qBALD,
    sample_paths,
    select_labels_from_pool,
)
from bo_stream.acquisition.labels import joint_entropies
from bo_stream.testing.streams import assert_untouched, fingerprint
from tests.support.problems.labels import labelled, small_classifier

CRITERIA = pytest.mark.parametrize("criterion", ["BALD", "entropy"])
VALUES: dict[str, Any] = {"BALD": qBALD, "entropy": PredictiveEntropy}


def model_and_pool(n: int = 40) -> tuple[DirichletWISKI, Tensor]:
    model = small_classifier(*labelled(25))
    return model, torch.rand(n, 2, dtype=torch.float64)


def joint_value(model: DirichletWISKI, X: Tensor, criterion: str, seed: int) -> Tensor:
    """Value of every set of points, ``N x q x d``, by enumeration over the same draws."""
    paths = sample_paths(model, 256, seed)
    p = paths(X.flatten(0, 1)).softmax(-1).detach().unflatten(1, X.shape[:2])
    joint, expected = joint_entropies(p, 10_000, torch.Generator())
    return joint - expected if criterion == "BALD" else joint


@CRITERIA
def test_picks_are_those_of_trying_every_candidate(criterion: Any) -> None:
    model, pool = model_and_pool()
    picks = select_labels_from_pool(model, pool, 4, criterion, seed=2).tolist()
    assert picks[0] == int(VALUES[criterion](model)(pool.unsqueeze(-2)).argmax())
    for k in range(1, 4):
        rest = [i for i in range(len(pool)) if i not in picks[:k]]
        sets = torch.stack([pool[[*picks[:k], i]] for i in rest])
        value = joint_value(model, sets, criterion, seed=2)
        assert picks[k] == rest[int(value.argmax())]


@CRITERIA
def test_looking_no_further_than_needed_misses_nothing(
    criterion: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bo_stream.acquisition.labels.CHUNK", 64)
    model, _ = model_and_pool()
    pool = torch.rand(3 * 64, 2, dtype=torch.float64)
    first, second = select_labels_from_pool(model, pool, 2, criterion, seed=1).tolist()
    pairs = torch.stack((pool[first].expand_as(pool), pool), -2)
    value = joint_value(model, pairs, criterion, seed=1)
    value[first] = -torch.inf
    assert second == int(value.argmax())


def test_excluded_candidates_and_repeats_are_never_picked() -> None:
    model, pool = model_and_pool(12)
    free = select_labels_from_pool(model, pool, 3)
    others = select_labels_from_pool(model, pool, 9, exclude=free)
    assert sorted([*free.tolist(), *others.tolist()]) == list(range(12))
    mask = torch.zeros(12, dtype=torch.bool)
    mask[free] = True
    assert torch.equal(select_labels_from_pool(model, pool, 9, exclude=mask), others)


def test_beyond_the_configurations_it_goes_on_by_draws() -> None:
    model, pool = model_and_pool(60)
    picks = select_labels_from_pool(model, pool, 8, max_configurations=32)
    assert len(set(picks.tolist())) == 8
    again = select_labels_from_pool(model, pool, 8, max_configurations=32)
    assert torch.equal(picks, again)
    good = float(qBALD(model)(pool[picks]))
    random = torch.stack([pool[torch.randperm(60)[:8]] for _ in range(20)])
    assert good > float(qBALD(model)(random).mean())


def test_a_choice_leaves_the_model_as_it_is() -> None:
    model, pool = model_and_pool()
    select_labels_from_pool(model, pool, 3)
    before = fingerprint(model)
    select_labels_from_pool(model, pool, 3)
    assert_untouched(model, before)


def test_hypothetical_labels_steer_the_choice() -> None:
    model, pool = model_and_pool()
    first = select_labels_from_pool(model, pool, 1)
    conditioned = model.condition_on_labels(pool[first], torch.tensor([1]))
    assert not torch.equal(select_labels_from_pool(conditioned, pool, 1), first)


def test_single_precision_pools_are_taken() -> None:
    X, labels = labelled(25)
    model, pool = small_classifier(X.float(), labels), torch.rand(30, 2)
    assert select_labels_from_pool(model, pool, 3).shape == (3,)


def test_bad_arguments_are_named() -> None:
    model, pool = model_and_pool()
    X, labels = labelled(9)
    two = model.condition_on_labels(pool[:1].expand(2, 1, -1), torch.tensor([[[0]], [[1]]]))
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: select_labels_from_pool(model, pool, 0), ValueError, "q from 1 to"),
        (lambda: select_labels_from_pool(model, pool, 41), ValueError, "q from 1 to"),
        (lambda: select_labels_from_pool(model, pool, 1, "luck"), ValueError, "criterion"),  # type: ignore[arg-type]
        (lambda: select_labels_from_pool(model, pool / 0.0, 1), InputDataError, "pool"),
        (
            lambda: select_labels_from_pool(model, pool, 1, exclude=torch.tensor([40])),
            InputDataError,
            "exclude",
        ),
        (
            lambda: select_labels_from_pool(two, pool, 1),
            UnsupportedError,
            r"without batch shape .* got one of batch shape \(2,\)",
        ),
        (
            lambda: select_labels_from_pool(model, pool, 2, num_samples=0),
            ValueError,
            "num_samples to be a whole number of at least 1",
        ),
        (
            lambda: select_labels_from_pool(WISKI(X, labels.double().unsqueeze(-1)), pool, 1),  # type: ignore[arg-type]
            UnsupportedError,
            "model of labels|one of labels",
        ),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
