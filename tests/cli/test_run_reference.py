"""The reference of the run commands names every key that they write as JSON."""

from __future__ import annotations

import msgspec
import pytest

from doc_pages import ROOT
from headgate.cli.run_session import EXIT_CODES
from headgate.workflow.backend import Money, StepTask
from headgate.workflow.dry_run import DryPart, DryRun, DryStop
from headgate.workflow.report import RunReport, RunState, StepRow, StepState, StepSummary
from headgate.workflow.run_list import RunSummary, StepOutput

PAGE = (ROOT / "docs/reference/run-cli.md").read_text()
KINDS: list[type[msgspec.Struct]] = [
    *(RunReport, StepSummary, StepRow, StepTask, Money),
    *(DryRun, DryPart, DryStop, StepOutput, RunSummary),
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_is_named(kind: type[msgspec.Struct]) -> None:
    missing = [
        field.name for field in msgspec.structs.fields(kind) if f"`{field.name}`" not in PAGE
    ]
    assert missing == []


def test_every_state_and_every_exit_code_is_named() -> None:
    for state in RunState:
        assert f"`{state.value}`" in PAGE
    for step_state in StepState:
        assert step_state.value in PAGE
    for code in {2, *EXIT_CODES.values()}:
        assert f"\n| {code} | " in PAGE
