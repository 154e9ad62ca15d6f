"""Texts of a target with placeholders: its URL, headers and variables, filled for each attempt.

What is filled in comes from the environment (`{env.NAME}`), from the slot of the attempt
(`{slot.name}`, `{slot.key}`), or from the task itself, and that only in a URL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Protocol
from urllib.parse import quote

import msgspec

from headgate.errors import InvalidSettingError
from headgate.executors.executor import WorkOrder
from headgate.redaction import MIN_SECRET_LENGTH, written_forms

# What the environment gives to a target: the values of `{env.NAME}`, the keys of its slots.
#
# Rule: a value from the environment is written where the configuration wants it and nowhere else.
# No error repeats one: a variable that is missing is named, and a text that somebody sent back is
# cleaned before it becomes the error of a task, and before any of it is cut off: half a value
# could not be told from other text.

PREFIX = "env."
VARIABLE = re.compile(r"\{env\.(\w+)\}")
_VARIABLE = re.compile(r"\{([A-Za-z_][\w.]*)\}")
_KEY_SHOWN = "{slot.key}"
MAX_KEYS = 1_000
"""How many keys of slots are remembered; they change, and the oldest make room for new ones."""

SlotKeys = Callable[[str], str]
"""Reads the key of a slot by its name, or raises `InvalidSettingError`."""


class ObserveSlot(Protocol):
    """Learns from a response that was got with the key of a slot, and what it says of the key.

    It returns at once and raises nothing.
    """

    def __call__(
        self,
        name: str,
        status: int,
        headers: Mapping[str, str],
        now: float,
        /,
        *,
        refused_key: str = "",
    ) -> None:
        """Learn from a response; `refused_key` is the key, if that is what was refused."""


def no_slot_keys(slot: str) -> str:
    """Read no key: there are no slots here."""
    problem = f"there is no slot {slot!r} here to read the key of; add it to the file"
    raise InvalidSettingError("slots", problem)


class Environment:
    """Fills settings of one target, and remembers what it gave out.

    With `has_slot` its tasks have slots, whose keys `slot_keys` reads.
    """

    def __init__(
        self,
        variables: Mapping[str, str],
        *,
        has_slot: bool = False,
        slot_keys: SlotKeys = no_slot_keys,
    ) -> None:
        self._variables = variables
        self._has_slot = has_slot
        self._slot_keys = slot_keys
        self._given: dict[str, str] = {}
        self._keys: dict[str, str] = {}
        self._hidden: dict[str, str] | None = None

    def __repr__(self) -> str:
        return f"Environment({', '.join(sorted(self._given.values()))})"

    def value(self, name: str, *, setting: str) -> str:
        """Return the variable that a setting needs."""
        value = self._variables.get(name)
        if value is None:
            advice = "set it, or take it out of the setting"
            raise InvalidSettingError(
                setting, f"the environment variable {name} is not set; {advice}"
            )
        self.hide(value, f"{{{PREFIX}{name}}}")
        return value

    def hide(self, value: str, placeholder: str) -> None:
        """Remember a secret; the first placeholder that it got is the one that is shown."""
        if len(value) >= MIN_SECRET_LENGTH and value not in self._given:
            self._given[value] = placeholder
            self._hidden = None

    def check_slot(self, setting: str) -> None:
        """Refuse a setting with a placeholder for a slot, at a target whose tasks have none."""
        if not self._has_slot:
            problem = (
                "has a placeholder for a slot, and the target names none; write slot or provider"
            )
            raise InvalidSettingError(setting, problem)

    def key_of(self, slot: str) -> str:
        """Read the key of a slot, and remember it as a secret."""
        key = self._slot_keys(slot)
        if len(key) >= MIN_SECRET_LENGTH:
            is_new = self._keys.pop(key, None) is None
            self._keys[key] = _KEY_SHOWN
            if is_new:
                self._hidden = None
            if len(self._keys) > MAX_KEYS:
                del self._keys[next(iter(self._keys))]
        return key

    def filled(self, text: str, *, setting: str) -> str:
        """Put variables into a text, where only `{env.NAME}` is a placeholder."""

        def value_of(match: re.Match[str]) -> str:
            name = match[1]
            if not name.startswith(PREFIX):
                raise InvalidSettingError(
                    setting, f"{{{name}}} is not {{env.NAME}}; name a variable"
                )
            return self.value(name.removeprefix(PREFIX), setting=setting)

        return _VARIABLE.sub(value_of, text)

    def cleaned(self, text: str) -> str:
        """Return a text with every value that was given out replaced by its placeholder."""
        for form, placeholder in self._forms().items():
            text = text.replace(form, placeholder)
        return text

    @property
    def longest_bytes(self) -> int:
        """How long a value that was given out can be, in whatever way it is written."""
        return max(map(len, map(_bytes_of, self._forms())), default=0)

    def cleaned_end(self, raw: bytes, length: int) -> str:
        """Return the end of a text, so many bytes or a few more, without any part of a value.

        What is before it must be as long as the longest value, or be all that there is.
        """
        start = max(0, len(raw) - length)
        for form in map(_bytes_of, self._forms()):
            # A value that lies across the beginning is taken whole, so that it is found below.
            found = raw.find(form, max(0, start - len(form) + 1), start + len(form) - 1)
            if found >= 0:
                start = found
        return self.cleaned(raw[start:].decode(errors="replace"))

    def _forms(self) -> dict[str, str]:
        """Return the placeholders of all ways to write a value."""
        if self._hidden is None:
            found: dict[str, str] = {}
            for value, placeholder in (self._given | self._keys).items():
                for form in written_forms(value):
                    found.setdefault(form, placeholder)
            # A value may contain another; the longer one goes first, or its rest would be shown.
            self._hidden = {form: found[form] for form in sorted(found, key=len, reverse=True)}
        return self._hidden


def _bytes_of(form: str) -> bytes:
    """Return a text from the environment as a program writes it, which need not be UTF-8."""
    return form.encode(errors="surrogateescape")


# Texts with placeholders for the slot of an attempt: `{slot.name}`, and `{slot.key}` for its key.
#
# Rule: a key is read when an attempt needs it, written where the configuration wants it and nowhere
# else. It is remembered only so that it can be taken out of what somebody sends back.

NAME = "slot.name"
KEY = "slot.key"
_SLOT_PLACEHOLDERS = re.compile(rf"\{{({re.escape(NAME)}|{re.escape(KEY)})\}}")

Written = Callable[[str], str]


def uses_slot(text: str) -> bool:
    """Tell whether a text has a placeholder for something of a slot."""
    return _SLOT_PLACEHOLDERS.search(text) is not None


class SlotText:
    """A text that is filled for each attempt; variables are filled once."""

    def __init__(self, text: str, *, setting: str, environment: Environment) -> None:
        environment.check_slot(setting)
        self._setting = setting
        self._environment = environment
        # Odd pieces are the names within braces.
        self._pieces = [
            piece if position % 2 else environment.filled(piece, setting=setting)
            for position, piece in enumerate(_SLOT_PLACEHOLDERS.split(text))
        ]

    def sample(self) -> str:
        """Return the text as it may look, to be checked before there is a task."""
        return self._joined("x", lambda: "x")

    def filled(self, order: WorkOrder, *, written: Written = str) -> str:
        """Return the text for one attempt, or raise `InvalidSettingError` if there is no key.

        `written` turns the name into what may stand there.
        """
        slot = order.slot
        if slot is None:
            raise InvalidSettingError(self._setting, "needs a slot, and the task has none")
        return self._joined(written(slot), lambda: self._environment.key_of(slot))

    def _joined(self, name: str, read_key: Callable[[], str]) -> str:
        return "".join(
            self._value(piece, name, read_key) if position % 2 else piece
            for position, piece in enumerate(self._pieces)
        )

    def _value(self, piece: str, name: str, read_key: Callable[[], str]) -> str:
        return name if piece == NAME else read_key()


# URLs with placeholders for what a task says.
#
# Rule: a task chooses among the addresses that the configuration describes, and no others. What it
# says is percent-encoded, so that it is one part of a path or of a query; it never stands in the
# scheme, the host or the port, and never makes a step up the path. Only what a resolver answered
# may stand in the address, because the configuration names the resolver.

RESOLVED = "resolved"
PARAMS = "params."
MAX_URL_LENGTH = 64 * 1024
"""How long a filled URL may be; servers take less, and params may have a megabyte."""

_FIELDS: dict[str, Callable[[WorkOrder], str | None]] = {
    "tabId": lambda order: order.submission.tab_id,
    "agentId": lambda order: order.agent_id,
    "projectId": lambda order: order.project_id,
    "taskId": lambda order: order.task_id,
    "action": lambda order: order.submission.action,
    NAME: lambda order: order.slot,
}
_BRACES = re.compile(r"\{([^{}]*)\}")
_HOST = r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^/?#@\s:\[\]]+)"
_URL = re.compile(
    rf"https?://{_HOST}(?::(?P<port>[0-9]{{1,5}}|\0))?(?:[/?][^\s#]*)?", re.IGNORECASE
)
_IN_HOST = re.compile(r"https?://[^/?#:]*", re.IGNORECASE)
_IN_PORT = re.compile(r"https?://[^/?#]*:", re.IGNORECASE)
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_MAX_LABEL_LENGTH = 63
_MAX_HOST_LENGTH = 253
_MAX_PORT = 65_535
_STEPS = frozenset((".", ".."))
# Stands for a placeholder while the shape of a template is looked at; no URL has it.
_MARK = "\0"


class UnfilledError(Exception):
    """A task lacks what the URL of its target needs; the text is the error of the task."""


class _UrlPart(Enum):
    """Where in a URL a placeholder stands: at its start, in its host or port, or behind those."""

    START = auto()
    HOST = auto()
    PORT = auto()
    BEHIND = auto()


class _Placeholder(msgspec.Struct, frozen=True):
    name: str
    part: _UrlPart


class UrlTemplate:
    """A URL that is filled for each task."""

    def __init__(self, text: str, *, setting: str, environment: Environment) -> None:
        self._setting = setting
        self._parts = self._parsed(text, environment)
        self._check_shape()

    @property
    def needs_resolved(self) -> bool:
        """Whether `{resolved}` is part of it."""
        return any(isinstance(part, _Placeholder) and part.name == RESOLVED for part in self._parts)

    def fill(self, order: WorkOrder, *, resolved: str = "") -> str:
        """Return the URL for one task, or raise `UnfilledError`."""
        url = "".join(
            part if isinstance(part, str) else self._filled(part, order, resolved)
            for part in self._parts
        )
        if len(url) > MAX_URL_LENGTH:
            problem = f"the executor's URL would be longer than {MAX_URL_LENGTH:,} characters"
            raise UnfilledError(problem)
        if _has_steps(url):
            raise UnfilledError("the path of the executor's URL cannot have the steps . and ..")
        return url

    def _filled(self, placeholder: _Placeholder, order: WorkOrder, resolved: str) -> str:
        if placeholder.part is _UrlPart.BEHIND:
            value = resolved if placeholder.name == RESOLVED else _value(placeholder.name, order)
            # What is too long even as it is, is not written out first: it would get longer still.
            return quote(value[: MAX_URL_LENGTH + 1], safe="", errors="replace")
        if placeholder.part is _UrlPart.START:
            return self._filled_start(resolved)
        is_usable = _is_host if placeholder.part is _UrlPart.HOST else _is_port
        if not is_usable(resolved):
            problem = f"what the resolver answered is not a {placeholder.part.name.lower()}"
            raise UnfilledError(problem)
        return resolved

    def _filled_start(self, resolved: str) -> str:
        is_alone = len(self._parts) == 1
        if not _is_url(resolved) or not (is_alone or "?" not in resolved):
            raise UnfilledError("what the resolver answered is not an http or https URL")
        return resolved if is_alone else resolved.removesuffix("/")

    def _parsed(self, text: str, environment: Environment) -> list[str | _Placeholder]:
        parts: list[str | _Placeholder] = []
        before = ""
        # Odd pieces are the names within braces.
        for position, piece in enumerate(_BRACES.split(text)):
            part = piece if position % 2 == 0 else self._placeholder(piece, before, environment)
            if part:
                parts.append(part)
            before += part if isinstance(part, str) else _MARK
        return parts

    def _placeholder(self, name: str, before: str, environment: Environment) -> str | _Placeholder:
        if name.startswith(PREFIX):
            return environment.value(name.removeprefix(PREFIX), setting=self._setting)
        if name == KEY:
            raise self._wrong("{slot.key} would end up in logs of others; put it into a header")
        if name == NAME:
            environment.check_slot(self._setting)
        is_param = name.startswith(PARAMS) and name != PARAMS
        if name != RESOLVED and name not in _FIELDS and not is_param:
            known = ", ".join(f"{{{field}}}" for field in _FIELDS)
            problem = f"{{{name}}} is unknown; it may be {known}, {{params.name}} or {{env.NAME}}"
            raise self._wrong(problem)
        part = _part_after(before)
        if part is not _UrlPart.BEHIND and name != RESOLVED:
            problem = f"{{{name}}} would let a task choose the host; put it in the path"
            raise self._wrong(problem)
        return _Placeholder(name, part)

    def _check_shape(self) -> None:
        shape = "".join(part if isinstance(part, str) else _MARK for part in self._parts)
        if "{" in shape or "}" in shape:
            raise self._wrong("has a brace without its counterpart")
        if "#" in shape:
            raise self._wrong("has a fragment; leave out what follows #")
        if shape.startswith(_MARK):
            if shape[1:2] not in ("", "/", "?"):
                raise self._wrong("must go on with / or ? after {resolved}")
        elif not _is_url(shape):
            raise self._wrong("must be http:// or https:// and a host; credentials go into headers")
        if _has_steps(shape):
            raise self._wrong("must not have the steps . or .. in its path")

    def _wrong(self, problem: str) -> InvalidSettingError:
        return InvalidSettingError(self._setting, problem)


def _part_after(before: str) -> _UrlPart:
    if not before:
        return _UrlPart.START
    if _IN_HOST.fullmatch(before):
        return _UrlPart.HOST
    return _UrlPart.PORT if _IN_PORT.fullmatch(before) else _UrlPart.BEHIND


def _is_url(text: str) -> bool:
    """Say whether this is an address that can be connected to, followed by a path and a query."""
    match = _URL.fullmatch(text)
    if match is None or len(match["host"]) > _MAX_HOST_LENGTH:
        return False
    labels = match["host"].removesuffix(".").split(".")
    is_port = match["port"] in (None, _MARK) or _is_port(match["port"])
    return is_port and all(0 < len(label) <= _MAX_LABEL_LENGTH for label in labels)


def _is_host(text: str) -> bool:
    return len(text) <= _MAX_HOST_LENGTH and all(map(_LABEL.fullmatch, text.split(".")))


def _is_port(text: str) -> bool:
    return (
        text.isascii()
        and text.isdecimal()
        and len(text) <= len(str(_MAX_PORT))
        and (0 < int(text) <= _MAX_PORT)
    )


def _has_steps(url: str) -> bool:
    return not _STEPS.isdisjoint(url.partition("?")[0].split("/"))


def _value(name: str, order: WorkOrder) -> str:
    read = _FIELDS.get(name)
    value = _param(name.removeprefix(PARAMS), order) if read is None else read(order)
    if not value:
        problem = f"{name} is required for task execution"
        raise UnfilledError(problem)
    return value


def _param(name: str, order: WorkOrder) -> str | None:
    params = order.submission.params
    try:
        given = msgspec.json.decode(params, type=dict[str, msgspec.Raw]) if params else {}
        found = msgspec.json.decode(given[name]) if name in given else None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise UnfilledError("params must be a JSON object") from None
    if found is None or isinstance(found, str):
        return found
    if isinstance(found, bool):
        return "true" if found else "false"
    if isinstance(found, int | float):
        return str(found)
    problem = f"params.{name} must be a string or a number to be part of a URL"
    raise UnfilledError(problem)
