"""What is worth a notice, in which words, and in which order."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from headgate.budgets.status import ScopeStatus
from headgate.core.budgets.ledger import Unit
from headgate.core.estimates import Kind, SilentKind
from headgate.core.slots.status import SlotBody
from headgate.core.text import at_once
from headgate.dashboard import overview
from headgate.dashboard.overview import MAX_BUDGETS, MAX_NOTICES, Notice, worst_first
from headgate.storage.usage import UnpricedModel

LATER = datetime(2026, 11, 15, 21, 0, tzinfo=UTC)


def scope(name: str = "session:s", **fields: Any) -> ScopeStatus:
    amounts: dict[str, Any] = dict.fromkeys(
        (
            "spent_micro_usd",
            "reserved_micro_usd",
            "overrun_micro_usd",
            "spent_tokens",
            "reserved_tokens",
            "overrun_tokens",
        ),
        0,
    )
    limits: dict[str, Any] = dict.fromkeys(
        ("limit_micro_usd", "remaining_micro_usd", "limit_tokens", "remaining_tokens", "resets_at")
    )
    return ScopeStatus(**{**amounts, **limits, "scope": name, "window": "none", **fields})


def slot(**fields: Any) -> SlotBody:
    known: dict[str, Any] = {
        "name": "work",
        "provider": "zai",
        "zone": "UTC",
        "quota_from": "address",
        "quota_text": "",
        "state": "open",
        "enabled": True,
        "limits": [],
        "wake_modes": [],
        "wakes_enabled": False,
        "wake_pending": False,
        "wake_errors": 0,
        "poll_errors": 0,
    }
    return SlotBody(**{**known, **fields})


@pytest.mark.parametrize(
    ("limits", "share"),
    [
        ({}, None),
        ({"limit_micro_usd": 100, "remaining_micro_usd": 75}, 0.25),
        ({"limit_micro_usd": 100, "remaining_micro_usd": -20}, 1.2),
        ({"limit_tokens": 0, "remaining_tokens": 0}, 1.0),
        (
            {
                "limit_micro_usd": 100,
                "remaining_micro_usd": 75,
                "limit_tokens": 10,
                "remaining_tokens": 1,
            },
            0.9,
        ),
    ],
)
def test_a_budget_is_as_full_as_its_tighter_limit(
    limits: dict[str, Any], share: float | None
) -> None:
    assert scope(**limits).used_share == (None if share is None else pytest.approx(share))


def test_a_model_without_a_price_is_told_of_with_the_lines_to_add() -> None:
    (notice,) = overview.of_unpriced([UnpricedModel(model='house "x"', tokens=900_000)])
    assert (notice.tone, notice.name) == ("warning", 'house "x"')
    assert "900,000 tokens" in notice.text
    assert r'[prices."house \"x\""] with input = … and output = …' in notice.text
    assert "at no cost" in notice.text
    held = UnpricedModel(model="m", tokens=9, assumed_micro_usd=100_000)
    (notice,) = overview.of_unpriced([held])
    assert "for 9 tokens $0.10 was booked, as was reserved" in notice.text


def test_work_that_reports_nothing_is_told_of_with_the_line_to_add() -> None:
    (notice,) = overview.of_silent([SilentKind(Kind("search", "review"), Unit.TOKENS)])
    assert (notice.tone, notice.name) == ("warning", "review")
    assert notice.text.startswith("reports no tokens in project search")
    assert 'Add estimate_tokens = … to [targets."review"]' in notice.text


@pytest.mark.parametrize(
    ("left", "tone", "words"),
    [
        (21, None, ""),
        (20, "warning", "is nearly used up: 20 of 100 tokens left."),
        (0, "bad", "is used up: 0 of 100 tokens left."),
        (-5, "bad", "is used up: 0 of 100 tokens left."),
    ],
)
def test_a_budget_is_told_of_from_the_share_of_alerts_on(
    left: int, tone: str | None, words: str
) -> None:
    found = at_once(overview.of_budgets(scope(limit_tokens=100, remaining_tokens=left)))
    assert [(one.tone, one.text) for one in found] == ([] if tone is None else [(tone, words)])


def test_very_many_budgets_leave_room_for_everything_else() -> None:
    full = {"limit_micro_usd": 100, "remaining_micro_usd": 0}
    children = [scope(f"run:{number}", **full) for number in range(20)]
    found = at_once(overview.of_budgets(scope("", children=children)))
    assert len(found) == MAX_BUDGETS + 1
    assert (found[-1].title, found[-1].href) == ("12 more budgets are used up", "/ui/budgets")
    assert found[-1].tone == "bad"


@pytest.mark.parametrize(
    ("fields", "tone", "text"),
    [
        ({}, None, ""),
        ({"state": "cold"}, None, ""),
        ({"state": "unknown", "poll_errors": 2}, None, ""),
        ({"state": "disabled", "disabled_reason": "by hand"}, "bad", "is disabled: by hand."),
        (
            {"state": "disabled", "disabled_reason": "disabled, the key was refused"},
            "bad",
            "is disabled: the key was refused.",
        ),
        (
            {"state": "exhausted", "resets_at": LATER, "wait_until": LATER},
            "warning",
            "is exhausted: calls and tasks wait for the next window.",
        ),
        (
            {"state": "exhausted", "resets_at": LATER},
            "warning",
            "is exhausted: its window ended, and the next poll must confirm it.",
        ),
        (
            {"state": "paused", "wait_reason": "paused by hand, x brings it back"},
            "warning",
            "is paused by hand, x brings it back.",
        ),
        (
            {"state": "no_key", "wait_reason": "no key: K is not set"},
            "bad",
            "has no key: K is not set.",
        ),
        (
            {"state": "open", "poll_errors": 3, "last_error": "no answer"},
            "warning",
            "could not be read 3 times in a row: no answer.",
        ),
    ],
)
def test_a_slot_is_told_of_when_its_tasks_wait_or_nothing_is_known(
    fields: dict[str, Any], tone: str | None, text: str
) -> None:
    found = list(overview.of_slots([slot(**fields)]))
    assert [(one.tone, one.text) for one in found] == ([] if tone is None else [(tone, text)])


@pytest.mark.parametrize(
    ("dead", "is_more", "title"),
    [
        (0, False, None),
        (1, False, "1 webhook was given up since yesterday"),
        (3, False, "3 webhooks were given up since yesterday"),
        (20, True, "20 or more webhooks were given up since yesterday"),
    ],
)
def test_webhooks_that_nobody_took_are_counted(dead: int, is_more: bool, title: str | None) -> None:
    found = list(overview.of_webhooks(dead, is_more=is_more))
    assert [one.title for one in found] == ([] if title is None else [title])


def test_the_worst_come_first_in_their_order_and_the_rest_is_counted() -> None:
    mild = [Notice(tone="warning", title=str(n), text="") for n in range(MAX_NOTICES)]
    grave = [Notice(tone="bad", title=f"bad {n}", text="") for n in range(2)]
    shown, more = worst_first([*mild, *grave])
    assert [one.title for one in shown[:3]] == ["bad 0", "bad 1", "0"]
    assert (len(shown), more) == (MAX_NOTICES, 2)
