"""Fields of forms as the API takes them, and what is said of those that it does not take.

Rule: a field that the form does not have stays as it is; one that was emptied takes the value away.
What a person can correct is said on the page that it came from; anything else is a page of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from headgate.bodies.admin import PatchBody
from headgate.dashboard.page import Done, Form
from headgate.errors import CallerError, InvalidFieldError
from headgate.web.refusals import Refusal

Patch = TypeVar("Patch", bound=PatchBody)
Choice = TypeVar("Choice", bound=str)

_LEAST_SERVER_STATUS = 500


async def changed_or_said(to: str, change: Callable[[], Awaitable[str]]) -> Done:
    """Do something, and go on to a page that tells what was done, or what was wrong with it."""
    try:
        return Done(to=to, said=f"{await change()}.")
    except CallerError as error:
        return Done(to=to, said=f"{error}.", is_error=True)
    except Refusal as refusal:
        if refusal.kind.status >= _LEAST_SERVER_STATUS:
            raise
        return Done(to=to, said=f"{refusal.body.error}.", is_error=True)


def text_of(form: Form, name: str) -> str | UnsetType | None:
    """Return a text; an empty one takes the value away."""
    if not form.has(name):
        return UNSET
    return form.get(name) or None


def integer_of(form: Form, name: str) -> int | UnsetType | None:
    """Return a whole number, also one that was written with commas."""
    text = text_of(form, name)
    if text is None or text is UNSET:
        return text
    digits = text.replace(",", "").replace(" ", "")
    if not digits.isascii() or not digits.isdigit() or len(digits) > len(str(2**63)):
        raise InvalidFieldError(name, "must be a whole number")
    return int(digits)


def float_of(form: Form, name: str) -> float | UnsetType | None:
    """Return a number."""
    text = text_of(form, name)
    if text is None or text is UNSET:
        return text
    try:
        return float(text)
    except ValueError:
        raise InvalidFieldError(name, "must be a number") from None


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
