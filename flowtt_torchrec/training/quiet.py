"""Silences what the libraries say in every run and no user of them can act on."""

from __future__ import annotations

import logging
import os
import warnings


def quiet_libraries() -> None:
    """Hides known, harmless warnings of TorchRec, FBGEMM and torch; all others stay."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler announces its start and stop
    # TorchRec passes an argument to DDP that torch has renamed.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
    # TorchRec's state dicts still hold ShardedTensor.
    warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
    # FBGEMM's dense tables on the CPU do their autograd inside the operator.
    warnings.filterwarnings("ignore", message="fbgemm::.*an autograd kernel was not registered")
    # Said for every data-parallel table, which by nature has no sharding spec and no cache.
    logging.getLogger().addFilter(lambda record: not record.getMessage().startswith("Sharding spec not found"))
    logging.getLogger("torchrec.distributed.utils").addFilter(
        lambda record: "caching params will be ignored" not in record.getMessage()
    )
    # TorchRec's pipeline traces the model with torch.fx and asks whether it does.
    logging.getLogger("torch.fx._symbolic_trace").addFilter(
        lambda record: not record.getMessage().startswith("is_fx_tracing will return true")
    )
