"""A checkpoint written under one plan continues exactly under any other, on one, two or four ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchrec.optim
from ranks import Ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from twins import Table, all_optimizers, make_batch, shard

from flowtt_torchrec.distributed import checkpoint
from flowtt_torchrec.spec import TTSpec

TABLES = [
    Table("a", 90, 16, ("f0",), 0, TTSpec(90, 16, (5, 5, 4), (2, 4, 2), (3, 5))),
    Table("b", 100, 32, ("f1",), 0, TTSpec(100, 32, (5, 5, 4), (4, 4, 2), (4, 4))),
    Table("c", 30, 16, ("f2",), 0, TTSpec(30, 16, (6, 5), (4, 4), (6,))),
    Table("d", 60, 16, ("f3",), 0, TTSpec(60, 16, (4, 4, 4), (2, 2, 4), (2, 3))),
    Table("e", 50, 16, ("f4",), 0, TTSpec(50, 16, (3, 3, 3, 2), (2, 2, 2, 2), (3, 4, 3))),
    Table("f", 25, 16, ("f5",), 0, TTSpec(25, 16, (5, 5), (4, 4), (5,))),
    Table("dense", 50, 16, ("f6",), 0),
    Table("small", 40, 16, ("f7",), "dp"),
]
PLANS: dict[str, tuple[int, tuple[Any, ...]]] = {  # ranks, and places of the tables
    "table-wise": (1, (0, 0, 0, 0, 0, 0, 0, "dp")),
    "table- and row-wise": (2, (0, "rw", 1, "rw", 1, "rw", 1, "dp")),
    "column-wise and of a host": (2, ((1, 0), "twrw0", (0, 1), "twrw0", "twcw", "twrw0", (0, 1), "dp")),
    "data-parallel": (4, ("dp", "dp", "dp", "dp", "dp", "dp", 3, "dp")),
    "all": (4, (3, "rw", (2, 0), "dp", "twcw", "twrw1", "rw", "dp")),
}
ADAGRAD = {"lr": 0.05, "eps": 1e-3}
# In backward, and of what is data-parallel.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, torch.optim.SGD, {"lr": 0.1}),
    "adagrad": (torch.optim.Adagrad, torch.optim.Adagrad, ADAGRAD),
    "row-wise adagrad": (torchrec.optim.RowWiseAdagrad, torch.optim.Adagrad, ADAGRAD),
    "adam": (torch.optim.Adam, torch.optim.Adam, {"lr": 0.02, "eps": 1e-3}),
}
PARTS, ROWS_OF_A_PART, LOOKUPS = 4, 4, 10


def placed(plan: str, optimizer: str) -> list[Table]:
    places = list(PLANS[plan][1])
    if optimizer == "row-wise adagrad":  # its state of data-parallel tables is another one
        places[:6] = [0 if place == "dp" else place for place in places[:6]]
        places[6] = places[6] if places[6] == "rw" else 0  # nor can it be brought from columns to rows
    if optimizer == "adam":  # FBGEMM has none for dense tables on the CPU
        places[6] = "dp"
    return [dataclasses.replace(table, place=place) for table, place in zip(TABLES, places)]


def build(plan: str, optimizer: str, world_size: int, seed: int) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    torch.manual_seed(seed)
    fused, dense, kwargs = OPTIMIZERS[optimizer]
    model = shard(placed(plan, optimizer), world_size, (fused, kwargs), seed=seed)
    return model, all_optimizers(model, lambda parameters: dense(parameters, **kwargs))


def part_of(seed: int, rank: int, world_size: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """This rank's part of a batch that does not depend on the number of ranks.

    The batch looks up every slice, since a dense Adam steps also those that a fused one leaves alone.
    """
    mine = range(rank * PARTS // world_size, (rank + 1) * PARTS // world_size)
    parts = [make_batch(TABLES, ROWS_OF_A_PART, PARTS * seed + part, most=LOOKUPS) for part in mine]
    jagged = [features.to_dict() for features, _ in parts]
    keys = parts[0][0].keys()
    lengths = [part[key].lengths() for key in keys for part in jagged]
    values = [part[key].values() for key in keys for part in jagged]
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


Expected = dict[str, list[float]]  # by plan


def save(rank: int, world_size: int, optimizer: str, folder: Path) -> Expected:
    """Writes checkpoints of the plans for this number of ranks; returns the losses of the steps after them."""
    expected = {}
    for number, plan in enumerate(PLANS):
        if PLANS[plan][0] == world_size:
            model, optimizers = build(plan, optimizer, world_size, seed=number)
            losses(model, optimizers, range(3))
            state = {"model": model.state_dict(), "optimizer": optimizers.state_dict()}
            dcp.save(state, checkpoint_id=folder / plan)
            expected[plan] = losses(model, optimizers, range(10, 15))
    return expected


def load(rank: int, world_size: int, optimizer: str, folder: Path, expected: Expected) -> int:
    """Loads every checkpoint under every plan for this number of ranks."""
    pairs = 0
    for plan in PLANS:
        if PLANS[plan][0] != world_size:
            continue
        model, optimizers = build(plan, optimizer, world_size, seed=100)
        losses(model, optimizers, range(99, 100))
        for source in PLANS:
            continue_from(folder / source, model, optimizers, expected[source])
            pairs += 1
    return pairs


def continue_from(
    checkpoint_id: Path, model: DistributedModelParallel, optimizers: CombinedOptimizer, expected: list[float]
) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizers.state_dict()}
    checkpoint.load(state, checkpoint_id)
    result = model.load_state_dict(state["model"])
    assert not result.missing_keys
    assert not result.unexpected_keys
    optimizers.load_state_dict(state["optimizer"])
    got = losses(model, optimizers, range(10, 15))
    torch.testing.assert_close(
        torch.tensor(got),
        torch.tensor(expected),
        atol=1e-6,
        rtol=1e-6,
        msg=lambda m: f"{checkpoint_id} under {model.plan}: {m}",
    )
    for name, parameter in optimizers.state_dict()["state"].items():
        steps = [value for key, value in parameter.items() if key.rpartition(".")[2] == "step"]
        assert all(float(step) == 8 for step in steps), name  # 3 before the checkpoint, 5 after


Saved = Callable[[str], tuple[Path, Expected]]


@pytest.fixture(scope="module")
def saved(
    one_rank: Callable[..., Any], two_ranks: Ranks, four_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> Saved:
    """For an optimizer, a checkpoint of each plan, and the losses of the steps after it."""

    @cache
    def with_optimizer(optimizer: str) -> tuple[Path, Expected]:
        args = optimizer, tmp_path_factory.mktemp("plans")
        return args[1], one_rank(save, *args) | two_ranks.run(save, *args)[0] | four_ranks.run(save, *args)[0]

    return with_optimizer


@pytest.mark.parametrize(
    "optimizer", [name if name == "adagrad" else pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS]
)
def test_every_plan_continues_every_other(
    one_rank: Callable[..., Any], two_ranks: Ranks, four_ranks: Ranks, saved: Saved, optimizer: str
) -> None:
    args = optimizer, *saved(optimizer)
    pairs = one_rank(load, *args) + two_ranks.run(load, *args)[0] + four_ranks.run(load, *args)[0]
    assert pairs == len(PLANS) ** 2


def load_full(rank: int, world_size: int, plan: str, file: Path, folder: Path, expected: list[float]) -> None:
    model, optimizers = build(plan, "adagrad", world_size, seed=100)
    losses(model, optimizers, range(99, 100))
    continue_from(folder, model, optimizers, expected)
    model, optimizers = build(plan, "adagrad", world_size, seed=100)
    result = model.load_state_dict(torch.load(file, weights_only=True)["model"])
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert losses(model, optimizers, range(10, 11)) == pytest.approx(expected[:1], rel=1e-6)


def test_full_state_dicts_out_and_in(
    one_rank: Callable[..., Any], two_ranks: Ranks, saved: Saved, tmp_path: Path
) -> None:
    folder, expected = saved("adagrad")
    file, again = tmp_path / "full.pt", tmp_path / "again"
    dcp_to_torch_save(folder / "all", file)
    torch_save_to_dcp(file, again)
    two_ranks.run(load_full, "column-wise and of a host", file, again, expected["all"])
    one_rank(load_full, "table-wise", file, again, expected["all"])


def half_precision_sgd(rank: int, world_size: int, folder: Path) -> None:
    """The fused optimizer of 16-bit cores counts steps, for the random bits of rounding; a dense SGD has no state."""
    states: dict[str, Any] = {}
    for place in ("dp", 0):
        table = dataclasses.replace(TABLES[0], place=place, data_type=DataType.BF16)
        model = shard([table], world_size, (torch.optim.SGD, {"lr": 0.1}))
        optimizers = all_optimizers(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        state = {"model": model.state_dict(), "optimizer": optimizers.state_dict()}
        if place == "dp":
            dcp.save(state, checkpoint_id=folder)
            states = {name: value.clone() for name, value in state["model"].items()}
        else:
            core = model.module.ebc.tt_cores()["a"][0]
            assert core.dtype == torch.bfloat16
            with torch.no_grad():
                core.zero_()
            checkpoint.load(state, folder)
            assert torch.equal(core, states["ebc.embedding_bags.a.tt_core0"])


def test_sgd_of_16_bit_cores_leaves_data_parallel(one_rank: Callable[..., Any], tmp_path: Path) -> None:
    one_rank(half_precision_sgd, tmp_path)


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
