"""Forms that are sent twice: carried out once, answered alike."""

from __future__ import annotations

import asyncio
import re
import weakref
from pathlib import Path

import pytest

from dashboard.browser import Browser, serving, submit, text_of
from headgate.dashboard.forms import KEPT_SECONDS, MAX_KEPT, SentForms
from headgate.dashboard.page import Done, Form, Page

HELD = '[projects.default]\nstatus = "paused"\n'
DONE = Done(to="/ui/tasks/new", said="this is the new task.")


class Deeds:
    """Counts how often something is done."""

    def __init__(self, outcome: Done | Page = DONE) -> None:
        self.outcome = outcome
        self.times = 0
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def __call__(self) -> Done | Page:
        self.times += 1
        await self.may_end.wait()
        return self.outcome


async def test_a_second_click_while_the_first_is_under_way_waits_for_its_answer() -> None:
    sent, deeds = SentForms(), Deeds()
    deeds.may_end.clear()
    clicks = [asyncio.create_task(sent.once("form", deeds, again="/")) for _ in range(2)]
    await asyncio.sleep(0)
    deeds.may_end.set()
    assert await asyncio.gather(*clicks) == [DONE, DONE]
    assert deeds.times == 1


async def test_one_who_leaves_does_not_undo_what_was_sent() -> None:
    sent, deeds = SentForms(), Deeds()
    deeds.may_end.clear()
    left = asyncio.create_task(sent.once("form", deeds, again="/"))
    await asyncio.sleep(0)
    left.cancel()
    deeds.may_end.set()
    assert await sent.once("form", deeds, again="/") == DONE
    assert deeds.times == 1


async def test_what_failed_may_be_sent_again() -> None:
    sent, deeds = SentForms(), Deeds()

    async def failing() -> Done:
        raise ValueError("not now")

    with pytest.raises(ValueError, match="not now"):
        await sent.once("form", failing, again="/")
    await asyncio.sleep(0)
    assert await sent.once("form", deeds, again="/") == DONE


async def test_a_page_that_shows_a_secret_is_shown_once() -> None:
    page = Page(template="tokens.html", title="Tokens")
    sent, deeds = SentForms(), Deeds(page)
    assert await sent.once("form", deeds, again="/ui/settings/tokens") is page
    second = await sent.once("form", deeds, again="/ui/settings/tokens")
    assert isinstance(second, Done)
    assert (second.to, second.is_error, deeds.times) == ("/ui/settings/tokens", True, 1)


async def test_the_page_of_a_secret_is_not_kept_after_it_was_shown() -> None:
    sent, deeds = SentForms(), Deeds()
    deeds.outcome = Page(template="tokens.html", title="Tokens", context={"made": Deeds()})
    secret = weakref.ref(deeds.outcome.context["made"])
    await sent.once("form", deeds, again="/ui/settings/tokens")
    deeds.outcome = DONE
    await asyncio.sleep(0)
    assert secret() is None


async def test_forms_are_kept_for_a_while_and_a_bounded_number_of_them() -> None:
    now = 0.0
    sent, deeds = SentForms(lambda: now), Deeds()
    await sent.once("first", deeds, again="/")
    now = KEPT_SECONDS - 1
    await sent.once("first", deeds, again="/")
    assert deeds.times == 1
    now = KEPT_SECONDS
    await sent.once("first", deeds, again="/")
    assert deeds.times == 2
    for number in range(MAX_KEPT):
        await sent.once(number, deeds, again="/")
    await sent.once("first", deeds, again="/")
    assert deeds.times == 3 + MAX_KEPT


def test_a_form_that_was_filled_in_otherwise_is_another() -> None:
    first = Form({"once": ["1"], "limit": ["5"]})
    assert first.digest == Form({"limit": ["5"], "once": ["1"]}).digest
    assert first.digest != Form({"once": ["1"], "limit": ["6"]}).digest


async def test_a_retry_that_is_clicked_twice_makes_one_task(tmp_path: Path) -> None:
    async with serving(tmp_path, HELD) as (_, app):
        task_id = await submit(app)
        browser = Browser(app)
        await browser.get(f"/ui/tasks/{task_id}")
        await browser.act(f"/ui/tasks/{task_id}/cancel")
        numbers = []
        for _ in range(2):
            page = (await browser.get(f"/ui/tasks/{task_id}")).body.decode()
            numbers += re.findall(r'name="once" value="([0-9a-f]+)"', page)
        first, second = numbers[0], numbers[-1]
        assert first != second
        made = set()
        for number in (first, first, second):
            answer = await browser.post(f"/ui/tasks/{task_id}/retry", {"once": number})
            made.add(answer.headers["location"])
        assert len(made) == 2
        assert len(text_of((await browser.get("/ui/tasks?state=queued")).body).split("tsk_")) == 3


async def test_a_part_of_the_frame_is_no_region(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        for name in ("main", "scripts", "styles", "head", "nothing"):
            answer = await Browser(app).region("/ui/tasks", name)
            assert answer.status == 200
            assert b"<html" in answer.body
