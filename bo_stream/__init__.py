"""Streaming Gaussian processes for BoTorch: data add, bases pull back, hypotheses condition."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from bo_stream.lazy_names import lazy_names

if TYPE_CHECKING:
    from bo_stream.acquisition import (
        FeatureNIPV,
        PoolSelector,
        PredictiveEntropy,
        qBALD,
        sample_paths,
        select_from_pool,
        select_labels_from_pool,
    )
    from bo_stream.learning import OnlineLearner, learn_points, maximise_stochastically, pretrain
    from bo_stream.models.clustered import ClusteredGP
    from bo_stream.models.coarse_points_warning import CoarsePointsWarning
    from bo_stream.models.decoupled import DecoupledGP
    from bo_stream.models.dirichlet_wiski import DirichletWISKI
    from bo_stream.models.heteroscedastic_wiski import HeteroscedasticWISKI
    from bo_stream.models.local import LocalGP
    from bo_stream.models.logistic import LogisticLikelihood
    from bo_stream.models.osgpr import OSGPR
    from bo_stream.models.osvgp import OSVGP
    from bo_stream.models.projection_warning import ProjectionWarning
    from bo_stream.models.qsgp import QSGP
    from bo_stream.models.qsrvm import QSRVM
    from bo_stream.models.resolution_warning import GridResolutionWarning
    from bo_stream.models.stems import LinearStem, MLPStem, RandomProjection
    from bo_stream.models.weight_layout import Chevron, FourierFeatures, InducingAtData, MeanField
    from bo_stream.models.wiski import WISKI

__version__ = version("bo-stream")

__all__ = [
    "OSGPR",
    "OSVGP",
    "QSGP",
    "QSRVM",
    "WISKI",
    "Chevron",
    "ClusteredGP",
    "CoarsePointsWarning",
    "DecoupledGP",
    "DirichletWISKI",
    "FeatureNIPV",
    "FourierFeatures",
    "GridResolutionWarning",
    "HeteroscedasticWISKI",
    "InducingAtData",
    "LinearStem",
    "LocalGP",
    "LogisticLikelihood",
    "MLPStem",
    "MeanField",
    "OnlineLearner",
    "PoolSelector",
    "PredictiveEntropy",
    "ProjectionWarning",
    "RandomProjection",
    "__version__",
    "learn_points",
    "maximise_stochastically",
    "pretrain",
    "qBALD",
    "sample_paths",
    "select_from_pool",
    "select_labels_from_pool",
]

_HOMES: dict[str, tuple[str, ...]] = {
    "acquisition": (
        "FeatureNIPV",
        "PoolSelector",
        "PredictiveEntropy",
        "qBALD",
        "sample_paths",
        "select_from_pool",
        "select_labels_from_pool",
    ),
    "learning": (
        "OnlineLearner",
        "learn_points",
        "maximise_stochastically",
        "pretrain",
    ),
    "models.clustered": ("ClusteredGP",),
    "models.coarse_points_warning": ("CoarsePointsWarning",),
    "models.decoupled": ("DecoupledGP",),
    "models.dirichlet_wiski": ("DirichletWISKI",),
    "models.heteroscedastic_wiski": ("HeteroscedasticWISKI",),
    "models.local": ("LocalGP",),
    "models.logistic": ("LogisticLikelihood",),
    "models.osgpr": ("OSGPR",),
    "models.osvgp": ("OSVGP",),
    "models.projection_warning": ("ProjectionWarning",),
    "models.qsgp": ("QSGP",),
    "models.qsrvm": ("QSRVM",),
    "models.resolution_warning": ("GridResolutionWarning",),
    "models.stems": (
        "LinearStem",
        "MLPStem",
        "RandomProjection",
    ),
    "models.weight_layout": (
        "Chevron",
        "FourierFeatures",
        "InducingAtData",
        "MeanField",
    ),
    "models.wiski": ("WISKI",),
    "allocation": (),
    "bases": (),
    "diagnostics": (),
    "loops": (),
    "models": (),
}
"""Where the names come from: importing torch and BoTorch for ``bo-stream --help`` takes seconds."""

if not TYPE_CHECKING:  # to a type checker, a name that is not there is an error
    __getattr__ = lazy_names(__name__, _HOMES, along=["acquisition"])  # for draw_matheron_paths


def __dir__() -> list[str]:
    """All public names, imported or not."""
    return sorted({*globals(), *__all__})
