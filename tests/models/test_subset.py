"""Hyperparameters of some outputs: values, constraints and priors of a batched module."""

from __future__ import annotations

import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models import ModelListGP
from botorch.models.transforms.input import Normalize
from botorch.models.utils.gpytorch_modules import get_gaussian_likelihood_with_lognormal_prior
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.kernels import RBFKernel, ScaleKernel, SpectralMixtureKernel
from gpytorch.means import ConstantMean
from gpytorch.priors import GammaPrior
from torch import Tensor

from bo_stream import OSGPR, WISKI
from bo_stream.bases.kernels import LinearStem
from bo_stream.learning import OnlineLearner, pretrain
from bo_stream.models.outcomes.base import check_outputs_exist, chosen_outputs, subset_module
from bo_stream.testing.streams import assert_close, assert_untouched, fingerprint
from tests.support.problems import kernel

BATCH = torch.Size([2])


@pytest.mark.parametrize("outputs", [[1], [2, 0], [0, 1, 2]])
@pytest.mark.parametrize("batch_shape", [torch.Size(), BATCH])
def test_a_kernel_of_some_outputs_is_the_kernels_part(
    outputs: list[int], batch_shape: torch.Size
) -> None:
    whole = kernel("product", 2, (*batch_shape, 3))
    part = subset_module(whole, batch_shape, 3, outputs)
    X = torch.rand(4, 2).double()

    def matrix(module: torch.nn.Module, extra: int) -> Tensor:
        inputs = X.expand(*batch_shape, *([extra] if extra else []), 4, 2)
        return module(inputs).to_dense()

    expected = matrix(whole, 3)[..., outputs, :, :]
    expected = expected.squeeze(-3) if len(outputs) == 1 else expected
    assert_close(matrix(part, len(outputs) if len(outputs) > 1 else 0), expected)


@pytest.mark.parametrize("outputs", [[1], [2, 0]])
def test_means_and_noises_of_some_outputs(outputs: list[int]) -> None:
    mean = ConstantMean(batch_shape=torch.Size([2, 3]))
    mean.constant = torch.randn(2, 3)
    likelihood = get_gaussian_likelihood_with_lognormal_prior(batch_shape=torch.Size([2, 3]))
    likelihood.noise = 0.1 + torch.rand(2, 3, 1)
    expected_mean, expected_noise = mean.constant[:, outputs], likelihood.noise[:, outputs]
    if len(outputs) == 1:
        expected_mean, expected_noise = expected_mean.squeeze(1), expected_noise.squeeze(1)
    assert torch.equal(subset_module(mean, BATCH, 3, outputs).constant, expected_mean)
    assert torch.equal(subset_module(likelihood, BATCH, 3, outputs).noise, expected_noise)


def test_priors_and_constraints_come_along() -> None:
    base = RBFKernel(
        batch_shape=torch.Size([3]),
        lengthscale_prior=GammaPrior(torch.tensor([2.0, 3.0, 4.0]).view(3, 1, 1), 1.0),
        lengthscale_constraint=GreaterThan(torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)),
    )
    whole = ScaleKernel(base, batch_shape=torch.Size([3]))
    part = subset_module(whole, torch.Size(), 3, [2])
    assert part.base_kernel.lengthscale_prior.concentration.flatten().tolist() == [4.0]
    assert_close(
        part.base_kernel.raw_lengthscale_constraint.lower_bound.flatten(), torch.tensor([0.3])
    )
    assert_close(part.base_kernel.lengthscale, whole.base_kernel.lengthscale[2])


@pytest.mark.parametrize("batched", [True, False])
def test_constraints_and_priors_of_each_input_are_not_of_outputs(batched: bool) -> None:
    """As many inputs as outputs, of which none has bounds of its own."""
    low, high = torch.tensor([0.01, 0.5]), torch.tensor([1.0, 5.0])
    whole = RBFKernel(
        ard_num_dims=2,
        batch_shape=torch.Size([2]) if batched else torch.Size(),
        lengthscale_constraint=Interval(low, high),
        lengthscale_prior=GammaPrior(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 4.0])),
    )
    part = subset_module(whole, torch.Size(), 2, [1])
    assert torch.equal(part.raw_lengthscale_constraint.upper_bound, high)
    assert torch.equal(part.lengthscale_prior.rate, whole.lengthscale_prior.rate)
    assert torch.equal(part.lengthscale, whole.lengthscale[1] if batched else whole.lengthscale)
    assert part.lengthscale_prior.log_prob(part.lengthscale).shape == part.lengthscale.shape


def test_a_value_that_is_no_parameter() -> None:
    whole = RBFKernel(batch_shape=torch.Size([2]))
    raw = torch.tensor([[[0.1]], [[0.7]]])
    del whole.raw_lengthscale
    whole.register_buffer("raw_lengthscale", raw)
    part = subset_module(whole, torch.Size(), 2, [1])
    assert torch.equal(part.raw_lengthscale, raw[1])


@pytest.mark.parametrize("m", [2, 3])
def test_a_shared_kernel_whose_shapes_look_like_outputs(m: int) -> None:
    """As many mixtures, or active inputs, as there are outputs."""
    mixture = SpectralMixtureKernel(num_mixtures=m, ard_num_dims=1)
    several = RBFKernel(active_dims=tuple(range(m)))
    batched = RBFKernel(active_dims=tuple(range(m)), batch_shape=torch.Size([m]))
    X = torch.rand(4, m)
    for shared, inputs in ((mixture, X[:, :1]), (several, X)):
        part = subset_module(shared, torch.Size(), m, [0])
        assert_close(part(inputs).to_dense(), shared(inputs).to_dense())
    part = subset_module(batched, torch.Size(), m, [1])
    assert_close(part(X).to_dense(), batched(X.expand(m, 4, m)).to_dense()[1])


def test_a_module_that_all_outputs_share_is_copied_whole() -> None:
    shared = kernel("scaled", 2)
    copied = subset_module(shared, torch.Size(), 3, [1])
    assert copied is not shared
    for (name, a), (other, b) in zip(
        shared.named_parameters(), copied.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(a, b)
        assert a.data_ptr() != b.data_ptr()


@pytest.mark.parametrize("outputs", [[], [3], [-1], [0, 0]])
def test_outputs_that_do_not_exist_are_refused(outputs: list[int]) -> None:
    with pytest.raises(UnsupportedError, match="distinct outputs in 0 to 2"):
        check_outputs_exist(outputs, of=3)


@pytest.mark.parametrize(
    ("asked", "chosen"), [([0, 1, -1], None), ([2, 0], [2, 0]), ([-1, 0], [2, 0])]
)
def test_a_posterior_may_be_asked_for_outputs_from_either_end(
    asked: list[int], chosen: list[int] | None
) -> None:
    assert chosen_outputs(asked, 3) == chosen


@pytest.mark.parametrize("asked", [[3], [-4], [0, 0], [0, -3]])
def test_outputs_that_are_none_are_named(asked: list[int]) -> None:
    with pytest.raises(UnsupportedError, match="output_indices to hold distinct outputs in 0 to 2"):
        chosen_outputs(asked, 3)


def test_a_list_of_models_gives_each_its_noise() -> None:
    X, Y = torch.rand(8, 2).double(), torch.rand(8, 2).double()
    models = [OSGPR(X, Y[:, i : i + 1]).eval() for i in range(2)]
    T, noise = torch.rand(3, 2).double(), 0.1 + torch.rand(3, 2).double()
    whole = ModelListGP(*models).posterior(T, observation_noise=noise)
    for i, model in enumerate(models):
        alone = model.posterior(T, observation_noise=noise[:, i : i + 1])
        assert_close(whole.mean[:, i : i + 1], alone.mean)
        assert_close(whole.variance[:, i : i + 1], alone.variance)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("what", ["pretrain", "step", "to"])
@pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")
def test_an_output_that_is_taught_or_moved_leaves_the_model_alone(what: str, outputs: int) -> None:
    X, Y = torch.rand(12, 2).double(), torch.rand(12, outputs).double()
    if what == "to":
        bounds = torch.tensor([[-0.1, -0.3], [1.1, 1.7]], dtype=torch.float64)
        transform = Normalize(2, bounds=bounds)
        whole: OSGPR | WISKI = OSGPR(X, Y, input_transform=transform)
    else:
        whole = WISKI(X, Y, stem=LinearStem(2, 2).double(), grid_size=8)
    before = fingerprint(whole.eval())
    part = whole.subset_output([outputs - 1])
    if what == "to":
        part.to(torch.float32)
    elif what == "step":
        OnlineLearner(part, stem_learning_rate=0.1).step(X[:3], Y[:3, -1:])
    else:
        pretrain(part, X, Y[:, -1:], maxiter=2)
    assert_untouched(whole, before)
