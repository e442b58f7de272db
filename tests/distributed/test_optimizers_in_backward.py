"""Fused optimizers as a TorchRec user drives them: filters, combined optimizers, schedules, kwargs, state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchrec.optim
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from ranks import Ranks
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
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
from flowtt_torchrec.optimizers import OptimizerSpec
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


def adam_state(rank: int, world_size: int) -> None:
    """Names as TorchRec's tables have them, and the number of steps, which evaluation does not count."""
    model = shard(TABLES, world_size, (torch.optim.Adam, {"lr": 0.1}))
    state = model.fused_optimizer.state_dict()["state"]
    assert state.keys() == {f"ebc.embedding_bags.tw.tt_core{k}" for k in range(3)}
    for k, shape in enumerate(SPEC.core_shapes):
        of_core = state[f"ebc.embedding_bags.tw.tt_core{k}"]
        assert {name: tuple(tensor.shape) for name, tensor in of_core.items()} == {
            f"tw.tt_core{k}.momentum1": shape, f"tw.tt_core{k}.exp_avg_sq": shape, f"tw.tt_core{k}.step": (),
        }  # fmt: skip
    for step in range(2):
        train_step(model, TABLES, step)
        with torch.no_grad():
            model(make_batch(TABLES, 6, step)[0])
    for of_core in state.values():
        *averages, steps = of_core.values()
        assert int(steps) == 2
        assert all(average.any() for average in averages)


def test_adams_state(one_rank: Callable[..., Any]) -> None:
    one_rank(adam_state)


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


def warmup(rank: int, world_size: int, optimizer: Any) -> None:
    """The rate of each step is that of TorchRec's warm-up, over all optimizers; a twin gets it set by hand."""
    lr = optimizer[1]["lr"]
    models = [shard(TABLES, world_size, optimizer) for _ in range(2)]
    model, twin = models
    all_of = [all_optimizers(m, lambda parameters: torch.optim.SGD(parameters, lr=lr)) for m in models]
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.0)]
    warm = WarmupOptimizer(all_of[0], stages, lr=lr)
    for step in range(6):
        for group in all_of[1].param_groups:
            group["lr"] = lr * min(step / 4, 1.0)
        before = full_state(model, TABLES)
        for m, optimizers in ((model, warm), (twin, all_of[1])):
            optimizers.zero_grad()
            train_step(m, TABLES, step)
            optimizers.step()
        after, expected = full_state(model, TABLES), full_state(twin, TABLES)
        for name in after:
            assert torch.equal(after[name], expected[name])
            assert torch.equal(after[name], before[name]) == (step == 0)


@pytest.mark.parametrize(
    "optimizer", [(torch.optim.SGD, {"lr": 0.2}), (torch.optim.Adam, {"lr": 0.05})], ids=["sgd", "adam"]
)
def test_warmup(one_rank: Callable[..., Any], optimizer: Any) -> None:
    one_rank(warmup, optimizer)


def clipping(rank: int, world_size: int, kind: GradientClipping) -> None:
    """TorchRec's clipping reaches what a dense optimizer steps; a fused table's gradient is never seen by it."""
    models = [shard(TABLES, world_size, (torch.optim.SGD, {"lr": 0.2})) for _ in range(2)]
    clipped, plain = (all_optimizers(m, lambda parameters: torch.optim.SGD(parameters, lr=0.2)) for m in models)
    optimizers = GradientClippingOptimizer(clipped, clipping=kind, max_gradient=1e-4), plain
    start = full_state(models[0], TABLES)
    for model, optimizer in zip(models, optimizers):
        optimizer.zero_grad()
        train_step(model, TABLES, 0)
        optimizer.step()
    moved, full = ({n: (v - start[n]).norm() for n, v in full_state(m, TABLES).items()} for m in models)
    for name in start:
        if name.startswith("tw"):
            assert moved[name] == full[name] > 0
        else:
            assert 0 < moved[name] < 0.1 * full[name]


@pytest.mark.parametrize("kind", [GradientClipping.NORM, GradientClipping.VALUE])
def test_clipping(one_rank: Callable[..., Any], kind: GradientClipping) -> None:
    one_rank(clipping, kind)


def kwargs_untouched(
    rank: int, world_size: int, optimizer: type[torch.optim.Optimizer], kwargs: dict[str, Any]
) -> None:
    given = dict(kwargs)
    tables = [table for table in mixed_tables() if table.spec is not None or table.place == "dp"]
    model = Model(tables)
    apply_optimizer_in_backward(optimizer, model.ebc.parameters(), kwargs)
    sharder = TTEmbeddingBagCollectionSharder(compression(tables))
    plan = make_plan(model.ebc, tables, world_size, sharder, dense=False)
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"ebc": plan}), sharders=[sharder]
    )
    assert kwargs == given
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())), lambda p: optimizer(p, **kwargs)
    )
    CombinedOptimizer([sharded.fused_optimizer, dense]).step()


@pytest.mark.parametrize(
    ("optimizer", "kwargs"),
    [
        (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-3}),
        (torch.optim.Adam, {"lr": 0.1, "betas": (0.8, 0.99)}),
        (torch.optim.Adam, {"lr": 0.1, "betas": [0.8, 0.99]}),
    ],
)
def test_the_callers_kwargs_are_not_changed(one_rank: Callable[..., Any], optimizer: Any, kwargs: Any) -> None:
    one_rank(kwargs_untouched, optimizer, kwargs)


def default_optimizer(rank: int, world_size: int) -> tuple[str, float]:
    model = shard(TABLES[:1], world_size, fused_params={"prefetch_pipeline": False})
    (kernel,) = model.module.ebc._tt_kernels()
    return kernel.emb_module.optimizer.kind, kernel.emb_module.optimizer.learning_rate


def test_without_an_optimizer_tables_get_fbgemms_default(one_rank: Callable[..., Any]) -> None:
    assert one_rank(default_optimizer) == ("sgd", 0.01)


def sharders_fused_params(rank: int, world_size: int) -> None:
    params = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.3, "eps": 1e-2, "weight_decay": 0.1}
    model = shard(TABLES[:1], world_size, fused_params=params)
    (kernel,) = model.module.ebc._tt_kernels()
    optimizer = kernel.emb_module.optimizer
    assert (optimizer.kind, optimizer.learning_rate) == ("adagrad", 0.3)
    assert (optimizer.eps, optimizer.weight_decay) == (1e-2, 0.1)


def test_the_sharders_fused_params_count(one_rank: Callable[..., Any]) -> None:
    one_rank(sharders_fused_params)


def adams_settings(rank: int, world_size: int, optimizer: Any, fused_params: dict[str, Any]) -> OptimizerSpec:
    model = shard(TABLES[:1], world_size, optimizer, fused_params=fused_params)
    (kernel,) = model.module.ebc._tt_kernels()
    return kernel.emb_module.optimizer


@pytest.mark.parametrize(
    ("optimizer", "fused_params"),
    [
        ((torch.optim.Adam, {"lr": 0.3, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1}), {}),
        ((torchrec.optim.Adam, {"lr": 0.3, "beta1": 0.8, "beta2": 0.95, "eps": 1e-4, "weight_decay": 0.1}), {}),
        (
            None,
            {
                "optimizer": EmbOptimType.ADAM,
                "learning_rate": 0.3,
                "beta1": 0.8,
                "beta2": 0.95,
                "eps": 1e-4,
                "weight_decay": 0.1,
            },
        ),
    ],
    ids=["torch", "torchrec", "fbgemm"],
)
def test_every_way_to_ask_for_adam(one_rank: Callable[..., Any], optimizer: Any, fused_params: dict[str, Any]) -> None:
    expected = OptimizerSpec("adam", 0.3, 1e-4, 0.1, 0.8, 0.95)
    assert one_rank(adams_settings, optimizer, fused_params) == expected


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ((torchrec.optim.LAMB, {"lr": 0.1}), r"table 'tw'.* lamb is not supported .*data_parallel"),
        ((torch.optim.RMSprop, {"lr": 0.1}), r"table 'tw': RMSprop cannot be fused.*RowWiseAdagrad or Adam"),
        ((torch.optim.Adam, {"lr": 0.1, "amsgrad": True}), r"table 'tw'.*'amsgrad'.*known: .*betas"),
        ((torchrec.optim.Adam, {"lr": 0.1, "betas": (0.9,)}), r"table 'tw': give Adam either .*\(0.9,\)"),
        ((torchrec.optim.Adam, {"lr": 0.1, "betas": (0.9, 0.99), "beta1": 0.9}), r"table 'tw': give Adam either"),
        ((torchrec.optim.Adam, {"lr": 0.1, "beta2": 1.0}), r"table 'tw': adam needs beta2 of .*below 1, not 1.0"),
        ((torchrec.optim.SGD, {"lr": 0.1, "gradient_clipping": True}), r"table 'tw'.*'gradient_clipping'"),
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
        model = shard(TABLES[1:], world_size, (torchrec.optim.LAMB, {"lr": 0.1}))
        optimizers = all_optimizers(model, lambda parameters: torch.optim.RMSprop(parameters, lr=0.1))
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
