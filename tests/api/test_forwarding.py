"""A node that does not know asks the one that does: once, within bounds; a failure is told."""

from __future__ import annotations

import asyncio

import pytest

from api.asgi_client import Client, Response, answer_of
from executors.endpoint import Answer, Seen, free_port, reply, reply_json, running_endpoint
from headgate.api import forwarding
from headgate.api.callers import Caller
from headgate.api.http.request import Request
from headgate.errors import NotDispatchingError

WHY = "/tasks/tsk_x/why"


async def asked(address: str, **headers: str) -> Response:
    """Ask a node that takes another one for the dispatcher."""
    client = Client()
    client.engine.failure = NotDispatchingError(address)
    return await answer_of(client.app, "GET", WHY, headers=headers)


def check_refusal(answer: Response, address: str) -> None:
    assert (answer.status, answer.json["code"]) == (503, "not_dispatching")
    assert answer.json["details"] == {"address": address}
    assert answer.headers["retry-after"] == "1"


async def test_the_answer_of_the_dispatcher_is_passed_on() -> None:
    async with running_endpoint(reply_json({"reasons": [1]})) as endpoint:
        answer = await asked(endpoint.url, x_request_id="r-1")
        assert (answer.status, answer.json) == (200, {"reasons": [1]})
        assert answer.headers["x-request-id"] == "r-1"
        (seen,) = endpoint.seen
        assert (seen.method, seen.path) == ("GET", WHY)
        assert (seen.headers["x-headgate-forwarded"], seen.headers["x-request-id"]) == ("1", "r-1")


async def test_a_refusal_of_the_dispatcher_is_passed_on_with_its_wait() -> None:
    refusal = reply(503, b"{}", Content_Type="application/json", Retry_After="7")
    async with running_endpoint(refusal) as endpoint:
        answer = await asked(endpoint.url)
        assert (answer.status, answer.headers["retry-after"]) == (503, "7")


async def test_a_question_that_was_passed_on_is_not_passed_on_again() -> None:
    async with running_endpoint(reply_json({})) as endpoint:
        check_refusal(await asked(endpoint.url, x_headgate_forwarded="1"), endpoint.url)
        assert endpoint.seen == []


@pytest.mark.parametrize(
    "given",
    [
        reply(302, b"{}", Content_Type="application/json", Location="http://127.0.0.1/"),
        reply(200, b"<html>", Content_Type="text/html"),
        reply(200, b"{}"),
        reply_json("x" * forwarding.MAX_ANSWER_BYTES),
        b"not HTTP\r\n\r\n",
    ],
    ids=["redirect", "page", "untyped", "too large", "not HTTP"],
)
async def test_an_answer_that_is_not_one_of_a_node_is_not_passed_on(given: bytes) -> None:
    async with running_endpoint(given) as endpoint:
        check_refusal(await asked(endpoint.url), endpoint.url)
        assert len(endpoint.seen) == 1


@pytest.mark.parametrize("address", ["", "nonsense", "ftp://127.0.0.1", "http://[::1"])
async def test_a_node_without_a_good_address_is_not_asked(address: str) -> None:
    check_refusal(await asked(address), address)


async def test_a_node_that_is_gone_is_told_to_the_client() -> None:
    address = f"http://127.0.0.1:{free_port()}"
    check_refusal(await asked(address), address)


async def test_a_node_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(_: Seen, __: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(forwarding, "ANSWER_SECONDS", 0.1)
    silent: Answer = hang
    async with running_endpoint(silent) as endpoint:
        check_refusal(await asked(endpoint.url), endpoint.url)


async def test_no_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    async with running_endpoint(reply_json({})) as endpoint:
        assert (await asked(endpoint.url)).status == 200


async def test_whoever_asks_is_told_to_the_node_that_knows() -> None:
    async with running_endpoint(reply_json({"reasons": []})) as endpoint:
        await asked(endpoint.url, authorization="Basic YTpi")
        (seen,) = endpoint.seen
        assert seen.headers["authorization"] == "Basic YTpi"


@pytest.mark.parametrize("status", [401, 403, 421])
async def test_a_node_that_does_not_let_this_one_in_was_not_reached(status: int) -> None:
    refusal = reply(status, b"{}", Content_Type="application/problem+json")
    async with running_endpoint(refusal) as endpoint:
        check_refusal(await asked(endpoint.url), endpoint.url)


async def test_one_caller_leaves_the_others_their_questions() -> None:
    """The other node may take its time with one that asks too much."""
    free = asyncio.Event()

    async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
        if seen.headers["x-request-id"] == "greedy":
            await free.wait()
        writer.write(reply_json({}))

    def sent_by(name: str) -> Request:
        headers = [(b"x-request-id", name.encode())]
        request = Request({"type": "http", "method": "GET", "headers": headers}, asyncio.sleep)
        request.request_id = name.encode()
        request.caller = Caller(name=name, token_id=name)
        return request

    async with running_endpoint(answer) as endpoint:
        forwarder = forwarding.Forwarder()
        greedy = [
            asyncio.create_task(forwarder.ask(endpoint.url, WHY, sent_by("greedy")))
            for _ in range(3 * forwarding.MAX_CONNECTIONS)
        ]
        async with asyncio.timeout(10.0):
            while len(endpoint.seen) < forwarding.MAX_CONNECTIONS // 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await forwarder.ask(endpoint.url, WHY, sent_by("modest")) is not None
        free.set()
        assert all(await asyncio.gather(*greedy))
