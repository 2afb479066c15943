"""The models on a grid, for functions that take any of them."""

from __future__ import annotations

from bo_stream.models.wiski.dirichlet import DirichletWISKI
from bo_stream.models.wiski.heteroscedastic import HeteroscedasticWISKI
from bo_stream.models.wiski.inference import GridInference, Memory
from bo_stream.models.wiski.wiski import WISKI

GridModel = WISKI | DirichletWISKI | HeteroscedasticWISKI


def process_parts(model: GridModel) -> tuple[GridInference, Memory]:
    """Return the inference and the memory of a model's process, beside that of its noise."""
    if isinstance(model, HeteroscedasticWISKI):
        return model._inference.mean, model._memory.mean
    return model._inference, model._memory
