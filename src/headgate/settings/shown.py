"""Settings for the eye: every effective value with its origin, and no secret among them.

Rule: what may be a secret is replaced, not shortened. A header or a variable is shown only where it
consists of a reference such as `Bearer {env.TOKEN}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from headgate.executors.environment import VARIABLE
from headgate.executors.targets import CommandTarget, Target
from headgate.redaction import HIDDEN, hidden_address, redacted
from headgate.settings.messages import key_path
from headgate.settings.sections import NAMED_TABLES, Settings
from headgate.settings.slots import SlotSettings

DEFAULT_ORIGIN = "default"

_REFERENCE = re.compile(r"(?:[A-Za-z]+ )?\{(?:env\.\w+|slot\.\w+|key)\}")
_SECRET_ARGUMENT = re.compile(
    r"((?:key|token|secret|password)[\w-]*=).+", re.IGNORECASE | re.DOTALL
)
_URL_KEYS = {"url", "proxy", "alerts_url", "base_url", "quota_url", "request_url"}
_SECRET_KEYS = {"headers", "env"}

Origins = dict[tuple[str, ...], str]


class ShownValue(msgspec.Struct, frozen=True, kw_only=True):
    """One effective value, and the file, variable or option that it comes from."""

    value: object
    origin: str


def shown_settings(settings: Settings, origins: Origins) -> dict[str, ShownValue]:
    """Return every effective value by its key, with secrets hidden."""
    return {
        key_path(*path): ShownValue(
            value=hidden(path[-1], value), origin=origins.get(path, DEFAULT_ORIGIN)
        )
        for path, value in _values(settings)
    }


def _values(settings: Settings) -> Iterator[tuple[tuple[str, ...], object]]:
    for section, table in msgspec.to_builtins(settings).items():
        for name, value in table.items():
            if section in NAMED_TABLES:
                yield from (((section, name, key), inner) for key, inner in value.items())
            else:
                yield (section, name), value


def hidden(key: str, value: object) -> object:
    """Return the value of a key without what may be a secret in it."""
    if key in _SECRET_KEYS and isinstance(value, dict):
        return {name: _reference_or_hidden(text) for name, text in value.items()}
    if isinstance(value, dict):
        return {name: hidden(name, inner) for name, inner in value.items()}
    if key in _URL_KEYS and isinstance(value, str):
        return hidden_address(value)
    if key == "wake_body" and isinstance(value, str):
        return redacted(value)
    if key == "command" and isinstance(value, list | tuple):
        return [_SECRET_ARGUMENT.sub(rf"\1{HIDDEN}", str(argument)) for argument in value]
    return value


def variables_of(target: Target) -> set[str]:
    """Return the environment variables that a target refers to."""
    passed = target.pass_env if isinstance(target, CommandTarget) else ()
    return {*_referred_to(target), *passed}


def variables_of_slot(slot: SlotSettings) -> set[str]:
    """Return the environment variables that a slot refers to, that of its key among them."""
    return {*_referred_to(slot), *filter(None, [slot.key_env])}


def _referred_to(written: Target | SlotSettings) -> list[str]:
    return VARIABLE.findall(msgspec.json.encode(written).decode())


def _reference_or_hidden(text: object) -> object:
    return text if isinstance(text, str) and _REFERENCE.fullmatch(text) else HIDDEN
