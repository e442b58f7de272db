"""From the ``compression`` section to a `TTSpec` for each table that becomes a tensor train."""

from __future__ import annotations

from collections.abc import Sequence

from flowtt_torchrec.hints import did_you_mean
from flowtt_torchrec.spec import TableConfig, TTSpec, compress_to_fit, parse_bytes
from flowtt_torchrec.training.config import CompressionConfig, TableCompression
from flowtt_torchrec.training.errors import ConfigError

_ELEMENT_SIZE = 4  # float32


def choose_specs(config: CompressionConfig, tables: Sequence[TableConfig]) -> dict[str, TTSpec]:
    """Specs of the tables to compress, in the order of ``tables``; the others stay dense.

    With ``auto`` these are the tables that the planner may compress: all that it makes smaller.

    Raises:
        ConfigError: a table is unknown, a shape is not allowed (with the table's name), or the budget is too small.
    """
    if config.tables == "dense":
        return {}
    choices = config.tables if isinstance(config.tables, dict) else {table.name: "tt" for table in tables}
    names = [table.name for table in tables]
    for name in choices:
        if name not in names:
            hint = did_you_mean(name, names) or f"; there are {len(names)}: {names[0]} to {names[-1]}"
            raise ConfigError(f"compression.tables: there is no table {name!r}{hint}")
    specs = {table.name: _spec(config, table, choices[table.name]) for table in tables if table.name in choices}
    free = [table for table in tables if table.name not in choices]
    if config.budget is not None:
        specs |= _fit(config, specs, tables, free)
    else:
        specs |= {t.name: _spec(config, t, "tt") for t in free if t.num_embeddings >= config.min_rows}
    chosen = {name: spec for name in names if (spec := specs.get(name)) is not None}
    if config.tables == "auto":
        return {name: spec for name, spec in chosen.items() if spec.compression_ratio > 1}
    return chosen


def _spec(config: CompressionConfig, table: TableConfig, choice: str | TableCompression) -> TTSpec | None:
    if choice == "dense":
        return None
    shape = choice if isinstance(choice, TableCompression) else TableCompression()
    rank = shape.rank or config.rank
    rows, dim = table.num_embeddings, table.embedding_dim
    try:
        if shape.p is not None and shape.q is not None:
            ranks = shape.ranks or [rank] * (len(shape.p) - 1)
            return TTSpec(rows, dim, tuple(shape.p), tuple(shape.q), tuple(ranks))
        return TTSpec.suggest(
            rows,
            dim,
            shape.ranks or rank,
            num_cores=shape.num_cores or (len(shape.ranks) + 1 if shape.ranks else config.num_cores),
            objective=shape.objective or config.objective,
        )
    except ValueError as error:
        raise ConfigError(f"table {table.name!r} ({rows:,} x {dim}): {error}") from None


def _fit(
    config: CompressionConfig,
    decided: dict[str, TTSpec | None],
    tables: Sequence[TableConfig],
    free: Sequence[TableConfig],
) -> dict[str, TTSpec]:
    """Specs for the largest of the ``free`` tables, so that all tables together fit the budget."""
    assert config.budget is not None
    used = 0
    for table in tables:
        if table.name in decided:
            spec = decided[table.name]
            numbers = table.num_embeddings * table.embedding_dim if spec is None else spec.num_parameters
            used += numbers * _ELEMENT_SIZE
    left = parse_bytes(config.budget) - used
    if left < 0:
        raise ConfigError(f"compression.budget is {config.budget}, but the tables given by name need {used:,} bytes")
    try:
        return compress_to_fit(
            free,
            left,
            element_size=_ELEMENT_SIZE,
            rank=config.rank,
            num_cores=config.num_cores,
            objective=config.objective,
        )
    except ValueError as error:
        raise ConfigError(f"compression.budget: {error}") from None
