"""Texts of a step as they are read, with every place that they use and where it was written.

Names of steps are looked up when all steps are read, so the places wait here until then. Rule: a
variable of the environment stands only in what an executor fills; all else is kept in a store.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from headgate.http_headers import CARRIAGE, HEADER_NAME
from headgate.workflow.conditions import Condition, condition_references
from headgate.workflow.texts import EnvPlace, Place, Template, Text, references
from headgate.workflow.values import Value

_ADDRESS = re.compile(r"https?://[^/?#@\s]", re.IGNORECASE)
_CREDENTIALS = re.compile(r"https?://[^/?#]*@", re.IGNORECASE)
_BEGINNING = re.compile(r"https?://", re.IGNORECASE)


class Uses:
    """Reads the texts of one step."""

    def __init__(self) -> None:
        self.places: list[tuple[Value, Place]] = []

    def text(self, value: Value) -> Text:
        """Read a text that an executor fills, so it may have variables."""
        text = value.text()
        self._note(value, references(text))
        return text

    def stored_text(self, value: Value) -> Text:
        """Read a text that is kept in the store of the run once it is filled."""
        text = value.text()
        _refuse_variables(value, references(text))
        self._note(value, references(text))
        return text

    def template(self, value: Value) -> Template:
        """Read a JSON value, which is kept in the store of the run once it is filled."""
        template = value.template()
        _refuse_variables(value, references(template))
        self._note(value, references(template))
        return template

    def condition(self, value: Value) -> Condition:
        """Read a condition."""
        condition = value.condition()
        self._note(value, condition_references(condition))
        return condition

    def _note(self, value: Value, places: Iterable[Place]) -> None:
        self.places += [(value, place) for place in places if not isinstance(place, EnvPlace)]


def only_variables(value: Value) -> Text:
    """Read a text that is the same for every run of every step."""
    text = value.text()
    if not all(isinstance(place, EnvPlace) for place in references(text)):
        value.refuse("is the same for all steps; only {env.NAME} may stand in it")
    return text


def read_url(value: Value, read_text: Callable[[Value], Text]) -> Text:
    """Read the address of a request."""
    parts = read_text(value).parts
    beginning = parts[0] if parts else ""
    if isinstance(beginning, str):
        is_address = _ADDRESS.match(beginning)
        # The host may be a place, and then only the scheme is there to be looked at.
        is_scheme = len(parts) > 1 and _BEGINNING.fullmatch(beginning)
        if not is_address and not is_scheme:
            value.refuse("is not an address; write one as https://host/path")
        if _CREDENTIALS.match(beginning):
            value.refuse("has a user name or a password; put them into headers")
    return Text(parts=parts, is_url=True)


def read_headers(value: Value, read_text: Callable[[Value], Text]) -> dict[str, Text]:
    """Read headers, each once whatever its case."""
    headers: dict[str, Text] = {}
    for name, entry in value.entries("headers").items():
        if HEADER_NAME.fullmatch(name) is None:
            entry.refuse("is not the name of a header; write it with letters and dashes")
        if name.lower() in CARRIAGE:
            entry.refuse("is set for every request; leave it out")
        if name.lower() in map(str.lower, headers):
            entry.refuse("is there twice, in another case; keep one of them")
        headers[name] = read_text(entry)
    return headers


def _refuse_variables(value: Value, places: Iterable[Place]) -> None:
    for place in places:
        if isinstance(place, EnvPlace):
            problem = f"{{env.{place.name}}} cannot stand here, because this is kept in the store"
            value.refuse(f"{problem} of the run; put it into env, headers or the command")
