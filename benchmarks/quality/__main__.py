"""Trains small click models with compressed tables of equal bytes and compares what they predict.

Every contender gets the same search of its learning rate and of the number of epochs on validation data. Trainings that
are in the file of runs already are not made again, so that a run can be stopped and started.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.environment import command_line, describe
from benchmarks.quality.contenders import BASELINES, CONTENDERS, TENSOR_TRAINS, UNCOMPRESSED
from benchmarks.quality.data import ORDERS, RECIPES, MissingDataError
from benchmarks.quality.figures import draw
from benchmarks.quality.runs import jobs, read, run_all
from benchmarks.quality.summary import print_tables, summarise, write_csv

_QUICK = {
    "datasets": ["movielens", "planted"],
    "contenders": ["dense", "hash", "qr_multiply", "narrow", "robe", "tt2", "tt3", "tt2_narrow1"],
    "ratios": [8.0],
    "seeds": 2,
    "max_rows": 40_000,
    "max_epochs": 4,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few contenders and rows, 3 minutes: shows that all works")
    parser.add_argument("--datasets", nargs="+", choices=RECIPES, default=["movielens", "flights"])
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        default=[UNCOMPRESSED, *BASELINES, *TENSOR_TRAINS],
        metavar="NAME",
        help=f"of {', '.join(CONTENDERS)}",
    )
    parser.add_argument("--ratios", nargs="+", type=float, default=[], help="compression ratios; the data set's own")
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=["frequency"], help="numbering of ids")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/quality"), metavar="FOLDER")
    parser.add_argument("--report-only", action="store_true", help="only tables and figures of the runs that are there")
    options = parser.parse_args(arguments)
    out = options.out / "quick" if options.quick else options.out
    sizes = {name: getattr(options, name) for name in ("datasets", "contenders", "ratios", "orders", "seeds")}
    todo = jobs(**(sizes | _QUICK if options.quick else sizes))
    console = Console(soft_wrap=True)
    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    runs = out / "runs.jsonl"
    if not options.report_only:
        try:
            run_all(todo, runs, options.workers, console.print)
        except MissingDataError as error:
            parser.error(str(error))
    finished = read(runs)
    if not finished:
        parser.error(f"{runs} has no finished trainings")
    rows = summarise(finished)
    print_tables(rows, console)
    write_csv(rows, out / "quality.csv", describe(command_line()))
    figures = draw(rows, out)
    for path in (out / "quality.csv", *figures):
        console.print(f"wrote {path}")
    if not figures:
        console.print("no figures, they need matplotlib: pip install matplotlib")


if __name__ == "__main__":
    main()
