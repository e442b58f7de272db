"""TT-SVD on blocks of rows: as good as the whole table's, from rows read in order."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flowtt_torchrec.cores import from_dense, init_cores, row_range, to_dense, tt_rows
from flowtt_torchrec.spec import TTSpec
from flowtt_torchrec.tt_svd import ReadRows, compress_rows

# of each number of cores one with rows that p does not address exactly
SPECS = [
    TTSpec(570, 16, (19, 30), (4, 4), (12,)),
    TTSpec(557, 16, (19, 30), (4, 4), (12,)),
    TTSpec(1000, 16, (5, 10, 20), (2, 2, 4), (7, 9)),
    TTSpec(997, 16, (5, 10, 20), (2, 2, 4), (7, 9)),
    TTSpec(1440, 16, (4, 4, 6, 15), (2, 2, 1, 4), (5, 8, 7)),
    TTSpec(1401, 16, (4, 4, 6, 15), (2, 2, 1, 4), (5, 8, 7)),
]
EXACT, KRYLOV = 2048, 1  # exact_side


def error(cores: list[Tensor], table: Tensor) -> float:
    missed = to_dense(cores, table.shape[0]).double() - table.double()
    return float(missed.norm() / table.double().norm())


def noise(spec: TTSpec, dtype: torch.dtype = torch.float64) -> Tensor:
    """A table that no tensor train fits: the hardest for a method that searches only a part of the columns."""
    generator = torch.Generator().manual_seed(spec.num_embeddings)
    return torch.randn(spec.num_embeddings, spec.embedding_dim, generator=generator, dtype=dtype)


def fading(spec: TTSpec) -> Tensor:
    """A sum of rank-one tables, each smaller than the one before."""
    ones = TTSpec(spec.num_embeddings, spec.embedding_dim, spec.p, spec.q, (1,) * len(spec.ranks))
    parts = [to_dense(init_cores(ones, str(i), 1 / i, dtype=torch.float64), spec.num_embeddings) for i in range(1, 30)]
    return torch.stack(parts).sum(0)


def rows_of(table: Tensor) -> ReadRows:
    return lambda first, last: table[first:last]


def bound(spec: TTSpec, table: Tensor) -> float:
    """What TT-SVD promises of a whole table: the singular values that are cut at each inner rank, all together."""
    d = spec.num_cores
    tensor = table.view(*spec.p, *spec.q).permute([axis for k in range(d) for axis in (k, d + k)])
    cut, rows = 0.0, 1
    for k, rank in enumerate(spec.ranks):
        rows *= spec.p[k] * spec.q[k]
        cut += float(torch.linalg.svdvals(tensor.reshape(rows, -1))[rank:].square().sum())
    return math.sqrt(cut) / float(table.norm())


def by_svd(table: Tensor, spec: TTSpec) -> list[Tensor]:
    """Oseledets' algorithm 1 as it is written, from the first core on; rows past the table's end are zeros."""
    d = spec.num_cores
    rest = torch.zeros(math.prod(spec.p), spec.embedding_dim, dtype=table.dtype)
    rest[: spec.num_embeddings] = table
    rest = rest.view(*spec.p, *spec.q).permute([axis for k in range(d) for axis in (k, d + k)])
    cores, rank = [], 1
    for k, next_rank in enumerate(spec.ranks):
        u, s, vh = torch.linalg.svd(rest.reshape(rank * spec.p[k] * spec.q[k], -1), full_matrices=False)
        cores.append(u[:, :next_rank].reshape(rank, spec.p[k], spec.q[k], next_rank).transpose(0, 1))
        rest, rank = s[:next_rank, None] * vh[:next_rank], next_rank
    return [*cores, rest.reshape(rank, spec.p[-1], spec.q[-1], 1).transpose(0, 1)]


@pytest.mark.parametrize("exact_side", [EXACT, KRYLOV])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.num_cores}cores-{s.num_embeddings}")
def test_as_close_as_the_svd_of_the_whole_table(spec: TTSpec, exact_side: int) -> None:
    for table in (noise(spec), fading(spec)):
        cores, reported = compress_rows(
            rows_of(table), spec, dtype=torch.float64, block_bytes=9000, exact_side=exact_side
        )
        assert [tuple(core.shape) for core in cores] == spec.core_shapes
        assert reported == pytest.approx(error(cores, table), rel=1e-6)
        # They begin at different ends, which makes a small difference.
        assert reported <= error(by_svd(table, spec), table) * 1.02
        if spec.num_embeddings == math.prod(spec.p):
            assert reported <= bound(spec, table) * (1 + 1e-9 if exact_side == EXACT else 1.01)


# Of each number of cores, tables that end early: in the first prefix, with whole first digits, with one row too few.
CUT = [
    TTSpec(256, 16, (6, 7, 7), (2, 2, 4), (8, 8)),
    TTSpec(245, 16, (6, 7, 7), (2, 2, 4), (8, 8)),
    TTSpec(5, 16, (6, 7, 7), (2, 2, 4), (8, 8)),
    TTSpec(997, 16, (5, 10, 20), (2, 2, 4), (7, 9)),
    TTSpec(41, 6, (6, 7), (2, 3), (12,)),
    TTSpec(22, 6, (6, 7), (2, 3), (12,)),
    TTSpec(154, 16, (6, 5, 7), (2, 2, 4), (12, 12)),
    TTSpec(43, 32, (2, 1, 6, 6), (2, 1, 4, 4), (4, 4, 5)),
    TTSpec(1401, 16, (4, 4, 6, 15), (2, 2, 1, 4), (5, 8, 7)),
    TTSpec(361, 16, (4, 4, 6, 15), (2, 2, 1, 4), (5, 8, 7)),
]


@pytest.mark.parametrize("exact_side", [EXACT, KRYLOV])
@pytest.mark.parametrize("spec", CUT, ids=lambda s: f"{s.num_cores}cores-{s.num_embeddings}")
def test_a_tensor_train_that_ends_early_is_recovered(spec: TTSpec, exact_side: int) -> None:
    """Rows past the end are unknown; taken for zeros, they would raise the ranks."""
    table = to_dense(init_cores(spec, "t", 1.0), spec.num_embeddings)
    cores, reported = compress_rows(rows_of(table), spec, block_bytes=9000, exact_side=exact_side)
    assert error(cores, table) < 1e-6
    assert reported < 1e-6
    again, _ = compress_rows(lambda first, last: row_range(cores, first, last), spec, exact_side=exact_side)
    assert error(again, table) < 2e-6
    assert error(from_dense(table, spec), table) < 1e-6


@pytest.mark.parametrize("exact_side", [EXACT, KRYLOV])
@pytest.mark.parametrize("rows", [59, 83, 118])
def test_the_end_of_a_table_counts_as_much_as_its_rows(rows: int, exact_side: int) -> None:
    """Half of the table, or all of it, is in the prefix in which it ends."""
    spec = TTSpec(rows, 24, (2, 60), (4, 6), (5,))
    for table in (noise(spec), fading(spec)):
        cores, reported = compress_rows(rows_of(table), spec, dtype=torch.float64, exact_side=exact_side)
        assert reported == pytest.approx(error(cores, table), rel=1e-6)
        assert reported <= error(by_svd(table, spec), table) * 1.01


@pytest.mark.parametrize("exact_side", [EXACT, KRYLOV])
@pytest.mark.parametrize("spec", SPECS[::2], ids=lambda s: f"{s.num_cores}cores")
def test_a_table_of_the_ranks_is_recovered(spec: TTSpec, exact_side: int) -> None:
    table = to_dense(init_cores(spec, "t", 1.0), spec.num_embeddings)
    cores, reported = compress_rows(rows_of(table), spec, block_bytes=9000, exact_side=exact_side)
    assert all(core.dtype == torch.float32 for core in cores)
    assert error(cores, table) < 1e-6
    assert reported < 1e-6
    rms = torch.stack([core.square().mean().sqrt() for core in cores])
    torch.testing.assert_close(rms, rms.mean().expand(spec.num_cores))


@pytest.mark.parametrize("spec", SPECS[1::2], ids=lambda s: f"{s.num_cores}cores")
def test_full_ranks_lose_nothing_of_a_table_that_ends_early(spec: TTSpec) -> None:
    full, bound = [], 1
    for k in range(spec.num_cores - 1):
        bound *= spec.p[k] * spec.q[k]
        full.append(min(bound, math.prod(p * q for p, q in zip(spec.p[k + 1 :], spec.q[k + 1 :]))))
    spec = TTSpec(spec.num_embeddings, spec.embedding_dim, spec.p, spec.q, tuple(full))
    table = noise(spec)
    cores, _ = compress_rows(rows_of(table), spec, dtype=torch.float64, block_bytes=9000)
    torch.testing.assert_close(to_dense(cores, spec.num_embeddings), table)


def test_one_last_core_is_searched_by_krylov_where_it_is_wide() -> None:
    """The search space is a small part of the columns, not all of them."""
    spec = TTSpec(8000, 16, (200, 40), (4, 4), (3,))
    table = noise(spec)
    cores, _ = compress_rows(rows_of(table), spec, dtype=torch.float64, block_bytes=100_000, exact_side=100)
    best = error(from_dense(table, spec), table)
    assert best < error(cores, table) < best * 1.001


def test_rows_are_read_in_order_and_few_at_a_time() -> None:
    spec = SPECS[3]
    table, reads, fractions = noise(spec), [], []

    def read(first: int, last: int) -> Tensor:
        reads.append((first, last))
        return table[first:last].half()

    compress_rows(read, spec, block_bytes=100 * 16 * 8, progress=fractions.append)
    once = [(first, min(first + 100, 980)) for first in range(0, 980, 100)]
    assert reads == [(980, 997), *once * 2]  # what is left of a prefix comes first
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1
    reads.clear()
    fractions.clear()
    compress_rows(read, spec, block_bytes=1, exact_side=1, progress=fractions.append)
    assert all(last - first <= spec.p[-1] for first, last in reads)
    assert fractions[-1] == 1


def test_equal_rows_give_equal_bits() -> None:
    table = noise(SPECS[0])
    one, two = (compress_rows(rows_of(table), SPECS[0], exact_side=1) for _ in range(2))
    assert all(map(torch.equal, one.cores, two.cores))


def test_zeros_and_numbers_that_are_not_finite() -> None:
    spec = SPECS[2]
    cores, reported = compress_rows(lambda first, last: torch.zeros(last - first, 16), spec)
    assert reported == 0
    assert not to_dense(cores, 1000).any()
    table = noise(spec)
    table[777, 3] = torch.nan
    for side in (EXACT, KRYLOV):
        with pytest.raises(ValueError, match="not finite"):
            compress_rows(rows_of(table), spec, exact_side=side)


@pytest.mark.parametrize("spec", SPECS[1::2], ids=lambda s: f"{s.num_cores}cores")
def test_row_ranges_are_the_rows(spec: TTSpec) -> None:
    cores = init_cores(spec, "t", 1.0, dtype=torch.float64)
    last = spec.num_embeddings
    for first, end in ((0, last), (0, 1), (17, 19), (spec.p[-1], 2 * spec.p[-1]), (last - 1, last)):
        torch.testing.assert_close(row_range(cores, first, end), tt_rows(cores, torch.arange(first, end)))
