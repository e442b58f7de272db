"""The greedy search that looks at a few of TorchRec's proposals."""

from __future__ import annotations

from typing import Any

import pytest
from test_planner import collection, topology
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.proposers import GreedyProposer
from torchrec.distributed.planner.types import ParameterConstraints, Perf, PlannerError, ShardingOption, Topology
from torchrec.distributed.planner.utils import reset_shard_rank

from flowtt_torchrec.distributed import (
    AutoCompression,
    BisectingGreedyProposer,
    DenseFirstPerfModel,
    DenseFirstProposer,
    TTEmbeddingBagCollectionSharder,
    TTEmbeddingEnumerator,
)
from flowtt_torchrec.spec import TTSpec

TYPES = ["table_wise", "data_parallel", "row_wise"]


def search_space(tables: int, topo: Topology, auto: bool = False, equal: bool = False) -> list[ShardingOption]:
    sizes = {f"t{i:02}": (100_000 * (1 if equal else i + 1), 32) for i in range(tables)}
    specs: Any = {name: TTSpec.suggest(*size, 8) for name, size in sizes.items()}
    specs = AutoCompression(specs) if auto else specs
    constraints = None if auto else {name: ParameterConstraints(sharding_types=TYPES) for name in sizes}
    enumerator = TTEmbeddingEnumerator(topo, 8 if equal else 512, specs, constraints)
    return enumerator.enumerate(collection(sizes=sizes), [TTEmbeddingBagCollectionSharder(specs)])


def search(proposer: GreedyProposer, space: list[ShardingOption], topo: Topology, rate: Any) -> list[tuple[Any, float]]:
    """Every proposal as sharding types and kernels, with its rating: infinite if it does not fit."""
    proposer.load(space)
    tried = []
    while proposal := proposer.propose():
        kinds = tuple((o.sharding_type, o.compute_kernel) for o in proposal)
        try:
            plan = GreedyPerfPartitioner().partition(proposal, topo)
            tried.append((kinds, rate(plan)))
            proposer.feedback(True, plan, tried[-1][1], topo)
        except PlannerError:
            tried.append((kinds, float("inf")))
            proposer.feedback(False, proposal, None, topo)
        reset_shard_rank(proposal)
    return tried


def stock_and_ours(use_depth: bool, tables: int, ranks: int) -> list[list[tuple[Any, float]]]:
    topo = topology(ranks, "cuda")
    space = search_space(tables, topo)
    rate = NoopPerfModel(topo).rate
    proposers = GreedyProposer(use_depth), BisectingGreedyProposer(use_depth)
    return [search(proposer, space, topo, rate) for proposer in proposers]


@pytest.mark.parametrize("use_depth", [True, False])
def test_few_steps_are_all_proposed_as_torchrec_does(use_depth: bool) -> None:
    stock, ours = stock_and_ours(use_depth, tables=4, ranks=2)
    assert ours == stock
    assert len(stock) == 1 + 4 * (len(TYPES) - 1)


@pytest.mark.parametrize("use_depth", [True, False])
def test_many_steps_are_not(use_depth: bool) -> None:
    stock, ours = stock_and_ours(use_depth, tables=60, ranks=4)
    assert len(stock) == 1 + 60 * 2
    assert len(ours) < 40
    assert {kinds for kinds, _ in ours} <= {kinds for kinds, _ in stock}
    assert min(rating for _, rating in ours) < 1.02 * min(rating for _, rating in stock)


def test_the_first_plan_that_fits_is_found_to_the_step() -> None:
    """Dense first, the price is for what is compressed: as good as TorchRec's search, which tries every step."""
    topo = topology(2, "cuda", 1)
    space = search_space(40, topo, auto=True)
    rate = DenseFirstPerfModel(topo).rate

    class EveryStep(DenseFirstProposer):
        def __init__(self) -> None:
            super().__init__(at_once=10_000)

    every, ours = (search(proposer, space, topo, rate) for proposer in (EveryStep(), DenseFirstProposer()))
    assert len(every) > 80 > len(ours)
    assert float("inf") > min(rating for _, rating in ours) == min(rating for _, rating in every)


def test_the_smallest_options_are_the_last_resort() -> None:
    """The steps go from data-parallel over table-wise to row-wise, and only the plan in the middle fits."""
    space = search_space(30, topology(2, "cuda", 1), equal=True)
    for option in space:
        time = ["data_parallel", "table_wise", "row_wise"].index(option.sharding_type) + 1.0
        for part in option.shards:
            part.perf = Perf(time, 0.0, 0.0, 0.0)
    undivided = next(o.total_storage.hbm for o in space if o.sharding_type == "table_wise")
    topo = topology(2, "cuda", 15.4 * undivided / 1024**3)  # 15 tables a rank, and no room for another that is on both
    tried = search(BisectingGreedyProposer(), space, topo, NoopPerfModel(topo).rate)
    assert {kind for kind, _ in tried[-1][0]} == {"table_wise"}
    assert all(rating == float("inf") for _, rating in tried[:-1])
    assert tried[-1][1] < float("inf")
    nothing = topology(2, "cuda", 0.001)
    assert search(BisectingGreedyProposer(), space, nothing, NoopPerfModel(nothing).rate)[-1][1] == float("inf")
