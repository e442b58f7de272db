"""Planning TT tables with TorchRec: modules are named as TorchRec's own in ``torchrec.distributed.planner``."""

from flowtt_torchrec.distributed.planner.compression_stats import CompressionRow, CompressionStats
from flowtt_torchrec.distributed.planner.enumerators import TTEmbeddingEnumerator
from flowtt_torchrec.distributed.planner.perf_models import DenseFirstPerfModel
from flowtt_torchrec.distributed.planner.plan_file import LoadedPlan, load_plan, save_plan
from flowtt_torchrec.distributed.planner.planners import TTEmbeddingShardingPlanner
from flowtt_torchrec.distributed.planner.proposers import BisectingGreedyProposer, DenseFirstProposer
from flowtt_torchrec.distributed.planner.shard_estimators import TTPerfEstimator, TTStorageEstimator
from flowtt_torchrec.distributed.planner.stats import TTEmbeddingStats

__all__ = [
    "BisectingGreedyProposer",
    "CompressionRow",
    "CompressionStats",
    "DenseFirstPerfModel",
    "DenseFirstProposer",
    "LoadedPlan",
    "TTEmbeddingEnumerator",
    "TTEmbeddingShardingPlanner",
    "TTEmbeddingStats",
    "TTPerfEstimator",
    "TTStorageEstimator",
    "load_plan",
    "save_plan",
]
