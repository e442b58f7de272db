"""A DLRM on tensor-train tables against one on TorchRec's dense ones: ``python -m benchmarks.training``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.harness import Measurement
from benchmarks.process_memory import MALLOC
from benchmarks.report import Report

FLOWTT, DENSE = "flowtt", "torchrec_dense"
VARIANTS = (FLOWTT, DENSE)
NUM_TABLES = 26


@dataclass(frozen=True)
class Request:
    """What the ranks are to measure.

    Attributes:
        variants: of `VARIANTS`.
        memory: measure memory, not time.
        dim: columns of the tables.
        batch_size: samples a rank and step.
        scale: factor on the rows of Kaggle's tables.
        max_rows: the most rows a table may have.
        min_rows: tables of at least so many rows become tensor trains.
        tt_rank: TT rank.
        rounds: rounds of the measurement.
        steps: steps of a variant in a round.
        batches: different batches a rank.
        threads: threads a rank; by default the CPUs divided by the ranks.
        output: file that rank 0 writes a `Result` to.
    """

    variants: Sequence[str] = VARIANTS
    memory: bool = False
    dim: int = 16
    batch_size: int = 2048
    scale: float = 1.0
    max_rows: int | None = None
    min_rows: int = 100_000
    tt_rank: int = 32
    rounds: int = 7
    steps: int = 4
    batches: int = 8
    threads: int | None = None
    output: str = ""


@dataclass(frozen=True)
class Tables:
    """The tables of a variant: rows and weights of all of them, how many are tensor trains, how they are placed."""

    rows: int
    tensor_trains: int
    weight_bytes: int
    sharding: str


@dataclass(frozen=True)
class VariantMemory:
    """Bytes on the rank that needs most: of the model as built, and at most in training."""

    built: int
    peak: int
    method: str


@dataclass
class Result:
    """What rank 0 reports; see `Request`."""

    threads: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    other_cores: float = 0.0
    tables: dict[str, Tables] = field(default_factory=dict)
    memory: dict[str, VariantMemory] = field(default_factory=dict)


@dataclass(frozen=True)
class Preset:
    """Columns and batch sizes to measure, and the rest of the requests."""

    dims: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    request: Request


PRESETS = {
    "quick": Preset((16,), (2048,), Request()),
    "full": Preset((16, 64), (2048, 8192), Request(rounds=15, steps=6)),
    # Shows that the benchmark itself works. Its numbers mean nothing.
    "smoke": Preset(
        (16,), (64,), Request(max_rows=1000, min_rows=500, tt_rank=4, rounds=2, steps=1, batches=2, threads=1)
    ),
}


def run(preset: str, request: Request, dims: Sequence[int], batch_sizes: Sequence[int], processes: int) -> Report:
    """Measures all cases in turn.

    Args:
        preset: its name, for the record.
        request: what to measure, but for columns and batch size.
        dims: columns of the tables.
        batch_sizes: samples a rank and step.
        processes: number of ranks.
    """
    described = environment.describe(environment.command_line())
    described["processes"] = processes
    described["flowtt"] = environment.describe_backend()
    report = Report("training", preset, described)
    first = True
    for dim in dims:
        memory: dict[str, VariantMemory] = {}
        for batch_size in batch_sizes:
            case = dataclasses.replace(request, dim=dim, batch_size=batch_size)
            report.progress(f"training: dim {dim}, batch {processes} x {batch_size}: building both models, then time")
            timed = launch(case, processes)
            if first:
                report.environment["threads"] = timed.threads
                report.show_environment()
                first = False
            for name in case.variants:
                report.progress(f"training: dim {dim}, batch {processes} x {batch_size}: memory of {name}")
                memory |= launch(dataclasses.replace(case, variants=[name], memory=True), processes).memory
            _report(report, case, processes, timed, memory)
    report.show_figures()
    return report


def launch(request: Request, processes: int) -> Result:
    """Runs the ranks through torchrun and returns what rank 0 reports."""
    with tempfile.TemporaryDirectory() as folder:
        request = dataclasses.replace(request, output=str(Path(folder) / "result.json"))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        # torchrun would set it to 1 and say so; the ranks set torch's threads themselves.
        environ = os.environ | {"OMP_NUM_THREADS": str(request.threads or max(1, (os.cpu_count() or 1) // processes))}
        subprocess.run(
            [*command, "-m", "benchmarks.training_worker", json.dumps(dataclasses.asdict(request))],
            cwd=Path(__file__).parent.parent,
            env=environ | MALLOC if request.memory else environ,
            check=True,
        )
        values: dict[str, Any] = json.loads(Path(request.output).read_text())
    values["tables"] = {name: Tables(**tables) for name, tables in values["tables"].items()}
    values["memory"] = {name: VariantMemory(**memory) for name, memory in values["memory"].items()}
    return Result(**values)


def _report(report: Report, case: Request, processes: int, timed: Result, memory: dict[str, VariantMemory]) -> None:
    samples = processes * case.batch_size
    columns: dict[str, Any] = {
        "question": "training",
        "distribution": "criteo kaggle",
        "lookups": samples,
        "pooling": 1,
        "tables": NUM_TABLES,
        "dim": case.dim,
        "threads": timed.threads,
    }
    measured = Measurement(timed.seconds, timed.other_cores)
    own: dict[str, dict[str, Any]] = {
        name: {
            "contender": name,
            "optimizer": "rowwise_adagrad",
            "rows": timed.tables[name].rows,
            "parameters": timed.tables[name].weight_bytes // 4,
            "ranks": case.tt_rank if timed.tables[name].tensor_trains else "",
        }
        for name in case.variants
    }
    report.add_times(measured, {name: {**own[name], "operation": "step"} for name in own}, **columns)
    start = len(report.rows)
    for name in case.variants:
        speeds = [samples / seconds for seconds in timed.seconds[name]]
        report.add(speeds, "samples/s", other_cores=timed.other_cores, operation="training", **own[name], **columns)
    for name in case.variants:
        for operation, number in (
            ("table weights", timed.tables[name].weight_bytes),
            ("model, largest rank", memory[name].built),
            (f"training peak, largest rank ({memory[name].method})", memory[name].peak),
        ):
            report.add([number], "bytes", operation=operation, **own[name], **columns)
    report.show(report.rows[start:])
    for name in case.variants:
        tables = timed.tables[name]
        report.note(f"{name}, dim {case.dim}: {tables.tensor_trains} tensor trains; tables placed: {tables.sharding}")
    suffix = f"dim{case.dim}_batch{case.batch_size}"
    report.figure(
        f"samples_per_second_vs_dense_{suffix}",
        "samples/s with tensor trains over those with TorchRec's dense tables",
        measured.ratios(DENSE, FLOWTT),
    )
    report.figure(
        f"table_bytes_dense_over_flowtt_{suffix}",
        "bytes of all dense tables over those of tensor trains and small tables",
        [timed.tables[DENSE].weight_bytes / timed.tables[FLOWTT].weight_bytes],
    )
    report.figure(
        f"peak_bytes_dense_over_flowtt_{suffix}",
        "memory that model and steps take on the largest rank, dense over tensor trains",
        [memory[DENSE].peak / memory[FLOWTT].peak],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="quick", help="how large a run is (default: quick)")
    parser.add_argument("--dims", type=int, nargs="+", metavar="N", help="columns of the tables")
    parser.add_argument("--batch-sizes", type=int, nargs="+", metavar="N", help="samples a rank and step")
    parser.add_argument("--tt-rank", type=int, metavar="N", help="TT rank (default: 32)")
    parser.add_argument("--min-rows", type=int, metavar="N", help="tables of so many rows become tensor trains")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="ranks (default: 2)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads a rank (default: CPUs over ranks)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results there")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write results there")
    options = parser.parse_args(arguments)
    preset = PRESETS[options.preset]
    given = {
        name: value for name in ("tt_rank", "min_rows", "threads") if (value := getattr(options, name)) is not None
    }
    report = run(
        options.preset,
        dataclasses.replace(preset.request, **given),
        options.dims or preset.dims,
        options.batch_sizes or preset.batch_sizes,
        options.processes,
    )
    for path, write in ((options.json, report.write_json), (options.csv, report.write_csv)):
        if path is not None:
            write(path)
            report.progress(f"wrote {path}")


if __name__ == "__main__":
    main()
