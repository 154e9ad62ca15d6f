"""The settings of key slots: `[quota]` for all of them, and a table of `[[slots]]` for each.

A key is never written into the file: a slot names the variable or the file that holds it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headgate.core.key_slots.wake import MINUTES_PER_DAY, RANGES, WakeMode
from headgate.errors import InvalidSettingError
from headgate.settings.messages import key_path, table_expected

SLOTS = "slots"
MAX_SLOTS = 10_000
MAX_SLOT_NAME_LENGTH = 32
NEVER = "none"
_KEYS_THEMSELVES = frozenset({"key", "api_key", "token"})

ProviderName = Literal["zai", "anthropic", "openai", "http-json"]
Minutes = Annotated[int, Meta(ge=1, le=MINUTES_PER_DAY)]
Text = Annotated[str, Meta(min_length=1, max_length=2_000)]


class QuotaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What holds for all slots."""

    max_slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)] = 4
    max_consecutive_errors: Annotated[int, Meta(ge=1, le=RANGES["max_consecutive_errors"][1])] = 10
    quota_poll_backoff_cap_minutes: Annotated[
        int, Meta(ge=1, le=RANGES["quota_poll_backoff_cap_minutes"][1])
    ] = 480
    wake_quota_retry_window_minutes: Minutes = 15
    wake_catch_up_minutes: Annotated[int, Meta(ge=0, le=MINUTES_PER_DAY)] = 15
    adaptive_polling: bool = False
    max_log_days: Annotated[int, Meta(ge=1, le=3_650)] = 7


class SlotSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key of a provider: where it is asked, when it is polled, when it is woken.

    `base_url` stands for both addresses, `quota_url` and `request_url` for one each. The pointers
    (RFC 6901) find the figures in the answer of an `http-json` provider.
    """

    name: Annotated[str, Meta(min_length=1, max_length=MAX_SLOT_NAME_LENGTH)]
    provider: ProviderName
    enabled: bool = True
    key_env: Text | None = None
    key_file: Text | None = None
    base_url: Text | None = None
    quota_url: Text | None = None
    request_url: Text | None = None
    headers: dict[str, str] = {}
    wake_model: Text | None = None
    wake_body: Text | None = None
    wake_modes: tuple[WakeMode, ...] = ()
    wake_interval_minutes: Minutes = 60
    wake_times: tuple[str, ...] = ()
    wake_after_reset_minutes: Minutes = 1
    poll_interval_minutes: Minutes = 30
    zone: Text = "UTC"
    limit_type: Text | None = None
    limit_unit: int | str | None = None
    percent_pointer: str | None = None
    used_pointer: str | None = None
    limit_pointer: str | None = None
    reset_pointer: str | None = None
    logging: bool = True


def slots_by_name(written: object) -> dict[str, object]:
    """Return the tables of `[[slots]]` by name, in their order, or raise `InvalidSettingError`.

    From here on a slot goes by its name, in messages too. Only a table whose name cannot be used
    is called by its place in the file.
    """
    if not isinstance(written, list):
        problem = 'is a list of tables; begin each with [[slots]] and write its name = "…" there'
        raise InvalidSettingError(SLOTS, problem)
    named: dict[str, object] = {}
    for place, table in enumerate(written):
        name = _name_of(table, place)
        if name in named:
            problem = f"{name!r} is the name of an earlier slot; each needs its own"
            raise InvalidSettingError(_name_key(place), problem)
        _check_keyless(name, table)
        named[name] = _with_modes(table)
    return named


def _name_of(table: object, place: int) -> str:
    if not isinstance(table, dict):
        raise table_expected((SLOTS, f"[{place}]"), table)
    if "name" not in table:
        raise InvalidSettingError(_name_key(place), "is missing; write it")
    name = table["name"]
    if isinstance(name, str) and 0 < len(name) <= MAX_SLOT_NAME_LENGTH and name.isprintable():
        if name.strip() == name:
            return name
        raise InvalidSettingError(_name_key(place), "has spaces at its ends; take them out")
    problem = f"must be a text of 1 to {MAX_SLOT_NAME_LENGTH} characters, all of them printable"
    raise InvalidSettingError(_name_key(place), problem)


def _name_key(place: int) -> str:
    return key_path(SLOTS, f"[{place}]", "name")


def _check_keyless(name: str, table: dict[str, object]) -> None:
    for key in sorted(_KEYS_THEMSELVES & table.keys()):
        problem = "a key is not written into the file; name its variable, key_env, or a key_file"
        raise InvalidSettingError(key_path(SLOTS, name, key), problem)


def _with_modes(table: dict[str, object]) -> dict[str, object]:
    is_never = table.get("wake_modes") in (NEVER, [NEVER])
    return table | {"wake_modes": []} if is_never else table
