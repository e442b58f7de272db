"""Results of a run: rows and figures, as JSON, as CSV and on the screen."""

from __future__ import annotations

import csv
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.environment import BUSY_CORES
from benchmarks.harness import Measurement, Statistics
from flowtt_torchrec.table_text import print_table

VERSION = 1
# Columns of a result row, and of the CSV. A row's numbers are in its unit: ms, bytes, count or ratio.
COLUMNS = (
    *("question", "contender", "operation", "optimizer"),
    *("distribution", "lookups", "pooling", "tables", "rows", "dim", "p", "q", "ranks", "parameters", "threads"),
    *("unit", "median", "min", "p10", "p90", "rounds", "other_cores"),
)
FIGURES = "figures"  # the question of figures in the CSV
_SHOWN = (
    "contender",
    "operation",
    "optimizer",
    "distribution",
    "lookups",
    "pooling",
    "tables",
    "dim",
    "ranks",
    "threads",
)


@dataclass(frozen=True)
class Figure:
    """A number that a run is about.

    Attributes:
        meaning: what it is, and which way is better.
        statistics: over rounds; a figure made of other numbers has a single one.
    """

    meaning: str
    statistics: Statistics


class Report:
    """Collects results and prints them as they come.

    Args:
        benchmark: name of the benchmark.
        preset: name of the preset.
        environment: as `benchmarks.environment.describe` gives it.
        console: where to print; a terminal gets tables, anything else plain lines.
    """

    def __init__(
        self, benchmark: str, preset: str, environment: Mapping[str, Any], console: Console | None = None
    ) -> None:
        self.benchmark = benchmark
        self.preset = preset
        self.environment = dict(environment)
        self.rows: list[dict[str, Any]] = []
        self.figures: dict[str, Figure] = {}
        self.notes: list[str] = []
        self._other_cores: list[float] = []
        self._console = Console() if console is None else console
        self._begin = time.perf_counter()

    # --- collecting ---

    def add(self, samples: Sequence[float], unit: str, *, other_cores: float | None = None, **columns: Any) -> None:
        """Adds a row: samples in ``unit``, and values for other `COLUMNS`."""
        unknown = set(columns) - set(COLUMNS)
        if unknown:
            raise ValueError(f"unknown result columns {sorted(unknown)}; known: {', '.join(COLUMNS)}")
        row: dict[str, Any] = {"threads": self.environment["threads"]}
        row.update(columns, unit=unit, **asdict(Statistics.of(samples)))
        row["other_cores"] = "" if other_cores is None else round(other_cores, 2)
        row["samples"] = list(samples)
        self.rows.append(row)

    def add_times(
        self, measurement: Measurement, actions: Mapping[str, Mapping[str, Any]], **columns: Any
    ) -> list[dict[str, Any]]:
        """Adds and prints the times of a measurement in ms.

        Args:
            measurement: what was measured.
            actions: columns of each of its actions.
            **columns: columns that all of them share.

        Returns:
            The rows.
        """
        start = len(self.rows)
        for action, own in actions.items():
            seconds = measurement.seconds[action]
            merged = {**columns, **own}
            self.add([1e3 * s for s in seconds], "ms", other_cores=measurement.other_cores, **merged)
        self._other_cores.append(measurement.other_cores)
        rows = self.rows[start:]
        self.show(rows)
        return rows

    def figure(self, name: str, meaning: str, samples: Sequence[float]) -> None:
        """Adds a figure from one sample a round, or from a single number."""
        self.figures[name] = Figure(meaning, Statistics.of(samples))

    def note(self, text: str) -> None:
        """Adds and prints a remark that the results need."""
        self.notes.append(text)
        self.progress(f"note: {text}")

    # --- busy machine ---

    def busy(self) -> dict[str, Any]:
        """How much other processes disturbed the run."""
        cores = self._other_cores or [0.0]
        disturbed = sum(c > BUSY_CORES for c in cores)
        median, most = statistics.median(cores), max(cores)
        used = f"other processes used {median:.2f} cores in the median measurement, {most:.2f} at most"
        busy = disturbed > 0.1 * len(cores)
        loud = f"{disturbed} of {len(cores)} had more than {BUSY_CORES}. Times are too long, ratios less so"
        return {
            "busy": busy,
            "measurements": len(cores),
            "disturbed_measurements": disturbed,
            "other_cores_median": round(median, 3),
            "other_cores_max": round(most, 3),
            "threshold_cores": BUSY_CORES,
            "message": f"BUSY MACHINE: {used}; {loud}" if busy else f"quiet machine: {used}",
        }

    # --- files ---

    def to_dict(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "version": VERSION,
            "preset": self.preset,
            "environment": self.environment,
            "machine": self.busy(),
            "seconds": round(time.perf_counter() - self._begin, 1),
            "figures": {name: figure.statistics.median for name, figure in self.figures.items()},
            "figure_details": {
                name: {"meaning": figure.meaning, **asdict(figure.statistics)} for name, figure in self.figures.items()
            },
            "notes": self.notes,
            "rows": self.rows,
        }

    def write_json(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def write_csv(self, path: Path) -> None:
        """Writes rows and figures; lines that start with ``#`` say what they were measured on."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            for key, value in self.environment.items():
                file.write(f"# {key}: {value}\n")
            file.write(f"# machine: {self.busy()['message']}\n")
            for note in self.notes:
                file.write(f"# note: {note}\n")
            writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(_rounded(row) for row in self.rows)
            for name, figure in self.figures.items():
                numbers = asdict(figure.statistics)
                writer.writerow(_rounded({"question": FIGURES, "operation": name, "unit": "ratio", **numbers}))

    # --- screen ---

    def progress(self, text: str) -> None:
        self._line(f"[{time.perf_counter() - self._begin:6.1f} s] {text}")

    def show_environment(self) -> None:
        for key, value in self.environment.items():
            if isinstance(value, dict):
                value = ", ".join(f"{k} {v}" for k, v in value.items())
            elif isinstance(value, list):
                value = " ".join(map(str, value))
            self._line(f"{key:>14}: {value}")

    def show(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Prints rows; what they have in common goes to the title."""
        values = {c: {row[c] for row in rows if row.get(c, "") not in ("", None)} for c in _SHOWN}
        shared = {c: next(iter(v), None) for c, v in values.items() if c not in _SHOWN[:2] and len(v) < 2}
        columns = [c for c in _SHOWN if c not in shared]
        lines = [
            [
                *(str(row.get(c, "")) for c in columns),
                *(_amount(row[c], row["unit"]) for c in ("median", "min", "p10", "p90")),
                row["unit"].replace("bytes", "MB"),
                str(row["rounds"]),
                str(row["other_cores"]) + ("!" if row["other_cores"] and row["other_cores"] > BUSY_CORES else ""),
            ]
            for row in rows
        ]
        title = ", ".join([str(rows[0]["question"]), *(f"{c} {v}" for c, v in shared.items() if v is not None)])
        heads = [*columns, "median", "min", "p10", "p90", "unit", "rounds", "other cores"]
        print_table(title, heads, lines, text_columns=[*columns, "unit"], console=self._console)

    def show_figures(self) -> None:
        lines = [
            [name, *(f"{n:.3g}" for n in (f.statistics.median, f.statistics.p10, f.statistics.p90)), f.meaning]
            for name, f in self.figures.items()
        ]
        heads = ["figure", "median", "p10", "p90", "meaning"]
        print_table("figures", heads, lines, text_columns=["figure", "meaning"], console=self._console)
        self._line(self.busy()["message"])

    def _line(self, text: str) -> None:
        # One line for a log, whatever its width; rich would break it.
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def load(path: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows and figures of a JSON or CSV file."""
    if path.suffix == ".json":
        data = json.loads(path.read_text(encoding="utf-8"))
        return data["rows"], data["figures"]
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    rows: list[dict[str, Any]] = [{k: _number(v) for k, v in row.items()} for row in csv.DictReader(lines)]
    figures = {row["operation"]: row["median"] for row in rows if row["question"] == FIGURES}
    return [row for row in rows if row["question"] != FIGURES], figures


def _number(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}


def _amount(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 1e6:,.2f}"
    if unit == "ms":
        return f"{value:,.3f}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
