"""The ledger on Redis or Valkey: budgets shared by many processes, without a database.

All keys of a ledger have one hash tag, and each call is one run of one script: one round trip, one
atomic step, whoever else calls. Callers of one process share a pipeline.

A ledger has an identity, made when a ledger is first opened. Rule: a server that came back
without it grants nothing, since it has forgotten the limits as well as what was spent.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import inf
from typing import Generic, TypeVar, cast

from msgspec.structs import replace

from headgate.budgets.redis_script import (
    Accounts,
    Again,
    Batch,
    Behind,
    Bounds,
    Claim,
    Done,
    Illegal,
    InForce,
    Known,
    Lost,
    NoRoom,
    Reply,
    Request,
    Short,
    Stale,
    WasSet,
    buckets_from,
    claim_on,
    decode_reply,
    encode,
    entry_from,
    illegal,
    kept_charges,
    kept_limit,
    limit_from,
    refused,
    reservation_from,
    rows_from,
    scopes_of,
    script_text,
    short,
)
from headgate.budgets.redis_server import DEADLINE_SECONDS, RedisServer, parse_url
from headgate.budgets.tracker import LedgerTracker
from headgate.core.budgets.ledger import (
    MAX_ACCOUNTS,
    Account,
    AdjustRequest,
    Audit,
    Clock,
    JournalEntry,
    Limit,
    Refused,
    ReserveRequest,
    SettleRequest,
    WindowChange,
    balances_from,
    read_account,
)
from headgate.core.budgets.reservations import Call, Reservation, unknown_reservation
from headgate.core.budgets.scopes import Scope, Tenant, depth
from headgate.core.budgets.windows import NO_WINDOW, Window, counted_buckets, parse_window
from headgate.errors import InvalidFieldError, InvalidSettingError, LedgerUnavailableError
from headgate.storage.zones import zone

# One pipeline for all callers of a process: what they ask in one turn of the loop is sent at
# once.
#
# A client spends several times on a call what the server does, so calls are gathered while others
# are under way and sent as one batch, in the order in which they were made. Two batches are under
# way at a time: the server works on one while this process reads the answers of the other.
#
# Rule: a caller gets its own answer or its own error, whatever becomes of the others in its
# batch. One that was cancelled before its batch left is not sent; one that was cancelled later is
# answered to nobody.

MAX_BATCH = 128
MIN_SHARE = 32
MAX_UNDER_WAY = 2
MAX_WAITING = 20_000

Wanted = TypeVar("Wanted")
Sent = TypeVar("Sent")


class SharedPipeline(Generic[Wanted, Sent]):
    """Gathers requests into batches; `send` answers each request with a value or an error."""

    def __init__(
        self, send: Callable[[Sequence[Wanted]], Awaitable[Sequence[Sent | Exception]]]
    ) -> None:
        self._send = send
        self._waiting: deque[tuple[Wanted, asyncio.Future[Sent]]] = deque()
        self._senders: set[asyncio.Task[None]] = set()
        self._is_sender_due = False
        self._under_way = 0

    async def call(self, request: Wanted) -> Sent:
        """Send a request with the next batch, and wait for its answer."""
        if len(self._waiting) >= MAX_WAITING:
            problem = f"{MAX_WAITING} calls already wait for the ledger; call less at a time"
            raise LedgerUnavailableError(problem)
        future: asyncio.Future[Sent] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._start_sender()
        return await future

    async def close(self) -> None:
        """Stop sending; whoever still waits gets an error."""
        senders = list(self._senders)
        for sender in senders:
            sender.cancel()
        if senders:
            await asyncio.wait(senders)
        self._is_sender_due = False
        _fail(self._waiting, "the ledger was closed before it answered; open it again")
        self._waiting.clear()

    def _start_sender(self) -> None:
        if self._is_sender_due or self._under_way >= MAX_UNDER_WAY:
            return
        # The task begins after everybody whose turn it is has called.
        self._is_sender_due = True
        sender = asyncio.create_task(self._send_all())
        self._senders.add(sender)
        sender.add_done_callback(self._senders.discard)

    async def _send_all(self) -> None:
        self._is_sender_due = False
        self._under_way += 1
        try:
            while self._waiting:
                batch = self._take_batch()
                if self._waiting:
                    self._start_sender()
                await self._send_batch(batch)
        finally:
            self._under_way -= 1

    def _take_batch(self) -> list[tuple[Wanted, asyncio.Future[Sent]]]:
        free = MAX_UNDER_WAY - self._under_way + 1
        share = min(max(MIN_SHARE, -(-len(self._waiting) // free)), MAX_BATCH)
        batch: list[tuple[Wanted, asyncio.Future[Sent]]] = []
        while self._waiting and len(batch) < share:
            request, future = self._waiting.popleft()
            if not future.done():
                batch.append((request, future))
        return batch

    async def _send_batch(self, batch: Sequence[tuple[Wanted, asyncio.Future[Sent]]]) -> None:
        if not batch:
            return
        try:
            answers = await self._send([request for request, _ in batch])
        except asyncio.CancelledError:
            _fail(batch, "the ledger was closed before it answered; open it again")
            raise
        except Exception as error:  # noqa: BLE001 - nobody in the batch may wait for ever
            _fail(batch, str(error), cause=error)
        else:
            _answer_all(batch, answers)


def _answer_all(
    batch: Sequence[tuple[Wanted, asyncio.Future[Sent]]], answers: Sequence[Sent | Exception]
) -> None:
    for (_, future), answer in zip(batch, answers, strict=True):
        if future.done():
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def _fail(
    waiting: Sequence[tuple[Wanted, asyncio.Future[Sent]]]
    | deque[tuple[Wanted, asyncio.Future[Sent]]],
    problem: str,
    *,
    cause: Exception | None = None,
) -> None:
    for _, future in waiting:
        if not future.done():
            error = LedgerUnavailableError(problem)
            error.__cause__ = cause
            future.set_exception(error)


DEFAULT_NAME = "default"
KEY_NAMES = (
    *("identity", "limits", "scopes", "balances", "checkpoint"),
    *("reservations", "leases", "finished", "journal", "kinds", "steps"),
)
DEFAULT_BOUNDS = Bounds()
MAX_NAME_LENGTH = 64
MAX_CACHED_WINDOWS = 100_000
MAX_STALE_ROUNDS = 100
MAX_EXPIRY_ROUNDS = 1_000
RECENT_ENTRIES = 1_000

Answer = Reservation | Refused | Again


class RedisLedger:
    """A ledger on a server; `ledger` names it, so that one server can keep several."""

    def __init__(
        self,
        url: str,
        *,
        ledger: str | None = None,
        clock: Clock = time.time,
        bounds: Bounds = DEFAULT_BOUNDS,
        deadline_seconds: float = DEADLINE_SECONDS,
        accepts_unseen_policy: bool = False,
    ) -> None:
        place = parse_url(url)
        name = _check_name(ledger or place.ledger or DEFAULT_NAME)
        self._keys = {key: f"{{headgate:budget:{name}}}:{key}" for key in KEY_NAMES}
        self._key_list = tuple(self._keys.values())
        self._clock = None if clock is time.time else clock
        self._bounds = bounds
        self._server = RedisServer(
            place,
            self._key_list[0],
            script_text(),
            deadline_seconds=deadline_seconds,
            accepts_unseen_policy=accepts_unseen_policy,
        )
        self._pipeline: SharedPipeline[Request, Answer] = SharedPipeline(self._apply)
        self._identity: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Only scopes that have a window; the script says when this is out of date.
        self._windows: dict[Scope, Window] = {}

    def now(self) -> float:
        """Return the server's time, or that of the clock that was given instead."""
        return self._server.now() if self._clock is None else self._clock()

    async def open(self) -> None:
        """Connect, check that the server is fit to keep a ledger, and find or create it."""
        await self.close()
        self._loop = asyncio.get_running_loop()
        try:
            await self._server.open()
            self._identity = await self._server.create(self._keys["identity"], secrets.token_hex(8))
        except BaseException:
            self._loop = None
            await self._server.close()
            raise

    async def close(self) -> None:
        """Let go of the server; calls under way end with `LedgerUnavailableError`."""
        if self._loop is not None and self._loop.is_closed():
            self._forget_loop()
        self._check_loop()
        self._identity = self._loop = None
        await self._pipeline.close()
        await self._server.close()

    async def set_limit(self, scope: Scope, limit: Limit) -> None:
        """Replace the limit of a scope; one without any amount removes it."""
        zone(limit.window.zone)
        await self._set("set_limit", scope, limit)
        self._remember_window(scope, limit.window)

    async def create_limit(self, scope: Scope, limit: Limit) -> Limit:
        """Set the limit of a scope that has none, and return the one that is in force then."""
        zone(limit.window.zone)
        in_force = await self._set("create_limit", scope, limit)
        self._remember_window(scope, in_force.window)
        return in_force

    async def _set(self, step: str, scope: Scope, limit: Limit) -> Limit:
        """Set a limit, and return the one that is in force then."""
        now = self.now()
        starts = counted_buckets(limit.window, now, zone(limit.window.zone))
        asked = (self._opened(), scope, kept_limit(limit), now, starts)
        reply = await self._step(step, encode(asked))
        if isinstance(reply, InForce):
            return limit if reply.limit is None else limit_from(reply.limit)
        was = cast("WasSet", reply)
        before = parse_window(was.window)
        limit = replace(limit, counted_since=was.counted_since or None)
        if limit.counted_since is None or before == limit.window:
            return limit
        change = WindowChange(scope, before, limit.window, now=now, zone=zone)
        if change.counted_since(buckets_from(was.folded), limit.counted_since) is not None:
            return limit
        # The script cannot compute windows, so it says too much until it is told. If that is lost,
        # nobody takes a budget for whole that is not.
        asked_again = (self._opened(), scope, kept_limit(limit))
        await self._step("count_whole_window", encode(asked_again))
        return replace(limit, counted_since=None)

    async def reserve(self, request: ReserveRequest) -> Reservation | Refused:
        """Hold the money in all scopes or in none; a known id gets its answer again."""
        for _ in range(MAX_EXPIRY_ROUNDS):
            answer = await self._call(request)
            if not isinstance(answer, Again):
                return answer
        raise LedgerUnavailableError("too many leases ended at once; call sweep and try again")

    async def settle(self, request: SettleRequest) -> Reservation:
        """Apply a further call, or raise `IllegalSettlementError`."""
        if request.tenant is not None and request.call is Call.COMMIT:
            return cast("Reservation", await self._call(await self._claim(request, request.tenant)))
        return cast("Reservation", await self._call(request))

    async def adjust(self, request: AdjustRequest) -> Reservation:
        """Change a balance by the word of an operator, or raise a `CallerError`."""
        return cast("Reservation", await self._call(request))

    async def accounts(self, scope: Scope, *, most: int = MAX_ACCOUNTS) -> list[Account]:
        """Return the scope and everything within it that has a limit or a balance, root first."""
        await self.sweep()
        parameters = encode((self._opened(), scope, most))
        reply = cast("Accounts", await self._step("accounts", parameters))
        now = self.now()
        found = []
        for name, kept, row in reply.rows[:most]:
            limit = None if kept is None else limit_from(kept)
            tz = zone((NO_WINDOW if limit is None else limit.window).zone)
            found.append(read_account(name, limit, buckets_from(row), now=now, tz=tz))
        return sorted(found, key=lambda account: (depth(account.scope), account.scope))

    async def journal(
        self, scope: Scope, *, since: float, until: float = inf, limit: int
    ) -> list[JournalEntry]:
        """Return the latest entries of a time that charge the scope, newest first."""
        await self.sweep()
        which = partial(_latest, scope=scope, since=since, until=until, limit=limit)
        found, is_complete = which(await self._entries(-RECENT_ENTRIES))
        if not is_complete:
            found, _ = which(await self._entries(0))
        return found

    async def sweep(self) -> int:
        """Expire all leases that are due, and return how many there were."""
        expired = 0
        while True:
            batch = Batch(self.now(), self._windows)
            done = cast("Done", await self._step_of(batch))
            expired += done.expired
            if not done.has_more_due:
                return expired

    async def audit(self) -> Audit:
        """Return both sides of the promise that balances equal the journal."""
        await self.sweep()
        kept, checkpoint, journal = await self._read(
            ("HGETALL", self._keys["balances"]),
            ("HGETALL", self._keys["checkpoint"]),
            ("LRANGE", self._keys["journal"], 0, -1),
        )
        entries = [entry_from(packed) for packed in cast("list[bytes]", journal)]
        return Audit(
            kept=rows_from(cast("dict[bytes, bytes]", kept)),
            journalled=balances_from(
                entries, checkpoint=rows_from(cast("dict[bytes, bytes]", checkpoint))
            ),
        )

    async def _claim(self, request: SettleRequest, tenant: Tenant) -> Claim:
        """Read first what a reservation is charged to: that never changes."""
        name = request.reservation_id
        (packed,) = await self._read(("HGET", self._keys["reservations"], name))
        if packed is None:
            raise unknown_reservation(name, request.call)
        return claim_on(request, tenant, kept_charges(cast("bytes", packed)))

    async def _entries(self, first: int) -> list[bytes]:
        (kept,) = await self._read(("LRANGE", self._keys["journal"], first, -1))
        return cast("list[bytes]", kept)

    async def _call(self, request: Request) -> Answer:
        self._opened()
        return await self._pipeline.call(request)

    async def _apply(self, requests: Sequence[Request]) -> Sequence[Answer | Exception]:
        for _ in range(MAX_STALE_ROUNDS):
            batch = Batch(self.now(), self._windows)
            errors = _fill(batch, requests)
            reply = await self._step_of(batch)
            if isinstance(reply, Done):
                self._forget_windows(requests, errors)
                return _answers(batch, requests, errors, reply.replies)
            for scope, window in reply.windows:
                self._remember_window(scope, parse_window(window))
        raise LedgerUnavailableError("the windows of budgets keep changing; try again")

    def _forget_windows(self, requests: Sequence[Request], errors: Sequence[object]) -> None:
        """Ask anew next time; whoever set a zone that is unknown here may have changed it."""
        for request, error in zip(requests, errors, strict=True):
            if error is not None:
                for scope in scopes_of(request):
                    self._windows.pop(scope, None)

    async def _step_of(self, batch: Batch) -> Done | Stale:
        parameters = batch.parameters(self._opened(), self._bounds)
        return cast("Done | Stale", await self._step("apply", parameters))

    async def _step(
        self, step: str, parameters: bytes
    ) -> Done | Stale | Accounts | InForce | WasSet:
        reply = decode_reply(await self._server.run(step, self._key_list, parameters))
        if isinstance(reply, Lost):
            raise _lost()
        if isinstance(reply, Behind):
            raise _behind()
        return reply

    async def _read(self, *commands: tuple[str | int, ...]) -> list[object]:
        identity, *found = await self._server.read(("GET", self._keys["identity"]), *commands)
        if identity != self._opened().encode():
            raise _lost()
        return found

    def _opened(self) -> str:
        if self._identity is None:
            raise LedgerUnavailableError("the ledger is closed; open it again")
        self._check_loop()
        return self._identity

    def _check_loop(self) -> None:
        """Refuse a second event loop: connections belong to the one that made them."""
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            problem = "the ledger was opened in another event loop; open a tracker in each loop"
            raise LedgerUnavailableError(problem)

    def _forget_loop(self) -> None:
        """Leave everything behind that only a loop which has ended could have let go of."""
        self._loop = None
        self._pipeline = SharedPipeline(self._apply)
        self._server.abandon()

    def _remember_window(self, scope: Scope, window: Window) -> None:
        if window == NO_WINDOW:
            self._windows.pop(scope, None)
            return
        if len(self._windows) >= MAX_CACHED_WINDOWS:
            self._windows.clear()
        self._windows[scope] = window


def _fill(batch: Batch, requests: Sequence[Request]) -> list[Exception | None]:
    errors: list[Exception | None] = []
    for request in requests:
        try:
            batch.add(request)
        except InvalidSettingError as error:
            errors.append(error)
        else:
            errors.append(None)
    return errors


def _answers(
    batch: Batch,
    requests: Sequence[Request],
    errors: Sequence[Exception | None],
    replies: Sequence[Reply],
) -> list[Answer | Exception]:
    remaining = iter(replies)
    return [
        _answer(batch, request, next(remaining)) if error is None else error
        for request, error in zip(requests, errors, strict=True)
    ]


def _answer(batch: Batch, request: Request, reply: Reply) -> Answer | Exception:
    match reply:
        case Illegal():
            return illegal(request, reply, batch.now)
        case Known():
            return reservation_from(request.reservation_id, reply)
        case Again():
            return reply
    match request:
        case SettleRequest():
            return unknown_reservation(request.reservation_id, request.call)
        case Claim():
            return unknown_reservation(request.reservation_id, request.request.call)
        case AdjustRequest():
            return short(request, cast("Short", reply))
    if isinstance(reply, NoRoom):
        return refused(request, reply, batch.now)
    return batch.made(request)


def _latest(
    kept: Sequence[bytes], scope: Scope, *, since: float, until: float, limit: int
) -> tuple[list[JournalEntry], bool]:
    """Return the newest entries of a scope, and whether older ones cannot add to them."""
    found: list[JournalEntry] = []
    for packed in reversed(kept):
        if len(found) >= limit:
            return found, True
        entry = entry_from(packed)
        if entry.at < since:
            return found, True
        if entry.at <= until and any(charge.scope == scope for charge in entry.charges):
            found.append(entry)
    return found, len(found) >= limit or len(kept) < RECENT_ENTRIES


def _behind() -> LedgerUnavailableError:
    problem = "Redis has forgotten steps that its replicas had confirmed, and grants nothing"
    return LedgerUnavailableError(f"{problem}; compare the budgets, and open the ledger again")


def _lost() -> LedgerUnavailableError:
    problem = "Redis has lost this ledger, or it was replaced, and grants nothing"
    return LedgerUnavailableError(f"{problem}; set the budgets and open the ledger again")


def _check_name(name: str) -> str:
    is_plain = name.isascii() and name.replace("-", "").replace("_", "").replace(".", "").isalnum()
    if not is_plain or len(name) > MAX_NAME_LENGTH:
        problem = f"must be letters, digits and . _ - only, at most {MAX_NAME_LENGTH} characters"
        raise InvalidFieldError("ledger", problem)
    return name


class RedisBudgetTracker(LedgerTracker):
    """Budgets shared by everybody who reaches the same Redis or Valkey.

    `redis://host:6379/0?ledger=name` chooses one of several ledgers on a server. With
    `redis+sentinel://` or `redis+cluster://` nothing is granted that a failover could forget.
    """

    def __init__(self, url: str, *, ledger: str | None = None, clock: Clock = time.time) -> None:
        super().__init__(RedisLedger(url, ledger=ledger, clock=clock))
