"""What every model of the registry computes, written to a file and compared with another commit's.

Before a change that must not alter results, and after it, on the same machine:

    python -m tests.support.golden write before.pt
    python -m tests.support.golden compare before.pt

For each case in each of its settings: the posterior after the first batch, after an update and
after a refit, the objective with its gradient, seeded fantasies with their posterior, and what
``retract``, ``merge`` and ``forget`` leave, or the text with which they are refused. Rounding
differs between processors and versions of torch, so that the file itself is not kept.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch
from botorch.exceptions.errors import BotorchError
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood
from torch import Tensor

from bo_stream import BayesianLastLayer
from bo_stream.models.base import StreamingGP
from bo_stream.testing.streams import gaussian, moments
from tests.laws.cases import STREAMS
from tests.laws.registry import Stream

Results = dict[str, Tensor]
"""By name; what was refused has the error's text in its name."""

FIRST, MORE = 14, 6
"""Observations of the first batch and of the update."""


def results(stream: Stream) -> Results:
    """Everything that a case computes in a setting, from a fixed seed."""
    torch.manual_seed(0)
    found: Results = {}
    data, points = stream.data(FIRST + MORE), stream.points
    model = stream.model(data[:FIRST])
    _keep(found, "first", *moments(model, points))
    model.update(*data[FIRST:].astuple())
    _keep(found, "updated", *moments(model, points))
    _keep(found, "objective", *_objective(model))
    _keep(found, "refreshed", *moments(model, points))
    fantasy = model.fantasize(points[..., :2, :], stream.sampler())
    _keep(found, "fantasized", *moments(fantasy, points))
    _keep(found, "gradient of variance", _variance_gradient(fantasy, points))
    other = stream.model(data[:FIRST])
    for name, verb in {
        "retracted": lambda: model.retract(*data[FIRST:].astuple()),
        "merged": lambda: model.merge(other),
        "forgotten": lambda: model.forget(0.5),
    }.items():
        try:
            verb()
        except (BotorchError, NotImplementedError) as error:
            _keep(found, f"{name}: {error}", torch.empty(0))
        else:
            _keep(found, name, *moments(model, points))
    return found


def _keep(found: Results, name: str, *values: Tensor) -> None:
    found.update({f"{name} {i}": value.detach().clone() for i, value in enumerate(values)})


def _objective(model: StreamingGP) -> list[Tensor]:
    """Its value and its gradient in all hyperparameters that it has one in, and out of training."""
    exact = isinstance(model.likelihood, _GaussianLikelihoodBase)
    kind = ExactMarginalLogLikelihood if exact else MarginalLogLikelihood
    if isinstance(model, BayesianLastLayer) and model.batch_shape.numel() > 1:
        model.network.requires_grad_(False)  # several elements learn none that they share
    model.train()
    torch.manual_seed(1)
    loss = model.compute_custom_loss(kind(model.likelihood, model)).sum()
    parameters = [p for p in model.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(loss, parameters, allow_unused=True) if loss.requires_grad else ()
    model.eval()
    return [loss, *(slope for slope in slopes if slope is not None)]


def _variance_gradient(model: StreamingGP, points: Tensor) -> Tensor:
    X = points.clone().requires_grad_()
    variance = gaussian(model.posterior(X)).variance.sum()
    return torch.autograd.grad(variance, X)[0]


def all_results() -> dict[str, Results | str]:
    """Those of all cases by name; the error of one that raises."""
    found: dict[str, Results | str] = {}
    for stream in STREAMS:
        try:
            found[str(stream)] = results(stream)
        except Exception as error:  # a refusal must stay the same, too
            found[str(stream)] = f"{type(error).__name__}: {error}"
    return found


def worst(now: Results, before: Results) -> float:
    """Largest difference in parts of the largest number of the same name, inf if names differ."""
    if now.keys() != before.keys():
        return float("inf")
    return max(_difference(now[name], before[name]) for name in before)


def _difference(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    scale = max(float(b.abs().max()), 1e-300) if b.numel() > 0 else 1.0
    return float((a - b).abs().max()) / scale if a.numel() > 0 else 0.0


def compare(now: dict[str, Results | str], before: dict[str, Results | str], most: float) -> int:
    """Print the cases that differ by more than so much; how many there are."""
    differing = 0
    for name in sorted(before):
        a, b = now.get(name, "absent"), before[name]
        if isinstance(a, str) or isinstance(b, str):
            differs, said = a != b, f"{b} -> {a}"
        else:
            value = worst(a, b)
            tolerance = max(most, 1e-5) if "float32" in name and most > 0.0 else most
            differs, said = not value <= tolerance, f"{value:.1e}"
        if differs:
            differing += 1
            print(f"{name}: {said}")
    new = len(now.keys() - before.keys())
    print(f"{len(now)} cases, {differing} differ by more than {most:g}, {new} are new")
    return differing


def main() -> int:
    """Write or compare; the exit code is 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--most", type=float, default=0.0, help="difference that is allowed")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    found = all_results()
    if asked.verb == "write":
        torch.save(found, asked.file)
        print(f"{len(found)} cases, {sum(isinstance(v, str) for v in found.values())} refused")
        return 0
    return min(1, compare(found, torch.load(asked.file), asked.most))


if __name__ == "__main__":
    raise SystemExit(main())
