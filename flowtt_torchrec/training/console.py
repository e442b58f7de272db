"""What rank 0 prints: drawn tables and a progress bar on a terminal, plain lines elsewhere (torchx, Slurm, files)."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flowtt_torchrec.table_text import print_table
from flowtt_torchrec.training.metrics import Scores


class Console:
    """Prints on one rank and is silent on the others.

    Args:
        enabled: whether this process prints.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._rich = RichConsole() if enabled and sys.stdout.isatty() else None
        self._progress: Progress | None = None

    def say(self, text: str = "") -> None:
        """Prints a line at once, also into a pipe."""
        if self._rich is not None:
            self._rich.print(text, markup=False, highlight=False, soft_wrap=True)
        elif self.enabled:
            print(text, flush=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> None:
        """Prints a table; the first ``text_columns`` columns are text, the others numbers."""
        if self.enabled:
            print_table(title, columns, rows, text_columns=columns[:text_columns], console=self._rich)

    def start_progress(self, title: str, total: int | None, done: int) -> None:
        """Begins a progress bar of steps; without a terminal the lines of `progress` are all there is."""
        if self._rich is None:
            return
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
            console=self._rich,
        )
        self._progress.add_task(title, total=total, completed=done, status="")
        self._progress.start()

    def advance(self) -> None:
        """Moves the bar by one step."""
        if self._progress is not None:
            self._progress.advance(self._progress.task_ids[0])

    def progress(self, line: str, status: str) -> None:
        """Says how it goes: ``status`` beside the bar, or the whole ``line``."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], status=status)
        else:
            self.say(line)

    def stop_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def show_scores(scores: Scores) -> str:
    """Like ``loss 0.4561  NE 0.8714  AUROC 0.7813``."""
    return f"loss {show(scores.loss)}  NE {show(scores.ne)}  AUROC {show(scores.auroc)}"


def show(number: float | None, digits: int = 4) -> str:
    """A number for people: ``-`` if there is none, ``NaN`` if it is not a number."""
    if number is None:
        return "-"
    return "NaN" if math.isnan(number) else f"{number:.{digits}f}"


def show_bytes(size: float) -> str:
    """Bytes for people, in powers of 1000 as in the compression table."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"
