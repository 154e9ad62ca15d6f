"""The rules for single fields of a submission; each returns the value to keep, or refuses it.

Rule: whatever passes here fits every store, every ledger and every log line: texts are bounded and
printable, times are within the calendar, amounts within what a reservation can hold.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NoReturn

import msgspec

from headgate.core.budgets.scopes import ROOT, Scope, charged_scopes, parse_scope
from headgate.core.money import to_micro_usd, to_tokens
from headgate.core.snapshot import MAX_PRIORITY, MAX_WEIGHT
from headgate.core.tasks.deadlines import IN_THE_PAST, INVALID_FORMAT, parse_rfc3339
from headgate.core.tasks.records import MAX_ATTEMPT_SECONDS, MAX_ATTEMPTS
from headgate.core.texts.nesting import is_deeper
from headgate.errors import InvalidAmountError, InvalidScopeError, InvalidTaskError
from headgate.intake.bodies import EstimateBody, shown

MAX_ID_LENGTH = 128
MAX_SELECTOR_LENGTH = 4096
MAX_URL_LENGTH = 2048
MAX_LABELS = 32
MAX_LABEL_KEY_LENGTH = 64
MAX_LABEL_VALUE_LENGTH = 256
MAX_PARENTS = 100
MAX_SCOPES = 16
MAX_DEPTH = 64

LATEST = 253_086_768_000.0
"""The latest time that is taken, in the year 9990: what is reckoned from it can be written, too."""

_URL = re.compile(r"https?://[^\s/?#@]+(?:[/?#]\S*)?", re.IGNORECASE | re.ASCII)


def refuse(field: str, problem: str) -> NoReturn:
    """Raise the error for a field whose value cannot be used."""
    raise InvalidTaskError("invalid_field", field, f"field '{field}': {problem}")


def identifier(text: str, field: str, *, most: int = MAX_ID_LENGTH) -> str:
    """Check a name that ends up in columns, headers and log lines."""
    if len(text) > most:
        refuse(field, f"has {len(text)} characters, at most {most} are kept")
    if not text.isprintable() or text[0] == " " or text[-1] == " ":
        refuse(field, "must be printable, without spaces at its ends")
    return text


def wanted(text: str | None, field: str) -> str | None:
    """Check a name that is looked for; nothing is not looked for."""
    return identifier(text, field) if text else None


def selector(text: str) -> str:
    """Check a selector: it may have several lines, but no character that a store cannot keep."""
    if len(text) > MAX_SELECTOR_LENGTH:
        refuse("selector", f"has {len(text)} characters, at most {MAX_SELECTOR_LENGTH} are kept")
    if "\0" in text:
        refuse("selector", "contains a null character")
    return text


def callback_url(text: str) -> str:
    """Check the shape of an address that is told of the result."""
    if len(text) > MAX_URL_LENGTH:
        refuse("callbackUrl", f"has {len(text)} characters, at most {MAX_URL_LENGTH} are kept")
    if not text.isprintable() or not _URL.fullmatch(text):
        refuse("callbackUrl", "must be an http or https address, without a user name")
    return text


def json_value(raw: msgspec.Raw, field: str) -> msgspec.Raw | None:
    """Check that every reader can read this JSON; None if it is absent or null."""
    if not raw:
        return None
    try:
        value = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        refuse(field, f"cannot be read: {shown(str(error))}")
    if value is None:
        return None
    if is_deeper(bytes(raw), value, levels=MAX_DEPTH):
        refuse(field, f"is nested deeper than {MAX_DEPTH} levels")
    return raw


def json_object(raw: msgspec.Raw, field: str) -> msgspec.Raw | None:
    """Check that this is an object; None if it is absent or null."""
    value = json_value(raw, field)
    if value is not None and not bytes(value).startswith(b"{"):
        refuse(field, "must be an object")
    return value


def deadline(text: str, *, now: float) -> float:
    """Return the Unix seconds of a deadline that a client asked for."""
    seconds = parse_rfc3339(text)
    if seconds is None or seconds > LATEST:
        raise InvalidTaskError("invalid_field", "deadline", INVALID_FORMAT)
    if seconds <= now:
        raise InvalidTaskError("invalid_field", "deadline", IN_THE_PAST)
    return seconds


def not_before(text: str, *, now: float) -> float | None:
    """Return the Unix seconds before which the task may not start; None if that is past."""
    seconds = parse_rfc3339(text)
    if seconds is None or seconds > LATEST:
        refuse("notBefore", "must be an RFC 3339 time, as in 2030-01-31T12:00:00Z")
    return seconds if seconds > now else None


def priority(value: int) -> int:
    """Check a priority; lower goes first."""
    if abs(value) > MAX_PRIORITY:
        refuse("priority", f"must be within {MAX_PRIORITY} of 0")
    return value


def weight(value: float) -> float:
    """Check a weight."""
    if not 0 <= value <= MAX_WEIGHT:
        refuse("weight", f"must be between 0 and {MAX_WEIGHT:.0f}")
    return value


def max_attempts(value: int) -> int:
    """Check a number of attempts."""
    if not 1 <= value <= MAX_ATTEMPTS:
        refuse("maxAttempts", f"must be between 1 and {MAX_ATTEMPTS}")
    return value


def timeout_seconds(value: float) -> float:
    """Check how long one attempt may take."""
    if not 0 < value <= MAX_ATTEMPT_SECONDS:
        refuse("timeoutSeconds", f"must be more than 0 and at most {MAX_ATTEMPT_SECONDS:.0f}")
    return value


def estimated_tokens(body: EstimateBody) -> int | None:
    """Return the tokens that were estimated; None is not estimated."""
    if body.tokens is None:
        return None
    try:
        return to_tokens(body.tokens, field="estimate.tokens")
    except InvalidAmountError as error:
        refuse(error.field, error.problem)


def estimated_micro_usd(body: EstimateBody) -> int:
    """Return the micro-dollars that were estimated; 0 is not estimated."""
    if body.usd is None:
        return 0
    try:
        return to_micro_usd(body.usd, field="estimate.usd")
    except InvalidAmountError as error:
        refuse(error.field, error.problem)


def cost_micro_usd(amount: float | str) -> int:
    """Return the micro-dollars that every attempt costs."""
    try:
        return to_micro_usd(amount, field="costUsd")
    except InvalidAmountError as error:
        refuse(error.field, error.problem)


def scopes(texts: list[str], own: Scope) -> tuple[str, ...]:
    """Return the scopes that a task is charged to: its project's own one first, each once."""
    return _charged(tuple(texts), own)


# Tasks that come together are charged to the same few scopes.
@lru_cache(maxsize=4_096)
def _charged(texts: tuple[str, ...], own: Scope) -> tuple[str, ...]:
    if len(texts) > MAX_SCOPES:
        refuse("scopes", f"has {len(texts)} entries, at most {MAX_SCOPES} are charged")
    try:
        given = [parse_scope(text, field=f"scopes[{n}]") for n, text in enumerate(texts)]
        charged_scopes(own, given)
    except InvalidScopeError as error:
        refuse(error.field if error.field.startswith("scopes") else "scopes", error.problem)
    for scope in given:
        if scope.startswith("project:") and scope.partition("/")[0] != own:
            refuse("scopes", f"'{scope}' is the budget of another project than the task's")
    return tuple(dict.fromkeys([own, *(scope for scope in given if scope != ROOT)]))


def depends_on(task_ids: list[str]) -> tuple[str, ...]:
    """Return the ids of parents, each once."""
    if len(task_ids) > MAX_PARENTS:
        refuse("dependsOn", f"has {len(task_ids)} entries, at most {MAX_PARENTS} are kept")
    if "" in task_ids:
        refuse("dependsOn", "has an empty task id")
    return tuple(dict.fromkeys([identifier(task_id, "dependsOn") for task_id in task_ids]))


def labels(given: dict[str, str]) -> dict[str, str]:
    """Check labels: few, short, printable."""
    if len(given) > MAX_LABELS:
        refuse("labels", f"has {len(given)} entries, at most {MAX_LABELS} are kept")
    for key, value in given.items():
        if not key or len(key) > MAX_LABEL_KEY_LENGTH or not key.isprintable():
            refuse("labels", f"a key must be 1 to {MAX_LABEL_KEY_LENGTH} printable characters")
        if len(value) > MAX_LABEL_VALUE_LENGTH or not value.isprintable():
            problem = f"has a value that is not up to {MAX_LABEL_VALUE_LENGTH} printable characters"
            refuse("labels", f"'{key}' {problem}")
    return given
