"""Every compressed table against its paper's definition, row by row in plain Python, and its number of weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.quality.contenders import CONTENDERS, TABLES, fit_spec, num_weights
from benchmarks.quality.tables import (
    Buckets,
    DeepHash,
    DoesNotFitError,
    HashEmbedding,
    Hashing,
    HotRows,
    MixedDimensions,
    Narrow,
    Ordered,
    QuotientRemainder,
    Robe,
    Table,
    UniversalHash,
)
from flowtt_torchrec.cores import tt_rows

ROWS, DIM = 300, 8
IDS = torch.arange(ROWS)


def table(rows: int = ROWS) -> Table:
    torch.manual_seed(0)
    return Table(rows, DIM, torch.randint(0, 1000, (rows,)), torch.rand(rows))


def made_of(module: nn.Module) -> torch.Tensor:
    """All rows."""
    return module.eval()(IDS).detach()


def hashed(module: UniversalHash, x: int, function: int | None = None) -> int:
    a, b = (v if function is None else v[function] for v in (module.a, module.b))
    return (int(a) * x + int(b)) % (2**31 - 1) % module.size


@pytest.mark.parametrize("ratio", [2, 8, 20])
@pytest.mark.parametrize("name", [name for name in CONTENDERS if name != "dense"])
def test_no_contender_has_more_weights_than_it_may_and_all_can_be_trained(name: str, ratio: int) -> None:
    tables = [table(), table(200)]
    budget = 500 * DIM // ratio
    try:
        module = CONTENDERS[name](tables, budget)
    except DoesNotFitError:
        if ratio == 2:
            raise
        return
    coarse = name in ("tt_flow", "tt2", "tt_memory", "tt4")  # ranks go up in large steps here
    assert (0 if coarse else 0.5 * budget) < num_weights(module) <= budget
    ids = torch.stack([torch.randint(300, (64,)), torch.randint(200, (64,))], dim=1)
    before = [p.detach().clone() for p in module.parameters()]
    rows = module(ids)
    assert rows.shape == (64, 2, DIM)
    rows.square().sum().backward()
    for p, old in zip(module.parameters(), before, strict=True):
        assert p.grad is not None or not torch.equal(p, old)  # the fused optimizer has stepped


def test_hashing_shares_whole_rows() -> None:
    module = Hashing(table(), 20 * DIM)
    for id in (0, 7, 299):
        assert torch.equal(made_of(module)[id], module.rows.weight[hashed(module.hash, id)])


def test_hash_embedding_weighs_two_hashed_rows() -> None:
    module = HashEmbedding(table(), 600)
    assert module.importances.num_embeddings == 150
    for id in (0, 7, 299):
        weights = module.importances.weight[hashed(module.importance_hash, id)]
        rows = [module.rows.weight[hashed(module.hash, id, function)] for function in (0, 1)]
        torch.testing.assert_close(made_of(module)[id], weights[0] * rows[0] + weights[1] * rows[1])


@pytest.mark.parametrize("concatenate", [False, True])
def test_quotient_and_remainder_tell_every_id(concatenate: bool) -> None:
    module = QuotientRemainder(table(), 40 * DIM, concatenate)
    rows = made_of(module)
    assert len(torch.unique(rows, dim=0)) == ROWS
    for id in (0, 7, 299):
        parts = module.quotients.weight[id // module.divisor], module.remainders.weight[id % module.divisor]
        expected = torch.cat(parts[::-1]) if concatenate else parts[0] * parts[1]
        torch.testing.assert_close(rows[id], expected)


def test_a_narrow_table_has_the_rank_of_its_columns() -> None:
    assert torch.linalg.matrix_rank(made_of(Narrow(table(), 3 * (ROWS + DIM)))) == 3


def test_frequent_blocks_have_more_columns() -> None:
    about = table()
    module = MixedDimensions(about, 900)
    columns = [block.embedding_dim for block in module.blocks]
    assert columns == sorted(columns, reverse=True)
    assert columns[0] > columns[-1]
    by_frequency = torch.argsort(about.counts, descending=True, stable=True)
    first = module.FIRST_BLOCK
    torch.testing.assert_close(
        made_of(module)[by_frequency[first + 3]], module.projections[1](module.blocks[1].weight[3]).detach()
    )


def test_robe_reads_blocks_of_one_circular_array() -> None:
    module = Robe([table(), table(200)], 100, block=4)
    rows = module(torch.tensor([[299, 0], [5, 199]]))
    for row, column, key in (0, 0, 299), (0, 1, 300), (1, 0, 5), (1, 1, 499):
        starts = [hashed(module.hash, key * 2 + chunk) for chunk in (0, 1)]
        expected = torch.stack([module.array[(start + k) % 100] for start in starts for k in range(4)])
        assert torch.equal(rows[row, column], expected)


def test_deep_hash_codes_lie_between_minus_one_and_one_and_equal_ids_are_equal() -> None:
    module = DeepHash(table(), 800)
    seen: list[torch.Tensor] = []
    module.network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    rows = module.train()(torch.tensor([3, 9, 3]))
    assert torch.equal(rows[0], rows[2])
    (codes,) = seen
    assert codes.shape == (2, module.hash.b.numel())
    assert codes.abs().max() <= 1
    assert codes[0, 0] == pytest.approx(2 * hashed(module.hash, 3, 0) / 999_999 - 1, abs=1e-6)


def test_hot_rows_are_the_most_frequent_ones() -> None:
    about = table()
    module = HotRows(about, 40 * DIM, lambda t, budget: Hashing(t, budget), share=0.5)
    rows, rest = made_of(module), made_of(module.rest)
    hot = torch.argsort(about.counts, descending=True, stable=True)[:20]
    torch.testing.assert_close(rows[hot], module.hot.weight.detach())
    cold = torch.ones(ROWS, dtype=torch.bool).index_fill(0, hot, False)
    assert torch.equal(rows[cold], rest[cold])


def test_neighbours_share_a_bucket() -> None:
    rows = made_of(Buckets(table(), 20 * DIM))
    assert torch.equal(rows[0], rows[14])
    assert len(torch.unique(rows, dim=0)) == 20


def test_an_ordered_table_has_neighbours_of_like_labels() -> None:
    about = table()
    seen: list[Table] = []

    def keep(ordered: Table) -> nn.Module:
        seen.append(ordered)
        return Narrow(ordered, 0, 1)

    module = Ordered(about, keep)
    assert torch.equal(seen[0].label_rates, about.label_rates.sort().values)
    assert torch.equal(about.label_rates[IDS], seen[0].label_rates[module.place[IDS]])


@pytest.mark.parametrize("name", ["tt2", "tt3", "tt4", "tt_memory", "tt_flow", "tt3_orthogonal"])
def test_a_tensor_train_is_the_product_of_its_cores(name: str) -> None:
    module = TABLES[name](table(), ROWS * DIM // 4)
    torch.testing.assert_close(made_of(module), tt_rows(module.bags.split_weights()["table"], IDS))


def test_a_fitted_tensor_train_has_the_largest_rank() -> None:
    spec = fit_spec(1000, 16, 2000, num_cores=3)
    assert spec.num_parameters <= 2000
    larger = type(spec)(1000, 16, spec.p, spec.q, (spec.ranks[0], spec.ranks[1] + 1))
    assert larger.num_parameters > 2000
    with pytest.raises(DoesNotFitError, match="rank 1"):
        fit_spec(1000, 16, 20)
