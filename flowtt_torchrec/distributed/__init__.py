"""Tensor-train tables in TorchRec: sharder, planner, sharded collection. Modules are named as TorchRec's own."""

from flowtt_torchrec.distributed import compat  # first, so that a torchrec that is too old says so
from flowtt_torchrec.distributed.auto_compression import AutoCompression, DenseFirstPerfModel, DenseFirstProposer
from flowtt_torchrec.distributed.embeddingbag import ShardedTTEmbeddingBagCollection, TTEmbeddingBagCollectionSharder
from flowtt_torchrec.distributed.enumerators import TTEmbeddingEnumerator
from flowtt_torchrec.distributed.estimators import TTPerfEstimator, TTStorageEstimator
from flowtt_torchrec.distributed.fp_embeddingbag import TTFeatureProcessedEmbeddingBagCollectionSharder
from flowtt_torchrec.distributed.planner import TTEmbeddingShardingPlanner
from flowtt_torchrec.distributed.planner_stats import TTEmbeddingStats
from flowtt_torchrec.distributed.proposers import BisectingGreedyProposer
from flowtt_torchrec.distributed.saved_plan import LoadedPlan, load_plan, save_plan
from flowtt_torchrec.distributed.stats import CompressionRow, CompressionStats

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
