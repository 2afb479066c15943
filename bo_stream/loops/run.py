"""A run of a command: checkpoints, progress, how many cores it may take, and its result files."""

from __future__ import annotations

import io
import json
import math
import os
import platform
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any, Self, TypeVar, cast
from uuid import uuid4

import numpy as np
import torch
from botorch.posteriors.gpytorch import GPyTorchPosterior
from filelock import FileLock, Timeout
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from bo_stream.acquisition import mean_path
from bo_stream.acquisition.criteria import sites
from bo_stream.acquisition.feature_nipv import in_weight_space, weight_space
from bo_stream.diagnostics.trust import PICTURE, RECORD, TrustReport, report
from bo_stream.diagnostics.validation import ProgressiveValidation, predict_batch
from bo_stream.errors import UsageError
from bo_stream.models.base import StreamingGP
from bo_stream.models.outcomes.likelihood import LikelihoodOutcomes
from bo_stream.observation_space import ObservationSpaceProcess
from bo_stream.process import ROWS, ConditionedProcess, PosteriorProcess
from bo_stream.storage.archive import (
    FileFormat,
    OtherVersionError,
    atomic_write,
    describe_file,
    one_line,
    package_version,
    read_index,
    write_index,
)
from bo_stream.warnings import users_stack_level

_LEAST_SECONDS = 1.0
"""Seconds of work before anything is concluded."""

_LEAST_SHARE = 0.8
"""Least share of a core that a thread which computes has where the cores are its own."""

_PREEMPTIONS_A_SECOND = 20.0
"""Most preemptions per second on a core of its own; on a shared one there are hundreds."""


class CrowdedCoresWarning(UserWarning):
    """A warning that other processes use the same cores, and threads of this one spin."""


def usage_of_this_thread() -> NDArray[np.float64]:
    """Return the thread's wall time, processor time, preemptions and sleeps since some time.

    Times are in seconds, preemptions and sleeps are context switches, involuntary and voluntary.
    All are zero on systems other than Linux.
    """
    if sys.platform != "linux":
        return np.zeros(4)
    import resource

    used = resource.getrusage(resource.RUSAGE_THREAD)
    at_work = used.ru_utime + used.ru_stime
    return np.array([time.monotonic(), at_work, used.ru_nivcsw, used.ru_nvcsw])


class CoreWatch:
    """A context that warns once if the work within it is slowed down by threads that spin.

    Threads of one process wait for each other many times in an update. One that spins keeps the
    core that another one needs until the system takes it away: two are then far slower than one.
    """

    def __init__(self, usage: Callable[[], NDArray[np.float64]] = usage_of_this_thread) -> None:
        """Measure by ``usage``, which returns the use so far by the thread that works."""
        self._usage = usage
        self._sum = self._before = np.zeros(4)
        passive = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
        sleeping = passive or os.environ.get("GOMP_SPINCOUNT") == "0"
        self._warned = torch.get_num_threads() == 1 or sleeping

    def __enter__(self) -> Self:
        self._before = self._usage()
        return self

    def __exit__(self, *_: Any) -> None:
        self._sum = self._sum + self._usage() - self._before
        seconds, core_seconds, preempted, slept = self._sum
        if seconds < _LEAST_SECONDS:
            return
        self._sum = np.zeros(4)
        # the thread wanted a core, never slept, and often had none
        often = preempted > max(slept, _PREEMPTIONS_A_SECOND * core_seconds)
        if often and core_seconds < _LEAST_SHARE * seconds and not self._warned:
            self._warned = True
            warnings.warn(
                f"Other processes use the same cores: this one had "
                f"{100 * core_seconds / seconds:.0f} % of a core, and its "
                f"{torch.get_num_threads()} threads spin while they wait for each other. "
                "Set OMP_WAIT_POLICY=PASSIVE in the environment before Python starts, or "
                "OMP_NUM_THREADS=1.",
                CrowdedCoresWarning,
                stacklevel=users_stack_level(),
            )


# --- a run in a folder: a lock, checkpoints of index and models ----------------------------------


T = TypeVar("T")
Event = TypeVar("Event")

SECONDS_BETWEEN_CHECKPOINTS = 15.0

LOCK = ".lock"
"""Name of the lock file, which is never removed: two processes could hold a removed one."""

HOLDER = ".lock-holder.json"

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_DAMAGE = (
    OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
_CURE = "Restore the folder from a copy, or start again in another folder."


@dataclass(frozen=True)
class CheckpointFormat:
    """A format of checkpoints: an index in JSON, and files of the models that it names.

    Attributes:
        name: File name of the index.
        run: Name of the saved object, for messages.
        format: Format of the index.
        keys: Keys of the models that it may have, by which their files are named.
    """

    name: str
    run: str
    format: FileFormat
    keys: tuple[str, ...] = ()

    def save(
        self, folder: Path, content: Mapping[str, Any], models: Mapping[str, StreamingGP]
    ) -> None:
        """Write models and index so that a complete checkpoint, old or new, exists at any time.

        The models go to new files, then the index is replaced in one move, then the previous models
        are removed. Files of other formats stay. The folder is created if necessary.

        Args:
            folder: Folder of the run.
            content: Plain values; the entry ``models`` is added here.
            models: Models by key, of those in ``keys``.

        Raises:
            OSError: The folder cannot be written, or the disk is full; the old checkpoint stands.
        """
        folder.mkdir(parents=True, exist_ok=True)
        previous = self._models(folder)
        try:
            files = {key: ModelFile.write(folder, key, model) for key, model in models.items()}
            records = {key: asdict(file) for key, file in files.items()}
            write_index(folder / self.name, self.format, {"models": records, **content})
        except BaseException:
            for path in self._models(folder) - previous:
                path.unlink(missing_ok=True)
            raise
        for path in previous:
            path.unlink(missing_ok=True)

    def is_in(self, folder: Path) -> bool:
        """Return whether a folder has a checkpoint of this format."""
        return (folder / self.name).exists()

    def _models(self, folder: Path) -> set[Path]:
        return {path for key in self.keys for path in folder.glob(f"model-{key}-*.safetensors")}

    @contextmanager
    def opened(self, folder: Path) -> Iterator[dict[str, Any]]:
        """Read the index; an error of the block that parses it is reported as damage.

        Raises:
            UsageError: There is none, it is damaged or was changed, or another version wrote it.
        """
        path = folder / self.name
        if not path.is_file():
            raise UsageError(
                f"There is no {self.run} to resume in {folder}: it has no {self.name}."
            )
        try:
            content = read_index(path, self.format)
        except OtherVersionError as error:
            raise UsageError(f"{error} Or start again in another folder.") from error
        except (OSError, ValueError) as error:
            raise UsageError(f"{error} {_CURE}") from error
        try:
            yield content
        except UsageError:
            raise
        except _DAMAGE as error:
            raise UsageError(f"{path} is damaged or no checkpoint ({error!r}). {_CURE}") from error


SAMPLING = CheckpointFormat(
    "checkpoint.json",
    "run",
    FileFormat("bo_stream sampling checkpoint", 9, True),
    ("chosen", "random"),
)
ASKING = CheckpointFormat(
    "sampling.json", "sampling", FileFormat("bo_stream active sampling", 2, True), ("sampling",)
)
OPTIMIZATION = CheckpointFormat(
    "optimization.json",
    "optimization",
    FileFormat("bo_stream optimization checkpoint", 9, True),
    ("surrogate",),
)
REPLAY = CheckpointFormat("replay.json", "replay", FileFormat("bo_stream survey replay", 1, True))
SURVEY = CheckpointFormat("survey.json", "survey", FileFormat("bo_stream survey", 1))


@dataclass(frozen=True)
class ModelFile:
    """A model's file as an index names it.

    Attributes:
        name: File name, in the folder of the index.
        sha256: Digest that the file names in its header, in hexadecimal digits.
        observations: Number of observations in the model.
    """

    name: str
    sha256: str
    observations: int

    @classmethod
    def write(cls, folder: Path, key: str, model: StreamingGP) -> Self:
        """Write a model to a new file."""
        observations = round(model.num_observations)
        path = folder / f"model-{key}-{observations:07d}-{uuid4().hex[:8]}.safetensors"
        model.save(path)
        return cls(path.name, describe_file(path)["sha256"], observations)

    def read(self, folder: Path, kind: type[StreamingGP], device: str) -> StreamingGP:
        """Load the model; nothing in the file is executed (see :meth:`StreamingGP.load`).

        A file that lies elsewhere, is damaged or was replaced is a ``UsageError``.
        """
        path = folder / self.name
        if Path(self.name).name != self.name:
            raise UsageError(
                f"The checkpoint in {folder} names the model {self.name!r}: expected the name of a "
                f"file in that folder. {_CURE}"
            )
        try:
            digest = describe_file(path)["sha256"]  # as its header says; loading checks that
            if digest != self.sha256:
                raise ValueError(
                    f"{path} is not the file that was written (SHA-256 {self.sha256[:12]}..., got "
                    f"{digest[:12]}...)."
                )
            model = kind.load(path, map_location=device)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"The checkpoint in {folder} cannot be read: {error} {_CURE}"
            ) from error
        observations = round(model.num_observations)
        if observations != self.observations:
            raise UsageError(
                f"{path} holds a model of {observations:,} observations, the checkpoint says "
                f"{self.observations:,}. {_CURE}"
            )
        return model


def from_record(kind: type[T], record: Mapping[str, Any]) -> T:
    """Build a dataclass from all of its fields as JSON returns them; lists become tuples."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # a dataclass
    return kind(**{name: _as_tuples(record[name]) for name in names})


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


@contextmanager
def hold_folder(
    folder: Path, advice: str = "Wait until that run ends, stop it, or give another --out."
) -> Iterator[None]:
    """Lock a folder against other processes while the block runs.

    The lock ends with the process, in any way. A missing folder is not locked.

    Args:
        folder: The folder.
        advice: What to do if another process holds the lock, for the message.

    Raises:
        UsageError: Another process holds the lock.
    """
    if not folder.is_dir():
        yield
        return
    try:
        with FileLock(folder / LOCK, timeout=0):
            (folder / HOLDER).write_text(json.dumps([os.getpid(), platform.node()]))
            try:
                yield
            finally:
                (folder / HOLDER).unlink(missing_ok=True)
    except Timeout as error:
        try:
            number, host = json.loads((folder / HOLDER).read_text())
            holder = f"process {number} on {host}"
        except (OSError, ValueError, TypeError):
            holder = "another process"
        raise UsageError(f"{folder} is in use by {holder}. {advice}") from error


def run_with_checkpoints(
    events: Iterator[Event],
    save: Callable[[], None],
    stop: StopRequest,
    on_event: Callable[[Event], None],
    *,
    ends_step: Callable[[Event], bool] = lambda _: True,
    is_costly: Callable[[Event], bool] = lambda _: False,
    seconds_between_checkpoints: float = SECONDS_BETWEEN_CHECKPOINTS,
) -> None:
    """Carry out a run; a checkpoint is also written at the end, even after an error.

    Events, which are steps or parts of steps, are done as they are drawn. The run may be stopped
    after one that ends a step. A costly one is saved at once, others after the seconds between
    checkpoints.
    """
    last = -float("inf")
    try:
        for event in events:
            on_event(event)
            if stop.made and ends_step(event):
                return
            if is_costly(event) or time.monotonic() - last > seconds_between_checkpoints:
                save()
                last = time.monotonic()
    finally:
        save()


def check_not_shorter(done: int, asked: int) -> None:
    """Raise a ``UsageError`` if fewer steps are asked for than are done."""
    if done > asked:
        raise UsageError(
            f"The run has done {done:,} steps already: expected steps of at least that, got "
            f"{asked:,}."
        )


class StopRequest:
    """A context in which a first Ctrl-C (or SIGTERM) asks to stop, and a second one interrupts.

    Attributes:
        made: Whether a stop was asked for.
    """

    def __init__(self, on_request: Callable[[], None]) -> None:
        """Prepare a request, at which ``on_request`` is called."""
        self.made = False
        self._on_request = on_request
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: Any) -> None:
        self._restore_handlers()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.made = True
        self._restore_handlers()
        self._on_request()

    def _restore_handlers(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


# --- predictions of a run's model, and its results as files --------------------------------------


_HALF_WIDTH_95 = 1.959963984540054


@torch.no_grad()
def predict(model: StreamingGP, X: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the marginal means and variances of ``model.posterior(X)``, ``n`` each, float64.

    Where the process is all in the weights of its features, the cost on a grid of d inputs is
    O(n 4^d) and one quadratic form, without ``n x r`` features.

    Args:
        model: Model of one output with an affine outcome transform.
        X: Inputs, ``n x d``.
    """
    process, inputs = process_at(model, X)
    if _in_features_only(process):
        space = weight_space(process)
        points = sites(space.basis, inputs)
        mean = points.linear(space.weights.mean)[0, 0]
        variance = points.quadratic(space.weights.covariance().unsqueeze(0))[0, 0]
    else:
        mean, variance = (value[0] for value in process.marginals(inputs))
    scale = model.outcome_scale().squeeze()
    return _in_units(model, X, mean), scale.square() * variance.clamp_min(0.0)


def process_at(model: StreamingGP, X: Tensor) -> tuple[PosteriorProcess, Tensor]:
    """Return the posterior process, and inputs ``n x d`` as it takes them, in float64."""
    inputs = model.transform_inputs(X).double()
    return model.process(inputs), inputs


@torch.no_grad()
def predict_mean(model: StreamingGP, X: Tensor) -> Tensor:
    """Compute the means of :func:`predict` alone, ``n``.

    In O(n r) where all is in r features, and in O(n k) where k observations are stored as rows.
    """
    if _in_features_only(model.process()):
        return mean_path(model)(X).squeeze(-1)
    process, inputs = process_at(model, X)
    rule = process.regression if isinstance(process, ObservationSpaceProcess) else process.mean
    mean = torch.cat([rule(rows)[0] for rows in inputs.split(ROWS, -2)], -1)
    return _in_units(model, X, mean).to(X)


def _in_units(model: StreamingGP, X: Tensor, mean: Tensor) -> Tensor:
    """Return means of the process at X, ``n``, in units of the outcomes."""
    first = cast(GPyTorchPosterior, model.posterior(X[:1])).mean.double().squeeze()
    return first + model.outcome_scale().squeeze() * (mean - mean[0])


def _in_features_only(process: PosteriorProcess) -> bool:
    """Return whether a process is in the weights of its features, rather than of few rows."""
    base = process.base if isinstance(process, ConditionedProcess) else process
    return in_weight_space(process) and not isinstance(base, ObservationSpaceProcess)


@dataclass(frozen=True)
class Score:
    """Scores of the predictions of held-out outcomes.

    Attributes:
        observations: Number of observations so far.
        rmse: Root mean squared error of the mean, in units of the target.
        rmse_sd: ``rmse`` over the standard deviation of the held-out outcomes; NaN where they are
            all equal.
        mae: Mean absolute error of the mean, in units of the target.
        mae_sd: ``mae`` over that standard deviation.
        nll: Mean negative log density of an outcome, noise included, in nats.
        coverage: Share of outcomes in their 95 % interval, noise included.
        wrong: Share of outcomes on the other side of a threshold than the mean; None without one.
    """

    observations: int
    rmse: float
    rmse_sd: float
    mae: float
    mae_sd: float
    nll: float
    coverage: float
    wrong: float | None = None


@torch.no_grad()
def score(model: StreamingGP, X: Tensor, Y: Tensor, threshold: float | None = None) -> Score:
    """Score the predictions, as of :func:`predict`, of held-out outcomes ``n x 1`` at ``n x d``.

    A threshold is in the units of the outcomes.
    """
    mean, variance = predict(model, X)
    truth = Y.double().squeeze(-1)
    error = truth - mean
    if isinstance(model.outcomes, LikelihoodOutcomes) and not model.prior.is_gaussian:
        batch = predict_batch(model, X, Y)
        nll = -float(batch.log_density.mean())
        coverage = math.nan if batch.pit is None else float((abs(batch.pit - 0.5) <= 0.475).mean())
    else:
        noise = model.noise_at(model.transform_inputs(X).double()).squeeze(-2)
        variance = variance + noise * model.outcome_scale().square().squeeze()
        density = 0.5 * (error.square() / variance + variance.log() + math.log(2.0 * math.pi))
        inside = error.abs() <= _HALF_WIDTH_95 * variance.sqrt()
        nll, coverage = float(density.mean()), float(inside.double().mean())
    varies = bool(truth.min() < truth.max())  # equal values may have a deviation by rounding
    deviation = (float(truth.std()) if varies else 0.0) or math.nan
    rmse, mae = float(error.square().mean().sqrt()), float(error.abs().mean())
    wrong = None
    if threshold is not None:
        wrong = float(((mean > threshold) != (truth > threshold)).double().mean())
    return Score(
        round(model.num_observations),
        rmse,
        rmse / deviation,
        mae,
        mae / deviation,
        nll,
        coverage,
        wrong,
    )


# --- writing of results: files that are replaced together, pictures ------------------------------


_PACKAGES = ("bo-stream", "torch", "botorch", "gpytorch", "linear-operator", "numpy", "scipy")


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Replace files, given as contents by name, once all are on the disk, or none.

    Raises:
        OSError: The disk is full or the folder cannot be written; the old files stand.
    """
    with ExitStack() as stack:
        for name, content in files.items():
            file = stack.enter_context(atomic_write(folder / name))
            file.write(content)
            file.flush()


def write_picture(path: Path, draw: Callable[[], Figure]) -> None:
    """Draw a picture and write it; if it cannot be drawn, warn and leave none."""
    try:
        figure, file = draw(), io.BytesIO()
        figure.savefig(file, format="png", dpi=150)
    except Exception as error:  # of any kind: the results are there
        path.unlink(missing_ok=True)
        reason = one_line(error)
        warnings.warn(f"{path.name} could not be drawn ({reason}).", RuntimeWarning, stacklevel=2)
    else:
        write_files(path.parent, {path.name: file.getvalue()})


def write_trust(
    folder: Path, model: StreamingGP, record: ProgressiveValidation, unalarmed: str | None = None
) -> TrustReport | None:
    """Write trust.json and trust.png, a report on a model; if there can be none, warn.

    ``unalarmed`` says why alarms are not judged; None: they are.
    """
    try:
        result = report(model, record)
        if unalarmed is not None:
            result = replace(result, alarms=(), untested=unalarmed)
    except Exception as error:  # of any kind: the results are there
        for name in (RECORD, PICTURE):
            (folder / name).unlink(missing_ok=True)
        reason = one_line(error)
        warnings.warn(f"{RECORD} could not be written ({reason}).", RuntimeWarning, stacklevel=2)
        return None
    write_files(folder, {RECORD: result.to_json()})
    write_picture(folder / PICTURE, result.plot)
    return result


def record_file(content: Mapping[str, Any], seconds: float, notes: list[str]) -> bytes:
    """Return a run's record as a JSON file, with time, memory, versions and texts of warnings."""
    peak_memory_mib = None
    if sys.platform != "win32":
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak_memory_mib = round(peak / (1024.0 if sys.platform != "darwin" else 1024.0**2))
    circumstances = {
        "seconds": round(seconds, 3),
        "threads": torch.get_num_threads(),
        "peak_memory_mib": peak_memory_mib,
        "versions": {"python": platform.python_version()}
        | {name: package_version(name) for name in _PACKAGES},
        "warnings": notes,
    }
    return (json.dumps({**content, **circumstances}, indent=2) + "\n").encode()
