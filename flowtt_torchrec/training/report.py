"""The JSON report of a run, and the summary that ends its output."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flowtt_torchrec.files import write_atomically
from flowtt_torchrec.machine import device_name
from flowtt_torchrec.training.best import best_evaluation
from flowtt_torchrec.training.checkpoint import Checkpoints
from flowtt_torchrec.training.config import TrainConfig
from flowtt_torchrec.training.console import Console, show, show_bytes
from flowtt_torchrec.training.loop import Trainer
from flowtt_torchrec.training.profiler import Part
from flowtt_torchrec.training.runtime import Runtime, peak_memory
from flowtt_torchrec.training.tables import PlannedTable
from flowtt_torchrec.versions import versions

SCHEMA = 1


def build_report(
    config: TrainConfig,
    runtime: Runtime,
    planned: Sequence[PlannedTable],
    trainer: Trainer,
    notes: Sequence[str],
    checkpoints: Checkpoints | None,
) -> dict[str, Any]:
    """The report as plain values. All ranks call it together; only rank 0's is complete.

    Args:
        config: the settings.
        runtime: this process.
        planned: the tables.
        trainer: after its run.
        notes: what there is to know about the data.
        checkpoints: of the run, if it writes any.
    """
    peaks: list[dict[str, int]] = [{}] * runtime.world_size
    dist.all_gather_object(peaks, peak_memory(runtime.device))
    evaluations = trainer.history.evaluation
    dense = sum(table.dense_bytes for table in planned)
    weights = sum(table.weight_bytes for table in planned)
    return {
        "schema": SCHEMA,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "config": asdict(config),
        "data_notes": list(notes),
        "device": {
            "kind": runtime.device.type,
            "name": device_name(runtime.device),
            "world_size": runtime.world_size,
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
        },
        "versions": versions(),
        "tables": [table.to_dict() for table in planned],
        "compression": {
            "dense_bytes": dense,
            "weight_bytes": weights,
            "ratio": dense / weights,
            "tensor_trains": sum(table.spec is not None for table in planned),
        },
        "metrics": evaluations[-1] if evaluations else None,
        "best": _best(evaluations, checkpoints),
        "stopped": trainer.stopped,
        "history": asdict(trainer.history),
        "steps": trainer.position.step,
        "samples_per_second": trainer.samples_per_second,
        "seconds": trainer.seconds,
        "peak_memory_bytes": peaks,
        "step_breakdown": [asdict(part) for part in trainer.profiler.breakdown],
    }


def _best(evaluations: Sequence[dict[str, Any]], checkpoints: Checkpoints | None) -> dict[str, Any] | None:
    """The best evaluation, with the checkpoint of its step; None for a checkpoint that there is not."""
    best = best_evaluation(evaluations)
    if best is None:
        return None
    kept = checkpoints is not None and best["step"] in checkpoints.steps()
    return {**best, "checkpoint": str(checkpoints.path(best["step"])) if checkpoints is not None and kept else None}


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Writes the report; a reader never sees half of it."""
    write_atomically(path, json.dumps(report, indent=1, allow_nan=False) + "\n")


def show_breakdown(console: Console, parts: Sequence[Part], cuda: bool) -> None:
    """Prints where the time of a step goes."""
    if not parts:
        console.say("no breakdown of a step: too few steps for it, or training.profile_steps is 0")
    for is_phase, title in ((True, "Time of a step on rank 0"), (False, "Operations within it")):
        chosen = [part for part in parts if part.is_phase == is_phase]
        if not chosen:
            continue
        columns = ["part", "ms", "share", *(["GPU ms"] if cuda else [])]
        rows = [
            [part.name, show(part.milliseconds, 2), f"{part.share:.1%}"]
            + ([show(part.device_milliseconds, 2)] if cuda else [])
            for part in chosen
        ]
        if is_phase:
            total = sum(part.milliseconds for part in chosen)
            device = [show(sum(part.device_milliseconds for part in chosen), 2)] if cuda else []
            rows.append(["whole step", show(total, 2), "100.0%", *device])
        console.table(title, columns, rows)


def show_metrics(console: Console, report: dict[str, Any]) -> None:
    """Prints the last evaluation beside the run's best and the best possible one, speed and memory."""
    metrics = report["metrics"]
    if metrics is not None:
        # A log loss there is for any rows: where it is null, predictions were no numbers.
        names = ("auroc", "ne", "loss")
        last = [show(math.nan if metrics["loss"] is None else metrics[name]) for name in names]
        of_run = report["best"] or dict.fromkeys(names)
        of_run_step = f" (step {of_run['step']})" if report["best"] else ""
        margin = metrics.get("best_auroc_margin")
        possible = [
            show(metrics.get("best_auroc")) + ("" if margin is None else f" ± {show(margin)}"),
            show(metrics.get("best_ne")),
            "-",
        ]
        best = [show(of_run[name]) for name in names]
        rows = [list(row) for row in zip(("AUROC", "NE", "log loss"), last, best, possible)]
        columns = ["metric", f"last (step {metrics['step']})", f"best{of_run_step}", "best possible"]
        console.table(f"Held-out rows ({metrics['samples']:,})", columns, rows)
        if report["best"] and report["best"]["checkpoint"]:
            console.say(f"best checkpoint: {report['best']['checkpoint']}")
    peaks = report["peak_memory_bytes"]
    speed = report["samples_per_second"]
    memory = f"peak memory a process {show_bytes(max(peak['rss'] for peak in peaks))}"
    if "cuda" in peaks[0]:
        memory += f", of a GPU {show_bytes(max(peak['cuda'] for peak in peaks))}"
    seconds = report["seconds"]
    waiting = seconds["waiting for data"] / seconds["training"] if seconds["training"] else 0.0
    console.say(
        f"{'-' if speed is None else f'{speed:,.0f}'} samples/s in training, {waiting:.1%} of it waiting for data, "
        f"{memory}"
    )
