from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flowtt_torchrec.spec import TTSpec
from flowtt_torchrec.training.compression import choose_specs, data_types
from flowtt_torchrec.training.config import CompressionConfig, TableCompression
from flowtt_torchrec.training.errors import ConfigError
from flowtt_torchrec.training.settings import InvalidField

TABLES: list[Any] = [
    SimpleNamespace(name=name, num_embeddings=rows, embedding_dim=8)
    for name, rows in (("small", 100), ("big", 1_000_000), ("middle", 10_000))
]


def _choose(**config: Any) -> dict[str, TTSpec]:
    return choose_specs(CompressionConfig(**config), TABLES)


def test_large_tables_are_compressed() -> None:
    assert list(_choose(min_rows=10_000)) == ["big", "middle"]
    assert list(_choose(min_rows=10_001)) == ["big"]
    assert _choose(min_rows=10_001, rank=4)["big"] == TTSpec.suggest(1_000_000, 8, 4)
    assert _choose(min_rows=10_001, rank=4, num_cores=2)["big"].num_cores == 2


def test_all_or_none() -> None:
    assert list(_choose(tables="all")) == ["small", "big", "middle"]
    assert _choose(tables="dense", min_rows=0) == {}


def test_auto_leaves_to_the_planner_what_becomes_smaller() -> None:
    assert list(_choose(tables="auto", rank=32)) == ["big", "middle"]
    with pytest.raises(InvalidField, match=r"has no meaning with tables=auto"):
        _choose(tables="auto", budget="1GB")


def test_tables_by_name_override_the_rule() -> None:
    specs = _choose(min_rows=10_000, rank=4, tables={"small": "tt", "big": "dense", "middle": TableCompression(rank=2)})
    assert list(specs) == ["small", "middle"]
    assert specs["small"] == TTSpec.suggest(100, 8, 4)
    assert specs["middle"] == TTSpec.suggest(10_000, 8, 2)


def test_a_shape_by_hand() -> None:
    by_hand = TableCompression(p=[100, 100, 100], q=[2, 2, 2], ranks=[3, 4])
    assert _choose(tables={"big": by_hand})["big"] == TTSpec(1_000_000, 8, (100, 100, 100), (2, 2, 2), (3, 4))
    ranks_only = _choose(tables={"big": TableCompression(ranks=[3, 4, 3])})["big"]
    assert (ranks_only.num_cores, ranks_only.ranks) == (4, (3, 4, 3))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"p": [100, 100], "q": [2, 4], "ranks": [4]}, "table 'big' .1,000,000 x 8.: TT p .* fewer than the table's"),
        ({"p": [100, 100, 100], "q": [2, 2, 2], "ranks": [500, 4]}, "table 'big' .*TT rank r_1 = 500 exceeds 200"),
        ({"ranks": [500, 500]}, "table 'big' .*TT rank r_1 = 500 exceeds"),
        ({"p": [100, 100, 100], "q": [2, 2, 2], "ranks": [4]}, "table 'big' .*3 cores need 3 factors in q and 2 ranks"),
    ],
)
def test_a_shape_that_does_not_fit_names_the_table(shape: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _choose(tables={"big": TableCompression(**shape)})


def test_an_unknown_table_has_a_near_match() -> None:
    with pytest.raises(ConfigError, match=r"there is no table 'smal'; did you mean 'small'\?"):
        _choose(tables={"smal": "dense"})


def test_budget_compresses_as_few_tables_as_it_takes() -> None:
    assert list(_choose(budget="400kB", rank=4)) == ["big"]
    assert list(_choose(budget="100kB", rank=4)) == ["big", "middle"]
    assert _choose(budget="1GB") == {}


def test_data_types_are_the_tables_own_or_their_sections() -> None:
    config = CompressionConfig(data_type="BF16", tables={"middle": TableCompression(data_type="FP16"), "small": "tt"})
    kinds = data_types(config, TABLES, ["small", "middle"], "FP32")
    assert {name: kind.value for name, kind in kinds.items()} == {"small": "BF16", "big": "FP32", "middle": "FP16"}
    kinds = data_types(CompressionConfig(), TABLES, ["big"], "FP16")
    assert {kind.value for kind in kinds.values()} == {"FP16"}
    with pytest.raises(InvalidField, match=r"cannot be chosen with tables=auto"):
        CompressionConfig(tables="auto", data_type="BF16")


def test_budget_counts_the_types() -> None:
    """Small and middle stay dense, 80,800 numbers; big is a tensor train of a given shape, or of rank 4."""
    dense, shape = 80_800, TableCompression(p=[100, 100, 100], q=[2, 2, 2], ranks=[40, 8])
    cores = TTSpec(1_000_000, 8, (100, 100, 100), (2, 2, 2), (40, 8)).num_parameters
    tables = {"middle": "dense", "small": "dense"}
    for of_dense, of_cores, size, core_size in (("FP32", "BF16", 4, 2), ("FP16", None, 2, 2), ("FP16", "FP32", 2, 4)):
        given: dict[str, Any] = {"data_type": of_cores, "tables": {**tables, "big": shape}}
        exact = size * dense + core_size * cores
        assert list(choose_specs(CompressionConfig(budget=exact, **given), TABLES, of_dense)) == ["big"]
        with pytest.raises(ConfigError, match=f"the tables given by name need {exact:,} bytes"):
            choose_specs(CompressionConfig(budget=exact - 1, **given), TABLES, of_dense)
        exact = size * dense + core_size * TTSpec.suggest(1_000_000, 8, 4).num_parameters
        found: dict[str, Any] = {"data_type": of_cores, "tables": tables, "rank": 4}
        assert list(choose_specs(CompressionConfig(budget=exact, **found), TABLES, of_dense)) == ["big"]
        with pytest.raises(ConfigError, match=r"compression.budget: the tables need"):
            choose_specs(CompressionConfig(budget=exact - 1, **found), TABLES, of_dense)


def test_budget_counts_the_tables_given_by_name() -> None:
    assert list(_choose(budget="400kB", rank=4, tables={"middle": "dense"})) == ["big"]
    with pytest.raises(ConfigError, match=r"the tables given by name need 320,000 bytes"):
        _choose(budget="300kB", rank=4, tables={"middle": "dense"})
    with pytest.raises(ConfigError, match=r"compression.budget: the tables need .* even with"):
        _choose(budget="1kB", rank=4)
