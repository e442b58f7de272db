"""TorchRec's printout of a plan, with the bytes that TT tables really take, and in MB."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrec.distributed.planner.shard_estimators import _get_optimizer_multipler
from torchrec.distributed.planner.stats import EmbeddingStats, _format_perf_breakdown, _format_table
from torchrec.distributed.planner.types import Perf, ShardingOption, Topology
from torchrec.distributed.types import ShardingPlan

from flowtt_torchrec.distributed.planner.shard_estimators import is_tt, optimizer_class
from flowtt_torchrec.distributed.planner.storage import table_bytes
from flowtt_torchrec.spec import TTSpec

WEIGHTS = "Compute Kernels Embedding Weights"
OPTIMIZER = "Compute Kernels Optimizer State"
TOTAL = "Compute Kernels Total Estimated Memory (weights + optimizer + IO + pipeline)"
TOTAL_UNTIL_1_7 = "Compute Kernels Storage"  # all that torchrec printed of kernels' bytes before 1.8


class TTEmbeddingStats(EmbeddingStats):
    """``EmbeddingStats`` that knows tensor trains.

    TorchRec's own takes every table's weights and optimizer state from its rows and columns, and rounds to GB. Here the
    sums by compute kernel are those of the cores, of every rank that has them, and the sums and the table of the ranks
    are in MB (1,000,000 bytes). A table's rows and columns in the list of parameters are those of the logical table.

    Args:
        compression: spec of each TT table.
    """

    def __init__(self, compression: Mapping[str, TTSpec]) -> None:
        super().__init__()
        self._compression = compression
        self._width: int
        self._sums: dict[str, dict[str, str]] = {}

    def log(self, sharding_plan: ShardingPlan, *args: Any, best_plan: list[ShardingOption], **kwargs: Any) -> None:
        """Called by the planner; logs at INFO to TorchRec's logger ``torchrec.distributed.planner.stats``."""
        weights: dict[str, int] = {}
        states: dict[str, int] = {}
        memory: dict[str, list[int]] = {}
        for option in best_plan:
            kernel = option.compute_kernel
            of_weights, of_state = self._weights_and_state(option)
            weights[kernel] = weights.get(kernel, 0) + of_weights
            states[kernel] = states.get(kernel, 0) + of_state
            total = option.total_storage
            memory[kernel] = [
                a + b for a, b in zip(memory.get(kernel, [0, 0, 0]), (total.hbm, total.ddr, total.ssd), strict=True)
            ]
        totals = {
            kernel: f"HBM: {show_mb(hbm)}, DDR: {show_mb(ddr)}, SSD: {show_mb(ssd)}"
            for kernel, (hbm, ddr, ssd) in memory.items()
        }
        self._sums = {
            WEIGHTS: {kernel: show_mb(size) for kernel, size in weights.items()},
            OPTIMIZER: {kernel: show_mb(size) for kernel, size in states.items()},
            TOTAL: totals,
            TOTAL_UNTIL_1_7: totals,
        }
        super().log(sharding_plan, *args, best_plan=best_plan, **kwargs)

    def _weights_and_state(self, option: ShardingOption) -> tuple[int, int]:
        tensor, optimizer = option.tensor, optimizer_class(option.tensor)
        if is_tt(option, self._compression):
            copies = len({shard.rank for shard in option.shards})
            spec = self._compression[option.name]
            counted = table_bytes(spec, option.sharding_type, optimizer, tensor.element_size())
            return copies * counted.cores, copies * counted.optimizer
        weights = tensor.numel() * tensor.element_size()
        return weights, round(weights * _get_optimizer_multipler(optimizer, tensor.shape))

    def _log_compute_kernel_stats(self, compute_kernels_stats: dict[str, Any], description: str) -> None:
        super()._log_compute_kernel_stats(self._sums.get(description, compute_kernels_stats), description)

    def _log_rank_mem_usage_and_perf(
        self,
        topology: Topology,
        used_ddr: list[int],
        used_hbm: list[int],
        perf: list[Perf],
        stats: dict[int, dict[str, Any]],
        used_sharding_types: set[str],
        reserved_hbm_percent: float,
    ) -> list[str]:
        """TorchRec's table of the ranks, but in MB."""
        columns = ["Rank", "HBM (MB)", "DDR (MB)", "Perf (ms)", "Input (MB)", "Output (MB)", "Shards"]
        table: list[list[Any]] = [columns, ["-" * len(column) for column in columns]]
        for rank, device in enumerate(topology.devices):
            table.append(
                [
                    rank,
                    _share(used_hbm[rank], (1 - reserved_hbm_percent) * device.storage.hbm),
                    _share(used_ddr[rank], device.storage.ddr),
                    _format_perf_breakdown(perf[rank]),
                    f"{stats[rank]['input_sizes']:.2f}",
                    f"{stats[rank]['output_sizes']:.2f}",
                    " ".join(f"{kind}: {stats[rank]['type'].get(kind, 0)}" for kind in sorted(used_sharding_types)),
                ]
            )
        lines = _format_table(table)
        self._width = max(self._width, len(lines[0]) + 8)
        return list(lines)


def show_mb(size: float) -> str:
    return f"{size / 1e6:,.3f} MB"


def _share(used: float, capacity: float) -> str:
    return f"{used / 1e6:,.3f} ({used / capacity if capacity else 0:.0%})"
