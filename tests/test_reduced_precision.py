"""Cores in bfloat16 and float16: every op against the definition, and what rounding does to training."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from tt_samples import (
    BACKENDS,
    INSTRUCTIONS,
    assert_near,
    both_backends,
    brute_force,
    choose_instructions,
    flat_grad,
    layout_of,
    mixed_layout,
    offsets_of,
    random_batch,
    random_weights,
)

from flowtt_torchrec import ablation, ops
from flowtt_torchrec.embedding_bag import BatchedTTEmbeddingBags, TTEmbeddingBag
from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.optimizers import KINDS, OptimizerSpec, apply_gradient, init_state
from flowtt_torchrec.plan import PoolingMode
from flowtt_torchrec.precision import TO_NEAREST, random_bits, round_stochastically, rounding_seed, seed_of_step
from flowtt_torchrec.spec import TTSpec

reduced = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


def tiled_layout() -> TTLayout:
    """Three-core tables of the sizes that tile registers take, and one that just misses them."""
    specs = {
        "rank_16": TTSpec(500, 64, (8, 8, 8), (4, 4, 4), (16, 16)),
        "rank_32": TTSpec(1000, 64, (10, 10, 10), (4, 4, 4), (32, 32)),
        "rank_64": TTSpec(1500, 64, (10, 16, 10), (8, 2, 4), (64, 32)),
        "seven_left_rows": TTSpec(300, 56, (10, 3, 10), (7, 4, 2), (32, 16)),
        "one_left_row": TTSpec(600, 8, (40, 4, 4), (1, 4, 2), (32, 8)),
        "odd_columns": TTSpec(300, 24, (10, 3, 10), (2, 3, 4), (16, 16)),
    }
    return TTLayout(list(specs.values()), list(specs), [1, 0, 2, 3, 1, 4, 5])


@reduced
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("make", [mixed_layout, tiled_layout], ids=["mixed", "tiled"])
def test_kernels_are_the_definition(dtype, instructions, make, monkeypatch):
    layout = make()
    choose_instructions(instructions, monkeypatch)
    results = []
    for backend, flow in (("reference", "prefix"), *(("native", flow) for flow in ("prefix", "unique", "direct"))):
        indices, offsets = random_batch(layout, batch_size=40, longest=5)
        generator = torch.Generator().manual_seed(1)
        factors = torch.rand(indices.numel(), generator=generator).requires_grad_()
        weights = random_weights(layout, dtype).requires_grad_()
        with ops.use_backend(backend), ablation(flow=flow):
            plan = ops.flow_plan(layout, indices, offsets)
            output = ops.pooled_lookup(weights, layout, offsets, plan, per_sample_weights=factors, pooling="mean")
            grad_output = torch.randn(output.shape, generator=generator)
            grads = torch.autograd.grad(output, [weights, factors], grad_output)
            flat, _ = ops._backend().pooled_backward(
                grad_output, weights.detach(), layout, offsets, plan, factors.detach(), PoolingMode.MEAN
            )
        assert grads[0].dtype == dtype
        assert torch.equal(grads[0], flat.to(dtype))
        results.append([output.detach(), grads[1], flat])
    assert all(tensor.dtype == torch.float32 for tensor in results[0])
    for result in results[1:]:
        for value, expected in zip(result, results[0]):
            assert_near(value, expected, 2e-5)


@both_backends
@reduced
def test_lookup_is_that_of_the_widened_cores(backend, dtype):
    layout = mixed_layout()
    indices, offsets = random_batch(layout, batch_size=7)
    weights = random_weights(layout, dtype)
    with ops.use_backend(backend):
        output = ops.lookup(weights, layout, indices, offsets)
    assert_near(output, brute_force(layout, weights.double(), indices, offsets))


@reduced
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
def test_fused_step_is_the_definition(dtype, kind, stochastic):
    """Results may differ where values before rounding do, in the last bit of float32: then by one step, and rarely."""
    layout = mixed_layout()
    optimizer = OptimizerSpec(kind, 0.05, 1e-3, weight_decay=0.1, stochastic_rounding=stochastic)
    results, before = [], torch.arange(layout.num_tables)  # steps of each table
    for backend in BACKENDS:
        weights, state = random_weights(layout, dtype).requires_grad_(), init_state(layout, kind, dtype=dtype)
        state["step"].copy_(before)
        for step in range(3):
            indices, offsets = random_batch(layout, batch_size=9, seed=step)
            grad_output = torch.randn(9, layout.total_dim, generator=torch.Generator().manual_seed(step))
            with ops.use_backend(backend):
                ops.fused_lookup(
                    weights, layout, indices, offsets, optimizer=optimizer, state=state, seed=5
                ).backward(grad_output)  # fmt: skip
        assert torch.equal(state["step"], before + 3)
        results.append((weights.detach(), state))
    (expected, expected_state), (actual, actual_state) = results
    assert actual.dtype == dtype
    largest_step = 2.0 ** (-6 if dtype == torch.bfloat16 else -9) * float(expected.abs().max())
    assert float((actual.float() - expected.float()).abs().max()) <= largest_step
    assert (actual == expected).double().mean() > 0.97
    for name in expected_state.keys() - {"step"}:
        assert expected_state[name].dtype == torch.float32
        assert_near(actual_state[name], expected_state[name], 0.02)


@reduced
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_rounding_has_the_bits_of_the_definition(dtype, instructions, monkeypatch):
    """A learning rate that is a power of two, so that values before rounding are the same to the bit; some denormal."""
    choose_instructions(instructions, monkeypatch)
    layout = layout_of("rank_32", "two_cores")
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(-8, 9, (layout.num_parameters,), generator=generator) / 8.0
    small = torch.randint(0, 2, start.shape, generator=generator).bool()
    start = torch.where(small, start * 2.0**-14, start).to(dtype)
    indices = torch.cat([torch.arange(1000), torch.arange(20)])
    offsets = torch.cat([torch.arange(1001), torch.arange(1001, 1021), torch.full((980,), 1020)])
    grad_output = torch.randint(-2, 3, (1000, layout.total_dim), generator=generator).float()
    optimizer, state = OptimizerSpec("sgd", 2.0**-12), init_state(layout, "sgd", dtype=dtype)
    state["step"].copy_(torch.tensor([0, 2**24]))
    weights = start.clone().requires_grad_()
    with ops.use_backend("native"):
        plan = ops.flow_plan(layout, indices, offsets)
        gradient, _ = ops._backend().pooled_backward(grad_output, start, layout, offsets, plan)
        output = ops.fused_lookup(weights, layout, indices, offsets, optimizer=optimizer, state=state, seed=11)
        output.backward(grad_output)
    values = start.float() - 2.0**-12 * gradient
    assert (values != values.to(dtype).float()).double().mean() > 0.5
    assert dtype == torch.bfloat16 or (values.abs() < 2.0**-14).sum() > 200
    elements = torch.arange(layout.num_parameters).split([spec.num_parameters for spec in layout.specs])
    seeds = [seed_of_step(rounding_seed(11), step) for step in (1, 2**24 + 1)]
    assert seeds[0] == seeds[1] < 2**24
    random = torch.cat([random_bits(seed, of_table) for seed, of_table in zip(seeds, elements)])
    assert torch.equal(weights.detach(), round_stochastically(values, dtype, random))


@both_backends
@reduced
def test_small_steps_add_up_only_with_stochastic_rounding(backend, dtype):
    """Steps below half the distance to the next number: lost to nearest, of the right mean stochastically."""
    layout = layout_of("three_cores")
    indices, offsets = torch.arange(100), torch.arange(101)

    def moved(weights_dtype, stochastic):
        weights = torch.full((layout.num_parameters,), 0.5, dtype=weights_dtype, requires_grad=True)
        state = init_state(layout, "sgd", dtype=weights_dtype)
        optimizer = OptimizerSpec("sgd", torch.finfo(dtype).eps / 2000, stochastic_rounding=stochastic)
        with ops.use_backend(backend):
            for _ in range(60):
                output = ops.fused_lookup(weights, layout, indices, offsets, optimizer=optimizer, state=state)
                output.backward(torch.full_like(output, -1.0))
        return (weights.detach() - 0.5).double()

    assert not moved(dtype, False).any()
    assert float(moved(dtype, True).mean()) == pytest.approx(float(moved(torch.float32, False).mean()), rel=0.15)


@reduced
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_from_a_summed_gradient(dtype, kind):
    """In float32 and rounded by the table's name: equal for replicas in groups of different tables."""
    alone, among = layout_of("three_cores"), layout_of("two_cores", "three_cores", "tiny")
    optimizer = OptimizerSpec(kind, 0.1, 1e-3, weight_decay=0.1)
    weights = random_weights(alone, dtype)
    first = among.specs[0].num_parameters
    own = slice(first, first + alone.num_parameters)
    together = random_weights(among, dtype)
    together[own] = weights
    states = [init_state(layout, kind, dtype=dtype) for layout in (alone, among)]
    states[1]["step"].copy_(torch.tensor([9, 0, 4]))  # of tables that began earlier
    wide, wide_state = weights.float(), init_state(alone, kind)
    for step in range(3):
        gradient = torch.randn(alone.num_parameters, generator=torch.Generator().manual_seed(step))
        everywhere = torch.ones(among.num_parameters)
        everywhere[own] = gradient
        touched = [torch.ones(layout.num_slices, dtype=torch.bool) for layout in (alone, among)]
        apply_gradient(alone, optimizer, weights, states[0], gradient, touched[0], seed=3)
        apply_gradient(among, optimizer, together, states[1], everywhere, touched[1], seed=3)
        assert torch.equal(weights, together[own])
        apply_gradient(alone, optimizer, wide, wide_state, gradient, touched[0])
    assert_near(weights, wide, 0.02 if dtype == torch.bfloat16 else 0.003)
    assert states[0]["step"].tolist() == [3]


@reduced
def test_a_step_to_nearest(dtype):
    layout = layout_of("tiny")
    weights, gradient = random_weights(layout, dtype), torch.randn(layout.num_parameters)
    expected = (weights.float() - 0.1 * gradient).to(dtype)
    optimizer = OptimizerSpec("sgd", 0.1, stochastic_rounding=False)
    assert optimizer.rounding_seed(dtype, 1) == TO_NEAREST
    apply_gradient(layout, optimizer, weights, init_state(layout, "sgd", dtype=dtype), gradient)
    assert torch.equal(weights, expected)


def batched(dtype, optimizer=None, **kwargs):
    layout = tiled_layout()
    specs = dict(zip(layout.names, layout.specs))
    return BatchedTTEmbeddingBags(specs, dtype=dtype, optimizer=optimizer, **kwargs)


@reduced
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_goes_on_to_the_same_bits(dtype, kind):
    optimizer = OptimizerSpec(kind, 0.1)
    bags = batched(dtype, optimizer)

    def train(module, first, steps):
        for step in range(first, first + steps):
            indices, offsets = random_batch(module.layout, batch_size=8, seed=step)
            module(indices, offsets).square().sum().backward()

    train(bags, 0, 2)
    resumed = batched(dtype, optimizer)
    state = {key: value.clone() for key, value in bags.state_dict().items()}
    assert {str(value.dtype) for key, value in state.items() if key.endswith("momentum1")} <= {"torch.float32"}
    resumed.load_state_dict(state)
    for module in (bags, resumed):
        train(module, 2, 2)
    assert torch.equal(bags.weights, resumed.weights)
    other = batched(dtype, optimizer, seed=1)
    other.load_state_dict(state)
    train(other, 2, 2)
    assert not torch.equal(bags.weights, other.weights)


@both_backends
@reduced
def test_output_dtype(backend, dtype):
    with ops.use_backend(backend):
        for bags in (batched(dtype), batched(dtype, output_dtype=torch.bfloat16), batched(dtype, output_dtype=dtype)):
            indices, offsets = random_batch(bags.layout, batch_size=3)
            output = bags(indices, offsets)
            assert output.dtype == bags.output_dtype
            output.square().sum().backward()
            assert flat_grad(bags).dtype == dtype
            assert flat_grad(bags).abs().sum() > 0
            wide = ops.lookup(bags.weights.float(), bags.layout, indices, offsets)
            assert_near(output, wide, 1e-6 if output.dtype == torch.float32 else 0.01)


@both_backends
@reduced
def test_one_table_is_like_torchs(backend, dtype):
    table = torch.randn(100, 12)
    with ops.use_backend(backend):
        ours = TTEmbeddingBag.from_pretrained(table, rank=200, freeze=False, padding_idx=3).to(dtype)
        assert ours.weights.dtype == dtype
        torchs = nn.EmbeddingBag.from_pretrained(table.to(dtype), freeze=False, padding_idx=3)
        torchs.mode = "mean"
        indices = torch.randint(100, (5, 4), generator=torch.Generator().manual_seed(0))
        output, expected = ours(indices), torchs(indices)
        assert output.dtype == expected.dtype == dtype
        assert_near(output, expected, 0.05)
        ours.mode = torchs.mode = "sum"
        ours.padding_idx = torchs.padding_idx = None
        factors = torch.rand(5, 4, dtype=dtype)
        assert_near(ours(indices, per_sample_weights=factors), torchs(indices, per_sample_weights=factors), 0.05)
        made = TTEmbeddingBag(100, 12, rank=4, dtype=dtype)
        made(indices).sum().backward()
        assert flat_grad(made).dtype == dtype


def test_only_floating_point_cores():
    with pytest.raises(
        ValueError, match=r"cores cannot be torch\.int8; use one of float32, float64, bfloat16, float16"
    ):
        batched(torch.int8)


def test_reduced_cores_learn_nearly_as_float32():
    """Training towards the rows of another table: with stochastic rounding the loss comes down as in float32."""
    spec = TTSpec(200, 16, (5, 8, 5), (4, 2, 2), (8, 8))
    target = torch.randn(200, 16, generator=torch.Generator().manual_seed(0)) * 0.1
    losses = {}
    for name, dtype, stochastic in (
        ("float32", torch.float32, True),
        ("bfloat16", torch.bfloat16, True),
        ("nearest", torch.bfloat16, False),
    ):
        optimizer = OptimizerSpec("rowwise_adagrad", 0.004, stochastic_rounding=stochastic)
        bags = BatchedTTEmbeddingBags({"t": spec}, optimizer=optimizer, dtype=dtype)
        for _ in range(150):
            loss = (bags(torch.arange(200), torch.arange(201)) - target).square().mean()
            loss.backward()
        losses[name] = float(loss.detach())
    assert losses["bfloat16"] < 1.1 * losses["float32"]
    assert losses["nearest"] > losses["bfloat16"]


def test_many_threads_and_a_hot_row():
    """Flows and owner slices that tasks share, in bfloat16 on tiles where there are some."""
    layout = tiled_layout()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.ones(layout.num_features, 6000, dtype=torch.int64)
    rows = torch.tensor([layout.specs[table].num_embeddings for table in layout.feature_tables])
    indices = (torch.rand(layout.num_features, 6000, generator=generator) ** 3 * rows[:, None]).long()
    indices[0, :5000] = 17
    offsets = offsets_of(lengths.flatten())
    results = {}
    for threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            weights = random_weights(layout, torch.bfloat16).requires_grad_()
            with ops.use_backend("native"):
                output = ops.lookup(weights, layout, indices.flatten(), offsets)
                grad_output = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
                results[threads] = output.detach(), torch.autograd.grad(output, weights, grad_output)[0].float()
        finally:
            torch.set_num_threads(before)
    with ops.use_backend("native"):
        wide = random_weights(layout, torch.bfloat16).float().requires_grad_()
        output = ops.lookup(wide, layout, indices.flatten(), offsets)
        expected = output.detach(), torch.autograd.grad(output, wide, grad_output)[0]
    for result in results.values():
        assert_near(result[0], expected[0], 1e-5)
        assert_near(result[1], expected[1], 0.005)
