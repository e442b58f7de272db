"""From the ``compression`` section to a `TTSpec` for each table that becomes a tensor train."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torchrec.modules.embedding_configs import DataType, data_type_to_dtype

from flowtt_torchrec.hints import did_you_mean
from flowtt_torchrec.spec import TableConfig, TTSpec, compress_to_fit, parse_bytes
from flowtt_torchrec.training.config import CompressionConfig, TableCompression
from flowtt_torchrec.training.errors import ConfigError


def choose_specs(
    config: CompressionConfig, tables: Sequence[TableConfig], dense_type: str = "FP32"
) -> dict[str, TTSpec]:
    """Specs of the tables to compress, in the order of ``tables``; the others stay dense.

    With ``auto`` these are the tables that the planner may compress: all that it makes smaller.

    Args:
        config: the ``compression`` section.
        tables: names and sizes.
        dense_type: ``model.data_type``.

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
        specs |= _fit(config, specs, tables, free, dense_type)
    else:
        specs |= {t.name: _spec(config, t, "tt") for t in free if t.num_embeddings >= config.min_rows}
    chosen = {name: spec for name in names if (spec := specs.get(name)) is not None}
    if config.tables == "auto":
        return {name: spec for name, spec in chosen.items() if spec.compression_ratio > 1}
    return chosen


def data_types(
    config: CompressionConfig, tables: Sequence[TableConfig], trains: Collection[str], dense_type: str
) -> dict[str, DataType]:
    """Type of each table's numbers.

    Args:
        config: the ``compression`` section.
        tables: by name.
        trains: names of those that are tensor trains.
        dense_type: ``model.data_type``.
    """
    return {t.name: DataType(_type_of(config, t.name, dense_type) if t.name in trains else dense_type) for t in tables}


def element_size(data_type: DataType | str) -> int:
    """Bytes a number."""
    return data_type_to_dtype(DataType(data_type)).itemsize


def _type_of(config: CompressionConfig, name: str, dense_type: str) -> str:
    """Type of a tensor train's cores."""
    choice = config.tables.get(name) if isinstance(config.tables, dict) else None
    own = choice.data_type if isinstance(choice, TableCompression) else None
    return own or config.data_type or dense_type


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
    dense_type: str,
) -> dict[str, TTSpec]:
    """Specs for the largest of the ``free`` tables, so that all tables together fit the budget."""
    assert config.budget is not None
    used = 0
    for table in tables:
        if table.name in decided:
            spec = decided[table.name]
            if spec is None:
                used += table.num_embeddings * table.embedding_dim * element_size(dense_type)
            else:
                used += spec.num_bytes(element_size(_type_of(config, table.name, dense_type)))
    left = parse_bytes(config.budget) - used
    if left < 0:
        raise ConfigError(f"compression.budget is {config.budget}, but the tables given by name need {used:,} bytes")
    try:
        return compress_to_fit(
            free,
            left,
            element_size=element_size(dense_type),
            core_element_size=element_size(config.data_type or dense_type),
            rank=config.rank,
            num_cores=config.num_cores,
            objective=config.objective,
        )
    except ValueError as error:
        raise ConfigError(f"compression.budget: {error}") from None
