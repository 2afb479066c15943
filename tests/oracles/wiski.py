"""WISKI's caches and what its paper makes of them, as printed and as mended. [Stanton2021]"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Caches:
    """``WᵀW``, ``Wᵀy`` and ``yᵀy``, a root L of the first, and the prior. [Stanton2021, section 4]

    Attributes:
        K: Prior covariance of the nodes, ``m x m``.
        W: Interpolation weights, ``n x m``.
        y: Outcomes, ``n``.
        noise: Variance σ².
    """

    K: Tensor
    W: Tensor
    y: Tensor
    noise: float

    def root(self) -> Tensor:
        """L with ``L Lᵀ = Wᵀ W``, ``m x m``."""
        values, vectors = torch.linalg.eigh(self.W.mT @ self.W)
        return vectors * values.clamp_min(0.0).sqrt()

    def inner(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q, ``a = Lᵀ σ⁻² K v`` and ``b = Q⁻¹ a``. [eq. 12]"""
        L = self.root()
        Q = torch.eye(len(L)).to(L) + L.mT @ self.K @ L / self.noise
        a = L.mT @ self.K @ v / self.noise
        return Q, a, torch.linalg.solve(Q, a)

    def mean(self, w: Tensor) -> Tensor:
        """At t points with weights ``t x m``. [eq. 14]"""
        moment = self.W.mT @ self.y
        _, _, b = self.inner(moment)
        return w @ self.K @ (moment - self.root() @ b) / self.noise

    def covariance(self, w: Tensor, printed: bool = False) -> Tensor:
        """At t points, ``t x t``. [eq. 15; printed: with its factor σ²]"""
        _, _, b = self.inner(w.mT)
        found = w @ self.K @ (w.mT - self.root() @ b)
        return self.noise * found if printed else found

    def log_marginal_likelihood(self, printed: bool = False) -> Tensor:
        """Without the constant ``−n / 2 log 2π``. [eq. 13]"""
        n, m = self.W.shape
        moment = self.W.mT @ self.y
        Q, a, b = self.inner(moment)
        explained = moment @ self.K @ moment
        logs = n * torch.tensor(self.noise).to(Q).log() + torch.logdet(Q)
        if printed:
            logs = (n - m) * torch.tensor(self.noise).to(Q).log() - torch.logdet(Q)
        else:
            explained = explained / self.noise
        return -0.5 * (self.y @ self.y - explained + a @ b) / self.noise - 0.5 * logs

    def newest(self, w: Tensor, y: Tensor, printed: bool = False) -> Tensor:
        """Of the log marginal likelihood with an outcome y more, what depends on its weights w.

        [eq. 18 in the form of A.5; printed: without ``σ⁻²`` before the squares]
        """
        M = torch.linalg.inv(self.noise * torch.linalg.inv(self.K) + self.W.mT @ self.W)
        moment = self.W.mT @ self.y + y * w
        v = M @ w
        squares = moment @ M @ moment - (v @ moment).square() / (1.0 + v @ w)
        return 0.5 * (squares if printed else squares / self.noise) - 0.5 * torch.log1p(v @ w)
