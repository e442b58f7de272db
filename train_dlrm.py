"""Trains TorchRec's DLRM on tensor-train and dense tables. ``python train_dlrm.py --help`` lists the options.

python train_dlrm.py --config configs/quickstart.yaml
torchrun --nproc_per_node 2 train_dlrm.py --config configs/quickstart.yaml --epochs 2
torchx run -s local_cwd dist.ddp -j 1x2 --script train_dlrm.py -- --config configs/quickstart.yaml
"""

import sys

from flowtt_torchrec.training.cli import main

if __name__ == "__main__":
    sys.exit(main())
