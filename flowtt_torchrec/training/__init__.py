"""The training job behind ``train_dlrm.py``: settings, model, loop, checkpoints, report."""
