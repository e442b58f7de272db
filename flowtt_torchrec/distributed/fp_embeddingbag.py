"""The sharder of collections with feature processors, whose weights (of positions, say) are trained with the tables."""

from __future__ import annotations

from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder

from flowtt_torchrec.distributed.embeddingbag import TTEmbeddingBagCollectionSharder
from flowtt_torchrec.distributed.sharding_types import SUPPORTED_SHARDING_TYPES, TT_KERNEL
from flowtt_torchrec.spec import TTSpec


class TTFeatureProcessedEmbeddingBagCollectionSharder(FeatureProcessedEmbeddingBagCollectionSharder):
    """``FeatureProcessedEmbeddingBagCollectionSharder`` that makes tensor trains of the tables with a spec.

    Args:
        sharder: of the collection inside, with the tables' specs.

    Example:
        >>> sharder = TTFeatureProcessedEmbeddingBagCollectionSharder(TTEmbeddingBagCollectionSharder(compression))
    """

    def __init__(self, sharder: TTEmbeddingBagCollectionSharder) -> None:
        super().__init__(sharder, qcomm_codecs_registry=sharder.qcomm_codecs_registry)
        self._tt_sharder = sharder

    @property
    def compression(self) -> dict[str, TTSpec]:
        """As of the sharder inside."""
        return self._tt_sharder.compression

    @property
    def plan_chooses(self) -> bool:
        """As of the sharder inside."""
        return self._tt_sharder.plan_chooses

    @property
    def keep_forward_weights(self) -> bool:
        """As of the sharder inside."""
        return self._tt_sharder.keep_forward_weights

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        kernels = super().compute_kernels(sharding_type, compute_device_type)
        return [*kernels, TT_KERNEL] if sharding_type in SUPPORTED_SHARDING_TYPES else kernels


TT_SHARDERS = (TTEmbeddingBagCollectionSharder, TTFeatureProcessedEmbeddingBagCollectionSharder)
