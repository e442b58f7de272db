"""The sharder that a user passes to TorchRec, and the sharded collection that it makes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingEnv2D,
)
from torchrec.distributed.utils import append_prefix, optimizer_type_to_emb_opt_type
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from flowtt_torchrec.distributed.auto_compression import AutoCompression
from flowtt_torchrec.distributed.checkpoint.names import ROWS, WEIGHT, check_saved, of_spec, saved_tables
from flowtt_torchrec.distributed.column_shards import check_columns
from flowtt_torchrec.distributed.fused_params import OPTIMIZERS
from flowtt_torchrec.distributed.kernel import TTKernel
from flowtt_torchrec.distributed.sharding import SHARDINGS, TTParameterSharding
from flowtt_torchrec.distributed.sharding_types import (
    COLUMN_TYPES,
    CUSTOMIZED_KERNEL,
    DATA_PARALLEL,
    ROW_TYPES,
    SUPPORTED_SHARDING_TYPES,
    TT_KERNEL,
)
from flowtt_torchrec.distributed.shared_kernel import CoreGradientSync, TTSharedEmbeddingBag, sharing_groups
from flowtt_torchrec.distributed.tables import TTTable, TTTables, check_config, check_same_on_ranks, name_tables
from flowtt_torchrec.distributed.variable_batch import with_inverse_indices_in_order
from flowtt_torchrec.hints import did_you_mean
from flowtt_torchrec.spec import TTSpec

logger = logging.getLogger(__name__)


class ShardedTTEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """``ShardedEmbeddingBagCollection`` with TT tables beside dense ones.

    A TT table has no ``weight``; its cores are the parameters ``embedding_bags.<table>.tt_core<k>``, plain tensors on
    the ranks that hold the table. Beside them the buffer ``tt_rows`` is the number of rows, which the cores do not
    tell. Fused optimizer state is ``<table>.tt_core<k>.momentum1``, for Adam ``exp_avg_sq`` and ``step`` too.
    No name depends on the placement. Made by `TTEmbeddingBagCollectionSharder`.
    """

    _embedding_bag_configs: list[EmbeddingBagConfig]
    _pooling_type_to_rs_features: dict[str, list[str]]
    _tt_ready = False  # the base class's constructor resets parameters and may load a state dict

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if PoolingType.MEAN.value in self._pooling_type_to_rs_features:
            self._spare_means_of_other_tables()
        self._tt_ready = True

    def _spare_means_of_other_tables(self) -> None:
        """Keeps the columns of tables that are not row-wise from being divided by the bags' lengths.

        Row-wise means are sums that TorchRec divides in the end, and with them, by mistake, all other tables' columns.
        It divides by 1 what it finds in its list of row-wise sums, so that is where the other tables' features go.
        """
        for config in self._embedding_bag_configs:
            if self.module_sharding_plan[config.name].sharding_type not in ROW_TYPES:
                self._pooling_type_to_rs_features[PoolingType.SUM.value].extend(config.feature_names)

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """As in TorchRec, with the right lengths for row-wise means of features with a batch size of their own."""
        means = PoolingType.MEAN.value in self._pooling_type_to_rs_features
        if means and isinstance(features, KeyedJaggedTensor) and features.variable_stride_per_key():
            order = [name for sharding in self._embedding_shardings for name in sharding.feature_names()]
            features = with_inverse_indices_in_order(features, order)
        return super().input_dist(ctx, features)

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> EmbeddingSharding:
        if not any(isinstance(info.param_sharding, TTParameterSharding) for info in sharding_infos):
            return super().create_embedding_bag_sharding(
                sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry
            )
        sharding_type = sharding_infos[0].param_sharding.sharding_type
        kwargs: dict[str, Any] = {}
        if sharding_type != DATA_PARALLEL:
            kwargs["qcomm_codecs_registry"] = qcomm_codecs_registry
        if sharding_type in COLUMN_TYPES:
            kwargs["permute_embeddings"] = permute_embeddings
        return SHARDINGS[sharding_type](sharding_infos, env, device, **kwargs)

    def _tt_tables(self) -> dict[str, TTTable]:
        """All TT tables of the collection, also those on other ranks."""
        return {
            name: sharding.tt_tables[name]
            for name, sharding in self.module_sharding_plan.items()
            if isinstance(sharding, TTParameterSharding) and sharding.tt_tables is not None
        }

    def _tt_kernels(self) -> Iterator[TTKernel]:
        for lookup in self._lookups:
            while isinstance(lookup, DistributedDataParallel):
                lookup = lookup.module
            for kernel in lookup._emb_modules:
                if isinstance(kernel, TTKernel):
                    yield kernel

    def tt_cores(self) -> dict[str, list[nn.Parameter]]:
        """The cores of each TT table that this rank holds."""
        return {name: cores for kernel in self._tt_kernels() for name, cores in kernel.cores.items()}

    def _initialize_torch_state(self, skip_registering: bool = False) -> None:
        plan = {name: self.module_sharding_plan[name] for name in self._tt_tables()}
        sync = CoreGradientSync(sharing_groups(plan, self._env.process_group))
        for kernel in self._tt_kernels():
            if isinstance(kernel, TTSharedEmbeddingBag):
                kernel.share(sync)
        super()._initialize_torch_state(skip_registering)
        tables = self._tt_tables()
        for kernel in self._tt_kernels():
            for name in kernel.cores:
                # The kernel's own module, so that whatever is done to its parameters here is what lookups see.
                table = kernel.emb_module.table(name)
                self.embedding_bags[name] = table
                rows = torch.tensor(tables[name].spec.num_embeddings, device=self._device)
                table.register_buffer(ROWS, rows)

    def reset_parameters(self) -> None:
        """Draws all tables anew. A TT table's cores depend on its name and the sharder's seed only."""
        configs = self._embedding_bag_configs
        tables = self._tt_tables()
        # The base class initialises ``weight`` of every config, which TT tables don't have.
        self._embedding_bag_configs = [config for config in configs if config.name not in tables]
        try:
            super().reset_parameters()
        finally:
            self._embedding_bag_configs = configs
        if not self._tt_ready or (self._device is not None and self._device.type == "meta"):
            return  # the kernels have just drawn them, and DDP has made the data-parallel ones equal
        for kernel in self._tt_kernels():
            kernel.reset_parameters()

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedTTEmbeddingBagCollection:
        super()._apply(fn, recurse)
        for kernel in self._tt_kernels():
            kernel.relink()
        self._fill_rows()
        return self

    @torch.no_grad()
    def _fill_rows(self) -> None:
        tables = self._tt_tables()
        for name in self.tt_cores():
            rows = self.embedding_bags[name].get_buffer(ROWS)
            if not rows.is_meta:  # to_empty gives it any number
                rows.fill_(tables[name].spec.num_embeddings)

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """As in TorchRec, and the buffers of TT tables: what DDP, which keeps replicas alike, must leave alone."""
        yield from super().sharded_parameter_names(prefix)
        for name in self.tt_cores():
            yield append_prefix(prefix, f"embedding_bags.{name}.{ROWS}")

    @staticmethod
    def _pre_load_state_dict_hook(
        self: ShardedTTEmbeddingBagCollection, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        """Checks the cores in a state dict, and drops those of tables on other ranks from a full one."""
        local = self.tt_cores()
        local_metadata = args[0] if args else {}
        for name, table in self._tt_tables().items():
            bag = f"{prefix}embedding_bags.{name}."
            if not self._tt_ready:  # the dense values of a module that was not on meta
                state_dict.pop(bag + WEIGHT, None)
            if bag + WEIGHT in state_dict:
                raise ValueError(
                    f"the state dict has a dense weight for table {name!r}, which is a tensor train here; bring it to "
                    "cores with flowtt_torchrec.distributed.checkpoint.compress_state_dict first"
                )
            keys = [key for key in state_dict if key.startswith(bag + "tt_core")]
            rows = state_dict.get(bag + ROWS)
            rows_saved = None if rows is None else int(rows)
            if name in local:
                # A checkpoint that was read into this very buffer is the saved number, and wrong if it is another.
                buffer = self.embedding_bags[name].get_buffer(ROWS)
                if not buffer.is_meta:
                    buffer.fill_(table.spec.num_embeddings)
                state_dict[bag + ROWS] = buffer
            else:
                state_dict.pop(bag + ROWS, None)
            if name in local and keys and local_metadata.get("assign_to_params_buffers", False):
                raise ValueError(
                    f"table {name!r}: load_state_dict(assign=True) would part the cores from the memory that the "
                    "lookup reads; load without assign"
                )
            for saved in saved_tables({key: state_dict[key].shape for key in keys}).values():
                saved.rows = rows_saved
                check_saved(name, saved, of_spec(table.spec), "the state dict")
            if name not in local:
                for key in keys:
                    del state_dict[key]
        ShardedEmbeddingBagCollection._pre_load_state_dict_hook(self, state_dict, prefix, *args)

    def update_shards(
        self, changed_sharding_params: EmbeddingModuleShardingPlan, env: ShardingEnv, device: torch.device | None
    ) -> None:
        """As in TorchRec for a collection of dense tables; TT tables move through a checkpoint instead."""
        tables = self._tt_tables()
        if tables:
            raise NotImplementedError(
                f"{name_tables(tables)}: a collection with TT tables cannot be resharded while it runs; save a "
                "checkpoint and load it under the new plan"
            )
        super().update_shards(changed_sharding_params, env, device)


class TTEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """``EmbeddingBagCollectionSharder`` that makes tensor trains of the tables with a spec.

    It takes the place of TorchRec's sharder for ``EmbeddingBagCollection``; dense tables keep all of its sharding types
    and kernels. The tables should be on the ``meta`` device: the values of a dense table are not used.

    A TT table is stepped in backward by the optimizer of ``apply_optimizer_in_backward`` (SGD, Adagrad, RowWiseAdagrad
    or Adam, with ``lr``, ``eps``, ``weight_decay`` and Adam's ``betas``), unless it is data-parallel: then its cores
    are ordinary parameters for the dense optimizer, as are TorchRec's own data-parallel tables.

    A row-wise or column-wise table is still one tensor train: every rank with a shard has all cores, serves its rows or
    columns, and makes the same step from the gradient summed over these ranks. Such tables need a gradient on all
    ranks in every backward, as TorchRec's exchange does anyhow.

    Args:
        compression: spec of each table that is to be a tensor train; an `AutoCompression` leaves that to the plan.
        fused_params: as in TorchRec, for all tables.
        qcomm_codecs_registry: as in TorchRec.
        seed: of the initial cores, together with the table's name. The same on all ranks.
        keep_forward_weights: keeps a copy of the cores with every forward, so that backward may follow another step of
            the same tables, as it does in ``TrainPipelineSemiSync``; otherwise that is an error. Not for data-parallel
            tables: DDP would not average their gradients.

    Example:
        >>> compression = {"t_cat_2": TTSpec.suggest(40_000_000, 128, rank=32)}
        >>> sharders = [TTEmbeddingBagCollectionSharder(compression)]
        >>> plan = TTEmbeddingShardingPlanner(compression=compression).collective_plan(model, sharders, pg)
        >>> model = DistributedModelParallel(model, plan=plan, sharders=sharders)
    """

    def __init__(
        self,
        compression: Mapping[str, TTSpec],
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        *,
        seed: int = 0,
        keep_forward_weights: bool = False,
    ) -> None:
        super().__init__(fused_params=fused_params, qcomm_codecs_registry=qcomm_codecs_registry)
        self._compression = dict(compression)
        self._plan_chooses = isinstance(compression, AutoCompression)
        self._seed = seed
        self._keep_forward_weights = keep_forward_weights

    @property
    def compression(self) -> dict[str, TTSpec]:
        """Spec of each table that is to be a tensor train, or may be if `plan_chooses`."""
        return dict(self._compression)

    @property
    def plan_chooses(self) -> bool:
        """Whether a table with a spec may be dense, if the plan says so."""
        return self._plan_chooses

    @property
    def keep_forward_weights(self) -> bool:
        """Whether every forward keeps a copy of the cores for its backward."""
        return self._keep_forward_weights

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """TorchRec's, and row-wise ones for TT tables on the CPU, where TorchRec has none.

        A subclass may offer fewer; if none of them is TorchRec's, they are for dense tables too.
        """
        types = super().sharding_types(compute_device_type)
        return [*types, *(name for name in SUPPORTED_SHARDING_TYPES if name not in types)]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        of_torchrec = super().sharding_types(compute_device_type)
        offered = self.sharding_types(compute_device_type)
        stock = sharding_type in of_torchrec or not set(of_torchrec) & set(offered)
        kernels = super().compute_kernels(sharding_type, compute_device_type) if stock else []
        return [*kernels, TT_KERNEL] if sharding_type in SUPPORTED_SHARDING_TYPES else kernels

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedTTEmbeddingBagCollection:
        """Shards a collection by its part of a plan.

        Raises:
            ValueError: naming the table, if plan, compression and config of a table don't go together.
        """
        configs = {config.name: config for config in module.embedding_bag_configs()}
        if not isinstance(env, ShardingEnv2D):  # refused below, on all ranks
            check_same_on_ranks({name: self._describe(name, params[name]) for name in configs}, env.process_group)
        tables = {
            name: check_config(config, self._compression[name])
            for name, config in configs.items()
            if self._check_plan(config.name, params[name])
        }
        foreign = self._compression.keys() - configs.keys()
        if foreign:  # a model may have several collections and has one sharder for all
            logger.warning("collection %s has no %s of the compression", module_fqn, name_tables(sorted(foreign)))
        if tables and (isinstance(env, ShardingEnv2D) or env.output_dtensor):
            raise ValueError(
                f"{name_tables(tables)}: TT tables don't support 2D parallelism or DTensor state dicts; use "
                "DistributedModelParallel with a plain ShardingEnv"
            )
        for name, parameter in self.shardable_parameters(module).items():
            if name in tables:
                if not parameter.is_meta:
                    logger.warning("table %r was not on the meta device; its dense values are not used", name)
                if params[name].sharding_type != DATA_PARALLEL:
                    _check_optimizer(name, parameter)
            if hasattr(parameter, "_optimizer_kwargs"):
                # TorchRec renames keys in these dicts; they belong to the caller
                parameter._optimizer_kwargs = [_hashable(kwargs) for kwargs in parameter._optimizer_kwargs]
        if self._keep_forward_weights:
            _check_not_data_parallel(tables, params)
        _check_row_wise_means(list(configs.values()), tables, params)
        shared = TTTables(tables, self._seed, self._keep_forward_weights)
        return ShardedTTEmbeddingBagCollection(
            module=module,
            table_name_to_parameter_sharding={
                name: TTParameterSharding.wrap(sharding, shared) if name in tables else sharding
                for name, sharding in params.items()
            },
            env=env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )

    def _describe(self, name: str, sharding: ParameterSharding) -> str:
        """What is to become of a table, in words that are equal where it is the same."""
        kind = self._compression.get(name, "dense")
        plan = f"{sharding.sharding_type}, {sharding.compute_kernel} on {sharding.ranks}"
        return f"{kind} (seed {self._seed}) planned {plan}"

    def _check_plan(self, name: str, sharding: ParameterSharding) -> bool:
        """Whether a table is a tensor train; an error if plan and compression don't agree."""
        if name not in self._compression:
            if sharding.compute_kernel != CUSTOMIZED_KERNEL:
                return False
            raise ValueError(
                f"table {name!r} is planned as {CUSTOMIZED_KERNEL}, but the sharder's compression has no TTSpec for "
                f"it{did_you_mean(name, self._compression)}"
            )
        if sharding.compute_kernel != CUSTOMIZED_KERNEL:
            if self._plan_chooses:
                return False
            raise ValueError(
                f"table {name!r} has a TTSpec, but the plan gives it the kernel {sharding.compute_kernel!r}; plan with "
                f"TTEmbeddingShardingPlanner, or set compute_kernel={CUSTOMIZED_KERNEL!r} in a plan made by hand"
            )
        if sharding.sharding_type not in SUPPORTED_SHARDING_TYPES:
            raise ValueError(
                f"table {name!r} is planned {sharding.sharding_type}; TT tables support "
                f"{', '.join(SUPPORTED_SHARDING_TYPES)}"
            )
        if sharding.sharding_type in COLUMN_TYPES:
            assert sharding.sharding_spec is not None
            shards = sharding.sharding_spec.shards
            columns = [(shard.shard_offsets[1], shard.shard_sizes[1]) for shard in shards]
            check_columns(name, self._compression[name], columns)
        return True

    @property
    def sharded_module_type(self) -> type[ShardedTTEmbeddingBagCollection]:
        return ShardedTTEmbeddingBagCollection


def _hashable(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that TorchRec can group tables by: lists, as Adam's betas may be, are tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in kwargs.items()}


def _check_optimizer(name: str, parameter: nn.Parameter) -> None:
    for optimizer in getattr(parameter, "_optimizer_classes", []):
        try:
            optimizer_type_to_emb_opt_type(optimizer)
        except ValueError:
            raise ValueError(
                f"table {name!r}: {optimizer.__name__} cannot be fused into backward; use {OPTIMIZERS}, or place the "
                "table data_parallel, where the dense optimizer trains it"
            ) from None


def _check_not_data_parallel(tables: Mapping[str, TTTable], plan: Mapping[str, ParameterSharding]) -> None:
    replicated = [name for name in tables if plan[name].sharding_type == DATA_PARALLEL]
    if replicated:
        raise ValueError(
            f"{name_tables(replicated)}: planned data_parallel, and the sharder has keep_forward_weights=True; DDP "
            "does not average gradients whose backward comes after another forward, so constrain these tables to "
            "other sharding types, or leave keep_forward_weights out"
        )


def _check_row_wise_means(
    configs: list[EmbeddingBagConfig], tables: Mapping[str, TTTable], plan: Mapping[str, ParameterSharding]
) -> None:
    """TorchRec divides the sums of row-wise mean tables by feature, so all tables of such a feature must be alike."""
    divided: dict[str, dict[bool, str]] = {}
    for config in configs:
        row_wise_mean = config.pooling == PoolingType.MEAN and plan[config.name].sharding_type in ROW_TYPES
        for feature in config.feature_names:
            divided.setdefault(feature, {}).setdefault(row_wise_mean, config.name)
    for feature, names in divided.items():
        if len(names) == 2 and not tables.keys().isdisjoint(names.values()):
            raise ValueError(
                f"table {names[True]!r} is row-wise with mean pooling, and table {names[False]!r}, which is not, has "
                f"the same feature {feature!r}; TorchRec would divide the columns of both by the bags' lengths. Place "
                f"{names[True]!r} otherwise, or give one of them a copy of the feature"
            )
