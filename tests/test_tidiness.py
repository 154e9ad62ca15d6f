"""Style that a test can keep: lengths, docstrings, names, dead modules, foreign words."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from headgate.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src/headgate"
MODULES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = ("tests", "benchmarks", "torture", "docs", "examples")
PYTHON = [*MODULES, *(path for name in FOLDERS for path in sorted(ROOT.glob(f"{name}/**/*.py")))]
TEXTS = [
    *PYTHON,
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("docs/**/*.json")),
    *sorted(ROOT.glob("examples/**/*.[my]*")),
    *sorted(ROOT.glob("deploy/*")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile")),
    *(ROOT / name for name in ("pyproject.toml", "constraints.txt", ".ci/run", ".gitignore")),
]

MOST_MODULE_LINES = 400
MOST_FUNCTION_LINES = 60
MOST_MODULES_IN_A_FOLDER = 32
# The layers are the list of what may lie at the top; import-linter reads the same one.
LAYERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
TOP_LEVEL = {"__init__", "py", *LAYERS[0]["layers"]}
# A command is loaded by its name, when it is called; the process that writes is a program.
ENTRIES = {
    "headgate",
    "headgate.__main__",
    "headgate.databases.writer_process",
    *(f"headgate.cli.commands.{name}" for name in COMMANDS),
}
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}

# Written so that this file does not contain what it looks for.
BANNED = {
    "unfinished work": re.compile(r"\bTO[D]O\b|\bFIX[M]E\b|\bXX[X]\b|NotImplemented[E]rror"),
    "a path of one machine": re.compile(r"(?<![\w.])/(?:work|home|root|Users)/\w"),
    "a document outside the project": re.compile(r"\bseed 0\d|\bissue #?\d|\bseeds/|\bshared/"),
    "a registry's host": re.compile(r"pypi[.]org|pythonhosted[.]org"),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def path_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions_of(path: Path) -> list[Function]:
    found = ast.walk(tree_of(path))
    return [node for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def length_of(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


every_module = pytest.mark.parametrize("path", MODULES, ids=path_of)
every_text = pytest.mark.parametrize("path", TEXTS, ids=path_of)


CORE_MAY_IMPORT = {
    "__future__", "bisect", "collections", "dataclasses", "datetime", "decimal", "enum",
    "functools", "headgate", "heapq", "itertools", "math", "msgspec", "re", "typing",
}  # fmt: skip
IMPURE_CALLS = {"now", "today", "utcnow", "open", "input", "print", "exec", "eval", "__import__"}
CORE = [path for path in MODULES if path.is_relative_to(PACKAGE / "core")]


@pytest.mark.parametrize("path", CORE, ids=path_of)
def test_core_imports_and_calls_nothing_impure(path: Path) -> None:
    """An import contract cannot see `datetime.now()`, nor a builtin that reads a file."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= CORE_MAY_IMPORT
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] in CORE_MAY_IMPORT
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            is_own = isinstance(called, ast.Attribute) and _is_self(called.value)
            assert is_own or name not in IMPURE_CALLS, f"{name}() on line {node.lineno}"


def _is_self(node: ast.expr) -> bool:
    """Say whether this is `self`, or something that hangs on it."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "self"


@every_module
def test_a_module_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_MODULE_LINES


def test_no_folder_is_crowded() -> None:
    counts = Counter(path_of(path.parent) for path in MODULES)
    assert {name: n for name, n in counts.items() if n > MOST_MODULES_IN_A_FOLDER} == {}


@every_module
def test_a_function_is_short(path: Path) -> None:
    lengths = {function.name: length_of(function) for function in functions_of(path)}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_FUNCTION_LINES} == {}


def test_most_functions_are_under_ten_lines() -> None:
    lengths = sorted(length_of(function) for path in MODULES for function in functions_of(path))
    assert lengths[len(lengths) // 2] < 10


def test_nothing_stray_lies_at_the_top_of_the_package() -> None:
    found = {path.stem for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert found <= TOP_LEVEL


@every_module
def test_everything_public_has_a_docstring(path: Path) -> None:
    tree = tree_of(path)
    assert ast.get_docstring(tree), "the module has none"
    assert [name for name, node in public_definitions(tree) if not ast.get_docstring(node)] == []


def public_definitions(
    tree: ast.Module | ast.ClassDef, prefix: str = ""
) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.name.startswith("_"):
            continue
        yield f"{prefix}{node.name}", node
        if isinstance(node, ast.ClassDef):
            yield from public_definitions(node, f"{prefix}{node.name}.")


@every_text
def test_no_text_has_words_that_do_not_belong(path: Path) -> None:
    text = path.read_text()
    found = {name: match[0] for name, banned in BANNED.items() if (match := banned.search(text))}
    assert found == {}


@every_text
def test_a_file_ends_in_one_newline_and_no_line_in_a_space(path: Path) -> None:
    text = path.read_text()
    assert text == "" or (text.endswith("\n") and not text.endswith("\n\n"))
    assert not re.search(r"[ \t]$", text, re.MULTILINE)


@pytest.mark.parametrize("path", PYTHON, ids=path_of)
def test_a_module_is_named_after_its_subject(path: Path) -> None:
    assert not NAMES_THAT_SAY_NOTHING & set(re.split(r"_", path.stem))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imported_names() -> frozenset[str]:
    """Return everything that is imported anywhere, as dotted names, with each name's parents."""
    found: set[str] = set()
    for path in PYTHON:
        own = module_name(path) if path.is_relative_to(PACKAGE) else ""
        found |= {name for name in imports_of(path) if name != own}
    return frozenset(found | {name.rpartition(".")[0] for name in found})


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@every_module
def test_a_module_is_imported_by_something_or_is_an_entry(path: Path) -> None:
    name = module_name(path)
    assert name in imported_names() | ENTRIES or path.name == "__init__.py"


def test_no_property_fails_because_the_machine_is_busy() -> None:
    assert settings.default is not None
    assert settings.default.deadline is None
