"""The reservation: money held before work starts, and every answer to every call on it.

`RULES` has a rule for each state and each call: a move, a repeat (the same answer again, nothing
changes) or a refusal. So a retried, late or doubled call has a defined answer on every backend.

A reservation weighs on its scopes according to its state, and a move books the difference between
the weight before and the weight after. Rule: nothing else changes a balance. So whatever the order
of calls, a scope's balance is the sum of what its reservations weigh, and nothing can leak.

Time acts through `expire` alone. Until it has run, a late call is still in time: its money is still
held, so letting it through is safe, and the answer depends on the ledger and not on a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import msgspec

from headgate.core.budgets.scopes import Scope
from headgate.core.enums import FastEnum
from headgate.core.money import Columns, MicroUsd, Tokens
from headgate.errors import IllegalSettlementError


class ReservationState(FastEnum):
    """Where a reservation is between being held and being settled."""

    HELD = "held"
    DISPATCHED = "dispatched"
    COMMITTED = "committed"
    RELEASED = "released"
    EXPIRED = "expired"
    ASSUMED = "assumed"


LIVE = frozenset({ReservationState.HELD, ReservationState.DISPATCHED})

NO_LEASE_END = 253_402_300_800.0
"""The year 10000: the `lease_until` of a reservation that only its holder ends, never time."""


class Call(FastEnum):
    """What can be asked of a reservation; `expire` is asked by time."""

    RESERVE = "reserve"
    DISPATCHED = "dispatched"
    EXTEND = "extend"
    COMMIT = "commit"
    RELEASE = "release"
    EXPIRE = "expire"


class Answer(Enum):
    """The kinds of answer that a rule can give."""

    MOVE = "moves"
    STAY = "the lease is renewed"
    REPEAT = "answered as before"
    REPEAT_IF_SAME = "answered as before; refused if the parameters differ"
    REFUSE = "refused"


class Booking(FastEnum):
    """What a reservation weighs on each of its scopes, in dollars and in tokens alike."""

    NOTHING = "nothing"
    RESERVED = "reserved: the amount"
    ASSUMED = "spent: the reserved amount"
    ACTUAL = "spent: the actual cost, up to the reserved amount; overrun: the rest"
    UNHELD = "overrun: the whole actual cost"


class Charge(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One balance that a reservation weighs on: a scope, and the bucket it was reserved in."""

    scope: Scope
    bucket_start: int


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts held in several balances at once, under an id that the caller made.

    `lease_until` is in Unix seconds. The actual amounts are set by commit. A `kind` is that of work
    of which too little is known for many at once.
    """

    id: str
    charges: tuple[Charge, ...]
    micro_usd: MicroUsd
    tokens: Tokens
    lease_until: float
    state: ReservationState = ReservationState.HELD
    dispatched_at_once: bool = False
    actual_micro_usd: MicroUsd | None = None
    actual_tokens: Tokens | None = None
    kind: str = ""

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """The scopes that are charged, in the order in which they are locked."""
        return tuple(charge.scope for charge in self.charges)


class Delta(Columns, frozen=True, kw_only=True, omit_defaults=True):
    """What one call adds to each balance of a reservation; amounts may be negative."""

    @property
    def negated(self) -> Delta:
        """What takes the same away."""
        return _delta(**{name: -amount for name, amount in msgspec.structs.asdict(self).items()})


NO_CHANGE = Delta()
_delta: Callable[..., Delta] = Delta  # without a call for the unit of each amount


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a call: the reservation as it is now, and the delta for each of its charges.

    A repeat has nothing to write: neither the reservation nor any balance changed.
    """

    reservation: Reservation
    delta: Delta = NO_CHANGE
    is_repeat: bool = False


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one call in one state; a move names the state and the weight after it."""

    answer: Answer
    to: ReservationState | None = None
    booking: Booking | None = None
    why: str = ""


def _move(to: ReservationState, booking: Booking) -> Rule:
    return Rule(answer=Answer.MOVE, to=to, booking=booking)


def _stay(state: ReservationState) -> Rule:
    return Rule(answer=Answer.STAY, to=state, booking=Booking.RESERVED)


def _refuse(why: str) -> Rule:
    return Rule(answer=Answer.REFUSE, why=why)


_REPEAT = Rule(answer=Answer.REPEAT)
_REPEAT_IF_SAME = Rule(
    answer=Answer.REPEAT_IF_SAME, why="its id was used with other parameters, use a new id"
)
_LEASE_ENDED = _refuse("its lease ended, do not call the provider, reserve again under a new id")
_OVER = _refuse("it is settled, reserve again under a new id")

RULES: dict[ReservationState, dict[Call, Rule]] = {
    ReservationState.HELD: {
        Call.RESERVE: _REPEAT_IF_SAME,
        Call.DISPATCHED: _move(ReservationState.DISPATCHED, Booking.RESERVED),
        Call.EXTEND: _stay(ReservationState.HELD),
        Call.COMMIT: _move(ReservationState.COMMITTED, Booking.ACTUAL),
        Call.RELEASE: _move(ReservationState.RELEASED, Booking.NOTHING),
        Call.EXPIRE: _move(ReservationState.EXPIRED, Booking.NOTHING),
    },
    ReservationState.DISPATCHED: {
        Call.RESERVE: _REPEAT_IF_SAME,
        Call.DISPATCHED: _REPEAT,
        Call.EXTEND: _stay(ReservationState.DISPATCHED),
        Call.COMMIT: _move(ReservationState.COMMITTED, Booking.ACTUAL),
        Call.RELEASE: _move(ReservationState.RELEASED, Booking.NOTHING),
        Call.EXPIRE: _move(ReservationState.ASSUMED, Booking.ASSUMED),
    },
    ReservationState.COMMITTED: {
        Call.RESERVE: _REPEAT_IF_SAME,
        Call.DISPATCHED: _OVER,
        Call.EXTEND: _OVER,
        Call.COMMIT: Rule(
            answer=Answer.REPEAT_IF_SAME, why="book a further cost under a new reservation"
        ),
        Call.RELEASE: _refuse("its cost is booked"),
        Call.EXPIRE: _REPEAT,
    },
    ReservationState.RELEASED: {
        Call.RESERVE: _REPEAT_IF_SAME,
        Call.DISPATCHED: _OVER,
        Call.EXTEND: _OVER,
        Call.COMMIT: _refuse("its caller gave the money back, book the cost under a new id"),
        Call.RELEASE: _REPEAT,
        Call.EXPIRE: _REPEAT,
    },
    ReservationState.EXPIRED: {
        Call.RESERVE: _REPEAT_IF_SAME,
        Call.DISPATCHED: _LEASE_ENDED,
        Call.EXTEND: _LEASE_ENDED,
        Call.COMMIT: _move(ReservationState.COMMITTED, Booking.UNHELD),
        Call.RELEASE: _REPEAT,
        Call.EXPIRE: _REPEAT,
    },
    ReservationState.ASSUMED: {
        Call.RESERVE: _REPEAT_IF_SAME,
        Call.DISPATCHED: _LEASE_ENDED,
        Call.EXTEND: _refuse("its lease ended and it is booked in full, commit the actual"),
        Call.COMMIT: _move(ReservationState.COMMITTED, Booking.ACTUAL),
        Call.RELEASE: _move(ReservationState.RELEASED, Booking.NOTHING),
        Call.EXPIRE: _REPEAT,
    },
}

# An id that the ledger does not have. Reserve may also ask to be dispatched at once.
UNKNOWN_RULES: dict[Call, Rule] = {
    **dict.fromkeys(Call, _refuse("it was never made, or was settled long ago; reserve first")),
    Call.RESERVE: _move(ReservationState.HELD, Booking.RESERVED),
}

# What a move takes away. No rule moves out of committed or released.
_STATE_BOOKING: dict[ReservationState, Booking] = {
    ReservationState.HELD: Booking.RESERVED,
    ReservationState.DISPATCHED: Booking.RESERVED,
    ReservationState.EXPIRED: Booking.NOTHING,
    ReservationState.ASSUMED: Booking.ASSUMED,
}

_WANTED: dict[Call, str] = {
    Call.RESERVE: "reserved with other parameters",
    Call.DISPATCHED: "dispatched",
    Call.EXTEND: "extended",
    Call.COMMIT: "committed",
    Call.RELEASE: "released",
    Call.EXPIRE: "expired",
}


def reserve(
    *,
    reservation_id: str,
    charges: tuple[Charge, ...],
    micro_usd: MicroUsd,
    tokens: Tokens,
    lease_until: float,
    dispatched: bool = False,
    kind: str = "",
) -> Settlement:
    """Make a reservation under an id that is not known yet; it must have been admitted."""
    reservation = Reservation(
        id=reservation_id,
        charges=charges,
        micro_usd=micro_usd,
        tokens=tokens,
        lease_until=lease_until,
        state=ReservationState.DISPATCHED if dispatched else ReservationState.HELD,
        dispatched_at_once=dispatched,
        kind=kind,
    )
    delta = Delta(reserved_micro_usd=micro_usd, reserved_tokens=tokens)
    return Settlement(reservation=reservation, delta=delta)


def reserve_again(
    reservation: Reservation,
    *,
    scopes: tuple[Scope, ...],
    micro_usd: MicroUsd,
    tokens: Tokens,
    dispatched: bool = False,
) -> Settlement:
    """Answer a reserve whose id is known: the same reservation, if it asks for the same.

    The buckets are not compared, since the window may have moved on between the two tries; nor is
    the lease, which no balance depends on. `dispatched` is: a caller that believes its reservation
    dispatched while it is only held would see its money given back after the provider was paid.
    """
    asked = (scopes, micro_usd, tokens, dispatched)
    kept = (
        reservation.scopes,
        reservation.micro_usd,
        reservation.tokens,
        reservation.dispatched_at_once,
    )
    return _settle(reservation, Call.RESERVE, is_same=asked == kept)


def mark_dispatched(reservation: Reservation) -> Settlement:
    """Note that the provider is about to be called: from here on the end of the lease costs."""
    return _settle(reservation, Call.DISPATCHED)


def extend(reservation: Reservation, *, lease_until: float) -> Settlement:
    """Renew the lease; an extension that arrives late never shortens it."""
    settlement = _settle(reservation, Call.EXTEND)
    longest = max(reservation.lease_until, lease_until)
    return Settlement(
        reservation=msgspec.structs.replace(settlement.reservation, lease_until=longest)
    )


def commit(reservation: Reservation, *, micro_usd: MicroUsd, tokens: Tokens) -> Settlement:
    """Book the actual cost in place of what was held; nothing of it is clamped away."""
    kept = (reservation.actual_micro_usd, reservation.actual_tokens)
    return _settle(
        reservation,
        Call.COMMIT,
        is_same=kept == (micro_usd, tokens),
        actual_micro_usd=micro_usd,
        actual_tokens=tokens,
    )


def release(reservation: Reservation) -> Settlement:
    """Give the money back: the caller knows that nothing was charged."""
    return _settle(reservation, Call.RELEASE)


def expire(reservation: Reservation, *, now: float) -> Settlement:
    """End the lease if its time has come: a held one is given back, a dispatched one is spent."""
    if now < reservation.lease_until:
        return Settlement(reservation=reservation, is_repeat=True)
    return _settle(reservation, Call.EXPIRE)


def weight_of(reservation: Reservation) -> Delta:
    """Return what a live reservation weighs on each of its charges."""
    return Delta(reserved_micro_usd=reservation.micro_usd, reserved_tokens=reservation.tokens)


def unknown_reservation(reservation_id: str, call: Call) -> IllegalSettlementError:
    """Give the refusal of any call but reserve on an id that the ledger does not have."""
    return _refusal(reservation_id, "unknown", UNKNOWN_RULES, call)


def rules_table_markdown() -> str:
    """Draw the rules as a Markdown table; the documentation shows this text."""
    lines = [
        "| state | call | answer | what then counts against limits, or why the call is refused |",
        "| --- | --- | --- | --- |",
    ]
    lines += [_row("unknown id", call, UNKNOWN_RULES[call]) for call in Call]
    for state, rules in RULES.items():
        lines += [_row(f"`{state.value}`", call, rules[call]) for call in Call]
    return "\n".join(lines)


def _settle(
    reservation: Reservation,
    call: Call,
    *,
    is_same: bool = True,
    actual_micro_usd: MicroUsd | None = None,
    actual_tokens: Tokens | None = None,
) -> Settlement:
    rules = RULES[reservation.state]
    rule = rules[call]
    if rule.to is not None and rule.booking is not None:
        after = msgspec.structs.replace(
            reservation,
            state=rule.to,
            actual_micro_usd=actual_micro_usd,
            actual_tokens=actual_tokens,
        )
        delta = _difference(after, _STATE_BOOKING[reservation.state], rule.booking)
        return Settlement(reservation=after, delta=delta)
    if rule.answer is Answer.REFUSE or not is_same:
        raise _refusal(reservation.id, reservation.state.value, rules, call)
    return Settlement(reservation=reservation, is_repeat=True)


def _refusal(
    reservation_id: str, current: str, rules: dict[Call, Rule], call: Call
) -> IllegalSettlementError:
    wanted = _WANTED[call]
    if call is Call.COMMIT and rules[call].answer is Answer.REPEAT_IF_SAME:
        wanted = "committed with another amount"
    targets = dict.fromkeys(rule.to.value for rule in rules.values() if rule.to is not None)
    return IllegalSettlementError(
        subject=f"reservation {reservation_id}",
        current=current,
        wanted=wanted,
        allowed=tuple(target for target in targets if target != current),
        advice=rules[call].why,
    )


# Spent, reserved and overrun of one column, from what was held and what it came to.
_WEIGHTS: dict[Booking, Callable[[int, int], tuple[int, int, int]]] = {
    Booking.NOTHING: lambda _held, _actual: (0, 0, 0),
    Booking.RESERVED: lambda held, _actual: (0, held, 0),
    Booking.ASSUMED: lambda held, _actual: (held, 0, 0),
    Booking.ACTUAL: lambda held, actual: (min(actual, held), 0, max(0, actual - held)),
    Booking.UNHELD: lambda _held, actual: (0, 0, actual),
}


def _difference(reservation: Reservation, before: Booking, after: Booking) -> Delta:
    if before is after:
        return NO_CHANGE
    usd = _column(before, after, reservation.micro_usd, reservation.actual_micro_usd or 0)
    tokens = _column(before, after, reservation.tokens, reservation.actual_tokens or 0)
    return _delta(
        spent_micro_usd=usd[0],
        reserved_micro_usd=usd[1],
        overrun_micro_usd=usd[2],
        spent_tokens=tokens[0],
        reserved_tokens=tokens[1],
        overrun_tokens=tokens[2],
    )


def _column(before: Booking, after: Booking, held: int, actual: int) -> tuple[int, int, int]:
    was, becomes = _WEIGHTS[before](held, actual), _WEIGHTS[after](held, actual)
    return becomes[0] - was[0], becomes[1] - was[1], becomes[2] - was[2]


def _row(state: str, call: Call, rule: Rule) -> str:
    target = f" to `{rule.to.value}`" if rule.to and rule.answer is Answer.MOVE else ""
    note = rule.booking.value if rule.booking is not None else rule.why
    return f"| {state} | `{call.value}` | {rule.answer.value}{target} | {note} |"
