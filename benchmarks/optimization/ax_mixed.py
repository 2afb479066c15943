"""Ax's ``get_next_trials`` over floats, integers and an ordered choice: ours against Ax's default.

Both strategies have Ax's own acquisition function and search, and the same completed trials of a
noisy Levy function. They take turns; processor time counts, and medians over experiments of several
seeds. Ax's default fits its model anew at each trial. So does ours up to 100 trials; then it learns
hyperparameters when those beyond have become 1.3 times as many, and each trial bears its share of
the call that does.
"""

from __future__ import annotations

import statistics
import warnings

import torch
from ax.api.configs import ChoiceParameterConfig, RangeParameterConfig
from botorch.test_functions import Levy
from torch import Tensor

from benchmarks.common.harness import Options, processor_seconds, start
from benchmarks.common.report import Claim, at_least, at_most, finish, stated
from benchmarks.optimization.problems import spelled
from benchmarks.peers.ax_client import METRIC, Parameters, attach_trials, client_over, quiet
from bo_stream.loops.models import OFTEN, REFIT

SLOWER = 1.2
"""Seconds of a call with few trials, in those of Ax's default."""

FASTER = 15.0
"""How many times faster a call with ``MANY`` trials is."""

FEW, MANY = (20, 50, 100), 1_000
SEEDS, SEEDS_OF_MANY = 5, 3
"""Experiments with ``FEW`` trials and with ``MANY``."""

CHOICES = (0.0, 2.5, 5.0, 10.0)
SPACE = [
    RangeParameterConfig("x0", (0.0, 10.0), parameter_type="float"),
    RangeParameterConfig("x1", (0.0, 10.0), parameter_type="float"),
    RangeParameterConfig("x2", (0, 10), parameter_type="int"),
    ChoiceParameterConfig("x3", list(CHOICES), parameter_type="float", is_ordered=True),
]
LEVY, NOISE = Levy(len(SPACE)), 1.0


class Caller:
    """An experiment with some completed trials, which is asked for one more again and again."""

    def __init__(self, n: int, streams: bool, seed: int) -> None:
        """Complete n random trials; nothing is fitted yet."""
        self._noise = torch.Generator().manual_seed(seed)
        self._client = client_over(SPACE, streams, first=5, seed=seed)
        trials = random_trials(n, seed)
        attach_trials(self._client, trials, [outcome(one, self._noise) for one in trials])

    def __call__(self) -> None:
        """Ask for a trial, and complete it."""
        ((index, parameters),) = self._client.get_next_trials(1).items()
        self._client.complete_trial(index, {METRIC: outcome(parameters, self._noise)})


def random_trials(n: int, seed: int) -> list[dict[str, float]]:
    """Draw parameters of n trials."""
    U = torch.rand(n, len(SPACE), generator=torch.Generator().manual_seed(1 + seed)).tolist()
    return [
        {
            "x0": 10.0 * a,
            "x1": 10.0 * b,
            "x2": int(11 * c),
            "x3": CHOICES[int(len(CHOICES) * d)],
        }
        for a, b, c, d in U
    ]


def outcome(parameters: Parameters, noise: torch.Generator) -> float:
    """What is measured with some parameters, to be minimised."""
    X: Tensor = torch.tensor([[float(parameters[f"x{i}"]) for i in range(len(SPACE))]])
    value = LEVY.evaluate_true(2.0 * X - 10.0)
    return float(value + NOISE * torch.randn(1, generator=noise))


def call_seconds(n: int, calls: int, seed: int) -> tuple[float, float, float]:
    """Processor seconds: our first call, which refits; our later ones' median; the default's."""
    ours, theirs = Caller(n, True, seed), Caller(n, False, seed)
    torch.manual_seed(seed)
    first = processor_seconds(ours)
    processor_seconds(theirs)
    pairs = [(processor_seconds(ours), processor_seconds(theirs)) for _ in range(calls)]
    mine, default = (statistics.median(times) for times in zip(*pairs, strict=True))
    return first, mine, default


def mean_seconds(n: int, first: float, later: float) -> float:
    """Seconds of a call from one refit to the next; each call has its own up to ``OFTEN``."""
    calls = (REFIT - 1.0) * (n - OFTEN)
    return later if calls <= 1.0 else later + (first - later) / calls


def claims(n: int, calls: int, seeds: int) -> list[Claim]:
    """Compare calls with n completed trials."""
    found = [call_seconds(n, calls, seed) for seed in range(seeds)]
    taken = [mean_seconds(n, first, later) for first, later, _ in found]
    ratios = [mine / default for mine, (*_, default) in zip(taken, found, strict=True)]
    ratio, label = statistics.median(ratios), f"n = {n:,}"
    first, _, default = (statistics.median(times) for times in zip(*found, strict=True))
    detail = (
        f"ours {statistics.median(taken):.2f} s, refits included, the first call {first:.2f} s; "
        f"{default:.2f} s; ours over it by seed {spelled(ratios)}"
    )
    made = [
        at_least(f"{label}: Ax's default over ours", 1.0 / ratio, FASTER, "", detail)
        if n == MANY
        else at_most(f"{label}: ours over Ax's default", ratio, SLOWER, "times", detail),
        stated(f"{label}: our first call over Ax's default", first / default, "times"),
    ]
    print(*made, sep="\n", flush=True)
    return made


def main() -> None:
    """Run it."""
    options: Options = start(__doc__)
    warnings.simplefilter("ignore")
    quiet()
    made: list[Claim] = []
    for n in options.pick((*FEW, MANY), (8,)):
        many = n == MANY
        made += claims(
            n, options.pick(3 if many else 5, 1), options.pick(SEEDS_OF_MANY if many else SEEDS, 1)
        )
    finish("ax_mixed", made, options, {"refit": REFIT, "seeds": SEEDS})


if __name__ == "__main__":
    main()
