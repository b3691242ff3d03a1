"""The shape of the repository: small files, small functions, tests that mirror the tree."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "services" / "tandem"
GENERATED = (PACKAGE / "v1", PACKAGE / "internal")
SOURCES = sorted(
    path for path in PACKAGE.rglob("*.py") if not any(folder in path.parents for folder in GENERATED)
)

MANY_LINES = 300
MOST_LINES = 400
MOST_FUNCTION_LINES = 75


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_files_are_rarely_over_300_lines_and_never_over_400() -> None:
    sizes = {str(path.relative_to(ROOT)): lines(path) for path in SOURCES}
    assert {name: size for name, size in sizes.items() if size > MOST_LINES} == {}
    long = {name: size for name, size in sizes.items() if size > MANY_LINES}
    assert len(long) <= len(sizes) / 20, f"more than one file in twenty is long: {long}"


def test_a_function_fits_a_screen() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno >= MOST_FUNCTION_LINES
    ]
    assert long == []


def test_unit_tests_mirror_the_tree() -> None:
    packages = {path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("__init__.py")}
    folders = {
        path.parent.relative_to(ROOT / "tests" / "unit") for path in ROOT.glob("tests/unit/**/test_*.py")
    }
    assert folders - packages == set()


def test_test_files_have_names_of_their_own() -> None:
    """Without packages among the tests, pytest can't import two files of one name."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_stub_is_left(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"NotImplementedError|\b(?:TODO|FIXME|XXX)\b", text) == []


def test_no_path_of_a_machine_is_in_the_repository() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    homes = re.compile("|".join("/" + name + "/" for name in ("work", "home", "Users", "root")))
    found = [
        name
        for name in listed.stdout.decode().split("\0")
        if name
        and (ROOT / name).is_file()
        and homes.search((ROOT / name).read_text("utf-8", errors="ignore"))
    ]
    assert found == []
