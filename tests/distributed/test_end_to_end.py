"""Planner to training: a table far larger than memory, and TorchRec's train pipeline."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable
from twins import (
    Table,
    all_optimizers,
    apply_optimizer_in_backward,
    dense_optimizer,
    make_batch,
    mixed_tables,
    shard,
    shared_tables,
)

from flowtt_torchrec.distributed import TTEmbeddingBagCollectionSharder, TTEmbeddingShardingPlanner
from flowtt_torchrec.spec import TTSpec

GIB = 1024**3


class Small(nn.Module):
    def __init__(self, tables: dict[str, tuple[int, int]]) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"])
            for name, (rows, dim) in tables.items()
        ]
        self.ebc = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        self.over = nn.Linear(sum(dim for _, dim in tables.values()), 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.ebc(features)
        return self.over(torch.cat([pooled[key] for key in sorted(pooled.keys())], dim=1)).squeeze(1)


def resident_bytes() -> int:
    """The most memory that this process has had resident."""
    status = Path("/proc/self/status").read_text()
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak is not None
    return int(peak[1]) * 1024


def four_billion_rows(rank: int, world_size: int, sharding_type: str) -> tuple[dict[str, str], list[float], int]:
    tables = {"huge": (4_000_000_000, 64), "small": (1_000, 64)}
    compression = {"huge": TTSpec.suggest(4_000_000_000, 64, 16)}
    model = Small(tables)
    apply_optimizer_in_backward(torch.optim.Adagrad, model.ebc.parameters(), {"lr": 0.05})
    sharder = TTEmbeddingBagCollectionSharder(compression)
    planner = TTEmbeddingShardingPlanner(
        Topology(world_size=world_size, local_world_size=world_size, compute_device="cpu", ddr_cap=GIB),
        batch_size=32,
        constraints={"huge": ParameterConstraints(sharding_types=[sharding_type])},
        compression=compression,
    )
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])
    optimizers = all_optimizers(sharded, lambda parameters: torch.optim.Adagrad(parameters, lr=0.05))
    generator = torch.Generator().manual_seed(rank)
    ids = torch.cat(
        [torch.randint(3_999_000_000, 4_000_000_000, (32,), generator=generator), torch.arange(32) * (1 + rank)]
    )
    features = KeyedJaggedTensor(keys=["f_huge", "f_small"], values=ids, lengths=torch.ones(64, dtype=torch.int64))
    targets = torch.randn(32, generator=generator)
    losses = []
    for _ in range(20):
        optimizers.zero_grad()
        loss = (sharded(features) - targets).square().mean()
        loss.backward()
        optimizers.step()
        losses.append(loss.item())
    kernels = {name: entry.compute_kernel for name, entry in plan.plan["ebc"].items()}
    return kernels, losses, resident_bytes()


def test_four_billion_rows_train_in_less_than_two_gibibytes(two_ranks: Ranks) -> None:
    for sharding_type in ("table_wise", "data_parallel"):
        for kernels, losses, peak in two_ranks.run(four_billion_rows, sharding_type):
            assert kernels["huge"] == "customized_kernel"
            assert kernels["small"] != "customized_kernel"
            assert losses[-1] < 0.5 * losses[0]
            assert peak < 2 * GIB


class PipelineBatch(Pipelineable):
    def __init__(self, features: KeyedJaggedTensor, targets: Tensor) -> None:
        self.features, self.targets = features, targets

    def to(self, device: torch.device, non_blocking: bool = False) -> PipelineBatch:
        return PipelineBatch(self.features.to(device), self.targets.to(device))

    def record_stream(self, stream: Any) -> None:
        pass

    def pin_memory(self) -> PipelineBatch:
        return self


class PipelineModel(nn.Module):
    """Loss and output, with feature names that fx can trace."""

    def __init__(self, inner: nn.Module, keys: list[str]) -> None:
        super().__init__()
        self.ebc, self.over, self.keys = inner.ebc, inner.over, keys

    def forward(self, batch: PipelineBatch) -> tuple[Tensor, Tensor]:
        pooled = self.ebc(batch.features)
        columns = torch.cat([pooled[key] for key in self.keys], dim=1)
        output = self.over(columns).squeeze(1)
        return (output - batch.targets).square().mean(), output


def pipelined(rank: int, world_size: int, make_tables: Callable[[], list[Table]]) -> None:
    tables = make_tables()
    used = [feature for table in tables for feature in table.features]
    keys = sorted(f if used.count(f) == 1 else f"{f}@{t.name}" for t in tables for f in t.features)
    batches = [make_batch(tables, 6, 10 * step + rank) for step in range(6)]
    losses: dict[bool, list[float]] = {}
    for pipeline in (False, True):
        torch.manual_seed(3)  # of the dense tables' weights
        model = shard(tables, world_size, (torch.optim.SGD, {"lr": 0.1}))
        optimizer = dense_optimizer(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        wrapped = PipelineModel(model.module, keys)
        if pipeline:
            run = TrainPipelineSparseDist(wrapped, optimizer, torch.device("cpu"))
            iterator = iter([PipelineBatch(*batch) for batch in batches])
            outputs = [run.progress(iterator) for _ in batches]
            run.detach()
        else:
            outputs = []
            for batch in batches:
                optimizer.zero_grad()
                loss, output = wrapped(PipelineBatch(*batch))
                loss.backward()
                optimizer.step()
                outputs.append(output)
        losses[pipeline] = [float(o.detach().square().sum()) for o in outputs]
    torch.testing.assert_close(torch.tensor(losses[True]), torch.tensor(losses[False]), atol=0, rtol=1e-6)


@pytest.mark.parametrize("make_tables", [mixed_tables, shared_tables])
def test_the_train_pipeline_gives_the_plain_loops_outputs(
    one_rank: Callable[..., Any], two_ranks: Ranks, make_tables: Callable[[], list[Table]]
) -> None:
    one_rank(pipelined, make_tables)
    two_ranks.run(pipelined, make_tables)
