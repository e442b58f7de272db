from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from cuda_emulation import build, emulated

from benchmarks import lookup
from benchmarks.contenders import FlowTT
from benchmarks.harness import Effort
from benchmarks.memory import measure_peak, modelled_peak
from benchmarks.presets import PRESETS
from benchmarks.questions import QUESTIONS
from benchmarks.questions.device import MAPPINGS
from benchmarks.report import load
from benchmarks.stages import OTHER, STAGES, stage_seconds
from benchmarks.workloads import Workload
from flowtt_torchrec import ops

# The names that other tools read; figures may be added, these may not go.
FIGURES = {
    *(f"{f}_{d}" for f in ("forward_vs_ttrec", "step_vs_ttrec") for d in ("zipf", "scattered", "uniform")),
    *(f"{f}_{d}" for f in ("step_vs_tbe", "flow_shape_step_vs_tbe") for d in ("zipf", "scattered", "uniform")),
    *(f"{f}bfloat16_step_over_float32_{d}" for f in ("", "flow_shape_") for d in ("zipf", "scattered", "uniform")),
    "gemm_fraction_uniform_forward",
    "gemm_fraction_uniform_backward",
    "growth",
    "one_call_speedup",
    "distribution_spread",
}


def test_smoke_run_writes_all_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = [question for question in PRESETS["quick"].questions if question != "memory"]  # has its own test
    files = ["--json", str(tmp_path / "r.json"), "--csv", str(tmp_path / "r.csv")]
    lookup.main(["--preset", "smoke", "--threads", "1", *files, "--only", *questions])
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["figures"].keys() >= FIGURES
    assert all(math.isfinite(value) and value > 0 for value in data["figures"].values())
    assert data["environment"]["threads"] == 1
    assert data["environment"]["command"]
    assert {row["question"] for row in data["rows"]} == set(questions)
    for row in data["rows"]:
        assert row["min"] <= row["p10"] <= row["median"] <= row["p90"]
    rows, figures = load(tmp_path / "r.csv")
    assert figures.keys() == data["figures"].keys()
    assert len(rows) == len(data["rows"])
    assert "figures" in capsys.readouterr().out


def test_counts_are_those_of_the_plan(tmp_path: Path) -> None:
    preset = dataclasses.replace(PRESETS["smoke"], batches=1)
    report = lookup.run(preset, ["comparison"], 1, ["test"])
    counts = {
        row["operation"]: row["median"]
        for row in report.rows
        if row["unit"] == "count" and row.get("distribution") == "uniform"
    }
    spec = preset.balanced
    (batch,) = Workload((spec,), "uniform", preset.lookups).batches(1)
    assert counts["distinct rows"] == batch.indices.unique().numel()
    assert counts["distinct prefixes"] == (batch.indices // spec.p[-1]).unique().numel()
    assert counts["forward flops"] == (
        counts["distinct prefixes"] * spec.flops_per_prefix + counts["distinct rows"] * spec.flops_per_row
    )


def test_every_other_question_runs() -> None:
    asked = [name for name in QUESTIONS if name not in PRESETS["quick"].questions]
    report = lookup.run(PRESETS["smoke"], asked, 1, ["test"])
    assert {row["question"] for row in report.rows} == set(asked)
    assert PRESETS["full"].questions == tuple(QUESTIONS)


@pytest.mark.parametrize("backend", ["native", pytest.param("cuda-emulated", marks=pytest.mark.slow)])
def test_device_question_has_parts_ablations_and_alternatives(backend: str) -> None:
    """Where there is no GPU: the CPU ops, and the CUDA ops on the emulator with the parts of their schedule."""
    ablations = set()
    if backend == "cuda-emulated":
        if build.toolkit() is None:
            pytest.skip("the headers of the CUDA toolkit are not here")
        emulated.load()
        ablations = {f"flowtt, {name}" for name in (*MAPPINGS, "deterministic")}
    once = Effort(rounds=1, min_rounds=1, seconds=1, visit_seconds=0.0)
    preset = dataclasses.replace(PRESETS["smoke"], effort=once, batches=1, pooled_lookups=100)
    with ops.use_backend(backend):
        report = lookup.run(preset, ["device"], 1, ["test"])
    operations = {row["operation"] for row in report.rows if row["contender"] == "flowtt"}
    assert operations == {"plan", "forward", "forward_planned", "backward", "step"}
    others = {"flowtt", "flowtt_unique", "flowtt_direct", "ttrec", "ttrec_unique", "nn_embedding_bag"}
    assert {row["contender"] for row in report.rows} == others | ablations
    assert "step_vs_nn_embedding_bag_dim16_rank8_p20" in report.figures


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_device_question_on_a_gpu(tmp_path: Path) -> None:
    lookup.main(["--preset", "smoke", "--device", "cuda", "--json", str(tmp_path / "r.json")])
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["environment"]["gpu"]["name"]
    assert {row["unit"] for row in data["rows"]} == {"ms", "bytes"}


def test_peak_memory_of_a_step() -> None:
    workload = Workload((PRESETS["smoke"].balanced,), "uniform", 65_536)
    ours, ttrec = measure_peak("flowtt", workload, 1), measure_peak("ttrec", workload, 1)
    assert ours.model == ttrec.model
    assert ours.step > 4 * 65_536 * 16  # the pooled output is in it
    assert ttrec.step > 4 * 65_536 * 8 * 2 * 8  # and so are TT-Rec's gathered slices
    assert modelled_peak(workload, ours, 1) > ours.model + 4 * 65_536 * 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--threads", "0"], "at least 1, not 0"),
        (["--only", "x"], "'x'"),
        pytest.param(
            ["--device", "cuda"],
            "sees no GPU here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_bad_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lookup.main(options)
    assert message in capsys.readouterr().err


def test_stages_add_up_to_the_step() -> None:
    spec = PRESETS["smoke"].balanced
    ours = FlowTT([spec])
    clock = iter([1.0, 1000.0])
    times = stage_seconds(ours, Workload((spec,), "uniform", 320, 20).batches(1)[0], lambda: next(clock))
    assert list(times) == [*STAGES, OTHER]
    assert all(times[stage] > 0 for stage in STAGES)
    assert sum(times.values()) == pytest.approx(999)
    ours.step(Workload((spec,), "uniform", 320).batches(1)[0])  # nobody records any more
