"""``--evaluate``: a checkpoint's scores on a split, without training."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from flowtt_torchrec.datasets import ClickDataset, Sharding, Split
from flowtt_torchrec.files import write_atomically
from flowtt_torchrec.training.checkpoint import Checkpoints
from flowtt_torchrec.training.config import TrainConfig
from flowtt_torchrec.training.console import Console, show
from flowtt_torchrec.training.data import make_dataset
from flowtt_torchrec.training.errors import CheckpointError, UserError
from flowtt_torchrec.training.loop import evaluate, scores_entry
from flowtt_torchrec.training.model import build_optimizer, shard
from flowtt_torchrec.training.options import Evaluation
from flowtt_torchrec.training.planning import Planning, this_machine
from flowtt_torchrec.training.resume import RunState, SavedRun, check_settings
from flowtt_torchrec.training.runtime import Runtime, decide_on_main
from flowtt_torchrec.training.tables import planned_tables


def evaluate_checkpoint(
    config: TrainConfig, wanted: Evaluation, directory: Path, runtime: Runtime, console: Console
) -> None:
    """Loads a checkpoint, scores it, prints the scores and writes them. All ranks call it together.

    Args:
        config: the settings of the run that wrote it.
        wanted: which checkpoint, and the rows.
        directory: ``evaluate-<split>.json`` goes there.
        runtime: this process.
        console: where the scores go.

    Raises:
        UserError: there is no such checkpoint or split, or the file cannot be written.
        DataError: the data is wrong.
    """
    assert config.checkpoint.directory is not None, "checked when the command line is read"
    checkpoints = Checkpoints(config.checkpoint.directory)
    saved = SavedRun.read(checkpoints, _step(checkpoints, wanted.checkpoint, runtime))
    check_settings(str(saved.path), saved.config, asdict(config))
    training = config.training
    ranks = (runtime.rank, runtime.world_size)
    dataset = make_dataset(config.data, Sharding(training.test_batch_size or training.batch_size, *ranks))
    _check_split(dataset, wanted.split)

    config = replace(config, planner=replace(config.planner, save_plan=None))  # which is that of the training
    planning = Planning(
        config, dataset, this_machine(runtime), runtime.device, saved.sharding_types(), set(saved.specs)
    )
    plan = planning.plan(dist.group.WORLD)
    model = shard(planning.model, plan, planning.sharders, runtime.device)
    planned = planned_tables(planning.tables, planning.specs, plan, runtime.world_size)
    optimizer = build_optimizer(model, config.optimizer)
    RunState(config, runtime, model, optimizer, planning.specs, planned, dataset.identity()).load(checkpoints, saved)

    limit = training.limit_val_batches if wanted.split == "val" else None
    scores = evaluate(model, dataset, runtime.device, limit, wanted.split)
    if not runtime.is_main:
        return
    step = saved.position.step
    names = {"AUROC": scores.auroc, "NE": scores.ne, "log loss": scores.loss}
    rows = [[name, show(value, 6)] for name, value in names.items()]
    console.table(f"{wanted.split}, step {step} ({scores.samples:,} rows)", ["metric", "model"], rows)
    entry: dict[str, Any] = {"split": wanted.split, "step": step, "checkpoint": str(saved.path)}
    path = directory / f"evaluate-{wanted.split}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**entry, **scores_entry(scores), "command": sys.argv}, indent=1, allow_nan=False)
        write_atomically(path, text + "\n")
    except OSError as error:
        raise UserError(f"report.directory: cannot write {path}: {error.strerror}") from None
    console.say(f"scores of {saved.path}: {path}")


def _step(checkpoints: Checkpoints, wanted: str, runtime: Runtime) -> int:
    """The step of the checkpoint ``wanted``: ``best``, ``last`` or a number."""
    steps, best = decide_on_main(runtime, lambda: (checkpoints.steps(), checkpoints.best()))
    if not steps:
        raise CheckpointError(f"--evaluate: there is no checkpoint in {checkpoints.directory}")
    if wanted == "last":
        return steps[-1]
    if wanted != "best":
        if int(wanted) not in steps:
            raise CheckpointError(
                f"--checkpoint {wanted}: there is none of that step in {checkpoints.directory}; there are those of "
                f"{', '.join(map(str, steps))}"
            )
        return int(wanted)
    if best is None:
        raise CheckpointError(
            f"--evaluate: {checkpoints.directory} does not say which checkpoint is the best: no evaluation of a saved "
            "step had an NE; choose --checkpoint last, or a step"
        )
    return best


def _check_split(dataset: ClickDataset, split: Split) -> None:
    if split not in dataset.splits:
        raise UserError(
            f"--evaluate {split}: this data has no such split, only {', '.join(dataset.splits)}; folders that "
            "`python -m flowtt_torchrec prepare` wrote have train, val and test"
        )
    dataset.check_rows(split)
