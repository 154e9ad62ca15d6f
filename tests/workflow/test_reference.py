"""The reference of the workflow file has every key, and every file that a page shows is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from doc_pages import PAGES, blocks_of, name_of, rows_under
from headgate.workflow import conditions, config, expansion, parser, placeholders, yaml_document
from headgate.workflow.config import ESTIMATE_KEYS
from headgate.workflow.parser import HTTP_KEYS, WORK_KEYS

PAGE = (Path(__file__).parent.parent.parent / "docs/reference/workflow-file.md").read_text()

TABLES = {
    "A workflow": parser.ROOT_KEYS,
    "config": config.CONFIG_KEYS,
    "A budget scope": config.SCOPE_KEYS,
    "defaults": config.DEFAULT_KEYS,
    "An endpoint": config.ENDPOINT_KEYS,
    "A price": config.PRICE_KEYS,
    "A step": parser.STEP_KEYS,
    "foreach": parser.FOREACH_KEYS,
    "An estimate": ESTIMATE_KEYS,
    "A command": WORK_KEYS["command"],
    "http": HTTP_KEYS,
    "A function": WORK_KEYS["call"],
    "A model": WORK_KEYS["model"],
    "A target": WORK_KEYS["target"],
    "Fields of steps": placeholders.STEP_FIELDS,
}


@pytest.mark.parametrize(("heading", "keys"), TABLES.items(), ids=TABLES)
def test_every_key_is_in_the_reference_in_its_order(heading: str, keys: tuple[str, ...]) -> None:
    assert tuple(row[0] for row in rows_under(PAGE, heading)) == keys


def test_every_kind_of_placeholder_is_in_the_reference() -> None:
    written = " ".join(row[0] for row in rows_under(PAGE, "Placeholders"))
    assert all(f"{{{root}" in written for root in placeholders.ROOTS)


def test_which_fields_are_those_of_all_runs_is_in_the_reference() -> None:
    rows = rows_under(PAGE, "Fields of steps")
    assert {row[0] for row in rows if row[1] != "all runs"} == set(placeholders.ONE_RUN_FIELDS)
    assert {row[0] for row in rows if row[1] != "one run"} == set(placeholders.ALL_RUNS_FIELDS)


def test_the_bounds_are_those_of_the_code() -> None:
    assert [row[1] for row in rows_under(PAGE, "Bounds")] == [
        f"{bound:,}"
        for bound in (
            yaml_document.MAX_FILE_BYTES,
            yaml_document.MAX_VALUES,
            parser.MAX_STEPS,
            expansion.MAX_RUNS,
            expansion.MAX_FILE_BYTES,
            expansion.MAX_LINE_BYTES,
            conditions.MAX_LENGTH,
        )
    ]


SHOWN = [
    (page, block.body)
    for page in PAGES
    if page.exists()
    for block in blocks_of(page.read_text())
    # A job of a pull request has steps, too, and is no workflow of ours.
    if block.language == "yaml" and "steps:" in block.body and "jobs:" not in block.body
]


@pytest.mark.parametrize(("page", "text"), SHOWN, ids=[name_of(page) for page, _ in SHOWN])
def test_every_workflow_that_a_page_shows_is_one(page: Path, text: str) -> None:
    assert parser.read_workflow(Path("eval.yaml"), text.encode()).steps


EXAMPLES = sorted((Path(__file__).parent.parent.parent / "examples").rglob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_every_example_is_a_workflow_whose_items_are_there(path: Path) -> None:
    workflow = parser.read_workflow(path, path.read_bytes())
    assert all(source.count for source in expansion.load_items(workflow, copies=None).values())
