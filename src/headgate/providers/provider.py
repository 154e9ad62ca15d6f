"""The contract of a provider of keys: it tells the quota of one key, and sends the wake for it.

A response is a value, also where it is a failure: a provider raises nothing for a refusal, a lost
connection, a time that ran out or a response that makes no sense. Each request is shown to the
`Trail` of its call before it leaves, and so is what came of it, with the key taken out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Protocol

import msgspec

from headgate.core.slots.quota import QuotaFailure, QuotaReport, WakeAnswer
from headgate.providers.endpoints import (
    ANTHROPIC,
    HTTP_JSON,
    ZAI,
    ProviderEndpoint,
    check_endpoint,
)


class RequestEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Which request this is about; events of the same one have the same `flow_id`."""

    flow_id: str
    action: str
    method: str
    url: str


class RequestSent(RequestEvent, frozen=True, kw_only=True):
    """A request that is about to leave."""

    body: str | None = None


class ResponseReceived(RequestEvent, frozen=True, kw_only=True):
    """The response to a request, as much of it as is worth keeping."""

    status: int
    duration_ms: float
    body: str | None = None


class RequestFailed(RequestEvent, frozen=True, kw_only=True):
    """A request that got no response that could be read, and why."""

    error: str
    duration_ms: float
    status: int | None = None


class Trail(Protocol):
    """Is shown every request and what came of it; nothing that it is shown has a key in it."""

    def sent(self, request: RequestSent) -> None:
        """Take note of a request before it leaves."""

    def received(self, response: ResponseReceived) -> None:
        """Take note of a response."""

    def failed(self, failure: RequestFailed) -> None:
        """Take note of a request without a response."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One use of a key: `flow_id` links its events, `action` says what it is for."""

    key: str
    action: str
    flow_id: str
    trail: Trail


class Provider(Protocol):
    """Speaks to the provider of one slot."""

    async def read_quota(self, call: Call) -> QuotaReport | QuotaFailure:
        """Ask how much of the quota is used, and when it resets."""

    def read_response(
        self, status: int, headers: Mapping[str, str], now: float
    ) -> QuotaReport | QuotaFailure | None:
        """Read what a response to anybody's request says of the quota; None if it says nothing.

        The names of headers are in lower case.
        """

    async def wake(self, call: Call) -> WakeAnswer:
        """Send the tiny request that opens a window."""

    async def close(self) -> None:
        """Let go of connections."""


def build_provider(
    provider_name: str,
    endpoint: ProviderEndpoint,
    *,
    setting: str = "slots",
    clock: Callable[[], float] = time.time,
) -> Provider:
    """Return the provider of a slot; it opens no connection before it is asked.

    What is wrong with the endpoint is an `InvalidSettingError` under the name `setting`.
    """
    check_endpoint(provider_name, endpoint, setting=setting)
    return _built(provider_name, endpoint.with_defaults(provider_name), clock)


def _built(provider_name: str, endpoint: ProviderEndpoint, clock: Callable[[], float]) -> Provider:
    # What sends is slow to load, and is loaded when there is something to send.
    from headgate.providers import quota_apis  # noqa: PLC0415

    if provider_name == ZAI:
        return quota_apis.ZaiProvider(endpoint, clock=clock)
    if provider_name == HTTP_JSON:
        return quota_apis.HttpJsonProvider(endpoint, clock=clock)
    dialect = quota_apis.ANTHROPIC if provider_name == ANTHROPIC else quota_apis.OPENAI
    return quota_apis.HeaderQuotaProvider(dialect, endpoint, clock=clock)


# What an error says of the key that it was got with.


class ProviderError(msgspec.Struct):
    """The error in an answer of a model API; each part may be anything."""

    message: object = None
    type: object = None
    code: object = None
    metadata: object = None

    @property
    def asked_provider(self) -> str:
        """The name of the provider that OpenRouter asked for an answer; "" if it names none."""
        found = self.metadata.get("provider_name") if isinstance(self.metadata, dict) else None
        return found if isinstance(found, str) else ""

    @property
    def said(self) -> str:
        """The message, if there is one."""
        return self.message if isinstance(self.message, str) else ""

    @property
    def codes(self) -> set[str]:
        """Its code and its type, as far as there are any."""
        return {str(one) for one in (self.code, self.type) if isinstance(one, str | int)}


class _ErrorBody(msgspec.Struct):
    error: ProviderError | None = None


_errors = msgspec.json.Decoder(_ErrorBody)


def error_in(body: bytes) -> ProviderError:
    """Return the error in an answer; an empty one if that is unreadable."""
    try:
        return _errors.decode(body).error or ProviderError()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ProviderError()


_UNAUTHORIZED, _FORBIDDEN = 401, 403
KEY_STATUSES = (_UNAUTHORIZED, _FORBIDDEN)
"""The answers that may be about the key of a call."""

_KEY_CODES = frozenset(
    (
        *("account_deactivated", "account_disabled", "authentication_error", "invalid_api_key"),
        *("key_disabled", "key_revoked", "token_expired", "token_revoked"),
        *("1000", "1001", "1002", "1003", "1004", "1110", "1111", "1112"),
    )
)
"""What providers call a key or an account that they refuse; the numbers are those of z.ai."""

_KEY_SAID = re.compile(
    r"(?:(?:your|this|the|provided|oauth|access|api)\s+)*(?:key|token|account|organization)\b"
    r"(?!.*\bmodels?\b).{0,40}?\b(?:revoked|disabled|deactivated|suspended|banned|expired|invalid)\b",
    re.IGNORECASE | re.DOTALL,
)
_OTHER_CODES = frozenset(
    (
        *("mismatched_organization", "insufficient_permissions", "model_not_found"),
        *(f"{one}_model_access_denied" for one in ("key", "team", "user", "org", "project")),
    )
)
_OTHER_SAID = re.compile(
    r"insufficient permissions|missing scopes|OAuth authentication is (?:currently )?not supported"
    r"|\bmodels?\b",
    re.IGNORECASE,
)


def refuses_key(status: int, body: bytes) -> bool:
    """Tell whether an answer refuses the key or its account, whatever is asked with it.

    A 401 does, unless it says that the key lacks a permission, may not use a model, or came in the
    wrong way. A 403 is about the model, the content or the country, unless its code or the
    beginning of its message says otherwise: what comes later in a message may be the words of the
    client. One that names the provider behind the upstream is about the key of the upstream there.
    """
    error = error_in(body)
    if error.asked_provider:
        return False
    if status == _UNAUTHORIZED:
        return error.codes.isdisjoint(_OTHER_CODES) and not _OTHER_SAID.search(error.said)
    if status != _FORBIDDEN:
        return False
    return not error.codes.isdisjoint(_KEY_CODES) or _KEY_SAID.match(error.said) is not None


# What an error says of the credit and the limits of a key, where to wait changes nothing.


class Shortage(Enum):
    """Of what a key has too little for a request."""

    CREDIT = "its credit is used up, whatever is asked with it"
    PROVIDER = "one provider of a model has no credit for it, and others may have"
    REQUEST = "this request asks for more than the key may use at a time"


_BAD_REQUEST, _PAYMENT_REQUIRED, _TOO_MANY = 400, 402, 429
_CREDIT_CODES = frozenset(
    (
        *("insufficient_quota", "exceeded_current_quota_error", "billing_not_active"),
        *("billing_hard_limit_reached", "Arrearage", "1113"),
    )
)
"""What OpenAI, Moonshot, Alibaba and z.ai call an account without credit."""

_CREDIT_SAID = re.compile(
    r"Your credit balance is too low|You have reached your specified API usage limits"
    r"|Insufficient (?:account )?balance|Insufficient credits|Key limit exceeded",
    re.IGNORECASE,
)
_QUOTA_SAID = re.compile(r"You exceeded your current quota, please check your plan and billing")
_REQUEST_SAID = re.compile(
    r"Request too large|(?:Extra usage|Usage credits) (?:is|are) required for long context"
    r"|This request requires more credits, or fewer|Prompt tokens limit exceeded",
    re.IGNORECASE,
)
_OF_FIELD = ": "
"""Where a field of a request is wrong, some providers begin with its name: `system: is required`.
A client may name one like an error, and no sentence about credit has a colon."""

_ASKED = re.compile(r"\bLimit:? ?([0-9]{1,12})\b.{0,40}?\bRequested:? ?([0-9]{1,12})\b", re.DOTALL)
_ORGANIZATION = re.compile(r"\borg-[A-Za-z0-9_-]{6,}")
_AMOUNT_ASKED = re.compile(r",? ?\bRequested:? ?[0-9]+", re.IGNORECASE)
MAX_SAID_CHARACTERS = 300


def shortage_of(status: int, body: bytes, *, model: str) -> Shortage | None:
    """Tell of what a key has too little by an answer; None if the answer is about other things.

    A 402 is about the credit of the account, unless it says that a smaller request would be taken,
    or names the provider behind the upstream that has answered so: a request may choose that one.
    The message of a 400 or 403 counts only where the `model` is not in it, and it is not about a
    field: a client may have named either like the words of the provider.
    """
    if status not in (_BAD_REQUEST, _PAYMENT_REQUIRED, _FORBIDDEN, _TOO_MANY):
        return None
    error = error_in(body)
    said = error.said
    credit = Shortage.PROVIDER if error.asked_provider else Shortage.CREDIT
    if status in (_BAD_REQUEST, _FORBIDDEN) and (_OF_FIELD in said or (model and model in said)):
        said = ""
    if status in (_PAYMENT_REQUIRED, _TOO_MANY):
        if "budget_exceeded" in error.codes or _REQUEST_SAID.match(said) or _asks_too_much(said):
            return Shortage.REQUEST
        if status == _PAYMENT_REQUIRED:
            return credit
    if not error.codes.isdisjoint(_CREDIT_CODES):
        return credit
    if status == _TOO_MANY:
        # Gemini says the same of its limits by the minute, with the status as code.
        is_quota = str(_TOO_MANY) not in error.codes and _QUOTA_SAID.match(said)
        return credit if is_quota else None
    return credit if _CREDIT_SAID.match(said) else None


def _asks_too_much(said: str) -> bool:
    found = _ASKED.search(said)
    return found is not None and int(found[2]) > int(found[1])


def told_to_others(body: bytes) -> str:
    """Return what an error says, on one short line, for others who use the same key.

    It names no account, and not how much was asked for.
    """
    error = error_in(body)
    said = ": ".join(one for one in (error.asked_provider, error.said) if one)
    said = _AMOUNT_ASKED.sub("", _ORGANIZATION.sub("org-…", said))
    line = "".join(one if one.isprintable() else " " for one in said[: 4 * MAX_SAID_CHARACTERS])
    line = " ".join(line.split())
    return line if len(line) <= MAX_SAID_CHARACTERS else f"{line[: MAX_SAID_CHARACTERS - 1]}…"
