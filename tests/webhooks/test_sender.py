"""The sender against real receivers: what is sent, what is not, and what is reported."""

from __future__ import annotations

import asyncio
import gzip
import ssl
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from standardwebhooks.webhooks import Webhook

from executors.endpoint import Answer, Endpoint, Seen, reply, running_endpoint
from headgate.storage.deliveries import MAX_ANSWER_CHARACTERS, Message, SendReport, new_secret
from headgate.webhooks.guard import UrlGuard, parse_allow_list
from headgate.webhooks.sender import WebhookSender
from webhooks.battery import BY_NAME, WRITTEN_OUT

HERE = UrlGuard(parse_allow_list(("127.0.0.0/8", "hooks.test")))
BODY = '{"taskId":"tsk_1","note":"Grüße"}'.encode()
SECRET = new_secret()


def to(url: str, *, event: str = "task.completed") -> Message:
    return Message(id="msg_1", event=event, url=url, task_id="tsk_1")


async def send(
    url: str, *, secrets: Sequence[str] = (SECRET,), sender: WebhookSender | None = None
) -> SendReport:
    sender = sender or WebhookSender(HERE, timeout_seconds=5.0)
    try:
        return await sender.send(to(url), BODY, secrets, now=time.time())
    finally:
        await sender.close()


def answered(answer: Answer) -> tuple[SendReport, list[Seen]]:
    async def scenario() -> tuple[SendReport, list[Seen]]:
        async with running_endpoint(answer) as endpoint:
            return await send(f"{endpoint.url}/hook?key=1"), endpoint.seen

    return asyncio.run(scenario())


def test_a_message_arrives_with_its_headers_and_its_body() -> None:
    report, (seen,) = answered(reply(204))
    assert report == SendReport(status=204, has_arrived=True)
    assert (seen.method, seen.path, seen.body) == ("POST", "/hook?key=1", BODY)
    assert seen.headers["x-headgate-event"] == "task.completed"
    assert seen.headers["x-headgate-task-id"] == "tsk_1"
    assert seen.headers["webhook-id"] == "msg_1"
    assert seen.headers["user-agent"].startswith("headgate")
    assert seen.headers["content-type"] == "application/json"


def test_receivers_verify_it_with_any_secret_that_signs() -> None:
    old, new = new_secret(), new_secret()

    async def scenario() -> Seen:
        async with running_endpoint() as endpoint:
            await send(endpoint.url, secrets=(new, old))
            return endpoint.seen[0]

    seen = asyncio.run(scenario())
    for secret in (old, new):
        Webhook(secret).verify(seen.body, seen.headers)
    with pytest.raises(Exception, match="No matching signature"):
        Webhook(new_secret()).verify(seen.body, seen.headers)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_a_failure_and_is_not_followed(status: int) -> None:
    async def scenario() -> tuple[SendReport, int, int]:
        async with running_endpoint() as other, running_endpoint() as endpoint:
            endpoint.answer = reply(status, Location=f"{other.url}/latest/meta-data")
            return await send(endpoint.url), len(endpoint.seen), len(other.seen)

    report, asked, followed = asyncio.run(scenario())
    assert not report.has_arrived
    assert not report.is_final
    assert report.error == f"answered {status}; redirects are not followed"
    assert (asked, followed) == (1, 0)


@pytest.mark.parametrize(
    ("answer", "status", "is_final", "asked_seconds"),
    [
        (reply(500, b"no\x00\nluck"), 500, False, None),
        (reply(404), 404, False, None),
        (reply(410), 410, True, None),
        (reply(429, Retry_After="7"), 429, False, 7.0),
        (reply(503, Retry_After="120"), 503, False, 120.0),
        (reply(503, Retry_After="soon"), 503, False, None),
        (reply(503, Retry_After="-1"), 503, False, None),
        (reply(500, Retry_After="7"), 500, False, None),
        (reply(503, Retry_After="Sun, 06 Nov 1994 08:49:37 GMT"), 503, False, 0.0),
    ],
)
def test_a_refusal_says_whether_and_when_to_come_again(
    answer: bytes, status: int, is_final: bool, asked_seconds: float | None
) -> None:
    report, _ = answered(answer)
    assert (report.status, report.is_final, report.asked_seconds) == (
        status,
        is_final,
        asked_seconds,
    )
    assert report.error is not None
    assert report.error.isprintable()


def test_no_more_is_kept_of_an_answer_than_explains_it() -> None:
    report, _ = answered(reply(500, b"x" * 1_000_000))
    assert report.error is not None
    assert len(report.error) <= 300


@pytest.mark.parametrize("status", [200, 302, 410, 500])
def test_the_beginning_of_an_answer_is_reported_as_one_printable_line(status: int) -> None:
    report, _ = answered(reply(status, b"  no\x00\x1b[2J\nluck \xff" + b"x" * 1_000_000))
    assert report.has_arrived is (status == 200)
    assert report.answer is not None
    assert report.answer.startswith("no [2J luck \ufffdxx")
    assert report.answer.endswith("x…")
    assert len(report.answer) == MAX_ANSWER_CHARACTERS


CODED = [
    ("gzip", gzip.compress(b"no luck"), "no luck"),
    ("gzip", gzip.compress(b"A" * (64 << 20)), "AAAA"),
    ("gzip", b"no luck", None),
    ("gzip, gzip", b"no luck", None),
    ("br", b"no luck", None),
]


@pytest.mark.parametrize("case", range(len(CODED)))
def test_an_answer_that_is_coded_unasked_is_shown_as_far_as_it_can_be_read(case: int) -> None:
    coding, body, said = CODED[case]
    report, (seen,) = answered(reply(500, body, Content_Encoding=coding))
    assert seen.headers["accept-encoding"] == "identity"
    assert report.status == 500
    assert (report.answer or "").startswith(said or "")
    assert (report.answer is None) is (said is None)


def test_an_empty_answer_is_none() -> None:
    for body in (b"", b" \r\n"):
        report, _ = answered(reply(200, body))
        assert report == SendReport(status=200, has_arrived=True)


@pytest.mark.parametrize("status", [200, 500])
def test_an_answer_that_repeats_what_was_sent_gives_no_secret_away(status: int) -> None:
    async def echo(seen: Seen, writer: asyncio.StreamWriter) -> None:
        signature = seen.headers["webhook-signature"]
        told = f"POST {seen.path} {SECRET} token=abcdefgh webhook-signature: {signature}"
        writer.write(reply(status, told.encode()))
        await writer.drain()

    async def scenario() -> SendReport:
        async with running_endpoint(echo) as endpoint:
            return await send(f"{endpoint.url}/hook?room=canary-of-the-query")

    report = asyncio.run(scenario())
    assert report.answer is not None
    assert report.answer.startswith("POST /hook?room=[redacted] [redacted] token=[redacted]")
    for said in (report.answer, report.error or ""):
        for secret in (SECRET, "canary", "abcdefgh", "v1,"):
            assert secret not in said


async def _never(_: Seen, __: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def _trickle(_: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 500 Trickle\r\nContent-Length: 1000\r\n\r\n")
    while True:
        writer.write(b".")
        await writer.drain()
        await asyncio.sleep(0.05)


async def _garbage(_: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
    await writer.drain()
    writer.close()


async def _long_head(_: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    for number in range(100_000):
        writer.write(b"x-%d: %b\r\n" % (number, b"y" * 100))
        await writer.drain()


async def _hang_up(_: Seen, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def _break_off(_: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\ntha")
    await writer.drain()
    writer.close()


def impatiently(answer: Answer) -> SendReport:
    async def scenario() -> tuple[SendReport, float]:
        async with running_endpoint(answer) as endpoint:
            started = time.monotonic()
            sender = WebhookSender(HERE, timeout_seconds=0.3)
            return await send(endpoint.url, sender=sender), time.monotonic() - started

    report, seconds = asyncio.run(scenario())
    assert seconds < 30
    return report


def test_a_receiver_that_hangs_is_given_up_in_time() -> None:
    assert impatiently(_never).error == "no answer within 0.3 seconds"


def test_a_status_counts_however_slowly_the_rest_comes() -> None:
    report = impatiently(_trickle)
    assert (report.status, report.has_arrived) == (500, False)
    assert set(report.answer or "") == {"."}


def test_a_message_that_was_taken_has_arrived_though_the_answer_breaks_off() -> None:
    report = impatiently(_break_off)
    assert (report.status, report.has_arrived, report.answer) == (200, True, "tha")


@pytest.mark.parametrize("answer", [_garbage, _long_head, _hang_up], ids=["ssh", "head", "gone"])
def test_a_receiver_that_does_not_speak_http_is_a_failure(answer: Answer) -> None:
    report, _ = answered(answer)
    assert not report.has_arrived
    assert report.error is not None
    assert report.error.isprintable()


def test_nobody_who_listens_is_a_failure_that_may_pass() -> None:
    report = asyncio.run(send("http://127.0.0.1:1/"))
    assert report.status is None
    assert not report.is_final
    assert report.error is not None
    assert report.error.startswith("cannot be reached")


@pytest.mark.parametrize("url", [*WRITTEN_OUT.values(), *BY_NAME.values()])
def test_nothing_of_the_battery_is_ever_connected_to(url: str) -> None:
    asked: list[str] = []

    async def lookup(host: str, _: int) -> Sequence[str]:
        asked.append(host)
        assert host.rstrip(".").endswith("localhost")
        return ["::1", "127.0.0.1"]

    sender = WebhookSender(UrlGuard(), timeout_seconds=5.0, lookup=lookup)
    report = asyncio.run(send(url, sender=sender))
    assert not report.has_arrived
    assert report.status is None
    assert report.is_final is not bool(asked)


def test_a_name_that_moves_after_it_was_judged_changes_nothing() -> None:
    """A rebinding name: what is connected to is what was judged, and each try is judged anew."""

    async def scenario() -> tuple[list[SendReport], list[str], int]:
        async with running_endpoint() as endpoint:
            answers = [
                ["127.0.0.1"],
                ["169.254.169.254"],
                ["127.0.0.1", "169.254.169.254"],
                ["fd00:ec2::254"],
                ["127.0.0.1", "100.100.100.200"],
            ]
            tries = len(answers)
            asked: list[str] = []

            async def lookup(host: str, _: int) -> Sequence[str]:
                asked.append(host)
                return answers.pop(0)

            sender = WebhookSender(HERE, timeout_seconds=5.0, lookup=lookup)
            url = f"http://hooks.test:{endpoint.port}/"
            reports = [await send(url, sender=sender) for _ in range(tries)]
            return reports, asked, len(endpoint.seen)

    reports, asked, arrived = asyncio.run(scenario())
    assert [report.has_arrived for report in reports] == [True] + [False] * 4
    assert arrived == 1
    assert asked == ["hooks.test"] * 5, "one lookup for each try, and none behind the guard's back"
    assert "169.254.169.254 may not be reached" in str(reports[1].error)


def test_the_next_address_is_tried_when_one_is_silent_or_dead() -> None:
    async def scenario() -> tuple[SendReport, Endpoint]:
        async with running_endpoint() as endpoint:

            async def lookup(_: str, __: int) -> Sequence[str]:
                return ["127.0.0.2", "127.0.0.1"]

            sender = WebhookSender(HERE, timeout_seconds=5.0, lookup=lookup)
            return await send(f"http://hooks.test:{endpoint.port}/", sender=sender), endpoint

    report, endpoint = asyncio.run(scenario())
    assert report.has_arrived
    assert endpoint.seen[0].headers["host"] == f"hooks.test:{endpoint.port}"


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/")
    report, seen = answered(reply(200))
    assert report.has_arrived
    assert len(seen) == 1


def test_a_lookup_that_fails_is_a_failure_that_may_pass() -> None:
    report = asyncio.run(send("http://no-such-host.invalid/"))
    assert not report.has_arrived
    assert not report.is_final
    assert report.error is not None
    assert report.error.startswith("cannot be reached")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a certificate for hooks.test, with its key in the same file."""
    folder = tmp_path_factory.mktemp("certificate")
    key, pem = folder / "key.pem", folder / "pem.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-keyout", key, "-out", pem, "-days", "2", "-subj", "/CN=hooks.test",
         "-addext", "subjectAltName=DNS:hooks.test"],
        check=True,
        capture_output=True,
    )  # fmt: skip
    whole = folder / "both.pem"
    whole.write_bytes(key.read_bytes() + pem.read_bytes())
    return whole


@pytest.mark.parametrize(
    ("name", "is_trusted", "arrives"),
    [("hooks.test", True, True), ("other.test", True, False), ("hooks.test", False, False)],
)
def test_the_certificate_is_checked_against_the_name(
    certificate: Path, name: str, is_trusted: bool, arrives: bool
) -> None:
    names: list[str | None] = []
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate)
    serving.sni_callback = lambda _, given, __: names.append(given)

    async def lookup(_: str, __: int) -> Sequence[str]:
        return ["127.0.0.1"]

    async def scenario() -> SendReport:
        trusting = ssl.create_default_context(cafile=str(certificate) if is_trusted else None)
        guard = UrlGuard(parse_allow_list(("hooks.test", "other.test")))
        sender = WebhookSender(guard, timeout_seconds=5.0, lookup=lookup, ssl_context=trusting)
        async with running_endpoint(context=serving) as endpoint:
            return await send(f"https://{name}:{endpoint.port}/", sender=sender)

    report = asyncio.run(scenario())
    assert report.has_arrived is arrives
    assert names == [name]
