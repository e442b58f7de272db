"""A plan goes with its layout and offsets, as it was made: others are refused, and never read past their arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tt_samples import BACKENDS, assert_near, every_backend, layout_of, mixed_layout, random_batch, random_weights

from flowtt_torchrec import ablation, ops
from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.plan import FlowPlan
from flowtt_torchrec.spec import TTSpec

REFUSED = "the flow plan is not one of this layout and these offsets|offsets"


def pool_and_wait(layout, offsets, plan):
    """A GPU says late what is wrong."""
    ops.pooled_lookup(random_weights(layout, torch.float32), layout, offsets, plan)
    ops.synchronize()


def refused(layout, offsets, plan):
    with pytest.raises(RuntimeError, match=REFUSED):
        pool_and_wait(layout, offsets, plan)


def changed(plan: FlowPlan, field: str, place: int, value: int) -> FlowPlan:
    tensor = getattr(plan, field).clone()
    tensor[place] = value
    return plan._replace(**{field: tensor})


@every_backend
@pytest.mark.parametrize("flow", ["prefix", "unique", "direct"])
def test_its_own_plan_passes(backend, flow):
    layout = mixed_layout()
    weights = random_weights(layout, torch.float32)
    with ops.use_backend(backend), ablation(flow=flow):
        for batch_size, longest, bits in ((5, 4, torch.int64), (3, 1, torch.int32), (0, 0, torch.int64)):
            indices, offsets = (tensor.to(bits) for tensor in random_batch(layout, batch_size, longest))
            plan = ops.flow_plan(layout, indices, offsets)
            assert int(plan.counts[3]) == layout.fingerprint
            output = ops.pooled_lookup(weights, layout, offsets.clone(), FlowPlan(*(t.clone() for t in plan)))
            assert torch.equal(output, ops.lookup(weights, layout, indices, offsets))
            ops.synchronize()


@every_backend
def test_other_offsets_are_refused(backend):
    layout = layout_of("three_cores")
    with ops.use_backend(backend):
        plan = ops.flow_plan(layout, torch.tensor([3, 4, 5, 3]), torch.tensor([0, 1, 2, 3, 4]))
        for offsets in (
            torch.arange(9),
            [0, 1, 1, 3, 4],
            [0, 1, 2, 3, 3],
            [0, 3, 2, 3, 4],
            [0, 2, 4],
            [0, 0, 1, 2, 3, 4],
        ):
            refused(layout, torch.as_tensor(offsets), plan)
        nothing = ops.flow_plan(layout, torch.tensor([], dtype=torch.int64), torch.tensor([0, 0]))
        refused(layout, torch.tensor([0, 4]), nothing)
        refused(layout, torch.tensor([0, 0]), plan)


@every_backend
def test_plans_of_other_layouts_are_refused(backend):
    layout = layout_of("two_cores", "three_cores")
    indices, offsets = random_batch(layout, 4)
    shape = TTSpec(23, 6, (6, 4), (2, 3), (5,)), TTSpec(100, 12, (5, 4, 6), (2, 3, 2), (3, 5))
    with ops.use_backend(backend):
        plan = ops.flow_plan(layout, indices, offsets)
        for other in (
            layout_of("three_cores", "two_cores"),
            layout_of("two_cores", "three_cores", feature_tables=[1, 0]),
            layout_of("four_cores", "odd"),
            TTLayout(shape, ["two_cores", "three_cores"]),
        ):
            refused(other, offsets, plan)
        same = TTLayout(layout.specs, ["a", "b"])  # names do not matter
        pool_and_wait(same, offsets, plan)


@every_backend
@pytest.mark.parametrize("flow", ["prefix", "direct"])
def test_changed_plans_are_refused(backend, flow):
    layout = layout_of("two_cores", "three_cores", feature_tables=[1, 0, 1])
    indices, offsets = random_batch(layout, 5, seed=2)
    with ops.use_backend(backend), ablation(flow=flow):
        plan = ops.flow_plan(layout, indices, offsets)
        rows, flows = plan.counts[:2].tolist()
        n, bags = indices.numel(), offsets.numel() - 1
        last = int(plan.row_keys[rows - 1])
        edits = [
            *(("row_keys", 0, value) for value in (1 << 60, -1, -(1 << 62), 7 << 3, 2 << 8)),
            *([("row_keys", 0, last)] if flow == "prefix" else []),  # out of order
            *(("bags", 1, value) for value in (-1, bags, 1 << 30, bags - 1)),
            *(("lookups", 0, value) for value in (-1, n, 1 << 30, int(plan.lookups[1]))),
            *(("row_starts", place, value) for place in (0, 1, rows) for value in (-1, n + 1, 1 << 30)),
            *(("flow_starts", place, value) for place in (0, 1, flows) for value in (-1, n + 1, 1 << 30)),
            *(("counts", place, value) for place in (0, 1) for value in (-1, 0, n + 1, 1 << 40)),
            ("counts", 3, 0),
        ]
        for edit in edits:
            refused(layout, offsets, changed(plan, *edit))
        for field, tensor in plan._asdict().items():
            shorter = plan._replace(**{field: tensor[:-1].clone()})
            with pytest.raises((RuntimeError, ValueError)):
                pool_and_wait(layout, offsets, shorter)
        np.asarray(plan.row_keys)[0] = 1 << 60  # torch does not see this
        refused(layout, offsets, plan)


@pytest.mark.parametrize("flow", ["prefix", "unique", "direct"])
def test_whatever_passes_is_a_plan(flow):
    """Any number in any entry: refused by both backends, or a plan of other rows, whose output both agree on."""
    layout = layout_of("two_cores", "odd", "four_cores", feature_tables=[1, 0, 2, 1])
    weights, generator = random_weights(layout), torch.Generator().manual_seed(0)
    indices, offsets = random_batch(layout, 6, seed=1)
    with ablation(flow=flow):
        plan = ops.flow_plan(layout, indices, offsets)
    passed = 0
    for _ in range(400):
        field = plan._fields[int(torch.randint(5, (), generator=generator))]
        tensor = getattr(plan, field)
        place = int(torch.randint(tensor.numel(), (), generator=generator))
        near = int(tensor[place]) + int(torch.randint(-2, 3, (), generator=generator))
        edited, outputs = changed(plan, field, place, near), []
        for backend in BACKENDS:
            with ops.use_backend(backend):
                try:
                    outputs.append(ops.pooled_lookup(weights, layout, offsets, edited))
                except RuntimeError as error:
                    outputs.append(str(error))
        if isinstance(outputs[0], str) or isinstance(outputs[1], str):
            assert outputs[0] == outputs[1]
        else:
            assert_near(*outputs)
            passed += 1
    assert 0 < passed < 300


def test_a_compiled_graph_keeps_the_check():
    layout = layout_of("three_cores")
    weights = random_weights(layout, torch.float32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def pool(offsets, plan):
        return ops.pooled_lookup(weights, layout, offsets, plan)

    indices, offsets = torch.tensor([3, 4, 5, 3]), torch.tensor([0, 1, 2, 3, 4])
    with ops.use_backend("native"):
        plan = ops.flow_plan(layout, indices, offsets)
        assert torch.equal(pool(offsets, plan), ops.lookup(weights, layout, indices, offsets))
        with pytest.raises(RuntimeError, match=REFUSED):
            pool(offsets, changed(plan, "row_keys", 0, 1 << 60))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_on_another_device_is_named(backend):
    layout = layout_of("three_cores")
    weights, factors = random_weights(layout, torch.float32), torch.rand(4)
    indices, offsets = torch.tensor([3, 4, 5, 3]), torch.tensor([0, 1, 2, 3, 4])
    with ops.use_backend(backend):
        plan = ops.flow_plan(layout, indices, offsets)
        for call, name in (
            (lambda: ops.lookup(weights, layout, indices.to("meta"), offsets.to("meta")), "indices"),
            (lambda: ops.lookup(weights, layout, indices, offsets.to("meta")), "offsets"),
            (lambda: ops.flow_plan(layout, indices.to("meta"), offsets), "offsets"),
            (
                lambda: ops.lookup(weights, layout, indices, offsets, per_sample_weights=factors.to("meta")),
                "per_sample",
            ),
            (lambda: ops.pooled_lookup(weights, layout, offsets, plan._replace(bags=plan.bags.to("meta"))), "bags"),
            (lambda: ops.lookup(weights.to("meta"), layout, indices, offsets), "indices"),
        ):
            with pytest.raises(ValueError, match=f"{name}.* is on device .*, but .* must be on one device.*move it"):
                call()
