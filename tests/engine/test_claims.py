"""What a submitter merely claims: it spends no more, and takes no more, than one that says nothing.

The hostile side is whatever a request body may say, read by the parser of the service as it reads
one of a token without `admin`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from engine.one_service import Service, play
from engine.simulated_work import always
from engine.test_budgets_without_estimates import LEDGERS, balance, ended_all, most_at_once
from headgate.api.submission import SubmissionParser
from headgate.core.budgets.ledger import Limit
from headgate.core.budgets.scopes import Scope
from headgate.core.dispatch_state import TargetEstimate
from headgate.core.lifecycle import NOTHING_USED, Failed, Outcome, Succeeded, Usage
from headgate.core.money import MicroUsd, Tokens
from headgate.core.task import TaskRecord, TaskStatus
from headgate.executors.executor import WorkOrder
from headgate.storage.store import Queued

X, Y = Scope("project:x"), Scope("project:y")
COST = 1_250_000
FIVE_DOLLARS = {X: Limit(limit_micro_usd=MicroUsd(5_000_000))}
CALLS = 40


def parser(**fields: Any) -> SubmissionParser:
    return SubmissionParser(projects=("x", "y"), targets={"t": None}, default_target="t", **fields)


async def submit(
    service: Service, *, is_trusted: bool = False, cost_targets: tuple[str, ...] = (), **said: Any
) -> str:
    body = {"projectId": "x", "action": "call"} | said
    draft = parser(cost_targets=cost_targets).read_task(
        msgspec.json.encode(body), now=service.now(), is_trusted=is_trusted
    )
    answer = await service.engine.submit(*draft)
    assert isinstance(answer, Queued)
    return answer.record.task.id


CHEAP: list[dict[str, Any]] = [
    {"costUsd": "0"},
    {"costUsd": "0.000001"},
    {"estimate": {"usd": 0}},
    {"estimate": {"usd": "0.01", "tokens": 0}},
    {"estimate": {"usd": 1.26}},
    {"costUsd": 0, "weight": 0, "estimate": {"tokens": 0}},
]


@pytest.mark.parametrize("new_ledger", LEDGERS, ids=["own", "outside"])
@pytest.mark.parametrize("has_own_actions", [False, True], ids=["one action", "an action each"])
@pytest.mark.parametrize("said", CHEAP, ids=str)
def test_no_claim_passes_a_dollar_budget(
    said: dict[str, Any], has_own_actions: bool, new_ledger: Any
) -> None:
    async def scenario(service: Service) -> Any:
        action = "call{}" if has_own_actions else "call"
        tasks = [
            await submit(service, action=action.format(number), **said) for number in range(CALLS)
        ]
        records = await ended_all(service, tasks)
        await asyncio.sleep(1.0)
        return records, await balance(service, X), most_at_once(service)

    work = always(1.0, Succeeded(usage=Usage(micro_usd=COST)))
    records, booked, at_once = play(scenario, work, budgets=FIVE_DOLLARS, new_ledger=new_ledger)
    done = [one for one in records if one.task.status is TaskStatus.DONE]
    assert booked.used_micro_usd == len(done) * COST
    assert booked.used_micro_usd <= 5_000_000 + COST
    assert at_once <= 4
    assert [one.micro_usd for one in done] == [COST] * len(done)


def test_a_stated_cost_is_booked_where_its_word_is_taken() -> None:
    async def scenario(service: Service) -> list[int | None]:
        ways: list[dict[str, Any]] = [
            {},
            {"is_trusted": True},
            {"cost_targets": ("t",)},
        ]
        tasks = [await submit(service, costUsd="0.07", **way) for way in ways]
        return [one.micro_usd for one in await ended_all(service, tasks)]

    work = always(1.0, Succeeded(usage=Usage(micro_usd=COST)))
    assert play(scenario, work) == [COST, 70_000, 70_000]


def test_a_claim_is_booked_where_the_work_says_nothing() -> None:
    async def scenario(service: Service) -> list[TaskRecord]:
        tasks = [await submit(service, estimate={"usd": "0.3"}) for _ in range(6)]
        return await ended_all(service, tasks)

    records = play(scenario, always(1.0, Succeeded()), budgets=FIVE_DOLLARS)
    assert [(one.micro_usd, one.progress.assumed_micro_usd) for one in records] == [
        (300_000, 300_000)
    ] * 6


def test_a_claim_below_the_default_of_its_target_holds_the_default() -> None:
    async def scenario(service: Service) -> list[int]:
        tasks = [await submit(service, estimate={"usd": usd}) for usd in (0, "0.02", "0.7")]
        return [one.progress.reserved_micro_usd for one in await ended_all(service, tasks)]

    default = {"t": TargetEstimate(micro_usd=50_000)}
    held = play(scenario, always(1.0), budgets=FIVE_DOLLARS, target_estimates=default)
    assert held == [50_000, 50_000, 700_000]


@pytest.mark.parametrize("said", [{"estimate": {"tokens": 0}}, {"weight": 0}], ids=str)
def test_no_claim_passes_a_token_budget(said: dict[str, Any]) -> None:
    async def scenario(service: Service) -> Any:
        tasks = [await submit(service, **said) for _ in range(CALLS)]
        await ended_all(service, tasks)
        return await balance(service, X), most_at_once(service)

    budgets = {X: Limit(limit_tokens=Tokens(10_000))}
    work = always(1.0, Succeeded(usage=Usage(tokens=2_500)))
    booked, at_once = play(scenario, work, budgets=budgets)
    assert booked.used_tokens <= 12_500
    assert at_once <= 4


# Two projects of equal weight on ten permits. The honest one says nothing; the other has as much to
# do, and says whatever it likes. A task takes a second of virtual time.

PERMITS = 10
EACH = 60
OUTCOMES: list[Outcome] = [
    Succeeded(),
    Succeeded(usage=NOTHING_USED),
    Succeeded(usage=Usage(tokens=500)),
    Failed(error="bad request", usage=NOTHING_USED),
]


@pytest.mark.parametrize("outcome", OUTCOMES, ids=["silent", "nothing", "measured", "refused"])
@pytest.mark.parametrize("said", [{"weight": 0}, {"estimate": {"tokens": 0}}], ids=str)
def test_a_weight_of_nothing_takes_no_share(said: dict[str, Any], outcome: Outcome) -> None:
    grants: list[str] = []

    def work(order: WorkOrder) -> tuple[float, Outcome]:
        grants.append(order.project_id)
        is_measured = isinstance(outcome, Succeeded) and bool(outcome.usage.tokens)
        is_alike = order.project_id == "y" or is_measured
        return 1.0, outcome if is_alike else Succeeded()

    async def scenario(service: Service) -> None:
        for _ in range(EACH):
            await submit(service, projectId="x")
            await submit(service, projectId="y", **said)
        await asyncio.sleep(2 * EACH / PERMITS + 5.0)

    play(scenario, work, max_inflight=PERMITS, default_tokens=1_000)
    assert len(grants) == 2 * EACH
    assert grants[:EACH].count("x") >= 0.475 * EACH
