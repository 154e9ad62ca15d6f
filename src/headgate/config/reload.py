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
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Mapping,
)
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import structlog

from headgate.config import Settings
from headgate.config.loading import Loaded, Origin
from headgate.config.overrides import (
    BUDGET_KEYS,
    MAX_OVERRIDES,
    PAUSED,
    Change,
    Difference,
    Override,
    OverrideKind,
    OverridePath,
    ReplacedBudget,
    StoredChange,
    busy_names,
    busy_projects,
    difference,
    file_value_of,
    read_overrides,
    replaced_budgets,
    store_change,
    unknown_targets,
    whole_budget,
)
from headgate.config.sources import Merged
from headgate.config.state import ConfigState
from headgate.core.budgets.ledger import Ledger, Limit
from headgate.core.budgets.scopes import Scope
from headgate.core.snapshot import Standing
from headgate.engine.engine import Engine, EngineSettings
from headgate.errors import InvalidSettingError, StoreError
from headgate.executors.executor import Executor
from headgate.executors.targets import Target, has_slot
from headgate.storage.audit import FILE, Actor, AuditEntry, Detail
from headgate.storage.transaction import Access

log = structlog.get_logger("headgate.config")

NO_FILE = "the service was started by a program, without settings that could be read again"

READ_SECONDS = 10.0
WATCH_SECONDS = 1.0
UPKEEP_SECONDS = 2.0

Result = TypeVar("Result")

Signature = tuple[int, int, int, int] | None

Listener = Callable[[Settings, bool], None]
"""Told of settings that have come into force, and whether everything is paused."""


class Assembly(Protocol):
    """How settings become parts; the one place that names concrete classes knows."""

    def engine_settings(self, settings: Settings, *, is_paused: bool) -> EngineSettings:
        """Return the part of the settings that the engine goes by."""

    def executors(self, targets: Mapping[str, Target]) -> dict[str, Executor]:
        """Return an executor for each target; none of them is open."""


class LiveConfig:
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
        self._unsent: ConfigState | None = None
        self._missing_targets: frozenset[str] = frozenset()
        self.origin = loaded.origin
        self.reloads = ReloadNotes(access.now)
        self.replaced_at_start: tuple[ReplacedBudget, ...] = ()
        self.state = ConfigState.initial(loaded.settings, loaded.tables, loaded.origins)

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self.state.settings

    @property
    def is_paused(self) -> bool:
        """Whether nothing new is started at all."""
        return self.state.is_paused

    def listen(self, listener: Listener) -> None:
        """Tell somebody of settings now, and whenever others come into force."""
        self._listeners.append(listener)
        listener(self.settings, self.is_paused)

    async def prepare(self) -> None:
        """Go on from what was changed before this process started; the store is open by then."""
        async with self._lock:
            overrides = await self._access.ask(read_overrides)
            state = self._first(overrides)
            busy = await self._access.ask(busy_projects)
            unconfigured = sorted(busy - state.settings.projects.keys())
            if unconfigured:
                log.warning(
                    "projects without settings have tasks; they drain", projects=unconfigured
                )
                state = state.with_unconfigured_projects(unconfigured)
            await self._find_missing_targets(state.settings)
            unfit = (one for one in overrides if one not in state.overrides)
            ended = (*state.ended(), *(one for one in unfit if one.kind == "budgets"))
            replaced = replaced_budgets(ended, state.settings)
            stored_change = StoredChange(
                ended=tuple(one.path for one in ended),
                entries=tuple(one.entry for one in replaced),
            )
            await self._apply(state.without_ended(), stored_change)
            self.replaced_at_start = _logged(replaced)
        self._is_prepared.set()

    def _first(self, overrides: tuple[Override, ...]) -> ConfigState:
        try:
            return self.state.with_overrides(overrides)
        except InvalidSettingError as error:
            log.warning("the file contradicts what was changed beside it", problem=str(error))
            return self.state.with_fitting_overrides(overrides)

    async def _find_missing_targets(self, settings: Settings) -> None:
        # Where nodes share a store, another may know the target: each has a file of its own.
        if self._engine.store.is_shared:
            return
        known = tuple(sorted(settings.all_targets))
        missing = await self._access.ask(partial(unknown_targets, known=known))
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
            before = self.state
            try:
                after = before.with_file(merged.tables, merged.origins)
            except InvalidSettingError as error:
                raise merged.located(error) from None
            found = Difference(
                changed=difference(before.settings, after.settings).changed,
                needs_restart=difference(before.settings, after.written).needs_restart,
                kept=merged.kept,
            )
            if merged.kept:
                log.warning("a zero keeps what was; the next start refuses it", keys=merged.kept)
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
        ended: Collection[OverridePath],
    ) -> tuple[Change, ...]:
        async with self._lock:
            before = self.state
            if kind == "budgets":
                resets = {key for _, _, key in ended}
                values = whole_budget(before.tables, before.overrides, name, values, resets)
                ended = {(kind, name, key) for key in BUDGET_KEYS if not values}
            begun = tuple(
                Override(
                    kind=kind,
                    name=name,
                    key=key,
                    value=value,
                    file_value=file_value_of(before.tables, kind, name, key),
                    at=self._access.now(),
                    by=actor.name,
                )
                for key, value in values.items()
            )
            kept = tuple(one for one in before.overrides if one.path not in ended)
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
            before = self.state
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

    async def refresh(self) -> None:
        """Go by what was changed at other nodes."""
        # Read inside the lock: what was read before a change must not come into force after it.
        async with self._lock:
            overrides = await self._access.ask(read_overrides)
            if overrides == self.state.overrides:
                return
            try:
                after = self.state.with_overrides(overrides)
            except InvalidSettingError as error:
                log.warning("the file contradicts a change at another node", problem=str(error))
                after = self.state.with_fitting_overrides(overrides)
                after = msgspec.structs.replace(after, overrides=overrides)
            await self._apply(after, StoredChange())

    async def finish_draining(self) -> None:
        """Let go of what has left the file and has no tasks any more."""
        if not self.state.draining:
            return
        async with self._lock:
            asked = tuple(sorted(self.state.draining))
            busy = await self._access.ask(partial(busy_names, asked=asked))
            done = set(asked) - busy
            if done:
                await self._apply(self.state.after_draining(done), StoredChange())
                log.info("has drained", names=[".".join(one) for one in sorted(done)])

    async def send_limits(self) -> None:
        """Tell a ledger outside the store of budgets that it could not be told of before."""
        if self._unsent is not None:
            await self._tell_ledger(self._unsent, self.state)

    async def _to_its_end(self, change: Coroutine[Any, Any, Result]) -> Result:
        """Carry a change out, also if whoever asked for it goes away meanwhile.

        One that comes while the service starts waits for the store to be open.
        """
        task = asyncio.get_running_loop().create_task(self._when_prepared(change))
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        result = await asyncio.shield(task)
        await self._engine.in_force()
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
        after: ConfigState,
        actor: Actor,
        action: str,
        subject: str,
        changed: tuple[Change, ...],
        *,
        begun: tuple[Override, ...] = (),
        reset: Collection[OverridePath] = (),
    ) -> None:
        """Put a state in force that somebody asked for, and write down who did."""
        lost = after.ended()
        ended = (*reset, *(one.path for one in lost))
        # What somebody changed by hand just now, no file has replaced.
        replaced = () if begun else replaced_budgets(lost, after.settings)
        entry = AuditEntry(actor=actor, action=action, subject=subject, detail=_detail(changed))
        stored_change = StoredChange(
            begun=tuple(one for one in begun if one.path not in ended),
            ended=ended,
            budgets=self._budgets(after),
            entries=(entry, *(one.entry for one in replaced)),
        )
        await self._apply(after.without_ended(), stored_change)
        _logged(replaced)
        keys = [change.key for change in changed]
        log.info("settings changed", action=action, by=actor.name, subject=subject, keys=keys)

    async def _apply(self, after: ConfigState, stored_change: StoredChange) -> None:
        before = self.state
        executors, opened = await self._opened(before, after)
        try:
            if not stored_change.is_empty:
                keeps_ledger = self._ledger is None
                await self._access.run(
                    partial(store_change, stored_change=stored_change, keeps_ledger=keeps_ledger)
                )
            await self._engine.reconfigure(self._engine_settings(after), executors)
        except BaseException:
            for executor in opened:
                await executor.close()
            raise
        self.state, self._executors = after, executors
        for listener in self._listeners:
            listener(after.settings, after.is_paused)
        if stored_change.budgets is not None:
            await self._tell_ledger(before, after)

    def _engine_settings(self, after: ConfigState) -> EngineSettings:
        settings = self._assembly.engine_settings(after.settings, is_paused=after.is_paused)
        missing = tuple(sorted(self._missing_targets - after.settings.all_targets.keys()))
        dispatch = msgspec.structs.replace(
            settings.dispatch, missing_targets=missing, set_keys=after.set_caps
        )
        return msgspec.structs.replace(settings, dispatch=dispatch)

    async def _opened(
        self, before: ConfigState, after: ConfigState
    ) -> tuple[dict[str, Executor], list[Executor]]:
        """Return the executors of all targets, and those of them that were opened for this."""
        old = {name: _work_of(target) for name, target in before.settings.all_targets.items()}
        wanted = after.settings.all_targets
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

    def _budgets(self, after: ConfigState) -> dict[Scope, Limit] | None:
        wanted = self._assembly.engine_settings(after.settings, is_paused=False).budgets
        return wanted if wanted != self._engine.settings.budgets else None

    async def _tell_ledger(self, before: ConfigState, after: ConfigState) -> None:
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


class SettingsReader:
    """Reads one at a time, so that what was read later comes into force later.

    A file may lie where nothing answers any more. Rule: no other change waits for it, one thread at
    most does, and whoever asked for a reload that takes too long is told so.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._under_way: asyncio.Task[Merged] | None = None

    @asynccontextmanager
    async def read(self, origin: Origin) -> AsyncIterator[Merged]:
        """Give what the sources say now; nobody reads them again while the body runs."""
        async with self._turn:
            if self._under_way is not None and not self._under_way.done():
                problem = "has not been read since it was last asked for; see where it lies"
                raise InvalidSettingError(_name(origin), problem)
            yield await self._read(origin)

    async def _read(self, origin: Origin) -> Merged:
        # A large file takes a while to be read, and the loop has other things to do.
        self._under_way = asyncio.create_task(asyncio.to_thread(origin.read, is_again=True))
        self._under_way.add_done_callback(_note)
        done, _ = await asyncio.wait({self._under_way}, timeout=READ_SECONDS)
        if not done:
            problem = f"was not read within {READ_SECONDS:g} s, and nothing has changed"
            raise InvalidSettingError(_name(origin), f"{problem}; reload when it can be read")
        return self._under_way.result()


def _name(origin: Origin) -> str:
    return "settings" if origin.path is None else str(origin.path)


def _note(task: asyncio.Task[Merged]) -> None:
    # Marks an error as seen: nobody waits for what took too long.
    if not task.cancelled():
        task.exception()


class ReloadNote(msgspec.Struct, frozen=True, kw_only=True):
    """When the settings were read again, for whom, and what that changed; or the `problem`."""

    at: float
    by: str
    changed: tuple[Change, ...] = ()
    problem: str = ""


class ReloadNotes:
    """Notes the last reload; `last` is None until there is one.

    A file that has changed is read again by itself, and nobody waits for the answer. If a person
    has reloaded it just before, nothing new is found, and the note of that person's reload stays.
    Rule: a note has no secret in it, since it is made of what a reload answers with.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.last: ReloadNote | None = None

    async def note(
        self, actor: Actor, reload: Callable[[Actor], Awaitable[Difference]]
    ) -> Difference:
        """Reload, and note what came of it."""
        try:
            found = await reload(actor)
        except InvalidSettingError as error:
            self.last = ReloadNote(at=self._now(), by=actor.name, problem=str(error))
            raise
        if actor is not FILE or found.changed or self.last is None or self.last.problem:
            self.last = ReloadNote(at=self._now(), by=actor.name, changed=found.changed)
        return found


def _replaced(overrides: tuple[Override, ...], begun: tuple[Override, ...]) -> tuple[Override, ...]:
    new = {one.path: one for one in (*overrides, *begun)}
    return tuple(new[path] for path in sorted(new))


def _logged(replaced: tuple[ReplacedBudget, ...]) -> tuple[ReplacedBudget, ...]:
    for one in replaced:
        log.warning("a budget that was set by hand has ended", problem=one.line)
    return replaced


def _detail(changed: tuple[Change, ...]) -> Detail:
    return {change.key: {"from": change.before, "to": change.after} for change in changed}


def _work_of(target: Target) -> Target:
    """Return what of a target its executor is made of."""
    # Which slot it is makes no difference to it, but whether there is one.
    slot = "" if has_slot(target) else None
    return msgspec.structs.replace(
        target, status=Standing.ACTIVE, slot=slot, provider=None, default=False
    )


class Reloadable(Protocol):
    """Reads the settings again when it is told to."""

    async def reload(self, actor: Actor, /) -> object:
        """Read them, or raise `InvalidSettingError` and change nothing."""


class FileWatcher:
    """Reloads when the file has changed.

    Editors write a file in several steps, or put another in its place. So it is read again when two
    looks in a row have found it the same.
    """

    def __init__(self, config: Reloadable, path: Path) -> None:
        self._config = config
        self._path = path
        self._known = signature_of(path)
        self._last = self._known

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            await self.run_once()

    async def run_once(self) -> bool:
        """Look at the file once; return whether it was read again."""
        found = await asyncio.to_thread(signature_of, self._path)
        is_settled = found == self._last
        self._last = found
        if found is None or found == self._known or not is_settled:
            return False
        try:
            await self._config.reload(FILE)
        except InvalidSettingError as error:
            log.warning("the file was refused; nothing has changed", problem=str(error))
        except StoreError as error:
            log.warning("the file could not be taken now; tried again", problem=str(error))
            return False
        self._known = found
        return True


def signature_of(path: Path) -> Signature:
    """Return what tells one state of a file from another; None if it is not there."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class ConfigUpkeep:
    """Looks for changes at other nodes, and lets go of what has drained."""

    def __init__(self, config: LiveConfig, *, is_shared: bool) -> None:
        self._config = config
        self._is_shared = is_shared
        self._problem = ""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(UPKEEP_SECONDS)
            await self.run_once()

    async def run_once(self) -> None:
        """Look once; what cannot be done now is tried again at the next look."""
        try:
            if self._is_shared:
                await self._config.refresh()
            await self._config.finish_draining()
            await self._config.send_limits()
            self._problem = ""
        except (StoreError, InvalidSettingError) as error:
            if self._problem != str(error):
                log.warning("changes of settings were not looked for", problem=str(error))
            self._problem = str(error)
