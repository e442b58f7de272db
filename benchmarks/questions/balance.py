"""Do threads get equal work when one table has most of the lookups?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from benchmarks.contenders import FlowTT
from benchmarks.harness import measure
from benchmarks.questions.run import Run
from benchmarks.workloads import Batch, draw_ids, small_tables
from flowtt_torchrec.spec import TTSpec

SMALL_TABLES = 18
HOT_SHARE = 0.9  # of the lookups are of the large table


def balance(run: Run) -> None:
    """A step of one large and many small tables, on one thread and on all: the large one with 90 % of the lookups."""
    preset, report = run.preset, run.report
    specs = (preset.balanced, *small_tables(SMALL_TABLES))
    ours = FlowTT(specs)
    few = round((1 - HOT_SHARE) * preset.lookups / SMALL_TABLES)
    lookups = {
        "skewed": [preset.lookups - few * SMALL_TABLES] + [few] * SMALL_TABLES,
        "even": [preset.lookups // len(specs)] * len(specs),
    }
    batches = {
        name: [_batch(specs, counts, seed) for seed in range(preset.batches)] for name, counts in lookups.items()
    }
    seconds: dict[tuple[str, int], float] = {}
    try:
        for threads in sorted({1, run.threads}):
            report.progress(f"balance: {threads} threads")
            torch.set_num_threads(threads)
            measured = measure({name: ours.action("step", b) for name, b in batches.items()}, preset.effort)
            columns = {"contender": ours.name, "operation": "step", "optimizer": ours.optimizer, "tables": len(specs)}
            report.add_times(
                measured,
                {name: {**columns, "distribution": name, "lookups": sum(lookups[name])} for name in batches},
                question="balance",
                threads=threads,
            )
            for name in batches:
                seconds[name, threads] = statistics.median(measured.seconds[name])
    finally:
        torch.set_num_threads(run.threads)
    gains = {name: seconds[name, 1] / seconds[name, run.threads] for name in batches}
    report.figure(
        "skewed_tables_scaling",
        f"speed-up by {run.threads} threads with {HOT_SHARE:.0%} of the lookups in one of {len(specs)} tables, over "
        "that with equal shares; 1 where threads get equal work",
        [gains["skewed"] / gains["even"]],
    )


def _batch(specs: Sequence[TTSpec], counts: Sequence[int], seed: int) -> Batch:
    """Bags of one lookup; a table with fewer lookups than the largest has empty bags at the end."""
    bags = max(counts)
    lengths = torch.cat([(torch.arange(bags) < count).long() for count in counts])
    ids = [draw_ids("zipf_1.05", spec.num_embeddings, count, seed) for spec, count in zip(specs, counts, strict=True)]
    grad_output = torch.randn(bags, sum(spec.embedding_dim for spec in specs)) * 1e-3
    return Batch(torch.cat(ids), torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), grad_output)
