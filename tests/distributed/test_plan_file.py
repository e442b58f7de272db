"""Plans as JSON."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from test_planner import ALL_TYPES, COMPRESSION, MID, SIZES, collection, entries, make_planner
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType
from twins import Model, Table, apply_optimizer_in_backward, full_state, make_batch, mixed_tables, shard

from flowtt_torchrec.distributed import TTEmbeddingBagCollectionSharder, load_plan, save_plan
from flowtt_torchrec.spec import TTSpec

RANKS = {"world_size": 4, "local_world_size": 2}
MODEL = torch.nn.ModuleDict({"ebc": collection()})
SHARDERS: list[Any] = [TTEmbeddingBagCollectionSharder(COMPRESSION)]


def plan(types: dict[str, str], device: str = "cuda") -> ShardingPlan:
    constraints = {name: ParameterConstraints(sharding_types=[kind], min_partition=32) for name, kind in types.items()}
    topology = Topology(**RANKS, compute_device=device)
    return make_planner(topology=topology, constraints=constraints).plan(MODEL, SHARDERS)


@pytest.mark.parametrize("kind", ALL_TYPES)
def test_a_plan_comes_back_as_it_was(tmp_path: Path, kind: str) -> None:
    """Of tensor trains and dense tables of one type."""
    made = plan(dict.fromkeys(SIZES, kind))
    made.plan["ebc"]["tiny"].output_dtype = DataType.FP16  # type: ignore[index]
    save_plan(tmp_path / "new" / "plan.json", made, MODEL, COMPRESSION, **RANKS)
    loaded = load_plan(tmp_path / "new" / "plan.json", MODEL, **RANKS, device="cuda")
    assert loaded.plan.plan == made.plan
    assert entries(loaded.plan) == entries(made)
    assert loaded.compression == COMPRESSION
    content = json.loads((tmp_path / "new" / "plan.json").read_text())
    assert content["modules"]["ebc"]["mid"]["tensor_train"] == MID.to_dict()
    assert not list(tmp_path.glob("**/*.part"))


def test_the_device_is_that_of_the_job(tmp_path: Path) -> None:
    save_plan(tmp_path / "plan.json", plan({}), MODEL, COMPRESSION, **RANKS)
    for device in ("cpu", "cuda"):
        loaded = load_plan(tmp_path / "plan.json", MODEL, **RANKS, device=device)
        placements = {
            s.placement.device().type
            for entry in loaded.plan.plan["ebc"].values()  # type: ignore[attr-defined]
            if entry.sharding_spec is not None
            for s in entry.sharding_spec.shards
        }
        assert placements == {device}


def refused(tmp_path: Path, message: str, edit: Callable[[dict[str, Any]], Any] = id, **job: Any) -> None:
    kinds = {"big": "table_row_wise", "mid": "table_wise", "small": "table_wise", "tiny": "table_wise"}
    path = tmp_path / "plan.json"
    save_plan(path, plan(kinds), MODEL, COMPRESSION, **RANKS)
    content = json.loads(path.read_text())
    edit(content["modules"]["ebc"])
    path.write_text(json.dumps(content))
    job = {"module": MODEL, **RANKS, **job}
    with pytest.raises(ValueError, match=message) as raised:
        load_plan(path, job.pop("module"), **job)
    assert str(path) in str(raised.value)


def test_what_does_not_go_with_the_model_or_the_ranks_is_named(tmp_path: Path) -> None:
    refused(tmp_path, r"plan is for 4 ranks, this job has 8: table '\w+' is .* on ranks \[", world_size=8)
    refused(tmp_path, r"hosts of 2 ranks, these have 4: table 'big' is on the ranks of one host", local_world_size=4)
    sizes = {**SIZES, "mid": (2_000_000, 64)}
    smaller = torch.nn.ModuleDict({"ebc": collection(sizes=sizes)})
    refused(tmp_path, r"table 'mid' is 3,000,000 x 64 in the plan and 2,000,000 x 64 in the model", module=smaller)
    renamed = torch.nn.ModuleDict({"ebc": collection(sizes={**SIZES, "extra": (10, 8)})})
    refused(tmp_path, r"table 'extra' of 'ebc' is in the model, not in the plan", module=renamed)
    elsewhere = torch.nn.ModuleDict({"bags": collection()})
    refused(tmp_path, r"tables .*'big'.*: the model has no module 'ebc'", module=elsewhere)


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    refused(tmp_path, r"has table 'bgi', which .* did you mean 'big'\?", lambda e: e.update(bgi=e.pop("big")))
    refused(tmp_path, r"table 'big' has compute_kernel 'tt'; known: ", lambda e: e["big"].update(compute_kernel="tt"))
    refused(tmp_path, r"table 'mid' .* no 'tensor_train'", lambda e: e["mid"].pop("tensor_train"))
    other = COMPRESSION["big"].to_dict()
    refused(tmp_path, r"table 'mid' is .* but its TTSpec", lambda e: e["mid"].update(tensor_train=other))
    refused(tmp_path, r"table 'mid' is on rank 7; there are ranks 0 to 3", lambda e: e["mid"].update(ranks=[7]))
    refused(tmp_path, r"table 'big': its shards .* not the whole table", lambda e: e["big"]["shards"].pop())
    refused(tmp_path, r"table 'mid' is table_wise and has no shards", lambda e: e["mid"].pop("shards"))
    refused(tmp_path, r"an entry has no 'ranks'", lambda e: e["mid"].pop("ranks"))
    for text in ("{", "[]", '{"version": 2}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ValueError, match=r"other\.json is not a plan"):
            load_plan(tmp_path / "other.json", MODEL, **RANKS)


def test_what_a_file_cannot_keep_is_named(tmp_path: Path) -> None:
    made = copy.deepcopy(plan({}))
    with pytest.raises(ValueError, match=r"table .big. is a tensor train in the plan, but .* no spec"):
        save_plan(tmp_path / "plan.json", made, MODEL, {}, **RANKS)
    made.plan["ebc"]["tiny"].cache_params = object()  # type: ignore[index]
    with pytest.raises(ValueError, match="table 'tiny' has cache_params"):
        save_plan(tmp_path / "plan.json", made, MODEL, COMPRESSION, **RANKS)
    assert list(tmp_path.iterdir()) == []


def train(rank: int, world_size: int, folder: str, tables: list[Table], loaded: bool) -> tuple[list[float], Any]:
    """Losses and state, with a plan made by hand, or with the same from the file."""
    path = Path(folder) / "plan.json"
    optimizer = (torch.optim.Adagrad, {"lr": 0.1})
    if loaded:
        unsharded = Model(tables)
        apply_optimizer_in_backward(optimizer[0], unsharded.ebc.parameters(), dict(optimizer[1]))
        plan, compression = load_plan(path, unsharded, world_size=world_size)
        sharder: EmbeddingBagCollectionSharder = TTEmbeddingBagCollectionSharder(compression)
        model = DistributedModelParallel(unsharded, device=torch.device("cpu"), plan=plan, sharders=[sharder])
    else:
        model = shard(tables, world_size, optimizer)
        if rank == 0:
            specs: dict[str, TTSpec] = {table.name: table.spec for table in tables if table.spec is not None}
            save_plan(path, model.plan, Model(tables), specs, world_size=world_size)
        torch.distributed.barrier()
    torch.manual_seed(0)
    for parameter in model.module.ebc.parameters():
        if parameter.dim() == 2:  # dense tables start at random
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
    losses = []
    for step in range(3):
        features, targets = make_batch(tables, 8, 10 * step + rank)
        loss = (model(features)[0] - targets).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses, full_state(model, tables)


def test_a_loaded_plan_trains_alike(two_ranks: Ranks, tmp_path: Path) -> None:
    tables = mixed_tables()
    made = two_ranks.run(train, str(tmp_path), tables, False)
    loaded = two_ranks.run(train, str(tmp_path), tables, True)
    for (losses, state), (losses_again, state_again) in zip(made, loaded):
        assert losses == losses_again
        assert state.keys() == state_again.keys()
        assert all(torch.equal(state[name], state_again[name]) for name in state)
