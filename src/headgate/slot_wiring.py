"""From the settings of slots to what runs them: providers, keys, what the rules go by.

Rule: a slot whose key or headers cannot be had is no reason not to start. It is set up all the
same, and says at its first use what is missing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from headgate.core.key_slots.slot import SlotConfig
from headgate.errors import InvalidSettingError
from headgate.executors.environment import VARIABLE, Environment, no_slot_keys
from headgate.http_headers import check_header_value
from headgate.provider import Provider
from headgate.providers.build import build_provider
from headgate.providers.slot_places import ProviderPlace
from headgate.runtime.engine import Engine
from headgate.runtime.key_slots.slots import Slots, SlotSetup
from headgate.settings import Settings, SlotSettings
from headgate.settings.messages import key_path
from headgate.settings.slot_keys import place_of, read_key, slot_config
from headgate.slot_logs import LOG_FOLDER, SlotLog
from headgate.stores.slots import SqlSlots
from headgate.stores.sql_store import SqlTaskStore


class SlotParts:
    """Sets slots up; a slot whose place is as it was keeps its provider and its connections."""

    def __init__(
        self, environ: Mapping[str, str], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._environ = environ
        self._clock = clock
        self._providers: dict[str, tuple[str, ProviderPlace, Provider]] = {}

    def setups(self, settings: Settings) -> tuple[SlotSetup, ...]:
        """Return all slots of the settings with what they need, in the order of the file.

        A provider that is in none of the setups any more is left to whoever got it to close.
        """
        setups = tuple(self._setup(settings, slot) for slot in settings.slots.values())
        self._providers = {name: self._providers[name] for name in settings.slots}
        return setups

    def _setup(self, settings: Settings, slot: SlotSettings) -> SlotSetup:
        place, problem = self._place(slot)
        reader = _reader(slot, self._environ, problem)
        config_for = _configurer(settings, slot)
        return SlotSetup(
            config=config_for(_key_or_none(reader)),
            provider=self._provider(slot, place),
            read_key=reader,
            is_logging=slot.logging,
            key_mark=partial(file_mark, slot.key_file),
            config_for=config_for,
        )

    def _place(self, slot: SlotSettings) -> tuple[ProviderPlace, InvalidSettingError | None]:
        place = place_of(slot)
        try:
            headers, hidden = _filled_headers(slot, self._environ)
        except InvalidSettingError as error:
            return msgspec.structs.replace(place, headers={}), error
        return msgspec.structs.replace(place, headers=headers, secrets=hidden), None

    def _provider(self, slot: SlotSettings, place: ProviderPlace) -> Provider:
        known = self._providers.get(slot.name)
        if known is not None and known[:2] == (slot.provider, place):
            return known[2]
        setting = key_path("slots", slot.name)
        provider = build_provider(slot.provider, place, setting=setting, clock=self._clock)
        self._providers[slot.name] = (slot.provider, place, provider)
        return provider


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


class SlotWork:
    """The slots of a service, or of a command that runs nothing else, with their log."""

    def __init__(
        self,
        settings: Settings,
        store: SqlTaskStore,
        environ: Mapping[str, str],
        *,
        data: Path,
        is_shared: bool,
    ) -> None:
        self._parts = SlotParts(environ)
        self.log = SlotLog(data / LOG_FOLDER, max_log_days=settings.quota.max_log_days)
        self.slots = Slots(
            SqlSlots(store),
            self._parts.setups(settings),
            trail_of=self.log.trail,
            make_id=partial(secrets.token_hex, 8),
            latest_lines=self.log.latest,
            is_shared=is_shared,
        )

    def reconfigure(self, settings: Settings) -> None:
        """Go by other settings."""
        self.log.max_log_days = settings.quota.max_log_days
        self.slots.reconfigure(self._parts.setups(settings))

    async def run(self) -> None:
        """Run the slots until cancelled; what is to be logged is on disk then."""
        try:
            await self.slots.run()
        finally:
            await asyncio.to_thread(self.log.close)


def build_slots(
    settings: Settings,
    store: SqlTaskStore,
    environ: Mapping[str, str],
    *,
    data: Path,
    is_shared: bool,
) -> SlotWork:
    """Return the slots of the settings: open the store, then `slots.prepare` and `run` them."""
    return SlotWork(settings, store, environ, data=data, is_shared=is_shared)


def attach_slots(
    engine: Engine,
    store: SqlTaskStore,
    settings: Settings,
    environ: Mapping[str, str],
    *,
    data: Path,
    is_shared: bool,
) -> SlotWork:
    """Have an engine run slots, and decide by how much room they have."""
    work = build_slots(settings, store, environ, data=data, is_shared=is_shared)
    engine.before_start(work.slots.prepare)
    engine.also_run("slots", work.run)
    engine.slot_paused = work.slots.look
    work.slots.listen(engine.dispatcher.set_slots)
    return work


def file_mark(name: str | None) -> object:
    """Return what changes whenever a file does, without reading it; None if it is not there."""
    if name is None:
        return None
    try:
        found = Path(name).expanduser().stat()
    except (OSError, ValueError, RuntimeError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _reader(
    slot: SlotSettings, environ: Mapping[str, str], problem: InvalidSettingError | None
) -> Callable[[], str]:
    # A function with its names inside shows nothing of the environment, as a partial would.
    def read() -> str:
        if problem is not None:
            raise InvalidSettingError(problem.field, problem.problem)
        return read_key(slot, environ)

    return read


def _configurer(settings: Settings, slot: SlotSettings) -> Callable[[str | None], SlotConfig]:
    def config_for(key: str | None) -> SlotConfig:
        return slot_config(settings, slot, key)

    return config_for


def _key_or_none(reader: Callable[[], str]) -> str | None:
    try:
        return reader()
    except InvalidSettingError:
        return None


def _filled_headers(
    slot: SlotSettings, environ: Mapping[str, str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the headers as they are sent, and what the environment gave, to be told nobody."""
    environment = Environment(environ)
    filled: dict[str, str] = {}
    given: list[str] = []
    for name, text in slot.headers.items():
        setting = key_path("slots", slot.name, "headers", name)
        parts = VARIABLE.split(text)
        parts[1::2] = [environment.value(one, setting=setting) for one in parts[1::2]]
        given += parts[1::2]
        filled[name] = "".join(parts)
        check_header_value(filled[name], setting)
    return filled, tuple(given)
