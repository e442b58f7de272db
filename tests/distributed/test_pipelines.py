"""TorchRec's train pipelines: TT tables must give what the plain loop gives.

Some pipelines ask for streams, which a CPU does not have, so TorchRec itself cannot run them there: see
`test_what_fails_on_the_cpu_fails_with_dense_tables_too`. `cpu_streams` gives them streams that do nothing. What these
pipelines do with tables, and in which order, is then tested; that nothing races on a GPU is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import train_pipelines as stock
from torchrec.distributed.train_pipeline.pipeline_stage import PipelineStage, SparseDataDistUtil
from torchrec.fx import Tracer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable
from twins import (
    CPU,
    Model,
    Reference,
    Table,
    dense_optimizer,
    full_state,
    make_batch,
    mixed_tables,
    shard,
    shared_tables,
)

STEPS = 6
SGD = (torch.optim.SGD, {"lr": 0.1})


class PipelineBatch(Pipelineable):
    def __init__(self, features: KeyedJaggedTensor, targets: Tensor) -> None:
        self.features, self.targets = features, targets

    def to(self, device: torch.device, non_blocking: bool = False) -> PipelineBatch:
        return PipelineBatch(self.features.to(device), self.targets.to(device))

    def record_stream(self, stream: Any) -> None:
        pass

    def pin_memory(self) -> PipelineBatch:
        return self


class PipelineModel(nn.Module):
    """Loss and output, with feature names that fx can trace."""

    def __init__(self, inner: Model, tables: Sequence[Table]) -> None:
        super().__init__()
        self.ebc, self.over = inner.ebc, inner.over
        used = [feature for table in tables for feature in table.features]
        self.keys = sorted(f if used.count(f) == 1 else f"{f}@{t.name}" for t in tables for f in t.features)

    def forward(self, batch: PipelineBatch) -> tuple[Tensor, Tensor]:
        pooled = self.ebc(batch.features)
        columns = torch.cat([pooled[key] for key in self.keys], dim=1)
        output = self.over(columns).squeeze(1)
        return (output - batch.targets).square().mean(), output


def make_model(
    tables: Sequence[Table], world_size: int, **kwargs: Any
) -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    torch.manual_seed(3)  # of the dense tables' weights
    model = shard(tables, world_size, SGD, wrap=lambda inner: PipelineModel(inner, tables), **kwargs)
    return model, dense_optimizer(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))


def make_batches(tables: Sequence[Table], rank: int) -> list[PipelineBatch]:
    return [PipelineBatch(*make_batch(tables, 6, 10 * step + rank)) for step in range(STEPS)]


class CpuStream(torch.cpu.Stream):
    """As torch's, and says its device."""

    device = CPU


def record_nothing(tensor: Tensor, stream: CpuStream) -> None:
    """In the place of ``Tensor.record_stream``."""


@contextmanager
def cpu_streams() -> Iterator[None]:
    with mock.patch.object(torch.Tensor, "record_stream", record_nothing):
        yield


def plain_loop(model: nn.Module, optimizer: Any, batches: Sequence[PipelineBatch]) -> list[Tensor]:
    outputs = []
    for batch in batches:
        optimizer.zero_grad()
        loss, output = model(batch)
        loss.backward()
        optimizer.step()
        outputs.append(output.detach())
    return outputs


def monolith(pipeline: Any, **streams: str) -> Callable[[nn.Module, Any, Sequence[PipelineBatch]], list[Tensor]]:
    """Runs a pipeline that does a whole step in ``progress``."""

    def run(model: nn.Module, optimizer: Any, batches: Sequence[PipelineBatch]) -> list[Tensor]:
        made = pipeline(model, optimizer, CPU)
        for name in streams.values():
            setattr(made, name, CpuStream())
        iterator = iter(batches)
        with cpu_streams():
            outputs = [made.progress(iterator).detach() for _ in batches]
        with pytest.raises(StopIteration):
            made.progress(iterator)
        if hasattr(made, "detach"):
            made.detach()
        return outputs

    return run


def staged(model: nn.Module, optimizer: Any, batches: Sequence[PipelineBatch]) -> list[Tensor]:
    dist = SparseDataDistUtil(model=model, data_dist_stream=CpuStream())
    stages = [
        PipelineStage(name="copy", runnable=lambda batch: batch.to(CPU), stream=CpuStream()),
        PipelineStage(
            name="dist",
            runnable=dist.start_sparse_data_dist,
            stream=dist.data_dist_stream,
            fill_callback=dist.wait_sdd_fill_callback,
        ),
    ]
    pipeline = stock.StagedTrainPipeline(stages, compute_stream=CpuStream())
    iterator, outputs = iter(batches), []
    with cpu_streams():
        while (batch := pipeline.progress(iterator)) is not None:
            outputs += plain_loop(model, optimizer, [batch])
    return outputs


PIPELINES = {
    "TrainPipelineBase": monolith(stock.TrainPipelineBase),
    "TrainPipelineSparseDist": monolith(stock.TrainPipelineSparseDist),
    "TrainPipelineSparseDistLite": monolith(stock.TrainPipelineSparseDistLite),
    "TrainPipelineFusedSparseDist": monolith(
        stock.TrainPipelineFusedSparseDist, dist="_data_dist_stream", lookup="_emb_lookup_stream"
    ),
    "PrefetchTrainPipelineSparseDist": monolith(
        stock.PrefetchTrainPipelineSparseDist, dist="_data_dist_stream", prefetch="_prefetch_stream"
    ),
    "StagedTrainPipeline": staged,
}


def same_as_the_plain_loop(rank: int, world_size: int, name: str, make_tables: Callable[[], list[Table]]) -> None:
    tables = make_tables()
    ended = []
    for run in (plain_loop, PIPELINES[name]):
        model, optimizer = make_model(tables, world_size)
        outputs = run(model, optimizer, make_batches(tables, rank))
        assert len(outputs) == STEPS
        ended.append((outputs, full_state(model, tables)))
    (expected, weights), (outputs, end) = ended
    torch.testing.assert_close(torch.stack(outputs), torch.stack(expected), atol=0, rtol=1e-6)
    for key, value in weights.items():
        torch.testing.assert_close(end[key], value, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("make_tables", [mixed_tables, shared_tables])
@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_gives_the_plain_loops_outputs(
    two_ranks: Ranks, name: str, make_tables: Callable[[], list[Table]]
) -> None:
    two_ranks.run(same_as_the_plain_loop, name, make_tables)


def evaluated(rank: int, world_size: int) -> None:
    tables = [*mixed_tables(), Table("rw", 77, 8, ("f9",), "rw", mixed_tables()[1].spec)]
    model, optimizer = make_model(tables, world_size)
    model.eval()
    batches = make_batches(tables, rank)
    with torch.no_grad():
        expected = [model(batch)[1] for batch in batches]
        before = full_state(model, tables)
        outputs = monolith(stock.EvalPipelineSparseDist)(model, optimizer, batches)
    torch.testing.assert_close(torch.stack(outputs), torch.stack(expected), atol=0, rtol=1e-6)
    after = full_state(model, tables)
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_the_evaluation_pipeline(two_ranks: Ranks) -> None:
    two_ranks.run(evaluated)


def outcome(pipeline: Any, dense: bool) -> str:
    tables = mixed_tables()
    model, optimizer = make_model(tables, 1, dense=dense)
    try:
        iterator = iter(make_batches(tables, 0))
        made = pipeline(model, optimizer, CPU)
        for _ in range(3):
            made.progress(iterator)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "works"


def on_the_cpu(rank: int, world_size: int) -> None:
    for pipeline in (
        stock.TrainPipelineBase,
        stock.TrainPipelineFusedSparseDist,
        stock.TrainPipelineSemiSync,
        stock.PrefetchTrainPipelineSparseDist,
    ):
        assert outcome(pipeline, dense=False) == outcome(pipeline, dense=True), pipeline.__name__


def test_what_fails_on_the_cpu_fails_with_dense_tables_too(one_rank: Callable[..., Any]) -> None:
    one_rank(on_the_cpu)


def semi_sync(model: nn.Module, optimizer: Any, batches: Sequence[PipelineBatch]) -> list[Tensor]:
    def make(*args: Any) -> Any:
        return stock.TrainPipelineSemiSync(*args, start_batch=0)

    return monolith(make, dist="_data_dist_stream")(model, optimizer, batches)


def late_reference(
    tables: Sequence[Table], state: dict[str, Tensor], over: nn.Module, every: Sequence[Sequence[PipelineBatch]]
) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """The outputs of each step and rank, and the last weights.

    The lookups of a step are made before the tables' step of the one before it, and so is the gradient.
    """
    master = Reference(tables, state, over)
    dense = torch.optim.SGD(master.over.parameters(), lr=0.1)
    outputs = []

    def look_up(step: int) -> tuple[Reference, list[Tensor]]:
        kept = Reference(tables, master.state(), over)
        return kept, [kept.columns(batch.features) for batch in every[step]]

    ahead = look_up(0)
    for step, batches in enumerate(every):
        kept, columns = ahead
        cut = [of_rank.detach().requires_grad_() for of_rank in columns]
        outputs.append([master.over(of_rank).squeeze(1) for of_rank in cut])
        if step + 1 < len(every):
            ahead = look_up(step + 1)
        dense.zero_grad()
        pairs = zip(outputs[-1], batches)
        torch.stack([(output - batch.targets).square().mean() for output, batch in pairs]).mean().backward()
        torch.autograd.backward(columns, [of_rank.grad for of_rank in cut])
        for name, parameter in master.parameters.items():
            parameter.grad = kept.parameters[name].grad
        master.fused_step([(batch.features, batch.targets) for batch in batches], "sgd", 0.1, 0.0, 0.0)
        dense.step()
    return outputs, master.state()


def late_gradients(rank: int, world_size: int, make_tables: Callable[[], list[Table]]) -> None:
    tables = [table for table in make_tables() if table.place != "dp"]
    model, optimizer = make_model(tables, world_size, keep_forward_weights=True)
    start, over = full_state(model, tables), model.module.over
    over = over.module if isinstance(over, nn.parallel.DistributedDataParallel) else over
    every = [list(of_step) for of_step in zip(*(make_batches(tables, r) for r in range(world_size)))]
    expected, end = late_reference(tables, start, over, every)
    outputs = semi_sync(model, optimizer, [of_step[rank] for of_step in every])
    for output, of_step in zip(outputs, expected):
        torch.testing.assert_close(output, of_step[rank].detach(), atol=1e-5, rtol=0)
    state = full_state(model, tables)
    for name, value in end.items():
        torch.testing.assert_close(state[name], value, atol=1e-5, rtol=0, msg=lambda m, name=name: f"{name}: {m}")
        assert not torch.equal(state[name], start[name])


@pytest.mark.parametrize("make_tables", [mixed_tables, shared_tables])
def test_semi_synchronous_training_takes_gradients_at_the_weights_of_their_forward(
    two_ranks: Ranks, make_tables: Callable[[], list[Table]]
) -> None:
    two_ranks.run(late_gradients, make_tables)


def late_gradients_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"tables 'dp', 'dp2': planned data_parallel, .* keep_forward_weights=True"):
        make_model(mixed_tables(), world_size, keep_forward_weights=True)
    tables = [table for table in mixed_tables() if table.place != "dp"]
    model, optimizer = make_model(tables, world_size)
    with pytest.raises(RuntimeError, match=r"weights have changed since this forward .* keep_forward_weights=True"):
        semi_sync(model, optimizer, make_batches(tables, rank))


def test_where_semi_synchronous_training_is_an_error(
    one_rank: Callable[..., Any],
) -> None:
    one_rank(late_gradients_refused)


def traced(rank: int, world_size: int) -> None:
    """As for TorchRec's own collection: a leaf, and not scriptable."""
    for dense in (False, True):
        model = make_model(mixed_tables(), world_size, dense=dense)[0].module
        graph = Tracer(leaf_modules=[type(model.ebc).__name__]).trace(model)
        called = [node.target for node in graph.nodes if node.op == "call_module"]
        assert called == ["ebc", "over.0", "over.1", "over.2"]
        with pytest.raises(NotImplementedError):
            torch.jit.script(model)


def test_fx_traces_a_model_with_a_sharded_collection(one_rank: Callable[..., Any]) -> None:
    one_rank(traced)
