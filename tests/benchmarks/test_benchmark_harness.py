from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.environment import CpuWatch, describe
from benchmarks.harness import Action, Effort, Measurement, Statistics, measure
from benchmarks.report import COLUMNS, Report, load


def test_statistics() -> None:
    assert Statistics.of([3.0, 1.0, 2.0, 5.0, 4.0]) == Statistics(3.0, 1.0, pytest.approx(1.4), pytest.approx(4.6), 5)
    assert Statistics.of([7.0]) == Statistics(7.0, 7.0, 7.0, 7.0, 1)


def test_rounds_are_interleaved_in_alternating_order() -> None:
    calls: list[str] = []
    effort = Effort(rounds=3, min_rounds=3, seconds=0.0, visit_seconds=0.0)
    actions = {name: Action(lambda _, n=name: calls.append(n), lambda call: call) for name in "ab"}
    measured = measure(actions, effort)
    # With no time for a visit each one is a single call; the first two are for the estimates.
    assert calls == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert [len(samples) for samples in measured.seconds.values()] == [3, 3]


class Clock:
    """Stands in for the time module: time passes only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("benchmarks.harness.time", made)
    return made


def test_setup_is_not_timed_and_counts_calls(clock: Clock) -> None:
    numbers: list[int] = []

    def setup(call: int) -> int:
        clock.sleep(100)
        return call

    def run(call: int) -> None:
        numbers.append(call)
        clock.sleep(2 if call % 2 else 4)

    effort = Effort(rounds=2, seconds=1e9, visit_seconds=9, max_calls=3)
    measured = measure({"a": Action(run, setup)}, effort)
    # Two calls for the estimate; then in each round one that is not counted and three of 2, 4 and 2.
    assert numbers == list(range(10))
    assert measured.seconds["a"] == [2, 2]


def test_long_calls_are_made_once_a_round(clock: Clock) -> None:
    calls: list[int] = []

    def run(call: int) -> None:
        calls.append(call)
        clock.sleep(5)

    measured = measure({"a": Action(run, lambda call: call)}, Effort(rounds=3, seconds=1e9, visit_seconds=0.1))
    assert measured.seconds["a"] == [5, 5, 5]
    assert calls == [0, 1, 2, 3]


def test_rounds_end_when_time_is_up(clock: Clock) -> None:
    action = Action(lambda _: clock.sleep(1), lambda call: call)
    effort = Effort(rounds=50, min_rounds=2, seconds=3.5, visit_seconds=0.1)
    assert len(measure({"a": action}, effort).seconds["a"]) == 4
    assert len(measure({"a": action}, Effort(rounds=50, min_rounds=2, seconds=0)).seconds["a"]) == 2


def test_ratios_are_taken_round_by_round() -> None:
    measured = Measurement({"a": [2.0, 6.0], "b": [1.0, 2.0]})
    assert measured.ratios("a", "b") == [2.0, 3.0]
    assert measured.map_rounds(lambda s: s["a"] + s["b"]) == [3.0, 8.0]


def test_other_processes_share_is_what_is_not_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = iter([(10.0, 100.0, 30.0), (14.0, 107.0, 34.0), (14.0, 103.0, 34.0)])  # clock, all work, our own
    monkeypatch.setattr(CpuWatch, "_read", staticmethod(lambda: next(reads)))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    watch = CpuWatch()
    assert watch.other_cores() == pytest.approx(0.75)
    assert watch.other_cores() == 0  # rounding to ticks must not make it negative


def test_cpu_counts_are_read() -> None:
    clock, busy, own = CpuWatch._read()
    assert busy > own > 0
    assert clock > 0


def report(terminal: bool = False) -> tuple[Report, io.StringIO]:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=200)
    return Report("lookup", "smoke", describe(["python", "-m", "x"]), console), text


def test_report_files_and_what_load_reads(tmp_path: Path) -> None:
    made, _ = report()
    measured = Measurement({"x": [0.001, 0.003], "y": [0.002, 0.002]}, other_cores=1.5)
    made.add_times(
        measured,
        {"x": {"contender": "a", "operation": "step"}, "y": {"contender": "b", "operation": "step"}},
        question="comparison",
        p="3·4",
    )
    made.figure("speedup", "how much", measured.ratios("y", "x"))
    made.note("a remark")
    made.write_json(tmp_path / "new" / "r.json")
    made.write_csv(tmp_path / "new" / "r.csv")

    data = json.loads((tmp_path / "new" / "r.json").read_text())
    assert data["figures"] == {"speedup": pytest.approx((2 + 2 / 3) / 2)}
    assert data["figure_details"]["speedup"]["meaning"] == "how much"
    assert data["rows"][0]["median"] == pytest.approx(2.0)
    assert data["rows"][0]["samples"] == [pytest.approx(1.0), pytest.approx(3.0)]
    assert data["machine"]["busy"] is True
    assert data["environment"]["versions"]["torch"]
    assert data["notes"] == ["a remark"]

    text = (tmp_path / "new" / "r.csv").read_text()
    assert "# machine: BUSY MACHINE" in text
    header = next(csv.reader(line for line in text.splitlines() if not line.startswith("#")))
    assert header == list(COLUMNS)
    for name in ("r.json", "r.csv"):
        rows, figures = load(tmp_path / "new" / name)
        assert [row["contender"] for row in rows] == ["a", "b"]
        assert rows[0]["p"] == "3·4"
        assert rows[1]["median"] == pytest.approx(2.0)
        assert figures["speedup"] == pytest.approx(4 / 3, rel=1e-4)


def test_unknown_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="widht"):
        report()[0].add([1.0], "ms", widht=3)


@pytest.mark.parametrize("terminal", [False, True])
def test_screen_shows_times_and_a_busy_machine(terminal: bool) -> None:
    made, text = report(terminal)
    made.add_times(Measurement({"x": [0.001]}, other_cores=1.0), {"x": {"contender": "a"}}, question="comparison")
    made.figure("speedup", "how much", [2.5])
    made.show_figures()
    assert "1.000" in text.getvalue()
    assert "1.0!" in text.getvalue()
    assert "speedup" in text.getvalue()
    assert "BUSY MACHINE: other processes used 1.00 cores" in text.getvalue()


def test_a_quiet_machine_is_called_so() -> None:
    made, _ = report()
    made.add_times(Measurement({"x": [0.001]}, other_cores=0.05), {"x": {"contender": "a"}}, question="comparison")
    assert made.busy()["busy"] is False
    assert made.busy()["message"].startswith("quiet machine")
