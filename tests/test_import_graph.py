"""Which module may import which, from the source alone."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import flowtt_torchrec

PACKAGE = Path(flowtt_torchrec.__file__).parent
NAME = PACKAGE.name


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(tree: ast.AST) -> list[tuple[str, list[str]]]:
    """Each module that is imported, wherever the statement is, and the names taken from it."""
    found = [(alias.name, []) for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            found.append((str(node.module), [alias.name for alias in node.names]))
    return found


def imported(path: Path) -> set[str]:
    """Modules of the package as they are named in MODULES, other packages by their first name."""
    found = set()
    for module, names in imports(ast.parse(path.read_text(encoding="utf-8"))):
        if module.partition(".")[0] != NAME:
            found.add(module.partition(".")[0])
            continue
        inner = {f"{module}.{name}" for name in names if f"{module}.{name}" in MODULES}
        found |= inner
        if len(inner) < len(names) or not names:
            found.add(module)
    return found


GRAPH = {module: imported(path) for module, path in MODULES.items()}


def room(module: str) -> str:
    """The folder below the package that a module is in, its own name for one at the top."""
    return module.split(".")[1] if "." in module else ""


def reached_from(module: str) -> set[str]:
    """Everything that importing a module brings in; a package's `__init__` comes with each of its modules."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        for other in GRAPH.get(waiting.pop(), ()):
            for name in (other, *(parent for parent in MODULES if other.startswith(f"{parent}."))):
                if name not in found and name != NAME:
                    found.add(name)
                    waiting.append(name)
    return found


def test_no_module_imports_itself_by_others() -> None:
    """Otherwise `CycleError` shows the cycle."""
    order = list(graphlib.TopologicalSorter({name: GRAPH[name] & MODULES.keys() for name in GRAPH}).static_order())
    assert order.index(f"{NAME}.spec") < order.index(f"{NAME}.distributed.embeddingbag")


def test_what_runs_does_not_import_what_plans() -> None:
    planner = f"{NAME}.distributed.planner"
    runtime = [name for name in MODULES if name.startswith(f"{NAME}.distributed.") and not name.startswith(planner)]
    assert f"{NAME}.distributed.embeddingbag" in runtime
    for module in runtime:
        direct = {other for other in GRAPH[module] if other.startswith(planner)}
        assert not direct, f"{module} imports {direct}"


def test_only_what_is_above_the_modules_imports_torchrec() -> None:
    """The ops and modules run with torch alone; so do the commands, but for those that read checkpoints."""
    below = [name for name in MODULES if room(name) not in ("distributed", "datasets", "training", "__main__")]
    assert f"{NAME}.embedding_bag" in below
    for module in below:
        reached = reached_from(module)
        upwards = {other for other in reached if room(other) in ("distributed", "datasets", "training")}
        assert not upwards, f"{module} imports {upwards}"
        assert not reached & {"torchrec", "fbgemm_gpu"}, f"{module} imports torchrec"


def test_nothing_imports_the_rooms_above_it() -> None:
    above = {"datasets": {"distributed", "training"}, "distributed": {"datasets", "training"}}
    for module in MODULES:
        upwards = {other for other in GRAPH[module] if room(other) in above.get(room(module), set())}
        assert not upwards, f"{module} imports {upwards}"
