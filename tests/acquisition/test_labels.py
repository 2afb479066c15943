"""What labels would teach: against enumeration over dense draws, and BoTorch's optimiser."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from torch import Tensor

from bo_stream import WISKI, PredictiveEntropy, qBALD
from bo_stream.acquisition.labels import Hypotheses, joint_entropies
from bo_stream.likelihoods.sites import entropy
from bo_stream.testing.streams import assert_close, assert_gradient, assert_untouched, fingerprint
from tests.oracles.classification import dirichlet_observations, label_information
from tests.oracles.gaussian_process import DenseGP
from tests.oracles.reference import reference
from tests.support.problems.labels import UNIT, labelled, small_classifier
from tests.support.smooth_points import smooth_points

BOTH = pytest.mark.parametrize("acquisition", [qBALD, PredictiveEntropy])


def dense_scores(gp: DenseGP, X: Tensor, n: int) -> Tensor:
    """Joint draws of all class scores at X, ``n x q x m``."""
    mean, covariance = gp.posterior(X)
    root = torch.linalg.cholesky(covariance + 1e-10 * torch.eye(len(X)))
    draws = mean + (root @ torch.randn(n, *mean.shape, 1, dtype=torch.float64)).squeeze(-1)
    return draws.mT.detach()


def small() -> tuple[Any, DenseGP]:
    X, labels = labelled(25)
    model = small_classifier(X, labels)
    return model, reference(model, X, *dirichlet_observations(labels.tolist(), 3, 0.01))


def sampler(n: int = 512) -> SobolQMCNormalSampler:
    return SobolQMCNormalSampler(torch.Size([n]), seed=3)


@pytest.mark.parametrize("q", [1, 2, 3])
def test_bald_is_the_information_of_brute_force(q: int) -> None:
    model, dense = small()
    X = torch.rand(3, q, 2, dtype=torch.float64)
    values = qBALD(model, sampler(4096))(X)
    expected = [label_information(dense_scores(dense, points, 100_000)) for points in X]
    torch.testing.assert_close(values, torch.tensor(expected).double(), rtol=0.0, atol=0.01)


@pytest.mark.parametrize("q", [1, 2, 4])
def test_bald_lies_between_nothing_and_the_entropy(q: int) -> None:
    model, _ = small()
    X = torch.rand(20, q, 2, dtype=torch.float64)
    information, whole = qBALD(model)(X), PredictiveEntropy(model)(X)
    assert bool((information >= 0.0).all() and (information <= whole).all())
    assert bool((information > 1e-3).any())
    assert bool((whole <= q * torch.tensor(3.0).log() + 1e-9).all())


def test_a_known_score_teaches_nothing() -> None:
    X = torch.full((4000, 2), 0.5, dtype=torch.float64)
    labels = torch.arange(4000) % 2
    model = small_classifier(X, labels)
    assert float(PredictiveEntropy(model)(X[:1])) > 0.6
    assert float(qBALD(model)(X[:1])) < 0.01


def test_labels_far_apart_add_up_and_equal_ones_do_not() -> None:
    X, labels = labelled(25)
    model = small_classifier(X, labels)
    model.covar_module.base_kernel.lengthscale = 0.1
    far = torch.tensor([[0.02, 0.97], [0.97, 0.02]], dtype=torch.float64)
    near = far[:1] + torch.tensor([[0.0, 0.0], [0.01, 0.0]], dtype=torch.float64)
    value = qBALD(model, sampler(4096))
    alone = value(far.unsqueeze(-2))
    assert float(value(far)) == pytest.approx(float(alone.sum()), abs=0.02)
    assert float(value(near)) < 1.7 * float(alone[0])


def test_pending_points_count_among_the_candidates() -> None:
    model, _ = small()
    X = torch.rand(5, 1, 2, dtype=torch.float64)
    pending = torch.rand(2, 2, dtype=torch.float64)
    together = qBALD(model)(torch.cat((X, pending.expand(5, 2, 2)), -2))
    assert_close(qBALD(model, X_pending=pending)(X), together)


@BOTH
@pytest.mark.parametrize("q", [1, 2])
def test_gradients_are_those_of_differences(acquisition: Any, q: int) -> None:
    model, _ = small()
    value = acquisition(model, sampler(16))
    assert_gradient(lambda X: value(X).sum(), smooth_points(model, 2, q))


@pytest.mark.filterwarnings("ignore:A not p.d.")  # where the optimiser brings points together
@BOTH
@pytest.mark.parametrize("q", [1, 2])
def test_botorch_finds_the_best_place(acquisition: Any, q: int) -> None:
    model, _ = small()
    model.posterior(UNIT)
    before, value = fingerprint(model), acquisition(model)
    X, best = optimize_acqf(value, UNIT, q=q, num_restarts=6, raw_samples=128)
    assert X.shape == (q, 2)
    with torch.no_grad():
        tried = value(torch.rand(64, q, 2, dtype=torch.float64))
    assert float(best) >= float(tried.quantile(0.95))
    assert_untouched(model, before)


def test_fantasies_have_values_of_their_own() -> None:
    model, _ = small()
    here = torch.full((1, 1, 2), 0.9, dtype=torch.float64)
    conditioned, probabilities = model.condition_on_each_label(here)
    after = qBALD(conditioned)(here.expand(3, 1, 1, 2)).reshape(-1)
    assert float((probabilities.reshape(-1) * after).sum()) < float(qBALD(model)(here))


def test_drawn_configurations_estimate_the_enumerated() -> None:
    p = torch.randn(64, 2, 4, 3, dtype=torch.float64).softmax(-1)
    generator = torch.Generator().manual_seed(0)
    exact, expected = joint_entropies(p, 81, generator)
    drawn = [joint_entropies(p, 80, generator) for _ in range(400)]
    mean = torch.stack([joint for joint, _ in drawn]).mean(0)
    torch.testing.assert_close(mean, exact, rtol=0.0, atol=0.01)
    assert_close(drawn[0][1], expected)


@pytest.mark.integration
def test_drawn_configurations_have_unbiased_gradients() -> None:
    scores = torch.randn(8, 3, 2, dtype=torch.float64).mul_(2.0).requires_grad_()
    generator = torch.Generator().manual_seed(0)

    def gradient(most: int) -> Tensor:
        joint = joint_entropies(scores.softmax(-1), most, generator)[0]
        return torch.autograd.grad(joint, scores)[0]

    mean = torch.stack([gradient(7) for _ in range(4000)]).mean(0)
    exact = gradient(8)
    assert float((mean - exact).norm()) < 0.15 * float(exact.norm())


def test_hypotheses_give_the_chain_rule() -> None:
    p = torch.randn(50, 3, 3, dtype=torch.float64).softmax(-1)
    generator = torch.Generator().manual_seed(0)
    start = Hypotheses(p.new_ones(1), p.new_full((1, 50), 1.0 / 50))
    state, total = start, torch.zeros((), dtype=torch.float64)
    for i in range(3):
        total = total + state.conditional_entropy(p[:, i : i + 1]).squeeze(0)
        state = state.after(p[:, i], 27, generator)
    assert_close(total, joint_entropies(p, 27, generator)[0])
    assert_close(state.weights.sum(), torch.ones((), dtype=torch.float64))
    assert_close(state.draws.sum(-1), torch.ones(27, dtype=torch.float64))
    fewer = start.after(p[:, 0], 27, generator).after(p[:, 1], 4, generator)
    assert fewer.draws.shape == (4, 50)


def test_entropy_at_certainty_is_zero_with_a_gradient() -> None:
    p = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    value = entropy(p)
    (gradient,) = torch.autograd.grad(value, p)
    assert float(value.detach()) == 0.0
    assert bool(gradient.isfinite().all())


@BOTH
def test_other_models_are_refused(acquisition: Any) -> None:
    X, labels = labelled(10)
    with pytest.raises(UnsupportedError, match="model to be one of labels"):
        acquisition(WISKI(X, labels.double().unsqueeze(-1)))
    with pytest.raises(UnsupportedError, match="scores of all classes"):
        acquisition(small_classifier(X, labels).subset_output([0]))
    with pytest.raises(ValueError, match="max_configurations to be a whole number of at least 1"):
        acquisition(small_classifier(X, labels), max_configurations=0)
