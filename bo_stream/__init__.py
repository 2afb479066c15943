"""Streaming Gaussian processes for BoTorch: data add, bases pull back, hypotheses condition."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from bo_stream.lazy_names import lazy_names

if TYPE_CHECKING:
    from bo_stream.acquisition import (
        ExceedanceEntropy,
        ExpectedLoss,
        FeatureNIPV,
        IntegratedVariance,
        Misclassification,
        PoolSelector,
        PredictiveEntropy,
        SiteConstraints,
        TargetedVariance,
        qBALD,
        sample_paths,
        select_from_pool,
        select_labels_from_pool,
        select_sites,
    )
    from bo_stream.bases.product_matern import ProductMatern
    from bo_stream.bases.stems import LinearStem, MLPStem, RandomProjection
    from bo_stream.learning import OnlineLearner, learn_points, maximise_stochastically, pretrain
    from bo_stream.likelihoods.binomial import BinomialLikelihood
    from bo_stream.likelihoods.counts import CountPosterior, counts
    from bo_stream.likelihoods.outcome_model import LogisticLikelihood
    from bo_stream.likelihoods.prevalence import PrevalencePosterior, prevalence
    from bo_stream.models.auto.auto import AutoGP
    from bo_stream.models.auto.inference import HandOverWarning
    from bo_stream.models.clustered.clustered import ClusteredGP
    from bo_stream.models.decoupled.decoupled import DecoupledGP
    from bo_stream.models.inducing.osgpr import OSGPR
    from bo_stream.models.inducing.osvgp import OSVGP
    from bo_stream.models.last_layer.last_layer import BayesianLastLayer
    from bo_stream.models.local.local import LocalGP
    from bo_stream.models.quadruply_stochastic.choice import (
        Chevron,
        FourierFeatures,
        InducingAtData,
        MeanField,
    )
    from bo_stream.models.quadruply_stochastic.qsgp import QSGP
    from bo_stream.models.quadruply_stochastic.qsrvm import QSRVM
    from bo_stream.models.wiski.dirichlet import DirichletWISKI
    from bo_stream.models.wiski.heteroscedastic import HeteroscedasticWISKI
    from bo_stream.models.wiski.resolution import GridResolutionWarning
    from bo_stream.models.wiski.wiski import WISKI
    from bo_stream.recommendation.recommend import recommend
    from bo_stream.storage.archive import describe_file
    from bo_stream.warnings import (
        CoarsePointsWarning,
        ProductKernelWarning,
        ProjectionWarning,
        ShortTrainingWarning,
    )

__version__ = version("bo-stream")

__all__ = [
    "OSGPR",
    "OSVGP",
    "QSGP",
    "QSRVM",
    "WISKI",
    "AutoGP",
    "BayesianLastLayer",
    "BinomialLikelihood",
    "Chevron",
    "ClusteredGP",
    "CoarsePointsWarning",
    "CountPosterior",
    "DecoupledGP",
    "DirichletWISKI",
    "ExceedanceEntropy",
    "ExpectedLoss",
    "FeatureNIPV",
    "FourierFeatures",
    "GridResolutionWarning",
    "HandOverWarning",
    "HeteroscedasticWISKI",
    "InducingAtData",
    "IntegratedVariance",
    "LinearStem",
    "LocalGP",
    "LogisticLikelihood",
    "MLPStem",
    "MeanField",
    "Misclassification",
    "OnlineLearner",
    "PoolSelector",
    "PredictiveEntropy",
    "PrevalencePosterior",
    "ProductKernelWarning",
    "ProductMatern",
    "ProjectionWarning",
    "RandomProjection",
    "ShortTrainingWarning",
    "SiteConstraints",
    "TargetedVariance",
    "__version__",
    "counts",
    "describe_file",
    "learn_points",
    "maximise_stochastically",
    "pretrain",
    "prevalence",
    "qBALD",
    "recommend",
    "sample_paths",
    "select_from_pool",
    "select_labels_from_pool",
    "select_sites",
]

_HOMES: dict[str, tuple[str, ...]] = {
    "acquisition": (
        "ExceedanceEntropy",
        "ExpectedLoss",
        "FeatureNIPV",
        "IntegratedVariance",
        "Misclassification",
        "PoolSelector",
        "PredictiveEntropy",
        "SiteConstraints",
        "TargetedVariance",
        "qBALD",
        "sample_paths",
        "select_from_pool",
        "select_labels_from_pool",
        "select_sites",
    ),
    "learning": (
        "OnlineLearner",
        "learn_points",
        "maximise_stochastically",
        "pretrain",
    ),
    "models.auto.auto": ("AutoGP",),
    "models.auto.inference": ("HandOverWarning",),
    "models.clustered.clustered": ("ClusteredGP",),
    "models.decoupled.decoupled": ("DecoupledGP",),
    "models.wiski.dirichlet": ("DirichletWISKI",),
    "models.wiski.heteroscedastic": ("HeteroscedasticWISKI",),
    "models.last_layer.last_layer": ("BayesianLastLayer",),
    "models.local.local": ("LocalGP",),
    "likelihoods.binomial": ("BinomialLikelihood",),
    "likelihoods.counts": ("CountPosterior", "counts"),
    "likelihoods.outcome_model": ("LogisticLikelihood",),
    "likelihoods.prevalence": ("PrevalencePosterior", "prevalence"),
    "models.inducing.osgpr": ("OSGPR",),
    "models.inducing.osvgp": ("OSVGP",),
    "warnings": (
        "CoarsePointsWarning",
        "ProductKernelWarning",
        "ProjectionWarning",
        "ShortTrainingWarning",
    ),
    "models.quadruply_stochastic.qsgp": ("QSGP",),
    "models.quadruply_stochastic.qsrvm": ("QSRVM",),
    "models.wiski.resolution": ("GridResolutionWarning",),
    "bases.product_matern": ("ProductMatern",),
    "bases.stems": (
        "LinearStem",
        "MLPStem",
        "RandomProjection",
    ),
    "models.quadruply_stochastic.choice": (
        "Chevron",
        "FourierFeatures",
        "InducingAtData",
        "MeanField",
    ),
    "models.wiski.wiski": ("WISKI",),
    "recommendation.recommend": ("recommend",),
    "storage.archive": ("describe_file",),
    "allocation": (),
    "bases": (),
    "diagnostics": (),
    "loops": (),
    "mapping": (),
    "models": (),
    "testing": (),
}
"""Where the names come from: importing torch and BoTorch for ``bo-stream --help`` takes seconds."""

if not TYPE_CHECKING:  # to a type checker, a name that is not there is an error
    __getattr__ = lazy_names(__name__, _HOMES, along=["acquisition"])  # for draw_matheron_paths


def __dir__() -> list[str]:
    """List all public names, imported or not."""
    return sorted({*globals(), *__all__})
