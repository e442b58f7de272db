"""Small groups of tables, batches for them, and the lookup by brute force on materialised tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from flowtt_torchrec import ops
from flowtt_torchrec.cores import to_dense
from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.spec import TTSpec

BACKENDS = ("reference", "native")
# torch 2.11 does not take graphs whose backward changes parameters: https://github.com/pytorch/pytorch/pull/177213
graphs_that_step = pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12), reason="torch 2.12 is needed"
)
both_backends = pytest.mark.parametrize("backend", BACKENDS)
INSTRUCTIONS = ("baseline", "avx2", "avx512", "amx")
# And the CUDA kernels, on an emulator and on a GPU; they have no float64: see `dtype_of`.
CUDA_EMULATED, CUDA = "cuda-emulated", "cuda"
every_backend = pytest.mark.parametrize(
    "backend", [*BACKENDS, CUDA_EMULATED, pytest.param(CUDA, marks=pytest.mark.cuda)], indirect=True
)

SPECS = {
    "two_cores": TTSpec(23, 6, (4, 6), (2, 3), (5,)),
    "three_cores": TTSpec(100, 12, (5, 4, 6), (2, 3, 2), (3, 5)),
    "four_cores": TTSpec(60, 16, (3, 2, 4, 3), (2, 2, 2, 2), (2, 3, 2)),
    "powers_of_two": TTSpec(512, 64, (8, 8, 8), (4, 4, 4), (16, 16)),
    "rank_32": TTSpec(1000, 64, (10, 10, 10), (4, 4, 4), (32, 32)),
    "odd": TTSpec(343, 105, (7, 7, 7), (3, 5, 7), (7, 9)),
    "factors_of_one": TTSpec(17, 4, (1, 5, 4), (1, 4, 1), (1, 3)),
    "tiny": TTSpec(7, 4, (2, 2, 2), (2, 1, 2), (2, 2)),
    "one_row": TTSpec(1, 4, (1, 1), (2, 2), (2,)),
}


def dtype_of(backend: str) -> torch.dtype:
    """The most exact type that a backend has."""
    return torch.float32 if backend in (CUDA_EMULATED, CUDA) else torch.float64


def choose_instructions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the CPU kernels for an instruction set run; skips the test where this machine has it not."""
    monkeypatch.setenv("FLOWTT_CPU_ISA", name)
    try:
        assert torch.ops.flowtt.cpu_isa() == name
    except RuntimeError as error:
        pytest.skip(str(error))


@contextmanager
def repeatable_ops(backend: str) -> Iterator[None]:
    """Within the block, the backend's ops run as ``backend`` and give the same bits every time."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with ops.use_backend(backend):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def layout_of(*names: str, feature_tables: list[int] | None = None) -> TTLayout:
    return TTLayout([SPECS[name] for name in names], list(names), feature_tables)


def mixed_layout() -> TTLayout:
    """All sample tables; some features share a table, and some tables have no feature."""
    return layout_of(*SPECS, feature_tables=[5, 0, 1, 2, 1, 4, 6, 8, 0])


@st.composite
def groups(draw: st.DrawFn) -> TTLayout:
    """Any few tables of any shapes, some with several features, some with none."""
    specs = []
    for _ in range(draw(st.integers(1, 3))):
        d = draw(st.integers(2, 4))
        p = tuple(draw(st.lists(st.integers(1, 6), min_size=d, max_size=d)))
        q = tuple(draw(st.lists(st.integers(1, 4), min_size=d, max_size=d)))
        addressable, dim = int(torch.tensor(p).prod()), int(torch.tensor(q).prod())
        rank = draw(st.integers(1, 6))
        ranks, bound = [], 1
        for k in range(d - 1):
            bound = min(bound * p[k] * q[k], rank)
            ranks.append(bound)
        bound = 1
        for k in range(d - 1, 0, -1):
            bound = min(bound * p[k] * q[k], ranks[k - 1])
            ranks[k - 1] = bound
        specs.append(TTSpec(draw(st.integers(1, addressable)), dim, p, q, tuple(ranks)))
    features = draw(st.lists(st.integers(0, len(specs) - 1), min_size=1, max_size=4))
    return TTLayout(specs, [f"t{t}" for t in range(len(specs))], features)


def random_weights(layout: TTLayout, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(layout.num_parameters, generator=generator, dtype=torch.float64).mul_(0.5).to(dtype)


def random_batch(layout: TTLayout, batch_size: int, longest: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Indices and offsets of bags with 0 to ``longest`` lookups."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(longest + 1, (layout.num_features, batch_size), generator=generator)
    indices = [
        torch.randint(layout.specs[table].num_embeddings, (int(of.sum()),), generator=generator)
        for table, of in zip(layout.feature_tables, lengths)
    ]
    return torch.cat(indices), offsets_of(lengths.flatten())


def flat_grad(module: nn.Module) -> Tensor:
    """The gradients of a module's cores, in the order of its flat weights."""
    return torch.cat([core.grad.flatten() for core in module.parameters()])


def offsets_of(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0), (1, 0))


def brute_force(
    layout: TTLayout,
    weights: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None = None,
    pooling: str = "sum",
) -> Tensor:
    """The lookup on dense tables, by torch's own embedding_bag; differentiable."""
    batch_size = (offsets.numel() - 1) // layout.num_features
    factors = torch.ones(indices.numel(), dtype=weights.dtype) if per_sample_weights is None else per_sample_weights
    cores, outputs = layout.core_views(weights), []
    for feature, table in enumerate(layout.feature_tables):
        dense = to_dense(cores[table], layout.specs[table].num_embeddings)
        bounds = offsets[feature * batch_size : (feature + 1) * batch_size + 1].long()
        own = slice(int(bounds[0]), int(bounds[-1]))
        pooled = F.embedding_bag(
            indices[own].long(), dense, bounds - bounds[0], mode="sum", include_last_offset=True,
            per_sample_weights=factors[own],
        )  # fmt: skip
        outputs.append(pooled / bounds.diff().clamp(min=1)[:, None] if pooling == "mean" else pooled)
    return torch.cat(outputs, dim=1)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Compares with the largest expected value as the scale, which suits sums of many terms."""
    assert actual.shape == expected.shape
    if tolerance is None:
        tolerance = 1e-11 if actual.dtype == torch.float64 else 1e-5
    if actual.numel():
        scale = float(expected.detach().abs().max())
        error = float((actual.detach().double() - expected.detach().double()).abs().max())
        assert error <= tolerance * scale, f"error {error:.3g} where values are up to {scale:.3g}"
