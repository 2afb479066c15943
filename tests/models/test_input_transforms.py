"""Input transforms that change the inputs' number, width or values, on every model.

A model with a transform is the model of transformed inputs, whatever it approximates. What
BoTorch's ``SingleTaskGP`` gives says which transformed inputs are meant.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, UnsupportedError
from botorch.fit import fit_gpytorch_mll
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.transforms.input import (
    AppendFeatures,
    ChainedInputTransform,
    FilterFeatures,
    InputPerturbation,
    InputStandardize,
    InputTransform,
    InteractionFeatures,
    Normalize,
    NumericToCategoricalEncoding,
    OneHotToNumeric,
    Round,
)
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.likelihoods import LaplaceLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood, SumMarginalLogLikelihood
from torch import Tensor
from torch.nn.functional import one_hot

from bo_stream import (
    OSGPR,
    OSVGP,
    QSGP,
    QSRVM,
    WISKI,
    AutoGP,
    ClusteredGP,
    DecoupledGP,
    DirichletWISKI,
    HeteroscedasticWISKI,
    LocalGP,
)
from bo_stream.acquisition import FeatureNIPV, sample_paths
from bo_stream.diagnostics.approximation import sensitivities
from bo_stream.diagnostics.validation import predict_batch
from bo_stream.learning import OnlineObjective
from bo_stream.models.base import StreamingGP
from bo_stream.models.quadruply_stochastic.memory import FourierFeatures
from bo_stream.testing.streams import assert_close, gaussian, joint_covariance, moments

pytestmark = pytest.mark.filterwarnings(
    "ignore:Data \\(input features\\) is not contained to the unit cube"  # categories by number
)

MODELS: dict[str, Callable[..., StreamingGP]] = {
    "WISKI": WISKI,
    "HeteroscedasticWISKI": partial(HeteroscedasticWISKI, rounds=0),
    "OSGPR": OSGPR,
    "OSVGP": OSVGP,
    "OSVGP, Laplace": partial(OSVGP, likelihood=LaplaceLikelihood()),
    "ClusteredGP": ClusteredGP,
    "LocalGP": LocalGP,
    "DecoupledGP": partial(DecoupledGP, num_mean=12, num_covar=4),
    "QSGP": partial(QSGP, basis=FourierFeatures(40), update_steps=4),
    "QSRVM": partial(QSRVM, max_points=12, update_steps=4),
}

SHIFTS = torch.tensor([[0.0, 0.0], [0.05, -0.03], [-0.02, 0.04]], dtype=torch.float64)
LEVELS = torch.tensor([[0.1], [0.5], [0.8]], dtype=torch.float64)
UNIT = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


def sampler(count: int = 4) -> SobolQMCNormalSampler:
    return SobolQMCNormalSampler(torch.Size([count]), seed=3)


def cube(n: int) -> Tensor:
    return 0.1 + 0.8 * torch.rand(n, 2, dtype=torch.float64)


def with_category(n: int, of: int = 2) -> Tensor:
    """One real input and one of some categories by number."""
    return torch.cat((cube(n)[:, :1], torch.arange(n).remainder(of).double().unsqueeze(-1)), -1)


def with_one_hot(n: int) -> Tensor:
    X = with_category(n, of=3)
    return torch.cat((X[:, :1], one_hot(X[:, 1].long(), 3).double()), -1)


def encoding() -> NumericToCategoricalEncoding:
    return NumericToCategoricalEncoding(2, {1: 2}, {1: partial(one_hot, num_classes=2)})


@dataclass(frozen=True)
class Kind:
    """A transform with inputs that it can take."""

    build: Callable[[], InputTransform]
    inputs: Callable[[int], Tensor]


ONE_TO_ONE = {
    "from one-hot": Kind(lambda: OneHotToNumeric(4, {1: 3}), with_one_hot),
    "to one-hot": Kind(encoding, with_category),
    "some features": Kind(lambda: FilterFeatures(torch.tensor([1])), cube),
    "products": Kind(InteractionFeatures, cube),
    "rounded": Kind(lambda: Round(integer_indices=[1]), with_category),
    "chained": Kind(
        lambda: ChainedInputTransform(
            scale=Normalize(2, indices=[0], bounds=2.0 * UNIT[:, :1]), encode=encoding()
        ),
        with_category,
    ),
}

ONE_TO_MANY = {
    "perturbed": lambda: InputPerturbation(SHIFTS),
    "normalised, perturbed": lambda: ChainedInputTransform(
        scale=Normalize(2, bounds=2.0 * UNIT), perturb=InputPerturbation(SHIFTS)
    ),
    "perturbed, normalised": lambda: ChainedInputTransform(
        perturb=InputPerturbation(SHIFTS), scale=Normalize(2, bounds=2.0 * UNIT)
    ),
}


def outcomes(X: Tensor) -> Tensor:
    return (3.0 * X[:, :1]).sin() + 0.3 * X[:, 1:2] + 0.01 * torch.randn_like(X[:, :1])


def assert_same(a: StreamingGP, b: StreamingGP, X: Tensor, own: Tensor) -> None:
    """Equal moments of one model at X and another at what X stands for."""
    for actual, expected in zip(moments(a, X), moments(b, own), strict=True):
        assert_close(actual, expected)


BY_BASIS = {"WISKI", "OSGPR"}
"""One model with a grid in a box of its own and one without: these meet every transform, and others
a transform to fewer inputs, a chain to more and one of values."""


def each_with_some(kinds: dict[str, Any], others: set[str]) -> list[Any]:
    """Parameters: names of models, and transforms, of which some models meet some."""
    return [
        pytest.param(name, kind, id=f"{key}-{name}")
        for key, kind in kinds.items()
        for name in MODELS
        if name in BY_BASIS or key in others
    ]


# --- one input of each --------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(BY_BASIS))
def test_a_model_of_products_of_inputs_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    X, T = cube(12), cube(5)
    model = MODELS[name](X, outcomes(X), input_transform=InteractionFeatures())
    model.save(tmp_path / "model")
    assert_same(type(model).load(tmp_path / "model"), model, T, T)


@pytest.mark.parametrize("name", sorted(BY_BASIS))
def test_models_that_predicted_at_other_inputs_are_merged(name: str) -> None:
    X, T = cube(12), cube(5)
    parts = [
        MODELS[name](X[rows], outcomes(X[rows]), input_transform=InputPerturbation(SHIFTS))
        for rows in (slice(6), slice(6, 12))
    ]
    parts[1].posterior(T)
    assert parts[0].merge(parts[1]).num_observations == 12


@pytest.mark.parametrize(
    ("name", "kind"), each_with_some(ONE_TO_ONE, {"from one-hot", "rounded", "chained"})
)
def test_a_model_with_a_transform_is_that_of_transformed_inputs(name: str, kind: Kind) -> None:
    build, transform = MODELS[name], kind.build()
    X, more, T = kind.inputs(12), kind.inputs(4), kind.inputs(5)
    Y, Z = outcomes(X), outcomes(more)
    model = build(X, Y, input_transform=kind.build()).update(more, Z)
    plain = build(transform(X), Y).update(transform(more), Z)
    assert_same(model, plain, T, transform(T))
    fantasy = model.fantasize(T[:2], sampler())
    expected = plain.fantasize(transform(T[:2]), sampler())
    assert_same(fantasy, expected, T, transform(T))


@pytest.mark.parametrize("kind", ONE_TO_ONE.values(), ids=ONE_TO_ONE)
def test_the_exact_process_is_botorch_s(kind: Kind) -> None:
    """The default kernel, too, is that of as many inputs: hyperparameters fit together."""
    X, T = kind.inputs(12), kind.inputs(5)
    exact = SingleTaskGP(X, outcomes(X), input_transform=kind.build())
    Y = exact.outcome_transform.untransform(exact.train_targets.unsqueeze(-1))[0]
    model = OSGPR(X, Y, input_transform=kind.build(), inducing_points=X)
    model.load_state_dict(exact.state_dict())
    own, theirs = model.posterior(T), exact.posterior(T)
    assert_close(own.mean, theirs.mean, factor=1e3)
    assert_close(joint_covariance(own), joint_covariance(theirs), factor=1e3)


def test_inducing_points_are_in_units_of_the_inputs() -> None:
    X = with_category(12)
    model = OSGPR(X, outcomes(X), input_transform=encoding(), inducing_points=X[:5])
    assert torch.equal(model.inducing_points, encoding()(X[:5]))


@pytest.mark.parametrize(
    ("kind", "bounds", "expected"),
    [
        ("from one-hot", [[0.0] * 4, [1.0] * 4], [[0.0, 0.0], [1.0, 2.0]]),
        ("to one-hot", [[0.0, 0.0], [1.0, 1.0]], [[0.0] * 3, [1.0] * 3]),
        ("products", [[-1.0, -2.0], [1.0, 1.0]], [[-1.0, -2.0, -2.0], [1.0, 1.0, 2.0]]),
        ("some features", [[0.0, -3.0], [1.0, 2.0]], [[-3.0], [2.0]]),
    ],
)
def test_bounds_are_those_of_the_box_s_image(
    kind: str, bounds: list[list[float]], expected: list[list[float]]
) -> None:
    """Not of its two corners alone: of one-hot inputs these are no category at all."""
    X = ONE_TO_ONE[kind].inputs(12)
    transform = ONE_TO_ONE[kind].build()
    model = WISKI(X, outcomes(X), input_transform=transform, bounds=torch.tensor(bounds))
    assert_close(model.bounds, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "clamped", "expected"),
    [
        ({}, False, [[-0.02, -0.03], [1.05, 1.04]]),
        ({"bounds": UNIT}, False, [[-0.02, -0.03], [1.05, 1.04]]),
        ({"bounds": UNIT}, True, [[0.0, 0.0], [1.0, 1.0]]),
    ],
)
def test_the_grid_holds_the_inputs_that_a_posterior_is_of(
    options: dict[str, Any], clamped: bool, expected: list[list[float]]
) -> None:
    """So that fantasies may be asked about at the edge, whose grid cannot grow."""
    X = cube(12)
    transform = InputPerturbation(SHIFTS, bounds=UNIT if clamped else None)
    model = WISKI(X, outcomes(X), input_transform=transform, **options)
    assert_close(model.bounds, torch.tensor(expected, dtype=torch.float64))
    fantasy = model.fantasize(UNIT, sampler())
    assert fantasy.posterior(UNIT).mean.shape == (4, 6, 1)


# --- several of each ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "transform"), each_with_some(ONE_TO_MANY, {"perturbed, normalised"})
)
def test_a_posterior_is_of_several_inputs_for_each_and_observations_are_of_one(
    name: str, transform: Callable[[], Any]
) -> None:
    build, many = MODELS[name], transform().eval()
    X, more, T, S = cube(12), cube(4), cube(3), cube(2)
    Y, Z = outcomes(X), outcomes(more)
    model = build(X, Y, input_transform=transform()).update(more, Z)
    box = {"bounds": model.bounds} if name.endswith("WISKI") else {}
    plain = build(many.preprocess_transform(X), Y, **box)
    plain.update(many.preprocess_transform(more), Z)
    assert model.posterior(T).mean.shape == (9, 1)
    assert_same(model, plain, T, many(T))
    fantasy = model.fantasize(S, sampler())
    expected = plain.fantasize(many.preprocess_transform(S), sampler())
    assert fantasy.batch_shape == (4,)
    assert_same(fantasy, expected, T, many(T))


@pytest.mark.parametrize("name", MODELS)
def test_features_may_be_appended_to_what_is_asked_about(name: str) -> None:
    """BoTorch's environmental variables: observed are x and w, a posterior is of x at every w."""
    build, append = MODELS[name], AppendFeatures(feature_set=LEVELS).eval()
    X, x, S = cube(12), cube(3)[:, :1], cube(2)
    Y = outcomes(X)
    model = build(X, Y, input_transform=AppendFeatures(feature_set=LEVELS))
    plain = build(X, Y)
    assert_same(model, plain, x, append(x))
    fantasy, expected = (m.fantasize(S, sampler()) for m in (model, plain))
    assert_same(fantasy, expected, x, append(x))
    with pytest.raises(BotorchTensorDimensionError, match=r"AppendFeatures turns into 2 inputs"):
        model.posterior(X[:2])
    with pytest.raises(BotorchTensorDimensionError, match="X"):
        model.update(x, Y[:3])


def test_labels_are_conditioned_on_where_they_would_be_observed() -> None:
    X, T = cube(12), cube(3)
    labels = (X[:, :1] > 0.5).double()
    model = DirichletWISKI(X, labels, input_transform=InputPerturbation(SHIFTS))
    many = InputPerturbation(SHIFTS).eval()
    plain = DirichletWISKI(X, labels, bounds=model.bounds)
    assert_same(model, plain, T, many(T))
    assert_same(model.fantasize(T, sampler()), plain.fantasize(T, sampler()), T, many(T))
    each, probabilities = model.condition_on_each_label(T[:1])
    expected, others = plain.condition_on_each_label(T[:1])
    assert torch.equal(probabilities, others)
    assert_same(each, expected, T, many(T))


@pytest.mark.parametrize("transform", ONE_TO_MANY.values(), ids=ONE_TO_MANY)
@pytest.mark.parametrize("on_fantasize", [False, True])
def test_fantasies_of_several_inputs_are_botorch_s(
    transform: Callable[[], Any], on_fantasize: bool
) -> None:
    X, T, S = cube(12), cube(3), cube(2)
    exact = SingleTaskGP(X, outcomes(X), input_transform=_on_fantasize(transform(), on_fantasize))
    Y = exact.outcome_transform.untransform(exact.train_targets.unsqueeze(-1))[0]
    model = OSGPR(X, Y, input_transform=_on_fantasize(transform(), on_fantasize), inducing_points=X)
    model.load_state_dict(exact.state_dict())
    for own, theirs in (
        (model, exact),
        (model.fantasize(S, sampler()), exact.fantasize(S, sampler())),
    ):
        a, b = gaussian(own.posterior(T)), gaussian(theirs.posterior(T))
        assert a.mean.shape == b.mean.shape
        assert_close(a.mean, b.mean, factor=1e4)
        assert_close(a.variance.expand_as(b.variance), b.variance, factor=1e4)


def _on_fantasize(transform: Any, on: bool) -> Any:
    for part in transform.modules():
        if isinstance(part, InputPerturbation):
            part.transform_on_fantasize = on
    return transform


@pytest.mark.parametrize("pending", [False, True])
def test_known_points_may_stand_for_several_inputs(pending: bool) -> None:
    X, C = cube(12), torch.rand(3, 2, 2, dtype=torch.float64)
    model = WISKI(X, outcomes(X), input_transform=InputPerturbation(SHIFTS, bounds=UNIT))
    first, last = cube(4), cube(2) if pending else None
    known = model.with_known_points(first, last)
    parts = [first.expand(3, 4, 2), C, *([last.expand(3, 2, 2)] if last is not None else [])]
    joined = torch.cat(parts, -2)
    for actual, expected in zip(moments(known, joined), moments(model, joined), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("kind", ["to one-hot", "products", "rounded"])
def test_a_box_that_is_bent_is_not_integrated_over(kind: str) -> None:
    X = ONE_TO_ONE[kind].inputs(12)
    model = WISKI(X, outcomes(X), input_transform=ONE_TO_ONE[kind].build())
    assert not model.maps_boxes
    with pytest.raises(UnsupportedError, match="Draw mc_points from the bounds"):
        FeatureNIPV(model, bounds=UNIT)
    straight = WISKI(X, outcomes(X), input_transform=FilterFeatures(torch.tensor([0])))
    assert straight.maps_boxes


def test_feature_nipv_refuses_several_inputs_of_each() -> None:
    X = cube(12)
    model = WISKI(X, outcomes(X), input_transform=InputPerturbation(SHIFTS))
    with pytest.raises(UnsupportedError, match="Use BoTorch's qNegIntegratedPosteriorVariance"):
        FeatureNIPV(model, cube(5))


def test_observations_are_transformed_where_fantasies_are_not() -> None:
    box, shared = torch.tensor([[0.0, 0.0], [10.0, 10.0]], dtype=torch.float64), []
    X, rows = 10.0 * cube(40), slice(20, 40)
    Y = outcomes(X)
    for on in (True, False):
        transform = Normalize(2, bounds=box, transform_on_fantasize=on)
        model = WISKI(X[:20], Y[:20], bounds=box, input_transform=transform)
        conditioned = model.condition_on_observations(X[rows], Y[rows])
        predicted = predict_batch(model, X[rows], Y[rows])
        shared.append(
            (
                *moments(conditioned, X),
                model.batch_log_marginal_likelihood(X[rows], Y[rows]),
                OnlineObjective(model).log_density(X[rows], Y[rows]),
                torch.as_tensor(predicted.error),
                torch.tensor(sensitivities(model, X)),
            )
        )
    for one, other in zip(*shared, strict=True):
        assert_close(one, other)
    updated = deepcopy(model)
    updated.update(X[rows], Y[rows])
    for actual, expected in zip(moments(conditioned, X), moments(updated, X), strict=True):
        assert_close(actual, expected)


# --- learned from the first inputs, and never again ----------------------------------------------

BUILT = {
    "AutoGP": AutoGP,
    "WISKI": partial(WISKI, grid_size=8),
    "OSGPR": OSGPR,
}


@pytest.mark.parametrize("learned", [Normalize, InputStandardize])
@pytest.mark.parametrize("name", BUILT)
def test_a_state_with_another_transform_of_what_is_in_memory_is_refused(
    name: str, learned: type[Normalize | InputStandardize]
) -> None:
    X = cube(20)
    Y = outcomes(X)
    few = BUILT[name](X[:8], Y[:8], input_transform=learned(2))
    whole = BUILT[name](X, Y, input_transform=learned(2))
    before = moments(whole, X)
    state = few.state_dict()
    with pytest.raises(UnsupportedError, match=r"input_transform\._\w+ as in this model, whose 20"):
        whole.load_state_dict(state)
    for after, former in zip(moments(whole, X), before, strict=True):
        assert_close(after, former)
    whole.load_state_dict(whole.state_dict())
    permuted = BUILT[name](X.flip(0), Y.flip(0), input_transform=learned(2))
    whole.load_state_dict(permuted.state_dict())  # rounded otherwise


def test_a_state_may_have_another_transform_of_queries() -> None:
    X = cube(20)
    Y = outcomes(X)
    model, other = (
        OSGPR(X, Y, input_transform=ChainedInputTransform(a=Normalize(2), b=InputPerturbation(by)))
        for by in (SHIFTS, 2.0 * SHIFTS)
    )
    model.load_state_dict(other.state_dict())
    for after, expected in zip(moments(model, X), moments(other, X), strict=True):
        assert_close(after, expected)


@pytest.mark.parametrize("name", BUILT)
def test_a_transform_learns_nothing_from_queries_in_training_mode(name: str) -> None:
    X = cube(20)
    model = BUILT[name](X, outcomes(X), input_transform=Normalize(2))
    before = moments(model, X)
    model.train()
    for ask in (model.transform_inputs, model.process_inputs, model.hypothetical_inputs):
        ask(0.5 * X[:4])
    sample_paths(model, 3, seed=0, at=0.5 * X[:4])
    model.eval()
    for after, former in zip(moments(model, X), before, strict=True):
        assert_close(after, former)


@pytest.mark.parametrize("name", BUILT)
def test_a_list_of_models_with_transforms_is_fitted(name: str) -> None:
    X = cube(20)
    models = [BUILT[name](X, outcomes(X), input_transform=Normalize(2)) for _ in range(2)]
    alone = deepcopy(models[0])
    fit_gpytorch_mll(ExactMarginalLogLikelihood(alone.likelihood, alone))
    together = ModelListGP(*models)
    fit_gpytorch_mll(SumMarginalLogLikelihood(together.likelihood, together))
    posterior = together.posterior(X)
    torch.testing.assert_close(posterior.mean[:, :1], alone.posterior(X).mean, rtol=1e-2, atol=1e-2)
