"""The command ``bo-stream optimize``: its options."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bo_stream.cli import options
from bo_stream.cli.app import app
from bo_stream.cli.options import option
from bo_stream.loops.optimization.trials import ACQUISITIONS, Bounds
from bo_stream.loops.optimization.trials import OptimizationSettings as _DEFAULT


def _bounds(text: str) -> Bounds:
    try:
        pairs = [tuple(float(part) for part in pair.split(",")) for pair in text.split()]
        return tuple((low, high) for low, high in pairs)
    except ValueError as error:
        raise typer.BadParameter(
            f"expected low,high of each input, as in '0,1 -5,5', got {text!r}"
        ) from error


def _resources(text: str) -> dict[str, float]:
    try:
        pairs = [part.split("=") for part in text.split()]
        return {name: float(number) for name, number in pairs}
    except ValueError as error:
        raise typer.BadParameter(f"expected name=number, as in 'GPU=1', got {text!r}") from error


@app.command()
def optimize(
    ctx: typer.Context,
    function: Annotated[
        str | None,
        typer.Argument(
            metavar="FUNCTION",
            show_default=False,
            help="One of BoTorch's test functions (Branin, Hartmann, Ackley, ...), or your own as "
            "package.module:function, which takes a list of numbers and returns one.",
        ),
    ] = None,
    dim: Annotated[
        int | None, option("Function", "Inputs of a test function (wiski: at most 4).")
    ] = None,
    noise: Annotated[
        float, option("Function", "Standard deviation of a test function's noise.")
    ] = 0.0,
    bounds: Annotated[
        Any,
        option(
            "Function",
            "Of each input of your own function, as in '0,1 -5,5'.",
            parser=_bounds,
            metavar="LOW,HIGH...",
        ),
    ] = None,
    maximize: Annotated[
        bool, option("Function", "Which value to look for.", "--maximize/--minimize")
    ] = _DEFAULT.maximize,
    workers: Annotated[
        int,
        option(
            "Function",
            "Processes that evaluate it at a time; 0: the command's own, which a function that "
            "crashes or hangs takes down.",
        ),
    ] = 1,
    timeout: Annotated[
        float | None, option("Function", "Seconds after which an evaluation has failed.")
    ] = None,
    executor: Annotated[
        str | None,
        option(
            "Function",
            "Where it is evaluated instead of in --workers: processes:N or threads:N of this "
            "machine, dask:ADDRESS or ray:ADDRESS of a cluster, dask:N or ray:N for one started "
            "here. What is lost with a worker is evaluated again, and is no failure.",
            metavar="KIND:WHERE",
        ),
    ] = None,
    resources: Annotated[
        Any,
        option(
            "Function",
            "What each evaluation needs of the executor's resources, as in 'GPU=1' (Dask) or "
            "'num_cpus=2 num_gpus=1' (Ray).",
            parser=_resources,
            metavar="NAME=N...",
        ),
    ] = None,
    retries: Annotated[int, option("Function", "Times that a failed evaluation is repeated.")] = 0,
    q: Annotated[int, option("Search", "Points chosen at a time.", "--batch", "-q")] = _DEFAULT.q,
    total: Annotated[
        int,
        option(
            "Search",
            "Steps of --batch points after the initial ones; a resumed run may be given more. "
            "Evaluations in all, in either mode: --initial + --steps x --batch.",
            "--steps",
        ),
    ] = 30,
    asynchronous: Annotated[
        bool,
        option(
            "Search",
            "Give each worker its next point the moment it is free; else all wait until a step has "
            "ended. A resumed run may change it.",
            "--asynchronous/--synchronous",
        ),
    ] = False,
    at_once: Annotated[
        int | None,
        option(
            "Search",
            "With --asynchronous: evaluations under way (as many as there are workers, which may "
            "come and go).",
        ),
    ] = None,
    ahead: Annotated[
        int | None,
        option(
            "Search",
            "With --asynchronous: points chosen before there is a worker for them (a quarter of "
            "those under way). 0: none, for evaluations of hours.",
        ),
    ] = None,
    initial: Annotated[int, option("Search", "Sobol points to start with.")] = _DEFAULT.initial,
    acquisition: Annotated[
        str,
        option(
            "Search",
            f"{', '.join(ACQUISITIONS)}, or a builder of your own as package.module:function.",
            metavar="NAME",
        ),
    ] = _DEFAULT.acquisition,
    beta: Annotated[float, option("Search", "Weight of the spread in qUCB.")] = _DEFAULT.beta,
    seed: Annotated[
        int, option("Search", "Of the Sobol points, the search and the noise.")
    ] = _DEFAULT.seed,
    model: options.Model = _DEFAULT.model,
    model_options: options.Set = None,
    kernel: options.Kernel = _DEFAULT.kernel,
    grid: options.Grid = None,
    refit: options.Refit = _DEFAULT.refit,
    device: options.Device = _DEFAULT.device,
    dtype: options.Dtype = _DEFAULT.dtype,
    out: options.Out = None,
    history: Annotated[
        str, option("Files", "Kind of the history file.", metavar="csv|parquet")
    ] = "csv",
    resume: options.Resume = False,
) -> None:
    """Find where a function is smallest (or largest), in few evaluations.

    Starts from Sobol points. Again and again it chooses the points that promise most, has them
    evaluated, maybe by several processes at a time, and learns. An evaluation that raises, hangs,
    dies or returns anything but one finite number is recorded and repeated as asked; the model
    never sees it.

    With --asynchronous no worker waits for another one; from a hundred workers on, take
    `--acquisition TS`. Each outcome is on the disk before it counts: after a kill, `--resume`
    evaluates again only what was under way.

    Writes history.csv (or .parquet), trace.png, trust.png (can the model be trusted?), run.json and
    a checkpoint. Ctrl-C stops after the step at hand, with --asynchronous when the evaluations
    under way have ended; `--resume` goes on, step by step to the same candidates. Nothing in the
    folder is run then: name a function of your own again, or it is asked for.

    - `bo-stream optimize Branin --noise 1 --out run`
    - `bo-stream optimize Hartmann --dim 6 --set max_exact=200`
    - `bo-stream optimize mine:cost --bounds '0,1 -5,5' --workers 4 -q 4 --timeout 60 --out run`
    - `bo-stream optimize mine:cost --bounds '0,1 -5,5' --executor dask:tcp://host:8786 -q 8`
    - `bo-stream optimize mine:cost --bounds '0,1 -5,5' --workers 8 --asynchronous --steps 200`
    - `bo-stream optimize mine:cost --out run --resume --steps 60`
    """
    settings = {
        "maximize": maximize, "q": q, "initial": initial, "acquisition": acquisition,
        "beta": beta, "seed": seed, "kernel": kernel, "grid": grid, "refit": refit,
        "device": device, "dtype": dtype, "model": model, "model_options": model_options,
    }  # fmt: skip
    target = {"function": function, "dim": dim, "noise": noise, "bounds": bounds}
    plan = {
        "total": total, "retries": retries, "workers": workers, "timeout": timeout,
        "executor": executor, "resources": resources,
        "asynchronous": asynchronous, "at_once": at_once, "ahead": ahead,
    }  # fmt: skip
    from bo_stream.cli.optimizing import run  # which imports torch: help does without

    run(ctx, settings, target, plan, history, out, resume)
