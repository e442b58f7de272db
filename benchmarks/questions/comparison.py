"""How fast is a lookup and a training step, against TT-Rec's algorithm and against the uncompressed table?"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.baselines import DenseTBE, TTRec
from benchmarks.contenders import FlowTT, counted_flops
from benchmarks.harness import Action, Measurement
from benchmarks.questions.run import LineUp, Run, check_agreement, key
from benchmarks.stages import stage_seconds
from benchmarks.workloads import Workload
from flowtt_torchrec import ops

SHORT = {"zipf_1.2": "zipf", "scattered_1.2": "scattered", "uniform": "uniform"}
_GEMM = "gemm"
_BROKEN_DOWN = 20  # steps


def comparison(run: Run) -> None:
    """Plan, forward, backward and step of one large table, under three distributions."""
    preset, report = run.preset, run.report
    report.progress(f"comparison: making tables of {preset.balanced.num_embeddings:,} rows, tensor-train and dense")
    ours, shaped = FlowTT([preset.balanced]), FlowTT([preset.flow_shape], name="flowtt_flow_shape")
    ttrec, dense = TTRec(ours.cores), DenseTBE([preset.balanced])
    unique = [TTRec(ours.cores, unique=True)] if preset.all_baselines else []
    baselines = [ttrec, *unique, dense]
    reduced, reduced_shaped = (
        FlowTT([spec], name=f"{of.name}_bfloat16", dtype=torch.bfloat16)
        for of, spec in ((ours, preset.balanced), (shaped, preset.flow_shape))
    )
    contenders = [ours, shaped, *baselines, reduced, reduced_shaped]
    for contender in contenders:
        report.add(
            [contender.num_bytes],
            "bytes",
            question="comparison",
            contender=contender.name,
            operation="weights and state",
            optimizer=contender.optimizer,
        )
    report.show(report.rows[-len(contenders) :])
    shaped_columns = Workload((preset.flow_shape,), "uniform", preset.lookups).describe()

    check_agreement(ours, [ttrec], Workload((preset.balanced,), "scattered_1.2", preset.lookups).batches(1)[0])
    for distribution, short in SHORT.items():
        report.progress(f"comparison: {distribution}, {preset.lookups:,} lookups")
        lineup = LineUp(run, "comparison", Workload((preset.balanced,), distribution, preset.lookups))
        lineup.add(ours, "plan", "forward", "forward_planned", "backward", "step")
        lineup.add(shaped, "forward", "step", p=shaped_columns["p"], parameters=shaped_columns["parameters"])
        lineup.add(reduced_shaped, "forward", "step", p=shaped_columns["p"], parameters=shaped_columns["parameters"])
        for contender in (*baselines, reduced):
            lineup.add(contender, "forward", "step")
        size = preset.gemm_size
        lineup.add_action(_GEMM, _gemm(size), contender="torch.mm", operation=f"{size}^3", **_NO_TABLE)
        measured = lineup.measure(preset.slow_effort)
        for operation in ("forward", "step"):
            report.figure(
                f"{operation}_vs_ttrec_{short}",
                f"times faster than the TT-Rec algorithm, {'plan and forward' if operation == 'forward' else 'step'}",
                measured.ratios(key(ttrec, operation), key(ours, operation)),
            )
        report.figure(
            f"step_vs_tbe_{short}",
            "our step's time over that of FBGEMM's dense table; less is better",
            measured.ratios(key(ours, "step"), key(dense, "step")),
        )
        report.figure(
            f"flow_shape_step_vs_tbe_{short}",
            "the same for the flow shape, at no more parameters",
            measured.ratios(key(shaped, "step"), key(dense, "step")),
        )
        for name, narrow, wide in (("", reduced, ours), ("flow_shape_", reduced_shaped, shaped)):
            report.figure(
                f"{name}bfloat16_step_over_float32_{short}",
                f"time of a step with bfloat16 cores over that with float32 ones{', flow shape' if name else ''}",
                measured.ratios(key(narrow, "step"), key(wide, "step")),
            )
        _count(run, ours, lineup, measured, short)
        if ops.backend_info().name == "native":
            _break_down(run, ours, lineup)
    report.figure(
        "flow_shape_dense_over_our_bytes",
        "bytes of the dense table and its state over ours",
        [dense.num_bytes / shaped.num_bytes],
    )


_NO_TABLE = dict.fromkeys(("distribution", "lookups", "pooling", "tables", "rows", "dim", "p", "q", "ranks"), "")


def _gemm(size: int) -> Action:
    a, b, out = (torch.randn(size, size) for _ in range(3))
    return Action(lambda _: torch.mm(a, b, out=out), lambda call: None)


def _break_down(run: Run, ours: FlowTT, lineup: LineUp) -> None:
    """Adds the times of the parts of a step."""
    parts: dict[str, list[float]] = {}
    for number in range(_BROKEN_DOWN + 1):
        batch = lineup.batches[number % len(lineup.batches)]
        for stage, seconds in stage_seconds(ours, batch, time.perf_counter).items():
            parts.setdefault(stage, []).append(1e3 * seconds)
    described: dict[str, Any] = {"question": "comparison", "contender": ours.name, "optimizer": ours.optimizer}
    start = len(run.report.rows)
    for stage, samples in parts.items():
        run.report.add(samples[1:], "ms", operation=f"of a step: {stage}", **described, **lineup.workload.describe())
    run.report.show(run.report.rows[start:])


def _count(run: Run, ours: FlowTT, lineup: LineUp, measured: Measurement, short: str) -> None:
    """Adds counts of rows, prefixes and operations, and their rate as a part of the large matrix product's."""
    report, spec = run.report, run.preset.balanced
    counts = [ours.plan(batch).counts[:2].tolist() for batch in lineup.batches]
    flops = [counted_flops(spec, rows, prefixes) for rows, prefixes in counts]
    forward, backward = (sum(f) / len(flops) for f in zip(*flops))
    described = {"question": "comparison", "contender": ours.name, **lineup.workload.describe()}
    for name, values in (
        ("distinct rows", [rows for rows, _ in counts]),
        ("distinct prefixes", [prefixes for _, prefixes in counts]),
        ("forward flops", [f for f, _ in flops]),
        ("backward flops", [b for _, b in flops]),
    ):
        report.add(values, "count", operation=name, **described)
    gemm = 2 * run.preset.gemm_size**3
    for operation, name, count in (("forward_planned", "forward", forward), ("backward", "backward", backward)):
        report.figure(
            f"gemm_fraction_{short}_{name}",
            f"counted operations a second of {name}, without the plan, over the rate of a large torch.mm",
            [count / gemm * ratio for ratio in measured.ratios(_GEMM, key(ours, operation))],
        )
