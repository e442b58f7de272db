"""Times of the parts of the compiled CPU ops."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.contenders import FlowTT
from benchmarks.workloads import Batch

# In the order of csrc/cpu/executor.h. Where bags have one lookup each, pooling is part of "rows"; the middle core is
# updated in "flows and middle core".
STAGES = ("keys", "sort", "rows and prefixes", "rows", "pooling", "flows and middle core", "outer cores")
OTHER = "everything else"  # autograd, allocation, the call itself


def stage_seconds(contender: FlowTT, batch: Batch, clock: Callable[[], float]) -> dict[str, float]:
    """Seconds of each of `STAGES` in one training step, and of `OTHER`.

    Args:
        contender: what makes the step.
        batch: its batch.
        clock: of the whole step.
    """
    seconds = torch.zeros(len(STAGES), dtype=torch.float64)
    torch.ops.flowtt.record_cpu_stages(seconds)
    try:
        start = clock()
        contender.step(batch)
        whole = clock() - start
    finally:
        torch.ops.flowtt.record_cpu_stages(None)
    times = dict(zip(STAGES, seconds.tolist()))
    return {**times, OTHER: whole - sum(times.values())}
