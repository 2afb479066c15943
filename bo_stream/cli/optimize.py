"""The command ``bo-stream optimize``: begin or resume a campaign, run it, show the best point.

Whatever loads torch is imported in the functions: the help pages do without.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bo_stream.cli import running
from bo_stream.cli.running import OUT, app, option, parse_settings, say
from bo_stream.errors import UsageError
from bo_stream.loops.optimization.trials import (
    ACQUISITIONS,
    FIRST_IN_BOX,
    MOST_IN_BOTH,
    MOST_IN_BOX,
    SEARCHES,
    Bounds,
    OptimizationSettings,
    usual_search,
)

if TYPE_CHECKING:
    from rich.table import Table

    from bo_stream.loops.optimization.campaign import History, OptimizationCampaign

_DEFAULT = OptimizationSettings


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
    initial: Annotated[
        int,
        option(
            "Search",
            "Points to start with, of a Sobol sequence; 0: 10, or twice the inputs in a region, "
            "whose first one is the middle of the box.",
        ),
    ] = _DEFAULT.initial,
    search: Annotated[
        str,
        option(
            "Search",
            "Where points are looked for: in the whole box, in a trust region about the best "
            f"point, or both, in the box until there are {FIRST_IN_BOX} outcomes. Default: box in "
            f"up to {MOST_IN_BOX} inputs, and with --acquisition, another --model than auto, --set "
            f"or --grid; both in up to {MOST_IN_BOTH}; region in more.",
            metavar="|".join(SEARCHES),
        ),
    ] = _DEFAULT.search,
    acquisition: Annotated[
        str,
        option(
            "Search",
            f"Of the box: {', '.join(ACQUISITIONS)}, or a builder of your own as "
            "package.module:function. Default: qLogEI.",
            metavar="NAME",
        ),
    ] = _DEFAULT.acquisition,
    beta: Annotated[
        float, option("Search", "Of the box: β of mean + √β sd in qUCB.")
    ] = _DEFAULT.beta,
    seed: Annotated[
        int, option("Search", "Of the Sobol points, the search and the noise.")
    ] = _DEFAULT.seed,
    model: running.Model = _DEFAULT.model,
    model_options: running.Set = None,
    kernel: running.Kernel = _DEFAULT.kernel,
    grid: running.Grid = None,
    refit: Annotated[
        float,
        option(
            "Model",
            "Of the box: relearn hyperparameters at so many times the observations. A region has a "
            "rule of its own; 0: never, in either.",
        ),
    ] = _DEFAULT.refit,
    device: running.Device = _DEFAULT.device,
    dtype: running.Dtype = _DEFAULT.dtype,
    out: running.Out = None,
    history: Annotated[
        str | None,
        option("Files", "Kind of the history file (csv, or as before).", metavar="csv|parquet"),
    ] = None,
    resume: running.Resume = False,
) -> None:
    """Find where a function is smallest (or largest), in few evaluations.

    Starts from points spread over the box. Again and again it chooses the points that promise
    most, has them evaluated, maybe by several processes at a time, and learns. In more than three
    inputs it goes on, or begins, in a region about the best point. An evaluation that raises,
    hangs, dies or returns anything but one finite number is recorded and repeated as asked; the
    model of the whole box never sees it.

    With --asynchronous no worker waits for another one; from a hundred workers on, take
    `--acquisition TS`. Each outcome is on the disk before it counts: after a kill, `--resume`
    evaluates again only what was under way.

    Writes history.csv (or .parquet), trace.png, trust.png (can the model be trusted?), run.json and
    a checkpoint. Ctrl-C stops after the step at hand, with --asynchronous when the evaluations
    under way have ended; `--resume` goes on, step by step to the same candidates. Nothing in the
    folder is run then: name a function of your own again, or it is asked for.

    - `bo-stream optimize Branin --noise 1 --out run`
    - `bo-stream optimize Hartmann --dim 6 --set max_exact=200`
    - `bo-stream optimize Levy --dim 20 -q 10 --steps 100`
    - `bo-stream optimize mine:cost --bounds '0,1 -5,5' --workers 4 -q 4 --timeout 60 --out run`
    - `bo-stream optimize mine:cost --bounds '0,1 -5,5' --executor dask:tcp://host:8786 -q 8`
    - `bo-stream optimize mine:cost --bounds '0,1 -5,5' --workers 8 --asynchronous --steps 200`
    - `bo-stream optimize mine:cost --out run --resume --steps 60`
    """
    from bo_stream.loops.optimization import Optimizer
    from bo_stream.loops.optimization.campaign import HISTORIES, OptimizationCampaign, Plan
    from bo_stream.loops.optimization.objectives import find_objective
    from bo_stream.loops.optimization.optimizer import named_functions

    settings: dict[str, Any] = {
        "maximize": maximize, "q": q, "initial": initial, "acquisition": acquisition,
        "search": search, "beta": beta, "seed": seed, "kernel": kernel, "grid": grid,
        "refit": refit, "device": device, "dtype": dtype, "model": model,
        "model_options": model_options,
    }  # fmt: skip
    target: dict[str, Any] = {"function": function, "dim": dim, "noise": noise, "bounds": bounds}
    plan: dict[str, Any] = {  # may change when a run goes on
        "total": total, "retries": retries, "workers": workers, "timeout": timeout,
        "executor": executor, "resources": resources,
        "asynchronous": asynchronous, "at_once": at_once, "ahead": ahead,
    }  # fmt: skip

    def begin() -> OptimizationCampaign:
        planned = Plan(**{**plan, "resources": resources or {}})
        if function is None:
            raise UsageError("Say which FUNCTION to optimise, as in: bo-stream optimize Branin.")
        objective = find_objective(function, dim, noise, bounds, seed)
        chosen = OptimizationSettings(bounds=objective.bounds, **settings)
        return OptimizationCampaign(objective, Optimizer(chosen), planned)

    def go_on(folder: Path) -> OptimizationCampaign:
        def is_trusted(name: str) -> bool:
            question = f"The run in {folder} names {name}. Import and call it?"
            given = name in (function, acquisition)
            return given or (at_terminal() and typer.confirm(question, err=True))

        trusted = [name for name in named_functions(folder) if is_trusted(name)]
        changes = running.said(ctx, plan)
        if "workers" in changes:  # ends the use of an executor
            changes = {"executor": None, "resources": {}, **changes}
        if changes.get("asynchronous") is False:
            changes = {"at_once": None, "ahead": None, **changes}
        campaign = OptimizationCampaign.resume(folder, trusted, **changes)
        began = campaign.optimizer.settings
        settings["initial"] = replace(began, initial=initial).initial  # 0: chosen
        previous = {**asdict(began), **asdict(campaign.objective)}
        if previous["function"].lower() == str(function).lower():
            target["function"] = previous["function"]
        running.check_unchanged(ctx, previous, {**settings, **target})
        return campaign

    with running.reported_problems() as caught:
        if {"executor", "workers"} <= set(running.said(ctx, plan)):
            raise UsageError(
                "--executor says where evaluations run, and how many at a time: leave out "
                "--workers, or --executor."
            )
        if history not in (None, *HISTORIES):
            raise UsageError(f"Expected --history csv or parquet, got {history!r}.")
        settings["model_options"] = parse_settings(model_options)
        with running.campaign_in_folder(out, resume, begin, go_on) as (campaign, folder):
            before = [kind for kind in HISTORIES if (folder / f"history.{kind}").is_file()]
            kind = history or (before[0] if resume and before else HISTORIES[0])
            _run_and_report(campaign, folder, kind, caught)


def at_terminal() -> bool:
    """Return whether somebody can be asked."""
    return sys.stdin.isatty()


def _run_and_report(
    campaign: OptimizationCampaign, folder: Path, kind: History, caught: running.Caught
) -> None:
    from bo_stream.loops.optimization.campaign import best_outcome, write_optimization

    settings, plan, objective = campaign.optimizer.settings, campaign.plan, campaign.objective
    verb = "Maximising" if settings.maximize else "Minimising"
    sides = [f"[{low:g}, {high:g}]" for low, high in settings.bounds]
    alike = len(sides) > 3 and len(set(sides)) == 1
    box = f"{sides[0]}^{len(sides)}" if alike else " x ".join(sides)
    steps = f"{plan.total} steps of {settings.q}"
    stopping = "Stopping after this step"
    if plan.asynchronous:
        steps = f"{plan.total * settings.q}, each when a worker is free,"
        stopping = "Stopping when the evaluations under way have ended"
    how, draws = settings.acquisition, "draws in a region"
    how = {"box": how, "both": f"{how} and later {draws}", "region": draws}[settings.search]
    say(
        f"{verb} {objective.function} over {box}: {settings.initial} initial points, "
        f"then {steps} by {how}; results in {folder}."
    )
    say(reason_of_search(settings))
    if campaign.steps:
        OUT.print(f"Going on after step {campaign.steps_done}.")
    with campaign.evaluator() as evaluating:
        run, status = partial(campaign.run_in, folder, evaluating), partial(best_so_far, campaign)
        try:
            stopped = running.run_with_bar(campaign, plan.total, status, run, stopping)
        finally:
            trust = write_optimization(campaign, folder, running.notes(caught), kind)
    OUT.print(f"The best of {summary(campaign)}:")
    OUT.print(_best_table(campaign))
    if (other := best_outcome(campaign)) is not None:
        which = "Highest" if settings.maximize else "Lowest"
        point = ", ".join(f"{x:.6g}" for x in other.X)
        say(f"{which} outcome: {other.Y:.6g} of trial {other.key}, at ({point}).")
    model = campaign.optimizer.surrogate.model
    logs = [] if model is None else [model.numerical_log]
    files = f"history.{kind}, trace.png, trust.png, trust.json and run.json"
    again = ["optimize"]  # what a user must give, as files run nothing
    if ":" in objective.function:
        again += [objective.function]
    if ":" in settings.acquisition:
        again += ["--acquisition", settings.acquisition]
    if plan.names_address:
        again += ["--executor", str(plan.executor)]
    running.show_end(folder, files, caught, logs, stopped, again, trust)


def reason_of_search(settings: OptimizationSettings) -> str:
    """Say which search runs, and why, in one line."""
    box, region, dim = "the whole box", "a region about the best point", settings.dim
    both = f"{box} until there are {FIRST_IN_BOX} outcomes, then {region}"
    searched = {"box": box, "both": both, "region": region}[settings.search]
    usual = usual_search(dim)
    if settings.search == usual:
        why = f"as there are {dim} inputs; --search chooses another."
    elif settings.search == "box":
        why = f"of {dim} inputs; --search {usual} is faster and better in more than {MOST_IN_BOX}."
    else:
        why = f"as asked for, of {dim} inputs."
    return f"Searching {searched}, {why}"


def best_so_far(campaign: OptimizationCampaign) -> str:
    """Return the best value of the last step and the number of failed trials as text."""
    from bo_stream.loops.optimization.campaign import counts

    count = counts(campaign)
    failed = f", {count['failed']} failed" if count["failed"] else ""
    last = campaign.steps[-1] if campaign.steps else None
    if last is None or last.best is None:
        return f"{count['told']} initial points{failed}"
    value = campaign.optimizer.ledger[last.best].Y if last.mean is None else last.mean
    return f"best {value:.5g}{failed}"


def summary(campaign: OptimizationCampaign) -> str:
    """Return the numbers of trials and the time as text."""
    from bo_stream.loops.optimization.campaign import counts

    count = counts(campaign)
    others = ", ".join(f"{n} {status}" for status, n in count.items() if n and status != "told")
    return f"{count['told']} outcomes{f' ({others})' if others else ''} in {campaign.seconds:.0f} s"


def _best_table(campaign: OptimizationCampaign) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column("what")
    table.add_column("value", justify="right")
    last = campaign.steps[-1] if campaign.steps else None
    if last is not None and last.best is not None:
        trial = campaign.optimizer.ledger[last.best]
        rows: dict[str, float | None] = {f"x{i}": x for i, x in enumerate(trial.X)}
        rows |= {"posterior mean": last.mean, "outcome": trial.Y, "noiseless": last.noiseless}
        rows |= {"known minimum": campaign.objective.optimum}
        for name, value in rows.items():
            if value is not None:
                table.add_row(name, f"{value:.6g}")
    return table
