"""The default kernel of maps: its formula, and the models that it is for."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError
from botorch.fit import fit_gpytorch_mll
from botorch.models.transforms.input import ChainedInputTransform
from gpytorch.kernels import AdditiveKernel
from gpytorch.likelihoods import BernoulliLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from bo_stream import OSGPR, OSVGP, WISKI, AutoGP, ProductKernelWarning, mapping
from bo_stream.mapping import (
    empirical_logits,
    map_inputs,
    map_kernel,
    screen_covariates,
    survey_kernel,
)


def surveyed(n: int = 60) -> tuple[Tensor, Tensor]:
    """Sites about the date line with three covariates, of which the first matters."""
    X = torch.rand(n, 5, dtype=torch.float64)
    X[:, :2] += torch.tensor([179.0, -17.0])
    Y = 4.0 * (X[:, 2:3] - 0.5) + torch.sin(6.0 * X[:, :1])
    return X, Y + 0.1 * torch.randn(n, 1, dtype=torch.float64)


def test_the_kernel_is_the_documented_sum() -> None:
    X, _ = surveyed()
    kernel = map_kernel(X, linear=[4])
    inputs = map_inputs(X)(X)
    a, b = inputs[:1], inputs[1:2]
    places = inputs[:, :2] - inputs[:, :2].mean(0)
    length = 0.3 * float(places.square().sum(-1).mean().sqrt())
    near = math.sqrt(3.0) * float((a - b)[:, :2].norm()) / length
    expected = 0.5 * (1.0 + near) * math.exp(-near)
    for column in (2, 3):
        far = math.sqrt(5.0) * float((a - b)[:, column].abs()) / 4.0
        expected += 0.25 * (1.0 + far + far**2 / 3.0) * math.exp(-far)
    expected += float(a[0, 4] * b[0, 4])
    assert float(kernel(a, b).to_dense().detach()) == pytest.approx(expected, rel=1e-6)


def test_the_kernel_of_surveys_has_a_part_of_each_site() -> None:
    X, _ = surveyed()
    inputs = map_inputs(X)(X)
    kernel = survey_kernel(X)
    *shared, own = kernel.kernels
    spread = AdditiveKernel(*shared)(inputs).to_dense()
    rest = (kernel(inputs).to_dense() - spread).detach()
    assert torch.allclose(rest, 0.05 * torch.eye(len(X)).to(X), atol=1e-9)
    again = torch.cat((inputs[:3], inputs[:3] + 2e-6))
    assert torch.equal(
        own(again, inputs[1:2]).to_dense().detach()[:, 0] > 0.0, torch.arange(6) == 1
    )
    total = sum(float(part.outputscale.detach()) for part in shared)
    assert total == pytest.approx(2.0)
    places = inputs[:, :2] - inputs[:, :2].mean(0)
    length = 0.3 * float(places.square().sum(-1).mean().sqrt())
    apart = float((inputs[0] - inputs[1])[:2].norm())
    near = shared[0](inputs[:1], inputs[1:2]).to_dense().detach()
    assert float(near) == pytest.approx(math.exp(-apart / length), rel=1e-6)


def test_a_map_without_covariates_has_a_kernel() -> None:
    X, _ = surveyed()
    (position,) = map_kernel(X[:, :2], nu=2.5).kernels
    assert float(position.outputscale.detach()) == pytest.approx(0.5)
    position, _ = survey_kernel(X[:, :2]).kernels
    assert float(position.outputscale.detach()) == pytest.approx(1.0)


@pytest.mark.parametrize("variance", [0, -1.0, math.inf, math.nan])
def test_the_variance_is_positive(variance: float) -> None:
    with pytest.raises(ValueError, match="variance to be positive and finite, got"):
        map_kernel(surveyed()[0], variance=variance)


def test_linear_columns_are_covariates() -> None:
    with pytest.raises(ValueError, match="linear among the covariates"):
        map_kernel(surveyed()[0], linear=[1])


@pytest.mark.parametrize("family", [OSGPR, AutoGP, WISKI, OSVGP])
def test_models_take_degrees(family: type, tmp_path: Path) -> None:
    X, Y = surveyed()
    given = {"covar_module": map_kernel(X), "input_transform": map_inputs(X)}
    if family is OSVGP:
        Y, given = (Y > 0.0).double(), given | {"likelihood": BernoulliLikelihood()}
    product = pytest.warns(ProductKernelWarning) if family is WISKI else nullcontext()
    with product:
        model = family(X[:40], Y[:40], **given)
    model.update(X[40:], Y[40:])
    if family is OSGPR:
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
        fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 3}})
        assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())
    site = X[:3].clone().requires_grad_()
    mean = model.posterior(site).mean
    (slope,) = torch.autograd.grad(mean.sum(), site)
    assert bool((slope.isfinite() & (slope != 0.0)).all())
    model.save(tmp_path / "map.bostream")
    again = family.load(tmp_path / "map.bostream")
    torch.testing.assert_close(again.posterior(X[:3]).mean, mean.detach())


def test_a_model_with_a_linear_part_is_saved(tmp_path: Path) -> None:
    X, Y = surveyed()
    kernel = map_kernel(X, linear=[4])
    model = OSGPR(X, Y, covar_module=kernel, input_transform=map_inputs(X))
    model.save(tmp_path / "map.bostream")
    assert OSGPR.load(tmp_path / "map.bostream").num_observations == len(X)


@pytest.mark.integration
def test_screening_finds_the_covariate_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fits start from another one's end, and end as if they did not."""
    names, starts, ends = ["lon", "lat", "rain", "noise"], list[float](), list[float]()
    random = torch.Generator().manual_seed(0)
    X = torch.rand(50, 4, dtype=torch.float64, generator=random)
    Y = 4.0 * X[:, 2:3] + torch.sin(6.0 * X[:, :1])
    Y = Y + 0.3 * torch.randn(50, 1, dtype=torch.float64, generator=random)
    fit = mapping.fit_gpytorch_mll

    def recording(mll: ExactMarginalLogLikelihood, **options: Any) -> None:
        for values, step in ((starts, lambda: None), (ends, lambda: fit(mll, **options))):
            step()
            values.append(float(mll.model.covar_module.kernels[0].outputscale.detach()))

    monkeypatch.setattr(mapping, "fit_gpytorch_mll", recording)
    table = screen_covariates(X, Y, names=names)
    assert isinstance(table, pd.DataFrame)
    assert table.index[0] == "rain"
    assert float(table.loc["rain", ["gain_alone", "gain_last"]].min()) > 10.0
    assert float(table.loc["noise", "gain_last"]) < float(table.loc["rain", "gain_last"]) / 2
    none, every = ends[:2]  # then each covariate alone, and without it
    assert starts[1:] == [none, none, every, none, every]
    fit_model = mapping._fit
    monkeypatch.setattr(mapping, "_fit", lambda *given: fit_model(*given[:-1], None))
    again = screen_covariates(X, Y, names=names)
    pd.testing.assert_frame_equal(again, table, atol=0.05, rtol=1e-3)


def test_warnings_of_a_fit_to_screen_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    X, Y = surveyed(12)
    transform, said = mapping.map_inputs, []

    def warning(sites: Tensor, **options: Any) -> ChainedInputTransform:
        inputs = transform(sites, **options)
        forward = inputs.forward

        def speaking(X: Tensor) -> Tensor:
            said.append(1)
            warnings.warn(f"jitter {len(said)}", NumericalWarning, stacklevel=1)
            return forward(X)

        inputs.forward = speaking  # type: ignore[method-assign]
        return inputs

    monkeypatch.setattr(mapping, "map_inputs", warning)
    assert len(screen_covariates(X[:, :3], Y)) == 1
    assert said


def test_rows_and_names_to_screen_belong_together() -> None:
    X, Y = surveyed()
    with pytest.raises(BotorchTensorDimensionError, match="names of columns, got 1"):
        screen_covariates(X, Y, names=["rain"])
    with pytest.raises(BotorchTensorDimensionError, match="`n x 1`"):
        screen_covariates(X, Y.squeeze(-1))


def test_empirical_logits_have_their_variances() -> None:
    logit, variance = empirical_logits(torch.tensor([0.0, 5.0]), torch.tensor([10.0, 10.0]))
    torch.testing.assert_close(logit, torch.tensor([math.log(0.5 / 10.5), 0.0]))
    torch.testing.assert_close(variance, torch.tensor([2.0 + 1.0 / 10.5, 2.0 / 5.5]))
