"""What the documentation shows is so: its Python runs, its commands are known, its links lead somewhere."""

from __future__ import annotations

import difflib
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from flowtt_torchrec.__main__ import _parser

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted({*ROOT.glob("*.md"), *DOCS.glob("**/*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("benchmarks/*.md")})
RUN = [page for page in PAGES if "```python\n" in page.read_text()]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", RUN, ids=name)
def test_python_blocks_run_and_print_what_the_page_shows(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "from torchrec" in page.read_text():
        pytest.importorskip("torchrec")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for difference in load(DOCS / "run_blocks.py").run_blocks(page):
        assert difference.printed == difference.expected, (
            f"{name(page)}:{difference.line}; run_blocks.py --update mends it"
        )


def test_a_difference_is_found_and_mended(tmp_path: Path) -> None:
    run_blocks = load(DOCS / "run_blocks.py").run_blocks
    page = tmp_path / "page.md"
    page.write_text("# A\n```python\nx = 1\nprint(x)\n```\n\n```text\n2\n```\nthen\n```python\nprint(x + 1)\n```\n")
    (difference,) = run_blocks(page)
    assert (difference.expected, difference.printed) == ("2\n", "1\n")
    run_blocks(page, update=True)
    assert run_blocks(page) == []
    assert "1\n```\nthen\n```python\nprint(x + 1)\n```\n" in page.read_text()


def test_the_readme_shows_the_two_lines_as_they_are() -> None:
    dense, tensor_trains = (
        (ROOT / "examples" / f"torchrec_{kind}.py").read_text().partition('"""\n\n')[2].splitlines()
        for kind in ("dense", "tensor_trains")
    )
    changed = list(difflib.unified_diff(dense, tensor_trains, n=0, lineterm=""))[2:]
    shown = re.search(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    assert shown[1].splitlines() == [line for line in changed if not line.startswith("@@")]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files(page: Path) -> None:
    for target, _ in LINK.findall(page.read_text()):
        assert not target or (page.parent / target).exists(), f"{name(page)} links to {target}"


def test_files_that_pages_name_are_there() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    of_others = "torchrec_dlrm/"
    for page in PAGES:
        if page.name == "CHANGELOG.md":  # of the past, too
            continue
        for named in re.findall(r"`([\w./-]+\.(?:py|h|cuh|cu|cpp|inc|sh|yaml|csv|md|txt))`", page.read_text()):
            known = any(f"/{file}".endswith(f"/{named}") for file in files)
            assert known or named.startswith(of_others), f"{name(page)} names {named}"


@pytest.mark.slow
def test_pictures_show_what_the_code_makes_now(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw = load(DOCS / "pictures" / "draw.py")
    for picture, make in draw.PICTURES.items():
        make().savefig(tmp_path / "drawn.svg")
        drawn, kept = (
            re.findall("<!-- (.*) -->", path.read_text())
            for path in (tmp_path / "drawn.svg", draw.HERE / f"{picture}.svg")
        )
        assert drawn, picture
        assert drawn == kept, f"{picture}.svg is out of date: python docs/pictures/draw.py {picture}"


def commands() -> list[tuple[str, list[str]]]:
    """Page and words of each command line in a block of ``bash``."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                found += [(name(page), shlex.split(part, comments=True)) for part in line.split(" && ")]
    return found


def test_commands_are_known() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    checked = 0
    for page, words in commands():
        if words[:1] == ["make"]:
            named = [word for word in words[1:] if "=" not in word]
            assert set(named) <= targets, f"{page}: {words}"
        elif words[:3] == ["python", "-m", "flowtt_torchrec"]:
            _parser().parse_args(words[3:])
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]) is not None, f"{page}: {words}"
        elif words[:1] == ["python"]:
            assert (ROOT / words[1]).exists(), f"{page}: {words}"
        else:
            continue
        checked += 1
    assert checked > 20


def test_train_dlrm_takes_the_options_that_pages_show() -> None:
    options = pytest.importorskip("flowtt_torchrec.training.options")
    shown = [(page, words) for page, words in commands() if "train_dlrm.py" in words]
    assert shown
    for page, words in shown:
        arguments = words[words.index("train_dlrm.py") + 1 :]
        assert options.parse([word for word in arguments if word != "--"]), page
