"""Tensor-train compressed embedding tables for TorchRec.

This package needs torch alone; what plugs into TorchRec is in `flowtt_torchrec.distributed`.
"""

from flowtt_torchrec._version import __version__
from flowtt_torchrec.ablations import ablation
from flowtt_torchrec.embedding_bag import BatchedTTEmbeddingBags, TTEmbeddingBag
from flowtt_torchrec.ops import release_memory
from flowtt_torchrec.optimizers import OptimizerSpec
from flowtt_torchrec.plan import BoundsCheckMode
from flowtt_torchrec.spec import TTSpec, compress_to_fit

__all__ = [
    "BatchedTTEmbeddingBags",
    "BoundsCheckMode",
    "OptimizerSpec",
    "TTEmbeddingBag",
    "TTSpec",
    "__version__",
    "ablation",
    "compress_to_fit",
    "release_memory",
]
