"""What every question of the lookup benchmark works with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.contenders import Contender
from benchmarks.harness import Action, Effort, Measurement, Timer, by_cuda_events, by_the_clock, measure
from benchmarks.presets import Preset
from benchmarks.report import Report
from benchmarks.workloads import Batch, Workload


@dataclass(frozen=True)
class Run:
    """One run: how large, on how many threads, on what device, and where results go."""

    preset: Preset
    report: Report
    threads: int
    device: str = "cpu"

    @property
    def timer(self) -> Timer:
        return by_cuda_events if self.device == "cuda" else by_the_clock


class LineUp:
    """Contenders that are measured together on the same batches.

    Args:
        run: the run.
        question: name of the question, for the result rows.
        workload: what is looked up.
        batches: its batches; made here if not given.
    """

    def __init__(self, run: Run, question: str, workload: Workload, batches: Sequence[Batch] | None = None) -> None:
        self.workload = workload
        self.batches = workload.batches(run.preset.batches) if batches is None else batches
        self._run = run
        self._question = question
        self._actions: dict[str, Action] = {}
        self._columns: dict[str, dict[str, Any]] = {}

    def add(self, contender: Contender, *operations: str, **columns: Any) -> None:
        """Adds operations of a contender; ``columns`` differ from those of the workload."""
        own = columns if contender.is_tensor_train else {**_DENSE, "parameters": contender.num_parameters, **columns}
        for operation in operations:
            self.add_action(
                key(contender, operation),
                contender.action(operation, self.batches),
                contender=contender.name,
                operation=operation,
                optimizer=(contender.optimizer or "none") if operation in ("step", "backward") else "",
                **own,
            )

    def add_action(self, name: str, action: Action, **columns: Any) -> None:
        """Adds anything else to time."""
        if name in self._actions:
            raise ValueError(f"{name!r} is measured already")
        self._actions[name] = action
        self._columns[name] = columns

    def measure(self, effort: Effort | None = None, **columns: Any) -> Measurement:
        """Measures, adds the rows to the report, and prints them."""
        effort = self._run.preset.effort if effort is None else effort
        result = measure(self._actions, effort, self._run.timer)
        described = {"question": self._question, **self.workload.describe(), **columns}
        self._run.report.add_times(result, self._columns, **described)
        return result


_DENSE = {"p": "", "q": "", "ranks": ""}


def key(contender: Contender, operation: str) -> str:
    """Name of a contender's operation in a measurement."""
    return f"{contender.name} {contender.optimizer} {operation}"


def check_agreement(reference: Contender, others: Sequence[Contender], batch: Batch) -> None:
    """Raises ``RuntimeError`` unless contenders with the same cores give the same output: no time of a wrong result."""
    with torch.no_grad():
        expected = reference.forward(batch)
        for other in others:
            error = float((other.forward(batch) - expected).norm() / expected.norm())
            if not error < 1e-5:
                raise RuntimeError(f"{other.name} and {reference.name} differ by {error:.2g} of the output's norm")
