"""Names, and all that torch does with parameters: what is done to a core is what lookups and steps see."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.func import functional_call
from torch.nn.utils import parametrize
from tt_samples import SPECS, assert_near, both_backends, brute_force, random_batch

from flowtt_torchrec import ops
from flowtt_torchrec.embedding_bag import BatchedTTEmbeddingBags, TTEmbeddingBag
from flowtt_torchrec.optimizers import OptimizerSpec

TABLES = {name: SPECS[name] for name in ("two_cores", "three_cores")}
ADAM = OptimizerSpec("adam", 0.1, weight_decay=0.1)
FUSED = [OptimizerSpec("sgd", 0.1), OptimizerSpec("rowwise_adagrad", 0.1), ADAM]
IDS = torch.tensor([[1, 7, 99], [0, 0, 3]])


def bags(optimizer: OptimizerSpec | None = None, **options: Any) -> BatchedTTEmbeddingBags:
    return BatchedTTEmbeddingBags(TABLES, optimizer=optimizer, **options)


def one_table(**options: Any) -> TTEmbeddingBag:
    return TTEmbeddingBag(100, 12, spec=SPECS["three_cores"], mode="sum", **options)


def step(module: BatchedTTEmbeddingBags, seed: int = 0) -> Tensor:
    output = module(*random_batch(module.layout, 6, seed=seed))
    output.square().sum().backward()
    return output


def side_by_side(module: BatchedTTEmbeddingBags | TTEmbeddingBag) -> bool:
    """Whether the flat tensor is the parameters' memory, not a copy."""
    return module.weights.data_ptr() == next(module.parameters()).data_ptr()


@pytest.mark.parametrize("module", [one_table(), bags(), bags(ADAM)], ids=["one", "many", "fused"])
def test_names_in_the_state_dict_are_those_of_parameters_and_buffers(module: nn.Module) -> None:
    state = module.state_dict(keep_vars=True)
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert state.keys() == named.keys()
    assert all(state[name] is tensor for name, tensor in named.items())
    assert {name for name, _ in module.named_parameters()} == {n for n, t in state.items() if t.requires_grad}
    assert get_model_state_dict(module).keys() == state.keys()
    other = copy.deepcopy(module)
    nn.init.zeros_(next(other.parameters()))
    set_model_state_dict(other, get_model_state_dict(module))
    assert all(map(torch.equal, other.state_dict().values(), state.values()))


def test_tables_may_be_called_as_attributes_are() -> None:
    names = ["weights", "pooling", "optimizer", "train", "type", "layout", "momentum1", "step", "forward"]
    module = BatchedTTEmbeddingBags(dict.fromkeys(names, SPECS["two_cores"]), optimizer=ADAM)
    step(module)
    module.set_learning_rate(0.2)
    again = copy.deepcopy(module)
    again.load_state_dict(module.state_dict())
    step(again)
    step(module)
    assert torch.equal(module.weights, again.weights)
    assert [name for name, _ in module.named_parameters()] == [f"{n}.tt_core{k}" for n in names for k in range(2)]
    for name in ("a.b", "", "optimizer_state"):
        with pytest.raises(ValueError, match=f"a table cannot be called {name!r}"):
            BatchedTTEmbeddingBags({name: SPECS["two_cores"]})


@both_backends
@pytest.mark.parametrize("optimizer", FUSED, ids=lambda optimizer: optimizer.kind)
def test_frozen_cores_are_not_stepped(backend: str, optimizer: OptimizerSpec) -> None:
    free, some, whole, teacher = (bags(optimizer) for _ in range(4))
    some.table("two_cores").requires_grad_(False)
    whole.table("three_cores").tt_core1.requires_grad_(False)
    teacher.requires_grad_(False)
    before = {name: core.clone() for name, core in free.named_parameters()}
    with ops.use_backend(backend):
        for module in (free, some, whole):
            step(module)
        factors = torch.ones(random_batch(teacher.layout, 6)[0].numel(), requires_grad=True)
        teacher(*random_batch(teacher.layout, 6), factors).square().sum().backward()
        assert factors.grad is not None
    for module in (some, whole, teacher):
        for (name, core), expected in zip(module.named_parameters(), free.parameters()):
            assert not core.requires_grad or not torch.equal(core, before[name])
            assert_near(core, expected if core.requires_grad else before[name], 1e-5)
            assert core.grad is None


@both_backends
def test_functional_call_reads_and_differentiates_what_it_is_given(backend: str) -> None:
    with ops.use_backend(backend):
        for module, arguments in ((one_table(), (IDS,)), (bags(ADAM), random_batch(bags().layout, 6))):
            other = copy.deepcopy(module)
            with torch.no_grad():
                for core in other.parameters():
                    core.mul_(1.5)
            before = module.weights.clone()
            state = {name: tensor.detach().clone() for name, tensor in other.state_dict().items()}
            given = {name: state[name].requires_grad_() for name, _ in other.named_parameters()}
            output = functional_call(module, state, arguments)
            assert torch.equal(output, other(*arguments))
            grads = torch.autograd.grad(output.square().sum(), list(given.values()))
            assert torch.equal(module.weights, before)

            def loss(cores: dict[str, Tensor], of: nn.Module = module, args: Any = arguments) -> Tensor:
                return functional_call(of, cores, args).square().sum()

            by_func = torch.func.grad(loss)({name: core.detach() for name, core in given.items()})
            for name, grad in zip(given, grads):
                assert_near(by_func[name], grad, 1e-5)
            assert side_by_side(module)


class WithOwn(TTEmbeddingBag):
    def __init__(self) -> None:
        super().__init__(100, 12, spec=SPECS["three_cores"], mode="sum")
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("calls", torch.tensor(0))
        self.over = nn.Linear(12, 1)

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        self.calls += 1
        return self.over(self.scale * super().forward(input, offsets, per_sample_weights))


def test_subclasses_may_have_parameters_buffers_and_modules() -> None:
    module, other = WithOwn(), WithOwn()
    output = module(IDS)
    other.load_state_dict(module.state_dict())
    assert other.calls == 1
    assert torch.equal(other(IDS), output)
    cores = ["tt_core0", "tt_core1", "tt_core2"]
    assert list(module.state_dict()) == [*cores, "scale", "calls", "over.weight", "over.bias"]
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


class Doubled(nn.Module):
    def forward(self, core: Tensor) -> Tensor:
        return 2 * core


def test_parametrised_cores_are_what_lookups_read() -> None:
    module = one_table()
    plain = module(IDS)
    parametrize.register_parametrization(module, "tt_core1", Doubled())
    output = module(IDS)
    assert_near(output, 2 * plain)
    output.sum().backward()
    assert module.parametrizations.tt_core1.original.grad is not None
    parametrize.remove_parametrizations(module, "tt_core1")
    assert_near(module(IDS), 2 * plain)
    module.double()
    assert side_by_side(module)


@both_backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("optimizer", FUSED, ids=lambda optimizer: optimizer.kind)
def test_conversion_takes_the_optimizer_and_the_output_along(
    backend: str, optimizer: OptimizerSpec, dtype: torch.dtype
) -> None:
    module = bags(optimizer)
    with ops.use_backend(backend):
        step(module)
        state = {name: flat.clone() for name, flat in module.optimizer_state.flat.items()}
        module.to(dtype)
        made = bags(optimizer, dtype=dtype)
        assert {n: (t.dtype, t.shape) for n, t in module.state_dict().items()} == {
            n: (t.dtype, t.shape) for n, t in made.state_dict().items()
        }
        assert all(torch.equal(module.optimizer_state.flat[name].to(flat), flat) for name, flat in state.items())
        made.load_state_dict(module.state_dict())
        outputs = [step(each, seed=1) for each in (module, made)]
        assert outputs[0].dtype == outputs[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.equal(module.weights, made.weights)
        module.float()
        assert step(module, seed=2).dtype == torch.float32
        assert side_by_side(module)


def test_sharing_memory_keeps_the_flat_buffer() -> None:
    for module in (one_table(), bags(ADAM)):
        module.share_memory()
        assert all(tensor.is_shared() for tensor in module.state_dict().values())
        assert side_by_side(module)
    before = module.weights.clone()
    step(module)
    assert not torch.equal(module.weights, before)
    assert torch.equal(torch.cat([core.detach().flatten() for core in module.parameters()]), module.weights)


def moved_memory(module: BatchedTTEmbeddingBags, how: str) -> BatchedTTEmbeddingBags:
    """The module, or a copy of it, with cores that have been given other memory."""
    if how == "deepcopy":
        return copy.deepcopy(module)
    if how == "pickle":
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        return torch.load(file, weights_only=False)
    if how == "assign":
        module.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()}, assign=True)
    if how == "data":
        core = module.table("three_cores").tt_core1
        core.data = core.data.clone()
    if how == "parameter":
        table = module.table("two_cores")
        table.tt_core0 = nn.Parameter(table.tt_core0.detach().clone())
    if how == "there and back":
        module.table("two_cores").double().float()
    return module


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "assign", "data", "parameter", "there and back"])
@pytest.mark.parametrize("optimizer", [None, ADAM], ids=["dense", "fused"])
def test_cores_with_other_memory_are_looked_up_and_trained(how: str, optimizer: OptimizerSpec | None) -> None:
    expected, module = bags(optimizer), bags(optimizer)
    for each in (expected, module):
        step(each)
    module = moved_memory(module, how)
    for seed in (1, 2):
        assert torch.equal(step(module, seed), step(expected, seed))
    for mine, other in zip(module.parameters(), expected.parameters()):
        assert torch.equal(mine, other)
        if how not in ("deepcopy", "pickle", "assign", "parameter"):  # these parameters are new
            assert (mine.grad is None) == (other.grad is None)
            assert mine.grad is None or torch.equal(mine.grad, other.grad)
    with torch.no_grad():
        module.table("two_cores").tt_core1.mul_(2)
    fused = optimizer is not None
    assert side_by_side(module) or (not fused and how in ("data", "parameter", "there and back"))
    indices, offsets = random_batch(module.layout, 6)
    assert_near(module(indices, offsets), brute_force(module.layout, module.weights, indices, offsets))


def test_a_fused_optimizer_wants_cores_of_one_type() -> None:
    module = bags(ADAM)
    module.table("two_cores").double()
    with pytest.raises(RuntimeError, match=r"several types or devices, .* convert or move the whole module"):
        step(module)
    step(module.float())


def test_state_under_its_earlier_names_loads() -> None:
    module, other = bags(ADAM), bags(ADAM)
    step(module)
    earlier = {}
    for name, tensor in module.state_dict().items():
        table = name.removeprefix("optimizer_state.").partition(".")[0]
        if name.endswith(".step"):
            earlier |= {f"{table}.tt_core{k}.step": tensor for k in range(TABLES[table].num_cores)}
        else:
            core, _, state = name.rpartition(".")[2].partition("_core")[2].partition("_")
            earlier[f"{table}.tt_core{core}" + (f".{state}" if state else "")] = tensor
    other.load_state_dict(earlier)
    for each in (module, other):
        step(each, seed=1)
    assert torch.equal(module.weights, other.weights)
