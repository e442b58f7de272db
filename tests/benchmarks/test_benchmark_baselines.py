from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.baselines import DenseEmbeddingBag, DenseTBE, TensorlyTorch, TTRec
from benchmarks.contenders import Contender, FlowTT, FlowTTCallATable, counted_flops
from benchmarks.questions.run import check_agreement
from benchmarks.workloads import Batch, Workload
from flowtt_torchrec.cores import to_dense
from flowtt_torchrec.spec import TTSpec

SPECS = (
    TTSpec(60, 8, (3, 4, 5), (2, 2, 2), (3, 4)),
    TTSpec(45, 8, (5, 10), (2, 4), (4,)),
    TTSpec(120, 16, (2, 3, 4, 5), (2, 2, 2, 2), (2, 3, 2)),
)


def batches(pooling: int) -> list[Batch]:
    """Batches with gradients large enough for a step to change the output."""
    made = Workload(SPECS, "zipf_1.05", 32, pooling).batches(2)
    return [dataclasses.replace(batch, grad_output=batch.grad_output * 1000) for batch in made]


def tensor_trains(ours: FlowTT, optimizer: str) -> list[Contender]:
    apart = FlowTTCallATable(SPECS, optimizer)
    apart.copy_cores(ours.cores)
    found: list[Contender] = [apart, TTRec(ours.cores, optimizer), TTRec(ours.cores, optimizer, unique=True)]
    for flow in ("unique", "direct"):
        grouped = FlowTT(SPECS, optimizer, flow=flow, name=flow)
        grouped.module.load_state_dict(ours.module.state_dict())
        found.append(grouped)
    if optimizer == "sgd" and TensorlyTorch.missing() is None:
        found.append(TensorlyTorch(ours.cores, optimizer))
    return found


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("pooling", [1, 4])
def test_tensor_trains_agree_before_and_after_steps(optimizer: str, pooling: int) -> None:
    ours = FlowTT(SPECS, optimizer)
    others = tensor_trains(ours, optimizer)
    made = batches(pooling)
    with torch.no_grad():
        before = ours.forward(made[0])
    for other in others:
        torch.testing.assert_close(other.forward(made[0]), before, msg=other.name)
    for batch in made:
        for contender in (ours, *others):
            contender.step(batch)
    with torch.no_grad():
        after = ours.forward(made[0])
    assert float((after - before).norm()) > 1e-3 * float(before.norm())
    for other in others:
        torch.testing.assert_close(other.forward(made[0]), after, rtol=1e-4, atol=1e-6, msg=other.name)


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("pooling", [1, 4])
def test_dense_tables_agree_with_the_materialised_cores(optimizer: str, pooling: int) -> None:
    ours = FlowTT(SPECS, optimizer)
    tbe, bag = DenseTBE(SPECS, optimizer), DenseEmbeddingBag(SPECS, "sgd")
    tables = [to_dense(cores, spec.num_embeddings) for cores, spec in zip(ours.cores, SPECS, strict=True)]
    first, *_ = batches(pooling)
    for dense in (tbe, bag):
        for weight, table in zip(dense.weights, tables, strict=True):
            weight.copy_(table)
        torch.testing.assert_close(dense.forward(first), ours.forward(first))
    before = [weight.clone() for weight in tbe.weights]
    tbe.step(first)
    bag.step(first)
    assert any(not torch.equal(weight, old) for weight, old in zip(tbe.weights, before, strict=True))
    if optimizer == "sgd":
        for weight, other in zip(tbe.weights, bag.weights, strict=True):
            torch.testing.assert_close(weight, other)


def test_bytes_count_weights_and_state() -> None:
    spec = SPECS[0]
    parameters, dense = spec.num_parameters, spec.num_embeddings * spec.embedding_dim
    assert FlowTT([spec], "sgd").num_bytes == 4 * parameters
    assert FlowTT([spec], "rowwise_adagrad").num_bytes == 4 * (parameters + spec.num_slices)
    assert FlowTT([spec], "adagrad").num_bytes == 8 * parameters
    assert TTRec(FlowTT([spec]).cores).num_bytes == 4 * (parameters + spec.num_slices)
    assert DenseTBE([spec]).num_bytes == 4 * (dense + spec.num_embeddings)
    assert DenseEmbeddingBag([spec], "adagrad").num_bytes >= 8 * dense
    assert DenseEmbeddingBag([spec]).num_parameters == dense


def test_a_wrong_contender_is_not_timed() -> None:
    ours = FlowTT(SPECS)
    other = TTRec(ours.cores)
    check_agreement(ours, [other], batches(1)[0])
    with torch.no_grad():
        other.cores[0][0].mul_(1.01)
    with pytest.raises(RuntimeError, match="ttrec and flowtt differ"):
        check_agreement(ours, [other], batches(1)[0])


def test_every_operation_runs_and_others_are_named() -> None:
    ours, made = FlowTT(SPECS), batches(1)
    for operation in ("plan", "forward", "forward_planned", "backward", "step"):
        action = ours.action(operation, made)
        action.run(action.setup(0))
        action.run(action.setup(1))
    with pytest.raises(ValueError, match="tbe has no operation 'plan'"):
        DenseTBE(SPECS).action("plan", made)


def test_counted_flops_are_those_of_the_products() -> None:
    spec = TTSpec(1000, 64, (10, 10, 10), (4, 4, 4), (32, 32))
    prefix, row = 2 * 4 * 32 * 4 * 32, 2 * 16 * 32 * 4
    assert counted_flops(spec, rows=7, prefixes=3) == (3 * prefix + 7 * row, 9 * prefix + 14 * row)
