"""Bytes that the planner counts, beside the bytes that are there."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec.optim
from ranks import Ranks
from test_planner import BIG, EVERYWHERE, collection, options_of, topology
from torch.optim import SGD, Adagrad, Adam
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import PipelineType
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from twins import Table, shard

from flowtt_torchrec.distributed import TTEmbeddingBagCollectionSharder, TTEmbeddingEnumerator
from flowtt_torchrec.distributed.planner.storage import Work, table_bytes
from flowtt_torchrec.spec import TTSpec

ROWS, DIM, BATCH, LENGTH = 10_000, 32, 1024, 4
LITTLE = TTSpec(ROWS, DIM, (20, 20, 25), (4, 4, 2), (16, 16))  # 0.09 MB beside 0.26 MB of pooled rows of two ranks
LARGE = TTSpec(ROWS, DIM, (20, 25, 20), (2, 8, 2), (40, 40))  # 1.3 MB
OPTIMIZERS: list[Any] = [SGD, Adagrad, torchrec.optim.RowWiseAdagrad, Adam]


@pytest.mark.parametrize(
    ("optimizer", "table_wise", "data_parallel"),
    [
        (None, 0, 0),
        (SGD, 0, 0),
        (Adagrad, 4 * BIG.num_parameters, 4 * BIG.num_parameters),
        (torchrec.optim.RowWiseAdagrad, 4 * sum(BIG.p), 4 * BIG.num_parameters),
        (Adam, 8 * BIG.num_parameters, 8 * BIG.num_parameters),
    ],
)
def test_optimizer_bytes(optimizer: Any, table_wise: int, data_parallel: int) -> None:
    assert table_bytes(BIG, "table_wise", optimizer).optimizer == table_wise
    assert table_bytes(BIG, "data_parallel", optimizer).optimizer == data_parallel
    assert table_bytes(BIG, "table_wise", optimizer, 2).optimizer == table_wise  # the state of bfloat16 is float32


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_shard_has_the_bytes_of_its_part(device: str) -> None:
    for option in (o for o in options_of(device, EVERYWHERE) if o.name == "big"):
        world = 1 if option.sharding_type == "data_parallel" else 2
        lookups = 2048 * (1 if option.sharding_type in ("row_wise", "table_row_wise") else world)
        work = Work(lookups, 2048 * world, len(option.shards), 2)
        expected = table_bytes(
            BIG, option.sharding_type, Adagrad, work=work, columns=option.shards[0].size[1], device=device
        )
        for part in option.shards:
            there, elsewhere = part.storage.hbm, part.storage.ddr
            assert {there, elsewhere} == {expected.total, 0}
            assert (there > elsewhere) == (device == "cuda")


def held(model: DistributedModelParallel) -> tuple[int, int]:
    """Bytes of cores and of fused optimizer state on this rank."""
    cores = [core for of_table in model.module.ebc.tt_cores().values() for core in of_table]
    states = model.fused_optimizer.state_dict()["state"].values()
    return size_of(cores), size_of(t for state in states for t in state.values() if t.numel() > 1)


def size_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def peak(function: Callable[[], Any]) -> int:
    """The most that torch has allocated on the CPU during a call and not freed, above what there was before."""
    gc.collect()  # an earlier model that was collected meanwhile would count as freed,
    time.sleep(0.05)  # and so would what threads of gloo and of autograd still hold of an earlier step
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def batch(features: list[str], rows: int = ROWS) -> KeyedJaggedTensor:
    bags = BATCH * len(features)
    return KeyedJaggedTensor(features, torch.randint(0, rows, (bags * LENGTH,)), lengths=torch.full((bags,), LENGTH))


@dataclass(frozen=True)
class Case:
    """One table a rank, its optimizer and its type; ``keep`` for two forwards before a backward."""

    sharding_type: str
    spec: TTSpec
    optimizer: Any = torchrec.optim.RowWiseAdagrad
    data_type: DataType = DataType.FP32
    keep: bool = False


def measure(case: Case, world_size: int) -> tuple[int, int, int, Callable[[], int]]:
    """Cores, state, kept gradients, and a step, which gives the batch with what it adds to it, of one table a rank."""
    place = {**PLACES, "column_wise": (0, world_size - 1)}[case.sharding_type]
    tables = [Table("t", ROWS, DIM, ("f",), place, case.spec, data_type=case.data_type)]
    if place == 0 and world_size > 1:
        tables.append(dataclasses.replace(tables[0], name="u", features=("g",), place=1))  # as much for the other rank
    model = shard(tables, world_size, (case.optimizer, {"lr": 0.01}), keep_forward_weights=case.keep)
    features = batch([feature for table in tables for feature in table.features])

    def step() -> None:
        pooled = [model.module.ebc(features).values() for _ in range(2 if case.keep else 1)]
        while pooled:
            of_forward = pooled.pop(0)
            of_forward.backward(torch.ones_like(of_forward))

    step()
    step()
    cores = [core for of_table in model.module.ebc.tt_cores().values() for core in of_table]
    gradients = size_of(core.grad for core in cores if core.grad is not None)
    ids = size_of([features.values(), features.lengths()])
    return *held(model), gradients, lambda: ids + peak(step)


def on_all_ranks(true: bool) -> bool:
    votes = torch.tensor(int(true))
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    return bool(votes)


def compare(rank: int, world_size: int, cases: list[Case]) -> list[str]:
    """Says what is off by more than 5 %."""
    wrong = []
    column_shards = 2
    for case in cases:
        kind = case.sharding_type
        cores, state, gradients, step = measure(case, world_size)
        shards = {"table_wise": 1, "column_wise": column_shards}.get(kind, world_size)
        bags = BATCH * (1 if kind == "data_parallel" else world_size)
        work = Work(bags * LENGTH / (shards if "row" in kind else 1), bags, shards, world_size)
        columns = DIM // column_shards if kind == "column_wise" else DIM
        size = 4 if case.data_type == DataType.FP32 else 2
        counted = table_bytes(
            case.spec, kind, case.optimizer, size, work=work, columns=columns, keep_forward_weights=case.keep
        )
        here = column_shards if kind == "column_wise" and world_size == 1 else 1  # shards on this rank
        assert (cores, gradients) == (here * counted.cores, counted.gradient)
        if kind == "data_parallel":
            state = counted.optimizer  # the dense optimizer's, which is not here
        assert state == here * counted.optimizer
        estimate = here * counted.total
        # When threads of gloo and of autograd free their buffers differs by step. Most steps are alike.
        totals: list[int] = []
        error = math.inf
        while len(totals) < 5 and not on_all_ranks(abs(error) <= 0.05):
            totals.append(cores + state + gradients + step())
            error = min(error, estimate / totals[-1] - 1, key=abs)
        if abs(error) > 0.05:
            wrong.append(
                f"{case} on {world_size} ranks: measured {totals}, estimated {estimate:,} ({error:+.1%}); {counted}"
            )
    return wrong


PLACES = {"table_wise": 0, "data_parallel": "dp", "row_wise": "rw", "table_row_wise": "twrw0", "column_wise": ()}
FLOAT32 = [
    *(Case(kind, LITTLE, Adagrad) for kind in PLACES),
    *(Case(kind, LARGE) for kind in PLACES),
    *(Case("row_wise", LARGE, optimizer) for optimizer in OPTIMIZERS),
]
NARROW = [
    *(Case(kind, LARGE, data_type=DataType.BF16) for kind in PLACES),
    *(Case("row_wise", LITTLE, Adagrad, data_type) for data_type in (DataType.BF16, DataType.FP16)),
    Case("column_wise", LARGE, Adam, DataType.FP16),
]
KEPT = [
    *(Case("table_wise", LARGE, optimizer, keep=True) for optimizer in OPTIMIZERS),
    *(Case(kind, LARGE, Adagrad, keep=True) for kind in ("row_wise", "column_wise")),
    *(Case(kind, LITTLE, SGD, keep=True) for kind in ("table_wise", "row_wise", "column_wise")),
    Case("table_wise", LARGE, Adagrad, DataType.BF16, keep=True),
]
CASES = pytest.mark.parametrize("cases", [FLOAT32, NARROW, KEPT], ids=["float32", "16 bit", "keep_forward_weights"])


@CASES
def test_estimates_are_what_one_rank_takes(one_rank: Callable[..., Any], cases: list[Case]) -> None:
    assert one_rank(compare, cases) == []


@CASES
def test_estimates_are_what_two_ranks_take(two_ranks: Ranks, cases: list[Case]) -> None:
    assert two_ranks.run(compare, cases) == [[], []]


def together(rank: int, world_size: int, kinds: list[str], specs: list[TTSpec]) -> tuple[int, int]:
    """Bytes estimated and measured of several tables on one rank."""
    tables = [
        Table(f"t{i}", ROWS, DIM, (f"f{i}",), PLACES[kind], spec) for i, (kind, spec) in enumerate(zip(kinds, specs))
    ]
    model = shard(tables, world_size, (Adagrad, {"lr": 0.01}))
    features = batch([table.features[0] for table in tables])

    def step() -> None:
        pooled = model.module.ebc(features).values()
        pooled.backward(torch.ones_like(pooled))

    step()
    step()
    work = Work(BATCH * LENGTH, BATCH, 1, 1)
    counted = [table_bytes(spec, kind, Adagrad, work=work) for kind, spec in zip(kinds, specs)]
    of_others = sum(c.optimizer for c, kind in zip(counted, kinds) if kind == "data_parallel")  # which is not here
    grads = (core.grad for of_table in model.module.ebc.tt_cores().values() for core in of_table)
    kept = [features.values(), features.lengths(), *(grad for grad in grads if grad is not None)]
    measured = sum(held(model)) + size_of(kept) + min(peak(step) for _ in range(3))
    return sum(c.total for c in counted) - of_others, measured


@pytest.mark.parametrize(
    ("kinds", "specs"),
    [
        (["table_wise"] * 4, [LITTLE, LARGE, LITTLE, LARGE]),
        (["table_wise", "table_wise", "row_wise", "row_wise"], [LARGE] * 4),
        (["table_wise", "table_wise", "data_parallel", "data_parallel"], [LARGE] * 4),
    ],
)
def test_estimates_of_several_tables_add_up(
    one_rank: Callable[..., Any], kinds: list[str], specs: list[TTSpec]
) -> None:
    estimate, measured = one_rank(together, kinds, specs)
    assert measured == pytest.approx(estimate, rel=0.05)


def test_weights_of_lookups_are_held_with_their_ids() -> None:
    enumerator = TTEmbeddingEnumerator(topology(), 2048, {"big": BIG}, pipeline_type=PipelineType.TRAIN_SPARSE_DIST)
    totals = []
    for weighted in (False, True):
        configs = collection().embedding_bag_configs()
        ebc = EmbeddingBagCollection(tables=configs, is_weighted=weighted, device=torch.device("meta"))
        options = enumerator.enumerate(ebc, [TTEmbeddingBagCollectionSharder({"big": BIG})])
        (option,) = (o for o in options if (o.name, o.sharding_type) == ("big", "table_wise"))
        assert option.shards[0].storage is not None
        totals.append(option.shards[0].storage.ddr)
    assert totals[1] - totals[0] == 4 * (3 + 1) * 2 * 2048  # three batches of the ranks', and one exchanged


def test_pipelines_hold_more_batches() -> None:
    work = Work(8192, 2048, 1, 2)
    inputs = {
        kind: table_bytes(LITTLE, "table_wise", SGD, work=work, pipeline_type=kind).input for kind in PipelineType
    }
    assert inputs[PipelineType.NONE] == 8 * (8192 + 2048)
    assert inputs[PipelineType.TRAIN_SPARSE_DIST] == 4 * inputs[PipelineType.NONE]
