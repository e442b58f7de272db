"""Click data that is prepared once and then read by position: TorchRec's npy layout, and a manifest beside it.

`flowtt_torchrec.datasets.prepared.prepare` turns raw Criteo text, CSV or Parquet into ``<part>_dense.npy``,
``<part>_sparse.npy`` and ``<part>_labels.npy``, one part a source file, as ``torchrec.datasets.criteo`` reads them; it
needs pyarrow. The manifest says what the columns are, how ids became rows, which rows are for training, validation and
test, and holds checksums. `PreparedClicks` reads such a folder, or one that TorchRec's own scripts have written.
"""

from flowtt_torchrec.datasets.prepared.dataset import PreparedClicks, is_prepared
from flowtt_torchrec.datasets.prepared.manifest import Manifest, Part, RowRange

__all__ = ["Manifest", "Part", "PreparedClicks", "RowRange", "is_prepared"]
