"""Draws the figures of results written by the benchmarks: ``python -m benchmarks.plot RESULTS… --out FOLDER``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import load
from benchmarks.workloads import DISTRIBUTIONS

Row = dict[str, Any]
# One colour a contender in all plots.
_COLOURS = {
    "flowtt": "tab:blue",
    "flowtt_flow_shape": "tab:cyan",
    "flowtt_bfloat16": "tab:purple",
    "flowtt_flow_shape_bfloat16": "tab:green",
    "flowtt_call_a_table": "tab:olive",
    "ttrec": "tab:red",
    "ttrec_unique": "tab:orange",
    "tbe": "tab:gray",
    "nn_embedding_bag": "tab:brown",
    "tensorly_torch": "tab:pink",
    "torchrec_dense": "tab:gray",
}


def select(rows: Sequence[Row], **values: Any) -> list[Row]:
    """Rows whose columns have these values; a tuple stands for any of its own."""
    return [
        row
        for row in rows
        if all(row.get(k) in v if isinstance(v, tuple) else row.get(k) == v for k, v in values.items())
    ]


def ratios(rows: Sequence[Row], figures: dict[str, float], axes: Any) -> bool:
    """How many times faster than TT-Rec's algorithm, and the step against the dense table."""
    groups = ("forward_vs_ttrec", "step_vs_ttrec", "step_vs_tbe", "flow_shape_step_vs_tbe")
    kinds = ("zipf", "scattered", "uniform")
    if not all(f"{group}_{kind}" in figures for group in groups for kind in kinds):
        return False
    for place, kind in enumerate(kinds):
        # The dense figures are times over times; drawn the other way round, higher is better everywhere.
        heights = [figures[f"{g}_{kind}"] if "ttrec" in g else 1 / figures[f"{g}_{kind}"] for g in groups]
        bars = axes.bar([g + 0.27 * (place - 1) for g in range(len(groups))], heights, 0.25, label=kind)
        axes.bar_label(bars, fmt="%.3g", fontsize=7)
    labels = ("forward,\nTT-Rec", "step,\nTT-Rec", "step,\ndense TBE", "step (flow shape),\ndense TBE")
    axes.set_xticks(range(len(groups)), labels)
    axes.set_yscale("log")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("times faster than")
    axes.legend()
    return True


def time_by_distribution(rows: Sequence[Row], figures: dict[str, float], axes: Any) -> bool:
    """The step under every distribution of ids."""
    rows = select(rows, question="distributions", operation="step", unit="ms")
    if not rows:
        return False
    names = list(dict.fromkeys(row["contender"] for row in rows))
    for place, name in enumerate(names):
        of = {row["distribution"]: row for row in rows if row["contender"] == name}
        kinds = [kind for kind in DISTRIBUTIONS if kind in of]
        positions = [k + 0.4 * (place - (len(names) - 1) / 2) for k in range(len(kinds))]
        _bars(axes, positions, [of[kind] for kind in kinds], 0.38, name)
        axes.set_xticks(range(len(kinds)), [kind.replace("_", "\n") for kind in kinds], fontsize=8)
    axes.set_ylabel("ms a step")
    axes.legend()
    return True


def time_by_batch(rows: Sequence[Row], figures: dict[str, float], axes: Any) -> bool:
    """Time per lookup of a step against the number of lookups, by distribution and threads."""
    rows = select(rows, question="growth", unit="ms")
    if not rows:
        return False
    colours = {"zipf_1.2": "tab:blue", "scattered_1.2": "tab:orange", "uniform": "tab:green"}
    for kind, threads in dict.fromkeys((row["distribution"], row["threads"]) for row in rows):
        of = sorted(select(rows, distribution=kind, threads=threads), key=lambda row: row["lookups"])
        x = [row["lookups"] for row in of]
        y, low, high = ([1e6 * row[c] / row["lookups"] for row in of] for c in ("median", "p10", "p90"))
        axes.plot(
            x,
            y,
            "o-" if threads == 1 else "s--",
            color=colours[kind],
            label=f"{kind}, {threads} thread{'s' if threads > 1 else ''}",
        )
        axes.fill_between(x, low, high, color=colours[kind], alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("lookups a step")
    axes.set_ylabel("ns a lookup, full step")
    axes.legend(fontsize=8)
    return True


def against_baselines(question: str, column: str, label: str) -> Callable[[Sequence[Row], dict[str, float], Any], bool]:
    """A plot of the step of all contenders against a column of a sweep, uniform ids."""

    def draw(rows: Sequence[Row], figures: dict[str, float], axes: Any) -> bool:
        rows = select(rows, question=question, operation="step", distribution="uniform", unit="ms")
        if not rows:
            return False
        values = list(dict.fromkeys(row[column] for row in rows if row[column] != ""))
        for name in dict.fromkeys(row["contender"] for row in rows):
            # A dense table has no shape; it is measured beside each tensor train, in the same order.
            of = select(rows, contender=name)
            places = [values.index(row[column]) if row[column] in values else k for k, row in enumerate(of)]
            axes.errorbar(
                places,
                [row["median"] for row in of],
                yerr=_spread(of),
                marker="o",
                color=_COLOURS.get(name),
                label=name,
            )
        axes.set_xticks(range(len(values)), [str(value) for value in values])
        axes.set_yscale("log")
        axes.set_xlabel(label)
        axes.set_ylabel("ms a step, uniform ids")
        axes.legend(fontsize=8)
        return True

    return draw


def flow_shape_gains(rows: Sequence[Row], figures: dict[str, float], axes: Any) -> bool:
    """Step of the balanced shape over that of the flow shape, at no more parameters."""
    rows = select(rows, question="flow_shapes", contender="flowtt_flow", unit="ms")
    tables = list(dict.fromkeys(f"{row['rows']}x{row['dim']}" for row in rows))
    for place, kind in enumerate(("zipf", "scattered", "uniform")):
        gains = [figures[f"balanced_over_flow_shape_{table}_{kind}"] for table in tables]
        axes.bar([t + 0.27 * (place - 1) for t in range(len(tables))], gains, 0.25, label=kind)
    axes.set_xticks(range(len(tables)), [table.replace("x", "\nx ") for table in tables], fontsize=8)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("times faster")
    axes.legend()
    return bool(tables)


def breakdown(rows: Sequence[Row], figures: dict[str, float], axes: Any) -> bool:
    """Where the time of a step goes."""
    rows = select(rows, question="comparison", contender="flowtt", unit="ms")
    kinds = list(dict.fromkeys(row["distribution"] for row in rows))
    prefix = "of a step: "
    parts = [name for name in dict.fromkeys(row["operation"] for row in rows) if name.startswith(prefix)]
    bottom = [0.0] * len(kinds)
    for part in parts:
        heights = [select(rows, distribution=kind, operation=part)[0]["median"] for kind in kinds]
        axes.bar(kinds, heights, 0.6, bottom, label=part.removeprefix(prefix))
        bottom = [b + h for b, h in zip(bottom, heights)]
    axes.set_ylabel("ms")
    axes.legend(fontsize=8)
    return bool(parts)


def memory_and_time(rows: Sequence[Row], figures: dict[str, float], axes: Any) -> bool:
    """Time of a step against the bytes of weights and optimizer state, uniform ids."""
    sizes = {
        row["contender"]: row["median"]
        for row in select(rows, question="comparison", operation="weights and state", unit="bytes")
    }
    steps = select(rows, question="comparison", operation="step", distribution="uniform", unit="ms")
    if not sizes or not steps:
        return False
    for row in steps:
        name = row["contender"]
        axes.errorbar(
            [sizes[name] / 1e6], [row["median"]], yerr=_spread([row]), marker="o", color=_COLOURS.get(name), label=name
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("MB of weights and optimizer state")
    axes.set_ylabel("ms a step, uniform ids")
    axes.legend()
    return True


def peak_memory(rows: Sequence[Row], figures: dict[str, float], axes: Any) -> bool:
    """Weights and state, and what steps need on top."""
    rows = [row for row in select(rows, question="memory", unit="bytes") if row["pooling"] == 1]
    names = list(dict.fromkeys(row["contender"] for row in rows))
    if not names:
        return False
    weights = [select(rows, contender=name, operation="weights and state")[0]["median"] / 1e6 for name in names]
    steps = [
        next(r["median"] for r in rows if r["contender"] == name and r["operation"].startswith("step (")) / 1e6
        for name in names
    ]
    axes.bar([k - 0.2 for k in range(len(names))], weights, 0.38, label="weights and state")
    axes.bar([k + 0.2 for k in range(len(names))], steps, 0.38, label="step, at most, on top")
    axes.set_xticks(range(len(names)), names)
    axes.set_yscale("log")
    axes.set_ylabel("MB")
    axes.legend()
    return True


def training(rows: Sequence[Row], figures: dict[str, float], axes: Any) -> bool:
    """Samples a second of a DLRM against the memory of its largest rank."""
    speeds = select(rows, question="training", unit="samples/s")
    if not speeds:
        return False
    for row in speeds:
        same = {key: row[key] for key in ("contender", "dim", "lookups")}
        (peak,) = (r for r in select(rows, unit="bytes", **same) if r["operation"].startswith("training peak"))
        axes.errorbar(
            [peak["median"] / 1e6],
            [row["median"]],
            yerr=_spread([row]),
            marker="o",
            color=_COLOURS[row["contender"]],
            label=f"{row['contender']}, dim {row['dim']}, {row['lookups']} samples a step",
        )
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("MB, training peak of the largest rank")
    axes.set_ylabel("samples/s")
    axes.legend(fontsize=8)
    return True


PLOTS: dict[str, Callable[[Sequence[Row], dict[str, float], Any], bool]] = {
    "ratios": ratios,
    "time_by_distribution": time_by_distribution,
    "time_by_batch": time_by_batch,
    "batch_against_baselines": against_baselines("batch", "lookups", "lookups a step"),
    "ranks_against_baselines": against_baselines("ranks", "ranks", "TT ranks"),
    "dims_against_baselines": against_baselines("dims", "dim", "columns of the table"),
    "cores_against_baselines": against_baselines("cores", "p", "factors of the rows"),
    "flow_shape_gains": flow_shape_gains,
    "breakdown": breakdown,
    "memory_and_time": memory_and_time,
    "peak_memory": peak_memory,
    "training": training,
}


def draw_all(results: Sequence[Path], folder: Path) -> list[Path]:
    """Draws every plot that the results have the numbers for, as PNG.

    Args:
        results: JSON or CSV files of one or more benchmarks.
        folder: where the images go.

    Returns:
        The files written.
    """
    matplotlib = importlib.import_module("matplotlib")  # optional
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    rows: list[Row] = []
    figures: dict[str, float] = {}
    for path in results:
        more_rows, more_figures = load(path)
        rows += more_rows
        figures |= more_figures
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in PLOTS.items():
        figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        if draw(rows, figures, axes):
            axes.set_title(_title(draw, name))
            figure.savefig(folder / f"{name}.png", dpi=150)
            written.append(folder / f"{name}.png")
        pyplot.close(figure)
    return written


def _title(draw: Callable[..., bool], name: str) -> str:
    return (draw.__doc__ or name.replace("_", " ").capitalize()).strip().rstrip(".")


def _bars(axes: Any, positions: Sequence[float], rows: Sequence[Row], width: float, label: str) -> None:
    axes.bar(positions, [r["median"] for r in rows], width, yerr=_spread(rows), color=_COLOURS.get(label), label=label)


def _spread(rows: Sequence[Row]) -> list[list[float]]:
    """Error bars from the 10 % to the 90 % quantile."""
    return [[max(0.0, r["median"] - r["p10"]) for r in rows], [max(0.0, r["p90"] - r["median"]) for r in rows]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="JSON or CSV files of the benchmarks")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/plots"), metavar="FOLDER")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("plots need matplotlib: pip install matplotlib")
    for path in options.results:
        if not path.is_file():
            parser.error(f"there is no file {path}")
    written = draw_all(options.results, options.out)
    if not written:
        parser.error("the results have no numbers for any plot")
    for path in written:
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
