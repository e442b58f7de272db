"""The compiled library: loading, torch's own checks of its ops, and equality with the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tt_samples import (
    BACKENDS,
    INSTRUCTIONS,
    assert_near,
    brute_force,
    choose_instructions,
    groups,
    layout_of,
    mixed_layout,
    offsets_of,
    random_batch,
    random_weights,
)

from flowtt_torchrec import ablation, native, ops
from flowtt_torchrec.cores import to_dense
from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.optimizers import KINDS, OptimizerSpec, init_state
from flowtt_torchrec.spec import TTSpec


@settings(max_examples=150, deadline=None)
@given(groups(), st.data())
def test_native_equals_reference_for_any_shapes_and_batch(layout, data):
    batch_size = data.draw(st.integers(0, 20))
    indices, offsets = random_batch(layout, batch_size, data.draw(st.integers(0, 12)), data.draw(st.integers(0, 99)))
    pooling, flow = (
        data.draw(st.sampled_from(["sum", "mean"])),
        data.draw(st.sampled_from(["prefix", "unique", "direct"])),
    )
    optimizer = OptimizerSpec(data.draw(st.sampled_from(KINDS)), 0.1, 1e-3, data.draw(st.sampled_from([0.0, 0.1])))
    dtype, tolerance = data.draw(st.sampled_from([(torch.float64, 1e-9), (torch.float32, 3e-3)]))
    weighted = data.draw(st.booleans())
    grad_output = torch.randn(batch_size, layout.total_dim, dtype=dtype)
    results = []
    for backend in BACKENDS:
        weights = random_weights(layout, dtype).requires_grad_()
        generator = torch.Generator().manual_seed(0)
        factors = torch.rand(indices.numel(), dtype=dtype, generator=generator).requires_grad_() if weighted else None
        state = init_state(layout, optimizer.kind, dtype=dtype)
        with ops.use_backend(backend), ablation(flow=flow):
            output = ops.fused_lookup(
                weights, layout, indices, offsets,
                optimizer=optimizer, state=state, per_sample_weights=factors, pooling=pooling,
            )  # fmt: skip
        output.backward(grad_output)
        grads = [factors.grad] if weighted else []
        results.append([output.detach(), weights.detach(), *state.values(), *grads])
    for expected, actual in zip(*results):
        assert_near(actual, expected, tolerance)


@pytest.fixture(scope="module")
def large_batch():
    """Enough lookups that every stage is shared between threads, ids both scattered and crowded."""
    layout = layout_of("three_cores", "rank_32", "odd", "two_cores", feature_tables=[1, 0, 1, 2, 3])
    batch_size = 4_000
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, (layout.num_features, batch_size), generator=generator)
    lengths[3] = torch.where(torch.arange(batch_size) == 17, 3_000, 0)
    indices = torch.rand(int(lengths.sum()), generator=generator)
    indices[1::2] = indices[1::2] ** 20
    rows = torch.tensor([layout.specs[table].num_embeddings for table in layout.feature_tables])
    indices = (indices * rows.repeat_interleave(lengths.sum(1))).long()
    batch = layout, indices, offsets_of(lengths.flatten())
    with ops.use_backend("reference"):
        return batch, forward_backward_and_step(*batch, torch.float64, "prefix")


def forward_backward_and_step(layout, indices, offsets, dtype, flow, kind="rowwise_adagrad"):
    weights = random_weights(layout, dtype).requires_grad_()
    with ablation(flow=flow):
        output = ops.lookup(weights, layout, indices, offsets, pooling="mean")
    grad_output = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    grad = torch.autograd.grad(output, weights, grad_output)[0]
    optimizer = OptimizerSpec(kind, 0.01, 1e-3, weight_decay=0.1)
    state = init_state(layout, optimizer.kind, dtype=dtype)
    with ablation(flow=flow):
        fused = ops.fused_lookup(weights, layout, indices, offsets, optimizer=optimizer, state=state)
    fused.backward(grad_output)
    return [output.detach(), grad, weights.detach(), *state.values()]


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_any_instruction_set(large_batch, instructions, monkeypatch):
    (layout, indices, offsets), expected = large_batch
    choose_instructions(instructions, monkeypatch)
    with ops.use_backend("native"):
        for value, right in zip(forward_backward_and_step(layout, indices, offsets, torch.float32, "prefix"), expected):
            assert_near(value, right, 2e-5)
    layout = mixed_layout()
    indices, offsets = random_batch(layout, batch_size=40, longest=8)
    for kind in KINDS:
        with ops.use_backend("native"):
            values = forward_backward_and_step(layout, indices, offsets, torch.float32, "prefix", kind)
        with ops.use_backend("reference"):
            expected = forward_backward_and_step(layout, indices, offsets, torch.float64, "prefix", kind)
        for value, right in zip(values, expected):
            assert_near(value, right, 2e-5)


def test_unknown_instruction_set(monkeypatch):
    monkeypatch.setenv("FLOWTT_CPU_ISA", "sse9")
    with ops.use_backend("native"), pytest.raises(RuntimeError, match=r"FLOWTT_CPU_ISA=sse9 is unknown; known: .*base"):
        ops.flow_plan(layout_of("tiny"), torch.tensor([1]), torch.tensor([0, 1]))


@pytest.mark.parametrize("flow", ["prefix", "unique", "direct"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(large_batch, flow, threads):
    batch, expected = large_batch
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with ops.use_backend("native"):
            first, second = (forward_backward_and_step(*batch, torch.float32, flow) for _ in range(2))
    finally:
        torch.set_num_threads(before)
    for value, again, right in zip(first, second, expected):
        assert torch.equal(value, again)
        assert_near(value, right, 2e-5)


@pytest.mark.parametrize("flow", ["prefix", "unique", "direct"])
@pytest.mark.parametrize("most", [1, 3])
def test_plans_that_threads_share(flow, most):
    """Flows and rows that lie across the borders of tasks, bags of one lookup each, and others."""
    layout = layout_of("three_cores", "rank_32", "odd")
    generator, batch_size = torch.Generator().manual_seed(0), 50_000
    lengths = torch.randint(1, most + 1, (layout.num_features, batch_size), generator=generator)
    lengths[0, :5] = 0
    rows = torch.tensor([spec.num_embeddings for spec in layout.specs]).repeat_interleave(lengths.sum(1))
    indices = (torch.rand(rows.numel(), generator=generator) ** 2 * rows).long()
    indices[20_000:90_000] = 3
    offsets, before = offsets_of(lengths.flatten()), torch.get_num_threads()
    with ops.use_backend("reference"), ablation(flow=flow):
        expected = ops.flow_plan(layout, indices, offsets)
    num_rows, num_flows = expected.counts.tolist()[:2]
    ends = (None, None, num_rows, num_rows + 1, num_flows + 1, None)
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            with ops.use_backend("native"), ablation(flow=flow):
                plan = ops.flow_plan(layout, indices, offsets)
            for name, value, right, end in zip(plan._fields, plan, expected, ends, strict=True):
                assert torch.equal(value[:end], right[:end].to(value.dtype)), (threads, name)
    finally:
        torch.set_num_threads(before)


def opcheck_arguments():
    """Arguments of every op, none of whose outputs has unspecified entries (all rows and prefixes differ)."""
    layout = layout_of("two_cores", "three_cores")
    indices, offsets = torch.tensor([0, 7, 13, 0, 6, 99]), torch.tensor([0, 2, 3, 6, 6])
    plan = ops.flow_plan(layout, indices, offsets)
    assert plan.counts.tolist() == [6, 6, 0, layout.fingerprint]
    weights, factors = random_weights(layout, torch.float32), torch.rand(6)
    grad_output = torch.randn(2, 18)
    described = layout.tables, layout.features, offsets, *plan
    forward = [
        (weights.clone().requires_grad_(w), *described, f, 18, mode)
        for w, f, mode in (
            (False, None, 0),
            (True, None, 1),
            (True, factors.clone().requires_grad_(), 0),
            (False, factors.clone().requires_grad_(), 1),
        )
    ]
    backward = [(grad_output, weights, *described, f, 1, f is not None) for f in (None, factors)]
    update = [
        (
            grad_output,
            weights.clone(),
            *momenta,
            *described,
            f,
            0,
            f is not None,
            number,
            0.1,
            1e-8,
            0.01,
            0.9,
            0.99,
            torch.tensor([2, 3]),
            -1,
        )
        for number, momenta, f in (
            (0, (None, None), None),
            (1, (torch.zeros(layout.num_parameters), None), factors),
            (2, (torch.zeros(layout.num_slices), None), None),
            (3, (torch.zeros(layout.num_parameters), torch.zeros(layout.num_parameters)), factors),
        )
    ]
    planning = [
        (layout.tables, layout.table_names, layout.features, indices, offsets, flow, mode)
        for flow, mode in ((0, 0), (1, 2), (2, 0))
    ]
    return {
        "flow_plan": planning,
        "check_plan": [described],
        "pooled_forward": forward,
        "pooled_backward": backward,
        "pooled_backward_update": update,
    }


@pytest.mark.parametrize(
    "op", ["flow_plan", "check_plan", "pooled_forward", "pooled_backward", "pooled_backward_update"]
)
def test_opcheck(op):
    with ops.use_backend("native"):
        for arguments in opcheck_arguments()[op]:
            torch.library.opcheck(getattr(torch.ops.flowtt, op).default, arguments)


def test_compiles_without_graph_breaks():
    layout = layout_of("two_cores", "three_cores")
    weights = random_weights(layout, torch.float32).requires_grad_()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def compiled(weights, indices, offsets):
        return ops.lookup(weights, layout, indices, offsets, pooling="mean").square()

    with ops.use_backend("native"):
        for batch_size in (4, 9):
            indices, offsets = random_batch(layout, batch_size, seed=batch_size)
            expected = ops.lookup(weights, layout, indices, offsets, pooling="mean").square()
            actual = compiled(weights, indices, offsets)
            assert_near(actual.detach(), expected.detach())
            for a, e in zip(*(torch.autograd.grad(output.sum(), weights) for output in (actual, expected))):
                assert_near(a, e)


def test_a_missing_library_is_an_error_that_says_what_to_do(monkeypatch):
    layout = layout_of("two_cores")
    monkeypatch.setattr(native, "load_error", "there is no compiled library (_C*.so) in /somewhere")
    with ops.use_backend("native"), pytest.raises(RuntimeError) as error:
        ops.flow_plan(layout, torch.tensor([1]), torch.tensor([0, 1]))
    for part in ("/somewhere", "make setup", "pip install --no-build-isolation -e .", "FLOWTT_BACKEND=reference"):
        assert part in str(error.value)
    with ops.use_backend("reference"):
        assert ops.flow_plan(layout, torch.tensor([1]), torch.tensor([0, 1])).counts[0] == 1


def test_library_that_does_not_load(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    assert native._load()[1] == f"there is no compiled library (_C*.so) in {tmp_path}"
    (tmp_path / "_C.so").write_bytes(b"not a library")
    path, error = native._load()
    assert path == tmp_path / "_C.so"
    assert "does not load" in error
    (tmp_path / "_C.abi3.so").write_bytes(b"")
    assert "several compiled libraries" in native._load()[1]


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
def test_long_bags_of_tables_that_threads_share(pooling, weighted):
    """Every thread adds rows to the same bags; one row has half the lookups of a feature."""
    layout = layout_of("rank_32", "odd", feature_tables=[0, 1, 0])
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((3, 100), 120)
    lengths[:, ::7] = 0
    indices = torch.rand(int(lengths.sum()), generator=generator)
    indices[: lengths[0].sum() // 2] = 0.5
    rows = torch.tensor([layout.specs[table].num_embeddings for table in layout.feature_tables])
    indices = (indices * rows.repeat_interleave(lengths.sum(1))).long()
    offsets, factors = offsets_of(lengths.flatten()), torch.rand(indices.numel(), generator=generator)
    assert int((indices == 500).sum()) > 4096  # more than one task works on it
    weights = random_weights(layout)

    def output(backend, dtype):
        with ops.use_backend(backend):
            given = factors.to(dtype) if weighted else None
            return ops.lookup(weights.to(dtype), layout, indices, offsets, per_sample_weights=given, pooling=pooling)

    expected, before = output("reference", torch.float64), torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(output("native", torch.float32), output("native", torch.float32))
            assert_near(output("native", torch.float32), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3])
def test_an_output_larger_than_caches(threads):
    """Rows go past the caches; one row has half the lookups of a feature, and some bags are empty."""
    layout = layout_of("rank_32", "odd", "powers_of_two")
    generator, batch_size = torch.Generator().manual_seed(0), 20_000
    lengths = (torch.rand(3, batch_size, generator=generator) < 0.9).long()
    ids = [torch.randint(spec.num_embeddings, (batch_size,), generator=generator) for spec in layout.specs]
    ids[0][::2] = 7
    weights, before = random_weights(layout, torch.float32), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with ops.use_backend("native"):
            offsets, taken = offsets_of(lengths.flatten()), [i[of == 1] for i, of in zip(ids, lengths)]
            output = ops.lookup(weights, layout, torch.cat(taken), offsets)
    finally:
        torch.set_num_threads(before)
    assert output.nbytes > 1 << 24
    cores = layout.core_views(weights)
    every = [to_dense(core, spec.num_embeddings) for core, spec in zip(cores, layout.specs)]
    expected = torch.cat([rows[i] * of[:, None] for rows, i, of in zip(every, ids, lengths)], dim=1)
    assert_near(output, expected)


@pytest.mark.parametrize("instructions", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize("q", [(3, 5, 7), (3, 5, 4), (3, 3, 2), (4, 4, 3), (5, 2, 5), (3, 3, 6), (2, 4, 8)])
def test_rows_of_any_width(instructions, q, monkeypatch):
    layout = TTLayout([TTSpec(60, q[0] * q[1] * q[2], (4, 4, 8), q, (8, 16))], ["t"])
    weights, ids = random_weights(layout), torch.tensor([0, 59, 7, 8, 9, 31, 30, 59])
    monkeypatch.setenv("FLOWTT_CPU_ISA", instructions)
    with ops.use_backend("native"):
        try:
            output = ops.lookup(weights.float(), layout, ids, torch.arange(9))
        except RuntimeError as error:
            pytest.skip(str(error))
    assert_near(output, brute_force(layout, weights, ids, torch.arange(9)))
