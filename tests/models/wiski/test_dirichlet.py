"""Streaming classification: dense oracles, late classes, hypothetical labels, bad input."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import gpytorch
import pytest
import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.fit import fit_gpytorch_mll
from botorch.models.transforms.input import Normalize
from botorch.sampling import SobolQMCNormalSampler
from botorch.utils.datasets import SupervisedDataset
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import DirichletClassificationLikelihood
from gpytorch.means import ConstantMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from bo_stream import DirichletWISKI, LinearStem, OnlineLearner, pretrain
from bo_stream.models.outcomes.gaussian import MAX_CLASSES, DirichletScores
from bo_stream.testing.streams import (
    assert_close,
    assert_gradient,
    assert_same_model,
    assert_same_posterior,
    assert_untouched,
    fingerprint,
    moments,
)
from tests.oracles.classification import dirichlet_observations
from tests.oracles.reference import reference, reference_posterior
from tests.support.problems.labels import UNIT, labelled, small_classifier
from tests.support.smooth_points import smooth_points

SAME = 1e-2  # of the float64 tolerance: 1e-10


@pytest.fixture
def points() -> Tensor:
    return torch.rand(6, 2, dtype=torch.float64)


# --- what it computes ---------------------------------------------------------------------------


@pytest.mark.parametrize("alpha_epsilon", [0.01, 0.1, 1.0])
def test_labels_become_scores_with_known_noise(alpha_epsilon: float) -> None:
    labels = [0, 2, 1, 1]
    found = DirichletScores(alpha_epsilon).of(torch.tensor(labels), 3, torch.float64)
    for actual, expected in zip(
        found, dirichlet_observations(labels, 3, alpha_epsilon), strict=True
    ):
        assert_close(actual, expected, SAME)


def test_scores_are_those_of_gpytorchs_likelihood() -> None:
    labels = torch.tensor([0, 2, 1, 1])
    likelihood = DirichletClassificationLikelihood(labels, alpha_epsilon=0.02, dtype=torch.float64)
    scores, noise = DirichletScores(0.02).of(labels, 3, torch.float64)
    assert_close(scores, likelihood.transformed_targets.mT)
    assert_close(noise, likelihood.noise.mT)


@pytest.mark.parametrize("alpha_epsilon", [0.01, 0.2])
def test_posterior_is_the_dense_one(alpha_epsilon: float, points: Tensor) -> None:
    X, labels = labelled(40)
    model = small_classifier(X[:10], labels[:10], alpha_epsilon=alpha_epsilon, num_classes=3)
    model.update(X[10:], labels[10:])
    scores, noise = dirichlet_observations(labels.tolist(), 3, alpha_epsilon)
    mean, covariance = reference_posterior(model, X, scores, points, noise)
    actual = moments(model, points)
    assert_close(actual[0], mean)
    assert_close(actual[1], covariance)
    marginal = model.marginals(points)
    assert_close(marginal[0], mean)
    assert_close(marginal[1], covariance.diagonal(dim1=-2, dim2=-1).mT)


def test_marginal_likelihood_and_gradients_are_the_dense_ones() -> None:
    X, labels = labelled(40)
    model = small_classifier(X, labels)
    dense = reference(model, X, *dirichlet_observations(labels.tolist(), 3, 0.01))
    actual, expected = model.log_marginal_likelihood(), dense.log_marginal_likelihood()
    assert_close(actual, expected)
    parameters = list(model.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(actual.sum(), parameters),
        torch.autograd.grad(expected.sum(), parameters),
        strict=True,
    ):
        assert_close(ours, theirs, 100.0)


class ExactDirichletGP(gpytorch.models.ExactGP):
    """gpytorch's own, with the modules of one of ours."""

    def __init__(self, X: Tensor, labels: Tensor, model: DirichletWISKI) -> None:
        likelihood = DirichletClassificationLikelihood(labels, dtype=torch.float64)
        super().__init__(X, likelihood.transformed_targets, likelihood)
        self.mean_module, self.covar_module = model.mean_module, model.covar_module

    def forward(self, X: Tensor) -> gpytorch.distributions.MultivariateNormal:
        X = X.expand(3, *X.shape[-2:])
        mean = self.mean_module(X).expand(X.shape[:-1])
        return gpytorch.distributions.MultivariateNormal(mean, self.covar_module(X))


def test_posterior_is_gpytorchs_to_the_grids_error(points: Tensor) -> None:
    X, labels = labelled(60)
    model = small_classifier(X, labels, grid_size=40)
    exact = ExactDirichletGP(X, labels, model).eval()
    with gpytorch.settings.fast_computations(False, False, False), torch.no_grad():
        expected = exact(points)
    mean, variance = model.marginals(points)
    torch.testing.assert_close(mean, expected.mean.mT, rtol=0.0, atol=2e-3)
    torch.testing.assert_close(variance, expected.variance.mT, rtol=0.0, atol=2e-3)


@pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")
def test_hyperparameters_are_learned_from_the_memory() -> None:
    X, labels = labelled(120)
    streamed = DirichletWISKI(X[:20], labels[:20], bounds=UNIT, grid_size=20).update(
        X[20:], labels[20:]
    )
    before = streamed.log_marginal_likelihood().sum()
    fit_gpytorch_mll(ExactMarginalLogLikelihood(streamed.likelihood, streamed))
    assert streamed.log_marginal_likelihood().sum() > before + 1.0
    batch = DirichletWISKI(X, labels, bounds=UNIT, grid_size=20)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(batch.likelihood, batch))
    found = streamed.class_probabilities(X).argmax(-1)
    assert (found == labels).double().mean() > 0.8
    torch.testing.assert_close(
        streamed.class_probabilities(X), batch.class_probabilities(X), rtol=0.0, atol=1e-3
    )


def test_probabilities_by_quadrature_and_sampling_agree(points: Tensor) -> None:
    model = small_classifier(*labelled(50))
    exact = model.class_probabilities(points)
    assert exact.shape == (6, 3)
    assert_close(exact.sum(-1), torch.ones(6, dtype=torch.float64))
    drawn = model.class_probabilities(points, "sampling", num_samples=20_000, seed=1)
    torch.testing.assert_close(drawn, exact, rtol=0.0, atol=0.01)
    batched = model.class_probabilities(points.view(2, 3, 2))
    assert_close(batched, exact.view(2, 3, 3))
    assert_gradient(lambda X: model.class_probabilities(X).square().sum(), smooth_points(model, 6))


def test_labels_have_no_moments(points: Tensor) -> None:
    model = small_classifier(*labelled(40))
    with pytest.raises(UnsupportedError, match="class_probabilities"):
        model.predictive(points)
    with pytest.raises(UnsupportedError, match="class_probabilities"):
        model.log_predictive(points, model.posterior(points).mean.detach())


def test_modules_per_class_serve_a_fixed_number(points: Tensor) -> None:
    X, labels = labelled(30)
    shape = torch.Size([3])
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2, batch_shape=shape), batch_shape=shape)
    kernel.base_kernel.lengthscale = 0.2 + 0.3 * torch.rand(3, 1, 2)
    model = small_classifier(
        X, labels, num_classes=3, covar_module=kernel, mean_module=ConstantMean(batch_shape=shape)
    )
    scores, noise = dirichlet_observations(labels.tolist(), 3, 0.01)
    mean, covariance = reference_posterior(model, X, scores, points, noise)
    assert_close(moments(model, points)[0], mean)
    assert_close(moments(model, points)[1], covariance)


def test_single_precision_is_double_to_its_accuracy(points: Tensor) -> None:
    X, labels = labelled(50)
    model = small_classifier(X, labels)
    single = small_classifier(X.float(), labels.int())
    probabilities = single.class_probabilities(points.float())
    assert probabilities.dtype == torch.float32
    assert_close(probabilities, model.class_probabilities(points))


# --- classes that come late ---------------------------------------------------------------------


def late(n: int = 60) -> tuple[Tensor, Tensor]:
    """Labels of which the class 2 comes after two thirds, and 4 (without a 3) at the end."""
    X, labels = labelled(n, 2)
    labels[2 * n // 3] = 2
    labels[-1] = 4
    return X, labels


@pytest.mark.parametrize("asked", [False, True], ids=["never asked", "asked between"])
def test_a_late_class_is_as_if_known_from_the_start(asked: bool, points: Tensor) -> None:
    X, labels = late()
    stream, known = small_classifier(X[:5], labels[:5]), small_classifier(X, labels, num_classes=5)
    seen = []
    for rows in torch.arange(5, 60).split(5):
        stream.update(X[rows], labels[rows])
        seen.append(stream.num_outputs)
        if asked:
            stream.posterior(points)
    assert seen == [2] * 7 + [3] * 3 + [5]
    assert_same_model(stream, known, points, SAME)
    assert_close(stream.noise_level(), known.noise_level(), SAME)
    assert stream.posterior(points).mean.shape == (6, 5)


def test_a_late_class_after_forgetting_growth_and_refinement(points: Tensor) -> None:
    X, labels = late()
    models = [small_classifier(X[:5], labels[:5], num_classes=k) for k in (None, 5)]
    for model in models:
        model.update(X[5:30] + 0.3, labels[5:30]).forget(0.7)
        model.update(X[-3:-1], labels[-3:-1]).retract(X[-3:-1], labels[-3:-1])
        model.refine(12).update(X[30:], labels[30:])
    assert_same_model(*models, points, SAME)


def test_a_late_class_on_the_grids_of_an_additive_kernel(points: Tensor) -> None:
    X, labels = late()
    parts = [ScaleKernel(RBFKernel(active_dims=(i,))) for i in range(2)]
    kernel = parts[0] + parts[1]
    models = [
        small_classifier(X[:5], labels[:5], num_classes=k, covar_module=kernel) for k in (None, 5)
    ]
    for model in models:
        model.update(X[5:], labels[5:])
    assert_same_model(*models, points, SAME)


def test_a_class_may_come_in_by_merging(points: Tensor) -> None:
    X, labels = late()
    shards = [small_classifier(X[rows], labels[rows]) for rows in torch.arange(60).split(20)]
    whole = small_classifier(X, labels)
    before = fingerprint(shards[0])
    merged = copy.deepcopy(shards[2]).merge(shards[0]).merge(shards[1])
    assert_untouched(shards[0], before)
    assert_same_model(merged, whole, points, SAME)
    assert_same_model(shards[0].merge(shards[1]).merge(shards[2]), whole, points, SAME)


def test_the_hidden_past_of_later_classes_is_not_learned_from() -> None:
    X, labels = labelled(60, 2)
    stream = small_classifier(X, labels)
    mll = ExactMarginalLogLikelihood(stream.likelihood, stream)
    assert stream.train().compute_custom_loss(mll).shape == (2,)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "file"])
def test_a_copy_takes_late_classes_too(way: str, points: Tensor, tmp_path: Path) -> None:
    X, labels = late()
    model = small_classifier(X[:30], labels[:30])
    if way == "file":
        model.save(tmp_path / "model")
        twin = DirichletWISKI.load(tmp_path / "model")
    else:
        twin = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    before = fingerprint(model)
    twin.update(X[30:], labels[30:])
    assert_untouched(model, before)
    assert_same_model(twin, small_classifier(X, labels), points, SAME)


def test_what_is_hypothetical_stays_when_a_class_comes(points: Tensor) -> None:
    X, labels = late()
    model = small_classifier(X[:30], labels[:30])
    conditioned = model.condition_on_labels(X[30:33], labels[30:33])
    before = moments(conditioned, points)
    model.update(X[30:], labels[30:])
    for actual, expected in zip(moments(conditioned, points), before, strict=True):
        assert torch.equal(actual, expected)
    assert conditioned.fantasize(points, sampler()).posterior(points).mean.shape == (4, 6, 2)


def test_clearing_keeps_the_classes(points: Tensor) -> None:
    X, labels = late()
    model = small_classifier(X, labels).clear()
    assert model.num_outputs == 5
    assert_same_model(model.update(X, labels), small_classifier(X, labels), points, SAME)


def test_nothing_known_is_two_classes(points: Tensor) -> None:
    X, labels = late()
    model = small_classifier(X[:0], labels[:0])
    assert_close(model.class_probabilities(points), torch.full((6, 2), 0.5, dtype=torch.float64))
    assert_same_model(model.update(X, labels), small_classifier(X, labels), points, SAME)


# --- hypothetical labels -------------------------------------------------------------------------


def sampler(n: int = 4) -> SobolQMCNormalSampler:
    return SobolQMCNormalSampler(torch.Size([n]), seed=5)


def test_conditioning_labels_is_updating_a_copy(points: Tensor) -> None:
    X, labels = labelled(40)
    model = small_classifier(X[:30], labels[:30], num_classes=3)
    conditioned = model.condition_on_labels(X[30:], labels[30:])
    updated = copy.deepcopy(model).update(X[30:], labels[30:])
    assert_same_posterior(conditioned, updated, points, factor=SAME)
    assert_close(conditioned.class_probabilities(points), updated.class_probabilities(points), SAME)


def test_a_batch_of_hypothetical_labels_is_each_alone(points: Tensor) -> None:
    model = small_classifier(*labelled(30))
    X, labels = torch.rand(4, 3, 2, dtype=torch.float64), torch.randint(3, (2, 4, 3, 1))
    batch = model.condition_on_labels(X, labels).class_probabilities(points)
    assert batch.shape == (2, 4, 6, 3)
    for i, j in ((0, 0), (1, 3)):
        alone = model.condition_on_labels(X[j], labels[i, j])
        assert_close(batch[i, j], alone.class_probabilities(points))


def test_hypothetical_labels_have_gradients(points: Tensor) -> None:
    model, labels = small_classifier(*labelled(30)), torch.tensor([0, 2])

    def probabilities(X: Tensor) -> Tensor:
        return model.condition_on_labels(X, labels).class_probabilities(points).square().sum()

    assert_gradient(probabilities, smooth_points(model, 2))


def test_fantasies_are_hypothetical_labels_as_probable_as_predicted() -> None:
    model, X = small_classifier(*labelled(30)), torch.rand(2, 1, 2, dtype=torch.float64)
    model.posterior(X)
    before = fingerprint(model)
    fantasies = model.fantasize(X, sampler(4096))
    assert_untouched(model, before)
    after = fantasies.marginals(X)[0].squeeze(-2)
    for j in range(2):
        each = [model.condition_on_labels(X[j], torch.tensor([k])) for k in range(3)]
        known = torch.stack([one.marginals(X[j])[0].squeeze(-2) for one in each])
        distance = (after[:, j].unsqueeze(1) - known).abs().amax(-1)
        assert bool((distance.amin(-1) < 1e-8).all())
        share = torch.nn.functional.one_hot(distance.argmin(-1), 3).double().mean(0)
        expected = model.class_probabilities(X[j]).squeeze(0)
        torch.testing.assert_close(share, expected, rtol=0.0, atol=0.03)
    again = model.fantasize(X, sampler(4096)).marginals(X)[0].squeeze(-2)
    assert torch.equal(after, again)


def test_fantasies_of_one_draw_are_consistent_between_points() -> None:
    """Labels are drawn jointly: at two near points they agree more often than by chance."""
    model = small_classifier(*labelled(4, 2))
    near = torch.tensor([[0.5, 0.5], [0.48, 0.5]], dtype=torch.float64)
    model.clear()
    inputs, drawing = model.hypothetical_inputs(near), model.outcomes.drawing(model.prior, None)
    scores, _ = model._drawn(near, inputs, model.process(inputs), sampler(4096), drawing)
    labels = scores.argmax(-1)
    p = model.class_probabilities(near)[0]
    agreement = (labels[:, 0] == labels[:, 1]).double().mean()
    assert agreement > p.square().sum() + 0.05


def test_fantasies_have_fantasies() -> None:
    model, X = small_classifier(*labelled(30)), torch.rand(2, 3, 2, dtype=torch.float64)
    first = model.fantasize(X, sampler(4))
    second = first.fantasize(0.9 * X + 0.05, sampler(5))
    assert second.posterior(X).mean.shape == (5, 4, 2, 3, 3)
    before, after = first.marginals(X)[1], second.marginals(X)[1]
    assert bool((after < before + 1e-12).all())


def test_nothing_to_fantasize_is_the_model(points: Tensor) -> None:
    model = small_classifier(*labelled(30))
    fantasies = model.fantasize(points[:0], sampler())
    assert_close(moments(fantasies, points)[0][2], moments(model, points)[0])


def test_each_label_is_conditioned_on_with_its_probability(points: Tensor) -> None:
    model, X = small_classifier(*labelled(30)), torch.rand(5, 1, 2, dtype=torch.float64)
    conditioned, probabilities = model.condition_on_each_label(X)
    assert probabilities.shape == (3, 5)
    assert_close(probabilities.mT, model.class_probabilities(X).squeeze(-2))
    after = conditioned.class_probabilities(points)
    for k in range(3):
        alone = model.condition_on_labels(X[4], torch.tensor([k]))
        assert_close(after[k, 4], alone.class_probabilities(points))

    def expected_entropy(X: Tensor) -> Tensor:
        conditioned, probabilities = model.condition_on_each_label(X)
        entropies = conditioned.label_moments(points).entropy.sum(-1)
        return (probabilities * entropies).sum()

    assert_gradient(expected_entropy, smooth_points(model, 2, 1))


# --- transforms, stems, learners ----------------------------------------------------------------


def test_inputs_are_transformed(points: Tensor) -> None:
    X, labels = labelled(30)
    box = torch.tensor([[-3.0, 10.0], [5.0, 40.0]], dtype=torch.float64)
    transform = Normalize(2, bounds=box)
    raw = small_classifier(transform.untransform(X), labels, input_transform=transform, bounds=box)
    plain = small_classifier(X, labels)
    assert_close(
        raw.class_probabilities(transform.untransform(points)), plain.class_probabilities(points)
    )


def test_labels_are_learned_through_a_stem_online() -> None:
    X = torch.rand(240, 3, dtype=torch.float64)
    labels = (X @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) > -0.25).long().unsqueeze(-1)
    model = DirichletWISKI(X[:160], labels[:160], stem=LinearStem(3, 1))
    model.covar_module.base_kernel.lengthscale = 1.0
    pretrain(model, X[:160], labels[:160], maxiter=30)
    learner = OnlineLearner(model, stem_learning_rate=1e-3, keep=240)
    learner.offer(X[:160], labels[:160])
    for rows in torch.arange(160, 200).split(10):
        assert learner.step(X[rows], labels[rows]) < 0.0
    found = model.class_probabilities(X[200:]).argmax(-1, keepdim=True)
    assert (found == labels[200:]).double().mean() > 0.9
    learner.refresh()
    anew = copy.deepcopy(model).clear().update(X[:200], labels[:200])
    assert_same_posterior(model, anew, X[200:])


def test_is_built_from_a_data_set(points: Tensor) -> None:
    X, labels = labelled(30)
    data = SupervisedDataset(
        X, labels.unsqueeze(-1).double(), feature_names=["a", "b"], outcome_names=["label"]
    )
    model = DirichletWISKI(**DirichletWISKI.construct_inputs(data, num_classes=3))
    assert model.class_probabilities(points).shape == (6, 3)


def test_scores_of_some_classes_predict_but_take_no_labels(points: Tensor) -> None:
    X, labels = labelled(30)
    model = small_classifier(X, labels)
    part = model.subset_output([2, 0])
    assert_close(part.posterior(points).mean, model.posterior(points).mean[..., [2, 0]])
    verbs: list[Any] = [
        lambda: part.update(X, labels),
        lambda: part.retract(X, labels),
        lambda: part.merge(model),
        lambda: model.merge(part),
        lambda: part.condition_on_labels(X, labels),
        lambda: part.class_probabilities(points),
        lambda: part.fantasize(points, sampler()),
        lambda: part.condition_on_each_label(points[:1]),
    ]
    for verb in verbs:
        with pytest.raises(UnsupportedError, match="scores of all classes"):
            verb()


# --- bad input ----------------------------------------------------------------------------------

_L = torch.tensor([0, 1, 1, 0])
FAULTS: dict[str, tuple[Any, type[Exception], str]] = {
    "fractions": (_L + 0.5, InputDataError, "whole numbers from 0"),
    "negative": (_L - 1, InputDataError, r"whole numbers from 0.*-1"),
    "NaN": (_L / _L.double().sub(1.0), InputDataError, "whole numbers from 0"),
    "no tensor": ([0, 1, 1, 0], InputDataError, r"labels to be a torch\.Tensor"),
    "too few": (_L[:3], BotorchTensorDimensionError, "labels of shape `n`"),
    "one-hot": (torch.eye(4), BotorchTensorDimensionError, "labels of shape `n`"),
    "elsewhere": (_L.to("meta"), InputDataError, "labels on cpu"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("verb", ["update", "retract", "condition_on_labels"])
@pytest.mark.parametrize("classes", [None, 2])
def test_bad_labels_are_named_and_change_nothing(
    fault: str, verb: str, classes: int | None
) -> None:
    X, labels = labelled(10, 2)
    model = small_classifier(X, labels, num_classes=classes)
    before = fingerprint(model)
    bad, error, message = FAULTS[fault]
    with pytest.raises(error, match=message):
        getattr(model, verb)(X[:4], bad)
    assert_untouched(model, before)


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "elsewhere"])
def test_bad_first_labels_are_named(fault: str) -> None:
    bad, error, message = FAULTS[fault]
    with pytest.raises(error, match=message):
        DirichletWISKI(torch.rand(4, 2, dtype=torch.float64), bad)


@pytest.mark.parametrize("verb", ["update", "retract", "condition_on_labels"])
def test_a_label_beyond_the_fixed_classes_is_refused(verb: str) -> None:
    X, labels = labelled(10, 2)
    model = small_classifier(X, labels, num_classes=2)
    before = fingerprint(model)
    with pytest.raises(InputDataError, match=r"classes, 0 to 1, got 2.*num_classes=2"):
        getattr(model, verb)(X, torch.full((10,), 2))
    assert_untouched(model, before)
    with pytest.raises(InputDataError, match="classes, 0 to 1, got 2"):
        DirichletWISKI(X, torch.full((10,), 2), num_classes=2)


def test_an_identifier_is_no_class() -> None:
    X, labels = labelled(10, 2)
    model = small_classifier(X, labels)
    before = fingerprint(model)
    for label in (MAX_CLASSES, 10**9):
        with pytest.raises(InputDataError, match=rf"labels below 1000, .* got {label}\. Number"):
            model.update(X, torch.full((10,), label))
        with pytest.raises(InputDataError, match=f"labels below 1000, .* got {label}"):
            DirichletWISKI(X, torch.full((10,), label))
    assert_untouched(model, before)


def test_more_classes_than_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    X, labels = labelled(10, 2)
    model = small_classifier(X, labels)
    before = fingerprint(model)
    monkeypatch.setattr("bo_stream.bases.grid.statistics.MEMORY_LIMIT_GIB", 1e-4)
    with pytest.raises(ValueError, match=r"A grid of 9 x 9 nodes, 41 times, would need .* GiB"):
        model.update(X, torch.full((10,), 40))
    assert_untouched(model, before)


@pytest.mark.parametrize("verb", ["retract", "condition_on_labels"])
def test_a_class_enters_by_update_only(verb: str) -> None:
    X, labels = labelled(10, 2)
    model = small_classifier(X, labels)
    with pytest.raises(InputDataError, match="a new class enters by update"):
        getattr(model, verb)(X, torch.full((10,), 2))


@pytest.mark.parametrize(
    "spoil",
    [lambda X: X / 0.0, lambda X: X + 1e3, lambda X: X.float(), lambda X: X[:, :1]],
    ids=["infinite", "far outside", "another dtype", "too narrow"],
)
def test_bad_inputs_bring_in_no_class(spoil: Any) -> None:
    X, labels = labelled(10, 2)
    model = small_classifier(X, labels)
    before = fingerprint(model)
    with pytest.raises((InputDataError, BotorchTensorDimensionError)):
        model.update(spoil(X), torch.full((10,), 7))
    assert_untouched(model, before)


def test_models_of_other_labels_cannot_be_merged() -> None:
    X, labels = late()
    model, fixed = small_classifier(X, labels), small_classifier(X[:9], labels[:9], num_classes=2)
    other = small_classifier(X, labels, alpha_epsilon=0.1)
    for a, b, message in (
        (model, other, "alpha_epsilon"),
        (fixed, model, "num_classes=2"),
        (model, None, "model of labels"),
    ):
        before = fingerprint(a)
        with pytest.raises(UnsupportedError, match=message):
            a.merge(b)
        assert_untouched(a, before)
    assert model.merge(fixed).num_observations == pytest.approx(69)


@pytest.mark.parametrize("value", [0, 1, -3, 2.0, "two"])
def test_a_number_of_classes_is_a_whole_number(value: Any) -> None:
    with pytest.raises(ValueError, match="num_classes to be an integer of at least 2"):
        small_classifier(*labelled(5, 2), num_classes=value)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_alpha_is_positive(value: float) -> None:
    with pytest.raises(ValueError, match="alpha_epsilon positive"):
        small_classifier(*labelled(5, 2), alpha_epsilon=value)


def test_what_cannot_be_is_refused_with_what_can(points: Tensor) -> None:
    X, labels = labelled(10)
    model = small_classifier(X, labels)
    shape = torch.Size([3])
    with pytest.raises(UnsupportedError, match="covar_module without batch shape"):
        small_classifier(X, labels, covar_module=RBFKernel(batch_shape=shape))
    with pytest.raises(UnsupportedError, match="mean_module without batch shape"):
        small_classifier(X, labels, mean_module=ConstantMean(batch_shape=shape))
    with pytest.raises(UnsupportedError, match="train_X of shape `n x d`"):
        DirichletWISKI(X.expand(2, 10, 2), labels)
    with pytest.raises(UnsupportedError, match="no Yvar with labels"):
        model.update(X, labels, torch.ones_like(X))
    with pytest.raises(UnsupportedError, match="no Yvar with labels"):
        model.fantasize(X, sampler(), observation_noise=torch.ones(1, 3))
    with pytest.raises(UnsupportedError, match="X of one point"):
        model.condition_on_each_label(points)
    with pytest.raises(ValueError, match="method to be 'quadrature' or 'sampling'"):
        model.class_probabilities(points, "guessing")
    with pytest.raises(ValueError, match="num_samples of at least 1"):
        model.class_probabilities(points, "sampling", num_samples=0)
