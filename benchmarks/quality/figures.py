"""Two figures: bytes against normalised entropy, and the time of a step against it at equal bytes."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.contenders import UNCOMPRESSED
from benchmarks.quality.summary import Row


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draws both figures as PNG, one panel a data set and numbering; none if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    matplotlib = importlib.import_module("matplotlib")  # optional
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    measured = [row for row in rows if not row.why_not]
    panels = list(dict.fromkeys((row.dataset, row.order) for row in measured))
    styles = _styles(pyplot, measured)
    written = []
    for name, panel in (("bytes_against_ne", _bytes), ("step_time_against_ne", _times)):
        figure, axes = pyplot.subplots(
            1, len(panels), figsize=(5 * len(panels) + 2, 5), layout="constrained", squeeze=False
        )
        for axis, (dataset, order) in zip(axes[0], panels):
            here = [row for row in measured if (row.dataset, row.order) == (dataset, order)]
            panel(axis, here, styles)
            axis.set_title(f"{dataset}, ids by {order}")
            axis.set_ylabel("normalised entropy, test (lower is better)")
        labels: dict[str, Any] = {}
        for axis in axes[0]:
            labels.update({text: mark for mark, text in zip(*axis.get_legend_handles_labels())})
        figure.legend(labels.values(), labels.keys(), loc="outside right upper", fontsize=7)
        figure.savefig(folder / f"{name}.png", dpi=120)
        pyplot.close(figure)
        written.append(folder / f"{name}.png")
    return written


def _styles(pyplot: Any, rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Colour and marker of each contender; tensor trains have filled circles, the others crosses and the like."""
    names = sorted({row.contender for row in rows} - {UNCOMPRESSED})
    colours = pyplot.get_cmap("tab20")
    return {
        name: {"color": colours(k % 20), "marker": "o" if name.startswith("tt") else "xv+d"[k % 4]}
        for k, name in enumerate(names)
    }


def _bytes(axis: Any, rows: Sequence[Row], styles: dict[str, dict[str, Any]]) -> None:
    for name, style in styles.items():
        mine = sorted((row for row in rows if row.contender == name), key=lambda row: row.bytes)
        if mine:
            interval = [0.0 if math.isnan(row.ne_interval) else row.ne_interval for row in mine]
            axis.errorbar(
                [row.bytes for row in mine], [row.ne for row in mine], interval, label=name, capsize=2, lw=1, **style
            )
    for row in rows:
        if row.contender == UNCOMPRESSED:
            axis.axhline(row.ne, color="black", ls="--", label=UNCOMPRESSED)
    axis.set_xscale("log")
    axis.set_xlabel("bytes of the compressed tables")


def _times(axis: Any, rows: Sequence[Row], styles: dict[str, dict[str, Any]]) -> None:
    ratios = sorted({row.ratio for row in rows if row.contender != UNCOMPRESSED})
    if not ratios:
        return
    middle = ratios[len(ratios) // 2]
    for row in rows:
        if row.contender == UNCOMPRESSED:
            axis.plot(row.step_ms, row.ne, "k*", label=UNCOMPRESSED)
        elif row.ratio == middle:
            axis.plot(row.step_ms, row.ne, ls="none", label=row.contender, **styles[row.contender])
    axis.set_xscale("log")
    axis.set_xlabel(f"CPU time of a step, ms, one thread, at 1/{middle:g} of the bytes")
