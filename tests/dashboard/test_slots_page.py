"""Slots: their figures, what is done to them and by whom, and what is told of them."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dashboard.browser import Browser, serving, text_of, until
from dashboard.test_login import LOCKED, token_of
from headgate.api.app import App
from headgate.app import Service
from headgate.core.gates import GateClosure
from headgate.dashboard.lists import ROWS
from headgate.dashboard.slots import HOUR_SECONDS
from headgate.storage.tokens import Bounds
from headgate.testing.fake_provider import FakeProvider

KEY = "zk-canary-of-the-slot"
NAME = "<b>a/b</b> \N{HEBREW LETTER ALEF}"
PATH = "/ui/slots/%3Cb%3Ea%2Fb%3C%2Fb%3E%20%D7%90"


@asynccontextmanager
async def with_slots(
    folder: Path,
    *names: str,
    more: str = "",
    before: str = "",
    script: str = "",
    of: FakeProvider | None = None,
) -> AsyncIterator[tuple[Service, App, FakeProvider]]:
    """Run a service with slots at a provider of its own, whose first answer may be a refusal."""
    (folder / "key").write_text(KEY)
    async with of or FakeProvider() as provider:
        if script:
            provider.next("500", message=script, on="quota")
        tables = [
            f'[[slots]]\nname = "{name}"\nprovider = "zai"\nkey_file = "{folder}/key"\n'
            f'base_url = "{provider.address}"\n{more}'
            for name in names
        ]
        quota = f"[quota]\nmax_slots = {len(names)}"
        async with serving(folder, "\n".join([before, quota, *tables])) as (service, app):
            yield service, app, provider


async def read_once(app: App) -> None:
    """Wait until the first readings are there."""

    async def is_read() -> bool:
        assert app.api.slots is not None
        return all(status.row.reading is not None for status in app.api.slots.statuses())

    await until(is_read)


async def test_a_slot_is_warmed_and_its_page_tells_what_came_of_it(tmp_path: Path) -> None:
    async with with_slots(tmp_path, "work") as (_, app, _provider):
        await read_once(app)
        browser = Browser(app)
        cold = text_of((await browser.get("/ui/slots/work")).body)
        assert "○\ufe0e cold" in cold
        assert "No window is open." in cold
        page, said = await browser.act("/ui/slots/work/warm")
        assert said.startswith("Done: Headgate sent a wake")

        async def is_open() -> bool:
            region = await browser.region("/ui/slots/work", "slot-now")
            return "●\ufe0e open" in text_of(region.body)

        await until(is_open)
        page = await browser.get("/ui/slots/work")
        text = text_of(page.body)
        assert re.search(r"opened \S+( \S+)? ago resets in [45] h", text) or "opened now" in text
        assert "Last wake confirmed" in text
        assert "data-countdown" in page.body.decode()
        assert "POST http://127.0.0.1" in text
        _, again = await browser.act("/ui/slots/work/warm")
        assert again.startswith("Not done: slot work: the window is open until")
        log = text_of((await browser.get("/ui/slots/work/log")).body)
        assert "wake" in log
        # The script for times finds them by their zone.
        assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+ UTC", log)


async def test_a_limit_whose_reset_has_passed_is_said_to_have_ended(tmp_path: Path) -> None:
    late = FakeProvider(is_warm=True, percent=100.0, clock=lambda: time.time() - 6 * HOUR_SECONDS)
    async with with_slots(tmp_path, "work", of=late) as (_, app, _provider):
        await read_once(app)
        text = text_of((await Browser(app).get("/ui/slots/work")).body)
    assert "5 hours 100 % ended 1 h ago" in text


async def test_a_slot_is_switched_off_and_on(tmp_path: Path) -> None:
    async with with_slots(tmp_path, "work") as (_, app, _provider):
        browser = Browser(app)
        await browser.get("/ui/slots")
        page, said = await browser.act("/ui/slots/work/disable")
        assert said.startswith("Done:"), said
        assert "Calls and tasks wait: paused by hand" in text_of(page.body)
        assert "/ui/slots/work/warm" not in page.body.decode()
        _, refused = await browser.act("/ui/slots/work/warm")
        assert refused.startswith("Not done: slot work:")
        page, said = await browser.act("/ui/slots/work/enable")
        assert said.startswith("Done:"), said
        assert "/ui/slots/work/enable" not in page.body.decode()


async def test_a_slot_that_the_settings_disable_says_so(tmp_path: Path) -> None:
    async with with_slots(tmp_path, "work", more="enabled = false\n") as (_, app, _provider):
        browser = Browser(app)
        await browser.get("/ui/slots")
        _, said = await browser.act("/ui/slots/work/enable")
    assert said.startswith("Not done:"), said


async def test_a_name_that_is_markup_is_a_name(tmp_path: Path) -> None:
    async with with_slots(tmp_path, NAME) as (_, app, _provider):
        await read_once(app)
        browser = Browser(app)
        page = (await browser.get("/ui/slots")).body.decode()
        assert "<b>a/b" not in page
        assert f'href="{PATH}"' in page
        assert 'href="/ui/tasks?state=queued&amp;slot=%3Cb%3Ea%2Fb' in page
        own, said = await browser.act(f"{PATH}/warm")
        assert said.startswith("Done:")
        assert "<bdi>&lt;b&gt;a/b" in own.body.decode()
        assert f'hx-get="{PATH}"' in own.body.decode()
        assert (await browser.get(f"{PATH}/log")).status == 200


async def test_what_a_provider_writes_is_text(tmp_path: Path) -> None:
    script = "<script>alert(1)</script>\u202e\x1b[2J"
    async with with_slots(tmp_path, "work", script=script) as (_, app, _provider):
        browser = Browser(app)

        async def has_failed() -> bool:
            return "1 error" in (await browser.get("/ui/slots/work")).body.decode()

        await until(has_failed)
        for path in ("/ui/slots", "/ui/slots/work", "/ui/slots/work/log"):
            page = (await browser.get(path)).body.decode()
            assert "&lt;script&gt;alert(1)" in page, path
            assert "<script>alert" not in page
            assert not {"\u202e", "\x1b"} & set(page)


async def test_a_slot_whose_key_was_refused_keeps_its_error_and_has_one_tag(tmp_path: Path) -> None:
    async with with_slots(tmp_path, "work") as (_, app, provider):
        await read_once(app)
        browser = Browser(app)
        await browser.get("/ui/slots/work")
        provider.next("401", message="this key was revoked", on="request")
        await browser.act("/ui/slots/work/warm")

        async def is_disabled() -> bool:
            return "disabled" in text_of((await browser.get("/ui/slots/work")).body)

        await until(is_disabled)
        page = text_of((await browser.get("/ui/slots/work")).body)
    assert (
        "1 error one request failed: refused: the provider answered 401: this key was revoked"
        in page
    )
    assert "Last error refused: the provider answered 401: this key was revoked" in page
    assert "held" not in page
    assert "Calls and tasks wait: " in page


async def test_no_page_has_the_key_in_it(tmp_path: Path) -> None:
    async with with_slots(tmp_path, "work") as (_, app, provider):
        await read_once(app)
        browser = Browser(app)
        await browser.get("/ui/slots")
        await browser.act("/ui/slots/work/warm")
        for path in ("/ui/slots", "/ui/slots/work", "/ui/slots/work/log"):
            assert KEY not in (await browser.get(path)).body.decode()
    assert any(request.key == KEY for request in provider.seen)


async def test_many_slots_come_in_parts(tmp_path: Path) -> None:
    names = [f"s{number:02}" for number in range(ROWS + 2)]
    async with with_slots(tmp_path, *names, more="enabled = false\n") as (_, app, _provider):
        browser = Browser(app)
        first = await browser.get("/ui/slots")
        assert len(first.body) < 150_000
        assert f'href="/ui/slots?from={ROWS}">More slots' in first.body.decode()
        assert f"1 to {ROWS} of {ROWS + 2}" in text_of(first.body)
        rest = (await browser.get(f"/ui/slots?from={ROWS}")).body.decode()
        assert rest.count('class="sheet slot"') == 2
        assert 'href="/ui/slots">Back to the first' in rest
        assert not {"Newest", "Older"} & set(text_of(rest).split())
        behind = text_of((await browser.get("/ui/slots?from=900")).body)
        assert "past the last one" in behind
        assert (await browser.get("/ui/slots?from=x")).status == 400


async def test_a_bound_reader_sees_slots_and_neither_log_nor_button(tmp_path: Path) -> None:
    async with with_slots(tmp_path, "work", before=LOCKED) as (service, app, provider):
        await read_once(app)
        browser = Browser(app)
        bounds = Bounds(agent_id="coder")
        browser.cookies["headgate_token"] = await token_of(service, "read", bounds=bounds)
        page = await browser.get("/ui/slots/work")
        text = text_of(page.body)
        assert page.status == 200
        assert "What the provider reports" in text
        assert "in flight" not in text
        assert "Log" not in text.replace("Log out", "")
        assert "/ui/slots/work/" not in page.body.decode()
        assert (await browser.get("/ui/slots/work/log")).status == 403
        assert (await browser.post("/ui/slots/work/warm")).status == 403
    assert [one for one in provider.seen if one.method == "POST"] == []


@pytest.mark.parametrize("path", ["/ui/slots/none", "/ui/slots/none/log"])
async def test_a_slot_that_is_not_there_is_a_page_that_says_so(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path) as (_, app):
        answer = await Browser(app).get(path)
    assert answer.status == 404
    assert "There is no slot" in text_of(answer.body)


async def test_what_is_closed_is_shown_with_who_closed_it_and_opened_by_a_button(
    tmp_path: Path,
) -> None:
    async with with_slots(tmp_path, "work") as (service, app, _provider):
        await read_once(app)
        now = service.engine.now()
        for kind, name, cause in (("slot", "work", "provider"), ("target", "web", "target")):
            closure = GateClosure(
                kind=kind,  # type: ignore[arg-type]
                name=name,
                until=now + 3_000,
                why="executor returned 429",
                cause=cause,  # type: ignore[arg-type]
                by="model",
                task_id="tsk_1",
                since=now - 60,
            )
            service.engine.dispatcher.observe((), closure)
        browser = Browser(app)
        overview = text_of((await browser.get("/")).body)
        assert "web is closed by its target: executor returned 429." in overview
        assert "work is closed: executor returned 429." in overview
        card = text_of((await browser.get("/ui/slots/work")).body)
        assert "Closed by provider model , its task , 1 min ago ." in card
        listed = text_of((await browser.get("/ui/settings/closures")).body)
        assert "slot work provider model , its task" in listed
        page, said = await browser.act("/ui/slots/work/open")
        assert said.startswith("Done: the slot is open")
        assert "Closed by" not in text_of(page.body)
        (left,) = await service.engine.closures()
        assert left.name == "web"
        fields = {"kind": "target", "name": "nowhere"}
        assert (await browser.post("/ui/settings/closures/open", fields)).status == 404
