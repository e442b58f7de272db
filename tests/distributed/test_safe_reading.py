"""Checkpoints that somebody else may have written: reading one must not run what is in it."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from flowtt_torchrec import __main__ as command
from flowtt_torchrec.distributed import checkpoint
from flowtt_torchrec.training.checkpoint import Checkpoints
from flowtt_torchrec.training.errors import CheckpointError

WEIGHT = "ebc.embedding_bags.t.weight"


class Hostile:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return exec, (f"open({str(self._path)!r}, 'w').close()",)


@pytest.fixture(autouse=True)
def ran(tmp_path: Path) -> Iterator[Path]:
    """The file that hostile objects make: at the end of each test it must not be there."""
    path = tmp_path / "ran"
    pickle.loads(pickle.dumps(Hostile(path)))
    assert path.exists(), "these objects would do no harm anyhow"
    path.unlink()
    yield path
    assert not path.exists()


@pytest.fixture
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def with_hostile_metadata(folder: Path, ran: Path) -> Path:
    """A good checkpoint whose metadata also runs code."""
    dcp.save({WEIGHT: torch.rand(12, 4)}, checkpoint_id=folder, no_dist=True)
    with open(folder / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    metadata.planner_data = {**metadata.planner_data, "x": Hostile(ran)}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def test_metadata(tmp_path: Path, ran: Path) -> None:
    source = with_hostile_metadata(tmp_path / "saved", ran)
    message = r"no readable \.metadata .*: it names builtins\.exec, .* so it was not loaded"
    for use in (
        lambda: checkpoint.load({WEIGHT: torch.zeros(12, 4)}, source),
        lambda: checkpoint.load({WEIGHT: torch.zeros(12, 4)}, storage_reader=dcp.FileSystemReader(source)),
        lambda: checkpoint.saved_specs(source),
        lambda: checkpoint.saved_dense_tables(source),
        lambda: checkpoint.export_checkpoint(source, tmp_path / "target"),
        lambda: checkpoint.compress_checkpoint(source, tmp_path / "target", {}),
    ):
        with pytest.raises(ValueError, match=message):
            use()
    for harmless in ([], {"storage_data": {}}):
        (source / ".metadata").write_bytes(pickle.dumps(harmless))
        with pytest.raises(ValueError, match=rf"\.metadata .*: it holds a {type(harmless).__name__}"):
            checkpoint.saved_specs(source)


@pytest.mark.usefixtures("_one_rank")
def test_resuming(tmp_path: Path, ran: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with_hostile_metadata(checkpoints.path(3), ran)
    (checkpoints.path(3) / "state.json").write_text("{}")  # no checksums: who changes files can change those too
    with pytest.raises(CheckpointError, match=r"cannot read the checkpoint .*step-0+3: .* names builtins\.exec"):
        checkpoints.load(3, {WEIGHT: torch.zeros(12, 4)})


@pytest.mark.parametrize("arguments", [["export"], ["compress", "--budget", "1kB"]], ids=["export", "compress"])
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_commands(
    tmp_path: Path,
    ran: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    kind: str,
) -> None:
    source = tmp_path / ("saved" if kind == "folder" else "saved.pt")
    if kind == "folder":
        with_hostile_metadata(source, ran)
    else:
        torch.save({WEIGHT: torch.rand(12, 4), "x": Hostile(ran)}, source)
    paths = [str(source), str(tmp_path / "target")]
    monkeypatch.setattr(sys, "argv", ["flowtt", arguments[0], *paths, *arguments[1:]])
    with pytest.raises(SystemExit, match="1"):
        command.main()
    assert re.search(r"it names (builtins\.)?exec, .*might run code", capsys.readouterr().err)
    assert not (tmp_path / "target").exists()


def test_values_that_are_no_tensors(tmp_path: Path, ran: Path) -> None:
    dcp.save({WEIGHT: torch.rand(12, 4), "x": Hostile(ran), "lr": 0.5}, checkpoint_id=tmp_path / "saved", no_dist=True)
    with pytest.raises(CheckpointException, match="x is a Python object that is not safe to load"):
        checkpoint.load({WEIGHT: torch.zeros(12, 4), "x": None}, tmp_path / "saved")
    state: dict[str, Any] = {WEIGHT: torch.zeros(12, 4), "lr": None}
    checkpoint.load(state, tmp_path / "saved")
    assert state["lr"] == 0.5
    assert state[WEIGHT].any()
