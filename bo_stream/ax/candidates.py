"""Proposals with exactly the parameters that a pool has."""

from __future__ import annotations

from typing import Any

from ax.adapter.base import Adapter
from ax.adapter.transforms.base import Transform
from ax.core.observation import ObservationFeatures

from bo_stream.ax.pool import Name
from bo_stream.ax.pools import known_pool

POOL = "pool"
"""Option of an acquisition: the pool's name."""

CANDIDATE = "candidate"
"""In the metadata of a proposal: the candidate's name."""


def metadata_of(pool: str, candidate: Name) -> dict[str, Any]:
    """What Ax keeps with a proposal.

    Args:
        pool: Its name.
        candidate: Its name in the pool.
    """
    return {POOL: pool, CANDIDATE: candidate}


class ExactCandidates(Transform):
    """Gives a proposal of a pool the pool's own values, when all other transforms are undone.

    They would come back from a logarithm with another last digit, and would not be found again.
    """

    no_op_for_experiment_data = True

    def __init__(
        self,
        search_space: Any = None,
        experiment_data: Any = None,
        adapter: Adapter | None = None,
        config: Any = None,
    ) -> None:
        """Nothing is learned."""
        super().__init__(search_space, experiment_data, adapter, config)

    def untransform_observation_features(
        self, observation_features: list[ObservationFeatures]
    ) -> list[ObservationFeatures]:
        """Of those that say which candidate they are.

        Former trials come here too, to be predicted, in a process that may not know their pool.
        """
        for proposal in observation_features:
            metadata = proposal.metadata or {}
            pool = known_pool(str(metadata.get(POOL)))
            if pool is not None and metadata.get(CANDIDATE) in pool.frame.index:
                proposal.parameters.update(pool.parameters_of(metadata[CANDIDATE]))
        return observation_features
