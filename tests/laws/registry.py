"""The models of this package as the laws of :mod:`bo_stream.testing` take them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import bo_stream
from bo_stream.models.base import StreamingGP
from bo_stream.models.quadruply_stochastic.qsgp import QSGP
from bo_stream.models.wiski.grid_model import GridModel
from bo_stream.testing import SETTINGS as SETTINGS
from bo_stream.testing import Setting as Setting
from bo_stream.testing.streams import Case as AnyCase
from bo_stream.testing.streams import ExampleData, ModelStream
from bo_stream.testing.streams import Law as Law
from bo_stream.testing.streams import applies as applies
from bo_stream.testing.streams import condition_on as condition_on
from tests.support.copies import Copies
from tests.support.smooth_points import is_smooth_at

DIM = 2


def prior_error(model: StreamingGP) -> float:
    """How far a prior may be off: by interpolation, or as 20 drawn frequencies are, or less."""
    if isinstance(model, GridModel):
        return float(1.1 * model.interpolation_error())  # which is found by probes
    return 0.5 if isinstance(model, QSGP) else 0.0  # 0.16 is a deviation


@dataclass(frozen=True, kw_only=True)
class Case(AnyCase):
    """A model of this package in one variant; its name begins with that of the class."""

    is_smooth_at: Callable[[StreamingGP, Tensor], Tensor] = is_smooth_at
    prior_error: Callable[[StreamingGP], float] = prior_error

    @property
    def family(self) -> str:
        """The family of the model."""
        module: str = getattr(bo_stream, self.name.partition(",")[0]).__module__
        return module.split(".")[2]


@dataclass(frozen=True)
class Stream(ModelStream):
    """One whose models are built once in a process, and given as copies."""

    def model(self, data: ExampleData, seed: int = 1) -> StreamingGP:
        return self._copied(("model", seed), data, lambda: self.built(data, seed))

    def settled(self, data: ExampleData) -> StreamingGP:
        if not self.case.residual:
            return self.model(data)
        return self._copied(("settled",), data, lambda: super(Stream, self).settled(data))

    def _copied(
        self, how: Hashable, data: ExampleData, build: Callable[[], StreamingGP]
    ) -> StreamingGP:
        """Give a copy of a model of the same data, which is built if none is kept."""
        values = tuple(None if t is None else t.cpu().numpy().tobytes() for t in data.astuple())
        key = (id(self.case), self.setting, how, len(data), values)
        if key in _KEPT:
            _KEPT.move_to_end(key)
        else:
            with torch.random.fork_rng(devices=[]):  # what is drawn later depends on no copies
                _KEPT[key] = self.case, Copies(build())
            if len(_KEPT) > MOST_KEPT:
                _KEPT.popitem(last=False)
        return _KEPT[key][1].new()


MOST_KEPT = 64
_KEPT: OrderedDict[Hashable, tuple[AnyCase, Copies[StreamingGP]]] = OrderedDict()


EVERY_SETTING = tuple(
    Setting(dtype, batch_shape, outputs)
    for dtype in (torch.float64, torch.float32)
    for batch_shape in ((), (2,))
    for outputs in (1, 2)
)


UNBATCHED = (Setting(), Setting(outputs=2), Setting(torch.float32, outputs=2))


def shared_out(streams: Iterable[Stream]) -> list[Any]:
    """Return parameters of tests in the matrix, of which a run takes each family and setting."""
    result = []
    for stream in streams:
        family, setting = stream.case.family, str(stream.setting)
        marks = [pytest.mark.matrix(family, setting), getattr(pytest.mark, family)]
        result.append(pytest.param(stream, id=str(stream), marks=marks))
    return result
