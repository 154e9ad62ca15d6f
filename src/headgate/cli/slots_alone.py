"""Slots without a service around them, for keys that something else than Headgate uses.

What is known of slots is kept where a service would keep it, so that one can take over from the
other. Rule: never both at once over one data directory; its lock sees to that.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec
import structlog

from headgate.app import SlotWork, build_slots, build_store, held_folder, is_shared
from headgate.cli.connection import data_directory
from headgate.cli.logs import configure_logs
from headgate.config import Settings, settings_file
from headgate.config.loading import Loaded, Origin, load
from headgate.config.reload import FileWatcher
from headgate.config.settings import LogSettings
from headgate.errors import InvalidSettingError
from headgate.storage.audit import Actor
from headgate.storage.data_lock import hold_directory

log = structlog.get_logger("headgate.config")


def run_alone(
    path: Path | None, data: Path | None, store_url: str | None, *, as_json: bool
) -> None:
    """Run the slots of a settings file until somebody ends it."""
    options = {} if store_url is None else {"store.url": store_url}
    loaded = load(Origin(path=settings_file(path), environ=os.environ, options=options))
    _check_slots(loaded)
    directory = (data or data_directory()).absolute()
    with _held(loaded.settings, directory):
        configure_logs(_logs(loaded.settings.log, as_json=as_json))
        asyncio.run(_run(loaded, directory))


def _check_slots(loaded: Loaded) -> None:
    if not loaded.settings.slots:
        path = None if loaded.origin is None else loaded.origin.path
        where = "there is no headgate.toml here" if path is None else f"{path} has none"
        advice = "write [[slots]] with name, provider and key_env, as headgate config example shows"
        raise InvalidSettingError("slots", f"{where}; {advice}")


def _logs(settings: LogSettings, *, as_json: bool) -> LogSettings:
    if as_json:
        return msgspec.structs.replace(settings, format="json")
    # This command is for people, also where they keep what it writes.
    return (
        msgspec.structs.replace(settings, format="text") if settings.format == "auto" else settings
    )


def _held(settings: Settings, directory: Path) -> AbstractContextManager[object]:
    folder = held_folder(settings, directory)
    if folder is None:
        # Nodes that share a store share its slots as well, and each wake is claimed by one.
        return nullcontext()
    return hold_directory(folder)


async def _run(loaded: Loaded, directory: Path) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    settings = loaded.settings
    keeps_ledger = settings.ledger.url in (None, settings.store.url)
    store = build_store(settings, data=directory, keeps_ledger=keeps_ledger)
    work = build_slots(settings, store, os.environ, data=directory, is_shared=is_shared(settings))
    await store.open()
    try:
        await work.slots.prepare()
        await _work(work, loaded.origin, stopping)
    finally:
        await store.close()


async def _work(work: SlotWork, origin: Origin | None, stopping: asyncio.Event) -> None:
    running = [asyncio.create_task(work.run()), asyncio.create_task(_set(stopping))]
    if origin is not None and origin.path is not None:
        watch = FileWatcher(Reloading(work, origin), origin.path)
        running.append(asyncio.create_task(watch.run()))
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in running:
            one.cancel()
        ends = await asyncio.gather(*running, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end


async def _set(event: asyncio.Event) -> None:
    await event.wait()


class Reloading:
    """Reads the settings of slots again."""

    def __init__(self, work: SlotWork, origin: Origin) -> None:
        self._work = work
        self._origin = origin

    async def reload(self, _actor: Actor, /) -> None:
        """Read the file, and have the slots go by it; one without slots changes nothing."""
        loaded = await asyncio.to_thread(load, self._origin)
        _check_slots(loaded)
        self._work.reconfigure(loaded.settings)
        log.info("settings reloaded")
