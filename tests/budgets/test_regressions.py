"""Budgets that once were kept by each process for itself, and what must hold now that they are not.

Each test is one promise to those who ran many workers on one budget.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from budgets.support import TrackerFactory, usd
from headgate import BudgetExceededError, LocalBudgetTracker, RedisBudgetTracker
from headgate.budgets.sqlite import SqliteBudgetTracker
from headgate.cli.main import run as headgate

WORKFLOW = "workflow:scenario-001"
SESSION = "session:eval-2026-04-12"


async def test_local_budget_tracker_existing_behavior_unchanged() -> None:
    """One process, one counter: spending adds up, and the limit stops the next call."""
    async with LocalBudgetTracker() as tracker:
        assert await tracker.get_budget(WORKFLOW) is None
        await tracker.set_budget(WORKFLOW, 5.00)
        for cost in (1.25, 2.5):
            token = await tracker.reserve(WORKFLOW, cost)
            await tracker.commit(token, actual_usd=cost)
        assert await tracker.get_spent(WORKFLOW) == 3.75
        assert await tracker.get_budget(WORKFLOW) == 5.0
        with pytest.raises(BudgetExceededError, match=r"spent \$3.7500 of \$5.0000 limit"):
            await tracker.reserve(WORKFLOW, 1.26)
        await tracker.reserve(WORKFLOW, 1.25)


async def test_local_budget_reserve_and_commit_track_correctly() -> None:
    async with LocalBudgetTracker() as tracker:
        token = await tracker.reserve(scope=WORKFLOW, amount_usd=0.50)
        assert await usd(tracker, WORKFLOW) == (0, 500_000, 0)
        assert await tracker.get_spent(WORKFLOW) == 0.0
        await tracker.commit(token, actual_usd=0.42)
        assert await usd(tracker, WORKFLOW) == (420_000, 0, 0)
        assert await tracker.get_spent(WORKFLOW) == 0.42


async def test_local_budget_release_decrements_reserved() -> None:
    async with LocalBudgetTracker() as tracker:
        await tracker.set_budget(WORKFLOW, 1)
        token = await tracker.reserve(WORKFLOW, 1)
        with pytest.raises(BudgetExceededError):
            await tracker.reserve(WORKFLOW, 0.01)
        await tracker.release(token)
        assert await usd(tracker, WORKFLOW) == (0, 0, 0)
        await tracker.reserve(WORKFLOW, 1)


async def test_redis_budget_tracker_concurrent_reserves_atomic(valkey_url: str) -> None:
    """Two hundred callers over four connections, room for fifty: fifty get it."""
    async with (
        RedisBudgetTracker(valkey_url) as one,
        RedisBudgetTracker(valkey_url) as two,
        RedisBudgetTracker(valkey_url) as three,
        RedisBudgetTracker(valkey_url) as four,
    ):
        await one.set_budget(SESSION, "10.00")
        pods = (one, two, three, four)
        answers = await asyncio.gather(
            *(pods[n % 4].reserve(f"{SESSION}/{WORKFLOW}", "0.20") for n in range(200)),
            return_exceptions=True,
        )
        refused = [answer for answer in answers if isinstance(answer, BudgetExceededError)]
        assert len(answers) - len(refused) == 50
        assert await usd(two, SESSION) == (0, 10_000_000, 0)


POD = """
import asyncio, sys
from headgate import BudgetExceededError, connect_budget

async def pod(url, scope):
    admitted = 0
    async with connect_budget(url) as tracker:
        for _ in range(100):
            try:
                token = await tracker.reserve(scope, "0.25")
            except BudgetExceededError:
                break
            await tracker.commit(token, "0.25")
            admitted += 1
    print(admitted)

asyncio.run(pod(*sys.argv[1:]))
"""


async def start_pod(url: str, number: int) -> asyncio.subprocess.Process:
    scope = f"{SESSION}/workflow:pod-{number}"
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", POD, url, scope, stdout=asyncio.subprocess.PIPE
    )


async def test_redis_budget_two_pods_share_state(valkey_url: str) -> None:
    """Two processes, each of which alone would spend ten dollars, spend ten together."""
    async with RedisBudgetTracker(valkey_url) as tracker:
        await tracker.set_budget(SESSION, "10.00")
        pods = await asyncio.gather(*(start_pod(valkey_url, number) for number in range(2)))
        admitted = [int((await pod.communicate())[0]) for pod in pods]
        assert [pod.returncode for pod in pods] == [0, 0]
        assert sum(admitted) == 40
        assert await tracker.get_spent(SESSION) == 10.0
        for number in range(2):
            spent = await tracker.get_spent(f"{SESSION}/workflow:pod-{number}")
            assert spent == admitted[number] * 0.25


async def test_pre_flight_reservation_prevents_overshoot(tracker_factory: TrackerFactory) -> None:
    """Parallel steps that would all see the same free money hold it before they start."""
    started: list[int] = []

    async def step(number: int) -> None:
        token = await tracker.reserve(WORKFLOW, "0.40", dispatched=True)
        started.append(number)
        await asyncio.sleep(0)
        await tracker.commit(token, "0.40")

    async with tracker_factory() as tracker:
        await tracker.set_budget(WORKFLOW, "1.00")
        answers = await asyncio.gather(*(step(n) for n in range(10)), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, BudgetExceededError)]
        assert (len(started), len(refused)) == (2, 8)
        assert await tracker.get_spent(WORKFLOW) == 0.8


async def test_session_scope_enforced_in_addition_to_workflow_scope(
    tracker_factory: TrackerFactory,
) -> None:
    first, second = f"{SESSION}/workflow:scenario-001", f"{SESSION}/workflow:scenario-002"
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "8.00")
        await tracker.set_budget(first, "5.00")
        await tracker.set_budget(second, "5.00")
        with pytest.raises(BudgetExceededError) as by_workflow:
            await tracker.reserve(first, "5.01")
        await tracker.reserve(first, "5.00")
        with pytest.raises(BudgetExceededError) as by_session:
            await tracker.reserve(second, "3.01")
        await tracker.reserve(second, "3.00")
        assert (by_workflow.value.scope, by_session.value.scope) == (first, SESSION)


def test_budget_status_cli_shows_breakdown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "budget.db"
    asyncio.run(spend_as_shown(path))
    arguments = ["budget", "status", "--ledger", str(path), "--session", "eval-2026-04-12"]
    assert headgate(arguments) == 0
    shown = capsys.readouterr().out
    for line in (
        "Spent: $32.40 / $50.00 (64.8%)",
        "Reserved: $1.20",
        "Per-workflow breakdown:",
        "  scenario-001: $4.50",
        "  scenario-002: $27.90",
    ):
        assert line in shown


async def spend_as_shown(path: Path) -> None:
    async with SqliteBudgetTracker(path) as tracker:
        await tracker.set_budget(SESSION, "50.00")
        for name, cost in (("scenario-001", "4.50"), ("scenario-002", "27.90")):
            token = await tracker.reserve(f"{SESSION}/workflow:{name}", cost)
            await tracker.commit(token, cost)
        await tracker.reserve(f"{SESSION}/workflow:scenario-001", "1.20")
