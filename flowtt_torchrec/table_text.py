"""Tables of text: drawn on a terminal that has room for them, aligned lines in a file, a pipe or a narrow terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    text_columns: Collection[str],
    caption: str = "",
    sum_row: bool = False,
    console: Console | None = None,
) -> None:
    """Prints a table.

    Args:
        title: in the line above.
        columns: their names.
        rows: the cells of each, one a column.
        text_columns: names of those that are text, to the left; numbers go to the right.
        caption: in the line below.
        sum_row: the last row adds the others up, and is set apart where it is drawn.
        console: where to print; the standard output if not given.
    """
    console = console or Console()
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    if console.is_terminal and console.width > sum(widths) + 3 * len(widths):  # with the borders
        drawn = Table(title=title, title_justify="left", caption=caption or None)
        for name in columns:
            drawn.add_column(name, justify="left" if name in text_columns else "right")
        for number, row in enumerate(rows):
            if sum_row and number == len(rows) - 1:
                drawn.add_section()
            drawn.add_row(*row)
        console.print(drawn)
        return
    lines = [
        "  ".join(
            cell.ljust(width) if name in text_columns else cell.rjust(width)
            for name, cell, width in zip(columns, row, widths, strict=True)
        ).rstrip()
        for row in (columns, *rows)
    ]
    for line in (title, *(f"  {line}" for line in lines), *([caption] if caption else [])):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
