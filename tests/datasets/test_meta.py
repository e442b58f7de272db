from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowtt_torchrec.datasets import DataError, MetaFiles, Sharding, Split
from flowtt_torchrec.datasets.meta_format import load_lookups, save_lookups

TABLES, SAMPLES = 5, 20
EMPTY = 2  # this table has no lookups


def _write(path: Path, seed: int, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """A small file; returns its indices and lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (TABLES, SAMPLES), generator=generator)
    lengths[EMPTY] = 0
    indices = torch.cat(
        [torch.randint(0, 10**table + 1, (int(n),), generator=generator) for table, n in enumerate(lengths.sum(1))]
    ).to(dtype)
    save_lookups(path, indices, lengths.to(dtype))
    return indices, lengths


def _bags(indices: Tensor, lengths: Tensor) -> list[list[list[int]]]:
    """[table][sample] -> indices."""
    flat = [bag.tolist() for bag in torch.split(indices, lengths.flatten().tolist())]
    return [flat[t * lengths.shape[1] : (t + 1) * lengths.shape[1]] for t in range(len(lengths))]


def _read(data: MetaFiles, split: Split, start: int = 0) -> list[list[list[list[int]]]]:
    """[batch][feature][sample] -> indices."""
    return [
        _bags(b.sparse_features.values(), b.sparse_features.lengths().view(len(data.feature_names), -1))
        for b in data.batches(split, start=start)
    ]


@pytest.mark.parametrize("suffix", [".pt", ".pt.gz"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_format_is_kept(tmp_path: Path, suffix: str, dtype: torch.dtype) -> None:
    path = tmp_path / f"fbgemm_t5_bs20{suffix}"
    indices, lengths = _write(path, 0, dtype)
    # As facebookresearch/dlrm_datasets documents it.
    opened = gzip.open(path) if suffix.endswith("gz") else open(path, "rb")  # noqa: SIM115
    with opened as stream:
        got_indices, got_offsets, got_lengths = torch.load(stream, weights_only=True)  # type: ignore[arg-type]
    assert torch.equal(got_indices, indices)
    assert got_lengths.shape == (TABLES, SAMPLES)
    assert got_offsets.tolist() == [0, *torch.cumsum(lengths.flatten(), 0).tolist()]
    content = load_lookups(path)
    assert torch.equal(content.table(3), torch.cat([torch.tensor(b, dtype=dtype) for b in _bags(indices, lengths)[3]]))


def test_a_file_in_the_format_of_old_torch(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save(
        (torch.tensor([3, 1]), torch.tensor([0, 1, 2]), torch.tensor([[1, 1]])),
        path,
        _use_new_zipfile_serialization=False,
    )
    assert load_lookups(path).indices.tolist() == [3, 1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_batches_are_slices_of_the_samples(tmp_path: Path, world_size: int) -> None:
    files = [_write(tmp_path / f"fbgemm_t5_bs20_{n}.pt", n) for n in (2, 10)]
    kept = [table for table in range(TABLES) if table != EMPTY]
    ranks = [MetaFiles(tmp_path, Sharding(4, rank, world_size), val_fraction=0.25) for rank in range(world_size)]
    for split, samples in (("train", range(15)), ("val", range(15, 20))):
        assert len({data.num_batches(split) for data in ranks}) == 1  # type: ignore[arg-type]
        batches = [batch for step in zip(*(_read(data, split) for data in ranks)) for batch in step]  # type: ignore[arg-type]
        assert len(batches) == world_size * ranks[0].num_batches(split)  # type: ignore[arg-type]
        dealt = [[bag for batch in batches for bag in batch[feature]] for feature in range(len(kept))]
        used = len(samples) - len(samples) % (4 * world_size) % world_size
        expected = [[_bags(*file)[table][s] for file in files for s in samples[:used]] for table in kept]
        assert dealt == expected


def test_tables_of_all_files(tmp_path: Path) -> None:
    files = [_write(tmp_path / f"fbgemm_t5_bs20_{n}.pt.gz", n) for n in range(3)]
    data = MetaFiles(sorted(tmp_path.iterdir()), Sharding(4), num_tables=4)
    assert data.feature_names == ["f0", "f1", "f3"]
    assert data.table_names == ["t_f0", "t_f1", "t_f3"]
    for feature, table in enumerate((0, 1, 3)):
        bags = [bag for file in files for bag in _bags(*file)[table]]
        assert data.num_embeddings[feature] == max(max(bag, default=0) for bag in bags) + 1
        assert data.pooling_factors[feature] == pytest.approx(sum(map(len, bags)) / 60)
    assert any("1 of 4 tables have no lookups: f2" in note for note in data.notes)
    best = data.best_metrics()
    assert (best.auroc, best.ne) == (0.5, 1.0)


def test_dense_features_and_labels_are_fixed_and_fair(tmp_path: Path) -> None:
    save_lookups(tmp_path / "a.pt", torch.zeros(4000, dtype=torch.int64), torch.ones(1, 4000, dtype=torch.int64))
    data = MetaFiles(tmp_path, Sharding(1000), val_fraction=0.5)
    first, second = data.batches("train")
    assert first.dense_features.shape == (1000, 13)
    assert first.labels.mean().item() == pytest.approx(0.5, abs=0.06)
    assert first.dense_features.std().item() == pytest.approx(1, abs=0.02)
    assert not torch.equal(first.labels, second.labels)
    (again,) = data.batches("train", start=1)
    assert torch.equal(again.labels, second.labels)
    assert torch.equal(again.dense_features, second.dense_features)
    other = next(iter(MetaFiles(tmp_path, Sharding(1000), val_fraction=0.5, seed=1).batches("train")))
    assert not torch.equal(other.labels, first.labels)


@pytest.mark.parametrize("start", range(9))
def test_resumes_where_it_stopped(tmp_path: Path, start: int) -> None:
    for number in range(2):
        _write(tmp_path / f"fbgemm_t5_bs20_{number}.pt", number)
    data = MetaFiles(tmp_path, Sharding(2, 1, 2))
    assert data.num_batches("train") == 10
    assert _read(data, "train", start) == _read(data, "train")[start:]


def test_rows_of_files_with_short_last_batches_are_found_again(tmp_path: Path) -> None:
    """A file of 18 training rows ends with a batch of 4 of 7 x 2 rows, in the middle of an epoch."""
    for number in range(3):
        _write(tmp_path / f"fbgemm_t5_bs20_{number}.pt", number)
    data = MetaFiles(tmp_path, Sharding(7, 1, 2))
    taken = [len(batch.labels) * 2 for batch in data.batches("train")]
    assert taken == [14, 4] * 3
    assert [data.batches_in(sum(taken[:n])) for n in range(7)] == list(range(7))
    assert data.batches_in(2 * 14, drop_last=True) == 3
    assert [data.batches_in(rows) for rows in (15, 28, 54 + 14)] == [None] * 3


def test_best_possible_scores_have_the_margin_of_few_rows(tmp_path: Path) -> None:
    for number in range(2):
        _write(tmp_path / f"fbgemm_t5_bs20_{number}.pt", number)
    few = MetaFiles(tmp_path, Sharding(4), val_fraction=0.5).best_metrics()
    # The standard error of the AUROC of a scorer that knows nothing, of 10 + 10 rows: sqrt((10 + 10 + 1) / (12 * 100)).
    assert few.auroc_margin == pytest.approx(1.96 * (21 / 1200) ** 0.5, rel=0.02)
    assert MetaFiles(tmp_path, Sharding(4), val_fraction=0.5).best_metrics(1).auroc_margin > few.auroc_margin


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "a.pt.gz"
    _write(path, 0)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"a\.pt\.gz: not a readable file .* truncated"):
        MetaFiles(path, Sharding(4))
    path = tmp_path / "b.pt"
    _write(path, 0)
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(DataError, match=r"b\.pt: not a readable file"):
        MetaFiles(path, Sharding(4))
    path.write_bytes(b"text\n" * 100)
    with pytest.raises(DataError, match=r"b\.pt: not a readable file"):
        MetaFiles(path, Sharding(4))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(2, dtype=torch.int64)] * 2, "a tuple of three integer tensors"),
        ((torch.zeros(1), torch.tensor([0, 1]), torch.tensor([[1]])), "a tuple of three integer tensors"),
        ({"indices": torch.tensor([1])}, "a tuple of three integer tensors"),
        ((torch.tensor([1]), torch.tensor([0, 1]), torch.tensor([1])), r"not \[1\] and \[2\]"),
        ((torch.tensor([1]), torch.tensor([0, 1, 1]), torch.tensor([[1]])), r"not \[1, 1\] and \[3\]"),
        ((torch.tensor([1]), torch.tensor([0, 2]), torch.tensor([[2]])), "offsets run from 0 to 2, .* indices, 1"),
        ((torch.tensor([1]), torch.tensor([0, 1, 1]), torch.tensor([[0], [1]])), "table f0 do not agree"),
        ((torch.tensor([1]), torch.tensor([0, 0, 2, 1]), torch.tensor([[0], [2], [-1]])), "table f2 do not agree"),
        ((torch.tensor([1, -1]), torch.tensor([0, 1, 2]), torch.tensor([[1], [1]])), "table f1 has a negative index"),
        ((torch.tensor([], dtype=torch.int64), torch.tensor([0, 0]), torch.tensor([[0]])), "no table has any lookups"),
        ((torch.tensor([[1], [2]]), torch.tensor([0, 1, 2]), torch.tensor([[1, 1]])), r"must be flat, not \[2, 1\]"),
        ((torch.tensor([1, 2]), torch.tensor([[0, 1, 2]]), torch.tensor([[1, 1]])), r"must be flat, .* \[1, 3\]"),
        (
            (torch.tensor([True, False]), torch.tensor([0, 1, 2]), torch.tensor([[1, 1]])),
            "holds a bool tensor, a int64",
        ),
        ((torch.tensor([1j]), torch.tensor([0, 1]), torch.tensor([[1]])), "holds a complex64 tensor"),
        ((torch.tensor([1, 1 << 40]), torch.tensor([0, 1, 2]), torch.tensor([[1], [1]])), r"f1 has the index 1,099,"),
    ],
)
def test_content_that_is_not_in_the_format(tmp_path: Path, content: object, message: str) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(DataError, match=message):
        MetaFiles(tmp_path / "a.pt", Sharding(1))


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    _write(tmp_path / "a.pt", 0)
    with pytest.raises(DataError, match="num_tables is 6, but the file has 5 tables"):
        MetaFiles(tmp_path, Sharding(4), num_tables=6)
    with pytest.raises(DataError, match="val_fraction is 1"):
        MetaFiles(tmp_path, Sharding(4), val_fraction=1.0)
    with pytest.raises(DataError, match="no data file is given"):
        MetaFiles([], Sharding(4))
    save_lookups(tmp_path / "b.pt", torch.tensor([1]), torch.tensor([[1]]))
    with pytest.raises(DataError, match=r"b\.pt: 1 tables, but .*a\.pt has 5"):
        MetaFiles(tmp_path, Sharding(4))
    with pytest.raises(ValueError, match="add up to 1, but there are 2 indices"):
        save_lookups(tmp_path / "c.pt", torch.tensor([1, 2]), torch.tensor([[1]]))
