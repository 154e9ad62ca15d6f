"""What goes to the script of the Redis ledger and what comes back, as types.

Both ways are MessagePack. A batch names each scope once, with the window that this process believes
it to have and the buckets that follow from it: zones cannot be computed inside Redis. The script
compares the windows with the limits it keeps; where they differ it applies nothing and says which.

The rules of reservations are rendered from `headgate.core.budgets.reservations` and put before the
script, so that there is one table of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files

import msgspec

from headgate.core.budgets.ledger import (
    GUARD_SHARE,
    LEAST_SHARE,
    PROBE_SHARE,
    Account,
    Adjustment,
    AdjustRequest,
    Balance,
    Flexible,
    JournalEntry,
    LedgerState,
    Limit,
    Refused,
    ReserveRequest,
    SettleRequest,
    Unit,
    amounts_to_hold,
)
from headgate.core.budgets.reservations import (
    RULES,
    Call,
    Charge,
    Delta,
    Reservation,
    ReservationState,
)
from headgate.core.budgets.scopes import MAX_REMEMBERED_LENGTH, Scope, Tenant
from headgate.core.budgets.windows import (
    KEPT_BUCKETS,
    NO_WINDOW,
    Window,
    bucket_start,
    format_window,
    live_from,
    parse_window,
)
from headgate.core.money import MAX_BALANCE, MAX_RESERVATION_MICRO_USD, MicroUsd, Tokens
from headgate.errors import AdjustmentError, LedgerUnavailableError
from headgate.storage.zones import zone


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A commit of a tenant, with the charges of its reservation, which never change.

    The script cannot compute windows, so it is told of those that may limit the claim.
    """

    request: SettleRequest
    own: tuple[Charge, ...]
    is_bound: bool

    @property
    def reservation_id(self) -> str:
        """The id of the reservation."""
        return self.request.reservation_id


Request = ReserveRequest | SettleRequest | AdjustRequest | Claim
Columns = tuple[int, int, int, int, int, int, int, int]

NO_LIMIT = -1
# A bucket, the columns of its balance, and when it last changed, which only the script reads.
ROW_WIDTH = 10
COLUMNS = 8


class Made(msgspec.Struct, frozen=True, array_like=True, tag="made"):
    """The reservation was made, as it was asked for."""


class Known(msgspec.Struct, frozen=True, array_like=True, tag="known"):
    """A reservation as it is kept, after the call."""

    state: ReservationState
    micro_usd: int
    tokens: int
    lease_until: float
    dispatched_at_once: bool
    finished_at: float
    charges: str
    kind: str = ""
    actual_micro_usd: int | None = None
    actual_tokens: int | None = None


class Illegal(Known, frozen=True, array_like=True, tag="illegal"):
    """A reservation as it is kept, and untouched: the call is not one that its state has."""


class Unknown(msgspec.Struct, frozen=True, array_like=True, tag="unknown"):
    """The ledger has no reservation of this id."""


class NoRoom(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The first scope that cannot hold the request, and how many of its kind are live."""

    scope: str
    window: str
    limit_micro_usd: int
    limit_tokens: int
    balance: Columns
    oldest_bucket: int | None = None
    live: int = 0


class Short(msgspec.Struct, frozen=True, array_like=True, tag="short"):
    """An adjustment was not made: in a unit, the first or the second, there is only so much."""

    unit: int
    there: int


class Again(msgspec.Struct, frozen=True, array_like=True, tag="again"):
    """There is no room yet, but leases that may hold some are still to be expired."""


Reply = Made | Known | Illegal | Unknown | NoRoom | Short | Again


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The step was taken: how many leases were expired first, and an answer for each request."""

    expired: int
    has_more_due: bool
    replies: list[Reply]


class Stale(msgspec.Struct, frozen=True, array_like=True, tag="stale"):
    """Nothing was applied: these scopes have other windows by now."""

    windows: list[tuple[Scope, str]]


class Lost(msgspec.Struct, frozen=True, array_like=True, tag="lost"):
    """Nothing was applied: the ledger is not the one that was opened."""


class Behind(msgspec.Struct, frozen=True, array_like=True, tag="behind"):
    """Nothing was applied: the ledger has taken fewer steps than the caller knows of."""


class KeptLimit(msgspec.Struct, frozen=True, array_like=True):
    """A limit as it is kept; -1 is no limit in that unit, 0 no time from which on it counts."""

    window: str
    limit_micro_usd: int
    limit_tokens: int
    is_by_tenant: bool = False
    counted_since: float = 0.0


class InForce(msgspec.Struct, frozen=True, array_like=True, tag="limit"):
    """The limit of a scope after one was to be founded; None where there is none."""

    limit: KeptLimit | None


class WasSet(msgspec.Struct, frozen=True, array_like=True, tag="set"):
    """A limit was set: the window before, and from when on everything counts; 0 for all of it.

    `folded` is the row of the scope as far as the journal does not know its entries, if the window
    changed.
    """

    window: str
    counted_since: float
    folded: list[int]


class Accounts(msgspec.Struct, frozen=True, array_like=True, tag="accounts"):
    """Scopes with their limits, and their balances in one row each, of `ROW_WIDTH` a bucket."""

    rows: list[tuple[Scope, KeptLimit | None, list[int]]]


class KeptEntry(msgspec.Struct, frozen=True, array_like=True):
    """A journal entry as it is kept."""

    at: float
    reservation_id: str
    call: str
    charges: str
    spent_micro_usd: int
    reserved_micro_usd: int
    overrun_micro_usd: int
    spent_tokens: int
    reserved_tokens: int
    overrun_tokens: int
    unaccepted_micro_usd: int
    unaccepted_tokens: int


CHARGES_AT = 6
CALLS: dict[str, Call | Adjustment] = {one.value: one for one in (*Call, *Adjustment)}

encode = msgspec.msgpack.Encoder().encode
StepReply = Done | Stale | Lost | Behind | Accounts | InForce | WasSet
_reply_decoder: msgspec.msgpack.Decoder[StepReply] = msgspec.msgpack.Decoder(StepReply)
_entry_decoder = msgspec.msgpack.Decoder(KeptEntry)
_row_decoder = msgspec.msgpack.Decoder(list[int])


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger keeps at most, and how many leases one step expires."""

    journal_entries: int = 20_000
    finished: int = 100_000
    finished_seconds: float = 86_400.0
    expired_at_once: int = 500

    def as_row(self) -> tuple[int, int, float, int]:
        """Give the bounds in the order in which the script reads them."""
        return self.journal_entries, self.finished, self.finished_seconds, self.expired_at_once


class Batch:
    """Requests for one step at `now`; each scope, and each set of scopes, stands in it once."""

    def __init__(self, now: float, windows: Mapping[Scope, Window]) -> None:
        self.now = now
        self._windows = windows
        self._charges: dict[Scope, Charge] = {}
        self._sets: dict[tuple[Scope, ...], tuple[int, tuple[Charge, ...]]] = {}
        self._scope_rows: list[tuple[Scope, str, int]] = []
        self._texts: list[str] = []
        self._requests: list[object] = []

    def add(self, request: Request) -> None:
        """Append a request; a window whose zone this machine does not know raises, alone."""
        further: tuple[object, ...] | bool = False
        dispatched, place, lease_until = False, 0, 0.0
        if isinstance(request, Claim):
            for charge in request.own:
                self._charge(charge.scope)
            further = (_text(request.own), request.is_bound)
            request = request.request
        if isinstance(request, AdjustRequest):
            place = self._place((request.scope,))
        else:
            lease_until = request.lease_until(self.now)
        if isinstance(request, ReserveRequest):
            if request.flexible is not None:
                further = _flexible_row(request.flexible)
            place, dispatched = self._place(request.scopes), request.dispatched
            call = Call.RESERVE.value
        else:
            call = request.call.value
        self._requests += (
            call,
            request.reservation_id,
            # The script has no word for nothing inside of a row.
            False if request.micro_usd is None else request.micro_usd,
            False if request.tokens is None else request.tokens,
            lease_until,
            dispatched,
            place,
            further,
        )

    def _place(self, scopes: tuple[Scope, ...]) -> int:
        known = self._sets.get(scopes)
        return self._add_set(scopes) if known is None else known[0]

    def parameters(self, identity: str, bounds: Bounds) -> bytes:
        """Give the batch as the script reads it."""
        row = (identity, self.now, bounds.as_row(), self._scope_rows, self._texts, self._requests)
        return encode(row)

    def made(self, request: ReserveRequest) -> Reservation:
        """Give the reservation that the script made for a request of this batch."""
        return Reservation(
            id=request.reservation_id,
            charges=self._sets[request.scopes][1],
            micro_usd=request.micro_usd,
            tokens=request.tokens,
            lease_until=request.lease_until(self.now),
            state=ReservationState.DISPATCHED if request.dispatched else ReservationState.HELD,
            dispatched_at_once=request.dispatched,
        )

    def _add_set(self, scopes: tuple[Scope, ...]) -> int:
        charges = tuple([self._charge(scope) for scope in scopes])
        self._texts.append(_text(charges))
        # Lua counts from one.
        place = len(self._texts)
        self._sets[scopes] = (place, charges)
        return place

    def _charge(self, scope: Scope) -> Charge:
        charge = self._charges.get(scope)
        if charge is None:
            window = self._windows.get(scope, NO_WINDOW)
            tz = zone(window.zone)
            charge = Charge(scope=scope, bucket_start=bucket_start(window, self.now, tz))
            earliest = live_from(window, self.now, tz)
            self._scope_rows.append((scope, format_window(window), earliest))
            self._charges[scope] = charge
        return charge


def scopes_of(request: Request) -> tuple[Scope, ...]:
    """Give the scopes whose windows a request depends on."""
    match request:
        case ReserveRequest():
            return request.scopes
        case Claim():
            return tuple([charge.scope for charge in request.own])
        case AdjustRequest():
            return (request.scope,)
        case SettleRequest():
            return ()


def _text(charges: Sequence[Charge]) -> str:
    return "\n".join([f"{each.scope} {each.bucket_start}" for each in charges])


def _flexible_row(flexible: Flexible) -> tuple[object, ...]:
    return (
        flexible.micro_usd.value,
        flexible.tokens.value,
        flexible.most_micro_usd,
        flexible.most_tokens,
        flexible.kind,
        flexible.micro_usd_at_once,
        flexible.tokens_at_once,
        flexible.likely_micro_usd,
        flexible.likely_tokens,
    )


def decode_reply(packed: bytes) -> StepReply:
    """Read what a step of the script replied."""
    return _reply_decoder.decode(packed)


def reservation_from(reservation_id: str, known: Known) -> Reservation:
    """Give a kept reservation as the core knows it."""
    usd, tokens = known.actual_micro_usd, known.actual_tokens
    return Reservation(
        id=reservation_id,
        charges=_charges_from(known.charges),
        micro_usd=MicroUsd(known.micro_usd),
        tokens=Tokens(known.tokens),
        lease_until=known.lease_until,
        state=known.state,
        dispatched_at_once=known.dispatched_at_once,
        actual_micro_usd=None if usd is None else MicroUsd(usd),
        actual_tokens=None if tokens is None else Tokens(tokens),
        kind=known.kind,
    )


def illegal(request: Request, reply: Illegal, now: float) -> Exception:
    """Give the core's own error for a call that the script refused."""
    state = LedgerState(zone)
    reservation_id = request.reservation_id
    state.reservations[reservation_id] = reservation_from(reservation_id, reply)
    try:
        match request:
            case Claim():
                state.settle(request.request, now)
            case SettleRequest():
                state.settle(request, now)
            case AdjustRequest():
                state.adjust(request, now)
            case ReserveRequest():
                state.reserve(request, now)
    except ValueError as error:
        return error
    return LedgerUnavailableError("the script and this version disagree about a call; upgrade both")


def short(request: AdjustRequest, reply: Short) -> AdjustmentError:
    """Give the core's own error for an adjustment that the script did not make."""
    unit = tuple(Unit)[reply.unit - 1]
    return AdjustmentError(
        scope=request.scope,
        call=request.call.value,
        unit=unit.value,
        wanted=abs(request.amount(unit) or 0),
        there=reply.there,
    )


def claim_on(request: SettleRequest, tenant: Tenant, charges: str) -> Claim:
    """Give a commit of a tenant with the charges of its reservation, as they are kept."""
    own = tuple([one for one in _charges_from(charges) if tenant.may_charge(one.scope)])
    return Claim(request=request, own=own, is_bound=tenant.is_bound)


def kept_charges(packed: bytes) -> str:
    """Give the charges of a reservation as the script keeps it: its values, in a row."""
    # A byte makes an array of them; the two actual amounts are there once it is settled.
    for count in (8, 10):
        try:
            values = msgspec.msgpack.decode(bytes([0x90 + count]) + packed)
        except msgspec.DecodeError:
            continue
        return str(values[CHARGES_AT])
    raise LedgerUnavailableError("a reservation is kept in a form that this version does not know")


def refused(request: ReserveRequest, reply: NoRoom, now: float) -> Refused:
    """Give the core's own refusal, from the balances that the script saw."""
    limit = limit_from(KeptLimit(reply.window, reply.limit_micro_usd, reply.limit_tokens))
    account = Account(
        scope=Scope(reply.scope),
        limit=limit,
        balance=balance_from(reply.balance),
        oldest_bucket=reply.oldest_bucket,
        tz=zone(limit.window.zone),
    )
    answer = amounts_to_hold([account], request, now=now, live=reply.live)
    if not isinstance(answer, Refused):
        problem = "the script and this version disagree about a limit; upgrade both"
        raise LedgerUnavailableError(problem)
    return answer


def kept_limit(limit: Limit) -> tuple[object, ...] | None:
    """Give a limit as the script keeps it; None removes it."""
    usd, tokens = limit.limit_micro_usd, limit.limit_tokens
    if not limit.has_amount:
        return None
    window = format_window(limit.window)
    return (
        window,
        NO_LIMIT if usd is None else usd,
        NO_LIMIT if tokens is None else tokens,
        limit.is_by_tenant,
        limit.counted_since or 0.0,
    )


def limit_from(kept: KeptLimit) -> Limit:
    """Give a kept limit as the core knows it."""
    usd, tokens = kept.limit_micro_usd, kept.limit_tokens
    return Limit(
        limit_micro_usd=None if usd == NO_LIMIT else MicroUsd(usd),
        limit_tokens=None if tokens == NO_LIMIT else Tokens(tokens),
        window=parse_window(kept.window),
        is_by_tenant=kept.is_by_tenant,
        counted_since=kept.counted_since or None,
    )


def balance_from(columns: Sequence[int]) -> Balance:
    """Give a kept balance as the core knows it."""
    return Balance(
        spent_micro_usd=MicroUsd(columns[0]),
        reserved_micro_usd=MicroUsd(columns[1]),
        overrun_micro_usd=MicroUsd(columns[2]),
        spent_tokens=Tokens(columns[3]),
        reserved_tokens=Tokens(columns[4]),
        overrun_tokens=Tokens(columns[5]),
        unaccepted_micro_usd=MicroUsd(columns[6]),
        unaccepted_tokens=Tokens(columns[7]),
    )


def buckets_from(row: Sequence[int]) -> dict[int, Balance]:
    """Give the balances of a scope by bucket."""
    return {
        row[first]: balance_from(row[first + 1 : first + 1 + COLUMNS])
        for first in range(0, len(row), ROW_WIDTH)
    }


def rows_from(kept: Mapping[bytes, bytes]) -> dict[tuple[Scope, int], Balance]:
    """Give all balances of a hash by scope and bucket."""
    return {
        (Scope(scope.decode()), start): balance
        for scope, packed in kept.items()
        for start, balance in buckets_from(_row_decoder.decode(packed)).items()
    }


def entry_from(packed: bytes) -> JournalEntry:
    """Give a kept journal entry as the core knows it."""
    # The script keeps the values in a row; this byte makes an array of twelve of them.
    kept = _entry_decoder.decode(b"\x9c" + packed)
    return JournalEntry(
        at=kept.at,
        reservation_id=kept.reservation_id,
        call=CALLS[kept.call],
        charges=_charges_from(kept.charges),
        delta=Delta(
            spent_micro_usd=MicroUsd(kept.spent_micro_usd),
            reserved_micro_usd=MicroUsd(kept.reserved_micro_usd),
            overrun_micro_usd=MicroUsd(kept.overrun_micro_usd),
            spent_tokens=Tokens(kept.spent_tokens),
            reserved_tokens=Tokens(kept.reserved_tokens),
            overrun_tokens=Tokens(kept.overrun_tokens),
            unaccepted_micro_usd=MicroUsd(kept.unaccepted_micro_usd),
            unaccepted_tokens=Tokens(kept.unaccepted_tokens),
        ),
    )


def _charges_from(text: str) -> tuple[Charge, ...]:
    return _read_charges(text) if len(text) > MAX_REMEMBERED_LENGTH else _remembered(text)


@lru_cache(maxsize=4_096)
def _remembered(text: str) -> tuple[Charge, ...]:
    return _read_charges(text)


def _read_charges(text: str) -> tuple[Charge, ...]:
    pairs = [line.split(" ") for line in text.split("\n")]
    return tuple([Charge(scope=Scope(scope), bucket_start=int(start)) for scope, start in pairs])


def script_text() -> str:
    """Give the whole script: the rules of the core, then what applies them."""
    body = files(__package__).joinpath("budget.lua").read_text(encoding="utf-8")
    return f"{_rules_in_lua()}\n{body}"


def _rules_in_lua() -> str:
    rules = [
        (f"{state.value} {call.value}", RULES[state][call]) for state in RULES for call in Call
    ]
    tables = {
        "RULES": {key: rule.answer.name for key, rule in rules},
        "MOVES": {key: rule.to.value for key, rule in rules if rule.to is not None},
        "BOOKINGS": {key: rule.booking.name for key, rule in rules if rule.booking is not None},
    }
    numbers = {
        "PROBE_SHARE": PROBE_SHARE,
        "LEAST_SHARE": LEAST_SHARE,
        "GUARD_SHARE": GUARD_SHARE,
        "MOST_HELD": MAX_RESERVATION_MICRO_USD,
        "KEPT_BUCKETS": KEPT_BUCKETS,
        "MOST_BALANCE": MAX_BALANCE,
    }
    lines = [f"local {name} = {{{_fields(table)}}}" for name, table in tables.items()]
    return "\n".join([*lines, *(f"local {name} = {number}" for name, number in numbers.items())])


def _fields(table: Mapping[str, str]) -> str:
    return ", ".join(f"['{key}'] = '{value}'" for key, value in table.items())
