"""Trains TorchRec's DLRM on tensor-train and dense tables. ``python train_dlrm.py --help`` lists the options.

python train_dlrm.py --config configs/quickstart.yaml
torchrun --nproc_per_node 2 train_dlrm.py --config configs/quickstart.yaml --epochs 2
torchx run -s local_cwd dist.ddp -j 1x2 --script train_dlrm.py -- --config configs/quickstart.yaml
"""

import os
import sys

# OpenMP reads it once, when torch loads it. Its threads would wait by spinning and take the cores from other threads of
# the process (autograd has a pool of its own): ten times slower on a CPU that has nothing to spare.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from flowtt_torchrec.training.cli import main

if __name__ == "__main__":
    sys.exit(main())
