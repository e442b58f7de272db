"""Measures `CostConstants` on this machine: a few tables and batches, and a fit of their times."""

from __future__ import annotations

import datetime
import itertools
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowtt_torchrec import ops
from flowtt_torchrec.cost_fits import fit, fit_lookup_costs, fit_step_costs
from flowtt_torchrec.embedding_bag import BatchedTTEmbeddingBags
from flowtt_torchrec.machine import device_name
from flowtt_torchrec.optimizers import OptimizerSpec
from flowtt_torchrec.planner_costs import CostConstants, PassCost
from flowtt_torchrec.spec import TTSpec
from flowtt_torchrec.versions import versions

# Rows, columns, rank: flows of many and of few rows, products of many and of few operations a byte.
SHAPES = ((1_000_000, 32, 8), (1_000_000, 64, 32), (10_000_000, 64, 64), (200_000, 128, 32))
LOOKUPS = (2_000, 20_000, 100_000)
POOLING = 8


@dataclass(frozen=True)
class Sample:
    """One batch: what it has to do, and how long that took.

    Attributes:
        features: operations, lookups and flows.
        forward_ms: of plan and forward.
        backward_ms: of backward with the update.
    """

    features: tuple[float, float, float]
    forward_ms: float
    backward_ms: float


def calibrate(
    device: str = "cpu",
    shapes: Sequence[tuple[int, int, int]] | None = None,
    lookups: Sequence[int] | None = None,
    repeats: int = 5,
) -> CostConstants:
    """Measures and fits.

    Args:
        device: ``"cpu"`` or ``"cuda"``; on the CPU with as many threads as torch uses now.
        shapes: rows, columns and rank of the tables; `SHAPES` if not given.
        lookups: of the batches; `LOOKUPS` if not given.
        repeats: runs of each, of which the fastest counts.
    """
    cases = itertools.product(shapes or SHAPES, lookups or LOOKUPS)
    samples = [_measure(torch.device(device), *shape, n, repeats) for shape, n in cases]
    bandwidth = _bandwidth(torch.device(device), repeats)
    measured = _measured_on(device)
    threads = f", {measured['threads']} threads" if device == "cpu" else ""
    return CostConstants(
        device,
        f"measured on {measured['machine']}{threads}, {measured['date']}",
        _fit([s.features for s in samples], [s.forward_ms for s in samples], bandwidth),
        _fit([s.features for s in samples], [s.backward_ms for s in samples], bandwidth),
        measured,
    )


def refit(model: str) -> dict[str, Any]:
    """Fits the constants of a cost model that is the same on all machines, and says how well.

    Args:
        model: ``"lookup"`` for `lookup_costs`, ``"step"`` for `step_costs`.
    """
    fitted = fit_lookup_costs() if model == "lookup" else fit_step_costs()
    return {"model": model, **fitted._asdict(), "measured": _measured_on("cpu")}


def _measured_on(device: str) -> dict[str, Any]:
    return {
        "machine": device_name(device),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "backend": ops.backend_info().name,
    }


def _measure(device: torch.device, rows: int, columns: int, rank: int, lookups: int, repeats: int) -> Sample:
    spec = TTSpec.suggest(rows, columns, rank)
    bags = BatchedTTEmbeddingBags({"t": spec}, optimizer=OptimizerSpec("adagrad", learning_rate=0.01), device=device)
    indices = torch.randint(0, rows, (lookups,), generator=torch.Generator().manual_seed(lookups)).to(device)
    offsets = torch.arange(0, lookups + 1, POOLING, device=device)
    offsets[-1] = lookups
    plan = ops.flow_plan(bags.layout, indices, offsets)
    distinct, flows = plan.counts[:2].tolist()
    forward_ms, backward_ms = float("inf"), float("inf")
    for _ in range(repeats + 1):  # the first is a warm-up that is not faster than the others
        start = _now(device)
        output = bags(indices, offsets)
        middle = _now(device)
        output.backward(torch.ones_like(output))
        forward_ms, backward_ms = min(forward_ms, middle - start), min(backward_ms, _now(device) - middle)
    flops = distinct * spec.flops_per_row + flows * spec.flops_per_prefix
    return Sample((float(flops), float(lookups), float(flows)), forward_ms, backward_ms)


def _bandwidth(device: torch.device, repeats: int, numbers: int = 8_000_000) -> float:
    """Bytes a millisecond of a copy, read and written."""
    source = torch.zeros(numbers, device=device)
    target = torch.empty_like(source)
    return 2 * 4 * numbers / min(_time(device, lambda: target.copy_(source)) for _ in range(repeats))


def _time(device: torch.device, run: Callable[[], Tensor]) -> float:
    start = _now(device)
    run()
    return _now(device) - start


def _now(device: torch.device) -> float:
    """Milliseconds, when all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() * 1e3


def _fit(features: Sequence[Sequence[float]], times: Sequence[float], bytes_per_ms: float) -> PassCost:
    """Times a unit of operations, lookups and flows. Products are never for nothing."""
    amounts = [dict(zip(("flop", "lookup", "flow"), sample)) for sample in features]
    found = fit(amounts, times, always=("flop",)).constants
    return PassCost(1 / found["flop"], bytes_per_ms, found["lookup"], found["flow"])
