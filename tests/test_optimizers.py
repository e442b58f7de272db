from __future__ import annotations

import pytest
import torch
from tt_samples import (
    BACKENDS,
    SPECS,
    assert_near,
    both_backends,
    brute_force,
    every_backend,
    layout_of,
    mixed_layout,
    random_batch,
    random_weights,
)

from flowtt_torchrec import ops
from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.optimizers import (
    KINDS,
    OptimizerSpec,
    apply_gradient,
    init_state,
    split_state,
    state_names,
    touched_slices,
)
from flowtt_torchrec.spec import TTSpec


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lamb",), "unknown fused optimizer 'lamb'; known: sgd, adagrad, rowwise_adagrad, adam"),
        (("sgd", -0.1), "sgd needs learning_rate of at least 0, not -0.1"),
        (("adagrad", 0.1, float("nan")), "adagrad needs eps of at least 0, not nan"),
        (("sgd", 0.1, 0.0, -1.0), "weight_decay"),
        (("adam", 0.1, 0.0, 0.0, 1.0), "adam needs beta1 of at least 0 and below 1, not 1.0"),
        (("adam", 0.1, 0.0, 0.0, 0.9, -0.5), "adam needs beta2 of at least 0 and below 1, not -0.5"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        OptimizerSpec(*arguments)


def test_state():
    layout = layout_of("two_cores", "three_cores")
    names = [(), ("momentum1",), ("momentum1",), ("momentum1", "exp_avg_sq", "step")]
    assert [state_names(kind) for kind in KINDS] == names
    assert init_state(layout, "sgd") == {}
    assert init_state(layout, "adagrad", dtype=torch.float64)["momentum1"].dtype == torch.float64
    assert init_state(layout, "adagrad", device="meta")["momentum1"].is_meta
    state = {"momentum1": torch.arange(25.0)}
    split = split_state(layout, "rowwise_adagrad", state)
    assert split["two_cores"][1]["momentum1"].tolist() == [4, 5, 6, 7, 8, 9]
    assert split["three_cores"][0]["momentum1"].tolist() == [10, 11, 12, 13, 14]
    split = split_state(layout, "adagrad", init_state(layout, "adagrad"))
    assert [tuple(core["momentum1"].shape) for core in split["three_cores"]] == SPECS["three_cores"].core_shapes
    assert split_state(layout, "sgd", {}) == {"two_cores": [{}, {}], "three_cores": [{}, {}, {}]}


def test_adams_state():
    layout = layout_of("two_cores", "three_cores")
    state = init_state(layout, "adam", dtype=torch.float64, device="meta")
    assert {name: tensor.dtype for name, tensor in state.items()} == {
        "momentum1": torch.float64, "exp_avg_sq": torch.float64, "step": torch.int64,
    }  # fmt: skip
    assert [state[name].is_meta for name in state] == [True, True, False]
    state = init_state(layout, "adam")
    split = split_state(layout, "adam", state)
    for name in ("momentum1", "exp_avg_sq"):
        assert [tuple(core[name].shape) for core in split["three_cores"]] == SPECS["three_cores"].core_shapes
    state["step"].fill_(3)
    assert [int(core["step"]) for core in split["three_cores"]] == [3, 3, 3]
    split["three_cores"][1]["step"].fill_(7)
    assert state["step"].tolist() == [3, 7]


@both_backends
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_a_fused_step_is_torch_optims(backend, kind):
    """Every slice is looked up, so that the weight decay of torch.optim falls on the same elements."""
    layout = layout_of("three_cores", "four_cores")
    indices = torch.cat([torch.arange(100), torch.arange(60).repeat(2)[:100]])
    offsets = torch.arange(0, 201, 2)
    weights, expected = (random_weights(layout).requires_grad_() for _ in range(2))
    optimizer = OptimizerSpec(kind, learning_rate=0.1, eps=1e-3, weight_decay=0.2, beta1=0.7, beta2=0.95)
    state = init_state(layout, kind, dtype=torch.float64)
    reference = {
        "sgd": torch.optim.SGD([expected], lr=0.1, weight_decay=0.2),
        "adagrad": torch.optim.Adagrad([expected], lr=0.1, eps=1e-3, weight_decay=0.2),
        "adam": torch.optim.AdamW([expected], lr=0.1, betas=(0.7, 0.95), eps=1e-3, weight_decay=0.2),
    }[kind]
    with ops.use_backend(backend):
        for _ in range(3):
            output = ops.fused_lookup(weights, layout, indices, offsets, optimizer=optimizer, state=state)
            output.square().sum().backward()
            reference.zero_grad()
            ops.lookup(expected, layout, indices, offsets).square().sum().backward()
            reference.step()
    assert_near(weights, expected, 1e-9)


@every_backend
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_no_gradient_and_no_eps_make_no_step(backend, kind, dtype):
    """A weight of 0 is enough; the same for a gradient that is summed elsewhere. Later lookups make their steps."""
    layout = layout_of("two_cores", "three_cores")
    indices, offsets = torch.tensor([3, 3, 5, 99, 7]), torch.tensor([0, 2, 3, 4, 5])
    weights = random_weights(layout, torch.float32).to(dtype).requires_grad_()
    before = weights.detach().clone()
    optimizer = OptimizerSpec(kind, 0.1, eps=0.0)
    state = init_state(layout, kind, dtype=dtype)
    with ops.use_backend(backend):
        for factors in (torch.zeros(5), torch.tensor([0.0, 0, 0, 1, 1])):
            output = ops.fused_lookup(
                weights, layout, indices, offsets, optimizer=optimizer, state=state, per_sample_weights=factors
            )
            output.sum().backward()
            assert weights.isfinite().all()
            assert all(tensor.isfinite().all() for tensor in state.values())
            assert torch.equal(weights, before) == (not factors.any())
    first_table = SPECS["two_cores"].num_parameters
    assert torch.equal(weights[:first_table], before[:first_table])
    summed = before.clone()
    touched = torch.ones(layout.num_slices, dtype=torch.bool)
    apply_gradient(
        layout, optimizer, summed, init_state(layout, kind, dtype=dtype), torch.zeros(layout.num_parameters), touched
    )
    assert torch.equal(summed, before)


@both_backends
def test_decay_that_cancels_the_gradient_leaves_row_wise_adagrad_finite(backend):
    """The mean square is summed from three terms that may round to less than 0."""
    layout = TTLayout([TTSpec(1, 64, (1, 1), (1, 64), (1,))], ["a"])
    optimizer = OptimizerSpec("rowwise_adagrad", 0.1, eps=0.0, weight_decay=0.3)
    for seed in range(20):
        weights = random_weights(layout, torch.float32, seed).requires_grad_()
        first, last = weights.detach().split([1, 64])
        state = init_state(layout, "rowwise_adagrad")
        with ops.use_backend(backend):
            output = ops.fused_lookup(
                weights, layout, torch.tensor([0]), torch.tensor([0, 1]), optimizer=optimizer, state=state
            )
            output.backward((-0.3 / first * last)[None])  # the last core's gradient is -0.3 times the core
        assert state["momentum1"][1].abs() < 1e-6
        assert state["momentum1"].ge(0).all()
        assert weights.isfinite().all()


@every_backend
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
def test_fused_step_is_the_gradient_then_the_formula(backend, kind, weighted):
    """Against brute force: three steps, with weight decay on the slices in use. Tables have made other steps before."""
    layout = mixed_layout()
    optimizer = OptimizerSpec(kind, learning_rate=0.05, eps=1e-3, weight_decay=0.1, beta1=0.8, beta2=0.9)
    state = init_state(layout, kind)
    weights = random_weights(layout, torch.float32).requires_grad_()
    expected = random_weights(layout).requires_grad_()
    momentum = init_state(layout, kind, dtype=torch.float64)
    if kind == "adam":
        for counts in (state, momentum):
            counts["step"].copy_(3 * torch.arange(layout.num_tables) % 7)
    for step in range(3):
        indices, offsets = random_batch(layout, batch_size=5, seed=step)
        factors = torch.rand(indices.numel()).requires_grad_() if weighted else None
        grad_output = torch.randn(5, layout.total_dim)
        with ops.use_backend(backend):
            output = ops.fused_lookup(
                weights, layout, indices, offsets,
                optimizer=optimizer, state=state, per_sample_weights=factors, pooling="mean",
            )  # fmt: skip
            output.backward(grad_output)
        assert weights.grad is None

        double_factors = factors.detach().double().requires_grad_() if weighted else None
        brute = brute_force(layout, expected, indices, offsets, double_factors, "mean")
        assert_near(output, brute, 1e-4)
        inputs = [expected, double_factors] if weighted else [expected]
        grads = torch.autograd.grad(brute, inputs, grad_output.double())
        if weighted:
            assert_near(factors.grad, grads[1], 1e-4)
        step_by_hand(layout, optimizer, expected, grads[0], momentum, indices, offsets)
        assert_near(weights, expected, 1e-4)
        for name in momentum:
            assert_near(state[name], momentum[name], 1e-4)


def step_by_hand(layout, optimizer, weights, grad, momentum, indices, offsets):
    """The formulas of flowtt_torchrec.optimizers, slice by slice."""
    batch_size = (offsets.numel() - 1) // layout.num_features
    used = set()
    for feature, table in enumerate(layout.feature_tables):
        own = indices[int(offsets[feature * batch_size]) : int(offsets[(feature + 1) * batch_size])]
        for row in own.tolist():
            for k in reversed(range(layout.specs[table].num_cores)):
                row, digit = divmod(row, layout.specs[table].p[k])
                used.add((table, k, digit))
    cores, grads = layout.core_views(weights.detach()), layout.core_views(grad)
    for table, k, digit in used:
        w = cores[table][k][digit]
        if optimizer.kind == "adam":
            m, v = (layout.core_views(momentum[name])[table][k][digit] for name in ("momentum1", "exp_avg_sq"))
            t, g = int(momentum["step"][table]) + 1, grads[table][k][digit]
            m.copy_(optimizer.beta1 * m + (1 - optimizer.beta1) * g)
            v.copy_(optimizer.beta2 * v + (1 - optimizer.beta2) * g**2)
            m_hat, v_hat = m / (1 - optimizer.beta1**t), v / (1 - optimizer.beta2**t)
            w -= optimizer.learning_rate * (m_hat / (v_hat.sqrt() + optimizer.eps) + optimizer.weight_decay * w)
            continue
        g = grads[table][k][digit] + optimizer.weight_decay * w
        if optimizer.kind == "adagrad":
            m = layout.core_views(momentum["momentum1"])[table][k][digit]
            m += g**2
        elif optimizer.kind == "rowwise_adagrad":
            m = layout.slice_views(momentum["momentum1"])[table][k][digit]
            m += (g**2).mean()
        w -= optimizer.learning_rate * (g if optimizer.kind == "sgd" else g / (m.sqrt() + optimizer.eps))
    if "step" in momentum:
        momentum["step"] += 1


@both_backends
def test_fused_lookup_leaves_untouched_slices_alone(backend):
    layout = layout_of("three_cores", "two_cores")
    indices, offsets = torch.tensor([0, 0, 1]), torch.tensor([0, 3, 3])
    before = random_weights(layout, torch.float32)
    weights = before.clone().requires_grad_()
    optimizer = OptimizerSpec("rowwise_adagrad", 0.1, weight_decay=0.5)
    state = init_state(layout, "rowwise_adagrad")
    with ops.use_backend(backend):
        ops.fused_lookup(weights, layout, indices, offsets, optimizer=optimizer, state=state).sum().backward()
    changed = [
        [(core != old).flatten(1).any(1).nonzero().flatten().tolist() for core, old in zip(*pair)]
        for pair in zip(layout.core_views(weights.detach()), layout.core_views(before))
    ]
    assert changed == [[[0], [0], [0, 1]], [[], []]]
    used = [[m.nonzero().flatten().tolist() for m in of] for of in layout.slice_views(state["momentum1"])]
    assert used == changed


def test_adam_moves_only_slices_of_this_batch():
    """Not even those with averages of an earlier one; what the batch touches without a gradient does move."""
    layout = layout_of("three_cores", "two_cores")
    optimizer = OptimizerSpec("adam", 0.1, weight_decay=0.5)
    start = random_weights(layout)
    results = []
    for backend in (*BACKENDS, None):  # and from a gradient summed elsewhere
        weights = start.clone().requires_grad_()
        state = init_state(layout, "adam", dtype=torch.float64)
        for step, row in enumerate((0, 99)):
            before = [weights.detach().clone(), state["momentum1"].clone(), state["exp_avg_sq"].clone()]
            batch = torch.tensor([row]), torch.tensor([0, 1, 1])
            with ops.use_backend(backend or "reference"):
                if backend is None:
                    plan = ops.flow_plan(layout, *batch)
                    output = ops.pooled_lookup(weights, layout, batch[1], plan)
                    (grad,) = torch.autograd.grad(output.sum() * (1 - step), weights)
                    with torch.no_grad():
                        touched = touched_slices(layout, plan.row_keys)
                        apply_gradient(layout, optimizer, weights, state, grad, touched)
                else:
                    output = ops.fused_lookup(weights, layout, *batch, optimizer=optimizer, state=state)
                    output.backward(torch.full_like(output, 1 - step))
            after = [weights.detach(), state["momentum1"], state["exp_avg_sq"]]
            for i, (new, old) in enumerate(zip(after, before)):
                changed = [
                    [(core != was).flatten(1).any(1).nonzero().flatten().tolist() for core, was in zip(*pair)]
                    for pair in zip(layout.core_views(new), layout.core_views(old))
                ]
                digits = [[0], [0], [0]] if step == 0 else [[4], [0], [3]]
                if step == 1 and i > 0:
                    digits = [[], [0], []]  # averages of 0 stay, those of the middle slice, of both rows, decay
                assert changed == [digits, [[], []]]
        assert state["step"].tolist() == [2, 2]
        results.append([weights.detach(), state["momentum1"], state["exp_avg_sq"]])
    for result in results[1:]:
        for value, expected in zip(result, results[0]):
            assert_near(value, expected, 1e-12)


@both_backends
def test_fused_lookup_refuses_a_gradient_at_changed_weights(backend):
    layout = layout_of("three_cores")
    indices, offsets = random_batch(layout, batch_size=2)
    weights = random_weights(layout).requires_grad_()
    with ops.use_backend(backend):
        first, second = (
            ops.fused_lookup(weights, layout, indices, offsets, optimizer=OptimizerSpec("sgd"), state={})
            for _ in range(2)
        )
        first.sum().backward()
        with pytest.raises(RuntimeError, match="weights have changed since this forward pass"):
            second.sum().backward()


@both_backends
def test_fused_lookup_does_not_step_frozen_weights(backend):
    layout = layout_of("three_cores")
    indices, offsets = random_batch(layout, batch_size=2)
    weights = random_weights(layout)
    before = weights.clone()
    factors = torch.rand(indices.numel(), dtype=torch.float64, requires_grad=True)
    with ops.use_backend(backend):
        output = ops.fused_lookup(
            weights, layout, indices, offsets,
            optimizer=OptimizerSpec("sgd"), state={}, per_sample_weights=factors,
        )  # fmt: skip
        output.sum().backward()
    assert factors.grad is not None
    assert torch.equal(weights, before)


@both_backends
def test_backward_runs_on_the_backend_of_forward(backend, monkeypatch):
    layout = layout_of("three_cores")
    indices, offsets = random_batch(layout, batch_size=2)
    weights = random_weights(layout).requires_grad_()
    with ops.use_backend(backend):
        output = ops.fused_lookup(weights, layout, indices, offsets, optimizer=OptimizerSpec("sgd"), state={})
    for name in BACKENDS:
        if name != backend:
            monkeypatch.setattr(ops.BACKENDS[name], "pooled_backward_update", None)
    output.sum().backward()


@both_backends
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_step_from_a_summed_gradient_is_the_fused_step(backend, kind, decay):
    layout = mixed_layout()
    optimizer = OptimizerSpec(kind, learning_rate=0.05, eps=1e-3, weight_decay=decay)
    fused = random_weights(layout).requires_grad_()
    weights = fused.detach().clone()
    fused_state, state = (init_state(layout, kind, dtype=torch.float64) for _ in range(2))
    for counts in (fused_state, state):
        if kind == "adam":
            counts["step"][2:4] = 5
    for step in range(3):
        indices, offsets = random_batch(layout, batch_size=4, seed=step)
        grad_output = torch.randn(4, layout.total_dim, dtype=torch.float64)
        with ops.use_backend(backend):
            plan = ops.flow_plan(layout, indices, offsets)
            leaf = weights.clone().requires_grad_()
            (grad,) = torch.autograd.grad(ops.pooled_lookup(leaf, layout, offsets, plan), leaf, grad_output)
            ops.fused_lookup(
                fused, layout, indices, offsets, optimizer=optimizer, state=fused_state
            ).backward(grad_output)  # fmt: skip
        touched = touched_slices(layout, plan.row_keys[: int(plan.counts[0])])
        apply_gradient(layout, optimizer, weights, state, grad, touched)
        assert_near(weights, fused, 1e-12)
        for name in state:
            assert_near(state[name], fused_state[name], 1e-12)


def test_touched_slices():
    layout = layout_of("three_cores", "two_cores")  # p 5, 4, 6 and 4, 6
    keys = layout.keys(torch.tensor([0, 0, 1]), torch.tensor([0, 99, 9]))
    touched = layout.slice_views(touched_slices(layout, keys))
    assert [[of.nonzero().flatten().tolist() for of in table] for table in touched] == [
        [[0, 4], [0], [0, 3]],
        [[1], [3]],
    ]
    assert not touched_slices(layout, keys[:0]).any()


def test_weight_decay_and_adam_must_know_what_was_touched():
    layout = layout_of("tiny")
    weights = random_weights(layout)
    for optimizer, message in (
        (OptimizerSpec("sgd", weight_decay=0.1), "weight decay changes touched slices only"),
        (OptimizerSpec("adam"), "Adam changes touched slices only"),
    ):
        with pytest.raises(ValueError, match=message):
            apply_gradient(layout, optimizer, weights, {}, torch.zeros_like(weights))


@pytest.mark.parametrize("kind", ["adagrad", "rowwise_adagrad", "adam"])
def test_a_gradient_of_zero_changes_nothing_without_eps(kind):
    layout = layout_of("tiny")
    weights = random_weights(layout)
    before = weights.clone()
    state = init_state(layout, kind, dtype=torch.float64)
    touched = torch.ones(layout.num_slices, dtype=torch.bool)
    apply_gradient(layout, OptimizerSpec(kind, 0.1, eps=0.0), weights, state, torch.zeros_like(weights), touched)
    assert torch.equal(weights, before)
