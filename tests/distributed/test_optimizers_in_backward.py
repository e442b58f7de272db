"""Fused optimizers as a TorchRec user drives them: filters, combined optimizers, schedules, kwargs, state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchrec.optim
from ranks import Ranks
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from twins import (
    Model,
    Table,
    all_optimizers,
    apply_optimizer_in_backward,
    compression,
    full_state,
    make_batch,
    make_plan,
    mixed_tables,
    shard,
)

from flowtt_torchrec.distributed import TTEmbeddingBagCollectionSharder
from flowtt_torchrec.spec import TTSpec

SPEC = TTSpec(90, 16, (5, 5, 4), (2, 4, 2), (3, 5))
TABLES = [Table("tw", 90, 16, ("f0",), 0, SPEC), Table("dp", 90, 16, ("f1",), "dp", SPEC)]


def train_step(model: DistributedModelParallel, tables: list[Table], seed: int) -> None:
    features, targets = make_batch(tables, 6, seed)
    output, _ = model(features)
    (output - targets).square().mean().backward()


def names_and_filters(rank: int, world_size: int) -> None:
    model = shard(mixed_tables(), world_size, (torch.optim.Adagrad, {"lr": 0.1}))
    named = dict(model.named_parameters())
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    tt = {name for name in named if "tt_core" in name}
    local = ["tw0", "four_cores"] if rank % world_size == 0 else ["tw1", "shares_f0"]
    if world_size == 1:
        local = ["tw0", "four_cores", "tw1", "shares_f0"]
    counts = {table.name: table.spec.num_cores for table in mixed_tables() if table.spec is not None}
    prefix = "ebc.embedding_bags."
    fused = {f"{prefix}{name}.tt_core{k}" for name in local for k in range(counts[name])}
    replicated = {f"{prefix}{name}.tt_core{k}" for name in ("dp", "dp2") for k in range(counts[name])}
    assert tt == fused | replicated
    assert tt & dense.keys() == replicated
    # the parameters of the module are the kernels' own
    kernels = {f"{prefix}{n}.tt_core{k}": c for n, cs in model.module.ebc.tt_cores().items() for k, c in enumerate(cs)}
    assert all(named[name] is core for name, core in kernels.items())
    assert kernels.keys() == tt

    state = model.fused_optimizer.state_dict()["state"]
    assert {name for name in state if "tt_core" in name} == fused
    for name in fused:
        table_and_core = name.removeprefix(prefix)
        assert {key: tensor.shape for key, tensor in state[name].items()} == {
            f"{table_and_core}.momentum1": named[name].shape
        }


def test_names_filter_and_state(one_rank: Callable[..., Any], two_ranks: Ranks) -> None:
    one_rank(names_and_filters)
    two_ranks.run(names_and_filters)


def rowwise_state(rank: int, world_size: int) -> None:
    model = shard(TABLES, world_size, (torchrec.optim.RowWiseAdagrad, {"lr": 0.1}))
    state = model.fused_optimizer.state_dict()["state"]
    shapes = {key: tuple(tensor.shape) for of_core in state.values() for key, tensor in of_core.items()}
    assert shapes == {f"tw.tt_core{k}.momentum1": (SPEC.p[k],) for k in range(3)}
    train_step(model, TABLES, 0)
    assert all(tensor.abs().sum() > 0 for of_core in state.values() for tensor in of_core.values())


def test_rowwise_adagrad_keeps_one_number_a_slice(one_rank: Callable[..., Any]) -> None:
    one_rank(rowwise_state)


def schedules(rank: int, world_size: int) -> None:
    """A learning rate of zero, set by a scheduler, stops all cores; a later one moves them again."""
    model = shard(TABLES, world_size, (torch.optim.SGD, {"lr": 0.2}))
    optimizers = all_optimizers(model, lambda parameters: torch.optim.SGD(parameters, lr=0.2))
    assert {group["lr"] for group in optimizers.param_groups} == {0.2}
    assert len(optimizers.param_groups) == (2 if rank == 0 else 1)  # the other rank has the data-parallel table only
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizers, lambda epoch: [1.0, 0.0, 0.5][min(epoch, 2)])
    moved = []
    for step in range(3):
        before = full_state(model, TABLES)
        optimizers.zero_grad()
        train_step(model, TABLES, step)
        optimizers.step()
        after = full_state(model, TABLES)
        moved.append({name: float((after[name] - before[name]).abs().max()) for name in before})
        schedule.step()
    for name in moved[0]:
        assert moved[0][name] > 0
        assert moved[1][name] == 0
        assert moved[2][name] > 0


def test_learning_rate_schedules(one_rank: Callable[..., Any], two_ranks: Ranks) -> None:
    one_rank(schedules)
    two_ranks.run(schedules)


def warmup(rank: int, world_size: int) -> float:
    model = shard(TABLES[:1], world_size, (torch.optim.SGD, {"lr": 0.2}))
    fused = WarmupOptimizer(model.fused_optimizer, [WarmupStage(WarmupPolicy.LINEAR, max_iters=10, value=0.0)], lr=0.2)
    before = full_state(model, TABLES)
    train_step(model, TABLES[:1], 0)
    fused.step()
    return float((full_state(model, TABLES)["tw.tt_core0"] - before["tw.tt_core0"]).abs().max())


def test_warmup_starts_at_zero(one_rank: Callable[..., Any]) -> None:
    assert one_rank(warmup) == 0.0


def kwargs_untouched(rank: int, world_size: int) -> None:
    kwargs = {"lr": 0.1, "eps": 1e-3}
    model = Model(mixed_tables())
    apply_optimizer_in_backward(torch.optim.Adagrad, model.ebc.parameters(), kwargs)
    sharder = TTEmbeddingBagCollectionSharder(compression(mixed_tables()))
    plan = make_plan(model.ebc, mixed_tables(), world_size, sharder, dense=False)
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"ebc": plan}), sharders=[sharder]
    )
    assert kwargs == {"lr": 0.1, "eps": 1e-3}
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())), lambda p: torch.optim.Adagrad(p, **kwargs)
    )
    CombinedOptimizer([sharded.fused_optimizer, dense]).step()


def test_the_callers_kwargs_are_not_changed(one_rank: Callable[..., Any]) -> None:
    one_rank(kwargs_untouched)


def default_optimizer(rank: int, world_size: int) -> tuple[str, float]:
    model = shard(TABLES[:1], world_size, fused_params={"prefetch_pipeline": False})
    (kernel,) = model.module.ebc._tt_kernels()
    return kernel.emb_module.optimizer.kind, kernel.emb_module.optimizer.learning_rate


def test_without_an_optimizer_tables_get_fbgemms_default(one_rank: Callable[..., Any]) -> None:
    assert one_rank(default_optimizer) == ("sgd", 0.01)


def sharders_fused_params(rank: int, world_size: int) -> None:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    params = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.3, "eps": 1e-2, "weight_decay": 0.1}
    model = shard(TABLES[:1], world_size, fused_params=params)
    (kernel,) = model.module.ebc._tt_kernels()
    optimizer = kernel.emb_module.optimizer
    assert (optimizer.kind, optimizer.learning_rate) == ("adagrad", 0.3)
    assert (optimizer.eps, optimizer.weight_decay) == (1e-2, 0.1)


def test_the_sharders_fused_params_count(one_rank: Callable[..., Any]) -> None:
    one_rank(sharders_fused_params)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ((torch.optim.Adam, {"lr": 0.1}), r"table 'tw'.* adam is not supported .*data_parallel"),
        ((torch.optim.RMSprop, {"lr": 0.1}), r"table 'tw': RMSprop cannot be fused"),
        ((torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), r"table 'tw'.*'momentum'.*known: lr, eps, weight_decay"),
        ((torchrec.optim.RowWiseAdagrad, {"lr": 0.1, "max_norm": 1.0}), r"table 'tw'.*'max_norm'"),
    ],
)
def test_unsupported_optimizers_name_the_table(one_rank: Callable[..., Any], optimizer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one_rank(lambda rank, world_size: shard(TABLES[:1], world_size, optimizer))


def test_a_negative_learning_rate_names_the_table(one_rank: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"table 'tw'.*learning_rate of at least 0, not -1"):
        one_rank(lambda rank, world_size: shard(TABLES[:1], world_size, fused_params={"learning_rate": -1.0}))


def test_unsupported_optimizers_are_fine_for_data_parallel_tables(one_rank: Callable[..., Any]) -> None:
    def train(rank: int, world_size: int) -> None:
        model = shard(TABLES[1:], world_size, (torch.optim.Adam, {"lr": 0.1}))
        optimizers = all_optimizers(model, lambda parameters: torch.optim.Adam(parameters, lr=0.1))
        before = full_state(model, TABLES)
        train_step(model, TABLES[1:], 0)
        optimizers.step()
        after = full_state(model, TABLES)
        assert all(not torch.equal(before[name], after[name]) for name in before)

    one_rank(train)


def two_forwards(rank: int, world_size: int) -> None:
    model = shard(TABLES[:1], world_size, (torch.optim.SGD, {"lr": 0.1}))
    outputs = [model(make_batch(TABLES[:1], 6, seed)[0])[0].sum() for seed in range(2)]
    outputs[0].backward()
    outputs[1].backward()


def test_a_backward_whose_weights_have_moved_on_is_an_error(one_rank: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match="weights have changed since this forward"):
        one_rank(two_forwards)
