"""Adam's state in a checkpoint: fused under one plan, dense under another, with the number of steps."""

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
from ranks import Ranks
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer
from twins import Table, all_optimizers, make_batch, shard

from flowtt_torchrec.distributed import checkpoint
from flowtt_torchrec.spec import TTSpec

TABLES = [
    Table("a", 90, 16, ("f0",), 0, TTSpec(90, 16, (5, 5, 4), (2, 4, 2), (3, 5))),
    Table("b", 100, 32, ("f1",), 0, TTSpec(100, 32, (5, 5, 4), (4, 4, 2), (4, 4))),
    Table("c", 60, 16, ("f2",), 0, TTSpec(60, 16, (6, 10), (4, 4), (6,))),
]
PLANS: dict[str, tuple[Any, ...]] = {  # places of the tables
    "table-wise": (0, 1, 0),
    "shared": ("rw", (1, 0), "dp"),
    "data-parallel": ("dp", "dp", "dp"),
}
ADAM = {"lr": 0.05, "eps": 1e-3, "betas": (0.8, 0.9)}


def build(
    plan: str, world_size: int, optimizer: type[torch.optim.Optimizer] = torch.optim.Adam
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    tables = [dataclasses.replace(table, place=place) for table, place in zip(TABLES, PLANS[plan])]
    kwargs = {key: value for key, value in ADAM.items() if key != "betas" or optimizer is torch.optim.Adam}
    model = shard(tables, world_size, (optimizer, kwargs))
    return model, all_optimizers(model, lambda parameters: optimizer(parameters, **kwargs))


def train(model: DistributedModelParallel, optimizers: CombinedOptimizer, seeds: range) -> None:
    for seed in seeds:
        features, targets = make_batch(TABLES, 6, 10 * seed + dist.get_rank())
        optimizers.zero_grad()
        (model(features)[0] - targets).square().mean().backward()
        optimizers.step()


def state_of(optimizers: CombinedOptimizer) -> dict[str, list[Tensor]]:
    """Both averages and the number of steps of each core, whoever steps it; all ranks together."""
    mine = {}
    for name, state in optimizers.state_dict()["state"].items():
        core = name.partition("embedding_bags.")[2]
        if core:
            by_name = {key.removeprefix(f"{core}."): value for key, value in state.items()}
            first = by_name["momentum1" if "momentum1" in by_name else "exp_avg"]
            mine[core] = [t.detach().clone().float() for t in (first, by_name["exp_avg_sq"], by_name["step"])]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    whole: dict[str, list[Tensor]] = {}
    for core, state in itertools.chain.from_iterable(of_rank.items() for of_rank in every):
        assert all(torch.equal(a, b) for a, b in zip(whole.setdefault(core, state), state)), f"{core} differs"
    return whole


def save(rank: int, world_size: int, folder: Path) -> dict[str, dict[str, list[Tensor]]]:
    saved = {}
    for steps, plan in enumerate(PLANS, start=2):
        model, optimizers = build(plan, world_size)
        train(model, optimizers, range(steps))
        dcp.save({"model": model.state_dict(), "optimizer": optimizers.state_dict()}, checkpoint_id=folder / plan)
        saved[plan] = state_of(optimizers)
        assert len(saved[plan]) == 8
        assert all(float(step) == steps for *_, step in saved[plan].values())
    return saved


def load(rank: int, world_size: int, folder: Path, saved: dict[str, dict[str, list[Tensor]]]) -> None:
    for source, plan in itertools.product(PLANS, PLANS):
        model, optimizers = build(plan, world_size)
        train(model, optimizers, range(99, 100))  # makes the dense optimizer's state, which is loaded in place
        state = {"model": model.state_dict(), "optimizer": optimizers.state_dict()}
        checkpoint.load(state, folder / source)
        model.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizer"])
        loaded = state_of(optimizers)
        assert loaded.keys() == saved[source].keys()
        for core, expected in saved[source].items():
            assert all(torch.equal(a, b) for a, b in zip(loaded[core], expected)), (source, plan, core)
        train(model, optimizers, range(5, 6))
        for core, (*_, step) in state_of(optimizers).items():
            assert step == saved[source][core][2] + 1


def test_adams_state_goes_from_plan_to_plan(one_rank: Callable[..., Any], two_ranks: Ranks, tmp_path: Path) -> None:
    saved = two_ranks.run(save, tmp_path)[0]
    two_ranks.run(load, tmp_path, saved)
    one_rank(load, tmp_path, saved)


def save_adams(rank: int, world_size: int, folder: Path) -> None:
    for plan in PLANS:
        model, optimizers = build(plan, world_size)
        train(model, optimizers, range(1))
        dcp.save({"optimizer": optimizers.state_dict()}, checkpoint_id=folder / plan)


def load_as_adagrads(rank: int, world_size: int, folder: Path, plan: str) -> None:
    _, optimizers = build(plan, world_size, torch.optim.Adagrad)
    checkpoint.load({"optimizer": optimizers.state_dict()}, folder)


def test_adams_state_is_not_taken_for_adagrads(one_rank: Callable[..., Any], tmp_path: Path) -> None:
    one_rank(save_adams, tmp_path)
    for source, plan in itertools.product(PLANS, PLANS):
        with pytest.raises(ValueError, match=r"table '[abc]': the checkpoint has Adam's state"):
            one_rank(load_as_adagrads, tmp_path / source, plan)


def without_steps_of_one_table(rank: int, world_size: int, folder: Path) -> None:
    """As a dense table of TorchRec's is saved, or a core that no one rounded."""
    model, optimizers = build("table-wise", world_size)
    train(model, optimizers, range(2))
    state = optimizers.state_dict()
    for k in range(3):
        del state["state"][f"ebc.embedding_bags.a.tt_core{k}"][f"a.tt_core{k}.step"]
    dcp.save({"optimizer": state}, checkpoint_id=folder)
    _, others = build("table-wise", world_size)
    loaded = {"optimizer": others.state_dict()}
    checkpoint.load(loaded, folder)
    others.load_state_dict(loaded["optimizer"])
    assert {float(step) for *_, step in state_of(others).values()} == {2}


def test_a_missing_number_of_steps_is_that_of_the_others(one_rank: Callable[..., Any], tmp_path: Path) -> None:
    one_rank(without_steps_of_one_table, tmp_path)
