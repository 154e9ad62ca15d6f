"""Fields of forms as the API takes them, and what is said of those that it does not take.

Rule: a field that the form does not have stays as it is; one that was emptied takes the value away.
A form that shows how things stand says in hidden fields what it was drawn with, so that a field
that its sender left alone takes back no change of somebody else. What a person can correct is said
on the page that it came from; anything else is a page of its own.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from headgate.api.errors import ApiError
from headgate.api.schema.admin import PatchBody
from headgate.core.money import to_written_limit_micro_usd
from headgate.dashboard.page import Done, Form, Page
from headgate.errors import CallerError, InvalidFieldError

# What forms call their fields, one table for each form, and what is wrong with a field by it.
#
# Templates take their labels from here and messages do too, so that a person finds the field that
# is spoken of. Rule: a field without a label is called as whoever refused it calls it.

BUDGET_FIELDS = {
    "scope": "Scope",
    "limit_usd": "Dollars",
    "limit_tokens": "Tokens",
    "window": "Window",
}
PROJECT_FIELDS = {
    "credit_weight": "Weight",
    "max_concurrent_agents": "Cap on tasks in flight",
    "budget_limit": "Token budget",
    "status": "Status",
}
AGENT_FIELDS = {"capacity": "Capacity", "status": "Status"}
FILTER_FIELDS = {
    "text": "Text",
    "project": "Project",
    "agent": "Agent",
    "label": "Label",
    "state": "State",
    "target": "Target",
    "slot": "Slot",
    "provider": "Provider",
    "scope": "Budget",
    "since": "Submitted since (UTC)",
    "until": "Submitted before (UTC)",
}
CALL_FIELDS = {
    "project": "Project",
    "agent": "Agent",
    "model": "Model",
    "state": "State",
    "upstream": "Upstream",
    "slot": "Slot",
    "task": "Task",
    "since": "Arrived since (UTC)",
    "until": "Arrived before (UTC)",
}
WEBHOOK_FIELDS = {"state": "State", "task": "Task", "url": "Address"}
SETTINGS_FIELDS = {"text": "Text", "section": "Section", "reset": "Override"}
TOKEN_FIELDS = {
    "name": "Name",
    "permissions": "Permissions",
    "expiresAt": "Expires after",
    "agentId": "Only for the agent",
    "projectId": "Only for the project",
}


def error_text(error: InvalidFieldError | ApiError, labels: Mapping[str, str]) -> str:
    """Return what is wrong, by the label of the field that it is about."""
    field, whole = _field_of(error), str(error)
    # A setting is named by its whole path; its last part is the field of the form.
    label = labels.get(field.rpartition(".")[2])
    if label is None:
        return whole
    problem = whole.removeprefix(f"field '{field}': ").removeprefix(f"{field}: ")
    return f"{label}: {problem}"


def _field_of(error: InvalidFieldError | ApiError) -> str:
    if isinstance(error, InvalidFieldError):
        return error.field
    return str(error.body.details.get("field", ""))


Patch = TypeVar("Patch", bound=PatchBody)
Choice = TypeVar("Choice", bound=str)

DRAWN_PREFIX = "drawn."
"""Begins the name of the hidden field that says what a field was drawn with."""

_LEAST_SERVER_STATUS = 500
_WHOLE = r"(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+)"
"""Digits, or thousands that are set apart; a comma elsewhere may be meant as a point."""

_WHOLE_NUMBER = re.compile(_WHOLE)
_NUMBER = re.compile(rf"(?:{_WHOLE}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{{1,3}})?")
_NO_LABELS: Mapping[str, str] = {}


async def changed_or_said(
    to: str, change: Callable[[], Awaitable[str]], labels: Mapping[str, str] = _NO_LABELS
) -> Done:
    """Do something, and go on to a page that tells what was done, or what was wrong with it."""
    try:
        return Done(to=to, said=f"{await change()}.")
    except InvalidFieldError as error:
        problem = error_text(error, labels)
    except CallerError as error:
        problem = str(error)
    except ApiError as api_error:
        if api_error.kind.status >= _LEAST_SERVER_STATUS:
            raise
        problem = error_text(api_error, labels)
    return Done(to=to, said=f"{problem}.", is_error=True)


def rebased(form: Form, held: Mapping[str, str]) -> Form:
    """Return a form as if it had been drawn now: what its sender left alone is as it is held.

    `held` is what each field would be drawn with. One that the sender and somebody else both
    changed is refused.
    """
    left_alone = {}
    for name, text in held.items():
        if not (form.has(name) and form.has(DRAWN_PREFIX + name)):
            continue
        given, drawn = form.get(name), form.get(DRAWN_PREFIX + name)
        if given == drawn:
            left_alone[name] = text
        elif text not in (drawn, given):
            both = f"is {text or 'none'} now, and was {drawn or 'none'} when this form was drawn"
            raise InvalidFieldError(name, both)
    return form.replaced(left_alone)


def text_of(form: Form, name: str) -> str | UnsetType | None:
    """Return a text; an empty one takes the value away."""
    if not form.has(name):
        return UNSET
    return form.get(name) or None


def integer_of(form: Form, name: str) -> int | UnsetType | None:
    """Return a whole number, also one whose thousands are set apart."""
    digits = _written(form, name, _WHOLE_NUMBER, "a whole number, such as 1500 or 1,500")
    if not isinstance(digits, str):
        return digits
    if len(digits) > len(str(2**63)):
        raise InvalidFieldError(name, "has too many digits")
    return int(digits)


def float_of(form: Form, name: str) -> float | UnsetType | None:
    """Return a number."""
    text = _written(form, name, _NUMBER, "a number, such as 2 or 0.5")
    return float(text) if isinstance(text, str) else text


def dollars_of(form: Form, name: str) -> str | UnsetType | None:
    """Return a limit in dollars, as it was written but for what sets its thousands apart."""
    text = _written(form, name, _NUMBER, "an amount, such as 12.50, without $")
    if isinstance(text, str):
        to_written_limit_micro_usd(text, field=name)
    return text


def _written(
    form: Form, name: str, pattern: re.Pattern[str], wanted: str
) -> str | UnsetType | None:
    """Return the plain digits of a number that is not negative."""
    text = text_of(form, name)
    if not isinstance(text, str):
        return text
    if pattern.fullmatch(text.removeprefix("-")) is None:
        raise InvalidFieldError(name, f"must be {wanted}")
    if text.startswith("-"):
        raise InvalidFieldError(name, "must not be negative")
    return text.replace(",", "").replace(" ", "")


def one_of(form: Form, name: str, choices: Sequence[Choice]) -> Choice | UnsetType:
    """Return one of some words."""
    if not form.has(name):
        return UNSET
    given = form.get(name)
    for choice in choices:
        if choice == given:
            return choice
    raise InvalidFieldError(name, f"must be one of {', '.join(choices)}")


def changes_nothing(wanted: PatchBody) -> bool:
    """Tell whether a patch leaves everything as it is."""
    fields = (field for field in wanted.__struct_fields__ if field != "reset")
    return not wanted.reset and all(getattr(wanted, field) is UNSET for field in fields)


def only_changed(wanted: Patch, known: Patch) -> Patch:
    """Leave out what is so already, so that sending a form does not override what it shows."""
    same = {
        field: UNSET
        for field in wanted.__struct_fields__
        if field != "reset" and getattr(wanted, field) == getattr(known, field)
    }
    return msgspec.structs.replace(wanted, **same)


# Forms that were sent: a second click is answered as the first was, and does nothing more.
#
# Every page that is sent has a number of its own in its forms. While a service is slow people click
# again, and a browser sends a form again when its answer is reloaded; retrying a task twice is paid
# twice. Rule: the same form with the same number and the same fields is carried out once; one that
# failed may be sent again. A page that answers a form shows what nobody may see again, so it is not
# kept: only that it was shown.

ONCE_FIELD = "once"
MAX_KEPT = 1_000
KEPT_SECONDS = 3_600.0

_SHOWN = "this form was sent before. Look for its result in the list."

Deed = Callable[[], Awaitable[Done | Page]]
Doing = asyncio.Task[Done | Page]


class SentForms:
    """What came of the forms of the last hour, by caller, address, number and fields."""

    def __init__(self, ticks: Callable[[], float] | None = None) -> None:
        self._ticks = ticks
        self._kept: OrderedDict[object, tuple[Doing | Done, float]] = OrderedDict()

    async def once(self, key: object, do: Deed, *, again: str) -> Done | Page:
        """Carry a form out, or return what came of it; `again` is where a page is not shown twice.

        It is done in a task of its own: who clicks again has left the first request.
        """
        now = (self._ticks or asyncio.get_running_loop().time)()
        self._forget_before(now)
        kept, _ = self._kept.get(key, (None, now))
        if kept is None:
            doing = asyncio.create_task(_done(do))
            doing.add_done_callback(lambda ended: self._ended(key, ended, again))
            self._kept[key] = (doing, now + KEPT_SECONDS)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return await asyncio.shield(doing)
        return kept if isinstance(kept, Done) else _told(await asyncio.shield(kept), again)

    def _forget_before(self, now: float) -> None:
        while self._kept and now >= next(iter(self._kept.values()))[1]:
            self._kept.popitem(last=False)

    def _ended(self, key: object, doing: Doing, again: str) -> None:
        kept, kept_until = self._kept.get(key, (None, 0.0))
        has_failed = doing.cancelled() or doing.exception() is not None
        if kept is not doing:
            return
        if has_failed:
            del self._kept[key]
        else:
            self._kept[key] = (_told(doing.result(), again), kept_until)


async def _done(do: Deed) -> Done | Page:
    return await do()


def _told(done: Done | Page, again: str) -> Done:
    """Return what is told to whoever sends a form once more."""
    return done if isinstance(done, Done) else Done(to=again, said=_SHOWN, is_error=True)
