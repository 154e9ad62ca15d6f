"""What the types of slots cannot say: keys that exclude or need each other, addresses, times.

Rule: a key of a provider goes only where nobody on the way can read it. Plain http is for this
machine, and an address carries no password.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import msgspec

from headgate.core.key_slots.wake import check_wake_config
from headgate.core.projects import Standing
from headgate.errors import InvalidSettingError
from headgate.executors.slot_texts import KEY
from headgate.http_headers import HEADER_NAME
from headgate.providers.slot_places import HTTP_JSON, check_place
from headgate.redaction import redacted
from headgate.settings.messages import key_path
from headgate.settings.sections import Settings
from headgate.settings.slot_keys import place_of, wake_config
from headgate.settings.slots import SLOTS, SlotSettings

LEAST_KEY_LENGTH = 20
ADDRESSES = ("base_url", "quota_url", "request_url")

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_PLACEHOLDER = re.compile(r"\{[A-Za-z_][\w.]*\}")
_KNOWN = re.compile(r"\{key\}|\{env\.\w+\}")
_LOOPBACK = re.compile(r"localhost|127(\.[0-9]{1,3}){3}|::1")


def check_slots(settings: Settings) -> None:
    """Raise `InvalidSettingError`, naming the key, unless every slot could be run."""
    count, most = len(settings.slots), settings.quota.max_slots
    if count > most:
        problem = f"has {count} slots, and quota.max_slots is {most}; raise it, or leave some out"
        raise InvalidSettingError(SLOTS, problem)
    for slot in settings.slots.values():
        _check_slot(settings, slot)
    _check_providers(settings)
    _check_key_places(settings)


def slot_label_warnings(settings: Settings) -> list[str]:
    """List targets whose slot is not configured, though others are.

    Without any slot in the file the name is a label: a rate limit, and what a 429 pauses.
    """
    if not settings.slots:
        return []
    return [
        f"{key_path('targets', name, 'slot')}: no [[slots]] has the name {target.slot!r}; "
        "its quota is not read"
        for name, target in settings.targets.items()
        if target.slot is not None and target.slot not in settings.slots
    ]


def _check_slot(settings: Settings, slot: SlotSettings) -> None:
    where = (SLOTS, slot.name)
    _check_key(slot, where)
    _check_headers(slot, where)
    wakes = bool(slot.wake_modes)
    check_place(slot.provider, place_of(slot), setting=key_path(*where), wakes=wakes)
    _check_addresses(slot, where)
    if slot.limit_unit is not None and slot.limit_type is None:
        problem = "needs limit_type, the type of the row that it is the unit of"
        raise InvalidSettingError(key_path(*where, "limit_unit"), problem)
    try:
        check_wake_config(wake_config(settings.quota, slot))
    except InvalidSettingError as error:
        raise InvalidSettingError(key_path(*where, error.field), error.problem) from None


def _check_key(slot: SlotSettings, where: tuple[str, str]) -> None:
    field = key_path(*where, "key_env")
    if slot.key_env is None and slot.key_file is None:
        raise InvalidSettingError(field, "is missing; write it, or key_file")
    if slot.key_env is None:
        return
    if slot.key_file is not None:
        raise InvalidSettingError(field, "give either key_env or key_file, not both")
    if not _VARIABLE.fullmatch(slot.key_env) or _looks_like_a_key(slot.key_env):
        # Whoever writes the key itself here must not find it in a message.
        problem = "is the name of a variable, as ZAI_KEY; the key itself is not written here"
        raise InvalidSettingError(field, problem)


def _looks_like_a_key(name: str) -> bool:
    is_random = len(name) >= LEAST_KEY_LENGTH and "_" not in name and re.search("[0-9]", name)
    return bool(is_random) or redacted(name) != name


def _check_headers(slot: SlotSettings, where: tuple[str, str]) -> None:
    for name, value in slot.headers.items():
        field = key_path(*where, "headers", name)
        if not HEADER_NAME.fullmatch(name):
            raise InvalidSettingError(field, "is not the name of a header")
        wrong = [one for one in _PLACEHOLDER.findall(value) if not _KNOWN.fullmatch(one)]
        if wrong:
            raise InvalidSettingError(
                field, f"{wrong[0]} is unknown; it may be {{key}} or {{env.NAME}}"
            )


def _check_addresses(slot: SlotSettings, where: tuple[str, str]) -> None:
    for name in ADDRESSES:
        place = urlsplit(getattr(slot, name) or "")
        field = key_path(*where, name)
        if "@" in place.netloc:
            raise InvalidSettingError(field, "has a user or a password in it; take it out")
        if place.scheme == "http" and not _LOOPBACK.fullmatch(place.hostname or ""):
            problem = (
                "would send the key unencrypted; write https, as http is for this machine only"
            )
            raise InvalidSettingError(field, problem)
    if slot.provider == HTTP_JSON and slot.base_url is not None:
        problem = "has no meaning for http-json; write quota_url and request_url"
        raise InvalidSettingError(key_path(*where, "base_url"), problem)


def _check_providers(settings: Settings) -> None:
    known = {slot.provider for slot in settings.slots.values()}
    for name, target in settings.targets.items():
        # What drains may have left the file together with its slots.
        if target.provider is None or target.status is Standing.DRAINING:
            continue
        field = key_path("targets", name, "provider")
        if target.slot is not None:
            raise InvalidSettingError(field, "give either slot or provider, not both")
        if target.provider not in known:
            problem = f"no [[slots]] has the provider {target.provider!r}; add one, or correct it"
            raise InvalidSettingError(field, problem)


def _check_key_places(settings: Settings) -> None:
    """Refuse a target that writes the key of a slot which has none to be read."""
    for name, target in settings.targets.items():
        is_label = target.slot is not None and target.slot not in settings.slots
        if not is_label or target.status is Standing.DRAINING:
            continue
        if f"{{{KEY}}}" in msgspec.json.encode(target).decode():
            problem = f"no [[slots]] has the name {target.slot!r}, and {{{KEY}}} needs its key"
            raise InvalidSettingError(
                key_path("targets", name, "slot"), f"{problem}; add it, or correct the name"
            )
