"""Cores: what initialisation, TT-SVD and reading back promise."""

from __future__ import annotations

import math

import pytest
import torch

from flowtt_torchrec.cores import default_std, digits, from_dense, from_fbtt, init_cores, to_dense, tt_rows
from flowtt_torchrec.spec import TTSpec

SPECS = [
    TTSpec(35, 6, (6, 6), (2, 3), (4,)),
    TTSpec(59, 12, (3, 4, 5), (2, 3, 2), (3, 5)),
    TTSpec(100, 24, (2, 3, 4, 5), (2, 2, 3, 2), (3, 4, 2)),
    TTSpec(7, 5, (1, 2, 4), (1, 1, 5), (1, 2)),
]


def entry(cores: list[torch.Tensor], row: int, column: int) -> float:
    """One number of the table, digit by digit, from the definition."""
    product = torch.ones(1, 1, dtype=cores[0].dtype)
    rows, columns = [], []
    for core in reversed(cores):
        rows.append(row % core.shape[0])
        columns.append(column % core.shape[2])
        row, column = row // core.shape[0], column // core.shape[2]
    for core, i, j in zip(cores, reversed(rows), reversed(columns), strict=True):
        product = product @ core[i, :, j, :]
    return product.item()


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.num_cores}cores")
def test_rows_and_dense_follow_the_definition(spec: TTSpec) -> None:
    cores = init_cores(spec, "t", 1.0, dtype=torch.float64)
    expected = torch.tensor(
        [[entry(cores, i, j) for j in range(spec.embedding_dim)] for i in range(spec.num_embeddings)],
        dtype=torch.float64,
    )
    torch.testing.assert_close(tt_rows(cores, torch.arange(spec.num_embeddings)), expected)
    torch.testing.assert_close(to_dense(cores, spec.num_embeddings), expected)
    some = torch.tensor([spec.num_embeddings - 1, 0, 0], dtype=torch.int32)
    torch.testing.assert_close(tt_rows(cores, some), expected[some.long()])
    assert tt_rows(cores, torch.empty(0, dtype=torch.int64)).shape == (0, spec.embedding_dim)


def test_digits_are_most_significant_first() -> None:
    i1, i2, i3 = digits(torch.tensor([0, 4, 5, 19, 20, 59]), (3, 4, 5))
    assert i1.tolist() == [0, 0, 0, 0, 1, 2]
    assert i2.tolist() == [0, 0, 1, 3, 0, 3]
    assert i3.tolist() == [0, 4, 0, 4, 0, 4]


def test_init_gives_rows_the_wanted_spread() -> None:
    for spec in (TTSpec.suggest(1_000_000, 64), TTSpec.suggest(200_000, 32, 16, num_cores=4)):
        rows = tt_rows(init_cores(spec, "t"), torch.arange(0, spec.num_embeddings, 97))
        std = default_std(spec.num_embeddings)
        uniform = torch.empty(100_000).uniform_(-1, 1) / math.sqrt(spec.num_embeddings)
        assert std == pytest.approx(uniform.std().item(), rel=0.02)
        # Rows share slices, so the sample's spread is looser than its size suggests.
        assert rows.std().item() == pytest.approx(std, rel=0.1)
        assert abs(rows.mean().item()) < 0.05 * std


def test_init_is_seeded_by_name() -> None:
    spec = SPECS[1]
    first, again = init_cores(spec, "a"), init_cores(spec, "a")
    for x, y in zip(first, again, strict=True):
        assert torch.equal(x, y)
    for other in (init_cores(spec, "b"), init_cores(spec, "a", seed=1)):
        assert not any(torch.equal(x, y) for x, y in zip(first, other, strict=True))
    assert [tuple(core.shape) for core in first] == spec.core_shapes


@pytest.mark.parametrize("rows", [60, 120])
def test_tt_svd_recovers_a_table_of_that_rank(rows: int) -> None:
    spec = TTSpec(rows, 24, (rows // 20, 4, 5), (2, 3, 4), (3, 5))
    table = to_dense(init_cores(spec, "t", 1.0, dtype=torch.float64), rows)
    cores = from_dense(table, spec)
    assert [tuple(core.shape) for core in cores] == spec.core_shapes
    torch.testing.assert_close(to_dense(cores, rows), table)
    rms = torch.stack([core.square().mean().sqrt() for core in cores])
    torch.testing.assert_close(rms, rms.mean().expand(3))


def test_tt_svd_error_stays_within_its_bound() -> None:
    torch.manual_seed(0)
    table = torch.randn(60, 12, dtype=torch.float64)
    spec = TTSpec(60, 12, (3, 4, 5), (2, 3, 2), (4, 6))
    error = (to_dense(from_dense(table, spec), 60) - table).square().sum()
    tensor = table.view(3, 4, 5, 2, 3, 2).permute(0, 3, 1, 4, 2, 5)
    cut = sum(
        torch.linalg.svdvals(tensor.reshape(rows, -1))[rank:].square().sum()
        for rows, rank in ((3 * 2, 4), (3 * 2 * 4 * 3, 6))
    )
    assert error <= cut * (1 + 1e-9)
    assert error < table.square().sum() / 2


def test_tt_svd_of_zeros_and_of_a_cut_table() -> None:
    spec = TTSpec(57, 12, (3, 4, 5), (2, 3, 2), (6, 10))  # full ranks, and rows past the end
    table = torch.randn(57, 12, dtype=torch.float64)
    torch.testing.assert_close(to_dense(from_dense(table, spec), 57), table)
    assert not any(core.isnan().any() for core in from_dense(torch.zeros(57, 12), spec))
    with pytest.raises(ValueError, match="56 x 12"):
        from_dense(table[:56], spec)


def test_fbtt_cores_are_the_same_numbers() -> None:
    spec = SPECS[1]
    cores = init_cores(spec, "t")
    fbtt = [core.reshape(1, core.shape[0], -1) for core in cores]
    for ours, core in zip(from_fbtt(fbtt, spec), cores, strict=True):
        assert torch.equal(ours, core)
    with pytest.raises(ValueError, match=r"FBTT core 1 is \(1, 4, 44\)"):
        from_fbtt([fbtt[0], fbtt[1][:, :, :-1], fbtt[2]], spec)
    with pytest.raises(ValueError, match="2 FBTT cores"):
        from_fbtt(fbtt[:2], spec)
