"""Does the time per lookup ever rise with the number of lookups?"""

from __future__ import annotations

import itertools
import statistics

import torch

from benchmarks.contenders import FlowTT
from benchmarks.harness import Measurement, measure
from benchmarks.questions.comparison import SHORT
from benchmarks.questions.run import Run
from benchmarks.workloads import Workload


def growth(run: Run) -> None:
    """A step at several numbers of lookups, on one thread and on all."""
    preset, report = run.preset, run.report
    ours = FlowTT([preset.balanced])
    worst, where = 0.0, ""
    try:
        for threads in sorted({1, run.threads}):
            torch.set_num_threads(threads)
            for distribution in SHORT:
                report.progress(f"growth: {distribution}, {threads} threads")
                workloads = {n: Workload((preset.balanced,), distribution, n) for n in preset.batch_sweep}
                measured = measure(
                    {str(n): ours.action("step", w.batches(preset.batches)) for n, w in workloads.items()},
                    preset.effort,
                )
                report.add_times(
                    measured,
                    {
                        str(n): {
                            **w.describe(),
                            "contender": ours.name,
                            "operation": "step",
                            "optimizer": ours.optimizer,
                        }
                        for n, w in workloads.items()
                    },
                    question="growth",
                    threads=threads,
                )
                ratio, pair = _worst_rise(measured, preset.batch_sweep)
                if ratio > worst:
                    worst, where = ratio, f"{pair}, {distribution}, {threads} threads"
    finally:
        torch.set_num_threads(run.threads)
    report.figure(
        "growth", f"largest time per lookup over that of fewer lookups ({where}); at most 1 is wanted", [worst]
    )


def _worst_rise(measured: Measurement, sizes: tuple[int, ...]) -> tuple[float, str]:
    """The largest ratio of times per lookup, more lookups over fewer, each the median of its rounds."""
    found = (
        (statistics.median(measured.ratios(str(more), str(fewer))) * fewer / more, f"{more:,} over {fewer:,} lookups")
        for fewer, more in itertools.combinations(sizes, 2)
    )
    return max(found)
