"""Inference from rows of counts: every row a Gaussian observation, found together with all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bo_stream.bases.inducing import differentiable_matrix, frozen, kernel_matrix
from bo_stream.likelihoods.sites import Sites
from bo_stream.models.auto.exact import ExactCache, ExactInference, ExactMemory
from bo_stream.models.held_sites import fit_held, held_bound
from bo_stream.models.memory import Observations
from bo_stream.models.prior import Prior
from bo_stream.process.process import PosteriorProcess


@dataclass(frozen=True)
class SiteExactInference(ExactInference):
    """The normal posterior of the largest bound, given all rows (Opper and Archambeau, 2009).

    It depends on the rows and the hyperparameters, not on the order in which rows came. The sites
    in the memory are those of a row that counts once.
    """

    def observe(
        self, memory: ExactMemory, cache: ExactCache | None, data: Observations, prior: Prior
    ) -> tuple[ExactMemory, None]:
        """Append rows, or take rows out, and find the sites of all. Cost O(n³) a step."""
        return self.sited(memory.after(data), prior), None

    def process(
        self, memory: ExactMemory, cache: ExactCache | None, prior: Prior, X: Tensor | None = None
    ) -> tuple[PosteriorProcess, ExactCache]:
        """Find the sites at the hyperparameters as they are, and solve, unless that is kept."""
        if cache is None or not prior.is_in(cache.state):
            memory = self.sited(memory, prior)
        return super().process(memory, cache, prior, X)

    @torch.no_grad()
    def sited(self, memory: ExactMemory, prior: Prior) -> ExactMemory:
        """Find the sites of all rows anew, from those that they have. Cost O(n³) a step."""
        rows, weight = memory.rows, memory.weight.unsqueeze(-2)
        if len(rows) == 0:
            return memory
        covariance = kernel_matrix(frozen(prior.kernel), rows.X, rows.X, prior.num_outputs)
        fit = fit_held(_weighted(memory), covariance, prior, memory.weight)
        sites = Sites(fit.sites.precision / weight, fit.sites.shift / weight)
        return replace(memory, rows=replace(rows, sites=sites))

    def objective(
        self, memory: ExactMemory, cache: ExactCache | None, prior: Prior
    ) -> tuple[Tensor, ExactCache | None]:
        """Return the bound at its optimum; see :func:`held_bound`."""
        X = memory.rows.X
        covariance = differentiable_matrix(prior.kernel, X, X, prior.num_outputs)
        return held_bound(_weighted(memory), covariance, prior, memory.weight), cache

    def refitted(
        self, memory: ExactMemory, cache: ExactCache | None, prior: Prior
    ) -> tuple[ExactMemory, ExactCache | None]:
        """Find the sites for new hyperparameters, so that later steps begin near them."""
        if cache is not None and prior.is_in(cache.state):
            return memory, cache
        return self.sited(memory, prior), cache


def _weighted(memory: ExactMemory) -> Observations:
    """Return the rows with sites that count as often as they do."""
    rows, weight = memory.rows, memory.weight.unsqueeze(-2)
    if rows.sites is None:
        return rows
    sites = Sites(rows.sites.precision * weight, rows.sites.shift * weight)
    return replace(rows, sites=sites)
