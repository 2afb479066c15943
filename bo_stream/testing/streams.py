"""Comparisons of models and their posteriors, and the streams that laws are checked on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import torch
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.posteriors.posterior import Posterior
from botorch.posteriors.transformed import TransformedPosterior
from botorch.sampling.normal import SobolQMCNormalSampler
from gpytorch.distributions import MultitaskMultivariateNormal
from torch import Tensor

from bo_stream.models.base import StreamingGP
from bo_stream.storage.trusted import Trusted
from bo_stream.tensors import map_tensors

TOLERANCE: dict[torch.dtype, float] = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Two ways to compute the same number, relative to its scale."""

GRADIENT_TOLERANCE = 1e-6
"""An analytic gradient against central differences in float64, relative to the largest entry."""

manual_seed: Callable[[int], Any] = (
    torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
)
"""Seeds torch's generators. Without a GPU ``torch.manual_seed`` records a stack trace for each kind
of device that is not there."""


# --- expectations -------------------------------------------------------------------------------


def expect(condition: bool | Tensor, message: str) -> None:
    """Raise AssertionError with a message unless a condition holds, under ``python -O`` too."""
    if not bool(condition):
        raise AssertionError(message)


@contextmanager
def refused(*errors: type[Exception], about: str = "") -> Iterator[None]:
    """Expect that what is done inside raises one of some errors.

    Args:
        errors: Of which one must be raised; any other passes through.
        about: Regular expression that its message must hold.
    """
    names = " or ".join(each.__name__ for each in errors)
    try:
        yield
    except errors as error:
        found = re.search(about, str(error)) is not None
        expect(found, f"Expected an error whose message matches {about!r}, got: {error}")
    else:
        raise AssertionError(f"Expected {names}, got no error.")


def assert_close(actual: Tensor, expected: Tensor, factor: float = 1.0) -> None:
    """Compare values by the actual dtype's tolerance; ``expected`` may be of a higher precision.

    Entries may differ by ``factor`` tolerances, relative to the larger of 1 and the entry's size.
    """
    tolerance = factor * TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance)


def assert_count(model: StreamingGP, expected: float) -> None:
    """Compare the number of observations in memory with another, to 1e-6 of it."""
    found = model.num_observations
    message = f"Expected num_observations of {expected:g}, got {found:g}."
    expect(abs(found - expected) <= 1e-6 * max(abs(expected), 1e-6), message)


# --- posteriors ---------------------------------------------------------------------------------


def gaussian(posterior: Posterior) -> GPyTorchPosterior:
    """Return the normal posterior before outcomes were untransformed."""
    while isinstance(posterior, TransformedPosterior):
        posterior = posterior._posterior
    if not isinstance(posterior, GPyTorchPosterior):
        kind = type(posterior).__name__
        raise AssertionError(f"Expected a posterior of normal standardised outcomes, got a {kind}.")
    return posterior


def centre(posterior: Posterior) -> Tensor:
    """Return the outcomes at the normal posterior's mean: the posterior's median."""
    if isinstance(posterior, TransformedPosterior):
        return posterior._sample_transform(centre(posterior._posterior))
    return gaussian(posterior).mean


def joint_covariance(posterior: GPyTorchPosterior) -> Tensor:
    """Return a posterior's covariance as ``... x m x t x t``; outputs must be independent."""
    distribution = posterior.distribution
    covariance: Tensor = distribution.covariance_matrix
    if not isinstance(distribution, MultitaskMultivariateNormal):
        return covariance.unsqueeze(-3)
    t, m = distribution.event_shape
    if distribution._interleaved:
        blocks = covariance.unflatten(-1, (t, m)).unflatten(-3, (t, m))
    else:
        blocks = covariance.unflatten(-1, (m, t)).unflatten(-3, (m, t))
        blocks = blocks.transpose(-1, -2).transpose(-3, -4)
    own = torch.stack([blocks[..., :, a, :, a] for a in range(m)], -3)
    between = [blocks[..., :, a, :, b] for a in range(m) for b in range(m) if a != b]
    dependent = any(bool(block.any()) for block in between)
    expect(not dependent, "Expected outputs that are independent, got a covariance between two.")
    return own


def moments(model: StreamingGP, X: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of the normal posterior, detached."""
    posterior = gaussian(model.posterior(X))
    return posterior.mean.detach(), joint_covariance(posterior).detach()


def assert_same_posterior(
    a: StreamingGP, b: StreamingGP, X: Tensor, bits: bool = False, factor: float = 1.0
) -> None:
    """Compare mean and covariance at X, to the tolerance or to the bit."""
    assert_same_moments(moments(a, X), moments(b, X), bits, factor)


def assert_same_moments(
    actual: tuple[Tensor, Tensor],
    expected: tuple[Tensor, Tensor],
    bits: bool = False,
    factor: float = 1.0,
) -> None:
    """Compare means and covariances, to the tolerance or to the bit.

    CUDA adds rows to a memory in any order, so that there no two updates are equal to the bit.
    """
    for name, ours, theirs in zip(("mean", "covariance"), actual, expected, strict=True):
        if bits and not ours.is_cuda:
            if not torch.equal(ours, theirs):  # a message of numbers takes as long as an update
                raise AssertionError(f"Expected an equal posterior {name}: {ours}, {theirs}.")
        else:
            assert_close(ours, theirs, factor)


def assert_same_model(a: StreamingGP, b: StreamingGP, X: Tensor, factor: float = 1.0) -> None:
    """Compare posterior, marginal likelihood and count."""
    assert_same_posterior(a, b, X, factor=factor)
    dtype = X.dtype
    ours, theirs = (m.log_marginal_likelihood().detach().to(dtype) for m in (a, b))
    assert_close(ours, theirs, factor=10 * factor)
    assert_count(a, b.num_observations)


def refreshed(model: StreamingGP) -> StreamingGP:
    """Return the model once more standardised by all its outcomes, as a refit does it."""
    model.train()
    model.eval()
    return model


# --- all that a model holds ---------------------------------------------------------------------


_LEAVES = (Tensor, int, float, str, type(None))


def contents(value: Any, cached: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield every tensor and every number that an object holds, wherever it is.

    Also what frozen dataclasses have cached of their fields, unless not ``cached``.
    """
    pending, seen = [("", value)], set[int]()
    while pending:
        path, value = pending.pop()
        if isinstance(value, _LEAVES):
            yield path, value
        elif id(value) not in seen and not isinstance(value, type):
            seen.add(id(value))
            parts = getattr(value, "__dict__", {})
            if isinstance(value, dict | list | tuple):
                parts = value if isinstance(value, dict) else dict(enumerate(value))
            settings = getattr(value, "__dataclass_params__", None)
            if not cached and settings is not None and settings.frozen:
                parts = {each.name: parts[each.name] for each in fields(value)}
            pending += [(f"{path}.{name}", part) for name, part in reversed(parts.items())]


def fingerprint(model: StreamingGP) -> dict[str, Any]:
    """Copy everything in a model but what follows from the rest."""
    return {
        path: value.detach().clone() if isinstance(value, Tensor) else value
        for path, value in contents(model, cached=False)
    }


def assert_untouched(model: StreamingGP, before: dict[str, Any]) -> None:
    """Check that everything in a model is as it was, to the bit."""
    assert_same_contents(fingerprint(model), before)


def assert_same_contents(after: dict[str, Any], before: dict[str, Any]) -> None:
    """Check that two fingerprints are equal, to the bit."""
    changed = sorted(after.keys() ^ before.keys())
    expect(not changed, f"Expected a model that is as it was; what it holds now or then: {changed}")
    for path, value in before.items():
        if isinstance(value, Tensor):
            same = isinstance(after[path], Tensor) and torch.equal(value, after[path])
        else:
            same = value == after[path] or (value != value and after[path] != after[path])
        if not same:
            raise AssertionError(f"{path} changed from {value} to {after[path]}")


def held_bytes(model: StreamingGP) -> int:
    """Count the bytes of all tensors that a model holds, each storage once."""
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for _, value in contents(model)
        if isinstance(value, Tensor)
    }
    return sum(storages.values())


# --- gradients ----------------------------------------------------------------------------------


_STEP = 1e-5
"""Of central differences."""


def central_differences(function: Callable[[Tensor], Tensor], X: Tensor) -> Tensor:
    """Compute the gradient of a scalar function by central differences."""
    gradient = torch.zeros_like(X)
    for i in range(X.numel()):
        shift = torch.zeros_like(X).flatten()
        shift[i] = _STEP
        shift = shift.view_as(X)
        with torch.no_grad():
            difference = function(X + shift) - function(X - shift)
        gradient.view(-1)[i] = difference / (2.0 * _STEP)
    return gradient


def assert_gradient(function: Callable[[Tensor], Tensor], X: Tensor) -> None:
    """Compare autograd's gradient with central differences, relative to its largest entry."""
    X = X.detach().clone().requires_grad_()
    (actual,) = torch.autograd.grad(function(X), X)
    _assert_close_gradient(actual, central_differences(function, X.detach()))


def assert_gradients(function: Callable[[Tensor], Tensor], X: Tensor) -> None:
    """Compare gradients of several values with central differences, all of one evaluation.

    Args:
        function: Maps inputs ``k x ...``, each of the k alone, to ``k x values``.
        X: Where, ``...``.
    """
    X = X.detach().unsqueeze(0)
    shifts = _STEP * torch.eye(X.numel()).to(X).view(-1, *X.shape[1:])
    with torch.no_grad():
        ahead, behind = function(torch.cat((X + shifts, X - shifts))).chunk(2)
    X.requires_grad_()
    for value, differences in zip(function(X)[0], (ahead - behind).mT, strict=True):
        (actual,) = torch.autograd.grad(value, X, retain_graph=True)
        _assert_close_gradient(actual.flatten(), differences / (2.0 * _STEP))


def _assert_close_gradient(actual: Tensor, expected: Tensor) -> None:
    size = float(expected.abs().max())
    expect(size > 0.0, "Expected a posterior that depends on X, got a gradient of zero.")
    tolerance = GRADIENT_TOLERANCE * size
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=tolerance)


_DRAWS = 1_000


def smooth_points(
    model: StreamingGP,
    is_smooth_at: Callable[[StreamingGP, Tensor], Tensor],
    *shape: int,
    low: float = 0.03,
    high: float = 0.97,
    shifts: tuple[float, ...] = (0.0,),
) -> Tensor:
    """Draw uniform points, ``shape x d`` of float64 on the model's device, away from all kinks.

    Args:
        model: Whose posterior is differentiated.
        is_smooth_at: Says which of ``n x d`` points are away from all kinks, ``n``.
        shape: Of the points.
        low: Least value of an input.
        high: Largest value of an input.
        shifts: Added to all inputs of a point, 0 among them: each such point is away from kinks.
    """
    (X,), count = model.train_inputs, torch.Size(shape).numel()
    draws = low + (high - low) * torch.rand(max(_DRAWS, 100 * count), X.shape[-1]).double()
    draws = draws.to(X.device)
    clear = torch.stack([is_smooth_at(model, draws + shift) for shift in shifts]).all(0)
    expect(int(clear.sum()) >= count, "the model has kinks everywhere")
    return draws[clear][:count].reshape(*shape, -1)


# --- data ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExampleData:
    """Inputs in the unit cube, positive outcomes, and known noise variances where there are any.

    Attributes:
        X: ``... x n x d``.
        Y: ``... x n x m``.
        Yvar: ``... x n x m`` or None.
        counts: Whether Y has two columns of one output, positives and examined.
    """

    X: Tensor
    Y: Tensor
    Yvar: Tensor | None = None
    counts: bool = False

    def __getitem__(self, rows: slice) -> ExampleData:
        """Select some of the rows."""
        Yvar = None if self.Yvar is None else self.Yvar[..., rows, :]
        return replace(self, X=self.X[..., rows, :], Y=self.Y[..., rows, :], Yvar=Yvar)

    def __len__(self) -> int:
        return self.X.shape[-2]

    def astuple(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the arguments of a model or of its ``update``."""
        return self.X, self.Y, self.Yvar

    def with_noise(self, kind: str) -> ExampleData:
        """Draw noise variances: none if ``"learned"``, all if ``"known"``, some if ``"mixed"``."""
        if kind == "learned":
            return replace(self, Yvar=None)
        Yvar = 0.01 + 0.05 * torch.rand_like(self.Y)
        if kind == "mixed":
            Yvar[..., ::2, :] = torch.nan
        return replace(self, Yvar=Yvar)


def example_data(
    n: int,
    dim: int = 2,
    outputs: int = 1,
    batch_shape: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float64,
) -> ExampleData:
    """Draw noisy values of smooth positive functions, one per output, at uniform points."""
    X = torch.rand(*batch_shape, n, dim, dtype=torch.float64)
    phase = X.sum(-1, keepdim=True) + torch.arange(outputs)
    Y = 4.0 + torch.sin(3.0 * phase) + X[..., :1] ** 2 + 0.1 * torch.randn_like(phase)
    return ExampleData(X.to(dtype), Y.to(dtype))


# --- what is checked ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """The shape, dtype and device of a model's data.

    Attributes:
        dtype: Of inputs and outcomes.
        batch_shape: Of the data.
        outputs: Number m of outputs.
        device: Where they are.
    """

    dtype: torch.dtype = torch.float64
    batch_shape: tuple[int, ...] = ()
    outputs: int = 1
    device: str = "cpu"

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.device}-{dtype}-batch{list(self.batch_shape)}-m{self.outputs}"


SETTINGS = (Setting(), Setting(torch.float32, outputs=2), Setting(batch_shape=(2,), outputs=2))
"""What a model is checked in unless told otherwise."""


def smooth_everywhere(model: StreamingGP, X: Tensor) -> Tensor:
    """Say of each of ``n x d`` inputs that the posterior can be differentiated there."""
    return torch.ones(len(X), dtype=torch.bool, device=X.device)


def exact_prior(model: StreamingGP) -> float:
    """Say that nothing but rounding parts a model's prior covariance from its kernel's."""
    return 0.0


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What is special about a model: each trait exempts it from some laws, or eases them.

    The default is the strictest: a memory of sums that carries the whole prior, of Gaussian noise.

    Attributes:
        noise: Kind of observations. ``"learned"``: no noise variance is known; ``"known"``: all
            are, ``"mixed"``: some are; ``"labels"``: outcomes are two classes; ``"counts"``: they
            are rows of positives and examined.
        in_order: Whether what enters depends on what came before.
        residual: Whether the features miss some of the prior.
        rows: Whether the latest observations are stored as rows, so that it matters which they are.
        blended: Whether an observation may make a variance grow: predictions are averages with
            weights that it moves, or what was learned takes a step.
        sites: Whether observations enter as Gaussian ones that stand for what is not.
        spreading: Whether places are added while inputs come that are far from all others.
        growing: Whether all observations are stored, up to a thousand or more.
        settling: Whether rows whose sites are found together settle, each for good, once a part of
            them is forgotten.
        truncated: Whether a fit's objective leaves out features, with a gradient near its own.
        hands_over: Whether the memory becomes one of another kind once it has grown.
        can_retract: Whether ``retract`` is supported.
        can_merge: Whether ``merge`` is.
        can_forget: Whether ``forget`` is.
        is_smooth_at: Says at which of ``n x d`` inputs the posterior can be differentiated, ``n``,
            with room for differences of 1e-5: a model may have kinks.
        prior_error: Largest difference of the model's prior covariance from that of
            ``covar_module``, relative to the largest entry, where the kernel is approximated.
        trusted: Classes and functions that the model's file may name; see ``StreamingGP.load``.
    """

    noise: Literal["learned", "known", "mixed", "labels", "counts"] = "learned"
    in_order: bool = False
    residual: bool = False
    rows: bool = False
    blended: bool = False
    sites: bool = False
    spreading: bool = False
    growing: bool = False
    settling: bool = False
    truncated: bool = False
    hands_over: bool = False
    can_retract: bool = True
    can_merge: bool = True
    can_forget: bool = True
    is_smooth_at: Callable[[StreamingGP, Tensor], Tensor] = smooth_everywhere
    prior_error: Callable[[StreamingGP], float] = exact_prior
    trusted: Sequence[Trusted] = ()


@dataclass(frozen=True)
class Case(Traits):
    """A model class in one variant.

    Attributes:
        name: The model's name, and after a comma what is special.
        build: Builds a model of some observations, whatever their shapes and dtype.
        input_dim: Number d of inputs.
        settings: What to check it in.
    """

    name: str
    build: Callable[[ExampleData], StreamingGP]
    input_dim: int = 2
    settings: tuple[Setting, ...] = SETTINGS


@dataclass(frozen=True)
class ModelStream:
    """A case in a setting, with data to stream."""

    case: Case
    setting: Setting

    def __str__(self) -> str:
        return f"{self.case.name}-{self.setting}"

    def data(self, n: int) -> ExampleData:
        """Draw n observations."""
        s = self.setting
        data = example_data(n, self.case.input_dim, s.outputs, s.batch_shape, s.dtype)
        if self.labels:
            data = replace(data, Y=(data.Y[..., :1] > 4.8).to(data.X))
        elif self.case.noise == "counts":
            examined = torch.randint(1, 30, data.Y.shape[:-1]).to(data.X)
            counts = torch.stack(((data.Y[..., 0] / 7.0 * examined).round(), examined), -1)
            data = replace(data, Y=counts, counts=True)
        else:
            data = data.with_noise(self.case.noise)
        return map_tensors(data, lambda tensor: tensor.to(s.device))

    def model(self, data: ExampleData, seed: int = 1) -> StreamingGP:
        """Return a model in evaluation mode: :meth:`built`, unless a subclass keeps copies."""
        return self.built(data, seed)

    def built(self, data: ExampleData, seed: int = 1) -> StreamingGP:
        """Build a model in evaluation mode; its hyperparameters depend on the seed only."""
        model = self.case.build(data)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                if name.startswith("stem."):
                    continue  # the memory holds what was projected before
                if name == "mean_module.raw_constant":
                    parameter.copy_(0.3 * noise)
                else:
                    parameter.mul_((0.2 * noise).exp())
        model.eval()
        return model

    def settled(self, data: ExampleData) -> StreamingGP:
        """Give the same model, whose observations enter after the hyperparameters are set.

        Features that miss some of the prior miss another part when the kernel moves.
        """
        model = self.model(data)
        return model.clear().update(*data.astuple()) if self.case.residual else model

    @property
    def labels(self) -> bool:
        """Whether outcomes are labels."""
        return self.case.noise == "labels"

    @cached_property
    def points(self) -> Tensor:
        """Test inputs, ``batch_shape x 5 x d``: of draws of their own, whoever asks first."""
        s, generator = self.setting, torch.Generator().manual_seed(torch.initial_seed() + 1)
        shape = (*s.batch_shape, 5, self.case.input_dim)
        return torch.rand(shape, generator=generator, dtype=s.dtype).to(s.device)

    def inputs(self, n: int, *leading: int) -> Tensor:
        """Draw uniform inputs, ``leading x batch_shape x n x d``."""
        s = self.setting
        X = torch.rand(*leading, *s.batch_shape, n, self.case.input_dim, dtype=s.dtype)
        return X.to(s.device)

    def smooth_points(self, model: StreamingGP, n: int, **options: Any) -> Tensor:
        """Draw inputs away from kinks, ``batch_shape x n x d``; see :func:`smooth_points`."""
        shape = (*self.setting.batch_shape, n)
        return smooth_points(model, self.case.is_smooth_at, *shape, **options)

    def sampler(self, n: int = 3) -> SobolQMCNormalSampler:
        """Return a sampler of n draws, the same ones at each call."""
        return SobolQMCNormalSampler(torch.Size([n]), seed=7)

    @property
    def exact(self) -> bool:
        """Whether gradients can be checked by differences."""
        return self.setting.dtype == torch.float64


def condition_on(model: StreamingGP, data: ExampleData, noise: Tensor | None = None) -> StreamingGP:
    """Condition a model on hypothetical observations of its kind."""
    on_labels = getattr(model, "condition_on_labels", None)
    if on_labels is not None:
        conditioned: StreamingGP = on_labels(data.X, data.Y)
        return conditioned
    return model.condition_on_observations(data.X, data.Y, noise=noise)


# --- laws ---------------------------------------------------------------------------------------

Law = Callable[[ModelStream], None]
"""A function with assertions, whose name and docstring say what must hold."""

LAWS: dict[str, Law] = {}
"""All laws by name; importing a module of laws puts its own here."""

_EXEMPTIONS: list[tuple[Law, Callable[[Traits], bool]]] = []


def law(function: Law) -> Law:
    """Put a law on the list."""
    LAWS[function.__name__] = function
    return function


def not_for(exempt: Callable[[Traits], bool]) -> Callable[[Law], Law]:
    """Return a decorator of laws that models of some traits need not obey."""

    def decorate(function: Law) -> Law:
        _EXEMPTIONS.append((function, exempt))
        return function

    return decorate


orderless = not_for(lambda traits: traits.in_order)
"""Of memories that do not depend on the order in which observations enter."""
of_outcomes = not_for(lambda traits: traits.noise in ("labels", "counts"))
"""Of observations in the units of the posterior."""
of_statistics = not_for(lambda traits: traits.rows)
"""Of memories that hold nothing but statistics."""
without_residual = not_for(lambda traits: traits.residual)
"""Of features that carry the whole prior."""
of_fixed_size = not_for(lambda traits: traits.growing)
"""Of memories that are as large after ten observations as after ten thousand."""
of_forgetting = not_for(lambda traits: traits.rows or traits.settling)
"""Of memories that hold nothing but statistics when some of them are forgotten, too."""
of_exact_objectives = not_for(lambda traits: traits.truncated or traits.blended)
"""Of objectives that are functions of the hyperparameters alone."""
of_gaussian_noise = not_for(lambda traits: traits.sites)
"""Of observations that are taken for normal ones."""
that_retract = not_for(lambda traits: not traits.can_retract)
"""Of models that take observations out again."""
that_merge = not_for(lambda traits: not traits.can_merge)
"""Of models whose memories add."""
that_forget = not_for(lambda traits: not traits.can_forget)
"""Of models whose memory can count less."""


def applies(law: Law, traits: Traits) -> bool:
    """Say whether a model of some traits must obey a law."""
    return not any(exempt(traits) for function, exempt in _EXEMPTIONS if function is law)
