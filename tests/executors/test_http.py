"""Tasks as HTTP requests, against an endpoint that really listens."""

from __future__ import annotations

import asyncio
import gzip
import shutil
import ssl
import subprocess
from email.utils import formatdate
from pathlib import Path

import msgspec
import pytest

from executors.endpoint import Seen, free_port, reply, reply_json, running_endpoint
from executors.orders import CHAT, failure_of, opened, order, pause_of, result_of
from headgate.core.lifecycle import NOTHING_USED, UNKNOWN_USAGE, Limited, Usage
from headgate.errors import InvalidSettingError
from headgate.executors.build import build_executor
from headgate.executors.targets import HttpTarget, Resolver
from headgate.providers.http_headers import retry_after_seconds
from headgate.testing import VirtualClock

NOW = VirtualClock()()


async def test_an_action_is_sent_with_its_parameters_to_the_endpoint_of_its_tab() -> None:
    async with running_endpoint(reply_json({"success": True})) as endpoint:
        target = HttpTarget(url=f"{endpoint.url}/tabs/{{tabId}}/action")
        async with opened(target) as executor:
            outcome = await executor.execute(
                order("type", tab_id="tab1", ref="e5", selector="#q", params={"text": "hi", "n": 1})
            )
    assert result_of(outcome) == {"success": True}
    [seen] = endpoint.seen
    assert (seen.method, seen.path) == ("POST", "/tabs/tab1/action")
    assert seen.json == {
        "kind": "type", "ref": "e5", "tabId": "tab1", "selector": "#q", "text": "hi", "n": 1,
    }  # fmt: skip
    assert seen.headers["x-agent-id"] == "coder"
    assert seen.headers["x-headgate-task-id"] == "t-1"
    assert seen.headers["x-headgate-attempt"] == "2"
    assert seen.headers["idempotency-key"] == "t-1"
    assert seen.headers["content-type"] == "application/json"


async def test_params_take_the_place_of_no_field_of_the_task() -> None:
    params = {"kind": "evil", "ref": "evil", "tabId": "evil", "selector": "evil", "x": 1}
    async with running_endpoint() as endpoint, opened(HttpTarget(url=endpoint.url)) as executor:
        await executor.execute(order("click", params=params))
        await executor.execute(order("click", ref="e1", params=params))
    assert [seen.json for seen in endpoint.seen] == [
        {"kind": "click", "x": 1},
        {"kind": "click", "ref": "e1", "x": 1},
    ]


async def test_the_input_can_be_the_whole_body() -> None:
    async with (
        running_endpoint() as endpoint,
        opened(HttpTarget(url=endpoint.url, body="input", method="PUT")) as executor,
    ):
        await executor.execute(order(given={"model": "m", "messages": []}))
        failure = failure_of(await executor.execute(order()))
    assert [(seen.method, seen.json) for seen in endpoint.seen] == [
        ("PUT", {"model": "m", "messages": []})
    ]
    assert failure.error == "input is required for task execution"
    assert failure.usage == NOTHING_USED


async def test_a_tab_is_required_where_the_url_names_one() -> None:
    async with opened(HttpTarget(url="http://127.0.0.1:1/tabs/{tabId}/action")) as executor:
        failure = failure_of(await executor.execute(order()))
    assert failure.error == "tabId is required for task execution"
    assert not failure.is_transient
    assert failure.usage == NOTHING_USED


@pytest.mark.parametrize("params", [[1], "x", 5])
async def test_params_that_are_no_object_fail_the_task(params: object) -> None:
    async with opened(HttpTarget(url="http://127.0.0.1:1/")) as executor:
        failure = failure_of(await executor.execute(order(params=params)))
    assert failure.error == "params must be a JSON object"


BODIES: list[tuple[bytes, object]] = [
    (b'{"a": [1, 2]}', {"a": [1, 2]}),
    (b"[]", []),
    (b" 12 ", 12),
    (b"", None),
    (b"plain words", {"text": "plain words"}),
    (b'{"a": ', {"text": '{"a": '}),
    (b'"\xff"', {"text": '"\ufffd"'}),
    (b"[" * 3_000, {"text": "[" * 3_000}),
]


@pytest.mark.parametrize(("body", "result"), BODIES)
async def test_a_body_is_kept_as_json_or_wrapped_as_text(body: bytes, result: object) -> None:
    async with (
        running_endpoint(reply(200, body)) as endpoint,
        opened(HttpTarget(url=endpoint.url)) as executor,
    ):
        assert result_of(await executor.execute(order())) == result


async def test_json_is_kept_byte_by_byte() -> None:
    body = b'{"n": 1.00, "big": 123456789012345678901234567890, "e": "\\u00e9"}'
    async with (
        running_endpoint(reply(200, body)) as endpoint,
        opened(HttpTarget(url=endpoint.url)) as executor,
    ):
        outcome = await executor.execute(order())
    assert result_of(outcome)["n"] == 1.0
    assert bytes(outcome.result) == body  # type: ignore[union-attr, arg-type]


async def test_the_usage_in_an_answer_is_priced() -> None:
    async with (
        running_endpoint(reply_json(CHAT)) as endpoint,
        opened(HttpTarget(url=endpoint.url)) as executor,
    ):
        outcome = await executor.execute(order())
    assert result_of(outcome) == CHAT
    usage = Usage(tokens=15, micro_usd=20, model="mine", is_priced=True)
    assert outcome.usage == usage  # type: ignore[union-attr]


STATUSES: list[tuple[int, bool, Usage]] = [
    (302, False, UNKNOWN_USAGE),
    (400, False, NOTHING_USED),
    (401, False, NOTHING_USED),
    (404, False, NOTHING_USED),
    (408, True, UNKNOWN_USAGE),
    (409, False, NOTHING_USED),
    (422, False, NOTHING_USED),
    (425, True, NOTHING_USED),
    (500, True, UNKNOWN_USAGE),
    (502, True, UNKNOWN_USAGE),
    (503, True, UNKNOWN_USAGE),
    (504, True, UNKNOWN_USAGE),
    (524, True, UNKNOWN_USAGE),
]
STATUSES_OF_MODELS: list[tuple[int, bool, Usage]] = [
    (302, False, UNKNOWN_USAGE),
    (400, False, NOTHING_USED),
    (401, False, NOTHING_USED),
    (408, True, UNKNOWN_USAGE),
    (500, True, NOTHING_USED),
    (502, True, NOTHING_USED),
    (503, True, NOTHING_USED),
    (504, True, UNKNOWN_USAGE),
    (524, True, UNKNOWN_USAGE),
]
MODEL_PATHS = (
    "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/messages",
    "/openai/deployments/gpt/chat/completions?api-version=1",
)  # fmt: skip


@pytest.mark.parametrize(("status", "is_transient", "usage"), STATUSES)
async def test_a_refusal_says_its_status_and_its_body(
    status: int, is_transient: bool, usage: Usage
) -> None:
    async with (
        running_endpoint(reply(status, b"no\nway ", Location="http://127.0.0.1:1/")) as endpoint,
        opened(HttpTarget(url=endpoint.url)) as executor,
    ):
        failure = failure_of(await executor.execute(order()))
    assert failure.error == f"executor returned {status}: no way"
    assert (failure.is_transient, failure.usage) == (is_transient, usage)


@pytest.mark.parametrize("path", MODEL_PATHS)
@pytest.mark.parametrize(("status", "is_transient", "usage"), STATUSES_OF_MODELS)
async def test_a_model_api_that_answers_before_any_output_charged_nothing(
    status: int, is_transient: bool, usage: Usage, path: str
) -> None:
    async with (
        running_endpoint(reply(status, b"overloaded")) as endpoint,
        opened(HttpTarget(url=endpoint.url + path)) as executor,
    ):
        failure = failure_of(await executor.execute(order()))
    assert (failure.is_transient, failure.usage) == (is_transient, usage)
    assert failure.is_cut == (status in {408, 504, 524})


async def test_an_agent_behind_the_path_of_a_model_api_books_its_failures_if_that_is_set() -> None:
    async with running_endpoint(reply(500, b"broken")) as endpoint:
        target = HttpTarget(url=f"{endpoint.url}/v1/chat/completions", book_failures=True)
        async with opened(target) as executor:
            failure = failure_of(await executor.execute(order()))
    assert failure.usage == UNKNOWN_USAGE


@pytest.mark.parametrize("path", ["/run", "/v1/chat/completions"])
async def test_a_failure_that_tells_its_usage_costs_that(path: str) -> None:
    async with (
        running_endpoint(reply_json(CHAT, 500)) as endpoint,
        opened(HttpTarget(url=endpoint.url + path)) as executor,
    ):
        failure = failure_of(await executor.execute(order()))
    assert failure.usage == Usage(tokens=15, micro_usd=20, model="mine", is_priced=True)


async def test_a_redirect_is_not_followed() -> None:
    async with running_endpoint() as other:
        answer = reply(307, b"", Location=other.url)
        async with (
            running_endpoint(answer) as endpoint,
            opened(HttpTarget(url=endpoint.url)) as executor,
        ):
            failure = failure_of(await executor.execute(order()))
    assert failure.error == "executor returned 307: (no body)"
    assert other.seen == []


async def test_the_body_of_a_refusal_is_cut_and_not_read_to_its_end() -> None:
    async def endless(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"1000\r\n" + b"x" * 4_096 + b"\r\n")
            await writer.drain()

    async with (
        running_endpoint(endless) as endpoint,
        opened(HttpTarget(url=endpoint.url)) as executor,
    ):
        failure = failure_of(await executor.execute(order()))
    assert len(failure.error) < 600
    assert failure.error.endswith("x…")


LIMITS: list[tuple[int, dict[str, str], float | None]] = [
    (429, {}, None),
    (429, {"Retry_After": "7"}, 7.0),
    (429, {"Retry_After": "0.5"}, 0.5),
    (429, {"Retry_After": "-3"}, 0.0),
    (429, {"Retry_After": "soon"}, None),
    (429, {"Retry_After": "nan"}, None),
    (429, {"Retry_After": formatdate(NOW + 90, usegmt=True)}, 90.0),
    (429, {"Retry_After": formatdate(NOW - 90, usegmt=True)}, 0.0),
    (429, {"retry_after_ms": "1500", "Retry_After": "9"}, 1.5),
    (503, {"Retry_After": "3"}, 3.0),
    (529, {"Retry_After": "3"}, 3.0),
    (529, {}, None),
]


@pytest.mark.parametrize(("status", "headers", "seconds"), LIMITS)
async def test_a_limit_is_a_pause_for_as_long_as_it_says(
    status: int, headers: dict[str, str], seconds: float | None
) -> None:
    async with (
        running_endpoint(reply(status, b"slow down", **headers)) as endpoint,
        opened(HttpTarget(url=endpoint.url)) as executor,
    ):
        pause = pause_of(await executor.execute(order()))
    assert pause == Limited(
        retry_after_seconds=seconds,
        error=f"executor returned {status}: slow down",
        is_overload=status != 429,
        why=f"executor returned {status}",
    )


@pytest.mark.parametrize("text", ["", "Wed, 32 Jan 2026 00:00:00 GMT", "9" * 400, "1e400", "\x00"])
def test_a_pause_that_cannot_be_read_is_none(text: str) -> None:
    assert retry_after_seconds({"retry-after": text}, now=0.0) is None


async def test_an_endpoint_that_is_not_there_charged_nothing() -> None:
    async with opened(HttpTarget(url=f"http://127.0.0.1:{free_port()}/")) as executor:
        failure = failure_of(await executor.execute(order()))
    assert failure.error.startswith("executor cannot be reached: ")
    assert failure.is_transient
    assert failure.usage == NOTHING_USED


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Len",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n123",
        b"no http at all\r\n\r\n",
    ],
)
async def test_what_breaks_after_the_request_was_sent_has_unknown_usage(answer: bytes) -> None:
    async def broken(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async with (
        running_endpoint(broken) as endpoint,
        opened(HttpTarget(url=endpoint.url)) as executor,
    ):
        failure = failure_of(await executor.execute(order()))
    assert failure.error.startswith("executor did not answer: ")
    assert failure.is_transient
    assert failure.is_cut
    assert failure.usage == UNKNOWN_USAGE


UNREADABLE = [
    ("gzip", b"abc", "its gzip data is damaged: incorrect header check", True),
    ("gzip", gzip.compress(b"{}", mtime=0)[:-1], "its gzip data stops in the middle", True),
    ("gzip", gzip.compress(b"") * 1_025, "its gzip data has more than 1024 members", False),
    ("gzip, gzip", b"abc", "it has more than one Content-Encoding (gzip, gzip)", False),
    ("br", b"abc", "its Content-Encoding is br; requests accept gzip, deflate", False),
]


@pytest.mark.parametrize(
    ("coding", "body", "error", "is_transient"), UNREADABLE, ids=[one[2] for one in UNREADABLE]
)
async def test_an_answer_that_cannot_be_read_is_booked_as_held(
    coding: str, body: bytes, error: str, is_transient: bool
) -> None:
    async with (
        running_endpoint(reply(200, body, Content_Encoding=coding)) as endpoint,
        opened(HttpTarget(url=endpoint.url)) as executor,
    ):
        failure = failure_of(await executor.execute(order()))
    assert failure.error == f"executor sent an answer that cannot be read: {error}"
    assert failure.is_transient is is_transient
    assert failure.is_cut
    assert failure.usage == UNKNOWN_USAGE


async def test_a_bomb_fails_at_the_cap_of_the_result() -> None:
    bomb = gzip.compress(bytes(16 << 20), mtime=0)
    async with (
        running_endpoint(reply(200, bomb, Content_Encoding="gzip")) as endpoint,
        opened(HttpTarget(url=endpoint.url)) as executor,
    ):
        failure = failure_of(await executor.execute(order()))
    assert failure.error == "result is larger than 1048576 bytes"


@pytest.mark.parametrize("body", [b"x" * 65, b"\x00" * 20, gzip.compress(b"x" * 1_000, mtime=0)])
async def test_a_result_beyond_the_cap_fails(body: bytes) -> None:
    headers = {"Content_Encoding": "gzip"} if body.startswith(b"\x1f\x8b") else {}
    async with (
        running_endpoint(reply(200, body, **headers)) as endpoint,
        opened(HttpTarget(url=endpoint.url, max_result_bytes=64)) as executor,
    ):
        failure = failure_of(await executor.execute(order()))
    assert failure.error == "result is larger than 64 bytes"
    assert not failure.is_transient
    assert failure.usage == UNKNOWN_USAGE


async def test_a_result_without_end_is_given_up_at_the_cap() -> None:
    async def endless(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"1000\r\n" + b"x" * 4_096 + b"\r\n")
            await writer.drain()

    async with (
        running_endpoint(endless) as endpoint,
        opened(HttpTarget(url=endpoint.url, max_result_bytes=10_000)) as executor,
    ):
        failure = failure_of(await executor.execute(order()))
    assert failure.error == "result is larger than 10000 bytes"


async def test_headers_are_filled_from_the_environment() -> None:
    headers = {"Authorization": "Bearer {env.TOKEN}", "content-type": "application/x-json"}
    async with running_endpoint() as endpoint:
        target = HttpTarget(url=f"{endpoint.url}/{{env.PART}}", headers=headers)
        environ = {"TOKEN": "s3cr3t", "PART": "a/b"}
        async with opened(target, environ=environ) as executor:
            await executor.execute(order())
    [seen] = endpoint.seen
    assert seen.path == "/a/b"
    assert seen.headers["authorization"] == "Bearer s3cr3t"
    assert seen.headers["content-type"] == "application/x-json"


async def test_a_secret_that_the_endpoint_repeats_is_not_shown() -> None:
    headers = {"Authorization": "Bearer {env.TOKEN}"}
    answer = reply(401, b"bad key s3cr3t-and-more")
    async with (
        running_endpoint(answer) as endpoint,
        opened(
            HttpTarget(url=endpoint.url, headers=headers),
            environ={"TOKEN": "s3cr3t-and-more"},
        ) as executor,
    ):
        failure = failure_of(await executor.execute(order()))
        assert "s3cr3t" not in repr(executor) + repr(vars(executor)["_environment"])
    assert failure.error == "executor returned 401: bad key {env.TOKEN}"


async def test_a_key_that_was_written_into_the_file_is_not_shown_either() -> None:
    headers = {"X-Api-Key": "sk-1234", "Authorization": "Bearer {env.TOKEN}", "Accept": "text"}
    async with (
        running_endpoint(reply(403, b"sk-1234, s3cr3t: no text")) as endpoint,
        opened(HttpTarget(url=endpoint.url, headers=headers), environ={"TOKEN": "s3cr3t"}) as it,
    ):
        failure = failure_of(await it.execute(order()))
    assert failure.error == "executor returned 403: {X-Api-Key}, {env.TOKEN}: no text"


@pytest.mark.parametrize("agent_id", ["two words", "agänt", "line\nbreak", " edge ", "日本"])
async def test_any_agent_can_be_named_in_a_header(agent_id: str) -> None:
    async with running_endpoint() as endpoint, opened(HttpTarget(url=endpoint.url)) as executor:
        odd = msgspec.structs.replace(order(), agent_id=agent_id)
        assert result_of(await executor.execute(odd)) == {}
    sent = endpoint.seen[0].headers["x-agent-id"]
    assert sent == agent_id or "%" in sent


async def test_a_cookie_of_one_task_is_not_sent_with_the_next() -> None:
    async with (
        running_endpoint(reply(200, b"1", Set_Cookie="who=me")) as endpoint,
        opened(HttpTarget(url=endpoint.url)) as executor,
    ):
        await executor.execute(order())
        await executor.execute(order())
    assert [seen.headers.get("cookie") for seen in endpoint.seen] == [None, None]
    assert endpoint.connections == 1


async def test_connections_are_bounded() -> None:
    open_now = asyncio.Semaphore(2)

    async def counted(_: Seen, writer: asyncio.StreamWriter) -> None:
        assert not open_now.locked()
        async with open_now:
            await asyncio.sleep(0)
            writer.write(reply(200, b"1"))

    async with (
        running_endpoint(counted) as endpoint,
        opened(HttpTarget(url=endpoint.url, max_connections=2)) as executor,
    ):
        outcomes = await asyncio.gather(*(executor.execute(order()) for _ in range(10)))
    assert [result_of(outcome) for outcome in outcomes] == [1] * 10
    assert endpoint.connections <= 2


async def test_a_cancelled_request_ends_and_its_connection_with_it() -> None:
    arrived = asyncio.Event()

    async def silent(_: Seen, writer: asyncio.StreamWriter) -> None:
        arrived.set()

    async with (
        running_endpoint(silent) as endpoint,
        opened(HttpTarget(url=endpoint.url)) as executor,
    ):
        running = asyncio.ensure_future(executor.execute(order()))
        await arrived.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await endpoint.left.wait()


async def test_cancelled_requests_give_their_connections_back() -> None:
    arrived = asyncio.Event()

    async def silent_at_first(_: Seen, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        if len(endpoint.seen) > 20:
            writer.write(reply(200, b"1"))

    async with (
        running_endpoint(silent_at_first) as endpoint,
        opened(HttpTarget(url=endpoint.url, max_connections=1)) as executor,
    ):
        for _ in range(20):
            arrived.clear()
            running = [asyncio.ensure_future(executor.execute(order())) for _ in range(2)]
            await arrived.wait()
            for task in running:
                task.cancel()
            await asyncio.wait(running)
        async with asyncio.timeout(30):
            assert result_of(await executor.execute(order())) == 1


TARGETS: list[tuple[HttpTarget, str, str]] = [
    (HttpTarget(url="ftp://h/"), "targets.it.url", "http"),
    (HttpTarget(url="http://user:pw@h/"), "targets.it.url", "credentials"),
    (HttpTarget(url="http://h:port/"), "targets.it.url", "host"),
    (HttpTarget(url="http:///x"), "targets.it.url", "host"),
    (HttpTarget(url="http://{tabId}/x"), "targets.it.url", "host"),
    (HttpTarget(url="http://h{tabId}/x"), "targets.it.url", "host"),
    (HttpTarget(url="{tabId}"), "targets.it.url", "host"),
    (HttpTarget(url="http://h/{tabid}"), "targets.it.url", "{tabid} is unknown"),
    (HttpTarget(url="http://h/{params.}"), "targets.it.url", "unknown"),
    (HttpTarget(url="http://h/{tabId"), "targets.it.url", "brace"),
    (HttpTarget(url="http://h/#x"), "targets.it.url", "fragment"),
    (HttpTarget(url="http://h/../x"), "targets.it.url", "steps"),
    (HttpTarget(url="http://h/{env.NOPE}"), "targets.it.url", "NOPE is not set"),
    (HttpTarget(url="{resolved}"), "targets.it.url", "resolver"),
    (HttpTarget(url="http://h/", resolver=Resolver(url="http://h")), "targets.it.url", "resolver"),
    (HttpTarget(url="{resolved}x", resolver=Resolver(url="http://h")), "targets.it.url", "/ or ?"),
    (HttpTarget(resolver=Resolver(url="{resolved}")), "targets.it.resolver.url", "part of it"),
    (
        HttpTarget(resolver=Resolver(url="http://h", pointer="a")),
        "targets.it.resolver.pointer",
        "6901",
    ),
    (
        HttpTarget(resolver=Resolver(url="http://h", pointer="/~2")),
        "targets.it.resolver.pointer",
        "6901",
    ),
    (
        HttpTarget(resolver=Resolver(url="http://h", headers={"K": "{env.NOPE}"})),
        "targets.it.resolver.headers.K",
        "NOPE is not set",
    ),
    (
        HttpTarget(url="http://h", headers={"Authorization": "Bearer {env.NOPE}"}),
        "targets.it.headers.Authorization",
        "NOPE is not set",
    ),
    (HttpTarget(url="http://h", headers={"A": "{evn.X}"}), "targets.it.headers.A", "evn.X"),
    (HttpTarget(url="http://h", headers={"A b": "c"}), "targets.it.headers.A b", "name"),
    (HttpTarget(url="http://h", headers={"A": "{env.NL}"}), "targets.it.headers.A", "ASCII"),
    (HttpTarget(url="http://h", headers={"X-Agent-ID": "a"}), "targets.it.headers.X-Agent-ID", ""),
    (HttpTarget(url="http://h", headers={"Host": "a"}), "targets.it.headers.Host", "leave it out"),
    *[
        (HttpTarget(url="http://h", headers={name: "x"}), f"targets.it.headers.{name}", "leave it")
        for name in ("Expect", "Keep-Alive", "Proxy-Connection", "TE", "Trailer", "Upgrade")
    ],
    (HttpTarget(url="http://h", proxy="{env.NL}"), "targets.it.proxy", "http"),
    (HttpTarget(url="http://h", proxy="socks5://h"), "targets.it.proxy", "http"),
]


@pytest.mark.parametrize(("target", "setting", "words"), TARGETS)
def test_a_wrong_target_is_refused_by_name_before_anything_runs(
    target: HttpTarget, setting: str, words: str
) -> None:
    environ = {"NL": "s3cr3t\nvalue"}
    with pytest.raises(InvalidSettingError) as raised:
        build_executor("it", target, environ=environ, clock=VirtualClock())
    assert raised.value.field == setting
    assert words in raised.value.problem
    assert "s3cr3t" not in str(raised.value)


@pytest.fixture
def own_certificate(tmp_path: Path) -> ssl.SSLContext:
    """Make a certificate that nobody vouches for."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *names]
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return context


async def test_a_certificate_is_verified(own_certificate: ssl.SSLContext) -> None:
    async with running_endpoint(context=own_certificate) as endpoint:
        url = endpoint.url.replace("http:", "https:")
        async with opened(HttpTarget(url=url)) as executor:
            failure = failure_of(await executor.execute(order()))
    assert failure.error.startswith("executor cannot be reached: ")
    assert "certificate" in failure.error.lower()
    assert failure.usage == NOTHING_USED
    assert endpoint.seen == []


async def test_requests_go_through_the_proxy_that_is_written() -> None:
    async with running_endpoint(reply_json("by proxy")) as proxy:
        target = HttpTarget(url="http://service.test/x", proxy="{env.PROXY}")
        async with opened(target, environ={"PROXY": proxy.url}) as executor:
            assert result_of(await executor.execute(order())) == "by proxy"
    assert [seen.path for seen in proxy.seen] == ["http://service.test/x"]


async def test_an_executor_that_is_not_open_says_so() -> None:
    target = HttpTarget(url="http://127.0.0.1:1/")
    executor = build_executor("it", target, environ={}, clock=VirtualClock())
    with pytest.raises(RuntimeError, match="open"):
        await executor.execute(order())
    await executor.close()
