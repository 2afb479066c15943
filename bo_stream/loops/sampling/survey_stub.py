"""Stand-ins until the criteria and the model are there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bo_stream import OSVGP, BinomialLikelihood
from bo_stream.mapping import map_inputs, map_kernel
from bo_stream.models.base import StreamingGP


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
