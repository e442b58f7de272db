from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtt_torchrec.datasets import counter_random


def test_hash_is_that_of_splitmix64() -> None:
    # The first outputs of the reference generator with state 1234567.
    numbers = counter_random.hash64(np.arange(1, 4), np.uint64(1234567))
    assert numbers.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_keys_differ_by_every_part() -> None:
    keys = {int(counter_random.key(*parts)) for parts in [(0, "a"), (1, "a"), (0, "b"), (0, "a", 1), (0,)]}
    assert len(keys) == 5
    assert counter_random.key(3, "x") == counter_random.key(3, "x")


def test_distributions() -> None:
    counters = np.arange(200_000)
    u = counter_random.uniform(counters, counter_random.key(0))
    assert u.min() >= 0
    assert u.max() < 1
    np.testing.assert_allclose(np.histogram(u, bins=20, range=(0, 1))[0], 10_000, rtol=0.05)
    z = counter_random.normal(counters, counter_random.key(1))
    np.testing.assert_allclose([z.mean(), z.var(), (z**3).mean(), (z**4).mean()], [0, 1, 0, 3], atol=0.05)
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 0.01


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 5000), seed=st.integers(0, 2**32))
def test_permutation_is_a_bijection(size: int, seed: int) -> None:
    values = counter_random.permute(np.arange(size, dtype=np.uint64), size, counter_random.key(seed))
    assert np.array_equal(np.sort(values), np.arange(size))


@pytest.mark.parametrize("size", [2**31, 4_000_000_000, 2**40 + 1])
def test_permutation_of_a_huge_range(size: int) -> None:
    values = counter_random.permute(np.arange(100_000, dtype=np.uint64), size, counter_random.key(0))
    assert len(np.unique(values)) == values.size
    assert values.max() < size
    # Neighbours are scattered: the values fill the range evenly.
    np.testing.assert_allclose(np.histogram(values.astype(float), bins=10, range=(0, size))[0], 10_000, rtol=0.05)


def test_permutation_of_columns_is_that_of_each_column() -> None:
    sizes, keys = np.array([5, 1000, 10**9], dtype=np.uint64), np.array([1, 2, 3], dtype=np.uint64)
    values = np.arange(15, dtype=np.uint64).reshape(5, 3) % sizes
    together = counter_random.permute(values, sizes, keys)
    for column in range(3):
        assert np.array_equal(
            together[:, column], counter_random.permute(values[:, column], sizes[column], keys[column])
        )
