"""What a checkpoint holds, and whether a run may continue from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from flowtt_torchrec.datasets import ClickDataset
from flowtt_torchrec.spec import TTSpec
from flowtt_torchrec.training.best import best_evaluation
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
    "data.shuffle",
    "data.num_tables",
    "data.seed",
    "data.generate",
    "model",
    "optimizer.kind",
    "optimizer.dense_kind",
    "training.limit_train_batches",
    "training.drop_last_training_batch",
    "training.seed",
)
_ABSENT = object()
_PARTS = {
    "position": dict,
    "history": dict,
    "world_size": int,
    "config": dict,
    "specs": dict,
    "plan": list,
}

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
        data: identity of the data that is trained and evaluated on.
    """

    def __init__(
        self,
        config: TrainConfig,
        runtime: Runtime,
        model: DistributedModelParallel,
        optimizer: CombinedOptimizer,
        specs: Mapping[str, TTSpec],
        planned: Sequence[PlannedTable],
        data: Mapping[str, Any],
    ) -> None:
        self._config, self._runtime = config, runtime
        self._model, self._optimizer = model, optimizer
        self._specs, self._planned, self._data = specs, planned, data

    def save(self, checkpoints: Checkpoints, position: Position, history: History) -> Path:
        """Writes a checkpoint. All ranks call it together."""
        state = {
            "format": FORMAT,
            "position": asdict(position),
            "history": asdict(history),
            "world_size": self._runtime.world_size,
            "config": asdict(self._config),
            "data": dict(self._data),
            "specs": {name: spec.to_dict() for name, spec in self._specs.items()},
            "plan": [table.to_dict() for table in self._planned],
            "versions": versions(),
        }
        best = best_evaluation(history.evaluation)
        spare = None if best is None else best["step"]
        return checkpoints.save(position.step, self._tensors(self._runtime.world_size), state, spare)

    def load(self, checkpoints: Checkpoints, saved: SavedRun) -> None:
        """Makes the model, the optimizer and the random numbers what they were. All ranks call it together.

        Raises:
            CheckpointError: the checkpoint is damaged, or has other tables than this run.
        """
        check_specs(str(saved.path), saved.specs, self._specs)
        check_data_types(str(saved.path), saved.plan, self._planned)
        self._make_dense_state()
        tensors = self._tensors(saved.world_size)
        checkpoints.load(saved.position.step, tensors)
        self._model.load_state_dict(tensors["model"])
        self._optimizer.load_state_dict(tensors["optimizer"])
        if "random" in tensors:
            torch.set_rng_state(tensors["random"][f"rank{self._runtime.rank}"])

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


@dataclass(frozen=True)
class SavedRun:
    """What a checkpoint says of the run that wrote it, beside its tensors.

    Args:
        path: of the checkpoint.
        position: how far the run was.
        history: what it had measured.
        world_size: its number of ranks.
        config: its settings.
        specs: of its tensor trains, as `TTSpec.to_dict`, by table.
        plan: its tables, as `PlannedTable.to_dict`.
        data: identity of its data; None in a checkpoint of an older version.
    """

    path: Path
    position: Position
    history: History
    world_size: int
    config: Mapping[str, Any]
    specs: Mapping[str, Any]
    plan: Sequence[Mapping[str, Any]]
    data: Mapping[str, Any] | None

    @classmethod
    def read(cls, checkpoints: Checkpoints, step: int) -> SavedRun:
        """Reads it from a checkpoint.

        Raises:
            CheckpointError: the checkpoint is damaged, or of another format.
        """
        path, state = checkpoints.path(step), checkpoints.read_state(step)
        if "format" in state and state["format"] != FORMAT:
            raise CheckpointError(f"the checkpoint {path} has format {state['format']}; this version reads {FORMAT}")
        for part, kind in {"format": int, **_PARTS}.items():
            if not isinstance(state.get(part), kind):
                raise checkpoints.damaged(step, f"it has no {part!r}")
        try:
            parts = {part: state[part] for part in _PARTS}
            parts |= {"position": Position(**state["position"]), "history": History(**state["history"])}
            saved = cls(path=path, data=state.get("data"), **parts)
            saved.sharding_types()
            for spec in saved.specs.values():
                TTSpec.from_dict(spec)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise checkpoints.damaged(step, f"{type(error).__name__}: {error}") from None
        return saved

    def sharding_types(self) -> dict[str, str]:
        """TorchRec's sharding type of each table."""
        return {table["name"]: table["sharding_type"] for table in self.plan}

    def check(self, config: TrainConfig, train_data: ClickDataset) -> str | None:
        """Whether a run may continue this one, as far as it is known before there is a plan; returns what to say.

        Args:
            config: settings of the run that continues.
            train_data: its rows.

        Raises:
            CheckpointError: it may not.
        """
        check_settings(str(self.path), self.config, asdict(config))
        note = self._check_data(train_data.identity(), config.checkpoint.accept_other_data)
        position = self.position
        if position.epoch >= config.training.epochs:
            part = "all" if position.epoch_finished else f"{position.rows:,} rows"
            raise CheckpointError(
                f"the checkpoint {self.path} has been trained on {part} of epoch {position.epoch + 1}, but "
                f"training.epochs is {config.training.epochs}; set it to at least {position.epoch + 1}"
            )
        drop_last = config.training.drop_last_training_batch
        if not position.epoch_finished and train_data.batches_in(position.rows, drop_last) is None:
            sharding = train_data.sharding
            raise CheckpointError(
                f"the checkpoint {self.path} was written after {position.rows:,} rows of an epoch, where no batch of "
                f"{sharding.world_size} ranks x batch_size {sharding.batch_size} ends; continue with "
                f"{self.world_size} ranks and batch_size {_lookup(self.config, 'training.batch_size')}"
            )
        return note

    def _check_data(self, now: Mapping[str, Any], accept: bool) -> str | None:
        if self.data is None:
            return "the checkpoint does not say which data it was trained on: nothing was compared" if now else None
        if self.data == now:
            return None
        what = _first_difference(self.data, now)
        if accept:
            return f"continuing with other data, as checkpoint.accept_other_data allows: {what}"
        raise CheckpointError(
            f"the checkpoint {self.path} was trained on other data: {what}; give the same files, or set "
            "checkpoint.accept_other_data=true to continue at the same row of the others"
        )


def _first_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first file that is not what it was."""
    for kind in sorted({*before, *now}):
        old, new = before.get(kind) or [], now.get(kind) or []
        for number, (was, is_now) in enumerate(zip_longest(old, new), start=1):
            if was != is_now:
                return f"{kind} file {number} was {_show_file(was)}, now it is {_show_file(is_now)}"
    return "the kind of data"


def _show_file(file: Mapping[str, Any] | None) -> str:
    if file is None:
        return "not there"
    return f"{file.get('name')} of {file.get('bytes', 0):,} bytes ({str(file.get('sha256_of_ends'))[:8]})"


def check_settings(path: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` if a setting that a run must keep is not what it was."""
    for key in _FIXED:
        before, after = _lookup(saved, key), _lookup(now, key)
        if before is _ABSENT:  # a setting that there was not yet
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            changed = [name for name in after if before.get(name) != after[name] and name not in _OTHERWISE_CHECKED]
            if not changed:
                continue
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
        value = value.get(part, _ABSENT) if isinstance(value, Mapping) else _ABSENT
    return value
