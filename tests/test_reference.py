"""The plain PyTorch definition itself, against brute force; test_ops.py holds every backend to the same cases."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tt_samples import assert_near, brute_force, groups, layout_of, random_batch, random_weights

from flowtt_torchrec import reference
from flowtt_torchrec.plan import Flow, PoolingMode


@settings(max_examples=40, deadline=None)
@given(groups(), st.integers(0, 5), st.sampled_from(list(Flow)), st.sampled_from(list(PoolingMode)), st.booleans())
def test_forward_and_gradients_for_any_shapes(layout, batch_size, flow, pooling_mode, weighted):
    weights = random_weights(layout)
    indices, offsets = random_batch(layout, batch_size)
    factors = torch.rand(indices.numel(), dtype=torch.float64) if weighted else None
    plan = reference.flow_plan(layout, indices, offsets, flow)
    output = reference.pooled_forward(weights, layout, offsets, plan, factors, pooling_mode)

    inputs = [weights.clone().requires_grad_()] + ([factors.clone().requires_grad_()] if weighted else [])
    expected = brute_force(layout, inputs[0], indices, offsets, *inputs[1:], pooling=pooling_mode.name.lower())
    assert_near(output, expected.detach())

    grad_output = torch.randn(output.shape, dtype=torch.float64)
    grads = reference.pooled_backward(
        grad_output, weights, layout, offsets, plan, factors, pooling_mode, per_sample_weights_grad=weighted
    )
    expected_grads = torch.autograd.grad(expected, inputs, grad_output)
    for grad, expected_grad in zip(grads, expected_grads):
        assert_near(grad, expected_grad)
    if not weighted:
        assert grads[1].shape == (0,)


@pytest.mark.parametrize("pooling_mode", list(PoolingMode))
def test_gradcheck(pooling_mode):
    layout = layout_of("one_row", "tiny", feature_tables=[1, 0])
    indices, offsets = torch.tensor([5, 6, 5, 0, 0]), torch.tensor([0, 2, 3, 5, 5])
    plan = reference.flow_plan(layout, indices, offsets)
    weights = random_weights(layout).requires_grad_()
    factors = torch.rand(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda w, f: reference.pooled_forward(w, layout, offsets, plan, f, pooling_mode), (weights, factors)
    )


def test_every_prefix_product_is_made_once(monkeypatch):
    layout = layout_of("three_cores", feature_tables=[0, 0])
    made = []
    products = reference._prefix_products

    def counted(cores, digits):
        made.append(digits.shape[0])
        return products(cores, digits)

    monkeypatch.setattr(reference, "_prefix_products", counted)
    indices = torch.tensor([0, 1, 5, 6, 0, 11, 99])  # prefixes 0, 0, 0, 1, 0, 1, 16
    offsets = torch.tensor([0, 4, 7])
    weights = random_weights(layout)
    for flow, expected in ((Flow.PREFIX, 3), (Flow.UNIQUE, 6), (Flow.DIRECT, 7)):
        made.clear()
        plan = reference.flow_plan(layout, indices, offsets, flow)
        reference.pooled_forward(weights, layout, offsets, plan)
        assert made == [expected]
