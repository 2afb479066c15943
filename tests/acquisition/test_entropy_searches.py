"""BoTorch's functions of posterior functions and of training inputs, on every model."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from unittest import mock

import pytest
import torch
from botorch.acquisition import (
    AcquisitionFunction,
    LogExpectedImprovement,
    PosteriorMean,
    ProximalAcquisitionFunction,
    qLogExpectedImprovement,
    qLowerBoundMaxValueEntropy,
    qMaxValueEntropy,
    qMultiFidelityMaxValueEntropy,
)
from botorch.acquisition.joint_entropy_search import (
    MIN_INFERRED_NOISE_LEVEL,
    qJointEntropySearch,
)
from botorch.acquisition.max_value_entropy_search import qMultiFidelityLowerBoundMaxValueEntropy
from botorch.acquisition.multi_objective.joint_entropy_search import (
    qLowerBoundMultiObjectiveJointEntropySearch,
)
from botorch.acquisition.multi_objective.max_value_entropy_search import (
    qLowerBoundMultiObjectiveMaxValueEntropySearch,
)
from botorch.acquisition.multi_objective.predictive_entropy_search import (
    qMultiObjectivePredictiveEntropySearch,
)
from botorch.acquisition.multi_objective.utils import compute_sample_box_decomposition
from botorch.acquisition.objective import LinearMCObjective
from botorch.acquisition.predictive_entropy_search import qPredictiveEntropySearch
from botorch.acquisition.thompson_sampling import PathwiseThompsonSampling
from botorch.acquisition.utils import get_optimal_samples
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError, UnsupportedError
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.model import Model
from botorch.models.transforms.input import Normalize
from botorch.sampling.normal import SobolQMCNormalSampler
from botorch.sampling.pathwise import draw_matheron_paths, get_matheron_path_model
from botorch.sampling.pathwise.prior_samplers import draw_kernel_feature_paths
from gpytorch.kernels import Kernel, MaternKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor
from torch.nn.functional import softplus

from bo_stream import (
    OSGPR,
    OSVGP,
    QSGP,
    WISKI,
    ClusteredGP,
    DecoupledGP,
    HeteroscedasticWISKI,
    LocalGP,
)
from bo_stream.bases.kernels import as_product
from bo_stream.models.base import StreamingGP
from bo_stream.models.quadruply_stochastic.memory import FourierFeatures
from bo_stream.models.wiski import memory as row_memory
from bo_stream.testing.streams import assert_close, assert_gradient
from tests.support.problems import Observations, observations

DIM = 3
BOX = torch.tensor([[0.0] * DIM, [1.0] * DIM]).double()
UNIT = torch.tensor([[0.0] * DIM, [1.0] * DIM])


def labelled(data: Observations) -> StreamingGP:
    return OSVGP(data.X, (data.Y > 4.8).double(), BernoulliLikelihood())


def on_its_grid(data: Observations) -> StreamingGP:
    with mock.patch.object(row_memory, "MOST_ROWS", 0):
        return MODELS["WISKI"](data)


MODELS: dict[str, Callable[[Observations], StreamingGP]] = {
    "WISKI": lambda d: WISKI(d.X, d.Y, covar_module=product(), grid_size=7, bounds=UNIT),
    "HeteroscedasticWISKI": lambda d: HeteroscedasticWISKI(
        d.X, d.Y, covar_module=product(), grid_size=7, noise_grid_size=5, rounds=0, bounds=UNIT
    ),
    "WISKI, no rows held": lambda d: on_its_grid(d),
    "OSGPR": lambda d: OSGPR(d.X, d.Y, covar_module=kernel(), inducing_points=d.X),
    "OSVGP": lambda d: OSVGP(d.X, d.Y, covar_module=kernel(), inducing_points=d.X),
    "ClusteredGP": lambda d: ClusteredGP(d.X, d.Y, covar_module=kernel(), resolution=0.2),
    "DecoupledGP": lambda d: DecoupledGP(d.X, d.Y, num_mean=12, num_covar=6, num_added=8),
    "QSGP": lambda d: QSGP(d.X, d.Y, basis=FourierFeatures(40), update_steps=3),
    "LocalGP": lambda d: LocalGP(d.X, d.Y, covar_module=kernel()),
    "OSVGP of labels": labelled,
}

LOCAL = "LocalGP has no functions to draw"
LABELS = "Expected no noise with a BernoulliLikelihood|no Gaussian noise to add"


def kernel() -> ScaleKernel:
    result = ScaleKernel(MaternKernel(2.5, ard_num_dims=DIM)).double()
    result.base_kernel.lengthscale = torch.tensor([0.5, 0.8, 1.1])
    return result


def product() -> Kernel:
    return as_product(kernel(), DIM)


def points(*shape: int) -> Tensor:
    return 0.05 + 0.9 * torch.rand(*shape, DIM, dtype=torch.float64)


def optima(model: Model) -> tuple[Tensor, Tensor]:
    inputs, outputs = get_optimal_samples(model, BOX, 3, raw_samples=32, num_restarts=2)
    assert inputs.shape == (3, DIM)
    assert outputs.shape == (3, 1)
    return inputs, outputs


def fronts(model: Model) -> tuple[Tensor, Tensor, Tensor]:
    """Two Pareto optimal points of each of two outcomes at 200 points, and the boxes below them."""
    X = points(200)
    with torch.no_grad():
        posterior = model.posterior(X)
        Y = posterior.mean + posterior.variance.sqrt() * torch.randn(2, 200, 2).double()
    best = Y.argmax(-2)
    values = torch.stack([Y[i, best[i]] for i in range(2)])
    return X[best], values, compute_sample_box_decomposition(values)


def proximal(base: AcquisitionFunction) -> AcquisitionFunction:
    return ProximalAcquisitionFunction(base, torch.tensor([0.3, 0.5, 1.0]).double(), beta=1.0)


Builder = Callable[[Model], AcquisitionFunction]

OF_ONE_OUTPUT: dict[str, Builder] = {
    "JES": lambda m: qJointEntropySearch(m, *optima(m)),
    "JES by Monte Carlo": lambda m: qJointEntropySearch(m, *optima(m), estimation_type="MC"),
    "JES, noisy": lambda m: qJointEntropySearch(m, *optima(m), condition_noiseless=False),
    "PES": lambda m: qPredictiveEntropySearch(m, points(3)),
    "MES": lambda m: qMaxValueEntropy(m, points(30), num_y_samples=16),
    "GIBBON": lambda m: qLowerBoundMaxValueEntropy(m, points(30)),
    "multi-fidelity MES": lambda m: qMultiFidelityMaxValueEntropy(m, points(30), num_y_samples=16),
    "multi-fidelity GIBBON": lambda m: qMultiFidelityLowerBoundMaxValueEntropy(m, points(30)),
    "Thompson sampling": PathwiseThompsonSampling,
    "a posterior function": lambda m: PosteriorMean(get_matheron_path_model(m)),
    "proximal": lambda m: proximal(LogExpectedImprovement(m, 4.0)),
}

OF_TWO_OUTPUTS: dict[str, Builder] = {
    "Thompson sampling": lambda m: PathwiseThompsonSampling(
        m, objective=LinearMCObjective(torch.ones(2).double())
    ),
    "multi-objective JES": lambda m: qLowerBoundMultiObjectiveJointEntropySearch(m, *fronts(m)),
    "multi-objective MES": lambda m: qLowerBoundMultiObjectiveMaxValueEntropySearch(
        m, fronts(m)[2]
    ),
    "multi-objective PES": lambda m: qMultiObjectivePredictiveEntropySearch(m, fronts(m)[0]),
    "proximal": lambda m: proximal(
        qLogExpectedImprovement(m, 4.0, objective=LinearMCObjective(torch.ones(2).double()))
    ),
}

OF_FUNCTIONS = (
    *("JES", "JES by Monte Carlo", "JES, noisy", "Thompson sampling", "a posterior function"),
)
OF_THE_LATENT = ("Thompson sampling", "a posterior function", "proximal")


def refusal(model: str, function: str) -> str | None:
    """What the error says, where a function cannot be had."""
    if model == "LocalGP" and function in OF_FUNCTIONS:
        return LOCAL
    if model == "OSVGP of labels" and function not in OF_THE_LATENT:
        return f"{LABELS}|that a BernoulliLikelihood can have"
    return None


def assert_works_or_says_why(model: Model, function: str, build: Builder, name: str) -> None:
    """Finite values and gradients, or one sentence; the posterior stays as it is to the bit.

    BoTorch's multi-objective predictive entropy search has NaN for a gradient, with its own models
    too, where two Pareto optimal points differ by more than eight standard deviations.
    """
    before = moments(model)
    _check_works_or_says_why(model, function, build, name)
    assert all(map(torch.equal, moments(model), before))


def moments(model: Model) -> tuple[Tensor, Tensor]:
    posterior = model.posterior(torch.linspace(0.1, 0.9, 4 * DIM).double().view(4, DIM))
    return posterior.mean.detach(), posterior.variance.detach()


def _check_works_or_says_why(model: Model, function: str, build: Builder, name: str) -> None:
    refused = refusal(name, function)
    if refused is not None:
        with pytest.raises((UnsupportedError, InputDataError), match=refused):
            build(model)(points(2, 1))
        return
    X = points(2, 1).requires_grad_()
    value = build(model)(X)
    assert value.shape == (2,)
    assert bool(value.isfinite().all())
    (gradient,) = torch.autograd.grad(value.sum(), X)
    assert function == "multi-objective PES" or bool(gradient.isfinite().all())


@pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")
@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
class TestEveryModel:
    @pytest.mark.parametrize("function", OF_ONE_OUTPUT)
    def test_of_one_output(self, name: str, function: str) -> None:
        model = MODELS[name](observations(15, DIM)).eval()
        assert_works_or_says_why(model, function, OF_ONE_OUTPUT[function], name)

    @pytest.mark.parametrize("function", OF_TWO_OUTPUTS)
    def test_of_two_outputs(self, name: str, function: str) -> None:
        if name == "OSVGP of labels":
            pytest.skip("labels of one output")
        model = MODELS[name](observations(15, DIM, 2)).eval()
        assert_works_or_says_why(model, function, OF_TWO_OUTPUTS[function], name)


def pair(outputs: int = 1, transform: Normalize | None = None) -> tuple[OSGPR, SingleTaskGP]:
    """The same posterior twice: with every input an inducing point, and the exact one."""
    data = observations(15, DIM, outputs)
    Y = (data.Y - data.Y.mean(0)) / data.Y.std(0)
    batch = torch.Size([outputs] if outputs > 1 else [])
    own = ScaleKernel(MaternKernel(2.5, ard_num_dims=DIM, batch_shape=batch), batch_shape=batch)
    own.base_kernel.lengthscale = 0.7
    exact = SingleTaskGP(
        data.X,
        Y,
        covar_module=own.double(),
        outcome_transform=None,
        input_transform=deepcopy(transform),
    )
    exact.likelihood.noise = 0.05
    model = OSGPR(
        data.X,
        Y,
        covar_module=deepcopy(exact.covar_module),
        mean_module=deepcopy(exact.mean_module),
        likelihood=deepcopy(exact.likelihood),
        outcome_transform=None,
        input_transform=transform,
        inducing_points=data.X,
    )
    return model.eval(), exact.eval()


@pytest.mark.filterwarnings("ignore:Data \\(outcome observations\\) is not standardized")
class TestValues:
    """Given the same optima, an exact sparse model has the values of BoTorch's exact one."""

    @pytest.mark.parametrize("q", [1, 2])
    def test_joint_entropy_search(self, q: int) -> None:
        model, exact = pair()
        given = optima(model)
        own, theirs = (
            qJointEntropySearch(m, *given, condition_noiseless=False) for m in (model, exact)
        )
        X = points(4, q)
        assert_close(own(X), theirs(X), 1e3)
        assert_gradient(lambda X: own(X).sum(), points(2, q))

    def test_joint_entropy_search_given_noiseless_optima(self) -> None:
        """Against dense algebra: gpytorch's fantasies of other noise have wrong means."""
        model, exact = pair()
        inputs, outputs = optima(model)
        search = qJointEntropySearch(model, inputs, outputs)
        X = points(4)
        posterior = search.conditional_model.posterior(X)
        prior, constant = exact.covar_module, exact.mean_module.constant
        noise = torch.full((16,), 0.05).double()
        noise[-1] = MIN_INFERRED_NOISE_LEVEL
        for i in range(3):
            given = torch.cat((exact.train_inputs[0], inputs[i : i + 1]))
            Y = torch.cat((exact.train_targets, outputs[i])) - constant
            gain = prior(X, given).to_dense() @ (prior(given).to_dense() + noise.diag()).inverse()
            covariance = prior(X).to_dense() - gain @ prior(given, X).to_dense()
            assert_close(posterior.mean[i].squeeze(-1), constant + gain @ Y)
            assert_close(posterior.variance[i].squeeze(-1), covariance.diagonal())
        assert_gradient(lambda X: search(X).sum(), points(2, 1))

    @pytest.mark.parametrize("function", [qMaxValueEntropy, qLowerBoundMaxValueEntropy])
    def test_max_value_entropy(self, function: type[AcquisitionFunction]) -> None:
        model, exact = pair()
        candidates, X, values = points(20), points(4, 1), []
        for each in (model, exact):
            torch.manual_seed(1)
            acquisition = function(each, candidates)
            assert torch.equal(acquisition.candidate_set[20:], exact.train_inputs[0])
            assert type(acquisition.candidate_set) is Tensor
            acquisition.posterior_max_values = torch.tensor([[1.6], [1.9], [2.3]]).double()
            values.append(acquisition(X).detach())
        assert_close(*values, 1e4)

    @pytest.mark.parametrize("kind", ["0", "LB", "LB2"])
    def test_multi_objective(self, kind: str) -> None:
        model, exact = pair(2)
        sets, values, boxes = fronts(model)
        X = points(4, 1)
        for build in (
            lambda m: qLowerBoundMultiObjectiveJointEntropySearch(
                m, sets, values, boxes, estimation_type=kind
            ),
            lambda m: qLowerBoundMultiObjectiveMaxValueEntropySearch(
                m, boxes, estimation_type=kind
            ),
        ):
            assert_close(build(model)(X), build(exact)(X), 1e4)

    def test_multi_objective_predictive_entropy_search(self) -> None:
        model, exact = pair(2)
        sets, X = fronts(model)[0], points(4, 1)
        own, theirs = (qMultiObjectivePredictiveEntropySearch(m, sets) for m in (model, exact))
        assert_close(own(X), theirs(X), 1e4)

    @pytest.mark.parametrize("transformed", [False, True])
    def test_proximal(self, transformed: bool) -> None:
        """Also where inputs are normalised: in those units, and in the inputs' own."""
        model, exact = pair(transform=Normalize(DIM) if transformed else None)
        X = points(4, 1)
        for own_units in (False, True):
            values = [proximal(LogExpectedImprovement(m, 0.5)) for m in (model, exact)]
            for value in values:
                value.transformed_weighting.fill_(not own_units)
            assert_close(values[0](X), values[1](X), 1e3)

    def test_proximal_of_two_outputs(self) -> None:
        objective = LinearMCObjective(torch.ones(2).double())
        X, sampler = points(4, 1), SobolQMCNormalSampler(torch.Size([64]), seed=1)
        own, theirs = (
            proximal(
                qLogExpectedImprovement(m, 0.5, sampler=deepcopy(sampler), objective=objective)
            )
            for m in pair(2)
        )
        assert_close(own(X), theirs(X), 1e3)

    def test_proximal_follows_the_last_observation(self) -> None:
        """Real or hypothetical; in a list of models too."""
        model, _ = pair()
        more, X = observations(2, DIM), points(4, 1)

        def weights(model: Model) -> Tensor:
            one = proximal(PosteriorMean(model))
            return one(X) / softplus(PosteriorMean(model)(X), beta=1.0)

        def expected(last: Tensor) -> Tensor:
            scaled = (X.squeeze(-2) - last) / torch.tensor([0.3, 0.5, 1.0]).double()
            return (-0.5 * scaled.square().sum(-1)).exp()

        conditioned = model.condition_on_observations(more.X[:1], more.Y[:1])
        model.update(more.X[1:], more.Y[1:])
        assert_close(weights(conditioned), expected(more.X[0]))
        assert_close(weights(model), expected(more.X[1]))

    @pytest.mark.integration
    def test_predictive_entropy_search(self) -> None:
        given, X = points(3), points(4, 1)
        own, theirs = (qPredictiveEntropySearch(m, given) for m in pair())
        assert_close(own(X), theirs(X), 1e4)

    def test_optima_in_many_dimensions_have_the_exact_ones_distribution(self) -> None:
        """Means of the largest values of 200 functions, within six standard errors."""
        model, exact = pair()
        X = points(60)
        drawn = [
            get_matheron_path_model(m, torch.Size([200]))(X).amax((-2, -1)).detach()
            for m in (model, exact)
        ]
        error = (drawn[0].mean() - drawn[1].mean()).abs()
        spread = sum(float(d.var()) for d in drawn) / 200.0
        assert float(error) <= 6.0 * spread**0.5


class TestPaths:
    def test_of_several_outputs(self) -> None:
        model, exact = pair(2)
        X = points(5)
        for each in (model, exact):
            path = draw_matheron_paths(each, torch.Size([3]))
            assert path(X).shape == (3, 2, 5)
            assert_close(path(X.unsqueeze(-3)), path(X))
        with pytest.raises(BotorchTensorDimensionError, match=r"pass X.unsqueeze\(-3\)"):
            draw_matheron_paths(model, torch.Size([3]))(points(4, 5))

    def test_in_a_list_of_models(self) -> None:
        models = ModelListGP(pair()[0], pair()[1])
        assert get_matheron_path_model(models, torch.Size([3]))(points(5)).shape == (3, 5, 2)

    def test_prior_sampler_is_refused(self) -> None:
        with pytest.raises(UnsupportedError, match="without prior_sampler"):
            draw_matheron_paths(
                pair()[0],
                torch.Size([3]),
                prior_sampler=lambda **options: draw_kernel_feature_paths(**options),
            )

    def test_in_six_dimensions(self) -> None:
        X = torch.rand(40, 6).double()
        model = OSGPR(X, (3.0 * X).sin().sum(-1, keepdim=True)).eval()
        bounds = torch.tensor([[0.0] * 6, [1.0] * 6]).double()
        best, values = get_optimal_samples(model, bounds, 2, raw_samples=64, num_restarts=2)
        assert best.shape == (2, 6)
        assert bool(values.isfinite().all())
