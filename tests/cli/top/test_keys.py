"""What keys do at a screen over a real service."""

from __future__ import annotations

import asyncio
import re

import pytest

from cli.top.fleet import Fleet, at
from cli.top.scene import Terminal
from headgate.core.task import TaskStatus


def test_a_text_is_looked_for_and_shown_until_it_is_taken_away(fleet: Fleet) -> None:
    async def body(terminal: Terminal) -> None:
        await terminal.press("4")
        await terminal.sees("tight", "judge")
        await terminal.press("slash", *"judge", "enter")
        await terminal.sees("judge", "contains “judge”", without="tight")
        await terminal.press("1")
        await terminal.sees("Nothing here contains “judge”.")
        await terminal.press("4", "slash", *["backspace"] * 5, "enter")
        await terminal.sees("tight", "judge", without="contains")
        await terminal.press("slash", *"zz", "escape")
        await terminal.sees("tight", without="contains")
        await terminal.press("slash", *"q1", "tab")
        await terminal.sees("[5 Budgets]", without="q1")

    at(fleet, body)


def test_a_filter_that_is_pasted_presses_no_other_key(fleet: Fleet) -> None:
    async def body(terminal: Terminal) -> None:
        await terminal.press("4")
        await terminal.sees("permits in use", "judge")
        await terminal.paste("/policy\n")
        await terminal.sees("Nothing here contains “policy”.", without="Cancel task")
        await terminal.press("slash", *["backspace"] * 6, "a", "slash", "b", "enter")
        await terminal.sees("Nothing here contains “a/b”.")

    at(fleet, body)
    assert fleet.service.task(fleet.waiting)["state"] == TaskStatus.QUEUED.value


def test_a_cancel_asks_first_and_no_means_no(fleet: Fleet) -> None:
    victim = fleet.service.submit(
        agentId="judge", projectId="off", target="slow", action="victim", labels={"v": "1"}
    )

    async def body(terminal: Terminal) -> None:
        await terminal.press("4", "slash", *"victim", "enter")
        await terminal.sees("judge", without="tight")
        await terminal.press("c")
        await terminal.sees(f"Cancel task {victim}?")
        await terminal.press("n")
        await terminal.sees("[4 Waiting", without="Cancel task")
        assert fleet.service.task(victim)["state"] == TaskStatus.QUEUED.value
        await terminal.press("c", "y")
        await terminal.sees(f"Task {victim} is cancelled.")
        await terminal.sees("Nothing here contains “victim”.")
        assert fleet.service.task(victim)["state"] == TaskStatus.CANCELLED.value

    at(fleet, body)


def test_a_project_is_paused_and_resumed(fleet: Fleet) -> None:
    def status() -> str:
        return str(fleet.service.ask("GET", "/projects/evals").body["status"])

    async def body(terminal: Terminal) -> None:
        await terminal.sees("evals", "20 %")
        await terminal.press("down", "p")
        await terminal.sees("Pause project evals?")
        await terminal.press("n")
        assert status() == "active"
        await terminal.press("p")
        await terminal.sees("Pause project evals?")
        await terminal.press("y")
        await terminal.sees("Project evals is paused.")
        assert status() == "paused"
        await terminal.press("p")
        await terminal.sees("Resume project evals?")
        await terminal.press("y")
        await terminal.sees("Project evals is active.")
        assert status() == "active"
        await terminal.press("3", "p")
        await terminal.sees("Choose a project first")

    at(fleet, body)


def test_p_goes_by_what_a_project_is_now_and_touches_no_archived_one(fleet: Fleet) -> None:
    def change(status: str) -> None:
        assert fleet.service.ask("PATCH", "/projects/evals", {"status": status}).status == 200

    async def body(terminal: Terminal) -> None:
        await terminal.sees("evals", "20 %")
        for status in ("archived", "draining"):
            await asyncio.to_thread(change, status)
            await terminal.press("p" if status == "draining" else "down", "p")
            await terminal.sees(f"Project evals is {status}; the key p only")
            assert fleet.service.ask("GET", "/projects/evals").body["status"] == status
        await asyncio.to_thread(change, "active")
        await terminal.press("p")
        await terminal.sees("Pause project evals?")
        await asyncio.to_thread(change, "archived")
        await terminal.press("y")
        await terminal.sees("Not done: project evals is archived by now.")

    try:
        at(fleet, body, size=(120, 24))
    finally:
        change("active")


def test_why_and_details_are_those_of_the_commands(fleet: Fleet) -> None:
    async def body(terminal: Terminal) -> None:
        await terminal.press("w")
        await terminal.sees("Choose a task to ask why about")
        await terminal.press("4")
        await terminal.sees("permits in use")
        await terminal.press("w")
        await terminal.sees("Why it waits", f"{fleet.waiting} is queued:", "held by")
        await terminal.press("escape", "enter")
        await terminal.sees(f"Task {fleet.waiting}", "max attempts", "crawl")
        await terminal.press("q", "6")
        await terminal.sees("disabled in")
        await terminal.press("enter")
        await terminal.sees("Slot work", "provider", "wake modes")
        await terminal.press("escape", "5")
        await terminal.sees("session:eval")
        await terminal.press("end", "enter")
        text = await terminal.sees("Budgets: session:eval", "limit", "$50.00")
        assert re.search(r"│ scope +session:eval", text)
        assert "│ name" not in text

    at(fleet, body)


def test_a_pane_is_sorted_by_its_columns_in_turn_and_turned_round(fleet: Fleet) -> None:
    async def names(terminal: Terminal) -> list[str]:
        found = re.findall(r"^(search|evals|off|default) ", terminal.text(), re.MULTILINE)
        return [str(name) for name in found]

    async def body(terminal: Terminal) -> None:
        await terminal.sees("default", "40 %")
        first = await names(terminal)
        await terminal.press("s")
        await terminal.sees("project▲", "Sorted by project.")
        assert await names(terminal) == ["default", "evals", "off", "search"]
        await terminal.press("r")
        await terminal.sees("project▼")
        assert await names(terminal) == ["search", "off", "evals", "default"]
        await terminal.press("r", *"ssssssss")
        await terminal.sees("In the order of the service.")
        assert await names(terminal) == first

    at(fleet, body)


@pytest.mark.parametrize("place", ["slash", "question_mark", "tab"])
def test_control_c_leaves_from_wherever_one_is(fleet: Fleet, place: str) -> None:
    async def body(terminal: Terminal) -> None:
        await terminal.press(place, "ctrl+c")
        assert not terminal.app.is_running

    at(fleet, body)


def test_who_may_only_read_is_told_so_where_that_is_not_enough(fleet: Fleet) -> None:
    made = fleet.service.ask("POST", "/tokens", {"name": "reader", "permissions": ["read"]})

    async def body(terminal: Terminal) -> None:
        await terminal.press("3")
        await terminal.sees("crawl")
        await terminal.press("c", "y")
        await terminal.sees("Not done:", "permission cancel")

    at(fleet, body, token=made.body["token"])
