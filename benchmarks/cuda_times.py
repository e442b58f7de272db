"""Times of the ops on a GPU, with the ablations of the schedule and of the grouping, as JSON.

    python -m benchmarks.cuda_times --json times.json

One table at a time, ids skewed as in click logs; the median of a few repetitions, by CUDA events. With ``--device cpu``
the CPU ops run, to try the script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from flowtt_torchrec import native
from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.optimizers import OptimizerSpec, init_state
from flowtt_torchrec.reference import Flow
from flowtt_torchrec.spec import TTSpec

SPECS = {
    "rank 16, dim 32": TTSpec(8_000_000, 32, (200, 200, 200), (2, 4, 4), (16, 16)),
    "rank 32, dim 32": TTSpec(8_000_000, 32, (200, 200, 200), (2, 4, 4), (32, 32)),
    "rank 32, dim 64": TTSpec(8_000_000, 64, (200, 200, 200), (4, 4, 4), (32, 32)),
    "rank 64, dim 128": TTSpec(8_000_000, 128, (200, 200, 200), (4, 4, 8), (64, 64)),
    "rank 128, dim 64": TTSpec(8_000_000, 64, (200, 200, 200), (4, 4, 4), (128, 128)),
}
MAPPINGS = {"static, rows": (False, False), "static, work": (True, False), "stealing": (True, True)}


def milliseconds(body: Callable[[], object], device: str, repetitions: int) -> float:
    """Median time of ``body``."""
    times = []
    for repetition in range(repetitions + 2):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            body()
            end.record()
            torch.cuda.synchronize()
            took = begin.elapsed_time(end)
        else:
            start = time.perf_counter()
            body()
            took = 1e3 * (time.perf_counter() - start)
        if repetition >= 2:
            times.append(took)
    return statistics.median(times)


def measure(spec: TTSpec, batch_size: int, per_bag: int, device: str, repetitions: int) -> dict[str, float]:
    """Times of the plan, forward, backward and fused step of one table, and of forward under other choices."""
    layout = TTLayout([spec], ["t"])
    generator = torch.Generator().manual_seed(0)
    count = batch_size * per_bag
    skewed = torch.rand(count, generator=generator, dtype=torch.float64).pow(8) * spec.num_embeddings
    indices = (skewed.long() * 2_654_435_761 % spec.num_embeddings).to(device)
    offsets = torch.arange(0, count + 1, per_bag, device=device)
    weights = torch.randn(layout.num_parameters, generator=generator).mul_(0.1).to(device)
    grad_output = torch.randn(batch_size, layout.total_dim, generator=generator).to(device)
    optimizer = OptimizerSpec("rowwise_adagrad", 0.01)
    momentum = init_state(layout, optimizer.kind, device=device)["momentum1"]
    plan = native.flow_plan(layout, indices, offsets)
    bodies: dict[str, Callable[[], object]] = {
        "plan": lambda: native.flow_plan(layout, indices, offsets),
        "forward": lambda: native.pooled_forward(weights, layout, offsets, plan),
        "backward": lambda: native.pooled_backward(grad_output, weights, layout, offsets, plan),
        "backward and update": lambda: native.pooled_backward_update(
            grad_output, weights, momentum, None, layout, offsets, plan, optimizer
        ),
    }
    for flow in (Flow.UNIQUE, Flow.DIRECT):
        other = native.flow_plan(layout, indices, offsets, flow)
        bodies[f"forward, {flow.name.lower()}"] = lambda other=other: native.pooled_forward(  # type: ignore[misc]
            weights, layout, offsets, other
        )
    times = {name: milliseconds(body, device, repetitions) for name, body in bodies.items()}
    if device == "cuda":
        for name, mapping in MAPPINGS.items():
            torch.ops.flowtt.use_cuda_mapping(*mapping)
            times[f"forward, {name}"] = milliseconds(bodies["forward"], device, repetitions)
            times[f"backward, {name}"] = milliseconds(bodies["backward"], device, repetitions)
        torch.ops.flowtt.use_cuda_mapping(True, True)
        torch.use_deterministic_algorithms(True)
        times["backward, deterministic"] = milliseconds(bodies["backward"], device, repetitions)
        torch.use_deterministic_algorithms(False)
    rows, flows = plan.counts[:2].tolist()
    return {"lookups": count, "rows": rows, "flows": flows, **times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--batch-size", type=int, default=32_768)
    parser.add_argument("--per-bag", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    results = {}
    for shape, spec in SPECS.items():
        results[shape] = measure(spec, options.batch_size, options.per_bag, options.device, options.repetitions)
        print(shape, json.dumps({key: round(value, 4) for key, value in results[shape].items()}), flush=True)
    peak = torch.cuda.max_memory_allocated() if options.device == "cuda" else None
    if options.json is not None:
        header = {"device": name, "torch": torch.__version__, "peak_bytes": peak, "unit": "milliseconds"}
        options.json.write_text(json.dumps({**header, "results": results}, indent=1))


if __name__ == "__main__":
    main()
