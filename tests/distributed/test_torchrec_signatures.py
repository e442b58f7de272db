"""The canary: what the plug-in overrides, reads or calls in torchrec, as it was when it was written.

A torchrec that changes one of these fails here, with a message that says what to look at, before anything else does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchrec
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
    _create_mean_pooling_divisor,
)
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.enumerators import GUARDED_COMPUTE_KERNELS, EmbeddingEnumerator
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.proposers import GreedyProposer
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
    get_num_poolings,
)
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import Perf, ShardingOption, Stats, Storage, Topology
from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.sharding.twcw_sharding import TwCwPooledEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding
from torchrec.distributed.types import ParameterSharding
from torchrec.distributed.utils import add_params_from_parameter_sharding, optimizer_type_to_emb_opt_type
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.keyed import KeyedOptimizer

from flowtt_torchrec.distributed.compat import check_torchrec, release

SIGNATURES: list[tuple[Callable[..., Any], list[str]]] = [
    # overridden
    (EmbeddingBagCollectionSharder.shard, ["self", "module", "params", "env", "device", "module_fqn"]),
    (EmbeddingBagCollectionSharder.compute_kernels, ["self", "sharding_type", "compute_device_type"]),
    (
        ShardedEmbeddingBagCollection.create_embedding_bag_sharding,
        ["sharding_infos", "env", "device", "permute_embeddings", "qcomm_codecs_registry"],
    ),
    (ShardedEmbeddingBagCollection._initialize_torch_state, ["self", "skip_registering"]),
    (ShardedEmbeddingBagCollection.input_dist, ["self", "ctx", "features"]),
    (ShardedEmbeddingBagCollection.reset_parameters, ["self"]),
    (ShardedEmbeddingBagCollection._pre_load_state_dict_hook, ["self", "state_dict", "prefix", "args"]),
    (ShardedEmbeddingBagCollection.update_shards, ["self", "changed_sharding_params", "env", "device"]),
    (
        GroupedPooledEmbeddingsLookup._create_embedding_kernel,
        ["self", "config", "device", "pg", "sharding_type", "env"],
    ),
    (GroupedPooledEmbeddingsLookup.forward, ["self", "sparse_features"]),
    (GroupedPooledEmbeddingsLookup._forward, ["self", "features_by_group"]),
    (TwPooledEmbeddingSharding.create_lookup, ["self", "device", "fused_params", "feature_processor"]),
    (DpPooledEmbeddingSharding.create_lookup, ["self", "device", "fused_params", "feature_processor"]),
    (CwPooledEmbeddingSharding.create_lookup, ["self", "device", "fused_params", "feature_processor"]),
    (TwCwPooledEmbeddingSharding.create_lookup, ["self", "device", "fused_params", "feature_processor"]),
    (RwPooledEmbeddingSharding.create_lookup, ["self", "device", "fused_params", "feature_processor"]),
    (TwRwPooledEmbeddingSharding.create_lookup, ["self", "device", "fused_params", "feature_processor"]),
    (BaseEmbedding.forward, ["self", "features"]),
    (EmbeddingEnumerator.enumerate, ["self", "module", "sharders"]),
    (EmbeddingEnumerator._filter_compute_kernels, ["self", "name", "allowed_compute_kernels", "sharding_type"]),
    (EmbeddingStats._log_compute_kernel_stats, ["self", "compute_kernels_stats", "description"]),
    (
        EmbeddingStats._log_rank_mem_usage_and_perf,
        [
            *("self", "topology", "used_ddr", "used_hbm", "perf", "stats", "used_sharding_types"),
            "reserved_hbm_percent",
        ],
    ),
    (GreedyProposer.load, ["self", "search_space", "enumerator"]),
    (GreedyProposer.feedback, ["self", "partitionable", "plan", "perf_rating", "storage_constraint"]),
    (NoopPerfModel.rate, ["self", "plan"]),
    (EmbeddingEnumerator.populate_estimates, ["self", "sharding_options"]),
    (
        Stats.log,
        [
            *("self", "sharding_plan", "topology", "batch_size", "storage_reservation", "num_proposals", "num_plans"),
            *("run_time", "best_plan", "constraints", "sharders", "enumerator", "debug", "debug_stats"),
        ],
    ),
    # called
    (
        GroupedPooledEmbeddingsLookup.__init__,
        [
            *("self", "grouped_configs", "device", "pg", "feature_processor", "scale_weight_gradients"),
            *("sharding_type", "env"),
        ],
    ),
    (
        EmbeddingEnumerator.__init__,
        ["self", "topology", "batch_size", "constraints", "estimator", "use_exact_enumerate_order"],
    ),
    (
        EmbeddingShardingPlanner.__init__,
        [
            *("self", "topology", "batch_size", "enumerator", "storage_reservation", "proposer", "partitioner"),
            *("performance_model", "stats", "constraints", "debug", "callbacks", "timeout_seconds", "plan_loader"),
        ],
    ),
    (get_num_poolings, ["constraints", "so"]),
    (optimizer_type_to_emb_opt_type, ["optimizer_class"]),
    (KeyedOptimizer.__init__, ["self", "params", "state", "param_groups"]),
]


@pytest.mark.parametrize(
    ("function", "expected"), [pytest.param(f, names, id=f.__qualname__) for f, names in SIGNATURES]
)
def test_signatures(function: Callable[..., Any], expected: list[str]) -> None:
    found = list(inspect.signature(inspect.unwrap(function)).parameters)
    assert found == expected, (
        f"torchrec {torchrec.__version__} has changed {function.__qualname__}: see what flowtt_torchrec.distributed "
        "makes of it"
    )


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (
            ParameterSharding,
            {
                *("sharding_type", "compute_kernel", "ranks", "sharding_spec", "cache_params", "enforce_hbm"),
                *("stochastic_rounding", "bounds_check_mode", "output_dtype", "key_value_params"),
            },
        ),
        (Perf, {"fwd_compute", "fwd_comms", "bwd_compute", "bwd_comms", "input_dist_comms", "prefetch_compute"}),
        (Storage, {"hbm", "ddr", "ssd"}),
    ],
)
def test_fields(owner: type, names: set[str]) -> None:
    assert set(owner.__dataclass_fields__) == names  # type: ignore[attr-defined]


def test_the_hook_that_carries_the_specs() -> None:
    source = inspect.getsource(add_params_from_parameter_sharding)
    assert "get_additional_fused_params" in source
    assert "CUSTOMIZED_KERNEL" in source


def test_the_customised_kernel_is_offered_unasked() -> None:
    """The enumerator drops it for tables without a spec, and must be given it for the others."""
    assert EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value == "customized_kernel"
    assert EmbeddingComputeKernel.CUSTOMIZED_KERNEL not in GUARDED_COMPUTE_KERNELS


def test_private_attributes() -> None:
    """Attributes of torchrec that the plug-in reads or sets."""
    for function, names in (
        (
            ShardedEmbeddingBagCollection.__init__,
            [
                *("_lookups", "_embedding_bag_configs", "module_sharding_plan"),
                "self._pooling_type_to_rs_features: Dict[str, List[str]]",
            ],
        ),
        (ShardedEmbeddingBagCollection._initialize_torch_state, ["self.embedding_bags", "self.reset_parameters()"]),
        (EmbeddingEnumerator.__init__, ["_last_stored_search_space", "self._constraints", "self._compute_device"]),
        (EmbeddingShardingPlanner.plan, ["self._enumerator", "self._stats", "self._perf_model.rate"]),
        (GreedyProposer.load, ["self._sharding_options_by_fqn", "self._current_proposal"]),
        (EmbeddingEnumerator.enumerate, ["self._filter_compute_kernels("]),
        (
            EmbeddingStats.log,
            [
                *('"Compute Kernels Embedding Weights"', '"Compute Kernels Optimizer State"'),
                '"Compute Kernels Total Estimated Memory (weights + optimizer + IO + pipeline)"',
            ]
            if release(torchrec.__version__) >= (1, 8)
            else ['"Compute Kernels Storage"'],
        ),
        (ShardingOption.__init__, ["self._tensor"]),
        (GroupedPooledEmbeddingsLookup.__init__, ["_emb_modules", "self.grouped_configs", "self._feature_splits"]),
        *(
            (sharding.__init__, ["self._grouped_embedding_configs_per_rank", "_device", "_env"])
            for sharding in (
                *(TwPooledEmbeddingSharding, DpPooledEmbeddingSharding),
                *(RwPooledEmbeddingSharding, TwRwPooledEmbeddingSharding),
            )
        ),
        (_create_mean_pooling_divisor, ["in pooling_type_to_rs_features[PoolingType.SUM.value]"]),
    ):
        source = inspect.getsource(inspect.unwrap(function))
        for name in names:
            assert name in source, f"{function.__qualname__} of torchrec {torchrec.__version__} has no {name}"


def test_defaults_of_the_config() -> None:
    """The default init_fn is a partial of uniform_, which tells it from one of the user's own."""
    config = EmbeddingBagConfig(num_embeddings=100, embedding_dim=8)
    assert config.init_fn.func is torch.nn.init.uniform_
    assert config.init_fn.keywords == {"a": -0.1, "b": 0.1}


def test_estimators_take_options_and_one_more() -> None:
    for estimator in (EmbeddingPerfEstimator, EmbeddingStorageEstimator):
        parameters = list(inspect.signature(inspect.unwrap(estimator.estimate)).parameters)
        assert parameters[:2] == ["self", "sharding_options"]
        assert len(parameters) == 3
    used = {"hbm_mem_bw", "ddr_mem_bw", "intra_host_bw", "inter_host_bw", "world_size", "local_world_size"}
    assert {*used, "compute_device"} <= set(dir(Topology))


def test_versions() -> None:
    check_torchrec("1.6.1")
    check_torchrec("1.9.2+cpu")
    with pytest.raises(ImportError, match=r"needs torchrec 1\.6 or later, found 1\.5\.1"):
        check_torchrec("1.5.1")
    with pytest.warns(UserWarning, match=r"torchrec 1\.10\.0 is newer than 1\.9"):
        check_torchrec("1.10.0")
