"""From finished trials to a table: means over seeds with intervals, and differences to hashing and to dense tables."""

from __future__ import annotations

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as ScreenTable

from benchmarks.quality.contenders import UNCOMPRESSED
from benchmarks.quality.runs import Finished, best_rate
from benchmarks.quality.training import Outcome, Trial

# Student's t, 97.5 %, by degrees of freedom (R. A. Fisher's table); above, the normal's.
_T = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
HASHING = "hash"
ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Row:
    """A contender at a ratio.

    NE is the test part's normalised entropy. Intervals are half of the 95 % interval of a mean over seeds (Student's
    t); differences are of the same seeds, so of the same split, and negative where the contender is better.
    """

    dataset: str
    order: str
    ratio: float
    contender: str
    rate: float = math.nan
    seeds: int = 0
    bytes: int = 0
    ne: float = math.nan
    ne_interval: float = math.nan
    auc: float = math.nan
    auc_interval: float = math.nan
    ne_less_hash: float = math.nan
    ne_less_hash_interval: float = math.nan
    ne_less_dense: float = math.nan
    ne_less_dense_interval: float = math.nan
    best_ne: float = math.nan
    step_ms: float = math.nan
    why_not: str = ""


def mean_and_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of its 95 % interval, which is NaN for one value."""
    if not values:
        return math.nan, math.nan
    degrees = len(values) - 1
    if degrees == 0:
        return values[0], math.nan
    t = _T[degrees] if degrees < len(_T) else 1.96
    return statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(len(values))


def chosen(finished: Finished) -> dict[Trial, dict[int, Outcome] | str]:
    """For each contender at a ratio (rate and seed 0), the outcomes by seed at the rate that is best by validation."""
    searched: dict[Trial, dict[float, float]] = defaultdict(dict)
    out: dict[Trial, dict[int, Outcome] | str] = {}
    for trial, outcome in finished.items():
        if isinstance(outcome, str):
            out[replace(trial, rate=0.0, seed=0)] = outcome
        elif trial.seed == 0:
            searched[replace(trial, rate=0.0, seed=0)][trial.rate] = outcome.validation_ne
    for group, rates in searched.items():
        rate = best_rate(rates)
        of_rate = {t.seed: o for t, o in finished.items() if replace(t, rate=0.0, seed=0) == group and t.rate == rate}
        out[replace(group, rate=rate)] = {seed: o for seed, o in of_rate.items() if not isinstance(o, str)}
    return out


def differences(ours: Mapping[int, Outcome], theirs: Mapping[int, Outcome]) -> tuple[float, float]:
    """Mean and interval of the differences in NE, ours less theirs, over the seeds that both have."""
    return mean_and_interval(
        [ours[seed].test_ne - theirs[seed].test_ne for seed in sorted(ours.keys() & theirs.keys())]
    )


def summarise(finished: Finished) -> list[Row]:
    """A row for each contender at each ratio, the best first."""
    groups = chosen(finished)
    references: dict[Trial, Mapping[int, Outcome]] = {}
    for trial, outcomes in groups.items():
        if not isinstance(outcomes, str):
            references[replace(trial, rate=0.0)] = outcomes
    rows = []
    for trial, outcomes in groups.items():
        key = (trial.dataset, trial.order, trial.ratio, trial.contender)
        if isinstance(outcomes, str):
            rows.append(Row(*key, why_not=outcomes))
            continue
        same = replace(trial, rate=0.0)
        to_hash = differences(outcomes, references.get(replace(same, contender=HASHING), {}))
        to_dense = differences(outcomes, references.get(replace(same, contender=UNCOMPRESSED, ratio=1.0), {}))
        every = list(outcomes.values())
        best = [o.best_ne for o in every if o.best_ne is not None]
        rows.append(
            Row(
                *key,
                trial.rate,
                len(every),
                ELEMENT_BYTES * every[0].weights,
                *mean_and_interval([o.test_ne for o in every]),
                *mean_and_interval([o.test_auc for o in every]),
                *to_hash,
                *to_dense,
                statistics.fmean(best) if best else math.nan,
                statistics.median(o.step_ms for o in every),
            )
        )
    return sorted(rows, key=lambda r: (r.dataset, r.order, r.ratio, math.isnan(r.ne), r.ne, r.contender))


def write_csv(rows: Sequence[Row], path: Path, environment: Mapping[str, Any]) -> None:
    """Writes rows as CSV, the environment before them in lines that start with ``#``."""
    with path.open("w", newline="") as file:
        for name, value in environment.items():
            file.write(f"# {name}: {value}\n")
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            values = {name: _short(value) for name, value in asdict(row).items()}
            writer.writerow(values)


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return value


def print_tables(rows: Sequence[Row], console: Console) -> None:
    """Prints a table for each data set, numbering and ratio."""
    for dataset, order, ratio in dict.fromkeys((row.dataset, row.order, row.ratio) for row in rows):
        table = ScreenTable(title=f"{dataset}, 1/{ratio:g} of the bytes, ids by {order}")
        for name in ("contender", "kB", "NE", "AUC", "NE - hash", "NE - dense", "rate", "ms a step", "seeds"):
            table.add_column(name, justify="left" if name == "contender" else "right", no_wrap=True)
        for row in rows:
            if (row.dataset, row.order, row.ratio) != (dataset, order, ratio):
                continue
            if row.why_not:
                table.add_row(row.contender, row.why_not)
                continue
            table.add_row(
                row.contender,
                f"{row.bytes / 1e3:.1f}",
                *(f"{mean:.4f} ± {half:.4f}" for mean, half in _pairs(row)),
                f"{row.rate:g}",
                f"{row.step_ms:.1f}",
                str(row.seeds),
            )
        console.print(table)


def _pairs(row: Row) -> list[tuple[float, float]]:
    return [
        (row.ne, row.ne_interval),
        (row.auc, row.auc_interval),
        (row.ne_less_hash, row.ne_less_hash_interval),
        (row.ne_less_dense, row.ne_less_dense_interval),
    ]
