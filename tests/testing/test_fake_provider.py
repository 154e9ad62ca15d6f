"""The fake provider behaves as a real one: cold, opened by use, over after five hours."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx2
import msgspec
import pytest

from headgate.cli.fake_provider import MAX_LATENCY_MS, WINDOW_MINUTES, slot_settings
from headgate.cli.main import run
from headgate.errors import InvalidSettingError
from headgate.providers.usage import reported_in
from headgate.testing import FakeProvider, VirtualClock, fake_provider
from headgate.testing.fake_provider import MAX_STEPS, FakeRequest, FakeResponse
from providers.trails import first_request

QUOTA = "/api/monitor/usage/quota/limit"
CHAT = "/api/coding/paas/v4/chat/completions"
KEY = "any-key"


def ask(fake: FakeProvider, path: str, *, key: str = KEY, body: bytes = b"") -> tuple[int, dict]:  # type: ignore[type-arg]
    """Ask without a network; return the status and the decoded body."""
    method = "POST" if path == CHAT or path.startswith("/fake/") else "GET"
    request = FakeRequest(method, path, {"authorization": f"Bearer {key}"}, body)
    answer, _ = fake.respond(request)
    assert answer is not None
    return answer.status, msgspec.json.decode(answer.body)


def tokens_row(fake: FakeProvider, *, key: str = KEY) -> dict[str, float]:
    _, body = ask(fake, QUOTA, key=key)
    [row] = [row for row in body["data"]["limits"] if row["type"] == "TOKENS_LIMIT"]
    return dict(row)


def test_a_cold_key_has_no_reset_time_and_reading_it_changes_nothing() -> None:
    fake = FakeProvider(clock=VirtualClock())
    for _ in range(3):
        assert "nextResetTime" not in tokens_row(fake)


def test_a_request_opens_a_window_of_five_hours_that_no_further_request_moves() -> None:
    clock = VirtualClock()
    fake = FakeProvider(clock=clock)
    ends_at_ms = (clock() + 5 * 3_600) * 1_000
    for percent in (1, 2, 3):
        assert ask(fake, CHAT)[0] == 200
        row = tokens_row(fake)
        assert (row["nextResetTime"], row["percentage"]) == (ends_at_ms, percent)
        clock.advance(60)


def test_a_window_that_is_over_is_cold_and_the_next_one_is_fresh() -> None:
    clock = VirtualClock()
    fake = FakeProvider(clock=clock, percent=30)
    ask(fake, CHAT)
    clock.advance(5 * 3_600)
    assert tokens_row(fake) == {"type": "TOKENS_LIMIT", "unit": 3, "number": 5, "percentage": 0}
    ask(fake, CHAT)
    assert tokens_row(fake)["percentage"] == 31
    assert fake.window(KEY).opened == 2


def test_the_monthly_row_has_a_reset_of_its_own() -> None:
    clock = VirtualClock()
    fake = FakeProvider(clock=clock)
    before = ask(fake, QUOTA)[1]["data"]["limits"][0]
    ask(fake, CHAT)
    assert ask(fake, QUOTA)[1]["data"]["limits"][0] == before
    assert before["type"] == "TIME_LIMIT"
    assert before["nextResetTime"] > (clock() + 86_400) * 1_000


def test_a_window_is_used_up_and_says_until_when() -> None:
    fake = FakeProvider(clock=VirtualClock(), percent=98)
    assert [ask(fake, CHAT)[0] for _ in range(3)] == [200, 200, 429]
    _, body = ask(fake, CHAT)
    assert body["error"]["code"] == "1316"
    # 2026-01-01T05:00Z, as it is written in Beijing.
    assert body["error"]["message"].endswith("reset at 2026-01-01 13:00:00")
    assert tokens_row(fake)["percentage"] == 100


def test_every_key_has_its_own_window_and_a_wrong_one_is_refused() -> None:
    fake = FakeProvider(clock=VirtualClock())
    ask(fake, CHAT, key="one")
    assert "nextResetTime" in tokens_row(fake, key="one")
    assert "nextResetTime" not in tokens_row(fake, key="two")
    strict = FakeProvider(key="right", clock=VirtualClock())
    assert ask(strict, QUOTA, key="right")[0] == 200
    for wrong in ("wrong", ""):
        assert ask(strict, QUOTA, key=wrong)[0] == 401
        assert ask(strict, CHAT, key=wrong)[0] == 401


def test_keys_and_steps_are_bounded() -> None:
    fake = FakeProvider(clock=VirtualClock())
    statuses = [ask(fake, QUOTA, key=f"k{n}")[0] for n in range(fake_provider.MAX_KEYS + 1)]
    assert (statuses[-2], statuses[-1]) == (200, 401)
    assert len(fake.seen) == fake_provider.MAX_SEEN
    fake.next("500", times=MAX_STEPS)
    with pytest.raises(InvalidSettingError, match="times"):
        fake.next("500")


def test_steps_are_taken_in_their_order_by_the_requests_that_they_are_for() -> None:
    fake = FakeProvider(clock=VirtualClock())
    fake.next("503", on="request")
    fake.next("429", on="quota", times=2)
    fake.next("500")
    assert [ask(fake, QUOTA)[0] for _ in range(4)] == [429, 429, 500, 200]
    assert [ask(fake, CHAT)[0] for _ in range(2)] == [503, 200]


def test_control_routes_script_the_next_answers_and_refuse_nonsense() -> None:
    fake = FakeProvider(clock=VirtualClock())
    status, state = ask(fake, "/fake/next", body=b'{"kind": "429", "retryAfter": 9, "times": 2}')
    assert (status, len(state["next"])) == (200, 2)
    assert ask(fake, QUOTA)[0] == 429
    for body in (b'{"kind": "nonsense"}', b'{"kind": "429", "times": 100000}', b"{", b"\xff"):
        assert ask(fake, "/fake/next", body=body)[0] == 400
    assert ask(fake, "/fake/other")[0] == 404
    status, state = ask(fake, "/fake/window", body=b'{"percent": 100}')
    assert state["windows"][0]["percent"] == 100
    _, state = ask(fake, "/fake/window", body=b'{"open": false}')
    assert state["windows"][0]["resetsAt"] is None


async def test_it_serves_on_the_loopback_interface_and_ends_with_requests_under_way() -> None:
    fake = FakeProvider()
    fake.next("timeout")
    async with httpx2.AsyncClient() as client:
        async with fake:
            assert fake.address == f"http://127.0.0.1:{fake.port}"
            headers = {"authorization": f"Bearer {KEY}"}
            waiting = asyncio.create_task(client.get(f"{fake.address}{QUOTA}", headers=headers))
            await first_request(fake)
            found = await client.get(f"{fake.address}{QUOTA}", headers=headers)
            assert found.json()["success"] is True
        with pytest.raises(httpx2.RequestError):
            await waiting
        with pytest.raises(httpx2.ConnectError):
            await client.get(f"{fake.address}/fake/state")


async def test_a_port_that_is_taken_is_said_in_one_line() -> None:
    async with FakeProvider() as first:
        with pytest.raises(InvalidSettingError, match="in use"):
            await FakeProvider(port=first.port).start()


def test_the_command_and_the_class_have_the_same_limits() -> None:
    assert fake_provider.WINDOW_MINUTES == WINDOW_MINUTES
    assert fake_provider.MAX_LATENCY_MS == MAX_LATENCY_MS


def test_the_settings_that_it_prints_are_a_slot() -> None:
    [slot] = tomllib.loads(slot_settings("http://127.0.0.1:7430"))["slots"]
    assert slot["base_url"] == "http://127.0.0.1:7430"
    assert slot["key_env"] == "FAKE_KEY"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_says_where_it_serves_and_ends_cleanly(
    number: signal.Signals, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "headgate", "fake-provider", "--port", "0", "--json"]
    with subprocess.Popen(
        [*command, "--warm", "--percent", "40"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = msgspec.json.decode(process.stdout.readline())["address"]
        found = httpx2.get(f"{address}{QUOTA}", headers={"authorization": "Bearer k"}).json()
        process.send_signal(number)
        assert process.wait(20) == 0
        assert process.stderr.read() == b""
    assert found["data"]["limits"][1]["percentage"] == 40


@pytest.mark.parametrize(
    "option", ["--window-minutes=nan", "--percent=nan", "--percent=101", "--window-minutes=0"]
)
def test_the_command_refuses_what_is_no_window(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fake-provider", "--port", "0", option]) == 2
    assert option.partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "events"),
    [("/v1/chat/completions", 4), ("/v1/messages", 6)],
    ids=["openai", "anthropic"],
)
async def test_a_request_for_a_stream_gets_one(path: str, events: int) -> None:
    async with FakeProvider() as provider, httpx2.AsyncClient() as client:
        answer = await client.post(
            f"{provider.address}{path}", json={"stream": True}, headers={"x-api-key": "any"}
        )
        assert answer.headers["content-type"] == "text/event-stream"
        lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        assert len(lines) == events
        assert "Hi" in answer.text


def post(fake: FakeProvider, path: str, body: bytes = b"{}", *, key: str = KEY) -> FakeResponse:
    answer, _ = fake.respond(FakeRequest("POST", path, {"x-api-key": key}, body))
    assert answer is not None
    return answer


def test_it_answers_responses_whole_and_as_a_stream_with_the_same_usage() -> None:
    fake = FakeProvider(clock=VirtualClock())
    whole = post(fake, "/v1/responses")
    body = msgspec.json.decode(whole.body)
    assert (whole.status, body["status"]) == (200, "completed")
    assert body["output"][0]["content"][0]["text"] == "Hi"
    assert "x-ratelimit-remaining-tokens" in whole.headers
    stream = post(fake, "/v1/responses", b'{"stream": true}')
    lines = stream.body.decode().splitlines()
    events = [msgspec.json.decode(line[6:]) for line in lines if line.startswith("data: ")]
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")
    assert events[-1]["response"] == body
    assert reported_in(stream.body, stream.headers)[0] == reported_in(whole.body, whole.headers)[0]
    fake.window(KEY).set_percent(100)
    assert post(fake, "/v1/responses").status == 429


def test_to_count_tokens_opens_no_window() -> None:
    fake = FakeProvider(clock=VirtualClock(), key=KEY)
    counted = post(fake, "/v1/messages/count_tokens")
    assert (counted.status, msgspec.json.decode(counted.body)) == (200, {"input_tokens": 8})
    assert fake.window(KEY).opened == 0
    assert post(fake, "/v1/messages/count_tokens", key="another").status != 200
