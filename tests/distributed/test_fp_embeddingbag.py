"""Collections with feature processors, from planner to training; test_twin_training.py compares their gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from twins import (
    CPU,
    all_optimizers,
    apply_optimizer_in_backward,
    compression,
    feature_rows,
    full_state,
    make_batch,
    mixed_tables,
)

from flowtt_torchrec.distributed import (
    TTEmbeddingBagCollectionSharder,
    TTEmbeddingShardingPlanner,
    TTFeatureProcessedEmbeddingBagCollectionSharder,
)


def planned(rank: int, world_size: int) -> tuple[list[float], set[str]]:
    tables = mixed_tables()
    ebc = EmbeddingBagCollection(
        tables=[table.config() for table in tables], device=torch.device("meta"), is_weighted=True
    )
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.1})
    processor = PositionWeightedModuleCollection(dict.fromkeys(feature_rows(tables), 4))
    model = FeatureProcessedEmbeddingBagCollection(ebc, processor)
    specs = compression(tables)
    tt_sharder = TTEmbeddingBagCollectionSharder(specs)
    topology = Topology(world_size=world_size, local_world_size=world_size, compute_device="cpu")
    planner = TTEmbeddingShardingPlanner(topology, batch_size=8, compression=specs)
    with pytest.raises(ValueError, match="TTFeatureProcessedEmbeddingBagCollectionSharder for a collection with"):
        planner.plan(model, [FeatureProcessedEmbeddingBagCollectionSharder(tt_sharder)])
    sharders = [TTFeatureProcessedEmbeddingBagCollectionSharder(tt_sharder)]
    assert sharders[0].fused_params == tt_sharder.fused_params
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    kernels = {name: entry.compute_kernel for name, entry in plan.plan[""].items()}
    assert {name for name, kernel in kernels.items() if kernel == "customized_kernel"} == specs.keys()
    sharded = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
    optimizers = all_optimizers(sharded, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    before = {name: parameter.detach().clone() for name, parameter in sharded.named_parameters()}
    losses = []
    for _ in range(5):
        features, _ = make_batch(tables, 6, rank)
        optimizers.zero_grad()
        pooled = sharded(features)
        loss = (torch.cat([pooled[key] for key in sorted(pooled.keys())], dim=1) - 0.1).square().mean(0).sum()
        loss.backward()
        optimizers.step()
        losses.append(loss.item())
    full_state(sharded, tables)  # replicas are equal
    trained = [name for name, parameter in sharded.named_parameters() if not torch.equal(before[name], parameter)]
    return losses, {name.rpartition(".")[2] for name in trained if "position_weight" in name}


def test_planned_and_trained(two_ranks: Ranks) -> None:
    features: set[str] = set()
    for losses, trained in two_ranks.run(planned):
        assert losses[-1] < 0.9 * losses[0]
        features |= trained  # a rank trains the position weights of the features that it looks up
    assert features == set(feature_rows(mixed_tables()))
