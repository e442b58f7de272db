"""One rank of the training benchmark; started by `benchmarks.training` through torchrun."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.optim.keyed import CombinedOptimizer

from benchmarks.environment import CpuWatch
from benchmarks.process_memory import in_use, peak, reset_peak
from benchmarks.training import DENSE, Request, Result, Tables, VariantMemory
from flowtt_torchrec.datasets import Sharding, SyntheticCriteo
from flowtt_torchrec.spec import TTSpec
from flowtt_torchrec.training.config import (
    CompressionConfig,
    DataConfig,
    GenerateConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    TrainingConfig,
)
from flowtt_torchrec.training.data import table_configs
from flowtt_torchrec.training.model import build_dlrm, build_optimizer, optimize_tables_in_backward, shard
from flowtt_torchrec.training.planning import Machine, Planning, make_topology
from flowtt_torchrec.training.quiet import quiet_libraries
from flowtt_torchrec.training.runtime import Runtime, host_memory, process_group
from flowtt_torchrec.training.tables import planned_tables


class Variant:
    """A sharded DLRM whose tables are TorchRec's, or tensor trains where they have enough rows."""

    def __init__(self, name: str, request: Request, dataset: SyntheticCriteo, runtime: Runtime) -> None:
        self.name = name
        config = _config(request)
        machine = Machine("cpu", runtime.world_size, runtime.local_world_size, ddr=host_memory() // runtime.world_size)
        group = dist.group.WORLD
        torch.manual_seed(0)
        if name == DENSE:  # as a stock TorchRec script does it
            tables = table_configs(dataset, request.dim)
            specs: Mapping[str, TTSpec] = {}
            model = build_dlrm(config.model, tables, dataset.num_dense, runtime.device)
            optimize_tables_in_backward(model, config.optimizer)
            sharders = get_default_sharders()
            planner = EmbeddingShardingPlanner(
                topology=make_topology(machine),
                batch_size=request.batch_size,
                storage_reservation=FixedPercentageStorageReservation(config.planner.storage_reservation),
            )
            plan = planner.collective_plan(model, sharders, group)
        else:
            planning = Planning(config, dataset, machine, runtime.device)
            tables, specs, model, sharders = planning.tables, planning.specs, planning.model, planning.sharders
            plan = planning.plan(group)
        planned = planned_tables(tables, specs, plan, runtime.world_size)
        self.tables = Tables(
            rows=sum(table.num_embeddings for table in planned),
            tensor_trains=len(specs),
            weight_bytes=sum(table.weight_bytes for table in planned),
            sharding=", ".join(
                f"{len(list(of))} {kind}"
                for kind, of in itertools.groupby(sorted(f"{t.kernel} {t.sharding_type}" for t in planned))
            ),
        )
        self.model: DistributedModelParallel = shard(model, plan, sharders, runtime.device)
        self.optimizer: CombinedOptimizer = build_optimizer(self.model, config.optimizer)

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        loss, _ = self.model(batch)
        loss.backward()
        self.optimizer.step()


def _config(request: Request) -> TrainConfig:
    return TrainConfig(
        data=DataConfig(generate=GenerateConfig()),
        model=ModelConfig(
            embedding_dim=request.dim,
            dense_arch_layer_sizes=[512, 256, 64, request.dim],
            over_arch_layer_sizes=[512, 256, 1],
        ),
        compression=CompressionConfig(min_rows=request.min_rows, rank=request.tt_rank),
        optimizer=OptimizerConfig(kind="rowwise_adagrad", learning_rate=0.01),
        training=TrainingConfig(batch_size=request.batch_size),
    )


def measure_times(request: Request, variants: list[Variant], batches: list[Batch]) -> tuple[dict[str, Any], float]:
    """Seconds a step of each variant, by round, and the cores that others used meanwhile.

    Rounds alternate in order. All ranks start a visit together and end it together; rank 0's clock counts.
    """
    seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for variant in variants:
        for batch in batches[:2]:  # first steps allocate
            variant.step(batch)
    watch = CpuWatch()
    stream = itertools.cycle(batches)
    for number in range(request.rounds):
        for variant in variants if number % 2 == 0 else reversed(variants):
            dist.barrier()
            start = time.perf_counter()
            for batch in itertools.islice(stream, request.steps):
                variant.step(batch)
            dist.barrier()
            seconds[variant.name].append((time.perf_counter() - start) / request.steps)
    own = torch.tensor([watch.own_seconds()], dtype=torch.float64)
    everyone = own.clone()
    dist.all_reduce(everyone)
    return seconds, watch.other_cores(siblings=float(everyone - own))


def main() -> None:
    request = Request(**json.loads(sys.argv[1]))
    quiet_libraries()
    with process_group("cpu", request.threads) as runtime:
        sharding = Sharding(request.batch_size, runtime.rank, runtime.world_size)
        dataset = SyntheticCriteo(sharding, scale=request.scale, max_rows=request.max_rows)
        batches = list(itertools.islice(dataset.batches("train"), request.batches))
        result = Result(threads=torch.get_num_threads())
        if request.memory:
            # A model of tiny tables first: what libraries take once is not the tables'.
            tiny = SyntheticCriteo(sharding, max_rows=100)
            Variant(request.variants[0], dataclasses.replace(request, min_rows=50), tiny, runtime).step(
                next(tiny.batches("train"))
            )
            for name in request.variants:
                result.memory[name] = _measure_memory(Variant, name, request, dataset, runtime, batches)
        else:
            variants = [Variant(name, request, dataset, runtime) for name in request.variants]
            result.tables = {variant.name: variant.tables for variant in variants}
            result.seconds, result.other_cores = measure_times(request, variants, batches)
        if runtime.is_main:
            Path(request.output).write_text(json.dumps(dataclasses.asdict(result)))


def _measure_memory(
    make: type[Variant], name: str, request: Request, dataset: SyntheticCriteo, runtime: Runtime, batches: list[Batch]
) -> VariantMemory:
    """Memory that a model and its steps take on the rank that needs most, above what is in use before it is made."""
    resettable = reset_peak()
    before = in_use() if resettable else peak(resettable)
    variant = make(name, request, dataset, runtime)
    built = in_use() - before
    for batch in batches:
        variant.step(batch)
    most = torch.tensor([built, peak(resettable) - before])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return VariantMemory(int(most[0]), int(most[1]), "VmHWM" if resettable else "ru_maxrss")


if __name__ == "__main__":
    main()
