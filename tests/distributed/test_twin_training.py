"""TT tables under TorchRec against a stock dense twin, and against plain autograd on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from twin_training import (
    ADAGRAD_DECAY,
    ADAM_DECAY,
    ROWWISE_DECAY,
    SGD,
    SGD_DECAY,
    same_outputs,
    same_training,
)
from twins import (
    CPU,
    Reference,
    Table,
    apply_optimizer_in_backward,
    compression,
    feature_rows,
    full_state,
    make_batch,
    make_plan,
    materialised,
    mixed_tables,
    shard,
)

from flowtt_torchrec.distributed import TTEmbeddingBagCollectionSharder
from flowtt_torchrec.spec import TTSpec

TOLERANCE = 1e-5


def twin_outputs(rank: int, world_size: int, pooling: PoolingType, weighted: bool) -> None:
    tables = mixed_tables(pooling)
    same_outputs(shard(tables, world_size, weighted=weighted), tables, "weighted" if weighted else "as is", steps=3)


CASES = [
    pytest.param(PoolingType.SUM, False, id="sum"),
    pytest.param(PoolingType.MEAN, False, id="mean"),
    pytest.param(PoolingType.SUM, True, id="weighted"),
    pytest.param(PoolingType.MEAN, True, id="weighted mean"),
]


@pytest.mark.parametrize(("pooling", "weighted"), CASES)
def test_twin_outputs_on_one_rank(one_rank: Callable[..., Any], pooling: PoolingType, weighted: bool) -> None:
    one_rank(twin_outputs, pooling, weighted)


@pytest.mark.parametrize(("pooling", "weighted"), CASES)
def test_twin_outputs_on_two_ranks(two_ranks: Ranks, pooling: PoolingType, weighted: bool) -> None:
    two_ranks.run(twin_outputs, pooling, weighted)


@pytest.mark.parametrize(
    ("optimizer", "mode"),
    [
        # FBGEMM's CPU kernels don't decay touched rows only, nor take weighted means through backward, as ours do
        pytest.param(SGD_DECAY, "sum", id="sgd, weight decay"),
        pytest.param(ADAGRAD_DECAY, "sum", id="adagrad, weight decay"),
        pytest.param(ROWWISE_DECAY, "sum", id="rowwise adagrad, weight decay"),
        pytest.param(ADAM_DECAY, "sum", id="adam, weight decay"),
        pytest.param(SGD, "weighted mean", id="weighted mean"),
    ],
)
def test_training_of_tt_tables_alone_equals_plain_autograd(two_ranks: Ranks, optimizer: Any, mode: str) -> None:
    trains = [table for table in mixed_tables() if table.spec is not None]
    two_ranks.run(same_training, trains, optimizer, mode)


def position_weights(rank: int, world_size: int, make_tables: Callable[[], list[Table]] = mixed_tables) -> set[str]:
    """A feature processor's weights, which reach the lookup with a gradient, train as beside the dense twin."""
    tables = make_tables()
    kinds = {}
    for dense in (False, True):
        processor = PositionWeightedModuleCollection(dict.fromkeys(feature_rows(tables), 4))
        with torch.no_grad():
            for weight in processor.parameters():
                weight.copy_(torch.linspace(0.5, 1.5, 4))
        ebc = EmbeddingBagCollection(
            tables=[table.config() for table in tables], device=torch.device("meta"), is_weighted=True
        )
        apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.1})
        stock = EmbeddingBagCollectionSharder()
        sharder = FeatureProcessedEmbeddingBagCollectionSharder(
            stock if dense else TTEmbeddingBagCollectionSharder(compression(tables))
        )
        plan = make_plan(ebc, tables, world_size, stock, dense=dense)
        model = DistributedModelParallel(
            FeatureProcessedEmbeddingBagCollection(ebc, processor),
            device=CPU,
            plan=ShardingPlan({"": plan}),
            sharders=[sharder],
        )
        kinds[dense] = model
    ours, twin = kinds[False], kinds[True]
    prefix = "_embedding_bag_collection."
    state = full_state(ours, tables)
    dense_state = {prefix + key.removeprefix("ebc."): value for key, value in materialised(tables, state).items()}
    assert not twin.load_state_dict(dense_state, strict=False).unexpected_keys
    features, _ = make_batch(tables, 5 + 4 * rank, rank)
    gradients = []
    for model in (ours, twin):
        pooled = model(features)
        torch.cat([pooled[key] for key in sorted(pooled.keys())], dim=1).square().sum().backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    names = [name for name in gradients[1] if "position_weights" in name]
    assert len(names) == len(feature_rows(tables))
    for name in names:
        torch.testing.assert_close(gradients[0][name], gradients[1][name], atol=TOLERANCE, rtol=1e-4)
    return {name.rpartition(".")[2] for name in names if gradients[0][name].abs().sum() > 0}


def test_position_weights_get_their_gradient(two_ranks: Ranks) -> None:
    trained = set().union(*two_ranks.run(position_weights))  # a rank's own are those of the features that it looks up
    assert trained == set(feature_rows(mixed_tables()))


def odd_batches(rank: int, world_size: int) -> None:
    """Steps with an empty batch on one rank, on all, without any lookup, and with int32 ids."""
    tables = mixed_tables()
    model = shard(tables, world_size, (torch.optim.SGD, {"lr": 0.1}))
    reference = Reference(tables, full_state(model, tables), model.module.over)
    sizes = [(0, 6), (6, 0), (4, 4), (4, 4)]
    for step, both in enumerate(sizes):
        features, _ = make_batch(tables, both[rank], 10 * step + rank, most=0 if step == 2 else 3)
        if step == 3:
            features = KeyedJaggedTensor(
                keys=features.keys(), values=features.values().int(), lengths=features.lengths().int()
            )
        output, columns = model(features)
        assert columns.shape == (both[rank], sum(table.dim * len(table.features) for table in tables))
        if both[rank]:  # a KeyedJaggedTensor of no samples cannot be split
            torch.testing.assert_close(columns, reference.columns(features), atol=TOLERANCE, rtol=0)
        (0.0 * output).sum().backward()  # a step of no size, so that the reference stays valid


def test_empty_and_uneven_batches(two_ranks: Ranks) -> None:
    two_ranks.run(odd_batches)


def rank_without_tables(rank: int, world_size: int) -> list[str]:
    tables = [Table("only", 90, 16, ("f0",), 0, TTSpec(90, 16, (5, 5, 4), (2, 4, 2), (3, 5)))]
    model = shard(tables, world_size, (torch.optim.Adagrad, {"lr": 0.1}))
    for step in range(2):
        features, targets = make_batch(tables, 5, step * 2 + rank)
        output, _ = model(features)
        (output - targets).square().mean().backward()
    return [key for key in model.state_dict() if "embedding_bags" in key]


def test_a_rank_without_tables(two_ranks: Ranks) -> None:
    keys, none = two_ranks.run(rank_without_tables)
    assert keys == [f"ebc.embedding_bags.only.{part}" for part in ("tt_core0", "tt_core1", "tt_core2", "tt_rows")]
    assert none == []


def one_call_a_group(rank: int, world_size: int) -> list[list[str]]:
    model = shard(mixed_tables(), world_size, (torch.optim.SGD, {"lr": 0.1}))
    return [list(kernel.cores) for kernel in model.module.ebc._tt_kernels()]


def test_all_tables_of_a_rank_are_one_group(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(one_call_a_group)
    assert sorted(map(sorted, first)) == [["dp", "dp2"], ["four_cores", "tw0"]]
    assert sorted(map(sorted, second)) == [["dp", "dp2"], ["shares_f0", "tw1"]]
