"""State dicts and torch.distributed.checkpoint: names, contents, other placements, errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchrec.optim
from ranks import Ranks
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer
from twins import Table, all_optimizers, full_state, make_batch, mixed_tables, shard

from flowtt_torchrec.spec import TTSpec

ADAGRAD = (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-3})
ROWWISE = (torchrec.optim.RowWiseAdagrad, {"lr": 0.05, "eps": 1e-3})
SGD = (torch.optim.SGD, {"lr": 0.05})
SPEC = TTSpec(90, 16, (5, 5, 4), (2, 4, 2), (3, 5))
TABLES = [Table("tw", 90, 16, ("f0",), 0, SPEC), Table("dp", 90, 16, ("f1",), "dp", SPEC)]


def swapped(tables: list[Table]) -> list[Table]:
    """The same tables, table-wise ones on the other rank."""
    return [dataclasses.replace(t, place=1 - t.place) if isinstance(t.place, int) else t for t in tables]


def build(
    tables: list[Table], world_size: int, optimizer: Any, seed: int
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    torch.manual_seed(seed)
    model = shard([t for t in tables if not isinstance(t.place, tuple)], world_size, optimizer)
    for core in (core for cores in model.module.ebc.tt_cores().values() for core in cores):
        with torch.no_grad():
            core.mul_(1 + 0.1 * seed)  # a start of its own: initial cores depend on the name only
    return model, all_optimizers(model, lambda parameters: torch.optim.Adagrad(parameters, lr=0.05, eps=1e-3))


def losses(model: DistributedModelParallel, optimizers: CombinedOptimizer, rank: int, seeds: range) -> list[float]:
    tables = [t for t in mixed_tables() if not isinstance(t.place, tuple)]
    values = []
    for seed in seeds:
        features, targets = make_batch(tables, 6, 10 * seed + rank)
        optimizers.zero_grad()
        output, _ = model(features)
        loss = (output - targets).square().mean()
        loss.backward()
        optimizers.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        values.append(float(total))
    return values


def save_and_load(rank: int, world_size: int, folder: str, optimizer: Any) -> None:
    tables = mixed_tables()
    model, optimizers = build(tables, world_size, optimizer, seed=1)
    losses(model, optimizers, rank, range(3))
    dcp.save({"model": model.state_dict(), "optimizer": optimizers.state_dict()}, checkpoint_id=folder)
    expected = losses(model, optimizers, rank, range(10, 14))

    model, optimizers = build(swapped(tables), world_size, optimizer, seed=2)
    losses(model, optimizers, rank, range(99, 100))  # makes the dense optimizer's state, which is loaded in place
    state = {"model": model.state_dict(), "optimizer": optimizers.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    result = model.load_state_dict(state["model"])
    assert not result.missing_keys
    assert not result.unexpected_keys
    optimizers.load_state_dict(state["optimizer"])
    got = losses(model, optimizers, rank, range(10, 14))
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(ADAGRAD, id="adagrad"), pytest.param(ROWWISE, id="rowwise adagrad"), pytest.param(SGD, id="sgd")],
)
def test_a_checkpoint_continues_with_tables_on_other_ranks(two_ranks: Ranks, tmp_path: Path, optimizer: Any) -> None:
    two_ranks.run(save_and_load, str(tmp_path), optimizer)


def keys_on_disk(rank: int, world_size: int, folder: str) -> None:
    model, optimizers = build(TABLES, world_size, ADAGRAD, seed=1)
    dcp.save({"model": model.state_dict(), "optimizer": optimizers.state_dict()}, checkpoint_id=folder)


def test_names_on_disk_do_not_depend_on_the_placement(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(keys_on_disk, str(tmp_path))
    stored = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    parts = (*(f"tt_core{k}" for k in range(3)), "tt_rows")
    assert {key for key in stored if key.startswith("model.ebc.")} == {
        f"model.ebc.embedding_bags.{table}.{part}" for table in ("tw", "dp") for part in parts
    }
    assert {key for key in stored if "momentum1" in key} == {
        f"optimizer.state.ebc.embedding_bags.tw.tt_core{k}.tw.tt_core{k}.momentum1" for k in range(3)
    }
    assert [tuple(stored[f"model.ebc.embedding_bags.tw.tt_core{k}"].size) for k in range(3)] == SPEC.core_shapes


def full_state_dict(rank: int, world_size: int) -> None:
    """A state dict with all cores loads on every rank, also where the table is not."""
    tables = mixed_tables()
    source = shard(tables, world_size, SGD)
    with torch.no_grad():
        for cores in source.module.ebc.tt_cores().values():
            for core in cores:
                core.add_(0.25)
    state = full_state(source, tables)
    dist.barrier()
    target = shard(swapped(tables), world_size, SGD)
    whole = {f"ebc.embedding_bags.{name}": value for name, value in state.items()}
    result = target.load_state_dict(whole | {k: v for k, v in source.state_dict().items() if "over" in k})
    assert not result.missing_keys
    assert not result.unexpected_keys
    for name, value in full_state(target, tables).items():
        torch.testing.assert_close(value, state[name], atol=0, rtol=0)
    features, _ = make_batch(tables, 6, rank)
    torch.testing.assert_close(target(features)[0], source(features)[0], atol=1e-6, rtol=0)


def test_a_full_state_dict_loads_under_any_placement(one_rank: Callable[..., Any], two_ranks: Ranks) -> None:
    one_rank(full_state_dict)
    two_ranks.run(full_state_dict)


def test_the_initial_cores_do_not_depend_on_the_placement(one_rank: Callable[..., Any], two_ranks: Ranks) -> None:
    alone = one_rank(initial_cores, False)
    for start in (*two_ranks.run(initial_cores, False), *two_ranks.run(initial_cores, True)):
        assert start.keys() == alone.keys()
        assert all(torch.equal(start[name], alone[name]) for name in alone)
    other_seed = one_rank(initial_cores, False, 1)
    assert not any(torch.equal(other_seed[name], alone[name]) for name in alone)


def initial_cores(rank: int, world_size: int, swap: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    tables = swapped(mixed_tables()) if swap else mixed_tables()
    model = shard(tables, world_size, seed=seed)
    return {name: value for name, value in full_state(model, tables).items() if "tt_core" in name}


def loaded(rank: int, world_size: int, change: Callable[[dict[str, Any]], None]) -> None:
    model = shard(TABLES, world_size)
    state = dict(model.state_dict())
    change(state)
    model.load_state_dict(state)


def test_a_core_of_another_shape_names_the_table(one_rank: Callable[..., Any]) -> None:
    def other_rank(state: dict[str, Any]) -> None:
        state["ebc.embedding_bags.dp.tt_core1"] = torch.zeros(5, 4, 4, 5)

    message = (
        r"table 'dp' does not match the state dict: saved are cores of shapes .*1: \[5, 4, 4, 5\].*expected are 3 "
        r"cores with p \(5, 5, 4\), q \(2, 4, 2\), ranks \(3, 5\), 90 rows\. Give the sharder the spec"
    )
    with pytest.raises(ValueError, match=message):
        one_rank(loaded, other_rank)


def test_a_core_too_many_names_the_table(one_rank: Callable[..., Any]) -> None:
    def fourth(state: dict[str, Any]) -> None:
        state["ebc.embedding_bags.tw.tt_core3"] = torch.zeros(4, 5, 2, 1)

    with pytest.raises(ValueError, match=r"table 'tw' does not match the state dict: .*3: \[4, 5, 2, 1\].*3 cores"):
        one_rank(loaded, fourth)


def test_a_table_of_other_rows_is_not_taken(one_rank: Callable[..., Any]) -> None:
    def longer(state: dict[str, Any]) -> None:
        state["ebc.embedding_bags.tw.tt_rows"] = torch.tensor(95)

    message = r"table 'tw' does not match the state dict: saved .*\(3, 5\), 95 rows; expected .*\(3, 5\), 90 rows"
    with pytest.raises(ValueError, match=message):
        one_rank(loaded, longer)


def test_cores_alone_load(one_rank: Callable[..., Any]) -> None:
    def cores_only(state: dict[str, Any]) -> None:
        del state["ebc.embedding_bags.tw.tt_rows"]

    one_rank(loaded, cores_only)


def test_a_missing_core_is_named(one_rank: Callable[..., Any]) -> None:
    def without(state: dict[str, Any]) -> None:
        del state["ebc.embedding_bags.tw.tt_core2"]

    with pytest.raises(RuntimeError, match=r"Missing key.*embedding_bags\.tw\.tt_core2"):
        one_rank(loaded, without)


def test_dense_weights_for_a_tt_table_say_what_to_do(one_rank: Callable[..., Any]) -> None:
    def dense(state: dict[str, Any]) -> None:
        state["ebc.embedding_bags.tw.weight"] = torch.zeros(90, 16)

    with pytest.raises(ValueError, match=r"dense weight for table 'tw'.*compress_state_dict"):
        one_rank(loaded, dense)


def test_assigning_is_refused(one_rank: Callable[..., Any]) -> None:
    def assign(rank: int, world_size: int) -> None:
        collection = shard(TABLES, world_size).module.ebc
        collection.load_state_dict(collection.state_dict(), assign=True)

    with pytest.raises(ValueError, match=r"table 'tw': load_state_dict\(assign=True\)"):
        one_rank(assign)


def test_a_checkpoint_of_another_spec_names_the_core(one_rank: Callable[..., Any], tmp_path: Path) -> None:
    def save(rank: int, world_size: int) -> None:
        dcp.save({"model": shard(TABLES, world_size).state_dict()}, checkpoint_id=tmp_path)

    def load(rank: int, world_size: int) -> None:
        other = dataclasses.replace(TABLES[0], spec=TTSpec(90, 16, (5, 5, 4), (2, 4, 2), (3, 4)))
        dcp.load({"model": shard([other, TABLES[1]], world_size).state_dict()}, checkpoint_id=tmp_path)

    one_rank(save)
    with pytest.raises(dcp.CheckpointException, match=r"tw\.tt_core1"):
        one_rank(load)


def moved(rank: int, world_size: int) -> None:
    """What nn.Module does to all parameters keeps the lookup and the parameters one, or is refused."""
    model = shard(TABLES, world_size)
    features, _ = make_batch(TABLES, 6, 0)
    before = model(features)[1]
    model.to(torch.device("cpu"))
    torch.testing.assert_close(model(features)[1], before, atol=0, rtol=0)
    model._apply(lambda tensor: tensor.clone().mul_(2) if tensor.dim() == 4 else tensor)
    doubled = model(features)[1]
    torch.testing.assert_close(doubled, 8 * before, atol=1e-6, rtol=1e-6)  # each of the three cores
    with pytest.raises(RuntimeError, match=r"table 'tw' is sharded on cpu as torch.float32 and cannot be moved"):
        model.double()


def test_applying_to_all_parameters(one_rank: Callable[..., Any]) -> None:
    one_rank(moved)


def parted(rank: int, world_size: int) -> None:
    """Lookups and steps follow cores that have been given memory of their own."""
    model, other = shard(TABLES, world_size), shard(TABLES, world_size)
    features, _ = make_batch(TABLES, 6, 0)
    with torch.no_grad():
        before = model(features)[1]
        for cores in model.module.ebc.tt_cores().values():
            cores[1].data = cores[1].data.clone().mul_(2)
        torch.testing.assert_close(model(features)[1], 2 * before)
        for cores in other.module.ebc.tt_cores().values():
            cores[1].mul_(2)
    for moved in (model, other):
        moved(features)[0].sum().backward()
    for name, cores in other.module.ebc.tt_cores().items():
        for core, twin in zip(cores, model.module.ebc.tt_cores()[name]):
            torch.testing.assert_close(core, twin)
            assert (core.grad is None) == (twin.grad is None)


def test_lookups_and_steps_follow_cores_with_other_memory(one_rank: Callable[..., Any]) -> None:
    one_rank(parted)


def reset(rank: int, world_size: int) -> None:
    model = shard(mixed_tables(), world_size)
    start = full_state(model, mixed_tables())
    with torch.no_grad():
        for cores in model.module.ebc.tt_cores().values():
            for core in cores:
                core.zero_()
    model.module.ebc.reset_parameters()
    again = full_state(model, mixed_tables())
    for name, value in again.items():
        if "tt_core" in name:
            assert torch.equal(value, start[name])
        else:
            assert not torch.equal(value, start[name])  # dense tables are drawn from torch's generator


def test_reset_parameters(one_rank: Callable[..., Any], two_ranks: Ranks) -> None:
    one_rank(reset)
    two_ranks.run(reset)
