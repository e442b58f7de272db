"""Row numbers out of range: the same under every sharding type, and told as the user gave them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from ranks import Ranks
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from twin_training import make_variable_batch
from twins import Table, feature_rows, full_state, make_batch, shard

from flowtt_torchrec.spec import TTSpec

SPEC = TTSpec(100, 16, (5, 5, 4), (2, 4, 2), (3, 5))
TABLES = [
    Table("rows", 100, 16, ("f0", "f1"), "rw", SPEC),
    Table("few_rows", 5, 8, ("f2",), "rw", TTSpec(5, 8, (2, 3), (2, 4), (3,))),  # none for the last of four ranks
    Table("host_rows", 95, 8, ("f3",), "twrw1", TTSpec(95, 8, (10, 10), (2, 4), (6,))),
    Table("columns", 60, 16, ("f4",), (1, 0), TTSpec(60, 16, (4, 4, 4), (2, 4, 2), (3, 5))),
    Table("host_columns", 80, 16, ("f5",), "twcw", TTSpec(80, 16, (4, 5, 4), (2, 4, 2), (3, 3))),
    Table("whole", 60, 16, ("f6",), 1, TTSpec(60, 16, (4, 4, 4), (2, 2, 4), (2, 3))),
    Table("replicas", 50, 8, ("f7",), "dp", TTSpec(50, 8, (5, 10), (2, 4), (4,))),
]
ROWS = feature_rows(TABLES)
TABLE_OF = {feature: table.name for table in TABLES for feature in table.features}
on_1_2_and_4_ranks = pytest.mark.parametrize("world_size", [1, 2, 4])


@pytest.fixture
def ranks(request: pytest.FixtureRequest, world_size: int) -> Callable[..., Any]:
    """Runs a function on so many ranks."""
    if world_size == 1:
        return request.getfixturevalue("one_rank")
    of_world: Ranks = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[world_size])
    return of_world.run


def bad_ids(rows: int, dtype: torch.dtype = torch.int64) -> list[int]:
    """Past the last row, among them ones that fall on a row when they are cut into blocks, and negative."""
    return [rows, rows + 1, rows + rows // 2, -1, -rows, *([2**40, -(2**63)] if dtype == torch.int64 else [2**31 - 1])]


def batch(variable: bool, dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    """One lookup a bag, of row 1, and with ``variable`` a batch size per feature."""
    strides = [2 + i % 2 if variable else 2 for i in range(len(ROWS))]
    return KeyedJaggedTensor(
        keys=list(ROWS),
        values=torch.ones(sum(strides), dtype=dtype),
        lengths=torch.ones(sum(strides), dtype=torch.int32),
        stride_per_key_per_rank=[[stride] for stride in strides] if variable else None,
    )


def lookup_alone(model: DistributedModelParallel, features: KeyedJaggedTensor) -> str | None:
    """What this rank's lookups raise; without the exchange of rows, in which others would wait for it."""
    ebc = model.module.ebc
    context = ebc.create_context()
    served = ebc.input_dist(context, features).wait().wait()
    try:
        ebc.compute(context, served)
    except IndexError as error:
        return str(error)
    return None


def fatal(rank: int, world_size: int) -> None:
    model = shard(TABLES, world_size)
    for variable in (False, True):
        for dtype in (torch.int64, torch.int32):
            for number, (feature, rows) in enumerate(ROWS.items()):
                for bad in bad_ids(rows, dtype):
                    features = batch(variable, dtype)
                    if rank == number % world_size:
                        features[feature].values()[1] = bad
                    every: list[str | None] = [None] * world_size
                    dist.all_gather_object(every, lookup_alone(model, features))
                    told = [message for message in every if message is not None]
                    assert told, f"{feature}: {bad} is no error"
                    for message in told:
                        assert f"index {bad} at" in message
                        assert f"table {TABLE_OF[feature]!r}) is out of range; allowed: 0 to {rows - 1}" in message
    assert lookup_alone(model, batch(True)) is None


@on_1_2_and_4_ranks
def test_fatal_names_the_table_and_the_id_as_it_was_given(ranks: Callable[..., Any], world_size: int) -> None:
    ranks(fatal)


def corrupt(features: KeyedJaggedTensor, wanted: Sequence[str], zero: bool) -> int:
    """Puts bad ids, or rows 0, in the place of some ids; returns how many."""
    count = 0
    for feature in wanted:
        values = features[feature].values()
        for place, bad in enumerate(bad_ids(ROWS[feature])[: values.numel()]):
            values[place] = 0 if zero else bad
            count += 1
    return count


def row_0(rank: int, world_size: int, mode: BoundsCheckMode) -> None:
    """Training on bad ids must be training on row 0, but for rounding: other ranks may serve them."""
    sgd, fused_params = (torch.optim.SGD, {"lr": 0.5}), {"bounds_check_mode": mode}
    for variable in (False, True):
        tables = [
            table for table in TABLES if not (variable and table.name == "host_rows")
        ]  # TorchRec has no VBE there
        model, other = shard(tables, world_size, sgd, fused_params=fused_params), shard(tables, world_size, sgd)
        for step in range(2):
            outputs = []
            for at, zero in ((model, False), (other, True)):
                make = make_variable_batch(tables, rank, 0) if variable else make_batch(tables, 6, step + 10 * rank)
                assert corrupt(make[0], list(feature_rows(tables)), zero) > 10
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    output, columns = at(make[0])
                told = [str(warning.message) for warning in caught if "such indices" in str(warning.message)]
                assert bool(told) == (at is model and mode == BoundsCheckMode.WARNING), told
                output.square().mean().backward()
                outputs.append(columns)
            torch.testing.assert_close(*outputs, atol=1e-5, rtol=0)
        state, expected = full_state(model, tables), full_state(other, tables)
        torch.testing.assert_close(state, expected, atol=1e-5, rtol=0)


@on_1_2_and_4_ranks
@pytest.mark.parametrize("mode", [BoundsCheckMode.WARNING, BoundsCheckMode.IGNORE])
def test_other_modes_take_row_0(ranks: Callable[..., Any], world_size: int, mode: BoundsCheckMode) -> None:
    ranks(row_0, mode)
