"""What is done to the parameters of a sharded model is what its lookups and steps see; and how they are called."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _get_in_backward_optimizers
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.shard import shard as composable_shard
from torchrec.distributed.types import ShardingEnv
from twins import CPU, Model, Table, compression, full_state, make_batch, make_plan, mixed_tables, shard

from flowtt_torchrec.distributed import TTEmbeddingBagCollectionSharder
from flowtt_torchrec.embedding_bag import BatchedTTEmbeddingBags, TTEmbeddingBag
from flowtt_torchrec.spec import TTSpec

SPEC = TTSpec(90, 16, (5, 5, 4), (2, 4, 2), (3, 5))
ADAM = torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}
ADAGRAD = torch.optim.Adagrad, {"lr": 0.1}
PREFIX = "ebc.embedding_bags."


def tables_in_every_way(world_size: int) -> list[Table]:
    """A table of each placement that keeps all of it in step; row-wise ones are shared by all ranks."""
    return [
        Table("table", 90, 16, ("f0",), world_size - 1, SPEC),
        Table("replica", 90, 16, ("f1",), "dp", SPEC),
        Table("rows", 90, 16, ("f2",), "rw", SPEC),
        Table("columns", 90, 16, ("f3",), (0, 1) if world_size > 1 else 0, SPEC),
    ]


def train(model: DistributedModelParallel, tables: list[Table], seed: int) -> Tensor:
    features, targets = make_batch(tables, 6, 10 * seed + dist.get_rank())
    loss = (model(features)[0] - targets).square().mean()
    loss.backward()
    return loss


def names(rank: int, world_size: int) -> None:
    """Parameters, buffers and state dict go by one set of names, as in a collection of dense tables."""
    tables = tables_in_every_way(world_size)
    model = shard(tables, world_size, ADAGRAD)
    stock = shard(tables, world_size, ADAGRAD, dense=True)
    state = model.state_dict()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    assert state.keys() == parameters.keys() | buffers.keys()
    assert parameters.keys().isdisjoint(buffers)
    held = [name for name in (t.name for t in tables) if f"{PREFIX}{name}.tt_core0" in parameters]
    assert buffers.keys() == {f"{PREFIX}{name}.tt_rows" for name in held}
    for name, parameter in parameters.items():
        assert state[name].data_ptr() == parameter.data_ptr()
    # one name a table is another set of names, and a rank without a table has none where TorchRec has an empty weight
    replaced = {f"{PREFIX}{table.name}.weight" for table in tables}
    assert {name for name, _ in stock.named_parameters()} - replaced == {n for n in parameters if PREFIX not in n}
    modules = [name for name, _ in model.module.ebc.named_modules()]
    assert modules == [name for name, _ in stock.module.ebc.named_modules()]
    assert get_model_state_dict(model.module).keys() == state.keys()  # a DMP itself does not find its parts by name
    before = {name: tensor.clone() for name, tensor in state.items()}
    train(model, tables, 0)
    set_model_state_dict(model.module, before)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert torch.equal(dict(model.named_buffers())[f"{PREFIX}rows.tt_rows"], torch.tensor(90))


def test_names_are_one_set(one_rank: Callable[..., Any], two_ranks: Ranks, four_ranks: Ranks) -> None:
    one_rank(names)
    two_ranks.run(names)
    four_ranks.run(names)


def frozen(rank: int, world_size: int) -> None:
    """Cores that require no gradient stay, the others are stepped as ever; also where ranks share a table."""
    tables = tables_in_every_way(world_size)[::3] + tables_in_every_way(world_size)[2:3]
    free, some, teacher = (shard(tables, world_size, ADAM) for _ in range(3))
    before = full_state(free, tables)
    teacher.requires_grad_(False)
    for name, parameter in some.named_parameters():
        if "rows.tt_core1" in name or "table.tt_core" in name:
            parameter.requires_grad_(False)
    train(free, tables, 0)
    train(some, tables, 0)
    features, _ = make_batch(tables, 6, rank)
    (teacher(features)[0] - free(features)[0]).square().mean().backward()
    expected = full_state(shard_and_train(tables, world_size), tables)
    after, taught = full_state(some, tables), full_state(teacher, tables)
    for name, value in before.items():
        stays = name == "rows.tt_core1" or name.startswith("table.")
        assert torch.equal(after[name], value) == stays
        torch.testing.assert_close(after[name], value if stays else expected[name])
        assert torch.equal(taught[name], value)


def shard_and_train(tables: list[Table], world_size: int) -> DistributedModelParallel:
    model = shard(tables, world_size, ADAM)
    train(model, tables, 0)
    return model


def test_frozen_cores_are_not_stepped(one_rank: Callable[..., Any], two_ranks: Ranks, four_ranks: Ranks) -> None:
    one_rank(frozen)
    two_ranks.run(frozen)
    four_ranks.run(frozen)


def rates(rank: int, world_size: int) -> None:
    tables = tables_in_every_way(world_size)
    model = shard(tables, world_size, ADAGRAD)
    optimizers = _get_in_backward_optimizers(model)
    assert len(optimizers) == sum(hasattr(p, "_in_backward_optimizers") for p in model.parameters())
    assert {group["lr"] for optimizer in optimizers for group in optimizer.param_groups} == {0.1}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
    before = full_state(model, tables)
    train(model, tables, 0)
    assert all(torch.equal(value, before[name]) for name, value in full_state(model, tables).items())
    assert {group["lr"] for group in model.fused_optimizer.param_groups} == {0.0}


def test_the_rates_of_optimizers_in_backward_are_theirs(two_ranks: Ranks) -> None:
    two_ranks.run(rates)


def memory(rank: int, world_size: int) -> None:
    """Shared memory, copies, and tensors put in the place of parameters."""
    tables = tables_in_every_way(world_size)
    model, twin = (shard(tables, world_size, ADAGRAD) for _ in range(2))
    features, _ = make_batch(tables, 6, rank)
    with torch.no_grad():
        before = model(features)[1]
        given = {name: 2 * value if "tt_core0" in name else value for name, value in model.named_parameters()}
        torch.testing.assert_close(functional_call(model.module, given, (features,))[1], 2 * before)
        model.share_memory()
        assert torch.equal(model(features)[1], before)
    assert all(parameter.is_shared() for parameter in model.parameters())
    train(model, tables, 0)
    train(twin, tables, 0)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert not torch.equal(model(features)[1], before)


def test_memory_may_be_shared_and_parameters_replaced(two_ranks: Ranks) -> None:
    two_ranks.run(memory)


def composable(rank: int, world_size: int) -> None:
    """`torchrec.distributed.shard.shard` takes modules that keep all names only; the sharder itself does the same."""
    tables = mixed_tables()
    sharder = TTEmbeddingBagCollectionSharder(compression(tables))
    ebc = Model(tables).ebc
    plan = make_plan(ebc, tables, world_size, sharder, dense=False)
    with pytest.raises(RuntimeError, match="cannot modify FQNs"):
        composable_shard(ebc, plan, ShardingEnv.from_process_group(dist.group.WORLD), CPU, sharder)
    sharded = sharder.shard(Model(tables).ebc, plan, ShardingEnv.from_process_group(dist.group.WORLD), CPU)
    model = shard(tables, world_size)
    names = {name for name, _ in model.module.ebc.named_parameters()}
    assert {name for name, _ in sharded.named_parameters()} == names


def test_a_collection_is_sharded_by_its_sharder(two_ranks: Ranks) -> None:
    two_ranks.run(composable)


def wrapped(rank: int, world_size: int) -> None:
    """DDP and FSDP2 around the plain modules: state dicts, and steps as without them."""
    torch.manual_seed(0)
    ids = torch.arange(24).view(8, 3)
    offsets = torch.arange(0, 25, 3)
    many = BatchedTTEmbeddingBags({"a": SPEC})
    for module, arguments in (
        (TTEmbeddingBag(90, 16, spec=SPEC, mode="sum"), (ids,)),
        (many, (ids.flatten(), offsets)),
    ):
        plain = copy.deepcopy(module)
        expected = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
        for wrap in (DistributedDataParallel, fully_shard):
            model: nn.Module = wrap(copy.deepcopy(plain))
            state = get_model_state_dict(model)
            assert state.keys() == expected.keys()
            full = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in state.items()}
            assert all(torch.equal(full[name], tensor) for name, tensor in expected.items())
            reference = copy.deepcopy(plain)
            for each in (model, reference):
                optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
                for _ in range(2):
                    optimizer.zero_grad()
                    each(*arguments).square().mean().backward()
                    optimizer.step()
            after = get_model_state_dict(model)
            for name, tensor in reference.state_dict().items():
                value = after[name]
                torch.testing.assert_close(value.full_tensor() if hasattr(value, "full_tensor") else value, tensor)


def test_ddp_and_fsdp_around_the_plain_modules(two_ranks: Ranks) -> None:
    two_ranks.run(wrapped)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("a bad batch")


def failing(rank: int, world_size: int) -> None:
    """A backward that raises after that of the lookups leaves nothing for the next step."""
    tables = tables_in_every_way(world_size)[2 : 3 if world_size == 1 else 4]  # the others step in their backward
    model, twin = (shard(tables, world_size, ADAM) for _ in range(2))
    before = full_state(model, tables)
    features, _ = make_batch(tables, 6, rank)
    below = nn.Parameter(torch.ones(()))
    # Autograd takes first what was made last: the lookup, then what fails.
    late = _Fails.apply(below)
    with pytest.raises(ArithmeticError):
        (model(features)[0].sum() + late).backward()
    kernels = list(model.module.ebc._tt_kernels())
    assert any(kernel.pending() for kernel in kernels), "the lookup's backward has not run"
    assert all(torch.equal(value, before[name]) for name, value in full_state(model, tables).items())
    for each in (model, twin):
        train(each, tables, 1)
    assert not any(kernel.pending() for kernel in kernels)
    expected = full_state(twin, tables)
    assert all(torch.equal(value, expected[name]) for name, value in full_state(model, tables).items())


def test_a_failed_backward_leaves_no_gradient(
    one_rank: Callable[..., Any], two_ranks: Ranks, four_ranks: Ranks
) -> None:
    one_rank(failing)
    two_ranks.run(failing)
    four_ranks.run(failing)


def ahead(rank: int, world_size: int) -> None:
    """A backward that comes after another step says what to do, on each rank that has a part of the table.

    Shards of columns are looked up in a copy of their part of the cores, so that they have nothing to refuse.
    """
    whole, _, rows, columns = tables_in_every_way(world_size)
    cases: list[tuple[Table, set[int]]] = [(whole, {world_size - 1}), (rows, set(range(world_size)))]
    if world_size > 1:
        cases.append((columns, set()))
    for table, on_ranks in cases:
        model = shard([table], world_size, ADAGRAD)
        losses = [model(make_batch([table], 6, 10 * seed + rank)[0])[0].sum() for seed in range(2)]
        losses[0].backward()
        message = r"weights have changed since .* keep_forward_weights=True"
        with pytest.raises(RuntimeError, match=message) if rank in on_ranks else nullcontext():
            losses[1].backward()


def test_a_late_backward_names_the_remedy(one_rank: Callable[..., Any], two_ranks: Ranks, four_ranks: Ranks) -> None:
    one_rank(ahead)
    two_ranks.run(ahead)
    four_ranks.run(ahead)
