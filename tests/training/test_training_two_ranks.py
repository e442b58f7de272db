"""What is wrong with a job of two ranks: told once, while the other rank neither waits for ever nor adds to it."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from training_jobs import TINY, run_job

from flowtt_torchrec.training.folders import held

pytestmark = pytest.mark.slow  # a dozen jobs

STEPS = 20  # 2 epochs of 480 rows, 2 ranks x 25 rows a step; each ends with a short batch, and `every` with it
SETTINGS = ["training.epochs=2", "checkpoint.directory=checkpoints", "report.directory=report"]
SETTINGS += ["data.generate=null", "data.path=data", "data.val_path=data/day_1", "data.num_embeddings=2000"]
SETTINGS += ["checkpoint.every=5", "training.validation_freq_within_epoch=5", "training.log_every=5"]
SETTINGS += ["checkpoint.keep=9"]


def _rows(path: Path, rows: int, seed: int) -> None:
    rng = random.Random(seed)
    lines = [[rng.randrange(2), *[5] * 13, *(f"{rng.randrange(3000):x}" for _ in range(26))] for _ in range(rows)]
    path.write_text("".join("\t".join(map(str, line)) + "\n" for line in lines))


@contextmanager
def _changed(path: Path) -> Iterator[bytes]:
    """A file that may be changed on the way; yields what it holds, and will again."""
    content = path.read_bytes()
    try:
        yield content
    finally:
        path.write_bytes(content)


def _run(directory: Path, *settings: str, resume: bool = False) -> subprocess.CompletedProcess[str]:
    options = ["--resume"] if resume else []
    return run_job(["--config", "tiny.yaml", *options, "--set", *SETTINGS, *settings], directory)


def _steps(directory: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in (directory / "checkpoints").glob("step-*"))


def _history(directory: Path) -> dict[str, list[dict[str, object]]]:
    return json.loads((directory / "report" / "report.json").read_text())["history"]


def _scores(directory: Path, part: str, *keys: str) -> list[tuple[object, ...]]:
    return [tuple(entry[key] for key in ("step", *keys)) for entry in _history(directory)[part]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a job that trained, and once more from the end of its first epoch, with the same scores."""
    directory = tmp_path_factory.mktemp("trained")
    (directory / "tiny.yaml").write_text(TINY)
    (directory / "data").mkdir()
    _rows(directory / "data" / "day_0", 480, seed=0)
    _rows(directory / "data" / "day_1", 100, seed=1)
    first = _run(directory)
    assert first.returncode == 0, first.stdout
    # A val_path inside the training folder is not trained on.
    assert first.stdout.count("left out of training, since val_path holds it: day_1") == 1
    assert _steps(directory) == [5, 10, 15, STEPS]
    parts = (("training", "loss"), ("evaluation", "loss", "ne", "auroc"))
    whole = [_scores(directory, *part) for part in parts]
    assert [entry[0] for entry in whole[1]] == [5, 10, 15, STEPS]
    for step in (15, STEPS):
        shutil.rmtree(directory / "checkpoints" / f"step-{step:012d}")
    again = _run(directory, resume=True)
    assert again.returncode == 0, again.stdout
    assert again.stdout.count("continuing from checkpoints/step-000000000010") == 1
    assert [_scores(directory, *part) for part in parts] == whole
    return directory


@pytest.fixture
def refused(trained: Path) -> Callable[..., None]:
    """Runs a job that must end with a message, and leave everything as it was."""

    def start(message: str, *settings: str, resume: bool = True) -> None:
        report = (trained / "report" / "report.json").read_bytes()
        result = _run(trained, *settings, resume=resume)
        assert result.returncode == 1, result.stdout
        assert message in result.stdout
        assert result.stdout.count("error") == 1, result.stdout
        assert "Traceback" not in result.stdout
        assert _steps(trained) == [5, 10, 15, STEPS]
        assert (trained / "report" / "report.json").read_bytes() == report

    return start


def test_what_does_not_continue_is_told_once(trained: Path, refused: Callable[..., None]) -> None:
    refused("has been trained on all of epoch 2, but training.epochs is 1; set it to at least 2", "training.epochs=1")
    refused("was written with training.seed=0, now it is 3; set it back", "training.seed=3")
    rows = trained / "data" / "day_1"
    with _changed(rows):
        _rows(rows, 100, seed=2)
        refused("was trained on other data: val file 1 was day_1 of ", "training.epochs=3")


def test_rows_that_are_all_held_out_are_told_once(refused: Callable[..., None]) -> None:
    refused("holds all that path data/day_1 does, so that nothing is left to train on", "data.path=data/day_1")


@pytest.mark.parametrize("name", ["__1_0.distcp", "state.json"])
def test_a_flipped_bit_is_told_once(trained: Path, refused: Callable[..., None], name: str) -> None:
    """Of a file that one rank verifies for all, and of one that all read."""
    path = trained / "checkpoints" / f"step-{STEPS:012d}" / name
    with _changed(path) as content:
        flipped = bytearray(content)
        flipped[len(flipped) // 2] ^= 1
        path.write_bytes(flipped)
        refused(f"is damaged: {name}: ", "training.epochs=3")


def test_folders_that_cannot_be_used_are_told_once(trained: Path, refused: Callable[..., None]) -> None:
    """Only rank 0 knows; the other one waits for it, and is ended."""
    refused("report.directory: cannot write into tiny.yaml: File exists", "report.directory=tiny.yaml")
    refused("checkpoint.directory: cannot write into tiny.yaml: File exists", "checkpoint.directory=tiny.yaml")
    with held(trained / "checkpoints"):
        refused("checkpoints is in use by another job: process ", "training.epochs=3")
    refused("checkpoints has checkpoints of an earlier run, the last of step 20; continue it", resume=False)
