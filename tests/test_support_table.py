"""Every claim of the table of docs/support.md has tests behind it.

A claim is what stands in a cell between semicolons. Whoever changes the table changes `CLAIMS` with it: row, column and
claim as in that page, and the tests, as file::function, that would fail if the claim were not true.
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
        "SGD, Adagrad, row-wise Adagrad, Adam": [
            ALONE,
            MIXED,
            f"{D}test_optimizers_in_backward.py::test_every_way_to_ask_for_adam",
        ],
        "weight decay": [f"{D}test_shared_tables.py::test_weight_decay_equals_plain_autograd"],
        "schedules and warm-up": [
            f"{D}test_optimizers_in_backward.py::test_learning_rate_schedules",
            f"{D}test_optimizers_in_backward.py::test_warmup",
        ],
        "any torch optimizer for data-parallel tables (TorchRec's `RowWiseAdagrad` is refused there by name)": [
            f"{D}test_optimizers_in_backward.py::test_unsupported_optimizers_are_fine_for_data_parallel_tables",
            f"{D}test_sharder_errors.py::test_row_wise_adagrad_as_dense_optimizer",
        ],
        "FBGEMM's gradient clipping is refused by name": [f"{D}test_optimizers_in_backward.py::test_clipping"],
    },
    ("pooling", DENSE): {"sum, mean": [TWINS]},
    ("pooling", TT): {
        "sum, mean": [ALONE, MIXED, f"{D}test_shared_tables.py::test_sums_beside_means"],
        "per-sample weights and their gradient": [
            f"{D}test_twin_training.py::test_position_weights_get_their_gradient",
            f"{D}test_shared_tables.py::test_position_weights_get_their_gradient",
        ],
        "feature-processed collections": [f"{D}test_fp_embeddingbag.py::test_planned_and_trained"],
        "a batch size per feature (VBE)": [ALONE, f"{D}test_variable_batch.py::test_training_equals_plain_autograd"],
    },
    ("ids", DENSE): {"int32, int64": [f"{D}test_twin_training.py::test_empty_and_uneven_batches"]},
    ("ids", TT): {
        "int32, int64": [
            "test_ops.py::test_integer_types",
            f"{D}test_twin_training.py::test_empty_and_uneven_batches",
            f"{D}test_shared_tables.py::test_empty_batches_and_int32",
        ],
        "out of range: fatal (`IndexError`, on a GPU from a later op), warning or ignore (row 0), as FBGEMM": [
            "test_batch_errors.py::test_indices_out_of_range",
            f"{D}test_sharder_errors.py::test_bounds_checks",
        ],
        "under every sharding type the error names the table and the id as it was given, on the ranks that serve it": [
            f"{D}test_shared_tables.py::test_rows_out_of_range_are_named_by_their_number_in_the_table",
            f"{D}test_bounds_checks.py::test_fatal_names_the_table_and_the_id_as_it_was_given",
        ],
    },
    ("dtypes", DENSE): {"all of TorchRec's": [TWINS]},
    ("dtypes", TT): {
        "float32, bfloat16 and float16 cores (the ops also float64)": [
            "test_ops.py::test_many_tables_in_one_call",
            "test_reduced_precision.py::test_kernels_are_the_definition",
            f"{D}test_data_types.py::test_training_stays_near_float32",
        ],
        "stochastic rounding in fused optimizers": [
            "test_reduced_precision.py::test_rounding_has_the_bits_of_the_definition",
            "test_reduced_precision.py::test_small_steps_add_up_only_with_stochastic_rounding",
        ],
        "`output_dtype` float32, float16 or bfloat16": [f"{D}test_data_types.py::test_output_dtype"],
    },
    ("quantised communication", DENSE): {"TorchRec's": [f"{D}test_data_types.py::test_quantised_communication"]},
    ("quantised communication", TT): {
        "FP16 and BF16 codecs": [f"{D}test_data_types.py::test_quantised_communication"],
        "INT8 and MX4 as for dense tables: TorchRec has no INT8 for row-wise ones, and no FP8 on a CPU": [
            f"{D}test_data_types.py::test_codecs_of_8_bits_and_less_do_what_they_do_with_dense_tables"
        ],
    },
    ("checkpoints", DENSE): {
        "TorchRec's": [f"{D}test_checkpoints.py::test_a_checkpoint_continues_with_tables_on_other_ranks"]
    },
    ("checkpoints", TT): {
        "`torch.distributed.checkpoint`": [
            f"{D}test_checkpoints.py::test_a_checkpoint_continues_with_tables_on_other_ranks"
        ],
        "`distributed.checkpoint.load` between any two plans on 1, 2 or 4 ranks, optimizer state included": [
            f"{D}test_reshard_checkpoints.py::test_every_plan_continues_every_other",
            f"{D}test_adam_checkpoints.py::test_adams_state_goes_from_plan_to_plan",
        ],
        "full state dicts out and in": [f"{D}test_reshard_checkpoints.py::test_full_state_dicts_out_and_in"],
        "tables that are new or renamed (`allow_missing`) or have more rows (`TTSpec.with_rows`) start warm": [
            f"{D}test_warm_starts.py::test_tables_that_are_added_or_renamed_train",
            f"{D}test_warm_starts.py::test_a_table_that_has_grown_keeps_its_rows",
        ],
        "another spec is refused": [
            f"{D}test_checkpoints.py::test_a_table_of_other_rows_is_not_taken",
            f"{D}test_checkpoints.py::test_a_checkpoint_of_another_spec_names_the_core",
        ],
        "dense checkpoints to tensor trains and back, in blocks of rows": [
            f"{D}test_conversion.py::test_conversion_of_directories_and_files_there_and_back",
            f"{D}test_conversion.py::test_the_dense_table_is_never_whole_in_memory",
        ],
        "reading one runs no code that it holds": [
            f"{D}test_safe_reading.py::test_metadata",
            f"{D}test_safe_reading.py::test_resuming",
            f"{D}test_safe_reading.py::test_commands",
        ],
    },
    ("parameters", DENSE): {"TorchRec's": [f"{D}test_parameters.py::test_names_are_one_set"]},
    ("parameters", TT): {
        "each core is one, `embedding_bags.<table>.tt_core<k>`, with the buffer `tt_rows`, on the ranks that hold it": [
            f"{D}test_parameters.py::test_names_are_one_set"
        ],
        "names of parameters and buffers are those of the state dict": [
            f"{D}test_parameters.py::test_names_are_one_set",
            "test_flat_cores.py::test_names_in_the_state_dict_are_those_of_parameters_and_buffers",
        ],
        "freezing": [
            f"{D}test_parameters.py::test_frozen_cores_are_not_stepped",
            "test_flat_cores.py::test_frozen_cores_are_not_stepped",
        ],
        "learning rates in `_get_in_backward_optimizers`": [
            f"{D}test_parameters.py::test_the_rates_of_optimizers_in_backward_are_theirs"
        ],
        "`get_model_state_dict`": [f"{D}test_parameters.py::test_names_are_one_set"],
        "DDP and FSDP2 of the plain modules": [f"{D}test_parameters.py::test_ddp_and_fsdp_around_the_plain_modules"],
        "`functional_call` and `torch.func.grad`": [
            "test_flat_cores.py::test_functional_call_reads_and_differentiates_what_it_is_given",
            "test_first_order.py::test_func_grad_is_the_gradient",
        ],
        "second and forward-mode derivatives are a `NotImplementedError`": [
            "test_first_order.py::test_a_gradient_penalty_is_an_error_or_right",
            "test_first_order.py::test_forward_mode_is_an_error_or_right",
        ],
        "`torchrec.distributed.shard.shard` refuses the new names: call the sharder's `shard`": [
            f"{D}test_parameters.py::test_a_collection_is_sharded_by_its_sharder"
        ],
    },
    ("planner", DENSE): {"TorchRec's": [f"{D}test_planner.py::test_dense_tables_keep_their_constraints"]},
    ("planner", TT): {
        "storage within 5 % of what CPU tensors take": [
            f"{D}test_storage.py::test_estimates_are_what_one_rank_takes",
            f"{D}test_storage.py::test_estimates_are_what_two_ranks_take",
            f"{D}test_auto_compression.py::test_every_plan_trains_in_the_bytes_it_counts",
        ],
        "costs from data sheets, or measured by `python -m flowtt_torchrec calibrate`": [
            f"{D}test_planner.py::test_cost_follows_flops_bytes_and_ranks",
            "test_calibration.py::test_shipped_constants_say_that_they_are_not_measured",
            "test_calibration.py::test_the_command_writes_what_it_measured",
        ],
        "its own choice of what to compress (`AutoCompression`)": [
            f"{D}test_auto_compression.py::test_tables_are_compressed_only_where_memory_forces_it"
        ],
        "plans saved and loaded as JSON": [
            f"{D}test_plan_file.py::test_a_plan_comes_back_as_it_was",
            f"{D}test_plan_file.py::test_a_loaded_plan_trains_alike",
        ],
    },
    ("pipelines", DENSE): {
        "TorchRec's": [f"{D}test_pipelines.py::test_what_fails_on_the_cpu_fails_with_dense_tables_too"]
    },
    ("pipelines", TT): {
        "`TrainPipelineBase`, `TrainPipelineSparseDist`, `TrainPipelineSparseDistLite`, `EvalPipelineSparseDist`": [
            f"{D}test_pipelines.py::test_a_pipeline_gives_the_plain_loops_outputs",
            f"{D}test_pipelines.py::test_the_evaluation_pipeline",
        ],
        "`TrainPipelineFusedSparseDist`, `PrefetchTrainPipelineSparseDist`, `StagedTrainPipeline` "
        "(which need CUDA, tested with stand-in streams)": [
            f"{D}test_pipelines.py::test_a_pipeline_gives_the_plain_loops_outputs",
            f"{D}test_pipelines.py::test_what_fails_on_the_cpu_fails_with_dense_tables_too",
        ],
        "`TrainPipelineSemiSync` with `keep_forward_weights=True`, "
        "else two forwards before a backward of the same tables are an error": [
            f"{D}test_pipelines.py::test_semi_synchronous_training_takes_gradients_at_the_weights_of_their_forward",
            f"{D}test_pipelines.py::test_where_semi_synchronous_training_is_an_error",
            "test_optimizers.py::test_fused_lookup_refuses_a_gradient_at_changed_weights",
        ],
    },
    ("compile and export", DENSE): {
        "TorchRec's": [f"{D}test_pipelines.py::test_fx_traces_a_model_with_a_sharded_collection"]
    },
    ("compile and export", TT): {
        "`torch.compile(fullgraph=True)` of the modules for any batch size and learning rate, "
        "fused step included (torch 2.12 or later)": [
            "test_graphs.py::test_a_graph_serves_all_batches_and_learning_rates",
            "test_graphs.py::test_inductor_compiles_forward_backward_and_step",
        ],
        "`torch.export`": [
            "test_graphs.py::test_export_for_any_batch",
            "test_graphs.py::test_export_of_one_table",
        ],
        "fx, as leaves": [
            "test_graphs.py::test_fx_traces_a_model_with_them_as_leaves",
            f"{D}test_pipelines.py::test_fx_traces_a_model_with_a_sharded_collection",
        ],
    },
    ("inference", DENSE): {"TorchRec's": [f"{D}test_pipelines.py::test_the_evaluation_pipeline"]},
    ("inference", TT): {
        "`materialise_rows(max_bytes)` keeps rows of small or much used tables while weights do not change": [
            "test_materialised.py::test_same_output_whatever_is_kept",
            "test_materialised.py::test_auto_stays_within_its_memory",
            "test_materialised.py::test_never_stale_after_a_fused_step",
        ],
    },
    ("scratch memory", DENSE): {"TorchRec's": []},
    ("scratch memory", TT): {
        "CPU ops keep what their last calls needed, and give back what these did not": [
            "test_memory.py::test_resident_memory_stays_flat_over_batches_of_different_sizes",
            "test_memory.py::test_memory_of_a_large_batch_is_kept_for_the_next_and_given_back_over_small_ones",
        ],
        "`flowtt_torchrec.release_memory()` gives all back": ["test_memory.py::test_memory_is_released_on_demand"],
    },
    ("live resharding, quantised inference", DENSE): {
        "TorchRec's": [f"{D}test_sharder_errors.py::test_live_resharding_is_refused"]
    },
    ("live resharding, quantised inference", TT): {
        "not supported: go through a checkpoint, or to dense tables with `python -m flowtt_torchrec export`": [
            f"{D}test_sharder_errors.py::test_live_resharding_is_refused",
            f"{D}test_conversion.py::test_a_trained_model_as_a_stock_one",
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


def claims_of_page() -> Iterator[tuple[str, str, str]]:
    """Row, column and claim, in the table's order."""
    lines = [line for line in (ROOT / "docs" / "support.md").read_text().splitlines() if line.startswith("|")]
    header, *rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    for row, *cells in rows[1:]:  # a line of dashes comes first
        for column, cell in zip(header[1:], cells):
            yield from ((row, column, claim.strip()) for claim in cell.split(";") if claim.strip())


def test_every_claim_has_an_entry_and_every_entry_a_claim() -> None:
    claimed = set(claims_of_page())
    assert len(claimed) > 20
    known = {(*cell, claim) for cell, claims in CLAIMS.items() for claim in claims}
    assert claimed - known == set(), "docs/support.md claims what CLAIMS has no tests for"
    assert known - claimed == set(), "CLAIMS has what docs/support.md doesn't say"


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
