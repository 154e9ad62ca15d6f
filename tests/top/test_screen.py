"""The screen over a real service: what is on it, and what keys do."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from administration.running import running
from headgate.core.tasks.task import TaskStatus
from headgate.top.pane import Pane
from service.support import ServiceProcess, running_service
from top.scene import Terminal, screen, serving

SETTINGS = """
[projects.search]
credit_weight = 2.0

[projects.evals]
credit_weight = 1.0
max_concurrent_agents = 1

[projects.off]
status = "paused"

[agents.tight]
capacity = 1

[targets.echo]
kind = "callable"
entry_point = "headgate.executors.echo:echo"
default = true

[targets.slow]
kind = "command"
command = ["sleep", "600"]

[budgets."session:eval"]
limit_usd = "50.00"

[[slots]]
name = "work"
provider = "zai"
key_env = "NOT_SET_ANYWHERE"
enabled = false
"""
AHEAD_SECONDS = 7_200.0
HOSTILE = "\x1b[2J\u202e"


class Fleet:
    """A service with a few tasks that run and wait until they are cancelled."""

    def __init__(self, service: ServiceProcess) -> None:
        self.service = service
        submit = service.submit
        self.running = submit(agentId="tight", projectId="search", target="slow", action="crawl")
        self.waiting = submit(agentId="tight", projectId="search", target="slow", action="crawl")
        self.paused = submit(agentId="judge", projectId="off", target="slow", action="judge")
        service.wait_for(self.running, "running")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder: Path = tmp_path_factory.mktemp("top")
    (folder / "headgate.toml").write_text(SETTINGS)
    with running_service(folder) as process:
        yield Fleet(process)


def at(fleet: Fleet, body: Callable[[Terminal], Awaitable[None]], **given: Any) -> None:
    async def main() -> None:
        async with screen(fleet.service.address, **given) as terminal:
            await body(terminal)

    asyncio.run(main())


def masked(text: str) -> str:
    """Return a screen without what differs from run to run; nothing moves by it."""
    text = re.sub(r"tsk_[0-9a-z]{26}", "tsk_" + "x" * 26, text)
    text = re.sub(r"…[0-9a-z]+", lambda cut: "…" + "x" * (len(cut[0]) - 1), text)
    text = re.sub(r"  wait .*", "", text)
    return re.sub(r"http://[0-9.:]+ +", "URL ", text)


TOTALS = """\
headgate URL live
queued 2 of 1,000  in flight 1 of 20  done -/min  failed -/min  spent $0.00
 1 Projects  2 Lanes [3 Running 1] 4 Waiting 2  5 Budgets  6 Slots
"""
RUNNING = {
    80: """\
task                              time   try  agent   project   target   action
…xxxxxxxxxxxxxxxxxxxxxxxx          2 h   1/1  tight   search    slow     crawl""",
    120: """\
task                                   time   try  agent   project   target   action
tsk_xxxxxxxxxxxxxxxxxxxxxxxxxx          2 h   1/1  tight   search    slow     crawl""",
}
KEYS = "/ filter  c cancel  p pause  w why  Enter more  s sort  ? help  q quit"


@pytest.mark.parametrize("width", [80, 120])
def test_a_screen_of_running_tasks(fleet: Fleet, width: int) -> None:
    async def body(terminal: Terminal) -> None:
        await terminal.press("3")
        text = masked(await terminal.sees("[3 Running 1]", "crawl", "live", "spent"))
        lines = text.splitlines()
        assert "\n".join(lines[:5]) == TOTALS + RUNNING[width]
        assert lines[-1] == KEYS

    at(fleet, body, size=(width, 24), ahead_seconds=AHEAD_SECONDS)


WAITING = {
    80: """\
 1 Projects  2 Lanes  3 Running 1 [4 Waiting 2] 5 Budgets  6 Slots
task               waits  agent   project   reason
…xxxxxxxxxx          2 h  tight   search    agent tight has 1 of 1 places in use
…xxxxxxxxxx          2 h  judge   off       project off is paused""",
    120: """\
 1 Projects  2 Lanes  3 Running 1 [4 Waiting 2] 5 Budgets  6 Slots
task                                  waits  agent   project   reason
tsk_xxxxxxxxxxxxxxxxxxxxxxxxxx          2 h  tight   search    agent tight has 1 of 1 places in use
tsk_xxxxxxxxxxxxxxxxxxxxxxxxxx          2 h  judge   off       project off is paused""",
}


@pytest.mark.parametrize("width", [80, 120])
def test_a_screen_of_waiting_tasks_with_their_reasons(fleet: Fleet, width: int) -> None:
    async def body(terminal: Terminal) -> None:
        await terminal.press("4")
        text = masked(await terminal.sees("places in use", "is paused"))
        assert "\n".join(text.splitlines()[2:6]) == WAITING[width]

    at(fleet, body, size=(width, 24), ahead_seconds=AHEAD_SECONDS)


def test_digits_and_tab_go_from_pane_to_pane(fleet: Fleet) -> None:
    async def body(terminal: Terminal) -> None:
        await terminal.sees("[1 Projects]", "search", "40 %")
        await terminal.press("tab")
        await terminal.sees("[2 Lanes]", "tight", "oldest")
        await terminal.press("5")
        await terminal.sees("[5 Budgets]", "session:eval", "$50.00")
        await terminal.press("6")
        await terminal.sees("[6 Slots]", "disabled in the configuration")
        await terminal.press("tab")
        await terminal.sees("[1 Projects]")
        await terminal.press("shift+tab")
        await terminal.sees("[6 Slots]")

    at(fleet, body)


def test_a_large_terminal_shows_all_panes_and_a_small_one_again_one(fleet: Fleet) -> None:
    async def body(terminal: Terminal) -> None:
        shown = ("1 Projects", "2 Lanes", "tight", "places in use", "session:eval", "disabled in")
        await terminal.sees(*shown)
        await terminal.resize(80, 24)
        await terminal.sees("[1 Projects]", without="places in use")
        await terminal.resize(40, 10)
        await terminal.sees("search")
        await terminal.resize(4, 2)
        await terminal.resize(80, 24)
        await terminal.sees("[1 Projects]", "search")
        await terminal.resize(200, 60)
        await terminal.sees(*shown)

    at(fleet, body, size=(200, 60))


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


def test_a_wider_terminal_has_more_columns_and_sorts_by_those_that_are_seen(fleet: Fleet) -> None:
    async def body(terminal: Terminal) -> None:
        await terminal.sees("search", "40 %", "target", without="owed")
        await terminal.press(*"ssssss")
        await terminal.sees("Sorted by queued.")
        await terminal.resize(120, 24)
        await terminal.sees("owed", "queued▲", "cap", "weight", "tokens")
        await terminal.press(*"sss")
        await terminal.sees("Sorted by weight.")
        await terminal.press("5")
        await terminal.sees("session:eval", "ends", "overrun", "an hour")
        await terminal.press("6")
        await terminal.sees("work", "woken", "errors", "held because")

    at(fleet, body)


def test_a_filter_that_is_pasted_presses_no_other_key(fleet: Fleet) -> None:
    async def body(terminal: Terminal) -> None:
        await terminal.press("4")
        await terminal.sees("places in use", "judge")
        await terminal.paste("/policy\n")
        await terminal.sees("Nothing here contains “policy”.", without="Cancel task")
        await terminal.press("slash", *["backspace"] * 6, "a", "slash", "b", "enter")
        await terminal.sees("Nothing here contains “a/b”.")

    at(fleet, body)
    assert fleet.service.task(fleet.waiting)["state"] == TaskStatus.QUEUED.value


def test_a_filter_is_told_beside_what_was_said_last(fleet: Fleet) -> None:
    async def body(terminal: Terminal) -> None:
        await terminal.press("slash", *"evals", "enter", "s")
        await terminal.sees("contains “evals”", "Sorted by project.")

    at(fleet, body)


def test_a_token_for_one_agent_is_told_why_it_sees_no_projects(fleet: Fleet) -> None:
    wish = {"name": "one-agent", "permissions": ["read"], "agentId": "tight"}
    made = fleet.service.ask("POST", "/tokens", wish)

    async def body(terminal: Terminal) -> None:
        await terminal.sees("A token for one agent sees no projects.")

    at(fleet, body, token=made.body["token"])


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


def test_what_a_question_is_about_is_seen_behind_it_in_any_size(fleet: Fleet) -> None:
    async def body(terminal: Terminal) -> None:
        await terminal.press("3")
        await terminal.sees("tight   search")
        await terminal.press("c")
        await terminal.sees(f"Cancel task {fleet.running}?", "[3 Running 1]", "tight   search")
        await terminal.resize(200, 50)
        await terminal.sees(f"Cancel task {fleet.running}?", "6 Slots", "held because")
        await terminal.resize(80, 24)
        await terminal.sees("[3 Running 1]", "tight   search", without="held because")
        await terminal.press("n")
        await terminal.sees("[3 Running 1]", without="Cancel task")

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
        await terminal.sees("places in use")
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


def test_the_keys_are_explained_and_q_leaves(fleet: Fleet) -> None:
    async def body(terminal: Terminal) -> None:
        await terminal.press("question_mark")
        await terminal.sees("headgate top: keys", "cancel a task; it asks first")
        await terminal.press("q")
        await terminal.sees("[1 Projects]")
        await terminal.press("q")
        assert not terminal.app.is_running

    at(fleet, body)


@pytest.mark.parametrize("place", ["slash", "question_mark", "tab"])
def test_control_c_leaves_from_wherever_one_is(fleet: Fleet, place: str) -> None:
    async def body(terminal: Terminal) -> None:
        await terminal.press(place, "ctrl+c")
        assert not terminal.app.is_running

    at(fleet, body)


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
        seen = terminal.app.watcher.interest.waiting
        assert len(seen) == 18
        await terminal.press("end")
        await terminal.until(lambda text: text.count("project off is paused") == 18)
        known = set(terminal.app.watcher.picture.reasons)
        assert known <= {*seen, *terminal.app.watcher.interest.waiting}
        assert more[-1] in terminal.app.watcher.interest.waiting

    try:
        at(fleet, body)
    finally:
        for task_id in more:
            fleet.service.ask("POST", f"/tasks/{task_id}/cancel")


def test_who_may_only_read_is_told_so_where_that_is_not_enough(fleet: Fleet) -> None:
    made = fleet.service.ask("POST", "/tokens", {"name": "reader", "permissions": ["read"]})

    async def body(terminal: Terminal) -> None:
        await terminal.press("3")
        await terminal.sees("crawl")
        await terminal.press("c", "y")
        await terminal.sees("Not done:", "permission cancel")

    at(fleet, body, token=made.body["token"])


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
