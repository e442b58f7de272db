"""The planner: storage, cost, choices, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    Shard,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from twins import apply_optimizer_in_backward

from flowtt_torchrec.distributed import (
    TTEmbeddingBagCollectionSharder,
    TTEmbeddingEnumerator,
    TTEmbeddingShardingPlanner,
    TTPerfEstimator,
    TTStorageEstimator,
)
from flowtt_torchrec.distributed.planner.shard_estimators import occupied
from flowtt_torchrec.planner_costs import CostConstants, PassCost
from flowtt_torchrec.spec import TTSpec

GIB = 1024**3
CUSTOMIZED = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value
BIG = TTSpec.suggest(40_000_000, 128, 32)
MID = TTSpec.suggest(3_000_000, 64, 16)
SIZES = {"big": (40_000_000, 128), "mid": (3_000_000, 64), "small": (100_000, 64), "tiny": (5_000, 32)}
COMPRESSION = {"big": BIG, "mid": MID}
ALL_TYPES = [t.value for t in ShardingType if t != ShardingType.GRID_SHARD]
STOCK_SHARDER: Any = EmbeddingBagCollectionSharder()


def collection(
    optimizer: Any = (torch.optim.Adagrad, {"lr": 0.1}), sizes: dict[str, tuple[int, int]] = SIZES
) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"])
        for name, (rows, dim) in sizes.items()
    ]
    ebc = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    apply_optimizer_in_backward(optimizer[0], ebc.parameters(), dict(optimizer[1]))
    return ebc


def topology(world_size: int = 2, device: str = "cpu", capacity: float = 8) -> Topology:
    capacities = {"hbm_cap": int(capacity * GIB)} if device == "cuda" else {"ddr_cap": int(capacity * GIB)}
    return Topology(world_size=world_size, local_world_size=world_size, compute_device=device, **capacities)


def make_planner(compression: dict[str, TTSpec] = COMPRESSION, **kwargs: Any) -> TTEmbeddingShardingPlanner:
    kwargs = {"topology": topology(), "batch_size": 2048, "stats": [], **kwargs}
    return TTEmbeddingShardingPlanner(
        storage_reservation=FixedPercentageStorageReservation(0.0), compression=compression, **kwargs
    )


def make_plan(ebc: EmbeddingBagCollection | None = None, **kwargs: Any) -> dict[str, tuple[str, str, list[int]]]:
    planner = make_planner(**kwargs)
    plan = planner.plan(ebc or collection(), [TTEmbeddingBagCollectionSharder(kwargs.get("compression", COMPRESSION))])
    return entries(plan)


def entries(plan: ShardingPlan) -> dict[str, tuple[str, str, list[int]]]:
    return {
        name: (entry.sharding_type, entry.compute_kernel, entry.ranks)
        for module in plan.plan.values()
        for name, entry in module.items()
    }


def options_of(device: str, constraints: dict[str, ParameterConstraints] | None = None) -> list[ShardingOption]:
    enumerator = TTEmbeddingEnumerator(topology(device=device), 2048, COMPRESSION, constraints)
    return enumerator.enumerate(collection(), [TTEmbeddingBagCollectionSharder(COMPRESSION)])


def kinds(options: list[ShardingOption]) -> dict[str, set[tuple[str, str]]]:
    by_table: dict[str, set[tuple[str, str]]] = {name: set() for name in SIZES}
    for option in options:
        by_table[option.name].add((option.sharding_type, option.compute_kernel))
    return by_table


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_table_gets_its_own_kind_of_options(device: str) -> None:
    stock = kinds(EmbeddingEnumerator(topology(device=device), 2048).enumerate(collection(), [STOCK_SHARDER]))
    every = {name: ParameterConstraints(sharding_types=ALL_TYPES) for name in COMPRESSION}
    options = options_of(device, every)
    assert all(shard.storage is not None and shard.perf is not None for o in options for shard in o.shards)
    by_table = kinds(options)
    assert by_table["big"] == by_table["mid"] == {(sharding_type, CUSTOMIZED) for sharding_type in ALL_TYPES}
    for name in ("small", "tiny"):
        assert by_table[name] == stock[name]


def test_options_that_no_plan_gains_from_are_not_made() -> None:
    """Of mid, on 2 ranks: the big table's rank is the slower one anyhow, and the sum of its cores costs time."""
    by_table = kinds(options_of("cuda"))
    assert by_table["big"] == {("table_wise", CUSTOMIZED), ("data_parallel", CUSTOMIZED)}
    assert by_table["mid"] == {("table_wise", CUSTOMIZED)}
    two_hosts = Topology(world_size=16, local_world_size=8, compute_device="cuda")
    enumerator = TTEmbeddingEnumerator(two_hosts, 2048, COMPRESSION)
    sharders: list[Any] = [TTEmbeddingBagCollectionSharder(COMPRESSION)]
    by_table = kinds(enumerator.enumerate(collection(), sharders))
    assert {sharding_type for sharding_type, _ in by_table["big"]} == {"table_wise", "data_parallel", "table_row_wise"}
    again = kinds(enumerator.enumerate(collection(), sharders))  # of another model
    assert again == by_table
    # with many equal tables a rank has several: none needs to be split, and all are better off undivided
    sizes = {f"t{i}": (1_000_000, 64) for i in range(40)}
    specs = {name: TTSpec.suggest(*size, 32) for name, size in sizes.items()}
    sharders = [TTEmbeddingBagCollectionSharder(specs)]
    options = TTEmbeddingEnumerator(two_hosts, 2048, specs).enumerate(collection(sizes=sizes), sharders)
    assert [(o.name, o.sharding_type) for o in options] == [(name, "table_wise") for name in sizes]


def test_options_come_in_one_order() -> None:
    options = options_of("cuda")
    per_table = {name: [o for o in options if o.name == name] for name in SIZES}
    for of_table in per_table.values():
        kinds = [(o.sharding_type, o.compute_kernel) for o in of_table]
        assert kinds == sorted(kinds)
    assert [o for of_table in per_table.values() for o in of_table] == sorted(
        options, key=lambda o: list(SIZES).index(o.name)
    )


ALL_TYPES = [t.value for t in ShardingType if t != ShardingType.GRID_SHARD]
EVERYWHERE = {"big": ParameterConstraints(sharding_types=ALL_TYPES, min_partition=32)}


def slow(device: str, flops_per_ms: float) -> CostConstants:
    """Constants that leave operations as all that counts."""
    return CostConstants(device, "a test", PassCost(flops_per_ms, 1e12), PassCost(flops_per_ms / 3, 1e12))


def perfs(
    device: str,
    compression: dict[str, TTSpec],
    world_size: int = 2,
    flops_per_ms: float | None = None,
    **kwargs: Any,
) -> dict[tuple[str, str], Any]:
    """Perf of the first shard of each option."""
    topo = topology(world_size, device)
    kwargs["costs"] = None if flops_per_ms is None else slow(device, flops_per_ms)
    sharder = TTEmbeddingBagCollectionSharder(compression)
    options = TTEmbeddingEnumerator(topo, 2048, compression, **kwargs).enumerate(collection(), [sharder])
    return {(o.name, o.sharding_type): o.shards[0].perf for o in options if o.compute_kernel == CUSTOMIZED}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cost_follows_flops_bytes_and_ranks(device: str) -> None:
    usual = perfs(device, COMPRESSION, flops_per_ms=1e6)  # so slow that flops count
    lookups = 2 * 2048
    rows = occupied(40_000_000, lookups)
    prefixes = occupied(-(-40_000_000 // BIG.p[-1]), rows)
    flops = rows * BIG.flops_per_row + prefixes * BIG.flops_per_prefix
    perf = usual["big", "table_wise"]
    assert perf.fwd_compute == pytest.approx(flops / 1e6)
    assert perf.bwd_compute == pytest.approx(3 * flops / 1e6)
    # lookups of a data-parallel table are those of one rank
    assert usual["big", "data_parallel"].fwd_compute == pytest.approx(perf.fwd_compute / 2, rel=0.02)
    smaller = perfs(device, {"big": TTSpec.suggest(40_000_000, 128, 8), "mid": MID}, flops_per_ms=1e6)
    assert smaller["big", "table_wise"].fwd_compute < perf.fwd_compute / 8
    # with flops for nothing, memory is what counts
    free = perfs(device, COMPRESSION, flops_per_ms=1e30)["big", "table_wise"]
    assert 0 < free.fwd_compute < perf.fwd_compute


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_data_parallel_is_priced_with_core_bytes(device: str) -> None:
    """As TorchRec prices the all-reduce of a dense table with as many numbers as the cores have."""
    rows = -(-BIG.num_parameters // 128)
    stock = EmbeddingEnumerator(
        topology(device=device),
        2048,
        constraints={"t": ParameterConstraints(sharding_types=["data_parallel"], compute_kernels=["dense"])},
    ).enumerate(collection(sizes={"t": (rows, 128)}), [EmbeddingBagCollectionSharder()])
    ours = perfs(device, COMPRESSION)["big", "data_parallel"]
    assert ours.bwd_comms == pytest.approx(stock[0].shards[0].perf.bwd_comms, rel=1e-12)
    assert ours.fwd_comms == 0
    assert perfs(device, COMPRESSION)["big", "table_wise"].fwd_comms > 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tables_with_a_spec_become_tensor_trains_and_no_others(device: str) -> None:
    plan = make_plan(topology=topology(device=device))
    assert plan["big"][1] == plan["mid"][1] == CUSTOMIZED
    assert {plan["small"][1], plan["tiny"][1]} <= {"fused", "dense"}


def test_a_table_that_fits_no_device_fits_as_a_tensor_train() -> None:
    stock = EmbeddingShardingPlanner(
        topology=topology(capacity=1),
        batch_size=2048,
        stats=[],
        storage_reservation=FixedPercentageStorageReservation(0.0),
    )
    with pytest.raises(PlannerError):
        stock.plan(collection(), [EmbeddingBagCollectionSharder()])
    assert make_plan(topology=topology(capacity=1))["big"][1] == CUSTOMIZED


def test_no_room_even_for_the_cores_is_the_planners_error() -> None:
    with pytest.raises(PlannerError, match="insufficient storage"):
        make_plan(topology=topology(capacity=0.001))


def test_equal_tables_are_spread_over_the_ranks() -> None:
    sizes = {f"t{i}": (1_000_000, 64) for i in range(8)}
    compression = {name: TTSpec.suggest(*size, 16) for name, size in sizes.items()}
    constraints = {name: ParameterConstraints(sharding_types=["table_wise"]) for name in sizes}
    plan = make_plan(collection(sizes=sizes), topology=topology(4), compression=compression, constraints=constraints)
    assert sorted(rank for _, _, (rank,) in plan.values()) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_constraints_narrow_a_tt_table_to_one_placement() -> None:
    placements = [("data_parallel", [0, 1]), ("table_wise", None), ("row_wise", [0, 1]), ("table_row_wise", [0, 1])]
    for sharding_type, ranks in (*placements, ("column_wise", [0, 1, 0, 1]), ("table_column_wise", [0, 1, 0, 1])):
        constraints = {"big": ParameterConstraints(sharding_types=[sharding_type, "grid_shard"], min_partition=32)}
        entry = make_plan(constraints=constraints)["big"]
        assert entry[:2] == (sharding_type, CUSTOMIZED)
        assert ranks is None or sorted(entry[2]) == sorted(ranks)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_columns_are_cut_only_where_the_cores_can_be(device: str) -> None:
    """BIG has q (4, 4, 8): columns come in steps of 32."""
    for width, shards in ((32, 4), (64, 2), (128, 1), (16, 0)):
        constraints = {"big": ParameterConstraints(min_partition=width)}
        found = [o for o in options_of(device, constraints) if o.name == "big" and o.sharding_type == "column_wise"]
        assert [len(o.shards) for o in found] == ([shards] if shards > 1 else [])
    constraints = {"big": ParameterConstraints(sharding_types=["column_wise"], min_partition=16)}
    with pytest.raises(
        ValueError, match=r"table 'big': .*cuts \[16\] columns wide, .*q \(4, 4, 8\).* multiples of 32, or"
    ):
        options_of(device, constraints)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("only", ALL_TYPES)
def test_a_sharder_that_offers_one_type_only(device: str, only: str) -> None:
    """For tensor trains and for dense tables, also where it is a type that a planner would not choose by itself."""

    class OneType(TTEmbeddingBagCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return [only]

    sizes = {"tt": (1000, 4), "dense": (1000, 4)}
    compression = {"tt": TTSpec(1000, 4, (10, 10, 10), (1, 2, 2), (2, 2))}  # cannot be cut: one shard of columns
    planner = make_planner(
        compression,
        topology=topology(2, device),
        constraints={name: ParameterConstraints(min_partition=4) for name in sizes},
    )
    plan = entries(planner.plan(collection(sizes=sizes), [OneType(compression)]))
    assert plan["tt"][:2] == (only, CUSTOMIZED)
    assert plan["dense"][0] == only
    assert plan["dense"][1] != CUSTOMIZED


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fewer_ranks_than_a_host_has(device: str) -> None:
    topo = Topology(world_size=1, local_world_size=8, compute_device=device)
    placements = ParameterConstraints(sharding_types=["table_wise", "data_parallel"])
    for constraints in ({}, dict.fromkeys(COMPRESSION, placements)):
        sizes = {name: SIZES[name] for name in (*COMPRESSION, "tiny")}
        plan = make_plan(collection(sizes=sizes), topology=topo, constraints=constraints)
        assert [plan[name][1:] for name in COMPRESSION] == [(CUSTOMIZED, [0])] * 2


def test_torchrecs_planner_names_ours() -> None:
    planner = EmbeddingShardingPlanner(topology(), batch_size=64, stats=[])
    message = r"customized_kernel \(of a tensor-train table: plan with TTEmbeddingShardingPlanner\)"
    with pytest.raises(ValueError, match=message):
        planner.plan(collection(), [TTEmbeddingBagCollectionSharder(COMPRESSION)])
    assert all(type(option.compute_kernel) is str for option in options_of("cpu"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_shared_tables_are_priced_by_their_part_and_the_sum_of_cores(device: str) -> None:
    constraints = EVERYWHERE
    usual = perfs(device, COMPRESSION, flops_per_ms=1e6, constraints=constraints)
    whole = usual["big", "table_wise"]
    assert usual["big", "row_wise"].fwd_compute == pytest.approx(whole.fwd_compute / 2, rel=0.02)
    assert usual["big", "column_wise"].fwd_compute == pytest.approx(whole.fwd_compute / 4, rel=1e-6)
    topo = topology(2, device)
    ring = 4 * BIG.num_parameters / topo.intra_host_bw  # 2 (n - 1) / n with two ranks
    tiny_cores = {"big": TTSpec.suggest(40_000_000, 128, 2), "mid": MID}
    small = perfs(device, tiny_cores, flops_per_ms=1e6, constraints=constraints)
    less = 4 * tiny_cores["big"].num_parameters / topo.intra_host_bw
    difference = usual["big", "row_wise"].bwd_comms - small["big", "row_wise"].bwd_comms
    assert difference == pytest.approx(ring - less, rel=1e-6)
    difference = usual["big", "column_wise"].bwd_comms - small["big", "column_wise"].bwd_comms
    assert difference == pytest.approx(1.5 * (ring - less), rel=1e-6)  # four shards


def test_dense_tables_keep_their_constraints() -> None:
    constraints = {
        "small": ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"]),
        "tiny": ParameterConstraints(sharding_types=["data_parallel"]),
    }
    plan = make_plan(topology=topology(device="cuda"), constraints=constraints)
    assert plan["small"][:2] == ("row_wise", "fused")
    assert plan["tiny"][:2] == ("data_parallel", "dense")


def test_row_wise_on_the_cpu_is_for_tensor_trains_only() -> None:
    constraints = {"small": ParameterConstraints(sharding_types=["row_wise"])}
    with pytest.raises(ValueError, match=r"table 'small' is dense and its constraints leave it no .* cpu"):
        make_plan(constraints=constraints)


def test_a_spec_without_a_table_is_named_with_the_near_match() -> None:
    with pytest.raises(ValueError, match=r"names table 'bgi', which the model hasn't; it has .*did you mean 'big'\?"):
        make_plan(compression={"bgi": BIG})


def test_a_spec_of_another_size_is_named() -> None:
    with pytest.raises(ValueError, match=r"table 'mid' is 3,000,000 x 64, but its TTSpec is for 40,000,000 x 128"):
        make_plan(compression={"mid": BIG})


def test_constraints_that_leave_no_option_are_named() -> None:
    for constraints, message in (
        (ParameterConstraints(sharding_types=["grid_shard"]), r"table 'big'.*\['grid_shard'\] only.*table_wise, data"),
        (ParameterConstraints(compute_kernels=["fused"]), r"table 'big'.*\['fused'\] only.*'customized_kernel'"),
    ):
        with pytest.raises(ValueError, match=message):
            make_planner(constraints={"big": constraints})


def test_planner_and_sharder_must_agree() -> None:
    planner = make_planner()
    other = COMPRESSION | {"big": TTSpec.suggest(40_000_000, 128, 8)}
    with pytest.raises(ValueError, match=r"planner's compression gives table 'big'.*pass both the same mapping"):
        planner.plan(collection(), [TTEmbeddingBagCollectionSharder(other)])
    with pytest.raises(ValueError, match=r"no sharder offers the TT kernel for \['\.big', '\.mid'\]"):
        planner.plan(collection(), [EmbeddingBagCollectionSharder()])


def test_a_stock_enumerator_is_refused() -> None:
    with pytest.raises(ValueError, match="EmbeddingEnumerator enumerates no TT tables"):
        make_planner(enumerator=EmbeddingEnumerator(topology(), 2048))


def test_grid_sharding_makes_no_dense_table_of_a_tensor_train() -> None:
    """TorchRec's sharders have it on GPUs, and constraints may name it beside others."""
    every = {name: ParameterConstraints(sharding_types=["grid_shard", "table_wise"]) for name in COMPRESSION}
    by_table = kinds(options_of("cuda", every))
    assert by_table["big"] == by_table["mid"] == {("table_wise", CUSTOMIZED)}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kept_forward_weights_take_memory_and_are_never_data_parallel(device: str) -> None:
    def options(keep: bool, kind: str) -> list[ShardingOption]:
        every = {"big": ParameterConstraints(sharding_types=[kind, "data_parallel"])}
        sharder = TTEmbeddingBagCollectionSharder(COMPRESSION, keep_forward_weights=keep)
        enumerator = TTEmbeddingEnumerator(topology(device=device), 2048, COMPRESSION, every)
        return enumerator.enumerate(collection(), [sharder])

    for kind in ("table_wise", "row_wise", "column_wise"):
        plain, kept = ({(o.name, o.sharding_type): o for o in options(keep, kind)} for keep in (False, True))
        assert {key for key in plain if key[0] in COMPRESSION and "data_parallel" in key} >= {("big", "data_parallel")}
        assert {name for name, sharding_type in kept if sharding_type == "data_parallel"} == {"small", "tiny"}
        more = [
            bytes_of(kept["big", kind].shards[0]) - bytes_of(plain["big", kind].shards[0]),
            bytes_of(kept["small", "table_wise"].shards[0]) - bytes_of(plain["small", "table_wise"].shards[0]),
        ]
        assert more[0] > 2048 * 128 * 4
        assert more[1] == 0

    constraints = {"big": ParameterConstraints(sharding_types=["data_parallel"])}
    sharder = TTEmbeddingBagCollectionSharder(COMPRESSION, keep_forward_weights=True)
    with pytest.raises(ValueError, match=r"table 'big': .* data_parallel only, and the sharder has keep_forward_weigh"):
        make_planner(constraints=constraints).plan(collection(), [sharder])


def bytes_of(shard_: Shard) -> int:
    assert shard_.storage is not None
    return shard_.storage.hbm + shard_.storage.ddr


def test_an_enumerator_of_ones_own() -> None:
    enumerator = TTEmbeddingEnumerator(topology(), 2048, COMPRESSION, use_exact_enumerate_order=True)
    assert make_plan(enumerator=enumerator)["big"][1] == CUSTOMIZED


def test_planning_twice_gives_the_same_plan() -> None:
    planner, ebc = make_planner(), collection()
    sharders = [TTEmbeddingBagCollectionSharder(COMPRESSION)]
    assert entries(planner.plan(ebc, sharders)) == entries(planner.plan(ebc, sharders))
    assert planner.hash_planner_context_inputs() != 0  # which reads the options kept from the last plan


def test_estimators_leave_other_customised_kernels_alone() -> None:
    options = [o for o in options_of("cpu") if o.name == "big"]
    for option in options:
        option.name = "not ours"
        for shard_ in option.shards:
            shard_.storage = shard_.perf = None
    for estimator in (TTStorageEstimator(topology(), COMPRESSION), TTPerfEstimator(topology(), COMPRESSION)):
        estimator.estimate(options, {})
    assert all(shard_.storage is None and shard_.perf is None for o in options for shard_ in o.shards)


def test_occupied() -> None:
    assert occupied(1e9, 10) == pytest.approx(10)
    assert occupied(10, 1e9) == pytest.approx(10)
    assert occupied(100, 100) == pytest.approx(100 * (1 - math.exp(-1)))


def test_constants_of_another_device_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a test\) are of cpu, the topology is of cuda; measure there with"):
        make_planner(topology=topology(2, "cuda"), costs=slow("cpu", 1e6))


def test_lookups_and_flows_cost_time_of_their_own() -> None:
    free = perfs("cpu", COMPRESSION, flops_per_ms=1e30)["big", "table_wise"]
    costs = CostConstants("cpu", "a test", PassCost(1e30, 1e12, 1e-3, 1e-2), PassCost(1e30, 1e12, 2e-3, 0.0))
    topo = topology(2, "cpu")
    enumerator = TTEmbeddingEnumerator(topo, 2048, COMPRESSION, costs=costs)
    options = enumerator.enumerate(collection(), [TTEmbeddingBagCollectionSharder(COMPRESSION)])
    (perf,) = (o.shards[0].perf for o in options if (o.name, o.sharding_type) == ("big", "table_wise"))
    flows = occupied(-(-40_000_000 // BIG.p[-1]), occupied(40_000_000, 4096))
    assert perf.fwd_compute == pytest.approx(free.fwd_compute + 4.096 + flows / 100)
    assert perf.bwd_compute == pytest.approx(free.bwd_compute + 8.192)
