"""What the sharder refuses, and how it says so."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchrec.optim
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from ranks import Ranks
from torchrec.distributed import sharding_plan as stock_plan
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.types import ShardingEnv, ShardingEnv2D, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from twins import Table, make_batch, shard

from flowtt_torchrec.cores import init_cores
from flowtt_torchrec.distributed import TTEmbeddingBagCollectionSharder, sharding_plan
from flowtt_torchrec.spec import TTSpec

SPEC = TTSpec(90, 16, (5, 5, 4), (2, 4, 2), (3, 5))
TABLE = Table("t", 90, 16, ("f0",), 0, SPEC)


def config(**kwargs: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        **{"name": "t", "num_embeddings": 90, "embedding_dim": 16, "feature_names": ["f0"], **kwargs}
    )


def shard_one(
    compression: dict[str, TTSpec],
    generator: Any,
    table: EmbeddingBagConfig | None = None,
    kernel: str | None = None,
    device: str = "meta",
    **kwargs: Any,
) -> DistributedModelParallel:
    """A model of one table, sharded by a plan of one entry."""
    module = torch.nn.ModuleDict(
        {"ebc": EmbeddingBagCollection(tables=[table or config()], device=torch.device(device))}
    )
    sharder = TTEmbeddingBagCollectionSharder(compression)
    plan = construct_module_sharding_plan(
        module["ebc"], {"t": generator}, sharder=sharder, local_size=1, world_size=1, device_type="cpu"
    )
    for name, value in {"compute_kernel": kernel, **kwargs}.items():
        if value is not None:
            setattr(plan["t"], name, value)
    return DistributedModelParallel(
        module, device=torch.device("cpu"), plan=ShardingPlan({"ebc": plan}), sharders=[sharder]
    )


def refused(one_rank: Callable[..., Any], message: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(ValueError, match=message):
        one_rank(lambda rank, world_size: shard_one(*args, **kwargs))


def test_a_planned_tt_table_without_a_spec(one_rank: Callable[..., Any]) -> None:
    message = r"table 't' is planned as customized_kernel, but the sharder's compression has no TTSpec"
    refused(one_rank, message, {}, sharding_plan.table_wise(0))
    refused(one_rank, message + r".*did you mean 'tt'\?", {"tt": SPEC}, sharding_plan.data_parallel())


def test_a_spec_whose_table_is_planned_dense(one_rank: Callable[..., Any]) -> None:
    message = r"table 't' has a TTSpec, but the plan gives it the kernel 'fused'.*TTEmbeddingShardingPlanner"
    refused(one_rank, message, {"t": SPEC}, stock_plan.table_wise(0, compute_kernel="fused"))


def test_a_spec_of_another_size(one_rank: Callable[..., Any]) -> None:
    other = TTSpec(91, 16, (5, 5, 4), (2, 4, 2), (3, 5))
    refused(one_rank, r"table 't' is 90 x 16, but its TTSpec is for 91 x 16", {"t": other}, sharding_plan.table_wise(0))


def test_grid_sharding(one_rank: Callable[..., Any]) -> None:
    message = "table 't' is planned grid_shard; TT tables support table_wise, data_parallel, row_wise, .*column_wise"
    refused(one_rank, message, {"t": SPEC}, stock_plan.grid_shard(host_indexes=[0]), kernel="customized_kernel")


@pytest.mark.parametrize("widths", [[4, 12], [4, 4, 4, 4], [6, 10]])
def test_column_shards_cut_where_the_cores_cannot_be(one_rank: Callable[..., Any], widths: list[int]) -> None:
    spec = TTSpec(90, 16, (5, 5, 4), (2, 4, 2), (3, 5))
    message = rf"table 't' is cut into columns of widths {re.escape(str(widths))}; .*every 8 columns: .* 8, 16 columns"

    def cut(sharding: Any) -> Any:
        first = 0
        for shard_, width in zip(sharding.sharding_spec.shards, widths):
            shard_.shard_offsets, shard_.shard_sizes = [0, first], [90, width]
            first += width
        return sharding

    make = sharding_plan.column_wise(ranks=[0] * len(widths))
    generator = lambda *args, **kwargs: cut(make(*args, **kwargs))  # noqa: E731
    refused(one_rank, message, {"t": spec}, generator, config(embedding_dim=16))


def test_row_wise_means_that_share_a_feature(one_rank: Callable[..., Any]) -> None:
    """TorchRec divides by feature, so the other table's columns would be divided too."""
    mean = dataclasses.replace(TABLE, name="mean", place="rw", pooling=PoolingType.MEAN)
    message = "table 'mean' is row-wise with mean pooling, and table 't', which is not, has the same feature 'f0'"
    with pytest.raises(ValueError, match=message):
        one_rank(lambda rank, world_size: shard([TABLE, mean], world_size))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_type": DataType.INT8}, "table 't' has data_type INT8; TT tables support FP32, FP16, BF16"),
        ({"use_virtual_table": True, "total_num_buckets": 10}, "table 't' is a virtual table"),
        ({"num_embeddings_post_pruning": 80}, "table 't' is pruned"),
        ({"init_fn": torch.nn.init.xavier_uniform_}, "table 't' has an init_fn of its own.*from_dense"),
        ({"weight_init_min": 0.0, "weight_init_max": 0.1}, "table 't' asks for initial weights of mean 0.05"),
        ({"weight_init_min": 0.0, "weight_init_max": 0.0}, "standard deviation 0;"),
    ],
)
def test_configs(one_rank: Callable[..., Any], changes: dict[str, Any], message: str) -> None:
    refused(one_rank, message, {"t": SPEC}, sharding_plan.table_wise(0), config(**changes))


def test_bounds_check_none_and_output_dtype(one_rank: Callable[..., Any]) -> None:
    args = ({"t": SPEC}, sharding_plan.table_wise(0))
    refused(
        one_rank, "table 't': bounds_check_mode NONE is not supported", *args, bounds_check_mode=BoundsCheckMode.NONE
    )
    refused(one_rank, "table 't': output_dtype .* is not supported", *args, output_dtype=DataType.INT8)


def lookup_of(row: int, mode: BoundsCheckMode | None) -> torch.Tensor:
    model = shard_one({"t": SPEC}, sharding_plan.table_wise(0), bounds_check_mode=mode)
    features = KeyedJaggedTensor(keys=["f0"], values=torch.tensor([row]), lengths=torch.tensor([1]))
    return model.module["ebc"](features)["f0"].detach()


def test_bounds_checks(one_rank: Callable[..., Any]) -> None:
    with pytest.raises(IndexError, match=r"index 90 .*table 't'.* allowed: 0 to 89"):
        one_rank(lambda rank, world_size: lookup_of(90, None))
    for mode in (BoundsCheckMode.IGNORE, BoundsCheckMode.V2_IGNORE):
        got = one_rank(lambda rank, world_size, mode=mode: lookup_of(90, mode))
        torch.testing.assert_close(got, one_rank(lambda rank, world_size: lookup_of(0, None)))


@pytest.mark.parametrize(
    ("changes", "std"),
    [
        ({}, 1 / (3 * 20_000) ** 0.5),
        ({"weight_init_min": -0.3, "weight_init_max": 0.3}, 0.3 / 3**0.5),
        ({"init_fn": functools.partial(torch.nn.init.normal_, mean=0.0, std=0.02)}, 0.02),
        ({"init_fn": functools.partial(torch.nn.init.uniform_, a=-0.1, b=0.1)}, 0.1 / 3**0.5),
    ],
)
@pytest.mark.parametrize("generator", [sharding_plan.table_wise(0), sharding_plan.data_parallel()])
def test_initial_rows_have_the_configs_deviation(
    one_rank: Callable[..., Any], changes: dict[str, Any], std: float, generator: Any
) -> None:
    spec = TTSpec.suggest(20_000, 16, 16)

    def rows(rank: int, world_size: int) -> torch.Tensor:
        table = config(num_embeddings=20_000, **changes)
        model = shard_one({"t": spec}, generator, table)
        features = KeyedJaggedTensor(
            keys=["f0"], values=torch.arange(20_000), lengths=torch.ones(20_000, dtype=torch.int64)
        )
        return model.module["ebc"](features)["f0"].detach()

    drawn = one_rank(rows)
    assert float(drawn.std()) == pytest.approx(std, rel=0.1)
    assert abs(float(drawn.mean())) < 0.1 * std


def test_tables_need_not_be_on_meta(one_rank: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="flowtt_torchrec"):
        model = one_rank(lambda r, w: shard_one({"t": SPEC}, sharding_plan.table_wise(0), device="cpu"))
    assert any("'t' was not on the meta device; its dense values are not used" in r.message for r in caplog.records)
    assert [name for name, _ in model.named_parameters()] == [f"ebc.embedding_bags.t.tt_core{k}" for k in range(3)]


class OnDevice(EmbeddingBagCollection):
    """A collection whose values TorchRec would load into the sharded one, as it does for a collection on a GPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


def test_dense_values_of_a_collection_on_a_device_are_left_out(one_rank: Callable[..., Any]) -> None:
    def make(rank: int, world_size: int) -> None:
        ebc = OnDevice(tables=[config(), config(name="d")], device=torch.device("cpu"))
        sharder = TTEmbeddingBagCollectionSharder({"t": SPEC})
        generators = {"t": sharding_plan.table_wise(0), "d": stock_plan.table_wise(0, compute_kernel="fused")}
        plan = construct_module_sharding_plan(
            ebc, generators, sharder=sharder, local_size=1, world_size=1, device_type="cpu"
        )
        env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
        sharded = sharder.shard(ebc, plan, env, torch.device("cpu"))
        state = sharded.state_dict()
        dense = state["embedding_bags.d.weight"].local_shards()[0].tensor
        assert torch.equal(dense, ebc.embedding_bags["d"].weight)
        drawn = init_cores(SPEC, "t")
        assert all(torch.equal(state[f"embedding_bags.t.tt_core{k}"], core) for k, core in enumerate(drawn))

    one_rank(make)


def test_other_environments_are_refused(one_rank: Callable[..., Any]) -> None:
    def make(rank: int, world_size: int) -> None:
        ebc = EmbeddingBagCollection(tables=[config()], device=torch.device("meta"))
        sharder = TTEmbeddingBagCollectionSharder({"t": SPEC})
        plan = construct_module_sharding_plan(
            ebc, {"t": sharding_plan.table_wise(0)}, sharder=sharder, local_size=1, world_size=1, device_type="cpu"
        )
        with_dtensor = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
        with_dtensor.output_dtensor = True
        for env in (with_dtensor, ShardingEnv2D.__new__(ShardingEnv2D)):
            with pytest.raises(ValueError, match="table 't': TT tables don't support 2D parallelism or DTensor"):
                sharder.shard(ebc, plan, env, torch.device("cpu"))

    one_rank(make)


def test_specs_of_another_collection_are_warned_of(
    one_rank: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="flowtt_torchrec"):
        one_rank(lambda r, w: shard_one({"t": SPEC, "elsewhere": SPEC}, sharding_plan.table_wise(0)))
    assert any("collection ebc has no table 'elsewhere'" in record.message for record in caplog.records)


def test_the_plan_is_not_changed_by_sharding(one_rank: Callable[..., Any]) -> None:
    def twice(rank: int, world_size: int) -> None:
        sharder = TTEmbeddingBagCollectionSharder({"t": SPEC})
        ebc = EmbeddingBagCollection(tables=[config()], device=torch.device("meta"))
        plan = construct_module_sharding_plan(
            ebc, {"t": sharding_plan.table_wise(0)}, sharder=sharder, local_size=1, world_size=1, device_type="cpu"
        )
        before = dataclasses.asdict(plan["t"])
        for _ in range(2):
            DistributedModelParallel(
                torch.nn.ModuleDict({"ebc": ebc}),
                device=torch.device("cpu"),
                plan=ShardingPlan({"ebc": plan}),
                sharders=[sharder],
            )
        assert dataclasses.asdict(plan["t"]) == before

    one_rank(twice)


def test_live_resharding_is_refused(one_rank: Callable[..., Any]) -> None:
    def reshard(rank: int, world_size: int) -> None:
        ebc = shard([TABLE], world_size).module.ebc
        ebc.update_shards({"t": ebc.module_sharding_plan["t"]}, ebc._env, torch.device("cpu"))

    with pytest.raises(NotImplementedError, match=r"table 't'.*checkpoint"):
        one_rank(reshard)


def several_collections(rank: int, world_size: int) -> None:
    """One sharder serves all collections of a model, also one that has dense tables only."""
    tables = {"first": TABLE, "second": dataclasses.replace(TABLE, name="u", features=("g",), place=1, spec=SPEC)}
    module = torch.nn.ModuleDict(
        {
            **{
                key: EmbeddingBagCollection(tables=[t.config()], device=torch.device("meta"))
                for key, t in tables.items()
            },
            "dense": EmbeddingBagCollection(tables=[config(name="d")], device=torch.device("meta")),
        }
    )
    sharder = TTEmbeddingBagCollectionSharder({"t": SPEC, "u": SPEC})
    plans = {}
    for key, generators in (
        ("first", {"t": tables["first"].generator(world_size, dense=False)}),
        ("second", {"u": tables["second"].generator(world_size, dense=False)}),
        ("dense", {"d": stock_plan.table_wise(0, compute_kernel="fused")}),
    ):
        plans[key] = construct_module_sharding_plan(
            module[key], generators, sharder=sharder, local_size=world_size, world_size=world_size, device_type="cpu"
        )
    model = DistributedModelParallel(module, device=torch.device("cpu"), plan=ShardingPlan(plans), sharders=[sharder])
    names = {key.rpartition(".")[0] for key in full_keys(model)}
    assert names == {"first.embedding_bags.t", "second.embedding_bags.u", "dense.embedding_bags.d"}
    for key, feature in (("first", "f0"), ("second", "g"), ("dense", "f0")):
        features, _ = make_batch([dataclasses.replace(TABLE, features=(feature,))], 4, rank)
        assert model.module[key](features)[feature].shape == (4, 16)


def full_keys(model: DistributedModelParallel) -> set[str]:
    every: list[list[str]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(every, list(model.state_dict()))
    return set().union(*every)


def test_several_collections(one_rank: Callable[..., Any], two_ranks: Ranks) -> None:
    one_rank(several_collections)
    two_ranks.run(several_collections)


def different_specs(rank: int, world_size: int, change: str) -> None:
    spec = SPEC if rank == 0 or change != "spec" else TTSpec(90, 16, (5, 5, 4), (2, 4, 2), (3, 4))
    place = 0 if rank == 0 or change != "plan" else "rw"
    tables = [dataclasses.replace(TABLE, spec=spec, place=place)]
    with pytest.raises(ValueError, match=r"table 't' is .*on rank 0, but .* on rank 1; give all ranks the same model"):
        shard(tables, world_size, seed=rank if change == "seed" else 0)


def test_ranks_that_differ_are_told_so_on_all_ranks(two_ranks: Ranks) -> None:
    for change in ("spec", "plan", "seed"):
        two_ranks.run(different_specs, change)


def row_wise_dense(rank: int, world_size: int) -> None:
    """TorchRec's dense tables may be stepped by it beside tables that it cannot step."""
    tables = [dataclasses.replace(TABLE, place="dp"), Table("dense", 90, 16, ("f1",), "dp")]
    model = shard(tables, world_size)
    optimizer = torchrec.optim.RowWiseAdagrad([p for p in model.parameters() if p.dim() > 1])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    features, _ = make_batch(tables, 6, rank)
    model(features)[0].sum().backward()
    with pytest.raises(ValueError, match=r"table 't': torchrec's RowWiseAdagrad cannot step .*torch.optim.Adagrad"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torchrec.optim.RowWiseAdagrad([model.module.ebc.embedding_bags["dense"].weight]).step()
    torch.optim.Adagrad([p for p in model.parameters() if p.dim() > 1]).step()


def test_row_wise_adagrad_as_dense_optimizer(one_rank: Callable[..., Any], two_ranks: Ranks) -> None:
    one_rank(row_wise_dense)
    two_ranks.run(row_wise_dense)
