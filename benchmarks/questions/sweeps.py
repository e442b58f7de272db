"""How do times change with the optimizer, the grouping, the batch, pooling, rank, width, cores and shape of a table?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from benchmarks.baselines import DenseEmbeddingBag, DenseTBE, TensorlyTorch, TTRec
from benchmarks.contenders import Contender, FlowTT
from benchmarks.questions.comparison import SHORT
from benchmarks.questions.run import LineUp, Run, check_agreement, key
from benchmarks.workloads import Workload
from flowtt_torchrec.spec import TTSpec

FLOWS = ("prefix", "unique", "direct")
# Factors of the columns for widths of 16 to 128.
Q_OF_DIM = {16: (2, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4), 128: (4, 4, 8)}


def optimizers(run: Run) -> None:
    """SGD in all of them, Adagrad where there is one, and dense gradients without an optimizer."""
    preset, report = run.preset, run.report
    specs = [preset.balanced]
    ours = [FlowTT(specs, optimizer) for optimizer in ("sgd", "adagrad", "rowwise_adagrad", None)]
    cores = ours[0].cores
    others: list[Contender] = [TTRec(cores, "sgd"), TTRec(cores, None)]
    if missing := TensorlyTorch.missing():
        report.note(missing)
    else:
        others += [TensorlyTorch(cores, "sgd")]
    dense: list[Contender] = [
        DenseTBE(specs, "sgd"),
        DenseEmbeddingBag(specs, "sgd"),
        DenseEmbeddingBag(specs, "adagrad"),
    ]
    check_agreement(ours[0], others, Workload(tuple(specs), "scattered_1.2", preset.lookups).batches(1)[0])
    for distribution in SHORT:
        report.progress(f"optimizers: {distribution}")
        lineup = LineUp(run, "optimizers", Workload(tuple(specs), distribution, preset.lookups))
        for contender in (*ours, *others, *dense):
            lineup.add(contender, "step")
        for contender in others[2:]:
            lineup.add(contender, "forward")
        lineup.measure(preset.slow_effort)


def flows(run: Run) -> None:
    """What sharing prefixes saves, and equal rows: the grouping by prefix, by row, and none."""
    preset, report = run.preset, run.report
    for spec, label in ((preset.balanced, ""), (preset.flow_shape, "_flow_shape")):
        ways = {flow: FlowTT([spec], flow=flow, name=f"flowtt{label}_{flow}") for flow in FLOWS}
        for lookups in (preset.batch_sweep[0], preset.lookups):
            for distribution, short in SHORT.items():
                report.progress(f"flows: {distribution}, {lookups:,} lookups, p {spec.p}")
                lineup = LineUp(run, "flows", Workload((spec,), distribution, lookups))
                for contender in ways.values():
                    lineup.add(contender, "forward", "step")
                measured = lineup.measure()
                for flow in FLOWS[1:]:
                    report.figure(
                        f"{flow}_over_prefix{label}_{short}_{lookups}",
                        f"step with flow={flow!r} over flow='prefix'; above 1 where sharing prefixes helps",
                        measured.ratios(key(ways[flow], "step"), key(ways["prefix"], "step")),
                    )


def batch(run: Run) -> None:
    """Lookups a step, against the baselines."""
    for distribution in SHORT:
        for lookups in run.preset.batch_sweep:
            _against_baselines(run, "batch", run.preset.balanced, distribution, lookups, shaped=run.preset.flow_shape)


def pooling(run: Run) -> None:
    """Bags of many lookups."""
    preset = run.preset
    lookups = preset.pooled_lookups // preset.pooling * preset.pooling
    for distribution in SHORT:
        _against_baselines(
            run, "pooling", preset.balanced, distribution, lookups, preset.pooling, shaped=preset.flow_shape
        )


def ranks(run: Run) -> None:
    """TT ranks, all alike."""
    table = run.preset.balanced
    for rank in run.preset.ranks:
        for distribution in SHORT:
            spec = dataclasses.replace(table, ranks=(rank,) * len(table.ranks))
            _against_baselines(run, "ranks", spec, distribution, run.preset.lookups)


def dims(run: Run) -> None:
    """Columns of the table."""
    for dim, q in Q_OF_DIM.items():
        for distribution in SHORT:
            spec = dataclasses.replace(run.preset.balanced, embedding_dim=dim, q=q)
            _against_baselines(run, "dims", spec, distribution, run.preset.lookups)


def cores(run: Run) -> None:
    """Tensor trains of two, three and four cores for the same table and rank."""
    table = run.preset.balanced
    for num_cores in (2, 3, 4):
        spec = TTSpec.suggest(table.num_embeddings, table.embedding_dim, table.ranks[0], num_cores=num_cores)
        for distribution in SHORT:
            _against_baselines(run, "cores", spec, distribution, run.preset.lookups)


def shapes(run: Run) -> None:
    """Shapes of the same table at the same rank, in one measurement."""
    table = run.preset.balanced
    for distribution in SHORT:
        run.report.progress(f"shapes: {distribution}")
        lineup = LineUp(run, "shapes", Workload((table,), distribution, run.preset.lookups))
        for p in run.preset.shapes:
            spec = dataclasses.replace(table, p=p)
            described = Workload((spec,), distribution, run.preset.lookups).describe()
            ours = FlowTT([spec], name=f"flowtt {described['p']}")
            lineup.add(ours, "forward", "step", p=described["p"], parameters=spec.num_parameters)
        lineup.measure()


def _against_baselines(
    run: Run,
    question: str,
    spec: TTSpec,
    distribution: str,
    lookups: int,
    pooling: int = 1,
    *,
    shaped: TTSpec | None = None,
) -> None:
    """Forward and step of FlowTT, of FBGEMM's dense table, and of TT-Rec's algorithm where it fits in memory."""
    preset, report = run.preset, run.report
    workload = Workload((spec,), distribution, lookups, pooling)
    report.progress(f"{question}: {distribution}, {lookups:,} lookups, {workload.describe()['p']}, ranks {spec.ranks}")
    lineup = LineUp(run, question, workload)
    ours = FlowTT([spec])
    lineup.add(ours, "plan", "forward", "step")
    if shaped is not None:
        name = "flowtt_flow_shape"
        described = Workload((shaped,), distribution, lookups).describe()
        lineup.add(FlowTT([shaped], name=name), "forward", "step", p=described["p"], parameters=shaped.num_parameters)
    lineup.add(DenseTBE([spec]), "forward", "step")
    slow = gathered_bytes(spec, lookups) <= preset.ttrec_bytes
    if slow:
        ttrec = TTRec(ours.cores)
        check_agreement(ours, [ttrec], lineup.batches[0])
        lineup.add(ttrec, "forward", "step")
    else:
        report.note(
            f"{question}: TT-Rec's algorithm left out at {lookups:,} lookups and ranks {spec.ranks}: its gathered "
            f"slices take {gathered_bytes(spec, lookups) / 1e9:.1f} GB"
        )
    lineup.measure(preset.slow_effort if slow else preset.effort)


def gathered_bytes(spec: TTSpec, lookups: int) -> int:
    """Bytes of the slices that TT-Rec's algorithm gathers for a batch."""
    slices: Sequence[int] = [size // p for size, p in zip(spec.core_sizes, spec.p)]
    return 4 * lookups * sum(slices)
