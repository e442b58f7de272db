from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from flowtt_torchrec.datasets import KAGGLE_NUM_EMBEDDINGS, DataError, Sharding, Split, SyntheticCriteo
from flowtt_torchrec.datasets.package_data import read_columns


def _collect(data: SyntheticCriteo, split: Split, epoch: int = 0, start: int = 0) -> tuple[torch.Tensor, ...]:
    """All of a rank's batches: dense, ids [26, rows], labels."""
    batches = list(data.batches(split, epoch, start))
    return (
        torch.cat([b.dense_features for b in batches]),
        torch.cat([b.sparse_features.values().view(26, -1) for b in batches], dim=1),
        torch.cat([b.labels for b in batches]),
    )


def _equal(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b))


def test_kaggle_cardinalities() -> None:
    assert len(KAGGLE_NUM_EMBEDDINGS) == 26
    assert sum(KAGGLE_NUM_EMBEDDINGS) == 33_762_577
    assert SyntheticCriteo(Sharding(8)).num_embeddings == KAGGLE_NUM_EMBEDDINGS


@pytest.mark.parametrize(("scale", "max_rows"), [(1.0, None), (0.001, None), (1.0, 5000), (0.5, 4), (3.0, None)])
def test_ids_are_in_range(scale: float, max_rows: int | None) -> None:
    data = SyntheticCriteo(Sharding(512), scale=scale, max_rows=max_rows, num_train_rows=4096)
    dense, ids, labels = _collect(data, "train")
    assert ids.shape == (26, 4096)
    assert dense.shape == (4096, 13)
    assert (ids >= 0).all()
    assert (ids.max(dim=1).values < torch.tensor(data.num_embeddings)).all()
    assert set(labels.tolist()) == {0.0, 1.0}
    assert max(data.num_embeddings) == max_rows or round(10_131_227 * scale) in data.num_embeddings
    assert (dense >= 0).all()


@pytest.mark.parametrize("split", ["train", "val"])
def test_data_does_not_depend_on_ranks_and_batch_size(split: Split) -> None:
    rows = {"num_train_rows": 120, "num_val_rows": 96, "seed": 5}
    whole = _collect(SyntheticCriteo(Sharding(1000), **rows), split, epoch=1)  # type: ignore[arg-type]
    parts = [list(SyntheticCriteo(Sharding(8, rank, 3), **rows).batches(split, 1)) for rank in range(3)]  # type: ignore[arg-type]
    dealt = torch.cat([batch.labels for step in zip(*parts) for batch in step])
    assert torch.equal(dealt, whole[2])
    dealt = torch.cat([batch.dense_features for step in zip(*parts) for batch in step])
    assert torch.equal(dealt, whole[0])
    dealt = torch.cat([batch.sparse_features.values().view(26, -1) for step in zip(*parts) for batch in step], dim=1)
    assert torch.equal(dealt, whole[1])


def test_resume_epochs_and_seeds() -> None:
    data = SyntheticCriteo(Sharding(16), num_train_rows=100, num_val_rows=64)
    dense, ids, labels = _collect(data, "train", epoch=2)
    assert _equal(_collect(data, "train", 2, start=3), (dense[48:], ids[:, 48:], labels[48:]))
    assert data.num_batches("train") == 7
    assert len(labels) == 100
    assert not _equal(_collect(data, "train", 0), _collect(data, "train", 1))
    assert _equal(_collect(data, "val", 0), _collect(data, "val", 1))
    assert not _equal(_collect(data, "val"), _collect(SyntheticCriteo(Sharding(16), num_val_rows=64, seed=1), "val"))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_best_metrics_are_those_of_the_true_probabilities(seed: int) -> None:
    data = SyntheticCriteo(Sharding(1024, 1, 2), num_val_rows=20_001, seed=seed)
    best = data.best_metrics()
    rows = data.rows(np.arange(20_000, dtype=np.uint64) + np.uint64(1 << 40))
    assert best.auroc == pytest.approx(roc_auc_score(rows.labels, rows.probabilities), abs=1e-9)
    assert 0.75 < best.auroc < 0.85
    assert 0.7 < best.ne < 0.9
    assert rows.labels.mean() == pytest.approx(0.25, abs=0.02)
    # Clicks are drawn from the probabilities: calibrated in every tenth of the rows.
    for part in np.array_split(np.argsort(rows.probabilities), 10):
        assert rows.labels[part].mean() == pytest.approx(rows.probabilities[part].mean(), abs=0.04)
    # The first batches of both ranks.
    part = data.best_metrics(num_batches=3)
    expected = roc_auc_score(rows.labels[: 3 * 2048], rows.probabilities[: 3 * 2048])
    assert part.auroc == pytest.approx(expected, abs=1e-9)


def test_skew_is_that_of_the_kaggle_sample() -> None:
    # Measured on the first 10,000 rows of the Kaggle file: distinct values that are not missing, and the share of the
    # most frequent one, by column.
    measured = {0: (175, 0.5005), 2: (5520, 0.047), 3: (4032, 0.073), 9: (2986, 0.2757), 23: (2524, 0.0755)}
    ids = SyntheticCriteo(Sharding(8)).rows(np.arange(10_000, dtype=np.uint64)).ids
    missing = read_columns("criteo_kaggle_categories.csv")["missing"]
    for column, (distinct, top_share) in measured.items():
        present = ids[:, column]
        if missing[column]:
            assert np.mean(present == 0) == pytest.approx(missing[column], abs=0.01)
            present = present[present != 0]
        _, counts = np.unique(present, return_counts=True)
        assert len(counts) == pytest.approx(distinct, rel=0.1)
        assert counts.max() / 10_000 == pytest.approx(top_share, rel=0.15)


def test_frequent_ids_are_scattered_over_the_table() -> None:
    data = SyntheticCriteo(Sharding(8))
    ids, counts = np.unique(data.rows(np.arange(20_000, dtype=np.uint64)).ids[:, 2], return_counts=True)
    frequent = ids[counts >= 10]
    assert len(frequent) > 100
    quarters = np.histogram(frequent.astype(float), bins=4, range=(0, data.num_embeddings[2]))[0]
    assert quarters.min() > len(frequent) / 8


def test_dense_features_have_the_measured_quantiles() -> None:
    dense = SyntheticCriteo(Sharding(8)).rows(np.arange(20_000, dtype=np.uint64)).dense
    # Integer 5: median 2,491, 99 % quantile 312,517, missing in 4.94 % of the rows.
    column = dense[:, 4]
    assert np.mean(column == 0) == pytest.approx(0.0494, abs=0.01)
    present = np.expm1(column[column > 0])
    assert np.median(present) == pytest.approx(2491, rel=0.1)
    assert np.quantile(present, 0.99) == pytest.approx(312_517, rel=0.25)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(DataError, match="num_train_rows is 1, it must be at least the number of ranks, 2"):
        SyntheticCriteo(Sharding(8, 0, 2), num_train_rows=1)
    with pytest.raises(DataError, match="num_val_rows is 0"):
        SyntheticCriteo(Sharding(8), num_val_rows=0)
    with pytest.raises(DataError, match="scale is 0"):
        SyntheticCriteo(Sharding(8), scale=0)
    with pytest.raises(DataError, match="max_rows is 3"):
        SyntheticCriteo(Sharding(8), max_rows=3)
