"""Endpoints that are looked up: by a resolver that really listens, with a JSON pointer."""

from __future__ import annotations

import asyncio

import pytest

from executors.endpoint import Endpoint, Seen, free_port, reply, reply_json, running_endpoint
from executors.orders import failure_of, opened, order, result_of
from headgate.core.lifecycle import NOTHING_USED, Failed
from headgate.core.text import found_at
from headgate.executors.targets import HttpTarget, Resolver

PREFIX = "the executor's endpoint could not be resolved: "


def looked_up(book: Endpoint, url: str = "{resolved}", pointer: str = "/endpoint") -> HttpTarget:
    resolver = Resolver(url=f"{book.url}/tabs/{{tabId}}", pointer=pointer)
    return HttpTarget(url=url, resolver=resolver)


async def failure_with(answer: bytes, url: str = "{resolved}") -> Failed:
    async with (
        running_endpoint(answer) as book,
        opened(looked_up(book, url)) as executor,
    ):
        failure = failure_of(await executor.execute(order(tab_id="t")))
    assert failure.usage == NOTHING_USED
    return failure


PLACES = [
    ("{resolved}", "http://127.0.0.1:PORT/there?q=1", "/there?q=1"),
    ("{resolved}/tabs/{tabId}/action", "http://127.0.0.1:PORT", "/tabs/t%2F1/action"),
    ("{resolved}/tabs/{tabId}/action", "http://127.0.0.1:PORT/base/", "/base/tabs/t%2F1/action"),
    ("http://127.0.0.1:{resolved}/x", "PORT", "/x"),
    ("http://{resolved}:PORT/x", "127.0.0.1", "/x"),
    ("http://127.0.0.1:PORT/{resolved}/x", "a/../b", "/a%2F..%2Fb/x"),
]


@pytest.mark.parametrize(("url", "answer", "path"), PLACES)
async def test_what_was_found_is_the_url_or_a_part_of_it(url: str, answer: str, path: str) -> None:
    async with running_endpoint(reply_json("done")) as instance:
        port = str(instance.port)
        found = {"endpoint": answer.replace("PORT", port)}
        async with (
            running_endpoint(reply_json(found)) as book,
            opened(looked_up(book, url.replace("PORT", port))) as executor,
        ):
            outcome = await executor.execute(order(tab_id="t/1"))
    assert result_of(outcome) == "done"
    assert [(seen.method, seen.path) for seen in book.seen] == [("GET", "/tabs/t%2F1")]
    assert [seen.path for seen in instance.seen] == [path]


async def test_a_port_may_be_a_number_deep_in_the_answer() -> None:
    async with running_endpoint(reply_json(1)) as instance:
        found = {"a/b": [{"~": {"": instance.port}}]}
        async with running_endpoint(reply_json(found)) as book:
            target = looked_up(book, "http://127.0.0.1:{resolved}/", "/a~1b/0/~0/")
            async with opened(target) as executor:
                assert result_of(await executor.execute(order(tab_id="t"))) == 1


WRONG_ANSWERS: list[tuple[bytes, str, bool]] = [
    (reply(404, b"no such tab"), "the lookup returned 404: no such tab", False),
    (reply(302), "the lookup returned 302:", False),
    (reply(500, b"oops"), "the lookup returned 500: oops", True),
    (reply(429, b"busy"), "the lookup returned 429: busy", True),
    (reply_json({"other": 1}), "the answer has nothing at '/endpoint'", False),
    (reply_json([1]), "the answer has nothing at '/endpoint'", False),
    (reply_json("text"), "the answer has nothing at '/endpoint'", False),
    (reply_json({"endpoint": None}), "what is at '/endpoint' is neither a string nor", False),
    (reply_json({"endpoint": True}), "what is at '/endpoint' is neither a string nor", False),
    (reply_json({"endpoint": 1.5}), "what is at '/endpoint' is neither a string nor", False),
    (reply_json({"endpoint": ""}), "what is at '/endpoint' is neither a string nor", False),
    (reply_json({"endpoint": {}}), "what is at '/endpoint' is neither a string nor", False),
    (reply(200, b"<html>"), "the answer is not JSON", False),
    (reply(200, b"[" * 5_000), "the answer is not JSON", False),
    (reply(200, b" " * 70_000), "the answer is larger than 65536 bytes", False),
    (reply(200, b"{}", Content_Encoding="gzip, gzip"), "the answer cannot be read: it has", False),
    (reply(200, b"{}", Content_Encoding="gzip"), "the answer cannot be read: its gzip", True),
]


@pytest.mark.parametrize(("answer", "error", "is_transient"), WRONG_ANSWERS)
async def test_a_lookup_that_fails_is_an_error_of_the_task(
    answer: bytes, error: str, is_transient: bool
) -> None:
    failure = await failure_with(answer)
    assert failure.error.startswith(PREFIX + error)
    assert failure.is_transient == is_transient


UNUSABLE = [
    ("{resolved}", "file:///etc/passwd", "not an http or https URL"),
    ("{resolved}", "http://user@host/", "not an http or https URL"),
    ("{resolved}", "9867", "not an http or https URL"),
    ("{resolved}/x", "http://h?q=", "not an http or https URL"),
    ("{resolved}/x", "http://h/a/../b", "steps"),
    ("{resolved}", "http://127.0.0.1:99999", "not an http or https URL"),
    ("{resolved}", f"http://{'a' * 64}.test/", "not an http or https URL"),
    ("{resolved}", "http://a..test/", "not an http or https URL"),
    ("{resolved}", "http://a b/", "not an http or https URL"),
    ("{resolved}", "http://[::1", "not an http or https URL"),
    ("http://h:{resolved}/", "1@evil", "not a port"),
    ("http://h:{resolved}/", "1/../x", "not a port"),
    ("http://127.0.0.1:{resolved}/", "99999", "not a port"),
    ("http://127.0.0.1:{resolved}/", "0", "not a port"),
    ("http://127.0.0.1:{resolved}/", "name", "not a port"),
    ("http://{resolved}/", "evil:80", "not a host"),
    ("http://{resolved}/", "user@evil", "not a host"),
    ("http://{resolved}/", f"{'a' * 64}.test", "not a host"),
    ("http://{resolved}/", "a..b", "not a host"),
    ("http://{resolved}/", "999.999.999.999", "cannot be"),
]


@pytest.mark.parametrize(("url", "answer", "words"), UNUSABLE)
async def test_what_was_found_must_fit_its_place(url: str, answer: str, words: str) -> None:
    failure = await failure_with(reply_json({"endpoint": answer}), url)
    assert words in failure.error
    assert not failure.is_transient


async def test_a_resolver_that_is_not_there_may_be_asked_again() -> None:
    resolver = Resolver(url=f"http://127.0.0.1:{free_port()}/", pointer="/x")
    async with opened(HttpTarget(resolver=resolver)) as executor:
        failure = failure_of(await executor.execute(order()))
    assert failure.error.startswith(PREFIX)
    assert failure.is_transient
    assert failure.usage == NOTHING_USED


async def test_a_resolver_that_stays_silent_is_given_up() -> None:
    over = asyncio.Event()

    async def silent(_: Seen, writer: asyncio.StreamWriter) -> None:
        await over.wait()

    async with running_endpoint(silent) as book:
        resolver = Resolver(url=book.url, timeout_seconds=0.01)
        async with opened(HttpTarget(resolver=resolver)) as executor:
            failure = failure_of(await executor.execute(order()))
        over.set()
    assert failure.error == PREFIX + "no answer within 0.01 seconds"
    assert failure.is_transient


async def test_the_secret_of_a_lookup_is_not_shown() -> None:
    async with running_endpoint(reply(403, b"who is s3cr3t?")) as book:
        resolver = Resolver(url=book.url, headers={"Key": "{env.KEY}"})
        async with opened(HttpTarget(resolver=resolver), environ={"KEY": "s3cr3t"}) as executor:
            failure = failure_of(await executor.execute(order()))
    assert failure.error == PREFIX + "the lookup returned 403: who is {env.KEY}?"
    assert book.seen[0].headers["key"] == "s3cr3t"


async def test_a_lookup_needs_the_tab_that_it_names() -> None:
    resolver = Resolver(url="http://127.0.0.1:1/{tabId}")
    async with opened(HttpTarget(resolver=resolver)) as executor:
        failure = failure_of(await executor.execute(order()))
    assert failure.error == "tabId is required for task execution"


DOCUMENT = {"foo": ["bar", "baz"], "": 0, "a/b": 1, "m~n": 8, "1": "one"}
POINTERS: list[tuple[tuple[str, ...], object]] = [
    ((), DOCUMENT),
    (("foo",), ["bar", "baz"]),
    (("foo", "0"), "bar"),
    (("",), 0),
    (("a/b",), 1),
    (("m~n",), 8),
    (("1",), "one"),
]


@pytest.mark.parametrize(("path", "found"), POINTERS)
def test_a_pointer_finds_what_the_standard_says(path: tuple[str, ...], found: object) -> None:
    assert found_at(DOCUMENT, path) == found


@pytest.mark.parametrize(
    "path", [("no",), ("foo", "2"), ("foo", "-"), ("foo", "-1"), ("foo", "00"), ("foo", "0", "x")]
)
def test_a_pointer_to_nothing_finds_nothing(path: tuple[str, ...]) -> None:
    with pytest.raises(LookupError):
        found_at(DOCUMENT, path)
