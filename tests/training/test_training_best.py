"""Best, not last: early stopping, and the best checkpoint. Whole jobs of one rank in this process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from training_jobs import TINY, run_here, run_job

from flowtt_torchrec.training.best import best_evaluation, reason_to_stop
from flowtt_torchrec.training.checkpoint import Checkpoints
from flowtt_torchrec.training.config import TrainingConfig
from flowtt_torchrec.training.errors import CheckpointError, ConfigError, UserError
from flowtt_torchrec.training.options import parse
from flowtt_torchrec.training.settings import InvalidField


def _evaluations(*scores: tuple[float | None, float | None]) -> list[dict[str, Any]]:
    return [{"step": 10 * number, "ne": ne, "auroc": auroc} for number, (ne, auroc) in enumerate(scores, start=1)]


def test_patience_counts_evaluations_since_the_best_ne() -> None:
    config = TrainingConfig(patience=2)
    seen = _evaluations((None, None), (0.9, 0.7), (0.8, 0.6), (0.8, 0.9), (0.85, 0.9))
    assert best_evaluation(seen) == seen[2]  # the first of equals; those without an NE are none
    assert [reason_to_stop(config, seen[:count]) is None for count in range(6)] == [True] * 5 + [False]
    assert reason_to_stop(TrainingConfig(), seen) is None
    assert reason_to_stop(config, _evaluations((None, None), (None, None))) is None


def test_the_target_stops_when_it_is_reached() -> None:
    config = TrainingConfig(target_auroc=0.75)
    assert reason_to_stop(config, _evaluations((None, None), (0.9, 0.7499))) is None
    assert "step 20 has AUROC 0.750000" in str(reason_to_stop(config, _evaluations((0.9, 0.7), (0.95, 0.75))))


@pytest.mark.parametrize(("name", "value"), [("patience", 0), ("target_auroc", 0.0), ("target_auroc", 1.01)])
def test_what_can_never_be_met_is_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidField):
        TrainingConfig(**{name: value})  # type: ignore[arg-type]


def _steps() -> list[int]:
    return sorted(int(path.name[5:]) for path in Path("checkpoints").glob("step-*"))


def test_patience_stops_and_the_best_checkpoint_stays(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A learning rate too high: the run is at its best early. One that continues in between does the same."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLOWTT_DEVICE", "cpu")
    settings = ["checkpoint.directory=checkpoints", "report.directory=report", "training.profile_steps=0"]
    settings += ["checkpoint.keep=1", "training.validation_freq_within_epoch=10", "training.patience=3"]
    settings += ["optimizer.learning_rate=0.4", "training.epochs=9", "checkpoint.every=10"]

    def job(*more: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
        run_here("--config", tiny, *options, "--set", *settings, *more)
        return json.loads(Path("report/report.json").read_text())

    whole = job()
    output = capsys.readouterr().out
    best, evaluations = whole["best"], whole["history"]["evaluation"]
    assert best["ne"] == min(entry["ne"] for entry in evaluations)
    assert whole["steps"] == best["step"] + 30 < 9 * 120
    assert whole["metrics"] == evaluations[-1] != best
    assert _steps() == [best["step"], whole["steps"]]
    assert best["checkpoint"] == f"checkpoints/step-{best['step']:012d}"
    assert "training stops: 3 evaluations since" in output
    assert whole["stopped"] in output
    assert f"best so far: NE {best['ne']:.4f} of step {best['step']}" in output
    assert f"best (step {best['step']})" in output
    assert f"best checkpoint: {best['checkpoint']}" in output

    def evaluated(split: str = "val", checkpoint: str = "best") -> dict[str, Any]:
        run_here("--config", tiny, "--evaluate", split, "--checkpoint", checkpoint, "--set", *settings)
        return json.loads(Path(f"report/evaluate-{split}.json").read_text())

    for entry, name in ((best, "best"), (whole["metrics"], "last"), (best, str(best["step"]))):
        scores = evaluated(checkpoint=name)
        assert (scores["step"], scores["samples"]) == (entry["step"], entry["samples"])
        for score in ("auroc", "ne", "loss"):
            assert scores[score] == pytest.approx(entry[score], abs=5e-7)
        assert f"{best['auroc']:.6f}" in capsys.readouterr().out or name == "last"
    with pytest.raises(UserError, match="--evaluate test: this data has no such split, only train, val; folders that"):
        evaluated("test")
    with pytest.raises(CheckpointError, match=r"--checkpoint 3: there is none of that step in checkpoints; there are"):
        evaluated(checkpoint="3")

    again = job(options=("--resume",))  # has been told to stop
    assert Checkpoints("checkpoints").best() == best["step"]
    assert (again["best"], again["steps"], again["stopped"]) == (best, whole["steps"], whole["stopped"])

    shutil.rmtree(f"checkpoints/step-{whole['steps']:012d}")  # continues from the best
    between = job(options=("--resume",))
    assert between["history"]["evaluation"] == evaluations
    assert (between["best"], between["stopped"]) == (best, whole["stopped"])
    assert _steps() == [best["step"], whole["steps"]]


@pytest.mark.slow
def test_two_ranks_evaluate_what_they_trained_and_one_does_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    arguments = ["--config", "tiny.yaml", "--checkpoint-dir", "checkpoints", "--report-dir", "report"]
    arguments += ["--set", "training.epochs=3", "optimizer.learning_rate=0.4", "training.profile_steps=0"]
    trained = run_job(arguments, tmp_path)
    assert trained.returncode == 0, trained.stdout
    best = json.loads((tmp_path / "report/report.json").read_text())["best"]
    for ranks in (2, 1):
        result = run_job([*arguments, "--evaluate"], tmp_path, ranks)
        assert result.returncode == 0, result.stdout
        scores = json.loads((tmp_path / "report/evaluate-val.json").read_text())
        assert scores["checkpoint"] == best["checkpoint"]
        for score in ("auroc", "ne", "loss"):
            assert scores[score] == pytest.approx(best[score], abs=5e-7)


def test_a_prepared_folder_has_a_test_split_to_score(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    from flowtt_torchrec.datasets.prepared.prepare import prepare

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLOWTT_DEVICE", "cpu")
    Path("days").mkdir()
    for day in range(2):
        lines = ("\t".join([f"{row % 3 == 0:d}", *["7"] * 13, *[f"{row * 31 % 97:08x}"] * 26]) for row in range(80))
        Path(f"days/day_{day}").write_text("\n".join(lines) + "\n")
    prepare("days", "prepared", num_embeddings=[100] * 26, say=lambda text: None)
    text = tiny.read_text().replace("generate: {train_rows: 3000, val_rows: 500, scale: 0.01}", "path: prepared")
    tiny.write_text(text)
    settings = ["checkpoint.directory=checkpoints", "report.directory=report", "training.profile_steps=0"]
    run_here("--config", tiny, "--set", *settings)
    run_here("--config", tiny, "--evaluate", "test", "--set", *settings)
    scores = json.loads(Path("report/evaluate-test.json").read_text())
    assert (scores["split"], scores["samples"]) == ("test", 40)
    assert scores["ne"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "last"], "--checkpoint goes with --evaluate"),
        (["--evaluate"], "--evaluate: there is no checkpoint directory"),
        (["--evaluate", "--checkpoint-dir", "c", "--resume"], "leave out --resume"),
        (
            ["--evaluate", "--checkpoint-dir", "c", "--checkpoint", "first"],
            "must be best, last or the number of a step",
        ),
    ],
)
def test_options_of_an_evaluation_that_mean_nothing_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(["--data", "x", *arguments])
