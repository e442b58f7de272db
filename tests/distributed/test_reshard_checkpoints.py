"""A checkpoint written under one plan continues exactly under any other, on one or two ranks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchrec.optim
from ranks import Ranks
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from twins import Table, all_optimizers, make_batch, shard

from flowtt_torchrec.distributed import checkpoint
from flowtt_torchrec.spec import TTSpec

TABLES = [
    Table("a", 90, 16, ("f0",), 0, TTSpec(90, 16, (5, 5, 4), (2, 4, 2), (3, 5))),
    Table("b", 100, 32, ("f1",), 0, TTSpec(100, 32, (5, 5, 4), (4, 4, 2), (4, 4))),
    Table("c", 60, 16, ("f2",), 0, TTSpec(60, 16, (6, 10), (4, 4), (6,))),
    Table("d", 60, 16, ("f3",), 0, TTSpec(60, 16, (4, 4, 4), (2, 2, 4), (2, 3))),
    Table("dense", 50, 16, ("f4",), 0),
    Table("small", 40, 16, ("f5",), "dp"),
]
PLANS: dict[str, tuple[Any, ...]] = {  # places of the tables
    "table-wise": (0, 1, 0, 1, 0, "dp"),
    "mixed": (1, (1, 0), "dp", "rw", 1, "dp"),
    "shared": ("rw", "rw", (0, 1), (1, 0), (0, 1), "dp"),
    "data-parallel": ("dp", "dp", "dp", "dp", "dp", 1),
}
ADAGRAD = {"lr": 0.05, "eps": 1e-3}
BATCH = 8


def placed(plan: str) -> list[Table]:
    return [dataclasses.replace(table, place=place) for table, place in zip(TABLES, PLANS[plan])]


def build(plan: str, world_size: int, seed: int) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    torch.manual_seed(seed)
    model = shard(placed(plan), world_size, (torch.optim.Adagrad, ADAGRAD), seed=seed)
    return model, all_optimizers(model, lambda parameters: torch.optim.Adagrad(parameters, **ADAGRAD))


def part_of(seed: int, rank: int, world_size: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """This rank's part of a batch that does not depend on the number of ranks."""
    parts = [make_batch(TABLES, BATCH // 2, 10 * seed + half) for half in range(2)]
    if world_size == 2:
        return parts[rank]
    both = [features.to_dict() for features, _ in parts]
    keys = parts[0][0].keys()
    lengths = [half[key].lengths() for key in keys for half in both]
    values = [half[key].values() for key in keys for half in both]
    features = KeyedJaggedTensor(keys=keys, values=torch.cat(values), lengths=torch.cat(lengths))
    return features, torch.cat([targets for _, targets in parts])


def losses(model: DistributedModelParallel, optimizers: CombinedOptimizer, seeds: range) -> list[float]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    values = []
    for seed in seeds:
        features, targets = part_of(seed, rank, world_size)
        optimizers.zero_grad()
        loss = (model(features)[0] - targets).square().mean()
        loss.backward()
        optimizers.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        values.append(float(total) / world_size)
    return values


def save(rank: int, world_size: int, folder: Path) -> dict[str, list[float]]:
    """Writes a checkpoint of each plan; returns the losses of the steps after it."""
    expected = {}
    for seed, plan in enumerate(PLANS):
        model, optimizers = build(plan, world_size, seed=seed)
        losses(model, optimizers, range(3))
        state = {"model": model.state_dict(), "optimizer": optimizers.state_dict()}
        dcp.save(state, checkpoint_id=folder / f"{plan}-{world_size}")
        expected[plan] = losses(model, optimizers, range(10, 15))
    return expected


def load(rank: int, world_size: int, folder: Path, expected: dict[tuple[str, int], list[float]]) -> int:
    """Loads every checkpoint under every plan."""
    pairs = list(itertools.product(expected, PLANS))
    for (source, saved_on), plan in pairs:
        model, optimizers = build(plan, world_size, seed=100)
        losses(model, optimizers, range(99, 100))
        state = {"model": model.state_dict(), "optimizer": optimizers.state_dict()}
        checkpoint.load(state, folder / f"{source}-{saved_on}")
        result = model.load_state_dict(state["model"])
        assert not result.missing_keys
        assert not result.unexpected_keys
        optimizers.load_state_dict(state["optimizer"])
        got = torch.tensor(losses(model, optimizers, range(10, 15)))
        torch.testing.assert_close(
            got,
            torch.tensor(expected[source, saved_on]),
            atol=1e-6,
            rtol=1e-6,
            msg=lambda m, pair=(source, saved_on, plan, world_size): f"{pair}: {m}",
        )
        for name, parameter in optimizers.state_dict()["state"].items():
            assert float(parameter.get("step", 8)) == 8, name  # 3 before the checkpoint, 5 after
    return len(pairs)


def test_every_plan_continues_every_other(one_rank: Callable[..., Any], two_ranks: Ranks, tmp_path: Path) -> None:
    expected = {(plan, 1): values for plan, values in one_rank(save, tmp_path).items()}
    expected |= {(plan, 2): values for plan, values in two_ranks.run(save, tmp_path)[0].items()}
    assert one_rank(load, tmp_path, expected) == 2 * len(PLANS) ** 2
    assert two_ranks.run(load, tmp_path, expected)[0] == 2 * len(PLANS) ** 2


def save_row_wise_state(rank: int, world_size: int, folder: Path) -> None:
    model = shard([TABLES[0]], world_size, (torchrec.optim.RowWiseAdagrad, ADAGRAD))
    optimizers = all_optimizers(model, lambda parameters: torch.optim.Adagrad(parameters, **ADAGRAD))
    dcp.save({"optimizer": optimizers.state_dict()}, checkpoint_id=folder)


def load_as(rank: int, world_size: int, folder: Path, make: Any) -> None:
    model = shard([dataclasses.replace(TABLES[0], place="dp")], world_size)
    state = {"optimizer": all_optimizers(model, make).state_dict()}
    checkpoint.load(state, folder)


def test_row_wise_state_is_not_taken_for_element_wise(one_rank: Callable[..., Any], tmp_path: Path) -> None:
    one_rank(save_row_wise_state, tmp_path)
    with pytest.raises(ValueError, match=r"table 'a': 'sum' is \[5, 1, 2, 3\] here, .*'a.tt_core0.momentum1' of \[5\]"):
        one_rank(load_as, tmp_path, lambda parameters: torch.optim.Adagrad(parameters, **ADAGRAD))


def test_state_that_the_checkpoint_has_not_is_missing(one_rank: Callable[..., Any], tmp_path: Path) -> None:
    one_rank(save_row_wise_state, tmp_path)

    def adadelta(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adadelta(parameters)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return optimizer

    with pytest.raises(CheckpointException, match="acc_delta"):
        one_rank(load_as, tmp_path, adadelta)


def test_a_checkpoint_must_be_named() -> None:
    with pytest.raises(ValueError, match="needs a checkpoint_id or a storage_reader"):
        checkpoint.load({})
