"""Where a slot's provider is asked and what it is sent, and whether that can be used.

It loads no HTTP client, so that settings can be checked without one. A header of the configuration
may hold `{key}`, for which the key is put; it then replaces the provider's own.
"""

from __future__ import annotations

from datetime import UTC, timedelta, timezone, tzinfo
from urllib.parse import urlsplit

import msgspec

from headgate.core.text import parsed_pointer
from headgate.errors import InvalidSettingError
from headgate.providers.http_headers import FRAMING_HEADERS, HEADER_NAME, check_header_value

ZAI = "zai"
ANTHROPIC = "anthropic"
OPENAI = "openai"
HTTP_JSON = "http-json"

WAKE_WORD = "hi"
KEY_PLACEHOLDER = "{key}"
CONNECT_TIMEOUT_SECONDS = 10.0
TIMEOUT_SECONDS = 30.0

_POINTERS = ("percent_pointer", "used_pointer", "limit_pointer", "reset_pointer")
_MAX_PORT = 65_535


class ProviderDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for a provider where the configuration says nothing.

    `zone` is the one in which it writes times that have no offset. Without a `quota_path` the
    quota is told by the headers of the response to any request.
    """

    base_url: str | None = None
    quota_path: str | None = None
    request_path: str | None = None
    model: str | None = None
    zone: tzinfo = UTC


DEFAULTS: dict[str, ProviderDefaults] = {
    ZAI: ProviderDefaults(
        base_url="https://api.z.ai",
        quota_path="/api/monitor/usage/quota/limit",
        request_path="/api/coding/paas/v4/chat/completions",
        model="glm-4-flash",
        zone=timezone(timedelta(hours=8)),
    ),
    ANTHROPIC: ProviderDefaults(
        base_url="https://api.anthropic.com",
        request_path="/v1/messages",
        model="claude-haiku-4-5",
    ),
    OPENAI: ProviderDefaults(
        base_url="https://api.openai.com",
        request_path="/v1/chat/completions",
        model="gpt-4o-mini",
    ),
    HTTP_JSON: ProviderDefaults(),
}


class ProviderEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where one slot sends its requests; what is left out has the defaults of its provider.

    `base_url` stands before the default paths; `quota_url` and `request_url` are whole addresses.
    `secrets` are parts of it that are shown to nobody, like the key.
    """

    base_url: str | None = None
    quota_url: str | None = None
    request_url: str | None = None
    model: str | None = None
    wake_body: str | None = None
    headers: dict[str, str] = {}
    secrets: tuple[str, ...] = ()
    percent_pointer: str | None = None
    used_pointer: str | None = None
    limit_pointer: str | None = None
    reset_pointer: str | None = None
    zone: tzinfo | None = None
    connect_timeout_seconds: float = CONNECT_TIMEOUT_SECONDS
    timeout_seconds: float = TIMEOUT_SECONDS

    def with_defaults(self, provider_name: str) -> ProviderEndpoint:
        """Return the endpoint with the defaults of a provider filled in."""
        defaults = DEFAULTS[provider_name]
        base = (self.base_url or defaults.base_url or "").rstrip("/")
        return msgspec.structs.replace(
            self,
            base_url=base or None,
            quota_url=self.quota_url or _joined(base, defaults.quota_path),
            request_url=self.request_url or _joined(base, defaults.request_path),
            model=self.model or defaults.model,
            zone=self.zone or defaults.zone,
        )

    def wake_content(self) -> bytes:
        """Return the body of the smallest request there is: one word in, one token out."""
        if self.wake_body is not None:
            return self.wake_body.encode()
        message = {"role": "user", "content": WAKE_WORD}
        return msgspec.json.encode({"model": self.model, "max_tokens": 1, "messages": [message]})


def check_endpoint(
    provider_name: str, endpoint: ProviderEndpoint, *, setting: str = "slots", wakes: bool = False
) -> None:
    """Raise `InvalidSettingError`, naming the field, unless the provider can be asked there.

    `wakes` says that the slot is to be woken, which needs more than reading its quota does.
    """
    if provider_name not in DEFAULTS:
        raise _wrong(setting, "provider", f"must be one of {', '.join(DEFAULTS)}")
    for field in ("base_url", "quota_url", "request_url"):
        _check_url(getattr(endpoint, field), f"{setting}.{field}")
    for name, value in endpoint.headers.items():
        _check_header(name, value, f"{setting}.headers.{name}")
    if endpoint.wake_body is not None:
        _check_wake_body(endpoint.wake_body, f"{setting}.wake_body")
    _check_pointers(provider_name, endpoint, setting)
    if provider_name == HTTP_JSON:
        _check_http_json(endpoint, setting, wakes=wakes)


def _joined(base: str, path: str | None) -> str | None:
    return f"{base}{path}" if base and path else None


def _check_url(url: str | None, setting: str) -> None:
    if url is None:
        return
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in {"http", "https"} and bool(parts.hostname)
        is_good = is_good and (parts.port is None or 0 < parts.port <= _MAX_PORT)
    except ValueError:
        is_good = False
    if not is_good or any(not "!" <= character <= "~" for character in url):
        raise InvalidSettingError(setting, "must be an http:// or https:// URL")


def _check_header(name: str, value: str, setting: str) -> None:
    if not HEADER_NAME.fullmatch(name):
        raise InvalidSettingError(setting, "is not the name of a header")
    if name.lower() in FRAMING_HEADERS:
        raise InvalidSettingError(setting, "is set for every request; leave it out")
    check_header_value(value, setting)


def _check_wake_body(body: str, setting: str) -> None:
    try:
        msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise InvalidSettingError(setting, "is not JSON; write the body of a request") from None


def _check_pointers(provider_name: str, endpoint: ProviderEndpoint, setting: str) -> None:
    for field in _POINTERS:
        pointer = getattr(endpoint, field)
        if pointer is None:
            continue
        if provider_name != HTTP_JSON:
            problem = f"is for provider = {HTTP_JSON!r} only; leave it out"
            raise _wrong(setting, field, problem)
        parsed_pointer(pointer, setting=f"{setting}.{field}")


def _check_http_json(endpoint: ProviderEndpoint, setting: str, *, wakes: bool) -> None:
    for field, is_wrong, problem in (
        (
            "quota_url",
            endpoint.quota_url is None,
            f"provider = {HTTP_JSON!r} needs the address that tells the quota",
        ),
        (
            "percent_pointer",
            (endpoint.percent_pointer is None) == (endpoint.used_pointer is None),
            "write either this or used_pointer; one of them finds how much is used",
        ),
        (
            "limit_pointer",
            endpoint.limit_pointer is not None and endpoint.used_pointer is None,
            "needs used_pointer beside it",
        ),
        ("request_url", wakes and endpoint.request_url is None, "a wake needs an address to go to"),
        (
            "wake_body",
            wakes and endpoint.wake_body is None and endpoint.model is None,
            "a wake needs this body, or wake_model for a chat completion",
        ),
    ):
        if is_wrong:
            raise _wrong(setting, field, problem)


def _wrong(setting: str, field: str, problem: str) -> InvalidSettingError:
    return InvalidSettingError(f"{setting}.{field}", problem)
