from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torchrec.datasets.utils import Batch

from flowtt_torchrec.datasets import CriteoTSV, DataError, Sharding, Split, criteo, text_files

Lines = Callable[..., list[str]]
ROWS = 103
SIZES = [3, 1000, 4_000_000_000, *range(1, 24)]


@pytest.fixture
def path(tmp_path: Path, criteo_lines: Lines) -> Path:
    path = tmp_path / "train.txt"
    path.write_text("\n".join(criteo_lines(ROWS)) + "\n")
    return path


def _ids(batch: Batch) -> Tensor:
    return batch.sparse_features.values().view(26, -1)


def _row_numbers(batch: Batch) -> list[int]:
    """The fixture's numbers of the lines, from the second dense feature."""
    return torch.expm1(batch.dense_features[:, 1]).round().int().tolist()


def _all_row_numbers(path: Path, split: Split, world_size: int, batch_size: int, **options: object) -> list[list[int]]:
    """Row numbers of each window, over all ranks."""
    ranks = [
        [_row_numbers(b) for b in CriteoTSV(path, 10, Sharding(batch_size, rank, world_size), **options).batches(split)]  # type: ignore[arg-type]
        for rank in range(world_size)
    ]
    for parts in zip_longest(*ranks):
        assert len({len(part) for part in parts}) == 1, "ranks see batches of the same sizes"
    return [[row for part in parts for row in part] for parts in zip(*ranks)]


def _same(a: list[Batch], b: list[Batch]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x.dense_features, y.dense_features)
        and torch.equal(x.labels, y.labels)
        and torch.equal(x.sparse_features.values(), y.sparse_features.values())
        for x, y in zip(a, b)
    )


def test_batch_holds_what_the_file_says(path: Path, criteo_lines: Lines) -> None:
    data = CriteoTSV(path, SIZES, Sharding(1000), val_every=ROWS + 1)
    (batch,) = data.batches("train")
    rows = [line.split("\t") for line in criteo_lines(ROWS)]
    assert batch.labels.tolist() == [float(row[0]) for row in rows]
    expected = torch.tensor([[math.log1p(max(int(x or 0), 0)) for x in row[1:14]] for row in rows])
    torch.testing.assert_close(batch.dense_features, expected)
    ids = [[int(row[14 + c] or "0", 16) % SIZES[c] for row in rows] for c in range(26)]
    assert _ids(batch).tolist() == ids
    assert max(ids[2]) >= 2**31
    assert batch.sparse_features.keys() == [f"cat_{i}" for i in range(26)] == data.feature_names
    assert batch.sparse_features.lengths().tolist() == [1] * (26 * ROWS)
    assert (batch.dense_features.dtype, batch.labels.dtype, _ids(batch).dtype) == (
        torch.float32,
        torch.float32,
        torch.int64,
    )
    assert data.table_names[0] == "t_cat_0"


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("chunk_bytes", [300, 1 << 20])
def test_ranks_share_every_row_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, chunk_bytes: int
) -> None:
    monkeypatch.setattr(text_files, "_CHUNK_BYTES", chunk_bytes)
    train = [row for window in _all_row_numbers(path, "train", world_size, 8) for row in window]
    val = [row for window in _all_row_numbers(path, "val", world_size, 8) for row in window]
    held_out = list(range(9, ROWS, 10))
    kept = [row for row in range(ROWS) if row not in held_out]
    # The order is that of the file, and only rows that do not divide evenly are left out, at the end.
    assert train == kept[: len(kept) - len(kept) % (8 * world_size) % world_size]
    assert val == held_out[: len(held_out) - len(held_out) % (8 * world_size) % world_size]


def test_the_order_does_not_depend_on_the_number_of_ranks(path: Path) -> None:
    one = [row for window in _all_row_numbers(path, "train", 1, 12, shuffle_rows=30) for row in window]
    two = [row for window in _all_row_numbers(path, "train", 2, 6, shuffle_rows=30) for row in window]
    assert one[: len(two)] == two
    assert len(one) - len(two) <= 1


def test_folder_of_days(tmp_path: Path, criteo_lines: Lines) -> None:
    lines = criteo_lines(30)
    (tmp_path / "day_10").write_text("\n".join(lines[20:]))
    (tmp_path / "day_2.gz").write_bytes(gzip.compress("\n".join(lines[:20]).encode() + b"\n"))
    (tmp_path / "day_2_labels.npy").write_bytes(b"not text")
    (window,) = _all_row_numbers(tmp_path, "train", 1, 64, val_every=31)
    assert window == list(range(30))
    assert _all_row_numbers(tmp_path, "val", 1, 64, val_every=15) == [[14, 29]]


def test_held_out_files(tmp_path: Path, criteo_lines: Lines) -> None:
    lines = criteo_lines(30)
    (tmp_path / "a.tsv").write_text("\n".join(lines[:20]))
    (tmp_path / "b.tsv").write_text("\n".join(lines[20:]))
    options = {"val_path": tmp_path / "b.tsv"}
    assert _all_row_numbers(tmp_path / "a.tsv", "train", 1, 64, **options) == [list(range(20))]
    assert _all_row_numbers(tmp_path / "a.tsv", "val", 1, 64, **options) == [list(range(20, 30))]


def test_what_is_held_out_is_not_trained_on(tmp_path: Path, criteo_lines: Lines) -> None:
    lines = criteo_lines(30)
    for day in range(3):
        (tmp_path / f"day_{day}").write_text("\n".join(lines[10 * day : 10 * day + 10]) + "\n")
    (tmp_path / "link").symlink_to(tmp_path / "day_2")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "copy.tsv").write_bytes((tmp_path / "day_2").read_bytes())
    for held_out in ("day_2", "link", "elsewhere", "elsewhere/../elsewhere/copy.tsv"):
        options = {"val_path": tmp_path / held_out}
        assert _all_row_numbers(tmp_path, "train", 1, 64, **options) == [list(range(20))], held_out
        assert _all_row_numbers(tmp_path, "val", 1, 64, **options) == [list(range(20, 30))]
        notes = CriteoTSV(tmp_path, 10, Sharding(8), **options).notes  # type: ignore[arg-type]
        assert "left out of training, since val_path holds it: day_2" in notes
    for path, val_path in (
        (tmp_path, tmp_path),
        (tmp_path / "day_1", tmp_path),
        (tmp_path / "day_2", tmp_path / "link"),
    ):
        with pytest.raises(DataError, match="nothing is left to train on; give other files to evaluate on"):
            CriteoTSV(path, 10, Sharding(8), val_path=val_path)


def test_a_folder_is_read_as_far_as_it_looks_like_data(tmp_path: Path, criteo_lines: Lines) -> None:
    (tmp_path / "a.tsv").write_text("\n".join(criteo_lines(20)))
    (tmp_path / "readme.txt").write_text("Clicks of a week.\nSee the terms.\n")
    (tmp_path / "test.txt").write_text("\n".join(line[2:] for line in criteo_lines(20)))
    (tmp_path / "notes.md").touch()
    (tmp_path / "b.txt").write_bytes(b"PAR1....")
    data = CriteoTSV(tmp_path, 10, Sharding(64), val_every=50)
    (batch,) = data.batches("train")
    assert len(batch.labels) == 20
    assert any("not read in" in note and "b.txt, notes.md, readme.txt, test.txt" in note for note in data.notes)
    (tmp_path / "a.tsv").unlink()
    with pytest.raises(DataError, match=r"b\.txt \(it is a Parquet file.*readme\.txt \(1 fields.*test\.txt \(.*labels"):
        CriteoTSV(tmp_path, 10, Sharding(64))


def test_other_data_has_another_identity(tmp_path: Path, criteo_lines: Lines) -> None:
    lines = "\n".join(criteo_lines(1000)).encode()
    for name in ("a", "val"):
        (tmp_path / name).write_bytes(lines)
    (tmp_path / "val").write_bytes(lines[:9000])

    def identity() -> dict[str, object]:
        return CriteoTSV(tmp_path / "a", 10, Sharding(8), val_path=tmp_path / "val").identity()

    first = identity()
    assert json.loads(json.dumps(first)) == first == identity()
    for changed in (b"1" + lines[1:], lines[:-1] + b"x", lines + b"0", lines[:-1]):
        assert changed != lines
        (tmp_path / "a").write_bytes(changed)
        assert identity() != first
    (tmp_path / "a").write_bytes(lines)
    (tmp_path / "val").write_bytes(lines[:9001])
    assert identity() != first


def test_shuffle_is_within_blocks_and_by_epoch_and_seed(path: Path) -> None:
    def order(epoch: int, seed: int = 0) -> list[int]:
        data = CriteoTSV(path, 10, Sharding(7), shuffle_rows=25, seed=seed)
        return [row for batch in data.batches("train", epoch) for row in _row_numbers(batch)]

    plain = [row for row in range(ROWS) if row % 10 != 9]
    first = order(0)
    assert first == order(0)
    assert first != plain
    assert len({tuple(first), tuple(order(1)), tuple(order(0, seed=1))}) == 3
    for start in range(0, len(plain), 25):
        assert sorted(first[start : start + 25]) == plain[start : start + 25]
    data = CriteoTSV(path, 10, Sharding(7), shuffle_rows=25)
    assert [row for batch in data.batches("val") for row in _row_numbers(batch)] == list(range(9, ROWS, 10))


@pytest.mark.parametrize("shuffle_rows", [0, 25])
@pytest.mark.parametrize("start", [0, 1, 5, 11, 12, 13, 99])
def test_resumes_where_it_stopped(path: Path, start: int, shuffle_rows: int) -> None:
    data = CriteoTSV(path, 10, Sharding(4, 1, 2), shuffle_rows=shuffle_rows)
    assert _same(list(data.batches("train", 3, start)), list(data.batches("train", 3))[start:])


def test_the_last_batch_may_be_smaller(path: Path) -> None:
    data = CriteoTSV(path, 10, Sharding(8))
    assert [len(batch.labels) for batch in data.batches("train")] == [8] * 11 + [5]
    assert [len(batch.labels) for batch in data.batches("val")] == [8, 2]
    assert data.num_batches("train") is None


def test_reads_no_more_than_it_needs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "_CHUNK_BYTES", 1000)
    read = 0

    def counted(path: Path):  # type: ignore[no-untyped-def]
        nonlocal read
        for lines in text_files.read_lines(path):
            read += len(lines)
            yield lines

    monkeypatch.setattr(criteo, "read_lines", counted)
    next(CriteoTSV(path, 10, Sharding(8)).batches("train"))
    assert read < 20


@pytest.mark.parametrize("shuffle_rows", [0, 25])
def test_errors_name_file_and_line(tmp_path: Path, criteo_lines: Lines, shuffle_rows: int) -> None:
    lines = criteo_lines(60)
    (tmp_path / "day_0").write_text("\n".join(lines[:20]) + "\n")
    fields = lines[45].split("\t")
    lines[45] = "\t".join(fields[:38])
    (tmp_path / "day_1").write_text("\n".join(lines[20:]) + "\n")
    data = CriteoTSV(tmp_path, 10, Sharding(8), shuffle_rows=shuffle_rows)
    with pytest.raises(DataError, match=r"day_1:26: 38 fields, but a Criteo line has 40"):
        list(data.batches("train"))
    list(data.batches("val"))  # the bad line is not of this split


def test_truncated_gzip_gives_its_rows_and_then_an_error(tmp_path: Path, criteo_lines: Lines) -> None:
    content = gzip.compress("\n".join(criteo_lines(3000)).encode())
    (tmp_path / "day_0.gz").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"day_0\.gz: .* truncated"):
        list(CriteoTSV(tmp_path, 10, Sharding(64)).batches("train"))


def test_too_few_rows(tmp_path: Path, criteo_lines: Lines) -> None:
    (tmp_path / "a.tsv").write_text(criteo_lines(1)[0])
    data = CriteoTSV(tmp_path / "a.tsv", 10, Sharding(8))
    assert len(list(data.batches("train"))) == 1
    with pytest.raises(DataError, match=r"a\.tsv: 0 rows for split 'val'"):
        list(data.batches("val"))


def test_bad_arguments_are_named(path: Path) -> None:
    with pytest.raises(DataError, match="num_embeddings has 2 numbers; Criteo data has 26"):
        CriteoTSV(path, [1, 2], Sharding(8))
    with pytest.raises(DataError, match="table t_cat_0 has 1,000,000,000,000 rows, which is a mistake"):
        CriteoTSV(path, 10**12, Sharding(8))
    with pytest.raises(DataError, match="table t_cat_3 has 0 rows"):
        CriteoTSV(path, [1, 1, 1, 0, *[1] * 22], Sharding(8))
    with pytest.raises(DataError, match="val_every is 1"):
        CriteoTSV(path, 10, Sharding(8), val_every=1)
    with pytest.raises(DataError, match="shuffle_rows is -1"):
        CriteoTSV(path, 10, Sharding(8), shuffle_rows=-1)
    with pytest.raises(DataError, match="does not exist"):
        CriteoTSV(path / "no", 10, Sharding(8))
