"""The rules that choose shapes: budgets kept, and the objective they are for really better."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtt_torchrec.shapes import balanced_cover, balanced_factors, balanced_shape, ordered_factors, step_cost
from flowtt_torchrec.spec import TTSpec


@given(rows=st.integers(1, 10**12), count=st.integers(2, 4))
def test_a_cover_is_tight_and_balanced(rows: int, count: int) -> None:
    factors = balanced_cover(rows, count)
    assert math.prod(factors) >= rows
    assert list(factors) == sorted(factors)
    assert factors[-1] <= round(rows ** (1 / count)) + 1
    assert math.prod(factors) <= rows + count * math.prod(factors[1:]) + rows ** (1 - 1 / count)


def test_ordered_factors_are_all_of_them() -> None:
    assert sorted(ordered_factors(12, 2)) == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
    assert len(list(ordered_factors(64, 3))) == 28
    assert balanced_factors(96, 3) == (4, 4, 6)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 4_000_000_000),
    dim=st.sampled_from([1, 5, 12, 16, 32, 64, 96, 128]),
    rank=st.integers(1, 64),
    objective=st.sampled_from(["memory", "flow"]),
)
def test_found_shapes_are_valid_and_keep_to_the_balanced_budget(rows: int, dim: int, rank: int, objective: str) -> None:
    spec = TTSpec.suggest(rows, dim, rank, objective=objective, num_cores=3)  # TTSpec checks the shape itself
    assert spec.num_parameters <= TTSpec.suggest(rows, dim, rank).num_parameters
    assert max(spec.ranks) <= rank


@pytest.mark.parametrize("rows", [10**6, 10**7, 4 * 10**9])
def test_each_objective_is_better_at_what_it_is_for(rows: int) -> None:
    balanced = TTSpec.suggest(rows, 64, 32)
    memory = TTSpec.suggest(rows, 64, 32, objective="memory")
    flow = TTSpec.suggest(rows, 64, 32, objective="flow")
    assert memory.num_parameters < balanced.num_parameters / 2
    assert flow.num_prefixes < balanced.num_prefixes / 2

    shape = balanced_shape(rows, 64, 32, 3)
    found = type(shape)(flow.p, flow.q, flow.ranks)
    assert step_cost(found, rows, 32_768) < step_cost(shape, rows, 32_768) / 2


def test_the_step_cost_counts_prefixes_by_occupancy() -> None:
    shape = balanced_shape(1000, 8, 4, 3)
    assert shape.p == (10, 10, 10)
    assert shape.q == (2, 2, 2)
    a_prefix, a_row = 4 * 2 * 2 * 4 * 2 * 4, 3 * 2 * 8 * 4 + 4 * 2 * 4 * 4 * 2
    # So many lookups that all rows and prefixes occur.
    assert step_cost(shape, 1000, 10**6) == pytest.approx(100 * a_prefix + 1000 * a_row, rel=1e-4)
    rows = 1000 * (1 - math.exp(-0.05))
    assert step_cost(shape, 1000, 50) == pytest.approx(100 * (1 - math.exp(-rows / 100)) * a_prefix + rows * a_row)


def test_a_budget_may_be_given_and_may_be_too_small() -> None:
    tight = TTSpec.suggest(10**7, 64, 32, objective="flow", max_parameters=400_000)
    loose = TTSpec.suggest(10**7, 64, 32, objective="flow", max_parameters=4_000_000)
    assert tight.num_parameters <= 400_000 < loose.num_parameters <= 4_000_000
    with pytest.raises(ValueError, match="lower the rank or raise max_parameters"):
        TTSpec.suggest(10**7, 64, 32, objective="flow", max_parameters=1000)
    with pytest.raises(ValueError, match=r"takes one rank for all bonds, not \(8, 8\)"):
        TTSpec.suggest(10**7, 64, (8, 8), objective="flow")
