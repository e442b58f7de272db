"""Click data as `torchrec.datasets.utils.Batch`, one stream a rank. `ClickDataset` is what the training loop uses.

* `CriteoTSV`: raw Criteo files, Kaggle or 1TB, read as a stream.
* `PreparedClicks`: npy files, made ready once by ``python -m flowtt_torchrec prepare`` or TorchRec's scripts.
* `SyntheticCriteo`: generated; Kaggle's table sizes and skew, and clicks whose best possible scores are known.
* `MetaFiles`: files in the format of facebookresearch/dlrm_datasets.
* `SyntheticMeta`: generated; calibrated to the published statistics of the 2022 set of these.
"""

from flowtt_torchrec.datasets.base import (
    SPLITS,
    BestMetrics,
    ClickDataset,
    DataError,
    Sharding,
    Split,
)
from flowtt_torchrec.datasets.criteo import CriteoTSV
from flowtt_torchrec.datasets.meta import MetaFiles
from flowtt_torchrec.datasets.meta_synthetic import SyntheticMeta
from flowtt_torchrec.datasets.prepared import PreparedClicks, is_prepared
from flowtt_torchrec.datasets.synthetic import KAGGLE_NUM_EMBEDDINGS, SyntheticCriteo

__all__ = [
    "KAGGLE_NUM_EMBEDDINGS",
    "SPLITS",
    "BestMetrics",
    "ClickDataset",
    "CriteoTSV",
    "DataError",
    "MetaFiles",
    "PreparedClicks",
    "Sharding",
    "Split",
    "SyntheticCriteo",
    "SyntheticMeta",
    "is_prepared",
]
