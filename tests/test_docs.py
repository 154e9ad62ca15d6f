"""The documentation is true: examples run, links lead somewhere, nothing public is left out.

UPDATE_DOCS=1 in the environment writes outputs and generated parts anew; see CONTRIBUTING.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import pydoc
import re
import tomllib
from pathlib import Path

import pytest

from doc_pages import (
    PAGES,
    ROOT,
    UPDATING,
    anchors_of,
    blocks_of,
    generated_names,
    links_of,
    name_of,
    prose_of,
    regenerated,
    rows_under,
    run_page,
    write_outputs,
)
from headgate import SchedulerState
from headgate.cli import main
from headgate.config import load_settings
from headgate.core.reasons import Cap, Reason
from headgate.core.snapshot import decode_snapshot
from reference_pages import expanded, snapshot_fields

ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
DECISIONS = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
COMMAND_LINE = (ROOT / "docs/reference/cli.md").read_text()
RAY_PAGE = ROOT / "docs/how-to/run-on-ray.md"
REASONS = (ROOT / "docs/how-to/read-the-reasons.md").read_text()

MOST_WORDS = 55_000

LANGUAGES = {
    *("python", "text", "output", "console", "shell", "sh", "json", "toml", "yaml", "mermaid"),
}

PACKAGES = {path.parent.name for path in (ROOT / "src/headgate").glob("*/__init__.py")}
ROOT_MODULES = {path.stem for path in (ROOT / "src/headgate").glob("[!_]*.py")}

every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@every_page
def test_every_example_runs_and_prints_what_the_page_shows(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if page == RAY_PAGE and importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: make test-ray runs it")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HEADGATE_BUDGET_URL", f"sqlite:///{tmp_path}/budget.db")
    outputs = run_page(page)
    if UPDATING:
        write_outputs(page, outputs)
        return
    for output in outputs:
        assert output.is_right, f"shown:\n{output.shown}\nprinted:\n{output.printed}"


@every_page
def test_generated_parts_equal_the_code(page: Path) -> None:
    text = page.read_text()
    if UPDATING:
        page.write_text(regenerated(text))
    else:
        assert text == regenerated(text)


def test_the_state_diagram_and_the_table_of_rules_are_generated() -> None:
    names = {name for page in PAGES for name in generated_names(page.read_text())}
    assert names == {
        "headgate.core.task.transition_diagram",
        "headgate.core.budgets.reservations.rules_table_markdown",
    }


@every_page
def test_every_block_says_what_it_is(page: Path) -> None:
    text = page.read_text()
    assert {block.language for block in blocks_of(text)} <= LANGUAGES
    # Only the walk runs `sh` blocks, and it cannot reach an address that is an example.
    assert {block.language for block in blocks_of(text) if block.is_excused} <= {"sh"}
    assert text.count("```") == 2 * len(blocks_of(text))


@every_page
def test_every_json_block_is_a_snapshot(page: Path) -> None:
    for block in blocks_of(page.read_text()):
        if block.language == "json":
            assert decode_snapshot(block.body.encode()).projects


@every_page
def test_every_toml_block_is_settings_that_a_service_starts_with(
    page: Path, tmp_path: Path
) -> None:
    for block in blocks_of(page.read_text()):
        if block.language == "toml":
            path = tmp_path / "headgate.toml"
            path.write_text(block.body)
            load_settings(path, {}, {})


@every_page
def test_every_make_command_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", page.read_text(), re.MULTILINE)) <= {
        pair for target in targets for pair in ((target, ""), ("", target))
    }


@every_page
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    for target in links_of(page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors_of(expanded(linked.read_text())), target


def test_every_picture_is_there_small_and_shown() -> None:
    shown = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in re.findall(r"!\[[^\]]+\]\((?P<target>[^)\s]+)\)", page.read_text())
    }
    kept = set((ROOT / "docs/images").iterdir())
    assert shown == kept
    assert max(path.stat().st_size for path in kept) < 100_000


def test_every_page_is_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page.suffix == ".md" and page.exists() and page not in reached:
            reached.add(page)
            paths = (target.partition("#")[0] for target in links_of(page.read_text()))
            waiting += [(page.parent / path).resolve() for path in paths if path]
    assert reached >= set(PAGES)


def test_the_documentation_can_be_read() -> None:
    """What a program can say by itself is generated; what people read is at most this long."""
    # The bars of a table and the signs of a program are no words.
    texts = (page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    words = sum(re.search(r"\w", part) is not None for text in texts for part in text.split())
    assert words <= MOST_WORDS


def test_the_readme_is_short_and_starts_with_the_two_commands() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    for command in ("make up", "make test"):
        assert any(line.startswith(command) for line in lines[:25])


def test_every_optional_field_says_what_it_repairs() -> None:
    page = (ROOT / "docs/fairness.md").read_text()
    named = {name for row in rows_under(page, "What each option repairs") for name in _names(row)}
    optional = [row[0].strip("`") for row in snapshot_fields(SchedulerState)][8:]
    assert named == set(optional)


def _names(row: list[str]) -> list[str]:
    return [name.strip("` ") for name in row[0].split(",")]


def test_every_exit_code_is_in_the_reference() -> None:
    codes = {row[0] for row in rows_under(COMMAND_LINE, "Exit codes")}
    constants = {str(code) for name, code in vars(main).items() if name.startswith("EXIT_")}
    assert codes >= constants | {"0"}


def test_every_reason_is_explained() -> None:
    rows = rows_under(REASONS, "All reasons")
    assert {(row[0], row[1]) for row in rows} == {
        (str(kind.__struct_config__.tag), kind.__name__)
        for kind in {*Reason.__subclasses__(), *Cap.__subclasses__()} - {Cap}
    }


@every_page
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    text = prose_of(page.read_text())
    paths = re.findall(r"(?<![\w./-])(?:\w+/)+\w+\.py\b", text)
    folders = (ROOT / "src/headgate", ROOT / "src", ROOT)
    assert [
        path for path in paths if not any((folder / path).is_file() for folder in folders)
    ] == []
    for name in re.findall(r"\bheadgate\.(?:\w+\.)*\w+", text):
        if name.split(".")[1] in PACKAGES | ROOT_MODULES:
            assert pydoc.locate(name) is not None, name


def test_the_table_of_packages_is_the_folder_list() -> None:
    assert sorted(row[0] for row in rows_under(ARCHITECTURE, "Packages")) == sorted(PACKAGES)
    beside = {path.name for path in (ROOT / "src/headgate").glob("[!_]*.py")}
    assert beside <= set(re.findall(r"`(\w+\.py)`", ARCHITECTURE))


def test_the_picture_of_the_packages_is_the_contract_of_their_layers() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    picture = next(block.body for block in blocks_of(ARCHITECTURE) if block.language == "text")
    shown = [re.split(r" {2,}", line[16:])[0] for line in picture.splitlines()]
    assert shown == [layer for layer in layers if layer != "__main__"]


def test_the_three_questions_name_methods_that_exist() -> None:
    answers = [row[2] for row in rows_under(ARCHITECTURE, "Three questions")]
    assert len(answers) == 3
    for answer in answers:
        method, path = re.findall(r"[\w./]+", answer.replace("` in `", " "))
        kind, name = method.split(".")
        module = importlib.import_module("headgate." + path.removesuffix(".py").replace("/", "."))
        assert callable(getattr(getattr(module, kind), name))


def test_decision_records_are_numbered_without_gaps() -> None:
    assert [int(page.name[:4]) for page in DECISIONS] == list(range(1, len(DECISIONS) + 1))


@pytest.mark.parametrize("page", DECISIONS, ids=name_of)
def test_a_decision_record_says_why_what_and_what_follows(page: Path) -> None:
    text = page.read_text()
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings == ["Context", "Decision", "Consequences"]
    index = (page.parent / "README.md").read_text()
    number, title = re.findall(r"^# (\d{4}): (.+)$", text, re.MULTILINE)[0]
    assert f"| [{number}]({page.name}) | {title} |" in index
