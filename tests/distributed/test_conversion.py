"""Dense checkpoints become tensor trains and tensor trains dense checkpoints, which stock models load."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import RankError, Ranks
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torchrec.distributed.model_parallel import DistributedModelParallel
from twins import Table, all_optimizers, compression, full_state, make_batch, materialised, shard

from flowtt_torchrec import __main__ as command
from flowtt_torchrec.cores import init_cores, to_dense
from flowtt_torchrec.distributed import checkpoint
from flowtt_torchrec.distributed.checkpoint import file_writers
from flowtt_torchrec.distributed.checkpoint.conversion import (
    compress_checkpoint,
    compress_state_dict,
    export_checkpoint,
    saved_dense_tables,
    saved_specs,
)
from flowtt_torchrec.spec import TTSpec

TABLES = [  # some end before the rows that p addresses do
    Table("a", 94, 16, ("f0",), "rw", TTSpec(94, 16, (5, 5, 4), (2, 4, 2), (3, 5))),
    Table("b", 60, 32, ("f1",), (1, 0), TTSpec(60, 32, (6, 10), (8, 4), (6,))),
    Table("c", 71, 16, ("f2",), 1, TTSpec(71, 16, (3, 3, 3, 3), (2, 2, 2, 2), (3, 4, 3))),
    Table("d", 64, 16, ("f3",), "dp", TTSpec(64, 16, (4, 4, 4), (2, 2, 4), (2, 3))),
    Table("dense", 50, 16, ("f4",), 0),
    Table("small", 40, 16, ("f5",), "dp"),
]
OTHER_PLACES = [dataclasses.replace(table, place=place) for table, place in zip(TABLES, (1, "rw", "dp", 0, 1, "dp"))]
ADAGRAD = (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-3})
SPECS = compression(TABLES)


def quiet(line: str) -> None:
    """Takes what conversions say."""


def dense_weight(table: Table) -> Tensor:
    """Weights that cores of the table's spec can have."""
    assert table.spec is not None
    return to_dense(init_cores(table.spec, f"dense {table.name}", 0.5), table.rows)


def dense_state(model: DistributedModelParallel) -> dict[str, Tensor]:
    """Full state of the stock twin."""
    weights = {f"ebc.embedding_bags.{t.name}.weight": dense_weight(t) for t in TABLES if t.spec is not None}
    rest = {f"ebc.embedding_bags.{name}": v for name, v in full_state(model, TABLES).items() if "ght" in name}
    return {**rest, **weights, **{k: v for k, v in model.state_dict().items() if "over" in k}}


def optimizers_of(model: DistributedModelParallel) -> Any:
    return all_optimizers(model, lambda parameters: torch.optim.Adagrad(parameters, lr=0.05, eps=1e-3))


def columns(model: DistributedModelParallel, rank: int) -> Tensor:
    return model(make_batch(TABLES, 6, rank)[0])[1].detach()


def save_dense(rank: int, world_size: int, folder: Path) -> Tensor:
    """Writes a checkpoint of the stock twin; returns what it computes."""
    model = shard(TABLES, world_size, ADAGRAD, dense=True)
    model.load_state_dict(dense_state(model))
    state = {"model": model.state_dict(), "optimizer": optimizers_of(model).state_dict()}
    dcp.save(state, checkpoint_id=folder)
    return columns(model, rank)


def load_compressed(rank: int, world_size: int, folder: Path) -> Tensor:
    model = shard(OTHER_PLACES, world_size, ADAGRAD)
    state = {"model": model.state_dict(), "optimizer": optimizers_of(model).state_dict()}
    checkpoint.load(state, folder, compress_dense=True)
    assert not model.load_state_dict(state["model"]).missing_keys
    full_state(model, TABLES)  # raises if replicas are not equal to the bit
    return columns(model, rank)


def load_and_fail(rank: int, world_size: int, tables: list[Table], folder: Path, **options: Any) -> None:
    checkpoint.load({"model": shard(tables, world_size).state_dict()}, folder, **options)


def test_a_dense_checkpoint_loads_into_tensor_trains(
    one_rank: Callable[..., Any], two_ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = two_ranks.run(save_dense, tmp_path)
    got = two_ranks.run(load_compressed, tmp_path)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    with caplog.at_level(logging.INFO, "flowtt_torchrec"):
        torch.testing.assert_close(one_rank(load_compressed, tmp_path), expected[0], atol=1e-5, rtol=1e-5)
    assert "no optimizer state for tables 'a', 'b', 'c', 'd', which stays as it is" in caplog.text
    assert "table 'a': 94 x 16 to p (5, 5, 4), q (2, 4, 2), ranks (3, 5)" in caplog.text

    message = r"tables 'a', 'b', 'c', 'd': dense in the checkpoint, a tensor train here; load with compress_dense=True"
    with pytest.raises(RankError, match=message):
        two_ranks.run(load_and_fail, OTHER_PLACES, tmp_path)
    short = [dataclasses.replace(TABLES[0], rows=99, spec=TTSpec(99, 16, (5, 5, 4), (2, 4, 2), (3, 5)))]
    with pytest.raises(ValueError, match="table 'a' is 94 x 16, but its TTSpec is for 99 x 16"):
        one_rank(lambda *args: load_and_fail(*args, short, tmp_path, compress_dense=True))


def save_dense_adam(rank: int, world_size: int, folder: Path) -> None:
    model = shard([dataclasses.replace(t, place="dp") for t in TABLES], world_size, dense=True)
    optimizers = all_optimizers(model, lambda parameters: torch.optim.Adam(parameters, lr=0.1))
    train_steps(model, optimizers, rank, 2)
    dcp.save({"model": model.state_dict(), "optimizer": optimizers.state_dict()}, checkpoint_id=folder)


def load_fused_adam(rank: int, world_size: int, folder: Path) -> None:
    places = ("rw", 0, (0, 0), "rw", "dp", "dp")
    tables = [dataclasses.replace(table, place=place) for table, place in zip(TABLES, places)]
    model = shard(tables, world_size, (torch.optim.Adam, {"lr": 0.1}))
    optimizers = all_optimizers(model, lambda parameters: torch.optim.Adam(parameters, lr=0.1))
    train_steps(model, optimizers, rank, 1)
    state = {"model": model.state_dict(), "optimizer": optimizers.state_dict()}
    checkpoint.load(state, folder, compress_dense=True)
    optimizers.load_state_dict(state["optimizer"])
    train_steps(model, optimizers, rank, 1)
    for name, of_core in optimizers.state_dict()["state"].items():
        steps = 1 + 1 if "tt_core" in name else 2 + 1  # its averages are still those of before the load
        assert [float(value) for key, value in of_core.items() if key.endswith("step")] == [steps], name


def train_steps(model: DistributedModelParallel, optimizers: Any, rank: int, steps: int) -> None:
    for _ in range(steps):
        features, targets = make_batch(TABLES, 6, rank)
        optimizers.zero_grad()
        (model(features)[0] - targets).square().mean().backward()
        optimizers.step()


def test_a_converted_table_keeps_its_own_number_of_steps(one_rank: Callable[..., Any], tmp_path: Path) -> None:
    one_rank(save_dense_adam, tmp_path)
    one_rank(load_fused_adam, tmp_path)


def load_full_state_dict(rank: int, world_size: int, file: Path) -> Tensor:
    model = shard(OTHER_PLACES, world_size, ADAGRAD)
    dense = torch.load(file, mmap=True, weights_only=True)["model"]
    assert not model.load_state_dict(compress_state_dict(dense, SPECS, say=quiet)).missing_keys
    full_state(model, TABLES)
    return columns(model, rank)


def load_converted(rank: int, world_size: int, folder: Path) -> Tensor:
    """Loads what a conversion wrote as any other checkpoint, but for optimizer state."""
    model = shard(OTHER_PLACES, world_size, ADAGRAD)
    state = {"model": model.state_dict(), "optimizer": optimizers_of(model).state_dict()}
    checkpoint.load(state, folder, allow_missing_state=True)
    assert not model.load_state_dict(state["model"]).missing_keys
    return columns(model, rank)


def load_stock(rank: int, world_size: int, folder: Path) -> Tensor:
    """A stock model with stock functions."""
    model = shard(OTHER_PLACES, world_size, ADAGRAD, dense=True)
    state = {"model": model.state_dict(), "optimizer": optimizers_of(model).state_dict()}
    dcp.load(state, checkpoint_id=folder, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert not model.load_state_dict(state["model"]).missing_keys
    return columns(model, rank)


def load_stock_file(rank: int, world_size: int, file: Path) -> Tensor:
    model = shard(OTHER_PLACES, world_size, dense=True)
    assert not model.load_state_dict(torch.load(file, weights_only=True)["model"]).missing_keys
    return columns(model, rank)


def test_conversion_of_directories_and_files_there_and_back(
    one_rank: Callable[..., Any], two_ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_writers, "BLOCK_BYTES", 1000)  # several blocks a table
    expected = two_ranks.run(save_dense, tmp_path / "dense")
    dcp_to_torch_save(tmp_path / "dense", tmp_path / "dense.pt")
    lines: list[str] = []
    for source, target in (
        ("dense", "trains"),
        ("dense.pt", "trains.pt"),
        ("dense", "mixed.pt"),
        ("dense.pt", "mixed"),
    ):
        errors = compress_checkpoint(tmp_path / source, tmp_path / target, SPECS, say=lines.append)
        assert errors.keys() == SPECS.keys()
        assert all(error < 1e-6 for error in errors.values())
        assert saved_specs(tmp_path / target) == SPECS
        assert {(t.name, t.num_embeddings) for t in saved_dense_tables(tmp_path / target)} == {
            ("dense", 50),
            ("small", 40),
        }
    assert sum("optimizer state of tables 'a', 'b', 'c', 'd' is left out" in line for line in lines) == 4
    for source, target in (("trains", "back"), ("trains.pt", "back.pt"), ("trains", "mixed_back.pt")):
        assert sorted(export_checkpoint(tmp_path / source, tmp_path / target, say=quiet)) == sorted(SPECS)

    loads: list[tuple[Callable[..., Tensor], list[str]]] = [
        (load_full_state_dict, ["dense.pt"]),
        (load_converted, ["trains", "mixed"]),
        (load_stock, ["back"]),
        (load_stock_file, ["back.pt", "mixed_back.pt"]),
    ]
    for load, names in loads:
        for name in names:
            for rank, got in enumerate(two_ranks.run(load, tmp_path / name)):
                torch.testing.assert_close(got, expected[rank], atol=1e-5, rtol=1e-5, msg=name)
    torch.testing.assert_close(one_rank(load_full_state_dict, tmp_path / "dense.pt"), expected[0], atol=1e-5, rtol=1e-5)
    kept = torch.load(tmp_path / "back.pt", mmap=True, weights_only=True)["optimizer"]["state"]
    whole = torch.load(tmp_path / "dense.pt", weights_only=True)["optimizer"]["state"]
    assert {name for name in whole if name not in kept} == {f"ebc.embedding_bags.{t}.weight" for t in "abcd"}
    for name, state in kept.items():
        assert all(torch.equal(value, whole[name][key]) for key, value in state.items()), name


def train_and_save(rank: int, world_size: int, folder: Path) -> tuple[Tensor, dict[str, Tensor]]:
    model = shard(TABLES, world_size, ADAGRAD)
    optimizers = optimizers_of(model)
    train_steps(model, optimizers, rank, 1)
    dcp.save({"model": model.state_dict(), "optimizer": optimizers.state_dict()}, checkpoint_id=folder)
    return columns(model, rank), materialised(TABLES, full_state(model, TABLES))


def test_a_trained_model_as_a_stock_one(two_ranks: Ranks, tmp_path: Path) -> None:
    expected = two_ranks.run(train_and_save, tmp_path / "trained")
    export_checkpoint(tmp_path / "trained", tmp_path / "stock", say=quiet)
    for got, (wanted, _) in zip(two_ranks.run(load_stock, tmp_path / "stock"), expected):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    export_checkpoint(tmp_path / "trained", tmp_path / "stock.pth", say=quiet)
    weights = torch.load(tmp_path / "stock.pth", weights_only=True)["model"]
    for name, weight in expected[0][1].items():
        torch.testing.assert_close(weights[name], weight)


MEMORY = """
import resource, sys, torch
from pathlib import Path
from flowtt_torchrec.cores import init_cores, tt_rows
from flowtt_torchrec.distributed.checkpoint.conversion import compress_checkpoint, export_checkpoint
from flowtt_torchrec.spec import TTSpec

def there_and_back(rows, folder):
    folder.mkdir()
    spec = TTSpec.suggest(rows, 64, rank=8)
    cores = init_cores(spec, "t", 1.0)
    state = {f"embedding_bags.t.tt_core{k}": core for k, core in enumerate(cores)}
    torch.save({**state, "embedding_bags.t.tt_rows": torch.tensor(rows)}, folder / "trains.pt")
    export_checkpoint(folder / "trains.pt", folder / "dense")
    export_checkpoint(folder / "trains.pt", folder / "dense.pt")
    [error] = compress_checkpoint(folder / "dense", folder / "again.pt", {"t": spec}).values()
    assert error < 1e-5, error
    some = torch.arange(0, rows, 997)
    again = torch.load(folder / "again.pt")
    got = tt_rows([again[f"embedding_bags.t.tt_core{k}"] for k in range(3)], some)
    torch.testing.assert_close(got, tt_rows(cores, some), atol=1e-4, rtol=0)
    return rows * 64 * 4

there_and_back(1000, Path(sys.argv[1], "small"))  # loads what is loaded late
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
table = there_and_back(100 * 100 * 100, Path(sys.argv[1], "large"))
print(table, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


def test_the_dense_table_is_never_whole_in_memory(tmp_path: Path) -> None:
    """A table of 256 MB goes to disk and back within a third of that."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEMORY, str(tmp_path)],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    table, peak = map(int, result.stdout.split())
    assert table == 256_000_000
    assert peak < table / 3


def write(folder: Path, **tables: Tensor) -> Path:
    path = folder / "source.pt"
    torch.save({f"ebc.embedding_bags.{name}.weight": value for name, value in tables.items()}, path)
    return path


def test_conversions_say_what_does_not_fit(tmp_path: Path) -> None:
    spec = SPECS["a"]
    source = write(tmp_path, user_id=torch.zeros(100, 16), ids=torch.zeros(100, 16, dtype=torch.int32))
    target = tmp_path / "target"
    with pytest.raises(ValueError, match=r"no dense table 'userid'; did you mean 'user_id'\?"):
        compress_checkpoint(source, target, {"userid": spec}, say=quiet)
    with pytest.raises(ValueError, match=r"table 'user_id' is 100 x 16, but its TTSpec is for 60 x 32"):
        compress_checkpoint(source, target, {"user_id": SPECS["b"]}, say=quiet)
    with pytest.raises(ValueError, match=r"table 'ids' is a torch.int32 tensor"):
        compress_checkpoint(source, target, {"ids": spec}, say=quiet)
    with pytest.raises(ValueError, match=r"source.pt has no tensor trains"):
        export_checkpoint(source, target, say=quiet)
    with pytest.raises(ValueError, match=r"no checkpoint .*nowhere"):
        export_checkpoint(tmp_path / "nowhere", target, say=quiet)
    with pytest.raises(ValueError, match=r"source.pt exists"):
        compress_checkpoint(source, source, {"user_id": spec}, say=quiet)
    with pytest.raises(ValueError, match=r"has no readable .metadata"):
        export_checkpoint(tmp_path, target, say=quiet)
    source = write(tmp_path, user_id=torch.full((94, 16), torch.nan))
    with pytest.raises(ValueError, match=r"table 'user_id': the table has numbers that are not finite"):
        compress_checkpoint(source, target, {"user_id": spec}, say=quiet)
    (tmp_path / "text.pt").write_text("no checkpoint")
    with pytest.raises(ValueError, match=r"text.pt cannot be read"):
        export_checkpoint(tmp_path / "text.pt", target, say=quiet)
    with pytest.raises(ValueError, match=r"no dense table 'b'"):
        compress_state_dict({}, {"b": spec}, say=quiet)
    assert not target.exists()


def test_what_cannot_be_kept_is_said_or_refused(tmp_path: Path) -> None:
    weight = {"ebc.embedding_bags.t.weight": dense_weight(TABLES[0])}
    named = {
        "model": weight,
        "optimizer": {
            "state": {"ebc.embedding_bags.t.weight": {"t.momentum1": torch.ones(100)}, "over": {"sum": torch.ones(2)}},
            "param_groups": [{"lr": 0.1}],
        },
        "step": 7,
    }
    torch.save(named, tmp_path / "named.pt")
    lines: list[str] = []
    compress_checkpoint(tmp_path / "named.pt", tmp_path / "kept.pt", {"t": SPECS["a"]}, say=lines.append)
    kept = torch.load(tmp_path / "kept.pt", weights_only=True)
    assert kept["step"] == 7
    assert kept["optimizer"]["state"].keys() == {"over"}
    assert "param_groups" not in kept["optimizer"]
    assert any("optimizer.param_groups is left out" in line for line in lines)
    assert any("optimizer state of table 't' is left out" in line for line in lines)

    numbered = torch.optim.Adagrad([torch.nn.Parameter(torch.ones(3))]).state_dict()
    torch.save({"model": weight, "optimizer": numbered}, tmp_path / "numbered.pt")
    with pytest.raises(ValueError, match=r"optimizer state optimizer.state.0.step is numbered"):
        compress_checkpoint(tmp_path / "numbered.pt", tmp_path / "no.pt", {"t": SPECS["a"]}, say=quiet)
    torch.save({"model": weight, "list": [torch.ones(3)]}, tmp_path / "list.pt")
    with pytest.raises(ValueError, match=r"list has tensors inside a list"):
        compress_checkpoint(tmp_path / "list.pt", tmp_path / "no.pt", {"t": SPECS["a"]}, say=quiet)
    torch.save({"t": dense_weight(TABLES[0]).T}, tmp_path / "strides.pt")
    with pytest.raises(ValueError, match=r"t is stored with strides"):
        compress_checkpoint(tmp_path / "strides.pt", tmp_path / "no.pt", {}, say=quiet)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_tables_of_other_types(tmp_path: Path, dtype: torch.dtype) -> None:
    table = dense_weight(TABLES[0]).to(dtype)
    source = write(tmp_path, t=table)
    compress_checkpoint(source, tmp_path / "trains", {"t": SPECS["a"]}, say=quiet)
    export_checkpoint(tmp_path / "trains", tmp_path / "dense.pt", say=quiet)
    again = torch.load(tmp_path / "dense.pt", weights_only=True)["ebc.embedding_bags.t.weight"]
    assert again.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 1e-2, torch.float64: 1e-7}[dtype]
    torch.testing.assert_close(again.double(), table.double(), atol=tolerance, rtol=tolerance)


def test_a_budget_counts_what_the_tables_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense tables in 16 bits take half; their cores are float32."""
    tables = {"a": dense_weight(TABLES[0]), "c": dense_weight(TABLES[2])}
    size = sum(weight.numel() for weight in tables.values())
    for dtype, budget, compressed in ((torch.float16, 2 * size, []), (torch.float32, 4 * size - 1, ["a"])):
        (tmp_path / str(dtype)).mkdir()
        source = write(tmp_path / str(dtype), **{name: weight.to(dtype) for name, weight in tables.items()})
        target = tmp_path / str(dtype) / "target"
        options = ["compress", str(source), str(target), "--budget", str(budget), "--rank", "2"]
        monkeypatch.setattr(sys, "argv", ["flowtt", *options])
        command.main()
        assert list(saved_specs(target)) == compressed


def test_as_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path, a=dense_weight(TABLES[0]), c=dense_weight(TABLES[2]))
    for number, choice in enumerate((["--tables", "a", "--rank", "5"], ["--budget", "9kB", "--rank", "2"])):
        target = tmp_path / f"trains{number}"
        monkeypatch.setattr(sys, "argv", ["flowtt", "compress", str(source), str(target), *choice, "--num-cores", "2"])
        command.main()
        assert saved_specs(target)["a"].num_cores == 2
        assert "table 'a': 94 x 16 to p (10, 10)" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["flowtt", "export", str(target), str(tmp_path / "dense.pt")])
    command.main()
    assert {table.name for table in saved_dense_tables(tmp_path / "dense.pt")} == {"a", "c"}
    assert f"wrote {tmp_path / 'dense.pt'}" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["flowtt", "compress", str(source), str(target), "--tables", "b"])
    with pytest.raises(SystemExit, match="1"):
        command.main()
    assert "has no dense table b" in capsys.readouterr().err
