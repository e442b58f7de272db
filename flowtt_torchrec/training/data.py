"""From the ``data`` section to a `ClickDataset`, and from a data set to TorchRec's tables."""

from __future__ import annotations

from torchrec.modules.embedding_configs import EmbeddingBagConfig

from flowtt_torchrec.datasets import (
    ClickDataset,
    CriteoTSV,
    MetaFiles,
    PreparedClicks,
    Sharding,
    SyntheticCriteo,
    SyntheticMeta,
    is_prepared,
)
from flowtt_torchrec.training.config import DataConfig, GenerateConfig
from flowtt_torchrec.training.errors import ConfigError

_NUM_META_TABLES = 788
_DEFAULT_NUM_EMBEDDINGS = 100_000  # as dlrm_main.py


def make_dataset(config: DataConfig, sharding: Sharding) -> ClickDataset:
    """The data set that the configuration describes.

    Args:
        config: the ``data`` section.
        sharding: this rank's part.

    Raises:
        ConfigError: a setting does not go with the kind of data.
        DataError: the files are missing or damaged, or a number is out of range.
    """
    if config.kind == "criteo":
        return _criteo(config, sharding)
    for key in ("num_embeddings", "num_embeddings_per_feature", "val_path"):
        if getattr(config, key) is not None:
            raise ConfigError(f"data.{key} is for data.kind=criteo; Meta's files say how large their tables are")
    if config.path is not None:
        return MetaFiles(
            config.path, sharding, num_tables=config.num_tables, val_fraction=config.val_fraction, seed=config.seed
        )
    generate = config.generate or GenerateConfig()
    return SyntheticMeta(
        sharding,
        num_tables=config.num_tables or _NUM_META_TABLES,
        num_train_rows=generate.train_rows,
        num_val_rows=generate.val_rows,
        seed=config.seed,
    )


def _criteo(config: DataConfig, sharding: Sharding) -> ClickDataset:
    if config.num_tables is not None:
        raise ConfigError("data.num_tables is for data.kind=meta; Criteo has 26 tables")
    if config.path is not None and is_prepared(config.path):
        return _prepared(config, config.path, sharding)
    if config.path is not None:
        return CriteoTSV(
            config.path,
            config.num_embeddings_per_feature or config.num_embeddings or _DEFAULT_NUM_EMBEDDINGS,
            sharding,
            val_path=config.val_path,
            val_every=config.val_every,
            shuffle_rows=config.shuffle_rows,
            seed=config.seed,
        )
    for key in ("num_embeddings", "num_embeddings_per_feature", "val_path"):
        if getattr(config, key) is not None:
            raise ConfigError(
                f"data.{key} is for files, but data.path is not set; generated tables are sized by data.generate.scale "
                "and data.generate.max_rows"
            )
    generate = config.generate or GenerateConfig()
    return SyntheticCriteo(
        sharding,
        num_train_rows=generate.train_rows,
        num_val_rows=generate.val_rows,
        scale=generate.scale,
        max_rows=generate.max_rows,
        seed=config.seed,
    )


def _prepared(config: DataConfig, path: str, sharding: Sharding) -> ClickDataset:
    for key, unset in (("val_path", None), ("shuffle_rows", 0)):
        if getattr(config, key) != unset:
            raise ConfigError(
                f"data.{key} is for raw text; {path} is prepared: its manifest says which rows are held out, and "
                "data.shuffle whether rows are shuffled"
            )
    return PreparedClicks(
        path,
        sharding,
        num_embeddings=config.num_embeddings_per_feature or config.num_embeddings,
        shuffle=config.shuffle,
        seed=config.seed,
    )


def table_configs(dataset: ClickDataset, embedding_dim: int) -> list[EmbeddingBagConfig]:
    """TorchRec's description of the data set's tables, one a feature, in float32."""
    return [
        EmbeddingBagConfig(name=table, num_embeddings=rows, embedding_dim=embedding_dim, feature_names=[feature])
        for feature, table, rows in zip(dataset.feature_names, dataset.table_names, dataset.num_embeddings, strict=True)
    ]
