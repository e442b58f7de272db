"""Other ways to the same numbers, and that a block ends."""

import pytest
import torch
from tt_samples import layout_of, random_batch, random_weights

from flowtt_torchrec import ablation, ops
from flowtt_torchrec.ablations import Mapping, current
from flowtt_torchrec.plan import Flow


def test_blocks_nest_and_end() -> None:
    layout = layout_of("three_cores")
    with ablation(flow="unique", steal=False):
        with ablation(flow="direct", handover=False):
            assert current() == Mapping(Flow.DIRECT, steal=False, handover=False)
        assert current() == Mapping(Flow.UNIQUE, steal=False)
        with pytest.raises(IndexError), ablation(flow="direct"):
            ops.flow_plan(layout, torch.tensor([layout.specs[0].num_embeddings]), torch.tensor([0, 1]))
        assert current() == Mapping(Flow.UNIQUE, steal=False)
    assert current() == Mapping()


def test_an_unknown_flow_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown flow 'x'; known: prefix, unique, direct"), ablation(flow="x"):
        pass


def test_a_compiled_graph_follows_the_block() -> None:
    layout = layout_of("three_cores")
    indices, offsets = random_batch(layout, 30)
    weights = random_weights(layout, torch.float32)
    flows = torch.compile(lambda: ops.flow_plan(layout, indices, offsets).counts[1], backend="eager", fullgraph=True)
    found = []
    for flow in ("prefix", "unique", "direct", "prefix"):
        with ablation(flow=flow):
            found.append(int(flows()))
            output = ops.lookup(weights, layout, indices, offsets)
        torch.testing.assert_close(output, ops.lookup(weights, layout, indices, offsets))
    assert found[0] < found[1] < found[2] == indices.numel()
    assert found[3] == found[0]
