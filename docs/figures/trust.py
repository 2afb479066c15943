"""A stream that begins to drift, for trust.md: ``python docs/figures/trust.py``."""

from __future__ import annotations

from pathlib import Path

import torch
from botorch.fit import fit_gpytorch_mll
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from bo_stream import WISKI
from bo_stream.diagnostics import ProgressiveValidation, TrustReport, report

PICTURE = Path(__file__).with_name("trust.png")
NOISE = 0.2


def drifting(rows: int = 3_000, begins: int = 2_400, batch: int = 10) -> TrustReport:
    """Report on a model of a stream whose level rises by a noise standard deviation."""
    torch.manual_seed(0)

    def observe(n: int, level: float = 0.0) -> tuple[Tensor, Tensor]:
        X = torch.rand(n, 2, dtype=torch.float64)
        return X, torch.sin(6.0 * X).sum(-1, keepdim=True) + NOISE * torch.randn_like(
            X[:, :1]
        ) + level

    model = WISKI(*observe(100), bounds=torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double())
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    record = ProgressiveValidation()
    for row in range(0, rows, batch):
        record.observe(model, *observe(batch, NOISE if row >= begins else 0.0))
    return report(model, record)


if __name__ == "__main__":
    found = drifting()
    found.plot().savefig(PICTURE, dpi=80, pil_kwargs={"optimize": True})
    print(f"{found}\n{PICTURE}: {PICTURE.stat().st_size:,} bytes")
