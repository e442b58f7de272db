"""How much memory does training need at most?"""

from __future__ import annotations

from benchmarks.memory import Peak, measure_peak, modelled_peak
from benchmarks.questions.run import Run
from benchmarks.workloads import Workload


def memory(run: Run) -> None:
    """Peak memory of training steps, each contender in a process of its own, and what it should be."""
    preset, report = run.preset, run.report
    contenders = ["flowtt", "ttrec"]
    if preset.all_baselines:
        contenders += ["ttrec_unique", "tbe", "nn_embedding_bag"]
    bags = preset.pooled_lookups // preset.pooling
    plain = Workload((preset.balanced,), "uniform", preset.lookups)
    pooled = Workload((preset.balanced,), "uniform", bags * preset.pooling, preset.pooling)
    start = len(report.rows)
    ratios = []
    for contender in contenders:
        report.progress(f"memory: {contender}, {plain.lookups:,} lookups")
        peak = measure_peak(contender, plain, run.threads)
        _add(run, contender, plain, peak)
        if contender == "flowtt":
            ratios.append((peak.model + peak.step) / modelled_peak(plain, peak, run.threads))
    report.progress(f"memory: flowtt, {pooled.lookups:,} lookups in bags of {pooled.pooling}")
    peak = measure_peak("flowtt", pooled, run.threads)
    _add(run, "flowtt", pooled, peak)
    ratios.append((peak.model + peak.step) / modelled_peak(pooled, peak, run.threads))
    report.show(report.rows[start:])
    report.figure(
        "peak_over_model",
        "peak memory of a step over weights + state + plan + output + distinct rows + outer cores a thread",
        [max(ratios)],
    )


def _add(run: Run, contender: str, workload: Workload, peak: Peak) -> None:
    columns = {"question": "memory", "contender": contender, **workload.describe()}
    run.report.add([peak.model], "bytes", operation="weights and state", **columns)
    run.report.add([peak.step], "bytes", operation=f"step ({peak.method})", **columns)
    if contender == "flowtt":
        run.report.add([peak.plan], "bytes", operation="plan", **columns)
        run.report.add([modelled_peak(workload, peak, run.threads)], "bytes", operation="modelled peak", **columns)
