"""What the kernels must know of the TT tables of one collection, and the checks that a table's config passes first."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType

from flowtt_torchrec.cores import default_std
from flowtt_torchrec.spec import TTSpec

_DATA_TYPES = (DataType.FP32, DataType.FP16, DataType.BF16)


@dataclass(frozen=True)
class TTTable:
    """Shape of a table, and the standard deviation that its rows start with."""

    spec: TTSpec
    init_std: float


class TTTables:
    """The TT tables of one collection.

    TorchRec groups tables into one kernel if their fused parameters are equal, and hashes these for every table. So all
    tables of a collection carry this one object, equal to itself only.

    Args:
        tables: by name.
        seed: of the initial cores, together with the table's name.
        keep_forward_weights: as for `BatchedTTEmbeddingBags`, for all kernels.
    """

    def __init__(self, tables: Mapping[str, TTTable], seed: int, keep_forward_weights: bool = False) -> None:
        self._tables = dict(tables)
        self.seed = seed
        self.keep_forward_weights = keep_forward_weights

    def __getitem__(self, name: str) -> TTTable:
        return self._tables[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tables

    def __deepcopy__(self, memo: dict[int, Any]) -> TTTables:
        return self  # never changed, and equal to itself only

    def __repr__(self) -> str:
        return f"TTTables({', '.join(self._tables)})"


def check_config(config: EmbeddingBagConfig, spec: TTSpec) -> TTTable:
    """The table that a config and a spec describe together.

    Raises:
        ValueError: naming the table, if the spec is of another size or the config asks for what TT tables don't have.
    """
    name = config.name
    spec.check_table(name, config.num_embeddings, config.embedding_dim)
    if config.data_type not in _DATA_TYPES:
        supported = ", ".join(data_type.value for data_type in _DATA_TYPES)
        raise ValueError(f"table {name!r} has data_type {config.data_type.value}; TT tables support {supported}")
    if config.pooling not in (PoolingType.SUM, PoolingType.MEAN):
        raise ValueError(f"table {name!r} has pooling {config.pooling.value}; TT tables support SUM and MEAN")
    if config.use_virtual_table:
        raise ValueError(f"table {name!r} is a virtual table, which cannot be a tensor train; take out its TTSpec")
    if config.num_embeddings_post_pruning is not None:
        raise ValueError(f"table {name!r} is pruned, which a tensor train cannot be; take out its TTSpec")
    return TTTable(spec, _init_std(config))


def table_parameters(collection: nn.Module) -> dict[str, nn.Parameter]:
    """The weight of each table of a collection that is not sharded yet, by the table's name."""
    parameters = {}
    for key, parameter in collection.named_parameters():
        table, _, kind = key.rpartition(".")
        if kind == "weight" and parameter.dim() == 2:
            parameters[table.rpartition(".")[2]] = parameter
    return parameters


def check_same_on_ranks(mine: Mapping[str, str], process_group: dist.ProcessGroup | None) -> None:
    """Raises ``ValueError`` on all ranks if they do not agree on a table. All ranks call it together.

    Args:
        mine: what this rank is to make of each table.
        process_group: all ranks that shard the collection.
    """
    if process_group is None or dist.get_world_size(process_group) == 1:
        return
    every: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(every, dict(mine), group=process_group)
    for rank, theirs in enumerate(every):
        for name in sorted({*every[0], *theirs}):
            if theirs.get(name) != every[0].get(name):
                first, other = every[0].get(name, "missing"), theirs.get(name, "missing")
                raise ValueError(
                    f"table {name!r} is {first} on rank 0, but {other} on rank {rank}; give all ranks the same model, "
                    "compression and plan"
                )


def _init_std(config: EmbeddingBagConfig) -> float:
    """Standard deviation of the config's initial weights."""
    init = config.init_fn
    if not isinstance(init, functools.partial) or init.args or init.func not in _STDS:
        raise ValueError(
            f"table {config.name!r} has an init_fn of its own; cores are drawn from a distribution of mean 0, so use "
            "weight_init_min and weight_init_max, or functools.partial of torch.nn.init.uniform_ or normal_. To start "
            "from a dense table load the cores that flowtt_torchrec.cores.from_dense makes of it"
        )
    mean, std = _STDS[init.func](**init.keywords)
    if not math.isclose(mean, 0.0, abs_tol=1e-12) or not std > 0:
        raise ValueError(
            f"table {config.name!r} asks for initial weights of mean {mean:g} and standard deviation {std:g}; cores "
            "can have mean 0 and a positive deviation only, so use weight_init_min = -weight_init_max < 0"
        )
    # TorchRec's own default gets the very value that every other TT module starts with
    default = default_std(config.num_embeddings)
    return default if math.isclose(std, default, rel_tol=1e-9) else std


def _uniform(a: float = 0.0, b: float = 1.0, **_: Any) -> tuple[float, float]:
    return (a + b) / 2, (b - a) / math.sqrt(12)


def _normal(mean: float = 0.0, std: float = 1.0, **_: Any) -> tuple[float, float]:
    return mean, std


_STDS = {torch.nn.init.uniform_: _uniform, torch.nn.init.normal_: _normal}


def name_tables(names: Iterable[str], most: int = 5) -> str:
    """Table names for an error message."""
    names = list(names)
    listed = ", ".join(repr(name) for name in names[:most])
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"table{'s' if len(names) > 1 else ''} {listed}{more}"
