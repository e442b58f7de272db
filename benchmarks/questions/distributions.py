"""How much does the time depend on which ids are looked up?"""

from __future__ import annotations

from benchmarks.contenders import FlowTT
from benchmarks.harness import measure
from benchmarks.questions.run import Run
from benchmarks.workloads import DISTRIBUTIONS, Workload

SPREAD = ("one_id", "zipf_0.8", "zipf_1.05", "zipf_1.2", "uniform", "distinct")


def distributions(run: Run) -> None:
    """A step at the same number of lookups under every distribution, for both shapes."""
    preset, report = run.preset, run.report
    for spec, name, prefix in (
        (preset.balanced, "flowtt", ""),
        (preset.flow_shape, "flowtt_flow_shape", "flow_shape_"),
    ):
        report.progress(f"distributions: {name}")
        ours = FlowTT([spec], name=name)
        workloads = {d: Workload((spec,), d, preset.lookups) for d in DISTRIBUTIONS}
        measured = measure(
            {d: ours.action("step", w.batches(preset.batches)) for d, w in workloads.items()}, preset.effort
        )
        own = {"contender": name, "operation": "step", "optimizer": ours.optimizer}
        report.add_times(measured, {d: {**w.describe(), **own} for d, w in workloads.items()}, question="distributions")
        report.figure(
            f"{prefix}distribution_spread",
            f"slowest over fastest step of {', '.join(SPREAD)}",
            measured.map_rounds(lambda s: max(s[d] for d in SPREAD) / min(s[d] for d in SPREAD)),
        )
