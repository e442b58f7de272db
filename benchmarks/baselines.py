"""What FlowTT is compared with: TT-Rec's algorithm, dense tables of torch and FBGEMM, tensorly-torch."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.contenders import EPS, LEARNING_RATE, Contender, split_batch, tensor_bytes
from benchmarks.workloads import Batch
from flowtt_torchrec.cores import digits
from flowtt_torchrec.spec import TTSpec

if TYPE_CHECKING:
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen


class _PerTable(Contender):
    """Contenders that know one table at a time."""

    num_tables: int

    def rows(self, table: int, rows: Tensor) -> Tensor:
        """Rows ``[N, embedding_dim]`` of a table, differentiable."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> Tensor:
        return torch.cat([self.pool(t, part) for t, part in enumerate(split_batch(batch, self.num_tables))], dim=1)

    def pool(self, table: int, batch: Batch) -> Tensor:
        rows = self.rows(table, batch.indices)
        if batch.batch_size == rows.shape[0]:  # bags of one
            return rows
        every = torch.arange(rows.shape[0], device=rows.device)
        return F.embedding_bag(every, rows, batch.offsets, mode="sum", include_last_offset=True)


class TTRec(_PerTable):
    """The algorithm of TT-Rec (Yin et al., MLSys 2021, section 3.3) in torch.

    For every lookup the slices of all cores are gathered, and one batched matrix product a core multiplies them;
    autograd gives the gradients. TT-Rec's own code does this on a GPU.

    Args:
        cores: the cores ``[p_k, r_{k-1}, q_k, r_k]`` of each table; copied.
        optimizer: see `Contender`.
        unique: look up equal rows once, as EcoRec does, instead of every lookup.
    """

    def __init__(
        self, cores: Sequence[Sequence[Tensor]], optimizer: str | None = "rowwise_adagrad", *, unique: bool = False
    ) -> None:
        if optimizer not in (None, "sgd", "rowwise_adagrad"):
            raise ValueError(f"the TT-Rec baseline has no optimizer {optimizer!r}; known: sgd, rowwise_adagrad")
        self.name = "ttrec_unique" if unique else "ttrec"
        self.optimizer = optimizer
        self.unique = unique
        self.cores = [[core.detach().clone().requires_grad_() for core in table] for table in cores]
        self.num_tables = len(cores)
        rowwise = optimizer == "rowwise_adagrad"
        self.momentum = [[core.new_zeros(core.shape[0]) for core in table] for table in cores] if rowwise else []

    @property
    def num_parameters(self) -> int:
        return sum(core.numel() for table in self.cores for core in table)

    @property
    def num_bytes(self) -> int:
        return tensor_bytes(*(t for table in (*self.cores, *self.momentum) for t in table))

    def pool(self, table: int, batch: Batch) -> Tensor:
        if not self.unique:
            return super().pool(table, batch)
        rows, inverse = batch.indices.unique(return_inverse=True)
        return F.embedding_bag(inverse, self.rows(table, rows), batch.offsets, mode="sum", include_last_offset=True)

    def rows(self, table: int, rows: Tensor) -> Tensor:
        cores = self.cores[table]
        index = digits(rows, [core.shape[0] for core in cores])
        # index_select is the fastest gather of torch here, in backward above all.
        product = cores[0].index_select(0, index[0]).squeeze(1)  # [N, q_1, r_1]
        for core, i in zip(cores[1:], index[1:], strict=True):
            _, rank, q, next_rank = core.shape
            gathered = core.index_select(0, i).view(-1, rank, q * next_rank)
            product = torch.bmm(product, gathered).view(rows.numel(), -1, next_rank)
        return product.squeeze(2)

    @torch.no_grad()
    def update(self) -> None:
        for t, table in enumerate(self.cores):
            for k, core in enumerate(table):
                grad, core.grad = core.grad, None
                if grad is None or self.optimizer is None:
                    continue
                if self.optimizer == "rowwise_adagrad":
                    momentum = self.momentum[t][k].add_(grad.square().mean(dim=(1, 2, 3)))
                    grad = grad / (momentum.sqrt() + EPS).view(-1, 1, 1, 1)
                core.sub_(LEARNING_RATE * grad)


class DenseTBE(Contender):
    """FBGEMM's table-batched embedding on the CPU, made as TorchRec makes it: the uncompressed table.

    Args:
        specs: sizes of the tables.
        optimizer: ``"rowwise_adagrad"`` or ``"sgd"``, fused.
    """

    name = "tbe"
    is_tensor_train = False

    def __init__(self, specs: Sequence[TTSpec], optimizer: str = "rowwise_adagrad") -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        kinds = {"rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "sgd": EmbOptimType.EXACT_SGD}
        self.optimizer = optimizer
        # The arguments of torchrec.distributed.batched_embedding_kernel.BatchedFusedEmbeddingBag on a CPU.
        self.module: SplitTableBatchedEmbeddingBagsCodegen = SplitTableBatchedEmbeddingBagsCodegen(
            embedding_specs=[
                (spec.num_embeddings, spec.embedding_dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for spec in specs
            ],
            feature_table_map=list(range(len(specs))),
            pooling_mode=PoolingMode.SUM,
            weights_precision=SparseType.FP32,
            cache_precision=SparseType.FP32,
            device=torch.device("cpu"),
            table_names=[f"t{t}" for t in range(len(specs))],
            optimizer=kinds[optimizer],
            learning_rate=LEARNING_RATE,
            eps=EPS,
        )
        for weight in self.weights:
            fill_uniform(weight)

    @property
    def weights(self) -> list[Tensor]:
        """The tables ``[num_embeddings, embedding_dim]``; views."""
        return list(self.module.split_embedding_weights())

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.weights)

    @property
    def num_bytes(self) -> int:
        return tensor_bytes(*self.weights, *(t for table in self.module.split_optimizer_states() for t in table))

    def forward(self, batch: Batch) -> Tensor:
        return self.module(indices=batch.indices, offsets=batch.offsets)

    def update(self) -> None:
        pass  # fused into backward


class DenseEmbeddingBag(_PerTable):
    """``nn.EmbeddingBag`` with sparse gradients and a torch optimizer: the uncompressed table without FBGEMM.

    Args:
        specs: sizes of the tables.
        optimizer: ``"sgd"`` or ``"adagrad"`` (torch has no row-wise Adagrad).
        device: where the tables are.
    """

    name = "nn_embedding_bag"
    is_tensor_train = False

    def __init__(self, specs: Sequence[TTSpec], optimizer: str = "sgd", *, device: str = "cpu") -> None:
        self.optimizer = optimizer
        self.num_tables = len(specs)
        weights = [torch.empty(spec.num_embeddings, spec.embedding_dim, device=device) for spec in specs]
        for weight in weights:
            fill_uniform(weight)
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(
                spec.num_embeddings,
                spec.embedding_dim,
                mode="sum",
                sparse=True,
                include_last_offset=True,
                _weight=weight,
            )
            for spec, weight in zip(specs, weights)
        )
        self._optimizer = _torch_optimizer(list(self.bags.parameters()), optimizer)

    @property
    def weights(self) -> list[Tensor]:
        """The tables ``[num_embeddings, embedding_dim]``."""
        return [weight.detach() for weight in self.bags.parameters()]

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.bags.parameters())

    @property
    def num_bytes(self) -> int:
        return tensor_bytes(*self.bags.parameters(), *_state(self._optimizer))

    def pool(self, table: int, batch: Batch) -> Tensor:
        return self.bags[table](batch.indices, batch.offsets)

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


class TensorlyTorch(_PerTable):
    """tensorly-torch's ``FactorizedEmbedding`` in its tensor-train form (``blocktt``), with a torch optimizer.

    It holds all ``prod(p)`` rows that the shape addresses, as it needs an exact factorisation.

    Args:
        cores: the cores ``[p_k, r_{k-1}, q_k, r_k]`` of each table; copied.
        optimizer: ``"sgd"`` or ``"adagrad"``.
    """

    name = "tensorly_torch"

    def __init__(self, cores: Sequence[Sequence[Tensor]], optimizer: str = "sgd") -> None:
        tltorch = importlib.import_module("tltorch")  # optional

        self.optimizer = optimizer
        self.num_tables = len(cores)
        self.embeddings = nn.ModuleList()
        for table in cores:
            p, q = tuple(core.shape[0] for core in table), tuple(core.shape[2] for core in table)
            embedding = tltorch.FactorizedEmbedding(
                int(torch.tensor(p).prod()),
                int(torch.tensor(q).prod()),
                auto_tensorize=False,
                tensorized_num_embeddings=p,
                tensorized_embedding_dim=q,
                factorization="blocktt",
                rank=(1, *(core.shape[3] for core in table)),
            )
            with torch.no_grad():
                for factor, core in zip(embedding.weight.factors, table, strict=True):
                    factor.copy_(core.transpose(0, 1))
            self.embeddings.append(embedding)
        self._optimizer = _torch_optimizer(list(self.embeddings.parameters()), optimizer)

    @staticmethod
    def missing() -> str | None:
        """Why it cannot run, if it cannot."""
        modules = {"tensorly": "tensorly", "tensorly-torch": "tltorch"}
        absent = [name for name, module in modules.items() if find_spec(module) is None]
        return f"tensorly-torch is left out; to have it: pip install {' '.join(absent)}" if absent else None

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.embeddings.parameters())

    @property
    def num_bytes(self) -> int:
        return tensor_bytes(*self.embeddings.parameters(), *_state(self._optimizer))

    def rows(self, table: int, rows: Tensor) -> Tensor:
        return self.embeddings[table](rows)

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


def fill_uniform(weight: Tensor) -> None:
    """Fills a table with uniform numbers between ``±1/sqrt(rows)``; a large one with copies of one block, for speed."""
    rows = weight.shape[0]
    block = weight[: min(rows, 1 << 18)].uniform_(-(rows**-0.5), rows**-0.5)
    for part in weight[block.shape[0] :].split(block.shape[0]):
        part.copy_(block[: part.shape[0]])


def _torch_optimizer(parameters: list[nn.Parameter], kind: str) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=LEARNING_RATE)
    if kind == "adagrad":
        return torch.optim.Adagrad(parameters, lr=LEARNING_RATE, eps=EPS)
    raise ValueError(f"no torch optimizer for {kind!r}; known: sgd, adagrad")


def _state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [t for values in optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
