from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tt_samples import SPECS, assert_near, brute_force, layout_of, offsets_of, random_batch, random_weights

from flowtt_torchrec import ops
from flowtt_torchrec.embedding_bag import BatchedTTEmbeddingBags, TTEmbeddingBag
from flowtt_torchrec.materialised import MaterialisedRows
from flowtt_torchrec.optimizers import OptimizerSpec
from flowtt_torchrec.plan import BoundsCheckMode

ENOUGH = 1 << 30


def bytes_of(table: str) -> int:
    return 4 * SPECS[table].num_embeddings * SPECS[table].embedding_dim


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("max_bytes", [0, bytes_of("two_cores") + bytes_of("three_cores"), ENOUGH])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_same_output_whatever_is_kept(pooling, weighted, max_bytes, integers):
    layout = layout_of("three_cores", "two_cores", "rank_32", "odd", feature_tables=[2, 0, 1, 0, 3])
    indices, offsets = (x.to(integers) for x in random_batch(layout, batch_size=11))
    factors = torch.randn(indices.numel(), dtype=torch.float64) if weighted else None
    weights = random_weights(layout)
    rows = MaterialisedRows(max_bytes, "materialised")
    expected = brute_force(layout, weights, indices, offsets.long(), factors, pooling)
    for _ in range(2):
        output = rows.lookup(weights, layout, indices, offsets, per_sample_weights=factors, pooling=pooling)
        assert_near(output, expected)
        assert rows.num_bytes <= max_bytes
    kept = {name for name, strategy in rows.strategies(layout).items() if strategy == "materialised"}
    assert kept == {0: set(), ENOUGH: set(layout.names)}.get(max_bytes, {"two_cores"})  # float64 takes twice the bytes


def test_a_batch_without_samples_and_one_without_lookups():
    layout = layout_of("three_cores", "two_cores")
    weights, rows = random_weights(layout), MaterialisedRows(ENOUGH, "materialised")
    nothing = torch.empty(0, dtype=torch.int64)
    assert rows.lookup(weights, layout, nothing, torch.zeros(1, dtype=torch.int64)).shape == (0, 18)
    output = rows.lookup(weights, layout, nothing, torch.zeros(7, dtype=torch.int64))
    assert torch.equal(output, torch.zeros(3, 18, dtype=torch.float64))


def test_rows_are_made_when_they_have_paid_for_themselves():
    layout = layout_of("three_cores", "rank_32")
    weights, rows = random_weights(layout, torch.float32), MaterialisedRows(ENOUGH)
    ids = torch.randint(100, (2_000,), generator=torch.Generator().manual_seed(0))
    offsets = offsets_of(torch.tensor([2_000, 1]))
    batch = torch.cat([ids, torch.tensor([7])]), offsets
    rows.lookup(weights, layout, *batch)
    assert rows.strategies(layout) == {"three_cores": "materialised", "rank_32": "prefix"}
    for _ in range(3):
        assert_near(rows.lookup(weights, layout, *batch), ops.lookup(weights, layout, *batch))
    assert rows.strategies(layout)["rank_32"] == "prefix"  # one lookup a batch has saved next to nothing
    heavy = torch.arange(1_000).repeat(20)
    few = torch.cat([torch.tensor([7]), heavy]), offsets_of(torch.tensor([1, heavy.numel()]))
    rows.lookup(weights, layout, *few)
    assert rows.strategies(layout)["rank_32"] == "materialised"


def test_auto_stays_within_its_memory():
    layout = layout_of("three_cores", "rank_32")
    weights, rows = random_weights(layout, torch.float32), MaterialisedRows(bytes_of("rank_32") - 1)
    ids = torch.cat([torch.arange(100).repeat(30), torch.arange(1_000).repeat(30)])
    rows.lookup(weights, layout, ids, offsets_of(torch.tensor([3_000, 30_000])))
    assert rows.strategies(layout) == {"three_cores": "materialised", "rank_32": "prefix"}
    assert rows.num_bytes == bytes_of("three_cores")


def test_forced_to_keep_none():
    layout = layout_of("three_cores")
    weights, rows = random_weights(layout), MaterialisedRows(ENOUGH, "prefix")
    ids = torch.arange(100).repeat(50)
    for _ in range(3):
        rows.lookup(weights, layout, ids, torch.tensor([0, 5_000]))
    assert rows.num_bytes == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_never_stale_after_a_fused_step(compiled):
    bags = BatchedTTEmbeddingBags({"t": SPECS["three_cores"]}, optimizer=OptimizerSpec("sgd", 0.1))
    step = torch.compile(bags, backend="aot_eager") if compiled else bags
    check_never_stale(bags, lambda ids, offsets: step(ids, offsets).sum().backward())


def test_never_stale_after_a_torch_optimizer():
    bags = BatchedTTEmbeddingBags({"t": SPECS["three_cores"]})
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.1)

    def step(ids, offsets):
        bags(ids, offsets).sum().backward()
        optimizer.step()

    check_never_stale(bags, step)


def test_never_stale_after_loading_or_writing_to_cores():
    bags = BatchedTTEmbeddingBags({"t": SPECS["three_cores"]})
    other = BatchedTTEmbeddingBags({"t": SPECS["three_cores"]}, seed=1)
    check_never_stale(bags, lambda *_: bags.load_state_dict(other.state_dict()))
    check_never_stale(bags, lambda *_: bags.split_weights()["t"][1].mul_(2))
    parameter = torch.nn.Parameter(bags.split_weights()["t"][0])  # as TorchRec's kernels hold a core

    @torch.no_grad()
    def write(*_):
        parameter.mul_(2)

    check_never_stale(bags, write)
    with torch.inference_mode():
        check_never_stale(bags, write)


def check_never_stale(bags, change):
    ids, offsets = torch.arange(100), torch.arange(101)
    bags.materialise_rows(ENOUGH, "materialised")
    with torch.no_grad():
        before = bags(ids, offsets)
    assert bags.materialised.num_bytes == bytes_of("three_cores")
    change(ids, offsets)
    with torch.no_grad():
        after = bags(ids, offsets)
        bags.materialise_rows(0)
        assert bags.materialised is None
        assert_near(after, bags(ids, offsets))
    assert not torch.equal(before, after)


def test_lookups_with_gradients_do_without():
    bag = TTEmbeddingBag(100, 12, spec=SPECS["three_cores"], mode="sum")
    bag.materialise_rows(ENOUGH, "materialised")
    ids = torch.arange(10)[None]
    bag(ids).sum().backward()
    assert bag.tt_core0.grad is not None
    assert bag.materialised.num_bytes == 0
    with torch.no_grad():
        bag(ids)
    assert bag.materialised.num_bytes > 0
    bag.requires_grad_(False)
    factors = torch.ones(1, 10, requires_grad=True)
    bag(ids, per_sample_weights=factors).sum().backward()
    assert factors.grad is not None


def test_torch_embedding_bag_agrees_with_padding():
    bag = TTEmbeddingBag(100, 12, spec=SPECS["three_cores"], padding_idx=3)
    ids = torch.tensor([[3, 1, 3], [3, 3, 3], [5, 6, 7]])
    with torch.no_grad():
        expected = bag(ids)
        bag.materialise_rows(ENOUGH, "materialised")
        assert_near(bag(ids), expected)


def test_rows_out_of_range():
    layout = layout_of("two_cores", "three_cores")
    weights = random_weights(layout)
    rows = MaterialisedRows(2 * bytes_of("two_cores"), "materialised")
    indices, offsets = torch.tensor([1, 23, 4, 100]), torch.tensor([0, 1, 2, 3, 4])
    with pytest.raises(IndexError, match=r"index 23 at position 1 \(feature 0, table 'two_cores'\).*0 to 22"):
        rows.lookup(weights, layout, indices, offsets)
    assert rows.num_bytes > 0
    expected = brute_force(layout, weights, torch.tensor([1, 0, 4, 0]), offsets)
    with pytest.warns(UserWarning, match="In this call 2 such indices"):
        output = rows.lookup(weights, layout, indices, offsets, bounds_check_mode=BoundsCheckMode.WARNING)
    assert_near(output, expected)
    assert_near(rows.lookup(weights, layout, indices, offsets, bounds_check_mode=BoundsCheckMode.IGNORE), expected)
    with pytest.raises(RuntimeError, match="offsets must start at 0"):
        rows.lookup(weights, layout, indices, torch.tensor([1, 1, 2, 3, 4]))


def test_copies_keep_no_rows():
    bags = BatchedTTEmbeddingBags({"t": SPECS["three_cores"]})
    bags.materialise_rows(ENOUGH, "materialised")
    with torch.no_grad():
        bags(torch.arange(10), torch.arange(11))
    for other in (copy.deepcopy(bags), pickle.loads(pickle.dumps(bags))):
        assert other.materialised.num_bytes == 0
        assert (other.materialised.max_bytes, other.materialised.strategy) == (ENOUGH, "materialised")


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"unknown strategy 'dense'; known: auto, prefix, materialised"):
        MaterialisedRows(1, "dense")
    with pytest.raises(ValueError, match="max_bytes must be at least 0, not -1"):
        MaterialisedRows(-1)
