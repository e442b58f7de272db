"""TT tables in bfloat16 and float16 under TorchRec, outputs of other types, and quantised communication."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torchrec.optim
from fbgemm_gpu.split_embedding_configs import SparseType
from ranks import Ranks
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.modules.embedding_configs import DataType
from twins import Reference, Table, all_optimizers, full_state, make_batch, mixed_tables, shard, shared_tables

from flowtt_torchrec.distributed import checkpoint
from flowtt_torchrec.distributed.planner.storage import Work, table_bytes
from flowtt_torchrec.spec import TTSpec

DTYPES = {DataType.BF16: torch.bfloat16, DataType.FP16: torch.float16}
ADAGRAD = ("adagrad", torchrec.optim.Adagrad, {"lr": 0.02, "eps": 1e-3})
SGD = ("sgd", torch.optim.SGD, {"lr": 0.2})


def stored_in(data_type: DataType, tables: list[Table]) -> list[Table]:
    """The tables, those with a spec in another type."""
    return [dataclasses.replace(table, data_type=data_type) if table.spec else table for table in tables]


def train(model: Any, optimizers: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    features, targets = batch
    optimizers.zero_grad()
    output, columns = model(features)
    loss = (output - targets).square().mean()
    loss.backward()
    optimizers.step()
    return loss.detach(), columns.detach()


def near_float32(
    rank: int, world_size: int, data_type: DataType, optimizer: Any, make_tables: Any, tolerance: float, **sharder: Any
) -> None:
    """Six steps stay near those of plain autograd in float32 from the same start; replicas are equal to the bit."""
    kind, optimizer_class, kwargs = optimizer
    tables = stored_in(data_type, make_tables())
    model = shard(tables, world_size, (optimizer_class, kwargs), **sharder)
    optimizers = all_optimizers(model, lambda parameters: torch.optim.SGD(parameters, lr=0.2))
    start = full_state(model, tables)
    for name, value in start.items():
        assert value.dtype == (DTYPES.get(data_type, torch.float32) if "tt_core" in name else torch.float32)
    reference = Reference(tables, {name: value.float() for name, value in start.items()}, model.module.over)
    dense = [*reference.over.parameters(), *reference.leaves([t.name for t in tables if t.place == "dp"])]
    plain = torch.optim.SGD(dense, lr=0.2)
    for step in range(6):
        batches = [make_batch(tables, 6, 100 * step + of_rank) for of_rank in range(world_size)]
        _, columns = train(model, optimizers, batches[rank])
        expected = reference.columns(batches[rank][0]).detach()
        assert float((columns - expected).abs().max()) <= tolerance * float(expected.abs().max()), f"step {step}"
        for parameter in [*reference.over.parameters(), *reference.parameters.values()]:
            parameter.grad = None
        reference.loss(batches).backward()
        plain.step()
        reference.fused_step(batches, kind, kwargs["lr"], kwargs.get("eps", 0.0), 0.0)
    end = full_state(model, tables)  # compares replicas
    data_parallel = {table.name for table in tables if table.place == "dp"}
    for name, value in reference.state().items():
        error = (end[name].float() - value).abs()
        if name.partition(".")[0] in data_parallel:  # torch's optimizers round to nearest, which loses small steps
            assert error.max() <= tolerance * value.abs().max(), name
            continue
        moved = (end[name].float() - start[name].float()).abs().mean()
        assert moved > 0, f"{name} did not train"
        assert error.mean() < 0.5 * moved + 1e-4, name


@pytest.mark.parametrize("make_tables", [mixed_tables, shared_tables])
@pytest.mark.parametrize(("data_type", "tolerance"), [(DataType.BF16, 0.1), (DataType.FP16, 0.02)])
def test_training_stays_near_float32(
    two_ranks: Ranks, data_type: DataType, tolerance: float, make_tables: Callable[[], list[Table]]
) -> None:
    two_ranks.run(near_float32, data_type, ADAGRAD, make_tables, tolerance)


@pytest.mark.parametrize(
    ("sharding_type", "kept", "step"), [("table_wise", 0, 0), ("row_wise", 0, 48), ("data_parallel", 2, 6)]
)
def test_bytes_of_a_reduced_table(sharding_type: str, kept: int, step: int) -> None:
    """Cores in two bytes, fused state and sums of gradients in four; DDP and a dense optimizer have the cores' type.

    A summed gradient is stepped in a copy of the cores of four bytes, and 40 bytes make random bits of a number.
    """
    spec = TTSpec(90, 16, (5, 5, 4), (2, 4, 2), (3, 5))
    nothing = Work(0, 0, shards=1, world_size=1)
    counted = table_bytes(spec, sharding_type, torchrec.optim.Adagrad, 2, work=nothing)
    n = spec.num_parameters
    assert (counted.cores, counted.gradient) == (2 * n, kept * n)
    outer = 4 * (spec.core_sizes[0] + spec.core_sizes[-1]) if sharding_type == "table_wise" else 0
    assert counted.step == step * n + (8 + outer if sharding_type == "table_wise" else 0)  # 8: an offset
    assert counted.optimizer == (2 if sharding_type == "data_parallel" else 4) * n


def outputs_of_type(rank: int, world_size: int, output: SparseType, make_tables: Any) -> None:
    """The pooled rows, and a gradient that comes back, as with float32 outputs but for their rounding."""
    tables = make_tables()
    pooled, state = {}, {}
    for wanted in (SparseType.FP32, output):
        model = shard(tables, world_size, (torch.optim.SGD, {"lr": 0.1}), fused_params={"output_dtype": wanted})
        if state:
            model.load_state_dict(state)
        state = dict(model.state_dict())
        features, _ = make_batch(tables, 6, rank)
        got = model.module.ebc(features)
        values = torch.cat([got[key] for key in sorted(got.keys())], dim=1)
        assert values.dtype == wanted.as_dtype()
        values.float().square().mean().backward()
        pooled[wanted] = values.float().detach(), full_state(model, [table for table in tables if table.spec])
    expected, end = pooled[SparseType.FP32]
    torch.testing.assert_close(pooled[output][0], expected, atol=0.01 * float(expected.abs().max()), rtol=0)
    for name, value in end.items():
        if "tt_core" in name:
            torch.testing.assert_close(pooled[output][1][name], value, atol=0.01, rtol=0.01)


@pytest.mark.parametrize("output", [SparseType.FP16, SparseType.BF16], ids=["FP16", "BF16"])
def test_output_dtype(two_ranks: Ranks, output: SparseType) -> None:
    two_ranks.run(outputs_of_type, output, tt_tables_of_all_kinds)


def tt_tables_of_all_kinds() -> list[Table]:
    return [table for table in shared_tables() if table.spec is not None]


def one_table() -> list[Table]:
    return [Table("only", 90, 16, ("f0",), 0, TTSpec(90, 16, (5, 5, 4), (2, 4, 2), (3, 5)))]


def test_output_dtype_beside_a_rank_without_tables(two_ranks: Ranks) -> None:
    two_ranks.run(outputs_of_type, SparseType.FP16, one_table)


def with_codecs(rank: int, world_size: int, precisions: tuple[CommType, CommType], make_tables: Any) -> None:
    config = QCommsConfig(forward_precision=precisions[0], backward_precision=precisions[1])
    registry = get_qcomm_codecs_registry(config, device=torch.device("cpu"))
    near_float32(rank, world_size, DataType.FP32, SGD, make_tables, 0.01, qcomm_codecs_registry=registry)


@pytest.mark.parametrize("make_tables", [mixed_tables, shared_tables])
@pytest.mark.parametrize(
    "precisions", [(CommType.FP16, CommType.FP16), (CommType.FP16, CommType.BF16)], ids=["FP16", "BF16 backward"]
)
def test_quantised_communication(
    two_ranks: Ranks, precisions: tuple[CommType, CommType], make_tables: Callable[[], list[Table]]
) -> None:
    two_ranks.run(with_codecs, precisions, make_tables)


def outcome_of_codecs(
    rank: int, world_size: int, config: QCommsConfig, places: tuple[Any, ...], tolerance: float, dense: bool
) -> str:
    """ "works", if rows and weights after a step are near those without a codec, or what TorchRec says."""
    tables = [table for table in shared_tables() if table.place in places]
    registry = get_qcomm_codecs_registry(config, device=torch.device("cpu"))
    sgd = (torch.optim.SGD, {"lr": 0.2})
    coded = shard(tables, world_size, sgd, dense=dense, qcomm_codecs_registry=registry)
    plain = shard(tables, world_size, sgd, dense=dense)
    plain.load_state_dict(coded.state_dict())
    start = full_state(plain, tables)
    features, targets = make_batch(tables, 32, rank)  # INT8 and MX4 want numbers for a rank in groups of 32
    columns = []
    for model in (plain, coded):
        try:
            output, pooled = model(features)
            (output - targets).square().mean().backward()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        columns.append(pooled.detach())
    assert not torch.equal(*columns)
    assert (columns[1] - columns[0]).abs().max() < tolerance * columns[0].abs().max()
    expected, end = full_state(plain, tables), full_state(coded, tables)
    for name, value in expected.items():
        assert (end[name] - value).abs().max() < tolerance * (value - start[name]).abs().max(), name
    return "works"


@pytest.mark.parametrize(
    "places", [(1, (1, 0), (0, 1, 0, 0), "twcw"), ("rw", "twrw0")], ids=["all to all", "scattered"]
)
@pytest.mark.parametrize(
    ("precision", "tolerance"), [(CommType.INT8, 0.05), (CommType.MX4, 0.5), (CommType.FP8, 0.1)], ids=lambda v: str(v)
)
def test_codecs_of_8_bits_and_less_do_what_they_do_with_dense_tables(
    two_ranks: Ranks, precision: CommType, tolerance: float, places: tuple[Any, ...]
) -> None:
    """TorchRec has no FP8 of rows on a CPU, and no INT8 of row-wise tables' rows; of these it makes FP16."""
    config = QCommsConfig(precision, precision, fp8_quantize_dim=16 if precision == CommType.FP8 else None)
    of_dense, of_trains = (
        two_ranks.run(outcome_of_codecs, config, places, tolerance, dense) for dense in (True, False)
    )
    assert of_trains == of_dense
    if precision != CommType.FP8 and "rw" not in places:
        assert of_trains == ["works", "works"]


def resumed(rank: int, world_size: int, folder: str, make_tables: Any) -> None:
    """A checkpoint of bfloat16 cores, float32 state and the number of steps goes on to the same bits."""
    tables = stored_in(DataType.BF16, make_tables())
    models = []
    for _ in range(2):
        model = shard(tables, world_size, ADAGRAD[1:])
        models.append((model, all_optimizers(model, lambda parameters: torch.optim.SGD(parameters, lr=0.2))))
    batches = [make_batch(tables, 6, 10 * step + rank) for step in range(4)]
    for batch in batches[:2]:
        train(*models[0], batch)
    state = {"model": models[0][0].state_dict(), "optimizer": models[0][0].fused_optimizer.state_dict()["state"]}
    dcp.save(state, checkpoint_id=folder)
    other = {"model": models[1][0].state_dict(), "optimizer": models[1][0].fused_optimizer.state_dict()["state"]}
    checkpoint.load(other, checkpoint_id=folder)
    models[1][0].load_state_dict(other["model"])
    for batch in batches[2:]:
        first, second = (train(*model, batch)[0] for model in models)
        assert torch.equal(first, second)
    ends = [full_state(model, tables) for model, _ in models]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


@pytest.mark.parametrize("make_tables", [mixed_tables, tt_tables_of_all_kinds])
def test_a_resumed_run_goes_on_to_the_same_bits(
    two_ranks: Ranks, tmp_path: Path, make_tables: Callable[[], list[Table]]
) -> None:
    two_ranks.run(resumed, str(tmp_path), make_tables)
