"""How large a run of the lookup benchmark is."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.harness import Effort
from benchmarks.workloads import BALANCED, FLOW_SHAPE, mixed_tables
from flowtt_torchrec.spec import TTSpec


@dataclass(frozen=True)
class Preset:
    """Sizes, and how much time they may take.

    Attributes:
        name: its name.
        questions: what a run answers unless told otherwise; names of `benchmarks.questions.QUESTIONS`.
        effort: of a measurement.
        slow_effort: of a measurement with the slow baselines in it.
        batches: different batches that each contender goes through in turn.
        balanced: the table of the comparison, shaped as peers shape it.
        flow_shape: the same table at no more parameters, with a large last factor.
        lookups: lookups a step.
        batch_sweep: lookups a step, where their number is the question.
        pooled_lookups: lookups a step with ``pooling`` lookups a bag.
        pooling: lookups a bag, where bags are pooled.
        ranks: TT ranks, where they are the question.
        shapes: factors of the rows, where they are the question: as peers choose them, then smaller middle factors,
            then larger last ones.
        shaped_tables: rows, columns and rank of tables whose flow shapes are compared with balanced ones.
        tables: tables of a group; the last one is the largest.
        lookups_a_table: lookups of each table of a group.
        mixed: tables of a group of very different sizes.
        mixed_lookups: lookups of each of them.
        inference_rows: rows of the tables that are looked up with frozen cores.
        gemm_size: rows and columns of the matrix product that counts as the machine's rate.
        ttrec_bytes: the TT-Rec baseline is left out where its gathered slices take more.
        on_device: tables of the question that runs on GPUs too.
        all_baselines: whether the comparison has the baselines that no figure needs.
    """

    name: str
    questions: tuple[str, ...]
    effort: Effort
    slow_effort: Effort
    batches: int = 4
    balanced: TTSpec = BALANCED
    flow_shape: TTSpec = FLOW_SHAPE
    lookups: int = 32_768
    batch_sweep: tuple[int, ...] = (4096, 16_384, 32_768, 131_072)
    pooled_lookups: int = 163_840
    pooling: int = 20
    ranks: tuple[int, ...] = (8, 16, 32, 64, 128)
    shapes: tuple[tuple[int, ...], ...] = (
        (200, 220, 250),
        (1000, 40, 250),
        (500, 40, 500),
        (100, 100, 1000),
        (250, 40, 1000),
        (400, 25, 1000),
        (50, 40, 5000),
    )
    shaped_tables: tuple[tuple[int, int, int], ...] = (
        (1_000_000, 32, 16),
        (1_000_000, 64, 32),
        (10_000_000, 64, 32),
        (10_000_000, 128, 64),
        (40_000_000, 128, 32),
        (100_000_000, 64, 32),
        (1_000_000_000, 64, 32),
        (4_000_000_000, 64, 32),
    )
    tables: tuple[int, ...] = (788,)
    lookups_a_table: tuple[int, ...] = (32,)
    mixed: tuple[TTSpec, ...] = mixed_tables(26, 10_000_000)
    mixed_lookups: int = 4096
    inference_rows: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    gemm_size: int = 2048
    ttrec_bytes: int = 2_500_000_000
    on_device: tuple[TTSpec, ...] = (
        TTSpec(8_000_000, 32, (200, 200, 200), (2, 4, 4), (16, 16)),
        BALANCED,
        FLOW_SHAPE,
        TTSpec(8_000_000, 128, (200, 200, 200), (4, 4, 8), (64, 64)),
        TTSpec(8_000_000, 64, (200, 200, 200), (4, 4, 4), (128, 128)),
    )
    all_baselines: bool = False


_FIGURES = ("comparison", "growth", "tables", "distributions", "memory")
_SMALL = TTSpec(8000, 16, p=(20, 20, 20), q=(2, 2, 4), ranks=(8, 8))

PRESETS = {
    # Ends within 90 s on two cores and gives every figure.
    "quick": Preset(
        "quick",
        _FIGURES,
        Effort(rounds=5, seconds=4, visit_seconds=0.03),
        Effort(rounds=5, seconds=9, visit_seconds=0.03),
    ),
    # Every sweep; docs and plots are made from it. About 20 minutes.
    "full": Preset(
        "full",
        (
            *_FIGURES,
            "optimizers",
            "flows",
            "mixed",
            "balance",
            "inference",
            "batch",
            "pooling",
            "ranks",
            "dims",
            "cores",
            "shapes",
            "flow_shapes",
        ),
        Effort(rounds=9, seconds=30),
        Effort(rounds=5, seconds=30),
        pooled_lookups=655_360,
        tables=(1, 8, 64, 240, 788),
        lookups_a_table=(32, 256, 2048),
        all_baselines=True,
    ),
    # Tiny tables: shows that the benchmark itself works. Its numbers mean nothing.
    "smoke": Preset(
        "smoke",
        _FIGURES,
        Effort(rounds=2, min_rounds=2, seconds=1, visit_seconds=0.0),
        Effort(rounds=2, min_rounds=2, seconds=1, visit_seconds=0.0),
        batches=2,
        balanced=_SMALL,
        flow_shape=TTSpec(8000, 16, p=(10, 8, 100), q=(2, 2, 4), ranks=(8, 8)),
        lookups=256,
        batch_sweep=(64, 256),
        pooled_lookups=320,
        ranks=(4, 8),
        shapes=((20, 20, 20), (10, 8, 100)),
        shaped_tables=((8000, 16, 8),),
        tables=(1, 5),
        lookups_a_table=(4,),
        mixed=mixed_tables(3, 3000),
        mixed_lookups=16,
        inference_rows=(100,),
        gemm_size=64,
        on_device=(_SMALL,),
    ),
}
