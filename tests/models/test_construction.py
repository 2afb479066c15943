"""What a grid model chooses for itself, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.exceptions.warnings import InputDataWarning
from botorch.models import SingleTaskGP
from botorch.models.transforms.input import Log10, Normalize
from botorch.models.transforms.outcome import Standardize
from gpytorch.kernels import LinearKernel, RBFKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.likelihoods.multitask_gaussian_likelihood import MultitaskGaussianLikelihood
from gpytorch.means import LinearMean

from bo_stream import AutoGP
from bo_stream.bases.grid.kernel import kernel_factors
from bo_stream.models.base import StreamingGP
from bo_stream.models.construction import (
    check_rank,
    choose_box,
    choose_likelihood,
    first_transformed,
)
from bo_stream.models.outcomes.gaussian import GaussianOutcomes, first_totals
from bo_stream.models.wiski.resolution import choose_grid_size
from bo_stream.models.wiski.wiski import WISKI
from bo_stream.testing.streams import assert_close
from tests.support.problems import Observations, observations

UNIT = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


@pytest.fixture
def data() -> Observations:
    return observations(8)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("noise", ["learned", "known"])
def test_default_modules_are_botorchs(outputs: int, noise: str) -> None:
    data = observations(8, 2, outputs, (3,)).with_noise(noise)
    ours, theirs = WISKI(*data.astuple(), grid_size=6), SingleTaskGP(*data.astuple())
    for name in ("covar_module", "mean_module", "likelihood"):
        assert type(getattr(ours, name)) is type(getattr(theirs, name))
    own, botorchs = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert own.keys() == botorchs.keys()
    for name, value in own.items():
        assert_close(value, botorchs[name])
    own_priors = {name: repr(prior) for name, _, prior, *_ in ours.named_priors()}
    assert own_priors == {name: repr(prior) for name, _, prior, *_ in theirs.named_priors()}


def test_noise_known_in_part_leaves_a_level_to_learn(data: Observations) -> None:
    Yvar = data.with_noise("mixed").Yvar
    assert isinstance(choose_likelihood(None, Yvar, torch.Size()), GaussianLikelihood)
    given = GaussianLikelihood()
    assert choose_likelihood(given, data.with_noise("known").Yvar, torch.Size()) is given


@pytest.mark.parametrize(
    ("X", "box"),
    [
        (torch.rand(5, 2), UNIT),
        (torch.empty(0, 2), UNIT),
        (torch.tensor([[0.0, 0.0], [1.0, 1.0]]), UNIT),
        (torch.tensor([[0.0, 10.0], [2.0, 30.0]]), torch.tensor([[-0.2, 8.0], [2.2, 32.0]])),
        (torch.tensor([[0.5, 3.0], [0.7, 3.0]]), torch.tensor([[0.48, 2.9], [0.72, 3.1]])),
    ],
    ids=["inside the unit cube", "no points", "its corners", "outside", "no width"],
)
def test_the_default_box_holds_the_data(X: torch.Tensor, box: torch.Tensor) -> None:
    assert_close(choose_box(None, X.double(), X.double(), None), box, factor=10)


def test_a_given_box_goes_through_the_input_transform() -> None:
    bounds = torch.tensor([[10.0, -1.0], [20.0, 1.0]]).double()
    transform = Normalize(2, bounds=bounds)
    X = torch.rand(3, 2).double()
    assert_close(choose_box(bounds, X, transform(X), transform), UNIT)


def test_a_given_box_goes_through_all_elements_of_a_transform() -> None:
    X = torch.tensor([[[10.0, -1.0], [20.0, 1.0]], [[15.0, -1.0], [20.0, 3.0]]]).double()
    transform = Normalize(2, batch_shape=torch.Size([2]))
    images = transform(X)
    box = choose_box(X[0], X, images, transform.eval())  # the second takes 10 to -1
    assert_close(box, torch.tensor([[-1.0, 0.0], [1.0, 1.0]]).double())


@pytest.mark.parametrize(("low", "image"), [(0.0, "-inf"), (-1.0, "nan")])
@pytest.mark.parametrize("kind", [AutoGP, WISKI])
def test_bounds_that_a_transform_takes_to_infinity_are_named(
    data: Observations, kind: type[StreamingGP], low: float, image: str
) -> None:
    bounds = torch.tensor([[low, 0.0], [2.0, 2.0]], dtype=torch.float64)
    with pytest.raises(InputDataError, match=rf"bounds .* Log10 .* \[\[{low}, .* \[\[{image}, "):
        kind(data.X + 0.1, data.Y, bounds=bounds, input_transform=Log10([0]))


@pytest.mark.parametrize(
    ("bounds", "error"),
    [
        (torch.rand(2), BotorchTensorDimensionError),
        (torch.rand(3, 2), BotorchTensorDimensionError),
        (torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]), BotorchTensorDimensionError),
        (torch.tensor([[0.0, 0.0], [1.0, 0.0]]), ValueError),
        (torch.tensor([[0.0, 1.0], [1.0, 0.0]]), ValueError),
        (torch.tensor([[0.0, 0.0], [1.0, torch.inf]]), InputDataError),
        (torch.tensor([[0.0, torch.nan], [1.0, 1.0]]), InputDataError),
    ],
    ids=["a vector", "three rows", "too wide", "no width", "upside down", "infinite", "NaN"],
)
def test_a_box_that_is_none_is_refused(
    data: Observations, bounds: torch.Tensor, error: type[Exception]
) -> None:
    with pytest.raises(error, match="bounds"):
        WISKI(*data.astuple(), bounds=bounds)


@pytest.mark.parametrize(
    ("grid_size", "sizes"), [(9, (9, 9)), ((9, 5), (9, 5)), ([4, 6], (4, 6)), (4, (4, 4))]
)
def test_a_grid_size_is_for_all_dimensions_or_each(grid_size: Any, sizes: tuple[int, ...]) -> None:
    assert choose_grid_size(grid_size, kernel_factors(RBFKernel(), 2), 2) == (sizes,)


@pytest.mark.parametrize("grid_size", [3, 0, -5, (9,), (9, 9, 9), (9, 3), 9.0, (9, 8.5), "99"])
def test_a_grid_size_that_is_none_is_refused(data: Observations, grid_size: Any) -> None:
    with pytest.raises(ValueError, match="grid_size"):
        WISKI(*data.astuple(), grid_size=grid_size)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"tolerance": -0.1}, "tolerance"),
        ({"tolerance": 1.0}, "tolerance"),
        ({"tolerance": float("nan")}, "tolerance"),
        ({"max_rank": 0}, "max_rank"),
    ],
)
def test_truncations_out_of_range_are_refused(options: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        check_rank(**{"tolerance": 0.0, "max_rank": 5, **options})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mean_module": LinearMean(2)}, "LinearMean .* ConstantMean or ZeroMean"),
        (
            {"likelihood": FixedNoiseGaussianLikelihood(torch.ones(8))},
            "FixedNoiseGaussianLikelihood.*train_Yvar",
        ),
        ({"likelihood": MultitaskGaussianLikelihood(num_tasks=1)}, "MultitaskGaussianLikelihood"),
        (
            {"covar_module": LinearKernel() + RBFKernel()},
            "LinearKernel is not a sum of products .* Expected one of: RBFKernel",
        ),
    ],
)
def test_modules_that_a_stream_cannot_learn_are_refused(
    data: Observations, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(UnsupportedError, match=match):
        WISKI(*data.astuple(), **options)


def test_an_outcome_transform_for_other_outputs_is_refused(data: Observations) -> None:
    with pytest.raises(BotorchTensorDimensionError, match="m=1 as train_Y, got m=2"):
        WISKI(*data.astuple(), outcome_transform=Standardize(m=2))


def test_input_transforms_learn_from_the_first_inputs(data: Observations) -> None:
    X = 3.0 + 5.0 * data.X
    transform = Normalize(2)
    inputs = first_transformed(X, transform)
    assert_close(inputs.amin(0), torch.zeros(2))
    assert_close(inputs.amax(0), torch.ones(2))
    assert not transform.training
    more = transform(X + 1.0)
    assert_close(more, inputs + 1.0 / (X.amax(0) - X.amin(0)))


def test_input_transforms_need_something_to_learn_from() -> None:
    with pytest.raises(InputDataError, match="Normalize must learn its bounds"):
        first_transformed(torch.empty(0, 2), Normalize(2))
    first_transformed(torch.empty(0, 2), Normalize(2, bounds=torch.tensor([[0.0, 0], [1, 1]])))


def test_inputs_and_outcomes_of_another_scale_are_warned_of(data: Observations) -> None:
    with pytest.warns(InputDataWarning, match="not contained to the unit cube"):
        WISKI(10.0 * data.X, data.Y)
    with pytest.warns(InputDataWarning, match="not standardized"):
        WISKI(data.X, 10.0 * data.Y, outcome_transform=None)


def test_first_outcomes_are_summed_about_their_mean() -> None:
    Y = 1e6 + torch.rand(3, 7, 2, dtype=torch.float64)
    shift = GaussianOutcomes.of(Y).shift
    totals = first_totals(Y, shift)
    assert_close(shift, Y.mean(-2))
    assert_close(totals[..., 0, 0], (Y - Y.mean(-2, keepdim=True)).square().sum(-2))
    assert_close(totals[..., 0, 1], torch.zeros(3, 2))
    assert_close(totals[..., 1, 1], torch.full((3, 2), 7.0))
    assert_close(GaussianOutcomes.of(Y[:, :0]).shift, torch.zeros(3, 2))
