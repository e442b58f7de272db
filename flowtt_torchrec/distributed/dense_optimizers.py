"""Dense optimizers that cannot step the cores of data-parallel tables, refused before they change anything."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from flowtt_torchrec.distributed.tables import name_tables

_table_of_core: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def watch_dense_optimizers(cores: Mapping[str, Iterable[nn.Parameter]]) -> None:
    """Has ``step()`` of an optimizer that cannot step these cores, by table, say so with the tables' names."""
    _register()
    for table, of_table in cores.items():
        for core in of_table:
            _table_of_core[core] = table


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not isinstance(optimizer, RowWiseAdagrad):
        return
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    tables = dict.fromkeys(_table_of_core[p] for p in parameters if p in _table_of_core)
    if tables:
        raise ValueError(
            f"{name_tables(tables)}: torchrec's RowWiseAdagrad cannot step the cores of data-parallel tables, since a "
            "dense one takes matrices only. Step them with torch.optim.Adagrad, or constrain these tables to "
            "other sharding types, where apply_optimizer_in_backward takes RowWiseAdagrad"
        )
