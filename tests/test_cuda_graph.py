"""The CUDA ops never wait for the device: on a GPU, all of them go into one captured graph, errors included."""

from __future__ import annotations

import pytest
import torch
from tt_samples import assert_near, layout_of, random_batch, random_weights

from flowtt_torchrec import native

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]


def capture(step):
    """A graph of the step, and what the step returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_graph_serves_another_batch(deterministic):
    layout = layout_of("rank_32", "three_cores", "four_cores")
    first, offsets = (tensor.cuda() for tensor in random_batch(layout, 64, 4))
    second = first.roll(1) % 60  # within every table
    weights = random_weights(layout, torch.float32).cuda()
    grad_output = torch.randn(64, layout.total_dim, device="cuda")
    indices = first % 60

    def step():
        plan = native.flow_plan(layout, indices, offsets)
        output = native.pooled_forward(weights, layout, offsets, plan)
        return output, native.pooled_backward(grad_output, weights, layout, offsets, plan)[0]

    torch.use_deterministic_algorithms(deterministic)
    try:
        graph, captured = capture(step)
        indices.copy_(second)
        graph.replay()
        for actual, expected in zip(captured, step()):
            assert_near(actual.cpu(), expected.cpu())
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_graph_tells_of_a_bad_batch():
    layout = layout_of("three_cores", "odd")
    indices, offsets = torch.tensor([1, 2], device="cuda"), torch.tensor([0, 1, 2], device="cuda")
    weights = random_weights(layout, torch.float32).cuda()

    def step():
        return native.pooled_forward(weights, layout, offsets, native.flow_plan(layout, indices, offsets))

    graph, output = capture(step)
    graph.replay()
    good = output.clone()
    indices[1] = 343
    graph.replay()
    with pytest.raises(IndexError, match=r"index 343 at position 1 \(feature 1, table 'odd'\).*0 to 342"):
        native.synchronize()
    assert not output.any()
    indices[1] = 2
    graph.replay()
    native.synchronize()
    assert torch.equal(output, good)
