"""Peak memory of training steps, measured in a process of its own.

``measure_peak`` runs this file as ``python -m benchmarks.memory REQUEST``, which prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.baselines import DenseEmbeddingBag, DenseTBE, TTRec
from benchmarks.contenders import Contender, FlowTT
from benchmarks.process_memory import MALLOC, in_use, peak, reset_peak
from benchmarks.workloads import Workload
from flowtt_torchrec.spec import TTSpec

CONTENDERS: dict[str, Callable[[TTSpec], Contender]] = {
    "flowtt": lambda spec: FlowTT([spec]),
    "ttrec": lambda spec: TTRec(FlowTT([spec]).cores),
    "ttrec_unique": lambda spec: TTRec(FlowTT([spec]).cores, unique=True),
    "tbe": lambda spec: DenseTBE([spec]),
    "nn_embedding_bag": lambda spec: DenseEmbeddingBag([spec]),
}
STEPS = 3


@dataclass(frozen=True)
class Peak:
    """Memory of one contender on one workload, in bytes.

    Attributes:
        model: weights and optimizer state.
        step: what three steps needed at most, above the memory that was in use before them (weights, state, batches and
            the gradient of the output).
        plan: the flow plan's tensors, 0 for others than FlowTT.
        rows: distinct rows of the batch, as rows of float32.
        method: which of the kernel's counts was read.
    """

    model: int
    step: int
    plan: int
    rows: int
    method: str


def measure_peak(contender: str, workload: Workload, threads: int) -> Peak:
    """Starts a process that measures ``contender``, a name of `CONTENDERS`, on a workload of one table."""
    (spec,) = workload.specs
    request = {
        "contender": contender,
        "spec": spec.to_dict(),
        "distribution": workload.distribution,
        "lookups": workload.lookups,
        "pooling": workload.pooling,
        "threads": threads,
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", json.dumps(request)],
        cwd=Path(__file__).parent.parent,
        env=os.environ | MALLOC,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Peak(**json.loads(done.stdout.splitlines()[-1]))


def modelled_peak(workload: Workload, peak: Peak, threads: int) -> int:
    """Bytes that a step should need at most, weights and state included.

    Cores and state, the plan, the pooled output, the distinct rows (their gradients in backward), and in every thread
    gradients of the first and the last core: nothing as large as lookups x dim x rank.
    """
    (spec,) = workload.specs
    output = 4 * workload.batch_size * spec.embedding_dim
    outer_cores = 4 * (spec.core_sizes[0] + spec.core_sizes[-1])
    return peak.model + peak.plan + output + peak.rows + threads * outer_cores


def _measure(request: dict[str, Any]) -> Peak:
    torch.set_num_threads(request["threads"])
    spec = TTSpec.from_dict(request["spec"])
    contender = CONTENDERS[request["contender"]](spec)
    workload = Workload((spec,), request["distribution"], request["lookups"], request["pooling"])
    batches = workload.batches(STEPS)
    # The first use of threads, autograd and libraries takes memory that has nothing to do with the batch.
    contender.step(Workload((spec,), "uniform", 2).batches(1)[0])

    resettable = reset_peak()
    before = in_use() if resettable else peak(resettable)
    for batch in batches:
        contender.step(batch)
    step = max(0, peak(resettable) - before)

    plan = sum(t.numel() * t.element_size() for t in contender.plan(batches[0])) if isinstance(contender, FlowTT) else 0
    rows = 4 * spec.embedding_dim * max(batch.indices.unique().numel() for batch in batches)
    return Peak(contender.num_bytes, step, plan, rows, "VmHWM" if resettable else "ru_maxrss")


if __name__ == "__main__":
    print(json.dumps(asdict(_measure(json.loads(sys.argv[1])))))
