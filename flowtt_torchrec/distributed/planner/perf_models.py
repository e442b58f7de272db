"""Rating plans of which some leave a table dense and others compress it."""

from __future__ import annotations

from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.types import ShardingOption, Topology

from flowtt_torchrec.distributed.sharding_types import CUSTOMIZED_KERNEL


class DenseFirstPerfModel(NoopPerfModel):
    """Rates a plan by its slowest rank, as TorchRec, plus a price for what it compresses.

    TorchRec's rating has no term for accuracy, and a tensor train on a rank that is not the slowest is free to it.

    Args:
        topology: the devices.
        ms_per_million: milliseconds of a step that compressing a million numbers must save. The default is so high that
            only memory forces a table to be compressed; a lower one lets time decide too.
    """

    def __init__(self, topology: Topology, ms_per_million: float = 1000.0) -> None:
        super().__init__(topology)
        self._ms_per_million = ms_per_million

    def rate(self, plan: list[ShardingOption]) -> float:
        compressed = sum(option.tensor.numel() for option in plan if option.compute_kernel == CUSTOMIZED_KERNEL)
        return super().rate(plan) + self._ms_per_million * compressed / 1e6
