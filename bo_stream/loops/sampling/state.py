"""State of an active sampling: what was asked and told, and the model of it, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bo_stream.diagnostics.validation import ProgressiveValidation
from bo_stream.errors import UsageError
from bo_stream.loops.models import KERNELS, MODELS
from bo_stream.loops.run import ModelFile
from bo_stream.loops.sampling.settings import SamplingSettings
from bo_stream.models.base import StreamingGP


@dataclass
class SamplingState:
    """State that determines the next choice, with the candidates and the settings.

    Attributes:
        model: Model of the picks without the outliers; None: there is none yet.
        picks: Candidates that were told, in the order of telling.
        outcomes: Their outcomes.
        pending: Candidates that were asked for and not told, in the order of asking.
        refits: Numbers of observations at which the hyperparameters were learned.
        kernel: Name of the model's kernel; empty while there is no model.
        kernels: Name of the kernel after each refit.
        onto_grid_at: Number of observations at which an exact model went onto a grid; None: it has
            not.
        outliers: Places in ``picks``, in order, of those that the model is without: outliers at the
            last refit, and later ones that wait for the next.
        validation: Record of how well each outcome was predicted, outliers included.
    """

    model: StreamingGP | None = None
    picks: list[int] = field(default_factory=list)
    outcomes: list[float] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    refits: list[int] = field(default_factory=list)
    outliers: list[int] = field(default_factory=list)
    kernel: str = ""
    kernels: list[str] = field(default_factory=list)
    onto_grid_at: int | None = None
    validation: ProgressiveValidation = field(default_factory=ProgressiveValidation)

    def record(self) -> dict[str, Any]:
        """Return all but the model, as JSON keeps it."""
        positions = {name: getattr(self, name) for name in _POSITIONS}
        return {
            **positions,
            "outcomes": self.outcomes,
            "kernel": self.kernel,
            "kernels": self.kernels,
            "onto_grid_at": self.onto_grid_at,
            "validation": self.validation.state(),
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> SamplingState:
        """Read a record of :meth:`record`, without a model."""
        positions = {name: [int(n) for n in record[name]] for name in _POSITIONS}
        outcomes = [float(value) for value in record["outcomes"]]
        validation = ProgressiveValidation.of_state(record["validation"])
        kernels, onto_grid_at = [str(name) for name in record["kernels"]], record["onto_grid_at"]
        return cls(
            None,
            outcomes=outcomes,
            kernel=str(record["kernel"]),
            kernels=kernels,
            onto_grid_at=None if onto_grid_at is None else int(onto_grid_at),
            validation=validation,
            **positions,
        )

    def load_model(
        self, file: ModelFile | None, path: Path, settings: SamplingSettings, candidates: int
    ) -> None:
        """Check a state that was read, and load its model.

        Args:
            file: Of the model, beside the index; None: there is no model.
            path: Index that the state is from.
            settings: Of the sampling.
            candidates: Number of candidates.

        Raises:
            UsageError: The state does not agree with itself, its model or the number of candidates,
                or the model cannot be read.
        """
        self._check(None if file is None else file.observations, candidates, path)
        if file is not None:
            self.model = file.read(path.parent, MODELS[settings.model].model, settings.device)

    def _check(self, observations: int | None, candidates: int, path: Path) -> None:
        """Check that a state agrees with a model of so many observations and with itself."""
        told, picks, outliers = len(self.picks), set(self.picks), set(self.outliers)
        known = [*self.picks, *self.pending]
        agrees = (
            self.outliers == sorted(outliers)
            and outliers <= set(range(told))
            and set(known) <= set(range(candidates))
            and len(set(known)) == len(known)
            and told == len(self.outcomes)
            and (observations is None or told == observations + len(outliers))
            and (self.kernel in KERNELS if observations is not None else not self.kernel)
            and len(self.kernels) == len(self.refits)
        )
        if not agrees:
            raise UsageError(
                f"{path} contradicts itself: {told:,} picks, {len(picks):,} of them distinct, "
                f"{len(self.outliers):,} outliers, {len(self.outcomes):,} outcomes, "
                f"{len(self.pending):,} pending of {candidates:,} candidates, and a model of "
                f"{observations or 0:,} observations."
            )


_POSITIONS = ("picks", "pending", "refits", "outliers")
