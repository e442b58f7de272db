"""What does one call for all tables save?"""

from __future__ import annotations

from benchmarks.baselines import DenseTBE
from benchmarks.contenders import FlowTT, FlowTTCallATable
from benchmarks.questions.run import LineUp, Run, check_agreement, key
from benchmarks.workloads import Workload, small_tables


def tables(run: Run) -> None:
    """Groups of small tables: one call against a call a table, and against FBGEMM's dense tables."""
    preset, report = run.preset, run.report
    largest = preset.tables[-1]
    for count in preset.tables:
        specs = small_tables(count)
        together, apart, dense = FlowTT(specs), FlowTTCallATable(specs), DenseTBE(specs)
        for lookups in preset.lookups_a_table:
            report.progress(f"tables: {count} tables, {lookups} lookups each")
            lineup = LineUp(run, "tables", Workload(specs, "zipf_1.05", lookups))
            apart.copy_cores(together.cores)
            check_agreement(together, [apart], lineup.batches[0])
            for contender in (together, apart, dense):
                lineup.add(contender, "forward", "step")
            measured = lineup.measure()
            if count != largest:
                continue
            speedups = {
                operation: measured.ratios(key(apart, operation), key(together, operation))
                for operation in ("forward", "step")
            }
            suffix = "" if lookups == preset.lookups_a_table[0] else f"_{lookups}_lookups"
            for operation, ratios in speedups.items():
                report.figure(
                    f"one_call_speedup_{operation}{suffix}",
                    f"time of {count} calls over one for {count} tables, {operation}",
                    ratios,
                )
            report.figure(
                f"one_call_speedup{suffix}",
                "the smaller of both",
                [min(both) for both in zip(*speedups.values(), strict=True)],
            )


def mixed(run: Run) -> None:
    """A group of tables from a thousand to millions of rows, in one call, as a model has them."""
    preset = run.preset
    ours, dense = FlowTT(preset.mixed), DenseTBE(preset.mixed)
    for distribution in ("zipf_1.05", "scattered_1.05", "uniform"):
        run.report.progress(f"mixed: {len(preset.mixed)} tables, {preset.mixed_lookups} lookups each, {distribution}")
        lineup = LineUp(run, "mixed", Workload(preset.mixed, distribution, preset.mixed_lookups))
        for contender in (ours, dense):
            lineup.add(contender, "forward", "step")
        lineup.measure()
