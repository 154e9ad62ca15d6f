"""Whatever goes wrong on a page is a page: what happened, and what to do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from api.asgi_client import Client
from dashboard.browser import Browser, text_of
from headgate.api.errors import CODES, ApiError
from headgate.dashboard.dashboard import Dashboard
from headgate.dashboard.errors import error_page
from headgate.dashboard.page import CONTENT_SECURITY_POLICY
from headgate.errors import StoreUnavailableError
from headgate.storage.store import TaskPage, TaskQuery


@pytest.fixture
def client() -> Client:
    client = Client()
    client.app.serve_pages(Dashboard(client.app.api, "on"))
    return client


async def test_an_address_where_nothing_is(client: Client) -> None:
    answer = await Browser(client.app).get("/ui/nothing")
    text = text_of(answer.body)
    assert answer.status == 404
    assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert "There is nothing at this address." in text
    assert "Go to the overview" in text
    assert answer.headers["x-request-id"] in text


async def test_a_page_that_is_asked_for_as_a_form(client: Client) -> None:
    browser = Browser(client.app)
    assert (await browser.post("/")).headers["allow"] == "GET, HEAD, OPTIONS"
    assert (await browser.get("/ui/theme")).status == 405


async def test_a_form_of_another_type_is_told_what_is_taken(client: Client) -> None:
    answer = await Browser(client.app).post("/ui/login", content_type="multipart/form-data")
    text = text_of(answer.body)
    assert answer.status == 415
    assert "JSON" not in text
    assert "Send application/x-www-form-urlencoded." in text


async def test_a_store_that_is_away_is_named_and_nothing_of_it_is_told(client: Client) -> None:
    client.engine.failure = StoreUnavailableError("postgres at 10.1.2.3 refused")
    answer = await Browser(client.app).get("/ui/tasks")
    text = text_of(answer.body)
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert "The store is unavailable now" in text
    assert "this page comes back when it can" in text
    assert "10.1.2.3" not in text


async def test_a_fault_tells_nothing_but_the_id_in_the_log(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    client.engine.failure = RuntimeError("a secret detail")
    answer = await Browser(client.app).get("/")
    assert answer.status == 500
    assert "secret" not in answer.body.decode()
    request_id = answer.headers["x-request-id"]
    assert request_id in text_of(answer.body)
    assert request_id in caplog.text


async def test_the_api_goes_on_to_answer_in_its_own_shape(client: Client) -> None:
    answer = await Browser(client.app).get("/nothing")
    assert answer.problem["code"] == "not_found"


@pytest.mark.parametrize("code", CODES)
def test_every_refusal_has_a_page_with_advice(code: str) -> None:
    page = error_page(ApiError(code, "it went wrong"), "id-1")
    context: dict[str, Any] = page.context
    assert page.status == CODES[code].status
    assert context["problem"] == "It went wrong."
    assert context["advice"].endswith(".")


@pytest.mark.parametrize("code", CODES)
def test_a_form_that_failed_for_the_service_is_never_said_to_be_done_or_tried_again(
    code: str,
) -> None:
    context: dict[str, Any] = error_page(
        ApiError(code, "it went wrong"), "id-1", sent_from="/ui/tasks"
    ).context
    is_ours = CODES[code].status >= 500
    assert ("Headgate cannot confirm that anything was done." in context["advice"]) is is_ours
    assert context["sent_from"] == ("/ui/tasks" if is_ours else "")
    assert "tries again by itself" not in context["advice"]


async def test_hostile_text_in_an_error_is_shown_as_text(client: Client) -> None:
    client.engine.failure = ApiError("not_found", "<script>alert(1)</script>\u202e\x1b[2J")
    answer = await Browser(client.app).get("/ui/tasks")
    assert "<script>alert" not in answer.body.decode()
    assert "&lt;script&gt;alert(1)" in answer.body.decode()
    assert "\u202e" not in answer.body.decode()
    assert "\\u202e\\x1b" in answer.body.decode()


async def test_a_page_whose_store_does_not_answer_says_so_while_somebody_looks(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.dashboard.dashboard.PAGE_SECONDS", 0.01)
    never = asyncio.Event()

    async def find(_: TaskQuery) -> TaskPage:
        await never.wait()
        return TaskPage(records=())

    monkeypatch.setattr(client.engine, "find", find)
    for answer in (
        await Browser(client.app).get("/ui/tasks"),
        await Browser(client.app).region("/ui/tasks", "rows"),
    ):
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "did not answer in time" in text_of(answer.body)


async def test_the_theme_switch_of_a_refused_form_leads_to_the_page_of_the_form(
    client: Client,
) -> None:
    browser = Browser(client.app)
    await browser.get("/ui/tasks")
    page = "/ui/tasks?state=queued"
    answer = await browser.post(
        "/ui/tasks/tsk_1/cancel", {"csrf": "old"}, referer=f"http://127.0.0.1:7420{page}"
    )
    assert answer.status == 403
    assert f'name="next" value="{page}"' in answer.body.decode()
