"""Changing the settings of a running service: one change at a time, wholly or not at all.

Whoever asks for a change, a file, a signal or a person, it goes the same way: the settings that
would be in force are computed and checked, what they need is opened, the store is told in one
transaction with the entry of the audit log, and then everything that runs goes by them, from the
next round of the dispatcher on. Up to the transaction nothing has happened; after it nothing can
fail.

Rule: what dispatches decides by its own settings. Overrides are in the store, and every node looks
for them; a file is each node's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
import structlog

from headgate.administration.reading import SettingsReader
from headgate.administration.reload_notes import ReloadNotes
from headgate.administration.situation import Situation, first_situation
from headgate.audit import Actor, AuditEntry, Detail
from headgate.core.budgets.accounts import Limit
from headgate.core.budgets.scopes import Scope
from headgate.core.projects import Standing
from headgate.databases.access import Access
from headgate.errors import InvalidSettingError, StoreError
from headgate.executor import Executor
from headgate.executors.targets import Target, has_slot
from headgate.ledger import Ledger
from headgate.runtime.engine import Engine, EngineSettings
from headgate.runtime.reconfiguring import in_force, reconfigure
from headgate.settings import Settings
from headgate.settings.changes import Change, Difference, difference
from headgate.settings.origin import Loaded
from headgate.settings.overrides import MAX_OVERRIDES, PAUSED, Override, OverrideKind, said_of
from headgate.stores.administering import overriding
from headgate.stores.administering.overriding import Adoption, Place

log = structlog.get_logger("headgate.settings")

NO_FILE = "the service was started by a program, without settings that could be read again"


Result = TypeVar("Result")


class Assembly(Protocol):
    """How settings become parts; the one place that names concrete classes knows."""

    def engine_settings(self, settings: Settings, *, is_paused: bool) -> EngineSettings:
        """Return the part of the settings that the engine goes by."""

    def executors(self, targets: Mapping[str, Target]) -> dict[str, Executor]:
        """Return an executor for each target; none of them is open."""


Listener = Callable[[Settings, bool], None]
"""Told of settings that have come into force, and whether everything is paused."""


class Administration:
    """The settings of one node, and the only way in which they change."""

    def __init__(
        self,
        engine: Engine,
        access: Access,
        assembly: Assembly,
        loaded: Loaded,
        *,
        executors: dict[str, Executor],
        ledger: Ledger | None = None,
    ) -> None:
        self._engine = engine
        self._access = access
        self._assembly = assembly
        self._executors = executors
        self._ledger = ledger
        self._lock = asyncio.Lock()
        self._reader = SettingsReader()
        self._is_prepared = asyncio.Event()
        self._listeners: list[Listener] = []
        self._under_way: set[asyncio.Task[Any]] = set()
        self._unsent: Situation | None = None
        self._missing_targets: frozenset[str] = frozenset()
        self.origin = loaded.origin
        self.reloads = ReloadNotes(access.now)
        self.situation = first_situation(loaded.settings, loaded.tables, loaded.origins)

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self.situation.settings

    @property
    def is_paused(self) -> bool:
        """Whether nothing new is started at all."""
        return self.situation.is_paused

    def listen(self, listener: Listener) -> None:
        """Tell somebody of settings now, and whenever others come into force."""
        self._listeners.append(listener)
        listener(self.settings, self.is_paused)

    async def prepare(self) -> None:
        """Go on from what was changed before this process started; the store is open by then."""
        async with self._lock:
            situation = self._first(await self._access.ask(overriding.read))
            busy = await self._access.ask(overriding.busy_projects)
            strays = sorted(busy - situation.settings.projects.keys())
            if strays:
                log.warning("projects without settings have tasks; they drain", projects=strays)
                situation = situation.with_strays(strays)
            await self._find_missing_targets(situation.settings)
            adoption = Adoption(ended=tuple(one.place for one in situation.ended()))
            await self._adopt(_without_ended(situation), adoption)
        self._is_prepared.set()

    def _first(self, overrides: tuple[Override, ...]) -> Situation:
        try:
            return self.situation.with_overrides(overrides)
        except InvalidSettingError as error:
            log.warning("the file contradicts what was changed beside it", problem=str(error))
            return self.situation.with_those_that_fit(overrides)

    async def _find_missing_targets(self, settings: Settings) -> None:
        # Where nodes share a store, another may know the target: each has a file of its own.
        if self._engine.store.is_shared:
            return
        known = tuple(sorted(settings.all_targets))
        missing = await self._access.ask(partial(overriding.unknown_targets, known=known))
        self._missing_targets = frozenset(missing)
        if missing:
            log.warning("targets without settings have tasks; these wait", targets=missing)

    async def reload(self, actor: Actor) -> Difference:
        """Read the file again, and go by it; `InvalidSettingError` if it cannot be used."""
        return await self._to_its_end(self.reloads.note(actor, self._reload))

    async def _reload(self, actor: Actor) -> Difference:
        if self.origin is None:
            raise InvalidSettingError("settings", NO_FILE)
        async with self._reader.read(self.origin) as merged, self._lock:
            before, after = self.situation, self.situation.with_file(merged.tables, merged.origins)
            found = difference(before.settings, after.written)
            found = msgspec.structs.replace(
                found, changed=difference(before.settings, after.settings).changed
            )
            if not found.is_empty or after.ended():
                await self._change(after, actor, "settings.reload", "", found.changed)
            return found

    async def override(
        self,
        kind: OverrideKind,
        name: str,
        values: Mapping[str, object],
        actor: Actor,
        *,
        resets: tuple[str, ...] = (),
    ) -> tuple[Change, ...]:
        """Change keys beside the file, and let the file say those that are reset.

        `InvalidSettingError` if the settings would not be right.
        """
        ended = {(kind, name, key) for key in resets if key not in values}
        return await self._to_its_end(self._override(kind, name, values, actor, ended))

    async def _override(
        self,
        kind: OverrideKind,
        name: str,
        values: Mapping[str, object],
        actor: Actor,
        ended: Collection[Place],
    ) -> tuple[Change, ...]:
        async with self._lock:
            before = self.situation
            begun = tuple(
                Override(
                    kind=kind,
                    name=name,
                    key=key,
                    value=value,
                    file_value=said_of(before.tables, kind, name, key),
                    at=self._access.now(),
                    by=actor.name,
                )
                for key, value in values.items()
            )
            kept = tuple(one for one in before.overrides if one.place not in ended)
            after = before.with_overrides(_replaced(kept, begun))
            if len(after.overrides) > MAX_OVERRIDES:
                problem = f"{MAX_OVERRIDES:,} keys are overridden already; write some into the file"
                raise InvalidSettingError(kind, problem)
            changed = difference(before.settings, after.settings).changed
            action = f"{kind.removesuffix('s')}.patch"
            await self._change(after, actor, action, name, changed, begun=begun, reset=ended)
            return changed

    async def pause(self, actor: Actor, *, is_paused: bool) -> None:
        """Turn the switch that pauses everything."""
        await self._to_its_end(self._pause(actor, is_paused=is_paused))

    async def _pause(self, actor: Actor, *, is_paused: bool) -> None:
        async with self._lock:
            before = self.situation
            switch = Override(
                kind="scheduler",
                name="",
                key=PAUSED,
                value=is_paused,
                at=self._access.now(),
                by=actor.name,
            )
            after = before.with_overrides(_replaced(before.overrides, (switch,)))
            change = Change(key="scheduler.paused", before=before.is_paused, after=is_paused)
            action = "scheduler.pause" if is_paused else "scheduler.resume"
            await self._change(after, actor, action, "", (change,), begun=(switch,))

    async def look(self) -> None:
        """Go by what was changed at other nodes."""
        # Read inside the lock: what was read before a change must not come into force after it.
        async with self._lock:
            overrides = await self._access.ask(overriding.read)
            if overrides == self.situation.overrides:
                return
            try:
                after = self.situation.with_overrides(overrides)
            except InvalidSettingError as error:
                log.warning("the file contradicts a change at another node", problem=str(error))
                after = self.situation.with_those_that_fit(overrides)
                after = msgspec.structs.replace(after, overrides=overrides)
            await self._adopt(after, Adoption())

    async def finish_draining(self) -> None:
        """Let go of what has left the file and has no tasks any more."""
        if not self.situation.left:
            return
        async with self._lock:
            asked = tuple(sorted(self.situation.left))
            busy = await self._access.ask(partial(overriding.busy_names, asked=asked))
            done = set(asked) - busy
            if done:
                await self._adopt(self.situation.after_draining(done), Adoption())
                log.info("has drained", names=[".".join(one) for one in sorted(done)])

    async def send_limits(self) -> None:
        """Tell a ledger outside the store of budgets that it could not be told of before."""
        if self._unsent is not None:
            await self._tell_ledger(self._unsent, self.situation)

    async def _to_its_end(self, change: Coroutine[Any, Any, Result]) -> Result:
        """Carry a change out, also if whoever asked for it goes away meanwhile.

        One that comes while the service starts waits for the store to be open.
        """
        task = asyncio.get_running_loop().create_task(self._when_prepared(change))
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        result = await asyncio.shield(task)
        await in_force(self._engine)
        return result

    async def _when_prepared(self, change: Coroutine[Any, Any, Result]) -> Result:
        try:
            await self._is_prepared.wait()
        except BaseException:
            change.close()
            raise
        return await change

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        # Marks an error as seen: whoever asked may have gone meanwhile.
        if not task.cancelled():
            task.exception()

    async def _change(
        self,
        after: Situation,
        actor: Actor,
        action: str,
        subject: str,
        changed: tuple[Change, ...],
        *,
        begun: tuple[Override, ...] = (),
        reset: Collection[Place] = (),
    ) -> None:
        """Put a situation in force that somebody asked for, and write down who did."""
        ended = (*reset, *(one.place for one in after.ended()))
        entry = AuditEntry(actor=actor, action=action, subject=subject, detail=_detail(changed))
        adoption = Adoption(
            begun=tuple(one for one in begun if one.place not in ended),
            ended=ended,
            budgets=self._budgets(after),
            entry=entry,
        )
        await self._adopt(_without_ended(after), adoption)
        keys = [change.key for change in changed]
        log.info("settings changed", action=action, by=actor.name, subject=subject, keys=keys)

    async def _adopt(self, after: Situation, adoption: Adoption) -> None:
        before = self.situation
        executors, opened = await self._opened(before, after)
        try:
            if not adoption.is_empty:
                keeps_books = self._ledger is None
                await self._access.run(
                    partial(overriding.adopt, adoption=adoption, keeps_books=keeps_books)
                )
            await reconfigure(self._engine, self._engine_settings(after), executors)
        except BaseException:
            for executor in opened:
                await executor.close()
            raise
        self.situation, self._executors = after, executors
        for listener in self._listeners:
            listener(after.settings, after.is_paused)
        if adoption.budgets is not None:
            await self._tell_ledger(before, after)

    def _engine_settings(self, after: Situation) -> EngineSettings:
        settings = self._assembly.engine_settings(after.settings, is_paused=after.is_paused)
        missing = tuple(sorted(self._missing_targets - after.settings.all_targets.keys()))
        desk = msgspec.structs.replace(settings.desk, missing_targets=missing)
        return msgspec.structs.replace(settings, desk=desk)

    async def _opened(
        self, before: Situation, after: Situation
    ) -> tuple[dict[str, Executor], list[Executor]]:
        """Return the executors of all targets, and those of them that were opened for this."""
        old = {name: _work_of(target) for name, target in before.settings.targets.items()}
        wanted = after.settings.targets
        changed = {
            name: target
            for name, target in wanted.items()
            if name not in self._executors or old.get(name) != _work_of(target)
        }
        new = self._assembly.executors(changed)
        opened: list[Executor] = []
        try:
            for executor in new.values():
                await executor.open()
                opened.append(executor)
        except BaseException:
            for executor in opened:
                await executor.close()
            raise
        known = self._executors | new
        return {name: known[name] for name in wanted if name in known}, opened

    def _budgets(self, after: Situation) -> dict[Scope, Limit] | None:
        wanted = self._assembly.engine_settings(after.settings, is_paused=False).budgets
        return wanted if wanted != self._engine.settings.budgets else None

    async def _tell_ledger(self, before: Situation, after: Situation) -> None:
        if self._ledger is None:
            return
        old = self._assembly.engine_settings(before.settings, is_paused=False).budgets
        new = self._assembly.engine_settings(after.settings, is_paused=False).budgets
        self._unsent = self._unsent or before
        try:
            for scope in old.keys() - new.keys():
                await self._ledger.set_limit(scope, Limit())
            for scope, limit in new.items():
                await self._ledger.set_limit(scope, limit)
            self._unsent = None
        except StoreError as error:
            log.warning("the ledger was not told of new budgets; tried again", problem=str(error))


def _replaced(overrides: tuple[Override, ...], begun: tuple[Override, ...]) -> tuple[Override, ...]:
    new = {one.place: one for one in (*overrides, *begun)}
    return tuple(new[place] for place in sorted(new))


def _without_ended(situation: Situation) -> Situation:
    ended = {one.place for one in situation.ended()}
    kept = tuple(one for one in situation.overrides if one.place not in ended)
    return msgspec.structs.replace(situation, overrides=kept)


def _work_of(target: Target) -> Target:
    """Return what of a target its executor is made of."""
    # Which slot it is makes no difference to it, but whether there is one.
    slot = "" if has_slot(target) else None
    return msgspec.structs.replace(
        target, status=Standing.ACTIVE, slot=slot, provider=None, default=False
    )


def _detail(changed: tuple[Change, ...]) -> Detail:
    return {change.key: {"from": change.before, "to": change.after} for change in changed}
