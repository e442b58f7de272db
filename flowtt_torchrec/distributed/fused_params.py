"""What a group of TT tables takes from TorchRec's ``fused_params``: optimizer, bounds checks, type of the output.

Nothing else is taken silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode as FbgemmBoundsCheckMode
from torchrec.modules.embedding_configs import DataType

from flowtt_torchrec.optimizers import ADAGRAD, ADAM, ROWWISE_ADAGRAD, SGD, OptimizerSpec
from flowtt_torchrec.plan import BoundsCheckMode

TT_TABLES = "tt_tables"  # the TTTables of the collection, put there by TTParameterSharding

_KINDS = {
    EmbOptimType.SGD: SGD,
    EmbOptimType.EXACT_SGD: SGD,
    EmbOptimType.EXACT_ADAGRAD: ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: ROWWISE_ADAGRAD,
    EmbOptimType.ADAM: ADAM,
}
OPTIMIZERS = "SGD, Adagrad, RowWiseAdagrad or Adam"  # of those that TorchRec fuses, in messages
_BOUNDS_CHECK_MODES = {
    FbgemmBoundsCheckMode.FATAL: BoundsCheckMode.FATAL,
    FbgemmBoundsCheckMode.V2_FATAL: BoundsCheckMode.FATAL,
    FbgemmBoundsCheckMode.WARNING: BoundsCheckMode.WARNING,
    FbgemmBoundsCheckMode.V2_WARNING: BoundsCheckMode.WARNING,
    FbgemmBoundsCheckMode.IGNORE: BoundsCheckMode.IGNORE,
    FbgemmBoundsCheckMode.V2_IGNORE: BoundsCheckMode.IGNORE,
}
_NUMBERS = ("learning_rate", "eps", "weight_decay", "beta1", "beta2")
_OUTPUT_DTYPES = {
    SparseType.FP32: torch.float32,
    SparseType.FP16: torch.float16,
    SparseType.BF16: torch.bfloat16,
    DataType.FP32: torch.float32,
    DataType.FP16: torch.float16,
    DataType.BF16: torch.bfloat16,
}
# About caches of dense rows, which a TT table does not have.
_WITHOUT_MEANING = (
    "cache_algorithm",
    "cache_load_factor",
    "cache_precision",
    "cache_reserved_memory",
    "enforce_hbm",
    "multipass_prefetch_config",
    "prefetch_pipeline",
)


def optimizer_spec(fused_params: Mapping[str, Any] | None, tables: str) -> OptimizerSpec:
    """The fused optimizer, with FBGEMM's defaults for what is not given (SGD, learning rate 0.01, eps 1e-8).

    Adam's decays are FBGEMM's ``beta1`` and ``beta2``, or torch's ``betas``.

    Args:
        fused_params: of the group, after TorchRec has renamed ``lr`` to ``learning_rate``.
        tables: the group's tables, for error messages.

    Raises:
        ValueError: for an optimizer or a parameter that TT tables don't have.
    """
    params = dict(fused_params or {})
    betas = params.pop("betas", None)
    if betas is not None:
        if len(betas) != 2 or "beta1" in params or "beta2" in params:
            raise ValueError(f"{tables}: give Adam either beta1 and beta2, or betas of two numbers, not {betas}")
        params["beta1"], params["beta2"] = betas
    known = {
        TT_TABLES,
        "bounds_check_mode",
        "optimizer",
        "output_dtype",
        "stochastic_rounding",
        *_NUMBERS,
        *_WITHOUT_MEANING,
    }
    unknown = sorted(params.keys() - known)
    if unknown:
        raise ValueError(
            f"{tables}: TT tables don't know the optimizer or fused parameter {', '.join(map(repr, unknown))}; "
            "known: lr, eps, weight_decay, beta1, beta2, betas, stochastic_rounding, bounds_check_mode, output_dtype"
        )
    kind = params.get("optimizer", EmbOptimType.EXACT_SGD)
    if kind not in _KINDS:
        raise ValueError(
            f"{tables}: the fused optimizer {kind} is not supported for TT tables; use {OPTIMIZERS}, or place the "
            "tables data_parallel, where the dense optimizer trains them"
        )
    values: dict[str, Any] = {key: float(params[key]) for key in _NUMBERS if key in params}
    values["stochastic_rounding"] = bool(params.get("stochastic_rounding", True))
    try:
        return OptimizerSpec(_KINDS[kind], **values)
    except ValueError as error:
        raise ValueError(f"{tables}: {error}") from None


def bounds_check_mode(fused_params: Mapping[str, Any] | None, tables: str) -> BoundsCheckMode:
    """The bounds check, an error by default.

    Raises:
        ValueError: for ``BoundsCheckMode.NONE``, which would read foreign memory.
    """
    mode = (fused_params or {}).get("bounds_check_mode", FbgemmBoundsCheckMode.FATAL)
    if mode not in _BOUNDS_CHECK_MODES:
        raise ValueError(f"{tables}: bounds_check_mode {mode.name} is not supported; use FATAL, WARNING or IGNORE")
    return _BOUNDS_CHECK_MODES[mode]


def output_dtype(fused_params: Mapping[str, Any] | None, tables: str) -> torch.dtype:
    """Type of the pooled rows, float32 by default.

    Raises:
        ValueError: for an ``output_dtype`` other than FP32, FP16 and BF16.
    """
    dtype = (fused_params or {}).get("output_dtype", SparseType.FP32)
    if dtype not in _OUTPUT_DTYPES:
        raise ValueError(
            f"{tables}: output_dtype {dtype!r} is not supported for TT tables; use SparseType.FP32, FP16 or BF16"
        )
    return _OUTPUT_DTYPES[dtype]
