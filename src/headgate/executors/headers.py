"""The headers of a target: from the configuration, filled from the environment, checked once.

Those with a place for the slot of an attempt are checked once, too, and filled for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

from headgate.errors import InvalidSettingError
from headgate.executors.environment import Environment
from headgate.executors.slot_texts import SlotText
from headgate.http_headers import (
    CARRIAGE,
    HEADER_NAME,
    HEADER_VALUE,
    SECRET_NAME,
    check_header_value,
)

_VISIBLE = "".join(map(chr, range(0x21, 0x7F)))

# Names are in lower case throughout, so that no header is sent in two spellings.
AGENT_ID = "x-agent-id"
TASK_ID = "x-headgate-task-id"
ATTEMPT = "x-headgate-attempt"
IDEMPOTENCY_KEY = "idempotency-key"
TRACEPARENT = "traceparent"
_NOT_CONFIGURABLE = frozenset((AGENT_ID, TASK_ID, ATTEMPT, IDEMPOTENCY_KEY, *CARRIAGE))


def filled_headers(
    headers: Mapping[str, str], *, setting: str, environment: Environment
) -> dict[str, str]:
    """Return headers as they are sent; errors name the header, and never its value."""
    return {
        name.lower(): _filled(name, value, f"{setting}.{name}", environment)
        for name, value in headers.items()
    }


def slot_headers(
    headers: Mapping[str, str], *, setting: str, environment: Environment
) -> dict[str, SlotText]:
    """Return headers that are filled for each attempt."""
    return {
        name.lower(): _slot_text(name, value, f"{setting}.{name}", environment)
        for name, value in headers.items()
    }


def header_value(text: str) -> str:
    """Return a text as a header can carry it: as it is, or percent-encoded where it must be."""
    return text if HEADER_VALUE.fullmatch(text) else quote(text, safe=_VISIBLE, errors="replace")


def _slot_text(name: str, value: str, setting: str, environment: Environment) -> SlotText:
    _check_name(name, setting)
    text = SlotText(value, setting=setting, environment=environment)
    check_header_value(text.sample(), setting)
    return text


def _check_name(name: str, setting: str) -> None:
    if not HEADER_NAME.fullmatch(name):
        raise InvalidSettingError(setting, "is not the name of a header")
    if name.lower() in _NOT_CONFIGURABLE:
        raise InvalidSettingError(setting, "is set for every request; leave it out")


def _filled(name: str, value: str, setting: str, environment: Environment) -> str:
    _check_name(name, setting)
    filled = environment.filled(value, setting=setting)
    check_header_value(filled, setting)
    if SECRET_NAME.search(name):
        # Behind a scheme such as Bearer; who writes a key into the file wants it hidden as well.
        environment.hide(filled.rpartition(" ")[2], f"{{{name}}}")
    return filled
