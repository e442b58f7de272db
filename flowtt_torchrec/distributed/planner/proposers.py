"""TorchRec's greedy search, at a few of its proposals instead of at all."""

from __future__ import annotations

import heapq

from torchrec.distributed.planner.proposers import GreedyProposer
from torchrec.distributed.planner.types import Enumerator, ShardingOption, Topology

from flowtt_torchrec.distributed.sharding_types import CUSTOMIZED_KERNEL


class BisectingGreedyProposer(GreedyProposer):
    """Looks at TorchRec's greedy proposals from afar, then closer and closer around the best.

    The greedy proposer starts with the best option of every table and gives the table that takes the most memory its
    next one, step by step, whatever the feedback: with hundreds of tables thousands of proposals, each partitioned
    anew. This one knows the same steps beforehand. It proposes after every ``n``-th of them, then between the
    neighbours of the best rating so far, until no step beside the best is left. If none of the first proposals fits the
    memory, it tries each table's smallest option. With few steps it makes all proposals, in TorchRec's order.

    Args:
        use_depth: as in TorchRec: rank a table's options by their slowest shard, else by the sum of their shards.
        at_once: proposals of one look.
    """

    def __init__(self, use_depth: bool = True, at_once: int = 12) -> None:
        super().__init__(use_depth)
        self._at_once = at_once
        self._clear()

    def _clear(self) -> None:
        self._steps: list[str] = []  # the table that each step gives its next option
        self._queue: list[int] = []  # how many steps to propose after, from the last on
        self._ratings: dict[int, float] = {}  # by the number of steps; infinite if it does not fit
        self._now = 0
        self._smallest: dict[str, int] | None = None

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        super().load(search_space, enumerator)
        self._clear()
        self._order_options()
        self._steps = self._greedy_steps()
        self._look(0, len(self._steps))
        self._advance()

    def _order_options(self) -> None:
        """For subclasses: puts the options of each table, ranked by time, in another order."""

    def _greedy_steps(self) -> list[str]:
        """The table that TorchRec's greedy proposer would step, again and again: that of the largest option."""
        heap = [
            (self._size(options[0]), i, fqn) for i, (fqn, options) in enumerate(self._sharding_options_by_fqn.items())
        ]
        heapq.heapify(heap)
        place = dict.fromkeys(self._sharding_options_by_fqn, 0)
        steps = []
        while heap:
            _, i, fqn = heap[0]
            options = self._sharding_options_by_fqn[fqn]
            if place[fqn] + 1 == len(options):
                heapq.heappop(heap)
                continue
            place[fqn] += 1
            steps.append(fqn)
            heapq.heapreplace(heap, (self._size(options[place[fqn]]), i, fqn))
        return steps

    @staticmethod
    def _size(option: ShardingOption) -> tuple[float, ...]:
        """What TorchRec calls the largest, negated for the heap."""
        stored = [(shard.storage.hbm, shard.storage.ddr) for shard in option.shards if shard.storage is not None]
        hbm, ddr = zip(*stored)
        return -max(hbm), -sum(hbm), -max(ddr), -sum(ddr)

    def _look(self, first: int, last: int) -> None:
        """Queues up to `at_once` proposals that are evenly spread from ``first`` to ``last`` steps."""
        count = min(self._at_once, last - first + 1)
        spread = {first + round(i * (last - first) / max(count - 1, 1)) for i in range(count)}
        self._queue = sorted(spread - self._ratings.keys(), reverse=True)

    def _advance(self) -> None:
        """Makes the next of the queue the current proposal."""
        self._now = self._queue.pop()
        place = dict.fromkeys(self._sharding_options_by_fqn, 0)
        for fqn in self._steps[: self._now]:
            place[fqn] += 1
        self._current_proposal = place

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        if self._smallest is not None:
            self._current_proposal = {}
            return
        fits = partitionable and perf_rating is not None
        self._ratings[self._now] = perf_rating if fits and perf_rating is not None else float("inf")
        if not self._queue:
            self._look_closer()
        if self._queue:
            self._advance()
        elif min(self._ratings.values()) == float("inf"):
            self._propose_smallest()
        else:
            self._current_proposal = {}

    def _look_closer(self) -> None:
        """Queues proposals between the neighbours of the best; none if there is no step beside it that is new."""
        tried = sorted(self._ratings)
        best = min(tried, key=self._ratings.__getitem__)  # the first of equals
        if self._ratings[best] == float("inf"):
            return
        at = tried.index(best)
        first = tried[at - 1] if at > 0 else best
        last = tried[at + 1] if at + 1 < len(tried) else best
        self._look(min(first + 1, best), max(last - 1, best))

    def _propose_smallest(self) -> None:
        self._smallest = {
            fqn: min(range(len(options)), key=[_bytes_of_all_ranks(option) for option in options].__getitem__)
            for fqn, options in self._sharding_options_by_fqn.items()
        }
        self._current_proposal = self._smallest


def _bytes_of_all_ranks(option: ShardingOption) -> int:
    storage = option.total_storage
    return storage.hbm + storage.ddr


class DenseFirstProposer(BisectingGreedyProposer):
    """The greedy search, which gives the largest table its next option, with the dense options first.

    So it comes by the plans that compress the largest tables only, whatever the estimated times.
    """

    def _order_options(self) -> None:
        for options in self._sharding_options_by_fqn.values():
            options.sort(key=lambda option: option.compute_kernel == CUSTOMIZED_KERNEL)  # stable
