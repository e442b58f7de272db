"""The compression table."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest
import torch
import torchrec
from test_planner import COMPRESSION, collection, make_planner, topology
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError

from flowtt_torchrec.distributed import (
    CompressionStats,
    TTEmbeddingBagCollectionSharder,
    TTEmbeddingShardingPlanner,
    TTEmbeddingStats,
)
from flowtt_torchrec.distributed.compat import release
from flowtt_torchrec.spec import TTSpec

CONSTRAINTS = {
    "big": ParameterConstraints(sharding_types=["data_parallel"]),
    "mid": ParameterConstraints(sharding_types=["table_wise"]),
}


def planned(max_rows: int = 40, **kwargs: Any) -> TTEmbeddingShardingPlanner:
    planner = make_planner(stats=[CompressionStats(COMPRESSION, max_rows)], constraints=CONSTRAINTS, **kwargs)
    planner.plan(collection(), [TTEmbeddingBagCollectionSharder(COMPRESSION)])
    return planner


def test_rows_have_the_plans_numbers() -> None:
    rows = {row.table: row for row in planned().compression_rows}
    assert rows.keys() == {"big", "mid"}
    big, spec = rows["big"], COMPRESSION["big"]
    assert (big.num_embeddings, big.embedding_dim) == (40_000_000, 128)
    assert (big.p, big.q, big.ranks) == (spec.p, spec.q, spec.ranks)
    assert big.dense_bytes == 40_000_000 * 128 * 4
    assert big.tt_bytes == big.optimizer_bytes == 4 * spec.num_parameters
    assert big.ratio == pytest.approx(spec.compression_ratio)
    assert big.placement == "data_parallel on 2 ranks"
    assert rows["mid"].placement in ("table_wise on rank 0", "table_wise on rank 1")
    assert json.loads(json.dumps(big.to_dict()))["ratio"] == pytest.approx(big.ratio)


def test_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    planned()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Tensor-train tables"
    assert lines[1].split()[:3] == ["table", "rows", "x"]
    assert lines[2].split()[0] == "big"
    assert "40,000,000 x 128" in lines[2]
    assert "20,480.00" in lines[2]  # MB of 40 M x 128 x 4 bytes
    assert lines[3].split()[0] == "mid"
    assert lines[4].split()[0] == "total"
    assert "21,248.00" in lines[4]
    assert lines[5].startswith("2 of 4 tables are tensor trains: 21,248.00 MB become ")
    assert len(lines) == 6
    assert all("\x1b" not in line for line in lines)


def test_a_drawn_table_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    planned()
    out = capsys.readouterr().out
    assert "│" in out
    assert "Tensor-train tables" in out
    assert "20,480.00" in out


def test_many_tables_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    planned(max_rows=1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1] for line in lines[2:5]] == ["big", "1 smaller tables", "total"]
    assert "768.00" in lines[3]


def test_nothing_is_printed_without_a_plan_or_a_tt_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PlannerError):
        planned(topology=topology(capacity=0.001))
    none = make_planner({}, stats=[CompressionStats({})])
    none.plan(collection(sizes={"tiny": (5_000, 32)}), [TTEmbeddingBagCollectionSharder({})])
    assert capsys.readouterr().out == ""
    assert none.compression_rows == []


def test_the_default_stats_are_torchrecs_and_the_table() -> None:
    planner = TTEmbeddingShardingPlanner(topology(), compression=COMPRESSION)
    assert [type(stats) for stats in planner._stats] == [TTEmbeddingStats, CompressionStats]


def test_tables_without_an_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    spec = {"big": TTSpec.suggest(40_000_000, 128, 4)}
    planner = make_planner(spec, stats=[CompressionStats(spec)])
    planner.plan(collection((torch.optim.SGD, {"lr": 0.1})), [TTEmbeddingBagCollectionSharder(spec)])
    assert planner.compression_rows[0].optimizer_bytes == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torchrecs_printout_has_the_bytes_of_the_cores(caplog: pytest.LogCaptureFixture, device: str) -> None:
    planner = make_planner(stats=[TTEmbeddingStats(COMPRESSION)], constraints=CONSTRAINTS, topology=topology(2, device))
    with caplog.at_level(logging.INFO, logger="torchrec.distributed.planner.stats"):
        planner.plan(collection(), [TTEmbeddingBagCollectionSharder(COMPRESSION)])
    lines = [record.getMessage().strip("# ") for record in caplog.records]
    cores = 4 * (2 * COMPRESSION["big"].num_parameters + COMPRESSION["mid"].num_parameters)  # big is on both ranks
    since_1_8 = ("Compute Kernels Embedding Weights:", "Compute Kernels Optimizer State:")
    for heading in since_1_8 if release(torchrec.__version__) >= (1, 8) else ():
        assert f"customized_kernel: {cores / 1e6:,.3f} MB" in lines[lines.index(heading) :][:5]
    total = sum(
        s.storage.hbm + s.storage.ddr for o in planner._best_plan or [] if o.name in CONSTRAINTS for s in o.shards
    )
    assert any(f"{total / 1e6:,.3f} MB" in line and "customized_kernel: HBM" in line for line in lines)
    assert any("HBM (MB)" in line for line in lines)
    assert not any("19.073" in line or "20,480" in line for line in lines)  # GB or MB of the dense table
