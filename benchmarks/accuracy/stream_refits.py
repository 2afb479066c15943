"""Refits along streams whose first outcomes are all equal, against fresh fits of the same data.

Streams of two to six inputs (``WISKI``: of two) that begin with a plateau of eight to seventeen
outcomes and are fitted seven times, some about 1e12, some in units of 1e±12. Each stream's last fit
is compared with the best of three fits from scratch, of the default start and of two draws from the
priors, in its own memory: so that all four are values of one function.

BoTorch's ``Standardize`` leaves outcomes alone that spread by less than 1e-8, which makes zeros of
those in units of 1e-12, the same from any start. Here its limit is lower, so that they count.
``FIRST`` of the environment is the first seed (0), for streams by which nothing was chosen.
"""

from __future__ import annotations

import copy
import itertools
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.optim.utils import sample_all_priors
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from benchmarks.common.harness import Options, processor_seconds, start
from benchmarks.common.report import Claim, at_least, at_most, finish
from bo_stream import OSGPR, WISKI, AutoGP
from bo_stream.models import fitting
from bo_stream.models.base import StreamingGP
from bo_stream.models.fitting import Values, hyperparameters, set_hyperparameters

FIRST = int(os.environ.get("FIRST", "0"))
NATS = 1.0
SHARE = 29 / 30
COST = 1.3
FITS = 7
UNITS = ((0.0, 1.0), (1e12, 1.0), (0.0, 1e12), (0.0, 1e-12), (-1e12, 1e3), (0.0, 1e-3))
"""Offsets and scales of the outcomes."""


def stream(seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and outcomes of a rough function, of which the first are all equal."""
    generator = torch.Generator().manual_seed(seed)
    d = 2 + seed % 5
    n, plateau = 30 + 15 * d, 8 + seed * 7 % 10
    X = torch.rand(n, d, generator=generator)
    slopes, centre = (draw(d, generator=generator) for draw in (torch.randn, torch.rand))
    f = (4.0 * ((X - centre) @ slopes)).sin() + (X - 0.5).square().sum(-1)
    f = f + 0.1 * torch.randn(n, generator=generator)
    f[:plateau] = f[:plateau].min()
    offset, scale = UNITS[seed % len(UNITS)]
    return X, (offset + scale * f).unsqueeze(-1)


def built(kind: type[StreamingGP], X: Tensor, Y: Tensor) -> StreamingGP:
    """A model on the unit cube."""
    if issubclass(kind, WISKI):
        bounds = torch.tensor([[0.0], [1.0]]).expand(2, X.shape[-1])
        return kind(X, Y, bounds=bounds, grid_size=10)
    return kind(X, Y)


def fit(model: StreamingGP) -> None:
    """Fit as a user does."""
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))


def log_posterior(model: StreamingGP) -> float:
    """Of the hyperparameters, in nats."""
    model.train()
    with torch.no_grad():
        loss = model.compute_custom_loss(ExactMarginalLogLikelihood(model.likelihood, model))
    model.eval()
    return -float(loss) * model.num_observations


def followed(kind: type[StreamingGP], X: Tensor, Y: Tensor) -> tuple[StreamingGP, Values]:
    """A model that was fitted along the stream, and its first hyperparameters."""
    ends = [8, *(round(len(X) * (i + 1) / FITS) for i in range(1, FITS))]
    model = built(kind, X[: ends[0]], Y[: ends[0]])
    first = hyperparameters(model)
    fit(model)
    for begin, end in itertools.pairwise(ends):
        fit(model.update(X[begin:end], Y[begin:end]))
    return model, first


@contextmanager
def one_start() -> Iterator[None]:
    """Let a refit begin at the present values alone."""
    chosen = fitting.other_start
    fitting.other_start = lambda model: None
    try:
        yield
    finally:
        fitting.other_start = chosen


def best_fresh(model: StreamingGP, first: Values) -> float:
    """The best of three fits from scratch in the same memory."""
    values = []
    for seed in range(3):
        other = copy.deepcopy(model)
        set_hyperparameters(other, first)
        torch.manual_seed(seed)
        if seed > 0:
            sample_all_priors(other)
        with one_start():
            fit(other)
        values.append(log_posterior(other))
    return max(values)


def streams(kind: type[StreamingGP], seeds: range) -> list[Claim]:
    """How many streams end where a fresh fit does, and what that costs."""
    near, alone, costs = 0, 0, [0.0, 0.0]
    for seed in seeds:
        data = stream(seed)
        found = list[tuple[StreamingGP, Values]]()
        with one_start():
            costs[0] += processor_seconds(
                lambda data=data, to=found: to.append(followed(kind, *data))
            )
        costs[1] += processor_seconds(lambda data=data, to=found: to.append(followed(kind, *data)))
        alone_is, is_near = (
            log_posterior(model) >= best_fresh(model, first) - NATS for model, first in found
        )
        alone, near = alone + alone_is, near + is_near
    name, count = kind.__name__, len(seeds)
    detail = f"{near} of {count}; from the present values alone {alone}"
    return [
        at_least(f"{name}: streams within a nat of fresh fits", near / count, SHARE, "", detail),
        at_most(f"{name}: cost of that", costs[1] / costs[0], COST, "times one start's"),
    ]


def main() -> None:
    """Run it."""
    options: Options = start(__doc__)
    warnings.simplefilter("ignore")
    count = options.pick(30, 1)
    claims = [
        claim
        for kind, seeds in (
            (AutoGP, range(FIRST, FIRST + count)),
            (OSGPR, range(FIRST, FIRST + count)),
            (WISKI, range(FIRST + -FIRST % 5, FIRST + count, 5)),
        )
        for claim in streams(kind, seeds)
    ]
    finish("stream_refits", claims, options, {"streams": count, "first": FIRST, "fits": FITS})


if __name__ == "__main__":
    main()
