"""What a checkpoint holds, and whether a run may continue from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from flowtt_torchrec.spec import TTSpec
from flowtt_torchrec.training.checkpoint import Checkpoints
from flowtt_torchrec.training.config import OptimizerConfig, TrainConfig
from flowtt_torchrec.training.errors import CheckpointError
from flowtt_torchrec.training.loop import History, Position
from flowtt_torchrec.training.model import dense_kind, dense_learning_rate
from flowtt_torchrec.training.runtime import Runtime
from flowtt_torchrec.training.tables import PlannedTable
from flowtt_torchrec.versions import versions

FORMAT = 1
# Settings that make a model or a sequence of rows what it is. Others (epochs, threads, ...) may change on the way.
_FIXED = (
    "data.kind",
    "data.val_every",
    "data.val_fraction",
    "data.shuffle_rows",
    "data.num_tables",
    "data.seed",
    "data.generate",
    "model",
    "optimizer.kind",
    "optimizer.dense_kind",
    "training.limit_train_batches",
    "training.drop_last_training_batch",
)

_OTHERWISE_CHECKED = ("data_type",)  # table by table; a checkpoint of an older version does not have it


class RunState:
    """The parts of a run that a checkpoint saves and restores.

    Args:
        config: the settings.
        runtime: this process.
        model: the sharded model.
        optimizer: of the whole model.
        specs: of the tensor-train tables.
        planned: all tables.
    """

    def __init__(
        self,
        config: TrainConfig,
        runtime: Runtime,
        model: DistributedModelParallel,
        optimizer: CombinedOptimizer,
        specs: Mapping[str, TTSpec],
        planned: Sequence[PlannedTable],
    ) -> None:
        self._config, self._runtime = config, runtime
        self._model, self._optimizer = model, optimizer
        self._specs, self._planned = specs, planned

    def save(self, checkpoints: Checkpoints, position: Position, history: History) -> None:
        """Writes a checkpoint. All ranks call it together."""
        state = {
            "format": FORMAT,
            "position": asdict(position),
            "history": asdict(history),
            "world_size": self._runtime.world_size,
            "config": asdict(self._config),
            "specs": {name: spec.to_dict() for name, spec in self._specs.items()},
            "plan": [table.to_dict() for table in self._planned],
            "versions": versions(),
        }
        checkpoints.save(position.step, self._tensors(self._runtime.world_size), state)

    def load(self, checkpoints: Checkpoints, step: int) -> tuple[Position, History]:
        """Makes the model, the optimizer and the random numbers what they were. All ranks call it together.

        Raises:
            CheckpointError: the checkpoint is damaged, or of a run that this one does not continue.
        """
        state = checkpoints.read_state(step)
        path = checkpoints.path(step)
        if state.get("format") != FORMAT:
            raise CheckpointError(
                f"the checkpoint {path} has format {state.get('format')}; this version reads {FORMAT}"
            )
        check_settings(str(path), state["config"], asdict(self._config))
        check_specs(str(path), state["specs"], self._specs)
        check_data_types(str(path), state["plan"], self._planned)
        position = Position(**state["position"])
        batch_size = self._config.training.batch_size
        window = batch_size * self._runtime.world_size
        if not position.epoch_finished and position.rows % window:
            raise CheckpointError(
                f"the checkpoint {path} was written after {position.rows:,} rows of an epoch, which is no multiple of "
                f"{self._runtime.world_size} ranks x batch_size {batch_size}; continue with {state['world_size']} "
                f"ranks and batch_size {state['config']['training']['batch_size']}"
            )
        self._make_dense_state()
        tensors = self._tensors(state["world_size"])
        checkpoints.load(step, tensors)
        self._model.load_state_dict(tensors["model"])
        self._optimizer.load_state_dict(tensors["optimizer"])
        if "random" in tensors:
            torch.set_rng_state(tensors["random"][f"rank{self._runtime.rank}"])
        return position, History(**state["history"])

    def _make_dense_state(self) -> None:
        """Makes the state that a dense optimizer has after a step, without which none would be asked for."""
        for _, optimizer in self._optimizer.optimizers:
            if isinstance(optimizer, KeyedOptimizerWrapper):
                optimizer.init_state()  # a step with gradients of zero
                optimizer.zero_grad(set_to_none=True)

    def _tensors(self, saved_world_size: int) -> dict[str, Any]:
        tensors: dict[str, Any] = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        if saved_world_size == self._runtime.world_size:
            tensors["random"] = {f"rank{self._runtime.rank}": torch.get_rng_state()}
        return tensors


def placement_is_free(config: OptimizerConfig) -> bool:
    """Whether tables may go to or from data-parallel when a run continues, and the losses go on as they would.

    Data-parallel tables are stepped by the dense optimizer, others by the fused one. These make the same steps, from
    state that `distributed.checkpoint.load` brings from one to the other, if they are both SGD or both Adagrad with
    the same learning rate. Fused row-wise Adagrad has other state, and fused Adam leaves alone what a batch does not
    look up.
    """
    same = dense_kind(config) == config.kind and dense_learning_rate(config) == config.learning_rate
    return same and config.kind in ("sgd", "adagrad")


def saved_sharding_types(state: Mapping[str, Any]) -> dict[str, str]:
    """TorchRec's sharding type of each table, from a checkpoint's state."""
    return {table["name"]: table["sharding_type"] for table in state["plan"]}


def saved_tensor_trains(state: Mapping[str, Any]) -> set[str]:
    """Names of the tables that were tensor trains, from a checkpoint's state."""
    return set(state["specs"])


def check_settings(path: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` if a setting that a run must keep is not what it was."""
    for key in _FIXED:
        before, after = _lookup(saved, key), _lookup(now, key)
        if isinstance(before, dict) and isinstance(after, dict):
            changed = [name for name in after if before.get(name) != after[name] and name not in _OTHERWISE_CHECKED]
            if changed:
                key, before, after = f"{key}.{changed[0]}", before.get(changed[0]), after[changed[0]]
        if before != after:
            raise CheckpointError(
                f"the checkpoint {path} was written with {key}={before}, now it is {after}; set it back, or start anew "
                "with another checkpoint.directory"
            )


def check_specs(path: str, saved: Mapping[str, Any], now: Mapping[str, TTSpec]) -> None:
    """Raises `CheckpointError` if a table is not the tensor train, or the dense table, that it was."""
    for name in sorted({*saved, *now}):
        before = TTSpec.from_dict(saved[name]) if name in saved else "dense"
        after = now.get(name, "dense")
        if before != after:
            raise CheckpointError(
                f"the checkpoint {path} has table {name!r} as {before}, now it is {after}; set compression.* back, or "
                "start anew with another checkpoint.directory"
            )


def check_data_types(path: str, saved: Sequence[Mapping[str, Any]], now: Sequence[PlannedTable]) -> None:
    """Raises `CheckpointError` if a table's numbers are not of the type that they were."""
    types = {table["name"]: table.get("data_type", "FP32") for table in saved}
    for table in now:
        before = types.get(table.name, table.data_type)
        if before != table.data_type:
            raise CheckpointError(
                f"the checkpoint {path} has table {table.name!r} in {before}, now it is {table.data_type}; set "
                "model.data_type or compression.data_type back, or start anew with another checkpoint.directory"
            )


def _lookup(settings: Mapping[str, Any], key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
