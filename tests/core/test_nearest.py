"""The known name that somebody probably meant."""

from __future__ import annotations

import pytest

from headgate.core.text import VERY_NEAR, did_you_mean, nearest

NAMES = ("budget_usd", "maxAttempts", "max_wait_seconds", "gpt-4o-mini", "evals", "search")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("eval", "evals"),
        ("EVALS", "evals"),
        ("max_attempts", "maxAttempts"),
        ("budget-usd", "budget_usd"),
        ("budget", "budget_usd"),
        ("gpt-4o-mni", "gpt-4o-mini"),
        ("nonsense", ""),
        ("", ""),
        ("_", ""),
        ("x" * 1_000_000, ""),
    ],
)
def test_the_nearest_name_is_found_whatever_its_case_and_dashes(name: str, meant: str) -> None:
    assert nearest(name, NAMES) == meant
    assert nearest(name, iter(reversed(NAMES))) == meant


def test_where_names_resemble_each_other_only_a_misspelling_is_near() -> None:
    assert nearest("claude-nonsense-9", ["claude-sonnet-5"], cutoff=VERY_NEAR) == ""
    assert nearest("claude-sonet-5", ["claude-sonnet-5"], cutoff=VERY_NEAR) == "claude-sonnet-5"


def test_a_question_names_the_nearest_and_else_what_to_do() -> None:
    assert did_you_mean("evals") == "did you mean evals?"
    assert did_you_mean("", "leave it out") == "leave it out"
