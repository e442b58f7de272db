"""Draws the documentation's pictures, from specs and from plans of real batches.

python docs/pictures/draw.py [NAME ...]    # SVGs beside this file; needs matplotlib, and for batches the compiled ops
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

from flowtt_torchrec import TTSpec, ops
from flowtt_torchrec.layout import TTLayout
from flowtt_torchrec.plan import FlowPlan

HERE = Path(__file__).resolve().parent
GREY, DARK = "#c9ced6", "#333a45"
COLOURS = ("#2f6fb5", "#d97a1e", "#3b9460")  # one a core
mpl.rcParams.update(
    {
        "font.size": 10,
        "text.color": DARK,
        "axes.edgecolor": DARK,
        "axes.labelcolor": DARK,
        "xtick.color": DARK,
        "ytick.color": DARK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "flowtt",  # the same file every time
        "svg.fonttype": "path",
    }
)


def digits(row: int, p: Sequence[int]) -> list[int]:
    """The mixed-radix digits of a row number, most significant first."""
    found = []
    for base in reversed(p):
        found.append(row % base)
        row //= base
    return found[::-1]


def size(num_bytes: float) -> str:
    """Bytes as people say them, in powers of 1000."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def tensor_train() -> Figure:
    """What a tensor train is, and what it saves."""
    figure, (train, memory) = plt.subplots(1, 2, figsize=(12.5, 4.2), width_ratios=(1.75, 1), layout="constrained")
    spec = TTSpec(10_000_000, 64, p=(200, 220, 250), q=(4, 4, 4), ranks=(32, 32))
    _draw_cores(train, spec, row=7_654_321)
    _draw_memory(memory)
    return figure


def _draw_cores(axes: Axes, spec: TTSpec, row: int) -> None:
    axes.set(xlim=(0, 15.4), ylim=(0, 7.6))
    axes.axis("off")
    found = digits(row, spec.p)
    axes.text(0, 7.25, f"a table of {spec.num_embeddings:,} x {spec.embedding_dim}, held as three cores", weight="bold")
    axes.text(0, 6.6, f"row {row:,} has the digits")
    for k, digit in enumerate(found):
        axes.text(5.8 + 1.0 * k, 6.6, str(digit), color=COLOURS[k], weight="bold")
    axes.text(8.8, 6.6, f"in base {' · '.join(map(str, spec.p))}")
    r = (1, *spec.ranks, 1)
    shapes = [(r[k], spec.q[k] * r[k + 1]) for k in range(3)]
    extents = ((0.35, 2.3), (1.5, 2.3), (1.5, 0.55))  # height and width of a slice, not to scale
    left = 0.3
    for k, (height, width) in enumerate(extents):
        base = 3.2
        for place in range(6, -1, -1):  # a stack of slices, the last in front
            x, y = left + 0.16 * place, base + 0.2 * place
            inside = COLOURS[k] if place == 3 else "white"
            axes.add_patch(Rectangle((x, y), width, height, facecolor=inside, edgecolor=COLOURS[k], lw=1))
        axes.text(left, 5.95, f"core {k + 1}: {spec.p[k]} slices", color=COLOURS[k], fontsize=9)
        axes.text(left, 2.75, f"{shapes[k][0]} x {shapes[k][1]}", color=COLOURS[k], fontsize=9)
        y = 1.0
        axes.add_patch(Rectangle((left, y), width, height, facecolor=COLOURS[k], edgecolor=COLOURS[k]))
        axes.text(left, y - 0.5, f"$G_{k + 1}[{found[k]}]$", color=COLOURS[k])
        if k < 2:
            axes.text(left + width + 0.85, y + 0.3, r"$\times$", fontsize=15, ha="center", va="center")
        left += width + 1.75
    axes.text(left - 0.8, 1.3, "=", fontsize=15, ha="center", va="center")
    axes.add_patch(Rectangle((left, 1.0), 4.4, 0.4, facecolor="#7b5ea7", edgecolor="#7b5ea7"))
    axes.text(left, 0.5, f"the row: {spec.embedding_dim} numbers, made when it is looked up", color="#7b5ea7")
    axes.text(
        left,
        2.75,
        f"{spec.num_parameters:,} numbers kept\nin place of {spec.num_embeddings * spec.embedding_dim:,}",
        color=DARK,
    )


def _draw_memory(axes: Axes) -> None:
    rows = [1_000_000, 10_000_000, 100_000_000, 1_000_000_000]
    for place, count in enumerate(reversed(rows)):
        dense, cores = count * 64 * 4, TTSpec.suggest(count, 64, rank=32).num_bytes()
        of_bars = (place + 0.19, dense, GREY, "dense"), (place - 0.19, cores, COLOURS[0], "tensor train of rank 32")
        for y, value, colour, name in of_bars:
            axes.barh(y, value, 0.36, color=colour)
            label = f"{size(value)}, {name}" if count == rows[0] else size(value)
            axes.text(value * 1.2, y, label, va="center")
    axes.set(
        xscale="log", xlim=(1e5, 1e13), yticks=range(len(rows)), yticklabels=[f"{count:,} rows" for count in rows[::-1]]
    )
    axes.set_xticks([1e6, 1e9, 1e12], ["1 MB", "1 GB", "1 TB"])
    axes.minorticks_off()
    axes.set_title("memory of the weights, 64 columns", fontsize=10, weight="bold", loc="left")
    axes.set_xlabel("float32, log scale")


def worth_it() -> Figure:
    """How much smaller a table gets, by rows and rank."""
    rows = [10**e for e in range(3, 10)]
    ranks = (8, 16, 32, 64, 128)
    figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
    table = [[TTSpec.suggest(count, 64, rank=rank).compression_ratio for count in rows] for rank in ranks]
    axes.imshow([[_shade(ratio) for ratio in line] for line in table], cmap="Blues", vmin=0, vmax=9, aspect="auto")
    for y, line in enumerate(table):
        for x, ratio in enumerate(line):
            text = f"{ratio:,.0f}x" if ratio >= 10 else f"{ratio:.1f}x"
            axes.text(x, y, text, ha="center", va="center", color="white" if _shade(ratio) > 5 else DARK)
    axes.set(yticks=range(len(ranks)), yticklabels=[f"rank {rank}" for rank in ranks])
    axes.set_xticks(range(len(rows)), [f"{count:,}" for count in rows])
    axes.set_xlabel("rows of the table")
    axes.set_title("numbers in the dense table over numbers in the cores, 64 columns, three cores", fontsize=10)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


def _shade(ratio: float) -> float:
    return float(torch.tensor(ratio).clamp(1).log10()) * 1.6


def flows() -> Figure:
    """A small batch in the order given, and as its plan groups it."""
    spec = TTSpec(60, 8, p=(3, 4, 5), q=(2, 2, 2), ranks=(4, 4))
    generator = torch.Generator().manual_seed(3)
    ids = (60 ** torch.rand(24, generator=generator)).long() - 1
    plan = _plan(spec, ids)
    rows, prefixes = plan.counts[:2].tolist()
    colours = mpl.colormaps["tab10"]
    number = {prefix: place for place, prefix in enumerate(dict.fromkeys((ids[plan.lookups.long()] // 5).tolist()))}
    figure, axes = plt.subplots(figsize=(10, 4), layout="constrained")
    axes.axis("off")
    axes.set(xlim=(-4.6, len(ids) + 0.2), ylim=(-2, 6))
    for place, row in enumerate(ids.tolist()):
        axes.add_patch(Rectangle((place, 5), 0.92, 0.8, facecolor=colours(number[row // 5])))
        axes.text(place + 0.46, 5.4, str(row), color="white", ha="center", va="center", fontsize=9)
    order = plan.lookups.tolist()
    for place, lookup in enumerate(order):
        row = int(ids[lookup])
        axes.add_patch(Rectangle((place, 2.6), 0.92, 0.8, facecolor=colours(number[row // 5])))
        axes.text(place + 0.46, 3, str(row), color="white", ha="center", va="center", fontsize=9)
        axes.plot((lookup + 0.46, place + 0.46), (4.95, 3.45), color=colours(number[row // 5]), lw=0.7, alpha=0.6)
    starts, flow_starts = plan.row_starts.tolist(), plan.flow_starts.tolist()
    for row in range(rows):
        first, last = starts[row], starts[row + 1]
        axes.add_patch(Rectangle((first, 1.5), last - first - 0.08, 0.5, facecolor="white", edgecolor=DARK, lw=1))
    for flow in range(prefixes):
        first, last = starts[flow_starts[flow]], starts[flow_starts[flow + 1]]
        prefix = int(ids[order[first]]) // 5
        middle = [int(ids[order[first]]) // 5 // 4, int(ids[order[first]]) // 5 % 4]
        colour = colours(number[prefix])
        axes.add_patch(Rectangle((first, 0.2), last - first - 0.08, 0.8, facecolor=colour, edgecolor=colour))
        label = f"({middle[0]}, {middle[1]})"
        axes.text((first + last - 0.08) / 2, -0.25, label, ha="center", va="center", fontsize=7.5, color=colour)
    for y, text in (
        (5.4, f"{len(ids)} lookups,\nas given"),
        (3, "the same, sorted by\ndigits 2, 1, 3"),
        (1.75, f"{rows} distinct rows"),
        (0.6, f"{prefixes} flows: one\nprefix, one product"),
    ):
        axes.text(-4.5, y, text, va="center")
    axes.text(
        -4.5,
        -1.5,
        f"In place of {len(ids)} times two products: {prefixes} products $G_1[i_1]\\,G_2[i_2]$, one a flow, and {rows} "
        "with $G_3[i_3]$, one a distinct row.",
        va="center",
    )
    return figure


def sharing() -> Figure:
    """Lookups, distinct rows and prefixes of a real batch size, by distribution of ids."""
    from benchmarks.workloads import BALANCED, FLOW_SHAPE, ROWS, draw_ids

    kinds = {"zipf_1.2": "Zipf 1.2, hot ids first", "scattered_1.2": "Zipf 1.2, scattered", "uniform": "uniform"}
    figure, both = plt.subplots(1, 2, figsize=(10, 3.2), sharey=True, layout="constrained")
    for axes, spec in zip(both, (BALANCED, FLOW_SHAPE)):
        for place, kind in enumerate(kinds):
            ids = draw_ids(kind, ROWS, 32_768, seed=0)
            rows, prefixes = _plan(spec, ids).counts[:2].tolist()
            for bar, (value, colour) in enumerate(zip((len(ids), rows, prefixes), (GREY, COLOURS[1], COLOURS[0]))):
                y = place + 0.27 * (1 - bar)
                axes.barh(y, value, 0.25, color=colour)
                axes.text(value + 400, y, f"{value:,}", va="center", fontsize=9)
        axes.set(xlim=(0, 39_000), xticks=[])
        axes.spines["bottom"].set_visible(False)
        axes.set_yticks(range(len(kinds)), list(kinds.values()))
        axes.set_title(f"p {' · '.join(map(str, spec.p))}", fontsize=10)
    handles = [Polygon([(0, 0)], color=colour) for colour in (GREY, COLOURS[1], COLOURS[0])]
    figure.legend(handles, ["lookups", "distinct rows", "prefixes"], loc="outside lower center", ncols=3, frameon=False)
    return figure


def _plan(spec: TTSpec, ids: torch.Tensor) -> FlowPlan:
    return ops.flow_plan(TTLayout([spec], ["t"]), ids, torch.arange(len(ids) + 1))


PICTURES = {
    "tensor_train": tensor_train,
    "worth_it": worth_it,
    "flows": flows,
    "sharing": sharing,
}


def main(names: Sequence[str]) -> None:
    sys.path.insert(0, str(HERE.parents[1]))  # benchmarks is no installed package
    unknown = set(names) - set(PICTURES)
    if unknown:
        sys.exit(f"unknown picture {', '.join(sorted(unknown))}; known: {', '.join(PICTURES)}")
    for name in names or PICTURES:
        figure = PICTURES[name]()
        figure.savefig(HERE / f"{name}.svg", metadata={"Date": None}, facecolor="white")
        plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1:])
