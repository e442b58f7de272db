"""The planner chooses which tables become tensor trains: dense first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks
from test_planner import BIG, COMPRESSION, MID, SIZES, collection, entries, make_planner, topology
from test_storage import peak, size_of
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, ShardingOption, Stats
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from flowtt_torchrec.distributed import (
    AutoCompression,
    DenseFirstPerfModel,
    TTEmbeddingBagCollectionSharder,
    TTEmbeddingEnumerator,
)
from flowtt_torchrec.spec import TTSpec

CONFIGS = [
    EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"])
    for name, (rows, dim) in SIZES.items()
]
AUTO = AutoCompression.suggest(CONFIGS, rank=32)


def compressed(capacity: float, device: str, **kwargs: Any) -> list[str]:
    """Tables that are tensor trains in the plan for two devices of so many GiB."""
    planner = make_planner(kwargs.pop("compression", AUTO), topology=topology(2, device, capacity), **kwargs)
    plan = entries(planner.plan(collection(), [TTEmbeddingBagCollectionSharder(AUTO)]))
    return [name for name in SIZES if plan[name][1] == "customized_kernel"]


def test_suggest() -> None:
    assert list(AUTO) == ["big", "mid", "small", "tiny"]
    assert AUTO["big"] == TTSpec.suggest(40_000_000, 128, 32)
    few_rows = EmbeddingBagConfig(name="few", num_embeddings=30, embedding_dim=8, feature_names=["f"])
    assert list(AutoCompression.suggest([few_rows, CONFIGS[0]], rank=32)) == ["big"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tables_are_compressed_only_where_memory_forces_it(device: str) -> None:
    """The big table is 19.1 GiB dense and twice that with its state, mid is 0.7 GiB and 1.4."""
    assert compressed(80, device) == []
    assert compressed(8, device) == ["big"]
    assert compressed(0.3, device) == ["big", "mid"]
    assert compressed(0.06, device) in (["big", "mid"], ["big", "mid", "small"])
    with pytest.raises(PlannerError):
        compressed(0.001, device)


def test_only_tables_with_a_spec_may_be_compressed() -> None:
    only_mid = AutoCompression({"mid": MID})
    planner = make_planner(only_mid, topology=topology(2, "cpu", 1))
    with pytest.raises(PlannerError):
        planner.plan(collection(), [TTEmbeddingBagCollectionSharder(only_mid)])


def test_constraints_keep_a_table_dense() -> None:
    constraints = {"big": ParameterConstraints(compute_kernels=["fused"])}
    with pytest.raises(PlannerError):
        compressed(8, "cpu", constraints=constraints)
    assert compressed(80, "cpu", constraints=constraints) == []


def test_tables_outside_of_device_memory_must_be_asked_for() -> None:
    assert compressed(8, "cuda", constraints={"big": ParameterConstraints(compute_kernels=["fused_uvm_caching"])}) == []


def test_many_tables_reach_the_greedy_proposers() -> None:
    """Too many proposals for the grid search: the largest tables are compressed, and no more than needed."""
    sizes = {f"t{i:02}": (1_000_000 * (i + 1), 32) for i in range(20)}  # 0.12 GiB a million rows, twice with state
    specs = AutoCompression({name: TTSpec.suggest(*size, 16) for name, size in sizes.items()})
    planner = make_planner(specs, topology=topology(2, "cuda", 10))
    plan = entries(planner.plan(collection(sizes=sizes), [TTEmbeddingBagCollectionSharder(specs)]))
    kernels = [plan[name][1] == "customized_kernel" for name in sizes]
    assert kernels == sorted(kernels)  # the smaller ones are dense
    dense = sum(2 * 4 * rows * dim for (rows, dim), tt in zip(sizes.values(), kernels) if not tt)
    assert 0 < sum(kernels) < 20
    assert dense > 0.8 * 20 * 1024**3


def test_a_lower_price_lets_time_decide() -> None:
    topo = topology(2, "cuda", 80)
    free = compressed(80, "cuda", performance_model=DenseFirstPerfModel(topo, ms_per_million=0.0))
    dear = compressed(80, "cuda", performance_model=DenseFirstPerfModel(topo, ms_per_million=1e-3))
    assert dear == []
    assert set(dear) <= set(free)


def test_planner_and_sharder_must_both_leave_it_to_the_plan() -> None:
    with pytest.raises(ValueError, match="AutoCompression, but not both"):
        make_planner(AUTO).plan(collection(), [TTEmbeddingBagCollectionSharder(dict(AUTO))])
    with pytest.raises(ValueError, match="AutoCompression, but not both"):
        make_planner(COMPRESSION).plan(collection(), [TTEmbeddingBagCollectionSharder(AutoCompression(COMPRESSION))])


def test_a_sharder_without_tensor_trains_is_named() -> None:
    with pytest.raises(ValueError, match=r"no sharder offers the TT kernel for \['\.big', "):
        make_planner(AUTO).plan(collection(), [EmbeddingBagCollectionSharder()])


def test_both_kinds_of_options() -> None:
    options = TTEmbeddingEnumerator(topology(), 2048, AutoCompression({"big": BIG})).enumerate(
        collection(), [TTEmbeddingBagCollectionSharder(AutoCompression({"big": BIG}))]
    )
    kinds = {(o.name, o.sharding_type, o.compute_kernel) for o in options}
    assert ("big", "table_wise", "fused") in kinds
    assert ("big", "table_wise", "customized_kernel") in kinds
    assert ("big", "row_wise", "fused") not in kinds
    assert not any(name != "big" and kernel == "customized_kernel" for name, _, kernel in kinds)


WANTED = {"large": (40_000_000, 128), "middle": (100_000, 128), "little": (5_000, 128)}
SCALED_DOWN = {"large": (40_000, 128), "middle": (100, 128), "little": (5, 128)}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("memory", "trains"), [(80, []), (8, ["large"]), (1, ["large"]), (0.07, ["large", "middle"])])
def test_what_is_compressed_for_two_devices(device: str, memory: float, trains: list[str]) -> None:
    """Dense with Adagrad's state 41 GB, 0.1 GB and 5 MB."""
    ebc = collection(sizes=WANTED)
    specs = AutoCompression.suggest(ebc.embedding_bag_configs(), rank=32)
    planner = make_planner(specs, topology=topology(2, device, memory))
    plan = entries(planner.plan(ebc, [TTEmbeddingBagCollectionSharder(specs)]))
    assert [name for name, (_, kernel, _) in plan.items() if kernel == "customized_kernel"] == trains


class Estimate(Stats):
    """Keeps the bytes that the planner counts, of all ranks."""

    total = 0

    def log(self, sharding_plan: Any, *args: Any, best_plan: list[ShardingOption], **kwargs: Any) -> None:
        self.total = sum(option.total_storage.hbm + option.total_storage.ddr for option in best_plan)


def plan_and_train(
    rank: int, world_size: int, sizes: dict[str, tuple[int, int]], gib: float
) -> tuple[list[str], int, int]:
    """Tables that the plan compresses, bytes that it counts for all ranks (on the one that plans), bytes of this rank.

    The planned model trains: the loss falls on every rank.
    """
    ebc = collection((torch.optim.Adagrad, {"lr": 0.1}), sizes)
    specs = AutoCompression.suggest(ebc.embedding_bag_configs(), rank=8)
    estimate = Estimate()
    planner = make_planner(specs, topology=topology(world_size, "cpu", gib), batch_size=16, stats=[estimate])
    sharders: list[Any] = [TTEmbeddingBagCollectionSharder(specs)]
    model = torch.nn.ModuleDict({"ebc": ebc})
    plan = planner.collective_plan(model, sharders, torch.distributed.group.WORLD)
    trains = [name for name, (_, kernel, _) in entries(plan).items() if kernel == "customized_kernel"]
    model = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    by_hand = dict(in_backward_optimizer_filter(model.named_parameters()))  # data-parallel tables; there may be none
    optimizer = torch.optim.Adagrad([*by_hand.values(), torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    features = KeyedJaggedTensor(
        keys=[f"f_{name}" for name in sizes],
        values=torch.cat([(torch.arange(16) * 999_983 + rank) % rows for rows, _ in sizes.values()]),
        lengths=torch.ones(16 * len(sizes), dtype=torch.int64),
    )
    losses = []

    def step() -> None:
        optimizer.zero_grad()
        loss = (model.module["ebc"](features).values() - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    for _ in range(2):
        step()
    of_step = peak(step)
    assert losses[2] < losses[1] < losses[0]
    states = [*model.fused_optimizer.state_dict()["state"].values(), *optimizer.state.values()]
    kept = [*model.state_dict().values(), *(value for state in states for value in state.values())]
    local = (t for value in kept for t in ([s.tensor for s in value.local_shards()] if sharded(value) else [value]))
    return trains, estimate.total, of_step + size_of(tensor for tensor in local if tensor.numel() > 1)


def sharded(value: Any) -> bool:
    return isinstance(value, ShardedTensor)


@pytest.mark.parametrize(
    ("sizes", "gib", "trains"),
    [(SCALED_DOWN, 0.08, []), (WANTED, 8, ["large"]), (WANTED, 1, ["large"]), (WANTED, 0.03, ["large", "middle"])],
)
def test_every_plan_trains_in_the_bytes_it_counts(
    two_ranks: Ranks, sizes: dict[str, tuple[int, int]], gib: float, trains: list[str]
) -> None:
    """The all-dense plan with a thousandth of the rows and of the memory."""
    of_ranks = two_ranks.run(plan_and_train, sizes, gib)
    assert [compressed for compressed, _, _ in of_ranks] == [trains, trains]
    estimated = max(counted for _, counted, _ in of_ranks)
    assert sum(measured for _, _, measured in of_ranks) == pytest.approx(estimated, rel=0.05)
