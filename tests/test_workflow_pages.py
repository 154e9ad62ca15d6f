"""Pages that run workflows: their `shell` blocks run in a folder with the files that they save."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from doc_pages import PAGES, Output, blocks_of, name_of
from doc_shells import commands_of, saved_files, shell_in


def languages_of(page: Path) -> set[str]:
    return {block.language for block in blocks_of(page.read_text())}


# A page with settings runs beside a service, with `test_service_pages`.
WORKFLOW_PAGES = [
    page for page in PAGES if languages_of(page) & {"shell", "yaml", "toml"} == {"shell", "yaml"}
]


def test_there_is_a_page_that_runs_a_workflow() -> None:
    assert "docs/how-to/run-a-workflow.md" in {name_of(page) for page in WORKFLOW_PAGES}


@pytest.mark.parametrize("page", WORKFLOW_PAGES, ids=name_of)
def test_what_a_page_runs_ends_as_it_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HEADGATE_BUDGET_URL", "HEADGATE_URL", "HEADGATE_SESSION_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, body in saved_files(page.read_text()).items():
        (tmp_path / name).write_text(body)
    with shell_in(tmp_path, COLUMNS="120", NO_COLOR="1") as shell:
        for command, shown in commands_of(page):
            printed = shell.run(command)
            # Tables fill a line with spaces, and a page ends none in one.
            printed = re.sub(r"[ \t]+$", "", printed, flags=re.MULTILINE)
            assert Output(shown, printed).is_right, f"$ {command}\n{printed}"
