"""A planted click model: the true click probability of every generated row, and the scores that it would get.

The log-odds of a row are the sum of three parts, each a fixed share of their variance:

* dense: a linear function of the dense features;
* categories: one effect for each id, a Gaussian drawn from the id's hash, divided by ``sqrt(1 + rank / 100)``: what can
  be learned from the frequent ids is nearly all that there is to know;
* pairs: for three pairs of columns, the product of such effects of the two ids.

Ids may have structure: each id of a column then belongs to one of `GROUPS` latent groups, by its hash, and a part of
the variance of its effects, ``group_share``, is the group's.

No table of effects is stored. Scale and offset are set on rows of their own, so that the clicks have a given rate and
the log-odds a given standard deviation, whatever the seed.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from flowtt_torchrec.datasets import counter_random
from flowtt_torchrec.datasets.base import BestMetrics, auroc_margin

CLICK_RATE = 0.25
LOG_ODDS_STD = 1.4
VARIANCE_SHARES = {"dense": 0.25, "categories": 0.6, "pairs": 0.15}
GROUPS = 64
_HALF_STRENGTH_RANK = 100.0

Array = NDArray[np.float64]


class PlantedModel:
    """True click probabilities.

    Args:
        seed: chooses the effects.
        pairs: the pairs of columns that interact.
        dense: float [rows, num_dense], rows to set scale and offset on.
        ids: uint64 [rows, columns], their ids.
        ranks: int [rows, columns], the place of each id among its column's ids, by frequency.
        group_share: share of the variance of ids' effects that is their latent groups', 0 to 1.
    """

    def __init__(
        self,
        seed: int,
        pairs: list[tuple[int, int]],
        dense: NDArray[np.float32],
        ids: NDArray[np.uint64],
        ranks: NDArray[np.uint64],
        group_share: float = 0.0,
    ) -> None:
        self._group_share = group_share
        self._left, self._right = (list(side) for side in zip(*pairs))
        columns = ids.shape[1]
        self._effect_keys, self._pair_keys = (
            np.array([counter_random.key(seed, name, column) for column in range(columns)], dtype=np.uint64)
            for name in ("effect", "pair effect")
        )
        self._group_keys = np.array([counter_random.key(seed, "group", c) for c in range(columns)], dtype=np.uint64)
        self._dense_mean, dense_std = dense.mean(axis=0), dense.std(axis=0)
        slopes = counter_random.normal(np.arange(dense.shape[1]), counter_random.key(seed, "slopes"))
        self._slopes = slopes / np.where(dense_std > 0, dense_std, 1.0)

        parts = self._parts(dense, ids, ranks)
        stds = np.array([part.std() for part in parts])
        shares = np.array([VARIANCE_SHARES[name] for name in ("dense", "categories", "pairs")])
        weights = np.sqrt(shares) / np.where(stds > 0, stds, 1.0)
        weighted = weights @ parts
        self._weights = weights * (LOG_ODDS_STD / weighted.std())
        self._offset = _offset_for_rate(self._weights @ parts, CLICK_RATE)

    def probabilities(self, dense: NDArray[np.float32], ids: NDArray[np.uint64], ranks: NDArray[np.uint64]) -> Array:
        """True click probability of each row; arguments as in the constructor."""
        return _sigmoid(self._weights @ self._parts(dense, ids, ranks) + self._offset)

    def _parts(self, dense: NDArray[np.float32], ids: NDArray[np.uint64], ranks: NDArray[np.uint64]) -> Array:
        strength = 1.0 / np.sqrt(1.0 + ranks / _HALF_STRENGTH_RANK)
        groups = self.groups(ids)
        effects = self._effects(ids, groups, self._effect_keys) * strength
        columns = self._left + self._right
        pair_effects = self._effects(ids[:, columns], groups[:, columns], self._pair_keys[columns])
        pair_effects = pair_effects * strength[:, columns]
        left, right = np.split(pair_effects, 2, axis=1)
        return np.stack([(dense - self._dense_mean) @ self._slopes, effects.sum(axis=1), (left * right).sum(axis=1)])

    def groups(self, ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The latent group of each id, below `GROUPS`; ``[rows, columns]``."""
        return counter_random.hash64(ids, self._group_keys) % np.uint64(GROUPS)

    def _effects(self, ids: NDArray[np.uint64], groups: NDArray[np.uint64], keys: NDArray[np.uint64]) -> Array:
        own = counter_random.normal(ids, keys)
        if not self._group_share:
            return own
        shared = counter_random.normal(groups, ~keys)
        return np.sqrt(1.0 - self._group_share) * own + np.sqrt(self._group_share) * shared


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def _offset_for_rate(log_odds: Array, rate: float) -> float:
    """The constant that makes the mean probability ``rate``, by bisection."""
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _sigmoid(log_odds + middle).mean() < rate else (low, middle)
    return low


def score(probabilities: Array, labels: NDArray[np.float32]) -> BestMetrics:
    """Scores of ``probabilities`` as predictions of ``labels``, both float [rows]; NaN if there is one label only."""
    clicked = labels > 0.5
    clicks, others = int(clicked.sum()), int((~clicked).sum())
    if not clicks or not others:
        return BestMetrics(math.nan, math.nan, math.nan)
    _, place, count = np.unique(probabilities, return_inverse=True, return_counts=True)
    mean_rank = (np.cumsum(count) - (count - 1) / 2)[place]  # equal scores share their mean rank
    auroc = (mean_rank[clicked].sum() - clicks * (clicks + 1) / 2) / (clicks * others)
    loss = -np.log(np.where(clicked, probabilities, 1.0 - probabilities)).mean()
    rate = clicked.mean()
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    return BestMetrics(float(auroc), float(loss / entropy), auroc_margin(float(auroc), clicks, others))
