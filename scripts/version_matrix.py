#!/usr/bin/env python3
"""Runs a selection of the tests with every supported torchrec, each beside the torch and fbgemm-gpu that go with it.

    make test-matrix                       every cell; several gigabytes of packages each
    make test-matrix ARGS="--cells 1.9"    one of them

A cell is a folder with a virtual environment, a copy of the tracked files and the log. It is used again if it is there.
pip's own settings hold: PIP_INDEX_URL and the like choose where torch comes from and whether it is a build for the CPU.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Cell:
    """Versions that belong together: torchrec 1.N, fbgemm-gpu 1.N, torch 2.(N+5)."""

    torchrec: str
    torch: str
    fbgemm: str

    @property
    def name(self) -> str:
        return ".".join(self.torchrec.split(".")[:2])


CELLS = (
    Cell("1.6.1", "2.11.0", "1.6.0"),
    Cell("1.7.0", "2.12.1", "1.7.0"),
    Cell("1.8.0", "2.13.0", "1.8.0"),
    Cell("1.9.2", "2.14.1", "1.9.0"),
)
# What depends on the versions of torch and torchrec: the canary, every placement, planner, checkpoints, pipelines, ops.
TESTS = (
    "tests/distributed/test_torchrec_signatures.py",
    "tests/distributed/test_planner.py",
    "tests/distributed/test_storage.py",
    "tests/distributed/test_auto_compression.py",
    "tests/distributed/test_plan_file.py",
    "tests/distributed/test_stats.py",
    "tests/distributed/test_twin_training.py",
    "tests/distributed/test_twin_matrix.py",
    "tests/distributed/test_shared_tables.py",
    "tests/distributed/test_optimizers_in_backward.py",
    "tests/distributed/test_sharder_errors.py",
    "tests/distributed/test_variable_batch.py",
    "tests/distributed/test_data_types.py",
    "tests/distributed/test_fp_embeddingbag.py",
    "tests/distributed/test_pipelines.py",
    "tests/distributed/test_checkpoints.py",
    "tests/distributed/test_reshard_checkpoints.py",
    "tests/distributed/test_conversion.py",
    "tests/test_native.py",
    "tests/test_embedding_bag.py",
    "tests/test_graphs.py",
)
DEVELOPMENT = ("pytest", "pytest-timeout", "hypothesis")


@dataclass
class Result:
    """What became of a cell: the step that failed, or the tests' closing line."""

    cell: Cell
    failed: str = ""
    tests: str = ""
    seconds: dict[str, float] = field(default_factory=dict)


class StepError(Exception):
    """A command of a cell failed; its output is in the cell's log."""


class CellRun:
    """The steps of one cell, each a method that may be repeated."""

    def __init__(self, cell: Cell, folder: Path) -> None:
        self.cell = cell
        self.folder = folder / f"torchrec-{cell.name}"
        self.source = self.folder / "source"
        self.python = self.folder / "venv" / "bin" / "python"
        self.log = self.folder / "log.txt"

    def install(self) -> None:
        """The packages. A shim of this cell's version stands for fbgemm-gpu, as in requirements/cpu.txt."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.python.exists():
            self._run(sys.executable, "-m", "venv", str(self.folder / "venv"))
        shim = self.folder / "shim"
        shim.mkdir(exist_ok=True)
        text = (ROOT / "requirements" / "fbgemm-gpu-shim" / "pyproject.toml").read_text()
        (shim / "pyproject.toml").write_text(re.sub(r"\d+\.\d+\.\d+(?=\+cpu|\"\])", self.cell.fbgemm, text))
        pinned = {"torch": self.cell.torch, "torchrec": self.cell.torchrec}
        base = (ROOT / "requirements" / "base.txt").read_text().splitlines()
        others = [line for line in base if line and not line.startswith("#") and line.split("==")[0] not in pinned]
        versions = [f"{name}=={version}" for name, version in pinned.items()]
        self._run(self.python, "-m", "pip", "install", "--quiet", *versions, *others, *DEVELOPMENT, str(shim))
        self._run(self.python, "-m", "pip", "check")

    def build(self) -> None:
        """The compiled ops, from a copy of the tracked files as they are now."""
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        wanted = {Path(name) for name in listed.split("\0") if name and (ROOT / name).exists()}
        for name in wanted:
            target = self.source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)  # with its time, so that only what changed is compiled again
        for path in [path for path in self.source.rglob("*.py") if path.relative_to(self.source) not in wanted]:
            path.unlink()
        self._run(self.python, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "-e", ".")

    def test(self, selection: list[str]) -> str:
        """The tests' closing line."""
        output = self._run(self.python, "-m", "pytest", "-q", *selection)
        return output.strip().splitlines()[-1].strip("= ")

    def _run(self, *command: str | Path) -> str:
        environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "FLOWTT_BUILD_CUDA": "0"}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(
            [str(part) for part in command],
            cwd=self.source if self.source.exists() else self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(map(str, command))}\n{done.stdout}\n")
        if done.returncode:
            last = done.stdout.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
            raise StepError(last[0].strip("= "))
        return done.stdout


def run_cell(cell: Cell, folder: Path, selection: list[str], install_only: bool) -> Result:
    run, result = CellRun(cell, folder), Result(cell)
    run.log.unlink(missing_ok=True)
    steps = {"install": run.install, "build": run.build, "tests": lambda: run.test(selection)}
    for step, perform in steps.items():
        if install_only and step != "install":
            break
        print(f"== torchrec {cell.torchrec}, torch {cell.torch}: {step}", flush=True)
        start = time.monotonic()
        try:
            result.tests = perform() or result.tests
        except StepError as error:
            result.failed = f"{step}: {error}; see {run.log}"
            break
        finally:
            result.seconds[step] = time.monotonic() - start
    return result


def table(results: list[Result]) -> str:
    """The results, in Markdown."""
    lines = ["| torchrec | torch | fbgemm-gpu-cpu | result | seconds |", "|---|---|---|---|---|"]
    for result in results:
        cell = result.cell
        seconds = ", ".join(f"{step} {spent:.0f}" for step, spent in result.seconds.items())
        outcome = result.failed or result.tests or "installed"
        lines.append(f"| {cell.torchrec} | {cell.torch} | {cell.fbgemm} | {outcome} | {seconds} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [cell.name for cell in CELLS]
    parser.add_argument("--cells", nargs="+", choices=names, default=names, help="versions of torchrec")
    parser.add_argument("--folder", type=Path, default=ROOT / ".matrix", help="where the cells are")
    parser.add_argument("--install-only", action="store_true", help="make the environments, run nothing")
    parser.add_argument("--delete", action="store_true", help="delete a cell when it is done")
    parser.add_argument("tests", nargs="*", help="instead of the selection, after --")
    arguments = parser.parse_args()
    results = []
    for cell in CELLS:
        if cell.name not in arguments.cells:
            continue
        folder = arguments.folder.resolve()
        results.append(run_cell(cell, folder, arguments.tests or list(TESTS), arguments.install_only))
        if arguments.delete and not results[-1].failed:
            shutil.rmtree(CellRun(cell, folder).folder)
        print(table(results), flush=True)
    return 1 if any(result.failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
