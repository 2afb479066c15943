"""The laws of the contract for models whose every input is an inducing point.

They are not in the registry, for their memory grows until there are ``max_points``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood

from bo_stream import OSGPR, OSVGP
from bo_stream.models.base import StreamingGP
from tests.laws.memory import (
    a_stream_is_its_batch,
    merging_shards_is_one_stream,
    order_does_not_matter,
    retracting_undoes_updating,
    updating_in_pieces_is_updating_once,
)
from tests.laws.registry import Case, Law, Setting, Stream
from tests.problems import Observations

BUILDERS: dict[str, Callable[[Observations], StreamingGP]] = {
    "OSGPR": lambda data: OSGPR(*data.astuple()),
    "OSGPR, few rows held": lambda data: OSGPR(*data.astuple(), window=4),
    "OSVGP": lambda data: OSVGP(data.X, data.Y, GaussianLikelihood().to(data.X)),
}


@pytest.mark.parametrize(
    "law",
    [
        updating_in_pieces_is_updating_once,
        a_stream_is_its_batch,
        order_does_not_matter,
        merging_shards_is_one_stream,
        retracting_undoes_updating,
    ],
    ids=lambda law: law.__name__,
)
@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("setting", [Setting(), Setting(torch.float32)], ids=str)
def test_law(name: str, law: Law, setting: Setting) -> None:
    law(Stream(Case(name, BUILDERS[name], residual=True), setting))


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_stream_of_batches_and_outputs_of_partly_known_noise_is_its_batch(outputs: int) -> None:
    setting = Setting(batch_shape=(2,), outputs=outputs)
    case = Case("OSGPR", lambda data: OSGPR(*data.astuple(), likelihood=_noise(data)), "mixed")
    a_stream_is_its_batch(Stream(case, setting))


def _noise(data: Observations) -> GaussianLikelihood:
    outputs = data.Y.shape[-1:] if data.Y.shape[-1] > 1 else torch.Size()
    return GaussianLikelihood(batch_shape=data.Y.shape[:-2] + outputs).to(data.Y)
