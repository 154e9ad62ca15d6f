"""The screen of `headgate top`: seven panes over one picture, and the keys.

In a small terminal one pane is shown, in a large one all. Rule: a key never waits for the service;
what it asks for is done beside, and the line below the panes says what came of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from headgate.api.schema.tasks import WhyBody
from headgate.cli.top.banner import (
    Line,
    address_parts,
    key_parts,
    message_parts,
    tab_parts,
    total_parts,
)
from headgate.cli.top.panes import (
    PANES,
    PROJECTS,
    RUNNING,
    SLOTS,
    WAITING,
    Pane,
    PaneKind,
    amount,
    answer_of,
    note,
)
from headgate.cli.top.service_state import PAUSE_SECONDS, Topic
from headgate.cli.top.tables import RowArranger, RowFilter, drawable, drawable_lines
from headgate.cli.top.watcher import ScreenContent, Watcher, told
from headgate.client.client import Client
from headgate.core.slots.status import SlotBody
from headgate.core.task_view import TaskSnapshot
from headgate.errors import ServiceError

# What comes over the panes: a question with two answers, and a text to read.

MAX_LINES = 500
MAX_LINE_LENGTH = 1_000
CLOSE = "Esc closes; arrows and Page Down scroll."

HELP = """\
1 to 7, Tab   another pane
arrows, j k   another row; Page Up, Page Down, Home and End
Enter         everything about the row
w             why a task waits
c             cancel a task; it asks first
p             pause or resume a project; it asks first
/             show only what contains a text
s             sort by the next column; after the last, as at first
r             the other way round
?             these keys
Ctrl-Z        back to the shell; fg takes it up again
q, Ctrl-C     quit

In a large terminal all panes are shown at once. In a share, │ is \
the target. In a budget, █ is spent and ▒ is reserved.

The service tells when something happens: live. Where it cannot, \
it is asked every few seconds: polling."""


class ConfirmScreen(ModalScreen[bool]):
    """A question that is answered by y or n."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape,q", "answer(False)", "no"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """Make the box."""
        with Vertical(classes="box"):
            yield Static(Text(drawable_lines(self._question)))
            yield Static(Text("y yes    n no", style="bold"))

    def action_answer(self, answer: bool) -> None:  # noqa: FBT001 - textual gives it by place
        """Close with an answer."""
        self.dismiss(answer)


class TextScreen(ModalScreen[None]):
    """A text under a title; of a very long one the beginning."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter,question_mark", "close", "close"),
        Binding("down,j", "scroll('down')", show=False),
        Binding("up,k", "scroll('up')", show=False),
    ]

    def __init__(self, title: str, lines: Sequence[str]) -> None:
        super().__init__()
        self._title = title
        self._text = bounded(lines)

    def compose(self) -> ComposeResult:
        """Make the box."""
        with Vertical(classes="box reading"):
            yield Static(Text(self._title, style="bold"))
            with VerticalScroll(id="text"):
                yield Static(Text(self._text))
            yield Static(Text(CLOSE, style="italic"))

    def action_close(self) -> None:
        """Go back to the panes."""
        self.dismiss()

    def action_scroll(self, way: str) -> None:
        """Scroll by one line."""
        text = self.query_one("#text", VerticalScroll)
        if way == "down":
            text.scroll_down(animate=False)
        else:
            text.scroll_up(animate=False)


def bounded(lines: Sequence[str]) -> str:
    """Return lines as one text, with everything written out that a terminal would act upon."""
    # What one thing says may have lines itself.
    parted = [part for line in lines for part in line.split("\n", MAX_LINES)][: MAX_LINES + 1]
    shown = [drawable_lines(line[:MAX_LINE_LENGTH]) for line in parted[:MAX_LINES]]
    if len(parted) > MAX_LINES:
        shown.append("… and more; headgate show prints all of a task")
    return "\n".join(shown)


ALL_FROM_WIDTH, ALL_FROM_HEIGHT = 160, 36
MAX_WANTED_LENGTH = 200
SAID_SECONDS = 8.0
REDRAW_SECONDS = 1.0

_TASK_PANES = (RUNNING, WAITING)
_SWITCHED: dict[str, tuple[str, Literal["active", "paused"]]] = {
    "active": ("Pause project {}?\nNothing of it starts until it is resumed.", "paused"),
    "paused": ("Resume project {}?\nWhat waits in it may start at once.", "active"),
}
"""What the key p asks about a project, and what it makes of it; others are left as they are."""


class Texts(NamedTuple):
    """How a thing is written out in full, a line for each fact."""

    task: Callable[[TaskSnapshot], list[str]]
    why: Callable[[WhyBody], list[str]]
    slot: Callable[[SlotBody], list[str]]


class Top(App[None]):
    """Shows one service, until it is closed."""

    CSS_PATH = "top.tcss"
    TITLE = "headgate top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"pane({number - 1})", show=False) for number in range(1, 8)),
        Binding("tab", "step(1)", show=False, priority=True),
        Binding("shift+tab", "step(-1)", show=False, priority=True),
        # Before any widget hears of it: what is typed fast or pasted after it is a text, and would
        # be pressed on a pane otherwise, where c and y are not letters.
        Binding("slash", "filter", show=False, priority=True),
        Binding("c", "cancel", show=False),
        Binding("p", "pause", show=False),
        Binding("w", "why", show=False),
        Binding("enter", "details", show=False),
        Binding("s", "sort", show=False),
        Binding("r", "reverse", show=False),
        Binding("question_mark", "help", show=False),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
        Binding("q", "quit", show=False),
        Binding("ctrl+c,ctrl+q", "quit", show=False, priority=True),
    ]

    def __init__(
        self,
        client: Client,
        texts: Texts,
        *,
        pause_seconds: float = PAUSE_SECONDS,
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(ansi_color=True)
        self.animation_level = "none"
        self.theme = "ansi-dark"
        self.watcher = Watcher(client, self.redraw, pause_seconds=pause_seconds)
        self._client = client
        self._texts = texts
        self._now = now
        self._current = 0
        self._row_arrangers = {kind.topic: RowArranger() for kind in PANES}
        self._wanted = ""
        self._said: tuple[str, bool, float] = ("", False, 0.0)

    def compose(self) -> ComposeResult:
        """Make the lines and the panes."""
        yield Line(id="place")
        yield Line(id="totals")
        yield Line(id="tabs")
        with Container(id="panes"):
            for kind in PANES:
                yield Pane(kind)
        yield Input(id="filter", max_length=MAX_WANTED_LENGTH, compact=True)
        yield Line(id="said")
        yield Line(id="keys")

    def on_mount(self) -> None:
        """Begin to ask and to listen."""
        self.action_pane(0)
        self.run_worker(self.watcher.ask_forever())
        self.run_worker(self.watcher.listen_forever())
        self.set_interval(REDRAW_SECONDS, self.redraw)
        # Whatever ran meanwhile has left nothing on the terminal that could be built upon.
        self.app_resume_signal.subscribe(self, lambda _: self.refresh(layout=True))

    def on_resize(self, event: events.Resize) -> None:
        """Show all panes where there is room for them."""
        # The size of the program itself is still that from before.
        width, height = event.size
        has_room = width >= ALL_FROM_WIDTH and height >= ALL_FROM_HEIGHT
        self.screen_stack[0].set_class(has_room, "all")
        self.call_after_refresh(self.redraw)

    def on_pane_moved(self) -> None:
        """Ask for the reasons of the rows that are seen now."""
        self._tell_watcher()

    def redraw(self) -> None:
        """Draw everything as it is known now."""
        if not self.is_running or not self._panes():
            return
        service, width = self.watcher.service, self.size.width
        self._line("place", address_parts(self._client.url, service, width=width))
        self._line("totals", total_parts(service, width=width))
        self._line("tabs", tab_parts(service, self._current, width=width))
        text, is_problem, until = self._said
        said = text if time.monotonic() < until else ""
        self._line("said", message_parts(said, service, is_problem=is_problem, wanted=self._wanted))
        self._line("keys", key_parts(width))
        for index, pane in enumerate(self._panes()):
            if pane.display:
                self._redraw_pane(index, pane)
        self._tell_watcher()

    def _redraw_pane(self, index: int, pane: Pane) -> None:
        service, kind = self.watcher.service, pane.kind
        # The service has looked for the text in tasks already, also in what is not shown.
        wanted = "" if kind in _TASK_PANES else self._wanted
        row_filter = RowFilter(wanted=wanted, column=pane.sort, is_reversed=pane.is_reversed)
        rows = kind.rows(service, self._now())
        found = self._row_arrangers[kind.topic].arranged(answer_of(kind, service), rows, row_filter)
        title = f"{index + 1} {kind.name} {amount(kind, service)}".rstrip()
        pane.show(
            found.rows,
            note=note(kind, service, wanted=self._wanted, found=found),
            title=title if self.screen_stack[0].has_class("all") else "",
            is_faint=service.is_past or kind.topic in service.problems,
        )

    def _tell_watcher(self) -> None:
        shown = [pane for pane in self._panes() if pane.display]
        waiting = next((pane.seen for pane in shown if pane.kind is WAITING), ())
        topics = tuple(pane.kind.topic for pane in shown)
        self.watcher.show(ScreenContent(topics=topics, waiting=waiting, wanted=self._wanted))

    def say(self, text: str, *, is_problem: bool = False) -> None:
        """Say something below the panes, for a while."""
        self._said = (text, is_problem, time.monotonic() + SAID_SECONDS)
        self.redraw()

    def action_pane(self, index: int) -> None:
        """Go to a pane; what was half typed is left."""
        self._current = index
        self._filter().remove_class("asked")
        for place, pane in enumerate(self._panes()):
            pane.set_class(place == index, "current")
        self._give_keys_to(self._pane())
        self.call_after_refresh(self.redraw)

    def action_step(self, panes: int) -> None:
        """Go to the next pane, or to the one before."""
        if len(self.screen_stack) == 1:
            self.action_pane((self._current + panes) % len(PANES))

    def action_sort(self) -> None:
        """Sort the pane by its next column."""
        title = self._pane().sort_by_next()
        self.say(f"Sorted by {title}." if title else "In the order of the service.")

    def action_reverse(self) -> None:
        """Turn the order of the pane round."""
        self._pane().is_reversed = not self._pane().is_reversed
        self.redraw()

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(TextScreen("headgate top: keys", HELP.splitlines()))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Let the key of the filter be a letter where one is being typed, or something is read."""
        if action == "filter":
            return len(self.screen_stack) == 1 and not self._filter().has_class("asked")
        return super().check_action(action, parameters)

    def action_filter(self) -> None:
        """Ask for a text, beginning with the one that is looked for."""
        field = self._filter()
        field.value = self._wanted
        field.placeholder = "Show only what contains this text; Enter, or Esc to leave it"
        field.add_class("asked")
        self._give_keys_to(field)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Show only what contains a text."""
        wanted = event.value.strip()
        if not wanted.isprintable():
            self.say("Type printable characters only.", is_problem=True)
            return
        self._wanted = wanted
        self.action_pane(self._current)

    def key_escape(self) -> None:
        """Leave the filter as it was."""
        self.action_pane(self._current)

    def action_cancel(self) -> None:
        """Cancel the task of the row, after a question."""
        task_id = self._task_id("cancel")
        if task_id is None:
            return

        def answered(is_meant: bool | None) -> None:  # noqa: FBT001 - textual gives it by place
            if is_meant:
                self._do(self._cancel(task_id))

        self.push_screen(
            ConfirmScreen(f"Cancel task {task_id}?\nOne that runs is told to stop."), answered
        )

    async def _cancel(self, task_id: str) -> None:
        answer = await self._client.cancel(task_id)
        if answer.status == "cancelled":
            self.watcher.note_gone(task_id)
        else:
            self.watcher.ask_again(Topic.RUNNING, Topic.STATS)
        self.say(f"Task {answer.task_id} is {answer.status}.")

    def action_pause(self) -> None:
        """Pause the project of the row, or resume it, after a question."""
        row = self._pane().selected
        if self._kind() is not PROJECTS or row is None:
            self.say("Choose a project first: 1 shows them.")
            return
        self._do(self._ask_status(row.key))

    async def _ask_status(self, project_id: str) -> None:
        # The row may be seconds old, and the question must be about what is so now.
        status = (await self._client.get_project(project_id)).status
        if status not in _SWITCHED:
            self.say(
                f"Project {project_id} is {status}; the key p only pauses what is active and"
                " resumes what is paused.",
                is_problem=True,
            )
            return
        question, wanted = _SWITCHED[status]

        def answered(is_meant: bool | None) -> None:  # noqa: FBT001 - textual gives it by place
            if is_meant:
                self._do(self._set_status(project_id, was=status, wanted=wanted))

        self.say("")
        self.push_screen(ConfirmScreen(question.format(project_id)), answered)

    async def _set_status(
        self, project_id: str, *, was: str, wanted: Literal["active", "paused"]
    ) -> None:
        status = (await self._client.get_project(project_id)).status
        if status not in (was, wanted):
            self.say(f"Not done: project {project_id} is {status} by now.", is_problem=True)
        else:
            status = (await self._client.change_project(project_id, status=wanted)).status
            self.say(f"Project {project_id} is {status}.")
        self.watcher.note_status(project_id, status)
        self.redraw()

    def action_why(self) -> None:
        """Show every rule that keeps the task of the row waiting."""
        task_id = self._task_id("ask why about")
        if task_id is not None:
            self._do(self._show_why(task_id))

    async def _show_why(self, task_id: str) -> None:
        answer = await self._client.why(task_id)
        self._read("Why it waits", self._texts.why(answer))

    def action_details(self) -> None:
        """Show everything about the row."""
        row, kind = self._pane().selected, self._kind()
        if row is None:
            self.say("There is nothing to show.")
        elif kind in _TASK_PANES:
            self._do(self._show_task(row.key))
        elif kind is SLOTS:
            self._do(self._show_slot(row.key))
        else:
            titles = [column.title for column in kind.columns]
            cells = [cell.text for cell in row.cells]
            facts = zip(titles, cells, strict=True)
            lines = [f"{title:<16} {text.strip()}" for title, text in facts if title and text]
            self._read(f"{kind.name}: {drawable(row.key)}", lines)

    async def _show_task(self, task_id: str) -> None:
        self._read(f"Task {task_id}", self._texts.task(await self._client.get(task_id)))

    async def _show_slot(self, name: str) -> None:
        slot = await self._client.slot(name)
        self._read(f"Slot {drawable(name)}", self._texts.slot(slot))

    def _read(self, title: str, lines: list[str]) -> None:
        self.say("")
        self.push_screen(TextScreen(title, lines))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that a person asked for; it comes before what is asked regularly."""
        self.watcher.throttle.take()
        self.say("Asking…")
        self.run_worker(self._told(work))

    async def _told(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except ServiceError as error:
            self.say(f"Not done: {told(error)}.", is_problem=True)

    def _task_id(self, verb: str) -> str | None:
        row = self._pane().selected
        if self._kind() not in _TASK_PANES or row is None:
            self.say(f"Choose a task to {verb}: 3 shows those that run, 4 those that wait.")
            return None
        return row.key

    def _panes(self) -> list[Pane]:
        return list(self.screen_stack[0].query(Pane))

    def _give_keys_to(self, widget: Pane | Input) -> None:
        # A widget's own way to take the focus takes effect later, after keys that are here already.
        self.screen_stack[0].set_focus(widget)

    def _filter(self) -> Input:
        return self.screen_stack[0].query_one("#filter", Input)

    def _pane(self) -> Pane:
        return self._panes()[self._current]

    def _kind(self) -> PaneKind:
        return PANES[self._current]

    def _line(self, name: str, parts: list[tuple[str, str]]) -> None:
        self.screen_stack[0].query_one(f"#{name}", Line).show(parts)
