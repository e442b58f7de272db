from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from flowtt_torchrec.datasets.planted import CLICK_RATE, LOG_ODDS_STD, PlantedModel, score


@pytest.mark.parametrize("levels", [7, 10**6])
def test_score_equals_sklearn(levels: int) -> None:
    rng = np.random.default_rng(0)
    probabilities = (rng.integers(levels, size=3000) + 0.5) / levels  # few levels: many ties
    labels = (rng.random(3000) < probabilities).astype(np.float32)
    best = score(probabilities, labels)
    assert best.auroc == pytest.approx(roc_auc_score(labels, probabilities), abs=1e-12)
    base = log_loss(labels, np.full(3000, labels.mean(dtype=np.float64)))
    assert best.ne == pytest.approx(log_loss(labels, probabilities) / base, rel=1e-6)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_scale_and_offset(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dense = rng.normal(3, 2, size=(20_000, 4)).astype(np.float32)
    ranks = rng.integers(1000, size=(20_000, 3)).astype(np.uint64)
    model = PlantedModel(seed, [(0, 2)], dense, ranks, ranks)
    probabilities = model.probabilities(dense, ranks, ranks)
    assert probabilities.mean() == pytest.approx(CLICK_RATE, abs=1e-6)
    assert np.log(probabilities / (1 - probabilities)).std() == pytest.approx(LOG_ODDS_STD, rel=0.02)
    # A row's probability is its own, whatever rows it comes with.
    np.testing.assert_allclose(model.probabilities(dense[7:9], ranks[7:9], ranks[7:9]), probabilities[7:9])


def test_every_part_matters_and_frequent_ids_more() -> None:
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(5000, 4)).astype(np.float32)
    ids = rng.integers(100_000, size=(5000, 3)).astype(np.uint64)
    model = PlantedModel(0, [(0, 2)], dense, ids, np.zeros_like(ids))

    def spread(ranks: int, column: int | None = None) -> float:
        other = ids.copy()
        if column is not None:
            other[:, column] += np.uint64(1)
        full = np.full_like(ids, ranks)
        change = model.probabilities(dense, other, full) - model.probabilities(dense, ids, full)
        return float(np.abs(change).mean())

    assert spread(0) == 0
    assert all(spread(0, column) > 0.05 for column in range(3))
    assert spread(10_000, 1) < 0.3 * spread(0, 1)
    moved = model.probabilities(dense + 1, ids, np.zeros_like(ids)) - model.probabilities(
        dense, ids, np.zeros_like(ids)
    )
    assert np.abs(moved).mean() > 0.01


def test_ids_of_a_latent_group_share_their_effect() -> None:
    rng = np.random.default_rng(0)
    dense = np.zeros((5000, 1), dtype=np.float32)
    ids = rng.integers(100_000, size=(5000, 2)).astype(np.uint64)
    ranks = np.zeros_like(ids)

    def model(share: float) -> PlantedModel:
        return PlantedModel(0, [(0, 1)], dense, ids, ranks, group_share=share)

    same = np.flatnonzero(model(1.0).groups(ids)[:, 0] == model(1.0).groups(ids)[0, 0])
    assert 30 < len(same) < 150  # of 5000 over 64 groups
    for share, spread in (1.0, 0.0), (0.0, 0.1), (0.75, 0.04):
        one = ids[same].copy()
        one[:, 1] = ids[0, 1]
        found = np.std(model(share).probabilities(dense[same], one, ranks[same]))
        assert found < 1e-9 if share == 1 else found > spread
