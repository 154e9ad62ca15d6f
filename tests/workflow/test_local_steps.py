"""What each kind of step does on an engine in this process, with real commands and requests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from executors.endpoint import Seen, free_port, reply, reply_json, running_endpoint
from headgate.core.estimates import Basis
from headgate.errors import InvalidSettingError
from headgate.providers.prices import Price
from headgate.testing.fake_provider import FakeProvider
from headgate.workflow.backend import TaskState
from headgate.workflow.local_backend import StepHolds, named_targets
from headgate.workflow.placeholders import parsed_template, parsed_text
from headgate.workflow.workflow import CallWork, CommandWork, Endpoint, Estimate, Step, TargetWork
from workflow.local_stage import Stage, call, http, model, order, shell, step

PRICES = {"mine": Price(input=1, output=2)}
CHAT = {
    "model": "other",
    "choices": [{"message": {"content": "hi"}}],
    "usage": {"prompt_tokens": 10, "completion_tokens": 5},
}


def endpoint(url: str, kind: Any = "openai", key: str | None = None, **headers: str) -> Endpoint:
    texts = {name: parsed_text(text) for name, text in headers.items()}
    return Endpoint(
        name="here",
        kind=kind,
        url=parsed_text(url),
        key=None if key is None else parsed_text(key),
        headers=texts,
    )


async def test_a_command_gets_its_arguments_variables_input_and_folder(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    script = 'cat; printf "|%s|%s|%s|%s" "$MINE" "$PASSED" "$HIDDEN" "$(basename "$PWD")"'
    work = shell(
        script,
        env={"MINE": "{env.KEY}-x"},
        pass_env=("PASSED", "ABSENT"),
        stdin=parsed_text("given"),
        cwd=parsed_text("inner"),
    )
    environ = {"KEY": "k1", "PASSED": "p1", "HIDDEN": "h1"}
    end, result = await Stage(tmp_path, step(work), environ=environ).one_end(step(work))
    assert end.state is TaskState.DONE
    assert result == {"stdout": "given|k1-x|p1||inner", "stderr": "", "exitCode": 0}


async def test_a_command_runs_in_the_folder_of_the_workflow(tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("#!/bin/sh\necho '{\"at\": 1}'\n")
    (tmp_path / "tool").chmod(0o755)
    one = step(CommandWork(command=(parsed_text("./tool"),)))
    _, result = await Stage(tmp_path, one).one_end(one)
    assert result["json"] == {"at": 1}


async def test_a_command_that_fails_is_tried_again_as_often_as_its_step_says(
    tmp_path: Path,
) -> None:
    one = step(shell("test -e seen || { touch seen; exit 3; }"), retries=1)
    end, _ = await Stage(tmp_path, one).one_end(one)
    assert (end.state, end.attempt) == (TaskState.DONE, 2)


async def test_a_command_that_fails_for_good_says_how(tmp_path: Path) -> None:
    one = step(shell("echo broken >&2; exit 3"))
    end, result = await Stage(tmp_path, one).one_end(one)
    assert (end.state, end.error) == (TaskState.FAILED, "command exited with 3: broken")
    assert result is None


async def test_an_attempt_that_takes_too_long_is_stopped_and_booked_as_held(
    tmp_path: Path,
) -> None:
    one = step(shell("sleep 60"), timeout_seconds=0.2, cost_micro_usd=70_000)
    end, _ = await Stage(tmp_path, one).one_end(one)
    assert end.state is TaskState.FAILED
    assert "timed out" in (end.error or "")
    assert (end.micro_usd, end.assumed_micro_usd) == (70_000, 70_000)


async def test_a_request_is_sent_with_its_method_headers_and_body(tmp_path: Path) -> None:
    async with running_endpoint(reply_json({"ok": True})) as server:
        one = step(
            http(server.url + "/a?k={env.KEY}", "PATCH", {"a": [1, "x"]}, X_Key="Bearer {env.KEY}")
        )
        end, result = await Stage(tmp_path, one, environ={"KEY": "k1"}).one_end(one)
    assert (end.state, result) == (TaskState.DONE, {"ok": True})
    seen = server.seen[0]
    assert (seen.method, seen.path, seen.json) == ("PATCH", "/a?k=k1", {"a": [1, "x"]})
    assert seen.headers["x-key"] == "Bearer k1"
    assert seen.headers["idempotency-key"] == end.task_id


async def test_a_request_without_a_body_has_none(tmp_path: Path) -> None:
    async with running_endpoint(reply(200, b"plain")) as server:
        one = step(http(server.url, "GET"))
        _, result = await Stage(tmp_path, one).one_end(one)
    assert result == {"text": "plain"}
    assert "content-type" not in server.seen[0].headers
    assert server.seen[0].body == b""


async def test_a_refused_request_fails_for_good_and_costs_nothing(tmp_path: Path) -> None:
    async with running_endpoint(reply(404, b"no such page")) as server:
        one = step(http(server.url), retries=3, cost_micro_usd=70_000)
        end, _ = await Stage(tmp_path, one).one_end(one)
    assert (end.state, end.attempt, end.micro_usd) == (TaskState.FAILED, 1, 0)
    assert end.error == "endpoint returned 404: no such page"


async def test_an_endpoint_that_is_not_there_is_tried_again_and_costs_nothing(
    tmp_path: Path,
) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    one = step(http(f"{address}/secret"), retries=1, cost_micro_usd=70_000)
    end, _ = await Stage(tmp_path, one).one_end(one)
    assert (end.state, end.attempt, end.micro_usd) == (TaskState.FAILED, 2, 0)
    assert (end.error or "").startswith(f"endpoint cannot be reached at {address}: ")


async def test_a_function_beside_the_workflow_gets_what_the_step_gives_it(tmp_path: Path) -> None:
    (tmp_path / "beside_the_file.py").write_text("def triple(number):\n    return 3 * number\n")
    one = step(call("beside_the_file:triple", 5))
    _, result = await Stage(tmp_path, one).one_end(one)
    assert result == 15


NOTHING = CallWork(entry_point="workflow.step_functions:shown")
NULL = CallWork(entry_point="workflow.step_functions:shown", given=parsed_template(None))
GIVEN: list[tuple[CallWork, Any]] = [
    (NOTHING, [[], {}]),
    (NULL, [[None], {}]),
    (call("workflow.step_functions:shown", 16), [[16], {}]),
    (call("workflow.step_functions:shown", "text"), [["text"], {}]),
    (call("workflow.step_functions:shown", [1, 2]), [[[1, 2]], {}]),
    (
        call("workflow.step_functions:shown", {"self": 1, "b": {"c": 2}}),
        [[], {"self": 1, "b": {"c": 2}}],
    ),
    (call("workflow.step_functions:shown_later", {"a": 1}), [[], {"a": 1}]),
    (call("workflow.step_functions:shown_later", 16), [[16], {}]),
    (call("math:sqrt", 16), 4.0),
]


@pytest.mark.parametrize(("work", "result"), GIVEN)
async def test_a_mapping_is_given_as_keyword_arguments_and_any_other_value_as_one_argument(
    tmp_path: Path, work: CallWork, result: object
) -> None:
    one = step(work)
    assert (await Stage(tmp_path, one).one_end(one))[1] == result


async def test_a_function_that_takes_other_arguments_says_which(tmp_path: Path) -> None:
    one = step(call("workflow.step_functions:double", {"number": 2}))
    end, _ = await Stage(tmp_path, one).one_end(one)
    assert end.state is TaskState.FAILED
    assert "unexpected keyword argument 'number'" in (end.error or "")


async def test_a_function_that_raises_fails_its_step(tmp_path: Path) -> None:
    one = step(call("workflow.step_functions:refuse"))
    end, _ = await Stage(tmp_path, one).one_end(one)
    assert (end.state, end.error) == (TaskState.FAILED, "RuntimeError: not today")


async def test_a_function_that_asks_for_a_pause_is_called_again_after_it(tmp_path: Path) -> None:
    one = step(call("workflow.step_functions:pause"))
    stage = Stage(tmp_path, one)
    async with stage.opened() as (backend, ear):
        await backend.submit([order(one)])
        waiting = await ear.wait_for(TaskState.QUEUED)
        assert await backend.why(waiting) == "paused for 1 s: rate limited (attempt 1)"
        (end,) = await ear.wait()
    assert (end.state, end.attempt) == (TaskState.DONE, 2)


async def test_a_model_is_asked_as_openai_wants_it_and_priced_by_the_model_that_was_asked(
    tmp_path: Path,
) -> None:
    async with running_endpoint(reply_json(CHAT)) as server:
        here = endpoint(f"{server.url}/v1/", key="{env.KEY}")
        one = step(model("here"))
        stage = Stage(
            tmp_path, one, environ={"KEY": "sk-1"}, endpoints={"here": here}, prices=PRICES
        )
        end, result = await stage.one_end(one)
    seen = server.seen[0]
    assert (seen.method, seen.path) == ("POST", "/v1/chat/completions")
    assert seen.headers["authorization"] == "Bearer sk-1"
    assert seen.json["messages"] == [{"role": "user", "content": "hello"}]
    assert (result, end.tokens, end.micro_usd) == (CHAT, 15, 20)


async def test_a_model_is_asked_as_anthropic_wants_it(tmp_path: Path) -> None:
    usage = {"input_tokens": 10, "output_tokens": 5}
    answer = {"model": "mine", "content": [{"type": "text", "text": "hi"}], "usage": usage}
    async with running_endpoint(reply_json(answer)) as server:
        here = endpoint(server.url, "anthropic", "{env.KEY}", extra="{env.KEY}2")
        one = step(model("here"))
        stage = Stage(
            tmp_path, one, environ={"KEY": "sk-1"}, endpoints={"here": here}, prices=PRICES
        )
        end, _ = await stage.one_end(one)
    seen = server.seen[0]
    assert seen.path == "/v1/messages"
    assert seen.headers["x-api-key"] == "sk-1"
    assert seen.headers["anthropic-version"] == "2023-06-01"
    assert seen.headers["extra"] == "sk-12"
    assert "authorization" not in seen.headers
    assert end.micro_usd == 20


async def test_a_limit_of_the_provider_costs_no_attempt_and_no_money(tmp_path: Path) -> None:
    answers = [reply(429, b"slow down", Retry_After="1"), reply_json(CHAT)]

    async def answer(_seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(answers.pop(0))
        await writer.drain()

    async with running_endpoint(answer) as server:
        here = endpoint(server.url)
        one = step(model("here"))
        stage = Stage(tmp_path, one, endpoints={"here": here}, prices=PRICES)
        end, _ = await stage.one_end(one)
    assert (end.state, end.attempt, end.micro_usd) == (TaskState.DONE, 2, 20)


@pytest.mark.parametrize(("status", "booked"), [(500, 0), (503, 0), (400, 0), (504, 30)])
async def test_a_model_that_fails_before_any_output_costs_nothing(
    tmp_path: Path, status: int, booked: int
) -> None:
    async with running_endpoint(reply(status, b"oops")) as server:
        one = step(model("here"))
        stage = Stage(tmp_path, one, endpoints={"here": endpoint(server.url)}, prices=PRICES)
        (end,) = await stage.carried_out(order(one, micro_usd=30))
    assert (end.state, end.micro_usd, end.assumed_micro_usd) == (TaskState.FAILED, booked, booked)
    assert end.error == f"here returned {status}: oops"


async def test_an_endpoint_of_ones_own_that_fails_without_figures_is_booked_as_held(
    tmp_path: Path,
) -> None:
    async with running_endpoint(reply(500, b"oops")) as server:
        one = step(http(url=f"{server.url}/run"))
        stage = Stage(tmp_path, one, prices=PRICES)
        (end,) = await stage.carried_out(order(one, micro_usd=30))
    assert (end.state, end.micro_usd, end.assumed_micro_usd) == (TaskState.FAILED, 30, 30)


TARGETS = """
[targets.double]
kind = "callable"
entry_point = "workflow.step_functions:double"
[targets.later]
kind = "callable"
entry_point = "workflow.step_functions:double"
status = "paused"
[targets.echoing]
kind = "command"
command = ["cat"]
"""


def configured(tmp_path: Path, work: TargetWork, **fields: Any) -> tuple[Stage, Step]:
    path = tmp_path / "headgate.toml"
    path.write_text(TARGETS)
    one = step(work, **fields)
    return Stage(tmp_path, one, options={"config": path}), one


async def test_a_target_of_the_settings_runs_its_tasks_here(tmp_path: Path) -> None:
    work = TargetWork(target="double", input=parsed_template({"value": 4}))
    stage, one = configured(tmp_path, work, cost_micro_usd=70_000)
    end, result = await stage.one_end(one)
    assert (result, end.micro_usd) == ({"twice": 8}, 70_000)


@pytest.mark.parametrize(
    ("target", "basis", "amount"), [("double", Basis.CONFIGURED, 250_000), ("free", Basis.FREE, 0)]
)
def test_a_step_without_an_estimate_holds_that_of_its_target(
    tmp_path: Path, target: str, basis: Basis, amount: int
) -> None:
    work = TargetWork(target=target, input=parsed_template({"value": 4}))
    stage, one = configured(tmp_path, work)
    free = '[targets.free]\nkind = "command"\ncommand = ["echo"]\n'
    said = TARGETS.replace("[targets.double]\n", '[targets.double]\nestimate_usd = "0.25"\n')
    (tmp_path / "headgate.toml").write_text(said + free)
    targets = named_targets(stage.workflow, stage.options, stage.environ)
    hold = StepHolds(stage.workflow, targets, ())(order(one, is_known=False))
    assert (hold.micro_usd.basis, hold.micro_usd.amount) == (basis, amount)


async def test_what_no_target_would_take_fails_its_step_and_no_other(tmp_path: Path) -> None:
    work = TargetWork(target="echoing", action=parsed_text("x" * 5_000))
    stage, one = configured(tmp_path, work)
    end, _ = await stage.one_end(one)
    assert end.state is TaskState.FAILED
    assert "action" in (end.error or "")


UNUSABLE: list[tuple[TargetWork, str]] = [
    (TargetWork(target="nope"), "steps.one.target: unknown target 'nope'; name one of"),
    (TargetWork(target="pull"), "steps.one.target: workers pull what is for 'pull' from a service"),
    (TargetWork(target="later"), "steps.one.target: target 'later' is paused in the settings"),
    (TargetWork(target="double", slot="s"), "steps.one.target: unknown slot 's'"),
    (TargetWork(), "steps.one.target: missing required field 'target'"),
]


@pytest.mark.parametrize(("work", "problem"), UNUSABLE)
async def test_a_target_that_cannot_be_used_here_is_refused_before_anything_runs(
    tmp_path: Path, work: TargetWork, problem: str
) -> None:
    stage, _ = configured(tmp_path, work)
    with pytest.raises(InvalidSettingError, match=f"^{problem}"):
        async with stage.opened():
            pass


MISSING: list[tuple[Step, str]] = [
    (step(shell("{env.NOT_SET}")), "steps.one.command: the environment variable NOT_SET is not"),
    (step(shell("x", env={"A": "{env.NOT_SET}"})), "steps.one.env.A: the environment variable"),
    (step(shell("x", env={"HEADGATE_A": ""})), "steps.one.env.HEADGATE_A: names with HEADGATE_"),
    (
        step(CommandWork(command=(parsed_text("no-such-program"),))),
        "steps.one.command: command not found: no-such-program; install it",
    ),
    (
        step(CommandWork(command=(parsed_text("./no-such-file"),))),
        "steps.one.command: command not found: ./no-such-file; install it",
    ),
    (step(shell("x", cwd=parsed_text("no-such"))), "steps.one.command: command could not be sta"),
    (step(http("http://x/{env.NOT_SET}")), "steps.one.http.url: the environment variable"),
    (step(http("http://x", Host="x")), "steps.one.http.headers.Host: is set for every request"),
    (step(call("no_such_module:f")), "steps.one.call: no_such_module cannot be imported"),
    (step(call("json:no_such")), "steps.one.call: json has no function no_such"),
    (step(model("here")), r"steps.one.model: \w+ goes to here, which needs NOT_SET; set it"),
    (step(model("absent")), "steps.one.endpoint: there is no endpoint 'absent'"),
]


@pytest.mark.parametrize(("one", "problem"), MISSING)
async def test_what_is_missing_is_found_before_anything_runs(
    tmp_path: Path, one: Step, problem: str
) -> None:
    here = endpoint("http://x", key="{env.NOT_SET}")
    stage = Stage(tmp_path, one, endpoints={"here": here})
    with pytest.raises(InvalidSettingError, match=f"^{problem}"):
        async with stage.opened():
            pass


async def test_a_program_that_an_earlier_step_makes_is_not_asked_for(tmp_path: Path) -> None:
    later = step(CommandWork(command=(parsed_text("./made"),)), "later", depends_on=("first",))
    async with Stage(tmp_path, step(shell("true"), "first"), later).opened():
        pass


COSTS: list[tuple[Step, int]] = [
    (step(shell("true"), cost_micro_usd=70_000), 70_000),
    (step(shell("exit 1"), cost_micro_usd=70_000), 70_000),
    (step(call("workflow.step_functions:free"), cost_micro_usd=70_000), 70_000),
    (step(call("workflow.step_functions:not_begun"), cost_micro_usd=70_000), 0),
    (step(shell("true")), 0),
    (step(shell("true"), estimate=Estimate(micro_usd=9)), 9),
]


@pytest.mark.parametrize(("one", "micro_usd"), COSTS)
async def test_a_cost_that_is_known_is_booked_once_and_as_such(
    tmp_path: Path, one: Step, micro_usd: int
) -> None:
    stage = Stage(tmp_path, one, micro_usd=1_000_000)
    held = one.estimate.micro_usd if one.estimate else None
    async with stage.opened() as (backend, ear):
        await backend.submit([order(one, micro_usd=held)])
        (end,) = await ear.wait()
        (money,) = await backend.money()
    assert (end.micro_usd, end.tokens) == (micro_usd, 0)
    assert end.assumed_micro_usd == (held or 0)
    assert (money.scope, money.spent_micro_usd, money.reserved_micro_usd) == (
        "workflow:flow", micro_usd, 0,
    )  # fmt: skip
    assert money.limit_micro_usd == 1_000_000


async def test_no_value_of_the_environment_is_kept_in_the_folder_of_the_run(
    tmp_path: Path,
) -> None:
    secret = "a-very-secret-value"
    environ = {"KEY": secret}
    async with running_endpoint(reply(400, f"bad key {secret}".encode())) as server:
        here = endpoint(server.url, key="{env.KEY}")
        steps = [
            step(shell('echo "$A" >&2; exit 1', env={"A": "{env.KEY}"}), "command"),
            step(http(server.url + "/?q={env.KEY}", X_Key="{env.KEY}"), "http"),
            step(model("here"), "model"),
        ]
        stage = Stage(tmp_path, *steps, environ=environ, endpoints={"here": here}, prices=PRICES)
        ends = await stage.carried_out(*(order(one, n) for n, one in enumerate(steps)))
    assert [end.error for end in ends] == [
        "command exited with 1: {env.KEY}",
        "endpoint returned 400: bad key {env.KEY}",
        "here returned 400: bad key {env.KEY}",
    ]
    assert len(server.seen) == 2
    assert secret.encode() not in stage.files()


SLOTS = """
[[slots]]
name = "work"
provider = "zai"
base_url = "{provider}"
key_env = "SLOT_KEY"
[[slots]]
name = "unused"
provider = "zai"
base_url = "http://127.0.0.1:9"
key_env = "OTHER_KEY"
[targets.there]
kind = "http"
url = "{there}"
slot = "work"
headers = {{ Authorization = "Bearer {{slot.key}}" }}
"""


async def test_a_target_with_a_slot_uses_its_key_and_runs_no_other_slot(tmp_path: Path) -> None:
    provider = FakeProvider()
    await provider.start()
    try:
        async with running_endpoint(reply_json({"ok": True})) as server:
            path = tmp_path / "headgate.toml"
            path.write_text(SLOTS.format(provider=provider.address, there=server.url))
            one = step(TargetWork(target="there", action=parsed_text("go")))
            stage = Stage(
                tmp_path, one, options={"config": path}, environ={"SLOT_KEY": "sk-of-a-slot"}
            )
            end, result = await stage.one_end(one)
    finally:
        await provider.stop()
    assert (end.state, result) == (TaskState.DONE, {"ok": True})
    assert server.seen[0].headers["authorization"] == "Bearer sk-of-a-slot"
    assert b"sk-of-a-slot" not in stage.files()
    assert stage.run.record.config == str(path)


TRAFFIC = """
[[slots]]
name = "plan"
provider = "anthropic"
base_url = "http://127.0.0.1:9"
key_env = "SLOT_KEY"
[targets.there]
kind = "http"
url = "{there}"
slot = "plan"
"""


async def test_a_model_step_with_the_key_of_a_slot_tells_its_quota(tmp_path: Path) -> None:
    usage = {"input_tokens": 10, "output_tokens": 5}
    answer = {"model": "mine", "content": [{"type": "text", "text": "hi"}], "usage": usage}
    told = reply(
        200,
        msgspec.json.encode(answer),
        Anthropic_RateLimit_Unified_5h_Utilization="0.25",
        Anthropic_RateLimit_Unified_5h_Reset="3600",
    )
    async with running_endpoint(told) as server, running_endpoint(reply_json({})) as there:
        path = tmp_path / "headgate.toml"
        path.write_text(TRAFFIC.format(there=there.url))
        asking = step(model("here"))
        using = step(TargetWork(target="there", action=parsed_text("go")), "two")
        stage = Stage(
            tmp_path,
            asking,
            using,
            options={"config": path},
            environ={"SLOT_KEY": "sk-1"},
            endpoints={"here": endpoint(server.url, "anthropic", "{env.SLOT_KEY}")},
            prices=PRICES,
        )
        async with stage.opened() as (backend, ear):
            await backend.submit([order(asking)])
            await ear.wait()
            async with asyncio.timeout(20):
                while b"quota-observed" not in stage.files():  # noqa: ASYNC110 - a file tells it
                    await asyncio.sleep(0.02)
    assert b'"percent_used":25.0' in stage.files()
