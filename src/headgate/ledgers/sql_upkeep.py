"""What keeps the tables of a ledger from growing, and proves that they are right.

The journal is kept for as long as finished reservations are remembered. What is older is summed
into the checkpoint, and the reservations that it tells the end of are forgotten with it. So the
order of the journal finds them, and no index is needed.
"""

from __future__ import annotations

from functools import cache

from headgate.core.budgets.accounts import Balance
from headgate.core.budgets.scopes import ROOT, Scope
from headgate.core.budgets.windows import live_from, parse_window
from headgate.databases.transaction import Dialect, Row, Transaction, json_rows
from headgate.errors import InvalidSettingError
from headgate.ledger import FINISHED_KEPT_SECONDS, Audit
from headgate.ledgers.sql_rows import to_balance
from headgate.ledgers.sql_schema import AMOUNTS
from headgate.ledgers.zones import zone

FOLDED_PER_STEP = 2_000
WINDOWS_PER_STEP = 500

_AMOUNTS = ", ".join(AMOUNTS)
_SUMS = ", ".join(f"CAST(SUM(amounts.{name}) AS BIGINT)" for name in AMOUNTS)
# The first entry that must stay ends what may go, even if a later one carries an earlier time:
# clocks of several machines are only nearly alike.
_LAST_OLD_ENTRY = """
    SELECT COALESCE(MIN(CASE WHEN at >= ? THEN seq END) - 1, MAX(seq)), COUNT(*)
    FROM (SELECT seq, at FROM ledger_journal ORDER BY seq LIMIT ?) AS oldest
"""
_FORGET = """
    DELETE FROM ledger_reservations WHERE finished_at < ? AND id IN
    (SELECT reservation_id FROM ledger_journal WHERE seq <= ?)
"""


def last_old_entry(transaction: Transaction, before: float, most: int) -> int:
    """Return the number of the last journal entry that is old enough to be folded; 0 if none."""
    rows = transaction.read(_LAST_OLD_ENTRY, (before, most))
    return int(rows[0][0] or 0)


def forget_finished(transaction: Transaction, before: float, last_entry: int) -> int:
    """Forget reservations that ended before, as the journal up to an entry tells."""
    return transaction.write(_FORGET, (before, last_entry))


def fold_journal(transaction: Transaction, last_entry: int) -> int:
    """Sum the journal up to an entry into the checkpoint; return how many entries that were."""
    transaction.write(_fold_sql(transaction.dialect), (last_entry,))
    return transaction.write("DELETE FROM ledger_journal WHERE seq <= ?", (last_entry,))


def tidy(transaction: Transaction, now: float, *, most: int = FOLDED_PER_STEP) -> bool:
    """Fold and forget one step of what is old; return whether there is more."""
    before = now - FINISHED_KEPT_SECONDS
    last_entry = last_old_entry(transaction, before, most)
    if not last_entry:
        return False
    forget_finished(transaction, before, last_entry)
    return fold_journal(transaction, last_entry) >= most


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
    """  # noqa: S608


@cache
def _purge_sql(dialect: Dialect, table: str) -> str:
    given = dialect.given({"scope": "TEXT", "bucket_start": "BIGINT"})
    return f"""
        DELETE FROM {table} WHERE (scope, bucket_start) IN
        (SELECT given.scope, given.bucket_start FROM {given})
    """  # noqa: S608
