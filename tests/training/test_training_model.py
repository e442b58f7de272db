from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from flowtt_torchrec.datasets import Sharding, SyntheticCriteo
from flowtt_torchrec.training.config import DataConfig, GenerateConfig, ModelConfig, OptimizerConfig
from flowtt_torchrec.training.data import make_dataset, table_configs
from flowtt_torchrec.training.errors import ConfigError
from flowtt_torchrec.training.model import LearningRate, build_dlrm
from flowtt_torchrec.training.profiler import StepProfiler


def _learning_rate(**config: Any) -> tuple[LearningRate, CombinedOptimizer]:
    parameter = torch.nn.Parameter(torch.zeros(1))
    sgd = KeyedOptimizerWrapper({"p": parameter}, lambda parameters: torch.optim.SGD(parameters, lr=2.0))
    optimizer = CombinedOptimizer([sgd])
    return LearningRate(optimizer, OptimizerConfig(learning_rate=4.0, **config)), optimizer


def test_learning_rate_warms_up_stays_and_decays() -> None:
    rate, optimizer = _learning_rate(lr_warmup_steps=4, lr_decay_start=6, lr_decay_steps=4)
    factors = [rate.factor(step) for step in range(12)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 0.75**2, 0.5**2, 0.25**2, 1e-7, 1e-7])
    assert rate.set(1) == 2.0
    assert optimizer.param_groups[0]["lr"] == 1.0
    rate.set(4)
    assert optimizer.param_groups[0]["lr"] == 2.0


def test_learning_rate_is_constant_by_default() -> None:
    rate, _ = _learning_rate()
    assert [rate.factor(step) for step in (0, 10, 10**9)] == [1, 1, 1]


@pytest.mark.parametrize("interaction", ["original", "dcn", "projection"])
def test_every_interaction_of_dlrm(interaction: Any) -> None:
    tables = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=10**10, embedding_dim=4, feature_names=[f"f{i}"])
        for i in range(3)
    ]
    config = ModelConfig(
        embedding_dim=4,
        dense_arch_layer_sizes=[8, 4],
        over_arch_layer_sizes=[8, 1],
        interaction_type=interaction,
        dcn_num_layers=1,
        dcn_low_rank_dim=2,
        interaction_branch1_layer_sizes=[8],
        interaction_branch2_layer_sizes=[8],
    )
    model = build_dlrm(config, tables, 5, torch.device("cpu"))
    collection = model.model.sparse_arch.embedding_bag_collection
    assert all(parameter.is_meta for parameter in collection.parameters())
    embedded = torch.zeros(2, 3, 4)
    dense = model.model.dense_arch(torch.zeros(2, 5))
    assert model.model.over_arch(model.model.inter_arch(dense, embedded)).shape == (2, 1)


def _data(**config: Any) -> DataConfig:
    return DataConfig(**{"generate": GenerateConfig(train_rows=10, val_rows=10, scale=0.001), **config})


def test_generated_data_and_its_tables() -> None:
    dataset = make_dataset(_data(), Sharding(5))
    assert isinstance(dataset, SyntheticCriteo)
    tables = table_configs(dataset, 8)
    assert [table.num_embeddings for table in tables] == dataset.num_embeddings
    assert [table.feature_names for table in tables] == [[name] for name in dataset.feature_names]


def test_generated_meta_tables() -> None:
    assert len(make_dataset(_data(kind="meta", num_tables=3), Sharding(5)).table_names) == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_tables": 3}, r"data.num_tables is for data.kind=meta"),
        ({"num_embeddings": 3}, r"data.num_embeddings is for files"),
        ({"kind": "meta", "num_embeddings": 3}, r"data.num_embeddings is for data.kind=criteo"),
        ({"kind": "meta", "val_path": "x"}, r"data.val_path is for data.kind=criteo"),
    ],
)
def test_settings_without_a_meaning_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_dataset(_data(**config), Sharding(5))


def test_profile_of_steps() -> None:
    profiler = StepProfiler(2, skip=1)
    for _ in range(4):
        profiler.begin_step()
        with torch.profiler.record_function("## forward 3 ##"):
            torch.ones(100, 100) @ torch.ones(100, 100)
        profiler.end_step()
    parts = {part.name: part for part in profiler.breakdown}
    assert list(parts) == ["forward", "other"]
    assert 0 < parts["forward"].share < 1
    assert parts["forward"].share + parts["other"].share == pytest.approx(1)


def test_profile_that_data_cuts_short() -> None:
    profiler = StepProfiler(5, skip=0)
    for _ in range(2):
        profiler.begin_step()
        profiler.end_step()
    profiler.begin_step()
    profiler.stop()
    assert [part.name for part in profiler.breakdown] == ["other"]
    profiler.begin_step()  # not profiled again
    profiler.end_step()
    assert len(profiler.breakdown) == 1


def test_no_profile_is_asked_for() -> None:
    profiler = StepProfiler(0)
    for _ in range(10):
        profiler.begin_step()
        profiler.end_step()
    profiler.stop()
    assert profiler.breakdown == []
