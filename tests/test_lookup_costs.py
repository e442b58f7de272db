from __future__ import annotations

import pytest
import torch
from tt_samples import SPECS, layout_of, mixed_layout, random_batch

from flowtt_torchrec import ops
from flowtt_torchrec.lookup_costs import STRATEGIES, Counts, estimate, explain, table_counts
from flowtt_torchrec.spec import TTSpec


@pytest.mark.parametrize("batch_size", [0, 1, 17])
def test_counts_of_each_table(batch_size):
    layout = mixed_layout()
    indices, offsets = random_batch(layout, batch_size)
    found = table_counts(layout, offsets, ops.flow_plan(layout, indices, offsets))
    for table, (counts, spec) in enumerate(zip(found, layout.specs)):
        own = [
            indices[int(offsets[f * batch_size]) : int(offsets[(f + 1) * batch_size])]
            for f, of in enumerate(layout.feature_tables)
            if of == table
        ]
        ids = torch.cat([torch.empty(0, dtype=torch.int64), *own])
        assert counts == (ids.numel(), ids.unique().numel(), (ids // spec.p[-1]).unique().numel())


def test_explains_the_tables_of_a_batch():
    layout = layout_of("two_cores", "three_cores", "rank_32", feature_tables=[2, 0])
    indices, offsets = torch.tensor([0, 1, 999, 999, 5]), torch.tensor([0, 2, 4, 5, 5])
    first, second = explain(layout, offsets, ops.flow_plan(layout, indices, offsets))
    assert (first.table, first.counts) == ("two_cores", Counts(1, 1, 1))
    assert (second.table, second.counts) == ("rank_32", Counts(4, 3, 2))
    assert tuple(second.nanoseconds) == STRATEGIES
    assert second.row_bytes == 1000 * 64 * 4


def test_what_is_cheap_follows_from_the_counts():
    spec = TTSpec(10_000_000, 64, (200, 220, 250), (4, 4, 4), (32, 32))

    def times(lookups, rows, flows, of=spec):
        return estimate("t", of, Counts(lookups, rows, flows)).nanoseconds

    hot, skewed, scattered = times(32_768, 1, 1), times(32_768, 7_600, 3_000), times(32_768, 32_700, 22_400)
    for t in (hot, skewed, scattered):
        assert t["prefix"] <= t["unique"] <= t["direct"]
    assert hot["prefix"] < skewed["prefix"] < scattered["prefix"]
    assert skewed["unique"] > 1.2 * skewed["prefix"]
    low_rank = TTSpec(10_000_000, 64, (200, 220, 250), (4, 4, 4), (4, 4))
    assert estimate("t", low_rank, Counts(4096, 4096, 4096)).best_without_rows == "direct"  # sorting was in vain

    small = estimate("t", SPECS["rank_32"], Counts(32_768, 1000, 100))
    assert (
        small.nanoseconds["materialised"]
        == estimate("t", SPECS["rank_32"], Counts(32_768, 1, 1)).nanoseconds["materialised"]
    )
    assert small.nanoseconds["materialised"] < small.nanoseconds["prefix"] < small.make_rows * 10
    large = estimate("t", spec, Counts(32_768, 32_700, 22_400))
    assert large.make_rows > 100 * large.nanoseconds["prefix"]


def test_two_cores_have_no_prefix_products():
    spec = SPECS["two_cores"]
    few, many = (estimate("t", spec, Counts(23, 23, flows)).nanoseconds for flows in (1, 4))
    assert 0 < many["prefix"] - few["prefix"] < 1000
