"""Runs that continue: from where, with what, and what is refused. Whole jobs of one rank in this process."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training_jobs import run_here

from flowtt_torchrec.datasets import DataError
from flowtt_torchrec.datasets.meta_format import save_lookups
from flowtt_torchrec.training.errors import CheckpointError, DivergenceError, UserError


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLOWTT_DEVICE", "cpu")


@pytest.fixture
def job(tiny: Path) -> Callable[..., dict[str, Any]]:
    """Runs the tiny job with some settings and options; returns its report."""

    def start(*settings: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
        fixed = ("checkpoint.directory=checkpoints", "report.directory=report", "training.profile_steps=0")
        run_here("--config", tiny, *options, "--set", *fixed, *settings)
        return json.loads(Path("report/report.json").read_text())

    return start


RESUME = ("--resume",)


def _steps() -> list[str]:
    return sorted(path.name for path in Path("checkpoints").glob("step-*"))


def _evaluated(report: dict[str, Any]) -> list[int]:
    return [entry["step"] for entry in report["history"]["evaluation"]]


@pytest.mark.slow
def test_several_reasons_to_save_and_evaluate_at_one_step(job: Callable[..., dict[str, Any]]) -> None:
    """480 rows in batches of 50: the short last batch of the epoch is step 10, where all of them fall."""
    settings = ["data.generate.train_rows=480", "training.batch_size=50", "checkpoint.every=5", "checkpoint.keep=9"]
    settings += ["training.validation_freq_within_epoch=5", "training.log_every=5"]
    first = job(*settings)
    assert _steps() == ["step-000000000005", "step-000000000010"]
    assert _evaluated(first) == [5, 10]
    again = job(*settings, "training.epochs=2", options=RESUME)
    assert _evaluated(again) == [5, 10, 15, 20]
    shutil.rmtree("checkpoints")
    whole = job(*settings, "training.epochs=2")
    assert whole["metrics"] == again["metrics"]
    # From the middle of an epoch, where it was saved with the scores of the same step.
    for step in ("step-000000000010", "step-000000000015", "step-000000000020"):
        shutil.rmtree(Path("checkpoints") / step)
    assert (
        job(*settings, "training.epochs=2", options=RESUME)["history"]["evaluation"] == whole["history"]["evaluation"]
    )


def test_files_that_end_with_a_short_batch_continue_in_the_next(job: Callable[..., dict[str, Any]]) -> None:
    Path("data").mkdir()
    generator = torch.Generator().manual_seed(0)
    for number in range(3):
        save_lookups(
            Path("data") / f"fbgemm_t3_bs20_{number}.pt",
            torch.randint(0, 50, (60,), generator=generator),
            torch.ones(3, 20, dtype=torch.int64),
        )
    settings = ["data.kind=meta", "data.path=data", "training.batch_size=7", "training.log_every=1"]
    settings += ["checkpoint.every=1", "checkpoint.keep=99"]
    whole = job(*settings)
    assert whole["steps"] == 9  # 7 + 7 + 4 rows a file
    for step in range(4, 10):  # step 3 ends the first file
        shutil.rmtree(f"checkpoints/step-{step:012d}")
    again = job(*settings, options=RESUME)
    assert [entry["loss"] for entry in again["history"]["training"]] == [
        entry["loss"] for entry in whole["history"]["training"]
    ]
    shutil.rmtree("checkpoints")
    # All three files, though the first ends with a batch that is left out.
    assert job(*settings, "training.drop_last_training_batch=true")["steps"] == 6
    for step in range(4, 7):
        shutil.rmtree(f"checkpoints/step-{step:012d}")
    assert job(*settings, "training.drop_last_training_batch=true", options=RESUME)["steps"] == 6


@pytest.fixture
def two_epochs(job: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """A job that has saved its third step, the last of the second epoch."""
    settings = ("data.generate.train_rows=50", "training.epochs=2")
    job(*settings)
    return lambda *more, options=RESUME: job(*settings, *more, options=options)


def test_what_may_not_change_on_the_way_is_named(two_epochs: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(
        CheckpointError, match=r"trained on all of epoch 2, but training\.epochs is 1; set it to at least"
    ):
        two_epochs("training.epochs=1")
    with pytest.raises(CheckpointError, match=r"written with training\.seed=0, now it is 3; set it back"):
        two_epochs("training.seed=3")
    state_file = next(Path("checkpoints").glob("step-*")) / "state.json"
    report = two_epochs()
    assert _evaluated(report)[-1] == 4
    saved = json.loads(state_file.read_text())
    state_file.write_text(json.dumps({**saved, "world_size": 2}))
    with pytest.raises(CheckpointError, match=r"state\.json: its checksum is another"):
        two_epochs()
    del saved["checksum"]  # as in older versions
    for content, message in (
        ({}, "state.json: it has no 'format'"),
        ([], "state.json: it is no mapping"),
        ({**saved, "format": 7}, "has format 7; this version reads 1"),
        ({name: part for name, part in saved.items() if name != "position"}, "state.json: it has no 'position'"),
        ({**saved, "position": {"stepp": 1}}, "state.json: TypeError"),
        ({**saved, "plan": [3]}, "state.json: TypeError"),
    ):
        state_file.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=message):
            two_epochs()


def _criteo(path: Path, rows: int, seed: int = 0) -> None:
    rng = random.Random(seed)
    lines = [
        "\t".join([str(rng.randrange(2)), *["5"] * 13, *(f"{rng.randrange(99):x}" for _ in range(26))])
        for _ in range(rows)
    ]
    path.write_text("\n".join(lines) + "\n")


def test_other_data_is_refused_unless_it_is_accepted(
    job: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    _criteo(Path("train.tsv"), 200)
    _criteo(Path("val.tsv"), 50, seed=1)
    settings = ["data.generate=null", "data.path=train.tsv", "data.val_path=val.tsv", "data.num_embeddings=100"]
    job(*settings)
    Path("moved").mkdir()
    for name in ("train.tsv", "val.tsv"):
        shutil.copy(name, Path("moved") / name)
    moved = ["data.path=moved/train.tsv", "data.val_path=moved/val.tsv", "training.epochs=2"]
    assert job(*settings, *moved, options=RESUME)["steps"] == 16
    _criteo(Path("val.tsv"), 50, seed=2)
    other = [*settings, "training.epochs=3"]
    with pytest.raises(
        CheckpointError, match=r"other data: val file 1 was val\.tsv of .* bytes \(.*\), now it is val\.tsv"
    ):
        job(*other, options=RESUME)
    with pytest.raises(CheckpointError, match=r"val file 1 was val\.tsv .*, now it is not there"):
        job(*other, "data.val_path=null", options=RESUME)
    capsys.readouterr()
    job(*other, "checkpoint.accept_other_data=true", options=RESUME)
    assert (
        "--resume: continuing with other data, as checkpoint.accept_other_data allows: val" in capsys.readouterr().out
    )


def test_rows_that_cannot_be_evaluated_on_are_told_before_training(
    job: Callable[..., dict[str, Any]],
) -> None:
    _criteo(Path("train.tsv"), 200)
    settings = ["data.generate=null", "data.path=train.tsv", "data.num_embeddings=100"]
    Path("val.tsv").write_text("\n".join(line[2:] for line in Path("train.tsv").read_text().splitlines()))
    with pytest.raises(DataError, match=r"val\.tsv:1: 39 fields.*without labels"):
        job(*settings, "data.val_path=val.tsv")
    Path("val.tsv").write_text("")
    with pytest.raises(DataError, match=r"val\.tsv: 0 rows for split 'val'"):
        job(*settings, "data.val_path=val.tsv")
    assert not _steps()


@pytest.mark.slow
def test_a_run_that_diverges_stops_and_keeps_its_last_finite_checkpoint(
    job: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["training.limit_train_batches=8", "optimizer.kind=sgd", "checkpoint.every=2"]
    job(*settings)
    explode = [*settings, "training.epochs=2", "optimizer.learning_rate=1e30"]
    with pytest.raises(
        DivergenceError, match=r"the loss of step 10 is not .* of step 8 \(.*loss 0\.\d+\), is kept: .*step-0*8; lower"
    ):
        job(*explode, options=RESUME)
    assert _steps() == ["step-000000000006", "step-000000000008"]
    capsys.readouterr()
    report = job(*explode, "training.stop_on_nonfinite=false", options=RESUME)
    output = capsys.readouterr().out
    assert output.count("training diverged: ") == 1
    assert "held out, step 16: loss NaN  NE NaN  AUROC NaN" in output
    assert [report["metrics"][name] for name in ("loss", "ne", "auroc")] == [None] * 3
    assert _steps() == ["step-000000000006", "step-000000000008"]
    report = job(*settings, "training.epochs=2", options=RESUME)
    assert 0 < report["metrics"]["loss"] < 1


def test_weights_that_no_row_has_shown_yet_are_not_saved(job: Callable[..., dict[str, Any]]) -> None:
    """The step after which they are not finite is the last one, so that no loss tells."""
    settings = ["training.limit_train_batches=1", "optimizer.eps=0"]  # 0 / 0 where a dense gradient is 0
    with pytest.raises(
        DivergenceError, match=r"after step 1 model\..* holds numbers that are not finite; no checkpoint"
    ):
        job(*settings)
    assert not _steps()


def test_a_run_without_checkpoints_is_stopped_by_its_evaluation(tiny: Path) -> None:
    with pytest.raises(UserError, match="after step 1 predictions of held-out rows are not finite"):
        run_here(
            *("--config", tiny, "--set", "training.limit_train_batches=1", "optimizer.eps=0"),
        )
