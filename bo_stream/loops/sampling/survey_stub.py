"""Stand-ins until the criteria and the model are there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bo_stream import OSVGP, BinomialLikelihood, prevalence
from bo_stream.mapping import map_inputs, map_kernel
from bo_stream.models.base import StreamingGP


@dataclass(frozen=True)
class SiteChoice:
    indices: Tensor
    gains: Tensor
    costs: Tensor
    before: float
    after: float


@dataclass(frozen=True)
class SurveyModelSettings:
    overdispersion: bool = False


def survey_model(
    sites: Tensor, X: Tensor, Y: Tensor, settings: Any, former: Any = None
) -> StreamingGP:
    return OSVGP(
        X,
        Y,
        BinomialLikelihood(overdispersion=settings.overdispersion),
        covar_module=map_kernel(sites),
        input_transform=map_inputs(sites),
        hyper_steps=30,
    )


def select_sites(
    model: StreamingGP,
    pool: Tensor,
    q: int,
    criterion: Any,
    mc_points: Tensor | None = None,
    weights: Any = None,
    exclude: Tensor | None = None,
    pending: Tensor | None = None,
    trials: int | None = None,
    constraints: Any = None,
) -> SiteChoice:
    with torch.no_grad():
        p = prevalence(model, pool)
        u = p.variance.reshape(-1)
    before = float(u.sum())
    if exclude is not None:
        u[exclude] = -1.0
    top = u.topk(min(q, int((u >= 0).sum())))
    return SiteChoice(
        top.indices,
        top.values,
        torch.ones(len(top.indices)),
        before,
        before - float(top.values.sum()),
    )
