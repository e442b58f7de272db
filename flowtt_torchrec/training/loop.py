"""The training loop: steps, progress, evaluation, checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer

from flowtt_torchrec import ops
from flowtt_torchrec.datasets import ClickDataset, Split
from flowtt_torchrec.datasets.prefetch import Prefetcher
from flowtt_torchrec.training.best import best_evaluation, reason_to_stop
from flowtt_torchrec.training.config import CheckpointConfig, TrainingConfig
from flowtt_torchrec.training.console import Console, show, show_scores
from flowtt_torchrec.training.divergence import FirstNonFiniteLoss, non_finite_tensor
from flowtt_torchrec.training.errors import DivergenceError, UserError
from flowtt_torchrec.training.metrics import ClickMetrics, Scores
from flowtt_torchrec.training.model import LearningRate
from flowtt_torchrec.training.profiler import StepProfiler
from flowtt_torchrec.training.runtime import Runtime, decide_on_main

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
        save: writes a checkpoint of the model and what it is given, and returns where.
        mark_best: notes that the checkpoint of a step, if there is one, is the best.
        log: receives (name, value, step) of every score that there is, on all ranks.
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
        save: Callable[[Position, History], Path],
        mark_best: Callable[[int], None],
        log: Callable[[str, float, int], None],
    ) -> None:
        self._config = config
        self._checkpoint_every = checkpointing.every
        self._checkpointing = checkpointing.directory is not None
        self._runtime, self._console = runtime, console
        self._model, self._optimizer, self._learning_rate = model, optimizer, learning_rate
        self._train_data, self._val_data = train_data, val_data
        self._save, self._mark_best, self._log = save, mark_best, log
        self._pipeline = TrainPipelineSparseDist(model, optimizer, runtime.device, execute_all_batches=True)
        self._window = ClickMetrics(_WINDOW_SAMPLES)
        self._window_rows, self._window_seconds = 0, 0.0
        self._saved: tuple[int, Path] | None = None
        self._non_finite_loss = FirstNonFiniteLoss(runtime.device)
        self._diverged = False
        self.stopped: str | None = None  # why, if before the last epoch
        self.profiler = StepProfiler(config.profile_steps if runtime.is_main else 0, cuda=runtime.device.type == "cuda")
        self.position = Position()
        self.history = History()
        self.seconds = {"training": 0.0, "waiting for data": 0.0, "evaluation": 0.0, "checkpoints": 0.0}
        self.rows = 0

    @property
    def samples_per_second(self) -> float | None:
        """Training rows of all ranks a second, evaluation and checkpoints left out; None before the first step."""
        return self.rows / self.seconds["training"] if self.rows else None

    def resume(self, position: Position, history: History, path: Path) -> None:
        """Continues from the checkpoint ``path``; the model and the optimizer must already be what they were."""
        self.position, self.history = position, history
        self._saved = position.step, path
        best = best_evaluation(history.evaluation)
        if best is not None:  # it may have been killed before it was noted
            self._mark_best(best["step"])

    def run(self) -> None:
        """Trains all epochs, or until the evaluations say that it is enough, evaluating after each."""
        self._decide_to_stop()  # a run that continues may have been told before
        while self.stopped is None:
            if not self.position.epoch_finished:
                self._train_epoch()
                if self.stopped is not None:
                    break
                self.position.epoch_finished = True
                self._checkpoint()
            if self._evaluate():
                self._mark_best(self.position.step)
            if self.position.epoch + 1 == self._config.epochs:
                break
            self._decide_to_stop()
            if self.stopped is None:
                self.position = Position(self.position.step, self.position.epoch + 1)
        if self.stopped is not None:
            self._console.say(f"training stops: {self.stopped}")
        ops.synchronize()

    def _decide_to_stop(self) -> None:
        # Rank 0 decides for all: sums on GPUs may differ in their last bits, and all must stop at the same step.
        self.stopped = decide_on_main(self._runtime, lambda: reason_to_stop(self._config, self.history.evaluation))

    def _train_epoch(self) -> None:
        rows, drop_last = self.position.rows, self._config.drop_last_training_batch
        start = self._train_data.batches_in(rows, drop_last)
        assert start is not None, "checked when a checkpoint is loaded"
        done = rows // self._train_data.sharding.window if drop_last else start
        batches = self._batches(self.position.epoch, start, done)
        total = self._config.limit_train_batches or self._train_data.num_batches("train")
        self._console.start_progress(f"epoch {self.position.epoch + 1}/{self._config.epochs}", total, done)
        try:
            # The pipeline runs dry at the end of each stretch, so that nothing is under way when the model is
            # evaluated or saved.
            while self._train_stretch(batches):
                is_best = False
                if self._due(self._config.validation_freq_within_epoch):
                    is_best = self._evaluate()
                    self._decide_to_stop()
                if self._due(self._checkpoint_every) or is_best or self.stopped:  # with the scores of the evaluation
                    self._checkpoint()
                if is_best:
                    self._mark_best(self.position.step)
                if self.stopped is not None:
                    break
        finally:
            self._console.stop_progress()
            batches.close()
            self.seconds["waiting for data"] += batches.waited
        if self.position.rows == 0:
            raise UserError("there is not one training batch: the data has fewer rows than the job has ranks")

    def _batches(self, epoch: int, start: int, done: int) -> Prefetcher:
        """This rank's batches of an epoch after the first ``start``, of which ``done`` were trained on."""
        batches = self._train_data.batches("train", epoch, start)
        if self._config.drop_last_training_batch:  # each file may end with one
            full = self._train_data.sharding.batch_size
            batches = (batch for batch in batches if len(batch.labels) == full)
        limit = self._config.limit_train_batches
        return Prefetcher(
            batches if limit is None else islice(batches, max(limit - done, 0)),
            self._config.prefetch_batches,
            pin_memory=self._runtime.device.type == "cuda",
        )

    def _due(self, every: int | None) -> bool:
        return every is not None and self.position.step % every == 0

    def _train_stretch(self, batches: Prefetcher) -> bool:
        """Trains up to the next step at which something else is due; returns whether there are more batches."""
        limits = [self._config.validation_freq_within_epoch]
        if self._checkpointing:
            limits.append(self._checkpoint_every)
        steps = min((every - self.position.step % every for every in limits if every is not None), default=None)
        stretch = islice(batches, steps)
        self._model.train()
        started = time.perf_counter()
        while True:
            rate = self._learning_rate.set(self.position.step)
            self.profiler.begin_step()
            try:
                loss, logits, labels = self._pipeline.progress(stretch)
            except StopIteration:
                self.profiler.stop()  # what comes now, evaluation or checkpoint, is no step
                break
            self.profiler.end_step()
            self.position.step += 1
            self._non_finite_loss.update(self.position.step, loss)
            self.position.rows += len(labels) * self._runtime.world_size
            self._window.update(logits, labels)
            self._window_rows += len(labels) * self._runtime.world_size
            self._console.advance()
            if self._due(self._config.log_every):
                started = self._report_window(started, rate)
        self._report_window(started, rate)
        return not batches.at_end()

    def _report_window(self, started: float, rate: float) -> float:
        """Says how the steps since the last report went; returns the time from which the next ones count."""
        scores = self._window.compute()  # waits for the device
        seconds = time.perf_counter() - started
        if scores.samples == 0:
            return time.perf_counter()
        step = self._non_finite_loss.step()
        if step is not None:
            self._end_diverged(f"the loss of step {step} is not a finite number")
        self.seconds["training"] += seconds
        self.rows += self._window_rows
        speed = self._window_rows / seconds
        entry = {"step": self.position.step, "epoch": self.position.epoch, "learning_rate": rate}
        self.history.training.append({**entry, **scores_entry(scores), "samples_per_second": speed})
        self._log_scores("train", {**scores._asdict(), "samples_per_second": speed, "learning_rate": rate})
        text = f"{speed:,.0f} samples/s  {show_scores(scores)}"
        self._console.progress(
            f"epoch {self.position.epoch + 1}/{self._config.epochs}  step {self.position.step}  {text}", text
        )
        self._window.reset()
        self._window_rows = 0
        return time.perf_counter()

    def _evaluate(self) -> bool:
        """Scores the held-out rows; returns whether they are the best so far, the same on all ranks."""
        started = time.perf_counter()
        model = self._pipeline.detach()
        scores = evaluate(model, self._val_data, self._runtime.device, self._config.limit_val_batches)
        self._pipeline.attach()
        self.seconds["evaluation"] += time.perf_counter() - started
        if not scores.finite:
            self._end_diverged(
                f"after step {self.position.step} predictions of held-out rows are not finite numbers, while the loss "
                "still was"
            )
        best = self._val_data.best_metrics(self._config.limit_val_batches) if self._runtime.is_main else None
        entry = {"step": self.position.step, "epoch": self.position.epoch, **scores_entry(scores)}
        if best is not None:
            entry |= numbers_entry(
                {"best_auroc": best.auroc, "best_ne": best.ne, "best_auroc_margin": best.auroc_margin}
            )
        self.history.evaluation.append(entry)
        self._log_scores("val", scores._asdict())
        planted = (
            f"  (best possible: NE {show(best.ne)}  AUROC {show(best.auroc)} ± {show(best.auroc_margin)})"
            if best is not None
            else ""
        )
        so_far = decide_on_main(self._runtime, lambda: best_evaluation(self.history.evaluation))
        is_best = so_far is not None and so_far["step"] == self.position.step
        beside = ""
        if so_far is not None:
            beside = "  best so far" if is_best else f"  best so far: NE {show(so_far['ne'])} of step {so_far['step']}"
        self._console.say(f"held out, step {self.position.step}: {show_scores(scores)}{beside}{planted}")
        return is_best

    def _checkpoint(self) -> None:
        if not self._checkpointing:
            return
        started = time.perf_counter()
        ops.synchronize()  # raises what a GPU has found wrong with a batch, rather than save it
        tensors = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        name = non_finite_tensor(tensors)
        if name is None:
            self._saved = self.position.step, self._save(self.position, self.history)
        else:
            self._end_diverged(f"after step {self.position.step} {name} holds numbers that are not finite")
        self.seconds["checkpoints"] += time.perf_counter() - started

    def _end_diverged(self, what: str) -> None:
        """Ends the run, or says once that it should be ended, as the settings have it."""
        kept = "no checkpoint was written before"
        if self._saved is not None:
            step, path = self._saved
            losses = [entry["loss"] for entry in self.history.training if entry["step"] <= step]
            kept = (
                f"the last finite checkpoint, of step {step} (training loss {show(losses[-1] if losses else None)}), "
            )
            kept += f"is kept: {path}"
        advice = "lower optimizer.learning_rate, or lengthen optimizer.lr_warmup_steps, and "
        advice += "start anew" if self._saved is None else "continue with --resume"
        if self._saved is not None:
            advice += "; remove that checkpoint first, to continue from the one before, if its loss had already grown"
        if self._config.stop_on_nonfinite:
            raise DivergenceError(f"training diverged: {what}; {kept}; {advice}")
        if not self._diverged:
            self._console.say(f"training diverged: {what}; {kept}, and none is written while it is so")
        self._diverged = True

    def _log_scores(self, split: str, scores: Mapping[str, float | None]) -> None:
        for name, value in scores.items():
            if value is not None:
                self._log(f"{split}/{name}", value, self.position.step)


def evaluate(
    model: torch.nn.Module,
    dataset: ClickDataset,
    device: torch.device,
    limit: int | None = None,
    split: Split = "val",
) -> Scores:
    """Scores the model on the rows of a split of all ranks together. All ranks call it together.

    Args:
        model: the sharded `DLRMTrain`, not under a pipeline.
        dataset: the rows.
        device: of the model.
        limit: batches of each rank; by default all.
        split: one of ``dataset.splits``.
    """
    metrics = ClickMetrics()
    model.eval()
    with torch.no_grad():
        for batch in islice(dataset.batches(split), limit):
            _, (_, logits, labels) = model(batch.to(device))
            metrics.update(logits, labels)
    model.train()
    return metrics.compute()


def scores_entry(scores: Scores) -> dict[str, float | None]:
    """For JSON; see `Scores` for what is None, and NaN is as well."""
    return numbers_entry(scores._asdict())


def numbers_entry(numbers: Mapping[str, float | None]) -> dict[str, float | None]:
    """For JSON, which has no NaN and no infinity."""
    return {name: None if value is None or not math.isfinite(value) else value for name, value in numbers.items()}
