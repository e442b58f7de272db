"""Making cores and reading them back: initialisation, TT-SVD, rows, whole tables, cores of FBTT.

Cores are tensors ``[p_k, r_{k-1}, q_k, r_k]``, first to last; see `flowtt_torchrec.spec`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flowtt_torchrec.spec import TTSpec
from flowtt_torchrec.tt_svd import from_dense as from_dense
from flowtt_torchrec.whole_numbers import whole_number

# TT-Rec draws core entries from a Gaussian without its middle: |x| > 2 (TT-Rec, section 3.2). Products of entries
# near zero would make the table's distribution pile up at zero.
_LEAST_MAGNITUDE = 2.0


def core_name(k: int) -> str:
    """Name of core ``k`` of a table in module and state dict."""
    return f"tt_core{k}"


def default_std(num_embeddings: int) -> float:
    """Standard deviation of TorchRec's default, uniform between ``±1/sqrt(num_embeddings)``."""
    return 1.0 / math.sqrt(3.0 * num_embeddings)


def init_cores(
    spec: TTSpec,
    name: str,
    std: float | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """Draws cores whose product has mean zero and standard deviation ``std``.

    Entries come from TT-Rec's sampled Gaussian. An element of a row sums ``prod(ranks)`` products of ``d`` entries, so
    entries of variance ``(std**2 / prod(ranks)) ** (1 / d)`` give the rows variance ``std**2``.

    Args:
        spec: shape of the table.
        name: the table's name. It seeds the draw, so that a table starts the same on any rank and under any plan.
        std: standard deviation of the rows' elements; `default_std` if not given.
        seed: changes all tables' draws together.
        dtype: of the cores.
        device: of the cores. The numbers are drawn on the CPU and do not depend on it.

    Returns:
        The cores, first to last, of shapes ``spec.core_shapes``.
    """
    std = default_std(spec.num_embeddings) if std is None else std
    core_std = (std**2 / math.prod(spec.ranks)) ** (0.5 / spec.num_cores)
    seed = whole_number("seed", seed)
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    return [
        (_sampled_gaussian(shape, generator) * core_std).to(device=device, dtype=dtype) for shape in spec.core_shapes
    ]


def _sampled_gaussian(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Standard normal numbers given that their magnitude exceeds `_LEAST_MAGNITUDE`, scaled to variance one."""
    t = _LEAST_MAGNITUDE
    tail = 0.5 * math.erfc(t / math.sqrt(2))
    density = math.exp(-t * t / 2) / math.sqrt(2 * math.pi)
    std = math.sqrt(1 + t * density / tail)  # of the two tails of the standard normal beyond t
    u = torch.rand(tuple(shape), generator=generator, dtype=torch.float32).mul_(2).sub_(1)
    magnitude = torch.special.ndtri(u.abs().clamp_(min=torch.finfo(u.dtype).tiny).mul_(tail)).neg_()
    return magnitude.div_(std).copysign_(u)


def digits(rows: Tensor, p: Sequence[int]) -> list[Tensor]:
    """Splits row numbers into their mixed-radix digits, most significant first."""
    out = []
    for base in reversed(p[1:]):
        out.append(rows % base)
        rows = torch.div(rows, base, rounding_mode="floor")
    return [rows, *reversed(out)]


def tt_rows(cores: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Rows of the table that ``cores`` stand for; differentiable in the cores.

    Args:
        cores: cores ``[p_k, r_{k-1}, q_k, r_k]``.
        rows: row numbers, int32 or int64, of shape ``[N]``.

    Returns:
        The rows, ``[N, embedding_dim]``.
    """
    return _prefix_products(cores, rows.long()).squeeze(2)


def _prefix_products(cores: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Products ``G_1[i_1] ... G_k[i_k]`` of the first ``k`` cores, ``[N, q_1 ... q_k, r_k]``."""
    index = digits(rows, [core.shape[0] for core in cores])
    product = cores[0][index[0]].flatten(1, 2)  # [N, q_1, r_1], the columns so far and the open rank
    for core, i in zip(cores[1:], index[1:], strict=True):
        _, rank, q, next_rank = core.shape
        product = torch.bmm(product, core[i].reshape(-1, rank, q * next_rank))
        product = product.reshape(-1, product.shape[1] * q, next_rank)
    return product


def row_range(cores: Sequence[Tensor], first: int, last: int) -> Tensor:
    """Rows ``first`` to ``last - 1``, ``[last - first, embedding_dim]``; the products of their prefixes are shared."""
    p = cores[-1].shape[0]
    start, end = first // p, -(-last // p)
    products = _prefix_products(cores[:-1], torch.arange(start, end, device=cores[0].device))
    rows = torch.einsum("nar,jrc->njac", products, cores[-1].squeeze(3))
    return rows.reshape((end - start) * p, -1)[first - start * p : last - start * p]


def to_dense(cores: Sequence[Tensor], num_embeddings: int) -> Tensor:
    """The whole table, ``[num_embeddings, embedding_dim]``; differentiable in the cores.

    Takes the memory of the dense table. Of the addressable rows past ``num_embeddings`` no more is computed than the
    last value of the first digit brings along.
    """
    tail = cores[-1].squeeze(3)  # [p_d, r, q_d]
    for core in reversed(cores[1:-1]):
        tail = torch.einsum("iaqr,jrc->ijaqc", core, tail)
        tail = tail.reshape(-1, core.shape[1], core.shape[2] * tail.shape[4])
    first = cores[0][: -(-num_embeddings // tail.shape[0])].squeeze(1)  # only the first digits in use
    table = torch.einsum("iqr,jrc->ijqc", first, tail)
    return table.reshape(first.shape[0] * tail.shape[0], -1)[:num_embeddings]


def from_fbtt(cores: Sequence[Tensor], spec: TTSpec) -> list[Tensor]:
    """Cores of FBTT-Embedding, ``[1, p_k, r_{k-1} q_k r_k]``, as ours: the same numbers in the same order.

    Raises:
        ValueError: if the number of cores or a core's size is not the spec's.
    """
    if len(cores) != spec.num_cores:
        raise ValueError(f"{len(cores)} FBTT cores given, but the TTSpec has {spec.num_cores}")
    out = []
    for k, (core, shape) in enumerate(zip(cores, spec.core_shapes, strict=True)):
        expected = (1, shape[0], math.prod(shape[1:]))
        if tuple(core.shape) != expected:
            raise ValueError(f"FBTT core {k} is {tuple(core.shape)}, but the TTSpec needs {expected}")
        out.append(core.detach().reshape(shape).clone())
    return out
