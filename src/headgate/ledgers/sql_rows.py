"""Rows of the ledger's tables, and the values that they stand for."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from headgate.core.budgets.accounts import Balance, JournalEntry, Limit
from headgate.core.budgets.reservations import (
    LIVE,
    Call,
    Charge,
    Delta,
    Reservation,
    ReservationState,
)
from headgate.core.budgets.windows import parse_window
from headgate.core.money import Columns, MicroUsd, Tokens
from headgate.databases.transaction import Row

_STATES = {state.value: state for state in ReservationState}
_CALLS = {call.value: call for call in Call}
_STATE_TEXTS = {state: state.value for state in ReservationState}
_CALL_TEXTS = {call: call.value for call in Call}
_CHARGES = msgspec.json.Decoder(tuple[Charge, ...])


@lru_cache(maxsize=4_096)
def to_limit(limit_micro_usd: int | None, limit_tokens: int | None, window: str) -> Limit:
    """Read the columns of a limit."""
    return Limit(
        limit_micro_usd=None if limit_micro_usd is None else MicroUsd(limit_micro_usd),
        limit_tokens=None if limit_tokens is None else Tokens(limit_tokens),
        window=parse_window(window),
    )


def to_balance(amounts: Row) -> Balance:
    """Read the six amounts of a balance."""
    return Balance(
        spent_micro_usd=amounts[0],
        reserved_micro_usd=amounts[1],
        overrun_micro_usd=amounts[2],
        spent_tokens=amounts[3],
        reserved_tokens=amounts[4],
        overrun_tokens=amounts[5],
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
    )


def to_entry(row: Row) -> JournalEntry:
    """Read the columns of a journal entry after its number."""
    amounts = to_balance(row[4:])
    return JournalEntry(
        at=row[0],
        reservation_id=row[1],
        call=_CALLS[row[2]],
        charges=_charges(row[3]),
        delta=Delta(**msgspec.structs.asdict(amounts)),
    )


def amounts_of(columns: Columns) -> tuple[int, int, int, int, int, int]:
    """Write the six amounts."""
    return (
        columns.spent_micro_usd,
        columns.reserved_micro_usd,
        columns.overrun_micro_usd,
        columns.spent_tokens,
        columns.reserved_tokens,
        columns.overrun_tokens,
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


# Callers that run side by side charge the same few scopes, so both directions are remembered.
@lru_cache(maxsize=4_096)
def charges_text(charges: tuple[Charge, ...]) -> str:
    """Write charges as compact JSON: `[["",0],["session:eval",0]]`."""
    return msgspec.json.encode(charges).decode()


@lru_cache(maxsize=4_096)
def _charges(text: str) -> tuple[Charge, ...]:
    return _CHARGES.decode(text)
