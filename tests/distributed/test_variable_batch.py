"""A batch size per feature (VBE): the helpers, and training against plain autograd on the batches written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from twins import Reference, Table, all_optimizers, feature_rows, full_state, shard

from flowtt_torchrec.distributed.variable_batch import by_rank, even_offsets, merge_groups
from flowtt_torchrec.spec import TTSpec

SPEC = TTSpec(60, 16, (4, 4, 4), (2, 4, 2), (3, 5))


def test_even_offsets_add_empty_bags() -> None:
    offsets = torch.tensor([0, 2, 2, 3, 7, 9])  # bags of 2, 0 and 1 lookups, then of 4 and 2
    assert even_offsets(offsets, [3, 2]).tolist() == [0, 2, 2, 3, 7, 9, 9]
    assert even_offsets(offsets, [2, 3]).tolist() == [0, 2, 2, 2, 3, 7, 9]
    assert even_offsets(torch.tensor([0, 5]), [0, 1]).tolist() == [0, 0, 5]
    assert even_offsets(torch.tensor([0]), [0, 0]).tolist() == [0]


def test_outputs_go_by_rank() -> None:
    pooled = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    assert by_rank(pooled, [2, 1], [[1, 2], [0, 1]]).tolist() == [1, 2, 4, 5, 7, 8, 3]
    other = by_rank(10 * pooled[:, :1], [1], [[2, 1]])
    merged = merge_groups(
        [by_rank(pooled, [2, 1], [[1, 2], [0, 1]]), other], [[2, 1], [1]], [[[1, 2], [0, 1]], [[2, 1]]]
    )
    assert merged.tolist() == [1, 2, 10, 40, 4, 5, 7, 8, 3, 70]


def tables_of(case: str, pooling: PoolingType) -> list[Table]:
    """Groups that TorchRec merges: tensor trains before and after dense tables on one rank."""
    places: dict[str, list[tuple[int | str | tuple[int, ...], bool]]] = {
        "two groups on a rank": [(0, True), (0, False), (1, False), (1, True)],
        "column-wise": [((0, 1), True), (1, True), ((1, 0), False)],
        "data-parallel": [("dp", True), ("dp", True), (1, False)],
        "row-wise": [("rw", True), ("rw", False), (0, True)],
    }
    return [
        Table(f"t{i}", 60, 16, (f"f{i}", f"g{i}") if i == 0 else (f"f{i}",), place, SPEC if tt else None, pooling)
        for i, (place, tt) in enumerate(places[case])
    ]


def make_batch(
    tables: list[Table], rank: int, step: int, weighted: bool, equal: bool
) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor, Tensor]:
    """Features of samples that repeat, the same written out, and targets."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    names, samples = list(feature_rows(tables)), 6
    lengths, values, factors, inverse = [], [], [], []
    full_lengths, full_values, full_factors = [], [], []
    for i, _ in enumerate(names):
        stride = 2 + (i + (0 if equal else rank)) % 3
        length = torch.randint(0, 4, (stride,), generator=generator)
        ids = torch.randint(0, 60, (int(length.sum()),), generator=generator)
        weights = torch.rand(ids.numel(), generator=generator) + 0.5
        of_sample = torch.randint(0, stride, (samples,), generator=generator)
        lengths.append(length)
        values.append(ids)
        factors.append(weights)
        inverse.append(of_sample)
        full_lengths.append(length[of_sample])
        full_values += [ids.split(length.tolist())[b] for b in of_sample.tolist()]
        full_factors += [weights.split(length.tolist())[b] for b in of_sample.tolist()]
    variable = KeyedJaggedTensor(
        keys=names,
        values=torch.cat(values),
        lengths=torch.cat(lengths),
        weights=torch.cat(factors) if weighted else None,
        stride_per_key_per_rank=[[length.numel()] for length in lengths],
        inverse_indices=(names, torch.stack(inverse)),
    )
    full = KeyedJaggedTensor(
        keys=names,
        values=torch.cat(full_values),
        lengths=torch.cat(full_lengths),
        weights=torch.cat(full_factors) if weighted else None,
    )
    return variable, full, torch.randn(samples, generator=generator)


def same_training(rank: int, world_size: int, case: str, pooling: PoolingType, weighted: bool) -> None:
    tables = tables_of(case, pooling)
    model = shard(tables, world_size, (torch.optim.SGD, {"lr": 0.2}), weighted=weighted)
    optimizers = all_optimizers(model, lambda parameters: torch.optim.SGD(parameters, lr=0.2))
    start = full_state(model, tables)
    reference = Reference(tables, start, model.module.over)
    plain = torch.optim.SGD(
        [*reference.over.parameters(), *reference.leaves([t.name for t in tables if t.place == "dp"])], lr=0.2
    )
    for step in range(5):
        batches = [make_batch(tables, r, step, weighted, equal=case == "row-wise") for r in range(world_size)]
        variable, full, targets = batches[rank]
        optimizers.zero_grad()
        output, columns = model(variable)
        torch.testing.assert_close(columns, reference.columns(full), atol=1e-5, rtol=0)
        (output - targets).square().mean().backward()
        optimizers.step()
        for parameter in [*reference.over.parameters(), *reference.parameters.values()]:
            parameter.grad = None
        written_out = [(f, y) for _, f, y in batches]
        reference.loss(written_out).backward()
        plain.step()
        reference.fused_step(written_out, "sgd", 0.2, 0.0, 0.0)
    end = full_state(model, tables)
    for name, value in reference.state().items():
        torch.testing.assert_close(end[name], value, atol=1e-5, rtol=0, msg=lambda m, name=name: f"{name}: {m}")
        assert not torch.equal(end[name], start[name])


@pytest.mark.parametrize(
    ("case", "pooling", "weighted"),
    [
        pytest.param("two groups on a rank", PoolingType.SUM, False, id="two groups on a rank"),
        pytest.param("two groups on a rank", PoolingType.MEAN, False, id="two groups on a rank, mean"),
        pytest.param("two groups on a rank", PoolingType.SUM, True, id="two groups on a rank, weighted"),
        pytest.param("column-wise", PoolingType.SUM, False, id="column-wise"),
        pytest.param("data-parallel", PoolingType.SUM, False, id="data-parallel"),
        pytest.param("row-wise", PoolingType.SUM, False, id="row-wise"),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_training_equals_plain_autograd(
    one_rank: Callable[..., Any],
    two_ranks: Ranks,
    world_size: int,
    case: str,
    pooling: PoolingType,
    weighted: bool,
) -> None:
    args = (same_training, case, pooling, weighted)
    one_rank(*args) if world_size == 1 else two_ranks.run(*args)


def dense_beside(rank: int, world_size: int) -> None:
    tables = [Table("t", 60, 16, ("f0",), "dp", SPEC), Table("d", 60, 16, ("f1",), "dp")]
    model = shard(tables, world_size)
    model(make_batch(tables, rank, 0, False, equal=True)[0])


def test_dense_data_parallel_tables_that_have_no_such_output_are_named(one_rank: Callable[..., Any]) -> None:
    with pytest.raises(NotImplementedError, match=r"table 'd': TorchRec's dense kernel .* on cpu"):
        one_rank(dense_beside)
