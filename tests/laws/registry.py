"""What a law is, and what it is about: a model in a variant, with data to stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from botorch.sampling import SobolQMCNormalSampler
from torch import Tensor

import bo_stream
from bo_stream import DirichletWISKI
from bo_stream.models.base import StreamingGP
from tests.support.problems import Observations, observations

DIM = 2


@dataclass(frozen=True)
class Setting:
    """What a stream's tensors look like."""

    dtype: torch.dtype = torch.float64
    batch_shape: tuple[int, ...] = ()
    outputs: int = 1
    device: str = "cpu"

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.device}-{dtype}-batch{list(self.batch_shape)}-m{self.outputs}"


@dataclass(frozen=True)
class Case:
    """A model class in one variant.

    Attributes:
        name: The model's name, and after a comma what is special.
        build: A model of some observations, whatever their shapes and dtype.
        noise: ``"learned"``, ``"known"`` or ``"mixed"``; ``"labels"``: outcomes are two classes;
            ``"counts"``: they are rows of positives and examined.
        in_order: Whether what enters depends on what came before; the laws for models where it
            does not are left out.
        residual: Whether the features miss some of the prior; laws for when they do not are left
            out.
        rows: Whether the latest observations are held as rows, so that it matters which they are.
        blended: Whether an observation may make a variance grow: predictions are averages with
            weights that it moves, or what was learned takes a step.
        sites: Whether observations enter as Gaussian ones that stand for what is not; laws of
            Gaussian noise are left out.
        spreading: Whether places are added while inputs come that are far from all others.
        growing: Whether all observations are held, up to a thousand or more.
        settling: Whether rows whose sites are found together settle, each for good, once a part of
            them is forgotten.
        truncated: Whether a fit's objective leaves out features, with a gradient near its own.
        settings: What to test it with.
    """

    name: str
    build: Callable[[Observations], StreamingGP]
    noise: str = "learned"
    in_order: bool = False
    residual: bool = False
    rows: bool = False
    blended: bool = False
    sites: bool = False
    spreading: bool = False
    growing: bool = False
    settling: bool = False
    truncated: bool = False
    settings: tuple[Setting, ...] = (
        Setting(),
        Setting(torch.float32, outputs=2),
        Setting(batch_shape=(2,), outputs=2),
    )

    @property
    def renews_sites(self) -> bool:
        """Whether sites of earlier observations are found anew, and may then say less."""
        return self.sites and (self.rows or self.settling or self.growing)

    @property
    def family(self) -> str:
        """The family of the model."""
        module: str = getattr(bo_stream, self.name.partition(",")[0]).__module__
        return module.split(".")[2]


EVERY_SETTING = tuple(
    Setting(dtype, batch_shape, outputs)
    for dtype in (torch.float64, torch.float32)
    for batch_shape in ((), (2,))
    for outputs in (1, 2)
)


UNBATCHED = (Setting(), Setting(outputs=2), Setting(torch.float32, outputs=2))


@dataclass(frozen=True)
class Stream:
    """A case in a setting, with data to stream."""

    case: Case
    setting: Setting

    def __str__(self) -> str:
        return f"{self.case.name}-{self.setting}"

    def data(self, n: int) -> Observations:
        s = self.setting
        data = observations(n, DIM, s.outputs, s.batch_shape, s.dtype)
        if self.labels:
            labels = (data.Y[..., :1] > 4.8).to(data.X)
            return Observations(data.X.to(s.device), labels.to(s.device))
        if self.case.noise == "counts":
            examined = torch.randint(1, 30, data.Y.shape[:-1]).to(data.X)
            counts = torch.stack(((data.Y[..., 0] / 7.0 * examined).round(), examined), -1)
            return Observations(data.X.to(s.device), counts.to(s.device), counts=True)
        data = data.with_noise(self.case.noise)
        Yvar = None if data.Yvar is None else data.Yvar.to(s.device)
        return Observations(data.X.to(s.device), data.Y.to(s.device), Yvar)

    def model(self, data: Observations, seed: int = 1) -> StreamingGP:
        """A model in evaluation mode; its hyperparameters depend on the seed only."""
        model = self.case.build(data)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                if name.startswith("stem."):
                    continue  # the memory holds what was projected before
                if name == "mean_module.raw_constant":
                    parameter.copy_(0.3 * noise)
                else:
                    parameter.mul_((0.2 * noise).exp())
        model.eval()
        return model

    def settled(self, data: Observations) -> StreamingGP:
        """The same, whose observations entered after the hyperparameters were set.

        Features that miss some of the prior miss another part when the kernel moves.
        """
        model = self.model(data)
        return model.clear().update(*data.astuple()) if self.case.residual else model

    @property
    def labels(self) -> bool:
        """Whether outcomes are labels."""
        return self.case.noise == "labels"

    @property
    def binary(self) -> bool:
        """Whether they are of two classes that stay two."""
        return self.labels and self.case.sites

    @cached_property
    def points(self) -> Tensor:
        """Test inputs, ``batch_shape x 5 x d``."""
        X = torch.rand(*self.setting.batch_shape, 5, DIM, dtype=self.setting.dtype)
        return X.to(self.setting.device)

    def sampler(self, n: int = 3) -> SobolQMCNormalSampler:
        return SobolQMCNormalSampler(torch.Size([n]), seed=7)

    @property
    def exact(self) -> bool:
        """Whether gradients can be checked by differences."""
        return self.setting.dtype == torch.float64


def shared_out(streams: Iterable[Stream]) -> list[Any]:
    """Return parameters of tests in the matrix, of which a run takes each family and setting."""
    result = []
    for stream in streams:
        family, setting = stream.case.family, str(stream.setting)
        marks = [pytest.mark.matrix(family, setting), getattr(pytest.mark, family)]
        result.append(pytest.param(stream, id=str(stream), marks=marks))
    return result


def condition_on(
    model: StreamingGP, data: Observations, noise: Tensor | None = None
) -> StreamingGP:
    """Condition a model on hypothetical observations of its kind."""
    if isinstance(model, DirichletWISKI):
        return model.condition_on_labels(data.X, data.Y)
    return model.condition_on_observations(data.X, data.Y, noise=noise)


Law = Callable[[Stream], None]
LAWS: list[Law] = []
_EXEMPTIONS: list[tuple[Law, Callable[[Case], bool]]] = []


def law(function: Law) -> Law:
    """Put a law on the list."""
    LAWS.append(function)
    return function


def not_for(exempt: Callable[[Case], bool]) -> Callable[[Law], Law]:
    """Return a decorator of laws that some cases need not obey."""

    def decorate(function: Law) -> Law:
        _EXEMPTIONS.append((function, exempt))
        return function

    return decorate


orderless = not_for(lambda case: case.in_order)
"""Of memories that do not depend on the order in which observations enter."""
of_outcomes = not_for(lambda case: case.noise in ("labels", "counts"))
"""Of observations in the units of the posterior."""
of_statistics = not_for(lambda case: case.rows)
"""Of memories that hold nothing but statistics."""
without_residual = not_for(lambda case: case.residual)
"""Of features that carry the whole prior."""
of_fixed_size = not_for(lambda case: case.growing)
"""Of memories that are as large after ten observations as after ten thousand."""
of_forgetting = not_for(lambda case: case.rows or case.settling)
"""Of memories that hold nothing but statistics when some of them are forgotten, too."""
of_exact_objectives = not_for(lambda case: case.truncated or case.blended)
"""Of objectives that are functions of the hyperparameters alone."""
of_gaussian_noise = not_for(lambda case: case.sites)
"""Of observations that are taken for normal ones."""


def applies(law: Law, case: Case) -> bool:
    """Return whether a case must obey a law."""
    return not any(exempt(case) for function, exempt in _EXEMPTIONS if function is law)
