"""How lookups are best done, table by table: what each strategy costs, from the plan's counts.

A table's lookups can go by *prefix* (flows: the ops' default), by *unique* row, *direct* (every lookup by itself), or
be gathered from *materialised* rows that were all made before. The model is closed and its constants are measured; see
docs/notes/cpu_kernels.md for both, and for why only `flowtt_torchrec.materialised` chooses between strategies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from flowtt_torchrec.layout import TABLE_SHIFT, TTLayout
from flowtt_torchrec.plan import FlowPlan
from flowtt_torchrec.spec import TTSpec

STRATEGIES = ("prefix", "unique", "direct", "materialised")


class Constants(NamedTuple):
    """What the parts of a forward pass take, in ns on one thread (machine and fit: docs/notes/cpu_kernels.md).

    ``python -m flowtt_torchrec calibrate --model lookup`` fits them anew.

    Attributes:
        lookup: key, sort and bag of a lookup.
        lookup_element: an element of its row, written.
        row: taking up a distinct row.
        row_flop: an operation of the product that makes it.
        prefix: taking up a flow.
        prefix_flop: an operation of its prefix product.
        direct_lookup: key of a lookup that is not sorted.
        slice_byte: a byte of the largest core's slice, which only sorted lookups find in the cache.
        gather_lookup: taking up a lookup of a materialised row.
        gather_element: an element of it, read and written.
        gather_far_row: what comes on top for a distinct row where the rows take more than `FAR_BYTES`.
    """

    lookup: float = 20.0
    lookup_element: float = 0.34
    row: float = 26.0
    row_flop: float = 0.0122
    prefix: float = 28.0
    prefix_flop: float = 0.0089
    direct_lookup: float = 4.0
    slice_byte: float = 0.04
    gather_lookup: float = 2.0
    gather_element: float = 0.25
    gather_far_row: float = 100.0


MEASURED = Constants()
FAR_BYTES = 1 << 25  # rows that take more come from memory, not from a cache


class Counts(NamedTuple):
    """Lookups of a table in a batch, its distinct rows among them, and its flows: their distinct prefixes."""

    lookups: int
    rows: int
    flows: int


class Estimate(NamedTuple):
    """What the lookups of a table would take, by strategy.

    Attributes:
        table: its name.
        counts: what the batch has of it.
        nanoseconds: of a forward pass on one thread, by strategy; to make the rows is not part of ``"materialised"``.
        make_rows: nanoseconds to make all rows of the table.
        row_bytes: what they take in float32.
    """

    table: str
    counts: Counts
    nanoseconds: dict[str, float]
    make_rows: float
    row_bytes: int

    @property
    def best_without_rows(self) -> str:
        """The cheapest strategy for cores that may have changed."""
        return min((s for s in STRATEGIES if s != "materialised"), key=self.nanoseconds.__getitem__)


def table_counts(layout: TTLayout, offsets: Tensor, plan: FlowPlan) -> list[Counts]:
    """Counts of each table of a batch; waits for the plan.

    Args:
        layout: the tables and features.
        offsets: the batch's, as for `flowtt_torchrec.ops.flow_plan`.
        plan: its plan.
    """
    rows, flows = (int(count) for count in plan.counts[:2])
    shift = int(layout.tables[0, TABLE_SHIFT])
    row_tables = plan.row_keys[:rows] >> shift
    flow_tables = row_tables[plan.flow_starts[:flows].long()]
    starts = layout.feature_starts(offsets)
    lookups = [0] * layout.num_tables
    for table, start, end in zip(layout.feature_tables, starts, starts[1:]):
        lookups[table] += end - start
    of_rows, of_flows = (torch.bincount(t, minlength=layout.num_tables).tolist() for t in (row_tables, flow_tables))
    return [Counts(*counts) for counts in zip(lookups, of_rows, of_flows)]


def strategy_amounts(spec: TTSpec, counts: Counts) -> dict[str, dict[str, float]]:
    """How often each of the `Constants` occurs in a forward pass over one table, by strategy; 0 if not named."""
    n, rows, flows = counts
    slice_bytes = 4 * spec.core_sizes[-2] // spec.p[-2]
    far = 4 * spec.num_embeddings * spec.embedding_dim > FAR_BYTES
    lookups = {"lookup": n, "lookup_element": n * spec.embedding_dim}

    def products(rows: int, prefixes: int) -> dict[str, float]:
        return {
            "row": rows,
            "row_flop": rows * spec.flops_per_row,
            "prefix": prefixes,
            "prefix_flop": prefixes * spec.flops_per_prefix,
        }

    return {
        "prefix": {**lookups, **products(rows, flows)},
        "unique": {**lookups, **products(rows, rows)},
        "direct": {
            "direct_lookup": n,
            "lookup_element": n * spec.embedding_dim,
            **products(n, n),
            "slice_byte": n * slice_bytes,
        },
        "materialised": {
            "gather_lookup": n,
            "gather_element": n * spec.embedding_dim,
            "gather_far_row": rows if far else 0,
        },
    }


def estimate(name: str, spec: TTSpec, counts: Counts, constants: Constants = MEASURED) -> Estimate:
    """What the lookups of one table would take."""

    def time(amounts: Mapping[str, float]) -> float:
        return sum(getattr(constants, part) * amount for part, amount in amounts.items())

    times = {strategy: time(amounts) for strategy, amounts in strategy_amounts(spec, counts).items()}
    every = spec.num_embeddings
    make = time(strategy_amounts(spec, Counts(every, every, -(-every // spec.p[-1])))["prefix"])
    return Estimate(name, counts, times, make, 4 * every * spec.embedding_dim)


def explain(layout: TTLayout, offsets: Tensor, plan: FlowPlan) -> list[Estimate]:
    """What the batch's lookups would take by each strategy, for every table that it looks up.

    Args:
        layout: the tables and features.
        offsets: the batch's, as for `flowtt_torchrec.ops.flow_plan`.
        plan: its plan, with ``flow="prefix"``.
    """
    counted = zip(layout.names, layout.specs, table_counts(layout, offsets, plan))
    return [estimate(name, spec, counts) for name, spec, counts in counted if counts.lookups]
