"""Outcome transforms in a stream against BoTorch's transforms of all the outcomes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.outcome import (
    Bilog,
    ChainedOutcomeTransform,
    Log,
    OutcomeTransform,
    Power,
    Standardize,
    StratifiedStandardize,
)
from botorch.posteriors.gpytorch import GPyTorchPosterior
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import LaplaceLikelihood, StudentTLikelihood
from torch import Tensor

from bo_stream import (
    OSGPR,
    OSVGP,
    QSGP,
    WISKI,
    AutoGP,
    BayesianLastLayer,
    ClusteredGP,
    DecoupledGP,
    LocalGP,
)
from bo_stream.models.base import StreamingGP
from bo_stream.models.outcomes.base import OutcomeChain
from bo_stream.testing.streams import assert_close


def totals_of(Y: Tensor, shift: Tensor) -> Tensor:
    """``[Y, 1]ᵀ [Y, 1]`` of outcomes ``n x m`` less a shift, ``m x 2 x 2``."""
    columns = torch.stack(((Y - shift).mT, torch.ones_like(Y.mT)), -1)
    return columns.mT @ columns


def learned(transform: OutcomeTransform, Y: Tensor) -> OutcomeChain:
    chain = OutcomeChain.of(transform.double())
    targets, _ = chain.to_targets(Y, None)
    shift = targets[0]
    chain.learn(totals_of(targets, shift), shift)
    return chain


CHAINS = {
    "none": lambda: None,
    "standardised": lambda: Standardize(m=2),
    "one standardised": lambda: Standardize(m=2, outputs=[1]),
    "log": Log,
    "log, standardised": lambda: ChainedOutcomeTransform(log=Log(), s=Standardize(m=2)),
    "nested": lambda: ChainedOutcomeTransform(
        first=ChainedOutcomeTransform(bilog=Bilog(), power=Power(0.5)), s=Standardize(m=2)
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_targets_are_those_of_the_whole_transform(name: str) -> None:
    Y = 3.0 + torch.rand(9, 2, dtype=torch.float64) * torch.tensor([1.0, 40.0])
    expected = Y if name == "none" else CHAINS[name]()(Y)[0]
    chain = OutcomeChain.of(None) if name == "none" else learned(CHAINS[name](), Y)
    targets, _ = chain.to_targets(Y, None)
    offset, scale = chain.offset_and_scale(torch.zeros(2, dtype=torch.float64))
    assert_close((targets - offset) / scale, expected)


@pytest.mark.parametrize("name", ["log", "nested"])
def test_posteriors_are_mapped_back(name: str) -> None:
    Y = 3.0 + torch.rand(9, 2, dtype=torch.float64)
    chain = learned(CHAINS[name](), Y)
    targets, _ = chain.to_targets(Y, None)
    point = MultivariateNormal(targets[:, 0], 1e-20 * torch.eye(9).double())
    for outputs in (None, [0]):
        draw = chain.untransform(GPyTorchPosterior(point), outputs).rsample(torch.Size([1]))
        assert_close(draw[0, :, 0], Y[:, 0], factor=10)


@pytest.mark.parametrize("outputs", [[2], [1], [2, 0], [1, 2, 0]])
@pytest.mark.parametrize("logarithm", [False, True])
@pytest.mark.filterwarnings("ignore:Data .* is not standardized")
def test_some_outputs_are_standardised_as_in_the_whole(outputs: list[int], logarithm: bool) -> None:
    """Where the transform is told which: BoTorch's does not count them anew for some outputs."""
    transform: OutcomeTransform = Standardize(m=3, outputs=[0, 2])
    if logarithm:
        transform = ChainedOutcomeTransform(log=Log(), s=transform)
    X = torch.rand(12, 2, dtype=torch.float64)
    Y = 3.0 + torch.rand(12, 3, dtype=torch.float64) * torch.tensor([1.0, 40.0, 7.0])
    whole = OSGPR(X[:8], Y[:8], outcome_transform=transform)
    part = whole.subset_output(outputs)
    for model, rows in ((whole, Y[8:]), (part, Y[8:, outputs])):
        model.update(X[8:], rows).train().eval()  # as a refit standardises anew
    assert_close(part.outcome_scale(), whole.outcome_scale()[outputs])
    if not logarithm:
        assert_close(part.posterior(X).mean, whole.posterior(X).mean[:, outputs])


@pytest.mark.parametrize("factor", [0.11, 0.2, 0.39])
def test_outcomes_that_are_nearly_forgotten_keep_the_last_scale(factor: float) -> None:
    """Less than two observations' worth: no sample variance, but not one of 1 either."""
    Y = 3.0 + 40.0 * torch.rand(5, 2, dtype=torch.float64)
    chain, shift = learned(Standardize(m=2), Y), Y[0]
    chain.learn(factor * totals_of(Y, shift), shift)
    offset, scale = chain.offset_and_scale(shift)
    assert_close(offset, Y.mean(0))
    assert_close(scale, Y.std(0))


@pytest.mark.parametrize(
    "Y", [torch.zeros(0, 2), torch.ones(1, 2), 5.0 * torch.ones(4, 2)], ids=["none", "one", "equal"]
)
def test_outcomes_without_spread_keep_their_scale(Y: Tensor) -> None:
    chain = OutcomeChain.of(Standardize(m=2))
    shift = torch.full((2,), 0.5)
    chain.learn(totals_of(Y, shift), shift)
    offset, scale = chain.offset_and_scale(torch.zeros(2))
    assert_close(scale, torch.ones(2))
    if len(Y) > 0:
        assert_close(offset, Y[0])


def test_without_outcomes_any_more_the_last_standardisation_stays() -> None:
    Y, shift = 3.0 + 40.0 * torch.rand(9, 2, dtype=torch.float64), torch.ones(2).double()
    chain = learned(Standardize(m=2), Y)
    chain.learn(0.0 * totals_of(Y, shift), shift)
    offset, scale = chain.offset_and_scale(torch.zeros(2).double())
    assert_close(offset, Y.mean(0))
    assert_close(scale, Y.std(0))


def test_outcomes_that_were_all_but_forgotten_keep_their_mean() -> None:
    Y = 3.0 + torch.rand(9, 2)
    chain = OutcomeChain.of(Standardize(m=2))
    chain.learn(0.01 * totals_of(Y, torch.zeros(2)), torch.zeros(2))
    assert_close(chain.offset_and_scale(torch.zeros(2))[0], Y.mean(0))


@pytest.mark.parametrize(
    ("transform", "fault"),
    [
        (ChainedOutcomeTransform(s=Standardize(m=1), log=Log()), "last of a chain"),
        (
            StratifiedStandardize(stratification_idx=0, all_task_values=torch.tensor([0, 1])),
            "StratifiedStandardize .* task",
        ),
        (Log(outputs=[0]), "Log .* some outputs only"),
    ],
)
def test_what_cannot_follow_a_stream_is_refused(transform: OutcomeTransform, fault: str) -> None:
    with pytest.raises(UnsupportedError, match=fault):
        OutcomeChain.of(transform)


def test_an_unknown_transform_is_refused_by_name() -> None:
    class Rank(OutcomeTransform):
        """Depends on all the outcomes."""

        def forward(self, Y: Tensor, Yvar: Any = None, X: Any = None) -> tuple[Tensor, Any]:
            return Y.argsort(-2).argsort(-2).to(Y), Yvar

    with pytest.raises(UnsupportedError, match=r"Rank .* only Log, Power and Bilog"):
        OutcomeChain.of(Rank())


def test_one_observation_that_fades_leaves_no_spread_but_a_rounding_error() -> None:
    """Its square less the square of its mean is zero up to rounding, of either sign."""
    Y = 3.0 + 40.0 * torch.rand(5, 2, dtype=torch.float64)
    one = 1.0 + torch.rand(1, 2, dtype=torch.float64)
    for factor in torch.linspace(0.1, 0.99, 90).double():
        chain = learned(Standardize(m=2), Y)
        chain.learn(factor * totals_of(one, torch.zeros(2)), torch.zeros(2))
        assert_close(chain.offset_and_scale(torch.zeros(2).double())[1], torch.ones(2).double())


def test_the_standardisation_maps_variances_by_the_scale_that_it_learned_last() -> None:
    Y = torch.rand(9, 2, dtype=torch.float64)
    standardize, shift = Standardize(m=2), torch.zeros(2).double()
    chain = learned(standardize, Y)
    chain.learn(totals_of(7.0 * Y, shift), shift)
    _, Yvar = standardize.eval()(Y, torch.ones_like(Y))
    assert_close(Yvar, (7.0 * Y).std(0).pow(-2).expand_as(Y))


@pytest.mark.parametrize(
    "kind", [AutoGP, WISKI, OSGPR, ClusteredGP, LocalGP, BayesianLastLayer, QSGP]
)
def test_outcomes_in_any_unit_make_the_same_model(kind: type[StreamingGP]) -> None:
    X = torch.rand(24, 2, dtype=torch.float64)
    Y, T = torch.sin(5.0 * X).sum(-1, keepdim=True), torch.rand(5, 2, dtype=torch.float64)
    found: list[tuple[Tensor, Tensor]] = []
    for unit in (1.0, 1e-12, 1e12):
        torch.manual_seed(0)
        model: Any = kind(X[:16], unit * Y[:16]).update(X[16:], unit * Y[16:])
        model.train().eval()  # as a refit standardises anew
        likelihood = torch.zeros(()) if kind is QSGP else model.log_marginal_likelihood().detach()
        found.append((model.posterior(T).mean / unit, likelihood))
    for other in found[1:]:
        for ours, theirs in zip(other, found[0], strict=True):
            assert_close(ours, theirs, factor=1e4)


UNDER_LIKELIHOODS = {
    "AutoGP": lambda X, Y: AutoGP(X, Y, likelihood=StudentTLikelihood()),
    "OSVGP": lambda X, Y: OSVGP(X, Y, LaplaceLikelihood(), outcome_transform=Standardize(1)),
    "DecoupledGP": lambda X, Y: DecoupledGP(X, Y, outcome_transform=Standardize(1)),
    "QSGP": QSGP,
}
"""Models that standardise outcomes by the first ones, for good."""


def first_outcomes(offset: float) -> tuple[Tensor, Tensor]:
    X = torch.rand(30, 2, dtype=torch.float64)
    return X, X.sum(-1, keepdim=True) + offset


@pytest.mark.parametrize("offset", [0.0, 1e6, 1e9])
@pytest.mark.parametrize("name", UNDER_LIKELIHOODS)
def test_a_large_offset_takes_no_digits_of_the_scale(name: str, offset: float) -> None:
    X, Y = first_outcomes(offset)
    found, expected = UNDER_LIKELIHOODS[name](X, Y).outcome_transform, Standardize(1)
    expected(Y)
    torch.testing.assert_close(found.stdvs, expected.stdvs, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(found.means, expected.means, rtol=1e-12, atol=1e-12)
