"""A trained model whose tables change: added, renamed, or with more rows than they had."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchrec.optim
from ranks import Ranks
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.keyed import CombinedOptimizer
from twins import Table, all_optimizers, cores_of, full_state, make_batch, shard

from flowtt_torchrec.cores import to_dense
from flowtt_torchrec.distributed import checkpoint
from flowtt_torchrec.spec import TTSpec

SPEC = TTSpec(90, 16, (5, 5, 4), (2, 4, 2), (3, 5))
BEFORE = [Table(name, 90, 16, (f"f{i}",), 0, SPEC) for i, name in enumerate(("kept", "old_name"))]
OTHERS = [Table(name, 90, 16, (f"f{i}",), 0, SPEC) for i, name in enumerate(("kept", "new_name", "added"))]
GROWN = [
    dataclasses.replace(BEFORE[0], rows=130, spec=SPEC.with_rows(130)),
    dataclasses.replace(BEFORE[1], rows=100, spec=SPEC.with_rows(100)),  # within what the cores hold already
]
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"lr": 0.05, "eps": 1e-3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-3}),
    "rowwise adagrad": (torchrec.optim.RowWiseAdagrad, {"lr": 0.05, "eps": 1e-3}),
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
}


def build(
    tables: Sequence[Table], place: Any, kind: str, data_type: DataType = DataType.FP32
) -> tuple[DistributedModelParallel, CombinedOptimizer, dict[str, Any]]:
    """A model with all tables in one place, trained for no step; the state that it loads into."""
    tables = [dataclasses.replace(table, place=place, data_type=data_type) for table in tables]
    optimizer, kwargs = OPTIMIZERS[kind]
    model = shard(tables, dist.get_world_size(), (optimizer, kwargs))
    dense = torch.optim.Adagrad if kind == "rowwise adagrad" else optimizer
    optimizers = all_optimizers(model, lambda parameters: dense(parameters, **kwargs))
    for _, of_some in optimizers.optimizers:
        if hasattr(of_some, "init_state"):
            of_some.init_state()
    return model, optimizers, {"model": model.state_dict(), "optimizer": optimizers.state_dict()}


def train(model: DistributedModelParallel, optimizers: CombinedOptimizer, tables: Sequence[Table], steps: int) -> None:
    for step in range(steps):
        features, targets = make_batch(tables, 6, 10 * step + dist.get_rank())
        optimizers.zero_grad()
        (model(features)[0] - targets).square().mean().backward()
        optimizers.step()


def table_state(optimizers: CombinedOptimizer, table: str) -> dict[str, Tensor]:
    """Optimizer state of a table's cores, by the end of its names."""
    return {
        f"{name.rpartition('.')[2]}.{key.rpartition('.')[2]}": value.detach().clone()
        for name, state in optimizers.state_dict()["state"].items()
        if f"embedding_bags.{table}." in name
        for key, value in state.items()
    }


def without_over(state: dict[str, Any]) -> dict[str, Any]:
    """Without the dense layers, whose sizes depend on the tables."""
    return {
        "model": {name: value for name, value in state["model"].items() if "over" not in name},
        "optimizer": {
            "state": {name: value for name, value in state["optimizer"]["state"].items() if "over" not in name}
        },
    }


def added_and_renamed(
    rank: int, world_size: int, folder: Path, place: Any, kind: str, data_type: DataType = DataType.FP32
) -> None:
    model, optimizers, _ = build(BEFORE, place, kind, data_type)
    train(model, optimizers, BEFORE, 3)
    before = full_state(model, BEFORE)
    dcp.save({"model": model.state_dict(), "optimizer": optimizers.state_dict()}, checkpoint_id=folder)

    model, optimizers, state = build(OTHERS, place, kind, data_type)
    fresh, state = full_state(model, OTHERS), without_over(state)
    checkpoint.load(state, folder, allow_missing=["added", "new_name", "kept"])
    loaded = full_state(model, OTHERS)
    for name, value in loaded.items():
        assert torch.equal(value, before[name] if name.startswith("kept.") else fresh[name]), name
    train(model, optimizers, OTHERS, 2)
    for name, value in full_state(model, OTHERS).items():
        assert not torch.equal(value, loaded[name]), f"{name} does not train"
    if kind == "adam" or data_type != DataType.FP32:
        at_start = int(place == "dp")  # of a dense optimizer: the step that makes its state
        for table, steps in (("kept", 3 + 2), ("new_name", 2), ("added", 2)):
            found = [int(value) for name, value in table_state(optimizers, table).items() if name.endswith(".step")]
            assert found == [at_start + steps] * (3 if model.module.ebc.tt_cores().get(table) else 0), (table, found)


@pytest.mark.parametrize(
    ("place", "kind", "data_type"),
    [
        (0, "adam", DataType.FP32),
        (0, "rowwise adagrad", DataType.BF16),
        ("rw", "adam", DataType.FP32),
        ((1, 0), "sgd", DataType.FP16),
        ("dp", "adam", DataType.FP32),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_tables_that_are_added_or_renamed_train(
    one_rank: Callable[..., Any],
    two_ranks: Ranks,
    tmp_path: Path,
    world_size: int,
    place: Any,
    kind: str,
    data_type: DataType,
) -> None:
    """Beside a table that has made more steps, in one kernel."""
    run = one_rank if world_size == 1 else two_ranks.run
    run(added_and_renamed, tmp_path / "saved", place, kind, data_type)


def saved_before(rank: int, world_size: int, folder: Path, kind: str) -> None:
    model, optimizers, _ = build(BEFORE, 0, kind)
    train(model, optimizers, BEFORE, 2)
    dcp.save({"model": model.state_dict(), "optimizer": optimizers.state_dict()}, checkpoint_id=folder)


def refused(rank: int, world_size: int, folder: Path) -> None:
    """On all ranks alike, before anything is read."""
    state = without_over(build(OTHERS, world_size - 1, "adam")[2])
    for allowed, message in (
        ((), r"no tables 'added', 'new_name'; with allow_missing=\['added', 'new_name'\] what is new stays"),
        (("added",), r"no table 'new_name'; with .*; did you mean 'old_name'\?"),
        (("aded",), r"allow_missing names a table 'aded', which the model does not have; did you mean 'added'\?"),
    ):
        with pytest.raises(ValueError, match=message):
            checkpoint.load(state, folder, allow_missing=allowed)


def test_missing_tables_are_an_error_unless_they_are_named(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(saved_before, tmp_path / "saved", "adam")
    two_ranks.run(refused, tmp_path / "saved")


def grown(rank: int, world_size: int, folder: Path, source: Any, target: Any, kind: str) -> None:
    model, optimizers, _ = build(BEFORE, source, kind)
    train(model, optimizers, BEFORE, 3)
    before = full_state(model, BEFORE)
    old_rows = {table.name: to_dense(cores_of(table, before), table.rows) for table in BEFORE}
    old_state = {table.name: table_state(optimizers, table.name) for table in BEFORE}
    dcp.save({"model": model.state_dict(), "optimizer": optimizers.state_dict()}, checkpoint_id=folder)

    model, optimizers, state = build(GROWN, target, kind)
    fresh = full_state(model, GROWN)
    checkpoint.load(without_over(state), folder)
    loaded = full_state(model, GROWN)
    for table in GROWN:
        rows = to_dense(cores_of(table, loaded), table.rows)
        assert torch.equal(rows[:90], old_rows[table.name])
        assert torch.equal(loaded[f"{table.name}.tt_core0"][5:], fresh[f"{table.name}.tt_core0"][5:])
    if source == target:
        for table in GROWN:
            for name, value in table_state(optimizers, table.name).items():
                was = old_state[table.name][name]
                if value.dim() == 0:
                    assert torch.equal(value, was)
                    continue
                assert torch.equal(value[: len(was)], was)
                assert not value[len(was) :].any()
    train(model, optimizers, GROWN, 2)
    for name, value in full_state(model, GROWN).items():
        assert not torch.equal(value, loaded[name]), f"{name} does not train"


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [(0, 0, "adam"), (0, "dp", "adagrad"), ("dp", "rw", "adagrad"), ("rw", (1, 0), "rowwise adagrad"), (0, 1, "sgd")],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_table_that_has_grown_keeps_its_rows(
    one_rank: Callable[..., Any], two_ranks: Ranks, tmp_path: Path, world_size: int, source: Any, target: Any, kind: str
) -> None:
    run = one_rank if world_size == 1 else two_ranks.run
    run(grown, tmp_path / "saved", source, target, kind)


def test_growing_is_told_and_other_changes_are_refused(
    one_rank: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one_rank(saved_before, tmp_path / "saved", "sgd")

    def load(rank: int, world_size: int, spec: TTSpec) -> None:
        table = dataclasses.replace(BEFORE[0], rows=spec.num_embeddings, spec=spec)
        checkpoint.load(without_over(build([table], 0, "sgd")[2]), tmp_path / "saved")

    with caplog.at_level(logging.WARNING):
        one_rank(load, SPEC.with_rows(130))
    assert "table 'kept' has 90 rows in the checkpoint, 130 here: the last are new" in caplog.text
    for spec in (TTSpec(85, *dataclasses.astuple(SPEC)[1:]), TTSpec(130, 16, (5, 7, 4), (2, 4, 2), (3, 5))):
        with pytest.raises(ValueError, match=r"table 'kept' does not match the checkpoint: saved are .* 90 rows"):
            one_rank(load, spec)
