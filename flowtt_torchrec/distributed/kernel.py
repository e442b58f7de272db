"""Compute kernels: a group of TT tables as TorchRec's lookup drives it, one op call for all of them.

A core is an ``nn.Parameter`` that is a view of the group's flat weight buffer. The sharded collection registers the
same parameters as ``embedding_bags.<table>.tt_core<k>``; see `ShardedTTEmbeddingBagCollection`.
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
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from flowtt_torchrec import ops
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
from flowtt_torchrec.layout import TTLayout
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

    def _adopt(self, views: list[list[Tensor]]) -> None:
        """Makes parameters of the views of the flat buffer."""
        self._views = dict(zip(self._specs, views))
        # A plain dict: nn.Module must not see the parameters of a kernel but through named_parameters.
        self._cores = {name: [nn.Parameter(view) for view in cores] for name, cores in self._views.items()}
        self._addresses = [view.data_ptr() for cores in views for view in cores]

    @property
    def config(self) -> GroupedEmbeddingConfig:
        return self._config

    @property
    def cores(self) -> dict[str, list[nn.Parameter]]:
        """The cores of each table."""
        return self._cores

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws all cores anew; optimizer state is left alone, as in TorchRec."""
        for name, views in self._views.items():
            table = self._tables[name]
            drawn = init_cores(table.spec, name, table.init_std, seed=self._tables.seed, dtype=self._dtype)
            for view, core in zip(views, drawn):
                view.copy_(core)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Pooled rows.

        Returns:
            ``[batch_size, columns]``, the features' columns side by side. With a batch size per feature (VBE) all in
            one row, as TorchRec's kernels: for each rank, for each feature, its bags of that rank.
        """
        if [core.data_ptr() for cores in self._cores.values() for core in cores] != self._addresses:
            raise RuntimeError(
                f"{self._named}: the cores have been given other memory (by deepcopy, or by assigning to .data), so "
                "the lookup would not see them; copy into the parameters instead"
            )
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
        raise NotImplementedError

    @torch.no_grad()
    def relink(self) -> None:
        """Brings cores that ``nn.Module`` has given new memory on the same device back into the flat buffer.

        Raises:
            RuntimeError: if the cores have been moved or converted.
        """
        for name, views in self._views.items():
            for core, view in zip(self._cores[name], views):
                if core.data_ptr() == view.data_ptr():
                    continue
                if core.device != view.device or core.dtype != view.dtype:
                    raise RuntimeError(
                        f"table {name!r} is sharded on {view.device} as {view.dtype} and cannot be moved or converted "
                        f"to {core.device}, {core.dtype}; shard the model anew"
                    )
                view.copy_(core)
                core.data = view

    def state_dict(
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Nothing: TorchRec takes every key here for ``<table>.weight``. The sharded collection has the cores."""
        return {} if destination is None else destination

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, cores in self._cores.items():
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
    """TT tables of a model-parallel sharding type; the optimizer steps them inside backward."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        sharding_type: ShardingType | None = None,
    ) -> None:
        super().__init__(config, pg, device, sharding_type)
        self._emb_module = BatchedTTEmbeddingBags(
            self._specs,
            feature_table_map=self._feature_tables,
            pooling=self._pooling,
            optimizer=optimizer_spec(config.fused_params, self._named),
            bounds_check_mode=self._bounds_check_mode,
            device=device,
            dtype=self._dtype,
            seed=self._tables.seed,
            keep_forward_weights=self._tables.keep_forward_weights,
        )
        self._adopt(list(self._emb_module.split_weights().values()))
        for cores in self._cores.values():
            for core in cores:
                # what keeps in_backward_optimizer_filter from handing them to the dense optimizer
                core._in_backward_optimizers = [EmptyFusedOptimizer()]  # type: ignore[attr-defined]
        default = all(self._tables[n].init_std == default_std(spec.num_embeddings) for n, spec in self._specs.items())
        if not default and not self._emb_module.weights.is_meta:
            self.reset_parameters()  # the module has drawn them with the default deviation
        self._optim = TTFusedOptimizer(self._emb_module, self._cores)

    @property
    def emb_module(self) -> BatchedTTEmbeddingBags:
        return self._emb_module

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        return self._optim

    def _lookup(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        self._emb_module.set_learning_rate(self._optim.learning_rate)
        return self._emb_module(indices, offsets, weights)


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
        self._layout = TTLayout(list(self._specs.values()), list(self._specs), self._feature_tables)
        self._weights = torch.empty(self._layout.num_parameters, device=device, dtype=self._dtype)
        self._adopt(self._layout.core_views(self._weights))
        watch_dense_optimizers(self._cores)
        if not self._weights.is_meta:
            self.reset_parameters()

    @property
    def weights(self) -> Tensor:
        """The flat buffer that the cores are views of."""
        return self._weights

    def _lookup(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        cores = [core for cores in self._cores.values() for core in cores]
        return ops.lookup(
            _FlatWeights.apply(self._weights, self._layout, *cores),
            self._layout,
            indices,
            offsets,
            per_sample_weights=weights,
            pooling=self._pooling,
            bounds_check_mode=self._bounds_check_mode,
        )


class _FlatWeights(torch.autograd.Function):
    """The flat buffer as a function of the cores that are views of it: nothing is copied, its gradient is split."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, layout: TTLayout, *cores: Tensor) -> Tensor:
        ctx.layout = layout
        return weights.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        views = ctx.layout.core_views(grad.contiguous())
        return None, None, *(view for cores in views for view in cores)


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
        params: dict[str, Tensor] = {}
        state: dict[Tensor, dict[str, Tensor]] = {}
        for name, states in bags.split_optimizer_state().items():
            for k, (core, core_state) in enumerate(zip(cores[name], states)):
                key = f"{name}.{core_name(k)}"
                params[key] = core
                if core_state:  # an empty entry could not be loaded on another rank than it was saved on
                    state[core] = {f"{key}.{state_name}": tensor for state_name, tensor in core_state.items()}
        assert bags.optimizer is not None
        super().__init__(params, state, [{"params": list(params.values()), "lr": bags.optimizer.learning_rate}])

    @property
    def learning_rate(self) -> float:
        return float(next(iter(self.param_groups))["lr"])

    def step(self, closure: Any = None) -> None:
        """Nothing: backward has stepped."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Nothing: there are no gradients."""
