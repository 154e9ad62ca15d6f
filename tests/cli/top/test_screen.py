"""The screen over a real service: what is on it, in any size, and when the service is away."""

from __future__ import annotations

import asyncio
from pathlib import Path

from cli.top.fleet import SETTINGS, Fleet, at
from cli.top.scene import Terminal, screen, serving
from config.running import running
from headgate.cli.top.panes import Pane
from headgate.cli.top.service_state import ConnectionState

HOSTILE = "\x1b[2J\u202e"


def test_a_large_terminal_shows_all_panes_and_a_small_one_again_one(fleet: Fleet) -> None:
    async def body(terminal: Terminal) -> None:
        shown = ("1 Projects", "2 Lanes", "tight", "permits in use", "session:eval", "disabled in")
        await terminal.sees(*shown)
        await terminal.resize(80, 24)
        await terminal.sees("[1 Projects]", without="permits in use")
        await terminal.resize(40, 10)
        await terminal.sees("search")
        await terminal.resize(4, 2)
        await terminal.resize(80, 24)
        await terminal.sees("[1 Projects]", "search")
        await terminal.resize(200, 60)
        await terminal.sees(*shown)

    at(fleet, body, size=(200, 60))


def test_a_token_for_one_agent_is_told_why_it_sees_no_projects(fleet: Fleet) -> None:
    token_fields = {"name": "one-agent", "permissions": ["read"], "agentId": "tight"}
    made = fleet.service.ask("POST", "/tokens", token_fields)

    async def body(terminal: Terminal) -> None:
        await terminal.sees("A token for one agent sees no projects.")

    at(fleet, body, token=made.body["token"])


def test_what_others_wrote_is_text(fleet: Fleet) -> None:
    task_id = fleet.service.submit(
        agentId="judge",
        projectId="off",
        target="slow",
        action="<script>[bold]x[/bold][@click=app.quit]y[/]",
        params={"hostile": HOSTILE, "long": "y" * 900_000},
    )

    async def body(terminal: Terminal) -> None:
        await terminal.press("4", "slash", *task_id[-10:], "enter")
        await terminal.sees(task_id[-10:], "is paused")
        await terminal.press("enter")
        text = await terminal.sees(
            "<script>[bold]x[/bold][@click=app.quit]y[/]", r"\u001b[2J\u202e", "yyyy"
        )
        assert all(line.isprintable() for line in text.splitlines())

    try:
        at(fleet, body, size=(120, 40))
    finally:
        fleet.service.ask("POST", f"/tasks/{task_id}/cancel")


def test_reasons_are_asked_only_for_the_rows_that_are_seen(fleet: Fleet) -> None:
    more = [
        fleet.service.submit(agentId="judge", projectId="off", target="slow", action="row")
        for _ in range(40)
    ]

    async def body(terminal: Terminal) -> None:
        await terminal.press("4")
        await terminal.until(lambda text: text.count("project off is paused") >= 17)
        seen = terminal.app.watcher.content.waiting
        assert len(seen) == 18
        await terminal.press("end")
        await terminal.until(lambda text: text.count("project off is paused") == 18)
        known = set(terminal.app.watcher.service.reasons)
        assert known <= {*seen, *terminal.app.watcher.content.waiting}
        assert more[-1] in terminal.app.watcher.content.waiting

    try:
        at(fleet, body)
    finally:
        for task_id in more:
            fleet.service.ask("POST", f"/tasks/{task_id}/cancel")


def test_events_of_a_task_bring_it_on_the_screen(fleet: Fleet) -> None:
    async def body(terminal: Terminal) -> None:
        await terminal.press("3")
        await terminal.sees("crawl", "live")
        service = fleet.service
        task_id = await asyncio.to_thread(
            lambda: service.submit(agentId="late", projectId="evals", target="slow", action="late")
        )
        await terminal.sees("late", "[3 Running 2]")
        await asyncio.to_thread(service.ask, "POST", f"/tasks/{task_id}/cancel")
        await terminal.sees("[3 Running 1]", without="late")

    at(fleet, body)


def test_a_lost_service_leaves_its_last_figures_and_comes_back_by_itself(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, SETTINGS) as service:
            port = 0
            async with serving(service.app, port) as port:
                open_screen = screen(f"http://127.0.0.1:{port}")
                terminal = await open_screen.__aenter__()
                await terminal.sees("live", "search", "40 %")
            text = await terminal.sees("CONNECTION LOST", "Trying again: ", "search")
            assert "queued 0 of 1,000" in text
            assert terminal.app.query_one("#projects", Pane).is_faint
            await terminal.press("p")
            await terminal.sees("Not done: no service answers.")
            async with serving(service.app, port):
                await terminal.sees("search", without="CONNECTION LOST")
                assert not terminal.app.query_one("#projects", Pane).is_faint
                await open_screen.__aexit__(None, None, None)

    asyncio.run(main())


def test_figures_that_are_refused_from_now_on_are_faint_before_each_was_asked_again(
    fleet: Fleet,
) -> None:
    async def body(terminal: Terminal) -> None:
        await terminal.sees("search", "40 %")
        terminal.app.watcher.service.contact = ConnectionState.REFUSED
        terminal.app.redraw()
        assert terminal.app.query_one("#projects", Pane).is_faint

    at(fleet, body)


def test_all_rows_are_looked_through_and_what_is_left_out_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        many = "".join(f'[projects."p{number}"]\ncredit_weight = 1.0\n' for number in range(300))
        async with (
            running(tmp_path, many) as service,
            serving(service.app) as port,
            screen(f"http://127.0.0.1:{port}") as terminal,
        ):
            await terminal.sees("The first 200 of 301 are shown; / finds others.")
            await terminal.press("slash", *"p299", "enter")
            await terminal.sees("p299 ", "active", without="p1")

    asyncio.run(main())
