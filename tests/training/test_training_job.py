"""Whole jobs in processes of their own, as users start them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from training_jobs import SCRIPT, TINY, environment, launch_job, run_job, torchrun

from flowtt_torchrec.spec import TTSpec

pytestmark = pytest.mark.slow

STEPS = 120  # 2 epochs of 3000 rows, 2 ranks x 25 rows a step
ARGUMENTS = [
    *("--config", "tiny.yaml", "--epochs", "2", "--set", "training.validation_freq_within_epoch=50"),
    *("--checkpoint-dir", "checkpoints", "--set", "checkpoint.every=30", "--report-dir", "report"),
    *("--save-plan", "plan.json"),
]


def _prepare(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "tiny.yaml").write_text(TINY)
    return directory


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder and output of a job that nothing interrupted."""
    directory = _prepare(tmp_path_factory.mktemp("finished"))
    result = launch_job(ARGUMENTS, directory)
    assert result.returncode == 0, result.stdout
    return directory, result.stdout


def _saved(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory / "checkpoints") if not name.startswith(".lock"))


def _report(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "report" / "report.json").read_text())


def _scores(directory: Path) -> list[tuple[Any, ...]]:
    history = _report(directory)["history"]
    keys = ("step", "epoch", "loss", "ne", "auroc", "samples")
    return [tuple(entry[key] for key in keys) for part in ("training", "evaluation") for entry in history[part]]


def test_report_holds_what_is_needed_to_judge_a_run(finished: tuple[Path, str]) -> None:
    report = _report(finished[0])
    assert (report["schema"], report["steps"]) == (1, STEPS)
    assert report["config"]["training"]["batch_size"] == 25
    assert report["device"]["world_size"] == 2
    assert report["versions"]["torch"] == torch.__version__
    tables = {table["name"]: table for table in report["tables"]}
    assert len(tables) == 26
    trained = [table for table in tables.values() if table["spec"] is not None]
    assert report["compression"]["tensor_trains"] == len(trained) > 3
    for table in tables.values():
        assert (table["spec"] is not None) == (table["num_embeddings"] >= 1000)
        assert (table["kernel"] == "customized_kernel") == (table["spec"] is not None)
        assert table["ranks"]
    assert report["compression"]["dense_bytes"] == sum(table["dense_bytes"] for table in tables.values())
    assert report["compression"]["weight_bytes"] == sum(table["weight_bytes"] for table in tables.values())
    metrics = report["metrics"]
    assert metrics["samples"] == 500
    assert 0.5 < metrics["auroc"] < metrics["best_auroc"] < 1
    assert 1 > metrics["ne"] > metrics["best_ne"] > 0
    assert report["samples_per_second"] > 0
    assert len(report["peak_memory_bytes"]) == 2
    assert sum(part["share"] for part in report["step_breakdown"] if part["is_phase"]) == pytest.approx(1)
    assert [entry["step"] for entry in report["history"]["evaluation"]] == [50, 60, 100, 120]


def test_loss_falls(finished: tuple[Path, str]) -> None:
    training = _report(finished[0])["history"]["training"]
    assert training[-1]["epoch"] == 1
    assert training[-1]["step"] == STEPS
    losses = [entry["loss"] for entry in training]
    assert sum(losses[-5:]) < sum(losses[:5])


def test_output_ends_with_table_scores_and_report(finished: tuple[Path, str]) -> None:
    ending = finished[1].partition("Time of a step on rank 0")[2]
    for text in ("backward and table updates", "tables are tensor trains", "AUROC", "best possible", "samples/s"):
        assert text in ending
    assert "report: report/report.json" in ending
    assert finished[1].count("held out, step 120:") == 1, "one rank speaks"
    assert "Warning" not in finished[1]


def test_checkpoints_are_the_last_two_and_the_best(finished: tuple[Path, str]) -> None:
    evaluations = _report(finished[0])["history"]["evaluation"]
    # As it was known when the last was written.
    best = min((entry for entry in evaluations if entry["step"] < STEPS), key=lambda entry: entry["ne"])["step"]
    assert _saved(finished[0]) == ["best.json", *(f"step-{step:012d}" for step in sorted({best, 90, STEPS}))]


def _children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in listed.split()]


def test_a_killed_job_resumes_with_the_same_losses(finished: tuple[Path, str], tmp_path: Path) -> None:
    _prepare(tmp_path)
    started = subprocess.Popen(
        torchrun(ARGUMENTS), cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not list(tmp_path.glob("checkpoints/step-*")):
        assert started.poll() is None, "the job ended before it was killed"
        time.sleep(0.005)
    os.kill(_children(started.pid)[-1], signal.SIGKILL)
    assert started.wait(60) != 0
    assert not (tmp_path / "report").exists()
    [*_, last] = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert last < f"step-{STEPS:012d}"

    resumed = run_job([*ARGUMENTS, "--resume"], tmp_path)
    assert resumed.returncode == 0, resumed.stdout
    assert f"continuing from checkpoints/{last}" in resumed.stdout
    assert _scores(tmp_path) == _scores(finished[0])


def test_what_the_planner_compressed_stays_compressed(tmp_path: Path) -> None:
    """A run that continues with more memory keeps the tables as they are."""
    _prepare(tmp_path)
    auto = ["--config", "tiny.yaml", "--set", "compression.tables=auto", "--checkpoint-dir", "checkpoints"]
    auto += ["--limit_train_batches", "4", "--limit_val_batches", "2"]
    kernels = []
    for run in (["--ddr", "3MB", "--report-dir", "first"], ["--ddr", "8GB", "--resume", "--report-dir", "second"]):
        result = run_job([*auto, *run, "--epochs", str(1 + len(kernels))], tmp_path, processes=1)
        assert result.returncode == 0, result.stdout
        plan = json.loads((tmp_path / run[-1] / "report.json").read_text())["tables"]
        kernels.append({table["name"]: table["kernel"] == "customized_kernel" for table in plan})
    assert any(kernels[0].values())
    assert not all(kernels[0].values())
    assert kernels[1] == kernels[0]


def test_another_number_of_ranks_continues(finished: tuple[Path, str], tmp_path: Path) -> None:
    more = ["--epochs", "3", "--batch_size", "50", "--report-dir", str(tmp_path), "--resume"]
    shutil.copytree(finished[0] / "checkpoints", _prepare(tmp_path) / "checkpoints")
    result = run_job([*ARGUMENTS, *more], tmp_path, processes=1)
    assert result.returncode == 0, result.stdout
    history = json.loads((tmp_path / "report.json").read_text())["history"]
    [again] = (entry for entry in history["evaluation"] if entry["step"] == STEPS)
    assert again["auroc"] == pytest.approx(_report(finished[0])["metrics"]["auroc"], rel=1e-5)
    assert again["loss"] == pytest.approx(_report(finished[0])["metrics"]["loss"], rel=1e-5)
    assert history["training"][-1]["step"] == STEPS + 60


def _training(directory: Path, report: str) -> dict[int, float]:
    history = json.loads((directory / report / "report.json").read_text())["history"]["training"]
    return {entry["step"]: entry["loss"] for entry in history}


def test_another_plan_on_another_number_of_ranks_has_the_same_losses(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    """From the middle of an epoch, on one rank, where tables lie otherwise: the same rows in every step."""
    shutil.copytree(finished[0] / "checkpoints" / "step-000000000090", tmp_path / "checkpoints" / "step-000000000090")
    _prepare(tmp_path)
    result = run_job([*ARGUMENTS, "--batch_size", "50", "--resume"], tmp_path, processes=1)
    assert result.returncode == 0, result.stdout
    was, now = (
        {table["name"]: table["sharding_type"] for table in _report(directory)["tables"]}
        for directory in (finished[0], tmp_path)
    )
    assert {name for name in was if (was[name] == "data_parallel") != (now[name] == "data_parallel")}
    expected, got = _training(finished[0], "report"), _training(tmp_path, "report")
    assert got.keys() == expected.keys()
    assert max(got) == STEPS
    assert list(got.values()) == pytest.approx(list(expected.values()), rel=1e-5)


def test_adam_resumes_with_all_of_its_state(tmp_path: Path) -> None:
    _prepare(tmp_path)
    arguments = ["--config", "tiny.yaml", "--set", "optimizer.kind=adam", "optimizer.learning_rate=0.01"]
    arguments += ["checkpoint.every=4", "training.log_every=1", "--checkpoint-dir", "checkpoints"]
    arguments += ["--limit_train_batches", "8", "--limit_val_batches", "2"]
    assert run_job([*arguments, "--report-dir", "whole"], tmp_path, processes=1).returncode == 0
    shutil.rmtree(tmp_path / "checkpoints" / "step-000000000008")
    resumed = run_job([*arguments, "--report-dir", "resumed", "--resume"], tmp_path, processes=1)
    assert "continuing from checkpoints/step-000000000004" in resumed.stdout
    assert _training(tmp_path, "resumed") == _training(tmp_path, "whole")


def test_tables_of_other_types_train_and_resume(tmp_path: Path) -> None:
    """bfloat16 cores, one table's in float16, on two ranks; the steps after the resumed checkpoint are the same."""
    _prepare(tmp_path)
    types = ["compression.data_type=BF16", "compression.tables.t_cat_3.data_type=FP16"]
    arguments = ["--config", "tiny.yaml", "--checkpoint-dir", "checkpoints", "--limit_train_batches", "8"]
    arguments += ["--limit_val_batches", "2", "--set", "checkpoint.every=4", "training.log_every=1"]
    first = run_job([*arguments, *types, "--report-dir", "whole"], tmp_path)
    assert first.returncode == 0, first.stdout
    tables = json.loads((tmp_path / "whole" / "report.json").read_text())["tables"]
    for table in tables:
        numbers = table["num_embeddings"] * table["embedding_dim"]
        if table["spec"] is None:
            assert (table["data_type"], table["weight_bytes"]) == ("FP32", 4 * numbers)
            continue
        spec = TTSpec.from_dict(table["spec"])
        assert table["data_type"] == ("FP16" if table["name"] == "t_cat_3" else "BF16")
        assert (table["weight_bytes"], table["dense_bytes"]) == (2 * spec.num_parameters, 2 * numbers)
        assert table["sharding_type"] != "data_parallel"
    shutil.rmtree(tmp_path / "checkpoints" / "step-000000000008")
    resumed = run_job([*arguments, *types, "--report-dir", "resumed", "--resume"], tmp_path)
    assert "continuing from checkpoints/step-000000000004" in resumed.stdout, resumed.stdout
    assert _training(tmp_path, "resumed") == _training(tmp_path, "whole")
    other = run_job([*arguments, *types[:1], "--resume"], tmp_path)
    assert "has table 't_cat_3' in FP16, now it is BF16; set model.data_type or compression.data_type" in other.stdout


def test_one_process_without_a_launcher(tmp_path: Path) -> None:
    """With Adam, which FBGEMM does not have on the CPU: dense tables go to the dense optimizer."""
    _prepare(tmp_path)
    arguments = ["--config", "tiny.yaml", "--limit_train_batches", "3", "--limit_val_batches", "2"]
    arguments += ["--set", "optimizer.kind=adam"]
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments, "--resume", "--checkpoint-dir", "none", "--test_batch_size", "10"],
        cwd=tmp_path,
        env=environment(),
        text=True,
        capture_output=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "--resume: there is no checkpoint in none yet, starting from scratch" in result.stdout
    report = json.loads((tmp_path / "runs" / "tiny" / "report.json").read_text())
    assert report["steps"] == 3
    assert report["metrics"]["samples"] == 20
    assert {table["kernel"] for table in report["tables"]} == {"dense", "customized_kernel"}


def test_a_bad_line_on_one_rank_ends_the_job(tmp_path: Path) -> None:
    good = "\t".join(["1", *(["5"] * 13), *(["68fd1e64"] * 26)])
    bad = "\t".join(good.split("\t")[:38])
    (tmp_path / "rows.tsv").write_text("\n".join([*[good] * 3000, bad, *[good] * 300]) + "\n")
    _prepare(tmp_path)
    arguments = ["--data", "rows.tsv", "--set", "data.generate=null", "--num_embeddings", "1000"]
    result = launch_job([*ARGUMENTS, *arguments], tmp_path)
    assert result.returncode != 0
    assert "rows.tsv:3001: " in result.stdout
    assert str(SCRIPT) not in result.stdout.partition("rows.tsv:3001")[0], "no traceback"
    assert not (tmp_path / "report").exists()
    assert _saved(tmp_path) == ["step-000000000030"]


def test_a_saved_plan_trains_the_same(finished: tuple[Path, str], tmp_path: Path) -> None:
    directory = _prepare(tmp_path)
    plan = finished[0] / "plan.json"
    result = run_job([*ARGUMENTS, "--plan", plan, "--set", "compression.tables=dense", "--epochs", "1"], directory)
    assert result.returncode == 0, result.stdout
    assert _report(directory)["tables"] == _report(finished[0])["tables"]
    scores = _scores(directory)
    assert scores[0][2] == _scores(finished[0])[0][2]  # the first loss
