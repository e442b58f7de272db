"""TorchRec's DLRM: the model, its optimizers, its shards, its learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.optim import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,  # public in torchrec, private name in torch
)
from torchrec.distributed.embedding_types import ModuleSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from flowtt_torchrec.training.config import ModelConfig, OptimizerConfig

EMBEDDING_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": torch.optim.Adam,
}


def build_dlrm(
    config: ModelConfig, tables: Sequence[EmbeddingBagConfig], num_dense: int, device: torch.device
) -> DLRMTrain:
    """The model, its tables on the meta device: they get memory when they are sharded.

    Args:
        config: the ``model`` section.
        tables: one a feature, all of dimension ``config.embedding_dim``.
        num_dense: number of dense features.
        device: of the dense layers.
    """
    collection = EmbeddingBagCollection(tables=list(tables), device=torch.device("meta"))
    common: dict[str, Any] = {
        "embedding_bag_collection": collection,
        "dense_in_features": num_dense,
        "dense_arch_layer_sizes": config.dense_arch_layer_sizes,
        "over_arch_layer_sizes": config.over_arch_layer_sizes,
        "dense_device": device,
    }
    if config.interaction_type == "dcn":
        return DLRMTrain(
            DLRM_DCN(dcn_num_layers=config.dcn_num_layers, dcn_low_rank_dim=config.dcn_low_rank_dim, **common)
        )
    if config.interaction_type == "projection":
        return DLRMTrain(
            DLRM_Projection(
                interaction_branch1_layer_sizes=config.interaction_branch1_layer_sizes,
                interaction_branch2_layer_sizes=config.interaction_branch2_layer_sizes,
                **common,
            )
        )
    return DLRMTrain(DLRM(**common))


def optimize_tables_in_backward(model: DLRMTrain, config: OptimizerConfig) -> None:
    """Has the tables updated inside their backward (not the data-parallel ones: see `build_optimizer`)."""
    arguments: dict[str, Any] = {"lr": config.learning_rate}
    if config.kind != "sgd":
        arguments["eps"] = config.eps
    apply_optimizer_in_backward(EMBEDDING_OPTIMIZERS[config.kind], model.model.sparse_arch.parameters(), arguments)


def shard(
    model: DLRMTrain, plan: ShardingPlan, sharders: list[ModuleSharder[Any]], device: torch.device
) -> DistributedModelParallel:
    """Gives every rank its shards. All ranks call it together."""
    return DistributedModelParallel(module=model, device=device, plan=plan, sharders=sharders)


def dense_kind(config: OptimizerConfig) -> str:
    """The optimizer of all that is data-parallel."""
    return config.dense_kind or ("adagrad" if config.kind == "rowwise_adagrad" else config.kind)


def dense_learning_rate(config: OptimizerConfig) -> float:
    """Its learning rate."""
    return config.dense_learning_rate or config.learning_rate


def build_optimizer(model: DistributedModelParallel, config: OptimizerConfig) -> CombinedOptimizer:
    """The fused optimizers of the tables, and one for all that is data-parallel: dense layers, replicated tables."""
    kind, lr = dense_kind(config), dense_learning_rate(config)

    def make(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        if kind == "sgd":
            return torch.optim.SGD(parameters, lr=lr)
        dense_class = torch.optim.Adagrad if kind == "adagrad" else torch.optim.Adam
        return dense_class(parameters, lr=lr, eps=config.eps)

    dense = KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(model.named_parameters())), make)
    return CombinedOptimizer([model.fused_optimizer, dense])


class LearningRate:
    """Linear warm-up, a constant, then a quadratic decay to nearly 0, as dlrm_main.py's LRPolicyScheduler.

    The rate is a function of the step alone, so there is nothing to store in a checkpoint.

    Args:
        optimizer: the rates of its groups are scaled.
        config: the ``optimizer`` section.
    """

    _LEAST = 1e-7  # of the decay, as dlrm_main.py

    def __init__(self, optimizer: CombinedOptimizer, config: OptimizerConfig) -> None:
        self._groups = list(optimizer.param_groups)
        self._base = [group["lr"] for group in self._groups]
        self._config = config

    def factor(self, step: int) -> float:
        """Of the rate at ``step``, counted from 0."""
        warmup, start, decay = (
            self._config.lr_warmup_steps,
            self._config.lr_decay_start,
            self._config.lr_decay_steps,
        )
        if step < warmup:
            return (step + 1) / warmup
        if decay and step >= start:
            left = max(start + decay - step, 0) / decay
            return max(left**2, self._LEAST)
        return 1.0

    def set(self, step: int) -> float:
        """Sets the rates for ``step``; returns that of the tables."""
        for group, base in zip(self._groups, self._base, strict=True):
            group["lr"] = base * self.factor(step)
        return self._config.learning_rate * self.factor(step)
