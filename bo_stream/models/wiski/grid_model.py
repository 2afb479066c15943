"""The models on a grid, for functions that take any of them."""

from __future__ import annotations

from bo_stream.models.wiski.dirichlet import DirichletWISKI
from bo_stream.models.wiski.heteroscedastic import HeteroscedasticWISKI
from bo_stream.models.wiski.wiski import WISKI

GridModel = WISKI | DirichletWISKI | HeteroscedasticWISKI
