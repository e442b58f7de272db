"""Every sharding type, alone and all in one collection, with every optimizer, on 1, 2 and 4 ranks, for 20 steps.

TT tables stand beside TorchRec's dense ones and are held to plain autograd on one process; see `same_training`. Tables
with different optimizers are trained together, so that every type meets every optimizer and every kind of lookups.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from ranks import Ranks
from torchrec.modules.embedding_configs import PoolingType
from twin_training import ADAGRAD, ADAM, ROWWISE, SGD, same_training
from twins import Table

from flowtt_torchrec.spec import TTSpec

STEPS = 20
RANKS = pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
OPTIMIZERS = (SGD, ADAGRAD, ROWWISE, ADAM)
MODES = ("as is", "weighted", "as is, variable")  # sums and means, weighted sums, a batch size per feature
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
        Table("rw2", 77, 8, ("f7", "f16"), "rw", TTSpec(77, 8, (7, 11), (2, 4), (6,))),
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


def optimised(tables: Sequence[Table], optimizer: Any, name: str) -> list[Table]:
    """Copies with an optimizer, names and features of their own."""
    return [
        dataclasses.replace(
            table,
            name=f"{table.name}_{name}",
            features=tuple(f"{feature}_{name}" for feature in table.features),
            optimizer=optimizer,
        )
        for table in tables
    ]


def pooled(tables: Sequence[Table], mode: str) -> list[Table]:
    """Every other table with means, unless they are weighted: there TorchRec's row-wise means are something else."""
    if "weighted" in mode:
        return list(tables)
    kinds = itertools.cycle([PoolingType.SUM, PoolingType.MEAN])
    return [dataclasses.replace(table, pooling=pooling) for table, pooling in zip(tables, kinds)]


def run(rank: int, world_size: int, cases: Sequence[tuple[str, list[Table], str]]) -> None:
    """Many models in one go, as starting processes takes longer than training all of them."""
    for name, tables, mode in cases:
        try:
            same_training(rank, world_size, tables, SGD, mode, STEPS)
        except AssertionError as error:
            raise AssertionError(f"{name}, {mode}, rank {rank} of {world_size}: {error}") from error


def everywhere(
    world_size: int, one_rank: Callable[..., Any], two_ranks: Ranks, four_ranks: Ranks, cases: list[Any]
) -> None:
    if world_size == 1:
        one_rank(run, cases)
    else:
        {2: two_ranks, 4: four_ranks}[world_size].run(run, cases)


@RANKS
@pytest.mark.parametrize("mode", MODES)
def test_each_sharding_type_alone(
    one_rank: Callable[..., Any], two_ranks: Ranks, four_ranks: Ranks, world_size: int, mode: str
) -> None:
    cases = []
    for name, tables in ALONE.items():
        of_type = [optimised(pooled(tables, mode), optimizer, optimizer[0]) for optimizer in OPTIMIZERS]
        cases.append((name, [*itertools.chain.from_iterable(of_type), BESIDE], mode))
    everywhere(world_size, one_rank, two_ranks, four_ranks, cases)


@RANKS
def test_all_sharding_types_in_one_collection(
    one_rank: Callable[..., Any], two_ranks: Ranks, four_ranks: Ranks, world_size: int
) -> None:
    cases = []
    for shift, mode in enumerate(MODES):
        tables = pooled(ALL, mode)
        kinds = itertools.islice(itertools.cycle(OPTIMIZERS), shift, None)
        own = [t for table, kind in zip(tables, kinds) for t in optimised([table], kind, kind[0])]
        cases.append(("all", own, mode))
    everywhere(world_size, one_rank, two_ranks, four_ranks, cases)
