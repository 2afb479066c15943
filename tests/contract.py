"""What every streaming model obeys: a registry of models, and laws that none may break.

A new model enters by a line in ``CASES``; the tests fail while a concrete class is missing. A law
takes a :class:`Stream` (a case with dtype, shapes and data) and asserts; ``@law`` puts it on the
list.
"""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.models import SingleTaskGP
from botorch.models.transforms.input import Normalize, Warp
from botorch.models.transforms.outcome import (
    Bilog,
    ChainedOutcomeTransform,
    Log,
    Power,
    Standardize,
)
from botorch.posteriors import Posterior, TransformedPosterior
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.kernels import AdditiveKernel, Kernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
)
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.means import ConstantMean
from gpytorch.mlls import LeaveOneOutPseudoLikelihood, PredictiveLogLikelihood
from torch import Tensor

from bo_stream import WISKI, DirichletWISKI, HeteroscedasticWISKI
from bo_stream.allocation import OIPS, CoverTree
from bo_stream.models.base import StreamingGP
from bo_stream.models.clustered.clustered import ClusteredGP
from bo_stream.models.decoupled.decoupled import DecoupledGP
from bo_stream.models.inducing.osgpr import OSGPR
from bo_stream.models.inducing.osvgp import OSVGP
from bo_stream.models.local.local import LocalGP
from bo_stream.models.quadruply_stochastic.choice import Chevron, FourierFeatures, InducingAtData
from bo_stream.models.quadruply_stochastic.qsgp import QSGP
from bo_stream.models.quadruply_stochastic.qsrvm import QSRVM
from bo_stream.models.stems import LinearStem
from bo_stream.models.wiski import rows as row_memory
from tests.oracles import joint_covariance
from tests.problems import Observations, observations
from tests.smooth_points import smooth_points
from tests.tolerances import GRADIENT_TOLERANCE, assert_close

DIM = 2


# --- the registry -------------------------------------------------------------------------------


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
        name: Of the test.
        build: A model of some observations, whatever their shapes and dtype.
        noise: ``"learned"``, ``"known"`` or ``"mixed"``; ``"labels"``: outcomes are two classes.
        in_order: Whether what enters depends on what came before; the laws that suppose it does
            not are left out.
        residual: Whether the features miss some of the prior; laws for when they do not are left
            out.
        rows: Whether the latest observations are held as rows, so that it matters which they are.
        blended: Whether an observation may make a variance grow: predictions are averages with
            weights that it moves, or what was learned takes a step.
        sites: Whether observations enter as Gaussian ones that stand for what is not; laws of
            Gaussian noise are left out.
        spreading: Whether places are added while inputs come that are far from all others.
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
    settings: tuple[Setting, ...] = (
        Setting(),
        Setting(torch.float32, outputs=2),
        Setting(batch_shape=(2,), outputs=2),
    )


EVERY_SETTING = tuple(
    Setting(dtype, batch_shape, outputs)
    for dtype in (torch.float64, torch.float32)
    for batch_shape in ((), (2,))
    for outputs in (1, 2)
)


def _wiski(**options: Any) -> Callable[[Observations], WISKI]:
    """A factory of grid models; options that are functions are called with the observations."""

    def build(data: Observations) -> WISKI:
        chosen = {k: v(data) if callable(v) else v for k, v in options.items()}
        defaults = {"grid_size": 9, "tolerance": 0.0, "covar_module": _rbf(data), "bounds": _UNIT}
        return WISKI(*data.astuple(), **{**defaults, **chosen})

    return build


def _holding(
    rows: int, build: Callable[[Observations], StreamingGP]
) -> Callable[[Observations], StreamingGP]:
    """A factory of grid models that hold no more than so many observations as rows."""

    def held(data: Observations) -> StreamingGP:
        with mock.patch.object(row_memory, "MOST_ROWS", rows):
            return build(data)

    return held


def _heteroscedastic(data: Observations) -> HeteroscedasticWISKI:
    return HeteroscedasticWISKI(
        *data.astuple(),
        covar_module=_rbf(data),
        bounds=_UNIT,
        grid_size=9,
        tolerance=0.0,
        noise_grid_size=8,
        rounds=0,
    )


_UNIT = torch.tensor([[0.0] * DIM, [1.0] * DIM])


def _parameter_shape(data: Observations) -> torch.Size:
    m = data.Y.shape[-1]
    return torch.Size((*data.X.shape[:-2], *([m] if m > 1 else [])))


def _rbf(data: Observations) -> RBFKernel:
    kernel = RBFKernel(ard_num_dims=DIM, batch_shape=_parameter_shape(data))
    kernel.lengthscale = torch.full_like(kernel.lengthscale, 0.6)
    return kernel


def _scaled_matern(data: Observations) -> ScaleKernel:
    shape = _parameter_shape(data)
    base = MaternKernel(nu=1.5, ard_num_dims=DIM, batch_shape=shape)
    return ScaleKernel(base, batch_shape=shape)


def _additive(*groups: tuple[int, ...]) -> Callable[[Observations], Kernel]:
    """A sum of scaled kernels over groups of inputs, every second one rough."""

    def build(data: Observations) -> Kernel:
        shape, parts = _parameter_shape(data), []
        for i, group in enumerate(groups):
            options = {"ard_num_dims": len(group), "active_dims": group, "batch_shape": shape}
            base = MaternKernel(nu=2.5, **options) if i % 2 else RBFKernel(**options)
            parts.append(ScaleKernel(base, batch_shape=shape))
        return ScaleKernel(AdditiveKernel(*parts), batch_shape=shape)

    return build


def _standardize(data: Observations) -> Standardize:
    return Standardize(m=data.Y.shape[-1], batch_shape=data.X.shape[:-2])


def _warp(data: Observations) -> Warp:
    """Of a box that holds all inputs of the laws: outside it a warp is flat."""
    return Warp(DIM, [0, 1], bounds=torch.tensor([[-0.5] * DIM, [1.5] * DIM])).to(data.X)


def _linear_stem(data: Observations) -> LinearStem:
    """Calibrated beforehand, so that it is the same whatever the first observations are."""
    points = torch.rand(50, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return LinearStem(DIM, DIM).calibrate(points).to(data.X)


def _dirichlet(data: Observations) -> DirichletWISKI:
    kernel = ScaleKernel(RBFKernel(ard_num_dims=DIM))
    kernel.base_kernel.lengthscale = 0.6
    options: dict[str, Any] = {"grid_size": 9, "tolerance": 0.0, "bounds": _UNIT}
    return DirichletWISKI(data.X, data.Y, covar_module=kernel, **options)


def _osgpr(**options: Any) -> Callable[[Observations], OSGPR]:
    """A factory of models with inducing points that stay, unless options say otherwise."""

    def build(data: Observations) -> OSGPR:
        chosen = {k: v(data) if callable(v) else v for k, v in options.items()}
        points = _spread_points(data)
        defaults = {"covar_module": _rbf(data), "inducing_points": points, "window": 0}
        return OSGPR(*data.astuple(), **{**defaults, **chosen})

    return build


def _local(**options: Any) -> Callable[[Observations], LocalGP]:
    """A factory of small local models, few of which fill the unit square."""

    def build(data: Observations) -> LocalGP:
        chosen = {k: v(data) if callable(v) else v for k, v in options.items()}
        defaults = {"covar_module": _rbf(data), "max_size": 24, "w_gen": 0.7, "max_models": 4}
        return LocalGP(*data.astuple(), **{**defaults, **chosen})

    return build


def _osvgp(
    likelihood: Callable[[Observations], Likelihood], **options: Any
) -> Callable[[Observations], OSVGP]:
    """A factory of models with inducing points that stay, of outcomes as they are."""

    def build(data: Observations) -> OSVGP:
        defaults = {"covar_module": _rbf(data), "inducing_points": _spread_points(data)}
        return OSVGP(data.X, data.Y, likelihood(data), **{**defaults, **options})

    return build


def _qsgp(**options: Any) -> Callable[[Observations], QSGP]:
    """A factory of models of few functions that take few steps, and hold few rows."""

    def build(data: Observations) -> QSGP:
        chosen = {k: v(data) if callable(v) else v for k, v in options.items()}
        defaults: dict[str, Any] = {
            "covar_module": _scaled_rbf(data),
            "basis": FourierFeatures(40),
            "update_steps": 8,
            "max_rows": 50,
            "outcome_transform": None,
        }
        return QSGP(data.X, data.Y, **{**defaults, **chosen})

    return build


def _qsrvm(data: Observations) -> QSRVM:
    options: dict[str, Any] = {"max_points": 12, "max_rows": 50, "freeze_steps": 5}
    return QSRVM(
        data.X, data.Y, covar_module=_rbf(data), update_steps=8, outcome_transform=None, **options
    )


def _scaled_rbf(data: Observations) -> ScaleKernel:
    return ScaleKernel(_rbf(data), batch_shape=_parameter_shape(data))


def _gaussian_likelihood(data: Observations) -> GaussianLikelihood:
    return GaussianLikelihood(batch_shape=_parameter_shape(data))


def _laplace_likelihood(data: Observations) -> LaplaceLikelihood:
    return LaplaceLikelihood(batch_shape=_parameter_shape(data))


def _bernoulli_likelihood(_: Observations) -> BernoulliLikelihood:
    return BernoulliLikelihood()


def _spread_points(data: Observations) -> Tensor:
    points = torch.quasirandom.SobolEngine(DIM).draw(14, dtype=torch.float64)
    return points.to(data.X)


def _noisy_likelihood(data: Observations) -> GaussianLikelihood:
    """With a variance of 0.1, at which float32 can solve for ten thousand observations."""
    likelihood = GaussianLikelihood(batch_shape=_parameter_shape(data))
    likelihood.noise = torch.full_like(likelihood.noise, 0.1)
    return likelihood


def _clustered(**options: Any) -> Callable[[Observations], ClusteredGP]:
    """A factory of models with a tree of the whole box, unless options say otherwise."""

    def build(data: Observations) -> ClusteredGP:
        chosen = {k: v(data) if callable(v) else v for k, v in options.items()}
        defaults = {"covar_module": _rbf(data), "tree": _wide_tree()}
        return ClusteredGP(*data.astuple(), **{**defaults, **chosen})

    return build


def _decoupled(
    likelihood: Callable[[Observations], Likelihood], **options: Any
) -> Callable[[Observations], DecoupledGP]:
    """A factory of small models with hyperparameters that stay, whose bases are soon full."""

    def build(data: Observations) -> DecoupledGP:
        modules = {
            "likelihood": likelihood(data),
            "covar_module": _rbf(data),
            "mean_module": ConstantMean(batch_shape=_parameter_shape(data)),
        }
        for module in modules.values():
            module.requires_grad_(False)
        sizes = {"num_mean": 12, "num_covar": 5, "num_added": 12, "max_rows": 20}
        return DecoupledGP(data.X, data.Y, **{**modules, **sizes, **options})

    return build


@cache
def _wide_tree() -> CoverTree:
    """So dense that no further input gets a centre of its own."""
    line = torch.linspace(-0.45, 1.45, 200, dtype=torch.float64)
    return CoverTree(0.33).insert(torch.cartesian_prod(line, line))


UNBATCHED = (Setting(), Setting(outputs=2), Setting(torch.float32, outputs=2))

CASES: tuple[Case, ...] = (
    Case("WISKI", _wiski(), settings=EVERY_SETTING),
    Case("WISKI, no rows held", _holding(0, _wiski()), settings=EVERY_SETTING),
    Case(
        "WISKI, twelve rows held, known noise in part",
        _holding(
            12,
            _wiski(likelihood=lambda data: GaussianLikelihood(batch_shape=_parameter_shape(data))),
        ),
        noise="mixed",
    ),
    Case("WISKI, few features", _wiski(max_rank=30)),
    Case("WISKI, scaled Matérn", _wiski(covar_module=_scaled_matern)),
    Case("WISKI, additive", _wiski(covar_module=_additive((0,), (1,)))),
    Case(
        "WISKI, additive, overlapping, few features",
        _wiski(covar_module=_additive((0,), (0, 1)), grid_size=((9,), (7, 8)), max_rank=30),
    ),
    Case(
        "WISKI, additive, known noise in part",
        _wiski(
            covar_module=_additive((1,), (0,)),
            likelihood=lambda data: GaussianLikelihood(batch_shape=_parameter_shape(data)),
        ),
        noise="mixed",
    ),
    Case("WISKI, one kernel for all outputs", _wiski(covar_module=lambda _: RBFKernel())),
    Case("WISKI, as measured", _wiski(outcome_transform=None)),
    Case("WISKI, log", _wiski(outcome_transform=lambda _: Log())),
    Case("WISKI, power", _wiski(outcome_transform=lambda _: Power(0.5))),
    Case(
        "WISKI, log, then standardised",
        _wiski(
            outcome_transform=lambda data: ChainedOutcomeTransform(
                log=Log(), standardize=_standardize(data)
            )
        ),
    ),
    Case(
        "WISKI, bilog",
        _wiski(outcome_transform=lambda data: ChainedOutcomeTransform(b=Bilog())),
    ),
    Case(
        "WISKI, normalised inputs",
        _wiski(
            input_transform=lambda data: Normalize(
                DIM, bounds=torch.tensor([[-0.5, -1.0], [2.0, 1.5]]).to(data.X)
            ),
            bounds=torch.tensor([[0.0] * DIM, [1.0] * DIM]),
        ),
    ),
    Case("WISKI, linear stem", _wiski(stem=_linear_stem, bounds=None)),
    Case("WISKI, known noise", _wiski(), noise="known", settings=EVERY_SETTING),
    Case(
        "WISKI, known noise in part",
        _wiski(likelihood=lambda data: GaussianLikelihood(batch_shape=_parameter_shape(data))),
        noise="mixed",
    ),
    Case("HeteroscedasticWISKI", _heteroscedastic, in_order=True),
    Case("HeteroscedasticWISKI, no rows held", _holding(0, _heteroscedastic), in_order=True),
    Case(
        "HeteroscedasticWISKI, known noise",
        _heteroscedastic,
        noise="known",
        settings=(Setting(outputs=2),),
    ),
    Case(
        "HeteroscedasticWISKI, known noise in part",
        _heteroscedastic,
        noise="mixed",
        in_order=True,
        settings=(Setting(),),
    ),
    Case("OSGPR", _osgpr(), residual=True, settings=EVERY_SETTING),
    Case("OSGPR, scaled Matérn", _osgpr(covar_module=_scaled_matern), residual=True),
    Case(
        "OSGPR, one kernel for all outputs",
        _osgpr(covar_module=lambda _: RBFKernel()),
        residual=True,
    ),
    Case("OSGPR, as measured", _osgpr(outcome_transform=None), residual=True),
    Case("OSGPR, known noise", _osgpr(), noise="known", residual=True, settings=EVERY_SETTING),
    Case(
        "OSGPR, known noise in part",
        _osgpr(likelihood=lambda data: GaussianLikelihood(batch_shape=_parameter_shape(data))),
        noise="mixed",
        residual=True,
    ),
    Case(
        "OSGPR, points by OIPS",
        _osgpr(inducing_points=None, allocator=OIPS(0.8), window=6),
        in_order=True,
        residual=True,
        rows=True,
    ),
    Case(
        "OSGPR, a window of rows",
        _osgpr(window=7),
        residual=True,
        rows=True,
        settings=EVERY_SETTING,
    ),
    Case(
        "OSGPR, a window of rows, warped inputs",
        _osgpr(window=7, input_transform=_warp),
        residual=True,
        rows=True,
        settings=(Setting(), Setting(torch.float32, outputs=2)),
    ),
    Case(
        "OSGPR, a window of rows, known noise in part",
        _osgpr(
            likelihood=lambda data: GaussianLikelihood(batch_shape=_parameter_shape(data)), window=7
        ),
        noise="mixed",
        residual=True,
        rows=True,
    ),
    Case("LocalGP", _local(), in_order=True, residual=True, blended=True),
    Case(
        "LocalGP, scaled Matérn, two nearest",
        _local(covar_module=_scaled_matern, nearest=2),
        in_order=True,
        residual=True,
        blended=True,
        settings=(Setting(),),
    ),
    Case(
        "LocalGP, one kernel for all outputs, as measured",
        _local(covar_module=lambda _: RBFKernel(), outcome_transform=None),
        in_order=True,
        residual=True,
        blended=True,
        settings=(Setting(outputs=2),),
    ),
    Case(
        "LocalGP, known noise",
        _local(),
        noise="known",
        in_order=True,
        residual=True,
        blended=True,
        settings=(Setting(torch.float32, outputs=2),),
    ),
    Case(
        "LocalGP, known noise in part",
        _local(likelihood=lambda data: GaussianLikelihood(batch_shape=_parameter_shape(data))),
        noise="mixed",
        in_order=True,
        residual=True,
        blended=True,
        settings=(Setting(batch_shape=(2,)),),
    ),
    Case("OSVGP, Gaussian", _osvgp(_gaussian_likelihood), residual=True),
    Case(
        "OSVGP, learning",
        _osvgp(_gaussian_likelihood, hyper_steps=1),
        in_order=True,
        residual=True,
        settings=(Setting(torch.float32, outputs=2),),
    ),
    Case(
        "OSVGP, Laplace",
        _osvgp(_laplace_likelihood),
        in_order=True,
        residual=True,
        sites=True,
        settings=(Setting(), Setting(batch_shape=(2,), outputs=2)),
    ),
    Case(
        "OSVGP, Bernoulli",
        _osvgp(_bernoulli_likelihood),
        noise="labels",
        in_order=True,
        residual=True,
        sites=True,
        settings=(Setting(torch.float32), Setting(batch_shape=(2,))),
    ),
    Case("ClusteredGP", _clustered(covar_module=_scaled_matern), residual=True),
    Case(
        "ClusteredGP, one kernel for all outputs",
        _clustered(covar_module=lambda _: RBFKernel()),
        residual=True,
        settings=(Setting(batch_shape=(2,), outputs=2),),
    ),
    Case(
        "ClusteredGP, as measured",
        _clustered(outcome_transform=None),
        residual=True,
        settings=(Setting(),),
    ),
    Case(
        "ClusteredGP, conjugate gradients",
        _clustered(solver="cg"),
        residual=True,
        settings=(Setting(), Setting(batch_shape=(2,), outputs=2)),
    ),
    Case(
        "ClusteredGP, warped inputs",
        _clustered(input_transform=_warp),
        residual=True,
        settings=(Setting(outputs=2),),
    ),
    Case("ClusteredGP, known noise", _clustered(), noise="known", residual=True),
    Case(
        "ClusteredGP, known noise in part",
        _clustered(likelihood=lambda data: GaussianLikelihood(batch_shape=_parameter_shape(data))),
        noise="mixed",
        residual=True,
        settings=(Setting(), Setting(batch_shape=(2,), outputs=2)),
    ),
    Case(
        "ClusteredGP, in single precision",
        _clustered(arithmetic=torch.float32, likelihood=_noisy_likelihood),
        residual=True,
        settings=(Setting(torch.float32, outputs=2),),
    ),
    Case(
        "ClusteredGP, centres by the stream",
        _clustered(tree=None, resolution=0.45),
        in_order=True,
        residual=True,
        spreading=True,
        settings=(Setting(), Setting(batch_shape=(2,), outputs=2)),
    ),
    Case(
        "QSGP",
        _qsgp(),
        in_order=True,
        residual=True,
        rows=True,
        blended=True,
        settings=UNBATCHED,
    ),
    Case(
        "QSGP, a chevron, functions drawn",
        _qsgp(covariance=Chevron(3), functions=11, control_points=6),
        in_order=True,
        residual=True,
        rows=True,
        blended=True,
        settings=(Setting(outputs=2),),
    ),
    Case(
        "QSGP, inducing points",
        _qsgp(basis=InducingAtData(12), covar_module=_rbf),
        in_order=True,
        residual=True,
        rows=True,
        blended=True,
        settings=(Setting(), Setting(torch.float32, outputs=2)),
    ),
    Case(
        "QSRVM",
        _qsrvm,
        in_order=True,
        residual=True,
        rows=True,
        blended=True,
        settings=(Setting(outputs=2),),
    ),
    Case(
        "QSGP, Laplace",
        _qsgp(likelihood=_laplace_likelihood),
        in_order=True,
        residual=True,
        rows=True,
        blended=True,
        sites=True,
        settings=(Setting(outputs=2),),
    ),
    Case(
        "QSGP, Bernoulli",
        _qsgp(likelihood=_bernoulli_likelihood),
        noise="labels",
        in_order=True,
        residual=True,
        rows=True,
        blended=True,
        sites=True,
        settings=(Setting(torch.float32),),
    ),
    Case(
        "DirichletWISKI",
        _dirichlet,
        noise="labels",
        settings=(Setting(outputs=2), Setting(torch.float32, outputs=2)),
    ),
    Case(
        "DecoupledGP",
        _decoupled(_gaussian_likelihood, natural_rate=0.5),
        in_order=True,
        residual=True,
        rows=True,
        blended=True,
    ),
    Case(
        "DecoupledGP, direct, lengthscale factors",
        _decoupled(
            _gaussian_likelihood,
            parametrization="direct",
            preconditioner="jacobi",
            lengthscale_factors=True,
            learn_mean_points=True,
        ),
        in_order=True,
        residual=True,
        rows=True,
        blended=True,
        settings=(Setting(), Setting(batch_shape=(2,), outputs=2)),
    ),
    Case(
        "DecoupledGP, Bernoulli",
        _decoupled(_bernoulli_likelihood, parametrization="hybrid"),
        noise="labels",
        in_order=True,
        residual=True,
        rows=True,
        blended=True,
        sites=True,
        settings=(Setting(), Setting(batch_shape=(2,))),
    ),
)


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


STREAMS = [Stream(case, setting) for case in CASES for setting in case.settings]


def suppose(model: StreamingGP, data: Observations, noise: Tensor | None = None) -> StreamingGP:
    """The model that supposes observations of its kind."""
    if isinstance(model, DirichletWISKI):
        return model.condition_on_labels(data.X, data.Y)
    return model.condition_on_observations(data.X, data.Y, noise=noise)


# --- what to compare ----------------------------------------------------------------------------


def gaussian(posterior: Posterior) -> GPyTorchPosterior:
    """The normal posterior before outcomes were untransformed."""
    while isinstance(posterior, TransformedPosterior):
        posterior = posterior._posterior
    assert isinstance(posterior, GPyTorchPosterior)
    return posterior


def centre(posterior: Posterior) -> Tensor:
    """The outcomes at the normal posterior's mean: the posterior's median."""
    if isinstance(posterior, TransformedPosterior):
        return posterior._sample_transform(centre(posterior._posterior))
    return posterior.mean


def moments(model: StreamingGP, X: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the normal posterior, detached."""
    posterior = gaussian(model.posterior(X))
    return posterior.mean.detach(), joint_covariance(posterior).detach()


def assert_same_posterior(
    a: StreamingGP, b: StreamingGP, X: Tensor, bits: bool = False, factor: float = 1.0
) -> None:
    """Equal mean and covariance at X, to the tolerance or to the bit.

    CUDA adds rows to a memory in any order, so that there no two updates are equal to the bit.
    """
    for actual, expected in zip(moments(a, X), moments(b, X), strict=True):
        if bits and not actual.is_cuda:
            assert torch.equal(actual, expected)
        else:
            assert_close(actual, expected, factor)


def assert_same_model(a: StreamingGP, b: StreamingGP, X: Tensor, factor: float = 1.0) -> None:
    """Equal posterior, marginal likelihood and count."""
    assert_same_posterior(a, b, X, factor=factor)
    dtype = X.dtype
    ours, theirs = (m.log_marginal_likelihood().detach().to(dtype) for m in (a, b))
    assert_close(ours, theirs, factor=10 * factor)
    assert a.num_observations == pytest.approx(b.num_observations)


def refreshed(model: StreamingGP) -> StreamingGP:
    """The model once more standardised by all its outcomes, as a refit does it."""
    model.train()
    model.eval()
    return model


def contents(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every tensor and every number that an object holds, wherever it is."""
    yield from _contents(value, path, set())


def _contents(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor | int | float | str | None):
        yield path, value
        return
    if id(value) in seen or isinstance(value, type) or (callable(value) and not vars_of(value)):
        return
    seen.add(id(value))
    for name, part in vars_of(value).items():
        yield from _contents(part, f"{path}.{name}", seen)


def vars_of(value: Any) -> dict[Any, Any]:
    """The parts of a container or an object, by name."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return getattr(value, "__dict__", {})


def fingerprint(model: StreamingGP) -> dict[str, Any]:
    """A copy of everything in a model."""
    return {
        path: value.detach().clone() if isinstance(value, Tensor) else value
        for path, value in contents(model)
    }


def assert_untouched(model: StreamingGP, before: dict[str, Any]) -> None:
    """Everything in a model is as it was, to the bit."""
    assert_same_contents(fingerprint(model), before)


def assert_same_contents(after: dict[str, Any], before: dict[str, Any]) -> None:
    """Two fingerprints are equal, to the bit."""
    assert after.keys() == before.keys()
    for path, value in before.items():
        if isinstance(value, Tensor):
            same = torch.equal(value, after[path])
        else:
            same = value == after[path] or (value != value and after[path] != after[path])
        assert same, f"{path} changed from {value} to {after[path]}"


def held_bytes(model: StreamingGP) -> int:
    """Bytes of all tensors that a model holds, each storage once."""
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for _, value in contents(model)
        if isinstance(value, Tensor)
    }
    return sum(storages.values())


def central_differences(function: Callable[[Tensor], Tensor], X: Tensor) -> Tensor:
    """The gradient of a scalar function by central differences."""
    step = 1e-5
    gradient = torch.zeros_like(X)
    for i in range(X.numel()):
        shift = torch.zeros_like(X).flatten()
        shift[i] = step
        shift = shift.view_as(X)
        with torch.no_grad():
            difference = function(X + shift) - function(X - shift)
        gradient.view(-1)[i] = difference / (2.0 * step)
    return gradient


def assert_gradient(function: Callable[[Tensor], Tensor], X: Tensor) -> None:
    """Autograd's gradient is that of central differences, relative to its largest entry."""
    X = X.detach().clone().requires_grad_()
    (actual,) = torch.autograd.grad(function(X), X)
    expected = central_differences(function, X.detach())
    size = float(expected.abs().max())
    assert size > 0.0
    tolerance = GRADIENT_TOLERANCE * size
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=tolerance)


# --- laws: memory -------------------------------------------------------------------------------

Law = Callable[[Stream], None]
LAWS: list[Law] = []

ORDERLESS: set[Law] = set()
"""Laws of models whose memory does not depend on the order in which observations enter."""

OF_OUTCOMES: set[Law] = set()
"""Laws of models whose observations are in the units of the posterior, not labels."""
OF_STATISTICS: set[Law] = set()
"""Laws of models that hold nothing but statistics."""
WITHOUT_RESIDUAL: set[Law] = set()
"""Laws of models whose features carry the whole prior."""

OF_GAUSSIAN_NOISE: set[Law] = set()
"""Laws of models that take an observation for a normal one."""


def law(function: Law) -> Law:
    """Put a law on the list."""
    LAWS.append(function)
    return function


def orderless(function: Law) -> Law:
    """Put a law on the list that a case ``in_order`` need not obey."""
    ORDERLESS.add(function)
    return law(function)


def of_outcomes(function: Law) -> Law:
    """Of models whose observations are outcomes, in the units of the posterior."""
    OF_OUTCOMES.add(function)
    return function


def of_statistics(function: Law) -> Law:
    """Of models that hold nothing but statistics."""
    OF_STATISTICS.add(function)
    return function


def without_residual(function: Law) -> Law:
    """Of models whose features carry the whole prior."""
    WITHOUT_RESIDUAL.add(function)
    return function


def of_gaussian_noise(function: Law) -> Law:
    """Of models that take an observation for a normal one."""
    OF_GAUSSIAN_NOISE.add(function)
    return function


def applies(law: Law, case: Case) -> bool:
    """Whether a case must obey a law."""
    ordered = case.in_order and law in ORDERLESS
    labels = case.noise == "labels" and law in OF_OUTCOMES
    missed = case.residual and law in WITHOUT_RESIDUAL
    held = case.rows and law in OF_STATISTICS
    sites = case.sites and law in OF_GAUSSIAN_NOISE
    return not (ordered or labels or missed or held or sites)


@orderless
def updating_in_pieces_is_updating_once(stream: Stream) -> None:
    first, rest = stream.data(6), stream.data(9)
    once = stream.model(first).update(*rest.astuple())
    pieces = stream.model(first)
    pieces.posterior(stream.points)
    for rows in (slice(0, 1), slice(1, 4), slice(4, 9)):
        assert pieces.update(*rest[rows].astuple()) is pieces
        moments(pieces, stream.points)
    assert_same_model(pieces, once, stream.points)


@orderless
def a_stream_is_its_batch(stream: Stream) -> None:
    data = stream.data(15)
    streamed = stream.settled(data[:4])
    streamed.update(*data[4:9].astuple()).update(*data[9:].astuple())
    assert_same_model(refreshed(streamed), stream.settled(data), stream.points)
    assert streamed.num_observations == pytest.approx(15)


@orderless
@of_statistics
def order_does_not_matter(stream: Stream) -> None:
    data = stream.data(12)
    backwards = stream.settled(data[8:]).update(*data[4:8].astuple()).update(*data[:4].astuple())
    forwards = stream.settled(data)
    assert_same_model(refreshed(backwards), refreshed(forwards), stream.points)


@orderless
@of_statistics
def merging_shards_is_one_stream(stream: Stream) -> None:
    data = stream.data(15)
    shards = [stream.model(data[:5]), stream.model(data[5:11], seed=2), stream.model(data[11:])]
    others = [fingerprint(shard) for shard in shards[1:]]
    merged = shards[0].merge(shards[1]).merge(shards[2])
    assert_same_model(refreshed(merged), stream.model(data), stream.points)
    for shard, before in zip(shards[1:], others, strict=True):
        assert_untouched(shard, before)
    merged.update(*data.astuple())
    for shard, before in zip(shards[1:], others, strict=True):
        assert_untouched(shard, before)
    merged.posterior(stream.points)
    before = fingerprint(merged)
    shards[1].update(*data.astuple())
    assert_untouched(merged, before)


@orderless
@of_statistics
def merging_shards_that_went_further_is_one_stream(stream: Stream) -> None:
    near, far = stream.data(6), stream.data(6)
    left = replace(far, X=far.X - 0.4)
    right = replace(far, X=far.X + 0.4)
    merged = stream.model(near).update(*left.astuple())
    merged.merge(stream.model(near[:0]).update(*right.astuple()))
    streamed = stream.model(near).update(*left.astuple()).update(*right.astuple())
    assert_same_model(refreshed(merged), refreshed(streamed), stream.points, factor=10)


@orderless
@of_statistics
def retracting_undoes_updating(stream: Stream) -> None:
    data, wrong = stream.data(10), stream.data(4)
    model, never = stream.model(data), stream.model(data)
    model.posterior(stream.points)
    model.update(*wrong.astuple())
    model.posterior(stream.points)
    assert model.retract(*wrong.astuple()) is model
    assert_same_model(model, never, stream.points)


@orderless
@of_statistics
def what_was_never_in_is_not_taken_out(stream: Stream) -> None:
    """Where features miss some of the prior it may pass for what they took in, but it solves."""
    data, other = stream.data(10), stream.data(8)
    model, forgetful = stream.settled(data), stream.settled(data).forget(0.5)
    wrong = replace(other, X=torch.rand_like(other.X))
    for each, rows in ((model, wrong), (forgetful, data[:5])):
        each.posterior(stream.points)
        before = fingerprint(each)
        if stream.case.residual:
            with contextlib.suppress(InputDataError):
                refreshed(copy.deepcopy(each).retract(*rows.astuple())).posterior(stream.points)
        else:
            with pytest.raises(InputDataError, match="in memory"):
                each.retract(*rows.astuple())
        assert_untouched(each, before)


@law
@of_statistics
def forgetting_half_of_everything_twice_is_everything_once(stream: Stream) -> None:
    data = stream.data(10)
    model, once = stream.model(data), stream.model(data)
    model.merge(stream.model(data))
    assert model.forget(0.5) is model
    assert_same_model(model, once, stream.points)


@law
def an_empty_batch_changes_nothing(stream: Stream) -> None:
    model, nothing = stream.model(stream.data(8)), stream.data(0)
    model.posterior(stream.points)
    before = fingerprint(model)
    model.update(*nothing.astuple()).retract(*nothing.astuple())
    assert_untouched(model, before)
    supposed = suppose(model, nothing)
    assert_same_posterior(supposed, model, stream.points)


@law
def what_is_handed_out_is_a_copy(stream: Stream) -> None:
    model = stream.model(stream.data(8))
    names = {name for c in type(model).__mro__ for name in vars(c) if _is_property_of_ours(c, name)}
    tensors = [model.outcome_scale(), *(getattr(model, name) for name in sorted(names))]
    before = fingerprint(model)
    for value in tensors:
        if isinstance(value, Tensor) and value.numel() > 0:
            value.detach()[(0,) * value.ndim] += 1
    assert_untouched(model, before)


def _is_property_of_ours(owner: type, name: str) -> bool:
    ours = owner.__module__.startswith("bo_stream.") and not name.startswith("_")
    return ours and isinstance(vars(owner)[name], property)


@orderless
def the_prior_comes_before_the_data(stream: Stream) -> None:
    data = stream.data(8)
    prior = stream.settled(data[:0])
    assert prior.num_observations == 0
    mean, covariance = moments(prior, stream.points)
    s, constant = stream.setting, prior.mean_module.constant.detach()
    constant = constant.unsqueeze(-1) if s.outputs == 1 else constant
    expected = constant.expand(*s.batch_shape, s.outputs)
    assert_close(mean, expected.unsqueeze(-2).expand_as(mean))
    posterior_variance = moments(stream.settled(data), stream.points)[1].diagonal(dim1=-2, dim2=-1)
    scale = prior.outcome_scale() / stream.settled(data).outcome_scale()
    relative = posterior_variance * scale.unsqueeze(-1).square().to(posterior_variance)
    assert bool((relative < covariance.diagonal(dim1=-2, dim2=-1)).all())
    assert_same_model(refreshed(prior.update(*data.astuple())), stream.settled(data), stream.points)


def _kept(model: StreamingGP) -> dict[str, Any]:
    """All that a model holds but the posteriors that it keeps for queries outside its bounds."""
    everything = fingerprint(model).items()
    return {path: value for path, value in everything if not path.startswith("._wider")}


@law
def a_query_outside_leaves_no_trace(stream: Stream) -> None:
    model, more, outside = stream.model(stream.data(10)), stream.data(3), 1.0 + stream.points
    model.posterior(stream.points)
    never, before = copy.deepcopy(model), _kept(model)
    seen = moments(model, outside)
    moments(model, 0.5 + outside)
    assert_same_contents(_kept(model), before)
    assert_same_posterior(model, never, stream.points, bits=True)
    for first, again in zip(seen, moments(model, outside), strict=True):
        assert torch.equal(first, again)
    if not stream.labels:
        moments(model.condition_on_observations(1.0 + more.X, more.Y), 1.0 + more.X)
    for each in (model, never):
        each.update(*more.astuple())
    assert_same_posterior(model, never, stream.points, bits=True)
    assert_same_posterior(model, never, outside)


@law
def memory_does_not_grow_with_the_stream(stream: Stream) -> None:
    model = stream.model(stream.data(10))

    def stream_on(n: int) -> int:
        model.update(*stream.data(n).astuple()).posterior(stream.points)
        model.update(*stream.data(3).astuple()).posterior(stream.points)
        return held_bytes(model)

    before = stream_on(600)  # enough for caches to be made anew, as by the others
    after = stream_on(9_000), stream_on(900)
    if stream.case.spreading:  # at least 4 discs of 0.45 cover the square; at most 9 lie apart
        assert max(after) < 4 * before
    else:
        assert after == (before, before)
    assert model.num_observations == pytest.approx(10_519)


@law
def what_is_remembered_is_detached(stream: Stream) -> None:
    model, more = stream.model(stream.data(8)), stream.data(3)
    tracked = [None if t is None else t.clone().requires_grad_() for t in more.astuple()]
    model.update(*tracked)
    process = model.eval().process(model.transform_inputs(stream.points).double())
    inputs = model.transform_inputs(stream.points).double().detach()
    assert not process.mean(inputs).requires_grad
    assert not process.variance(inputs).requires_grad


@law
def training_inputs_are_the_latest_observed(stream: Stream) -> None:
    data, more = stream.data(8), stream.data(3)
    model = stream.model(data).update(*more.astuple())
    outputs = (model.num_outputs,) if model.num_outputs > 1 else ()
    observed = torch.cat((data.X, more.X), -2)
    observed = observed.unsqueeze(-3) if outputs else observed
    for each in (model, suppose(model, stream.data(2))):
        (X,) = each.train_inputs
        assert (X.dtype, X.device) == (observed.dtype, observed.device)
        assert X.shape[:-2] == (*each.batch_shape, *outputs)
        assert torch.equal(X[..., :11, :], observed.expand(*X.shape[:-2], 11, X.shape[-1]))


@law
def another_kind_of_model_cannot_be_merged(stream: Stream) -> None:
    data = stream.data(5)
    model = stream.model(data)
    before = fingerprint(model)
    other = OSGPR if type(model) is not OSGPR else LocalGP
    X, Y = data.X, torch.rand_like(data.Y)
    for stranger in (other(X, Y), SingleTaskGP(X, Y)):
        with pytest.raises(UnsupportedError):
            model.merge(stranger)
    assert_untouched(model, before)


@law
def an_objective_that_needs_the_data_is_refused(stream: Stream) -> None:
    model = stream.model(stream.data(5))
    if isinstance(model.likelihood, _GaussianLikelihoodBase):
        mll = LeaveOneOutPseudoLikelihood(model.likelihood, model)
        with pytest.raises(UnsupportedError, match=r"mll .* LeaveOneOutPseudoLikelihood"):
            model.compute_custom_loss(mll)
    with pytest.raises(UnsupportedError, match=r"mll .* PredictiveLogLikelihood"):
        model.compute_custom_loss(PredictiveLogLikelihood(model.likelihood, model, num_data=5))


@law
def whether_gradients_are_recorded_changes_no_update(stream: Stream) -> None:
    data, more, X = stream.data(10), stream.data(3), stream.points
    model, silent, twin = (stream.model(data) for _ in range(3))
    with torch.inference_mode():
        inside = [None if t is None else t.clone() for t in more.astuple()]
        model.update(*inside).posterior(X)
    model.update(*inside)
    with torch.no_grad():
        for _ in range(2):
            silent.update(*more.astuple()).posterior(X)
    for _ in range(2):
        twin.update(*more.astuple()).posterior(X)
    expected = _moments_and_gradient(twin, X)
    for each in (model, silent):
        for ours, theirs in zip(_moments_and_gradient(each, X), expected, strict=True):
            assert_close(ours, theirs)


def _moments_and_gradient(model: StreamingGP, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance in transformed units, and the gradient of their sum."""
    inputs = model.transform_inputs(X).double().requires_grad_()
    process = model.eval().process(inputs)
    mean, variance = process.mean(inputs), process.variance(inputs)
    (gradient,) = torch.autograd.grad((mean + variance).sum(), inputs)
    return mean.detach(), variance.detach(), gradient


# --- laws: supposing ----------------------------------------------------------------------------


@law
@without_residual
def supposing_is_updating_a_copy(stream: Stream) -> None:
    data, more = stream.data(10), stream.data(3)
    model = stream.model(data)
    scale = model.outcome_scale().unsqueeze(-2).to(more.Y)
    noise = None
    if stream.case.noise in ("known", "mixed"):
        level = model.noise_at(model.transform_inputs(more.X).double()).mT.to(more.Y)
        assert more.Yvar is not None
        noise = torch.where(more.Yvar.isnan(), level, more.Yvar / scale.square())
    supposed = suppose(model, more, noise)
    updated = copy.deepcopy(model).update(*more.astuple())
    assert_same_posterior(supposed, updated, stream.points)


@law
@of_outcomes
@of_gaussian_noise
def supposing_leaves_the_model_as_it_is(stream: Stream) -> None:
    model, more = stream.model(stream.data(10)), stream.data(3)
    model.posterior(stream.points, observation_noise=True)
    before = fingerprint(model)
    supposed = model.condition_on_observations(more.X, more.Y)
    supposed.posterior(stream.points)
    fantasy = model.fantasize(more.X, stream.sampler())
    fantasy.posterior(stream.points).rsample(torch.Size([2]))
    fantasy.condition_on_observations(more.X, more.Y).posterior(stream.points)
    for X, Y in ((more.X[..., :1], more.Y), (more.X, more.Y[..., :2, :]), (more.X, more.Y / 0.0)):
        with pytest.raises((BotorchTensorDimensionError, InputDataError)):
            model.condition_on_observations(X, Y)
    with pytest.raises((RuntimeError, InputDataError)):
        model.fantasize(more.X, lambda posterior: posterior.mean * math.nan)
    assert_untouched(model, before)


@law
def what_is_supposed_stays_when_the_model_moves_on(stream: Stream) -> None:
    model, more = stream.model(stream.data(10)), stream.data(3)
    supposed = suppose(model, more)
    before = moments(supposed, stream.points)
    shifted = stream.data(4)
    other = 1.0 - shifted.Y if stream.binary else 2.0 + 3.0 * shifted.Y
    model.update(shifted.X, other, shifted.Yvar)
    refreshed(model).posterior(stream.points)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    for actual, expected in zip(moments(supposed, stream.points), before, strict=True):
        assert torch.equal(actual, expected)


@law
@of_gaussian_noise
def supposing_twice_is_supposing_once(stream: Stream) -> None:
    model, more = stream.model(stream.data(10)), stream.data(4)
    twice = suppose(suppose(model, more[:1]), more[1:])
    assert_same_posterior(twice, suppose(model, more), stream.points)


@law
@of_gaussian_noise
def supposing_the_own_mean_leaves_the_mean(stream: Stream) -> None:
    model, X = stream.model(stream.data(10)), stream.data(3).X
    supposed = model.condition_on_observations(X, centre(model.posterior(X)))
    assert_close(moments(supposed, stream.points)[0], moments(model, stream.points)[0])


@law
def variance_never_grows(stream: Stream) -> None:
    model, more = stream.model(stream.data(10)), stream.data(3)
    before = gaussian(model.posterior(stream.points)).variance
    supposed = suppose(model, more)
    fantasy = supposed.fantasize(more.X, stream.sampler())
    updated = copy.deepcopy(model).update(*more.astuple())
    slack = 1e-12 if stream.exact else 1e-5
    for after in (supposed, fantasy) if stream.case.blended else (supposed, updated, fantasy):
        variance = gaussian(after.posterior(stream.points)).variance
        assert bool((variance <= before * (1.0 + slack)).all())
        assert bool((variance < 0.999 * before).any())


@law
@of_outcomes
@of_gaussian_noise
def fantasies_are_each_alone(stream: Stream) -> None:
    """Fantasies of a batch of inputs are those of each input, conditioned on the same draws."""
    model, batch = stream.model(stream.data(10)), 2
    X = torch.rand(batch, *stream.setting.batch_shape, 3, DIM).to(stream.points)
    draws = stream.sampler()(model.posterior(X, observation_noise=True))
    assert draws.shape == (3, *X.shape[:-1], stream.setting.outputs)
    fantasy = model.fantasize(X, stream.sampler())
    T = stream.points
    mean, covariance = moments(fantasy, T)
    covariance = covariance.expand(3, *covariance.shape[1:])
    for i, j in ((0, 0), (2, 1)):
        alone = model.condition_on_observations(X[j], draws[i, j])
        expected_mean, expected_covariance = moments(alone, T)
        assert_close(mean[i, j], expected_mean)
        assert_close(covariance[i, j], expected_covariance)


@law
def fantasies_have_the_batch_shape_of_their_posteriors(stream: Stream) -> None:
    """That of BoTorch's ``SingleTaskGP``, after whatever verbs; the data's batch shape stays."""
    model, exact, s = stream.model(stream.data(8)), _single_task_gp(stream), stream.setting
    X = torch.rand(*(s.batch_shape or (5,)), 2, DIM).to(stream.points)
    wide = X.expand(4, *X.shape)
    fantasy, theirs = (
        m.fantasize(X.to(m.train_targets), stream.sampler(4)) for m in (model, exact)
    )
    pairs = [
        (fantasy, theirs),
        (
            fantasy.fantasize(wide, stream.sampler(3)),
            theirs.fantasize(wide.double(), stream.sampler(3)),
        ),
    ]
    for own, other in pairs:
        assert own.batch_shape == other.batch_shape
        assert gaussian(own.posterior(stream.points[..., :1, :])).mean.shape[:-2] == own.batch_shape
    supposed = suppose(model, stream.data(3))
    assert supposed.batch_shape == model.batch_shape == torch.Size(s.batch_shape)
    assert suppose(supposed, stream.data(2)).batch_shape == model.batch_shape
    assert fantasy.subset_output([0]).batch_shape == fantasy.batch_shape
    assert fantasy.with_known_points(X).batch_shape == fantasy.batch_shape
    assert model.with_known_points(X).batch_shape == model.batch_shape


def _single_task_gp(stream: Stream) -> SingleTaskGP:
    """An exact model of as many observations of the stream's shapes, in float64."""
    X = stream.data(8).X.double()
    model = SingleTaskGP(X, torch.randn(*X.shape[:-1], stream.setting.outputs).to(X))
    model.posterior(X)  # which fills the caches that conditioning needs
    return model


@law
def what_is_supposed_cannot_be_put_into_memory(stream: Stream) -> None:
    model, more = stream.model(stream.data(10)), stream.data(3)
    supposed = suppose(model, more)
    supposed.posterior(stream.points)
    before = fingerprint(supposed)
    verbs: list[Callable[[], Any]] = [
        lambda: supposed.update(*more.astuple()),
        lambda: supposed.retract(*more.astuple()),
        lambda: supposed.merge(model),
        lambda: model.merge(supposed),
        lambda: supposed.forget(0.5),
    ]
    for verb in verbs:
        with pytest.raises(UnsupportedError, match="supposes"):
            verb()
    assert_untouched(supposed, before)


# --- laws: the posterior ------------------------------------------------------------------------


@law
def points_that_are_evaluated_once_change_nothing(stream: Stream) -> None:
    model, points = stream.model(stream.data(10)), stream.points
    baseline, pending = points[..., :-2, :], points[..., -2:, :]
    X = torch.rand(3, *stream.setting.batch_shape, 2, DIM).to(points)
    first, last = (part.expand(3, *part.shape) for part in (baseline, pending))

    def after_baseline(others: Tensor) -> Tensor:
        return torch.cat((first, others), -2)

    def before_pending(others: Tensor) -> Tensor:
        return torch.cat((others, last), -2)

    def between(others: Tensor) -> Tensor:
        return before_pending(after_baseline(others))

    known = model.with_known_points(baseline, pending)
    for extend in (after_baseline, before_pending, between):
        assert_same_posterior(known, model, extend(X))
        gradients = [summary_gradient(m, X, extend) for m in (known, model)]
        assert_close(*gradients, factor=float(gradients[1].abs().max()))
    for others in (X, baseline, points, between(X)[..., 1:-1, :]):
        assert_same_posterior(known, model, others)
    for part in (model.with_known_points(baseline), model.with_known_points(last=pending)):
        assert_same_posterior(part, model, between(X))
    more = stream.data(2)
    assert_same_posterior(suppose(known, more), suppose(model, more), between(X))
    with pytest.raises(UnsupportedError):
        known.update(*more.astuple())


def summary_gradient(model: StreamingGP, X: Tensor, extend: Callable[[Tensor], Tensor]) -> Tensor:
    """Of the entries of a posterior's moments, added up with unequal weights."""
    X = X.clone().requires_grad_()
    posterior = gaussian(model.posterior(extend(X)))
    mean, covariance = posterior.mean, joint_covariance(posterior)
    weights = [torch.linspace(0.3, 1.0, part.numel()).to(part) for part in (mean, covariance)]
    value = mean.flatten() @ weights[0] + covariance.flatten() @ weights[1]
    (gradient,) = torch.autograd.grad(value, X)
    return gradient


@law
def posterior_follows_the_inputs(stream: Stream) -> None:
    """Shape, dtype and device; each input batch is alone; joint and marginal agree; draws too."""
    s = stream.setting
    model = stream.model(stream.data(10))
    X = torch.rand(3, *s.batch_shape, 4, DIM).to(stream.points)
    posterior = model.posterior(X)
    draws, normal = posterior.rsample(torch.Size([2])), gaussian(posterior)
    assert model.batch_shape == s.batch_shape
    assert model.num_outputs == s.outputs
    assert normal.mean.shape == normal.variance.shape == (3, *s.batch_shape, 4, s.outputs)
    assert draws.shape == (2, *normal.mean.shape)
    assert {normal.mean.dtype, normal.variance.dtype, draws.dtype} == {s.dtype}
    assert {t.device.type for t in (normal.mean, normal.variance, draws)} == {s.device}
    marginal = joint_covariance(normal).diagonal(dim1=-2, dim2=-1).mT
    assert_close(normal.variance, marginal)
    mean, covariance = moments(model, X[2])
    assert_close(normal.mean[2], mean)
    assert_close(joint_covariance(normal)[2], covariance)


@law
def posterior_of_one_set_serves_every_batch_element(stream: Stream) -> None:
    model, X = stream.model(stream.data(10)), torch.rand(4, DIM).to(stream.points)
    mean, covariance = moments(model, X)
    expected = moments(model, X.expand(*stream.setting.batch_shape, 4, DIM))
    assert_close(mean, expected[0])
    assert_close(covariance, expected[1])


@law
@of_outcomes
def gradients_are_those_of_differences(stream: Stream) -> None:
    if not stream.exact:
        return
    model, T = stream.model(stream.data(10)), stream.points[..., :2, :]

    def posterior_sum(which: str, X: Tensor) -> Tensor:
        value: Tensor = getattr(gaussian(model.posterior(X)), which)
        return value.sin().sum()

    def fantasy_sum(which: str, X: Tensor) -> Tensor:
        fantasy = model.fantasize(X, stream.sampler(2))
        fantasy = fantasy.fantasize(X + 0.1, stream.sampler(2))
        value: Tensor = getattr(gaussian(fantasy.posterior(T)), which)
        return value.sin().sum()

    shape = (*stream.setting.batch_shape, 2)
    X = smooth_points(model, *shape, low=0.1, high=0.8, shifts=(0.0, 0.1))
    for which in ("mean", "variance"):
        assert_gradient(lambda X, which=which: posterior_sum(which, X), X)
        assert_gradient(lambda X, which=which: fantasy_sum(which, X), X)


@law
@of_gaussian_noise
def observation_noise_is_added_to_the_variance(stream: Stream) -> None:
    model, X = stream.model(stream.data(10)), stream.points
    plain = gaussian(model.posterior(X)).variance
    scale = model.outcome_scale().unsqueeze(-2).square().to(plain)
    own = scale * model.noise_at(model.transform_inputs(X).double()).mT.to(plain)
    noisy = gaussian(model.posterior(X, observation_noise=True)).variance
    assert_close(noisy, plain + own)
    given = 0.1 + torch.rand_like(plain)
    noisy = gaussian(model.posterior(X, observation_noise=given)).variance
    assert_close(noisy, plain + scale * given)
    last = [stream.setting.outputs - 1]
    noisy = gaussian(model.posterior(X, last, observation_noise=given)).variance
    assert_close(noisy, (plain + scale * given)[..., last])
    supposed = model.condition_on_observations(X, centre(model.posterior(X)))
    plain = gaussian(supposed.posterior(X)).variance
    noisy = gaussian(supposed.posterior(X, observation_noise=True)).variance
    assert_close(noisy, plain + own)


@law
@of_outcomes
@of_gaussian_noise
def fantasies_take_the_noise_they_are_given(stream: Stream) -> None:
    """Draws have it, and conditioning on them too; per point or for all, per output, in a batch."""
    model, s, T = stream.model(stream.data(10)), stream.setting, stream.points
    X = torch.rand(2, *s.batch_shape, 3, DIM).to(T)
    for rows in (3, 1):
        noise = 0.05 + torch.rand(*s.batch_shape, rows, s.outputs).to(T)
        draws = stream.sampler()(model.posterior(X, observation_noise=noise))
        fantasy = model.fantasize(X, stream.sampler(), observation_noise=noise)
        mean, covariance = moments(fantasy, T)
        alone = model.condition_on_observations(X[1], draws[2, 1], noise=noise)
        expected_mean, expected_covariance = moments(alone, T)
        assert_close(mean[2, 1], expected_mean)
        assert_close(covariance.expand(3, *covariance.shape[1:])[2, 1], expected_covariance)


@law
def a_posterior_transform_sees_the_outcomes(stream: Stream) -> None:
    model, X = stream.model(stream.data(10)), stream.points
    posterior = model.posterior(X)
    if isinstance(posterior, TransformedPosterior):
        return
    weights = torch.linspace(-1.0, 2.0, stream.setting.outputs).to(X)
    scalarized = model.posterior(X, posterior_transform=ScalarizedPosteriorTransform(weights))
    assert_close(scalarized.mean.squeeze(-1), posterior.mean @ weights)
    assert_close(scalarized.variance.squeeze(-1), posterior.variance @ weights.square())


@law
@of_outcomes
def some_outputs_are_as_among_all(stream: Stream) -> None:
    model, more = stream.model(stream.data(10)), stream.data(3)
    supposed = model.condition_on_observations(more.X, more.Y)
    fantasy = model.fantasize(more.X, stream.sampler())
    for kept in ([0], [stream.setting.outputs - 1], list(reversed(range(stream.setting.outputs)))):
        for whole in (model, supposed, fantasy):
            full, part = whole.posterior(stream.points), whole.subset_output(kept)
            assert part.num_outputs == len(kept)
            asked = whole.posterior(stream.points, output_indices=kept)
            for found in (asked, part.posterior(stream.points)):
                assert_close(centre(found), centre(full)[..., kept])
                assert_close(gaussian(found).variance, gaussian(full).variance[..., kept])
    lost = more if stream.setting.outputs == 1 else replace(more, Y=more.Y[..., 1:])
    lost = lost if lost.Yvar is None else replace(lost, Yvar=lost.Yvar[..., -1:])
    before = fingerprint(model)
    part = model.subset_output([stream.setting.outputs - 1])
    part.update(*lost.astuple())
    assert_untouched(model, before)
    whole = copy.deepcopy(model).update(*more.astuple())
    assert_same_posterior(
        refreshed(part),
        refreshed(whole).subset_output([stream.setting.outputs - 1]),
        stream.points,
    )


# --- laws: hyperparameters and files ------------------------------------------------------------


def _pickled(model: StreamingGP) -> StreamingGP:
    return pickle.loads(pickle.dumps(model))


def _saved(model: StreamingGP) -> StreamingGP:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        model.save(path)
        return type(model).load(path)


@law
def a_copy_goes_on_as_the_original(stream: Stream) -> None:
    data, more = stream.data(10), stream.data(5)
    model = stream.model(data[:6])
    for asked_before in (False, True):
        if asked_before:
            model.update(*data[6:].astuple())
            model.posterior(stream.points)
        for way in (copy.deepcopy, _pickled, _saved):
            twin = way(model)
            original = copy.deepcopy(model)
            assert_same_posterior(twin, original, stream.points, bits=True)
            twin.update(*more.astuple())
            original.update(*more.astuple())
            assert_same_posterior(twin, original, stream.points, bits=True)
            assert_same_posterior(refreshed(twin), refreshed(original), stream.points, bits=True)
        assert model.num_observations == pytest.approx(10 if asked_before else 6)


@law
def state_dict_holds_hyperparameters_only(stream: Stream) -> None:
    data, other = stream.data(8), stream.data(30)
    source, target = stream.model(data), stream.model(other, seed=2)
    state = source.state_dict()
    sizes = {name: value.shape for name, value in target.state_dict().items()}
    assert {name: value.shape for name, value in state.items()} == sizes
    count = target.num_observations
    target.load_state_dict(state)
    assert target.num_observations == count
    assert_same_posterior(refreshed(target), stream.model(other), stream.points)


@law
def entering_and_leaving_training_changes_nothing(stream: Stream) -> None:
    model = stream.model(stream.data(10)).update(*stream.data(5).astuple())
    refreshed(model).posterior(stream.points)
    before = fingerprint(model)
    refreshed(model).posterior(stream.points)
    assert_untouched(model, before)


# --- bad input ----------------------------------------------------------------------------------

Mutation = Callable[[Observations], tuple[Any, Any, Any]]


@dataclass(frozen=True)
class Fault:
    """Something wrong with observations, and the error that must say so.

    Attributes:
        name: Of the test.
        spoil: Arguments with the fault in them.
        error: What is raised.
        argument: Its name is in the message.
        verbs: The methods that can see the fault.
    """

    name: str
    spoil: Mutation
    error: type[Exception]
    argument: str
    verbs: frozenset[str] = field(
        default=frozenset({"update", "retract", "condition_on_observations"})
    )

    def __str__(self) -> str:
        return self.name


def _with(tensor: Tensor, value: float) -> Tensor:
    spoilt = tensor.clone()
    spoilt.view(-1)[-1] = value
    return spoilt


_ALL = frozenset({"update", "retract", "condition_on_observations", "posterior"})
_MEMORY = frozenset({"update", "retract"})
_OTHER_DTYPE = {torch.float64: torch.float32, torch.float32: torch.float64}

FAULTS = (
    Fault("X no tensor", lambda o: (o.X.tolist(), o.Y, o.Yvar), InputDataError, "X", _ALL),
    Fault("Y no tensor", lambda o: (o.X, o.Y.tolist(), o.Yvar), InputDataError, "Y"),
    Fault(
        "X a single number",
        lambda o: (o.X.sum(), o.Y, o.Yvar),
        BotorchTensorDimensionError,
        "X",
        _ALL,
    ),
    Fault(
        "X a vector",
        lambda o: (o.X.flatten()[:DIM], o.Y, o.Yvar),
        BotorchTensorDimensionError,
        "X",
        _ALL,
    ),
    Fault(
        "X too wide",
        lambda o: (torch.cat((o.X, o.X), -1), o.Y, o.Yvar),
        BotorchTensorDimensionError,
        "X",
        _ALL,
    ),
    Fault(
        "X in an unknown batch",
        lambda o: (o.X.expand(3, *o.X.shape), o.Y, o.Yvar),
        BotorchTensorDimensionError,
        "X",
        _MEMORY,
    ),
    Fault(
        "Y without its outputs",
        lambda o: (o.X, o.Y[..., 0], o.Yvar),
        BotorchTensorDimensionError,
        "Y",
    ),
    Fault(
        "Y with too many outputs",
        lambda o: (o.X, torch.cat((o.Y, o.Y), -1), o.Yvar),
        BotorchTensorDimensionError,
        "Y",
    ),
    Fault(
        "Y with a row too few",
        lambda o: (o.X, o.Y[..., 1:, :], o.Yvar),
        BotorchTensorDimensionError,
        "Y",
    ),
    Fault("X whole numbers", lambda o: (o.X.long(), o.Y, o.Yvar), InputDataError, "X", _ALL),
    Fault("Y whole numbers", lambda o: (o.X, o.Y.long(), o.Yvar), InputDataError, "Y"),
    Fault(
        "X of another dtype",
        lambda o: (o.X.to(_OTHER_DTYPE[o.X.dtype]), o.Y, o.Yvar),
        InputDataError,
        "X",
        _ALL,
    ),
    Fault(
        "Y of another dtype",
        lambda o: (o.X, o.Y.to(_OTHER_DTYPE[o.Y.dtype]), o.Yvar),
        InputDataError,
        "Y",
    ),
    Fault(
        "X on another device", lambda o: (o.X.to("meta"), o.Y, o.Yvar), InputDataError, "X", _ALL
    ),
    Fault("Y on another device", lambda o: (o.X, o.Y.to("meta"), o.Yvar), InputDataError, "Y"),
    Fault("NaN in X", lambda o: (_with(o.X, math.nan), o.Y, o.Yvar), InputDataError, "X", _ALL),
    Fault("inf in X", lambda o: (_with(o.X, math.inf), o.Y, o.Yvar), InputDataError, "X", _ALL),
    Fault("NaN in Y", lambda o: (o.X, _with(o.Y, math.nan), o.Yvar), InputDataError, "Y"),
    Fault("inf in Y", lambda o: (o.X, _with(o.Y, -math.inf), o.Yvar), InputDataError, "Y"),
)
"""What no model takes, wherever it comes in."""

VARIANCE_FAULTS = (
    ("negative", lambda v: _with(v, -1e-3), InputDataError),
    ("infinite", lambda v: _with(v, math.inf), InputDataError),
    ("a row too few", lambda v: v[..., 1:, :], BotorchTensorDimensionError),
    ("of another dtype", lambda v: v.to(_OTHER_DTYPE[v.dtype]), InputDataError),
    ("on another device", lambda v: v.to("meta"), InputDataError),
    ("no tensor", lambda v: v.tolist(), InputDataError),
)
"""What no model takes for a variance (``Yvar`` or ``noise``)."""
