"""A model and a plan for it, before the tables get any memory."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.planner import ParameterConstraints, Topology, types
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    PipelineType,
    ShardingPlan,
    ShardingType,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from flowtt_torchrec.datasets import ClickDataset
from flowtt_torchrec.distributed import (
    AutoCompression,
    CompressionStats,
    LoadedPlan,
    TTEmbeddingBagCollectionSharder,
    TTEmbeddingShardingPlanner,
    TTEmbeddingStats,
    load_plan,
    save_plan,
)
from flowtt_torchrec.distributed.sharding_types import CUSTOMIZED_KERNEL, DATA_PARALLEL
from flowtt_torchrec.distributed.tables import name_tables
from flowtt_torchrec.planner_costs import CostConstants
from flowtt_torchrec.spec import TTSpec, parse_bytes
from flowtt_torchrec.training.compression import choose_specs, data_types, element_size
from flowtt_torchrec.training.config import ModelConfig, TrainConfig
from flowtt_torchrec.training.data import table_configs
from flowtt_torchrec.training.errors import ConfigError, UserError
from flowtt_torchrec.training.model import build_dlrm, optimize_tables_in_backward
from flowtt_torchrec.training.runtime import Runtime, host_memory


@dataclass(frozen=True)
class Machine:
    """What to plan for; it need not be there.

    Args:
        kind: ``"cpu"`` or ``"cuda"``.
        world_size: number of ranks.
        local_world_size: ranks of one host.
        hbm: bytes of GPU memory of a rank; None for TorchRec's default.
        ddr: bytes of host memory of a rank; None for TorchRec's default.
    """

    kind: str
    world_size: int
    local_world_size: int
    hbm: int | None = None
    ddr: int | None = None


def make_topology(machine: Machine) -> Topology:
    """TorchRec's description of the machine."""
    if not hasattr(types, "TopologyFactory"):  # before torchrec 1.8
        return Topology(
            world_size=machine.world_size,
            compute_device=machine.kind,
            hbm_cap=machine.hbm,
            ddr_cap=machine.ddr,
            local_world_size=machine.local_world_size,
        )
    return types.TopologyFactory.create_topology(
        trainer_config=types.TrainerConfig(
            world_size=machine.world_size,
            local_world_size=machine.local_world_size,
            hbm_cap_bytes=machine.hbm,
            ddr_cap_bytes=machine.ddr,
        ),
        kernel_config=types.KernelConfig(compute_device=machine.kind),
    )


def make_sharders(specs: Mapping[str, TTSpec], seed: int = 0) -> list[ModuleSharder[Any]]:
    """TorchRec's sharders, and last, which counts for embedding bag collections, the one that knows tensor trains.

    Args:
        specs: of the tensor-train tables.
        seed: of their initial cores.
    """
    return [*get_default_sharders(), TTEmbeddingBagCollectionSharder(specs, seed=seed)]


def this_machine(runtime: Runtime) -> Machine:
    """The one that the job runs on."""
    cuda = runtime.device.type == "cuda"
    return Machine(
        runtime.device.type,
        runtime.world_size,
        runtime.local_world_size,
        hbm=torch.cuda.get_device_properties(runtime.device).total_memory if cuda else None,
        ddr=host_memory() // runtime.local_world_size,
    )


class Planning:
    """The model and the plan for it, before any memory is given to the tables.

    Args:
        config: the settings.
        dataset: whose tables are planned.
        machine: to plan for, but for what the ``planner`` section says.
        device: where the dense layers are made.
        saved_types: sharding type of each table in the checkpoint to continue from, if the optimizers are such that
            data-parallel tables must stay data-parallel and the others must not become so.
        saved_trains: names of the tensor trains in that checkpoint; with ``compression.tables=auto`` these stay so and
            the others stay dense.

    Attributes:
        tables: of the model.
        specs: of the tensor trains, once there is a plan; until then of the tables that may be.

    Raises:
        ConfigError: a setting does not go with the data.
        UserError: the plan of ``planner.plan`` cannot be read, or does not go with the model or the ranks.
    """

    def __init__(
        self,
        config: TrainConfig,
        dataset: ClickDataset,
        machine: Machine,
        device: torch.device,
        saved_types: Mapping[str, str] | None = None,
        saved_trains: Collection[str] | None = None,
    ) -> None:
        tables = table_configs(dataset, config.model.embedding_dim)
        self._settings, self._machine = config.planner, machine
        self._loaded = self._load(config.model, tables, dataset.num_dense)
        offered = self._offered(config, tables, saved_trains)
        self.specs: Mapping[str, TTSpec] = offered
        types = data_types(config.compression, tables, offered, config.model.data_type)
        _check_dense_type(config, machine.kind, [table.name for table in tables if table.name not in offered])
        self.tables = [replace(table, data_type=types[table.name]) for table in tables]
        self.model = build_dlrm(config.model, self.tables, dataset.num_dense, device)
        optimize_tables_in_backward(self.model, config.optimizer)
        self.sharders = make_sharders(offered, config.training.seed)
        self.compression = CompressionStats(offered, announce=False)
        printed = [TTEmbeddingStats(offered)] if config.report.print_sharding_plan else []
        hbm = machine.hbm if config.planner.hbm is None else parse_bytes(config.planner.hbm)
        ddr = machine.ddr if config.planner.ddr is None else parse_bytes(config.planner.ddr)
        self._planner = TTEmbeddingShardingPlanner(
            topology=make_topology(replace(machine, hbm=hbm, ddr=ddr)),
            compression=offered,
            batch_size=config.training.batch_size,
            costs=self._costs(),
            pipeline_type=PipelineType.TRAIN_SPARSE_DIST,
            stats=[*printed, self.compression],
            storage_reservation=FixedPercentageStorageReservation(config.planner.storage_reservation),
            constraints={
                name: ParameterConstraints(
                    pooling_factors=[factor],
                    sharding_types=_allowed_types(
                        (saved_types or {}).get(name),
                        machine.kind,
                        has_16_bits=element_size(types[name]) < 4,
                        train=name in offered,
                    ),
                    compute_kernels=_allowed_kernels(config, machine.kind),
                )
                for name, factor in zip(dataset.table_names, dataset.pooling_factors)
            },
        )

    def _offered(
        self, config: TrainConfig, tables: Sequence[EmbeddingBagConfig], saved_trains: Collection[str] | None
    ) -> Mapping[str, TTSpec]:
        """Specs that the planner is offered: of tables that are tensor trains or, with ``auto``, may become so."""
        if self._loaded is not None:
            return self._loaded.compression
        specs = choose_specs(config.compression, tables, config.model.data_type)
        if config.compression.tables != "auto":
            return specs
        if saved_trains is None:
            return AutoCompression(specs)
        return {name: spec for name, spec in specs.items() if name in saved_trains}

    def plan(self, group: dist.ProcessGroup | None = None) -> ShardingPlan:
        """Plans, on rank 0 of the group for all of it, or takes the plan of ``planner.plan``; writes it if asked to.

        Raises:
            UserError: the tables do not fit, or the plan cannot be written.
        """
        if self._loaded is not None:
            plan = self._loaded.plan
            self.compression.take(plan, self.model)
        else:
            try:
                plan = (
                    self._planner.plan(self.model, self.sharders)
                    if group is None
                    else self._planner.collective_plan(self.model, self.sharders, group)
                )
            except PlannerError as error:
                raise UserError(f"TorchRec's planner found no plan: {error}") from None
        self.specs = {name: spec for name, spec in self.specs.items() if _is_tensor_train(plan, name)}
        if self._settings.save_plan is not None and (group is None or dist.get_rank(group) == 0):
            try:
                save_plan(
                    self._settings.save_plan,
                    plan,
                    self.model,
                    self.specs,
                    world_size=self._machine.world_size,
                    local_world_size=self._machine.local_world_size,
                )
            except (OSError, ValueError) as error:
                raise UserError(f"planner.save_plan: {error}") from None
        return plan

    def _costs(self) -> CostConstants | None:
        if self._settings.costs is None:
            return None
        try:
            return CostConstants.load(self._settings.costs)
        except (OSError, ValueError) as error:
            raise UserError(f"planner.costs: {error}") from None

    def _load(self, config: ModelConfig, tables: Sequence[EmbeddingBagConfig], num_dense: int) -> LoadedPlan | None:
        if self._settings.plan is None:
            return None
        model = build_dlrm(config, tables, num_dense, torch.device("meta"))  # which draws no random numbers
        try:
            return load_plan(
                self._settings.plan,
                model,
                world_size=self._machine.world_size,
                local_world_size=self._machine.local_world_size,
                device=self._machine.kind,
            )
        except (OSError, ValueError) as error:
            raise UserError(f"planner.plan: {error}") from None


def _is_tensor_train(plan: ShardingPlan, name: str) -> bool:
    modules = (cast(EmbeddingModuleShardingPlan, module) for module in plan.plan.values())
    customized = CUSTOMIZED_KERNEL
    return any(module[name].compute_kernel == customized for module in modules if name in module)


def _check_dense_type(config: TrainConfig, device: str, dense: Sequence[str]) -> None:
    """Raises `ConfigError` for dense tables of a type that they cannot be trained in."""
    data_type, auto = config.model.data_type, config.compression.tables == "auto"
    if data_type == "FP32" or not (dense or auto):
        return
    which = "tables that stay dense" if auto else name_tables(dense)
    advice = "set it to FP32, and compression.data_type for the tensor trains"
    if config.model.embedding_dim % 4:
        raise ConfigError(
            f"model.data_type is {data_type}, but with model.embedding_dim={config.model.embedding_dim}, which is no "
            f"multiple of 4, dense tables are data-parallel ({which}), and would be stepped in 16 bits; {advice}"
        )
    if device != "cpu":
        return
    if data_type == "BF16":
        raise ConfigError(f"model.data_type is BF16, in which FBGEMM has no dense tables on a CPU ({which}); {advice}")
    if config.optimizer.kind == "adam":
        raise ConfigError(
            f"model.data_type is {data_type}, but with optimizer.kind=adam dense tables are data-parallel on a CPU "
            f"({which}), and Adam's averages would be in 16 bits too; {advice}"
        )


def _allowed_types(saved: str | None, device: str, *, has_16_bits: bool, train: bool) -> list[str] | None:
    """Sharding types of a table that was ``saved`` with one, or whose numbers have 16 bits; else all.

    A tensor ``train`` is not cut into the rows of all ranks: those are many options that no plan gains from.
    """
    if saved is None and not has_16_bits:
        return None
    data_parallel = DATA_PARALLEL
    if saved == data_parallel:
        return [data_parallel]
    without = {data_parallel, *([ShardingType.ROW_WISE.value, ShardingType.GRID_SHARD.value] if train else [])}
    return [kind for kind in EmbeddingBagCollectionSharder().sharding_types(device) if kind not in without]


def _allowed_kernels(config: TrainConfig, device: str) -> list[str] | None:
    # FBGEMM fuses no Adam on the CPU, and no optimizer where columns are no multiple of 4.
    if (config.optimizer.kind == "adam" and device == "cpu") or config.model.embedding_dim % 4:
        return [EmbeddingComputeKernel.DENSE.value, CUSTOMIZED_KERNEL]
    return None


def print_planner_logs() -> None:
    """Prints what TorchRec's planner logs of a plan, its tables of shards and ranks; by default nobody sees it."""
    logger = logging.getLogger("torchrec.distributed.planner.stats")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
