"""What the calls of running tasks have used so far, and the secret of the tokens they come with.

A call of a task books nothing by itself but what it held beside its task. The rest is added up
here, by model and key, in the transaction that writes the call, until the attempt of its task ends
and books the sum. So the sum survives a crash, and any node can end the attempt.

Rule: the rows of an attempt are read and deleted in the transaction that ends it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from headgate.core.budgets.escrow import Amounts
from headgate.core.call import CallRecord
from headgate.core.retention import CALL_RETENTION_SECONDS
from headgate.core.task_money import TASK_TOKEN_PREFIX
from headgate.storage.migrations import first_migration
from headgate.storage.task_ids import first_id_at
from headgate.storage.transaction import Access, Insert, Row, Transaction

PART = "task_calls"

_TABLES = """
CREATE TABLE task_calls (
    task_id {text} NOT NULL,
    attempt BIGINT NOT NULL,
    model {text} NOT NULL,
    slot {text} NOT NULL,
    calls BIGINT NOT NULL,
    tokens BIGINT NOT NULL,
    micro_usd BIGINT NOT NULL,
    beside_tokens BIGINT NOT NULL,
    beside_micro_usd BIGINT NOT NULL,
    assumed_tokens BIGINT NOT NULL,
    assumed_micro_usd BIGINT NOT NULL,
    unpriced_tokens BIGINT NOT NULL,
    PRIMARY KEY (task_id, attempt, model, slot)
) {by_key};
CREATE TABLE task_token_secrets (
    name {text} PRIMARY KEY,
    secret {text} NOT NULL
) {by_key}
"""

MIGRATIONS = (first_migration(_TABLES),)

_KEY = ("task_id", "attempt", "model", "slot")
_SUMS = (
    "calls",
    "tokens",
    "micro_usd",
    "beside_tokens",
    "beside_micro_usd",
    "assumed_tokens",
    "assumed_micro_usd",
    "unpriced_tokens",
)
TASK_CALLS = Insert(
    table="task_calls",
    columns=(
        ("task_id", "TEXT"),
        ("attempt", "BIGINT"),
        ("model", "TEXT"),
        ("slot", "TEXT"),
        *((name, "BIGINT") for name in _SUMS),
    ),
    key=_KEY,
    bounded=_SUMS,
)


class TaskPart(msgspec.Struct, frozen=True, array_like=True):
    """Which attempt a call was of, and what it held beside the task and is booked by itself.

    `keeps_ledger` tells whether the ledger is in the store.
    """

    attempt: int
    beside: Amounts = Amounts()
    keeps_ledger: bool = True


class CallSum(msgspec.Struct, frozen=True, kw_only=True):
    """What the calls of an attempt to one model, with one key, have used together."""

    model: str
    slot: str
    calls: int
    tokens: int
    micro_usd: int
    beside_tokens: int = 0
    beside_micro_usd: int = 0
    assumed_tokens: int = 0
    assumed_micro_usd: int = 0
    unpriced_tokens: int = 0


class CallsUsed(msgspec.Struct, frozen=True):
    """What all calls of an attempt have used."""

    sums: tuple[CallSum, ...]

    @property
    def total(self) -> Amounts:
        """All of it."""
        return Amounts(
            sum(one.micro_usd for one in self.sums), sum(one.tokens for one in self.sums)
        )

    @property
    def beside(self) -> Amounts:
        """The part that is booked by the calls themselves."""
        return Amounts(
            sum(one.beside_micro_usd for one in self.sums),
            sum(one.beside_tokens for one in self.sums),
        )

    @property
    def assumed(self) -> Amounts:
        """The part that nobody reported."""
        return Amounts(
            sum(one.assumed_micro_usd for one in self.sums),
            sum(one.assumed_tokens for one in self.sums),
        )

    @property
    def model(self) -> str | None:
        """The model, if all calls were to one."""
        models = {one.model for one in self.sums}
        return (models.pop() or None) if len(models) == 1 else None


def rows(ended: Iterable[tuple[CallRecord, TaskPart, str]]) -> list[Row]:
    """Return what calls add to the sums of their attempts, one row for each sum."""
    sums: dict[Row, list[int]] = {}
    for record, part, model in ended:
        key = (record.task_id, part.attempt, model, record.slot or "")
        tokens = record.tokens or 0
        added = (
            1,
            tokens,
            record.micro_usd or 0,
            part.beside.tokens,
            part.beside.micro_usd,
            record.assumed_tokens,
            record.assumed_micro_usd,
            tokens - record.assumed_tokens if record.is_unpriced else 0,
        )
        known = sums.get(key, [0] * len(_SUMS))
        sums[key] = [one + more for one, more in zip(known, added, strict=True)]
    return [(*key, *one) for key, one in sums.items()]


_READ = f"SELECT model, slot, {', '.join(_SUMS)} FROM task_calls WHERE task_id = ? AND attempt = ?"  # noqa: S608
_DELETE = "DELETE FROM task_calls WHERE task_id = ?"
_DELETE_OLD = (
    "DELETE FROM task_calls WHERE task_id < ? AND NOT EXISTS (SELECT 1 FROM tasks"
    " WHERE tasks.id = task_calls.task_id AND tasks.state IN ('assigned', 'running'))"
)


def read(transaction: Transaction, task_id: str, attempt: int) -> CallsUsed:
    """Return what the calls of an attempt have used."""
    found = transaction.read(_READ, (task_id, attempt))
    names = ("model", "slot", *_SUMS)
    return CallsUsed(tuple(CallSum(**dict(zip(names, row, strict=True))) for row in found))


def take(transaction: Transaction, task_id: str, attempt: int) -> CallsUsed:
    """Return what the calls of an attempt have used, and forget it: the attempt ends."""
    used = read(transaction, task_id, attempt)
    if used.sums:
        transaction.run(_DELETE, (task_id,))
    return used


def delete_old(transaction: Transaction, now: float) -> None:
    """Delete what calls have left that ended after their task."""
    transaction.run(_DELETE_OLD, (first_id_at(now - CALL_RETENTION_SECONDS),))


# The token of an attempt. It says whose it is, and nothing of it is stored: whoever has the secret
# of the store can tell whether it is good.


class TaskToken(NamedTuple):
    """What a token of a task says: which attempt at which task."""

    task_id: str
    attempt: int


def task_token(task_id: str, attempt: int, secret: bytes) -> str:
    """Return the token of an attempt."""
    said = f"{task_id}.{attempt}"
    return f"{TASK_TOKEN_PREFIX}{said}.{_mac(said, secret)}"


def read_task_token(text: str, secret: bytes) -> TaskToken | None:
    """Return what a token says that was made with the secret; None of any other text."""
    if not text.startswith(TASK_TOKEN_PREFIX) or not text.isascii():
        return None
    said, _, mac = text.removeprefix(TASK_TOKEN_PREFIX).rpartition(".")
    if not hmac.compare_digest(mac, _mac(said, secret)):
        return None
    task_id, _, attempt = said.rpartition(".")
    return TaskToken(task_id, int(attempt))


def _mac(said: str, secret: bytes) -> str:
    return hmac.new(secret, said.encode(), hashlib.sha256).hexdigest()


_ADD_FIRST = (
    "INSERT INTO task_token_secrets (name, secret) VALUES ('', ?) ON CONFLICT (name) DO NOTHING"
)
_READ_FIRST = "SELECT secret FROM task_token_secrets WHERE name = ''"


def _secret(transaction: Transaction, _now: float, *, proposed: str) -> str:
    transaction.run(_ADD_FIRST, (proposed,))
    found: Sequence[Row] = transaction.read(_READ_FIRST)
    return str(found[0][0])


class TaskCallStore:
    """The sums of the calls of running tasks, and the secret; may raise `StoreUnavailableError`."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def secret(self) -> bytes:
        """Return what the tokens of tasks are signed with; the first who asks makes it."""
        proposed = secrets.token_hex(32)
        return bytes.fromhex(await self._access.run(partial(_secret, proposed=proposed)))

    async def used(self, task_id: str, attempt: int) -> CallsUsed:
        """Return what the calls of an attempt have used so far."""
        return await self._access.ask(partial(read, task_id=task_id, attempt=attempt))
