from __future__ import annotations

from pathlib import Path

import pytest

from flowtt_torchrec.datasets import DataError
from flowtt_torchrec.datasets.files import find_files

PATTERNS = (r"train\.txt(\.gz)?", r"day_\d+(\.gz)?", r"[^._].*\.tsv")


def _names(folder: Path) -> list[str]:
    return [path.name for path in find_files(folder, PATTERNS, "data")]


def test_natural_order_and_nothing_else(tmp_path: Path) -> None:
    for name in ("day_10", "day_2", "day_1.gz", "day_0_dense.npy", ".day_3", "terms.tsv", "readme.md"):
        (tmp_path / name).touch()
    (tmp_path / "day_7").mkdir()
    assert _names(tmp_path) == ["day_1.gz", "day_2", "day_10"]


def test_the_first_pattern_that_matches_decides(tmp_path: Path) -> None:
    (tmp_path / "b.tsv").touch()
    (tmp_path / "a.tsv").touch()
    assert _names(tmp_path) == ["a.tsv", "b.tsv"]
    (tmp_path / "train.txt").touch()
    (tmp_path / "test.txt").touch()
    assert _names(tmp_path) == ["train.txt"]


def test_a_file_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "sample.csv").touch()
    assert find_files(tmp_path / "sample.csv", PATTERNS, "data") == [tmp_path / "sample.csv"]


def test_errors_name_the_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        find_files(tmp_path / "nowhere", PATTERNS, "data")
    with pytest.raises(DataError, match=r"holds no data: expected day_0.*found nothing"):
        find_files(tmp_path, PATTERNS, "day_0")
    (tmp_path / "notes.md").touch()
    with pytest.raises(DataError, match=r"found notes\.md"):
        find_files(tmp_path, PATTERNS, "day_0")
    (tmp_path / "day_0").touch()
    (tmp_path / "day_0.gz").touch()
    with pytest.raises(DataError, match=r"both day_0 and day_0\.gz"):
        find_files(tmp_path, PATTERNS, "day_0")
