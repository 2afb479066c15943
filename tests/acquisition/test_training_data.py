"""Functions of BoTorch that read training inputs and outcomes, of models that keep few or none."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.acquisition import (
    LogExpectedImprovement,
    PosteriorMean,
    ProximalAcquisitionFunction,
    qLogExpectedImprovement,
    qLowerBoundMaxValueEntropy,
)
from botorch.acquisition.multi_step_lookahead import make_best_f, qMultiStepLookahead
from botorch.acquisition.predictive_entropy_search import qPredictiveEntropySearch
from botorch.cross_validation import efficient_loo_cv, loo_cv
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.exceptions.warnings import BotorchWarning
from botorch.models import ModelListGP
from botorch.models.model import Model
from botorch.models.transforms.input import AppendFeatures, Normalize
from botorch.models.utils.assorted import get_data_for_optimization_help
from botorch.optim import optimize_acqf
from botorch.optim.initializers import sample_points_around_best
from botorch.optim.utils import get_X_baseline
from botorch.optim.utils.model_utils import get_data_loader
from botorch.sampling.normal import SobolQMCNormalSampler
from botorch.utils.evaluation import compute_in_sample_model_fit_metric
from torch import Tensor

from bo_stream import OSGPR, WISKI, DirichletWISKI, HeteroscedasticWISKI
from bo_stream.models.base import StreamingGP
from bo_stream.models.botorch_hooks import LATEST
from bo_stream.testing.streams import assert_close
from tests.acquisition.test_entropy_searches import BOX, DIM, MODELS, moments, points
from tests.support.problems import observations

LABELLED = "OSVGP of labels"

pytestmark = [
    pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid"),
    pytest.mark.filterwarnings("ignore:Data \\(outcome observations\\) is not standardized"),
]


def outcomes(name: str, Y: Tensor) -> Tensor:
    return (Y > 4.8).double() if name == LABELLED else Y


def proximal(model: Model) -> ProximalAcquisitionFunction:
    base = LogExpectedImprovement(model, 4.0)
    return ProximalAcquisitionFunction(base, torch.ones(DIM).double(), beta=1.0)


def around_best(model: Model) -> Tensor:
    return optimize_acqf(
        PosteriorMean(model),
        BOX,
        q=1,
        num_restarts=2,
        raw_samples=8,
        options={"sample_around_best": True, "maxiter": 3},
    )[0]


class TestTrainInputs:
    @pytest.mark.matrix
    @pytest.mark.parametrize("name", MODELS)
    def test_are_the_latest(self, name: str) -> None:
        data, more = observations(15, DIM), observations(LATEST, DIM)
        model = MODELS[name](data)
        assert torch.equal(model.train_inputs[0], data.X)
        model.update(more.X[:5], outcomes(name, more.Y[:5]))
        assert torch.equal(model.train_inputs[0], torch.cat((data.X, more.X[:5])))
        model.update(more.X[5:], outcomes(name, more.Y[5:]))
        assert torch.equal(model.train_inputs[0], more.X)

    def test_one_at_a_time(self) -> None:
        data = observations(LATEST + 40, DIM)
        model = MODELS["OSGPR"](data[:1])
        for i in range(1, len(data)):
            model.update(*data[slice(i, i + 1)].astuple())
            assert torch.equal(model.train_inputs[0], data.X[: i + 1][-LATEST:])
        parts = model._latest.parts
        assert sum(part.untyped_storage().nbytes() for part in parts) <= 2 * LATEST * DIM * 8

    @pytest.mark.parametrize("name", MODELS)
    def test_a_loop_of_gpytorch_s_is_told_of_the_objective(self, name: str) -> None:
        data = observations(15, DIM)
        model = MODELS[name](data)
        model.train()
        with pytest.raises(UnsupportedError, match=r"minimise model.compute_custom_loss\(mll\)"):
            model(data.X)
        model.eval()
        mean = model(data.X).mean
        assert mean.shape[-1] == len(data.X)

    def test_are_copies(self) -> None:
        data = observations(15, DIM)
        model, X = MODELS["WISKI"](data), data.X.clone()
        data.X.zero_()
        model.train_inputs[0][0].zero_()
        assert torch.equal(model.train_inputs[0][1:], X[1:])

    def test_shapes(self) -> None:
        data = observations(6, DIM, 2, (3,))
        model = WISKI(*data.astuple(), grid_size=6)
        assert model.train_inputs[0].shape == (3, 2, 6, DIM)
        assert torch.equal(model.train_inputs[0][:, 1], data.X)
        assert model.subset_output([1]).train_inputs[0].shape == (3, 6, DIM)
        assert WISKI(data.X[0, :0], data.Y[0, :0, :1]).train_inputs[0].shape == (0, DIM)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_survive_a_file_and_a_copy(self, dtype: torch.dtype, tmp_path: Path) -> None:
        data = observations(15, DIM, dtype=dtype)
        model = OSGPR(data.X, data.Y)
        model.save(tmp_path / "model.pt")
        for same in (OSGPR.load(tmp_path / "model.pt"), deepcopy(model)):
            assert same.train_inputs[0].dtype == dtype
            assert torch.equal(same.train_inputs[0], data.X)
        assert model.to(torch.float64).train_inputs[0].dtype == torch.float64

    def test_taken_out_and_in_again(self) -> None:
        data = observations(15, DIM)
        model = MODELS["WISKI"](data)
        model.update(data.X[3:4], data.Y[3:4])
        assert torch.equal(model.retract(data.X[3:4], data.Y[3:4]).train_inputs[0], data.X)
        model.retract(data.X[[14, 0]], data.Y[[14, 0]])
        assert torch.equal(model.train_inputs[0], data.X[1:14])
        assert torch.equal(model.forget(0.1).train_inputs[0], data.X[1:14])
        assert model.clear().train_inputs[0].shape == (0, DIM)
        model.update(data.X[:2], data.Y[:2])
        assert torch.equal(model.train_inputs[0], data.X[:2])

    def test_withdrawn(self) -> None:
        data = observations(30, DIM)
        transform = Normalize(DIM, bounds=2.0 * BOX)
        model = HeteroscedasticWISKI(
            data.X[:20], data.Y[:20], grid_size=7, rounds=0, input_transform=transform
        )
        entry = model.observe(data.X[20:25], data.Y[20:25])
        model.observe(data.X[25:], data.Y[25:])
        model.withdraw(entry)
        assert torch.equal(model.train_inputs[0], torch.cat((data.X[:20], data.X[25:])))

    def test_merged(self) -> None:
        data = observations(LATEST + 10, DIM)
        one, other = MODELS["ClusteredGP"](data[:10]), MODELS["ClusteredGP"](data[10:])
        empty = MODELS["WISKI"](data[:10]).clear()
        last = torch.cat((data.X[10:], data.X[:10]))[-LATEST:]
        with pytest.warns(UserWarning, match="nearest centres"):
            assert torch.equal(one.merge(other).train_inputs[0], last)
        assert torch.equal(empty.merge(MODELS["WISKI"](data[:10])).train_inputs[0], data.X[:10])

    def test_a_refused_update_or_merge_changes_nothing(self) -> None:
        data = observations(15, DIM)
        model = MODELS["OSGPR"](data)
        with pytest.raises(UnsupportedError, match="merge"):
            model.merge(MODELS["WISKI"](data))
        with pytest.raises(InputDataError, match="Expected Y to be finite"):
            model.update(data.X, data.Y * torch.nan)
        assert torch.equal(model.train_inputs[0], data.X)

    def test_follow_no_gradient(self) -> None:
        data = observations(15, DIM)
        model = MODELS["OSGPR"](data).update(data.X.requires_grad_(), data.Y)
        conditioned = model.condition_on_observations(data.X[:1], data.Y[:1])
        for each in (model, conditioned):
            assert not each.train_inputs[0].requires_grad

    def test_of_fantasies(self) -> None:
        """With the hypothetical inputs, as BoTorch's; its functions refuse the batch themselves."""
        data, X = observations(15, DIM, 2), points(5, 2)
        model = MODELS["OSGPR"](data).eval()
        fantasies = model.fantasize(X, SobolQMCNormalSampler(torch.Size([4]), seed=0))
        found = fantasies.train_inputs[0]
        assert found.shape == (4, 5, 2, 17, DIM)
        assert torch.equal(found[3, 1, 0], torch.cat((data.X, X[1])))
        assert torch.equal(model.train_inputs[0][0], data.X)
        with pytest.raises(NotImplementedError, match="fantasized models"):
            qPredictiveEntropySearch(fantasies.subset_output([0]), points(3))

    def test_of_hypothetical_inputs_without_the_appended_features(self) -> None:
        data = observations(15, DIM)
        features = torch.tensor([[0.2], [0.7]]).double()
        appended = AppendFeatures(features, transform_on_fantasize=True)
        model = OSGPR(data.X, data.Y, input_transform=appended)
        conditioned = model.condition_on_observations(points(1)[:, :2], data.Y[:2])
        assert torch.equal(conditioned.train_inputs[0], data.X)

    def test_before_their_transform(self) -> None:
        data = observations(15, DIM)
        model = OSGPR(10.0 * data.X, data.Y, input_transform=Normalize(DIM)).eval()
        assert torch.equal(model.train_inputs[0], 10.0 * data.X)
        assert torch.equal(get_X_baseline(PosteriorMean(model)), 10.0 * data.X)
        search = qLowerBoundMaxValueEntropy(model, 10.0 * points(20))
        assert torch.equal(search.candidate_set[20:], 10.0 * data.X)

    def test_last_input_of_a_batch_is_refused(self) -> None:
        model = WISKI(*observations(6, DIM, 1, (3,)).astuple(), grid_size=6).eval()
        with pytest.raises(UnsupportedError, match="PenalizedAcquisitionFunction"):
            model.train_inputs[0][-1]

    def test_of_an_empty_model(self) -> None:
        """Searches start without a baseline, entropies compare with no point."""
        data = observations(15, DIM)
        model = WISKI(data.X[:0], data.Y[:0], bounds=BOX).eval()
        with pytest.warns(BotorchWarning, match="Failed to extract X_baseline"):
            assert sample_points_around_best(PosteriorMean(model), 4, 0.1, BOX) is None
        assert bool(qPredictiveEntropySearch(model, points(3))(points(2, 1)).isfinite().all())
        assert bool(qLowerBoundMaxValueEntropy(model, points(20))(points(2, 1)).isfinite().all())
        with pytest.raises(UnsupportedError, match="PenalizedAcquisitionFunction"):
            proximal(model)(points(2, 1))

    def test_of_a_model_of_classes(self) -> None:
        data = observations(15, DIM)
        model = DirichletWISKI(data.X, (data.Y > 4.8).long(), grid_size=6, bounds=BOX)
        model.update(data.X[:2], torch.tensor([2, 0]))
        assert torch.equal(model.train_inputs[0][2], torch.cat((data.X, data.X[:2])))


class TestSearches:
    @pytest.mark.matrix
    @pytest.mark.parametrize("name", MODELS)
    def test_start_around_the_best_of_the_latest(self, name: str) -> None:
        model = MODELS[name](observations(15, DIM)).eval()
        before = moments(model)
        assert torch.equal(get_X_baseline(PosteriorMean(model)), model.train_inputs[0])
        assert bool(around_best(model).isfinite().all())
        assert all(map(torch.equal, moments(model), before))


READS_OUTCOMES: dict[str, tuple[Callable[[Model, Path], Any], str]] = {
    "make_best_f": (lambda m, p: make_best_f(m, points(1)), "lambda model, X: {'best_f'"),
    "loo_cv": (lambda m, p: loo_cv(m), "leave_one_out"),
    "efficient_loo_cv": (lambda m, p: efficient_loo_cv(m, False), "leave_one_out"),
    "AIC": (
        lambda m, p: compute_in_sample_model_fit_metric(m, "AIC"),
        "model.log_marginal_likelihood",
    ),
    "get_data_loader": (lambda m, p: get_data_loader(m, 4), "hand it your own"),
    "get_data_for_optimization_help": (
        lambda m, p: get_data_for_optimization_help(m, str(p / "help.json")),
        "hand it your own",
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
class TestOutcomes:
    """What cannot be had without outcomes says so, and changes nothing."""

    @pytest.mark.parametrize("function", READS_OUTCOMES)
    @pytest.mark.parametrize("outputs", [1, 2])
    def test_are_refused(self, name: str, function: str, outputs: int, tmp_path: Path) -> None:
        if name == LABELLED and outputs > 1:
            pytest.skip("labels of one output")
        model = MODELS[name](observations(15, DIM, outputs)).eval()
        before, (build, advice) = moments(model), READS_OUTCOMES[function]
        with pytest.raises(UnsupportedError) as refused:
            build(model, tmp_path)
        assert advice in str(refused.value)
        assert "\n" not in str(refused.value)
        assert all(map(torch.equal, moments(model), before))


class TestAdvice:
    """What is advised in place of a function works."""

    def test_in_place_of_make_best_f(self) -> None:
        data = observations(15, DIM)
        model = MODELS["OSGPR"](data).eval()
        X_observed, shapes = data.X, []

        def best(model: Model, X: Tensor) -> dict[str, Tensor]:
            value = model.posterior(X_observed).mean.amax((-2, -1))
            shapes.append(value.shape)
            return {"best_f": value}

        lookahead = qMultiStepLookahead(
            model,
            batch_sizes=[1],
            samplers=[SobolQMCNormalSampler(torch.Size([2]), seed=0)],
            valfunc_cls=[qLogExpectedImprovement, qLogExpectedImprovement],
            valfunc_argfacs=[best, best],
            inner_mc_samples=[8, 8],
        )
        X = points(3, lookahead.get_augmented_q_batch_size(1)).requires_grad_()
        value = lookahead(X)
        (gradient,) = torch.autograd.grad(value.sum(), X)
        assert shapes == [(), (2, 3)]
        assert value.shape == (3,)
        assert bool(value.isfinite().all() and gradient.isfinite().all())

    def test_outcomes_still_give_dtype_device_and_length(self) -> None:
        model: StreamingGP = MODELS["OSGPR"](observations(15, DIM))
        assert len(model.train_targets) == 0
        assert torch.ones(2).to(model.train_targets).dtype == torch.float64
        assert "[]" in repr(model.train_targets)

    def test_a_list_of_models(self) -> None:
        data = observations(15, DIM)
        models = ModelListGP(MODELS["OSGPR"](data), MODELS["WISKI"](data))
        assert all(torch.equal(X, data.X) for (X,) in models.train_inputs)
        X = points(4, 1)
        found = proximal(ModelListGP(models.models[0]))(X)
        assert_close(found, proximal(models.models[0])(X))
