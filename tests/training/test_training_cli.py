from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from flowtt_torchrec.training import job
from flowtt_torchrec.training.cli import main


@pytest.fixture(autouse=True)
def _cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWTT_DEVICE", "cpu")


def _fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.err.startswith("train_dlrm.py: error: ")
    assert captured.err.count("\n") == 1
    return captured.err.strip()


def test_wrong_settings_end_in_one_line(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = _fails(["--config", str(tiny), "--set", "training.epoch=3"], capsys)
    assert "unknown key 'epoch' in training; did you mean 'epochs'?" in error


def test_missing_data_ends_in_one_line(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = _fails(["--config", str(tiny), "--data", str(tmp_path / "none.tsv"), "--dry-run"], capsys)
    assert "none.tsv does not exist" in error


def test_too_large_ranks_end_in_one_line(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = "compression.tables={t_cat_2: {ranks: [5000, 5000]}}"
    error = _fails(["--config", str(tiny), "--dry-run", "--set", ranks], capsys)
    assert "table 't_cat_2' (101,312 x 8): TT rank r_1 = 5000 exceeds" in error


def test_tables_that_do_not_fit_end_in_one_message(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(tiny), "--dry-run", "--ddr", "1kB"]) == 1
    error = capsys.readouterr().err
    assert "TorchRec's planner found no plan: " in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (
            "index 7 at position 3 (feature 0, table 't_cat_0') is out of range; allowed: 0 to 6",
            "index 7 at position 3 (feature 0, table 't_cat_0') is out of range; allowed: 0 to 6",
        ),
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1", "lost the connection to another"),
    ],
)
def test_errors_of_the_operators_that_users_can_mend(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, raised: str, said: str
) -> None:
    def fail(invocation: object) -> None:
        raise RuntimeError(f"{raised}\nException raised from ...")

    monkeypatch.setattr(job, "run", fail)
    monkeypatch.setattr("flowtt_torchrec.training.cli._LOST_PEER_GRACE_SECONDS", 0)
    assert said in _fails(["--config", str(tiny)], capsys)


@pytest.mark.parametrize(
    ("allocate", "asked"),
    [
        (lambda: torch.empty(1 << 52, dtype=torch.int8), ", when 4503599627370496 bytes more were asked for"),
        (lambda: np.empty(1 << 52, dtype=np.int8), ", when 4.00 PiB more were asked for"),
        (lambda: bytearray(1 << 62), ". Use"),
    ],
)
def test_out_of_memory_is_told(
    tiny: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    allocate: Callable[[], object],
    asked: str,
) -> None:
    monkeypatch.setattr(job, "run", lambda invocation: allocate())
    error = _fails(["--config", str(tiny)], capsys)
    assert f"out of memory{asked}" in error
    assert "smaller training.batch_size" in error


def test_bugs_show_their_traceback(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(invocation: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(job, "run", fail)
    assert main(["--config", str(tiny)]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_unknown_device_is_told(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWTT_DEVICE", "tpu")
    assert "FLOWTT_DEVICE=tpu is unknown; allowed: cpu, cuda" in _fails(["--config", str(tiny)], capsys)


def test_dry_run_plans_for_a_machine_that_is_not_there(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ["--dry-run", "--world-size", "8", "--device", "cuda", "--hbm", "80GB"]
    assert main(["--config", str(tiny), *machine]) == 0
    output = capsys.readouterr().out
    assert "customized_kernel" in output
    assert "t_cat_25" in output
    assert "7 of 26 tables are tensor trains" in output
    assert "dry run for 8 ranks on cuda, batch 8 x 25" in output


@pytest.mark.parametrize(("memory", "trains"), [("80GB", 0), ("3MB", 1)])
def test_dry_run_compresses_what_does_not_fit(
    tiny: Path, capsys: pytest.CaptureFixture[str], memory: str, trains: int
) -> None:
    auto = ["--set", "compression.tables=auto", "--set", "compression.rank=4", "--ddr", memory]
    assert main(["--config", str(tiny), *auto, "--dry-run", "--world-size", "2"]) == 0
    output = capsys.readouterr().out
    assert ("customized_kernel" in output) == bool(trains)


def test_dry_run_of_a_giant_table(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    giant = ["--set", "data.generate.scale=395", "--set", "data.generate.max_rows=4000000000", "--ddr", "1GB"]
    assert main(["--config", str(tiny), *giant, "--dry-run", "--world-size", "2"]) == 0
    assert "4,000,000,000 x 8" in capsys.readouterr().out


def test_data_types_that_cannot_be_are_told(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ["--config", str(tiny), "--dry-run", "--set"]
    error = _fails([*machine, "compression.data_type=bfloat16"], capsys)
    assert "compression.data_type is 'bfloat16', allowed: FP32, FP16, BF16" in error
    error = _fails([*machine, "model.data_type=BF16"], capsys)
    assert "FBGEMM has no dense tables on a CPU (tables 't_cat_0'," in error
    error = _fails([*machine, "model.data_type=FP16", "optimizer.kind=adam"], capsys)
    assert "Adam's averages would be in 16 bits too; set it to FP32, and compression.data_type" in error
    assert main([*machine, "model.data_type=BF16", "compression.tables=all"]) == 0
    assert main([*machine, "model.data_type=BF16", "--device", "cuda"]) == 0
    assert "BF16" in capsys.readouterr().out


def test_a_plan_is_saved_and_used_again(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, machine = str(tmp_path / "plans" / "two.json"), ["--dry-run", "--world-size", "2"]
    assert main(["--config", str(tiny), *machine, "--save-plan", plan]) == 0
    made = capsys.readouterr().out
    assert "data sheet" in made  # where the times are from
    # which tables are tensor trains is the plan's to say
    assert main(["--config", str(tiny), *machine, "--plan", plan, "--set", "compression.tables=dense"]) == 0
    used = capsys.readouterr().out
    assert made.split("Times of tensor trains")[0].rstrip(". ") in used
    assert made.splitlines()[-1] == used.splitlines()[-1]
    other = ["--dry-run", "--world-size", "4", "--plan", plan]
    assert "plan is for 2 ranks, this job has 4: table" in _fails(["--config", str(tiny), *other], capsys)
    assert "planner.plan: " in _fails(["--config", str(tiny), *machine, "--plan", "none.json"], capsys)
    assert "has no cost constants" in _fails(["--config", str(tiny), *machine, "--costs", plan], capsys)


@pytest.mark.parametrize("ranks", [64, pytest.param(1024, marks=pytest.mark.slow)])
def test_dry_run_for_more_ranks_than_rows(tiny: Path, capsys: pytest.CaptureFixture[str], ranks: int) -> None:
    assert main(["--config", str(tiny), "--dry-run", "--world-size", str(ranks), "--device", "cuda"]) == 0
    assert f"dry run for {ranks} ranks on cuda" in capsys.readouterr().out
