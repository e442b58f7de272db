"""Compute kernels: a group of TT tables as TorchRec's lookup drives it, one op call for all of them.

The cores are the parameters of a `BatchedTTEmbeddingBags`, one module a table. The sharded collection has the very same
modules as ``embedding_bags.<table>``; see `ShardedTTEmbeddingBagCollection`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.types import ShardingType
from torchrec.distributed.utils import append_prefix
from torchrec.modules.embedding_configs import PoolingMode, data_type_to_dtype, pooling_type_to_pooling_mode
from torchrec.optim.fused import FusedOptimizer, FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from flowtt_torchrec.cores import core_name, default_std, init_cores
from flowtt_torchrec.distributed.dense_optimizers import watch_dense_optimizers
from flowtt_torchrec.distributed.fused_params import (
    TT_TABLES,
    bounds_check_mode,
    optimizer_spec,
    output_dtype,
)
from flowtt_torchrec.distributed.tables import TTTables, name_tables
from flowtt_torchrec.distributed.variable_batch import by_rank, even_offsets
from flowtt_torchrec.embedding_bag import BatchedTTEmbeddingBags
from flowtt_torchrec.optimizers import OptimizerSpec
from flowtt_torchrec.precision import compute_dtype


class TTKernel(BaseEmbedding):
    """What the kernels share: the group's tables, their features and their cores.

    Args:
        config: the group's tables, all with the same pooling, data type and fused parameters.
        pg: not used; TorchRec gives it to every kernel.
        device: where the cores live.
        sharding_type: given by TorchRec for row-wise types, where means become sums.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        sharding_type: ShardingType | None = None,
    ) -> None:
        super().__init__()
        self._config = config
        self._device = device
        self._dtype = data_type_to_dtype(config.data_type)
        self._tables: TTTables = (config.fused_params or {})[TT_TABLES]
        # A table is here once for each of its shards on this rank.
        self._specs = {table.name: self._tables[table.name].spec for table in config.embedding_tables}
        names = list(self._specs)
        self._named = name_tables(names)
        self._feature_tables = [
            names.index(table.name) for table in config.embedding_tables for _ in table.feature_names
        ]
        mean = pooling_type_to_pooling_mode(config.pooling, sharding_type) == PoolingMode.MEAN
        self._pooling = "mean" if mean else "sum"
        self._bounds_check_mode = bounds_check_mode(config.fused_params, self._named)
        self._output_dtype = output_dtype(config.fused_params, self._named)
        self._emb_module = BatchedTTEmbeddingBags(
            self._specs,
            feature_table_map=self._feature_tables,
            pooling=self._pooling,
            optimizer=self._fused_optimizer_spec(),
            bounds_check_mode=self._bounds_check_mode,
            device=device,
            dtype=self._dtype,
            seed=self._tables.seed,
            keep_forward_weights=self._tables.keep_forward_weights,
        )
        self._placed = self._emb_module.weights.device
        default = all(self._tables[n].init_std == default_std(spec.num_embeddings) for n, spec in self._specs.items())
        if not default:
            self.reset_parameters()  # the module has drawn them with the default deviation

    def _fused_optimizer_spec(self) -> OptimizerSpec | None:
        return None

    @property
    def emb_module(self) -> BatchedTTEmbeddingBags:
        """The group's tables."""
        return self._emb_module

    @property
    def config(self) -> GroupedEmbeddingConfig:
        return self._config

    @property
    def cores(self) -> dict[str, list[nn.Parameter]]:
        """The cores of each table."""
        of_tables = ((name, self._emb_module.table(name)) for name in self._specs)
        return {
            name: [getattr(table, core_name(k)) for k in range(self._specs[name].num_cores)]
            for name, table in of_tables
        }

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws all cores anew; optimizer state is left alone, as in TorchRec."""
        for name, cores in self._emb_module.split_weights().items():
            if cores[0].is_meta:
                return
            table = self._tables[name]
            drawn = init_cores(table.spec, name, table.init_std, seed=self._tables.seed, dtype=self._dtype)
            for core, values in zip(cores, drawn):
                core.copy_(values)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Pooled rows.

        Returns:
            ``[batch_size, columns]``, the features' columns side by side. With a batch size per feature (VBE) all in
            one row, as TorchRec's kernels: for each rank, for each feature, its bags of that rank.
        """
        weights = features.weights_or_none()
        # Feature processors pass positions as integer weights; TorchRec's kernels ignore those too.
        if weights is not None:
            weights = weights.to(compute_dtype(self._dtype)) if weights.is_floating_point() else None
        if not features.variable_stride_per_key():
            return self._lookup(features.values(), features.offsets(), weights).to(self._output_dtype)
        offsets = even_offsets(features.offsets(), features.stride_per_key())
        pooled = self._lookup(features.values(), offsets, weights).to(self._output_dtype)
        return by_rank(pooled, self._config.embedding_dims(), features.stride_per_key_per_rank())

    def _lookup(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        return self._emb_module(indices, offsets, weights)

    def relink(self) -> None:
        """After ``nn.Module`` has done something to all cores.

        Raises:
            RuntimeError: if the cores have been moved or converted.
        """
        for name, cores in self.cores.items():
            for core in cores:
                if core.device != self._placed or core.dtype != self._dtype:
                    raise RuntimeError(
                        f"table {name!r} is sharded on {self._placed} as {self._dtype} and cannot be moved or "
                        f"converted to {core.device}, {core.dtype}; shard the model anew"
                    )
        self._emb_module.relink()

    def state_dict(
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Nothing: TorchRec takes every key here for ``<table>.weight``. The sharded collection has the cores."""
        return {} if destination is None else destination

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, cores in self.cores.items():
            for k, core in enumerate(cores):
                yield append_prefix(prefix, f"{name}.{core_name(k)}"), core

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        yield from ()

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Nothing: TorchRec would register it as the table's ``weight``."""
        yield from ()

    def flush(self) -> None:
        """No cache to write back."""

    def purge(self) -> None:
        """No cache to empty."""


class TTFusedEmbeddingBag(TTKernel, FusedOptimizerModule):
    """TT tables of a model-parallel sharding type; the optimizer steps them inside backward.

    Cores that require no gradient are not stepped. The output requires one all the same: backward then has the same
    exchanges on all ranks, whoever holds what is frozen.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        sharding_type: ShardingType | None = None,
    ) -> None:
        super().__init__(config, pg, device, sharding_type)
        self._optim = TTFusedOptimizer(self._emb_module, self.cores)
        for cores in self.cores.values():
            for core in cores:
                # also what keeps in_backward_optimizer_filter from handing them to the dense optimizer
                core._in_backward_optimizers = [self._optim]  # type: ignore[attr-defined]

    def _fused_optimizer_spec(self) -> OptimizerSpec:
        return optimizer_spec(self._config.fused_params, self._named)

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        return self._optim

    def _lookup(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        self._emb_module.set_learning_rate(self._optim.learning_rate)
        output = self._lookup_to_step(indices, offsets, weights)
        return output.requires_grad_() if torch.is_grad_enabled() else output

    def _lookup_to_step(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        return self._emb_module(indices, offsets, weights)

    def relink(self) -> None:
        super().relink()
        self._optim.show(self._emb_module, self.cores)


class TTDenseEmbeddingBag(TTKernel):
    """Data-parallel TT tables: DDP averages the cores' gradients, the user's dense optimizer steps them."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        sharding_type: ShardingType | None = None,
    ) -> None:
        super().__init__(config, pg, device, sharding_type)
        watch_dense_optimizers(self.cores)

    @property
    def weights(self) -> Tensor:
        """The flat buffer that the cores are views of."""
        return self._emb_module.weights


class TTFusedOptimizer(FusedOptimizer):
    """The fused optimizer as checkpoints and learning rate schedules see it.

    Args:
        bags: the group's tables with their optimizer.
        cores: the parameters of each table.

    Attributes:
        params: ``<table>.tt_core<k>`` to core. The sharded collection puts ``embedding_bags.`` before the keys.
        state: core to ``{"<table>.tt_core<k>.momentum1": …}``, views of the memory that backward updates. SGD has none,
            Adam ``exp_avg_sq`` too, as TorchRec calls it, and ``step``, which TorchRec's tables don't save.
        param_groups: one group, whose ``lr`` holds from the next forward on.
    """

    def __init__(self, bags: BatchedTTEmbeddingBags, cores: dict[str, list[nn.Parameter]]) -> None:
        params: dict[str, Tensor] = {
            f"{name}.{core_name(k)}": core for name, of_table in cores.items() for k, core in enumerate(of_table)
        }
        assert bags.optimizer is not None
        super().__init__(params, {}, [{"params": list(params.values()), "lr": bags.optimizer.learning_rate}])
        self.show(bags, cores)

    def show(self, bags: BatchedTTEmbeddingBags, cores: dict[str, list[nn.Parameter]]) -> None:
        """Has the state be that of the tables, whose memory may have changed."""
        for name, states in bags.split_optimizer_state().items():
            for k, (core, core_state) in enumerate(zip(cores[name], states)):
                if core_state:  # an empty entry could not be loaded on another rank than it was saved on
                    key = f"{name}.{core_name(k)}"
                    self.state[core] = {f"{key}.{state_name}": tensor for state_name, tensor in core_state.items()}

    @property
    def learning_rate(self) -> float:
        return float(next(iter(self.param_groups))["lr"])

    def step(self, closure: Any = None) -> None:
        """Nothing: backward has stepped."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Nothing: there are no gradients."""
