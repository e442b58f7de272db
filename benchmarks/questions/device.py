"""What does each part cost on a GPU, what does each idea gain, and how fast are others? Runs on a CPU to be tried."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.baselines import DenseEmbeddingBag, TTRec
from benchmarks.contenders import Contender, FlowTT
from benchmarks.harness import Action
from benchmarks.questions.run import LineUp, Run, check_agreement, key
from benchmarks.questions.sweeps import gathered_bytes
from benchmarks.workloads import Batch, Workload
from flowtt_torchrec import ablation, ops
from flowtt_torchrec.compiled import CompiledOps
from flowtt_torchrec.spec import TTSpec

# What `ablation` turns off, by what is left.
MAPPINGS: dict[str, dict[str, Any]] = {
    "static mapping of rows": {"by_work": False, "steal": False, "handover": False},
    "static mapping": {"steal": False, "handover": False},
    "stealing": {"handover": False},
    "stealing and handover": {},
}


def device(run: Run) -> None:
    """The parts of a step, the ablations, the alternatives and the peak memory, a table at a time."""
    for spec in run.preset.on_device:
        _table(run, spec)


def _table(run: Run, spec: TTSpec) -> None:
    preset, report = run.preset, run.report
    workload = Workload((spec,), "skewed", preset.pooled_lookups, preset.pooling)
    report.progress(f"device: dim {spec.embedding_dim}, ranks {spec.ranks}, p {spec.p}")
    batches = [batch.to(run.device) for batch in skewed_batches(workload, preset.batches)]
    ours = FlowTT([spec], device=run.device)
    lineup = LineUp(run, "device", workload, batches)
    lineup.add(ours, "plan", "forward", "forward_planned", "backward", "step")
    for flow in ("unique", "direct"):
        lineup.add(FlowTT([spec], flow=flow, name=f"flowtt_{flow}", device=run.device), "forward", "step")
    _add_ablations(run, lineup, ours)
    others: list[Contender] = []
    free = torch.cuda.mem_get_info()[0] // 8 if run.device == "cuda" else preset.ttrec_bytes
    if gathered_bytes(spec, workload.lookups) <= free:
        others = [TTRec(ours.cores), TTRec(ours.cores, unique=True)]
        check_agreement(ours, others, batches[0])
    else:
        report.note(f"device: the TT-Rec baseline is left out at ranks {spec.ranks}, its slices take too much memory")
    others.append(DenseEmbeddingBag([spec], device=run.device))
    for other in others:
        lineup.add(other, "forward", "step")
    measured = lineup.measure()
    name = f"dim{spec.embedding_dim}_rank{max(spec.ranks)}_p{spec.p[-1]}"
    for operation in ("forward", "step"):
        for other in others:
            report.figure(
                f"{operation}_vs_{other.name}_{name}",
                f"{other.name}'s time over ours, {operation}; more is better",
                measured.ratios(key(other, operation), key(ours, operation)),
            )
    if run.device == "cuda":
        for contender in (ours, *others):
            columns = {"contender": contender.name, "operation": "step", "optimizer": contender.optimizer or "none"}
            bytes_ = [_peak_bytes(contender, batches[0])]
            report.add(bytes_, "bytes", question="device", **{**workload.describe(), **columns})
        report.show(report.rows[-1 - len(others) :])


def _add_ablations(run: Run, lineup: LineUp, ours: FlowTT) -> None:
    """The schedule's parts, and deterministic gradients; the CPU ops have neither."""
    backend = ops.BACKENDS[ops.backend_info().name]
    if run.device == "cpu" and not isinstance(backend, CompiledOps):  # one that is not a module is the tests' emulator
        return

    def configured(action: Action, mapping: dict[str, Any], deterministic: bool) -> Action:
        def run_so(argument: Any) -> None:
            torch.use_deterministic_algorithms(deterministic)
            try:
                with ablation(**mapping):
                    action.run(argument)
            finally:
                torch.use_deterministic_algorithms(False)

        return Action(run_so, action.setup)

    variants = [(name, mapping, False) for name, mapping in MAPPINGS.items()]
    for name, mapping, deterministic in (*variants, ("deterministic", {}, True)):
        for operation in ("forward_planned", "backward"):
            action = configured(ours.action(operation, lineup.batches), mapping, deterministic)
            columns = {"contender": f"flowtt, {name}", "operation": operation, "optimizer": ours.optimizer}
            lineup.add_action(f"{name} {operation}", action, **columns)


def skewed_batches(workload: Workload, count: int) -> list[Batch]:
    """Batches of one table, skewed as click logs are, hot ids scattered over the table; needs torch alone."""
    (spec,) = workload.specs
    batches = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        drawn = torch.rand(workload.lookups, generator=generator, dtype=torch.float64).pow(8) * spec.num_embeddings
        batches.append(
            Batch(
                drawn.long() * 2_654_435_761 % spec.num_embeddings,
                torch.arange(0, workload.lookups + 1, workload.pooling),
                torch.randn(workload.batch_size, spec.embedding_dim, generator=generator) * 1e-3,
            )
        )
    return batches


def _peak_bytes(contender: Contender, batch: Batch) -> int:
    """The most that a step allocates on the GPU beyond what was there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    contender.step(batch)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
