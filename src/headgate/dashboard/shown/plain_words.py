"""What programs call things, as pages say it: one table for each kind of name.

Rule: a name that is not in its table is shown as it is; nothing is hidden because nobody thought of
it. Whoever looks into logs or into the API finds the name itself in the title of the words.
"""

from __future__ import annotations

from headgate.bodies.slots import LimitBody
from headgate.core.key_slots.quota import UNIT_HOURS
from headgate.core.texts.figures import count

BOOKINGS = {
    "reserve": "held",
    "dispatched": "started",
    "extend": "held for longer",
    "commit": "booked",
    "release": "given back",
    "expire": "ran out",
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
    "initial-quota-poll": "first reading of the quota",
    "background-quota-poll": "reading of the quota",
    "wake-precheck": "reading before a wake",
    "manual-precheck": "reading before a wake by hand",
    "scheduled-wake": "a wake that was due",
    "initial-wake": "the first wake",
    "manual-wake": "a wake by hand",
    "forced-wake-retry": "the wake once more",
    "key-replaced": "the key was replaced",
    "key-unreadable": "the key cannot be read",
    "slot-from-nothing": "nothing was known of the slot",
    "slot-enabled": "enabled",
    "slot-disabled": "disabled",
    "slot-auto-disabled": "disabled by itself",
    "wake-condition-met": "a wake is due",
    "wake-skipped": "no wake was needed",
    "wake-missed": "a wake was missed",
    "wake-shared": "the wake of another slot serves it",
    "wake-unsent": "a wake was not sent",
    "wake-sent": "a wake was sent",
    "wake-window-closed": "the wake was not confirmed in time",
    "wake-scheduler.started": "wakes are watched",
    "wake-scheduler.config-changed": "wakes go by new settings",
    "quota-poller.started": "the quota is read from now on",
    "quota-poller.config-changed": "readings go by new settings",
    "quota-poller.stale-answer": "an answer came too late",
    "quota-poller.recovered": "readings work again",
    "quota-poller.wake-confirmed": "the wake was confirmed",
    "quota-poller.wake-unconfirmed": "the wake is not confirmed yet",
    "quota-poller.paused": "the provider asked for a pause",
    "quota-poller.backoff": "readings come less often",
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


def limit_words(limit: LimitBody) -> str:
    """Return for how long a limit of a provider is; a unit that nobody knows keeps its number."""
    if limit.unit is None:
        return ""
    number = "" if limit.number is None else count(limit.number)
    if limit.unit == UNIT_HOURS:
        return "an hour" if number == "1" else f"{number} hours".strip()
    return f"{number} of the provider's unit {limit.unit}".strip()
