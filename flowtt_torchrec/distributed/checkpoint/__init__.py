"""Checkpoints of TT tables: loading them under another plan, and tables of checkpoints to tensor trains and back."""

from flowtt_torchrec.distributed.checkpoint.conversion import (
    SavedDenseTable,
    compress_checkpoint,
    compress_state_dict,
    export_checkpoint,
    saved_dense_tables,
    saved_specs,
)
from flowtt_torchrec.distributed.checkpoint.loader import load

__all__ = [
    "SavedDenseTable",
    "compress_checkpoint",
    "compress_state_dict",
    "export_checkpoint",
    "load",
    "saved_dense_tables",
    "saved_specs",
]
