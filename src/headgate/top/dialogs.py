"""What comes over the panes: a question with two answers, and a text to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from headgate.top.drawable import drawable_lines

MAX_LINES = 500
MAX_LINE_LENGTH = 1_000
CLOSE = "Esc closes; arrows and Page Down scroll."

HELP = """\
1 to 6, Tab   another pane
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


class Ask(ModalScreen[bool]):
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


class Reading(ModalScreen[None]):
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
