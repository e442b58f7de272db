"""Are shapes that `TTSpec.suggest` makes for flows faster than balanced ones of no fewer parameters?"""

from __future__ import annotations

import statistics

from benchmarks.contenders import FlowTT
from benchmarks.questions.comparison import SHORT
from benchmarks.questions.run import LineUp, Run, key
from benchmarks.workloads import Workload
from flowtt_torchrec.spec import TTSpec

CLEAR_GAIN = 1.5


def flow_shapes(run: Run) -> None:
    """A step of tables from a million to billions of rows, ``objective="flow"`` against ``"balanced"``."""
    preset, report = run.preset, run.report
    gains: dict[str, float] = {}
    for rows, dim, rank in preset.shaped_tables:
        balanced = TTSpec.suggest(rows, dim, rank)
        shaped = TTSpec.suggest(rows, dim, rank, objective="flow", lookups=preset.lookups)
        table = f"{rows}x{dim}"
        report.note(
            f"flow_shapes: {table}, rank {rank}: balanced p {balanced.p}, q {balanced.q}, {balanced.num_parameters:,} "
            f"parameters; flow p {shaped.p}, q {shaped.q}, {shaped.num_parameters:,}"
        )
        contenders = FlowTT([balanced], name="flowtt_balanced"), FlowTT([shaped], name="flowtt_flow")
        for distribution, short in SHORT.items():
            report.progress(f"flow_shapes: {table}, {distribution}")
            lineup = LineUp(run, "flow_shapes", Workload((balanced,), distribution, preset.lookups))
            for contender, spec in zip(contenders, (balanced, shaped)):
                described = Workload((spec,), distribution, preset.lookups).describe()
                own = {column: described[column] for column in ("p", "q", "ranks", "parameters")}
                lineup.add(contender, "step", **own)
            ratios = lineup.measure().ratios(*(key(contender, "step") for contender in contenders))
            gains[f"{table}_{short}"] = statistics.median(ratios)
            report.figure(
                f"balanced_over_flow_shape_{table}_{short}",
                "step of the balanced shape over that of the flow shape of no more parameters; above 1 is faster",
                ratios,
            )
    report.figure("balanced_over_flow_shape_least", f"the least of {len(gains)} cases", [min(gains.values())])
    clear = sum(gain >= CLEAR_GAIN for gain in gains.values())
    report.figure("clearly_faster_flow_shapes", f"cases of {len(gains)} at {CLEAR_GAIN} or more", [clear])
