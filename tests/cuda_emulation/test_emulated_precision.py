"""16-bit cores and TF32 in the CUDA ops, on the emulator."""

from __future__ import annotations

import pytest
import torch
from tt_samples import SPECS, mixed_layout, random_batch, random_weights

from cuda_emulation import build, emulated
from cuda_emulation.checked_run import compare_16_bit, compare_rounding
from flowtt_torchrec import ops, reference
from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.optimizers import KINDS
from flowtt_torchrec.precision import TO_NEAREST
from flowtt_torchrec.spec import TTSpec

pytestmark = pytest.mark.skipif(build.toolkit() is None, reason="the headers of the CUDA toolkit are not here")

LAYOUTS = {
    "mixed": mixed_layout(),
    "ranks 16, 8": TTLayout([TTSpec(500, 64, (8, 8, 8), (4, 4, 4), (16, 8))], ["t"]),
    "ranks 8, 16": TTLayout([TTSpec(500, 64, (8, 8, 8), (2, 4, 8), (8, 16))], ["t"]),
    "four cores": TTLayout([TTSpec(32, 256, (2, 2, 2, 4), (4, 4, 4, 4), (8, 32, 16))], ["t"]),
    "slabs": TTLayout([TTSpec(2000, 64, (32, 2, 32), (4, 4, 4), (128, 128)), SPECS["odd"]], ["large", "odd"]),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=[name.replace(" ", "-") for name in LAYOUTS])
both_16_bit_types = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


@pytest.fixture(scope="module")
def emulator():
    return emulated.load()


@every_layout
@both_16_bit_types
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_16_bit_cores_are_read_as_floats(emulator, layout, dtype, deterministic):
    torch.use_deterministic_algorithms(deterministic)
    try:
        compare_16_bit(layout, *random_batch(layout, 12, 3), dtype)
    finally:
        torch.use_deterministic_algorithms(False)


@both_16_bit_types
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [TO_NEAREST, 7], ids=["nearest", "stochastic"])
def test_new_weights_are_rounded_as_defined(emulator, dtype, kind, seed):
    layout = mixed_layout()
    compare_rounding(layout, *random_batch(layout, 12, 3), dtype, kind, seed)


@pytest.mark.parametrize("layout", [LAYOUTS["ranks 16, 8"], LAYOUTS["four cores"]], ids=["three-cores", "four-cores"])
def test_tf32_where_torch_allows_it(emulator, layout):
    indices, offsets = random_batch(layout, 12, 3)
    weights, plan = random_weights(layout, torch.float32), reference.flow_plan(layout, indices, offsets)
    exact = reference.pooled_forward(weights.double(), layout, offsets, plan)
    before = torch.get_float32_matmul_precision()
    errors = {}
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            output = ops.BACKENDS[emulated.BACKEND].pooled_forward(weights, layout, offsets, plan)
            errors[precision] = float((output - exact).abs().max() / exact.abs().max())
    finally:
        torch.set_float32_matmul_precision(before)
    assert errors["highest"] < 2e-6 < 5e-5 < errors["high"] < 2e-3
