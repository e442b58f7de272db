"""Models in pairs: TT tables under TorchRec beside a stock dense twin, and beside a single-process reference.

The reference is plain autograd on one process: it takes the batches of all ranks, and its loss is the mean of theirs.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed import sharding_plan as stock_plan
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from flowtt_torchrec.cores import digits, to_dense, tt_rows
from flowtt_torchrec.distributed import TTEmbeddingBagCollectionSharder, sharding_plan
from flowtt_torchrec.spec import TTSpec

CPU = torch.device("cpu")
Optimizer = tuple[str, type[torch.optim.Optimizer], dict[str, Any]]  # kind, what is asked for, its arguments


@dataclass(frozen=True)
class Table:
    """A table of a test collection: a tensor train if it has a spec."""

    name: str
    rows: int
    dim: int
    features: tuple[str, ...]
    place: int | str | tuple[int, ...]  # a rank (table-wise), "dp", "rw", "twrw<host>", ranks (column-wise), "twcw"
    spec: TTSpec | None = None
    pooling: PoolingType = PoolingType.SUM
    data_type: DataType = DataType.FP32
    optimizer: Optimizer | None = None  # instead of the model's

    def config(self) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(
            name=self.name,
            num_embeddings=self.rows,
            embedding_dim=self.dim,
            feature_names=list(self.features),
            pooling=self.pooling,
            data_type=self.data_type,
        )

    def generator(self, world_size: int, *, dense: bool) -> Any:
        """Entry of a plan, folded onto the ranks that there are."""
        make: Any = sharding_plan if not dense and self.spec is not None else stock_plan
        if self.place == "dp":
            return make.data_parallel()
        if self.place == "rw":
            return make.row_wise()
        if self.place in ("twrw0", "twrw1"):
            return make.table_row_wise(host_index=int(self.place[-1]) % (world_size // local_size()))
        if self.place == "twcw":
            ranks = list(range(min(world_size, 2)))
            return make.table_column_wise(ranks) if make is sharding_plan else make.column_wise(ranks=ranks)
        if isinstance(self.place, tuple):
            return make.column_wise(ranks=[rank % world_size for rank in self.place])
        return make.table_wise(self.place % world_size)


def mixed_tables(pooling: PoolingType = PoolingType.SUM) -> list[Table]:
    """Every kind of table at once: both TT placements, 2 to 4 cores, shared and several features, dense neighbours."""
    return [
        Table("tw0", 90, 16, ("f0",), 0, TTSpec(90, 16, (5, 5, 4), (2, 4, 2), (3, 5)), pooling),
        Table("tw1", 77, 8, ("f1", "f2"), 1, TTSpec(77, 8, (4, 5, 4), (2, 2, 2), (3, 3)), pooling),
        Table("shares_f0", 95, 8, ("f0",), 1, TTSpec(95, 8, (10, 10), (2, 4), (6,)), pooling),
        Table("four_cores", 60, 16, ("f3",), 0, TTSpec(60, 16, (3, 3, 3, 3), (2, 2, 2, 2), (3, 4, 3)), pooling),
        Table("dp", 60, 16, ("f4",), "dp", TTSpec(60, 16, (4, 4, 4), (2, 2, 4), (2, 3)), pooling),
        Table("dp2", 50, 8, ("f4", "f5"), "dp", TTSpec(50, 8, (5, 10), (2, 4), (4,)), pooling),
        Table("dense_tw", 50, 16, ("f6",), 1, None, pooling),
        Table("dense_dp", 40, 16, ("f7",), "dp", None, pooling),
        Table("dense_cw", 40, 32, ("f8", "f0"), (1, 0), None, pooling),
    ]


def shared_tables(pooling: PoolingType = PoolingType.SUM) -> list[Table]:
    """All six placements of tensor trains, several shards of a table on one rank, beside dense tables."""
    pool = {"pooling": pooling}
    return [
        Table("rw", 90, 16, ("f0",), "rw", TTSpec(90, 16, (5, 5, 4), (2, 4, 2), (3, 5)), **pool),
        Table("rw2", 77, 8, ("f1", "f2"), "rw", TTSpec(77, 8, (7, 11), (2, 4), (6,)), **pool),
        Table("twrw", 95, 8, ("f3",), "twrw0", TTSpec(95, 8, (10, 10), (2, 4), (6,)), **pool),
        Table("cw", 60, 16, ("f4", "f5"), (1, 0), TTSpec(60, 16, (3, 3, 3, 3), (4, 2, 1, 2), (8, 4, 3)), **pool),
        Table("cw4", 64, 32, ("f6",), (0, 1, 0, 0), TTSpec(64, 32, (4, 4, 4), (4, 4, 2), (9, 5)), **pool),
        Table("cw_alone", 50, 16, ("f6",), (1, 1), TTSpec(50, 16, (2, 25), (4, 4), (8,)), **pool),
        Table("twcw", 80, 16, ("f7",), "twcw", TTSpec(80, 16, (4, 5, 4), (2, 4, 2), (3, 3)), **pool),
        Table("tw", 60, 16, ("f8",), 1, TTSpec(60, 16, (4, 4, 4), (2, 2, 4), (2, 3)), **pool),
        Table("dp", 50, 8, ("f9",), "dp", TTSpec(50, 8, (5, 10), (2, 4), (4,)), **pool),
        Table("dense_rw", 50, 16, ("f10",), "rw", None, **pool),
        Table("dense_tw", 50, 16, ("f11",), 1, None, **pool),
        Table("dense_dp", 40, 16, ("f12",), "dp", None, **pool),
        Table("dense_cw", 40, 32, ("f13",), (1, 0), None, **pool),
    ]


def tables_on_two_hosts() -> list[Table]:
    """For four ranks: tables shared by one host, by ranks of both, by all."""
    return [
        Table("cw", 60, 16, ("f0",), (3, 1), TTSpec(60, 16, (3, 3, 3, 3), (4, 2, 1, 2), (8, 4, 3))),
        Table("cw4", 64, 32, ("f1",), (2, 2, 0, 1), TTSpec(64, 32, (4, 4, 4), (4, 4, 2), (9, 5))),
        Table("twrw1", 95, 8, ("f2",), "twrw1", TTSpec(95, 8, (10, 10), (2, 4), (6,))),
        Table("rw", 90, 16, ("f3", "f4"), "rw", TTSpec(90, 16, (5, 5, 4), (2, 4, 2), (3, 5))),
        Table("rw_few_rows", 5, 8, ("f4",), "rw", TTSpec(5, 8, (2, 3), (2, 4), (3,))),  # none for the last rank
        Table("twcw", 80, 16, ("f5",), "twcw", TTSpec(80, 16, (4, 5, 4), (2, 4, 2), (3, 3))),
        Table("twrw0", 80, 16, ("f5",), "twrw0", TTSpec(80, 16, (4, 5, 4), (2, 4, 2), (3, 3))),
        Table("tw", 60, 16, ("f6",), 3, TTSpec(60, 16, (4, 4, 4), (2, 2, 4), (2, 3))),
        Table("dp", 50, 8, ("f7",), "dp", TTSpec(50, 8, (5, 10), (2, 4), (4,))),
        Table("dense_tw", 50, 16, ("f8",), 2),
        Table("dense_rw", 50, 16, ("f8",), "rw"),
    ]


def local_size() -> int:
    """Ranks of a host."""
    return int(os.environ["LOCAL_WORLD_SIZE"])


def compression(tables: Sequence[Table]) -> dict[str, TTSpec]:
    return {table.name: table.spec for table in tables if table.spec is not None}


def feature_rows(tables: Sequence[Table]) -> dict[str, int]:
    """Features in a fixed order, and the ids that each may have: those that all its tables have."""
    rows: dict[str, int] = {}
    for table in tables:
        for feature in table.features:
            rows[feature] = min(rows.get(feature, table.rows), table.rows)
    return rows


def make_batch(
    tables: Sequence[Table], batch_size: int, seed: int, *, weighted: bool = False, most: int = 4
) -> tuple[KeyedJaggedTensor, Tensor]:
    """A batch with 0 to ``most`` lookups a bag, and targets."""
    generator = torch.Generator().manual_seed(seed)
    lengths, values = [], []
    rows = feature_rows(tables)
    for num_rows in rows.values():
        length = torch.randint(0, most + 1, (batch_size,), generator=generator)
        lengths.append(length)
        values.append(torch.randint(0, num_rows, (int(length.sum()),), generator=generator))
    ids = torch.cat(values)
    weights = torch.rand(ids.numel(), generator=generator) + 0.5 if weighted else None
    features = KeyedJaggedTensor(keys=list(rows), values=ids, lengths=torch.cat(lengths), weights=weights)
    return features, torch.randn(batch_size, generator=generator)


class Model(nn.Module):
    """A collection and a small network on its columns, taken by name: their order depends on the plan."""

    def __init__(self, tables: Sequence[Table], *, weighted: bool = False) -> None:
        super().__init__()
        configs = [table.config() for table in tables]
        self.ebc = EmbeddingBagCollection(tables=configs, device=torch.device("meta"), is_weighted=weighted)
        self.over = make_over(tables)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        pooled = self.ebc(features)
        columns = torch.cat([pooled[key] for key in sorted(pooled.keys())], dim=1)
        return self.over(columns).squeeze(1), columns


def make_over(tables: Sequence[Table]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        columns = sum(table.dim * len(table.features) for table in tables)
        return nn.Sequential(nn.Linear(columns, 8), nn.Tanh(), nn.Linear(8, 1))


def shard(
    tables: Sequence[Table],
    world_size: int,
    optimizer: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
    *,
    dense: bool = False,
    weighted: bool = False,
    wrap: Callable[[Model], nn.Module] = lambda model: model,
    **sharder_args: Any,
) -> DistributedModelParallel:
    """The sharded model: with TT tables, or its stock twin if ``dense``. ``wrap`` may change what surrounds its ebc."""
    model = Model(tables, weighted=weighted)
    if optimizer is not None:
        for table in tables:
            fused_class, kwargs = table.optimizer[1:] if table.optimizer else optimizer
            if fused_class is torch.optim.Adam and table.spec is None:  # FBGEMM has no Adam on the CPU
                fused_class, kwargs = torch.optim.SGD, {"lr": kwargs["lr"]}
            parameters = model.ebc.embedding_bags[table.name].parameters()
            apply_optimizer_in_backward(fused_class, parameters, dict(kwargs))
    sharder: EmbeddingBagCollectionSharder = (
        EmbeddingBagCollectionSharder(**sharder_args)
        if dense
        else TTEmbeddingBagCollectionSharder(compression(tables), **sharder_args)
    )
    plan = make_plan(model.ebc, tables, world_size, sharder, dense=dense)
    return DistributedModelParallel(wrap(model), device=CPU, plan=ShardingPlan({"ebc": plan}), sharders=[sharder])


def make_plan(
    ebc: EmbeddingBagCollection,
    tables: Sequence[Table],
    world_size: int,
    sharder: EmbeddingBagCollectionSharder,
    *,
    dense: bool,
) -> EmbeddingModuleShardingPlan:
    """A plan by hand, as the tables' places say."""
    plan = stock_plan.construct_module_sharding_plan(
        ebc,
        {table.name: table.generator(world_size, dense=dense) for table in tables},
        sharder=sharder,
        local_size=local_size(),
        world_size=world_size,
        device_type="cpu",
    )
    for sharding in plan.values():
        if sharding.compute_kernel != "customized_kernel" and sharding.sharding_type != "data_parallel":
            sharding.compute_kernel = "fused"  # some of TorchRec's generators take the first that the sharder offers
    return plan


def dense_optimizer(model: DistributedModelParallel, make: Any) -> KeyedOptimizerWrapper:
    """The optimizer of what is not stepped in backward."""
    return KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(model.named_parameters())), make)


def all_optimizers(model: DistributedModelParallel, make: Any) -> CombinedOptimizer:
    return CombinedOptimizer([model.fused_optimizer, dense_optimizer(model, make)])


def full_state(model: DistributedModelParallel, tables: Sequence[Table]) -> dict[str, Tensor]:
    """``<table>.weight`` and ``<table>.tt_core<k>`` of all tables, on every rank. Replicas must be equal to the bit."""
    mine: dict[str, Any] = {}
    for key, value in model.state_dict().items():
        name = key.partition("embedding_bags.")[2]
        if not name or name.endswith(".tt_rows"):
            continue
        if isinstance(value, ShardedTensor):
            mine[name] = [(s.metadata.shard_offsets, s.tensor.detach().clone()) for s in value.local_shards()]
        else:
            mine[name] = value.detach().clone()
    every: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, mine)
    sizes = {f"{table.name}.weight": (table.rows, table.dim) for table in tables}
    state: dict[str, Tensor] = {}
    for of_rank in every:
        for name, value in of_rank.items():
            if isinstance(value, list):
                whole = state.setdefault(name, torch.zeros(sizes[name]))
                for (row, column), piece in value:
                    whole[row : row + piece.shape[0], column : column + piece.shape[1]] = piece
            else:
                assert name not in state or torch.equal(state[name], value), f"replicas of {name} differ"
                state[name] = value
    return state


def cores_of(table: Table, state: Mapping[str, Tensor]) -> list[Tensor]:
    assert table.spec is not None
    return [state[f"{table.name}.tt_core{k}"] for k in range(table.spec.num_cores)]


def materialised(tables: Sequence[Table], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of the dense twin: TT tables written out."""
    return {
        f"ebc.embedding_bags.{table.name}.weight": to_dense(cores_of(table, state), table.rows)
        if table.spec is not None
        else state[f"{table.name}.weight"]
        for table in tables
    }


class Reference:
    """The model on one process, with parameters as leaves and the fused update rules written out."""

    def __init__(self, tables: Sequence[Table], state: Mapping[str, Tensor], over: nn.Module) -> None:
        self.tables = tables
        self.over = copy.deepcopy(over)
        self.parameters = {name: value.clone().requires_grad_() for name, value in state.items()}
        self.momentum: dict[str, Tensor] = {}
        self.steps = 0

    def of_table(self, table: Table) -> list[Tensor]:
        return cores_of(table, self.parameters) if table.spec else [self.parameters[f"{table.name}.weight"]]

    def columns(self, features: KeyedJaggedTensor) -> Tensor:
        """The columns of one rank's batch, by name."""
        by_feature = features.to_dict()
        used = [feature for table in self.tables for feature in table.features]
        named: dict[str, Tensor] = {}
        for table in self.tables:
            for feature in table.features:
                bag = by_feature[feature]
                lengths, ids = bag.lengths(), bag.values()
                rows = (
                    tt_rows(self.of_table(table), ids) if table.spec else self.parameters[f"{table.name}.weight"][ids]
                )
                if bag.weights_or_none() is not None:
                    rows = rows * bag.weights()[:, None]
                owners = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
                pooled = torch.zeros(lengths.numel(), table.dim).index_add(0, owners, rows)
                if table.pooling == PoolingType.MEAN:
                    pooled = pooled / lengths.clamp(min=1)[:, None]
                named[feature if used.count(feature) == 1 else f"{feature}@{table.name}"] = pooled
        return torch.cat([named[key] for key in sorted(named)], dim=1)

    def loss(self, batches: Sequence[tuple[KeyedJaggedTensor, Tensor]]) -> Tensor:
        losses = [(self.over(self.columns(f)).squeeze(1) - y).square().mean() for f, y in batches]
        return torch.stack(losses).mean()

    def leaves(self, names: Sequence[str]) -> list[Tensor]:
        """Parameters of the tables named."""
        return [p for table in self.tables if table.name in names for p in self.of_table(table)]

    @torch.no_grad()
    def fused_step(
        self,
        batches: Sequence[tuple[KeyedJaggedTensor, Tensor]],
        kind: str,
        lr: float,
        eps: float,
        decay: float,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        """The fused update of all tables that are not data-parallel, from the gradients in their leaves.

        The arguments are for tables without an optimizer of their own.
        """
        self.steps += 1
        for table in self.tables:
            if table.place == "dp":
                continue
            ids = torch.cat([f.to_dict()[feature].values() for f, _ in batches for feature in table.features])
            if table.optimizer is None:
                self._step_table(table, ids, kind, lr, eps, decay, betas)
                continue
            own, _, kwargs = table.optimizer
            numbers = (kwargs.get(name, 0.0) for name in ("lr", "eps", "weight_decay"))
            self._step_table(table, ids, own, *numbers, kwargs.get("betas", betas))

    def _step_table(
        self, table: Table, ids: Tensor, kind: str, lr: float, eps: float, decay: float, betas: tuple[float, float]
    ) -> None:
        touched = digits(ids, table.spec.p) if table.spec else [ids]
        for k, (w, index) in enumerate(zip(self.of_table(table), touched)):
            assert w.grad is not None
            mask = torch.zeros(w.shape[0], dtype=torch.bool).index_fill(0, index, True)
            mask = mask.view(-1, *[1] * (w.dim() - 1))
            if kind == "adam" and table.spec is not None:
                m, v = (self.momentum.setdefault(f"{table.name}.{k}.{i}", torch.zeros_like(w)) for i in range(2))
                m.copy_(torch.where(mask, betas[0] * m + (1 - betas[0]) * w.grad, m))
                v.copy_(torch.where(mask, betas[1] * v + (1 - betas[1]) * w.grad.square(), v))
                m_hat, v_hat = m / (1 - betas[0] ** self.steps), v / (1 - betas[1] ** self.steps)
                w -= lr * mask * (m_hat / (v_hat.sqrt() + eps) + decay * w)
                continue
            g = torch.where(mask, w.grad + decay * w, 0.0)
            if kind in ("sgd", "adam"):  # FBGEMM has no Adam on the CPU: see `shard`
                w -= lr * g
                continue
            square = g.square()
            if kind == "rowwise_adagrad":
                square = square.flatten(1).mean(1).view_as(mask)
            m = self.momentum.setdefault(f"{table.name}.{k}", torch.zeros_like(square))
            m += square
            w -= lr * g / (m.sqrt() + eps)

    def state(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.parameters.items()}
