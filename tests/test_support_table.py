"""Every claim of the README's table "What is supported" has tests behind it.

A claim is what stands in a cell between semicolons. Whoever changes the table changes `CLAIMS` with it: row, column and
claim as in the README, and the tests, as file::function, that would fail if the claim were not true.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
D = "distributed/"
TWINS = f"{D}test_twin_training.py::test_twin_outputs_on_two_ranks"
ALONE = f"{D}test_twin_matrix.py::test_each_sharding_type_alone"
MIXED = f"{D}test_twin_matrix.py::test_all_sharding_types_in_one_collection"

DENSE, TT = "dense tables beside TT tables", "TT tables"
CLAIMS: dict[tuple[str, str], dict[str, list[str]]] = {
    ("sharding", DENSE): {"all of TorchRec's": [TWINS, MIXED]},
    ("sharding", TT): {
        "table-wise, column-wise, table-column-wise, row-wise, table-row-wise, data-parallel": [
            ALONE,
            MIXED,
            f"{D}test_shared_tables.py::test_training_on_four_ranks_of_two_hosts",
        ],
        "grid and 2D are refused by name": [
            f"{D}test_sharder_errors.py::test_grid_sharding",
            f"{D}test_sharder_errors.py::test_other_environments_are_refused",
        ],
    },
    ("fused optimizers", DENSE): {"all of TorchRec's": [MIXED]},
    ("fused optimizers", TT): {
        "SGD, Adagrad, row-wise Adagrad, with weight decay": [
            f"{D}test_twin_training.py::test_training_of_tt_tables_alone_equals_plain_autograd",
            f"{D}test_shared_tables.py::test_weight_decay_equals_plain_autograd",
            ALONE,
        ],
        "any torch optimizer for data-parallel tables. Adam is not fused yet": [
            f"{D}test_optimizers_in_backward.py::test_unsupported_optimizers_are_fine_for_data_parallel_tables"
        ],
    },
    ("pooling", DENSE): {"sum, mean": [TWINS]},
    ("pooling", TT): {
        "sum, mean": [ALONE, MIXED, f"{D}test_shared_tables.py::test_sums_beside_means"],
        "per-sample weights and their gradient": [
            f"{D}test_twin_training.py::test_position_weights_get_their_gradient",
            f"{D}test_shared_tables.py::test_position_weights_get_their_gradient",
        ],
        "a batch size per feature (VBE)": [f"{D}test_variable_batch.py::test_training_equals_plain_autograd"],
    },
    ("ids", DENSE): {"int32, int64": [f"{D}test_twin_training.py::test_empty_and_uneven_batches"]},
    ("ids", TT): {
        "int32, int64": [
            "test_ops.py::test_integer_types",
            f"{D}test_twin_training.py::test_empty_and_uneven_batches",
            f"{D}test_shared_tables.py::test_empty_batches_and_int32",
        ],
        "out of range: fatal, warning or ignore, as FBGEMM": [
            "test_ops.py::test_indices_out_of_range",
            f"{D}test_sharder_errors.py::test_bounds_checks",
            f"{D}test_shared_tables.py::test_rows_out_of_range_are_named_by_their_number_in_the_table",
        ],
    },
    ("dtypes", DENSE): {"all of TorchRec's": [TWINS]},
    ("dtypes", TT): {
        "float32 (the ops also float64)": ["test_ops.py::test_many_tables_in_one_call", TWINS],
        "float16 and bfloat16 are refused by name": [f"{D}test_sharder_errors.py::test_configs"],
    },
    ("checkpoints", DENSE): {
        "TorchRec's": [f"{D}test_checkpoints.py::test_a_checkpoint_continues_with_tables_on_other_ranks"]
    },
    ("checkpoints", TT): {
        "`torch.distributed.checkpoint`": [
            f"{D}test_checkpoints.py::test_a_checkpoint_continues_with_tables_on_other_ranks"
        ],
        "`distributed.checkpoint.load` also across placements and 1 or 2 ranks, optimizer state included": [
            f"{D}test_reshard_checkpoints.py::test_every_plan_continues_every_other"
        ],
    },
    ("planner", DENSE): {"TorchRec's": [f"{D}test_planner.py::test_dense_tables_keep_their_constraints"]},
    ("planner", TT): {
        "true storage and cost of each placement": [
            f"{D}test_storage.py::test_estimates_are_what_one_rank_takes",
            f"{D}test_storage.py::test_estimates_are_what_two_ranks_take",
            f"{D}test_planner.py::test_cost_follows_flops_bytes_and_ranks",
        ],
        "its own choice of what to compress (`AutoCompression`)": [
            f"{D}test_auto_compression.py::test_tables_are_compressed_only_where_memory_forces_it"
        ],
        "cost constants are not calibrated yet": [],  # says what is missing
    },
    ("pipelines", DENSE): {
        "TorchRec's": [f"{D}test_pipelines.py::test_what_fails_on_the_cpu_fails_with_dense_tables_too"]
    },
    ("pipelines", TT): {
        "`TrainPipelineBase`, `TrainPipelineSparseDist`": [
            f"{D}test_pipelines.py::test_a_pipeline_gives_the_plain_loops_outputs"
        ],
        "two forwards before a backward of the same tables are an error": [
            f"{D}test_pipelines.py::test_where_semi_synchronous_training_is_an_error",
            "test_optimizers.py::test_fused_lookup_refuses_a_gradient_at_changed_weights",
        ],
    },
    ("live resharding, quantised inference", DENSE): {
        "TorchRec's": [f"{D}test_sharder_errors.py::test_live_resharding_is_refused"]
    },
    ("live resharding, quantised inference", TT): {
        "not supported: go through a checkpoint, or back to a dense table with `cores.to_dense`": [
            f"{D}test_sharder_errors.py::test_live_resharding_is_refused",
            "test_cores.py::test_rows_and_dense_follow_the_definition",
        ]
    },
    ("shapes", TT): {
        "2 to 4 cores, any factors": ["test_native.py::test_native_equals_reference_for_any_shapes_and_batch"],
        '`TTSpec.suggest(objective="balanced" \\| "memory" \\| "flow")`': [
            "test_shapes.py::test_found_shapes_are_valid_and_keep_to_the_balanced_budget",
            "test_shapes.py::test_each_objective_is_better_at_what_it_is_for",
        ],
    },
}


def claims_of_readme() -> Iterator[tuple[str, str, str]]:
    """Row, column and claim, in the table's order."""
    section = (ROOT / "README.md").read_text().partition("## What is supported\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    header, *rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    for row, *cells in rows[1:]:  # a line of dashes comes first
        for column, cell in zip(header[1:], cells):
            yield from ((row, column, claim.strip()) for claim in cell.split(";") if claim.strip())


def test_every_claim_has_an_entry_and_every_entry_a_claim() -> None:
    claimed = set(claims_of_readme())
    assert len(claimed) > 20
    known = {(*cell, claim) for cell, claims in CLAIMS.items() for claim in claims}
    assert claimed - known == set(), "the README's table claims what CLAIMS has no tests for"
    assert known - claimed == set(), "CLAIMS has what the README's table doesn't say"


@pytest.mark.parametrize(
    "name", sorted({name for of_cell in CLAIMS.values() for of in of_cell.values() for name in of})
)
def test_the_tests_are_there(name: str) -> None:
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert function.startswith("test_")
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (
        f"{file} has no {function}"
    )
