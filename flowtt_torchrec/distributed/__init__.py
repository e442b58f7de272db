"""Tensor-train tables in TorchRec: sharder, planner, sharded collection. Modules are named as TorchRec's own."""

from flowtt_torchrec.distributed import compat  # first, so that a torchrec that is too old says so
from flowtt_torchrec.distributed.auto_compression import AutoCompression
from flowtt_torchrec.distributed.embeddingbag import ShardedTTEmbeddingBagCollection, TTEmbeddingBagCollectionSharder
from flowtt_torchrec.distributed.fp_embeddingbag import TTFeatureProcessedEmbeddingBagCollectionSharder
from flowtt_torchrec.distributed.planner.compression_stats import CompressionRow, CompressionStats
from flowtt_torchrec.distributed.planner.enumerators import TTEmbeddingEnumerator
from flowtt_torchrec.distributed.planner.perf_models import DenseFirstPerfModel
from flowtt_torchrec.distributed.planner.plan_file import LoadedPlan, load_plan, save_plan
from flowtt_torchrec.distributed.planner.planners import TTEmbeddingShardingPlanner
from flowtt_torchrec.distributed.planner.proposers import BisectingGreedyProposer, DenseFirstProposer
from flowtt_torchrec.distributed.planner.shard_estimators import TTPerfEstimator, TTStorageEstimator
from flowtt_torchrec.distributed.planner.stats import TTEmbeddingStats

__all__ = [
    "AutoCompression",
    "BisectingGreedyProposer",
    "CompressionRow",
    "CompressionStats",
    "DenseFirstPerfModel",
    "DenseFirstProposer",
    "LoadedPlan",
    "ShardedTTEmbeddingBagCollection",
    "TTEmbeddingBagCollectionSharder",
    "TTEmbeddingEnumerator",
    "TTEmbeddingShardingPlanner",
    "TTEmbeddingStats",
    "TTFeatureProcessedEmbeddingBagCollectionSharder",
    "TTPerfEstimator",
    "TTStorageEstimator",
    "compat",
    "load_plan",
    "save_plan",
]
