"""torch.compile, torch.export and fx tracing of the modules, as a user's model has them."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from test_native import opcheck_arguments
from torch import Tensor, nn
from tt_samples import SPECS, graphs_that_step, random_batch

from flowtt_torchrec import ops
from flowtt_torchrec.embedding_bag import BatchedTTEmbeddingBags, TTEmbeddingBag
from flowtt_torchrec.optimizers import OptimizerSpec

TABLES = {name: SPECS[name] for name in ("four_cores", "two_cores", "three_cores")}
ANY = torch.export.Dim.AUTO


class Model(nn.Module):
    """Tables under a dense layer."""

    def __init__(self, optimizer: OptimizerSpec | None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.bags = BatchedTTEmbeddingBags(TABLES, optimizer=optimizer, dtype=dtype)
        self.over = nn.Linear(self.bags.layout.total_dim, 3)

    def forward(self, indices: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        return self.over(self.bags(indices, offsets, weights)).sigmoid()


def same_steps(optimizer: OptimizerSpec | None, backend: str, steps: int, dtype: torch.dtype = torch.float32) -> None:
    """Every step has another batch size and learning rate, and needs no new graph."""
    model = Model(optimizer, dtype)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, fullgraph=True, dynamic=True, backend=backend)
    for step in range(1, steps + 1):
        indices, offsets = random_batch(model.bags.layout, 4 + step, seed=step)
        factors = [torch.linspace(0.5, 1.5, indices.numel()).requires_grad_() for _ in range(2)]
        for module, weights, bags in ((model, factors[0], model.bags), (compiled, factors[1], twin.bags)):
            if optimizer is not None:
                bags.set_learning_rate(0.1 * step)
            with torch._dynamo.config.patch(error_on_recompile=step > 1):
                module(indices, offsets, weights).square().sum().backward()
        torch.testing.assert_close(factors[0].grad, factors[1].grad)
        for mine, compiled_one in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(mine, compiled_one)
            torch.testing.assert_close(mine.grad, compiled_one.grad)
    for mine, compiled_one in zip(model.buffers(), twin.buffers()):
        torch.testing.assert_close(mine, compiled_one)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (None, torch.float32),
        pytest.param("sgd", torch.float32, marks=graphs_that_step),
        pytest.param("rowwise_adagrad", torch.bfloat16, marks=graphs_that_step),
        pytest.param("adam", torch.float32, marks=graphs_that_step),
        pytest.param("adam", torch.float16, marks=graphs_that_step),
    ],
)
def test_a_graph_serves_all_batches_and_learning_rates(kind: str | None, dtype: torch.dtype) -> None:
    with ops.use_backend("native"):
        same_steps(None if kind is None else OptimizerSpec(kind, 0.1), "aot_eager", 5, dtype)


@graphs_that_step
def test_adams_step_number_breaks_no_graph() -> None:
    torch._dynamo.reset()
    model = Model(OptimizerSpec("adam", 0.1))
    twin = copy.deepcopy(model)
    with ops.use_backend("native"):
        compiled = torch.compile(twin, backend="aot_eager")
        torch._dynamo.utils.counters.clear()
        for step in range(2):
            indices, offsets = random_batch(model.bags.layout, 5, seed=step)
            for module in (model, compiled):
                module(indices, offsets, torch.ones(indices.numel())).square().sum().backward()
    assert not torch._dynamo.utils.counters["graph_break"]
    for mine, compiled_one in zip([*model.parameters(), *model.buffers()], [*twin.parameters(), *twin.buffers()]):
        torch.testing.assert_close(mine, compiled_one)


@graphs_that_step
def test_the_reference_steps_in_compiled_models() -> None:
    """With graph breaks, since it reads what it is given."""
    bags = BatchedTTEmbeddingBags({"t": SPECS["two_cores"]}, optimizer=OptimizerSpec("sgd", 0.1))
    twin = copy.deepcopy(bags)
    with ops.use_backend("reference"):
        compiled = torch.compile(twin, backend="aot_eager")
        for rate in (0.1, 0.2):
            indices, offsets = random_batch(bags.layout, 5)
            for module, call in ((bags, bags), (twin, compiled)):
                module.set_learning_rate(rate)
                call(indices, offsets).square().sum().backward()
    assert torch.equal(bags.weights, twin.weights)


@pytest.mark.slow
@graphs_that_step
def test_inductor_compiles_forward_backward_and_step() -> None:
    with ops.use_backend("native"):
        same_steps(OptimizerSpec("adagrad", 0.1), "inductor", 3)


def test_opcheck_of_the_update_in_graphs() -> None:
    op = torch.ops.flowtt.pooled_backward_update_for_graphs.default
    place = [argument.name for argument in op._schema.arguments].index("learning_rate")
    with ops.use_backend("native"):
        for arguments in opcheck_arguments()["pooled_backward_update"]:
            rate = torch.tensor(arguments[place], dtype=torch.float64)
            torch.library.opcheck(op, (*arguments[:place], rate, *arguments[place + 1 :]))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("fused", [False, True], ids=["dense", "fused"])
def test_export_for_any_batch(fused: bool, strict: bool) -> None:
    model = Model(OptimizerSpec("sgd") if fused else None).eval()
    layout = model.bags.layout

    def arguments(batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
        indices, offsets = random_batch(layout, batch_size, seed=batch_size)
        return indices, offsets, torch.rand(indices.numel())

    with ops.use_backend("native"):
        dynamic = ({0: ANY}, {0: ANY}, {0: ANY})
        exported = torch.export.export(model, arguments(5), dynamic_shapes=dynamic, strict=strict)
        file = io.BytesIO()
        torch.export.save(exported, file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        for batch_size in (5, 9):
            inputs = arguments(batch_size)
            torch.testing.assert_close(loaded(*inputs), model(*inputs))


@pytest.mark.parametrize("options", [{"mode": "sum"}, {"mode": "mean", "padding_idx": 3}], ids=["sum", "padded mean"])
def test_export_of_one_table(options: dict) -> None:
    bag = TTEmbeddingBag(1000, 16, rank=4, **options)
    with ops.use_backend("native"):
        of_rows = torch.export.export(bag, (torch.randint(1000, (6, 4)),), dynamic_shapes=({0: ANY, 1: ANY},)).module()
        ragged = torch.randint(1000, (12,)), torch.tensor([0, 3, 3])
        of_bags = torch.export.export(bag, ragged, dynamic_shapes=({0: ANY}, {0: ANY})).module()
        rows = torch.randint(1000, (3, 7))
        torch.testing.assert_close(of_rows(rows), bag(rows))
        ragged = torch.randint(1000, (15,)), torch.tensor([0, 3, 3, 9])
        torch.testing.assert_close(of_bags(*ragged), bag(*ragged))


@pytest.mark.parametrize("name", ["TTEmbeddingBag", "BatchedTTEmbeddingBags"])
def test_fx_traces_a_model_with_them_as_leaves(name: str) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = TTEmbeddingBag(100, 6, rank=2) if name == "TTEmbeddingBag" else BatchedTTEmbeddingBags(TABLES)

        def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
            return self.table(indices, offsets).relu()

    class Tracer(torch.fx.Tracer):  # torchrec.fx.Tracer(leaf_modules=[name]) is the same
        def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
            return type(module).__name__ == name or super().is_leaf_module(module, qualified_name)

    holder = Holder()
    graph = Tracer().trace(holder)
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["table"]
    traced = torch.fx.GraphModule(holder, graph)
    batch = random_batch(holder.table.layout, 4)
    assert torch.equal(traced(*batch), holder(*batch))
