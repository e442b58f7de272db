"""Preparing click data once, and reading it by position."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.datasets.utils import Batch

pa = pytest.importorskip("pyarrow")
import pyarrow.csv  # noqa: E402
import pyarrow.parquet  # noqa: E402

from flowtt_torchrec.datasets import CriteoTSV, DataError, PreparedClicks, Sharding, is_prepared  # noqa: E402
from flowtt_torchrec.datasets.prefetch import Prefetcher  # noqa: E402
from flowtt_torchrec.datasets.prepared import prepare as preparation  # noqa: E402
from flowtt_torchrec.datasets.prepared import row_order, source_files  # noqa: E402
from flowtt_torchrec.datasets.prepared.prepare import prepare, verify  # noqa: E402
from flowtt_torchrec.datasets.prepared.source_files import Columns  # noqa: E402

Lines = Callable[..., list[str]]
SIZES = [3, 1000, 2_000_000_000, *range(1, 24)]
ROWS = 500


def _silent(text: str) -> None:
    """For ``say``."""


def _prepare(source: Path, target: Path, **options: Any) -> Any:
    options.setdefault(
        "num_embeddings", None if options.get("ids") == "contiguous" or "like" in options else SIZES[:2] + [10] * 24
    )
    return prepare(source, target, say=_silent, **options)


def _whole(folder: Path, split: Any = "train", **options: Any) -> Batch:
    """All rows of a split in one batch, as they lie."""
    options.setdefault("shuffle", False)
    (batch,) = PreparedClicks(folder, Sharding(100_000), **options).batches(split)
    return batch


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _arrays(folder: Path) -> dict[str, bytes]:
    """What a reader of the npy files sees: the manifest has the names of the sources too."""
    return {name: content for name, content in _files(folder).items() if name.endswith(".npy")}


@pytest.fixture
def days(tmp_path: Path, criteo_lines: Lines) -> Path:
    folder = tmp_path / "days"
    folder.mkdir()
    for day in range(3):
        (folder / f"day_{day}").write_text("\n".join(criteo_lines(ROWS, seed=day)) + "\n")
    return folder


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small file has many blocks."""
    monkeypatch.setattr(source_files, "BLOCK_BYTES", 7000)


@pytest.mark.usefixtures("small_blocks")
def test_prepared_rows_are_those_of_the_text(days: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    manifest = _prepare(days, out, workers=2, num_embeddings=[min(size, 2**31 - 1) for size in SIZES])
    assert [part.name for part in manifest.parts] == ["day_0", "day_1", "day_2"]
    assert is_prepared(out)
    assert not is_prepared(days)
    batch = _whole(out)
    sizes = manifest.num_embeddings
    text = CriteoTSV(days / "day_0", sizes, Sharding(100_000), val_path=days / "day_1")
    expected = [next(text.batches(split)) for split in ("train", "val")]
    for part, rows in zip(expected, (slice(0, ROWS), slice(ROWS, 2 * ROWS))):
        torch.testing.assert_close(batch.dense_features[rows], part.dense_features, rtol=0, atol=0)
        torch.testing.assert_close(batch.labels[rows], part.labels, rtol=0, atol=0)
        ids = batch.sparse_features.values().view(26, -1)[:, rows]
        torch.testing.assert_close(ids, part.sparse_features.values().view(26, -1), rtol=0, atol=0)
    verify(out, _silent)
    # the last day in halves, as TorchRec's loader has day 23
    assert [len(_whole(out, split).labels) for split in ("train", "val", "test")] == [2 * ROWS, ROWS // 2, ROWS // 2]


@pytest.mark.usefixtures("small_blocks")
def test_every_format_gives_the_same_rows(tmp_path: Path, criteo_lines: Lines) -> None:
    text = ("\n".join(criteo_lines(ROWS)) + "\n").encode()
    columns = source_files.CRITEO
    names = [columns.label, *columns.dense, *columns.sparse]
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "plain.tsv").write_bytes(text)
    (sources / "windows.tsv").write_bytes(text.replace(b"\n", b"\r\n"))
    (sources / "no_end.tsv").write_bytes(text.rstrip(b"\n"))
    (sources / "zipped.tsv.gz").write_bytes(gzip.compress(text))
    with pa.output_stream(str(sources / "zstandard.tsv.zst"), compression="zstd") as stream:
        stream.write(text)
    commas = text.replace(b"\t", b",")
    (sources / "bare.csv").write_bytes(commas)
    (sources / "header.csv").write_bytes(
        ",".join(["extra", *names]).encode() + b"\n" + b"\n".join(b"x," + line for line in commas.split(b"\n")[:-1])
    )
    table = pyarrow.csv.read_csv(
        pa.BufferReader(text),
        read_options=pyarrow.csv.ReadOptions(column_names=names),
        parse_options=pyarrow.csv.ParseOptions(delimiter="\t"),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types={name: pa.string() for name in columns.sparse}, strings_can_be_null=True
        ),
    )
    pyarrow.parquet.write_table(table.select(list(reversed(names))), sources / "reversed.parquet")
    expected = None
    for source in sorted(sources.iterdir()):
        out = tmp_path / "out" / source.name
        _prepare(source, out, columns=columns, split="none")
        found = [*_whole(out).sparse_features.values().tolist(), *_whole(out).dense_features.flatten().tolist()]
        expected = expected or found
        assert found == expected, source.name


def test_numbered_ids_go_by_frequency_and_rare_ones_share_row_0(tmp_path: Path) -> None:
    ids = [7] * 5 + [3] * 9 + [8] * 5 + [1] * 2
    table = pa.table({"y": [i % 2 for i in range(len(ids))], "x": [0.5] * len(ids), "id": ids})
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    columns = Columns("y", ["x"], ["id"])
    manifest = _prepare(
        tmp_path / "train.parquet",
        tmp_path / "out",
        columns=columns,
        ids="contiguous",
        frequency_threshold=3,
        split="none",
    )
    assert manifest.num_embeddings == [4]
    assert manifest.tables == ["t_id"]
    np.testing.assert_array_equal(np.load(tmp_path / "out/vocabulary/t_id.npy"), [3, 7, 8])
    rows = _whole(tmp_path / "out").sparse_features.values().tolist()
    assert rows == [2] * 5 + [1] * 9 + [3] * 5 + [0] * 2
    with np.load(tmp_path / "out/counts/t_id.npz") as counts:
        assert (counts["rows"].tolist(), counts["counts"].tolist()) == ([1, 2, 3, 0], [9, 5, 5, 2])
        assert (int(counts["distinct"]), int(counts["total"])) == (4, 21)

    pyarrow.parquet.write_table(pa.table({"x": [1.0, 1.0], "id": [8, 99]}), tmp_path / "score.parquet")
    _prepare(
        tmp_path / "score.parquet",
        tmp_path / "score",
        columns=Columns(None, ["x"], ["id"]),
        like=tmp_path / "out",
        split="none",
    )
    batch = _whole(tmp_path / "score")
    assert batch.sparse_features.values().tolist() == [3, 0]
    assert batch.labels.tolist() == [-1, -1]


def test_text_ids_are_hashed(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pa.table({"y": [0, 1, 1], "id": ["blue", None, "blue"]}), tmp_path / "t.parquet")
    columns = Columns("y", [], ["id"], hexadecimal=False)
    for rule in ("hash", "modulo"):
        _prepare(tmp_path / "t.parquet", tmp_path / rule, columns=columns, ids=rule, num_embeddings=1000, split="none")
        first, missing, again = _whole(tmp_path / rule).sparse_features.values().tolist()
        assert first == again != missing


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("ids", ["modulo", "contiguous"])
def test_a_stopped_run_goes_on_to_the_same_bytes(days: Path, tmp_path: Path, ids: str) -> None:
    _prepare(days, tmp_path / "whole", ids=ids)

    class StopError(Exception):
        pass

    def stop_at(text: str) -> Callable[[str], None]:
        def say(line: str) -> None:
            if text in line:
                raise StopError

        return say

    broken = tmp_path / "broken"
    sizes = None if ids == "contiguous" else SIZES[:2] + [10] * 24
    for place in ("day_0:", "day_1:", "counting rows"):
        with pytest.raises(StopError):
            prepare(days, broken, ids=ids, num_embeddings=sizes, say=stop_at(place))
        assert not (broken / "manifest.json").exists()
    with pytest.raises(DataError, match=r"beginning of another preparation"):
        _prepare(days, broken, ids="hash")
    lines: list[str] = []
    prepare(days, broken, ids=ids, num_embeddings=sizes, say=lines.append)
    assert "day_0: 500 rows are there already" in lines
    assert _files(broken) == _files(tmp_path / "whole")
    with pytest.raises(DataError, match="is not empty"):
        _prepare(days, broken, ids=ids)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bytes(days: Path, tmp_path: Path, criteo_lines: Lines) -> None:
    (days / "day_1").write_text("\n".join(criteo_lines(60_000, seed=1)) + "\n")
    _prepare(days, tmp_path / "whole")
    sizes = ",".join(map(str, SIZES[:2] + [10] * 24))
    command = [sys.executable, "-m", "flowtt_torchrec", "prepare", str(days), str(tmp_path / "broken")]
    process = subprocess.Popen([*command, "--num-embeddings", sizes], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("day_0"):
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    assert not (tmp_path / "broken/manifest.json").exists()
    subprocess.run([*command, "--num-embeddings", sizes], check=True, stdout=subprocess.DEVNULL)
    assert _files(tmp_path / "broken") == _files(tmp_path / "whole")


@pytest.mark.usefixtures("small_blocks")
def test_bad_rows_stop_the_run_or_are_left_out(days: Path, tmp_path: Path) -> None:
    lines = (days / "day_1").read_text().splitlines()
    lines[70] = lines[70].replace("\t", "\tx", 1)
    lines[300] = "0\t1"
    lines[301] = ""
    (days / "day_1").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"day_1:71: integer 1 .*is 'x"):
        _prepare(days, tmp_path / "out")
    assert "day_1_dense.npy" not in os.listdir(tmp_path / "out")
    with pytest.raises(DataError, match=r"1 of the first \d+ rows are bad, more than a share of 0.001"):
        _prepare(days, tmp_path / "share", skip_bad_rows=True)
    said: list[str] = []
    manifest = prepare(
        days, tmp_path / "skip", num_embeddings=10, skip_bad_rows=True, max_bad_share=0.02, say=said.append
    )
    assert [(part.rows, part.skipped) for part in manifest.parts] == [(ROWS, 0), (ROWS - 3, 3), (ROWS, 0)]
    assert [line for line in said if line.startswith("left out") and "day_1:301" in line]
    assert said[-1].endswith("3 bad rows left out")


def _truncate(folder: Path) -> None:
    path = folder / "day_0_sparse.npy"
    path.write_bytes(path.read_bytes()[:-100])


def _flip(folder: Path) -> None:
    path = folder / "day_0_labels.npy"
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)


def _save(name: str, array: np.ndarray) -> Callable[[Path], None]:
    return lambda folder: np.save(folder / name, array)


def _edit(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**content, **changes}))

    return edit


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (_truncate, r"day_0_sparse.npy: is no whole npy file"),
    "flipped bit": (_flip, r"day_0_labels.npy: the content is not what was prepared"),
    "missing": (lambda folder: (folder / "day_1_dense.npy").unlink(), r"day_1_dense.npy is missing"),
    "pickled": (_save("day_0_dense.npy", np.array([{}], dtype=object)), r"day_0_dense.npy: is no whole npy file"),
    "other type": (_save("day_0_dense.npy", np.zeros((ROWS, 13))), r"elements are float64, they must be float32"),
    "other shape": (
        _save("day_0_sparse.npy", np.zeros((ROWS, 25), np.int32)),
        r"day_0_sparse.npy: the shape is \[500, 25\], it must be \[rows, 26\]",
    ),
    "fewer rows": (_save("day_0_labels.npy", np.zeros((7, 1), np.int32)), r"500 rows of dense features, .* 7 labels"),
    "no manifest": (
        lambda folder: (folder / "manifest.json").write_text("{"),
        r"manifest.json: the manifest is damaged",
    ),
    "later version": (_edit(version=2), r"version 2 is not known here"),
    "overlap": (
        _edit(split={"train": [["day_0", 0, 9]], "val": [["day_0", 8, 10]], "test": []}),
        r"rows 8 to 9 of day_0 are in train and in val",
    ),
    "split past the end": (
        _edit(split={"train": [["day_0", 0, 9999]], "val": [], "test": []}),
        r"rows 0 to 9999 of day_0, which has 500",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(days: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    _prepare(days, out)
    damage, message = DAMAGE[kind]
    damage(out)

    def read_and_verify() -> None:
        list(PreparedClicks(out, Sharding(100)).batches("val"))
        verify(out, _silent)

    with pytest.raises(DataError, match=message):
        read_and_verify()


def _no_permission(folder: Path) -> None:
    """A file where the folder should be: root may write anywhere."""
    (folder.parent / "out").write_text("")


SOURCES: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "twice": (lambda f: (f / "day_1.gz").write_bytes(b""), {}, r"holds both day_1 and day_1.gz"),
    "same part": (lambda f: (f / "day_1.tsv").write_bytes(b""), {}, r"would both become part 'day_1'"),
    "missing day": (lambda f: (f / "day_1").unlink(), {}, r"day_1 is missing between day_0 and day_2"),
    "damaged gzip": (
        lambda f: ((f / "day_1").unlink(), (f / "day_1.gz").write_bytes(gzip.compress(b"0\t" * 9999)[:-9])),
        {},
        r"day_1.gz: cannot be read",
    ),
    "not Parquet": (
        lambda f: [(p.rename(p.with_suffix(".parquet"))) for p in f.iterdir()],
        {},
        r"content is not Parquet",
    ),
    "no such column": (
        lambda f: [p.rename(p.with_suffix(".csv")) for p in f.iterdir()],
        {"columns": Columns("y", ["a"], ["b"])},
        r"day_0.csv: the first line has 1 columns .* no y, a, b",
    ),
    "sizes": (lambda f: None, {"num_embeddings": [1, 2]}, r"num_embeddings has 2 numbers; Criteo data has 26"),
    "no sizes": (lambda f: None, {"num_embeddings": None}, r"num_embeddings is needed"),
    "rule": (lambda f: None, {"ids": "magic"}, r"ids='magic' is unknown; known: modulo, hash, contiguous"),
    "target": (_no_permission, {}, r"out is a file, it must be a folder"),
    "empty": (lambda f: [p.write_bytes(b"") for p in f.iterdir()], {}, r"no rows in 3 file"),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_what_is_wrong_with_a_source_is_named(days: Path, tmp_path: Path, kind: str) -> None:
    change, options, message = SOURCES[kind]
    change(days)
    options.setdefault("num_embeddings", 10) if kind != "no sizes" else None
    with pytest.raises(DataError, match=message):
        prepare(days, tmp_path / "out", say=_silent, **options)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_full_disk_is_named(days: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, rows: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(preparation.NpyWriter, "append", full)
    with pytest.raises(DataError, match=r"part day_0 cannot be written \(no space left on the disk\)"):
        _prepare(days, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == [".job.json"]


def test_a_folder_without_manifest_is_read_as_torchrec_writes_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for day, rows in enumerate((40, 30)):
        np.save(tmp_path / f"day_{day}_dense.npy", rng.random((rows, 13), np.float32))
        np.save(tmp_path / f"day_{day}_sparse.npy", rng.integers(0, 2**32, (rows, 26)))
        np.save(tmp_path / f"day_{day}_labels.npy", rng.integers(0, 2, (rows, 1), np.int32))
    with pytest.raises(DataError, match=r"no manifest.json, so the rows of its tables must be given"):
        PreparedClicks(tmp_path, Sharding(8))
    batch = _whole(tmp_path, num_embeddings=100)
    expected = np.load(tmp_path / "day_0_sparse.npy").T % 100
    np.testing.assert_array_equal(batch.sparse_features.values().view(26, -1).numpy(), expected)
    assert [len(_whole(tmp_path, split, num_embeddings=100).labels) for split in ("val", "test")] == [15, 15]


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small split has many chunks and groups of them."""
    monkeypatch.setattr(row_order, "CHUNK_ROWS", 16)
    monkeypatch.setattr(row_order, "_GROUP", 4)


@pytest.mark.usefixtures("small_groups")
def test_an_epoch_is_a_permutation_that_can_be_entered_anywhere(days: Path, tmp_path: Path) -> None:
    _prepare(days, tmp_path / "out")

    def rows(world_size: int, epoch: int = 0, start: int = 0) -> list[tuple[float, ...]]:
        ranks = [
            list(
                PreparedClicks(tmp_path / "out", Sharding(24 // world_size, rank, world_size)).batches(
                    "train", epoch, start
                )
            )
            for rank in range(world_size)
        ]
        return [
            (label, *dense)
            for batches in zip(*ranks)
            for batch in batches
            for label, dense in zip(batch.labels.tolist(), batch.dense_features.tolist())
        ]

    lying = _whole(tmp_path / "out")
    whole = sorted((label, *dense) for label, dense in zip(lying.labels.tolist(), lying.dense_features.tolist()))
    first, second = rows(1), rows(1, epoch=1)
    assert sorted(first) == sorted(second) == whole
    assert first != second
    assert len([1 for a, b in zip(first, second) if a == b]) < len(first) // 10
    assert rows(2)[: len(first) - 24] == first[: len(first) - 24]
    for start in (1, 3, 17, 41):
        assert rows(1, 1, start) == second[24 * start :]


def test_batches_are_made_ahead_and_errors_come_out_where_they_are_asked_for() -> None:
    made: list[int] = []

    def batches() -> Iterator[Any]:
        for number in range(6):
            made.append(number)
            yield number
        raise DataError("row 7 is bad")

    prefetcher = Prefetcher(batches(), ahead=2)
    assert [next(prefetcher) for _ in range(6)] == list(range(6))
    with pytest.raises(DataError, match="row 7"):
        next(prefetcher)
    with pytest.raises(StopIteration):
        next(prefetcher)
    assert prefetcher.waited >= 0

    made.clear()
    stopped = Prefetcher(batches(), ahead=1)
    assert next(stopped) == 0
    stopped.close()
    assert len(made) <= 4
    last: Any = Prefetcher(iter([1, 2]), ahead=3)
    assert not last.at_end()
    assert list(last) == [1, 2]
    assert last.at_end()
