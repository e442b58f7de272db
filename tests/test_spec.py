"""TTSpec: counts, the suggested shapes, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtt_torchrec.spec import TTSpec, compress_to_fit, parse_bytes


@dataclass
class Table:
    name: str
    num_embeddings: int
    embedding_dim: int


def test_counts_of_the_reference_table() -> None:
    spec = TTSpec(10_000_000, 64, p=(200, 220, 250), q=(4, 4, 4), ranks=(32, 16))
    assert spec.core_shapes == [(200, 1, 4, 32), (220, 32, 4, 16), (250, 16, 4, 1)]
    assert spec.core_sizes == [25_600, 450_560, 16_000]
    assert spec.num_parameters == 492_160
    assert spec.num_bytes() == 4 * 492_160
    assert spec.num_slices == 670
    assert spec.num_prefixes == 44_000
    assert spec.compression_ratio == pytest.approx(640_000_000 / 492_160)
    assert spec.flops_per_prefix == 2 * 4 * 32 * 4 * 16
    assert spec.flops_per_row == 2 * 16 * 16 * 4


def test_flops_of_two_and_four_cores() -> None:
    assert TTSpec(100, 16, (10, 10), (4, 4), (8,)).flops_per_prefix == 0
    four = TTSpec(10_000, 16, (10, 10, 10, 10), (2, 2, 2, 2), (4, 8, 4))
    assert four.flops_per_prefix == 2 * 2 * 4 * 2 * 8 + 2 * 4 * 8 * 2 * 4
    assert four.flops_per_row == 2 * 8 * 4 * 2


@given(
    rows=st.integers(1, 4_000_000_000),
    dim=st.integers(1, 512),
    rank=st.integers(1, 256),
    cores=st.integers(2, 4),
)
def test_suggested_shapes_are_valid_and_tight(rows: int, dim: int, rank: int, cores: int) -> None:
    spec = TTSpec.suggest(rows, dim, rank, num_cores=cores)
    assert spec.num_cores == cores
    assert rows <= math.prod(spec.p)
    root = rows ** (1 / cores)
    assert all(root / 2 <= p <= root + 1 for p in spec.p) or rows < 2**cores
    assert math.prod(spec.q) == dim
    assert list(spec.q) == sorted(spec.q)
    assert max(spec.ranks) <= rank
    assert TTSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert hash(TTSpec.from_dict(spec.to_dict())) == hash(spec)


@pytest.mark.parametrize(
    ("dim", "q"), [(16, (2, 2, 4)), (32, (2, 4, 4)), (64, (4, 4, 4)), (128, (4, 4, 8)), (7, (1, 1, 7))]
)
def test_suggested_column_factors(dim: int, q: tuple[int, ...]) -> None:
    assert TTSpec.suggest(1000, dim).q == q


def test_a_single_rank_is_clipped_and_listed_ranks_are_not() -> None:
    assert TTSpec.suggest(4, 64, 32).ranks == (4, 8)
    with pytest.raises(ValueError, match=r"rank r_1 = 32 exceeds 4.*TTSpec.suggest"):
        TTSpec.suggest(4, 64, (32, 8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": (3, 4, 4)}, "addresses 48 rows, fewer than the table's 60"),
        ({"q": (2, 2, 2)}, "multiplies to 8, not to the embedding_dim 12"),
        ({"ranks": (7, 8)}, "rank r_1 = 7 exceeds 6"),
        ({"ranks": (3, 11)}, "rank r_2 = 11 exceeds 10"),
        ({"ranks": (3,)}, "3 cores need 3 factors in q and 2 ranks"),
        ({"p": (60,), "q": (12,), "ranks": ()}, "1 factors; 2 to 4 cores"),
        ({"ranks": (0, 8)}, "at least 1"),
        ({"p": (3, 4, 5.0)}, "must be a whole number, not 5.0"),
        ({"num_embeddings": 0}, "at least one row"),
    ],
)
def test_bad_shapes_say_what_is_allowed(change: dict, message: str) -> None:
    good = {"num_embeddings": 60, "embedding_dim": 12, "p": (3, 4, 5), "q": (2, 3, 2), "ranks": (3, 8)}
    TTSpec(**good)
    with pytest.raises(ValueError, match=message):
        TTSpec(**{**good, **change})


def test_suggest_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="'fast'; known: balanced, memory, flow"):
        TTSpec.suggest(100, 8, objective="fast")
    with pytest.raises(ValueError, match="num_cores 5"):
        TTSpec.suggest(100, 8, num_cores=5)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        TTSpec.suggest(100, 8, 0)
    with pytest.raises(ValueError, match="0 x 8"):
        TTSpec.suggest(0, 8)


def test_a_spec_for_another_table_is_named() -> None:
    spec = TTSpec.suggest(100, 8)
    spec.check_table("t", 100, 8)
    with pytest.raises(ValueError, match=r"table 't_cat_3' is 101 x 8, but its TTSpec is for 100 x 8"):
        spec.check_table("t_cat_3", 101, 8)


def test_compress_to_fit_takes_the_largest_first() -> None:
    tables = [Table("small", 1_000, 64), Table("big", 40_000_000, 64), Table("mid", 3_000_000, 64)]
    assert compress_to_fit(tables, "20GB") == {}
    assert list(compress_to_fit(tables, "2GB")) == ["big"]
    few = compress_to_fit(tables, "100MB", rank=16)
    assert list(few) == ["big", "mid"]
    assert few["big"].ranks == (16, 16)
    with pytest.raises(ValueError, match="lower the rank or raise the budget"):
        compress_to_fit(tables, "1MB")


@pytest.mark.parametrize(("text", "size"), [("8GB", 8_000_000_000), ("1.5 MiB", 1_572_864), ("17", 17), (5, 5)])
def test_parse_bytes(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["8 gigs", "-1GB", "", "GB"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        parse_bytes(text)


def test_narrow_keeps_all_but_the_first_q():
    spec = TTSpec(90, 16, (5, 5, 4), (4, 2, 2), (15, 5))
    assert spec.column_step == 4
    part = spec.narrow(4)
    assert (part.num_embeddings, part.embedding_dim, part.p, part.q, part.ranks) == (
        90,
        4,
        (5, 5, 4),
        (1, 2, 2),
        (15, 5),
    )
    assert part.core_shapes[1:] == spec.core_shapes[1:]
    assert spec.narrow(16) == spec
    for columns in (0, 2, 6, 20):
        with pytest.raises(ValueError, match=r"q \(4, 2, 2\) can be cut every 4 columns.*multiples of 4 up to 16"):
            spec.narrow(columns)
