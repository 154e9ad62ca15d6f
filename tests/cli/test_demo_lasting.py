"""What the demonstration shows in its first minute it shows hours later: three hours of its plan.

The hours are those of the plan, held against the settings that the service is started with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import takewhile

import pytest

from headgate.cli.up_demo import NEARLY_USED_UP as NEARLY
from headgate.cli.up_demo import PAUSED, USED_UP, Demo, PlannedTask, plan
from headgate.config import Settings
from headgate.config.loading import Origin, load
from headgate.core.budgets.alerts import NEARLY_USED_UP
from headgate.core.money import read_usd
from headgate.engine.history import STEP_SECONDS

PLAN_SECONDS = 3 * 3_600.0
WINDOW_SECONDS = 3_750.0
"""The longest that a window of an hour counts something: it ends in steps of 150 seconds."""
PERIOD_SECONDS = 600.0
MOST_USED = 0.9 * NEARLY_USED_UP
LASTS = timedelta(days=7)

Amount = Callable[[PlannedTask], float]


@pytest.fixture(scope="module")
def settings() -> Settings:
    with Demo() as demo:
        return load(Origin(path=demo.settings_file, environ=demo.environ)).settings


@pytest.fixture(scope="module")
def planned() -> list[PlannedTask]:
    return list(takewhile(lambda one: one.at_seconds < PLAN_SECONDS, plan()))


def usd(task: PlannedTask) -> float:
    return read_usd(str(task.fields.get("estimate_usd") or "0")) / 1e6


def tokens(task: PlannedTask) -> float:
    return float(task.fields.get("estimate_tokens") or 0)


def seconds(task: PlannedTask) -> float:
    return float((task.fields["params"] or {})["seconds"])


def of_scope(tasks: Iterable[PlannedTask], scope: str) -> Iterator[PlannedTask]:
    """Yield the tasks that a scope is charged for."""
    for task in tasks:
        own = (f"project:{task.fields['project_id']}", *(task.fields.get("scopes") or ()))
        if scope in ("", "root") or any(f"{one}/".startswith(f"{scope}/") for one in own):
            yield task


def most_within(tasks: Iterable[PlannedTask], length_seconds: float, amount: Amount) -> float:
    """Return the largest sum of an amount in any stretch of so many seconds."""
    within: deque[PlannedTask] = deque()
    total = most = 0.0
    for task in tasks:
        within.append(task)
        total += amount(task)
        while within[0].at_seconds <= task.at_seconds - length_seconds:
            total -= amount(within.popleft())
        most = max(most, total)
    return most


def test_what_is_there_to_wait_has_no_deadline(
    planned: list[PlannedTask],
) -> None:
    opening = [one for one in planned if one.at_seconds == 0]
    waiting = [one for one in opening if one.fields["project_id"] == PAUSED]
    waiting += of_scope(opening, USED_UP)
    assert len(waiting) > 5
    for one in waiting:
        assert "deadline" not in one.fields


@pytest.mark.parametrize(
    ("scope", "window", "least", "most"),
    [(USED_UP, "month", 2.1, 3.0), (NEARLY, "none", 0.9, 0.99)],
)
def test_a_budget_that_is_used_up_or_nearly_stays_so_over_midnight_and_the_turn_of_a_month(
    planned: list[PlannedTask],
    settings: Settings,
    scope: str,
    window: str,
    least: float,
    most: float,
) -> None:
    budget = settings.budgets[scope]
    assert budget.window == window
    opening = [one for one in planned if one.at_seconds == 0]
    charged = sum(usd(one) for one in of_scope(opening, scope))
    assert budget.limit_usd is not None
    assert least <= charged / float(budget.limit_usd) <= most


def test_no_other_budget_is_ever_nearly_used_up(
    planned: list[PlannedTask], settings: Settings
) -> None:
    others = {
        scope: budget
        for scope, budget in settings.budgets.items()
        if scope not in (USED_UP, NEARLY)
    }
    for scope, budget in others.items():
        own = list(of_scope(planned, scope))
        for amount, limit in ((usd, budget.limit_usd), (tokens, budget.limit_tokens)):
            if limit is not None:
                used = most_within(own, WINDOW_SECONDS, amount) / float(limit)
                assert 0.3 < used < MOST_USED, (scope, used)


def test_in_no_ten_minutes_there_comes_more_work_than_there_is_room_for(
    planned: list[PlannedTask], settings: Settings
) -> None:
    ordinary = [one for one in planned if one.at_seconds > 0]
    places = {"": settings.scheduler.max_inflight} | {
        f"project:{name}": project.max_concurrent_agents
        for name, project in settings.projects.items()
    }
    for scope, most in places.items():
        if most is not None:
            work = most_within(of_scope(ordinary, scope), PERIOD_SECONDS, seconds)
            assert work < 0.95 * most * PERIOD_SECONDS, scope


def test_the_beginning_spends_no_more_at_a_time_than_the_rest(
    planned: list[PlannedTask], settings: Settings
) -> None:
    opening = [one for one in planned if one.at_seconds == 0]
    limits = {scope: settings.budgets[scope].limit_usd for scope in (USED_UP, NEARLY)}
    spent = sum(
        min(float(limit or 0), sum(usd(one) for one in of_scope(opening, scope)))
        for scope, limit in limits.items()
    )
    ordinary = [one for one in planned if one.at_seconds > 0]
    assert spent <= most_within(ordinary, STEP_SECONDS, usd)
