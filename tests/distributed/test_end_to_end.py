"""Planner to training: a table far larger than memory."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from twins import (
    all_optimizers,
    apply_optimizer_in_backward,
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
