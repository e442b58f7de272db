"""Where the cores of many tables lie in one flat buffer, and how a row becomes a sortable key.

`TTLayout` turns specs into the two integer tensors that the ops read. Their columns are part of the ops' interface:
``csrc/include/flowtt`` mirrors them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from flowtt_torchrec.spec import MAX_CORES, TTSpec
from flowtt_torchrec.whole_numbers import whole_number

KEY_BITS = 62  # in an int64, with room for the number after the last key

# Columns of a row of TTLayout.tables. Cores that a table does not have: p = q = r = 1, offsets and shifts 0.
TABLE_COLUMNS = 32
NUM_CORES, NUM_EMBEDDINGS, EMBEDDING_DIM = 0, 1, 2
P, Q, RANKS = 3, 7, 11  # p_1..p_4, q_1..q_4, r_0..r_4
CORE_OFFSETS = 16  # first element of each core in the weights
DIGIT_SHIFTS = 20  # bit at which each digit starts in a key
SLICE_OFFSETS = 24  # first slice of each core in per-slice optimizer state
TABLE_SHIFT = 28  # bit at which the table's number starts in a key
FINGERPRINT = 29  # of the whole layout, the same in every row


class TTLayout:
    """A group of tensor-train tables in one flat weight buffer.

    Cores lie one after the other, table by table, without gaps. The key of a row is
    ``table << table_shift | digits``, the digits in bit fields of their own, most significant first: the middle digits
    from the last to the first, then digit 1, then the last digit. So rows that share a prefix are neighbours in key
    order, and so are prefixes that share the large middle slices.

    Args:
        specs: shape of each table.
        names: name of each table, for error messages and state dicts.
        feature_tables: the table that each feature looks up, in the order of the output's columns; one feature a table
            if not given.
        parts: whether names may repeat, since several of these are parts of one table.

    Attributes:
        tables: int64 CPU tensor ``[num_tables, TABLE_COLUMNS]``.
        table_names: uint8 CPU tensor, the names in UTF-8 joined by newlines.
        features: int64 CPU tensor ``[num_features, 2]``: table and first output column of each feature.
        feature_dims: columns of each feature.
        total_dim: columns of all features together.
        num_parameters: elements of the flat weight buffer.
        num_slices: slices ``G_k[i_k]`` of all tables, the size of per-slice optimizer state.
        fingerprint: a number that equal layouts have in common, whatever their tables' names.

    Raises:
        ValueError: if there is no table or feature, names repeat, a feature's table does not exist, or keys would need
            more than 62 bits.
    """

    def __init__(
        self,
        specs: Sequence[TTSpec],
        names: Sequence[str],
        feature_tables: Sequence[int] | None = None,
        *,
        parts: bool = False,
    ) -> None:
        if not specs:
            raise ValueError("a group of tensor-train tables needs at least one table")
        if len(names) != len(specs) or (len(set(names)) != len(names) and not parts):
            raise ValueError(f"{len(specs)} tables need as many different names, not {list(names)}")
        if any("\n" in name for name in names):
            raise ValueError(f"table names must be single lines, not {[name for name in names if chr(10) in name]}")
        feature_tables = [
            whole_number(f"the table of feature {f}", t)
            for f, t in enumerate(range(len(specs)) if feature_tables is None else feature_tables)
        ]
        if len(feature_tables) == 0:
            raise ValueError("a group of tensor-train tables needs at least one feature")
        for feature, table in enumerate(feature_tables):
            if not 0 <= table < len(specs):
                raise ValueError(f"feature {feature} names table {table}; allowed: 0 to {len(specs) - 1}")

        self.specs = tuple(specs)
        self.names = tuple(names)
        self.feature_tables = tuple(feature_tables)
        self.feature_dims = tuple(specs[t].embedding_dim for t in feature_tables)
        self.total_dim = sum(self.feature_dims)
        self.num_parameters = sum(spec.num_parameters for spec in specs)
        self.num_slices = sum(spec.num_slices for spec in specs)
        self.tables = _describe(self.specs, self.names)
        # On the CPU, where they are read, also where torch's default device is another.
        self.table_names = torch.tensor(list("\n".join(names).encode()), dtype=torch.uint8, device="cpu")
        starts = [0, *accumulate(self.feature_dims[:-1])]
        self.features = torch.tensor(list(zip(feature_tables, starts)), dtype=torch.int64, device="cpu")
        described = self.tables.numpy().tobytes() + self.features.numpy().tobytes()
        digest = hashlib.blake2b(described, digest_size=8).digest()
        self.fingerprint = int.from_bytes(digest, "big") >> 1  # in an int64
        self.tables[:, FINGERPRINT] = self.fingerprint

    @property
    def num_tables(self) -> int:
        return len(self.specs)

    @property
    def num_features(self) -> int:
        return len(self.feature_tables)

    def core_views(self, flat: Tensor) -> list[list[Tensor]]:
        """Views ``[p_k, r_{k-1}, q_k, r_k]`` of a buffer ``[num_parameters]``: for each table, its cores."""
        if flat.shape != (self.num_parameters,):
            raise ValueError(f"the tables need a flat buffer of {self.num_parameters} elements, not {list(flat.shape)}")
        pieces = iter(flat.split([size for spec in self.specs for size in spec.core_sizes]))
        return [[next(pieces).view(shape) for shape in spec.core_shapes] for spec in self.specs]

    def slice_views(self, flat: Tensor) -> list[list[Tensor]]:
        """Views ``[p_k]`` of a per-slice buffer ``[num_slices]``: for each table, one a core."""
        if flat.shape != (self.num_slices,):
            raise ValueError(f"the tables need a buffer of {self.num_slices} slices, not {list(flat.shape)}")
        pieces = iter(flat.split([p for spec in self.specs for p in spec.p]))
        return [[next(pieces) for _ in spec.p] for spec in self.specs]

    def feature_starts(self, offsets: Tensor) -> list[int]:
        """Place of each feature's first lookup in a batch, then the number of lookups; waits for the device.

        Args:
            offsets: ``[num_features * batch_size + 1]``, as for `flowtt_torchrec.ops.flow_plan`.
        """
        batch_size = (offsets.numel() - 1) // self.num_features
        return offsets[torch.arange(self.num_features + 1, device=offsets.device) * batch_size].tolist()

    def keys(self, tables: Tensor, rows: Tensor) -> Tensor:
        """Keys of rows.

        Args:
            tables: int64 ``[N]``, table numbers.
            rows: int64 ``[N]``, row numbers within the tables.

        Returns:
            int64 ``[N]``.
        """
        of = self.tables.to(rows.device)[tables]
        keys = tables << of[:, TABLE_SHIFT]
        for k in reversed(range(MAX_CORES)):
            p = of[:, P + k]
            keys = keys | (rows % p << of[:, DIGIT_SHIFTS + k])
            rows = torch.div(rows, p, rounding_mode="floor")
        return keys

    def split_keys(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Table numbers ``[N]`` and digits ``[N, MAX_CORES]`` of keys ``[N]``, all int64; the reverse of `keys`."""
        described = self.tables.to(keys.device)
        tables = keys >> described[0, TABLE_SHIFT]
        factors = self.tables[:, P : P + MAX_CORES].tolist()
        masks = torch.tensor([[(1 << bits_for(p)) - 1 for p in row] for row in factors], device="cpu")
        shifts = described[:, DIGIT_SHIFTS : DIGIT_SHIFTS + MAX_CORES]
        return tables, keys[:, None] >> shifts[tables] & masks.to(keys.device)[tables]

    def prefix_keys(self, keys: Tensor) -> Tensor:
        """Keys ``[N]`` without their last digit: equal for rows of the same table and prefix."""
        last = torch.tensor([bits_for(spec.p[-1]) for spec in self.specs], device=keys.device)
        last = last[keys >> self.tables[0, TABLE_SHIFT].to(keys.device)]
        return keys >> last << last

    def __repr__(self) -> str:
        return (
            f"TTLayout({self.num_tables} tables, {self.num_features} features, {self.num_parameters:,} parameters, "
            f"{self.total_dim} columns)"
        )


def bits_for(p: int) -> int:
    """Bits that hold a digit of radix ``p``."""
    return (p - 1).bit_length()


def _digit_shifts(p: Sequence[int]) -> tuple[list[int], int]:
    """The bit at which each digit starts, and the bits that all digits take."""
    d = len(p)
    shifts, used = [0] * d, 0
    for k in (d - 1, 0, *range(1, d - 1)):  # least significant first
        shifts[k] = used
        used += bits_for(p[k])
    return shifts, used


def _describe(specs: Sequence[TTSpec], names: Sequence[str]) -> Tensor:
    table_bits = bits_for(len(specs))
    widest = max(range(len(specs)), key=lambda t: _digit_shifts(specs[t].p)[1])
    table_shift = _digit_shifts(specs[widest].p)[1]
    if table_bits + table_shift > KEY_BITS:
        raise ValueError(
            f"table {names[widest]!r} has p {specs[widest].p}, whose digits take {table_shift} bits; with "
            f"{table_bits} bits for {len(specs)} tables that is more than {KEY_BITS}; choose smaller factors p or "
            "fewer tables in one group"
        )
    described = torch.zeros(len(specs), TABLE_COLUMNS, dtype=torch.int64, device="cpu")
    element = slices = 0
    for row, spec in zip(described, specs):
        d, unused = spec.num_cores, MAX_CORES - spec.num_cores
        ones, zeros = (1,) * unused, (0,) * unused
        offsets, slice_offsets = [], []
        for size, p in zip(spec.core_sizes, spec.p):
            offsets.append(element)
            slice_offsets.append(slices)
            element += size
            slices += p
        columns = (
            *(d, spec.num_embeddings, spec.embedding_dim),
            *(*spec.p, *ones),
            *(*spec.q, *ones),
            *(1, *spec.ranks, 1, *ones),
            *(*offsets, *zeros),
            *(*_digit_shifts(spec.p)[0], *zeros),
            *(*slice_offsets, *zeros),
            table_shift,
        )
        row[: len(columns)] = torch.tensor(columns, device="cpu")
    return described
