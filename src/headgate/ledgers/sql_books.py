"""The books in SQL: functions on a transaction that somebody else opens and commits.

A batch of requests becomes a `Books` with the rows that it touches, the requests are applied
there, and what changed is written back: one row a balance, however many requests changed it.

Rule: whoever calls these functions calls `lock_books` first, and before any other lock that the
same transaction takes. Then no two transactions read the same balances and write them one after
the other, and none waits for the books while another waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from math import inf

from headgate.core.budgets.accounts import Account, JournalEntry, Limit, Refused
from headgate.core.budgets.books import Books, ReserveRequest, SettleRequest
from headgate.core.budgets.reservations import Call, Reservation
from headgate.core.budgets.scopes import Scope
from headgate.core.budgets.windows import format_window, live_from
from headgate.databases.transaction import Dialect, Statement, Transaction, about, json_rows
from headgate.errors import CallerError, InvalidSettingError
from headgate.ledger import MAX_ACCOUNTS
from headgate.ledgers.sql_rows import (
    amounts_of,
    entry_row,
    reservation_row,
    to_balance,
    to_entry,
    to_limit,
    to_reservation,
)
from headgate.ledgers.sql_schema import AMOUNTS, BALANCES, JOURNAL, RESERVATION, RESERVATIONS
from headgate.ledgers.zones import zone

Request = ReserveRequest | SettleRequest
Answer = Reservation | Refused

EXPIRED_PER_ROUND = 1_000
MAX_EXPIRED = 20 * EXPIRED_PER_ROUND
JOURNAL_PAGE = 20_000
MAX_SCANNED_ENTRIES = 200_000
"""How far back the journal of a scope is looked for; older entries exist, but are not searched."""

_AMOUNTS = ", ".join(AMOUNTS)
_RESERVATION = ", ".join(RESERVATION)
_RESERVATIONS = f"SELECT {_RESERVATION} FROM ledger_reservations"  # noqa: S608
_LIMITS = "SELECT scope, limit_micro_usd, limit_tokens, time_window FROM ledger_limits"
_DEPTH = "LENGTH(scope) - LENGTH(REPLACE(scope, '/', ''))"

_LOCK = "SELECT 1 FROM ledger_balances WHERE scope = '' AND bucket_start = 0 FOR UPDATE"
_DUE = (
    f"SELECT {_RESERVATION} FROM ledger_reservations"  # noqa: S608
    " WHERE finished_at IS NULL AND lease_until <= ? ORDER BY lease_until LIMIT ?"
)
_IS_ANY_DUE = (
    "SELECT 1 FROM ledger_reservations WHERE finished_at IS NULL AND lease_until <= ? LIMIT 1"
)
_SET_LIMIT = (
    "INSERT INTO ledger_limits (scope, limit_micro_usd, limit_tokens, time_window)"
    " VALUES (?, ?, ?, ?) ON CONFLICT (scope) DO UPDATE SET"
    " limit_micro_usd = excluded.limit_micro_usd, limit_tokens = excluded.limit_tokens,"
    " time_window = excluded.time_window"
)
_LATEST = "SELECT seq, at FROM ledger_journal WHERE seq < ? ORDER BY seq DESC LIMIT 1"
_JOURNAL = (
    f"SELECT at, reservation_id, call, charges, {_AMOUNTS} FROM ledger_journal"  # noqa: S608
    " WHERE seq > ? AND seq < ? AND at >= ? AND at <= ? AND {position}(charges, ?) > 0"
    " ORDER BY seq DESC LIMIT ?"
)
_POSITION = {Dialect.SQLITE: "instr", Dialect.POSTGRES: "strpos"}


def lock_books(transaction: Transaction) -> None:
    """Keep all others away from the books until the transaction ends.

    SQLite has one writer at a time by itself. In PostgreSQL everybody takes the row of the root
    first, since every request charges the root: so whoever has it has everything below, and with
    one lock there is no order in which two could wait for each other.
    """
    if transaction.dialect is Dialect.POSTGRES:
        transaction.run(_LOCK)


def set_limit(transaction: Transaction, scope: Scope, limit: Limit) -> None:
    """Replace the limit of a scope; one without any amount removes it."""
    if not limit.has_amount:
        transaction.write("DELETE FROM ledger_limits WHERE scope = ?", (scope,))
        return
    window = format_window(limit.window)
    row = (scope, limit.limit_micro_usd, limit.limit_tokens, window)
    transaction.write(_SET_LIMIT, row)


def found_limit(transaction: Transaction, scope: Scope, limit: Limit) -> Limit:
    """Set the limit of a scope that has none, and return the one that is in force then."""
    found = transaction.read(f"{_LIMITS} WHERE scope = ?", (scope,))
    if found:
        return to_limit(*found[0][1:])
    set_limit(transaction, scope, limit)
    return limit


def apply_batch(
    transaction: Transaction, requests: Sequence[Request], now: float
) -> list[Answer | CallerError]:
    """Expire what is due, then apply requests in their order; each has an answer of its own."""
    books = load(transaction, requests, now)
    answers = [_apply(books, request, now) for request in requests]
    write(transaction, books, now)
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


def load(transaction: Transaction, requests: Sequence[Request], now: float) -> Books:
    """Read everything that the requests touch, after what is due has been expired."""
    reserves = [request for request in requests if isinstance(request, ReserveRequest)]
    scopes = list({scope for request in reserves for scope in request.scopes})
    ids = list({request.reservation_id for request in requests})
    touched = [_reservations(transaction.dialect, ids), _limits(transaction.dialect, scopes)]
    known, limits, any_due = transaction.read_all([*touched, (_IS_ANY_DUE, (now,))])
    if any_due:
        expire_due(transaction, now)
        known, limits = transaction.read_all(touched)
    books = Books(zone, at=now)
    books.reservations = {row[0]: to_reservation(row) for row in known}
    books.limits = {row[0]: to_limit(row[1], row[2], row[3]) for row in limits}
    _load_balances(transaction, books, scopes, now)
    return books


def write(transaction: Transaction, books: Books, now: float) -> None:
    """Write what a batch has changed."""
    balances = [
        (scope, start, *amounts_of(books.balances[scope][start]))
        for scope, start in sorted(books.changed_balances)
    ]
    transaction.insert(BALANCES, balances)
    reservations = books.changed_reservations.values()
    transaction.insert(RESERVATIONS, [reservation_row(item, now) for item in reservations])
    transaction.insert(JOURNAL, [entry_row(entry) for entry in books.entries])
    books.forget_changes()


def accounts(
    transaction: Transaction, scope: Scope, now: float, *, most: int = MAX_ACCOUNTS
) -> list[Account]:
    """Return the scope and everything within it that has a limit or a balance, root first."""
    within = _scopes_within(transaction, scope, most - 1) if most > 1 else []
    scopes = [scope, *within]
    books = Books(zone)
    limits = transaction.read(*_limits(transaction.dialect, scopes))
    books.limits = {row[0]: to_limit(row[1], row[2], row[3]) for row in limits}
    _load_balances(transaction, books, scopes, now)
    return [books.account(name, now) for name in scopes]


def limited_accounts(
    transaction: Transaction, *, now: float, after: str | None, most: int
) -> list[Account]:
    """Return scopes that have a limit, in their order, from behind one on."""
    where, values = ("", ()) if after is None else (" WHERE scope > ?", (after,))
    rows = transaction.read(f"{_LIMITS}{where} ORDER BY scope LIMIT ?", (*values, most))
    books = Books(zone)
    books.limits = {row[0]: to_limit(row[1], row[2], row[3]) for row in rows}
    _load_balances(transaction, books, list(books.limits), now)
    return [books.account(scope, now) for scope in books.limits]


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


def _apply(books: Books, request: Request, now: float) -> Answer | CallerError:
    try:
        if isinstance(request, ReserveRequest):
            return books.reserve(request, now)
        return books.settle(request, now)
    except CallerError as error:
        return error


def _expire(transaction: Transaction, due: Sequence[Reservation], now: float) -> None:
    books = Books(zone)
    books.reservations = {reservation.id: reservation for reservation in due}
    _load_balances(transaction, books, (), now)
    for reservation in due:
        books.settle(SettleRequest(reservation_id=reservation.id, call=Call.EXPIRE), now)
    write(transaction, books, now)


def _load_balances(
    transaction: Transaction, books: Books, scopes: Sequence[Scope], now: float
) -> None:
    """Read the buckets of these scopes that count now, and all that reservations may change."""
    earliest = _charged_buckets(books.reservations.values())
    for scope in scopes:
        counted = _counted_from(books.limits.get(scope), now)
        earliest[scope] = min(counted, earliest.get(scope, counted))
    if earliest:
        wanted = json_rows(list(earliest.items()))
        for row in transaction.read(_balances_sql(transaction.dialect), (wanted,)):
            books.balances.setdefault(row[0], {})[row[1]] = to_balance(row[2:])


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


def _reservations(dialect: Dialect, ids: Iterable[str]) -> Statement:
    return about(dialect, _RESERVATIONS, "id", ids)


def _limits(dialect: Dialect, scopes: Iterable[Scope]) -> Statement:
    return about(dialect, _LIMITS, "scope", scopes)


@cache
def _balances_sql(dialect: Dialect) -> str:
    given = dialect.given({"scope": "TEXT", "earliest": "BIGINT"})
    amounts = ", ".join(f"kept.{name}" for name in AMOUNTS)
    return (
        f"SELECT kept.scope, kept.bucket_start, {amounts} FROM {given}"  # noqa: S608
        " JOIN ledger_balances AS kept ON kept.scope = given.scope"
        " AND kept.bucket_start >= given.earliest"
    )
