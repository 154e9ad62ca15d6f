"""From the settings of a slot to its key, its endpoint, and what the rules know of it.

The key and the headers of an upstream of the gateway are read here as well.

Rule: a key is read when it is used, and goes nowhere else. No message, repr or difference has it;
what is kept of it is a digest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from headgate.config.messages import key_path
from headgate.config.settings import (
    SLOTS,
    UPSTREAMS,
    QuotaSettings,
    Settings,
    SlotSettings,
    UpstreamSettings,
)
from headgate.config.sources import regular_content
from headgate.core.slots.slot import SlotConfig
from headgate.core.slots.wakes import QuotaSource, WakeConfig
from headgate.errors import InvalidSettingError
from headgate.executors.templates import VARIABLE, Environment, no_slot_keys
from headgate.providers.endpoints import ProviderEndpoint
from headgate.providers.http_headers import check_header_value
from headgate.storage.zones import zone

MAX_KEY_BYTES = 16_384
DIGEST_CHARACTERS = 32
LEAST_SECRET_LENGTH = 8
"""A shorter value of a variable is no secret: to hide it would spoil what others say."""

_KEY = re.compile(r"[!-~]+")


def read_key(slot: SlotSettings, environ: Mapping[str, str]) -> str:
    """Read the key anew, or raise `InvalidSettingError`, which says what to do and not the key."""
    if slot.key_env is not None:
        return _key_in_variable(slot.key_env, environ, key_path(SLOTS, slot.name, "key_env"))
    return _key_in_file(slot.key_file or "", key_path(SLOTS, slot.name, "key_file"))


def read_upstream_key(name: str, upstream: UpstreamSettings, environ: Mapping[str, str]) -> str:
    """Read the key that an upstream itself has, as that of a slot is read."""
    field = key_path(UPSTREAMS, name, "key_env")
    if upstream.key_env is None:
        raise InvalidSettingError(field, "is not set, so that it has no key of its own")
    return _key_in_variable(upstream.key_env, environ, field)


def key_problem(settings: Settings, variable: str, environ: Mapping[str, str]) -> str:
    """Say why a variable that is set holds no key, if a slot or an upstream looks for one there."""
    looked_for = {one.key_env for one in settings.slots.values()}
    looked_for |= {one.key_env for one in settings.all_upstreams.values()}
    if variable not in environ or variable not in looked_for:
        return ""
    try:
        _key_in_variable(variable, environ, variable)
    except InvalidSettingError as error:
        return error.problem
    return ""


def upstream_headers(
    name: str, upstream: UpstreamSettings, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the headers of an upstream as they are sent, or raise `InvalidSettingError`."""
    environment = Environment(environ)
    filled: dict[str, str] = {}
    for header, text in upstream.headers.items():
        setting = key_path(UPSTREAMS, name, "headers", header)
        parts = VARIABLE.split(text)
        parts[1::2] = [environment.value(one, setting=setting) for one in parts[1::2]]
        filled[header] = "".join(parts)
        check_header_value(filled[header], setting)
    return filled


def upstream_secrets(upstream: UpstreamSettings, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of variables in the headers of an upstream, which nobody is to see."""
    names = [one for text in upstream.headers.values() for one in VARIABLE.split(text)[1::2]]
    found = [environ[name] for name in dict.fromkeys(names) if name in environ]
    return tuple(value for value in found if len(value) >= LEAST_SECRET_LENGTH)


class SlotKeys:
    """Reads the keys that targets write into requests, of the slots that are configured now."""

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._slots = settings.slots

    def __call__(self, name: str) -> str:
        """Read a key anew, or raise `InvalidSettingError`."""
        slot = self._slots.get(name)
        return no_slot_keys(name) if slot is None else read_key(slot, self._environ)

    def reconfigure(self, settings: Settings) -> None:
        """Go by other settings, for what starts from now on."""
        self._slots = settings.slots


def endpoint_of(slot: SlotSettings) -> ProviderEndpoint:
    """Return where the provider of a slot is asked; headers are as the file writes them."""
    return ProviderEndpoint(
        base_url=slot.base_url,
        quota_url=slot.quota_url,
        request_url=slot.request_url,
        model=slot.wake_model,
        wake_body=slot.wake_body,
        headers=slot.headers,
        percent_pointer=slot.percent_pointer,
        used_pointer=slot.used_pointer,
        limit_pointer=slot.limit_pointer,
        reset_pointer=slot.reset_pointer,
    )


def wake_config(quota: QuotaSettings, slot: SlotSettings) -> WakeConfig:
    """Return when a slot is woken and polled; `InvalidSettingError` if nobody knows its zone."""
    return WakeConfig(
        wake_modes=frozenset(slot.wake_modes),
        wake_on_start=slot.wake_on_start,
        wake_interval_minutes=slot.wake_interval_minutes,
        wake_times=slot.wake_times,
        wake_after_reset_minutes=slot.wake_after_reset_minutes,
        poll_interval_minutes=slot.poll_interval_minutes,
        zone=zone(slot.zone, field="zone"),
        quota_from=quota_source(slot),
        wake_catch_up_minutes=quota.wake_catch_up_minutes,
        wake_quota_retry_window_minutes=quota.wake_quota_retry_window_minutes,
        max_consecutive_errors=quota.max_consecutive_errors,
        quota_poll_backoff_cap_minutes=quota.quota_poll_backoff_cap_minutes,
    )


def quota_source(slot: SlotSettings) -> QuotaSource:
    """Return where readings come from: requests are sent for them only if that was asked for."""
    if endpoint_of(slot).with_defaults(slot.provider).quota_url is not None:
        return "address"
    return "requests" if slot.poll == "request" else "traffic"


def slot_config(settings: Settings, slot: SlotSettings, key: str | None) -> SlotConfig:
    """Return a slot as the rules see it; None is a key that cannot be read."""
    quota = settings.quota
    return SlotConfig(
        name=slot.name,
        provider=slot.provider,
        wake=wake_config(quota, slot),
        is_enabled=slot.enabled,
        adaptive_polling=quota.adaptive_polling,
        limit_type=slot.limit_type,
        limit_unit=slot.limit_unit,
        key_digest=_key_digest(slot, key),
        settings_digest=_settings_digest(quota, slot, key),
        has_fixed_key=slot.key_env is not None,
        projects=slot.projects,
    )


def _key_in_variable(variable: str, environ: Mapping[str, str], field: str) -> str:
    text = environ.get(variable)
    if text is None:
        problem = f"the variable {variable} is not set; set it where the service starts"
        raise InvalidSettingError(field, problem)
    return _checked(text, f"the variable {variable}", field)


def _key_in_file(name: str, field: str) -> str:
    try:
        content = regular_content(Path(name).expanduser(), MAX_KEY_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidSettingError(field, f"{name} cannot be read: {why}") from None
    if len(content) > MAX_KEY_BYTES:
        problem = f"{name} has more than {MAX_KEY_BYTES:,} bytes; it holds no key"
        raise InvalidSettingError(field, problem)
    return _checked(content.decode("ascii", "replace"), name, field)


def _checked(text: str, place: str, field: str) -> str:
    key = text.strip()
    if not key:
        raise InvalidSettingError(field, f"{place} is empty; put the key there")
    if not _KEY.fullmatch(key):
        problem = f"{place} does not hold just a key, one line of printable ASCII without spaces"
        raise InvalidSettingError(field, problem)
    return key


def _key_digest(slot: SlotSettings, key: str | None) -> str:
    endpoint = endpoint_of(slot).with_defaults(slot.provider)
    # A key that nobody can read is not taken for anybody else's.
    owner = slot.name if key is None else None
    return _digest(slot.provider, endpoint.quota_url, endpoint.request_url, key, owner)


def _settings_digest(quota: QuotaSettings, slot: SlotSettings, key: str | None) -> str:
    # How many slots there may be, and how long logs are kept, is none of one slot's matters.
    shared = msgspec.structs.replace(quota, max_slots=1, max_log_days=1)
    # Who may use a slot, and how many at a time, changes nothing about its key and its window.
    return _digest(msgspec.structs.replace(slot, projects=None, max_inflight=None), shared, key)


def _digest(*parts: object) -> str:
    content = msgspec.json.encode(parts, order="deterministic")
    return hashlib.sha256(content).hexdigest()[:DIGEST_CHARACTERS]
