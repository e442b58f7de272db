from __future__ import annotations

import importlib.util
from collections import defaultdict

import pytest
import torch
from tt_samples import (
    SPECS,
    assert_near,
    both_backends,
    brute_force,
    dtype_of,
    every_backend,
    layout_of,
    mixed_layout,
    random_batch,
    random_weights,
    repeatable_ops,
)

from flowtt_torchrec import ablation, ops
from flowtt_torchrec.cores import tt_rows
from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.optimizers import OptimizerSpec, init_state
from flowtt_torchrec.spec import TTSpec

both_types = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def check(layout, indices, offsets, dtype=torch.float32, factors=None, pooling="sum", flow="prefix", tolerance=None):
    """Forward, and the gradients of weights and per-sample weights, against brute force in float64."""
    weights = random_weights(layout)
    inputs = [weights.requires_grad_()]
    if factors is not None:
        inputs.append(factors.double().requires_grad_())
    expected = brute_force(layout, inputs[0], indices, offsets, *inputs[1:], pooling=pooling)
    grad_output = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected_grads = torch.autograd.grad(expected, inputs, grad_output)

    inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    with ablation(flow=flow):
        output = ops.lookup(
            inputs[0], layout, indices, offsets, per_sample_weights=(inputs[1:] or [None])[0], pooling=pooling
        )
    assert output.dtype == dtype
    assert_near(output, expected, tolerance)
    for grad, expected_grad in zip(torch.autograd.grad(output, inputs, grad_output.to(dtype)), expected_grads):
        assert_near(grad, expected_grad, tolerance)


@every_backend
@both_types
@pytest.mark.parametrize("flow", ["prefix", "unique", "direct"])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
def test_many_tables_in_one_call(backend, dtype, flow, pooling, weighted):
    if dtype == torch.float64 != dtype_of(backend):
        pytest.skip("no float64")
    layout = mixed_layout()
    indices, offsets = random_batch(layout, batch_size=13)
    factors = torch.randn(indices.numel()) if weighted else None
    with ops.use_backend(backend):
        check(layout, indices, offsets, dtype, factors, pooling, flow)


@every_backend
@pytest.mark.parametrize("table", SPECS)
def test_counts_around_tile_sizes(backend, table, subtests):
    layout = layout_of(table)
    for count in (1, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 257):
        indices = torch.randint(SPECS[table].num_embeddings, (count,), generator=torch.Generator().manual_seed(count))
        with subtests.test(count=count), ops.use_backend(backend):
            check(layout, indices, torch.arange(count + 1))


@every_backend
@pytest.mark.parametrize("table", ["two_cores", "three_cores", "four_cores", "rank_32"])
@pytest.mark.parametrize("per_prefix", [1, 3, 4, 5])
def test_rows_per_prefix(backend, table, per_prefix):
    spec = SPECS[table]
    prefixes = torch.arange(min(9, spec.num_embeddings // spec.p[-1]))
    indices = (prefixes[:, None] * spec.p[-1] + torch.arange(min(per_prefix, spec.p[-1]))).flatten()
    with ops.use_backend(backend):
        check(layout_of(table), indices.repeat(2), torch.arange(0, 2 * indices.numel() + 1, 2))


@every_backend
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_one_row_ten_thousand_times(backend, pooling):
    indices = torch.full((10_000,), 99)
    indices[5_000] = 3
    with ops.use_backend(backend):
        check(layout_of("three_cores"), indices, torch.tensor([0, 4_000, 10_000]), pooling=pooling, tolerance=1e-4)


@every_backend
@pytest.mark.parametrize(
    "spec",
    [
        TTSpec(4_000_000_000, 8, (1500, 1700, 1600), (2, 2, 2), (2, 2)),
        TTSpec(2**54, 4, (2**18, 2**18, 2**18), (1, 2, 2), (1, 2)),
    ],
    ids=["keys_over_32_bits", "rows_over_52_bits"],
)
def test_huge_tables(backend, spec):
    """Checked against rows made one by one."""
    layout = TTLayout([spec, SPECS["tiny"]], ["huge", "tiny"])
    dtype = dtype_of(backend)
    weights = random_weights(layout, dtype).requires_grad_()
    huge = torch.randint(spec.num_embeddings, (40,), generator=torch.Generator().manual_seed(0))
    last = spec.num_embeddings - 1
    huge[:8] = torch.tensor([0, last, 1, last, 2**31, 2**32 - 300_000_000, spec.p[-1], 0])
    tiny = torch.arange(20) % 7
    cores = layout.core_views(weights)
    expected = torch.cat([tt_rows(cores[0], huge).view(20, 2, -1).sum(1), tt_rows(cores[1], tiny)], dim=1)
    grad_output = torch.randn(expected.shape, dtype=dtype)
    with ops.use_backend(backend):
        offsets = torch.cat([torch.arange(0, 40, 2), torch.arange(40, 61)])
        output = ops.lookup(weights, layout, torch.cat([huge, tiny]), offsets)
        assert_near(output, expected)
        grads = [torch.autograd.grad(value, weights, grad_output)[0] for value in (output, expected)]
        assert_near(*grads)


@every_backend
def test_every_row_of_a_table(backend):
    indices = torch.randperm(SPECS["rank_32"].num_embeddings, generator=torch.Generator().manual_seed(0))
    with ops.use_backend(backend):
        check(layout_of("rank_32"), indices, torch.arange(0, 1001, 5))


@every_backend
@pytest.mark.parametrize("batch_size", [0, 1, 3])
def test_empty_batches_and_bags(backend, batch_size):
    layout = mixed_layout()
    indices, offsets = torch.empty(0, dtype=torch.int64), torch.zeros(9 * batch_size + 1, dtype=torch.int64)
    weights = random_weights(layout, dtype_of(backend)).requires_grad_()
    factors = torch.empty(0, dtype=dtype_of(backend), requires_grad=True)
    with ops.use_backend(backend):
        plan = ops.flow_plan(layout, indices, offsets)
        assert plan.counts.tolist() == [0, 0, 0, layout.fingerprint]
        assert [tensor.numel() for tensor in plan] == [0, 0, 0, 1, 1, 4]
        for pooling in ("sum", "mean"):
            output = ops.lookup(weights, layout, indices, offsets, per_sample_weights=factors, pooling=pooling)
            assert output.shape == (batch_size, layout.total_dim)
            assert output.eq(0).all()
            grads = torch.autograd.grad(output.sum(), [weights, factors])
            assert grads[0].eq(0).all()
            assert grads[1].shape == (0,)


@every_backend
@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("offset_type", [torch.int32, torch.int64])
def test_integer_types(backend, index_type, offset_type):
    layout = mixed_layout()
    indices, offsets = random_batch(layout, batch_size=5)
    with ops.use_backend(backend):
        check(layout, indices.to(index_type), offsets.to(offset_type))


@every_backend
def test_strided_arguments(backend):
    layout = layout_of("three_cores", "rank_32")
    indices, offsets = random_batch(layout, batch_size=6)
    factors = torch.rand(indices.numel(), 2)[:, 0]
    strided = [torch.stack([tensor, tensor], dim=1)[:, 0] for tensor in (indices, offsets)]
    assert not any(tensor.is_contiguous() for tensor in (*strided, factors))
    with ops.use_backend(backend):
        check(layout, *strided, factors=factors)


@every_backend
@pytest.mark.parametrize("kind", ["expanded", "transposed", "sliced"])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_of_any_strides(backend, kind, fused):
    layout = layout_of("three_cores", "two_cores")
    indices, offsets = random_batch(layout, batch_size=6)
    grad = {
        "expanded": torch.ones(()).expand(6, 18),
        "transposed": torch.randn(18, 6).t(),
        "sliced": torch.randn(6, 40)[:, 3:39:2],
    }[kind]
    assert not grad.is_contiguous()

    def run(grad):
        weights = random_weights(layout, torch.float32).requires_grad_()
        if not fused:
            return torch.autograd.grad(ops.lookup(weights, layout, indices, offsets), weights, grad)[0]
        ops.fused_lookup(weights, layout, indices, offsets, optimizer=OptimizerSpec("sgd"), state={}).backward(grad)
        return weights.detach()

    with repeatable_ops(backend):
        assert torch.equal(run(grad), run(grad.contiguous()))


@every_backend
def test_gradients_only_where_asked(backend):
    layout = layout_of("three_cores")
    indices, offsets = random_batch(layout, batch_size=4)
    for wants_weights, wants_factors in ((True, False), (False, True), (False, False)):
        weights = random_weights(layout, dtype_of(backend)).requires_grad_(wants_weights)
        factors = torch.rand(indices.numel(), dtype=dtype_of(backend), requires_grad=wants_factors)
        with ops.use_backend(backend):
            output = ops.lookup(weights, layout, indices, offsets, per_sample_weights=factors)
        assert output.requires_grad == (wants_weights or wants_factors)
        if output.requires_grad:
            output.sum().backward()
        assert (weights.grad is not None) == wants_weights
        assert (factors.grad is not None) == wants_factors


@both_backends
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_gradcheck(backend, pooling):
    layout = layout_of("one_row", "tiny", feature_tables=[1, 0])
    indices, offsets = torch.tensor([5, 6, 5, 0, 0]), torch.tensor([0, 2, 3, 5, 5])
    inputs = random_weights(layout).requires_grad_(), torch.rand(5, dtype=torch.float64, requires_grad=True)
    with ops.use_backend(backend):
        assert torch.autograd.gradcheck(
            lambda w, f: ops.lookup(w, layout, indices, offsets, per_sample_weights=f, pooling=pooling), inputs
        )


@every_backend
@pytest.mark.parametrize("flow", ["prefix", "unique", "direct"])
@pytest.mark.parametrize("seed", range(3))
def test_flow_plan(backend, flow, seed):
    layout = mixed_layout()
    batch_size = 7
    indices, offsets = random_batch(layout, batch_size, seed=seed)
    with ops.use_backend(backend), ablation(flow=flow):
        plan = ops.flow_plan(layout, indices, offsets)
    count, bags = indices.numel(), []
    for bag in range(offsets.numel() - 1):
        bags += [bag] * int(offsets[bag + 1] - offsets[bag])
    assert [t.dtype for t in plan] == [torch.int32, torch.int32, torch.int64, torch.int32, torch.int32, torch.int64]
    assert [t.numel() for t in plan] == [count, count, count, count + 1, count + 1, 4]
    assert plan.bags.tolist() == bags
    tables = torch.tensor(layout.feature_tables)[torch.tensor(bags) // batch_size]
    keys = layout.keys(tables, indices).tolist()
    if flow == "direct":
        order, groups = list(range(count)), [[i] for i in range(count)]
    else:
        order, by_key = sorted(range(count), key=keys.__getitem__), defaultdict(list)
        for position in order:
            by_key[keys[position]].append(position)
        groups = list(by_key.values())
    assert plan.lookups.tolist() == order
    distinct = [keys[group[0]] for group in groups]
    prefixes = layout.prefix_keys(torch.tensor(distinct)).tolist()
    flow_starts = [
        row
        for row in range(len(distinct))
        if flow != "prefix" or row == 0 or (prefixes[row], prefixes[row - 1]) != (prefixes[row - 1],) * 2
    ]
    assert plan.counts.tolist() == [len(distinct), len(flow_starts), 0, layout.fingerprint]
    assert plan.row_keys.tolist()[: len(distinct)] == distinct
    starts = [0]
    for group in groups:
        starts.append(starts[-1] + len(group))
    assert plan.row_starts.tolist()[: len(starts)] == starts
    assert plan.flow_starts.tolist()[: len(flow_starts) + 1] == [*flow_starts, len(distinct)]


@every_backend
def test_repetition_gives_the_same_bits(backend):
    layout = mixed_layout()
    indices, offsets = random_batch(layout, batch_size=64, longest=9)
    factors = torch.rand(indices.numel())
    grad_output = torch.randn(64, layout.total_dim)

    def run():
        weights = random_weights(layout, torch.float32).requires_grad_()
        output = ops.lookup(weights, layout, indices, offsets, per_sample_weights=factors)
        grads = torch.autograd.grad(output, weights, grad_output)
        optimizer, state = OptimizerSpec("adagrad", 0.1), init_state(layout, "adagrad")
        ops.fused_lookup(weights, layout, indices, offsets, optimizer=optimizer, state=state).backward(grad_output)
        return [output.detach(), *grads, weights.detach(), state["momentum1"]]

    with repeatable_ops(backend):
        first = run()
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(first, run()))


@both_backends
def test_arguments_are_checked(backend):
    layout = layout_of("three_cores")
    indices, offsets, weights = torch.tensor([1, 2]), torch.tensor([0, 2]), random_weights(layout)
    factors = torch.rand(2, dtype=torch.float64)
    with ops.use_backend(backend):
        for arguments, options, message in (
            ((weights, layout, indices.float(), offsets), {}, "indices must be .* int32 or int64, not 1-D of torch.fl"),
            ((weights, layout, indices[None], offsets), {}, "indices must be a 1-D tensor .*, not 2-D"),
            ((weights, layout, indices, offsets.short()), {}, "offsets must be .*, not 1-D of torch.int16"),
            ((weights[1:], layout, indices, offsets), {}, r"weights must be .*\[270\].*, not torch.float64 \[269\]"),
            ((weights.int(), layout, indices, offsets), {}, "weights must be float32, float64, bfloat16 or float16"),
            ((weights, layout, indices, offsets), {"per_sample_weights": factors[1:]}, r"\[2\], one a lookup, .*\[1\]"),
            ((weights, layout, indices, offsets), {"per_sample_weights": factors.float()}, "must be torch.float64"),
            ((weights, layout, indices, offsets), {"pooling": "max"}, "unknown pooling 'max'; known: sum, mean"),
        ):
            with pytest.raises(ValueError, match=message):
                ops.lookup(*arguments, **options)
        with pytest.raises(ValueError, match=r"adagrad on torch\.float64 needs the state 'momentum1'"):
            ops.fused_lookup(
                weights.requires_grad_(), layout, indices, offsets, optimizer=OptimizerSpec("adagrad"), state={}
            )


def test_backend_choice():
    before = ops.backend_info()
    with ops.use_backend("reference"):
        assert ops.backend_info()[:2] == ("reference", "use_backend('reference')")
        ops.set_backend("native")
        assert ops.backend_info()[:2] == ("native", "set_backend('native')")
    assert ops.backend_info() == before
    with pytest.raises(ValueError, match=r"unknown backend 'cuda' .*; known: native, reference"):
        ops.set_backend("cuda")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("reference", ("reference", "FLOWTT_BACKEND=reference")),
        ("", ("native", "the default")),
        ("fast", r"unknown backend 'fast' \(FLOWTT_BACKEND=fast\); known: native, reference"),
    ],
)
def test_backend_variable(value, expected, monkeypatch):
    monkeypatch.setenv("FLOWTT_BACKEND", value)
    spec = importlib.util.spec_from_file_location("ops_anew", ops.__file__)
    module = importlib.util.module_from_spec(spec)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            spec.loader.exec_module(module)
    else:
        spec.loader.exec_module(module)
        assert module.backend_info()[:2] == expected
