"""Sizes, ranks and budgets may be any whole number; floats are refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from flowtt_torchrec import BatchedTTEmbeddingBags, TTEmbeddingBag, TTSpec, compress_to_fit
from flowtt_torchrec.datasets.criteo_format import table_sizes


@dataclass
class Table:
    name: str
    num_embeddings: int
    embedding_dim: int


CALLS = {
    "rank": (lambda n: TTSpec.suggest(1000, 12, n(4)), "TT rank must be a whole number"),
    "ranks": (lambda n: TTSpec.suggest(1000, 12, (n(4), n(4))), "TT ranks"),
    "p": (lambda n: TTSpec(60, 12, (n(3), n(4), n(5)), (2, 3, 2), (3, 5)), r"TT p .* must be a whole number"),
    "rows": (lambda n: TTSpec(n(60), 12, (3, 4, 5), (2, 3, 2), (3, 5)), "num_embeddings must be a whole number"),
    "columns": (lambda n: TTSpec.suggest(1000, n(12)), "embedding_dim must be a whole number"),
    "num_cores": (lambda n: TTSpec.suggest(1000, 12, 4, num_cores=n(3)), "num_cores must be a whole number"),
    "max_parameters": (
        lambda n: TTSpec.suggest(1000, 12, 4, objective="memory", max_parameters=n(2000)),
        "max_parameters must be a whole number",
    ),
    "lookups": (lambda n: TTSpec.suggest(1000, 12, 4, objective="flow", lookups=n(64)), "lookups must be a whole"),
    "narrow": (lambda n: TTSpec.suggest(1000, 12, 4).narrow(n(6)), "columns must be a whole number"),
    "budget": (
        lambda n: compress_to_fit([Table("a", 100_000, 12)], n(1_000_000), rank=n(4), element_size=n(4))["a"],
        "must be a whole number",
    ),
    "bag": (lambda n: TTEmbeddingBag(n(100), n(12), rank=n(4), padding_idx=n(3)).spec, "must be a whole number"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", [np.int32, np.int64, torch.tensor], ids=["int32", "int64", "tensor"])
def test_any_whole_number_counts_as_the_int(call, kind):
    make = CALLS[call][0]
    spec = make(kind)
    assert spec == make(int)
    assert json.loads(json.dumps(spec.to_dict())) == make(int).to_dict()  # a plan's file holds it


@pytest.mark.parametrize("call", CALLS)
def test_floats_are_refused_by_name(call):
    make, message = CALLS[call]
    with pytest.raises(ValueError, match=message):
        make(float)


def test_groups_of_tables_and_data():
    spec = TTSpec.suggest(100, 12, 4)
    bags = BatchedTTEmbeddingBags({"a": spec, "b": spec}, feature_table_map=np.array([1, 0, 1]), seed=np.int64(3))
    assert bags.layout.feature_tables == (1, 0, 1)
    assert torch.equal(bags.weights, BatchedTTEmbeddingBags({"a": spec, "b": spec}, seed=3).weights)
    bags.materialise_rows(np.int64(1000))
    assert bags.materialised.max_bytes == 1000
    with pytest.raises(ValueError, match=r"the table of feature 1 must be a whole number, not 1\.0"):
        BatchedTTEmbeddingBags({"a": spec, "b": spec}, feature_table_map=[0, 1.0])
    with pytest.raises(ValueError, match="max_bytes must be a whole number"):
        bags.materialise_rows(1e3)
    with pytest.raises(ValueError, match="seed must be a whole number"):
        BatchedTTEmbeddingBags({"a": spec}, seed=0.5)
    assert table_sizes(np.int64(7)) == table_sizes([np.int32(7)] * 26) == [7] * 26
