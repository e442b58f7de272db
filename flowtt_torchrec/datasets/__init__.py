"""Click data as `torchrec.datasets.utils.Batch`, one stream a rank. `ClickDataset` is what the training loop uses.

==========================  =========================================================================================
`CriteoTSV`                 ``CriteoTSV(path, num_embeddings, sharding, *, val_path=None, val_every=10, shuffle_rows=0,
                            seed=0, drop_last=False)``: raw Criteo files, Kaggle or 1TB, read as a stream
`SyntheticCriteo`           ``SyntheticCriteo(sharding, *, num_train_rows=1_000_000, num_val_rows=65_536,
                            scale=1.0, max_rows=None, seed=0)``: generated, Kaggle's table sizes and skew, best possible scores known
`MetaFiles`                 ``MetaFiles(paths, sharding, *, num_tables=None, num_embeddings=None, val_every=10,
                            seed=0)``: files in the format of facebookresearch/dlrm_datasets
`SyntheticMeta`             ``SyntheticMeta(sharding, *, num_tables=240, num_train_rows, num_val_rows, seed=0)``:
                            generated, calibrated to the published statistics of the 2022 set
==========================  =========================================================================================
"""

from flowtt_torchrec.datasets.base import (
    SPLITS,
    BestMetrics,
    ClickDataset,
    DataError,
    Sharding,
    Split,
)
from flowtt_torchrec.datasets.synthetic import KAGGLE_NUM_EMBEDDINGS, SyntheticCriteo

__all__ = [
    "KAGGLE_NUM_EMBEDDINGS",
    "SPLITS",
    "BestMetrics",
    "ClickDataset",
    "DataError",
    "Sharding",
    "Split",
    "SyntheticCriteo",
]
