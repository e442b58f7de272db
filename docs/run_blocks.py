"""Runs the Python blocks of a page, in order and in one namespace, and compares what they print.

A block of ``text`` right after one of ``python`` is what that one prints.

python docs/run_blocks.py [--update] PAGE...    # --update writes what was printed into the page
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.DOTALL | re.MULTILINE)


@dataclass
class Difference:
    """A block that did not print what its page says."""

    line: int
    expected: str
    printed: str


def run_blocks(page: Path, *, update: bool = False) -> list[Difference]:
    """Runs a page's blocks; an exception of one is raised, with the page's name and line in its traceback.

    Args:
        page: a Markdown file.
        update: whether to write into the page what its blocks printed, where it shows their output.

    Returns:
        The differences between what was printed and what the page shows; blocks that show nothing may print anything.
    """
    text = page.read_text()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    differences, pieces, end = [], [], 0
    for block in _BLOCK.finditer(text):
        line = text.count("\n", 0, block.start("code"))
        code = compile("\n" * line + block["code"], str(page), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        shown = "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())
        if block["output"] is not None:
            if shown != block["output"]:
                differences.append(Difference(line + 1, block["output"], shown))
            pieces += [text[end : block.start("output")], shown]
            end = block.end("output")
    if update:
        page.write_text("".join([*pieces, text[end:]]))
    return differences


def main(arguments: list[str]) -> int:
    update = "--update" in arguments
    failed = False
    for page in (Path(name) for name in arguments if name != "--update"):
        for difference in run_blocks(page, update=update):
            failed = not update
            print(f"{page}:{difference.line}: prints\n{difference.printed}and not\n{difference.expected}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
