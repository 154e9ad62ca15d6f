"""Pages of a service whose store or ledger is away: what is known, what is not, and why."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from api.asgi_client import Client, answer_of
from api.fake_engine import health
from budgets.servers import PostgresServer, ValkeyServer
from dashboard.browser import Browser, serving, submit, text_of, until
from headgate.api.app import App
from headgate.dashboard.dashboard import Dashboard
from headgate.errors import StoreUnavailableError
from headgate.storage.deliveries import DeliveryPage, DeliveryQuery
from headgate.storage.store import Totals

SETTINGS = """
[projects.search]
status = "paused"

[budgets.root]
limit_usd = "10"

[[slots]]
name = "spare"
provider = "zai"
key_file = "{folder}/none"
enabled = false
base_url = "http://127.0.0.1:9"
"""
NOTHING = "\N{EN DASH}"
UNKNOWN = "unknown while the store is unreachable"
STORE_NOTICE = "The store has a problem. The store is unavailable; the log of this node says why."
NO_LEDGER = "unknown while the ledger does not answer"
LEDGER_NOTICE = "The ledger has a problem. The ledger is unavailable;"
LEDGER_AWAY = "The budget ledger is unavailable now"


async def overview(app: App) -> str:
    answer = await Browser(app).get("/")
    assert answer.status == 200, text_of(answer.body)
    return text_of(answer.body)


@pytest.fixture
def client() -> Client:
    client = Client()
    client.app.serve_pages(Dashboard(client.app.api, "on"))
    client.engine.failure = StoreUnavailableError("postgres at 10.1.2.3 refused")
    return client


async def test_the_overview_outlives_its_store_and_the_other_pages_say_why_not(
    tmp_path: Path, postgres: PostgresServer, postgres_url: str
) -> None:
    options: dict[str, object] = {"store.url": postgres_url}
    async with serving(tmp_path, SETTINGS.format(folder=tmp_path), options) as (service, app):
        await submit(app, projectId="search")
        service.engine.history.run_once()
        postgres.stop()
        try:
            text = await overview(app)
            assert STORE_NOTICE in text.partition("Queued")[0]
            assert "Slot spare is disabled" in text
            assert "Project search is paused" in text
            assert "The last hour in steps of five minutes" in text
            assert f"Spent {NOTHING} {UNKNOWN}" in text
            assert "Nobody is kept waiting" not in text
            assert "Nothing has been submitted yet" not in text
            for region in ("state-now", "figure-rows", "who-gets-what"):
                assert (await Browser(app).region("/", region)).status == 200
            for path in ("/ui/tasks", "/ui/projects", "/ui/budgets", "/ui/webhooks"):
                answer = await Browser(app).get(path)
                assert answer.status == 503, path
                assert "The store is unavailable now" in text_of(answer.body), path
        finally:
            postgres.start()

        async def is_whole() -> bool:
            text = await overview(app)
            return UNKNOWN not in text and "has a problem" not in text and "Queued 1 of" in text

        await until(is_whole, seconds=20.0)


async def test_what_the_desk_knows_is_shown_without_the_store(tmp_path: Path) -> None:
    async with serving(tmp_path, SETTINGS.format(folder=tmp_path)) as (service, app):
        task = await submit(app, projectId="search")
        await until(lambda: _has_waiting(app))
        await service.engine.store.close()
        text = await overview(app)
    assert STORE_NOTICE in text
    assert "Queued 1 of 1,000" in text
    assert "In flight 0 of 20" in text
    assert f"{task} of search" in text
    assert "The reason is unknown now: the store is unavailable now" in text
    assert "50 % target" in text


async def _has_waiting(app: App) -> bool:
    present = app.api.engine.outlook.present()
    return present is not None and present.queued == 1


async def test_without_a_desk_each_part_says_that_it_is_not_known(client: Client) -> None:
    text = await overview(client.app)
    for part in ("Queued", "In flight", "Completed", "Spent"):
        assert f"{part} {NOTHING} {UNKNOWN}" in text
    assert f"Shares of projects Projects They are {UNKNOWN}." in text
    assert f"Budgets All budgets They are {UNKNOWN}." in text
    assert f"Waiting longest It is {UNKNOWN}." in text
    assert "10.1.2.3" not in text


async def test_the_notice_does_not_wait_for_the_node_to_find_out(client: Client) -> None:
    assert client.engine.state.parts["store"] == "ok"
    assert (await overview(client.app)).count("The store has a problem") == 1
    parts = {"store": "it is away", "ledger": "ok", "dispatcher": "ok"}
    client.engine.state = health(is_ready=False, problem="it is away", parts=parts)
    text = await overview(client.app)
    assert text.count("The store has a problem") == 1
    assert "It is away." in text


async def test_a_store_that_neither_answers_nor_fails_does_not_hold_the_overview_up(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.dashboard.overview.ANSWER_SECONDS", 0.01)
    client.engine.failure = None
    never = asyncio.Event()

    async def totals() -> Totals:
        await never.wait()
        return Totals(lanes=())

    monkeypatch.setattr(client.engine, "totals", totals)
    text = await overview(client.app)
    assert STORE_NOTICE in text
    assert f"Queued {NOTHING} {UNKNOWN}" in text


async def test_webhooks_that_come_too_late_are_told_as_unknown_and_not_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.dashboard.overview.ANSWER_SECONDS", 0.2)
    unknown = "The state of webhooks is unknown now"
    async with serving(tmp_path) as (service, app):
        assert unknown not in await overview(app)
        assert service.api.webhooks is not None
        never = asyncio.Event()

        async def find(_: DeliveryQuery) -> DeliveryPage:
            await never.wait()
            return DeliveryPage(deliveries=())

        monkeypatch.setattr(service.api.webhooks.deliveries, "find", find)
        text = await overview(app)
        assert unknown in text
        assert "has a problem" not in text
        await service.engine.store.close()
        assert unknown not in await overview(app), "that the store is away says it"


async def test_a_fault_is_no_outage(client: Client) -> None:
    client.engine.failure = RuntimeError("a mistake of ours")
    assert (await Browser(client.app).get("/")).status == 500


async def test_with_only_the_ledger_away_it_is_the_ledger_that_is_named(
    tmp_path: Path, valkey: ValkeyServer, valkey_url: str
) -> None:
    options: dict[str, object] = {"ledger.url": valkey_url}
    limit = {"scope": "session:eval", "limit_usd": "5", "window": "none"}
    async with serving(tmp_path, SETTINGS.format(folder=tmp_path), options) as (_, app):
        browser = Browser(app)
        assert (await browser.get("/ui/budgets")).status == 200
        valkey.stop()
        try:
            for path in ("/ui/budgets", "/ui/budgets?scope=session%3Aeval"):
                answer = await browser.get(path)
                text = text_of(answer.body)
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                assert LEDGER_AWAY in text
                assert "ledger.url" in text
                assert "store" not in text.partition(LEDGER_AWAY)[2]
            answer = await browser.post("/ui/budgets/limit", limit)
            assert answer.status == 303, "the ledger is told when it is back"
            text = await overview(app)
            assert LEDGER_NOTICE in text
            assert f"Spent {NOTHING} {NO_LEDGER}" in text
            assert "Queued 0 of" in text
            assert UNKNOWN not in text
        finally:
            valkey.start()

        async def is_back() -> bool:
            return (await browser.get("/ui/budgets")).status == 200

        await until(is_back, seconds=20.0)


async def test_an_action_that_the_store_did_not_confirm_is_not_said_to_be_tried_again(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, SETTINGS.format(folder=tmp_path)) as (service, app):
        browser = Browser(app)
        task = await submit(app, projectId="search")
        page = f"/ui/tasks/{task}"
        await browser.get(page)
        await service.engine.store.close()
        sent_from = f"http://127.0.0.1:7420{page}?a=b"
        answer = await browser.post(f"{page}/cancel", referer=sent_from)
        text = text_of(answer.body)
        assert answer.status == 503
        assert "tries again by itself" not in text
        assert "Headgate cannot confirm that anything was done. Check the present state" in text
        assert f'href="{page}?a=b">Back to the page of the form</a>' in answer.body.decode()
        looked = await browser.get(page)
        assert "The service retries by itself" in text_of(looked.body)
        assert "Back to the page" not in text_of(looked.body)


@pytest.mark.parametrize(
    "sent_from", ["", "http://127.0.0.1:7420/", "http://[::1", "//elsewhere", "javascript:alert(1)"]
)
async def test_a_form_that_came_from_nowhere_is_answered_with_the_way_to_the_overview(
    client: Client, sent_from: str
) -> None:
    browser = Browser(client.app)
    await browser.get("/")
    answer = await browser.post("/ui/tasks/tsk_1/cancel", referer=sent_from)
    assert answer.status == 503
    assert "Back to the page" not in text_of(answer.body)
    assert 'href="/">Go to the overview</a>' in answer.body.decode()


async def test_a_store_that_keeps_the_books_itself_is_named_on_the_page_of_budgets(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, SETTINGS.format(folder=tmp_path)) as (service, app):
        await service.engine.store.close()
        answer = await Browser(app).get("/ui/budgets")
        assert answer.status == 503
        assert "The store is unavailable now" in text_of(answer.body)
        assert (await answer_of(app, "GET", "/budgets/status")).status == 503
