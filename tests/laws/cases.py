"""Every model of the package in every variant that is worth a test."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import torch
from botorch.models.transforms.input import Normalize, Warp
from botorch.models.transforms.outcome import (
    Bilog,
    ChainedOutcomeTransform,
    Log,
    Power,
    Standardize,
)
from gpytorch.kernels import AdditiveKernel, Kernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
)
from gpytorch.means import ConstantMean
from torch import Tensor

from bo_stream import (
    WISKI,
    BinomialLikelihood,
    DirichletWISKI,
    HeteroscedasticWISKI,
    ProductMatern,
)
from bo_stream.allocation import OIPS, CoverTree
from bo_stream.bases.kernels import LinearStem
from bo_stream.models.auto.auto import AutoGP
from bo_stream.models.base import StreamingGP
from bo_stream.models.clustered.clustered import ClusteredGP
from bo_stream.models.decoupled.decoupled import DecoupledGP
from bo_stream.models.inducing.osgpr import OSGPR, OSVGP
from bo_stream.models.last_layer.inference import default_network
from bo_stream.models.last_layer.last_layer import BayesianLastLayer
from bo_stream.models.local import LocalGP
from bo_stream.models.quadruply_stochastic.memory import Chevron, FourierFeatures, InducingAtData
from bo_stream.models.quadruply_stochastic.qsgp import QSGP, QSRVM
from bo_stream.models.wiski import memory as row_memory
from bo_stream.testing.streams import exact_prior
from tests.laws.registry import (
    DIM,
    EVERY_SETTING,
    UNBATCHED,
    Case,
    Setting,
    Stream,
)
from tests.support.problems import Observations


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
    m = 1 if data.counts else data.Y.shape[-1]
    return torch.Size((*data.X.shape[:-2], *([m] if m > 1 else [])))


def _rbf(data: Observations) -> RBFKernel:
    kernel = RBFKernel(ard_num_dims=DIM, batch_shape=_parameter_shape(data))
    kernel.lengthscale = torch.full_like(kernel.lengthscale, 0.6)
    return kernel


def _scaled_matern(data: Observations) -> ScaleKernel:
    shape = _parameter_shape(data)
    base = MaternKernel(nu=1.5, ard_num_dims=DIM, batch_shape=shape)
    return ScaleKernel(base, batch_shape=shape)


def _product_matern(data: Observations) -> ScaleKernel:
    """Of the hyperparameters of :func:`_scaled_matern`, for a grid."""
    shape = _parameter_shape(data)
    base = ProductMatern(nu=1.5, ard_num_dims=DIM, batch_shape=shape)
    return ScaleKernel(base, batch_shape=shape)


def _additive(*groups: tuple[int, ...]) -> Callable[[Observations], Kernel]:
    """A sum of scaled kernels over groups of inputs, every second one rough."""

    def build(data: Observations) -> Kernel:
        shape, parts = _parameter_shape(data), []
        for i, group in enumerate(groups):
            options = {"ard_num_dims": len(group), "active_dims": group, "batch_shape": shape}
            base = ProductMatern(nu=2.5, **options) if i % 2 else RBFKernel(**options)
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


def _auto(**options: Any) -> Callable[[Observations], AutoGP]:
    """A factory of models that are exact at first; options that are functions as elsewhere."""

    def build(data: Observations) -> AutoGP:
        chosen = {k: v(data) if callable(v) else v for k, v in options.items()}
        return AutoGP(*data.astuple(), **{"covar_module": _rbf(data), **chosen})

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
            "update_steps": 3,
            "max_rows": 50,
            "outcome_transform": None,
        }
        return QSGP(data.X, data.Y, **{**defaults, **chosen})

    return build


def _qsrvm(data: Observations) -> QSRVM:
    options: dict[str, Any] = {"max_points": 12, "max_rows": 50, "freeze_steps": 2}
    return QSRVM(
        data.X, data.Y, covar_module=_rbf(data), update_steps=3, outcome_transform=None, **options
    )


def _scaled_rbf(data: Observations) -> ScaleKernel:
    return ScaleKernel(_rbf(data), batch_shape=_parameter_shape(data))


def _gaussian_likelihood(data: Observations) -> GaussianLikelihood:
    return GaussianLikelihood(batch_shape=_parameter_shape(data))


def _laplace_likelihood(data: Observations) -> LaplaceLikelihood:
    return LaplaceLikelihood(batch_shape=_parameter_shape(data))


def _bernoulli_likelihood(_: Observations) -> BernoulliLikelihood:
    return BernoulliLikelihood()


def _binomial_likelihood(_: Observations) -> BinomialLikelihood:
    return BinomialLikelihood()


def _likelihood_with_outliers(_: Observations) -> BinomialLikelihood:
    return BinomialLikelihood(trials=10, overdispersion=True, outliers=0.05)


def _beta_binomial_likelihood(_: Observations) -> BinomialLikelihood:
    return BinomialLikelihood(trials=10, overdispersion=True)


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


def _last_layer(window: int, **options: Any) -> Callable[[Observations], BayesianLastLayer]:
    """A factory of models of few features that hold so many rows."""

    def build(data: Observations) -> BayesianLastLayer:
        network, chosen = default_network(DIM, 6), {k: v(data) for k, v in options.items()}
        defaults = {"network": network, "train_Yvar": data.Yvar, "window": window}
        return BayesianLastLayer(data.X, data.Y, **{**defaults, **chosen})

    return build


def _unlearned(_: Observations) -> torch.nn.Module:
    """A network of buffers, whose features stay when hyperparameters move."""
    network = default_network(DIM, 6)
    for layer in network:
        for name, value in list(layer.named_parameters()):
            delattr(layer, name)
            layer.register_buffer(name, value.detach())
    return network


@cache
def _wide_tree() -> CoverTree:
    """So dense that no further input gets a centre of its own."""
    line = torch.linspace(-0.45, 1.45, 200, dtype=torch.float64)
    return CoverTree(0.33).insert(torch.cartesian_prod(line, line))


CANNOT = {"can_retract": False, "can_merge": False, "can_forget": False}

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
    Case("WISKI, few features", _wiski(max_rank=30), truncated=True),
    Case("WISKI, scaled Matérn", _wiski(covar_module=_product_matern)),
    Case("WISKI, additive", _wiski(covar_module=_additive((0,), (1,)))),
    Case(
        "WISKI, additive, overlapping, few features",
        _wiski(covar_module=_additive((0,), (0, 1)), grid_size=((9,), (7, 8)), max_rank=30),
        truncated=True,
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
    Case(
        "WISKI, binomial",
        _wiski(likelihood=_binomial_likelihood),
        noise="counts",
        sites=True,
        settling=True,
        settings=(Setting(), Setting(batch_shape=(2,))),
    ),
    Case(
        "WISKI, beta-binomial with outliers, additive",
        _wiski(likelihood=_likelihood_with_outliers, covar_module=_additive((0,), (1,))),
        noise="counts",
        sites=True,
        settling=True,
        settings=(Setting(),),
    ),
    Case(
        "WISKI, binomial, additive, no rows held",
        _holding(
            0,
            _wiski(likelihood=_binomial_likelihood, covar_module=_additive((0,), (1,)), window=0),
        ),
        noise="counts",
        in_order=True,
        can_retract=False,
        sites=True,
        settings=(Setting(torch.float32),),
    ),
    Case(
        "WISKI, binomial, a window on the grid",
        _holding(0, _wiski(likelihood=_binomial_likelihood, window=7)),
        noise="counts",
        in_order=True,
        rows=True,
        sites=True,
        settings=(Setting(), Setting(torch.float32), Setting(batch_shape=(2,))),
    ),
    Case("HeteroscedasticWISKI", _heteroscedastic, in_order=True, can_retract=False),
    Case(
        "HeteroscedasticWISKI, no rows held",
        _holding(0, _heteroscedastic),
        in_order=True,
        can_retract=False,
    ),
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
        can_retract=False,
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
    Case("AutoGP", _auto(), residual=True, growing=True, settings=EVERY_SETTING),
    Case("AutoGP, known noise", _auto(), noise="known", residual=True, growing=True),
    Case(
        "AutoGP, known noise in part",
        _auto(likelihood=lambda data: GaussianLikelihood(batch_shape=_parameter_shape(data))),
        noise="mixed",
        residual=True,
        growing=True,
    ),
    Case(
        "AutoGP, warped inputs",
        _auto(input_transform=_warp),
        residual=True,
        growing=True,
        settings=UNBATCHED,
    ),
    Case(
        "AutoGP, handed over to a grid",
        _auto(
            families=("exact", "WISKI"),
            max_exact=9,
            max_rows=40,
            bounds=_UNIT,
            grid_size=9,
            tolerance=0.0,
        ),
        residual=True,
        hands_over=True,
        settings=UNBATCHED,
    ),
    Case(
        "AutoGP, handed over to inducing points",
        _auto(families=("exact", "OSGPR"), max_exact=9, max_rows=40, window=7),
        residual=True,
        in_order=True,
        rows=True,
        spreading=True,
    ),
    Case(
        "AutoGP, Laplace",
        _auto(
            likelihood=_laplace_likelihood,
            hyper_steps=0,
            outcome_transform=None,
            max_rows=40,
            window=0,
        ),
        in_order=True,
        can_retract=False,
        residual=True,
        sites=True,
        spreading=True,
        settings=(Setting(), Setting(batch_shape=(2,), outputs=2)),
    ),
    Case(
        "AutoGP, binomial",
        _auto(likelihood=_binomial_likelihood),
        noise="counts",
        residual=True,
        growing=True,
        sites=True,
        settings=(Setting(), Setting(batch_shape=(2,))),
    ),
    Case(
        "AutoGP, beta-binomial, handed over",
        _auto(likelihood=_beta_binomial_likelihood, max_exact=4, max_rows=40, window=7),
        noise="counts",
        in_order=True,
        rows=True,
        residual=True,
        spreading=True,
        sites=True,
        settings=(Setting(torch.float32),),
    ),
    Case("LocalGP", _local(), in_order=True, can_retract=False, residual=True, blended=True),
    Case(
        "LocalGP, scaled Matérn, two nearest",
        _local(covar_module=_scaled_matern, nearest=2),
        in_order=True,
        can_retract=False,
        residual=True,
        blended=True,
        settings=(Setting(),),
    ),
    Case(
        "LocalGP, one kernel for all outputs, as measured",
        _local(covar_module=lambda _: RBFKernel(), outcome_transform=None),
        in_order=True,
        can_retract=False,
        residual=True,
        blended=True,
        settings=(Setting(outputs=2),),
    ),
    Case(
        "LocalGP, known noise",
        _local(),
        noise="known",
        in_order=True,
        can_retract=False,
        residual=True,
        blended=True,
        settings=(Setting(torch.float32, outputs=2),),
    ),
    Case(
        "LocalGP, known noise in part",
        _local(likelihood=lambda data: GaussianLikelihood(batch_shape=_parameter_shape(data))),
        noise="mixed",
        in_order=True,
        can_retract=False,
        residual=True,
        blended=True,
        settings=(Setting(batch_shape=(2,)),),
    ),
    Case("BayesianLastLayer", _last_layer(40), settings=EVERY_SETTING),
    Case("BayesianLastLayer, known noise", _last_layer(40), noise="known"),
    Case(
        "BayesianLastLayer, known noise in part",
        _last_layer(
            40, likelihood=lambda data: GaussianLikelihood(batch_shape=_parameter_shape(data))
        ),
        noise="mixed",
    ),
    Case(
        "BayesianLastLayer, no rows held",
        _last_layer(0, network=_unlearned),
        settings=EVERY_SETTING,
    ),
    Case(
        "BayesianLastLayer, no rows held, known noise in part",
        _last_layer(
            0,
            network=_unlearned,
            likelihood=lambda data: GaussianLikelihood(batch_shape=_parameter_shape(data)),
        ),
        noise="mixed",
    ),
    Case("BayesianLastLayer, few rows held", _last_layer(7), residual=True, rows=True),
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
        can_retract=False,
        residual=True,
        sites=True,
        settings=(Setting(), Setting(batch_shape=(2,), outputs=2)),
    ),
    Case(
        "OSVGP, Bernoulli",
        _osvgp(_bernoulli_likelihood),
        noise="labels",
        in_order=True,
        can_retract=False,
        residual=True,
        sites=True,
        settings=(Setting(torch.float32), Setting(batch_shape=(2,))),
    ),
    Case(
        "OSVGP, binomial",
        _osvgp(_binomial_likelihood, window=0),
        noise="counts",
        in_order=True,
        can_retract=False,
        residual=True,
        sites=True,
        settings=(Setting(), Setting(batch_shape=(2,))),
    ),
    Case(
        "OSVGP, binomial, few outcomes held",
        _osvgp(_binomial_likelihood, window=7),
        noise="counts",
        in_order=True,
        residual=True,
        rows=True,
        sites=True,
        settings=(Setting(), Setting(torch.float32), Setting(batch_shape=(2,))),
    ),
    Case(
        "OSVGP, beta-binomial with outliers",
        _osvgp(_likelihood_with_outliers),
        noise="counts",
        in_order=True,
        residual=True,
        sites=True,
        settings=(Setting(torch.float32),),
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
        **CANNOT,
        residual=True,
        rows=True,
        blended=True,
        settings=UNBATCHED,
    ),
    Case(
        "QSGP, a chevron, functions drawn",
        _qsgp(covariance=Chevron(3), functions=11, control_points=6),
        in_order=True,
        **CANNOT,
        residual=True,
        rows=True,
        blended=True,
        settings=(Setting(outputs=2),),
    ),
    Case(
        "QSGP, inducing points",
        _qsgp(basis=InducingAtData(12), covar_module=_rbf),
        prior_error=exact_prior,
        in_order=True,
        **CANNOT,
        residual=True,
        rows=True,
        blended=True,
        settings=(Setting(), Setting(torch.float32, outputs=2)),
    ),
    Case(
        "QSRVM",
        _qsrvm,
        in_order=True,
        **CANNOT,
        residual=True,
        rows=True,
        blended=True,
        settings=(Setting(outputs=2),),
    ),
    Case(
        "QSGP, Laplace",
        _qsgp(likelihood=_laplace_likelihood),
        in_order=True,
        **CANNOT,
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
        **CANNOT,
        residual=True,
        rows=True,
        blended=True,
        sites=True,
        settings=(Setting(torch.float32),),
    ),
    Case(
        "QSGP, binomial",
        _qsgp(likelihood=_binomial_likelihood),
        noise="counts",
        in_order=True,
        **CANNOT,
        residual=True,
        rows=True,
        blended=True,
        sites=True,
        settings=(Setting(),),
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
        **CANNOT,
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
        **CANNOT,
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
        **CANNOT,
        residual=True,
        rows=True,
        blended=True,
        sites=True,
        settings=(Setting(), Setting(batch_shape=(2,))),
    ),
    Case(
        "DecoupledGP, binomial",
        _decoupled(_binomial_likelihood, parametrization="hybrid"),
        noise="counts",
        in_order=True,
        **CANNOT,
        residual=True,
        rows=True,
        blended=True,
        sites=True,
        settings=(Setting(), Setting(batch_shape=(2,))),
    ),
)


STREAMS = [Stream(case, setting) for case in CASES for setting in case.settings]
