from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from benchmarks import training
from benchmarks.environment import describe
from benchmarks.report import Report
from benchmarks.training import DENSE, FLOWTT, PRESETS, Result, Tables, VariantMemory


@pytest.mark.slow
def test_two_ranks_train_both_variants() -> None:
    request = PRESETS["smoke"].request
    result = training.launch(dataclasses.replace(request, dim=16, batch_size=32), processes=2)
    assert {name: len(seconds) for name, seconds in result.seconds.items()} == {FLOWTT: 2, DENSE: 2}
    assert result.threads == 1
    ours, dense = result.tables[FLOWTT], result.tables[DENSE]
    assert ours.rows == dense.rows
    assert ours.tensor_trains > dense.tensor_trains == 0
    assert ours.weight_bytes < dense.weight_bytes == 4 * 16 * dense.rows
    assert "customized_kernel" in ours.sharding
    assert "customized_kernel" not in dense.sharding


@pytest.mark.slow
def test_memory_of_a_variant() -> None:
    request = dataclasses.replace(PRESETS["smoke"].request, dim=16, batch_size=32, max_rows=100_000)
    memory = training.launch(dataclasses.replace(request, variants=[DENSE], memory=True), processes=1).memory[DENSE]
    assert memory.peak >= memory.built > 10_000_000  # the tables are in it


def test_report_of_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {FLOWTT: Tables(1000, 3, 4000, "3 a"), DENSE: Tables(1000, 0, 64_000, "3 b")}
    memory = {FLOWTT: VariantMemory(50, 100, "VmHWM"), DENSE: VariantMemory(500, 800, "VmHWM")}

    def launch(request: training.Request, processes: int) -> Result:
        assert processes == 2
        if request.memory:
            (name,) = request.variants
            return Result(1, memory={name: memory[name]})
        return Result(1, {FLOWTT: [0.5, 0.25], DENSE: [0.25, 0.25]}, 0.1, tables)

    monkeypatch.setattr(training, "launch", launch)
    monkeypatch.setattr(training, "Report", lambda *args: Report(*args, console=Console(file=io.StringIO(), width=200)))
    report = training.run("smoke", PRESETS["smoke"].request, [16], [64], processes=2)
    assert report.figures["samples_per_second_vs_dense_dim16_batch64"].statistics.median == pytest.approx(0.75)
    assert report.figures["table_bytes_dense_over_flowtt_dim16_batch64"].statistics.median == 16
    assert report.figures["peak_bytes_dense_over_flowtt_dim16_batch64"].statistics.median == 8
    speeds = {row["contender"]: row["samples"] for row in report.rows if row["unit"] == "samples/s"}
    assert speeds == {FLOWTT: [256, 512], DENSE: [512, 512]}
    assert report.environment["processes"] == 2
    assert describe(["x"]).keys() <= report.environment.keys()
