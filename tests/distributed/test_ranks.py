"""The test harness itself: a failure on one rank must fail the test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ranks import RankError, Ranks


def fail_on_rank_1(rank: int, world_size: int) -> int:
    if rank == 1:
        raise ValueError("as wanted")
    return rank


def end_rank_1(rank: int, world_size: int) -> int:
    if rank == 1:
        os._exit(3)
    return rank


def add(rank: int, world_size: int, number: int) -> tuple[int, int]:
    return world_size, rank + number


def test_errors_and_results(tmp_path: Path) -> None:
    ranks = Ranks(2, tmp_path)
    try:
        with pytest.raises(RankError, match=r"(?s)^rank 1:.*ValueError: as wanted"):
            ranks.run(fail_on_rank_1)
        assert ranks.run(add, 5) == [(2, 5), (2, 6)]
        with pytest.raises(RankError, match="rank 1:\nthe process ended with exit code 3"):
            ranks.run(end_rank_1)
    finally:
        ranks.close()
