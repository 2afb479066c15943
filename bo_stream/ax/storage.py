"""What Ax's JSON and SQL storage must know by name."""

from __future__ import annotations

from ax.storage.botorch_modular_registry import (
    register_acquisition,
    register_acquisition_function,
    register_model,
)
from ax.storage.json_store.registry import CORE_DECODER_REGISTRY
from ax.storage.transform_registry import register_transform
from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance

from bo_stream.acquisition import FeatureNIPV
from bo_stream.ax.acquisition import StreamAcquisition
from bo_stream.ax.candidates import ExactCandidates
from bo_stream.ax.generator import StreamGenerators
from bo_stream.ax.nipv import StreamNIPV
from bo_stream.ax.pool_acquisition import PoolAcquisition
from bo_stream.ax.pool_start import PoolStart
from bo_stream.ax.units import OutcomeUnits
from bo_stream.models.clustered import ClusteredGP
from bo_stream.models.heteroscedastic_wiski import HeteroscedasticWISKI
from bo_stream.models.local import LocalGP
from bo_stream.models.osgpr import OSGPR
from bo_stream.models.osvgp import OSVGP
from bo_stream.models.wiski import WISKI

STORED_MODELS = (WISKI, OSGPR, OSVGP, ClusteredGP, LocalGP, HeteroscedasticWISKI)


def register() -> None:
    """Tell Ax; done when ``bo_stream.ax`` is imported, which must be before anything is loaded."""
    for model in STORED_MODELS:
        register_model(model)
    register_acquisition_function(FeatureNIPV)
    register_acquisition_function(StreamNIPV)
    register_acquisition_function(qNegIntegratedPosteriorVariance)
    register_acquisition(StreamAcquisition)
    register_acquisition(PoolAcquisition)
    register_transform(ExactCandidates)
    register_transform(OutcomeUnits)
    CORE_DECODER_REGISTRY[StreamGenerators.__name__] = StreamGenerators
    CORE_DECODER_REGISTRY[PoolStart.__name__] = PoolStart
