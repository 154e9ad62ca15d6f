"""The ledger in SQL: functions on a transaction that somebody else opens and commits.

A batch of requests becomes a `LedgerState` with the rows that it touches, the requests are applied
there, and what changed is written back, one row a balance. Whoever calls these functions calls
`lock_ledger` first, before any other lock of the same transaction. So no two transactions overwrite
each other's balances, and no two wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from itertools import pairwise
from math import inf
from typing import NamedTuple

import msgspec

from headgate.core.budgets.ledger import (
    EMPTY,
    FINISHED_KEPT_SECONDS,
    MAX_ACCOUNTS,
    Account,
    Adjustment,
    AdjustRequest,
    Audit,
    Balance,
    JournalEntry,
    LedgerState,
    Limit,
    Refused,
    ReserveRequest,
    SettleRequest,
    WindowChange,
)
from headgate.core.budgets.reservations import (
    LIVE,
    NO_LEASE_END,
    Call,
    Charge,
    Delta,
    Reservation,
    ReservationState,
)
from headgate.core.budgets.scopes import MAX_REMEMBERED_LENGTH, ROOT, Scope
from headgate.core.budgets.windows import KEPT_BUCKETS, format_window, live_from, parse_window
from headgate.core.money import Columns, MicroUsd, Tokens
from headgate.errors import CallerError, InvalidSettingError
from headgate.storage.migrations import Migration
from headgate.storage.schema import CONFIGURED
from headgate.storage.transaction import (
    Dialect,
    Insert,
    Lookup,
    Row,
    Statement,
    Transaction,
    about,
    json_rows,
)
from headgate.storage.zones import zone

# Rows and the values that they stand for

_STATES = {state.value: state for state in ReservationState}
_CALLS: dict[str, Call | Adjustment] = {one.value: one for one in (*Call, *Adjustment)}
_STATE_TEXTS = {state: state.value for state in ReservationState}
_CALL_TEXTS = {call: text for text, call in _CALLS.items()}
_CHARGES = msgspec.json.Decoder(tuple[Charge, ...])


@lru_cache(maxsize=4_096)
def to_limit(
    limit_micro_usd: int | None,
    limit_tokens: int | None,
    window: str,
    is_by_tenant: int = 0,
    counted_since: float | None = None,
) -> Limit:
    """Read the columns of a limit."""
    return Limit(
        limit_micro_usd=None if limit_micro_usd is None else MicroUsd(limit_micro_usd),
        limit_tokens=None if limit_tokens is None else Tokens(limit_tokens),
        window=parse_window(window),
        is_by_tenant=bool(is_by_tenant),
        counted_since=counted_since,
    )


def to_balance(amounts: Row) -> Balance:
    """Read the amounts of a balance."""
    return Balance(
        spent_micro_usd=amounts[0],
        reserved_micro_usd=amounts[1],
        overrun_micro_usd=amounts[2],
        spent_tokens=amounts[3],
        reserved_tokens=amounts[4],
        overrun_tokens=amounts[5],
        unaccepted_micro_usd=amounts[6],
        unaccepted_tokens=amounts[7],
    )


def to_reservation(row: Row) -> Reservation:
    """Read the columns of a reservation, in the order of the schema."""
    return Reservation(
        id=row[0],
        state=_STATES[row[1]],
        lease_until=row[2],
        charges=_charges(row[3]),
        micro_usd=row[4],
        tokens=row[5],
        dispatched_at_once=bool(row[6]),
        actual_micro_usd=row[7],
        actual_tokens=row[8],
        kind=row[9],
    )


def to_delta(amounts: Row) -> Delta:
    """Read the amounts of a change."""
    return Delta(**msgspec.structs.asdict(to_balance(amounts)))


def to_entry(row: Row) -> JournalEntry:
    """Read the columns of a journal entry after its number."""
    return JournalEntry(
        at=row[0],
        reservation_id=row[1],
        call=_CALLS[row[2]],
        charges=_charges(row[3]),
        delta=to_delta(row[4:]),
    )


def amounts_of(columns: Columns) -> tuple[int, ...]:
    """Write the amounts."""
    return (
        columns.spent_micro_usd,
        columns.reserved_micro_usd,
        columns.overrun_micro_usd,
        columns.spent_tokens,
        columns.reserved_tokens,
        columns.overrun_tokens,
        columns.unaccepted_micro_usd,
        columns.unaccepted_tokens,
    )


def reservation_row(reservation: Reservation, now: float) -> Row:
    """Write a reservation that changed now."""
    return (
        reservation.id,
        _STATE_TEXTS[reservation.state],
        reservation.lease_until,
        charges_text(reservation.charges),
        reservation.micro_usd,
        reservation.tokens,
        int(reservation.dispatched_at_once),
        reservation.actual_micro_usd,
        reservation.actual_tokens,
        reservation.kind,
        None if reservation.state in LIVE else now,
    )


def entry_row(entry: JournalEntry) -> Row:
    """Write a journal entry."""
    return (
        entry.at,
        entry.reservation_id,
        _CALL_TEXTS[entry.call],
        charges_text(entry.charges),
        *amounts_of(entry.delta),
    )


def charges_text(charges: tuple[Charge, ...]) -> str:
    """Write charges as compact JSON: `[["",0],["session:eval",0]]`."""
    return msgspec.json.encode(charges).decode()


def _charges(text: str) -> tuple[Charge, ...]:
    return _CHARGES.decode(text) if len(text) > MAX_REMEMBERED_LENGTH else _remembered(text)


# Callers that run side by side charge the same few scopes.
@lru_cache(maxsize=4_096)
def _remembered(text: str) -> tuple[Charge, ...]:
    return _CHARGES.decode(text)


# Tables and statements. Each index costs more than the commit itself, so there is one beside the
# keys: the leases that are still running. Reservations that ended are found through the journal,
# which is in order of time.

PART = "ledger"

AMOUNTS = (
    "spent_micro_usd",
    "reserved_micro_usd",
    "overrun_micro_usd",
    "spent_tokens",
    "reserved_tokens",
    "overrun_tokens",
    "unaccepted_micro_usd",
    "unaccepted_tokens",
)
_FIRST_AMOUNTS = AMOUNTS[:6]
RESERVATION = (
    "id",
    "state",
    "lease_until",
    "charges",
    "micro_usd",
    "tokens",
    "dispatched_at_once",
    "actual_micro_usd",
    "actual_tokens",
    "kind",
)

_TABLES = """
CREATE TABLE ledger_limits (
    scope {text} PRIMARY KEY,
    limit_micro_usd BIGINT,
    limit_tokens BIGINT,
    time_window {text} NOT NULL
) {by_key};
CREATE TABLE ledger_balances (
    scope {text},
    bucket_start BIGINT,
    {amounts},
    PRIMARY KEY (scope, bucket_start)
) {by_key};
CREATE TABLE ledger_reservations (
    id {text} PRIMARY KEY,
    state {text} NOT NULL,
    lease_until DOUBLE PRECISION NOT NULL,
    charges {text} NOT NULL,
    micro_usd BIGINT NOT NULL,
    tokens BIGINT NOT NULL,
    dispatched_at_once INTEGER NOT NULL,
    actual_micro_usd BIGINT,
    actual_tokens BIGINT,
    finished_at DOUBLE PRECISION
) {by_key};
CREATE INDEX ledger_leases ON ledger_reservations (lease_until) WHERE finished_at IS NULL;
CREATE TABLE ledger_journal (
    seq {sequence},
    at DOUBLE PRECISION NOT NULL,
    reservation_id {text} NOT NULL,
    call {text} NOT NULL,
    charges {text} NOT NULL,
    {amounts}
);
CREATE TABLE ledger_checkpoint (
    scope {text},
    bucket_start BIGINT,
    {amounts},
    PRIMARY KEY (scope, bucket_start)
) {by_key};
INSERT INTO ledger_balances VALUES ('', 0, 0, 0, 0, 0, 0, 0)
"""
_AMOUNT_COLUMNS = ", ".join(f"{name} BIGINT NOT NULL" for name in _FIRST_AMOUNTS)


def _statements(*, text: str, sequence: str, by_key: str) -> tuple[str, ...]:
    script = _TABLES.format(text=text, sequence=sequence, by_key=by_key, amounts=_AMOUNT_COLUMNS)
    return tuple(statement.strip() for statement in script.split(";"))


_KINDS = (
    "ALTER TABLE ledger_reservations ADD COLUMN kind TEXT NOT NULL DEFAULT ''",
    """
    CREATE INDEX ledger_kinds ON ledger_reservations (kind)
    WHERE finished_at IS NULL AND kind <> ''
    """,
)

_CLAIMS = (
    *(
        f"ALTER TABLE {table} ADD COLUMN {name} BIGINT NOT NULL DEFAULT 0"
        for table in ("ledger_balances", "ledger_journal", "ledger_checkpoint")
        for name in AMOUNTS[6:]
    ),
    "ALTER TABLE ledger_limits ADD COLUMN is_by_tenant INTEGER NOT NULL DEFAULT 0",
)

_COUNTED = ("ALTER TABLE ledger_limits ADD COLUMN counted_since DOUBLE PRECISION",)

MIGRATIONS = (
    Migration(
        number=1,
        sqlite=_statements(text="TEXT", sequence="INTEGER PRIMARY KEY", by_key="WITHOUT ROWID"),
        postgres=_statements(
            text='TEXT COLLATE "C"',
            sequence="BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
            by_key="",
        ),
    ),
    # How many live reservations there are of a kind of work of which little is known.
    Migration(number=2, sqlite=_KINDS, postgres=_KINDS),
    # What tenants claim and nobody has accepted, and which limits are their own.
    Migration(number=3, sqlite=_CLAIMS, postgres=_CLAIMS),
    # From when on everything counts, where the window changed and older amounts have no time.
    Migration(number=4, sqlite=_COUNTED, postgres=_COUNTED),
)

_AMOUNT_TYPES = tuple((name, "BIGINT") for name in AMOUNTS)

BALANCES = Insert(
    table="ledger_balances",
    columns=(("scope", "TEXT"), ("bucket_start", "BIGINT"), *_AMOUNT_TYPES),
    key=("scope", "bucket_start"),
    updated=AMOUNTS,
)
_RESERVATION_COLUMNS = (
    ("id", "TEXT"),
    ("state", "TEXT"),
    ("lease_until", "DOUBLE PRECISION"),
    ("charges", "TEXT"),
    ("micro_usd", "BIGINT"),
    ("tokens", "BIGINT"),
    ("dispatched_at_once", "INTEGER"),
    ("actual_micro_usd", "BIGINT"),
    ("actual_tokens", "BIGINT"),
    ("kind", "TEXT"),
    ("finished_at", "DOUBLE PRECISION"),
)
RESERVATIONS = Insert(
    table="ledger_reservations",
    columns=_RESERVATION_COLUMNS,
    key=("id",),
    updated=("state", "lease_until", "actual_micro_usd", "actual_tokens", "finished_at"),
)
JOURNAL = Insert(
    table="ledger_journal",
    columns=(
        ("at", "DOUBLE PRECISION"),
        ("reservation_id", "TEXT"),
        ("call", "TEXT"),
        ("charges", "TEXT"),
        *_AMOUNT_TYPES,
    ),
)


NO_LIMIT = Limit()

Request = ReserveRequest | SettleRequest | AdjustRequest
Answer = Reservation | Refused

EXPIRED_PER_ROUND = 1_000
MAX_EXPIRED = 20 * EXPIRED_PER_ROUND
JOURNAL_PAGE = 20_000
MAX_SCANNED_ENTRIES = 200_000
"""How far back the journal of a scope is looked for; older entries exist, but are not searched."""

_AMOUNTS = ", ".join(AMOUNTS)
_RESERVATION = ", ".join(RESERVATION)
_RESERVATIONS = about(f"SELECT {_RESERVATION} FROM ledger_reservations", "id")  # noqa: S608
_LIVE_KINDS = Lookup(
    lambda dialect: (
        "SELECT kind, COUNT(*) FROM ledger_reservations"  # noqa: S608
        f" WHERE finished_at IS NULL AND kind <> '' AND kind IN {dialect.texts} GROUP BY kind"
    )
)
_LIMITS = (
    "SELECT scope, limit_micro_usd, limit_tokens, time_window, is_by_tenant, counted_since"
    " FROM ledger_limits"
)
_LIMITS_OF = about(_LIMITS, "scope")
_KEPT_AMOUNTS = ", ".join(f"kept.{name}" for name in AMOUNTS)
_BALANCES_FROM = Lookup(
    lambda dialect: (
        f"SELECT kept.scope, kept.bucket_start, {_KEPT_AMOUNTS} FROM"  # noqa: S608
        f" {dialect.given({'scope': 'TEXT', 'earliest': 'BIGINT'})}"
        " JOIN ledger_balances AS kept ON kept.scope = given.scope"
        " AND kept.bucket_start >= given.earliest"
    )
)
# Whoever locks the ledger locks this row, so it stays whatever is in it.
_LOCKED = frozenset({(ROOT, 0)})
_DROP_EMPTIED = Lookup(
    lambda dialect: (
        "DELETE FROM ledger_balances WHERE (scope, bucket_start) IN"  # noqa: S608
        " (SELECT given.scope, given.bucket_start FROM"
        f" {dialect.given({'scope': 'TEXT', 'bucket_start': 'BIGINT'})})"
    )
)
_DEPTH = "LENGTH(scope) - LENGTH(REPLACE(scope, '/', ''))"

_UNACCEPTED = """
    SELECT scope, CAST(SUM(unaccepted_micro_usd) AS BIGINT) AS usd,
        CAST(SUM(unaccepted_tokens) AS BIGINT) AS tokens
    FROM ledger_balances WHERE unaccepted_micro_usd > 0 OR unaccepted_tokens > 0
    GROUP BY scope ORDER BY usd DESC, tokens DESC, scope LIMIT ?
"""
LOCK = "SELECT 1 FROM ledger_balances WHERE scope = '' AND bucket_start = 0 FOR UPDATE"
_DUE = (
    f"SELECT {_RESERVATION} FROM ledger_reservations"  # noqa: S608
    " WHERE finished_at IS NULL AND lease_until <= ? ORDER BY lease_until LIMIT ?"
)
_WITHOUT_LEASE = (
    f"SELECT {_RESERVATION} FROM ledger_reservations"  # noqa: S608
    " WHERE finished_at IS NULL AND lease_until = ? AND id > ? ORDER BY id LIMIT ?"
)
_IS_ANY_DUE = (
    "SELECT 1 FROM ledger_reservations WHERE finished_at IS NULL AND lease_until <= ? LIMIT 1"
)
_SET_LIMIT = (
    "INSERT INTO ledger_limits"
    " (scope, limit_micro_usd, limit_tokens, time_window, is_by_tenant, counted_since)"
    " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (scope) DO UPDATE SET"
    " limit_micro_usd = excluded.limit_micro_usd, limit_tokens = excluded.limit_tokens,"
    " time_window = excluded.time_window, is_by_tenant = excluded.is_by_tenant,"
    " counted_since = excluded.counted_since"
)
_LATEST = "SELECT seq, at FROM ledger_journal WHERE seq < ? ORDER BY seq DESC LIMIT 1"
_JOURNAL = (
    f"SELECT at, reservation_id, call, charges, {_AMOUNTS} FROM ledger_journal"  # noqa: S608
    " WHERE seq > ? AND seq < ? AND at >= ? AND at <= ? AND {position}(charges, ?) > 0"
    " ORDER BY seq DESC LIMIT ?"
)
_POSITION = {Dialect.SQLITE: "instr", Dialect.POSTGRES: "strpos"}


def lock_ledger(transaction: Transaction) -> None:
    """Keep all others away from the ledger until the transaction ends.

    SQLite has one writer at a time by itself. In PostgreSQL everybody takes the row of the root
    first, since every request charges the root: so whoever has it has everything below, and with
    one lock there is no order in which two could wait for each other.
    """
    if transaction.dialect is Dialect.POSTGRES:
        transaction.run(LOCK)


def set_limit(transaction: Transaction, scope: Scope, limit: Limit, now: float) -> None:
    """Replace the limit of a scope; one without any amount removes it."""
    if not limit.has_amount:
        transaction.write("DELETE FROM ledger_limits WHERE scope = ?", (scope,))
        return
    found = transaction.read(f"{_LIMITS} WHERE scope = ?", (scope,))
    before = to_limit(*found[0][1:]) if found else NO_LIMIT
    counted_since = before.counted_since
    if before.window != limit.window:
        change = WindowChange(scope, before.window, limit.window, now=now, zone=zone)
        counted_since = _change_window(transaction, change, now)
    window = format_window(limit.window)
    is_by_tenant = int(limit.is_by_tenant)
    amounts = (limit.limit_micro_usd, limit.limit_tokens)
    transaction.write(_SET_LIMIT, (scope, *amounts, window, is_by_tenant, counted_since))


def create_limit(transaction: Transaction, scope: Scope, limit: Limit, now: float) -> Limit:
    """Set the limit of a scope that has none, and return the one that is in force then."""
    found = transaction.read(f"{_LIMITS} WHERE scope = ?", (scope,))
    if found:
        return to_limit(*found[0][1:])
    set_limit(transaction, scope, limit, now)
    return limit


def apply_batch(
    transaction: Transaction, requests: Sequence[Request], now: float
) -> list[Answer | CallerError]:
    """Expire what is due, then apply requests in their order; each has an answer of its own."""
    state = load(transaction, requests, now)
    answers = [apply(state, request, now) for request in requests]
    write(transaction, state, now)
    return answers


def expire_due(transaction: Transaction, now: float) -> int:
    """End the leases that are due, and return how many there were.

    All of them, before anything is refused for want of what they hold; only after a very long
    standstill the rest waits for the next call.
    """
    expired = 0
    if not transaction.read(_IS_ANY_DUE, (now,)):
        return expired
    while expired < MAX_EXPIRED:
        due = [to_reservation(row) for row in transaction.read(_DUE, (now, EXPIRED_PER_ROUND))]
        if due:
            _expire(transaction, due, now)
            expired += len(due)
        if len(due) < EXPIRED_PER_ROUND:
            break
    return expired


def without_lease(transaction: Transaction, *, after: str, most: int) -> list[Reservation]:
    """Return reservations that only their holder ends, by id, from behind one on."""
    rows = transaction.read(_WITHOUT_LEASE, (NO_LEASE_END, after, most))
    return [to_reservation(row) for row in rows]


def end_now(transaction: Transaction, reservations: Sequence[Reservation], now: float) -> None:
    """End reservations as if their lease ended now: what had begun is assumed to be spent."""
    due = [msgspec.structs.replace(one, lease_until=now) for one in reservations]
    if due:
        _expire(transaction, due, now)


def load(transaction: Transaction, requests: Sequence[Request], now: float) -> LedgerState:
    """Read everything that the requests touch, after what is due has been expired."""
    reserves = [request for request in requests if isinstance(request, ReserveRequest)]
    scopes = list({scope for request in reserves for scope in request.scopes})
    scopes += [request.scope for request in requests if isinstance(request, AdjustRequest)]
    ids = list({request.reservation_id for request in requests})
    touched: list[Statement] = [(_RESERVATIONS, ids), (_LIMITS_OF, scopes)]
    known, limits, any_due = transaction.read_all([*touched, (_IS_ANY_DUE, (now,))])
    if any_due:
        expire_due(transaction, now)
        known, limits = transaction.read_all(touched)
    state = LedgerState(zone, at=now)
    state.reservations = {row[0]: to_reservation(row) for row in known}
    own = _own_scopes(state, requests)
    if own:
        limits += transaction.read(_LIMITS_OF, own)
        scopes += own
    state.limits = {row[0]: to_limit(*row[1:]) for row in limits}
    kinds = {request.flexible.kind for request in reserves if request.flexible is not None}
    if state.limits and kinds:
        state.live_kinds = dict(transaction.read(_LIVE_KINDS, list(kinds)))
    _load_balances(transaction, state, scopes, now)
    return state


def _own_scopes(state: LedgerState, requests: Sequence[Request]) -> list[Scope]:
    """Return the scopes in which tenants claim something that are their own: these may limit it."""
    own: dict[Scope, None] = {}
    for request in requests:
        if isinstance(request, SettleRequest) and request.tenant is not None:
            known = state.reservations.get(request.reservation_id)
            scopes = () if known is None else known.scopes
            own.update(dict.fromkeys(filter(request.tenant.may_charge, scopes)))
    return list(own)


def write(transaction: Transaction, state: LedgerState, now: float) -> None:
    """Write what a batch has changed."""
    drop_emptied(transaction, state)
    transaction.insert_all(changed_rows(state, now))


def drop_emptied(transaction: Transaction, state: LedgerState) -> None:
    """Delete the balances in which a batch has left nothing, before what it changed is written."""
    changed = state.changed_balances - _LOCKED
    emptied = [key for key in changed if _kept(state, key) is None]
    if emptied:
        state.changed_balances.difference_update(emptied)
        transaction.run(_DROP_EMPTIED, sorted(emptied))


def _kept(state: LedgerState, key: tuple[Scope, int]) -> Balance | None:
    buckets = state.balances.get(key[0])
    return None if buckets is None else buckets.get(key[1])


def changed_rows(state: LedgerState, now: float) -> list[tuple[Insert, list[Row]]]:
    """Return what a batch has changed as rows to be written, and take it as written."""
    balances = [
        (*key, *amounts_of(_kept(state, key) or EMPTY)) for key in sorted(state.changed_balances)
    ]
    reservations = [reservation_row(item, now) for item in state.changed_reservations.values()]
    entries = [entry_row(entry) for entry in state.entries]
    state.forget_changes()
    return [(BALANCES, balances), (RESERVATIONS, reservations), (JOURNAL, entries)]


def accounts(
    transaction: Transaction, scope: Scope, now: float, *, most: int = MAX_ACCOUNTS
) -> list[Account]:
    """Return the scope and everything within it that has a limit or a balance, root first."""
    within = _scopes_within(transaction, scope, most - 1) if most > 1 else []
    scopes = [scope, *within]
    state = LedgerState(zone)
    limits = transaction.read(_LIMITS_OF, scopes)
    state.limits = {row[0]: to_limit(*row[1:]) for row in limits}
    _load_balances(transaction, state, scopes, now)
    return [state.account(name, now) for name in scopes]


def limited_accounts(
    transaction: Transaction, *, now: float, after: str | None, most: int
) -> list[Account]:
    """Return scopes that have a limit, in their order, from behind one on."""
    where, values = ("", ()) if after is None else (" WHERE scope > ?", (after,))
    rows = transaction.read(f"{_LIMITS}{where} ORDER BY scope LIMIT ?", (*values, most))
    state = LedgerState(zone)
    state.limits = {row[0]: to_limit(*row[1:]) for row in rows}
    _load_balances(transaction, state, list(state.limits), now)
    return [state.account(scope, now) for scope in state.limits]


def unaccepted(transaction: Transaction, *, most: int) -> list[tuple[Scope, int, int]]:
    """Return the scopes with the most that is claimed and not accepted: dollars and tokens."""
    rows = transaction.read(_UNACCEPTED, (most,))
    return [(Scope(row[0]), row[1], row[2]) for row in rows]


def journal(
    transaction: Transaction, scope: Scope, *, since: float, until: float = inf, limit: int
) -> list[JournalEntry]:
    """Return the latest entries of a time that charge the scope, newest first.

    They are looked for among the latest `MAX_SCANNED_ENTRIES` of all scopes: an index for each
    scope would cost every request, and this is asked seldom.
    """
    found: list[JournalEntry] = []
    before, scanned = 2**62, 0
    mark = f'["{scope}",'
    sql = _JOURNAL.format(position=_POSITION[transaction.dialect])
    while len(found) < limit and scanned < MAX_SCANNED_ENTRIES:
        latest = transaction.read(_LATEST, (before,))
        if not latest or latest[0][1] < since:
            break
        behind = latest[0][0] - JOURNAL_PAGE
        asked = (behind, before, since, until, mark, limit - len(found))
        found += [to_entry(row) for row in transaction.read(sql, asked)]
        before, scanned = behind + 1, scanned + JOURNAL_PAGE
    return found


def apply(state: LedgerState, request: Request, now: float) -> Answer | CallerError:
    """Apply one request to what was loaded for it."""
    try:
        if isinstance(request, ReserveRequest):
            return state.reserve(request, now)
        if isinstance(request, AdjustRequest):
            return state.adjust(request, now)
        return state.settle(request, now)
    except CallerError as error:
        # Its frames lead to that of the caller, which has the answer: each would keep the other.
        return error.with_traceback(None)


def _expire(transaction: Transaction, due: Sequence[Reservation], now: float) -> None:
    state = LedgerState(zone)
    state.reservations = {reservation.id: reservation for reservation in due}
    _load_balances(transaction, state, (), now)
    for reservation in due:
        state.settle(SettleRequest(reservation_id=reservation.id, call=Call.EXPIRE), now)
    write(transaction, state, now)


def _load_balances(
    transaction: Transaction, state: LedgerState, scopes: Sequence[Scope], now: float
) -> None:
    """Read the buckets of these scopes that count now, and all that reservations may change."""
    earliest = _charged_buckets(state.reservations.values())
    for scope in scopes:
        counted = _counted_from(state.limits.get(scope), now)
        earliest[scope] = min(counted, earliest.get(scope, counted))
    if earliest:
        for row in transaction.read(_BALANCES_FROM, list(earliest.items())):
            state.load_balance(row[0], row[1], to_balance(row[2:]))


def _charged_buckets(reservations: Iterable[Reservation]) -> dict[Scope, int]:
    earliest: dict[Scope, int] = {}
    for reservation in reservations:
        for charge in reservation.charges:
            known = earliest.get(charge.scope)
            if known is None or charge.bucket_start < known:
                earliest[charge.scope] = charge.bucket_start
    return earliest


def _counted_from(limit: Limit | None, now: float) -> int:
    if limit is None:
        return 0
    try:
        return live_from(limit.window, now, zone(limit.window.zone))
    except InvalidSettingError:
        # The zone came from a machine that knows it. Who asks about this scope is told so; the
        # others in the same batch are not to suffer from it.
        return 0


def _scopes_within(transaction: Transaction, scope: Scope, most: int) -> list[Scope]:
    # A range and not a pattern: an underscore in a name is a wildcard of LIKE. The character after
    # the slash in byte order is the zero.
    bounds = (f"{scope}/", f"{scope}0") if scope else ("!", "~")
    within = "scope >= ? AND scope < ?"
    sql = (
        f"SELECT scope FROM (SELECT scope FROM ledger_limits WHERE {within}"  # noqa: S608
        f" UNION SELECT scope FROM ledger_balances WHERE {within}) AS known"
        f" ORDER BY {_DEPTH}, scope LIMIT ?"
    )
    rows = transaction.read(sql, (*bounds, *bounds, most))
    return [Scope(row[0]) for row in rows]


# Purging and auditing. The journal is kept for as long as finished reservations are remembered.
# What is older is summed into the checkpoint, and the reservations that it tells the end of are
# forgotten with it; so the order of the journal finds them without an index.

MAX_ENTRIES = 500_000
"""How many journal entries stay for the whole time; of more, the oldest are folded sooner.

One tenant's calls are not to fill a disk for all. It is some 200,000 reservations.
"""

LEAST_KEPT_SECONDS = 900.0
"""How long an entry and a finished reservation stay at least: calls are repeated within minutes."""

FOLDED_PER_STEP = 2_000
WINDOWS_PER_STEP = 500

_SUMS = ", ".join(f"CAST(SUM(amounts.{name}) AS BIGINT)" for name in AMOUNTS)
_JOURNAL_ENDS = """
    SELECT (SELECT MIN(seq) FROM ledger_journal), (SELECT MAX(seq) FROM ledger_journal)
"""
# The first entry that must stay ends what may go, even if a later one carries an earlier time:
# clocks of several machines are only nearly alike. One that is further ahead than such clocks was
# written while a clock was wrong, and is not waited for.
_LAST_OLD_ENTRY = """
    SELECT COALESCE(MIN(CASE WHEN at >= ? AND at < ? THEN seq END) - 1, MAX(seq)), COUNT(*)
    FROM (SELECT seq, at FROM ledger_journal ORDER BY seq LIMIT ?) AS oldest
"""
_FORGET = """
    DELETE FROM ledger_reservations WHERE (finished_at < ? OR finished_at >= ?) AND id IN
    (SELECT reservation_id FROM ledger_journal WHERE seq <= ?)
"""


class Foldable(NamedTuple):
    """The last journal entry that may be folded, 0 if none, and how long entries are kept now."""

    last_entry: int
    kept_seconds: float


def last_old_entry(transaction: Transaction, now: float, most: int) -> Foldable:
    """Return up to where the journal is old enough to be folded, or too long."""
    rows = transaction.read(_JOURNAL_ENDS)
    first, last = rows[0][0] or 0, rows[0][1] or 0
    excess = last - first + 1 - MAX_ENTRIES
    for count, seconds in ((most, FINISHED_KEPT_SECONDS), (excess, LEAST_KEPT_SECONDS)):
        if count > 0:
            times = _remembered_times(now, seconds)
            found = transaction.read(_LAST_OLD_ENTRY, (*times, min(count, most)))
            if (found[0][0] or 0) >= first > 0:
                return Foldable(int(found[0][0]), seconds)
    return Foldable(0, FINISHED_KEPT_SECONDS)


def forget_finished(transaction: Transaction, now: float, foldable: Foldable) -> int:
    """Forget reservations that ended long ago, as the journal up to an entry tells."""
    times = _remembered_times(now, foldable.kept_seconds)
    return transaction.write(_FORGET, (*times, foldable.last_entry))


def _remembered_times(now: float, kept_seconds: float) -> tuple[float, float]:
    return now - kept_seconds, now + FINISHED_KEPT_SECONDS


def fold_journal(transaction: Transaction, last_entry: int) -> int:
    """Sum the journal up to an entry into the checkpoint; return how many entries that were."""
    transaction.write(_fold_sql(transaction.dialect), (last_entry,))
    transaction.write(_drop_zeros_sql(transaction.dialect), (last_entry,))
    return transaction.write("DELETE FROM ledger_journal WHERE seq <= ?", (last_entry,))


def tidy(transaction: Transaction, now: float, *, most: int = FOLDED_PER_STEP) -> bool:
    """Fold and forget one step of what is old; return whether there is more."""
    foldable = last_old_entry(transaction, now, most)
    if not foldable.last_entry:
        return False
    forget_finished(transaction, now, foldable)
    return fold_journal(transaction, foldable.last_entry) >= most


def purge_buckets(transaction: Transaction, now: float, *, after: Scope = ROOT) -> Scope:
    """Drop balances that left their window long ago, for some scopes after the given one.

    Both sides lose the same: a bucket goes only if the checkpoint has all of it and nothing in it
    is held. Returns the scope to go on after, the root at the end.
    """
    rows = transaction.read(
        "SELECT scope, time_window FROM ledger_limits WHERE scope >= ? AND time_window <> 'none'"
        " ORDER BY scope LIMIT ?",
        (after, WINDOWS_PER_STEP),
    )
    wanted = json_rows([(row[0], _left_before(row[1], now)) for row in rows])
    purged = json_rows(transaction.read(_purgeable_sql(transaction.dialect), (wanted,)))
    for table in ("ledger_balances", "ledger_checkpoint"):
        transaction.write(_purge_sql(transaction.dialect, table), (purged,))
    return Scope(rows[-1][0]) if len(rows) == WINDOWS_PER_STEP else ROOT


def audit(transaction: Transaction) -> Audit:
    """Return both sides of the promise that balances equal the journal."""
    kept = f"SELECT scope, bucket_start, {_AMOUNTS} FROM ledger_balances"  # noqa: S608
    return Audit(
        kept=_by_bucket(transaction.read(kept)),
        journalled=_by_bucket(transaction.read(_sums_sql(transaction.dialect))),
    )


def _by_bucket(rows: list[Row]) -> dict[tuple[Scope, int], Balance]:
    return {(Scope(row[0]), row[1]): to_balance(row[2:]) for row in rows if any(row[2:])}


def _left_before(window: str, now: float) -> int:
    parsed = parse_window(window)
    try:
        return int(live_from(parsed, now, zone(parsed.zone)) - FINISHED_KEPT_SECONDS)
    except InvalidSettingError:
        return 0


@cache
def _fold_sql(dialect: Dialect) -> str:
    changes = ", ".join(f"{name} = ledger_checkpoint.{name} + excluded.{name}" for name in AMOUNTS)
    return f"""
        INSERT INTO ledger_checkpoint (scope, bucket_start, {_AMOUNTS})
        SELECT scope, bucket_start, {_SUMS} FROM
            ({_charged_sql(dialect)} WHERE entry.seq <= ?) AS amounts
        WHERE scope IS NOT NULL GROUP BY scope, bucket_start
        ON CONFLICT (scope, bucket_start) DO UPDATE SET {changes}
    """  # noqa: S608


@cache
def _drop_zeros_sql(dialect: Dialect) -> str:
    """Return what drops the sums of folded entries that have come to nothing."""
    nothing = " AND ".join(f"{name} = 0" for name in AMOUNTS)
    return f"""
        DELETE FROM ledger_checkpoint WHERE {nothing} AND (scope, bucket_start) IN
        (SELECT scope, bucket_start FROM ({_charged_sql(dialect)} WHERE entry.seq <= ?) AS folded)
    """  # noqa: S608


@cache
def _sums_sql(dialect: Dialect) -> str:
    return f"""
        SELECT scope, bucket_start, {_SUMS} FROM (
            SELECT scope, bucket_start, {_AMOUNTS} FROM ledger_checkpoint
            UNION ALL {_charged_sql(dialect)}
        ) AS amounts GROUP BY scope, bucket_start
    """  # noqa: S608


def _charged_sql(dialect: Dialect) -> str:
    amounts = ", ".join(f"entry.{name}" for name in AMOUNTS)
    elements = dialect.elements("entry.charges")
    return f"""
        SELECT CAST(charge.value->>0 AS TEXT) AS scope,
            CAST(charge.value->>1 AS BIGINT) AS bucket_start, {amounts}
        FROM ledger_journal AS entry CROSS JOIN {elements} AS charge
    """  # noqa: S608


@cache
def _purgeable_sql(dialect: Dialect) -> str:
    same = " AND ".join(f"summed.{name} = kept.{name}" for name in AMOUNTS)
    return f"""
        SELECT kept.scope, kept.bucket_start
        FROM {dialect.given({"scope": "TEXT", "left_before": "BIGINT"})}
        JOIN ledger_balances AS kept ON kept.scope = given.scope
            AND kept.bucket_start > 0 AND kept.bucket_start < given.left_before
            AND kept.reserved_micro_usd = 0 AND kept.reserved_tokens = 0
        JOIN ledger_checkpoint AS summed ON summed.scope = kept.scope
            AND summed.bucket_start = kept.bucket_start AND {same}
        WHERE {KEPT_BUCKETS} <= (
            SELECT COUNT(*) FROM ledger_balances AS later
            WHERE later.scope = kept.scope AND later.bucket_start > kept.bucket_start
        )
    """  # noqa: S608


@cache
def _purge_sql(dialect: Dialect, table: str) -> str:
    given = dialect.given({"scope": "TEXT", "bucket_start": "BIGINT"})
    return f"""
        DELETE FROM {table} WHERE (scope, bucket_start) IN
        (SELECT given.scope, given.bucket_start FROM {given})
    """  # noqa: S608


# A change of window: what the journal knows moves into the buckets of the new one. The charges of
# its entries are compact JSON, in which the text of a charge is replaced by that of another one.

_OPEN = ("held", "dispatched", "expired", "assumed")
_ADJUSTMENTS = tuple(call.value for call in Adjustment)
_HAS_AMOUNTS = "SELECT 1 FROM ledger_balances WHERE scope = ? LIMIT 1"
_JOURNAL_FROM = "SELECT at FROM ledger_journal ORDER BY seq LIMIT 1"
_CHECKPOINT_OF = f"SELECT bucket_start, {_AMOUNTS} FROM ledger_checkpoint WHERE scope = ?"  # noqa: S608
_BALANCES_OF = f"SELECT bucket_start, {_AMOUNTS} FROM ledger_balances WHERE scope = ?"  # noqa: S608
_CHECKPOINT = Insert(
    table="ledger_checkpoint",
    columns=(("scope", "TEXT"), ("bucket_start", "BIGINT"), *_AMOUNT_TYPES),
    key=("scope", "bucket_start"),
    updated=AMOUNTS,
)

_TRANSACTION_TIMEOUT = "transaction_timeout"
_PATIENT = {_TRANSACTION_TIMEOUT: "30s", "idle_in_transaction_session_timeout": "30s"}
# Not by key, and no table once for each row of another, which the server takes for cheap while it
# has no statistics. Such a plan may be kept with its connection, so only statements that nothing
# else uses are run with it.
_WHOLE_TABLES = {
    "enable_hashjoin": "on",
    "enable_mergejoin": "on",
    "enable_nestloop": "off",
    "enable_seqscan": "on",
}
_GIVEN_NAMES = Dialect.POSTGRES.given({"name": "TEXT"})
_GIVEN_SETTINGS = Dialect.POSTGRES.given({"name": "TEXT", "value": "TEXT"})
# An older server does not know every setting; it says NULL for those.
_SETTINGS = f"SELECT given.name, current_setting(given.name, true) FROM {_GIVEN_NAMES}"  # noqa: S608
_SET_LOCALLY = f"SELECT set_config(given.name, given.value, true) FROM {_GIVEN_SETTINGS}"  # noqa: S608


def _change_window(transaction: Transaction, change: WindowChange, now: float) -> float | None:
    """Move what the journal knows into the buckets of another window; return since when it does."""
    scope, mark = change.scope, f'["{change.scope}",'
    has_amounts = bool(transaction.read(_HAS_AMOUNTS, (scope,)))
    if not has_amounts and not transaction.read(_live_sql(transaction.dialect), (mark,)):
        return None
    with _set_locally(transaction, _PATIENT):
        return _move_amounts(transaction, change, mark, now)


def _move_amounts(
    transaction: Transaction, change: WindowChange, mark: str, now: float
) -> float | None:
    scope, dialect = change.scope, transaction.dialect
    starts = [*change.starts, 2**60]
    buckets = json_rows(list(pairwise(starts)))
    asked = (buckets, change.earliest, mark, mark, scope)
    forgotten_of = (change.current, mark, scope, change.current)
    with _set_locally(transaction, _WHOLE_TABLES):
        moves = transaction.read(_moves_sql(dialect), asked)
        forgotten = transaction.read(_forgotten_sums_sql(dialect), forgotten_of)
        corrections = transaction.read(_corrections_sql(dialect), (change.earliest, mark))
        for table, key, placed, given in (
            ("ledger_reservations", "id", _placed_reservations_sql(dialect), asked),
            ("ledger_reservations", "id", _forgotten_sql(dialect), forgotten_of),
            ("ledger_journal", "seq", _placed_entries_sql(dialect), asked),
        ):
            transaction.write(_relabel_sql(table, key, placed), (mark, mark, *given))
    state = LedgerState(zone)
    for start, *amounts in transaction.read(_BALANCES_OF, (scope,)):
        state.load_balance(scope, start, to_balance(tuple(amounts)))
    for start, to, *amounts in moves:
        state.move(scope, start, to, to_delta(tuple(amounts)))
    _move_corrections(transaction, state, change, corrections)
    folded = {row[0]: to_balance(row[1:]) for row in transaction.read(_CHECKPOINT_OF, (scope,))}
    _move_forgotten(transaction, state, change, forgotten, folded)
    # The lock of the ledger is the row of the root's bucket 0, so it stays.
    drop_emptied(transaction, state)
    transaction.insert_all(changed_rows(state, now))
    return change.counted_since(folded, _journal_from(transaction, now))


def _journal_from(transaction: Transaction, now: float) -> float:
    """Return since when the journal has every entry."""
    first, last = transaction.read(_JOURNAL_ENDS)[0]
    # As long as one that was folded for want of room is younger, those after it fill the journal.
    is_full = first is not None and last - first >= MAX_ENTRIES - FOLDED_PER_STEP
    kept_from = now if is_full else now - FINISHED_KEPT_SECONDS
    found = transaction.read(_JOURNAL_FROM)
    return min(kept_from, found[0][0]) if found else kept_from


@contextmanager
def _set_locally(transaction: Transaction, settings: Mapping[str, str]) -> Iterator[None]:
    """Have other settings of PostgreSQL in the body; what ends it by an error undoes them too."""
    if transaction.dialect is not Dialect.POSTGRES:
        yield
        return
    rows = transaction.read(_SETTINGS, (json_rows([(name,) for name in settings]),))
    before = {name: value for name, value in rows if value is not None}
    _set_all(transaction, {name: settings[name] for name in before})
    yield
    _set_all(transaction, before)


def _set_all(transaction: Transaction, settings: Mapping[str, str]) -> None:
    if _TRANSACTION_TIMEOUT in settings:
        # The server begins to count the time anew only after it has not counted it.
        transaction.run(_SET_LOCALLY, (json_rows([(_TRANSACTION_TIMEOUT, "0")]),))
    transaction.run(_SET_LOCALLY, (json_rows(list(settings.items())),))


def _move_corrections(
    transaction: Transaction, state: LedgerState, change: WindowChange, rows: Iterable[Row]
) -> None:
    for row in rows:
        charges, delta = _charges(row[2]), to_delta(row[3:])
        start, to = change.bucket_in(charges), change.bucket_at(row[1])
        if start is None or to is None or start == to:
            continue
        if state.balances.get(change.scope, {}).get(to, EMPTY).add(delta).is_whole:
            state.move(change.scope, start, to, delta)
            text = charges_text(change.charges(charges, to))
            transaction.write("UPDATE ledger_journal SET charges = ? WHERE seq = ?", (text, row[0]))


def _move_forgotten(
    transaction: Transaction,
    state: LedgerState,
    change: WindowChange,
    rows: Iterable[Row],
    folded: dict[int, Balance],
) -> None:
    """Move what is held and was reserved before the journal begins: it counts as reserved now."""
    is_folded = False
    for start, micro_usd, tokens in rows:
        held = Delta(reserved_micro_usd=micro_usd, reserved_tokens=tokens)
        state.move(change.scope, start, change.current, held)
        folded[start] = folded.get(start, EMPTY).add(held.negated)
        folded[change.current] = folded.get(change.current, EMPTY).add(held)
        is_folded = True
    if is_folded:
        sums = [(change.scope, start, *amounts_of(one)) for start, one in folded.items()]
        transaction.insert(_CHECKPOINT, sums)


@cache
def _placed_sql(dialect: Dialect, rows: str, columns: str) -> str:
    """Return rows of reservations of a scope with the buckets that they are to have.

    `rows` is the table with what joins it to the reservations that were made in the new window.
    """
    position = _POSITION[dialect]
    given = dialect.given({"bucket_start": "BIGINT", "until": "BIGINT"})
    return f"""
        SELECT {columns}, CAST(charge.value->>1 AS BIGINT) AS old_start,
            given.bucket_start AS new_start
        FROM {given}
        JOIN (
            SELECT reservation_id, MIN(at) AS at FROM ledger_journal
            WHERE call = 'reserve' AND at >= ? AND {position}(charges, ?) > 0
            GROUP BY reservation_id
        ) AS made ON made.at >= given.bucket_start AND made.at < given.until
        JOIN {rows} AND {position}(entry.charges, ?) > 0
        CROSS JOIN {dialect.elements("entry.charges")} AS charge
        WHERE charge.value->>0 = ? AND CAST(charge.value->>1 AS BIGINT) <> given.bucket_start
    """  # noqa: S608


def _placed_entries_sql(dialect: Dialect) -> str:
    amounts = ", ".join(f"entry.{name}" for name in AMOUNTS)
    return _placed_sql(
        dialect,
        "ledger_journal AS entry ON entry.reservation_id = made.reservation_id",
        f"entry.seq AS key, {amounts}",
    )


def _placed_reservations_sql(dialect: Dialect) -> str:
    """Return what places the reservations that may still be settled."""
    states = ", ".join(f"'{state}'" for state in _OPEN)
    return _placed_sql(
        dialect,
        f"ledger_reservations AS entry ON entry.id = made.reservation_id"
        f" AND entry.state IN ({states})",
        "entry.id AS key",
    )


@cache
def _forgotten_sql(dialect: Dialect) -> str:
    """Return what is held in a scope and the journal has forgotten; it is to have one bucket."""
    states = ", ".join(sorted(f"'{state.value}'" for state in LIVE))
    return f"""
        SELECT kept.id AS key, kept.micro_usd, kept.tokens,
            CAST(charge.value->>1 AS BIGINT) AS old_start, CAST(? AS BIGINT) AS new_start
        FROM ledger_reservations AS kept
        LEFT JOIN (SELECT DISTINCT reservation_id FROM ledger_journal WHERE call = 'reserve')
            AS made ON made.reservation_id = kept.id
        CROSS JOIN {dialect.elements("kept.charges")} AS charge
        WHERE made.reservation_id IS NULL AND kept.state IN ({states})
            AND {_POSITION[dialect]}(kept.charges, ?) > 0
            AND charge.value->>0 = ? AND CAST(charge.value->>1 AS BIGINT) <> ?
    """  # noqa: S608


@cache
def _moves_sql(dialect: Dialect) -> str:
    return f"""
        SELECT old_start, new_start, {_SUMS} FROM ({_placed_entries_sql(dialect)}) AS amounts
        GROUP BY old_start, new_start
    """  # noqa: S608


@cache
def _forgotten_sums_sql(dialect: Dialect) -> str:
    return f"""
        SELECT old_start, CAST(SUM(micro_usd) AS BIGINT), CAST(SUM(tokens) AS BIGINT)
        FROM ({_forgotten_sql(dialect)}) AS amounts GROUP BY old_start
    """  # noqa: S608


def _relabel_sql(table: str, key: str, placed: str) -> str:
    """Return what writes the new buckets; the first two parameters are the mark of the scope."""
    return f"""
        UPDATE {table} SET charges = REPLACE(
            {table}.charges,
            CAST(? AS TEXT) || placed.old_start || ']', CAST(? AS TEXT) || placed.new_start || ']'
        )
        FROM ({placed}) AS placed WHERE placed.key = {table}.{key}
    """  # noqa: S608


@cache
def _corrections_sql(dialect: Dialect) -> str:
    calls = ", ".join(f"'{call}'" for call in _ADJUSTMENTS)
    return f"""
        SELECT seq, at, charges, {_AMOUNTS} FROM ledger_journal
        WHERE call IN ({calls}) AND at >= ? AND {_POSITION[dialect]}(charges, ?) > 0 ORDER BY seq
    """  # noqa: S608


@cache
def _live_sql(dialect: Dialect) -> str:
    position = _POSITION[dialect]
    return f"""
        SELECT 1 FROM ledger_reservations
        WHERE finished_at IS NULL AND {position}(charges, ?) > 0 LIMIT 1
    """  # noqa: S608


# Budgets of the configuration. What it no longer names is no longer in force, but a budget that
# somebody set by hand, in a scope that no configuration ever named, stays as it is.


def set_limits(
    transaction: Transaction, limits: dict[Scope, Limit], now: float, *, keeps_ledger: bool
) -> tuple[Scope, ...]:
    """Put the budgets of the configuration in force; return the scopes that it has left out."""
    rows = transaction.read("SELECT scope FROM configured_budgets ORDER BY scope")
    left_out = tuple(Scope(row[0]) for row in rows if row[0] not in limits)
    if keeps_ledger:
        for scope in left_out:
            set_limit(transaction, scope, NO_LIMIT, now)
        for scope, limit in limits.items():
            set_limit(transaction, scope, limit, now)
    transaction.run("DELETE FROM configured_budgets")
    transaction.insert(CONFIGURED, [(scope,) for scope in limits])
    return left_out
