"""An automatic model as the public model of the family that it is in."""

from __future__ import annotations

from bo_stream.models.auto.auto import AutoGP
from bo_stream.models.auto.families import OSGPR as SPARSE
from bo_stream.models.auto.families import OSVGP as VARIATIONAL
from bo_stream.models.auto.families import WISKI as ON_GRID
from bo_stream.models.base import StreamingGP
from bo_stream.models.inducing.osgpr import OSGPR
from bo_stream.models.inducing.osvgp import OSVGP
from bo_stream.models.wiski.wiski import WISKI

_CLASSES: dict[str, type[StreamingGP]] = {ON_GRID: WISKI, SPARSE: OSGPR, VARIATIONAL: OSVGP}


def family_model(model: StreamingGP) -> StreamingGP:
    """Return the public model of an :class:`~bo_stream.AutoGP`'s family, to be asked, not updated.

    It shares hyperparameters, memory and cache. An exact model, and any other, is returned as it
    is. So what is written for WISKI or OSGPR holds for an AutoGP that has become one.
    """
    if not isinstance(model, AutoGP) or model.family not in _CLASSES:
        return model
    shared = model._shallow_copy()
    view = object.__new__(_CLASSES[model.family])
    view.__dict__.update(shared.__dict__)
    memory = model._memory
    view._inference, view._memory, view._cache = memory.inference, memory.inner, model._cache
    return view
