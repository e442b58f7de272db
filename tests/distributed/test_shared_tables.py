"""Row-wise and column-wise TT tables beyond what test_twin_matrix.py holds every sharding type to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from test_twin_training import position_weights
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from twin_training import ADAGRAD, ADAM_DECAY, ROWWISE_DECAY, SGD, SGD_DECAY, make_variable_batch, same_training
from twins import (
    Model,
    Reference,
    Table,
    compression,
    feature_rows,
    full_state,
    make_batch,
    shard,
    shared_tables,
    tables_on_two_hosts,
)

from flowtt_torchrec.distributed import TTEmbeddingBagCollectionSharder, sharding_plan
from flowtt_torchrec.distributed.shared_kernel import sharing_groups
from flowtt_torchrec.spec import TTSpec


@pytest.mark.parametrize("optimizer", [SGD_DECAY, ROWWISE_DECAY, ADAM_DECAY], ids=lambda optimizer: optimizer[0])
def test_weight_decay_equals_plain_autograd(two_ranks: Ranks, optimizer: Any) -> None:
    """TT tables alone: FBGEMM's CPU kernels don't decay touched rows only."""
    trains = [table for table in shared_tables() if table.spec is not None]
    two_ranks.run(same_training, trains, optimizer)


def sums_and_means() -> list[Table]:
    """Two groups of tables in most sharding types, so two kernels each; no feature has row-wise means and others."""
    means = {"rw2", "cw", "dp", "dense_rw", "dense_tw"}
    return [dataclasses.replace(t, pooling=PoolingType.MEAN) if t.name in means else t for t in shared_tables()]


@pytest.mark.parametrize("world_size", [1, 2])
def test_sums_beside_means(one_rank: Callable[..., Any], two_ranks: Ranks, world_size: int) -> None:
    args = (same_training, sums_and_means(), SGD, "as is", 5)
    one_rank(*args) if world_size == 1 else two_ranks.run(*args)


def column_wise_and_others() -> list[Table]:
    """TorchRec's feature-processed collections have no row-wise tables."""
    return [table for table in shared_tables() if table.place not in ("rw", "twrw0")]


def test_position_weights_get_their_gradient(two_ranks: Ranks) -> None:
    trained = set().union(*two_ranks.run(position_weights, column_wise_and_others))
    assert trained == set(feature_rows(column_wise_and_others()))


def on_two_hosts(rank: int, world_size: int) -> None:
    for optimizer in (SGD_DECAY, ADAM_DECAY):
        trains = [table for table in tables_on_two_hosts() if table.spec is not None]
        same_training(rank, world_size, trains, optimizer, steps=5)
    same_training(rank, world_size, tables_on_two_hosts(), ADAGRAD, steps=5)


def test_training_on_four_ranks_of_two_hosts(four_ranks: Ranks) -> None:
    four_ranks.run(on_two_hosts)


ROWS = Table("rows", 90, 16, ("f0",), "rw", TTSpec(90, 16, (5, 5, 4), (2, 4, 2), (3, 5)))
COLUMNS = Table("columns", 90, 16, ("f1",), (0, 1), TTSpec(90, 16, (5, 5, 4), (2, 4, 2), (3, 5)))


TABLE = Table("table", 90, 16, ("f2",), 1, TTSpec(90, 16, (5, 5, 4), (2, 4, 2), (3, 5)))


def two_lookups_one_backward(rank: int, world_size: int) -> None:
    """Wherever a table is, each lookup's backward is a step, the last lookup's first, at the weights of both."""
    tables = [ROWS, COLUMNS, TABLE]
    model = shard(tables, world_size, (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-3}), keep_forward_weights=True)
    batches = [[make_batch(tables, 4, 10 * i + r) for r in range(world_size)] for i in range(2)]
    before = full_state(model, tables)
    at_forward, expected = (Reference(tables, before, model.module.over) for _ in range(2))
    losses = []
    for of_ranks in batches:
        features, targets = of_ranks[rank]
        losses.append((model(features)[0] - targets).square().mean())
    (losses[0] + losses[1]).backward()
    names = list(expected.parameters)
    for of_ranks in reversed(batches):
        grads = torch.autograd.grad(at_forward.loss(of_ranks), [at_forward.parameters[name] for name in names])
        for name, grad in zip(names, grads):
            expected.parameters[name].grad = grad
        expected.fused_step(of_ranks, "adagrad", 0.1, 1e-3, 0.0)
    after = full_state(model, tables)
    for name, value in expected.state().items():
        assert not torch.equal(after[name], before[name])
        torch.testing.assert_close(after[name], value, atol=1e-5, rtol=0)


def test_several_lookups_before_one_backward(one_rank: Callable[..., Any], two_ranks: Ranks, four_ranks: Ranks) -> None:
    one_rank(two_lookups_one_backward)
    two_ranks.run(two_lookups_one_backward)
    four_ranks.run(two_lookups_one_backward)


def empty_and_int32(rank: int, world_size: int) -> None:
    """Batches of no samples, of no lookups, and of int32 ids."""
    tables = [ROWS, COLUMNS]
    model = shard(tables, world_size, (torch.optim.SGD, {"lr": 0.0}))
    reference = Reference(tables, full_state(model, tables), model.module.over)
    for step, (size, most) in enumerate([(0, 3), (4, 0), (4, 3)]):
        features, _ = make_batch(tables, size, 10 * step + rank, most=most)
        if step == 2:
            features = KeyedJaggedTensor(
                keys=features.keys(), values=features.values().int(), lengths=features.lengths().int()
            )
        output, columns = model(features)
        assert columns.shape == (size, 32)
        if size:
            torch.testing.assert_close(columns, reference.columns(features), atol=1e-5, rtol=0)
        output.sum().backward()


def test_empty_batches_and_int32(two_ranks: Ranks) -> None:
    two_ranks.run(empty_and_int32)


def uneven(rank: int, world_size: int) -> None:
    """Column-wise tables take batches of other sizes on each rank; TorchRec's row-wise exchange does not, on gloo."""
    model = shard([COLUMNS], world_size, (torch.optim.SGD, {"lr": 0.1}))
    reference = Reference([COLUMNS], full_state(model, [COLUMNS]), model.module.over)
    features, _ = make_batch([COLUMNS], 3 + 2 * rank, rank)
    output, columns = model(features)
    torch.testing.assert_close(columns, reference.columns(features), atol=1e-5, rtol=0)
    output.sum().backward()


def test_column_wise_tables_take_uneven_batches(two_ranks: Ranks) -> None:
    two_ranks.run(uneven)


def uneven_rows(rank: int, world_size: int, place: str) -> None:
    """Told on all ranks, before gloo fails; without gradients they are fine."""
    tables = [dataclasses.replace(ROWS, place=place)]
    model = shard(tables, world_size, (torch.optim.SGD, {"lr": 0.1}))
    features, _ = make_batch(tables, 3 + 2 * rank, rank)
    with torch.no_grad():
        assert model(features)[1].shape == (3 + 2 * rank, 16)
    message = r"table 'rows': with gloo row-wise tables train on batches of one size .* not on \[3, 5\]; .*drop_last"
    with pytest.raises(ValueError, match=message):
        model(features)
    if place == "rw":
        with pytest.raises(ValueError, match="table 'rows': with gloo"):
            model(make_variable_batch(tables, 0, rank)[0])
    features, _ = make_batch(tables, 3, rank)
    model(features)[0].sum().backward()


def test_row_wise_tables_tell_of_uneven_batches(two_ranks: Ranks) -> None:
    for place in ("rw", "twrw0"):
        two_ranks.run(uneven_rows, place)


def out_of_range(rank: int, world_size: int) -> str:
    model = shard([ROWS, COLUMNS], world_size)
    messages = []
    for row, column in ((90, 0), (0, 95)):
        features = KeyedJaggedTensor(
            keys=["f0", "f1"], values=torch.tensor([row, column]), lengths=torch.tensor([1, 1])
        )
        with pytest.raises(IndexError) as error:
            model(features)
        messages.append(str(error.value))
    return "\n".join(messages)


def test_rows_out_of_range_are_named_by_their_number_in_the_table(one_rank: Callable[..., Any]) -> None:
    message = one_rank(out_of_range)
    assert "index 90 at position 0 (feature 0, table 'rows') is out of range; allowed: 0 to 89" in message
    assert "index 95" in message


def learning_rate(rank: int, world_size: int) -> None:
    """A schedule's learning rate holds for shared tables too."""
    tables = [ROWS, COLUMNS]
    model = shard(tables, world_size, (torch.optim.SGD, {"lr": 0.5}))
    before = full_state(model, tables)
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.0
    features, targets = make_batch(tables, 4, rank)
    (model(features)[0] - targets).square().mean().backward()
    assert all(torch.equal(value, before[name]) for name, value in full_state(model, tables).items())
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.5
    (model(features)[0] - targets).square().mean().backward()
    assert not any(torch.equal(value, before[name]) for name, value in full_state(model, tables).items())


def test_learning_rates_of_the_schedule(two_ranks: Ranks) -> None:
    two_ranks.run(learning_rate)


def groups_made(rank: int, world_size: int) -> list[tuple[int, ...]]:
    """Process groups that the tables of this rank use, none of them made twice."""
    model = shard(tables_on_two_hosts(), world_size)
    (sync,) = {kernel._sync for kernel in model.module.ebc._tt_kernels() if hasattr(kernel, "_sync")}
    by_ranks: dict[tuple[int, ...], set[int]] = {}
    for group in sync._groups.values():
        by_ranks.setdefault(tuple(torch.distributed.get_process_group_ranks(group)), set()).add(id(group))
    assert all(len(ids) == 1 for ids in by_ranks.values())
    return list(by_ranks)


def test_tables_with_the_same_ranks_share_a_process_group(four_ranks: Ranks) -> None:
    every = [(1, 3), (0, 1, 2), (2, 3), (0, 1, 2, 3), (0, 1)]
    for rank, found in enumerate(four_ranks.run(groups_made)):
        assert found == [ranks for ranks in every if rank in ranks]


def part_of_the_job(rank: int, world_size: int) -> None:
    """Ranks 1 to 3 as a group of their own, whose ranks a plan counts from 0."""
    group = torch.distributed.new_group([1, 2, 3])
    if rank == 0:
        return
    sharder = TTEmbeddingBagCollectionSharder(compression([ROWS, COLUMNS]))
    ebc = Model([ROWS, COLUMNS]).ebc
    plan = {
        name: generate(ebc.embedding_bags[name].weight, 3, 3, "cpu", sharder)
        for name, generate in (("rows", sharding_plan.row_wise()), ("columns", sharding_plan.column_wise([0, 1])))
    }
    assert sharing_groups({"rows": plan["rows"]}, group) == {"rows": group}
    with pytest.raises(ValueError, match=r"table 'columns' is shared by ranks \(1, 2\) of a process group"):
        sharing_groups(plan, group)


def test_a_process_group_that_is_a_part_of_the_job(four_ranks: Ranks) -> None:
    four_ranks.run(part_of_the_job)
