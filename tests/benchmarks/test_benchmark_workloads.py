from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.workloads import (
    BALANCED,
    DISTRIBUTIONS,
    FLOW_SHAPE,
    Workload,
    draw_ids,
    mixed_tables,
    scatter,
    small_tables,
)
from flowtt_torchrec.spec import TTSpec


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 64, 1000, 4097])
def test_scatter_is_a_bijection(rows: int) -> None:
    assert sorted(scatter(np.arange(rows), rows).tolist()) == list(range(rows))


def test_scatter_leaves_no_order() -> None:
    steps = np.diff(scatter(np.arange(1000), 1_000_000))
    assert len(np.unique(steps)) > 990


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_ids_are_in_range_and_repeatable(distribution: str) -> None:
    ids = draw_ids(distribution, 1000, 500, seed=3)
    assert ids.dtype == torch.int64
    assert ids.shape == (500,)
    assert 0 <= int(ids.min()) <= int(ids.max()) < 1000
    assert torch.equal(ids, draw_ids(distribution, 1000, 500, seed=3))


def test_distributions_are_what_they_say() -> None:
    distinct = {name: draw_ids(name, 10_000, 5000, seed=1).unique().numel() for name in DISTRIBUTIONS}
    assert distinct["one_id"] == 1
    assert distinct["distinct"] == 5000
    assert distinct["zipf_1.2"] < distinct["zipf_1.05"] < distinct["zipf_0.8"] < distinct["uniform"] < 5000
    assert distinct["scattered_1.2"] == distinct["zipf_1.2"]  # the same draw, spread out
    assert int(draw_ids("zipf_1.2", 10_000, 5000, seed=1).median()) < 100
    assert int(draw_ids("scattered_1.2", 10_000, 5000, seed=1).median()) > 1000


def test_bad_requests_name_the_value() -> None:
    with pytest.raises(ValueError, match="'normal'"):
        draw_ids("normal", 10, 5, seed=0)
    with pytest.raises(ValueError, match="11 distinct ids"):
        draw_ids("distinct", 10, 11, seed=0)
    with pytest.raises(ValueError, match="bags of 3"):
        Workload((BALANCED,), "uniform", 10, 3)


def test_batches_are_feature_by_feature() -> None:
    specs = (TTSpec(60, 8, (3, 4, 5), (2, 2, 2), (3, 4)), TTSpec(50, 4, (5, 10), (2, 2), (4,)))
    first, second = Workload(specs, "uniform", 12, 3).batches(2)
    assert first.batch_size == 4
    assert first.offsets.tolist() == list(range(0, 25, 3))
    assert int(first.indices[12:].max()) < 50
    assert first.grad_output.shape == (4, 12)
    assert not torch.equal(first.indices, second.indices)


def test_the_flow_shape_has_no_more_parameters() -> None:
    assert FLOW_SHAPE.num_parameters <= BALANCED.num_parameters
    assert len(small_tables(788)) == 788
    assert [spec.num_embeddings for spec in mixed_tables(3, 10_000_000)] == [1000, 100_000, 10_000_000]
