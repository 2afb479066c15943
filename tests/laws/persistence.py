"""Laws of copies, files and hyperparameters."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from bo_stream.models.base import StreamingGP
from tests.laws.registry import (
    Stream,
    law,
)
from tests.support.comparisons import (
    assert_same_posterior,
    assert_untouched,
    fingerprint,
    refreshed,
)


def _pickled(model: StreamingGP) -> StreamingGP:
    return pickle.loads(pickle.dumps(model))


def _saved(model: StreamingGP) -> StreamingGP:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        model.save(path)
        return type(model).load(path)


@law
def a_copy_goes_on_as_the_original(stream: Stream) -> None:
    data, more = stream.data(10), stream.data(5)
    model = stream.model(data[:6])
    for asked_before in (False, True):
        if asked_before:
            model.update(*data[6:].astuple())
            model.posterior(stream.points)
        for way in (copy.deepcopy, _pickled, _saved):
            twin = way(model)
            original = copy.deepcopy(model)
            assert_same_posterior(twin, original, stream.points, bits=True)
            twin.update(*more.astuple())
            original.update(*more.astuple())
            assert_same_posterior(twin, original, stream.points, bits=True)
            assert_same_posterior(refreshed(twin), refreshed(original), stream.points, bits=True)
        assert model.num_observations == pytest.approx(10 if asked_before else 6)


@law
def state_dict_holds_hyperparameters_only(stream: Stream) -> None:
    data, other = stream.data(8), stream.data(30)
    source, target = stream.model(data), stream.model(other, seed=2)
    state = source.state_dict()
    sizes = {name: value.shape for name, value in target.state_dict().items()}
    assert {name: value.shape for name, value in state.items()} == sizes
    count = target.num_observations
    target.load_state_dict(state)
    assert target.num_observations == count
    assert_same_posterior(refreshed(target), stream.model(other), stream.points)


@law
def entering_and_leaving_training_changes_nothing(stream: Stream) -> None:
    model = stream.model(stream.data(10)).update(*stream.data(5).astuple())
    refreshed(model).posterior(stream.points)
    before = fingerprint(model)
    refreshed(model).posterior(stream.points)
    assert_untouched(model, before)
