"""TT-SVD of a table that is too large to hold: its rows are read block by block, in order, a few times.

TT-SVD (Oseledets, SIAM J. Sci. Comput. 2011, algorithm 1), from the last core to the first. Rows that share a prefix
are neighbours, so the unfolding ``M`` that the last core comes from, ``[p_1 q_1 ... p_{d-1} q_{d-1}, p_d q_d]``, is
read a few of its rows at a time; the core is the orthonormal basis of the ``r_{d-1}`` leading right singular vectors.
What the other cores come from, ``M`` projected on that basis, is smaller by ``p_d q_d / r_{d-1}`` and kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flowtt_torchrec.cores import equal_magnitudes
from flowtt_torchrec.spec import TTSpec

ReadRows = Callable[[int, int], Tensor]
"""Rows ``first`` to ``last - 1`` of a table, ``[last - first, columns]``."""

BLOCK_BYTES = 16 << 20  # of the rows that are worked on at a time, in float64
EXACT_SIDE = 2048  # columns of an unfolding up to which its Gram matrix is made
KRYLOV_PASSES = 3
OVERSAMPLE = 16


class Compressed(NamedTuple):
    """Cores, and the Frobenius norm of what they miss over that of the table."""

    cores: list[Tensor]
    relative_error: float


@torch.no_grad()
def compress_rows(
    read: ReadRows,
    spec: TTSpec,
    *,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[float], None] | None = None,
    block_bytes: int = BLOCK_BYTES,
    exact_side: int = EXACT_SIDE,
) -> Compressed:
    """Cores close to a dense table that is never whole in memory.

    The squared error is the sum of what is cut at each inner rank. Where an unfolding has at most ``exact_side``
    columns, that is the sum of its squared singular values past the rank, as for `cores.from_dense`: at most
    ``num_cores - 1`` times the best possible together. Wider ones are searched by a randomised block Krylov method
    (Musco and Musco, NeurIPS 2015, algorithm 2), whose cut is at most ``1 + epsilon`` times that with high probability;
    in practice the error is within some thousandths of that of `cores.from_dense`. A table of exactly the spec's ranks
    is recovered in both cases. Sums are in float64.

    Besides a block of rows it takes the memory of the table times ``r_{d-1} / (p_d q_d)``, and that of a square matrix
    of ``exact_side`` or of ``4 (rank + 16)`` columns of a wider unfolding. The table is read twice, or with Krylov five
    times. Equal rows give equal bits on the same machine with the same number of threads.

    Args:
        read: reads rows, of any floating-point type, on the CPU.
        spec: the shape to bring the table to. Rows that ``p`` addresses past the table's end count as zeros.
        dtype: of the cores.
        progress: is told how much of all reading is done, from 0 to 1.
        block_bytes: the size of a block of rows in float64; at least the last core's ``p`` rows are read.
        exact_side: see above.

    Returns:
        Cores of shapes ``spec.core_shapes``, and the error, measured; what the cores have in rows past the table's end
        is part of it.

    Raises:
        ValueError: if the table has numbers that are not finite.
    """
    p, q, r = spec.p, spec.q, (1, *spec.ranks, 1)
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    passes = 2 if _is_exact(p[-1] * q[-1], r[-2], exact_side) else 2 + KRYLOV_PASSES
    counted = _Counted(read, spec.num_embeddings * passes, progress)
    source: ReadRows = counted.read
    num_rows = spec.num_embeddings
    cores: list[Tensor] = []
    energy = missed = 0.0
    for k in reversed(range(1, spec.num_cores)):
        unfolding = _Unfolding(source, num_rows, p[k], math.prod(q[:k]), q[k], r[k + 1], block_bytes)
        basis, energy_here = _leading_right_vectors(unfolding, r[k], exact_side)
        if not cores:
            energy = energy_here
            if not math.isfinite(energy):
                raise ValueError("the table has numbers that are not finite")
        core = basis.T.reshape(r[k], p[k], q[k], r[k + 1]).transpose(0, 1)
        cores.insert(0, core.to(dtype))
        projected = torch.empty(unfolding.num_prefixes, math.prod(q[:k]) * r[k], dtype=kept)
        left = 0.0
        for first, block in unfolding.blocks():
            product = block @ basis
            left += float(torch.linalg.vector_norm(product)) ** 2
            part = product.view(-1, projected.shape[1])
            projected[first : first + part.shape[0]] = part
        missed += max(energy_here - left, 0.0)
        source, num_rows = _rows_of(projected), unfolding.num_prefixes
    first_core = torch.zeros(p[0], q[0] * r[1], dtype=dtype)
    first_core[:num_rows] = source(0, num_rows)
    cores.insert(0, first_core.view(p[0], 1, q[0], r[1]))
    return Compressed(equal_magnitudes(cores), math.sqrt(missed / energy) if energy else 0.0)


def _rows_of(table: Tensor) -> ReadRows:
    return lambda first, last: table[first:last]


def _is_exact(width: int, rank: int, exact_side: int) -> bool:
    """Whether all of an unfolding's columns are searched, and not only a Krylov space, which is smaller if it pays."""
    return width <= max(exact_side, KRYLOV_PASSES * (rank + OVERSAMPLE))


class _Counted:
    """Reads rows and says how much of all reading is done."""

    def __init__(self, read: ReadRows, total: int, progress: Callable[[float], None] | None) -> None:
        self._read, self._total, self._progress = read, total, progress
        self._done = 0

    def read(self, first: int, last: int) -> Tensor:
        rows = self._read(first, last)
        self._done += last - first
        if self._progress is not None:
            self._progress(self._done / self._total)
        return rows


@dataclass
class _Unfolding:
    """A table ``[rows, Q q r]`` as a matrix ``[prefixes Q, p q r]``, of which a few prefixes are read at a time."""

    read: ReadRows
    num_rows: int
    p: int
    columns_before: int
    q: int
    rank: int
    block_bytes: int

    @property
    def num_prefixes(self) -> int:
        return -(-self.num_rows // self.p)

    @property
    def width(self) -> int:
        return self.p * self.q * self.rank

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """First prefix and float64 ``[prefixes Q, p q r]``."""
        step = max(1, self.block_bytes // (8 * self.columns_before * self.width))
        for prefix in range(0, self.num_prefixes, step):
            prefixes = min(step, self.num_prefixes - prefix)
            first, last = prefix * self.p, min((prefix + prefixes) * self.p, self.num_rows)
            block = self.read(first, last).double()
            if block.shape[0] < prefixes * self.p:
                block = torch.cat([block, block.new_zeros(prefixes * self.p - block.shape[0], block.shape[1])])
            block = block.view(prefixes, self.p, self.columns_before, self.q * self.rank)
            yield prefix, block.transpose(1, 2).reshape(-1, self.width)


def _leading_right_vectors(unfolding: _Unfolding, rank: int, exact_side: int) -> tuple[Tensor, float]:
    """An orthonormal basis ``[width, rank]`` that keeps the most of the unfolding, and its squared norm."""
    trial = None if _is_exact(unfolding.width, rank, exact_side) else _krylov_space(unfolding, rank)
    side = unfolding.width if trial is None else trial.shape[1]
    gram = torch.zeros(side, side, dtype=torch.float64)
    energy = 0.0
    for _, block in unfolding.blocks():
        energy += float(torch.linalg.vector_norm(block)) ** 2
        within = block if trial is None else block @ trial
        gram.addmm_(within.T, within)
    if not math.isfinite(energy):
        raise ValueError("the table has numbers that are not finite")
    vectors = torch.linalg.eigh(gram).eigenvectors[:, -rank:].flip(1)  # eigenvalues come in ascending order
    return vectors if trial is None else trial @ vectors, energy


def _krylov_space(unfolding: _Unfolding, rank: int) -> Tensor:
    """Orthonormal basis of ``[S y, S² y, ...]`` for ``S = Mᵀ M`` and a random ``y``, ``[width, side]``."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(unfolding.width, rank + OVERSAMPLE, generator=generator, dtype=torch.float64)
    space = []
    for _ in range(KRYLOV_PASSES):
        image = torch.zeros_like(y)
        for _, block in unfolding.blocks():
            image.addmm_(block.T, block @ y)
        y = torch.linalg.qr(image).Q
        space.append(y)
    return torch.linalg.qr(torch.cat(space, dim=1)).Q
