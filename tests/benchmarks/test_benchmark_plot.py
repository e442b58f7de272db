from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks import lookup, plot
from benchmarks.presets import PRESETS
from benchmarks.report import load


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "r.csv"
    questions = ["comparison", "growth", "distributions", "ranks", "flow_shapes"]
    lookup.run(PRESETS["smoke"], questions, 1, ["test"]).write_csv(path)
    return path


def test_select() -> None:
    rows = [{"a": 1, "b": "x"}, {"a": 2, "b": "x"}, {"a": 3, "b": "y"}]
    assert plot.select(rows, b="x") == rows[:2]
    assert plot.select(rows, a=(1, 3)) == [rows[0], rows[2]]


def test_all_plots_that_have_numbers_are_drawn(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = plot.draw_all([results], tmp_path / "plots")
    assert {path.stem for path in written} == {
        *("ratios", "time_by_distribution", "time_by_batch", "ranks_against_baselines", "flow_shape_gains"),
        *("breakdown", "memory_and_time"),
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


class Axes:
    """Takes the place of matplotlib's axes and remembers what was drawn."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    def __getattr__(self, name: str) -> object:
        return lambda *args, **kwargs: self.calls.append((name, args))


def test_plots_read_what_the_benchmark_writes(results: Path) -> None:
    rows, figures = load(results)
    axes = Axes()
    assert plot.ratios(rows, figures, axes)
    heights = [args[1] for name, args in axes.calls if name == "bar"]
    assert heights[0] == [
        figures["forward_vs_ttrec_zipf"],
        figures["step_vs_ttrec_zipf"],
        1 / figures["step_vs_tbe_zipf"],
        1 / figures["flow_shape_step_vs_tbe_zipf"],
    ]
    for draw in (plot.time_by_distribution, plot.time_by_batch, plot.breakdown, plot.memory_and_time):
        assert draw(rows, figures, Axes())
    assert not plot.training(rows, figures, Axes())


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = "there is no file" if importlib.util.find_spec("matplotlib") else "plots need matplotlib"
    with pytest.raises(SystemExit):
        plot.main([str(tmp_path / "none.csv")])
    assert message in capsys.readouterr().err
