"""Leaving it to the planner which tables become tensor trains: dense as long as there is room."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flowtt_torchrec.spec import TableConfig, TTSpec


class AutoCompression(Mapping[str, TTSpec]):
    """A ``compression`` for sharder and planner that says which tables *may* become tensor trains, and of which shape.

    The planner then tries each of them dense and compressed, and compresses where that buys memory; see
    `flowtt_torchrec.distributed.DenseFirstPerfModel`. A plan made by hand chooses by its compute kernels.

    Args:
        specs: shape of each such table; the others stay dense.

    Example:
        >>> compression = AutoCompression.suggest(model.embedding_bag_configs(), rank=32)
        >>> sharders = [TTEmbeddingBagCollectionSharder(compression)]
        >>> plan = TTEmbeddingShardingPlanner(topology, compression=compression).collective_plan(model, sharders, pg)
    """

    def __init__(self, specs: Mapping[str, TTSpec]) -> None:
        self._specs = dict(specs)

    @classmethod
    def suggest(cls, tables: Iterable[TableConfig], **suggest: Any) -> AutoCompression:
        """Shapes for all tables that a tensor train makes smaller.

        Args:
            tables: TorchRec ``EmbeddingBagConfig`` objects, or anything with their name and size.
            **suggest: passed on to `TTSpec.suggest`.
        """
        specs = {t.name: TTSpec.suggest(t.num_embeddings, t.embedding_dim, **suggest) for t in tables}
        return cls({name: spec for name, spec in specs.items() if spec.compression_ratio > 1})

    def __getitem__(self, name: str) -> TTSpec:
        return self._specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def __repr__(self) -> str:
        return f"AutoCompression({self._specs!r})"
