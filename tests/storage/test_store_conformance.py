"""What every task store does with a task that waits, runs and ends."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec
import pytest

from headgate.core.admission import QueueLimits
from headgate.core.lifecycle import (
    MOST_UNPRICED_MICRO_USD,
    NOTHING_USED,
    UNKNOWN_USAGE,
    Finish,
    TryAgain,
    Usage,
)
from headgate.core.task import NO_JSON, Submission, TaskStatus
from headgate.errors import IllegalTransitionError, UnfitValueError
from headgate.storage.schema import COUNT_PROJECTS
from headgate.storage.store import (
    MAX_PAGE_BYTES,
    CancelAnswer,
    NotAssigned,
    Queued,
    TaskQuery,
    TurnedAway,
)
from headgate.storage.transaction import Transaction
from storage.scene import AGAIN, AWAY, COST, DONE, FAILED, HERE, Place, Scene, ids

WORK = Submission(
    action="click",
    tab_id="t1",
    params=msgspec.Raw(b'{"x": [1, 2]}'),
    input=msgspec.Raw(b"null"),
    labels={"team": "a"},
)


async def test_a_submitted_task_can_be_read_with_all_that_it_was_given(place: Place) -> None:
    async with place.scene() as scene:
        new = scene.new("t1", submission=WORK)
        answer = await scene.ask(new)
        assert isinstance(answer, Queued)
        assert answer.position == 1
        assert answer.record == await scene.get("t1")
        assert answer.record.submission == WORK
        assert answer.record.task == new.task
        assert answer.record.terms == new.terms


async def test_the_same_id_gets_the_same_answer(place: Place) -> None:
    async with place.scene() as scene:
        first = await scene.ask(scene.new("t1"))
        await scene.submit("t2")
        assert await scene.ask(scene.new("t1")) == first
        assert (await scene.store.totals()).submitted == 2


async def test_the_same_id_twice_at_once_is_one_task(place: Place) -> None:
    async with place.scene() as scene:
        new = scene.new("t1")
        first, second = await asyncio.gather(scene.ask(new), scene.ask(new))
        assert first == second
        assert await scene.lane() == (1, 0)


async def test_a_repeat_shows_what_has_become_of_the_task(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        await scene.settle("t1")
        again = await scene.ask(scene.new("t1"))
        assert isinstance(again, Queued)
        assert again.record.task.status is TaskStatus.DONE


async def test_a_full_queue_turns_tasks_away_in_their_order(place: Place) -> None:
    limits = QueueLimits(max_queue=2, max_per_agent=None)
    async with place.scene() as scene:
        news = [scene.new(f"t{number}", limits=limits) for number in range(4)]
        answers = await asyncio.gather(*[scene.ask(new) for new in news])
        kinds = [type(answer).__name__ for answer in answers]
        assert kinds == ["Queued", "Queued", "TurnedAway", "TurnedAway"]
        assert await scene.states("t0", "t3") == ["queued", "rejected"]
        turned_away = answers[3]
        assert isinstance(turned_away, TurnedAway)
        assert turned_away.rejected.message == "rejected: global queue full (2/2)"
        assert turned_away.record.error == turned_away.rejected.message
        assert turned_away.record.progress.completed_at == scene.clock()


async def test_a_task_that_was_turned_away_is_turned_away_again(place: Place) -> None:
    limits = QueueLimits(max_queue=0)
    async with place.scene() as scene:
        first = await scene.ask(scene.new("t1", limits=limits))
        assert await scene.ask(scene.new("t1")) == first
        assert (await scene.store.totals()).rejected == 1


async def test_an_agent_has_a_limit_in_each_project(place: Place) -> None:
    """Whoever names the agent of another project fills only its own lane of it."""
    limits = QueueLimits(max_queue=None, max_per_agent=2)
    async with place.scene() as scene:
        for number in range(2):
            await scene.submit(f"t{number}", project_id="a", limits=limits)
        refused = await scene.ask(scene.new("t2", project_id="a", limits=limits))
        assert isinstance(refused, TurnedAway)
        assert refused.rejected.message == 'rejected: agent queue full for "coder" (2/2)'
        await scene.submit("t3", project_id="b", limits=limits)
        await scene.submit("t4", project_id="a", agent_id="other", limits=limits)
        await scene.submit("t5", project_id="a", agent_id=None, limits=limits)


async def test_a_project_queues_up_to_its_share_of_what_is_free(place: Place) -> None:
    limits = QueueLimits(max_queue=10, max_per_agent=None, queue_share=1)
    async with place.scene() as scene:
        news = [
            scene.new(f"t{number}", project_id="many", agent_id=f"a{number}", limits=limits)
            for number in range(7)
        ]
        answers = await asyncio.gather(*[scene.ask(new) for new in news])
        kinds = [type(answer).__name__ for answer in answers]
        assert kinds == [*["Queued"] * 5, "TurnedAway", "TurnedAway"]
        assert isinstance(answers[5], TurnedAway)
        refused = answers[5].rejected
        assert refused.message == 'rejected: project queue full for "many" (5/5)'
        assert (refused.project_id, refused.max_per_project) == ("many", 5)
        # Another project has room, and leaves less of it for the first.
        for number in range(2):
            await scene.submit(f"u{number}", project_id="few", limits=limits)
        await scene.assign("t0")
        await scene.cancel("t1")
        assert isinstance(
            await scene.ask(scene.new("t7", project_id="many", limits=limits)), Queued
        )
        again = await scene.ask(scene.new("t8", project_id="many", limits=limits))
        assert isinstance(again, TurnedAway)
        totals = await scene.store.totals()
        assert (totals.rejected, totals.rejected_by_project, totals.rejected_by_global) == (3, 3, 0)


async def test_what_was_admitted_is_not_judged_again(place: Place) -> None:
    limits = QueueLimits(max_queue=3, max_per_agent=None, queue_share=1)
    async with place.scene() as scene:
        await scene.run("t1", limits=limits)
        await scene.submit("child", depends_on=("t1",), limits=limits)
        await scene.submit("other", project_id="evals", limits=limits)
        # The queue is beyond the share of this project now, and takes back what it has admitted.
        assert isinstance(await scene.ask(scene.new("t2", limits=limits)), TurnedAway)
        await scene.settle("t1", AGAIN)
        assert await scene.states("t1", "child", "other") == ["queued"] * 3
        await scene.assign("t1", attempt=2)
        await scene.settle("t1", DONE, attempt=2)
        await scene.assign("child")
        assert await scene.states("t1", "child") == ["done", "running"]


async def test_a_store_from_before_projects_were_counted_has_them_counted(place: Place) -> None:
    def count_again(transaction: Transaction, _: float) -> None:
        transaction.run("DELETE FROM project_counts")
        transaction.run("DELETE FROM counters WHERE name IN ('live_bytes', 'ended_bytes')")
        for statement in COUNT_PROJECTS.split(";"):
            transaction.run(statement)

    async with place.scene() as scene:
        for number in range(5):
            await scene.submit(f"t{number}", project_id=f"p{number % 2}", agent_id=f"a{number}")
        await scene.cancel("t3")
        await scene.store.run(count_again)


async def test_what_runs_or_ended_takes_no_room_in_the_queue(place: Place) -> None:
    limits = QueueLimits(max_queue=1, max_per_agent=1)
    async with place.scene() as scene:
        await scene.run("t1", limits=limits)
        await scene.submit("t2", limits=limits)
        await scene.cancel("t2")
        await scene.submit("t3", limits=limits)


async def test_a_full_life(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("t1", submission=WORK)
        scene.clock.advance(2.5)
        running = await scene.assign("t1", tick=4)
        assert running.task.status is TaskStatus.RUNNING
        assert running.submission == WORK
        assert running.lease is not None
        assert (running.lease.node_id, running.lease.attempt) == (HERE, 1)
        assert running.progress.started_at == scene.clock()
        assert await scene.lane() == (0, 1)
        scene.clock.advance(1)
        (settled,) = await scene.settle("t1", result=msgspec.Raw(b'{"ok": true}'))
        assert settled.task.status is TaskStatus.DONE
        assert settled.progress.completed_at == scene.clock()
        assert (settled.tokens, settled.micro_usd) == (70, 7)
        assert settled.lease is None
        record = await scene.get("t1")
        assert record.result == '{"ok": true}'
        totals = await scene.store.totals()
        assert (totals.submitted, totals.completed, totals.started) == (1, 1, 1)
        assert totals.wait_ms == 2_500
        assert [lane.served_tick for lane in totals.lanes] == [4]


async def test_a_failure_is_written_with_its_error(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        (settled,) = await scene.settle("t1", FAILED)
        assert (settled.task.status, settled.error) == (TaskStatus.FAILED, "it broke")


async def test_whatever_an_executor_printed_can_be_stored(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        odd = Finish(status=TaskStatus.FAILED, error="a\0b\n\ud800\u2603")
        await scene.settle("t1", odd, result=msgspec.Raw(b'"\\u0000\\ud800"'))
        record = await scene.get("t1")
        assert record.error == "ab\n?\u2603"
        assert record.result == '"\\u0000\\ud800"'


async def test_an_open_task_is_in_the_lane_of_whoever_took_it(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("t1", agent_id=None)
        assert await scene.lane("") == (1, 0)
        record = await scene.assign("t1", agent_id="finder", tick=3)
        assert record.agent_id == "finder"
        assert record.task.agent_id is None
        assert (await scene.lane(""), await scene.lane("finder")) == ((0, 0), (0, 1))
        await scene.settle("t1", AGAIN)
        assert (await scene.lane(""), await scene.lane("finder")) == ((1, 0), (0, 0))
        assert (await scene.get("t1")).agent_id is None
        served = {lane.agent_id: lane.served_tick for lane in (await scene.store.totals()).lanes}
        assert served[""] == 3


async def test_another_try_waits_with_its_counts_and_its_time(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        at = scene.clock() + 30
        step = TryAgain(not_before=at, failures=1, losses=2, rate_limit_hits=3, error="busy")
        (record,) = await scene.settle("t1", step)
        assert record.task.status is TaskStatus.QUEUED
        assert record.task.not_before == at
        progress = record.progress
        assert (progress.failures, progress.losses, progress.rate_limit_hits) == (1, 2, 3)
        assert (record.error, progress.attempt, progress.node_id) == ("busy", 1, None)
        again = await scene.assign("t1", attempt=2)
        assert again.progress.attempt == 2
        assert again.progress.failures == 1
        await scene.settle("t1", attempt=2)
        assert (await scene.get("t1")).error is None


async def test_the_tick_counts_attempts_that_ended(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        await scene.settle("t1", AGAIN)
        await scene.assign("t1", attempt=2)
        await scene.settle("t1", attempt=2)
        assert (await scene.store.backlog(scene.epoch)).tick == 2
        assert (await scene.submit("t2")).task.enqueued_tick == 2


async def test_unknown_costs_are_what_was_reserved(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        (record,) = await scene.settle("t1", cost=UNKNOWN_USAGE)
        assert (record.tokens, record.micro_usd) == (100, 10)


async def test_a_cost_of_nothing_gives_the_money_back(place: Place) -> None:
    async with place.scene() as scene:
        await scene.set_limit("", 100)
        await scene.run("t1")
        await scene.submit("t2")
        refused = (await scene.plan(scene.line("t2")))[0]
        assert isinstance(refused, NotAssigned)
        await scene.settle("t1", cost=NOTHING_USED)
        await scene.assign("t2")


async def test_a_settlement_repeats_its_answer(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        first = await scene.settle("t1")
        assert await scene.settle("t1") == first
        assert (await scene.store.totals()).completed == 1


async def test_a_settlement_for_another_try_repeats_its_answer(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        first = await scene.settle("t1", AGAIN)
        assert await scene.settle("t1", AGAIN) == first
        await scene.assign("t1", attempt=2)
        assert await scene.is_stale(scene.settlement("t1", AGAIN))


async def test_only_the_holder_of_the_lease_settles(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        assert await scene.is_stale(scene.settlement("t1", node_id=AWAY))
        assert await scene.is_stale(scene.settlement("t1", attempt=2))
        assert await scene.is_stale(scene.settlement("t1", attempt=0))
        assert await scene.is_stale(scene.settlement("nothing"))
        assert await scene.state("t1") == "running"


async def test_whoever_did_not_settle_gets_no_answer_of_another(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        await scene.settle("t1")
        assert await scene.is_stale(scene.settlement("t1", node_id=AWAY))


async def test_what_was_never_started_cannot_be_done(place: Place) -> None:
    async with place.scene() as scene:
        await scene.join_away()
        await scene.submit("t1")
        await scene.submit("t2")
        await scene.assign("t1", node_id=AWAY)
        await scene.assign("t2")
        illegal = scene.store.settle(scene.settlement("t1", DONE, node_id=AWAY))
        legal = scene.store.settle(scene.settlement("t2", DONE))
        refused, *_ = await asyncio.gather(illegal, legal, return_exceptions=True)
        assert isinstance(refused, IllegalTransitionError)
        assert await scene.states("t1", "t2") == ["assigned", "done"]


async def test_cancel_ends_what_waits(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("t1")
        (record,) = await scene.cancel("t1")
        assert (record.task.status, record.error) == (TaskStatus.CANCELLED, "cancelled")
        assert await scene.lane() == (0, 0)
        assert await scene.cancel("t1") == (record,)
        assert (await scene.store.totals()).cancelled == 1


async def test_cancel_of_what_is_not_there_is_none(place: Place) -> None:
    async with place.scene() as scene:
        assert await scene.store.cancel("nothing", node_id=HERE) is None


async def test_cancel_leaves_what_has_ended_as_it_is(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        settled = await scene.settle("t1")
        answer = await scene.store.cancel("t1", node_id=HERE)
        assert answer == CancelAnswer(records=settled, had_ended=True)


async def test_cancel_asks_what_runs_and_frees_nothing_yet(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        (record,) = await scene.cancel("t1")
        assert record.task.status is TaskStatus.RUNNING
        assert record.progress.cancel_requested
        assert await scene.lane() == (0, 1)
        (settled,) = await scene.settle("t1", AGAIN)
        assert (settled.task.status, settled.error) == (TaskStatus.CANCELLED, "cancelled")
        assert await scene.lane() == (0, 0)


async def test_work_that_was_done_before_the_cancel_arrived_is_done(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        await scene.cancel("t1")
        (settled,) = await scene.settle("t1", DONE)
        assert settled.task.status is TaskStatus.DONE


async def test_cancel_of_an_assigned_task_gives_back_place_and_money(place: Place) -> None:
    async with place.scene() as scene:
        await scene.join_away()
        await scene.set_limit("", 100)
        await scene.submit("t1")
        await scene.submit("t2")
        await scene.assign("t1", node_id=AWAY)
        (record,) = await scene.cancel("t1")
        assert record.task.status is TaskStatus.CANCELLED
        assert (await scene.store.collect(AWAY)).started == ()
        await scene.assign("t2")


async def test_lists_are_newest_first_in_pages(place: Place) -> None:
    async with place.scene() as scene:
        for number in range(5):
            await scene.submit(f"t{number}")
        first = await scene.store.find(TaskQuery(limit=2))
        assert (ids(first.records), first.next_before) == (["t4", "t3"], "t3")
        rest = await scene.store.find(TaskQuery(before="t3", limit=3))
        assert (ids(rest.records), rest.next_before) == (["t2", "t1", "t0"], None)


async def test_a_page_ends_where_its_tasks_become_too_large(place: Place) -> None:
    large = msgspec.Raw(msgspec.json.encode("x" * (MAX_PAGE_BYTES // 2 - 10_000)))
    async with place.scene() as scene:
        for number in range(5):
            work = Submission(action="work", input=large if number % 2 else NO_JSON)
            await scene.submit(f"t{number}", submission=work)
            await scene.assign(f"t{number}")
            await scene.settle(f"t{number}", result=None if number % 2 else large)
        assert await pages(scene, limit=9) == [["t4", "t3"], ["t2", "t1"], ["t0"]]


async def test_a_task_that_is_too_large_for_any_page_has_one_of_its_own(place: Place) -> None:
    async with place.scene() as scene:
        for number, size in enumerate((10, MAX_PAGE_BYTES + 1, 10)):
            result = msgspec.Raw(msgspec.json.encode("x" * size))
            await scene.run(f"t{number}")
            await scene.settle(f"t{number}", result=result)
        assert await pages(scene, limit=9) == [["t2"], ["t1"], ["t0"]]


async def pages(scene: Scene, *, limit: int) -> list[list[str]]:
    """Read page by page to the last one."""
    found, before, has_more = [], None, True
    while has_more:
        page = await scene.store.find(TaskQuery(before=before, limit=limit))
        found.append(ids(page.records))
        before, has_more = page.next_before, page.next_before is not None
    return found


async def test_lists_are_by_agent_project_and_state(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("t0", agent_id="a", project_id="p", submission=WORK)
        await scene.submit("t1", agent_id="b", project_id="p")
        await scene.submit("t2", agent_id="a", project_id="q")
        await scene.cancel("t2")
        find = scene.found
        assert ids(await find(TaskQuery(agent_id="a"))) == ["t2", "t0"]
        assert ids(await find(TaskQuery(project_id="p"))) == ["t1", "t0"]
        states = (TaskStatus.CANCELLED, TaskStatus.DONE)
        assert ids(await find(TaskQuery(states=states))) == ["t2"]
        (record,) = await find(TaskQuery(agent_id="a", project_id="p"))
        assert record.submission == WORK


async def test_a_name_that_a_database_cannot_take_is_no_outage(place: Place) -> None:
    async with place.scene() as scene:
        with suppress(UnfitValueError):
            assert await scene.store.get("\0") is None
        await scene.submit("t0")
        assert await scene.state("t0") == "queued"


async def test_of_many_tasks_those_of_an_owner_are_told_in_one_question(place: Place) -> None:
    async with place.scene() as scene:
        for task_id, agent_id in (("t0", "a"), ("t1", "b"), ("t2", "a")):
            await scene.submit(task_id, agent_id=agent_id)
        asked = ("t0", "t1", "t2", "none")
        assert await scene.store.among(asked, TaskQuery(agent_id="a")) == {"t0", "t2"}
        assert await scene.store.among(asked, TaskQuery()) == {"t0", "t1", "t2"}
        assert await scene.store.among(asked, TaskQuery(project_id="nowhere")) == frozenset()


async def test_an_unknown_task_is_none(place: Place) -> None:
    async with place.scene() as scene:
        assert await scene.store.get("nothing") is None


async def test_a_store_that_was_closed_has_everything_when_it_opens(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        before = await scene.get("t1")
        await scene.store.close()
        await scene.store.open()
        assert await scene.get("t1") == before


@pytest.mark.parametrize(
    ("cost", "tokens", "micro_usd"),
    # A success that used no tokens has had a permit all the same: it counts what it was charged.
    # So does one that cost no dollars, where these are counted.
    [
        (COST, COST.tokens, COST.micro_usd),
        (NOTHING_USED, 100, 100),
        (Usage(tokens=500, micro_usd=0), 500, 500),
        (Usage(tokens=5_000, micro_usd=0), 5_000, MOST_UNPRICED_MICRO_USD),
    ],
)
async def test_usage_is_booked_by_project_and_hour(
    place: Place, cost: Usage, tokens: int, micro_usd: int
) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        await scene.settle("t1", cost=cost)
        (row,) = (await scene.store.backlog(scene.epoch)).usage
        assert (row.project_id, row.hour % 3_600) == ("search", 0)
        assert (row.tokens, row.micro_usd) == (tokens, micro_usd)
        assert (row.started, row.completed) == (1, 1)
