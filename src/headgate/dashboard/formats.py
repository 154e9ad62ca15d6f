"""Texts as pages show them, and the filters by which templates write numbers and texts.

Rule: a text that somebody else wrote is shown, never obeyed. What a browser would act upon is
written out, and what is long is cut.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from headgate.core import text as figure_texts
from headgate.core.budgets.alerts import NEARLY_PERCENT
from headgate.core.slots.quota import UNIT_HOURS
from headgate.core.slots.status import QuotaLimitBody, SlotBody
from headgate.core.slots.wakes import ended_words, mode_words
from headgate.core.task import TaskRecord, TaskStatus
from headgate.core.text import ago, coming, count, printable, printable_lines, seconds_of

MAX_TEXT_LENGTH = 4_000
MAX_LINE_LENGTH = 200
ELLIPSIS = "…"
ID_BEGINNING, ID_END = 8, 6


def line(text: object, most: int = MAX_LINE_LENGTH) -> str:
    """Return a text as one line: control and direction characters written out, the end cut off."""
    whole = str(text)
    shown = printable(whole[:most])
    return shown if len(whole) <= most else shown + ELLIPSIS


def block(text: object, most: int = MAX_TEXT_LENGTH) -> str:
    """Return a text with its lines; all other control characters are written out."""
    whole = str(text)
    shown = printable_lines(whole[:most])
    return shown if len(whole) <= most else shown + ELLIPSIS


def capital(text: str) -> str:
    """Return a text with a capital letter at its beginning, as a sentence has it."""
    return f"{text[:1].upper()}{text[1:]}"


def assumption(assumed: tuple[int, int], booked: tuple[int, int]) -> str:
    """Say whether tokens and micro-dollars were reported; nothing where they were."""
    if not any(assumed):
        return ""
    return "assumed" if assumed == booked else "partly assumed"


def short_id(whole: str) -> str:
    """Return the beginning and the end of an id, which is where ids differ."""
    short = f"{whole[:ID_BEGINNING]}{ELLIPSIS}{whole[-ID_END:]}"
    return short if len(short) < len(whole) else whole


FILTERS = {
    "line": line,
    "block": block,
    "capital": capital,
    "short_id": short_id,
    "usd": figure_texts.usd,
    "column_usd": figure_texts.column_usd,
    "exact_usd": figure_texts.exact_usd,
    "dollars": figure_texts.dollars,
    "count": figure_texts.count,
    "duration": figure_texts.duration,
    "percent": figure_texts.percent,
    "iso": figure_texts.iso,
    "clock": figure_texts.clock,
}


# What programs call things, as pages say it: one table for each kind of name.
#
# Rule: a name that is not in its table is shown as it is; nothing is hidden because nobody
# thought of it. Whoever looks into logs or into the API finds the name itself in the title of the
# words.

BOOKINGS = {
    "reserve": "reserved",
    "dispatched": "started",
    "extend": "extended",
    "commit": "booked",
    "release": "released",
    "expire": "expired",
    "adjust": "adjusted",
    "accept": "accepted",
    "reject": "rejected",
}
"""What was asked of a reservation, as the journal says it."""

DELIVERIES = {"pending": "to be sent", "delivered": "delivered", "dead": "given up"}

LIMITS = {
    "TOKENS_LIMIT": "tokens",
    "CREDIT_LIMIT": "credit",
    "TIME_LIMIT": "time",
}

LOG_PHASES = {"request": "sent", "response": "answer", "event": "", "error": "error"}

LOG_ACTIONS = {
    "initial-quota-poll": "first quota poll",
    "background-quota-poll": "quota poll",
    "wake-precheck": "poll before a wake",
    "manual-precheck": "poll before a manual wake",
    "scheduled-wake": "scheduled wake",
    "initial-wake": "first wake",
    "manual-wake": "manual wake",
    "forced-wake-retry": "repeated wake",
    "key-replaced": "key replaced",
    "key-unreadable": "key cannot be read",
    "slot-from-nothing": "no earlier state of the slot",
    "slot-enabled": "enabled",
    "slot-disabled": "disabled",
    "slot-auto-disabled": "disabled automatically",
    "wake-condition-met": "wake due",
    "wake-skipped": "wake not needed",
    "wake-missed": "wake missed",
    "wake-shared": "another slot wakes it",
    "wake-unsent": "wake not sent",
    "wake-sent": "wake sent",
    "wake-window-closed": "wake not confirmed in time",
    "wake-scheduler.started": "wake scheduler started",
    "wake-scheduler.config-changed": "wake scheduler uses new settings",
    "quota-observed": "quota read from traffic",
    "quota-poller.started": "quota poller started",
    "quota-poller.config-changed": "quota poller uses new settings",
    "quota-poller.stale-answer": "answer came too late",
    "quota-poller.recovered": "polls work again",
    "quota-poller.wake-confirmed": "wake confirmed",
    "quota-poller.wake-unconfirmed": "wake not confirmed yet",
    "quota-poller.paused": "the provider asked for a pause",
    "quota-poller.backoff": "polls less often",
}


_UNHEARD = ("cannot be reached", "did not answer in HTTP")
"""What is said of a receiver without an answer, before the words of a library."""

_UNHEARD_CAUSES = {
    "Name or service not known": "its name is not known",
    "nodename nor servname": "its name is not known",
    "No address associated": "its name is not known",
    "name resolution": "no name server answers",
    "All connection attempts failed": "nothing takes connections there",
    "Connection refused": "nothing takes connections there",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not trusted",
    "WRONG_VERSION_NUMBER": "it does not speak TLS there",
}
"""The causes that people meet, by a part of what systems and libraries say of them."""


def said(words: dict[str, str], name: str) -> str:
    """Return the words for a name, or the name itself where there are none."""
    return words.get(name, name)


def unheard_words(error: str | None) -> str:
    """Return what a receiver did instead of taking a message; its own words stay as they are."""
    if not error:
        return "did not take the message, and no reason is known"
    problem, _, cause = error.partition(": ")
    if problem not in _UNHEARD:
        return f"did not take the message: {error}"
    known = next((words for part, words in _UNHEARD_CAUSES.items() if part in cause), "")
    return f"{problem}: {known}" if known else f"{problem}; headgate webhooks ping says more"


def limit_words(limit: QuotaLimitBody) -> str:
    """Return for how long a limit of a provider is; a unit that nobody knows keeps its number."""
    if limit.unit is None:
        return ""
    number = "" if limit.number is None else count(limit.number)
    if limit.unit == UNIT_HOURS:
        return "an hour" if number == "1" else f"{number} hours".strip()
    return f"{number} of the provider's unit {limit.unit}".strip()


# What a page says of a slot: how much is used, when its window ends, what wakes it next.
#
# Rule: the overview and the pages of slots draw from here, so that a slot reads the same on all.


class SlotBar(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a quota is used, of 100; without a reading the bar is empty."""

    used: float
    tone: str
    words: str


def bar_of(slot: SlotBody) -> SlotBar:
    """Return the bar of a slot; used up has the tone that a budget has then."""
    used = slot.percent_used
    if used is None:
        return SlotBar(used=0.0, tone="spent", words="not known yet")
    tone = "warn" if used >= NEARLY_PERCENT else "spent"
    if slot.state == "exhausted":
        tone = "full"
    return SlotBar(used=used, tone=tone, words=f"{used:.1f}".removesuffix(".0") + " % used")


def reset_words(resets_at: datetime | float, now: float) -> str:
    """Return when a window resets, or that it ended."""
    if seconds_of(resets_at) > now:
        return f"resets {coming(resets_at, now)}"
    return ended_words(ago(resets_at, now))


def next_wake_words(slot: SlotBody) -> str:
    """Return when and why the next wake comes or is skipped, or why there is none."""
    if slot.next_wake is not None:
        return slot.next_wake.text
    if not slot.wake_modes:
        return "never: no wake mode is set"
    why = slot.no_wake_reason or slot.disabled_reason
    if slot.wakes_enabled and not why:
        return "not known yet"
    return f"none: {why or 'it is disabled'}"


def wake_mode_words(slot: SlotBody) -> str:
    """Return when a slot is woken."""
    return ", ".join(mode_words(mode) for mode in slot.wake_modes) or "never"


# Since when a task waits or runs, and how long it took.
#
# Rule: what an earlier attempt took is no time of the latest; a record has the beginning of the one
# before until the next has begun.


def started_at(record: TaskRecord) -> float | None:
    """Return when the latest attempt began; None if it has not begun."""
    at, past = record.progress.started_at, record.progress.attempts
    if record.task.status is TaskStatus.ASSIGNED or at is None:
        return None
    return None if past and at < past[-1].ended_at else at


def queued_since(record: TaskRecord) -> float:
    """Return since when a task that waits may start: its submit, or the end of its last attempt."""
    past = record.progress.attempts
    queued_at = past[-1].ended_at if past else record.task.created_at
    return max(queued_at, record.task.not_before or 0.0)


def seconds_so_far(record: TaskRecord, now: float) -> float | None:
    """Return how long a task waits, runs, or took; None if no attempt has begun."""
    if record.task.status is TaskStatus.QUEUED:
        return max(0.0, now - queued_since(record))
    began, ended = started_at(record), record.progress.completed_at
    return None if began is None else max(0.0, (now if ended is None else ended) - began)
