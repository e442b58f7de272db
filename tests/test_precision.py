from __future__ import annotations

import pytest
import torch

from flowtt_torchrec.precision import (
    check_weight_dtype,
    compute_dtype,
    random_bits,
    round_stochastically,
    round_weights,
)

reduced = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


def splitmix64(x: int) -> int:
    """As published, in Python's integers."""
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_random_bits():
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # the first number of the published generator
    elements = torch.tensor([0, 1, 4, 2**33 + 6, 2**40 - 1])
    for seed in (0, 1, 7, 2**23 + 5, 2**31 - 1, 2**62 + 3):
        words = [splitmix64(((seed << 40) + e // 4) % 2**64) for e in elements.tolist()]
        expected = [word >> 16 * (e % 4) & 0xFFFF for word, e in zip(words, elements.tolist())]
        assert random_bits(seed, elements).tolist() == expected
        assert random_bits(seed, elements.view(5, 1)).shape == (5, 1)


@reduced
def test_rounding_goes_to_a_neighbour_and_keeps_the_mean(dtype):
    values = torch.tensor([1.0, 1.001, -1.001, 3.1416, 6e-5, -5e-5, 3.3e-8, 1e-3, 0.0, 60001.0])
    draws = 20_000
    random = random_bits(3, torch.arange(draws * values.numel())).view(draws, -1)
    rounded = round_stochastically(values.expand(draws, -1), dtype, random)
    assert rounded.dtype == dtype
    rounded = rounded.double()
    nearest = values.to(dtype)
    for value, near, column in zip(values, nearest, rounded.T):
        low, high = column.min(), column.max()
        assert low <= value <= high
        assert float(near) in (low, high)
        assert column.unique().numel() == (1 if near == value else 2)
        step = float(high - low)
        assert abs(float(column.mean() - value)) <= 0.02 * step


@reduced
def test_what_is_a_number_already_stays(dtype):
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    random = random_bits(1, torch.arange(numbers.numel()))
    rounded = round_stochastically(numbers.float(), dtype, random)
    assert torch.equal(rounded.nan_to_num(), numbers.nan_to_num())
    assert torch.equal(rounded.isnan(), numbers.isnan())
    assert torch.equal(rounded.signbit() | rounded.isnan(), numbers.signbit() | numbers.isnan())


@reduced
def test_overflow_is_infinite(dtype):
    largest = torch.finfo(dtype).max
    above = torch.tensor([torch.finfo(torch.float32).max if dtype == torch.bfloat16 else largest * 1.0004])
    results = {float(round_stochastically(above, dtype, torch.tensor([random]))) for random in (0, 2**16 - 1)}
    assert results == {largest, float("inf")}


def test_seeds_and_wide_types():
    values, elements = torch.full((1000,), 1.001), torch.arange(1000)
    first, second = (round_weights(values, torch.bfloat16, seed, elements) for seed in (1, 2))
    assert not torch.equal(first, second)
    assert torch.equal(first, round_weights(values, torch.bfloat16, 1, elements))
    assert torch.equal(first[500:], round_weights(values[500:], torch.bfloat16, 1, elements[500:]))
    assert torch.equal(round_weights(values, torch.bfloat16, -1, elements), values.bfloat16())
    assert torch.equal(round_weights(values, torch.float32, 1, elements), values)
    assert [compute_dtype(dtype) for dtype in (torch.float64, torch.float32, torch.float16)] == [
        torch.float64,
        torch.float32,
        torch.float32,
    ]
    with pytest.raises(ValueError, match=r"cannot be torch.int32; use one of float32, float64, bfloat16, float16"):
        check_weight_dtype(torch.int32)
