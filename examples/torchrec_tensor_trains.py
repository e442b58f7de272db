"""`torchrec_dense.py` with its two large tables as tensor trains: another sharder, another planner.

torchrun --nproc_per_node 2 examples/torchrec_tensor_trains.py
"""

import os

import torch
import torch.distributed as dist
from clicks import NUM_DENSE, ROWS, batches
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.planner import Topology
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from flowtt_torchrec import TTSpec
from flowtt_torchrec.distributed import TTEmbeddingBagCollectionSharder, TTEmbeddingShardingPlanner

BATCH_SIZE, STEPS, DIM = 512, 100, 16

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
dist.init_process_group("nccl" if on_gpu else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

tables = [
    EmbeddingBagConfig(name=f"t_{name}", num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
    for name, rows in ROWS.items()
]
ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
torch.manual_seed(0)  # dense layers that start alike on every rank
model = DLRMTrain(DLRM(ebc, NUM_DENSE, dense_arch_layer_sizes=[32, DIM], over_arch_layer_sizes=[32, 1]))
apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.1})

topology = Topology(world_size=world_size, compute_device=device.type)
compression = {f"t_{name}": TTSpec.suggest(ROWS[name], DIM, rank=16) for name in ("user", "item")}
sharders = [*get_default_sharders(), TTEmbeddingBagCollectionSharder(compression)]
planner = TTEmbeddingShardingPlanner(topology, batch_size=BATCH_SIZE, compression=compression)
plan = planner.collective_plan(model, sharders, dist.group.WORLD)
model = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)

dense_parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
dense_optimizer = KeyedOptimizerWrapper(dense_parameters, lambda params: torch.optim.Adagrad(params, lr=0.1))
optimizer = CombinedOptimizer([model.fused_optimizer, dense_optimizer])

losses = []
for batch in batches(BATCH_SIZE, STEPS, seed=rank):
    optimizer.zero_grad()
    loss, _ = model(batch.to(device))
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

if rank == 0:
    names = [name for name in model.state_dict() if "embedding_bags" in name]
    print(f"loss {losses[0]:.3f} -> {sum(losses[-10:]) / 10:.3f}; tables on rank 0: {', '.join(names)}")
dist.destroy_process_group()
