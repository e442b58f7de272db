"""The version matrix names what is there, and what the package says that it supports."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    spec = importlib.util.spec_from_file_location("version_matrix", ROOT / "scripts" / "version_matrix.py")
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_the_selection_exists(matrix: ModuleType) -> None:
    for path in matrix.TESTS:
        assert (ROOT / path).exists(), f"{path} has moved; say so in scripts/version_matrix.py"


def test_versions_go_together_and_are_all_that_are_supported(matrix: ModuleType) -> None:
    from flowtt_torchrec.distributed import compat

    for cell in matrix.CELLS:
        major, minor = map(int, cell.name.split("."))
        assert cell.fbgemm.startswith(f"{major}.{minor}.")
        assert cell.torch.startswith(f"2.{minor + 5}.")
    names = [tuple(map(int, cell.name.split("."))) for cell in matrix.CELLS]
    oldest, newest = compat.OLDEST, compat.NEWEST_TESTED
    assert names == [(oldest[0], minor) for minor in range(oldest[1], newest[1] + 1)]
    tested = dict(re.findall(r"^(torch|torchrec)==(.*)$", (ROOT / "requirements" / "base.txt").read_text(), re.M))
    assert (tested["torchrec"], tested["torch"]) in {(cell.torchrec, cell.torch) for cell in matrix.CELLS}


def test_a_cell_that_fails_is_a_line_of_the_table_and_the_others_run(
    matrix: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def install(self: object) -> None:
        if self.cell.name == "1.7":  # type: ignore[attr-defined]
            raise matrix.StepError("no such version")

    monkeypatch.setattr(matrix.CellRun, "install", install)
    monkeypatch.setattr(matrix.CellRun, "build", lambda self: None)
    monkeypatch.setattr(matrix.CellRun, "test", lambda self, selection: f"3 passed of {selection}")
    monkeypatch.setattr(
        sys, "argv", ["version_matrix.py", "--folder", str(tmp_path), "--cells", "1.7", "1.8", "--", "a"]
    )
    assert matrix.main() == 1
    rows = capsys.readouterr().out.strip().splitlines()[-2:]
    assert rows[0].startswith("| 1.7.0 | 2.12.1 | 1.7.0 | install: no such version; see")
    assert rows[1].startswith("| 1.8.0 | 2.13.0 | 1.8.0 | 3 passed of ['a'] |")
