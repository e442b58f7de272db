"""Constants of the cost models from times on this machine: those of `lookup_costs` and of `step_costs`.

Shapes and ways to look up are chosen by these before anything runs, so they are constants of the source, not of a
machine: a table's shape must not depend on where it is chosen. `calibration` measures those of the planner.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowtt_torchrec import lookup_costs, ops, step_costs
from flowtt_torchrec.ablations import ablation
from flowtt_torchrec.embedding_bag import BatchedTTEmbeddingBags
from flowtt_torchrec.optimizers import OptimizerSpec
from flowtt_torchrec.shapes import balanced_cover, largest_ranks, ordered_factors
from flowtt_torchrec.spec import TTSpec

POOLING = 8  # lookups a bag
MOST_PARAMETERS = 8_000_000
# Rows, columns, rank: of few and of many bytes, products of few and of many operations.
LOOKUP_SHAPES = (
    *((1_000, 64, 32), (100_000, 16, 8), (1_000_000, 32, 16), (1_000_000, 128, 32)),
    *((10_000_000, 64, 32), (10_000_000, 64, 64), (10_000_000, 16, 64)),
)


class Fit(NamedTuple):
    """Fitted constants, and how near they come to the times.

    Attributes:
        constants: by name, of the unit that the times have; 0 for what the times do not show.
        p10: predicted over measured time that a tenth of the samples is below.
        median: of the same.
        p90: that a tenth is above.
        samples: how many.
    """

    constants: dict[str, float]
    p10: float
    median: float
    p90: float
    samples: int


def fit(amounts: Sequence[Mapping[str, float]], times: Sequence[float], always: Iterable[str] = ()) -> Fit:
    """Constants by which amounts become times: least squares of the relative errors, none of them negative.

    Constants that come out negative are left out, the one that matters most first.

    Args:
        amounts: what each sample has of each constant's cause; 0 of what is not named.
        times: of the samples.
        always: constants that must be above 0.

    Raises:
        RuntimeError: if one of ``always`` comes out at 0 or below.
    """
    always = set(always)
    used = list(dict.fromkeys(itertools.chain(*amounts)))
    target = torch.tensor(list(times), dtype=torch.float64)
    rows = [[float(sample.get(name, 0.0)) for name in used] for sample in amounts]
    table = torch.tensor(rows, dtype=torch.float64) / target[:, None]
    scale = table.norm(dim=0).clamp(min=1e-300)
    names, columns = list(used), list(range(len(used)))
    while True:
        scaled = table[:, columns] / scale[columns]
        found = torch.linalg.lstsq(scaled, torch.ones_like(target)[:, None], driver="gelsd").solution[:, 0]
        worst = min(zip(found.tolist(), names))
        if worst[0] >= 0:
            break
        if worst[1] in always:
            raise RuntimeError("the times do not grow with the work; calibrate on a machine that does nothing else")
        del columns[names.index(worst[1])]
        names.remove(worst[1])
    predicted = scaled @ found
    constants = dict.fromkeys(used, 0.0) | dict(zip(names, (found / scale[columns]).tolist()))
    p10, median, p90 = predicted.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    return Fit(constants, p10, median, p90, len(times))


def fit_lookup_costs(
    shapes: Sequence[tuple[int, int, int]] = LOOKUP_SHAPES, lookups: Sequence[int] = (4_096, 32_768), repeats: int = 5
) -> Fit:
    """`lookup_costs.Constants` in ns, from forward passes on one thread by each strategy.

    Args:
        shapes: rows, columns and rank of the tables.
        lookups: of the batches.
        repeats: runs of each, of which the fastest counts.
    """
    amounts, times = [], []
    with _one_thread(), torch.no_grad():
        for (rows, columns, rank), n in itertools.product(shapes, lookups):
            bags = BatchedTTEmbeddingBags({"t": TTSpec.suggest(rows, columns, rank)}, optimizer=None)
            spec = bags.layout.specs[0]
            for case in step_costs.CASES:
                indices, offsets = _batch(case, rows, n)
                (counts,) = lookup_costs.table_counts(
                    bags.layout, offsets, ops.flow_plan(bags.layout, indices, offsets)
                )
                of_strategies = lookup_costs.strategy_amounts(spec, counts)
                for strategy in ("prefix", "unique", "direct"):
                    with ablation(flow=strategy):
                        times.append(_least_ns(lambda: bags(indices, offsets), repeats))  # noqa: B023 - called at once
                    amounts.append(of_strategies[strategy])
                if 4 * rows * columns <= 1 << 30:
                    bags.materialise_rows(1 << 30, "materialised")
                    times.append(_least_ns(lambda: bags(indices, offsets), repeats))  # noqa: B023
                    bags.materialise_rows(0)
                    amounts.append(of_strategies["materialised"])
    return fit(amounts, times)


def fit_step_costs(shapes: int = 100, lookups: int = 32_768, repeats: int = 4, seed: int = 0) -> Fit:
    """`step_costs.Constants` in ns, from steps with row-wise Adagrad on one thread.

    Args:
        shapes: how many random shapes.
        lookups: of a batch.
        repeats: steps of each, of which the fastest counts.
        seed: of the shapes.
    """
    amounts, times = [], []
    optimizer = OptimizerSpec("rowwise_adagrad", learning_rate=0.01)
    with _one_thread():
        for spec in itertools.islice(_random_specs(seed), shapes):
            bags = BatchedTTEmbeddingBags({"t": spec}, optimizer=optimizer)
            expected = step_costs.step_amounts(spec.p, spec.q, spec.ranks, spec.num_embeddings, lookups)
            for number, case in enumerate(step_costs.CASES):
                indices, offsets = _batch(case, spec.num_embeddings, lookups)
                grad_output = torch.ones(offsets.numel() - 1, spec.embedding_dim)
                times.append(_least_ns(lambda: bags(indices, offsets).backward(grad_output), repeats))  # noqa: B023
                of_case = {name: np.broadcast_to(x, len(step_costs.CASES))[number] for name, x in expected.items()}
                amounts.append({name: float(amount) for name, amount in of_case.items()})
    return fit(amounts, times)


def _random_specs(seed: int) -> Iterator[TTSpec]:
    """Tables of 100,000 to 4 billion rows with random factors, small enough to be many."""
    rng = np.random.default_rng(seed)
    while True:
        rows, cores = int(10 ** rng.uniform(5, 9.6)), int(rng.integers(2, 5))
        columns, rank = int(2 ** rng.integers(4, 8)), int(2 ** rng.integers(3, 7))
        last = int(10 ** rng.uniform(1.5, 4))
        p = (*balanced_cover(-(-rows // last), cores - 1), last)
        factors = [q for q in ordered_factors(columns, cores) if min(q) > 1]
        q = factors[rng.integers(len(factors))]
        spec = TTSpec(rows, columns, p, q, largest_ranks(p, q, (rank,) * (cores - 1)))
        if spec.num_parameters <= MOST_PARAMETERS:
            yield spec


def _batch(case: str, rows: int, lookups: int) -> tuple[Tensor, Tensor]:
    """Ids of one of `step_costs.CASES`, and offsets of bags of `POOLING`."""
    generator = torch.Generator().manual_seed(lookups)
    drawn = torch.rand(lookups, dtype=torch.float64, generator=generator)
    if case == "uniform":
        ids = drawn * rows
    else:  # ranks with density proportional to rank^-ZIPF
        power = 1 - step_costs.ZIPF
        ids = (1 + drawn * ((rows + 1) ** power - 1)) ** (1 / power) - 1
    indices = ids.long().clamp(max=rows - 1)
    if case == "scattered":
        indices = indices * 2_654_435_761 % rows
    offsets = torch.arange(0, lookups + POOLING, POOLING).clamp(max=lookups)
    return indices, offsets


def _least_ns(run: Callable[[], object], repeats: int) -> float:
    least = float("inf")
    for _ in range(repeats + 1):  # the first is a warm-up that is not faster than the others
        start = time.perf_counter_ns()
        run()
        least = min(least, time.perf_counter_ns() - start)
    return float(least)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
