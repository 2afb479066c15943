"""Ax's generator with models that stream, and the registry entry that strategies name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ax.adapter.registry import Cont_X_trans, GeneratorRegistryBase, GeneratorSetup, MBM_X_trans
from ax.adapter.transforms.derelativize import Derelativize
from ax.core.search_space import SearchSpaceDigest
from ax.generators.random.sobol import SobolGenerator
from ax.generators.torch.botorch_modular.acquisition import Acquisition
from ax.generators.torch.botorch_modular.generator import BoTorchGenerator
from ax.generators.torch.botorch_modular.surrogate import SurrogateSpec
from ax.generators.torch.botorch_modular.utils import ModelConfig
from ax.generators.torch_base import TorchGenResults, TorchOptConfig
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.models.transforms.outcome import Standardize
from torch import Tensor

from bo_stream.ax.acquisition import StreamAcquisition, best_observed
from bo_stream.ax.adapters import QuasiRandomAdapter, StreamAdapter
from bo_stream.ax.pool_acquisition import PoolAcquisition
from bo_stream.ax.stream import Record
from bo_stream.ax.surrogate import StreamSurrogate, name_of
from bo_stream.ax.transforms import (
    ExactCandidates,
    FiniteOutcomes,
    OutcomeUnits,
    ReportedMetrics,
    SteadyWinsorize,
)
from bo_stream.models.auto.auto import AutoGP

RELATIVE_TO_MEASURED = {
    "Derelativize": {"use_raw_status_quo": True},
    "SteadyWinsorize": {"derelativize_with_raw_status_quo": True},
}
"""Options of transforms: as in Ax's default, a bound relative to the status quo is one relative to
its measured outcome, not to the predicted one."""


def surrogate_spec(
    model: type | None = None,
    model_options: Mapping[str, Any] | None = None,
    default: type = AutoGP,
) -> SurrogateSpec:
    """Return Ax's specification of a model that standardises its outcomes itself.

    Args:
        model: A streaming model of BoTorch.
        model_options: Further arguments of its constructor.
        default: Model where none is asked for: :class:`AutoGP`, or :class:`WISKI`, whose place
            :class:`OSGPR` takes for more inputs than a grid takes.
    """
    config = ModelConfig(
        botorch_model_class=model or default,
        model_options=dict(model_options or {}),
        outcome_transform_classes=[Standardize],
        name=name_of(model, default),
    )
    return SurrogateSpec(model_configs=[config])


class StreamGenerator(BoTorchGenerator):
    """Ax's modular generator, whose surrogate is a :class:`StreamSurrogate`."""

    def __init__(
        self,
        surrogate_spec: SurrogateSpec | None = None,
        acquisition_class: type[Acquisition] | None = None,
        acquisition_options: dict[str, Any] | None = None,
        botorch_acqf_class: type[AcquisitionFunction] | None = None,
        botorch_acqf_options: dict[str, Any] | None = None,
        refit_on_cv: bool = False,
        warm_start_refit: bool = True,
        refit: float | None = None,
        learned: dict[str, Record] | None = None,
        units: dict[str, float] | None = None,
        cutoffs: dict[str, list[float | None]] | None = None,
        winsorize: bool = True,
    ) -> None:
        """Make a generator without a model; the first seven arguments are ``BoTorchGenerator``'s.

        For ``refit`` and ``learned`` see :class:`StreamSurrogate`. ``units`` and ``cutoffs`` (lower
        and upper; None: there is none) are those of the metrics, by name, written by the transforms
        when one is first seen or changes; ``winsorize``: outliers on the bad side are clipped.
        """
        super().__init__(
            surrogate_spec=surrogate_spec or _default_spec(),
            acquisition_class=acquisition_class or StreamAcquisition,
            acquisition_options=acquisition_options,
            botorch_acqf_class=botorch_acqf_class,
            botorch_acqf_options=botorch_acqf_options,
            refit_on_cv=refit_on_cv,
            warm_start_refit=warm_start_refit,
        )
        self.refit, self.winsorize = refit, winsorize
        self.learned: dict[str, Record] = {} if learned is None else learned
        self.units: dict[str, float] = {} if units is None else units
        self.cutoffs: dict[str, list[float | None]] = {} if cutoffs is None else cutoffs
        self._surrogate = StreamSurrogate(
            surrogate_spec=self.surrogate_spec,
            refit_on_cv=refit_on_cv,
            warm_start_refit=warm_start_refit,
            refit=refit,
            learned=self.learned,
            units=self.units,
        )

    def gen(
        self, n: int, search_space_digest: SearchSpaceDigest, torch_opt_config: TorchOptConfig
    ) -> TorchGenResults:
        """Generate candidates; overrides ``BoTorchGenerator.gen`` to name those of a pool."""
        results = super().gen(n, search_space_digest, torch_opt_config)
        if isinstance(self._acquisition, PoolAcquisition):
            return replace(results, candidate_metadata=list(self._acquisition.metadata))
        return results

    def _get_state(self) -> dict[str, Any]:
        """Return what Ax stores with each generator run, and gives to the next generator.

        Overrides ``Generator._get_state``, which returns nothing. The values are the same objects
        as long as the generator lives, for Ax builds another when it is given others.
        """
        return {"learned": self.learned, "units": self.units, "cutoffs": self.cutoffs}

    def best_point(
        self, search_space_digest: SearchSpaceDigest, torch_opt_config: TorchOptConfig
    ) -> Tensor | None:
        """Return the feasible observed point of the best posterior mean; None: many objectives.

        Overrides ``BoTorchGenerator.best_point``, which Ax calls with every candidate and which
        takes the joint posterior at all data. Marginal means cost O(n r), and the acquisition has
        them already.
        """
        if torch_opt_config.is_moo:
            return None
        last = self._acquisition
        if isinstance(last, StreamAcquisition) and last.config is torch_opt_config:
            return last.best
        return best_observed(self.surrogate, search_space_digest, torch_opt_config)


_default_spec = surrogate_spec  # an argument of ``StreamGenerator`` has the name


class StreamGenerators(GeneratorRegistryBase):
    """Generators by the names in a ``GeneratorSpec``: for models that stream, and before them."""

    BO_STREAM = "BoStream"
    QUASI_RANDOM = "BoStreamSobol"

    @property
    def GENERATOR_KEY_TO_GENERATOR_SETUP(self) -> dict[str, GeneratorSetup]:
        """Return the generators, their adapters and their transforms.

        Overrides ``GeneratorRegistryBase.GENERATOR_KEY_TO_GENERATOR_SETUP``, Ax's own generators.
        None of the transforms is one of Ax's that learns from all outcomes anew: it would change
        rows of the data at every trial. What was learned is in the state that Ax stores after each
        candidate, and not in the arguments beside it again.
        """
        return {
            "BoStream": GeneratorSetup(
                adapter_class=StreamAdapter,
                generator_class=StreamGenerator,
                transforms=[
                    FiniteOutcomes,
                    ReportedMetrics,
                    ExactCandidates,
                    *MBM_X_trans,
                    Derelativize,
                    SteadyWinsorize,
                    OutcomeUnits,
                ],
                standard_adapter_kwargs={
                    "expand_model_space": False,
                    "transform_configs": RELATIVE_TO_MEASURED,
                },
                not_saved_generator_kwargs=["learned", "units", "cutoffs"],
            ),
            "BoStreamSobol": GeneratorSetup(
                adapter_class=QuasiRandomAdapter,
                generator_class=SobolGenerator,
                transforms=Cont_X_trans,
            ),
        }
