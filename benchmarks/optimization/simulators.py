"""Simulators that other packages ship, as functions of BoTorch's kind: nothing was tuned on them.

Their least values are not known. All are deterministic, and take some milliseconds a point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import numpy as np
import torch
from botorch.test_functions.synthetic import SyntheticTestFunction
from torch import Tensor

Simulation = Callable[[np.ndarray], float]


class Simulator(SyntheticTestFunction):
    """A simulation of one point after the other, whose package is imported at the first."""

    def __init__(
        self,
        load: Callable[[], Simulation],
        bounds: Sequence[tuple[float, float]],
        package: str,
        install: str,
    ) -> None:
        """Describe it; nothing is imported yet.

        Args:
            load: Imports the package and returns the simulation, which is to be minimised.
            bounds: Low and high of each input.
            package: What is imported.
            install: What ``pip install`` is to be given.
        """
        self.dim, self.continuous_inds = len(bounds), list(range(len(bounds)))
        super().__init__(bounds=list(bounds))
        self._load, self._package, self._install = load, package, install
        self._simulation: Simulation | None = None

    @property
    def missing(self) -> str | None:
        """What has to be installed; None if the package is there."""
        return None if find_spec(self._package) else self._install

    def _evaluate_true(self, X: Tensor) -> Tensor:
        if self.missing:
            raise ImportError(f"This simulator needs a package: pip install '{self._install}'.")
        simulation = self._simulation or self._load()
        self._simulation = simulation
        rows = X.reshape(-1, self.dim).detach().numpy()
        values = [float(simulation(row)) for row in rows]
        return torch.tensor(values, dtype=X.dtype).reshape(X.shape[:-1])


# --- a lander, steered by a rule with twelve numbers ----------------------------------------------


LANDER_SEEDS = (0, 1)
"""Of the grounds and first pushes that a rule is tried on: those of two episodes."""

MOST_STEPS = 500
"""Of an episode, after which it counts as it stands."""


def lander_action(state: Sequence[float], w: np.ndarray) -> int:
    """Return the engine to fire: 0 none, 1 left, 2 main, 3 right.

    The rule of gymnasium's own heuristic, with its twelve constants w free, as TuRBO's authors have
    it (Eriksson et al., 2019): an angle and a height that are aimed at, and how far both are off.
    """
    x, height, speed_x, speed_y, angle, spin, left_leg, right_leg = state
    wanted_angle = float(np.clip(w[0] * x + w[1] * speed_x, -w[2], w[2]))
    wanted_height = w[3] * abs(x)
    turn = w[4] * (wanted_angle - angle) - w[5] * spin
    lift = w[6] * (wanted_height - height) - w[7] * speed_y
    if left_leg or right_leg:
        turn, lift = w[8], -w[9] * speed_y
    if lift > abs(turn) and lift > w[10]:
        return 2
    if turn < -w[11]:
        return 3
    return 1 if turn > w[11] else 0


def load_lander() -> Simulation:
    """Gymnasium's LunarLander-v3: minus the mean reward of the episodes of ``LANDER_SEEDS``."""
    import gymnasium

    world = gymnasium.make("LunarLander-v3").unwrapped

    def landed(w: np.ndarray) -> float:
        total = 0.0
        for seed in LANDER_SEEDS:
            state, _ = world.reset(seed=seed)
            for _ in range(MOST_STEPS):
                state, reward, ended, _, _ = world.step(lander_action(state, w))
                total += float(reward)
                if ended:
                    break
        return -total / len(LANDER_SEEDS)

    return landed


# --- a pendulum, and a mirror ---------------------------------------------------------------------


TORQUES, HELD = 40, 5
"""Torques in a row, and the steps of 0.05 s for which each is held."""


def load_pendulum() -> Simulation:
    """Gymnasium's Pendulum-v1, from rest below: the cost of ten seconds, by the torques."""
    import gymnasium

    world = gymnasium.make("Pendulum-v1").unwrapped

    def swung(torques: np.ndarray) -> float:
        world.reset(seed=0)
        world.state = np.array([np.pi, 0.0])
        return -sum(float(world.step([torque])[1]) for torque in torques for _ in range(HELD))

    return swung


LAYERS = 40


def load_mirror() -> Simulation:
    """Nevergrad's Bragg mirror: what it does not reflect of light of 600 nm."""
    from nevergrad.functions.photonics.photonics import bragg

    return bragg


def lander() -> Simulator:
    """Twelve numbers of a rule that lands a craft."""
    box = [(0.0, 2.0)] * 12
    return Simulator(load_lander, box, "Box2D", "gymnasium[box2d]>=1.0")


def pendulum() -> Simulator:
    """Forty torques of at most 2 N m, too few to lift the pendulum at once."""
    return Simulator(load_pendulum, [(-2.0, 2.0)] * TORQUES, "gymnasium", "gymnasium>=1.0")


def mirror() -> Simulator:
    """Permittivities and thicknesses (nm) of 40 layers."""
    box = [(2.0, 3.0)] * LAYERS + [(30.0, 180.0)] * LAYERS
    return Simulator(load_mirror, box, "nevergrad", "nevergrad>=1.0.12")
