"""The stream behind open pages: what it tells, how often, and to whom."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from api.asgi_client import Client, scope_of
from api.fake_engine import health
from dashboard.browser import WAIT_SECONDS, Browser, serving, submit
from dashboard.test_login import LOCKED, token_of
from dashboard.test_slots_page import with_slots
from headgate.api.app import App
from headgate.api.callers import LOCAL, Caller
from headgate.api.http.request import Request
from headgate.api.shares import MAX_PAGES
from headgate.dashboard import live
from headgate.dashboard.live import Seen, changes, look, stream, until_look
from headgate.dashboard.page import View
from headgate.errors import NotDispatchingError

CHANGED = b"event: changed\ndata:\n\n"


def view_of(app: App, **headers: str) -> View:
    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    request = Request(scope_of("GET", "/ui/live", headers), receive)
    return View(api=app.api, request=request, caller=LOCAL, mode="on", now=0.0)


async def refused(view: View) -> str:
    """Return why a stream is refused, up to what to do about it; it must say that and end."""
    answer = await stream(view, "")
    assert answer.stream is not None
    (piece,) = [piece async for piece in answer.stream]
    name, data, *rest = piece.decode().split("\n")
    assert (name, rest) == ("event: refused", ["", ""])
    reason, _, advice = data.removeprefix("data: ").partition("; ")
    assert advice == "end some of them, or try again later"
    return reason


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        (Seen(tasks=1), Seen(tasks=1), []),
        (Seen(tasks=1), Seen(tasks=2), ["tasks", "changed"]),
        (Seen(slots=1), Seen(slots=2), ["slots", "changed"]),
        (Seen(calls=1), Seen(calls=2), ["changed"]),
        (Seen(rules=1), Seen(rules=2), ["changed"]),
        (Seen(tasks=1, slots=1), Seen(tasks=2, slots=2), ["tasks", "slots", "changed"]),
    ],
)
def test_what_changed_is_named_once_and_anything_is_a_change(
    before: Seen, after: Seen, names: list[str]
) -> None:
    assert changes(before, after) == names


async def test_a_task_and_a_pause_are_changes(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        first = look(view_of(app))
        assert look(view_of(app)) == first
        await submit(app)
        second = look(view_of(app))
        assert "tasks" in changes(first, second)
        app.api.is_paused = True
        assert changes(second, look(view_of(app))) != []


async def test_a_slot_and_new_settings_are_changes(tmp_path: Path) -> None:
    async with with_slots(tmp_path, "work") as (_, app, _provider):
        browser = Browser(app)
        await browser.get("/ui/slots")
        before = look(view_of(app))
        await browser.act("/ui/slots/work/disable")
        assert "slots" in changes(before, look(view_of(app)))
        before = look(view_of(app))
        await browser.act("/ui/projects/default/change", {"credit_weight": "2"})
        assert before.rules != look(view_of(app)).rules


def test_a_problem_of_the_node_is_a_change() -> None:
    client = Client()
    before = look(view_of(client.app))
    client.engine.state = health(problem="the store fails")
    assert changes(before, look(view_of(client.app))) == ["changed"]


async def test_a_page_hears_of_a_task_within_two_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.02)
    async with serving(tmp_path) as (_, app):
        answer = await stream(view_of(app), "")
        assert (answer.content_type, answer.stream is not None) == (b"text/event-stream", True)
        assert answer.stream is not None
        async with asyncio.timeout(WAIT_SECONDS):
            assert (await anext(answer.stream)).startswith(b"retry:")
            first = await anext(answer.stream)
            assert first == CHANGED, "for what changed since it was drawn"
            waiting = asyncio.ensure_future(anext(answer.stream))
            await asyncio.sleep(0)
            await submit(app)
            told = await waiting
            while b"tasks" in (again := await anext(answer.stream)):
                pass
        assert again == CHANGED, "what is settled after the end is shown"
        assert b"event: tasks\ndata:\n\n" in told
        assert told.endswith(CHANGED)
        assert app.api.shares.pages.taken == 1
        await answer.stream.aclose()
        assert app.api.shares.pages.taken == 0


async def test_a_page_that_hears_nothing_is_refreshed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(live, "REFRESH_SECONDS", 0.03)
    monkeypatch.setattr(live, "FIRST_LOOKS", 0)
    async with serving(tmp_path) as (_, app):
        assert await first_told(app) == CHANGED


async def test_a_page_of_a_node_that_sees_no_tasks_looks_again_sooner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(live, "BLIND_SECONDS", 0.03)
    monkeypatch.setattr(live, "REFRESH_SECONDS", 3_600.0)
    monkeypatch.setattr(live, "FIRST_LOOKS", 0)
    client = Client()
    client.engine.failure = NotDispatchingError("")
    assert await first_told(client.app) == CHANGED


async def first_told(app: App) -> bytes:
    """Return the first thing that a stream tells after its beginning."""
    answer = await stream(view_of(app), "")
    assert answer.stream is not None
    async with asyncio.timeout(WAIT_SECONDS):
        await anext(answer.stream)
        told = await anext(answer.stream)
    await answer.stream.aclose()
    return told


async def test_the_stream_of_a_token_that_was_revoked_at_another_node_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(live, "CHECK_SECONDS", 0.0)
    async with serving(tmp_path, LOCKED) as (service, app):
        token = await token_of(service, "read")
        view = view_of(app, authorization=f"Bearer {token}")
        view.request.caller = await app.api.auth.look_up(view.request, "read")
        answer = await stream(view, "")
        assert answer.stream is not None
        await anext(answer.stream)
        # As another node does it: nothing here is told.
        await service.api.tokens.revoke(token.split("_")[1])
        async with asyncio.timeout(WAIT_SECONDS):
            assert [piece async for piece in answer.stream if b"changed" not in piece] == []


async def test_a_stream_ends_at_once_when_its_token_is_revoked_at_the_same_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LOOK_SECONDS", 3_600.0)
    async with serving(tmp_path, LOCKED) as (service, app):
        token, other = await token_of(service, "read"), await token_of(service)
        opened = []
        for one in (token, other):
            view = view_of(app, authorization=f"Bearer {one}")
            view.request.caller = await app.api.auth.look_up(view.request, "read")
            pieces = (await stream(view, "")).stream
            assert pieces is not None
            await anext(pieces)
            opened.append(asyncio.ensure_future(anext(pieces, b"ended")))
        await asyncio.sleep(0)
        await service.api.tokens.revoke(token.split("_")[1])
        app.api.auth.forget()
        async with asyncio.timeout(WAIT_SECONDS):
            assert await opened[0] == b"ended"
        assert not opened[1].done(), "that of another token goes on"
        opened[1].cancel()
        await asyncio.gather(opened[1], return_exceptions=True)
        assert app.api.shares.pages.taken == 0


async def test_there_are_as_many_streams_as_are_bearable(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        app.api.shares.pages.take("others", MAX_PAGES)
        reason = "this node has 200 open pages, 0 of them yours: your share of 200"
        assert await refused(view_of(app)) == reason


async def test_one_token_leaves_streams_for_others(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        greedy = view_of(app)
        reader = frozenset({"read"})
        greedy.request.caller = Caller(name="greedy", token_id="greedy", permissions=reader)
        taken = [await stream(greedy, "") for _ in range(MAX_PAGES)]
        begun = [one.stream for one in taken if one.stream is not None]
        pieces = [await anext(one, b"") for one in begun]
        too_many = [piece for piece in pieces if piece.startswith(b"event: refused")]
        assert len(too_many) == MAX_PAGES - 167, "asked for in a burst, before any of them began"
        reason = "this node has 167 open pages, 167 of them yours: your share of 200"
        assert await refused(greedy) == reason
        modest = view_of(app)
        modest.request.caller = Caller(name="modest", token_id="modest", permissions=reader)
        other = (await stream(modest, "")).stream
        assert other is not None
        assert (await anext(other)).startswith(b"retry:")
        begun.append(other)
        for one in begun:
            await one.aclose()
        assert app.api.shares.pages.taken == 0


def test_many_streams_look_less_often_and_together() -> None:
    for count, step in ((1, 1.0), (8, 1.0), (9, 2.0), (200, 10.0)):
        for now in (100.25, 100.75):
            ahead = now + until_look(now, count)
            assert ahead % step == 0
            assert 0 < until_look(now, count) <= step
