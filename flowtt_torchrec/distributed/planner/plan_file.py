"""A sharding plan as JSON: what was planned once, on whatever machine, is used again and can be read and edited.

The file says of each table its size, sharding type and kernel, the size, offset and rank of each shard, and the shape
of its tensor train if it is one. Devices are not in it: ``cuda`` or ``cpu`` is chosen when it is loaded.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import placement
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import DataType

from flowtt_torchrec.distributed.sharding_types import CUSTOMIZED_KERNEL, DATA_PARALLEL, HOST_TYPES
from flowtt_torchrec.distributed.tables import name_tables, table_parameters
from flowtt_torchrec.files import write_atomically
from flowtt_torchrec.hints import did_you_mean
from flowtt_torchrec.spec import TTSpec

VERSION = 1
_TYPES = {kind.value for kind in ShardingType}
_KERNELS = {kernel.value for kernel in EmbeddingComputeKernel}
# Fields of an entry that are a plain value or an enum, and what makes them from JSON again.
_OPTIONS: dict[str, Any] = {
    "enforce_hbm": bool,
    "stochastic_rounding": bool,
    "bounds_check_mode": BoundsCheckMode.__getitem__,
    "output_dtype": DataType,
}
_NOT_SAVED = ("cache_params", "key_value_params")


class LoadedPlan(NamedTuple):
    """A plan from a file.

    Attributes:
        plan: for ``DistributedModelParallel``.
        compression: spec of each tensor train in it, for `TTEmbeddingBagCollectionSharder`.
    """

    plan: ShardingPlan
    compression: dict[str, TTSpec]


def save_plan(
    path: str | os.PathLike[str],
    plan: ShardingPlan,
    module: nn.Module,
    compression: Mapping[str, TTSpec],
    *,
    world_size: int,
    local_world_size: int | None = None,
) -> None:
    """Writes a plan. One rank is enough.

    Args:
        path: of the file; folders are made, an older file is replaced in one step.
        plan: by a planner or by hand.
        module: the model before it is sharded, whose table sizes are kept.
        compression: spec of each table that is a tensor train; may have others, as an `AutoCompression` does.
        world_size: ranks of the plan.
        local_world_size: ranks of a host, ``world_size`` if not given.

    Raises:
        ValueError: naming the table, if the model has no such table or its entry has cache or key-value parameters,
            which are no part of the file.
    """
    modules = {}
    for module_path, entries in _modules(plan):
        sizes = _table_sizes(module, module_path, entries)
        modules[module_path] = {
            name: _to_json(name, entry, sizes[name], compression) for name, entry in entries.items()
        }
    content = {
        "format": "flowtt_torchrec sharding plan",
        "version": VERSION,
        "world_size": world_size,
        "local_world_size": local_world_size or world_size,
        "modules": modules,
    }
    write_atomically(Path(path), json.dumps(content, indent=1, default=operator.index) + "\n")


def load_plan(
    path: str | os.PathLike[str],
    module: nn.Module,
    *,
    world_size: int,
    local_world_size: int | None = None,
    device: str = "cpu",
) -> LoadedPlan:
    """Reads a plan that `save_plan` wrote, for a model of the same tables.

    Args:
        path: of the file.
        module: the model before it is sharded.
        world_size: ranks of this job.
        local_world_size: ranks of a host, ``world_size`` if not given.
        device: ``"cpu"`` or ``"cuda"``, where the tables are to be.

    Raises:
        OSError: if the file cannot be read.
        ValueError: naming the file, and the table where the plan does not go with the model or with the ranks.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a plan: {error}") from None
    if not isinstance(content, dict) or content.get("version") != VERSION or "modules" not in content:
        raise ValueError(f"{path} is not a plan of version {VERSION} that flowtt_torchrec.distributed.save_plan wrote")
    local = local_world_size or world_size
    try:
        _check_ranks(content, world_size, local)
        compression: dict[str, TTSpec] = {}
        plan = {}
        for module_path, entries in content["modules"].items():
            sizes = _table_sizes(module, module_path, entries)
            missing = sizes.keys() - entries.keys()
            if missing:
                raise ValueError(f"{name_tables(sorted(missing))} of {module_path!r} is in the model, not in the plan")
            plan[module_path] = EmbeddingModuleShardingPlan()
            for name, entry in entries.items():
                if (spec := _spec(name, entry, sizes[name])) is not None:
                    compression[name] = spec
                plan[module_path][name] = _from_json(name, entry, world_size, local, device)
    except KeyError as error:
        raise ValueError(f"{path}: an entry has no {error}; write the file with save_plan") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return LoadedPlan(ShardingPlan(cast(Any, plan)), compression)


def _modules(plan: ShardingPlan) -> Iterable[tuple[str, EmbeddingModuleShardingPlan]]:
    return ((path, cast(EmbeddingModuleShardingPlan, entries)) for path, entries in plan.plan.items())


def _table_sizes(module: nn.Module, path: str, entries: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Rows and columns of the tables of a submodule, which must have all tables of the plan's entries."""
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        raise ValueError(f"{name_tables(entries)}: the model has no module {path!r}, where the plan has them") from None
    sizes = {name: (p.shape[0], p.shape[1]) for name, p in table_parameters(owner).items()}
    for name in entries:
        if name not in sizes:
            hint = did_you_mean(name, sizes)
            raise ValueError(f"the plan has table {name!r}, which {path!r} of the model hasn't{hint}")
    return sizes


def _to_json(
    name: str, entry: ParameterSharding, size: tuple[int, int], compression: Mapping[str, TTSpec]
) -> dict[str, Any]:
    for field in _NOT_SAVED:
        if getattr(entry, field) is not None:
            raise ValueError(f"table {name!r} has {field}, which a plan file does not keep; set it with constraints")
    result: dict[str, Any] = {
        "num_embeddings": size[0],
        "embedding_dim": size[1],
        "sharding_type": entry.sharding_type,
        "compute_kernel": entry.compute_kernel,
        "ranks": entry.ranks,
    }
    if isinstance(entry.sharding_spec, EnumerableShardingSpec):
        result["shards"] = [
            {"offset": list(s.shard_offsets), "size": list(s.shard_sizes), "rank": _rank(s)}
            for s in entry.sharding_spec.shards
        ]
    for field in _OPTIONS:
        value = getattr(entry, field)
        if value is not None:
            result[field] = value.name if isinstance(value, BoundsCheckMode) else getattr(value, "value", value)
    if entry.compute_kernel == CUSTOMIZED_KERNEL:
        if name not in compression:
            raise ValueError(f"table {name!r} is a tensor train in the plan, but the compression has no spec for it")
        result["tensor_train"] = compression[name].to_dict()
    return result


def _rank(shard: ShardMetadata) -> int:
    rank = None if shard.placement is None else shard.placement.rank()
    if rank is None:
        raise ValueError("a shard has no rank")
    return rank


def _from_json(name: str, entry: Mapping[str, Any], world_size: int, local: int, device: str) -> ParameterSharding:
    for field, known in (("sharding_type", _TYPES), ("compute_kernel", _KERNELS)):
        if entry[field] not in known:
            raise ValueError(f"table {name!r} has {field} {entry[field]!r}; known: {', '.join(sorted(known))}")
    shards = entry.get("shards")
    if shards is None and entry["sharding_type"] != DATA_PARALLEL:
        raise ValueError(f"table {name!r} is {entry['sharding_type']} and has no shards")
    if shards is not None:
        covered = sum(shard["size"][0] * shard["size"][1] for shard in shards)
        if covered != entry["num_embeddings"] * entry["embedding_dim"]:
            raise ValueError(f"table {name!r}: its shards have {covered:,} numbers, which is not the whole table")
    for rank in [*(entry["ranks"] or []), *(shard["rank"] for shard in shards or [])]:
        if not 0 <= rank < world_size:
            raise ValueError(f"table {name!r} is on rank {rank}; there are ranks 0 to {world_size - 1}")
    spec = shards and EnumerableShardingSpec(
        [
            ShardMetadata(
                shard_offsets=shard["offset"],
                shard_sizes=shard["size"],
                placement=placement(device, shard["rank"], local),
            )
            for shard in shards
        ]
    )
    options = {field: read(entry[field]) for field, read in _OPTIONS.items() if field in entry}
    return ParameterSharding(
        sharding_type=entry["sharding_type"],
        compute_kernel=entry["compute_kernel"],
        ranks=entry["ranks"],
        sharding_spec=spec,
        **options,
    )


def _spec(name: str, entry: Mapping[str, Any], size: tuple[int, int]) -> TTSpec | None:
    planned = (entry["num_embeddings"], entry["embedding_dim"])
    if planned != size:
        raise ValueError(
            f"table {name!r} is {planned[0]:,} x {planned[1]} in the plan and {size[0]:,} x {size[1]} in the model; "
            "plan anew"
        )
    if entry["compute_kernel"] != CUSTOMIZED_KERNEL:
        return None
    if "tensor_train" not in entry:
        raise ValueError(f"table {name!r} has the kernel {CUSTOMIZED_KERNEL!r} and no 'tensor_train' with its shape")
    spec = TTSpec.from_dict(entry["tensor_train"])
    spec.check_table(name, *size)
    return spec


def _check_ranks(content: Mapping[str, Any], world_size: int, local_world_size: int) -> None:
    every = [(name, entry) for entries in content["modules"].values() for name, entry in entries.items()]
    if content["world_size"] != world_size and every:
        name, entry = every[0]
        raise ValueError(
            f"the plan is for {content['world_size']} ranks, this job has {world_size}: table {name!r} is "
            f"{entry['sharding_type']} on ranks {entry['ranks']}; plan anew"
        )
    by_host = [name for name, entry in every if entry["sharding_type"] in HOST_TYPES]
    if by_host and content["local_world_size"] != local_world_size:
        raise ValueError(
            f"the plan is for hosts of {content['local_world_size']} ranks, these have {local_world_size}: "
            f"{name_tables(by_host)} {'is' if len(by_host) == 1 else 'are'} on the ranks of one host; plan anew"
        )
