"""The training loop: steps, progress, evaluation, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

import torch
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer

from flowtt_torchrec import ops
from flowtt_torchrec.datasets import ClickDataset
from flowtt_torchrec.training.config import CheckpointConfig, TrainingConfig
from flowtt_torchrec.training.console import Console, show, show_scores
from flowtt_torchrec.training.errors import UserError
from flowtt_torchrec.training.metrics import ClickMetrics, Scores
from flowtt_torchrec.training.model import LearningRate
from flowtt_torchrec.training.profiler import StepProfiler
from flowtt_torchrec.training.runtime import Runtime

_WINDOW_SAMPLES = 131_072  # of one rank, for the AUROC of a progress line


@dataclass
class Position:
    """How far a run is, as a checkpoint stores it.

    Args:
        step: steps so far, over all epochs.
        epoch: the current one.
        rows: training rows that all ranks have taken of it.
        epoch_finished: all rows were taken; what is left of the epoch is its evaluation.
    """

    step: int = 0
    epoch: int = 0
    rows: int = 0
    epoch_finished: bool = False


@dataclass
class History:
    """What was measured on the way, each a dictionary with its step.

    Args:
        training: scores of the rows since the entry before, as they were predicted before the step.
        evaluation: scores of the held-out rows.
    """

    training: list[dict[str, Any]] = field(default_factory=list)
    evaluation: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """Trains one model on one rank, in step with the others.

    Args:
        config: the ``training`` section.
        checkpointing: the ``checkpoint`` section.
        runtime: this process.
        console: where progress goes.
        model: the sharded model.
        optimizer: of the whole model.
        learning_rate: set before each step.
        train_data: rows to train on.
        val_data: rows to evaluate on, maybe in batches of another size.
        save: writes a checkpoint of the model and what it is given.
        log: receives (name, value, step) of every score, on all ranks.
    """

    def __init__(
        self,
        config: TrainingConfig,
        checkpointing: CheckpointConfig,
        runtime: Runtime,
        console: Console,
        model: DistributedModelParallel,
        optimizer: CombinedOptimizer,
        learning_rate: LearningRate,
        train_data: ClickDataset,
        val_data: ClickDataset,
        save: Callable[[Position, History], None],
        log: Callable[[str, float, int], None],
    ) -> None:
        self._config = config
        self._checkpoint_every = checkpointing.every
        self._checkpointing = checkpointing.directory is not None
        self._runtime, self._console = runtime, console
        self._model, self._learning_rate = model, learning_rate
        self._train_data, self._val_data = train_data, val_data
        self._save, self._log = save, log
        self._pipeline = TrainPipelineSparseDist(model, optimizer, runtime.device, execute_all_batches=True)
        self._window = ClickMetrics(_WINDOW_SAMPLES)
        self._window_rows, self._window_seconds = 0, 0.0
        self._saved_step: int | None = None
        self.profiler = StepProfiler(config.profile_steps if runtime.is_main else 0, cuda=runtime.device.type == "cuda")
        self.position = Position()
        self.history = History()
        self.seconds = {"training": 0.0, "evaluation": 0.0, "checkpoints": 0.0}
        self.rows = 0

    @property
    def samples_per_second(self) -> float | None:
        """Training rows of all ranks a second, evaluation and checkpoints left out; None before the first step."""
        return self.rows / self.seconds["training"] if self.rows else None

    def resume(self, position: Position, history: History) -> None:
        """Continues from there; the model and the optimizer must already be what they were."""
        self.position, self.history = position, history
        self._saved_step = position.step

    def run(self) -> None:
        """Trains all epochs, evaluating after each."""
        while self.position.epoch < self._config.epochs:
            if not self.position.epoch_finished:
                self._train_epoch()
                self.position.epoch_finished = True
                self._checkpoint()
            self._evaluate()
            if self.position.epoch + 1 == self._config.epochs:
                ops.synchronize()
                break
            self.position = Position(self.position.step, self.position.epoch + 1)

    def _train_epoch(self) -> None:
        window = self._train_data.sharding.window
        done = self.position.rows // window
        batches = self._batches(self.position.epoch, done)
        total = self._config.limit_train_batches or self._train_data.num_batches("train")
        self._console.start_progress(f"epoch {self.position.epoch + 1}/{self._config.epochs}", total, done)
        try:
            # The pipeline runs dry at the end of each stretch, so that nothing is under way when the model is
            # evaluated or saved.
            while self._train_stretch(batches):
                if self._due(self._checkpoint_every):
                    self._checkpoint()
                if self._due(self._config.validation_freq_within_epoch):
                    self._evaluate()
        finally:
            self._console.stop_progress()
        if self.position.rows == 0:
            raise UserError("there is not one training batch: the data has fewer rows than the job has ranks")

    def _batches(self, epoch: int, done: int) -> Iterator[Batch]:
        """This rank's batches of an epoch after the first ``done``."""
        batches = self._train_data.batches("train", epoch, done)
        if self._config.drop_last_training_batch:
            batches = takewhile(lambda batch: len(batch.labels) == self._train_data.sharding.batch_size, batches)
        limit = self._config.limit_train_batches
        return batches if limit is None else islice(batches, max(limit - done, 0))

    def _due(self, every: int | None) -> bool:
        return every is not None and self.position.step % every == 0

    def _train_stretch(self, batches: Iterator[Batch]) -> bool:
        """Trains up to the next step at which something else is due; returns whether there may be more batches."""
        limits = [self._config.validation_freq_within_epoch]
        if self._checkpointing:
            limits.append(self._checkpoint_every)
        steps = min((every - self.position.step % every for every in limits if every is not None), default=None)
        stretch = islice(batches, steps)
        taken = 0
        self._model.train()
        started = time.perf_counter()
        while True:
            rate = self._learning_rate.set(self.position.step)
            self.profiler.begin_step()
            try:
                _, logits, labels = self._pipeline.progress(stretch)
            except StopIteration:
                self.profiler.stop()  # what comes now, evaluation or checkpoint, is no step
                break
            self.profiler.end_step()
            taken += 1
            self.position.step += 1
            self.position.rows += len(labels) * self._runtime.world_size
            self._window.update(logits, labels)
            self._window_rows += len(labels) * self._runtime.world_size
            self._console.advance()
            if self._due(self._config.log_every):
                started = self._report_window(started, rate)
        self._report_window(started, rate)
        return steps is not None and taken == steps

    def _report_window(self, started: float, rate: float) -> float:
        """Says how the steps since the last report went; returns the time from which the next ones count."""
        scores = self._window.compute()  # waits for the device
        seconds = time.perf_counter() - started
        if scores.samples == 0:
            return time.perf_counter()
        self.seconds["training"] += seconds
        self.rows += self._window_rows
        speed = self._window_rows / seconds
        entry = {"step": self.position.step, "epoch": self.position.epoch, "learning_rate": rate}
        self.history.training.append({**entry, **scores_entry(scores), "samples_per_second": speed})
        for name, value in (*scores._asdict().items(), ("samples_per_second", speed), ("learning_rate", rate)):
            self._log(f"train/{name}", value, self.position.step)
        text = f"{speed:,.0f} samples/s  {show_scores(scores)}"
        self._console.progress(
            f"epoch {self.position.epoch + 1}/{self._config.epochs}  step {self.position.step}  {text}", text
        )
        self._window.reset()
        self._window_rows = 0
        return time.perf_counter()

    def _evaluate(self) -> None:
        started = time.perf_counter()
        model = self._pipeline.detach()
        scores = evaluate(model, self._val_data, self._runtime.device, self._config.limit_val_batches)
        self._pipeline.attach()
        self.seconds["evaluation"] += time.perf_counter() - started
        best = self._val_data.best_metrics(self._config.limit_val_batches) if self._runtime.is_main else None
        entry = {"step": self.position.step, "epoch": self.position.epoch, **scores_entry(scores)}
        if best is not None:
            entry |= {"best_auroc": best.auroc, "best_ne": best.ne}
        self.history.evaluation.append(entry)
        for name, value in scores._asdict().items():
            self._log(f"val/{name}", value, self.position.step)
        planted = f"  (best possible: NE {show(best.ne)}  AUROC {show(best.auroc)})" if best is not None else ""
        self._console.say(f"held out, step {self.position.step}: {show_scores(scores)}{planted}")

    def _checkpoint(self) -> None:
        if not self._checkpointing or self._saved_step == self.position.step:
            return
        started = time.perf_counter()
        ops.synchronize()  # raises what a GPU has found wrong with a batch, rather than save it
        self._save(self.position, self.history)
        self._saved_step = self.position.step
        self.seconds["checkpoints"] += time.perf_counter() - started


def evaluate(model: torch.nn.Module, dataset: ClickDataset, device: torch.device, limit: int | None = None) -> Scores:
    """Scores the model on the held-out rows of all ranks together. All ranks call it together.

    Args:
        model: the sharded `DLRMTrain`, not under a pipeline.
        dataset: its ``"val"`` split is used.
        device: of the model.
        limit: batches of each rank; by default all.
    """
    metrics = ClickMetrics()
    model.eval()
    with torch.no_grad():
        for batch in islice(dataset.batches("val"), limit):
            _, (_, logits, labels) = model(batch.to(device))
            metrics.update(logits, labels)
    model.train()
    return metrics.compute()


def scores_entry(scores: Scores) -> dict[str, float | None]:
    """For JSON, which has no NaN."""
    return {name: None if value != value else value for name, value in scores._asdict().items()}
