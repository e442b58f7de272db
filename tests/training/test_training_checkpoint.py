from __future__ import annotations

import multiprocessing
import os
import random
import re
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flowtt_torchrec.training.checkpoint import Checkpoints
from flowtt_torchrec.training.errors import CheckpointError


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep=2)


def _tensors(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"weight": torch.full((4,), value)}}


def test_what_is_saved_is_loaded(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(7, _tensors(3.0), {"epoch": 1})
    assert path.name == "step-000000000007"
    read = _tensors(0.0)
    checkpoints.load(7, read)
    assert torch.equal(read["model"]["weight"], torch.full((4,), 3.0))
    assert checkpoints.read_state(7) == {"epoch": 1}


def test_there_may_be_none(checkpoints: Checkpoints) -> None:
    assert checkpoints.steps() == []
    assert checkpoints.remove_all() == 0


def test_the_latest_are_kept(checkpoints: Checkpoints) -> None:
    for step in (1, 2, 10):
        checkpoints.save(step, _tensors(step), {})
    assert checkpoints.steps() == [2, 10]
    assert sorted(os.listdir(checkpoints.directory)) == ["step-000000000002", "step-000000000010"]
    assert checkpoints.remove_all() == 2
    assert os.listdir(checkpoints.directory) == []


def test_one_that_is_spared_stays_beside_the_latest(checkpoints: Checkpoints) -> None:
    for step in (1, 2, 3, 4):
        checkpoints.save(step, _tensors(step), {}, spare=1)
    assert checkpoints.steps() == [1, 3, 4]
    checkpoints.save(5, _tensors(5), {}, spare=3)
    assert checkpoints.steps() == [3, 4, 5]


def test_half_written_ones_are_ignored_and_removed(checkpoints: Checkpoints) -> None:
    checkpoints.save(1, _tensors(1.0), {})
    for name in (".writing-step-000000000002", ".removing-step-000000000000"):
        (checkpoints.directory / name).mkdir()
        (checkpoints.directory / name / "state.json").write_text("{}")
    (checkpoints.directory / "step-000000000003").mkdir()  # a copy that was cut short: it has no state.json
    assert checkpoints.steps() == [1]
    checkpoints.save(4, _tensors(4.0), {})
    assert checkpoints.steps() == [1, 4]
    assert not list(checkpoints.directory.glob(".*"))


def test_a_step_can_be_saved_again(checkpoints: Checkpoints) -> None:
    checkpoints.save(1, _tensors(1.0), {"n": 1})
    checkpoints.save(1, _tensors(2.0), {"n": 2})
    read = _tensors(0.0)
    checkpoints.load(1, read)
    assert (read["model"]["weight"][0], checkpoints.read_state(1)) == (2.0, {"n": 2})


def test_a_missing_tensor_is_told(checkpoints: Checkpoints) -> None:
    checkpoints.save(1, _tensors(1.0), {})
    with pytest.raises(CheckpointError, match=r"cannot read the checkpoint .*step-000000000001: .*model.bias"):
        checkpoints.load(1, {"model": {"bias": torch.zeros(1)}})


def test_damaged_state_is_told(checkpoints: Checkpoints) -> None:
    (checkpoints.save(1, _tensors(1.0), {}) / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"step-000000000001 is damaged: state.json"):
        checkpoints.read_state(1)


def test_failing_to_write_leaves_the_last_one(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.save(1, _tensors(1.0), {})

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*step-000000000002: .*no space left"):
        checkpoints.save(2, _tensors(2.0), {})
    assert checkpoints.steps() == [1]


def _save_for_ever(directory: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    checkpoints = Checkpoints(directory, keep=2)
    step = 0
    while True:
        step += 1
        checkpoints.save(step, _tensors(step), {"step": step})


def test_a_kill_at_any_moment_leaves_a_whole_one(checkpoints: Checkpoints) -> None:
    for attempt in range(4):
        writer = multiprocessing.get_context("forkserver").Process(
            target=_save_for_ever, args=(str(checkpoints.directory),), daemon=True
        )
        writer.start()
        while not (checkpoints.steps() and checkpoints.steps()[-1] >= 3):
            assert writer.is_alive()
            time.sleep(0.01)
        time.sleep(0.003 * attempt)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        last = checkpoints.steps()[-1]
        read = _tensors(0.0)
        checkpoints.load(last, read)
        assert read["model"]["weight"][0] == last
        assert checkpoints.read_state(last) == {"step": last}
        checkpoints.remove_all()


def _flip_a_bit(path: Path, seed: int) -> None:
    content = bytearray(path.read_bytes())
    place = random.Random(seed).randrange(8 * len(content))
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "state.json"])
def test_a_flipped_bit_is_told(checkpoints: Checkpoints, name: str) -> None:
    path = checkpoints.save(1, _tensors(1.0), {"position": {"rows": 1000}}) / name
    whole = path.read_bytes()
    for seed in range(8):
        path.write_bytes(whole)
        _flip_a_bit(path, seed)
        with pytest.raises(CheckpointError, match=rf"step-000000000001 is damaged: {re.escape(name)}: .*Remove it"):
            checkpoints.load(1, _tensors(0.0))
    path.write_bytes(whole)
    checkpoints.load(1, _tensors(0.0))
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}: .*No such file"):
        checkpoints.load(1, _tensors(0.0))


def test_checkpoints_of_before_there_were_checksums_are_read(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(1, _tensors(1.0), {"epoch": 1}) / "state.json"
    path.write_text('{"epoch": 1}')
    checkpoints.load(1, _tensors(0.0))
    assert checkpoints.read_state(1) == {"epoch": 1}


def test_a_full_disk_is_told_as_such(checkpoints: Checkpoints) -> None:
    """A limit on the size of files, which torch's writer reports as little as a full disk."""
    checkpoints.save(1, _tensors(1.0), {})
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*step-000000000002: .*no space left.* MB are free"):
            checkpoints.save(2, {"model": {"weight": torch.zeros(1 << 16)}}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert os.listdir(checkpoints.directory) == ["step-000000000001"]
