"""The headers of a target: from the configuration, filled from the environment, checked once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote

from headgate.errors import InvalidSettingError
from headgate.executors.environment import Environment

_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_VALUE = re.compile(r"(?:[!-~](?:[ \t!-~]*[!-~])?)?")
_SECRET = re.compile("authorization|cookie|key|password|secret|token", re.IGNORECASE)
_VISIBLE = "".join(map(chr, range(0x21, 0x7F)))

# Names are in lower case throughout, so that no header is sent in two spellings.
AGENT_ID = "x-agent-id"
TASK_ID = "x-headgate-task-id"
ATTEMPT = "x-headgate-attempt"
IDEMPOTENCY_KEY = "idempotency-key"
TRACEPARENT = "traceparent"
_CARRIAGE = ("connection", "content-length", "host", "transfer-encoding")
_NOT_CONFIGURABLE = frozenset((AGENT_ID, TASK_ID, ATTEMPT, IDEMPOTENCY_KEY, *_CARRIAGE))


def filled_headers(
    headers: Mapping[str, str], *, setting: str, environment: Environment
) -> dict[str, str]:
    """Return headers as they are sent; errors name the header, and never its value."""
    return {
        name.lower(): _filled(name, value, f"{setting}.{name}", environment)
        for name, value in headers.items()
    }


def header_value(text: str) -> str:
    """Return a text as a header can carry it: as it is, or percent-encoded where it must be."""
    return text if _VALUE.fullmatch(text) else quote(text, safe=_VISIBLE, errors="replace")


def _filled(name: str, value: str, setting: str, environment: Environment) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidSettingError(setting, "is not the name of a header")
    if name.lower() in _NOT_CONFIGURABLE:
        raise InvalidSettingError(setting, "is set for every request; leave it out")
    filled = environment.filled(value, setting=setting)
    if not _VALUE.fullmatch(filled):
        problem = "its value must be printable ASCII without spaces at its ends"
        raise InvalidSettingError(setting, problem)
    if _SECRET.search(name):
        # Behind a scheme such as Bearer; who writes a key into the file wants it hidden as well.
        environment.hide(filled.rpartition(" ")[2], f"{{{name}}}")
    return filled
