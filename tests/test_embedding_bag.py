from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from tt_samples import SPECS, assert_near, both_backends, brute_force, flat_grad, graphs_that_step, random_batch

from flowtt_torchrec import cores, ops
from flowtt_torchrec.embedding_bag import BatchedTTEmbeddingBags, TTEmbeddingBag
from flowtt_torchrec.ops import BoundsCheckMode
from flowtt_torchrec.optimizers import KINDS, OptimizerSpec, state_names
from flowtt_torchrec.spec import TTSpec

TABLES = {name: SPECS[name] for name in ("two_cores", "three_cores", "four_cores")}


def make_twins(name="three_cores", **options) -> tuple[TTEmbeddingBag, nn.EmbeddingBag]:
    """A tensor train, and torch's module on its materialised rows, in float64."""
    spec = SPECS[name]
    bag = TTEmbeddingBag(spec.num_embeddings, spec.embedding_dim, spec=spec, dtype=torch.float64, **options)
    dense = cores.to_dense(bag.cores, spec.num_embeddings)
    return bag, nn.EmbeddingBag.from_pretrained(dense, freeze=False, **options)


def check_twins(bag: TTEmbeddingBag, twin: nn.EmbeddingBag, *arguments: torch.Tensor, **factors: torch.Tensor) -> None:
    """Outputs and gradients; the twin's row gradients are carried to the cores through the materialised table."""
    output, expected = bag(*arguments, **factors), twin(*arguments, **factors)
    assert output.dtype == expected.dtype
    assert_near(output, expected)
    grad_output = torch.randn_like(expected)
    inputs = list(factors.values())
    (dense_grad, *expected_grads) = torch.autograd.grad(expected, [twin.weight, *inputs], grad_output)
    of_cores = list(bag.parameters())
    all_grads = torch.autograd.grad(output, [*of_cores, *inputs], grad_output)
    grad, grads = torch.cat([g.flatten() for g in all_grads[: len(of_cores)]]), all_grads[len(of_cores) :]
    weights = bag.weights.detach().requires_grad_()
    dense = cores.to_dense(bag.layout.core_views(weights)[0], bag.num_embeddings)
    assert_near(grad, torch.autograd.grad(dense, weights, dense_grad)[0])
    for factor_grad, expected_grad in zip(grads, expected_grads):
        assert_near(factor_grad, expected_grad)


@both_backends
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 0, 7, -1])
@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
def test_calls_of_embedding_bag(backend, mode, padding_idx, index_type):
    options = {"mode": mode, "padding_idx": padding_idx}
    input = torch.tensor([7, 99, 0, 7, 7, 5, 99, 0, 12, 7, 3, 3], dtype=index_type)
    starts = torch.tensor([0, 2, 2, 5, 9], dtype=index_type)  # an empty bag, and one of 7s and a 0 only
    with ops.use_backend(backend):
        bag, twin = make_twins(**options)
        check_twins(bag, twin, input, starts)
        check_twins(bag, twin, input.view(4, 3))
        check_twins(bag, twin, input[:1], starts[:1])
        bag, twin = make_twins(**options, include_last_offset=True)
        check_twins(bag, twin, input, torch.cat([starts, starts.new_tensor([12])]))
        check_twins(bag, twin, input.view(3, 4))


@both_backends
@pytest.mark.parametrize("padding_idx", [None, 7])
def test_per_sample_weights(backend, padding_idx):
    bag, twin = make_twins(mode="sum", padding_idx=padding_idx)
    input = torch.tensor([[7, 99, 0], [7, 7, 7], [5, 7, 99]])
    factors = torch.rand(3, 3, dtype=torch.float64, requires_grad=True)
    with ops.use_backend(backend):
        check_twins(bag, twin, input, per_sample_weights=factors)
        flat = factors.detach().flatten().requires_grad_()
        check_twins(bag, twin, input.flatten(), torch.tensor([0, 0, 4]), per_sample_weights=flat)


@both_backends
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 7])
def test_nothing_to_look_up(backend, mode, padding_idx):
    bag, twin = make_twins(mode=mode, padding_idx=padding_idx)
    none = torch.empty(0, dtype=torch.int64)
    with ops.use_backend(backend):
        for arguments in ((none, torch.tensor([0, 0])), (none, none), (none.view(0, 3),), (none.view(3, 0),)):
            output = bag(*arguments)
            bags = arguments[1].numel() if len(arguments) > 1 else arguments[0].shape[0]
            assert output.shape == (bags, 12)
            assert output.eq(0).all()
            output.sum().backward()
            assert flat_grad(bag).eq(0).all()
        check_twins(bag, twin, torch.tensor([7, 7]), torch.tensor([0]))


@both_backends
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_of_padded_lookups_do_not_count(backend, value):
    bag, twin = make_twins(mode="sum", padding_idx=7)
    input = torch.tensor([[7, 99, 0], [7, 7, 7], [5, 7, 99]])
    factors = torch.rand(3, 3, dtype=torch.float64).masked_fill(input == 7, value).requires_grad_()
    with ops.use_backend(backend):
        assert bag(input, per_sample_weights=factors).isfinite().all()
        assert_near(bag(input, per_sample_weights=factors), twin(input, per_sample_weights=factors))
        check_twins(bag, twin, input, per_sample_weights=factors.detach().masked_fill(input == 7, 0).requires_grad_())
        bag(input, per_sample_weights=factors).sum().backward()
        assert flat_grad(bag).isfinite().all()
        assert factors.grad.masked_select(input == 7).eq(0).all()


def test_means_with_padding_are_right_past_the_whole_numbers_of_a_float32():
    bag = TTEmbeddingBag(4, 1, spec=TTSpec(4, 1, (2, 2), (1, 1), (1,)), mode="mean", padding_idx=3)
    lookups = 2**24 + 3
    input = torch.zeros(lookups, dtype=torch.int32)
    input[-2:] = 3
    rows = cores.to_dense(bag.cores, 4)
    with ops.use_backend("native"):  # the last bag starts where a float32 cannot count any more
        output = bag(input, torch.tensor([0, 2**24 - 2]))
    assert_near(output[1], rows[0])


def test_keywords_of_embedding_bag():
    defaults = {"max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False, "dtype": None}
    nn.EmbeddingBag(100, 12, **defaults)
    assert TTEmbeddingBag(100, 12, **defaults).weights.dtype == torch.float32
    assert TTEmbeddingBag.from_pretrained(torch.randn(100, 12), rank=3, sparse=False).weights.shape
    others = {"max_norm": 1.0, "norm_type": 1.0, "scale_grad_by_freq": True, "sparse": True}
    for keyword, value in others.items():
        with pytest.raises(NotImplementedError, match=f"TTEmbeddingBag has no {keyword}={value}: .* leave it"):
            TTEmbeddingBag(100, 12, **{keyword: value})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_default_types(dtype):
    torch.manual_seed(0)
    expected = TTEmbeddingBag(100, 12, rank=3)
    group, pretrained = BatchedTTEmbeddingBags(TABLES), torch.randn(100, 12)
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(0)
        bag = TTEmbeddingBag(100, 12, rank=3)
        assert bag.weights.dtype == nn.EmbeddingBag(100, 12).weight.dtype == dtype
        assert torch.equal(bag.weights, expected.weights.to(dtype))
        assert torch.equal(BatchedTTEmbeddingBags(TABLES).weights, group.weights)
        converted = TTEmbeddingBag.from_pretrained(pretrained.to(dtype), rank=1_000)
        assert converted.weights.dtype == dtype
        rows = cores.to_dense([core.double() for core in converted.cores], 100)
        assert_near(rows, pretrained.double(), torch.finfo(dtype).eps * 20)
    finally:
        torch.set_default_dtype(torch.float32)


def test_empty_offsets():
    input, none = torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64)
    with pytest.raises(ValueError, match="offsets is empty, so none of the 2 indices is in a bag; give"):
        TTEmbeddingBag(100, 12)(input, none)
    for indices in (input, none):
        with pytest.raises(ValueError, match=r"offsets is empty.* at the end the number of indices"):
            TTEmbeddingBag(100, 12, include_last_offset=True)(indices, none)


@both_backends
def test_integer_types_may_differ(backend):
    bag, twin = make_twins(mode="sum")
    with ops.use_backend(backend):
        input, starts = torch.tensor([7, 99, 0, 7]), torch.tensor([0, 3])
        assert_near(bag(input.int(), starts), twin(input, starts))
        assert_near(bag(input, starts.int()), twin(input, starts))


def test_wrong_calls():
    bag, twin = make_twins(mode="mean")
    input, factors = torch.tensor([[1, 2]]), torch.rand(1, 2, dtype=torch.float64)
    for module in (bag, twin):
        with pytest.raises(NotImplementedError, match=r"only supported for mode='sum'.*got mode='mean'"):
            module(input, per_sample_weights=factors)
        with pytest.raises(ValueError, match="offsets"):
            module(input, torch.tensor([0]))
        with pytest.raises(ValueError, match="offsets"):
            module(input[0])
        with pytest.raises(ValueError, match="dim"):
            module(input[None])
        with pytest.raises(ValueError, match="per_sample_weights"):
            module(input, per_sample_weights=factors[:, :1])


@both_backends
def test_index_out_of_range(backend):
    bag, _ = make_twins(mode="sum")
    with ops.use_backend(backend), pytest.raises(IndexError, match=r"index 100 .*0 to 99"):
        bag(torch.tensor([[1, 100]]))
    bag.bounds_check_mode = BoundsCheckMode.IGNORE
    with ops.use_backend(backend):
        assert torch.equal(bag(torch.tensor([[1, 100]])), bag(torch.tensor([[1, 0]])))


def test_wrong_settings():
    with pytest.raises(ValueError, match="unknown mode 'max'; known: sum, mean"):
        TTEmbeddingBag(100, 12, mode="max")
    with pytest.raises(ValueError, match="padding_idx 100 is outside the table's 100 rows"):
        TTEmbeddingBag(100, 12, padding_idx=100)
    with pytest.raises(ValueError, match=r"100 x 12.*23 x 6"):
        TTEmbeddingBag(100, 12, spec=SPECS["two_cores"])


@both_backends
def test_a_torch_optimizer_trains_it(backend):
    torch.manual_seed(0)
    bag, _ = make_twins(mode="sum")
    target = make_twins()[1].weight.detach()
    optimizer = torch.optim.Adam(bag.parameters(), lr=0.02)
    losses = []
    with ops.use_backend(backend):
        for _ in range(40):
            loss = (bag(torch.arange(100)[:, None]) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_initial_rows_have_torchrecs_variance_and_follow_the_seed():
    torch.manual_seed(3)
    bag = TTEmbeddingBag(10_000, 32, rank=8)
    dense = cores.to_dense(bag.cores, 10_000)
    assert dense.std().item() == pytest.approx(cores.default_std(10_000), rel=0.15)
    torch.manual_seed(3)
    assert torch.equal(TTEmbeddingBag(10_000, 32, rank=8).weights, bag.weights)
    assert not torch.equal(TTEmbeddingBag(10_000, 32, rank=8).weights, bag.weights)


@both_backends
def test_from_pretrained(backend):
    dense = torch.randn(100, 12, dtype=torch.float64)
    full = TTSpec.suggest(100, 12, rank=1_000)  # clipped to the ranks at which nothing is lost
    bag = TTEmbeddingBag.from_pretrained(dense, full, mode="sum")
    assert not any(core.requires_grad for core in bag.parameters())
    with ops.use_backend(backend):
        assert_near(bag(torch.arange(100)[:, None]), dense)
    bag = TTEmbeddingBag.from_pretrained(dense, rank=3, freeze=False, mode="mean", padding_idx=2)
    assert bag.spec.ranks == (3, 3)
    assert (bag.mode, bag.padding_idx, bag.tt_core0.requires_grad) == ("mean", 2, True)


def test_state_of_one_table():
    bag, _ = make_twins()
    state = bag.state_dict()
    assert {key: tuple(core.shape) for key, core in state.items()} == {
        f"tt_core{k}": shape for k, shape in enumerate(SPECS["three_cores"].core_shapes)
    }
    other, _ = make_twins()
    assert not torch.equal(other.weights, bag.weights)
    other.load_state_dict(state)
    assert torch.equal(other.weights, bag.weights)


def test_repr_says_what_it_is():
    bag = TTEmbeddingBag(100, 12, spec=SPECS["three_cores"], mode="sum", padding_idx=-1, include_last_offset=True)
    assert repr(bag) == (
        "TTEmbeddingBag(100, 12, p=(5, 4, 6), q=(2, 3, 2), ranks=(3, 5), mode='sum', include_last_offset=True, "
        "padding_idx=99)"
    )
    bags = BatchedTTEmbeddingBags(TABLES, optimizer=OptimizerSpec("sgd", 0.5))
    assert "3 tables, 3 features" in repr(bags)
    assert "learning_rate=0.5" in repr(bags)


@both_backends
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
def test_batched_equals_brute_force(backend, pooling, weighted):
    bags = BatchedTTEmbeddingBags(TABLES, feature_table_map=[2, 0, 0, 1], pooling=pooling, dtype=torch.float64)
    indices, offsets = random_batch(bags.layout, batch_size=6)
    factors = torch.rand(indices.numel(), dtype=torch.float64) if weighted else None
    with ops.use_backend(backend):
        output = bags(indices, offsets, factors)
        weights = bags.weights.requires_grad_()
        expected = brute_force(bags.layout, weights, indices, offsets, factors, pooling)
        assert output.shape == (6, 16 + 6 + 6 + 12)
        assert_near(output, expected)
        output.square().sum().backward()
        assert_near(flat_grad(bags), torch.autograd.grad(expected.square().sum(), weights)[0])


@both_backends
def test_fused_steps_with_the_learning_rate_of_the_moment(backend):
    bags = BatchedTTEmbeddingBags(TABLES, optimizer=OptimizerSpec("sgd", 0.5), dtype=torch.float64)
    indices, offsets = random_batch(bags.layout, batch_size=6)
    with ops.use_backend(backend):
        for rate in (0.5, 0.25, 0.0):
            bags.set_learning_rate(rate)
            assert bags.optimizer.learning_rate == rate
            before = bags.weights.detach().clone().requires_grad_()
            grad = torch.autograd.grad(ops.lookup(before, bags.layout, indices, offsets).sum(), before)[0]
            bags(indices, offsets).sum().backward()
            assert all(core.grad is None for core in bags.parameters())
            assert_near(bags.weights, before - rate * grad)
    with pytest.raises(RuntimeError, match="no fused optimizer"):
        BatchedTTEmbeddingBags(TABLES).set_learning_rate(0.1)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(None, id="dense"),
        pytest.param(OptimizerSpec("rowwise_adagrad", 0.1), id="rowwise_adagrad", marks=graphs_that_step),
        pytest.param(OptimizerSpec("adam", 0.1), id="adam", marks=graphs_that_step),
    ],
)
def test_batched_compiles_without_graph_breaks(optimizer):
    eager = BatchedTTEmbeddingBags(TABLES, optimizer=optimizer)
    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager", dynamic=True)
    # Adam reads the number of its step from a tensor, as FBGEMM's does.
    with ops.use_backend("native"), torch._dynamo.config.patch(capture_scalar_outputs=True):
        for batch_size in (5, 8):
            indices, offsets = random_batch(eager.layout, batch_size, seed=batch_size)
            outputs = [module(indices, offsets) for module in (eager, compiled)]
            assert torch.equal(*outputs)
            for output in outputs:
                output.square().sum().backward()
    assert torch.equal(eager.weights, twin.weights)
    if optimizer is None:
        assert torch.equal(flat_grad(eager), flat_grad(twin))
    else:
        for name, state in eager._optimizer_state().items():
            assert torch.equal(state, twin._optimizer_state()[name])
            assert state.any()


@pytest.mark.parametrize("options", [{"mode": "sum"}, {"mode": "mean", "padding_idx": 7}])
def test_one_table_compiles_without_graph_breaks(options):
    bag, _ = make_twins(**options)
    compiled = torch.compile(bag, fullgraph=True, backend="aot_eager", dynamic=True)
    with ops.use_backend("native"):
        for input in (torch.tensor([[1, 7, 9], [7, 7, 7]]), torch.arange(40).view(10, 4)):
            assert torch.equal(bag(input), compiled(input))


def test_initial_weights_depend_on_name_and_seed_only():
    names = list(TABLES)
    bags = BatchedTTEmbeddingBags(TABLES)
    turned = BatchedTTEmbeddingBags({name: TABLES[name] for name in reversed(names)})
    for name in names:
        assert all(torch.equal(a, b) for a, b in zip(bags.split_weights()[name], turned.split_weights()[name]))
    assert not torch.equal(bags.weights, BatchedTTEmbeddingBags(TABLES, seed=1).weights)
    dense = cores.to_dense(BatchedTTEmbeddingBags({"a": TTSpec.suggest(5_000, 32, 8)}).split_weights()["a"], 5_000)
    assert dense.std().item() == pytest.approx(cores.default_std(5_000), rel=0.15)


@pytest.mark.parametrize("kind", KINDS)
def test_state_survives_saving_and_loading(kind):
    def make(tables):
        return BatchedTTEmbeddingBags(tables, optimizer=OptimizerSpec(kind, 0.1))

    bags = make(TABLES)
    indices, offsets = random_batch(bags.layout, batch_size=6)
    with ops.use_backend("reference"):
        bags(indices, offsets).sum().backward()
        file = io.BytesIO()
        torch.save(nn.ModuleDict({"bags": bags}).state_dict(), file)
        file.seek(0)
        other = make(dict(reversed(TABLES.items())))  # another place in the flat tensor
        nn.ModuleDict({"bags": other}).load_state_dict(torch.load(file, weights_only=True))
        for name in TABLES:
            for a, b in zip(bags.split_weights()[name], other.split_weights()[name]):
                assert torch.equal(a, b)
            for a, b in zip(bags.split_optimizer_state()[name], other.split_optimizer_state()[name]):
                assert a.keys() == b.keys() == set(state_names(kind))
                assert all(torch.equal(a[key], b[key]) for key in a)
                assert all(a[key].any() for key in a)
        again = make(TABLES)
        again.load_state_dict(bags.state_dict())
        for module in (bags, again):
            module(indices, offsets).sum().backward()
        assert torch.equal(bags.weights, again.weights)


def test_state_dict_keys_and_sharing():
    bags = BatchedTTEmbeddingBags({"a": SPECS["two_cores"], "b": SPECS["odd"]}, optimizer=OptimizerSpec("adagrad"))
    state = bags.state_dict(prefix="m.")
    expected = ["m.a.tt_core0", "m.a.tt_core1", "m.b.tt_core0", "m.b.tt_core1", "m.b.tt_core2"]
    states = [f"{key.replace('m.', 'm.optimizer_state.')}_momentum1" for key in expected]
    assert list(state) == [*expected, *states]
    assert [f"m.{name}" for name, _ in bags.named_parameters()] == expected
    assert [f"m.{name}" for name, _ in bags.named_buffers()] == states
    state["m.b.tt_core1"].fill_(3.0)
    assert bags.split_weights()["b"][1].eq(3.0).all()
    state["m.optimizer_state.b.tt_core1_momentum1"].fill_(4.0)
    assert bags.split_optimizer_state()["b"][1]["momentum1"].eq(4.0).all()
    assert not state["m.a.tt_core0"].requires_grad
    assert bags.state_dict(keep_vars=True)["a.tt_core0"].requires_grad


def test_loading_names_what_does_not_fit():
    bags = BatchedTTEmbeddingBags(TABLES, optimizer=OptimizerSpec("adagrad"))
    state = {key: tensor.clone() for key, tensor in bags.state_dict().items()}
    state["three_cores.tt_core1"] = torch.zeros(4, 3, 3, 4)
    del state["optimizer_state.two_cores.tt_core0_momentum1"]
    state["stranger.tt_core0"] = torch.zeros(1)
    with pytest.raises(RuntimeError) as error:
        bags.load_state_dict(state)
    for part in (
        "size mismatch for three_cores.tt_core1: copying a param with shape torch.Size([4, 3, 3, 4])",
        "current model is torch.Size([4, 3, 3, 5])",
        'Missing key(s) in state_dict: "optimizer_state.two_cores.tt_core0_momentum1"',
        'Unexpected key(s) in state_dict: "stranger.tt_core0"',
    ):
        assert part in str(error.value)
    loaded = {key: tensor for key, tensor in state.items() if key != "three_cores.tt_core1"}
    loaded["odd.tt_core0"] = loaded.pop("stranger.tt_core0")
    loaded["four_cores.tt_core3"].fill_(2.0)
    result = bags.load_state_dict(loaded, strict=False)
    assert result.missing_keys == ["three_cores.tt_core1", "optimizer_state.two_cores.tt_core0_momentum1"]
    assert result.unexpected_keys == ["odd.tt_core0"]
    assert bags.split_weights()["four_cores"][3].eq(2.0).all()


def test_meta_device_then_materialised_or_loaded():
    options = {"optimizer": OptimizerSpec("adam"), "feature_table_map": [0, 0, 2]}
    expected = BatchedTTEmbeddingBags(TABLES, **options)
    bags = BatchedTTEmbeddingBags(TABLES, **options, device="meta")
    assert bags.weights.is_meta
    assert bags.optimizer_state.flat["momentum1"].is_meta
    with pytest.warns(UserWarning, match=r"two_cores.tt_core0: .* to a meta parameter .*assign=True"):
        bags.load_state_dict(expected.state_dict())
    assigned = copy.deepcopy(bags)
    assigned.load_state_dict(expected.state_dict(), assign=True)
    bags.to_empty(device="cpu")
    bags.reset_parameters()
    for module in (bags, assigned):
        assert all(isinstance(core, nn.Parameter) for core in module.parameters())
        assert torch.equal(module.weights, expected.weights)
        momentum1, step = (module.optimizer_state.flat[name] for name in ("momentum1", "step"))
        assert torch.equal(momentum1, expected.optimizer_state.flat["momentum1"])
        indices, offsets = random_batch(module.layout, batch_size=3)
        with ops.use_backend("reference"):
            module(indices, offsets).sum().backward()
        assert momentum1.any()
        assert step.tolist() == [1, 1, 1]
        assert step.device.type == "cpu"
    with torch.device("meta"):
        assert BatchedTTEmbeddingBags(TABLES).weights.is_meta
        assert TTEmbeddingBag(100, 12).weights.is_meta


@both_backends
def test_conversion_and_copies_keep_views_together(backend):
    bags = BatchedTTEmbeddingBags(TABLES, optimizer=OptimizerSpec("adagrad", 0.1)).double()
    assert bags.weights.dtype == bags.optimizer_state.flat["momentum1"].dtype == torch.float64
    twin = copy.deepcopy(bags)
    indices, offsets = random_batch(bags.layout, batch_size=4)
    with ops.use_backend(backend):
        bags(indices, offsets).sum().backward()
        assert not torch.equal(bags.weights, twin.weights)
        twin(indices, offsets).sum().backward()
    assert torch.equal(bags.weights, twin.weights)
    assert torch.equal(torch.cat([c.flatten() for of in bags.split_weights().values() for c in of]), bags.weights)


def test_wrong_groups():
    with pytest.raises(ValueError, match="unknown pooling 'max'; known: sum, mean"):
        BatchedTTEmbeddingBags(TABLES, pooling="max")
    with pytest.raises(ValueError, match="feature 1 names table 3; allowed: 0 to 2"):
        BatchedTTEmbeddingBags(TABLES, feature_table_map=[0, 3])
    with pytest.raises(ValueError, match="at least one table"):
        BatchedTTEmbeddingBags({})
