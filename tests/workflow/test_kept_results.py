"""What steps give is kept so that it can be read again; what is no answer of a model fails."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from executors.endpoint import reply, reply_json, running_endpoint
from headgate.providers.prices import Price
from headgate.workflow.backend import TaskState
from headgate.workflow.placeholders import parsed_text
from headgate.workflow.run_tasks import recorded_tasks
from headgate.workflow.step_requests import has_answer, output_of, result_value
from headgate.workflow.workflow import Endpoint, Estimate
from run_commands import EXIT_DONE, Commands
from workflow.local_stage import RUN_ID, Stage, call, http, model, order, shell, step

PRICES = {"mine": Price(input=1, output=2)}
DEEP = "[" * 5_000 + "]" * 5_000
LONG = "9" * 5_000
UNREADABLE = ["1e400", '{"a": [-1e999]}', DEEP, LONG]


@pytest.mark.parametrize("text", UNREADABLE)
async def test_output_that_cannot_be_read_again_is_a_text(tmp_path: Path, text: str) -> None:
    async with running_endpoint(reply(200, text.encode())) as server:
        steps = [step(shell(f"echo '{text}'"), "command"), step(http(server.url), "http")]
        stage = Stage(tmp_path, *steps)
        async with stage.opened() as (backend, ear):
            await backend.submit([order(one, number) for number, one in enumerate(steps)])
            ends = sorted(await ear.wait(2), key=lambda task: task.number)
            results = await backend.results(ends)
    assert {end.state for end in ends} == {TaskState.DONE}
    outputs = [output_of(one.work, result) for one, result in zip(steps, results, strict=True)]
    assert outputs == [text, text]
    with recorded_tasks(stage.path, RUN_ID) as recorded:
        assert recorded.results(ends) == results


async def test_a_function_that_returns_what_cannot_be_read_again_fails(tmp_path: Path) -> None:
    (tmp_path / "deep_values.py").write_text(
        "def deep():\n    value = []\n    for _ in range(400):\n        value = [value]\n"
        "    return value\n"
    )
    one = step(call("deep_values:deep"))
    end, _ = await Stage(tmp_path, one).one_end(one)
    assert end.state is TaskState.FAILED
    assert "nest it at most 200 deep" in (end.error or "")


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_result_that_was_kept_unreadable_is_its_text(text: str) -> None:
    assert result_value(text.encode()) == {"text": text}
    kept = f'{{"stdout":"x","json":{text}}}'
    assert output_of(shell("true"), result_value(kept.encode())) == kept


POISON = """
config: {budget_usd: 1.00}
steps:
  - {id: a, command: [echo, "1e400"], cost_usd: 0.10}
  - {id: b, command: [echo, "{steps.a.output}"], cost_usd: 0.10}
"""


def test_a_run_whose_output_no_reader_has_a_value_for_goes_on(tmp_path: Path) -> None:
    commands = Commands(tmp_path)
    (tmp_path / "p.yaml").write_text(POISON)
    assert commands.run("p.yaml").code == EXIT_DONE
    assert commands.run("--resume", "last").code == EXIT_DONE
    data = ("--data", str(commands.data))
    assert commands.call("runs", "output", "last", "b", *data).stdout == "1e400\n"


NO_ANSWERS = [
    (b"\0\xff\xfenot json", "here answered with no completion: \ufffd\ufffdnot json"),
    (b"<html>Log in</html>", "here answered with no completion: <html>Log in</html>"),
    (b'{"error":"busy"}', 'here answered with no completion: {"error":"busy"}'),
    (b'{"choices":[]}', 'here answered with no completion: {"choices":[]}'),
    (b'{"choices":[{"message":{},"x":1e400}]}', None),
    (b"", "here answered with no completion: null"),
]


@pytest.mark.parametrize(("body", "error"), NO_ANSWERS)
async def test_what_is_no_answer_of_a_model_is_a_failure_booked_as_held(
    tmp_path: Path, body: bytes, error: str | None
) -> None:
    async with running_endpoint(reply(200, body)) as server:
        here = Endpoint(name="here", kind="openai", url=parsed_text(server.url))
        one = step(model("here"))
        stage = Stage(tmp_path, one, endpoints={"here": here}, prices=PRICES)
        (end,) = await stage.carried_out(order(one, micro_usd=30))
    assert (end.state, end.micro_usd, end.assumed_micro_usd) == (TaskState.FAILED, 30, 30)
    assert error is None or end.error == error


async def test_what_is_no_answer_and_says_what_it_used_is_booked_as_used(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    async with running_endpoint(reply_json({"error": "filtered", "usage": usage})) as server:
        here = Endpoint(name="here", kind="openai", url=parsed_text(server.url))
        one = step(model("here"))
        stage = Stage(tmp_path, one, endpoints={"here": here}, prices=PRICES)
        (end,) = await stage.carried_out(order(one, micro_usd=30))
    assert (end.state, end.micro_usd, end.assumed_micro_usd) == (TaskState.FAILED, 20, 0)


def test_an_answer_that_calls_a_tool_needs_no_text() -> None:
    assert has_answer({"choices": [{"message": {"content": None, "tool_calls": [{}]}}]})
    assert has_answer({"content": []})


@pytest.mark.parametrize(("tokens", "booked"), [(None, 0), (0, 0), (7, 7)])
async def test_an_attempt_that_ends_unheard_is_booked_with_the_tokens_of_its_step(
    tmp_path: Path, tokens: int | None, booked: int
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = f"test -e again && exit 0; touch again; echo > {fifo}; sleep 60"
    one = step(shell(script), estimate=Estimate(micro_usd=30, tokens=tokens))
    stage = Stage(tmp_path, one)
    async with stage.opened() as (backend, _):
        await backend.submit([order(one, micro_usd=30, tokens=tokens or 0)])
        await asyncio.to_thread(fifo.read_text)
    async with stage.opened() as (_, ear):
        (end,) = await ear.wait()
    # The second attempt says nothing of tokens either, and is booked as it was held.
    assert (end.attempt, end.tokens) == (2, 2 * booked)
