from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import gammainc

from flowtt_torchrec.datasets import DataError, MetaFiles, Sharding, SyntheticMeta
from flowtt_torchrec.datasets.meta_format import save_lookups
from flowtt_torchrec.datasets.package_data import read_columns

# Published for each file of the 2022 set, 131,072 samples of 788 tables (its locality_stats.txt): distinct ids, and the
# shares of them that occur once, twice, 3 to 4, 5 to 8 times, ... and of the lookups that go to these.
PUBLISHED_DISTINCT = 110_259_238
PUBLISHED_IDS = [0.342, 0.144, 0.149, 0.138, 0.112, 0.068, 0.029, 0.010, 0.004, 0.002]
PUBLISHED_LOOKUPS = [0.027, 0.023, 0.040, 0.068, 0.105, 0.120, 0.099, 0.070, 0.059, 0.054]
TABLES = read_columns("meta788_inferred.csv")


def _expected_reuse(table: int, samples: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Expected distinct ids and lookups by reuse bin, for Poisson counts of each id; the last bin is open."""
    vocab, s, q = TABLES["vocab"][table], TABLES["zipf_s"][table], TABLES["zipf_q"][table]
    edges = np.unique(np.round(np.geomspace(1, vocab + 1, 1500)))
    low, width = edges[:-1], np.diff(edges)
    weights = (low + (width - 1) / 2 + q) ** -s
    rate = samples * TABLES["pooling_factor"][table] * weights / (weights * width).sum()
    bins = 2.0 ** np.arange(17)
    # P(count <= n) = 1 - P(n + 1, rate), and the lookups of ids with count <= n are rate * P(count <= n - 1).
    ids = 1 - gammainc(bins + 1, rate[:, None])
    lookups = rate[:, None] * (1 - gammainc(bins, rate[:, None]))
    ids = np.diff(np.c_[np.exp(-rate), ids, np.ones_like(rate)], axis=1)
    lookups = np.diff(np.c_[np.zeros_like(rate), lookups, rate], axis=1)
    return width @ ids, width @ lookups


def test_the_tables_add_up_to_the_published_statistics() -> None:
    assert len(TABLES["table"]) == 788
    assert sum(TABLES["pooling_factor"]) == pytest.approx(10_720.5, abs=0.5)
    ids, lookups = (sum(part) for part in zip(*(_expected_reuse(table, 131_072) for table in range(788))))
    assert ids.sum() == pytest.approx(PUBLISHED_DISTINCT, rel=0.03)  # type: ignore[union-attr]
    np.testing.assert_allclose((ids / ids.sum())[:10], PUBLISHED_IDS, atol=0.025)  # type: ignore[union-attr]
    np.testing.assert_allclose((lookups / lookups.sum())[:10], PUBLISHED_LOOKUPS, atol=0.025)  # type: ignore[union-attr]


@pytest.mark.parametrize("table", [10, 44, 226])
def test_generated_reuse_is_the_expected_one(table: int) -> None:
    samples = 8192
    indices, lengths = SyntheticMeta(Sharding(8)).lookups(table, np.arange(samples, dtype=np.uint64))
    assert lengths.mean() == pytest.approx(TABLES["pooling_factor"][table], rel=0.03)
    _, counts = np.unique(indices, return_counts=True)
    bins = np.ceil(np.log2(counts)).astype(int)
    ids, lookups = _expected_reuse(table, samples)
    assert len(counts) == pytest.approx(ids.sum(), rel=0.02)
    np.testing.assert_allclose(np.bincount(bins, minlength=18) / len(counts), ids / ids.sum(), atol=0.015)
    shares = np.bincount(bins, weights=counts, minlength=18) / counts.sum()
    np.testing.assert_allclose(shares, lookups / lookups.sum(), atol=0.03)


@pytest.mark.parametrize(
    ("table", "ratio", "tolerance"), [(0, 0.002, 0.1), (4, 0.3209, 0.12), (44, 0.4726, 0.05), (125, 0.1657, 0.1)]
)
def test_distinct_ids_of_single_tables(table: int, ratio: float, tolerance: float) -> None:
    """Published for batches of 2,048 in the artifact of EcoRec (SC'24): distinct ids over lookups."""
    indices, _ = SyntheticMeta(Sharding(8)).lookups(table, np.arange(2048, dtype=np.uint64))
    assert len(np.unique(indices)) / len(indices) == pytest.approx(ratio, rel=tolerance)


def test_ids_are_scattered_like_random_ones() -> None:
    """Distinct prefixes follow random occupancy, C (1 - exp(-U / C)), as they do in the real data."""
    data = SyntheticMeta(Sharding(8))
    ids = np.unique(data.lookups(4, np.arange(2048, dtype=np.uint64))[0])
    for last_factor in (350, 2000):
        prefixes = data.num_embeddings[4] / last_factor
        expected = prefixes * (1 - np.exp(-len(ids) / prefixes))
        assert len(np.unique(ids // last_factor)) == pytest.approx(expected, rel=0.02)


def test_a_batch_of_240_tables() -> None:
    data = SyntheticMeta(Sharding(64), num_tables=240)
    batch = next(iter(data.batches("train")))
    assert batch.sparse_features.keys() == [f"f{i}" for i in range(240)] == data.feature_names
    assert batch.sparse_features.values().numel() / 64 == pytest.approx(3232, rel=0.05)
    for key, rows in zip(data.feature_names, data.num_embeddings):
        values = batch.sparse_features[key].values()
        assert (values >= 0).all()
        assert (values < rows).all()
    lengths = batch.sparse_features.lengths().view(240, 64).float().mean(1)
    torch.testing.assert_close(lengths, torch.tensor(data.pooling_factors), rtol=0.6, atol=0.5)
    assert set(batch.labels.tolist()) == {0.0, 1.0}
    assert any("not Meta's data" in note for note in data.notes)


def test_data_does_not_depend_on_ranks_and_batch_size() -> None:
    rows = {"num_tables": 6, "num_train_rows": 40}
    (whole,) = SyntheticMeta(Sharding(40), **rows).batches("train", 1)
    parts = [list(SyntheticMeta(Sharding(4, rank, 3), **rows).batches("train", 1)) for rank in range(3)]
    dealt = [batch for step in zip(*parts) for batch in step]
    assert [len(batch.labels) for batch in dealt] == [4] * 9 + [1] * 3
    assert torch.equal(torch.cat([b.dense_features for b in dealt]), whole.dense_features[:39])
    for key in whole.sparse_features.keys():  # noqa: SIM118
        lengths = torch.cat([b.sparse_features[key].lengths() for b in dealt])
        assert torch.equal(lengths, whole.sparse_features[key].lengths()[:39])
        values = torch.cat([b.sparse_features[key].values() for b in dealt])
        assert torch.equal(values, whole.sparse_features[key].values()[: len(values)])


def test_resume_epochs_and_seeds() -> None:
    data = SyntheticMeta(Sharding(8), num_tables=3, num_train_rows=40, num_val_rows=8)
    values = [batch.sparse_features.values() for batch in data.batches("train", 1)]
    resumed = [batch.sparse_features.values() for batch in data.batches("train", 1, start=2)]
    assert data.num_batches("train") == len(values) == len(resumed) + 2
    assert all(torch.equal(a, b) for a, b in zip(values[2:], resumed))
    first = next(iter(data.batches("train", 0))).sparse_features.values()
    assert not torch.equal(first, values[0])
    other = SyntheticMeta(Sharding(8), num_tables=3, seed=1)
    assert not torch.equal(first, next(iter(other.batches("train", 0))).sparse_features.values())


def test_generated_data_can_be_written_and_read_in_metas_format(tmp_path: Path) -> None:
    batch = next(iter(SyntheticMeta(Sharding(32), num_tables=8).batches("train")))
    lengths = batch.sparse_features.lengths().view(8, 32)
    save_lookups(tmp_path / "fbgemm_t8_bs32_0.pt.gz", batch.sparse_features.values(), lengths)
    (read,) = MetaFiles(tmp_path, Sharding(32), val_fraction=0.01).batches("train")
    assert read.sparse_features.keys() == batch.sparse_features.keys()
    for key in batch.sparse_features.keys():  # noqa: SIM118
        expected = batch.sparse_features[key].to_dense()[:31]
        assert [bag.tolist() for bag in read.sparse_features[key].to_dense()] == [bag.tolist() for bag in expected]


def test_bad_arguments_are_named() -> None:
    with pytest.raises(DataError, match="num_tables is 789, it must be between 1 and 788"):
        SyntheticMeta(Sharding(8), num_tables=789)
    with pytest.raises(DataError, match="num_val_rows is 0"):
        SyntheticMeta(Sharding(8), num_val_rows=0)
