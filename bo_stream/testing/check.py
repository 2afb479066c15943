"""Check a model of one's own by the laws that all models obey; among them the laws of bad input."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.sampling.normal import SobolQMCNormalSampler
from torch import Tensor

from bo_stream.models.base import StreamingGP
from bo_stream.testing import memory, posteriors
from bo_stream.testing.streams import (
    LAWS,
    SETTINGS,
    Case,
    ExampleData,
    Law,
    ModelStream,
    Setting,
    Traits,
    applies,
    assert_untouched,
    fingerprint,
    law,
    manual_seed,
    refused,
)

SUBJECTS = (memory, posteriors)
"""Importing a module of laws puts them on the list."""

# --- laws of bad input: what a user gets wrong is named, and changes nothing ---------------------

_OTHER_DTYPE = {torch.float64: torch.float32, torch.float32: torch.float64}


@dataclass(frozen=True)
class InputFault:
    """Something wrong with inputs or outcomes, and the error that must say so.

    Attributes:
        name: What is wrong; begins with X or Y.
        spoil: Maps the tensor to one with the fault.
        error: What is raised.
        memory_only: Whether hypothetical observations and queries may be so.
        of_labels: Whether a model of labels must say so, too.
    """

    name: str
    spoil: Callable[[Tensor], Any]
    error: type[Exception]
    memory_only: bool = False
    of_labels: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def argument(self) -> str:
        """The name that must be in the message, as a pattern."""
        return "X" if self.name.startswith("X") else "Y|labels"

    def applied(self, data: ExampleData) -> tuple[Any, Any]:
        """Return X and Y, of which one has the fault."""
        if self.argument == "X":
            return self.spoil(data.X), data.Y
        return data.X, self.spoil(data.Y)


def _spoilt(value: float, tensor: Tensor) -> Tensor:
    spoilt = tensor.clone()
    spoilt.view(-1)[-1] = value
    return spoilt


_SHAPE = BotorchTensorDimensionError

FAULTS = (
    InputFault("X a list", lambda X: X.tolist(), InputDataError),
    InputFault("X of NumPy", lambda X: X.cpu().numpy(), InputDataError),
    InputFault("X None", lambda X: None, InputDataError),
    InputFault("X a single number", lambda X: X.sum(), _SHAPE),
    InputFault("X a vector", lambda X: X.flatten()[: X.shape[-1]], _SHAPE),
    InputFault("X too wide", lambda X: torch.cat((X, X), -1), _SHAPE),
    InputFault("X in an unknown batch", lambda X: X.expand(3, *X.shape), _SHAPE, memory_only=True),
    InputFault("X whole numbers", lambda X: (9 * X).long(), InputDataError),
    InputFault("X of another dtype", lambda X: X.to(_OTHER_DTYPE[X.dtype]), InputDataError),
    InputFault("X on another device", lambda X: X.to("meta"), InputDataError),
    InputFault("X with NaN", partial(_spoilt, math.nan), InputDataError),
    InputFault("X with inf", partial(_spoilt, math.inf), InputDataError),
    InputFault("Y a list", lambda Y: Y.tolist(), InputDataError),
    InputFault("Y None", lambda Y: None, InputDataError),
    InputFault("Y without its outputs", lambda Y: Y[..., 0], _SHAPE, of_labels=False),
    InputFault("Y with too many outputs", lambda Y: torch.cat((Y, Y), -1), _SHAPE),
    InputFault("Y with a row too few", lambda Y: Y[..., 1:, :], _SHAPE),
    InputFault("Y whole numbers", lambda Y: Y.long(), InputDataError, of_labels=False),
    InputFault(
        "Y of another dtype", lambda Y: Y.to(_OTHER_DTYPE[Y.dtype]), InputDataError, of_labels=False
    ),
    InputFault("Y on another device", lambda Y: Y.to("meta"), InputDataError),
    InputFault("Y with NaN", partial(_spoilt, math.nan), InputDataError),
    InputFault("Y with inf", partial(_spoilt, -math.inf), InputDataError),
)
"""What no model takes."""


@law
def bad_observations_are_named_and_change_nothing(stream: ModelStream) -> None:
    """Check that faults of X and Y are named by whatever takes them, and change nothing.

    Where they are not: leave `update`, `retract`, `condition_on_observations`, `posterior`,
    `fantasize`, `process` and `forward` to `StreamingGP`, whose checks come before anything is
    changed.
    """
    model, more = stream.model(stream.data(10)), stream.data(4)
    model.posterior(stream.points)
    before, sampler = fingerprint(model), stream.sampler(2)
    for fault in FAULTS:
        if stream.labels and not fault.of_labels:
            continue
        X, Y = fault.applied(more)
        calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]
        calls = [(model.update, (X, Y)), (model.retract, (X, Y))]
        if not fault.memory_only:
            if not stream.labels:
                calls.append((model.condition_on_observations, (X, Y)))
            if fault.argument == "X":
                calls += [(model.posterior, (X,)), (model.fantasize, (X, sampler))]
        for verb, arguments in calls:
            with refused(fault.error, about=rf"\bExpected .*\b({fault.argument})\b"):
                verb(*arguments)
    inputs = model.process_inputs(stream.points)
    for wrong in (inputs[..., :-1], torch.cat((inputs, inputs), -1), inputs[..., 0].flatten()):
        for call in (model, model.process, model.feature_process):
            with refused(_SHAPE, about=rf"Expected X of shape .* x {inputs.shape[-1]}`"):
                call(wrong)
    assert_untouched(model, before)


@law
def a_sampler_that_is_none_is_named(stream: ModelStream) -> None:
    """Check that fantasies refuse what draws no samples, and change nothing.

    Where they do not: leave `fantasize` to `StreamingGP`.
    """
    model = stream.model(stream.data(10))
    model.posterior(stream.points)
    before = fingerprint(model)
    for wrong in (None, 4, torch.Size([4]), SobolQMCNormalSampler):
        with refused(UnsupportedError, about=r"sampler .*such as SobolQMCNormalSampler"):
            model.fantasize(stream.points, wrong)  # type: ignore[arg-type]
    assert_untouched(model, before)


# --- checks -------------------------------------------------------------------------------------


class BrokenLawError(AssertionError):
    """A model breaks laws: its message says which, in which settings, and what to do.

    Attributes:
        laws: Names of the laws, in their order.
    """

    def __init__(self, message: str, laws: Sequence[str]) -> None:
        super().__init__(message)
        self.laws = tuple(laws)


@dataclass(frozen=True)
class Check:
    """A law and what it is about; a call runs it.

    Attributes:
        law: A function, whose name and docstring say what must hold.
        stream: A model in a setting, with data.
        seed: Of the data.
    """

    law: Law
    stream: ModelStream
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.name}-{self.stream.setting}"

    @property
    def name(self) -> str:
        """Name of the law."""
        return self.law.__name__

    def __call__(self) -> None:
        """Run the law; torch's generator is as it was afterwards.

        Raises:
            BrokenLawError: The law does not hold, or the model raises something else.
        """
        with torch.random.fork_rng(devices=[]):
            manual_seed(self.seed)
            try:
                self.law(self.stream)
            except Exception as error:
                raise BrokenLawError(_explained([self], error), [self.name]) from error


def _explained(broken: Sequence[Check], error: BaseException) -> str:
    """Say what a law wants and what came instead, in the first of some settings."""
    law, case = broken[0].law, broken[0].stream.case
    settings = ", ".join(str(check.stream.setting) for check in broken)
    what = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    text = f"{what}{error}\n\n{inspect.cleandoc(law.__doc__ or '')}"
    body = "\n".join(f"    {line}".rstrip() for line in text.splitlines())
    return f"{broken[0].name} is broken by {case.name} in {settings}:\n{body}"


def model_checks(
    factory: Callable[..., StreamingGP],
    traits: Traits | None = None,
    *,
    input_dim: int = 2,
    settings: Sequence[Setting] = SETTINGS,
    laws: Iterable[str] | None = None,
    exempt: Mapping[str, str] | None = None,
    seed: int = 0,
) -> list[Check]:
    """List the checks of :func:`check_model`, to run each as a test of its own.

    Arguments and errors as there.

    Example:
        >>> @pytest.mark.parametrize("check", model_checks(build), ids=str)
        ... def test_law(check):
        ...     check()
    """
    traits, exempt = Traits() if traits is None else traits, exempt or {}
    laws = None if laws is None else list(laws)
    for argument, names in (("laws", laws or ()), ("exempt", exempt)):
        unknown = [name for name in names if name not in LAWS]
        if unknown:
            raise ValueError(
                f"Expected {argument} to name laws, which bo_stream.testing.LAWS lists, got "
                f"{', '.join(map(repr, unknown))}."
            )
    empty = [name for name, reason in exempt.items() if not reason.strip()]
    if empty:
        raise ValueError(f"Expected a reason for each law in exempt, got none for {empty}.")
    if not settings:
        raise ValueError("Expected settings of at least one Setting, got none.")

    own: dict[str, Any] = {each.name: getattr(traits, each.name) for each in fields(Traits)}
    name = getattr(factory, "__name__", type(factory).__name__).replace("<lambda>", "the model")
    case = Case(
        name,
        lambda data: factory(*(part for part in data.astuple() if part is not None)),
        input_dim,
        tuple(settings),
        **own,
    )
    names = [each for each in (LAWS if laws is None else laws) if each not in exempt]
    chosen = [LAWS[each] for each in names if applies(LAWS[each], traits)]
    streams = [ModelStream(case, s) for s in settings]
    return [Check(law, stream, seed) for law in chosen for stream in streams]


def check_model(
    factory: Callable[..., StreamingGP],
    traits: Traits | None = None,
    *,
    input_dim: int = 2,
    settings: Sequence[Setting] = SETTINGS,
    laws: Iterable[str] | None = None,
    exempt: Mapping[str, str] | None = None,
    seed: int = 0,
) -> None:
    """Check that a model of one's own obeys the laws of all models, and report what it breaks.

    All laws are run in all settings, then one error reports all that are broken: what was expected,
    what came, and what to do. Cost: some hundred models of ten observations or fewer, and one
    stream of 5,000 a setting.

    Args:
        factory: Builds a model: ``factory(X, Y)``, with X of ``batch_shape x n x d`` and Y of
            ``batch_shape x n x m``, n may be 0; ``factory(X, Y, Yvar)`` where ``traits.noise`` says
            that noise is known. It is called again for each model, and must build the same of the
            same data: kernels and networks are made in it.
        traits: What is special about the model: which verbs it lacks, what it approximates, what
            its outcomes are. Default: nothing, the strictest.
        input_dim: Number d of inputs.
        settings: Dtypes, batch shapes and numbers of outputs to check it in. Default: float64,
            float32 with two outputs, and a batch of two with two outputs.
        laws: Names of those to run; default: all of ``LAWS``.
        exempt: Names of laws that the model need not obey, each with the reason.
        seed: Of the data; torch's generator is as it was afterwards.

    Raises:
        BrokenLawError: A law is broken.
        ValueError: A law that does not exist, an exemption without reason, or no setting.

    Example:
        >>> check_model(lambda X, Y: OSGPR(X, Y, window=0), Traits(residual=True))
    """
    checks = model_checks(
        factory,
        traits,
        input_dim=input_dim,
        settings=settings,
        laws=laws,
        exempt=exempt,
        seed=seed,
    )
    broken: dict[str, list[tuple[Check, BaseException]]] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The model inputs are of type torch.float32")
        for check in checks:
            try:
                check()
            except BrokenLawError as error:
                broken.setdefault(check.name, []).append((check, error.__cause__ or error))
    if broken:
        ran = len({check.name for check in checks})
        parts = [f"{len(broken)} of {ran} laws are broken; to run some: laws={list(broken)}."]
        parts += [_explained([check for check, _ in each], each[0][1]) for each in broken.values()]
        first = next(iter(broken.values()))[0][1]
        raise BrokenLawError("\n\n".join(parts), list(broken)) from first
