"""Tasks as calls of Python functions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from executors import task_functions
from executors.orders import CHAT, failure_of, opened, order, pause_of, result_of
from headgate.core.lifecycle import UNKNOWN_USAGE, Outcome, Succeeded, Usage
from headgate.errors import InvalidSettingError
from headgate.executors.build import build_executor
from headgate.executors.targets import ECHO, CallableTarget
from headgate.testing import VirtualClock


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """Let every thread that a test left waiting come to its end."""
    task_functions.RELEASED.clear()
    yield
    task_functions.RELEASED.set()


def calling(function: str, **fields: Any) -> CallableTarget:
    return CallableTarget(entry_point=f"executors.task_functions:{function}", **fields)


async def outcome_of(function: str, given: object = None, **fields: Any) -> Outcome:
    async with opened(calling(function, **fields)) as executor:
        return await executor.execute(order(given=given))


async def test_the_built_in_target_gives_back_what_the_client_wrote() -> None:
    async with opened(ECHO) as executor:
        outcome = await executor.execute(
            order("click", tab_id="t", params={"x": 1.50}, given=["a"], labels={"k": "v"})
        )
    assert result_of(outcome) == {
        "echo": {
            "action": "click", "tabId": "t", "params": {"x": 1.5}, "input": ["a"],
            "labels": {"k": "v"},
        }
    }  # fmt: skip


@pytest.mark.parametrize("function", ["doubled", "doubled_plainly"])
async def test_what_a_function_returns_is_the_result(function: str) -> None:
    assert result_of(await outcome_of(function, 21))["doubled"] == 42


async def test_a_plain_function_runs_on_a_thread_of_its_target() -> None:
    assert result_of(await outcome_of("doubled_plainly", 1))["thread"] == "headgate-it"


async def test_a_function_sees_the_order_by_the_names_of_the_api() -> None:
    async with opened(calling("seen")) as executor:
        outcome = await executor.execute(order("run", params={"a": 1}, ref="e1", labels={"k": "v"}))
    assert result_of(outcome) == {
        "taskId": "t-1", "attempt": 2, "projectId": "search", "agentId": "coder", "action": "run",
        "tabId": None, "ref": "e1", "selector": None, "params": {"a": 1}, "input": None,
        "labels": {"k": "v"}, "deadline": None, "traceparent": None,
        "slot": None,
    }  # fmt: skip


async def test_a_function_gets_empty_params_for_a_task_without_any() -> None:
    async with opened(calling("seen")) as executor:
        assert result_of(await executor.execute(order("run")))["params"] == {}


async def test_a_function_that_returns_nothing_has_no_result() -> None:
    assert await outcome_of("nothing") == Succeeded()


async def test_the_usage_that_a_function_returns_is_priced() -> None:
    outcome = await outcome_of("chat")
    assert result_of(outcome) == CHAT
    assert outcome.usage == Usage(tokens=15, micro_usd=20, model="mine", is_priced=True)  # type: ignore[union-attr]


async def test_the_answer_of_a_providers_client_can_be_returned() -> None:
    outcome = await outcome_of("modelled")
    assert result_of(outcome) == {"mode": "json", **CHAT}
    assert outcome.usage == Usage(tokens=15, micro_usd=20, model="mine", is_priced=True)  # type: ignore[union-attr]


async def test_a_function_may_return_an_outcome() -> None:
    assert pause_of(await outcome_of("paused")).retry_after_seconds == 3.0


async def test_an_outcome_whose_result_is_not_json_has_failed() -> None:
    assert failure_of(await outcome_of("returning_no_json")).error == "result is not JSON"


@pytest.mark.parametrize("function", ["failing", "failing_plainly"])
@pytest.mark.parametrize(
    ("kind", "message", "error"),
    [
        ("ValueError", "no good", "ValueError: no good"),
        ("StopAsyncIteration", "x", "StopAsyncIteration: x"),
        ("SystemExit", "1", "SystemExit: 1"),
        ("KeyboardInterrupt", "x", "KeyboardInterrupt: x"),
        ("BaseException", "x", "BaseException: x"),
        ("RuntimeError", "a\nb  c", "RuntimeError: a b c"),
        ("OSError", "x" * 10_000, "OSError: " + "x" * 490 + "…"),
    ],
)
async def test_an_exception_fails_the_task_for_now(
    function: str, kind: str, message: str, error: str
) -> None:
    failure = failure_of(await outcome_of(function, [kind, message]))
    assert failure.error == error
    assert failure.is_transient
    assert failure.usage == UNKNOWN_USAGE


async def test_a_function_that_cancels_itself_has_failed() -> None:
    failure = failure_of(await outcome_of("cancelling_itself"))
    assert failure.error == "CancelledError: by itself"


async def test_a_result_beyond_the_cap_fails() -> None:
    failure = failure_of(await outcome_of("large", max_result_bytes=100))
    assert failure.error == "result is larger than 100 bytes"
    assert not failure.is_transient


@pytest.mark.parametrize("function", ["unwritable", "endless"])
async def test_a_result_that_is_no_json_fails(function: str) -> None:
    failure = failure_of(await outcome_of(function))
    assert failure.error.startswith("result cannot be written as JSON: ")
    assert not failure.is_transient


@pytest.mark.parametrize(("name", "called"), [("tool", "called"), ("tool.method", "method")])
async def test_an_entry_point_may_be_an_object_or_its_method(name: str, called: str) -> None:
    assert result_of(await outcome_of(name)) == [called, 2]


async def test_a_thread_sees_the_context_of_its_caller() -> None:
    task_functions.WHO.set("me")
    assert result_of(await outcome_of("who")) == "me"


async def test_a_cancelled_coroutine_ends() -> None:
    async with opened(calling("waiting")) as executor:
        running = asyncio.ensure_future(executor.execute(order()))
        await asyncio.to_thread(task_functions.ENTERED.acquire)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_a_thread_that_was_given_up_keeps_its_place_until_it_ends() -> None:
    async with opened(calling("stuck", threads=1)) as executor:
        given_up = asyncio.ensure_future(executor.execute(order()))
        await asyncio.to_thread(task_functions.ENTERED.acquire)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up

        following = asyncio.ensure_future(executor.execute(order()))
        await asyncio.sleep(0)
        assert not task_functions.ENTERED.acquire(blocking=False)
        task_functions.RELEASED.set()
        assert result_of(await following) == "late"
        assert task_functions.ENTERED.acquire(blocking=False)


async def test_one_that_waits_for_a_thread_can_be_cancelled() -> None:
    async with opened(calling("stuck", threads=1)) as executor:
        first = asyncio.ensure_future(executor.execute(order()))
        await asyncio.to_thread(task_functions.ENTERED.acquire)
        second = asyncio.ensure_future(executor.execute(order()))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        task_functions.RELEASED.set()
        assert result_of(await first) == "late"


def test_a_thread_that_is_left_does_not_mind_that_the_loop_has_ended() -> None:
    async def left() -> None:
        async with opened(calling("stuck")) as executor:
            running = asyncio.ensure_future(executor.execute(order()))
            await asyncio.to_thread(task_functions.ENTERED.acquire)
            running.cancel()

    asyncio.run(left())


WRONG = [
    ("no_such_package.module:function", "cannot be imported: ModuleNotFoundError"),
    ("executors.broken_module:function", "cannot be imported: LookupError: no settings here"),
    ("executors.task_functions:missing", "has no function missing"),
    ("executors.task_functions:tool.missing.deeper", "has no function tool.missing.deeper"),
    ("executors.task_functions:not_a_function", "has no function not_a_function"),
]


@pytest.mark.parametrize(("entry_point", "words"), WRONG)
async def test_a_function_that_cannot_be_found_is_told_when_it_is_opened(
    entry_point: str, words: str
) -> None:
    target = CallableTarget(entry_point=entry_point)
    executor = build_executor("it", target, environ={}, clock=VirtualClock())
    with pytest.raises(InvalidSettingError, match=words) as raised:
        await executor.open()
    assert raised.value.field == "targets.it.entry_point"


@pytest.mark.parametrize("entry_point", ["module", "module:", ":f", "a..b:f", "a/b:f", "m:f()"])
def test_an_entry_point_has_a_module_and_a_function(entry_point: str) -> None:
    target = CallableTarget(entry_point=entry_point)
    with pytest.raises(InvalidSettingError, match=r"package\.module:function"):
        build_executor("it", target, environ={}, clock=VirtualClock())


async def test_an_executor_that_is_not_open_says_so() -> None:
    executor = build_executor("it", ECHO, environ={}, clock=VirtualClock())
    assert "is not open" in failure_of(await executor.execute(order())).error
