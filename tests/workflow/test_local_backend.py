"""Runs on an engine in this process: kept, resumed, interrupted, and held by their budgets."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest

from budgets.servers import running_valkey
from executors.endpoint import free_port
from headgate.budgets.connect import connect_budget
from headgate.core import dispatch_state
from headgate.core.estimates import Basis
from headgate.core.task import TaskRecord
from headgate.errors import (
    BudgetMismatchError,
    InvalidSettingError,
    LedgerUnavailableError,
    StoreError,
)
from headgate.providers.prices import Price
from headgate.storage.sqlite import SqliteTaskStore
from headgate.storage.store import TaskQuery
from headgate.workflow import local_backend as local_engine
from headgate.workflow.backend import Backend, StepOrder, TaskState
from headgate.workflow.costs import ESTIMATES_FILE, earlier_kinds
from headgate.workflow.placeholders import parsed_text
from headgate.workflow.run_folder import STORE
from headgate.workflow.run_record import new_run_id
from headgate.workflow.workflow import BudgetScope
from service.support import environment, family
from workflow.local_process import COST_MICRO_USD, STEPS
from workflow.local_stage import RUN_ID, WAITED_SECONDS, Stage, order, shell, step

CHEAP = step(shell("true"), cost_micro_usd=COST_MICRO_USD)
SESSION = BudgetScope(name="session", key=parsed_text("s"), micro_usd=1_000_000)
LONG_SECONDS = 60.0
PROGRAM = Path(__file__).with_name("local_process.py")


async def test_every_task_of_a_run_is_known_after_it_was_closed(tmp_path: Path) -> None:
    stage = Stage(tmp_path, CHEAP)
    orders = [order(CHEAP, 3), order(CHEAP, 1_000_000), order(CHEAP, 3, generation=2)]
    await stage.carried_out(*orders)
    async with stage.opened() as (backend, ear):
        known = [task async for task in backend.known()]
    assert {(one.task_id, one.number, one.generation, one.state) for one in known} == {
        (f"{RUN_ID}-0000003", 3, 0, TaskState.DONE),
        (f"{RUN_ID}-0000003-2", 3, 2, TaskState.DONE),
        (f"{RUN_ID}-1000000", 1_000_000, 0, TaskState.DONE),
    }
    assert ear.told == []


async def test_a_step_that_is_submitted_again_runs_once_and_is_told_once(tmp_path: Path) -> None:
    one = step(shell("echo x >> seen"))
    stage = Stage(tmp_path, one)
    await stage.carried_out(order(one))
    async with stage.opened() as (backend, ear):
        await backend.submit([order(one)])
        await backend.submit([order(one, 1)])
        await ear.wait(2)
    assert (tmp_path / "seen").read_text() == "x\n" * 2
    assert sorted(end.number for end in ear.ends()) == [0, 1]


async def test_each_change_is_told_once_and_in_order(tmp_path: Path) -> None:
    one = step(shell("test -e seen || { touch seen; exit 1; }"), retries=1)
    async with Stage(tmp_path, one).opened() as (backend, ear):
        await backend.submit([order(one)])
        await ear.wait()
    assert [(task.state.value, task.attempt) for task in ear.told] == [
        ("queued", 0), ("running", 1), ("queued", 1), ("running", 2), ("done", 2),
    ]  # fmt: skip


async def test_results_come_in_the_order_of_the_question(tmp_path: Path) -> None:
    steps = [step(shell(f"echo {n}"), f"s{n}") for n in range(3)]
    async with Stage(tmp_path, *steps).opened() as (backend, ear):
        await backend.submit([order(one, n) for n, one in enumerate(steps)])
        ends = sorted(await ear.wait(3), key=lambda end: -end.number)
        results = await backend.results(ends)
    assert [result["json"] for result in results] == [2, 1, 0]


async def test_what_waits_goes_on_with_the_next_process(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    steps = [step(shell(f"echo > {fifo}; sleep 60"), "long"), step(shell("true"), "next")]
    stage = Stage(tmp_path, *steps, concurrency=1)
    async with stage.opened() as (backend, ear):
        await backend.submit([order(one, n) for n, one in enumerate(steps)])
        await asyncio.to_thread(fifo.read_text)
        running = await ear.wait_for(TaskState.RUNNING)
        waiting = [task for task in ear.told if task.number == 1][-1]
        assert "1 of 1" in await backend.why(waiting)
        await backend.cancel([running, waiting])
        ends = await ear.wait(2)
        await backend.cancel(ends)
        await backend.submit([order(one, n, generation=1) for n, one in enumerate(steps)])
        await asyncio.to_thread(fifo.read_text)
    assert {end.state for end in ends} == {TaskState.CANCELLED}
    steps[0] = step(shell("true"), "long")
    async with stage.opened() as (backend, ear):
        known = {task.task_id: task async for task in backend.known()}
        await backend.cancel([known[f"{RUN_ID}-0000000-1"]])
        ends = await ear.wait(2)
    assert {(end.number, end.generation) for end in ends} == {(0, 1), (1, 1)}


async def test_an_attempt_that_was_stopped_by_the_end_of_its_process_is_assumed(
    tmp_path: Path,
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = f"test -e again && exit 0; touch again; echo > {fifo}; sleep 60"
    one = step(shell(script), cost_micro_usd=COST_MICRO_USD)
    stage = Stage(tmp_path, one)
    async with stage.opened() as (backend, _):
        await backend.submit([order(one)])
        await asyncio.to_thread(fifo.read_text)
    async with stage.opened() as (backend, ear):
        (end,) = await ear.wait()
        (money,) = await backend.money()
    assert (end.state, end.attempt) == (TaskState.DONE, 2)
    assert (end.micro_usd, end.assumed_micro_usd) == (2 * COST_MICRO_USD, COST_MICRO_USD)
    assert money.spent_micro_usd == 2 * COST_MICRO_USD


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_what_ends_while_a_run_is_being_closed_is_told(
    tmp_path: Path, *, is_cancelled: bool
) -> None:
    begun, go_on = tmp_path / "begun", tmp_path / "go-on"
    os.mkfifo(begun)
    os.mkfifo(go_on)
    one = step(shell(f"echo > {begun}; cat {go_on}"))
    stage = Stage(tmp_path, one)
    async with stage.opened() as (backend, ear):
        await backend.submit([order(one)])
        await asyncio.to_thread(begun.read_text)
        running = await ear.wait_for(TaskState.RUNNING)
        closing = asyncio.create_task(backend.close(drain_seconds=WAITED_SECONDS))
        await asyncio.sleep(0)
        if is_cancelled:
            await backend.cancel([running])
        else:
            await asyncio.to_thread(go_on.write_text, "now")
        (end,) = await ear.wait()
        await closing
    assert end.state is (TaskState.CANCELLED if is_cancelled else TaskState.DONE)


async def becomes_stuck(backend: Backend) -> None:
    """Wait: a step that ends makes the engine ask the budgets once more."""
    async with asyncio.timeout(WAITED_SECONDS):
        while not await backend.is_stuck():  # noqa: ASYNC110
            await asyncio.sleep(0)


def program(folder: Path, given: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(folder), given],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


async def test_an_attempt_whose_process_was_killed_is_assumed_and_runs_again(
    tmp_path: Path,
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = f"test -e again && exit 0; touch again; echo > {fifo}; sleep 60"
    process = program(tmp_path, script)
    try:
        await asyncio.wait_for(asyncio.to_thread(fifo.read_text), 20.0)
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)
    one = step(shell(script), cost_micro_usd=COST_MICRO_USD)
    async with Stage(tmp_path, one).opened() as (backend, ear):
        (end,) = await ear.wait()
        known = [task async for task in backend.known()]
        (money,) = await backend.money()
    assert known == [end]
    assert (end.state, end.attempt) == (TaskState.DONE, 2)
    assert (end.micro_usd, end.assumed_micro_usd) == (2 * COST_MICRO_USD, COST_MICRO_USD)
    assert (money.spent_micro_usd, money.reserved_micro_usd) == (2 * COST_MICRO_USD, 0)


async def test_a_run_is_driven_by_one_process_at_a_time(tmp_path: Path) -> None:
    async with Stage(tmp_path, CHEAP).opened():
        with pytest.raises(StoreError, match="under way"):
            async with Stage(tmp_path, CHEAP).opened():
                pass


async def test_what_no_budget_holds_is_rejected_and_what_is_cheaper_runs(tmp_path: Path) -> None:
    free = step(shell("true"), "free")
    stage = Stage(tmp_path, CHEAP, free, micro_usd=150_000)
    ends = await stage.carried_out(*(order(CHEAP, n) for n in range(4)), order(free, 4))
    assert sorted(end.state.value for end in ends) == ["done"] * 3 + ["rejected"] * 2
    assert ends[4].state is TaskState.DONE
    rejected = [end for end in ends if end.state is TaskState.REJECTED]
    assert all((end.error or "").startswith("Budget exceeded: spent $") for end in rejected)
    assert {(end.attempt, end.micro_usd) for end in rejected} == {(0, 0)}


async def test_a_resume_may_raise_the_limit_of_its_workflow(tmp_path: Path) -> None:
    stage = Stage(tmp_path, CHEAP, micro_usd=100_000)
    first = await stage.carried_out(order(CHEAP, 0), order(CHEAP, 1))
    assert sorted(end.state.value for end in first) == ["done", "rejected"]
    stage.options = msgspec.structs.replace(stage.options, micro_usd=150_000)
    (end,) = await stage.carried_out(order(CHEAP, 1, generation=1))
    assert end.state is TaskState.DONE
    assert stage.run.record.scopes[-1].micro_usd == 150_000
    assert stage.run.record.micro_usd == 150_000


async def test_scopes_around_a_workflow_are_shared_in_the_ledger_of_the_data_directory(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path, CHEAP, scopes=(SESSION,), micro_usd=500_000)
    async with stage.opened() as (backend, ear):
        await backend.submit([order(CHEAP)])
        await ear.wait()
        money = await backend.money()
    assert [(one.scope, one.limit_micro_usd) for one in money] == [
        ("session:s", 1_000_000),
        ("session:s/workflow:flow", 500_000),
    ]
    ledger = f"sqlite:///{tmp_path}/data/budget.db"
    assert (stage.run.record.tracker, stage.run.record.ledger) == ("sqlite", ledger)
    async with connect_budget(ledger) as tracker:
        status = await tracker.status("session:s")
    assert status.spent_micro_usd + status.reserved_micro_usd == COST_MICRO_USD


async def test_a_shared_ledger_that_is_used_up_refuses_as_soon_as_it_has_booked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch_state, "ASK_AGAIN_SECONDS", LONG_SECONDS)
    small = msgspec.structs.replace(SESSION, micro_usd=2 * COST_MICRO_USD)
    stage = Stage(tmp_path, CHEAP, scopes=(small,))
    began = time.monotonic()
    ends = await stage.carried_out(*(order(CHEAP, n) for n in range(3)))
    assert time.monotonic() - began < LONG_SECONDS
    assert sorted(end.state.value for end in ends) == ["done", "done", "rejected"]


async def test_a_limit_that_is_another_in_the_ledger_is_refused_before_anything_runs(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path}/data/budget.db"
    (tmp_path / "data").mkdir()
    async with connect_budget(url) as tracker:
        await tracker.set_budget("session:s", "2.00")
    stage = Stage(tmp_path, CHEAP, scopes=(SESSION,))
    with pytest.raises(
        BudgetMismatchError, match=r"session:s: the limit is \$2.00, and the file says"
    ):
        async with stage.opened():
            pass
    async with connect_budget(url) as tracker:
        await tracker.set_budget("session:s", "1.00", window="day")
    with pytest.raises(BudgetMismatchError, match=r"session:s: the limit is \$1.00 .*day"):
        async with stage.opened():
            pass
    async with connect_budget(url) as tracker:
        await tracker.set_budget("session:s", "1.00")
    assert len(await stage.carried_out(order(CHEAP))) == 1


async def test_a_resume_sets_the_limit_of_its_workflow_in_a_shared_ledger_too(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path, CHEAP, scopes=(SESSION,), micro_usd=100_000)
    await stage.carried_out(order(CHEAP))
    stage.options = msgspec.structs.replace(stage.options, micro_usd=300_000)
    (end,) = await stage.carried_out(order(CHEAP, 1))
    assert end.state is TaskState.DONE
    async with stage.opened() as (backend, _):
        assert [one.limit_micro_usd for one in await backend.money()] == [1_000_000, 300_000]


async def test_a_run_waits_for_a_window_and_says_that_nothing_else_can_help(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path}/data/budget.db"
    (tmp_path / "data").mkdir()
    async with connect_budget(url) as tracker:
        await tracker.set_budget("session:s", "1.00", window="rolling:24h")
        token = await tracker.reserve("session:s", "0.95")
        await tracker.commit(token, "0.95")
    free = step(shell("true"), "free")
    open_session = msgspec.structs.replace(SESSION, micro_usd=None)
    stage = Stage(tmp_path, CHEAP, free, scopes=(open_session,))
    async with stage.opened() as (backend, ear):
        assert not await backend.is_stuck()
        await backend.submit([order(CHEAP)])
        await backend.submit([order(free, 1)])
        await ear.wait()
        waiting = [task for task in ear.told if task.number == 0][-1]
        assert waiting.state is TaskState.QUEUED
        await becomes_stuck(backend)
        line = await backend.why(waiting)
        await backend.cancel([waiting])
        ends = await ear.wait(2)
    start = "session:s: $0.95 of $1.00 spent, $0.00 reserved; needed: $0.07; more in"
    assert line.startswith(start)
    assert ends[-1].state is TaskState.CANCELLED


def test_processes_of_one_session_spend_no_more_than_its_limit_together(
    tmp_path: Path, valkey_url: str
) -> None:
    options = {
        "session_id": "s", "session_micro_usd": 500_000, "concurrency": 4, "redis_url": valkey_url,
    }  # fmt: skip
    both = [tmp_path / "a", tmp_path / "b"]
    processes = [program(folder, msgspec.json.encode(options).decode()) for folder in both]
    outputs = [process.communicate(timeout=40)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    counts = [msgspec.json.decode(output.splitlines()[-1]) for output in outputs]
    assert sum(count.get("done", 0) for count in counts) == 500_000 // COST_MICRO_USD
    assert sum(sum(count.values()) for count in counts) == 2 * STEPS
    assert asyncio.run(spent_in(valkey_url)) == 490_000


def test_runs_that_begin_in_the_same_second_hold_money_under_names_of_their_own() -> None:
    assert len({new_run_id(0.0) for _ in range(10_000)}) == 10_000


async def spent_in(url: str) -> int:
    async with connect_budget(url) as tracker:
        status = await tracker.status("session:s")
        audit = await tracker.ledger.audit()
    assert audit.kept == audit.journalled
    assert status.reserved_micro_usd == 0
    return status.spent_micro_usd


async def test_a_password_is_not_kept_and_is_asked_for_again(
    tmp_path: Path, valkey_url: str
) -> None:
    # A user without a password is let in with any.
    url = valkey_url.replace("://", "://default:hunter22@")
    stage = Stage(tmp_path, CHEAP, options={"redis_url": url})
    await stage.carried_out(order(CHEAP))
    assert b"hunter22" not in stage.files()
    stage.options = msgspec.structs.replace(stage.options, redis_url=None)
    with pytest.raises(InvalidSettingError, match="without its password"):
        async with stage.opened():
            pass
    stage.options = msgspec.structs.replace(stage.options, redis_url=url)
    (end,) = await stage.carried_out(order(CHEAP, 1))
    assert end.state is TaskState.DONE


async def test_every_end_is_told_though_the_process_that_writes_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_engine, "WRITTEN_APART", 0)
    total = 40
    async with Stage(tmp_path, CHEAP, concurrency=4).opened() as (backend, ear):
        await backend.submit([order(CHEAP, n) for n in range(total)])
        for ends in (5, 15, 25):
            await ear.wait(ends)
            os.kill(writer_pid(), signal.SIGKILL)
        assert len(await ear.wait(total)) == total
        (money,) = await backend.money()
    assert {end.state for end in ear.ends()} == {TaskState.DONE}
    assert money.spent_micro_usd == sum(end.micro_usd for end in ear.ends())
    assert money.spent_micro_usd == total * COST_MICRO_USD


def writer_pid() -> int:
    found = [
        pid
        for pid in family(os.getpid())[1:]
        if b"headgate.storage.writer" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return found[-1]


async def test_a_run_waits_for_a_ledger_that_is_away_and_says_so(tmp_path: Path) -> None:
    with running_valkey() as server:
        stage = Stage(tmp_path, CHEAP, options={"redis_url": server.url})
        async with stage.opened() as (backend, ear):
            before = await backend.money()
            server.stop()
            await backend.submit([order(CHEAP)])
            waiting = await ear.wait_for(TaskState.QUEUED, attempt=0)
            async with asyncio.timeout(WAITED_SECONDS):
                while not (line := await backend.why(waiting)):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            now = await backend.money()
            assert [msgspec.structs.replace(one, as_of=None) for one in now] == before
            assert all(one.as_of is not None for one in now), "it says how old that is"
            assert "the ledger does not answer" in backend.trouble
            assert not await backend.is_stuck()
            server.start()
            (end,) = await ear.wait()
            (money,) = await backend.money()
    assert "Redis" in line
    assert (end.state, money.spent_micro_usd) == (TaskState.DONE, COST_MICRO_USD)


async def test_a_ledger_that_cannot_be_reached_ends_a_run_before_it_begins(tmp_path: Path) -> None:
    stage = Stage(tmp_path, CHEAP, options={"redis_url": f"redis://127.0.0.1:{free_port()}/0"})
    with pytest.raises(LedgerUnavailableError):
        async with stage.opened():
            pass


# Steps of which nobody says what they cost: what is held is learned, and kept from run to run.

ANSWER = '{"model": "mine", "usage": {"prompt_tokens": 1000, "completion_tokens": 0}}'
PRICED = step(shell(f"printf %s '{ANSWER}'"), "priced")
"""Costs ten cents, at the prices below."""
PRICES = {"mine": Price(input=Decimal(100), output=Decimal(0))}
LIMIT = 10_000_000


async def records_of(stage: Stage) -> list[TaskRecord]:
    store = SqliteTaskStore(stage.path / STORE)
    await store.open()
    try:
        return list((await store.find(TaskQuery(limit=100))).records)
    finally:
        await store.close()


async def test_a_step_without_an_estimate_holds_what_earlier_runs_have_cost(
    tmp_path: Path,
) -> None:
    def unknown(count: int) -> list[StepOrder]:
        return [order(PRICED, number, is_known=False) for number in range(count)]

    first = Stage(tmp_path, PRICED, prices=PRICES, micro_usd=LIMIT)
    ends = await first.carried_out(*unknown(1))
    assert [end.micro_usd for end in ends] == [100_000]
    (record,) = await records_of(first)
    assert record.progress.reserved_micro_usd == LIMIT // 10
    assert record.progress.hold is not None
    assert record.progress.hold.micro_usd.basis is Basis.PROBE

    second = Stage(tmp_path, PRICED, prices=PRICES, micro_usd=LIMIT, run_id="20261115-200918-3fa2")
    await second.carried_out(*unknown(2))
    for record in await records_of(second):
        assert record.progress.hold is not None
        assert record.progress.hold.micro_usd.basis is Basis.LEARNED
    kinds = {(one.kind.name, one.kind.action): one for one in earlier_kinds(second.data, "flow")}
    assert kinds["step:command:priced", "priced"].learned.micro_usd.count == 3


async def test_a_resume_goes_by_what_its_own_run_has_learned(tmp_path: Path) -> None:
    stage = Stage(tmp_path, PRICED, prices=PRICES, micro_usd=LIMIT)
    await stage.carried_out(order(PRICED, 0, is_known=False))
    (stage.data / ESTIMATES_FILE).write_bytes(b"{")
    await stage.carried_out(order(PRICED, 1, is_known=False))
    bases = [
        one.progress.hold and one.progress.hold.micro_usd.basis for one in await records_of(stage)
    ]
    assert sorted(map(str, bases)) == sorted(map(str, [Basis.PROBE, Basis.LEARNED]))
    assert len(earlier_kinds(stage.data, "flow")) == 2


async def test_the_first_of_an_unknown_step_runs_alone_and_other_steps_beside_it(
    tmp_path: Path,
) -> None:
    begun, go_on = tmp_path / "begun", tmp_path / "go-on"
    os.mkfifo(begun)
    os.mkfifo(go_on)
    slow = step(shell(f"echo > {begun}; cat {go_on}"), "slow")
    stage = Stage(tmp_path, slow, PRICED, prices=PRICES, micro_usd=LIMIT, concurrency=4)
    async with stage.opened() as (backend, ear):
        await backend.submit([order(slow, 0, is_known=False), order(slow, 1, is_known=False)])
        await asyncio.to_thread(begun.read_text)
        await backend.submit([order(PRICED, 2, is_known=False)])
        (end,) = await ear.wait()
        waiting = next(task for task in ear.told if task.number == 1)
        why = await backend.why(waiting)
        await asyncio.to_thread(go_on.write_text, "now")
        await asyncio.to_thread(begun.read_text)
        await asyncio.to_thread(go_on.write_text, "now")
        await ear.wait(3)
    assert end.number == 2
    assert "until the first one ends; give the step an estimate to run more at once" in why


async def test_an_unknown_step_that_was_lost_is_booked_at_its_probe_and_a_silent_one_is_unpriced(
    tmp_path: Path,
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    lost = step(shell(f"test -e again && exit 0; touch again; echo > {fifo}; sleep 60"), "lost")
    stage = Stage(tmp_path, lost, micro_usd=LIMIT)
    async with stage.opened() as (backend, _):
        await backend.submit([order(lost, is_known=False)])
        await asyncio.to_thread(fifo.read_text)
    async with stage.opened() as (backend, ear):
        (end,) = await ear.wait()
        (money,) = await backend.money()
    assert (end.state, end.attempt, end.is_unpriced) == (TaskState.DONE, 2, True)
    assert (end.micro_usd, end.assumed_micro_usd) == (LIMIT // 10, LIMIT // 10)
    assert (money.spent_micro_usd, money.reserved_micro_usd) == (LIMIT // 10, 0)


async def test_an_unknown_step_that_fails_books_its_probe(tmp_path: Path) -> None:
    failing = step(shell("exit 1"), "failing")
    stage = Stage(tmp_path, failing, micro_usd=LIMIT)
    (end,) = await stage.carried_out(order(failing, is_known=False))
    assert (end.state, end.is_unpriced) == (TaskState.FAILED, False)
    assert (end.micro_usd, end.assumed_micro_usd) == (LIMIT // 10, LIMIT // 10)


async def test_a_step_that_never_says_what_it_used_runs_in_parallel_after_three(
    tmp_path: Path,
) -> None:
    silent = step(shell("exit 0"), "silent")
    stage = Stage(tmp_path, silent, micro_usd=LIMIT)
    ends = await stage.carried_out(*[order(silent, n, is_known=False) for n in range(6)])
    assert all(end.is_unpriced for end in ends)
    assert {end.micro_usd for end in ends} == {0}
    held = sorted(record.progress.reserved_micro_usd for record in await records_of(stage))
    assert held == [0, 0, 0, *[LIMIT // 10] * 3]
