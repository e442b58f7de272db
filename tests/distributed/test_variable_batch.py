"""A batch size per feature (VBE): the helpers, and training against plain autograd on the batches written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from twin_training import SGD, make_variable_batch, same_training
from twins import Table, shard

from flowtt_torchrec.distributed.variable_batch import by_rank, even_offsets, merge_groups
from flowtt_torchrec.spec import TTSpec

SPEC = TTSpec(60, 16, (4, 4, 4), (2, 4, 2), (3, 5))


def test_even_offsets_add_empty_bags() -> None:
    offsets = torch.tensor([0, 2, 2, 3, 7, 9])  # bags of 2, 0 and 1 lookups, then of 4 and 2
    assert even_offsets(offsets, [3, 2]).tolist() == [0, 2, 2, 3, 7, 9, 9]
    assert even_offsets(offsets, [2, 3]).tolist() == [0, 2, 2, 2, 3, 7, 9]
    assert even_offsets(torch.tensor([0, 5]), [0, 1]).tolist() == [0, 0, 5]
    assert even_offsets(torch.tensor([0]), [0, 0]).tolist() == [0]


def test_outputs_go_by_rank() -> None:
    pooled = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    assert by_rank(pooled, [2, 1], [[1, 2], [0, 1]]).tolist() == [1, 2, 4, 5, 7, 8, 3]
    other = by_rank(10 * pooled[:, :1], [1], [[2, 1]])
    merged = merge_groups(
        [by_rank(pooled, [2, 1], [[1, 2], [0, 1]]), other], [[2, 1], [1]], [[[1, 2], [0, 1]], [[2, 1]]]
    )
    assert merged.tolist() == [1, 2, 10, 40, 4, 5, 7, 8, 3, 70]


def tables_of(case: str) -> list[Table]:
    """Groups that TorchRec merges: tensor trains before and after dense tables on one rank."""
    places: dict[str, list[tuple[int | str | tuple[int, ...], bool]]] = {
        "two groups on a rank": [(0, True), (0, False), (1, False), (1, True)],
        "column-wise": [((0, 1), True), (1, True), ((1, 0), False)],
        "data-parallel": [("dp", True), ("dp", True), (1, False)],
        "row-wise": [("rw", True), ("rw", False), (0, True)],
        "row-wise, not first": [(0, True), ("rw", True), (1, False), ("rw", True)],
    }
    return [
        Table(f"t{i}", 60, 16, (f"f{i}", f"g{i}") if i == 0 else (f"f{i}",), place, SPEC if tt else None)
        for i, (place, tt) in enumerate(places[case])
    ]


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        ("two groups on a rank", "variable"),
        ("two groups on a rank", "variable mean"),
        ("two groups on a rank", "variable weighted"),
        ("column-wise", "variable"),
        ("data-parallel", "variable"),
        ("row-wise", "variable"),
        ("row-wise, not first", "variable mean"),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_training_equals_plain_autograd(
    one_rank: Callable[..., Any],
    two_ranks: Ranks,
    world_size: int,
    case: str,
    mode: str,
) -> None:
    args = (same_training, tables_of(case), SGD, mode, 5)
    one_rank(*args) if world_size == 1 else two_ranks.run(*args)


def dense_beside(rank: int, world_size: int) -> None:
    tables = [Table("t", 60, 16, ("f0",), "dp", SPEC), Table("d", 60, 16, ("f1",), "dp")]
    model = shard(tables, world_size)
    model(make_variable_batch(tables, rank, 0)[0])


def test_dense_data_parallel_tables_that_have_no_such_output_are_named(one_rank: Callable[..., Any]) -> None:
    with pytest.raises(NotImplementedError, match=r"table 'd': TorchRec's dense kernel .* on cpu"):
        one_rank(dense_beside)
