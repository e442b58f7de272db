"""Leaving it to the planner which tables become tensor trains: dense as long as there is room."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.types import ShardingOption, Topology

from flowtt_torchrec.distributed.estimators import CUSTOMIZED_KERNEL
from flowtt_torchrec.distributed.proposers import BisectingGreedyProposer
from flowtt_torchrec.spec import TableConfig, TTSpec


class AutoCompression(Mapping[str, TTSpec]):
    """A ``compression`` for sharder and planner that says which tables *may* become tensor trains, and of which shape.

    The planner then tries each of them dense and compressed, and compresses where that buys memory; see
    `DenseFirstPerfModel`. A plan made by hand chooses by its compute kernels.

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


class DenseFirstPerfModel(NoopPerfModel):
    """Rates a plan by its slowest rank, as TorchRec, plus a price for what it compresses.

    TorchRec's rating has no term for accuracy, and a tensor train on a rank that is not the slowest is free to it.

    Args:
        topology: the devices.
        ms_per_million: milliseconds of a step that compressing a million numbers must save. The default is so high that
            only memory forces a table to be compressed; a lower one lets time decide too.
    """

    def __init__(self, topology: Topology, ms_per_million: float = 1000.0) -> None:
        super().__init__(topology)
        self._ms_per_million = ms_per_million

    def rate(self, plan: list[ShardingOption]) -> float:
        compressed = sum(option.tensor.numel() for option in plan if option.compute_kernel == CUSTOMIZED_KERNEL)
        return super().rate(plan) + self._ms_per_million * compressed / 1e6


class DenseFirstProposer(BisectingGreedyProposer):
    """The greedy search, which gives the largest table its next option, with the dense options first.

    So it comes by the plans that compress the largest tables only, whatever the estimated times.
    """

    def _order_options(self) -> None:
        for options in self._sharding_options_by_fqn.values():
            options.sort(key=lambda option: option.compute_kernel == CUSTOMIZED_KERNEL)  # stable
