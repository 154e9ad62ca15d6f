"""Slots: the keys of providers, each with a loop that wakes it and one that reads its quota.

Every node runs the loops of every slot; what is to be done is claimed in the store, so that it is
done once, and goes on when a node is lost. What a node does not know better it takes
from its row cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import structlog

from headgate.core.slots.slot import SlotConfig, SlotRow, SlotStanding
from headgate.core.slots.status import LogLine
from headgate.engine.slots import slot_log
from headgate.engine.slots.loops import QuotaLoop, WakeLoop
from headgate.engine.slots.row_cache import SlotRowCache
from headgate.engine.slots.slot import KeySlot, LoopHealth, Shared, SlotSetup, SlotStatus
from headgate.engine.slots.slot_log import SlotTrail
from headgate.engine.supervisor import Pulse, Supervisor
from headgate.errors import (
    HeadgateError,
    SlotNotFoundError,
    StoreUnavailableError,
)
from headgate.providers.provider import Provider
from headgate.storage.audit import AuditEntry
from headgate.storage.slot_rows import SlotStore

# The watch over slots: sees what other nodes changed, and starts loops again that stand still.
#
# It also notices a clock that jumped, after which every sleep is too long or too short, and has all
# loops look at once.

STUCK_SECONDS = 120.0
"""A step takes two requests at most, each with a limit of its own; one this long has stopped."""

REFRESH_SECONDS = 60.0
SHARED_REFRESH_SECONDS = 1.0
WATCH_SECONDS = 30.0
JUMP_SECONDS = 2.0
FORGET_SECONDS = 3_600.0


class SlotWatch:
    """Watches the loops of all slots."""

    def __init__(
        self,
        rows: SlotRowCache,
        supervisor: Supervisor,
        *,
        names: Callable[[], tuple[str, ...]],
        look_all: Callable[[], None],
        is_shared: bool,
    ) -> None:
        self._rows = rows
        self._supervisor = supervisor
        self._names = names
        self._look_all = look_all
        self._refresh_seconds = SHARED_REFRESH_SECONDS if is_shared else REFRESH_SECONDS
        self._wall_ahead: float | None = None
        self.refresh_pulse = Pulse()
        self._problem = ""
        self._forgets_at = 0.0

    async def refresh(self) -> None:
        """Read what others changed, until cancelled."""
        while True:
            self.refresh_pulse.begin()
            try:
                await self._refresh_once()
                self._tell("")
            except StoreUnavailableError as error:
                self._tell(str(error) or "the store is unavailable")
            self.refresh_pulse.end(self._rows.now())
            await asyncio.sleep(self._refresh_seconds)

    async def _refresh_once(self) -> None:
        names = self._names()
        if names:
            await self._rows.refresh()
        now = asyncio.get_running_loop().time()
        if now >= self._forgets_at:
            await self._rows.forget_others(names)
            self._forgets_at = now + FORGET_SECONDS

    async def watch(self) -> None:
        """Look after loops and clock, until cancelled."""
        while True:
            self.run_once()
            await asyncio.sleep(WATCH_SECONDS)

    def run_once(self) -> list[str]:
        """Start again what stands still, and return the names."""
        if self._has_jumped():
            log.info("the clock has jumped; all slots look at once")
            self._look_all()
        return self._supervisor.restart_stuck(STUCK_SECONDS)

    def _has_jumped(self) -> bool:
        before = self._wall_ahead
        self._wall_ahead = self._rows.now() - asyncio.get_running_loop().time()
        return before is not None and abs(self._wall_ahead - before) > JUMP_SECONDS

    def _tell(self, problem: str) -> None:
        if problem and not self._problem:
            log.warning("slots cannot be read; nothing is sent until they can", problem=problem)
        elif self._problem and not problem:
            log.info("slots can be read again")
        self._problem = problem


__all__ = ["LoopHealth", "SlotSetup", "SlotStatus", "Slots"]

log = structlog.get_logger("headgate.slots")

MAX_REQUESTS = 256
"""How many requests to providers are under way at a time, of all slots."""

STOP_SECONDS = 10.0
"""How long loops have to end; one that does not hear it must not keep the service from ending."""

Listener = Callable[[tuple[SlotStanding, ...]], None]
LatestLines = Callable[[str, int], list[LogLine]]
"""Reads the latest lines about a slot, at most so many; it may take a while."""


class Slots:
    """All slots of a service, on one node."""

    def __init__(
        self,
        store: SlotStore,
        setups: Sequence[SlotSetup],
        *,
        trail_of: Callable[[str], SlotTrail],
        make_id: Callable[[], str],
        latest_lines: LatestLines | None = None,
        is_shared: bool = False,
    ) -> None:
        self._rows = SlotRowCache(store, self._seen)
        self._shared = Shared(
            rows=self._rows,
            trail_of=trail_of,
            make_id=make_id,
            turns=asyncio.Semaphore(MAX_REQUESTS),
            sharers=self._sharers,
            poll_soon=self._poll_soon,
            changed=self._tell,
        )
        self._latest_lines = latest_lines
        self._is_shared = is_shared
        self._slots: dict[str, KeySlot] = {}
        self._listeners: list[Listener] = []
        self._retired: list[Provider] = []
        self._supervisor: Supervisor | None = None
        self._refusing: set[asyncio.Future[None]] = set()
        self._is_prepared = False
        self._place(setups)

    async def prepare(self) -> None:
        """Read what is kept of the slots, and begin those that are new or changed."""
        await self._rows.refresh()
        await asyncio.gather(*(slot.begin() for slot in self._slots.values()))
        self._is_prepared = True
        self._tell()

    async def run(self) -> None:
        """Run two loops for each slot, and watch them, until cancelled."""
        self._supervisor = supervisor = Supervisor()
        watch = SlotWatch(
            self._rows,
            supervisor,
            names=lambda: tuple(self._slots),
            look_all=self._look_all,
            is_shared=self._is_shared,
        )
        try:
            supervisor.start("slot row cache", watch.refresh, watch.refresh_pulse)
            supervisor.start("slot watch", watch.watch)
            supervisor.start("retired providers", self._close_retired)
            for slot in self._slots.values():
                self._start(slot, supervisor)
            await asyncio.Event().wait()
        finally:
            self._supervisor = None
            await supervisor.stop(longest_seconds=STOP_SECONDS)
            await self._close()

    def reconfigure(self, setups: Sequence[SlotSetup]) -> None:
        """Go by other settings: loops see them at their next step, which comes at once."""
        before = {id(slot.setup.provider): slot.setup.provider for slot in self._slots.values()}
        self._place(setups)
        used = {id(slot.setup.provider) for slot in self._slots.values()}
        self._retired.extend(provider for key, provider in before.items() if key not in used)
        for slot in self._slots.values():
            slot.restate()
        self._tell()

    def listen(self, listener: Listener) -> None:
        """Tell of all standings now, and whenever one of them changes."""
        self._listeners.append(listener)
        listener(self.standings())

    def standings(self) -> tuple[SlotStanding, ...]:
        """Return what decisions need of each slot, in the order of the file."""
        return tuple(slot.standing() for slot in self._slots.values())

    def statuses(self) -> tuple[SlotStatus, ...]:
        """Return everything about each slot, in the order of the file."""
        return tuple(slot.status() for slot in self._slots.values())

    async def latest_lines(self, name: str, most: int) -> list[LogLine]:
        """Return the latest lines that this node has logged of a slot, oldest first.

        Raises `SlotNotFoundError`.
        """
        self._slot(name)
        if self._latest_lines is None:
            return []
        return await asyncio.to_thread(self._latest_lines, name, most)

    async def warm(self, name: str, entry: AuditEntry | None = None) -> SlotStatus:
        """Wake a slot by hand, unless a fresh reading shows that its window is open.

        Raises `SlotNotFoundError`, `WindowOpenError`, or `SlotUnavailableError` where nothing was
        sent or the provider did not take it.
        """
        return await self._slot(name).warm(entry)

    async def switch(
        self, name: str, *, is_on: bool, entry: AuditEntry | None = None
    ) -> SlotStatus:
        """Enable or disable a slot by hand; enabling forgets what had disabled it."""
        return await self._slot(name).switch(entry, is_on=is_on)

    async def reopen(self, name: str) -> SlotStatus:
        """Open a slot that a pause or a quota closed; the next answer of its provider decides."""
        return await self._slot(name).reopen()

    def read_soon(self, name: str) -> None:
        """Read the quota soon: somebody was told there is none. At most once a minute."""
        slot = self._slots.get(name)
        if slot is not None:
            slot.read_soon()

    def observe(
        self,
        name: str,
        status: int,
        headers: Mapping[str, str],
        now: float,
        *,
        refused_key: str = "",
    ) -> None:
        """Learn from a response to a request that was sent with the key of a slot, whoever sent it.

        So a quota that is told by headers is known while traffic flows, and nobody has to ask for
        it. The names of headers are in lower case; a name that no slot has changes nothing. It
        returns at once: what matters is stored within a second. A `refused_key` disables the slot.
        """
        slot = self._slots.get(name)
        if slot is None:
            return
        slot.observe(status, headers, now)
        if refused_key:
            refusing = asyncio.ensure_future(self.refuse_key(name, status, refused_key))
            self._refusing.add(refusing)
            refusing.add_done_callback(self._refusing.discard)

    async def refuse_key(self, name: str, status: int, key: str) -> None:
        """Disable a slot whose key was refused to real traffic; the log says what became of it.

        A key that was replaced while the request was under way says nothing about the new one.
        """
        try:
            await self._slot(name).refuse_key(status, key)
        except HeadgateError as error:
            log.error(
                "a key was refused, and its slot could not be disabled",
                slot=name, status=status, why=str(error),
            )  # fmt: skip

    def loops(self, name: str) -> tuple[asyncio.Task[None] | None, ...]:
        """Return what runs the loops of a slot, its wake loop first."""
        supervisor = self._supervisor
        names = _loop_names(self._slot(name))
        return () if supervisor is None else tuple(supervisor.task(one) for one in names)

    def _slot(self, name: str) -> KeySlot:
        slot = self._slots.get(name)
        if slot is None:
            raise SlotNotFoundError(name)
        return slot

    def _place(self, setups: Sequence[SlotSetup]) -> None:
        """Have exactly these slots; those that were there go on with what they had."""
        before, self._slots = self._slots, {}
        for setup in setups:
            name = setup.config.name
            slot = before.pop(name, None)
            if slot is None:
                self._slots[name] = slot = KeySlot(setup, self._shared)
                self._start(slot, self._supervisor)
            else:
                self._slots[name] = slot
                slot.reconfigure(setup)
        for slot in before.values():
            self._drop(slot)
        self._rows.keep_only(frozenset(self._slots))

    def _start(self, slot: KeySlot, supervisor: Supervisor | None) -> None:
        if supervisor is not None:
            wake, quota = _loop_names(slot)
            supervisor.start(wake, WakeLoop(slot).run, slot.wake_pulse)
            supervisor.start(quota, QuotaLoop(slot).run, slot.quota_pulse)

    def _drop(self, slot: KeySlot) -> None:
        slot_log.gone(slot.name)
        if self._supervisor is not None:
            for name in _loop_names(slot):
                self._supervisor.drop(name)

    def _seen(self, row: SlotRow) -> None:
        slot = self._slots.get(row.name)
        if slot is not None:
            slot.seen(row)

    def _sharers(self, config: SlotConfig) -> tuple[SlotConfig, ...]:
        digest = config.key_digest
        if not digest:
            return (config,)
        others = [slot.config for slot in self._slots.values() if slot.name != config.name]
        sharing = [one for one in others if one.key_digest == digest]
        return (config, *sharing, *self._left(digest))

    def _left(self, key_digest: str) -> list[SlotConfig]:
        """Return slots that left the settings, say for another name, with their wake on its way."""
        rows = self._rows.pending_of_key(key_digest)
        kept = [row.config for row in rows if row.name not in self._slots]
        return [msgspec.structs.replace(one, is_enabled=False) for one in kept if one is not None]

    def _poll_soon(self, names: Iterable[str]) -> None:
        for name in names:
            slot = self._slots.get(name)
            if slot is not None:
                slot.quota_alarm.ring()

    def _look_all(self) -> None:
        for slot in self._slots.values():
            slot.wake_alarm.ring()
            slot.quota_alarm.ring()

    def _tell(self) -> None:
        if self._is_prepared:
            standings = self.standings()
            for listener in self._listeners:
                listener(standings)

    async def _close_retired(self) -> None:
        """Close providers that were replaced, when no step can be using them any more."""
        while True:
            replaced = list(self._retired)
            await asyncio.sleep(STUCK_SECONDS)
            self._retired = self._retired[len(replaced) :]
            for provider in replaced:
                await _close(provider)

    async def _close(self) -> None:
        retired, self._retired = self._retired, []
        for provider in (*retired, *(slot.setup.provider for slot in self._slots.values())):
            await _close(provider)


def _loop_names(slot: KeySlot) -> tuple[str, str]:
    return f"slot {slot.name} wake scheduler", f"slot {slot.name} quota poller"


async def _close(provider: Provider) -> None:
    try:
        await provider.close()
    except Exception:
        # It may be anybody's, and the next one is to be closed all the same.
        log.exception("a provider could not be closed")
