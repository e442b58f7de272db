"""The rules that choose shapes: budgets kept, and the objective they are for really better."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtt_torchrec.shapes import balanced_cover, balanced_factors, ordered_factors
from flowtt_torchrec.spec import TTSpec
from flowtt_torchrec.step_costs import CASES, step_costs


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
    costs, flow_costs = (step_costs(s.p, s.q, s.ranks, rows, 32_768) for s in (balanced, flow))
    assert (flow_costs < costs / 1.1).all()
    assert flow_costs.mean() < costs.mean() / 1.5


def test_the_step_model_counts_prefixes_by_occupancy() -> None:
    p, q, ranks = (10, 10, 10), (2, 2, 4), (4, 4)
    a_row = 31.0 + 0.015 * 2 * 16 * 4
    a_prefix = 114.0 + 0.028 * 2 * 2 * 4 * 2 * 4 + 0.05 * 4 * 2 * 4
    cores, middle = 0.06 * 4 * (10 * 2 * 4 + 10 * 4 * 2 * 4 + 10 * 4 * 4), 0.2 * 10 * 4 * 4 * 2 * 4

    def of_the_shape(lookups: int) -> np.ndarray:
        return step_costs(p, q, ranks, 1000, lookups) - 240_000 - lookups * (30 + 0.83 * 16)

    # So many lookups that all rows and prefixes occur, however they are distributed.
    expected = 1000 * a_row + 100 * a_prefix + middle + cores
    assert of_the_shape(10**9) == pytest.approx([expected] * len(CASES), rel=0.02)
    rows = 1000 * (1 - math.exp(-0.05))
    prefixes = 100 * (1 - math.exp(-rows / 100))
    expected = rows * a_row + prefixes * a_prefix + (1 - math.exp(-prefixes / 10)) * middle + cores
    assert of_the_shape(50)[0] == pytest.approx(expected)


def test_the_step_model_knows_that_few_last_columns_do_not_pay() -> None:
    # The same products of a row, but for how the kernels can take them.
    two, four = (step_costs((100, 100, 100), q, (16, 16), 10**6, 32_768)[0] for q in ((2, 4, 2), (2, 2, 4)))
    assert two > four


def test_the_step_model_knows_skew_and_the_cache() -> None:
    uniform, scattered, in_order = step_costs((200, 220, 250), (4, 4, 4), (32, 32), 10**7, 32_768)
    assert uniform > 1.5 * scattered > 1.5 * 1.2 * in_order
    # The same prefixes, but a last core that no cache holds.
    near, far = (step_costs((100, 100, last), (4, 4, 4), (32, 32), 10**4 * last, 32_768)[0] for last in (1000, 64_000))
    assert far > 1.2 * near


def test_a_budget_may_be_given_and_may_be_too_small() -> None:
    tight = TTSpec.suggest(10**7, 64, 32, objective="flow", max_parameters=400_000)
    loose = TTSpec.suggest(10**7, 64, 32, objective="flow", max_parameters=4_000_000)
    assert tight.num_parameters <= 400_000 < loose.num_parameters <= 4_000_000
    with pytest.raises(ValueError, match="lower the rank or raise max_parameters"):
        TTSpec.suggest(10**7, 64, 32, objective="flow", max_parameters=1000)
    with pytest.raises(ValueError, match=r"takes one rank for all bonds, not \(8, 8\)"):
        TTSpec.suggest(10**7, 64, (8, 8), objective="flow")
