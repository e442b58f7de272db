"""What do rows that are made once and kept save, where the cores are frozen?"""

from __future__ import annotations

from benchmarks.contenders import FlowTT
from benchmarks.questions.comparison import SHORT
from benchmarks.questions.run import LineUp, Run, check_agreement, key
from benchmarks.workloads import Workload
from flowtt_torchrec.spec import TTSpec


def inference(run: Run) -> None:
    """Forward without gradients, by flows and from materialised rows."""
    preset, report = run.preset, run.report
    table = preset.balanced
    for rows in preset.inference_rows:
        spec = TTSpec.suggest(rows, table.embedding_dim, table.ranks[0])
        by_flows = FlowTT([spec], None)
        kept = FlowTT([spec], None, name="flowtt_materialised", materialised_bytes=1 << 40)
        kept.module.load_state_dict(by_flows.module.state_dict())
        for distribution, short in SHORT.items():
            report.progress(f"inference: {rows:,} rows, {distribution}")
            lineup = LineUp(run, "inference", Workload((spec,), distribution, preset.lookups))
            check_agreement(by_flows, [kept], lineup.batches[0])
            lineup.add(by_flows, "forward")
            lineup.add(kept, "forward")
            report.figure(
                f"materialised_speedup_{rows}_{short}",
                f"time of a forward pass by flows over one from materialised rows, a table of {rows:,} rows",
                lineup.measure().ratios(key(by_flows, "forward"), key(kept, "forward")),
            )
