"""Pages of a service whose clock was set back or forward: no time is negative, none is nonsense."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from config.running import WORK, running
from dashboard.browser import Browser, text_of
from headgate.core.text import ago, coming

HOUR_SECONDS = 3_600
TOML = (
    WORK
    + """
[scheduler]
tick_seconds = 0.05
# A task that has ended is not forgotten in the hour by which the clock is set forward.
task_retention_seconds = 86400

[projects.default]
[projects.held]
status = "paused"

[budgets.root]
limit_usd = "10"
window = "day"
"""
)
PAGES = ("/", "/ui/tasks", "/ui/projects", "/ui/budgets", "/ui/webhooks", "/ui/slots")
MORE_PAGES = ("/ui/settings", "/ui/settings/audit", "/ui/settings/tokens", "/ui/projects/held")
NOT_YET = re.compile(r"(?:Submitted|started|Done|run|Made|since) ?[^,;.]{0,30},? in \d")
NEGATIVE = re.compile(r"(?<![\w.:/-])-\d+(?:\.\d+)? ?(?:ms|s|min|h|d|%)\b")


@pytest.mark.parametrize("jump_seconds", [-HOUR_SECONDS, HOUR_SECONDS])
async def test_no_page_has_a_negative_time_after_the_clock_was_set(
    jump_seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, real = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead[0])
    async with running(tmp_path, TOML) as one:
        browser = Browser(one.app)
        done, waiting = await one.submit(), await one.submit(projectId="held")
        await one.ended(done)
        ahead[0] = jump_seconds
        after = await one.submit(projectId="held")
        tasks = [f"/ui/tasks/{task}" for task in (done, waiting, after)]
        for path in (*PAGES, *MORE_PAGES, *tasks):
            page = await browser.get(path)
            assert page.status == 200, path
            text = text_of(page.body)
            assert NEGATIVE.findall(text) == [], path
            assert NOT_YET.findall(text) == [], path


@pytest.mark.parametrize(
    ("seconds_ago", "words"),
    [
        (7_200, "2 h ago"),
        (1.5, "1.5 s ago"),
        (0.5, "now"),
        (0, "now"),
        (-0.5, "now"),
        (-60, "now"),
        (-61, "before the clock was set back"),
        (-7_200, "before the clock was set back"),
    ],
)
def test_what_has_happened_is_not_still_to_come(seconds_ago: float, words: str) -> None:
    assert ago(1_000_000 - seconds_ago, 1_000_000) == words


@pytest.mark.parametrize(
    ("seconds_ahead", "words"),
    [(7_200, "in 2 h"), (1.5, "in 1.5 s"), (0.5, "due now"), (-7_200, "due now")],
)
def test_what_is_still_to_come_is_not_over(seconds_ahead: float, words: str) -> None:
    assert coming(1_000_000 + seconds_ahead, 1_000_000) == words
