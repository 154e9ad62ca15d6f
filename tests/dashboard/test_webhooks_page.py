"""Webhooks: what was told to whom, once more, pings, and secrets that nobody sees."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dashboard.browser import Browser, serving, submit, text_of, until
from dashboard.test_login import LOCKED, token_of
from headgate.api.app import App
from headgate.api.webhooks import one_webhook
from headgate.app import Service
from headgate.dashboard.formats import unheard_words
from headgate.dashboard.webhooks import PAGE_ROWS
from headgate.storage.deliveries import Alert, DeliveryState, TryOutcome
from headgate.storage.unit_of_work import message_id

ALLOWED = '[webhooks]\nallow = ["127.0.0.1"]\n'
NOWHERE = "http://127.0.0.1:9/hook?key=canary-of-the-query"
SECRET_PREFIX = "whsec_"


@asynccontextmanager
async def receiver(status: int = 204) -> AsyncIterator[str]:
    """Take every message with one status, and give the address."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status} X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        writer.write(head.encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/hook?key=canary-of-the-query"


async def file(service: Service, count: int, url: str = NOWHERE) -> list[str]:
    """File alerts, as budgets do; nobody has tried to send them yet."""
    assert service.api.webhooks is not None
    ids = [f"msg_{number:03}" for number in range(count)]
    alerts = [
        Alert(message_id=one, scope=one, unit="tokens", percent=50, limit=1, until=None, body="{}")
        for one in ids
    ]
    await service.api.webhooks.deliveries.alert(alerts, url)
    return ids


async def end(service: Service, webhook_id: str, **outcome: Any) -> None:
    """Write that a webhook was tried, whoever has claimed it."""
    assert service.api.webhooks is not None
    deliveries = service.api.webhooks.deliveries
    await deliveries.release(None)
    await deliveries.claim([webhook_id], claimed_by="me", seconds=30)
    await deliveries.settle(TryOutcome(id=webhook_id, claimed_by="me", **outcome))


async def state_of(app: App, webhook_id: str) -> str:
    return (await one_webhook(app.api, webhook_id)).state


async def test_switched_off_the_page_says_how_to_switch_them_on(tmp_path: Path) -> None:
    async with serving(tmp_path, "[webhooks]\nenabled = false\n") as (_, app):
        browser = Browser(app)
        page = await browser.get("/ui/webhooks")
        assert page.status == 200
        assert "Webhooks are off" in text_of(page.body)
        assert (await browser.get("/ui/webhooks/msg_1")).status == 503


async def test_a_webhook_that_arrives_is_shown_with_its_answer(tmp_path: Path) -> None:
    async with receiver() as url, serving(tmp_path, ALLOWED) as (service, app):
        assert service.api.webhooks is not None
        deliveries = service.api.webhooks.deliveries
        task_id = await submit(app, callbackUrl=url)
        browser = Browser(app)

        async def has_arrived() -> bool:
            found = await deliveries.get(message_id(task_id))
            return found is not None and found.state is DeliveryState.DELIVERED

        await until(has_arrived)
        # Looked at once: a drawing that took long is kept for ten times as long.
        region = await browser.region(f"/ui/webhooks?task={task_id}", "deliveries")
        assert "✓\ufe0e delivered" in text_of(region.body)
        page = (await browser.get("/ui/webhooks?state=delivered")).body.decode()
        assert f'href="/ui/tasks/{task_id}"' in page
        assert "hook?key=***" in page
        assert "canary" not in page
        assert "No webhook matches" in text_of((await browser.get("/ui/webhooks?state=dead")).body)


async def test_one_that_was_given_up_is_sent_again_and_arrives(tmp_path: Path) -> None:
    async with receiver() as url, serving(tmp_path, ALLOWED) as (service, app):
        (webhook_id,) = await file(service, 1, url)
        await end(service, webhook_id, has_arrived=False, status=410, error="answered 410")
        browser = Browser(app)
        text = text_of((await browser.get(f"/ui/webhooks/{webhook_id}")).body)
        assert "✕\ufe0e given up" in text
        assert "answered 410" in text
        page, said = await browser.act(f"/ui/webhooks/{webhook_id}/redeliver")
        assert said.startswith("Done:"), said
        assert "canary" not in page.body.decode()

        async def has_arrived() -> bool:
            return await state_of(app, webhook_id) == "delivered"

        await until(has_arrived)


async def test_one_of_which_nothing_is_left_is_not_sent_again(tmp_path: Path) -> None:
    async with serving(tmp_path, ALLOWED) as (service, app):
        (webhook_id,) = await file(service, 1)
        await end(service, webhook_id, has_arrived=True, status=204)
        browser = Browser(app)
        page = (await browser.get(f"/ui/webhooks/{webhook_id}")).body.decode()
        assert "It was delivered. The receiver gets it again" in page
        _, said = await browser.act(f"/ui/webhooks/{webhook_id}/redeliver")
    assert said.startswith("Not done: it has arrived and its task is not kept any more")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (204, "Done: the receiver accepted the message with 204."),
        (500, "Not done: the receiver did not take the message: "),
    ],
)
async def test_a_ping_says_what_came_back(tmp_path: Path, status: int, said: str) -> None:
    async with receiver(status) as url, serving(tmp_path, ALLOWED) as (_, app):
        browser = Browser(app)
        await browser.get("/ui/webhooks")
        page, found = await browser.act("/ui/webhooks/ping", {"url": url})
    assert found.startswith(said)
    assert "canary" not in page.body.decode()


@pytest.mark.parametrize("url", ["", "ftp://x", "http://127.0.0.1:9/", "x" * 3_000])
async def test_an_address_that_may_not_be_reached_is_refused_on_the_page(
    tmp_path: Path, url: str
) -> None:
    async with serving(tmp_path) as (_, app):
        browser = Browser(app)
        await browser.get("/ui/webhooks")
        _, said = await browser.act("/ui/webhooks/ping", {"url": url})
    assert said.startswith("Not done: Address: ")


async def test_a_receiver_that_is_not_reached_is_told_of_in_words_of_ours(tmp_path: Path) -> None:
    async with serving(tmp_path, ALLOWED) as (_, app):
        browser = Browser(app)
        await browser.get("/ui/webhooks")
        for url, cause in (
            ("http://no-such-host.invalid/hook", "its name is not known"),
            (NOWHERE, "nothing takes connections there"),
        ):
            _, said = await browser.act("/ui/webhooks/ping", {"url": url})
            assert said == f"Not done: the receiver cannot be reached: {cause}."


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            "answered 500: oops: [Errno 2]",
            "did not take the message: answered 500: oops: [Errno 2]",
        ),
        ("no answer within 10 seconds", "did not take the message: no answer within 10 seconds"),
        (
            "cannot be reached: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed",
            "cannot be reached: its certificate is not trusted",
        ),
        (
            "cannot be reached: [SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)",
            "cannot be reached: it does not speak TLS there",
        ),
        (
            "cannot be reached: [Errno -3] Temporary failure in name resolution",
            "cannot be reached: no name server answers",
        ),
        (
            "cannot be reached: ReadError",
            "cannot be reached; headgate webhooks ping says more",
        ),
        (
            "did not answer in HTTP: illegal status line",
            "did not answer in HTTP; headgate webhooks ping says more",
        ),
        (None, "did not take the message, and no reason is known"),
    ],
)
def test_what_a_receiver_said_is_told_as_it_is_and_what_a_library_says_is_not(
    error: str | None, words: str
) -> None:
    assert unheard_words(error) == words


async def test_of_secrets_only_the_ages_are_shown(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, app):
        browser = Browser(app)
        await browser.get("/ui/webhooks")
        page, said = await browser.act("/ui/webhooks/secret/rotate")
        assert said.startswith("Done: there is a new signing secret")
        assert service.api.webhooks is not None
        secrets = await service.api.webhooks.deliveries.secrets()
        assert len(secrets) == 2
        text = page.body.decode()
        assert not any(one.secret in text for one in secrets)
        assert SECRET_PREFIX not in text
        assert "replaced" in text_of(text)
        actions = [row.action for row in (await service.api.audit.page()).rows]
        assert actions == ["webhook.secret.rotate"]


async def test_a_long_list_comes_in_parts(tmp_path: Path) -> None:
    async with serving(tmp_path, ALLOWED) as (service, app):
        await file(service, PAGE_ROWS + 3)
        browser = Browser(app)
        page = await browser.get("/ui/webhooks")
        assert len(page.body) < 150_000
        text = page.body.decode()
        older = text[text.index('rel="next" href="') :].split('"')[3].replace("&amp;", "&")
        rest = (await browser.get(older)).body.decode()
        assert rest.count('<th scope="row" data-label="Webhook">') == 3
        assert 'href="/ui/webhooks">Newest' in rest


async def test_a_filter_that_cannot_be_is_told_beside_the_form(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        page = await Browser(app).get("/ui/webhooks?state=%3Cb%3E&task=1")
    assert page.status == 400
    assert "is none of pending, delivered, dead . Correct the filter" in text_of(page.body)
    assert "<b>" not in page.body.decode()


async def test_what_receivers_answer_is_text(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>\u202e\x1b[2J" + "x" * 100_000
    async with serving(tmp_path, ALLOWED) as (service, app):
        (webhook_id,) = await file(service, 1, "http://127.0.0.1:9/<script>alert(1)</script>")
        await end(service, webhook_id, has_arrived=False, status=500, error=hostile)
        browser = Browser(app)
        for path in ("/ui/webhooks", f"/ui/webhooks/{webhook_id}"):
            page = (await browser.get(path)).body.decode()
            assert "<script>alert" not in page
            assert not {"\u202e", "\x1b"} & set(page)
            assert len(page) < 30_000


async def test_only_administrators_see_webhooks(tmp_path: Path) -> None:
    async with serving(tmp_path, LOCKED) as (service, app):
        browser = Browser(app)
        browser.cookies["headgate_token"] = await token_of(service, "read", "cancel", "submit")
        assert (await browser.get("/ui/webhooks")).status == 403
        assert (await browser.get("/ui/webhooks/msg_1")).status == 403
        for action in ("ping", "secret/rotate", "msg_1/redeliver"):
            assert (await browser.post(f"/ui/webhooks/{action}")).status == 403
        assert 'href="/ui/webhooks"' not in (await browser.get("/")).body.decode()


async def test_one_that_is_not_there_is_a_page_that_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        browser = Browser(app)
        assert (await browser.get("/ui/webhooks/msg_none")).status == 404
        assert (await browser.post("/ui/webhooks/msg_none/redeliver")).status == 404
