from __future__ import annotations

import numpy as np
import pytest

from flowtt_torchrec.datasets import counter_random
from flowtt_torchrec.datasets.zipf import ZipfMandelbrot


@pytest.mark.parametrize(
    ("size", "s", "q"),
    [
        (1, 1.0, 0.0),
        (3, 1.5, -0.75),
        (512, 1.2, 0.0),
        (513, 0.0, 7.5),
        (20_000, 1.0, 0.0),
        (20_000, 1.09, 0.7),
        (9_000, 2.6, 0.4),
        (5_000, 0.3, 7.5),
    ],
)
def test_ranks_follow_the_law(size: int, s: float, q: float) -> None:
    weights = (np.arange(1.0, size + 1) + q) ** -s
    cdf = np.cumsum(weights / weights.sum())
    u = counter_random.uniform(np.arange(100_000), counter_random.key(0))
    expected = np.minimum(np.searchsorted(cdf, u, side="right"), size - 1)
    ranks = ZipfMandelbrot(size, s, q).sample(u).astype(np.int64)
    # Only at the borders between two ranks may rounding decide otherwise.
    assert np.abs(ranks - expected).max() <= 1
    assert np.mean(ranks != expected) < 1e-3


@pytest.mark.parametrize("s", [0.0, 0.5, 1.0, 1 + 1e-12, 1.0852, 3.0])
def test_a_huge_vocabulary_stays_in_range(s: float) -> None:
    size = 4_000_000_000
    ranks = ZipfMandelbrot(size, s).sample(np.array([0.0, 0.5, 0.999999, 1 - 2.0**-53]))
    assert ranks[0] == 0
    assert ranks.max() < size
    assert (np.diff(ranks.astype(np.int64)) >= 0).all()


@pytest.mark.parametrize(("size", "s", "q"), [(0, 1.0, 0.0), (5, -1.0, 0.0), (5, 1.0, -1.0)])
def test_bad_parameters(size: int, s: float, q: float) -> None:
    with pytest.raises(ValueError, match="Zipf-Mandelbrot"):
        ZipfMandelbrot(size, s, q)
