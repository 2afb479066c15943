"""A merge that fails leaves a model as it was, its reference outcome and noise floor included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.models.transforms.input import Normalize
from botorch.models.transforms.outcome import Log, Standardize
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import GaussianLikelihood, LaplaceLikelihood

from bo_stream import WISKI, DirichletWISKI, HeteroscedasticWISKI
from bo_stream.models.base import StreamingGP
from bo_stream.models.clustered import inference as cluster_inference
from bo_stream.models.clustered.clustered import ClusteredGP
from bo_stream.models.decoupled.decoupled import DecoupledGP
from bo_stream.models.inducing.osgpr import OSGPR, OSVGP
from bo_stream.models.local import LocalGP
from bo_stream.models.quadruply_stochastic.qsgp import QSGP, QSRVM
from bo_stream.testing.streams import assert_untouched, fingerprint
from tests.support.problems import observations

Build = Callable[..., StreamingGP]


def by_parts(*groups: tuple[int, ...]) -> Any:
    return sum(
        (RBFKernel(active_dims=group) for group in groups[1:]), RBFKernel(active_dims=groups[0])
    )


def far(X: Any, Y: Any) -> WISKI:
    return WISKI(X + 1e3, Y)


def grid(X: Any, Y: Any) -> WISKI:
    return WISKI(X, Y, bounds=torch.tensor([[0.0, 0.0], [1.0, 1.0]]))


def of_other_parts(X: Any, Y: Any) -> WISKI:
    return WISKI(X, Y, covar_module=by_parts((0,), (1,)))


def noise_of_parts(X: Any, Y: Any) -> HeteroscedasticWISKI:
    return HeteroscedasticWISKI(X, Y, noise_covar_module=by_parts((0,), (1,)))


def known_noise(X: Any, Y: Any) -> OSGPR:
    return OSGPR(X, Y, torch.full_like(Y, 0.1))


def logarithms(X: Any, Y: Any) -> LocalGP:
    return LocalGP(X, Y, outcome_transform=Log())


def normalised(X: Any, Y: Any) -> ClusteredGP:
    return ClusteredGP(X, Y, input_transform=Normalize(2, bounds=torch.tensor([[0.0, 0], [2, 2]])))


def sites(X: Any, Y: Any) -> OSVGP:
    return OSVGP(X, Y, GaussianLikelihood(), outcome_transform=Standardize(m=1), hyper_steps=0)


def other_sites(X: Any, Y: Any) -> OSVGP:
    return OSVGP(X, Y, LaplaceLikelihood(), outcome_transform=Standardize(m=1))


def two_labels(X: Any, Y: Any) -> DirichletWISKI:
    return DirichletWISKI(X, (Y > 3.0).to(Y), num_classes=2)


def more_labels(X: Any, Y: Any) -> DirichletWISKI:
    return DirichletWISKI(X, torch.arange(len(Y)).remainder(3).unsqueeze(-1).to(Y))


def two_outputs(X: Any, Y: Any) -> WISKI:
    return WISKI(X, torch.cat((Y, -Y), -1))


def fast(of: type[QSGP | QSRVM]) -> Build:
    return lambda X, Y: of(X, Y, update_steps=1, outcome_transform=None)


def decoupled(X: Any, Y: Any) -> DecoupledGP:
    return DecoupledGP(X, Y, num_mean=8, num_covar=5, outcome_transform=None)


@dataclass(frozen=True)
class Failure:
    """A merge that fails.

    Attributes:
        mine: The model that others are merged into.
        theirs: Another one.
        error: What is raised.
        message: A part of it.
    """

    mine: Build
    theirs: Build
    error: type[Exception]
    message: str


FAILURES = {
    "WISKI, far inputs": Failure(grid, far, InputDataError, "too far outside"),
    "WISKI, other groups": Failure(grid, of_other_parts, UnsupportedError, "groups of inputs"),
    "WISKI, another number of outputs": Failure(
        WISKI, two_outputs, UnsupportedError, "number of outputs: 1 and 2"
    ),
    "WISKI, another class": Failure(grid, OSGPR, UnsupportedError, "class: "),
    "HeteroscedasticWISKI, other groups of the noise": Failure(
        HeteroscedasticWISKI, noise_of_parts, UnsupportedError, "groups of inputs"
    ),
    "DirichletWISKI, more labels": Failure(two_labels, more_labels, UnsupportedError, "classes"),
    "OSGPR, known noise": Failure(OSGPR, known_noise, UnsupportedError, "noise"),
    "OSVGP, another standardisation": Failure(sites, sites, UnsupportedError, "standardised alike"),
    "OSGPR, another class": Failure(OSGPR, WISKI, UnsupportedError, "class: "),
    "OSVGP, another likelihood": Failure(sites, other_sites, UnsupportedError, "likelihood"),
    "LocalGP, another transform": Failure(LocalGP, logarithms, UnsupportedError, "transform"),
    "ClusteredGP, another transform": Failure(
        ClusteredGP, normalised, UnsupportedError, "transform"
    ),
    "ClusteredGP, no memory": Failure(ClusteredGP, ClusteredGP, ValueError, "memory"),
    "QSGP": Failure(fast(QSGP), fast(QSGP), UnsupportedError, "cannot merge"),
    "QSRVM": Failure(fast(QSRVM), fast(QSRVM), UnsupportedError, "cannot merge"),
    "DecoupledGP": Failure(decoupled, decoupled, UnsupportedError, "cannot be merged"),
}


@pytest.mark.filterwarnings("ignore:Data ")
@pytest.mark.parametrize("rows", [0, 6])
@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_merge_changes_nothing(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure, data = FAILURES[name], observations(12)
    model = failure.mine(data.X[:rows], data.Y[:rows])
    other = failure.theirs(data.X, 5.0 + 3.0 * data.Y)
    model.posterior(data.X)
    before, theirs = fingerprint(model), fingerprint(other)
    if "memory" in name:
        monkeypatch.setattr(cluster_inference, "MEMORY_LIMIT_GIB", 1e-9)
    with pytest.raises(failure.error, match=failure.message):
        model.merge(other)
    assert_untouched(model, before)
    assert_untouched(other, theirs)
