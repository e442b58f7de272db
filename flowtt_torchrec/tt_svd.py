"""TT-SVD of a table that is too large to hold: its rows are read block by block, in order, a few times.

TT-SVD (Oseledets, SIAM J. Sci. Comput. 2011, algorithm 1), from the last core to the first. Rows that share a prefix
are neighbours, so the unfolding ``M`` that the last core comes from, ``[p_1 q_1 ... p_{d-1} q_{d-1}, p_d q_d]``, is
read a few of its rows at a time; the core is the orthonormal basis of the ``r_{d-1}`` leading right singular vectors.
What the other cores come from, ``M`` projected on that basis, is smaller by ``p_d q_d / r_{d-1}`` and kept.

A table may end before the rows that ``p`` addresses do. The rows past its end are unknown, not zeros: a table that is
a tensor train goes on as one, and zeros would break its ranks. They belong to prefixes of which no row is known, which
are left out, and at each core to one prefix that is known in part. See `_CutPrefix`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flowtt_torchrec.spec import TTSpec

ReadRows = Callable[[int, int], Tensor]
"""Rows ``first`` to ``last - 1`` of a table, ``[last - first, columns]``."""

BLOCK_BYTES = 16 << 20  # of the rows that are worked on at a time, in float64
EXACT_SIDE = 2048  # columns of an unfolding up to which its Gram matrix is made
KRYLOV_PASSES = 3
OVERSAMPLE = 16
SMALLEST = 1e-7  # singular values below that part of the largest count as 0
CERTAIN = 1e-12  # eigenvalues of a Gram matrix below that part of the largest may be but rounding
MOST_TURNS = 10  # of making the basis better for a prefix that is known in part
ENOUGH = 1e-4  # the part of the error by which a turn must lower it for another to follow


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
    columns and the table as many rows as ``p`` addresses, that is the sum of its squared singular values past the rank:
    at most ``num_cores - 1`` times the best possible together. Wider ones are searched by a randomised block Krylov
    method (Musco and Musco, NeurIPS 2015, algorithm 2), whose cut is at most ``1 + epsilon`` times that with high
    probability; in practice the error is within some thousandths. A table of exactly the spec's ranks is recovered in
    all cases. Sums are in float64.

    Besides a block of rows it takes the memory of the table times ``r_{d-1} / (p_d q_d)``, and that of a square matrix
    of ``exact_side`` or of ``4 (rank + 16)`` columns of a wider unfolding. The table is read twice, or with Krylov five
    times. Equal rows give equal bits on the same machine with the same number of threads.

    Args:
        read: reads rows, of any floating-point type, on the CPU.
        spec: the shape to bring the table to.
        dtype: of the cores.
        progress: is told how much of all reading is done, from 0 to 1.
        block_bytes: the size of a block of rows in float64; at least the last core's ``p`` rows are read.
        exact_side: see above.

    Returns:
        Cores of shapes ``spec.core_shapes``, and the error on the table's rows, measured.

    Raises:
        ValueError: if the table has numbers that are not finite.
    """
    p, q, r = spec.p, spec.q, (1, *spec.ranks, 1)
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    passes = 2 if _is_exact(p[-1] * q[-1], r[-2], exact_side) else 2 + KRYLOV_PASSES
    whole = spec.num_embeddings // p[-1] * p[-1]  # rows of whole prefixes; the others are read once
    counted = _Counted(read, whole * passes + spec.num_embeddings - whole, progress)
    source: ReadRows = counted.read
    num_rows = spec.num_embeddings  # of the source; all that it has of them is known
    cores: list[Tensor] = []
    cut: _CutPrefix | None = None  # the prefix after those rows, if some of its rows are known
    energy = missed = 0.0
    for k in reversed(range(1, spec.num_cores)):
        unfolding = _Unfolding(source, num_rows, p[k], math.prod(q[:k]), q[k], r[k + 1], block_bytes)
        known = _KnownPart.of(unfolding, cut)
        basis, energy_here = _leading_right_vectors(unfolding, known, r[k], exact_side)
        if not cores:
            energy = energy_here + (0.0 if known is None else float(known.children.square().sum()))
            if not math.isfinite(energy):
                raise ValueError("the table has numbers that are not finite")
        cores.insert(0, basis.T.reshape(r[k], p[k], q[k], r[k + 1]).transpose(0, 1))
        projected = torch.empty(unfolding.num_prefixes, math.prod(q[:k]) * r[k], dtype=kept)
        left = 0.0
        for first, block in unfolding.blocks():
            product = block @ basis
            left += float(torch.linalg.vector_norm(product)) ** 2
            part = product.view(-1, projected.shape[1])
            projected[first : first + part.shape[0]] = part
        missed += max(energy_here - left, 0.0)
        source, num_rows = _rows_of(projected), unfolding.num_prefixes
        cut = None if known is None else known.seen_from(basis)
    first_core = torch.zeros(p[0], q[0] * r[1], dtype=torch.float64)
    first_core[:num_rows] = source(0, num_rows)
    if cut is not None:
        coefficients = cut.coefficients()
        first_core[num_rows] = coefficients.flatten()
        missed += cut.squared_error(coefficients)
    cores.insert(0, first_core.view(p[0], 1, q[0], r[1]))
    relative_error = math.sqrt(missed / energy) if energy else 0.0
    return Compressed([core.to(dtype) for core in equal_magnitudes(cores)], relative_error)


@torch.no_grad()
def from_dense(weight: Tensor, spec: TTSpec) -> list[Tensor]:
    """Cores close to a dense table, by `compress_rows`, which says how close.

    Args:
        weight: the table, ``[num_embeddings, embedding_dim]``, of a floating-point type.
        spec: the shape to bring it to.

    Returns:
        Cores of shapes ``spec.core_shapes`` with the type and device of ``weight``.

    Raises:
        ValueError: if ``weight`` is not of the size that ``spec`` is for, or has numbers that are not finite.
    """
    if tuple(weight.shape) != (spec.num_embeddings, spec.embedding_dim):
        raise ValueError(
            f"the weight is {' x '.join(map(str, weight.shape))}, but the TTSpec is for "
            f"{spec.num_embeddings} x {spec.embedding_dim}"
        )
    compressed = compress_rows(lambda first, last: weight[first:last].cpu(), spec, dtype=weight.dtype)
    return [core.to(weight.device) for core in compressed.cores]


def equal_magnitudes(cores: list[Tensor]) -> list[Tensor]:
    """The same product from cores of equal root mean square: one learning rate then suits all of them."""
    rms = torch.stack([core.square().mean().sqrt() for core in cores])
    if not bool((rms > 0).all()):  # a table of zeros
        return [core.contiguous() for core in cores]
    target = rms.log().mean().exp()
    return [(core * (target / r)).contiguous() for core, r in zip(cores, rms, strict=True)]


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
    """A table ``[rows, Q q r]`` as a matrix ``[prefixes Q, p q r]``, of which a few prefixes are read at a time.

    Only prefixes all of whose ``p`` rows are there are part of it.
    """

    read: ReadRows
    num_rows: int
    p: int
    columns_before: int
    q: int
    rank: int
    block_bytes: int

    @property
    def num_prefixes(self) -> int:
        return self.num_rows // self.p

    @property
    def width(self) -> int:
        return self.p * self.q * self.rank

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """First prefix and float64 ``[prefixes Q, p q r]``."""
        step = max(1, self.block_bytes // (8 * self.columns_before * self.width))
        for prefix in range(0, self.num_prefixes, step):
            prefixes = min(step, self.num_prefixes - prefix)
            block = self.read(prefix * self.p, (prefix + prefixes) * self.p).double()
            block = block.view(prefixes, self.p, self.columns_before, self.q * self.rank)
            yield prefix, block.transpose(1, 2).reshape(-1, self.width)


@dataclass
class _CutPrefix:
    """The prefix at which the table ends, as the cores after it leave it to those before.

    Its coefficients ``x`` ``[Q, r]`` are not known, only rows that these make: ``x @ seen`` should be ``rows``.

    Attributes:
        rows: ``[Q, n]``.
        seen: ``[r, n]``.
        missed: squared error in rows that no coefficients make.
    """

    rows: Tensor
    seen: Tensor
    missed: float

    def coefficients(self, near: Tensor | None = None) -> Tensor:
        """Those that make the rows best; of several, those nearest to ``near``, by default the smallest."""
        near = self.rows.new_zeros(self.rows.shape[0], self.seen.shape[0]) if near is None else near
        return near + _divided(self.rows - near @ self.seen, self.seen)

    def squared_error(self, coefficients: Tensor) -> float:
        return self.missed + float((self.rows - coefficients @ self.seen).square().sum())


@dataclass
class _KnownPart:
    """What is known of the unfolding's row block ``[Q, p q r]`` in which the table ends.

    Attributes:
        children: ``[Q, n, q r]``, of the first ``n`` of its ``p`` rows: all is known.
        cut: of the row after these, if a part of it is known.
        p: rows of the block.
    """

    children: Tensor
    cut: _CutPrefix | None
    p: int

    @classmethod
    def of(cls, unfolding: _Unfolding, cut: _CutPrefix | None) -> _KnownPart | None:
        first = unfolding.num_prefixes * unfolding.p
        if first == unfolding.num_rows and cut is None:
            return None
        columns = unfolding.q * unfolding.rank
        rows = unfolding.read(first, unfolding.num_rows) if first < unfolding.num_rows else torch.empty(0)
        children = rows.double().reshape(-1, unfolding.columns_before, columns).transpose(0, 1)
        if not children.numel():
            children = children.new_empty(unfolding.columns_before, 0, columns)
        return cls(children, cut, unfolding.p)

    def seen_from(self, basis: Tensor) -> _CutPrefix:
        """The part as coefficients of a basis ``[p q r, rank]`` see it."""
        n, columns = self.children.shape[1:]
        by_row = basis.view(self.p, columns, -1)
        rows, seen = [self.children.flatten(1)], [by_row[:n].reshape(n * columns, basis.shape[1]).T]
        missed = 0.0
        if self.cut is not None:
            below = by_row[n].view(-1, self.cut.seen.shape[0], basis.shape[1])  # [q, r, rank]
            rows.append(self.cut.rows.reshape(self.children.shape[0], -1))
            seen.append(torch.einsum("qcr,cn->rqn", below, self.cut.seen).flatten(1))
            missed = self.cut.missed
        every, view = torch.cat(rows, 1), torch.cat(seen, 1)
        # No more columns than coefficients are needed to tell these.
        axes = torch.linalg.qr(view.T).Q
        within = every @ axes
        missed += max(float(every.square().sum() - within.square().sum()), 0.0)
        return _CutPrefix(within, view @ axes, missed)

    def filled(self, model: Tensor) -> Tensor:
        """A block ``[Q, p q r]``: what is known, and where nothing is known, the model's."""
        block = model.view(model.shape[0], self.p, -1).clone()
        n = self.children.shape[1]
        block[:, :n] = self.children
        if self.cut is not None:
            near = block[:, n].reshape(-1, self.cut.seen.shape[0])
            block[:, n] = self.cut.coefficients(near).view(block.shape[0], -1)
        return block.flatten(1)

    def closed(self, space: Tensor) -> list[Tensor]:
        """Parts ``[p q r, any]`` that together span what `filled` makes of blocks within a space, and the space."""
        by_row = space.view(self.p, -1, space.shape[1])
        n, width = self.children.shape[1], space.shape[0]
        parts = [by_row.clone() for _ in range(2)]
        parts[0][n:] = 0
        parts[1][:n] = 0
        if self.cut is not None:
            child = parts[1][n].view(-1, self.cut.seen.shape[0], space.shape[1])  # [q, r, any]
            fixed = torch.einsum("qcs,cd->qds", child, self.cut.seen @ torch.linalg.pinv(self.cut.seen, rtol=SMALLEST))
            parts += [torch.zeros_like(by_row) for _ in range(2)]
            parts[2][n] = fixed.reshape_as(by_row[n])
            parts[3][n] = by_row[n]
        nothing = space.new_zeros(self.children.shape[0], width)
        return [*(part.view(width, -1) for part in parts), self.filled(nothing).T]


def _divided(rows: Tensor, by: Tensor) -> Tensor:
    """The smallest ``x`` with ``x @ by`` nearest to ``rows``."""
    return torch.linalg.lstsq(by.T, rows.T, rcond=SMALLEST, driver="gelsd").solution.T


def _leading_right_vectors(
    unfolding: _Unfolding, known: _KnownPart | None, rank: int, exact_side: int
) -> tuple[Tensor, float]:
    """An orthonormal basis ``[width, rank]`` that keeps the most, and the squared norm of the unfolding."""
    trial = None if _is_exact(unfolding.width, rank, exact_side) else _krylov_space(unfolding, known, rank)
    side = unfolding.width if trial is None else trial.shape[1]
    gram = torch.zeros(side, side, dtype=torch.float64)
    energy = 0.0
    for _, block in unfolding.blocks():
        energy += float(torch.linalg.vector_norm(block)) ** 2
        within = block if trial is None else block @ trial
        gram.addmm_(within.T, within)
    if not math.isfinite(energy) or not bool(gram.isfinite().all()):
        raise ValueError("the table has numbers that are not finite")
    values, vectors = torch.linalg.eigh(gram)
    vectors = vectors[:, -rank:].flip(1)  # eigenvalues come in ascending order
    if known is None:
        return vectors if trial is None else trial @ vectors, energy
    if not bool(known.children.isfinite().all()):
        raise ValueError("the table has numbers that are not finite")
    certain = int((values[-rank:] > CERTAIN * values[-1]).sum())
    return _with_known_part(gram, trial, vectors, certain, known), energy


def _with_known_part(gram: Tensor, trial: Tensor | None, vectors: Tensor, certain: int, known: _KnownPart) -> Tensor:
    """A basis ``[width, rank]`` for the unfolding and the block of which a part is known.

    Begins with one for the unfolding alone, which is enough for a table of the ranks, and one for the rest of the part
    where that leaves some of the rank over. Then in turn what is not known is taken from the basis, and the basis made
    better for what that gives: the error in what is known falls with each turn.

    Args:
        gram: of the unfolding, ``[side, side]``.
        trial: orthonormal, ``[width, side]``, what ``gram`` and ``vectors`` are coordinates of; if not given, all.
        vectors: ``[side, rank]``, leading eigenvectors of ``gram``.
        certain: how many of these belong to eigenvalues that are not 0.
        known: the part.
    """

    def basis_of(coordinates: Tensor) -> Tensor:
        return coordinates if trial is None else trial @ coordinates

    def error_of(coordinates: Tensor) -> tuple[float, Tensor]:
        basis = basis_of(coordinates)
        seen = known.seen_from(basis)
        coefficients = seen.coefficients()
        kept = float((coordinates * (gram @ coordinates)).sum())
        return seen.squared_error(coefficients) - kept, coefficients @ basis.T

    total = float(gram.trace())
    rank = vectors.shape[1]
    if certain < rank:
        model = known.children.new_zeros(known.children.shape[0], basis_of(vectors).shape[0])
        if certain:
            model = error_of(vectors[:, :certain])[1]
        rest = known.filled(model) - model
        rest = rest if trial is None else rest @ trial
        directions = torch.linalg.svd(rest, full_matrices=False).Vh[: rank - certain].T
        vectors = torch.linalg.qr(torch.cat([vectors[:, :certain], directions, vectors[:, certain:]], 1)).Q[:, :rank]
    error, model = error_of(vectors)
    for _ in range(MOST_TURNS):
        block = known.filled(model)
        block = block if trial is None else block @ trial
        better = vectors
        for _ in range(2):
            better = torch.linalg.qr(gram @ better + block.T @ (block @ better)).Q
        now, better_model = error_of(better)
        if not now < error:
            break
        gained, error, model, vectors = error - now, now, better_model, better
        if gained <= ENOUGH * max(error + total, SMALLEST**2 * total):
            break
    return basis_of(vectors)


def _krylov_space(unfolding: _Unfolding, known: _KnownPart | None, rank: int) -> Tensor:
    """Orthonormal basis of ``[S y, S² y, ...]`` for ``S = Mᵀ M`` and a random ``y``, ``[width, side]``.

    Large enough for what is known of the block in which the table ends to be filled up within it.
    """
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(unfolding.width, rank + OVERSAMPLE, generator=generator, dtype=torch.float64)
    space = []
    for _ in range(KRYLOV_PASSES):
        image = torch.zeros_like(y)
        for _, block in unfolding.blocks():
            image.addmm_(block.T, block @ y)
        y = torch.linalg.qr(image).Q
        space.append(y)
    if known is not None:
        space = known.closed(torch.cat(space, dim=1))
    return torch.linalg.qr(torch.cat(space, dim=1)).Q
