"""The run in numbers: every trial, every step, and what they were made with."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from typing import Any

import pandas as pd
import torch

from bo_stream.loops.optimization.campaign import OptimizationCampaign
from bo_stream.loops.optimization.trials import STATUSES, History, Status, Trial
from bo_stream.loops.records import model_record, peak_memory_mib
from bo_stream.loops.versions import all_versions


def history(campaign: OptimizationCampaign) -> pd.DataFrame:
    """One row per trial, by key; ``best`` is the best outcome up to it."""
    steps = campaign.step_of()
    rows = [_row(campaign, trial, steps) for trial in campaign.optimizer.ledger]
    table = pd.DataFrame(rows)
    if not rows:
        return table
    y = table["y"].astype("float64")
    table["best"] = (y.cummax() if campaign.settings.maximize else y.cummin()).ffill()
    return table


def _row(campaign: OptimizationCampaign, trial: Trial, steps: dict[int, int]) -> dict[str, Any]:
    return {
        "key": trial.key,
        "step": steps.get(trial.key),
        "origin": trial.origin,
        "status": trial.status,
        "attempts": trial.attempts,
        **{f"x{i}": x for i, x in enumerate(trial.X)},
        "y": trial.Y,
        "noiseless": campaign.objective.noiseless(trial.X),
        "seconds": trial.seconds,
        "error": trial.error,
    }


def history_file(campaign: OptimizationCampaign, kind: History) -> bytes:
    """The history as a file of a kind."""
    table = history(campaign)
    if kind == "csv":
        return table.to_csv(index=False).encode()
    file = io.BytesIO()
    table.to_parquet(file, index=False)
    return file.getvalue()


def run_record(campaign: OptimizationCampaign, notes: list[str]) -> bytes:
    """Settings, versions, the result, every step, the learned model, time and memory.

    The model has the outcomes in ``outcome_unit``.
    """
    return (json.dumps(_run_record(campaign, notes), indent=2) + "\n").encode()


def _run_record(campaign: OptimizationCampaign, notes: list[str]) -> dict[str, Any]:
    surrogate = campaign.optimizer.surrogate
    return {
        "finished": campaign.finished,
        "steps_done": campaign.steps_done,
        "objective": campaign.objective.as_record(),
        "optimum": campaign.objective.optimum,
        "settings": campaign.settings.as_record(),
        "plan": asdict(campaign.plan),
        "best": _best_record(campaign),
        "counts": counts(campaign),
        "steps": [asdict(step) for step in campaign.steps],
        "refits_at": surrogate.refits,
        "outcome_unit": surrogate.unit,
        "model": None
        if surrogate.model is None
        else model_record(campaign.settings.model, surrogate.model),
        "seconds": round(campaign.seconds, 3),
        "threads": torch.get_num_threads(),
        "peak_memory_mib": peak_memory_mib(),
        "versions": all_versions(),
        "warnings": notes,
    }


def counts(campaign: OptimizationCampaign) -> dict[Status, int]:
    """How many trials there are of each status."""
    ledger = campaign.optimizer.ledger
    return {status: len(ledger.with_status(status)) for status in STATUSES}


def _best_record(campaign: OptimizationCampaign) -> dict[str, Any] | None:
    last = campaign.steps[-1] if campaign.steps else None
    if last is None or last.best is None:
        return None
    trial = campaign.optimizer.ledger[last.best]
    return {
        "key": trial.key,
        "X": trial.X,
        "Y": trial.Y,
        "posterior_mean": last.mean,
        "noiseless": last.noiseless,
    }
