"""Every sharding type, alone and all in one collection, with every optimizer, on 1, 2 and 4 ranks, for 20 steps.

TT tables stand beside TorchRec's dense ones and are held to plain autograd on one process; see `same_training`. On one
and two ranks every type meets every optimizer, on four, which take long, two of them; the kind of lookups changes from
case to case, so that every optimizer meets every kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from ranks import Ranks
from twin_training import ADAGRAD, ADAM, ROWWISE, SGD, same_training
from twins import Table

from flowtt_torchrec.spec import TTSpec

STEPS = 20
OPTIMIZERS = (SGD, ADAGRAD, ROWWISE, ADAM)
MODES = ("sum", "mean", "weighted", "variable")
ALONE: dict[str, list[Table]] = {
    "table-wise": [
        Table("tw0", 90, 16, ("f0",), 0, TTSpec(90, 16, (5, 5, 4), (2, 4, 2), (3, 5))),
        Table("tw3", 60, 16, ("f1", "f0"), 3, TTSpec(60, 16, (3, 3, 3, 3), (2, 2, 2, 2), (3, 4, 3))),
    ],
    "column-wise": [
        Table("cw", 60, 16, ("f2", "f3"), (3, 1), TTSpec(60, 16, (3, 3, 3, 3), (4, 2, 1, 2), (8, 4, 3))),
        Table("cw4", 64, 32, ("f3",), (2, 1, 0, 0), TTSpec(64, 32, (4, 4, 4), (4, 4, 2), (9, 5))),
    ],
    "table-column-wise": [
        Table("twcw", 80, 16, ("f4",), "twcw", TTSpec(80, 16, (4, 5, 4), (2, 4, 2), (3, 3))),
        Table("twcw2", 50, 16, ("f5",), "twcw", TTSpec(50, 16, (2, 25), (4, 4), (8,))),
    ],
    "row-wise": [
        Table("rw", 90, 16, ("f6",), "rw", TTSpec(90, 16, (5, 5, 4), (2, 4, 2), (3, 5))),
        Table("rw2", 77, 8, ("f7", "f6"), "rw", TTSpec(77, 8, (7, 11), (2, 4), (6,))),
    ],
    "table-row-wise": [
        Table("twrw0", 95, 8, ("f8",), "twrw0", TTSpec(95, 8, (10, 10), (2, 4), (6,))),
        Table("twrw1", 80, 16, ("f9",), "twrw1", TTSpec(80, 16, (4, 5, 4), (2, 4, 2), (3, 3))),
    ],
    "data-parallel": [
        Table("dp", 60, 16, ("f10",), "dp", TTSpec(60, 16, (4, 4, 4), (2, 2, 4), (2, 3))),
        Table("dp2", 50, 8, ("f11", "f10"), "dp", TTSpec(50, 8, (5, 10), (2, 4), (4,))),
    ],
}
BESIDE = Table("dense_tw", 50, 16, ("f12",), 1)
DENSE = [
    BESIDE,
    Table("dense_rw", 50, 16, ("f13",), "rw"),
    Table("dense_dp", 40, 16, ("f14",), "dp"),
    Table("dense_cw", 40, 32, ("f15",), (1, 0)),
]
ALL = [*itertools.chain.from_iterable(ALONE.values()), *DENSE]


def run(rank: int, world_size: int, cases: Sequence[tuple[str, list[Table], Any, str]]) -> None:
    """Many models in one go, as starting processes takes longer than training all of them."""
    for name, tables, optimizer, mode in cases:
        try:
            same_training(rank, world_size, tables, optimizer, mode, STEPS)
        except AssertionError as error:
            raise AssertionError(f"{name}, {optimizer[0]}, {mode}, rank {rank} of {world_size}: {error}") from error


def everywhere(
    world_size: int, one_rank: Callable[..., Any], two_ranks: Ranks, four_ranks: Ranks, cases: list[Any]
) -> None:
    if world_size == 1:
        one_rank(run, cases)
    else:
        {2: two_ranks, 4: four_ranks}[world_size].run(run, cases)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_sharding_type_alone(
    one_rank: Callable[..., Any], two_ranks: Ranks, four_ranks: Ranks, world_size: int
) -> None:
    cases = [
        (name, [*tables, BESIDE], optimizer, MODES[(i + j + world_size) % len(MODES)])
        for i, (name, tables) in enumerate(ALONE.items())
        for j, optimizer in enumerate(OPTIMIZERS)
        if world_size < 4 or (j - i) % len(OPTIMIZERS) < 2
    ]
    everywhere(world_size, one_rank, two_ranks, four_ranks, cases)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_sharding_types_in_one_collection(
    one_rank: Callable[..., Any], two_ranks: Ranks, four_ranks: Ranks, world_size: int
) -> None:
    cases = [("all", ALL, optimizer, MODES[(j + world_size) % len(MODES)]) for j, optimizer in enumerate(OPTIMIZERS)]
    everywhere(world_size, one_rank, two_ranks, four_ranks, cases)
