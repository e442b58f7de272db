from __future__ import annotations

import pytest

from flowtt_torchrec.datasets import DataError, Sharding
from flowtt_torchrec.datasets.base import check_split


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("window_rows", [0, 1, 2, 7, 15, 40])
def test_ranks_share_a_window_evenly(world_size: int, window_rows: int) -> None:
    shardings = [Sharding(4, rank, world_size) for rank in range(world_size)]
    window_rows = min(window_rows, shardings[0].window)
    parts = [range(100)[s.rank_rows(window_rows)] for s in shardings]
    assert {len(part) for part in parts} == {window_rows // world_size}
    assert [row for part in parts for row in part] == list(range(window_rows // world_size * world_size))


@pytest.mark.parametrize(("rows", "expected"), [(0, 0), (1, 0), (2, 1), (8, 1), (9, 1), (11, 2), (16, 2)])
def test_number_of_batches(rows: int, expected: int) -> None:
    assert Sharding(batch_size=4, rank=1, world_size=2).num_batches(rows) == expected


def test_bad_arguments_are_named() -> None:
    with pytest.raises(DataError, match="batch_size is 0"):
        Sharding(0)
    with pytest.raises(DataError, match="rank 2 is not one of 2 ranks"):
        Sharding(4, 2, 2)
    with pytest.raises(DataError, match="'test' is unknown; there are 'train', 'val'"):
        check_split("test")  # type: ignore[arg-type]
