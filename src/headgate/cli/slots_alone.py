"""Slots without a service around them, for keys that something else than Headgate uses.

What is known of slots is kept where a service would keep it, so that one can take over from the
other. Rule: never both at once over one data directory; its lock sees to that. Other commands ask
this process over a socket there, so that the lock is in nobody's way.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import msgspec
import structlog

from headgate.api.errors import ApiError, api_error_of
from headgate.api.slots import observe_response, slot_body
from headgate.app import SlotWork, build_slots, build_store, held_file, is_shared
from headgate.cli.connection import chosen_directory
from headgate.cli.logs import configure_logs
from headgate.cli.slot import WARM_SECONDS
from headgate.client.local_slots import (
    SOCKET_NAME,
    SocketReply,
    SocketRequest,
    connected_socket,
    short_address,
)
from headgate.config import Settings, settings_file
from headgate.config.loading import Loaded, Origin, load
from headgate.config.reload import FileWatcher
from headgate.config.settings import LogSettings
from headgate.core.slots.status import SlotBody, SlotListBody
from headgate.engine.slots.slot import SlotStatus
from headgate.engine.slots.slots import Slots
from headgate.errors import HeadgateError, InvalidSettingError, SlotNotFoundError
from headgate.storage.audit import Actor, AuditEntry
from headgate.storage.data_lock import hold_store

log = structlog.get_logger("headgate.config")


def run_alone(
    path: Path | None, data: Path | None, store_url: str | None, *, as_json: bool
) -> None:
    """Run the slots of a settings file until somebody ends it."""
    options = {} if store_url is None else {"store.url": store_url}
    loaded = load(Origin(path=settings_file(path), environ=os.environ, options=options))
    _check_slots(loaded)
    directory = chosen_directory(data)
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
    file = held_file(settings, directory)
    if file is None:
        # Nodes that share a store share its slots as well, and each wake is claimed by one.
        return nullcontext()
    return hold_store(file)


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
        commands = SlotCommands(work.slots, store.now)
        await _work(work, loaded.origin, stopping, commands, directory)
    finally:
        await store.close()


async def _work(
    work: SlotWork,
    origin: Origin | None,
    stopping: asyncio.Event,
    commands: SlotCommands,
    directory: Path,
) -> None:
    running = [asyncio.create_task(work.run()), asyncio.create_task(_set(stopping))]
    running.append(asyncio.create_task(commands.serve(directory)))
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


# The socket of the data directory, by which `headgate slot list`, `warm`, `pause` and `resume`
# reach this process. Whoever may open it may do all of that: only the owner of the directory can.

MAX_REQUEST_BYTES = 64 << 10
MAX_CONNECTIONS = 16
REQUEST_SECONDS = 5.0
OK = 200

_ONLY_THE_OWNER = 0o177
_HERE = Actor(name="(command)")


class SlotCommands:
    """Answers commands about slots, each with the status and body that the API would send."""

    def __init__(self, slots: Slots, now: Callable[[], float]) -> None:
        self._slots = slots
        self._now = now
        self._connections = 0

    async def serve(self, directory: Path) -> None:
        """Listen in a directory until cancelled; where that cannot be, slots run all the same."""
        listening = listening_in(directory)
        if listening is None:
            await asyncio.Event().wait()
            return
        server = await asyncio.start_unix_server(
            self._connected, sock=listening, limit=MAX_REQUEST_BYTES
        )
        try:
            await server.serve_forever()
        finally:
            with suppress(OSError):
                (directory / SOCKET_NAME).unlink()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections > MAX_CONNECTIONS:
                return
            async with asyncio.timeout(REQUEST_SECONDS):
                line = await reader.readline()
            if line:
                async with asyncio.timeout(WARM_SECONDS):
                    reply = await self.reply(line)
                writer.write(msgspec.json.encode(reply) + b"\n")
                await writer.drain()
        except (TimeoutError, OSError, ValueError):
            # It asked for nothing that can be read, or went away.
            pass
        finally:
            self._connections -= 1
            writer.close()

    async def reply(self, line: bytes) -> SocketReply:
        """Return the answer to a line."""
        try:
            request = msgspec.json.decode(line, type=SocketRequest)
            body: SlotBody | SlotListBody = await self._done(request)
        except msgspec.MsgspecError as error:
            return _refused(ApiError("bad_json", f"the command cannot be read: {error}"))
        except HeadgateError as error:
            return _refused(api_error_of(error))
        return SocketReply(status=OK, body=msgspec.Raw(msgspec.json.encode(body)))

    async def _done(self, request: SocketRequest) -> SlotBody | SlotListBody:
        slots, name = self._slots, request.name
        entry = AuditEntry(actor=_HERE, action=f"slot.{request.verb}", subject=name)
        match request.verb:
            case "list":
                bodies = [self._body(status) for status in slots.statuses()]
                return SlotListBody(slots=bodies, count=len(bodies))
            case "show" | "observe":
                found = (one for one in slots.statuses() if one.config.name == name)
                status = next(found, None)
                if status is None:
                    raise SlotNotFoundError(name)
                if request.response is not None:
                    observe_response(slots, name, request.response, self._now())
                return self._body(status)
            case "warm":
                return self._body(await slots.warm(name, entry))
            case "enable" | "disable":
                is_on = request.verb == "enable"
                return self._body(await slots.switch(name, is_on=is_on, entry=entry))

    def _body(self, status: SlotStatus) -> SlotBody:
        return slot_body(status, self._now())


def _refused(error: ApiError) -> SocketReply:
    body = msgspec.json.encode(error.body_of(""))
    return SocketReply(status=error.kind.status, body=msgspec.Raw(body))


def listening_in(directory: Path) -> socket.socket | None:
    """Return the socket of a directory; None, which is logged, if commands cannot be answered."""
    try:
        connected_socket(directory, REQUEST_SECONDS).close()
    except OSError:
        # Nobody answers: there is none yet, or its process is gone.
        pass
    else:
        # Several may share a store, and with it all slots; the first one answers for them.
        return None
    listening = socket.socket(socket.AF_UNIX)
    before = os.umask(_ONLY_THE_OWNER)
    try:
        (directory / SOCKET_NAME).unlink(missing_ok=True)
        with short_address(directory) as address:
            listening.bind(address)
    except OSError as error:
        listening.close()
        why = error.strerror or str(error)
        log.warning("headgate slot list, warm, pause and resume cannot reach this", why=why)
        return None
    finally:
        os.umask(before)
    return listening
