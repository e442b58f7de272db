"""A dense model's checkpoint compressed by TT-SVD, fine-tuned, and exported for a stock model again.

python examples/compress_checkpoint.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from clicks import NUM_DENSE, ROWS, batches
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

from flowtt_torchrec import TTSpec
from flowtt_torchrec.distributed import TTEmbeddingBagCollectionSharder, TTEmbeddingShardingPlanner
from flowtt_torchrec.distributed.checkpoint import compress_checkpoint, export_checkpoint, load

BATCH_SIZE, DIM = 512, 16


def make_model(device: str) -> DLRMTrain:
    """The model; with tables on "meta" it is for `DistributedModelParallel`."""
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
        for name, rows in ROWS.items()
    ]
    ebc = EmbeddingBagCollection(tables=tables, device=torch.device(device))
    return DLRMTrain(DLRM(ebc, NUM_DENSE, dense_arch_layer_sizes=[32, DIM], over_arch_layer_sizes=[32, 1]))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    for batch in batches(BATCH_SIZE, steps, seed):
        optimizer.zero_grad()
        model(batch)[0].backward()
        optimizer.step()


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    return sum(model(batch)[0].item() for batch in batches(BATCH_SIZE, 20, seed=99)) / 20


folder = tempfile.TemporaryDirectory()
path = Path(folder.name)

# A dense model, trained and saved as ever.
torch.manual_seed(0)
dense = make_model("cpu")
train(dense, torch.optim.Adagrad(dense.parameters(), lr=0.1), steps=60, seed=0)
torch.save(dense.state_dict(), path / "dense.pt")
print(f"dense:      loss {held_out_loss(dense):.3f}")

# Its largest table as a tensor train: the same as `python -m flowtt_torchrec compress dense.pt small --tables t_user`.
compression = {"t_user": TTSpec.suggest(ROWS["user"], DIM, rank=16)}
errors = compress_checkpoint(path / "dense.pt", path / "small", compression)

# A TorchRec model with that tensor train, which loads the result. One process is enough here.
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = make_model("meta")
apply_optimizer_in_backward(torch.optim.Adagrad, model.model.sparse_arch.parameters(), {"lr": 0.02})
sharders = [TTEmbeddingBagCollectionSharder(compression)]
topology = Topology(world_size=1, compute_device="cpu")
planner = TTEmbeddingShardingPlanner(topology, batch_size=BATCH_SIZE, compression=compression)
plan = planner.collective_plan(model, sharders, dist.group.WORLD)
model = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
load(model.state_dict(), path / "small")
print(f"compressed: loss {held_out_loss(model):.3f}; relative error of the table {errors['t_user']:.2f}")

# Fine-tuned. The tables' optimizer steps in backward; this one is for the dense layers.
dense_layers = [parameter for _, parameter in in_backward_optimizer_filter(model.named_parameters())]
train(model, torch.optim.Adagrad(dense_layers, lr=0.02), steps=60, seed=1)
dcp.save(model.state_dict(), checkpoint_id=path / "tuned")
print(f"fine-tuned: loss {held_out_loss(model):.3f}")

# Back to dense tables, for a model that knows nothing of tensor trains.
export_checkpoint(path / "tuned", path / "dense_again.pt")
stock = make_model("cpu")
stock.load_state_dict(torch.load(path / "dense_again.pt"))
print(f"exported:   loss {held_out_loss(stock):.3f}")

dist.destroy_process_group()
folder.cleanup()
