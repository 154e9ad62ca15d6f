"""Calls of running tasks: the tokens that they come with, and the money that they draw on.

A task is handed an address and a token for the attempt that runs. Its calls draw on what the
attempt holds; what they need beyond that is reserved beside it, in the scopes of the task. A call
that cannot grow waits while somebody else may give something back in that scope; where everybody
waits to grow, the youngest call is refused.

Rule: a token is good while its attempt runs, and for nothing but calls. An attempt is settled when
its calls have ended and are written; those that take too long are booked at what they have drawn.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import inf
from typing import NamedTuple

from headgate.core.budgets.escrow import Amounts
from headgate.core.budgets.ledger import Ledger, Refused, ReserveRequest
from headgate.core.budgets.reservations import Reservation
from headgate.core.budgets.scopes import Scope
from headgate.core.dispatch_state import DispatchState, Planned, charged_by
from headgate.core.estimates import Basis, Hold
from headgate.core.money import MicroUsd, Tokens
from headgate.core.task import TaskRecord, TaskStatus
from headgate.core.task_money import GrowingCall, OpenCalls, TaskMoney, call_to_refuse
from headgate.errors import NotDispatchingError
from headgate.executors.executor import GatewayAccess
from headgate.storage.task_calls import TaskCallStore, TaskPart, read_task_token, task_token

SETTLE_SECONDS = 10.0
"""How long the end of an attempt waits for those of its calls that are still under way."""

LOADED_SECONDS = 10.0
LOADED_TRIES = 10
"""How long, and how often, a call waits for the tasks that are read anew."""

MAX_PROJECTS = 4_096
"""Of so many tasks it is remembered which project they are of."""

WRITE_SECONDS = 60.0
"""How long it waits for the store to be told of those that have ended."""


class Offer(NamedTuple):
    """What tasks of a target are handed: the address of the gateway, and which protocols it has."""

    base_url: str
    protocols: tuple[str, ...]


class TaskDraw:
    """What a call has drawn on its task, and what is held for it beside that."""

    __slots__ = ("attempt", "beside", "drawn", "has_reservation")

    def __init__(self, attempt: TaskAttempt, drawn: Amounts) -> None:
        self.attempt = attempt
        self.drawn = drawn
        self.beside = Amounts()
        self.has_reservation = False

    @property
    def held(self) -> Amounts:
        """All that is held for the call."""
        return self.drawn.plus(self.beside)


class TaskAttempt:
    """An attempt that makes calls: its money, and those of its calls that are not over."""

    __slots__ = (
        "agent_id",
        "calls",
        "ends_at",
        "growing",
        "has_called",
        "is_over",
        "money",
        "number",
        "task",
        "unwritten",
    )

    def __init__(self, record: TaskRecord, used: Amounts) -> None:
        progress = record.progress
        self.task = record.task
        self.agent_id = record.agent_id or record.task.agent_id or ""
        self.number = progress.attempt
        self.ends_at = _ends_at(record)
        held = Amounts(progress.reserved_micro_usd, progress.reserved_tokens)
        self.money = TaskMoney(held, used)
        self.calls: set[str] = set()
        self.growing: dict[str, tuple[Refused, float]] = {}
        self.unwritten: dict[str, Amounts] = {}
        """What has ended and the store has yet to be told: the task's part of what each cost."""

        self.is_over = False
        self.has_called = False
        """Whether a call of it has had its turn here."""

    @property
    def is_stuck(self) -> bool:
        """Whether it does nothing but wait to grow, as far as anybody knows."""
        return bool(self.growing) and len(self.growing) == len(self.calls)

    def open_calls(self, *, keeps_ledger: bool, is_partly_unknown: bool) -> OpenCalls:
        """Return what is held for its calls that are not over.

        A store that keeps the ledger books what it is told too late. With another ledger nobody
        would, so what has ended and may not be written counts as well.
        """
        drawn = self.money.drawn
        for part in () if keeps_ledger else self.unwritten.values():
            drawn = drawn.plus(part)
        return OpenCalls(drawn, self.has_called or any(drawn), is_partly_unknown)


class TaskCalls:
    """The attempts of tasks that make calls here."""

    def __init__(
        self,
        ledger: Ledger,
        store: TaskCallStore,
        *,
        record_of: Callable[[str], Awaitable[TaskRecord | None]],
        state: Callable[[], DispatchState | None],
        loaded: Callable[[], Awaitable[None]],
        decided_since: Callable[[], float | None],
        keeps_ledger: bool = True,
    ) -> None:
        self._loaded = loaded
        self._ledger = ledger
        self._keeps_ledger = keeps_ledger
        self._decided_since = decided_since
        self._store = store
        self._record_of = record_of
        self._state = state
        self._attempts: dict[str, TaskAttempt] = {}
        self._projects: dict[str, str] = {}
        self._secret: bytes | None = None
        self._changed = asyncio.Event()
        self.offer: Callable[[str], Offer | None] = lambda _target: None
        """Says what tasks of a target are handed; None where they are handed nothing."""

        self.max_wait_seconds: Callable[[], float] = lambda: 0.0
        """Says how long a call may wait."""

    # Who may make calls.

    def may_call(self, record: TaskRecord) -> bool:
        """Tell whether an attempt has made calls, or could have."""
        return record.task.id in self._attempts or self.offer(record.task.target or "") is not None

    async def access(self, record: TaskRecord) -> GatewayAccess | None:
        """Return what an attempt that begins needs to make calls; None if it is to make none."""
        offer = self.offer(record.task.target or "")
        if offer is None:
            return None
        token = task_token(record.task.id, record.progress.attempt, await self._known_secret())
        return GatewayAccess(base_url=offer.base_url, token=token, protocols=offer.protocols)

    async def _known_secret(self) -> bytes:
        if self._secret is None:
            self._secret = await self._store.secret()
        return self._secret

    async def secret_for(self, purpose: str) -> bytes:
        """Return a secret that is the same on every node and after a restart."""
        return hmac.digest(await self._known_secret(), purpose.encode(), "sha256")

    def may_be_token(self, token: str) -> bool:
        """Tell whether a token may be of a task, as far as is known without the store."""
        return self._secret is None or read_task_token(token, self._secret) is not None

    async def project_of(self, token: str) -> str | None:
        """Return the project of the task that a token was made for, wherever that runs."""
        read = read_task_token(token, await self._known_secret())
        if read is None:
            return None
        project_id = self._projects.get(read.task_id)
        if project_id is None and (record := await self._record_of(read.task_id)) is not None:
            if len(self._projects) >= MAX_PROJECTS:
                self._projects.clear()
            project_id = self._projects[read.task_id] = record.task.project_id
        return project_id

    async def attempt_of(self, token: str) -> TaskAttempt | None:
        """Return the attempt that a token is of, while it runs; None of any other."""
        read = read_task_token(token, await self._known_secret())
        if read is None:
            return None
        await self._until_loaded()
        if not self._is_in_flight(read.task_id, read.attempt):
            return None
        known = self._attempts.get(read.task_id)
        if known is None or known.number != read.attempt:
            record = await self._record_of(read.task_id)
            if record is None or record.progress.attempt != read.attempt:
                return None
            if record.task.status is not TaskStatus.RUNNING:
                return None
            used = await self._store.used(read.task_id, read.attempt)
            # Another call of the same attempt may have been first.
            known = self._attempts.get(read.task_id)
            if known is None or known.number != read.attempt:
                known = TaskAttempt(record, used.total.minus(used.beside))
                self._attempts[read.task_id] = known
        return None if known.is_over else known

    async def _until_loaded(self) -> None:
        """Wait while the tasks are read anew: until then nobody knows which of them run."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LOADED_SECONDS):
                for _ in range(LOADED_TRIES):
                    if self._state() is not None:
                        return
                    await self._loaded()
        if self._state() is None:
            raise NotDispatchingError("")

    def _is_in_flight(self, task_id: str, number: int) -> bool:
        state = self._state()
        found = None if state is None else state.in_flight.get(task_id)
        return found is not None and found.number == number and not found.task.is_call

    # The money of a call.

    def enter(self, task_id: str, call_id: str) -> bool:
        """Take note of a call of a task; False if the task has ended meanwhile."""
        attempt = self._attempts.get(task_id)
        if attempt is None or attempt.is_over:
            return False
        attempt.calls.add(call_id)
        return True

    def leave(self, task_id: str, call_id: str) -> None:
        """Take note of the end of a call."""
        attempt = self._attempts.get(task_id)
        if attempt is not None:
            attempt.calls.discard(call_id)
            attempt.growing.pop(call_id, None)
        self._notify()

    def draw(self, task_id: str, hold: Hold) -> TaskDraw | None:
        """Take what a call needs from what its task holds, as far as that goes.

        None if the task has ended. One of which nothing is known takes all that is left.
        """
        attempt = self._attempts.get(task_id)
        if attempt is None or attempt.is_over:
            return None
        wanted = Amounts(hold.micro_usd.amount, hold.tokens.amount)
        if Basis.PROBE in (hold.micro_usd.basis, hold.tokens.basis):
            wanted = attempt.money.left
        return TaskDraw(attempt, attempt.money.draw(wanted))

    async def grow(
        self, draw: TaskDraw, planned: Planned, name: str, *, lease_seconds: float
    ) -> Refused | None:
        """Reserve what a call needs beyond what it has drawn; the refusal, if there is no room."""
        hold = planned.hold
        missing = Amounts(hold.micro_usd.amount, hold.tokens.amount).minus(draw.drawn)
        missing = Amounts(max(0, missing.micro_usd), max(0, missing.tokens))
        is_probe = Basis.PROBE in (hold.micro_usd.basis, hold.tokens.basis)
        is_unknown = is_probe and not any(draw.drawn)
        if not any(missing) and not is_unknown:
            return None
        answer = await self._ledger.reserve(
            ReserveRequest(
                reservation_id=name,
                scopes=planned.charged,
                micro_usd=MicroUsd(missing.micro_usd),
                tokens=Tokens(missing.tokens),
                lease_seconds=lease_seconds,
                dispatched=True,
                flexible=hold.flexible if is_unknown else None,
            )
        )
        if isinstance(answer, Refused):
            return answer
        draw.beside, draw.has_reservation = _held(answer), True
        return None

    def has_grown(self, draw: TaskDraw, call_id: str) -> None:
        """Take note that a call waits for no more room."""
        draw.attempt.growing.pop(call_id, None)

    def give_back(self, draw: TaskDraw) -> None:
        """Put back what a call has drawn that cost nothing."""
        draw.attempt.money.give_back(draw.drawn)
        self._notify()

    def settle(
        self, draw: TaskDraw, call_id: str, cost: Amounts
    ) -> tuple[Amounts, TaskPart | None]:
        """Book what a call cost; return what is booked by itself, and what its task adds up.

        A call that outlived its attempt was booked with it at what it had drawn.
        """
        attempt = draw.attempt
        parts = attempt.money.settle(draw.drawn, draw.beside, cost)
        if attempt.is_over and call_id not in attempt.calls:
            over = cost.minus(draw.drawn)
            return Amounts(max(0, over.micro_usd), max(0, over.tokens)), None
        if not any(cost):
            return parts.beside, None
        attempt.has_called = True
        attempt.unwritten[call_id] = parts.of_task
        return parts.beside, TaskPart(attempt.number, parts.beside, self._keeps_ledger)

    def written(self, task_id: str, call_id: str) -> None:
        """Take note that the store has the end of a call."""
        attempt = self._attempts.get(task_id)
        if attempt is not None:
            attempt.unwritten.pop(call_id, None)
        self._notify()

    # Waiting to grow.

    def refused_for(
        self, draw: TaskDraw, call_id: str, created_at: float, refused: Refused
    ) -> str | None:
        """Return which call gives up, now that one found no room; None if all may wait.

        Where a window frees room in time, all wait for that.
        """
        draw.attempt.growing[call_id] = (refused, created_at)
        gives_up_at = min(created_at + self.max_wait_seconds(), draw.attempt.ends_at)
        if refused.kind or _resets_in_time(refused, gives_up_at):
            return None
        return call_to_refuse(
            [
                GrowingCall(one, attempt.task.id, at)
                for attempt in self._attempts.values()
                for one, (by, at) in attempt.growing.items()
                if by.scope == refused.scope and by.unit is refused.unit
            ],
            reserved=refused.reserved,
            held_by_stuck={
                task_id: attempt.money.held.amount(refused.unit)
                for task_id, attempt in self._attempts.items()
                if attempt.is_stuck and _charges(attempt, refused.scope)
            },
        )

    # The end of an attempt.

    async def ended(self, record: TaskRecord) -> OpenCalls | None:
        """Wait for the calls of an attempt that is over; return what is known of the others.

        None if it could make none. Its token is good no more.
        """
        attempt = self._attempts.get(record.task.id)
        is_unknown = self._is_inherited(record)
        if attempt is None or attempt.number != record.progress.attempt:
            if self.offer(record.task.target or "") is None:
                return None
            return OpenCalls(is_partly_unknown=is_unknown)
        attempt.is_over = True
        await self._until(lambda: not attempt.calls, SETTLE_SECONDS)
        # Nobody waits for these any more. What has ended is booked by what it cost.
        attempt.calls.clear()
        await self._until(lambda: not attempt.unwritten, WRITE_SECONDS)
        open_calls = attempt.open_calls(
            keeps_ledger=self._keeps_ledger, is_partly_unknown=is_unknown
        )
        if self._attempts.get(record.task.id) is attempt:
            del self._attempts[record.task.id]
        return open_calls

    def _is_inherited(self, record: TaskRecord) -> bool:
        """Tell whether an attempt began before the node led that decides about its calls."""
        since, began_at = self._decided_since(), record.progress.started_at
        return since is not None and began_at is not None and began_at < since

    async def until_written(self, task_id: str, call_id: str) -> None:
        """Wait until the store has the end of a call of a task, within bounds."""
        attempt = self._attempts.get(task_id)
        if attempt is not None:
            await self._until(lambda: call_id not in attempt.unwritten, SETTLE_SECONDS)

    async def _until(self, is_so: Callable[[], bool], seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not is_so():
                    self._changed.clear()
                    await self._changed.wait()

    def calls_of(self, record: TaskRecord) -> list[str]:
        """Return the calls of an attempt that are not over."""
        attempt = self._attempts.get(record.task.id)
        if attempt is None or attempt.number != record.progress.attempt:
            return []
        return list(attempt.calls)

    def forget_lost(self) -> list[str]:
        """Forget attempts that others have ended, and return the calls that they have left."""
        state = self._state()
        if state is None:
            return []
        left: list[str] = []
        for task_id, attempt in list(self._attempts.items()):
            if not attempt.is_over and not self._is_in_flight(task_id, attempt.number):
                attempt.is_over = True
                left += attempt.calls
                attempt.calls.clear()
                del self._attempts[task_id]
        return left

    def _notify(self) -> None:
        self._changed.set()


def _held(answer: Reservation) -> Amounts:
    return Amounts(answer.micro_usd, answer.tokens)


def _ends_at(record: TaskRecord) -> float:
    """Return when an attempt is stopped at the latest."""
    ends_at = inf if record.task.deadline is None else record.task.deadline
    seconds, began_at = record.terms.attempt_seconds, record.progress.started_at
    return ends_at if seconds is None or began_at is None else min(ends_at, began_at + seconds)


def _resets_in_time(refused: Refused, until: float) -> bool:
    """Tell whether a window frees enough by a time: what is held does not end with a window."""
    if refused.resets_at is None or refused.resets_at > until:
        return False
    return refused.reserved + refused.requested <= refused.limit


def _charges(attempt: TaskAttempt, scope: Scope) -> bool:
    return scope in charged_by(attempt.task.scopes)
