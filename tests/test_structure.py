"""The structure of the package in numbers: no package cycles, few modules with a single importer, short files."""

from __future__ import annotations

import ast
import statistics
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests.test_architecture import ROOT, modules, own, tree

MOST_MODULES = {"launch": 10, "checkpoint": 14, "config": 15}
MOST_WITH_ONE_IMPORTER = 35
MOST_LINES = 400
MEDIAN_LINES = 170


def package_of(module: str) -> str:
    return module.partition(".")[0]


def is_package(module: str) -> bool:
    return (ROOT.joinpath(*module.split(".")) / "__init__.py").exists()


@cache
def importers() -> dict[str, set[str]]:
    """The modules that import each module; the lazy public names of ``__init__`` do not count."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules():
        for used in own(module) - {module}:
            if module != "__init__" and not is_package(used):
                found[used].add(module)
    return found


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_packages_import_one_another_without_a_cycle() -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for module in modules():
        if module != "__init__":
            graph[package_of(module)] |= {package_of(used) for used in own(module)} - {package_of(module), "__init__"}
    while leaves := {package for package, needs in graph.items() if not needs & set(graph)}:
        graph = defaultdict(set, {package: needs for package, needs in graph.items() if package not in leaves})
    assert not graph, f"a cycle runs through {dict(graph)}"


def test_few_modules_have_a_single_importer() -> None:
    single = sorted(module for module, users in importers().items() if len(users) == 1)
    assert len(single) <= MOST_WITH_ONE_IMPORTER, f"{len(single)} modules have one importer: {single}"


@pytest.mark.parametrize(("package", "most"), MOST_MODULES.items())
def test_packages_stay_small(package: str, most: int) -> None:
    found = [path for path in (ROOT / package).rglob("*.py") if path.name != "__init__.py"]
    assert len(found) <= most, [path.name for path in found]


def test_files_are_short() -> None:
    assert not {str(path.relative_to(ROOT)): lines(path) for path in files() if lines(path) > MOST_LINES}
    assert statistics.median(lines(path) for path in files() if path.name != "__init__.py") <= MEDIAN_LINES


def test_no_module_only_re_exports() -> None:
    for module in modules():
        if module == "__init__" or is_package(module):
            continue
        body = [node for node in tree(module).body if not (isinstance(node, ast.Expr))]
        assert any(not isinstance(node, ast.Import | ast.ImportFrom) for node in body), f"{module} only imports"
