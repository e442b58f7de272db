from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tt_samples import SPECS, layout_of, mixed_layout

from flowtt_torchrec import layout as columns
from flowtt_torchrec.layout import TTLayout, bits_for
from flowtt_torchrec.spec import TTSpec


def test_descriptor_columns():
    layout = layout_of("two_cores", "three_cores", feature_tables=[1, 0, 1])
    # two_cores: p 4, 6 -> 2 and 3 bits; three_cores: p 5, 4, 6 -> 3, 2 and 3 bits, the middle digit on top
    first = [2, 23, 6, 4, 6, 1, 1, 2, 3, 1, 1, 1, 5, 1, 1, 1, 0, 40, 0, 0, 3, 0, 0, 0, 0, 4, 0, 0, 8, 0, 0, 0]
    second = [3, 100, 12, 5, 4, 6, 1, 2, 3, 2, 1, 1, 3, 5, 1, 1]
    second += [130, 160, 340, 0, 3, 6, 0, 0, 10, 15, 19, 0, 8, 0, 0, 0]
    for row in (first, second):
        row[columns.FINGERPRINT] = layout.fingerprint
    assert layout.tables.tolist() == [first, second]
    assert layout.tables.dtype == torch.int64
    assert layout.features.tolist() == [[1, 0], [0, 12], [1, 18]]
    assert layout.feature_dims == (12, 6, 12)
    assert layout.total_dim == 30
    assert layout.num_parameters == 130 + 270
    assert layout.num_slices == 10 + 15
    assert bytes(layout.table_names.tolist()) == b"two_cores\nthree_cores"


def test_fingerprints_tell_layouts_apart():
    """By tables, their order and features, not by names; the same in every process."""
    layout = layout_of("two_cores", "three_cores")
    others = (
        layout_of("three_cores", "two_cores"),
        layout_of("two_cores", "three_cores", feature_tables=[1, 0]),
        layout_of("two_cores", "three_cores", feature_tables=[0, 1, 1]),
        layout_of("two_cores"),
        TTLayout([SPECS["two_cores"], TTSpec(99, 12, (5, 4, 6), (2, 3, 2), (3, 5))], ["two_cores", "three_cores"]),
    )
    assert len({layout.fingerprint, *(other.fingerprint for other in others)}) == 1 + len(others)
    assert TTLayout(layout.specs, ["a", "b"]).fingerprint == layout.fingerprint
    assert layout.fingerprint == 6413254428049893772


def test_descriptors_are_on_the_cpu_whatever_torchs_default_device():
    with torch.device("meta"):
        layout = layout_of("two_cores")
    assert {tensor.device.type for tensor in (layout.tables, layout.table_names, layout.features)} == {"cpu"}


def test_views_lie_where_the_descriptor_says():
    layout = mixed_layout()
    flat = torch.arange(layout.num_parameters)
    slices = torch.arange(layout.num_slices)
    for table, (spec, cores, core_slices) in enumerate(
        zip(layout.specs, layout.core_views(flat), layout.slice_views(slices))
    ):
        assert [tuple(core.shape) for core in cores] == spec.core_shapes
        for k, (core, of_core) in enumerate(zip(cores, core_slices)):
            assert core.flatten()[0] == layout.tables[table, columns.CORE_OFFSETS + k]
            assert of_core.tolist() == [layout.tables[table, columns.SLICE_OFFSETS + k] + i for i in range(spec.p[k])]
    layout.core_views(flat)[0][0].zero_()
    assert flat[: SPECS["two_cores"].core_sizes[0]].eq(0).all()


def test_four_cores_put_the_later_middle_digit_on_top():
    layout = layout_of("four_cores")  # p 3, 2, 4, 3 -> 2, 1, 2 and 2 bits
    row = ((2 * 2 + 1) * 4 + 3) * 3 + 1
    key = layout.keys(torch.tensor([0]), torch.tensor([row]))
    assert key.item() == 3 << 5 | 1 << 4 | 2 << 2 | 1


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_keys_are_reversible_and_sort_by_table_middle_prefix_and_row(data):
    p = data.draw(st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=4), min_size=1, max_size=3))
    specs = [TTSpec(int(torch.tensor(f).prod()), 1, tuple(f), (1,) * len(f), (1,) * (len(f) - 1)) for f in p]
    layout = TTLayout(specs, [str(t) for t in range(len(specs))])
    tables = torch.cat([torch.full((spec.num_embeddings,), t) for t, spec in enumerate(specs)])
    rows = torch.cat([torch.arange(spec.num_embeddings) for spec in specs])
    keys = layout.keys(tables, rows)
    assert keys.unique().numel() == keys.numel()

    found_tables, digits = layout.split_keys(keys)
    assert torch.equal(found_tables, tables)
    recomposed = torch.zeros_like(rows)
    for k in range(4):
        factor = torch.tensor([spec.p[k] if k < spec.num_cores else 1 for spec in specs])[tables]
        recomposed = recomposed * factor + digits[:, k]
    assert torch.equal(recomposed, rows)

    def order(i):  # middle digits from the last to the first, then the first, then the last
        d = specs[tables[i]].num_cores
        own = digits[i].tolist()[:d]
        return (int(tables[i]), *own[d - 2 : 0 : -1], own[0], own[-1])

    by_digits = sorted(range(len(rows)), key=order)
    assert keys.argsort().tolist() == by_digits
    prefixes = layout.prefix_keys(keys).tolist()
    for i, j in pairwise(by_digits):
        assert (prefixes[i] == prefixes[j]) == (order(i)[:-1] == order(j)[:-1])


def test_bits_for():
    assert [bits_for(p) for p in (1, 2, 3, 4, 5, 8, 9, 256, 257)] == [0, 1, 2, 2, 3, 3, 4, 8, 9]


def test_keys_use_up_to_62_bits():
    spec = TTSpec(2**62, 1, (2**21, 2**20, 2**21), (1, 1, 1), (1, 1))
    layout = TTLayout([spec], ["wide"])
    tables, digits = layout.split_keys(layout.keys(torch.tensor([0]), torch.tensor([2**62 - 2])))
    assert tables.tolist() == [0]
    assert digits.tolist() == [[2**21 - 1, 2**20 - 1, 2**21 - 2, 0]]
    with pytest.raises(ValueError, match=r"table 'wide' has p .* 62 bits; with 1 bits for 2 tables"):
        TTLayout([spec, spec], ["wide", "other"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], []), "at least one table"),
        (([SPECS["odd"]], ["a", "b"]), "1 tables need as many different names"),
        (([SPECS["odd"]] * 2, ["a", "a"]), "different names"),
        (([SPECS["odd"]], ["a\nb"]), "single lines"),
        (([SPECS["odd"]], ["a"], []), "at least one feature"),
        (([SPECS["odd"]], ["a"], [0, 1]), "feature 1 names table 1; allowed: 0 to 0"),
    ],
)
def test_bad_groups_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TTLayout(*arguments)


def test_views_need_a_buffer_of_the_right_size():
    layout = layout_of("two_cores")
    with pytest.raises(ValueError, match="flat buffer of 130 elements, not \\[131\\]"):
        layout.core_views(torch.zeros(131))
    with pytest.raises(ValueError, match="buffer of 10 slices, not \\[11\\]"):
        layout.slice_views(torch.zeros(11))
