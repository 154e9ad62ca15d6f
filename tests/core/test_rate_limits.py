"""Rate limits: no stretch of time as long as the window ever has more than the limit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.rate_limits import RateCharge, RateLimit, RateTable

NOW = 1_767_225_600.0
REQUESTS = RateLimit(kind="target", name="t", unit="requests", most=2, window_seconds=60)
TOKENS = RateLimit(kind="slot", name="s", unit="tokens", most=100, window_seconds=3_600)


def test_limits_are_found_by_what_an_attempt_passes_through() -> None:
    book = RateTable([REQUESTS, TOKENS])
    assert book.limits_on(("target", "t"), ("slot", "s")) == [REQUESTS, TOKENS]
    assert book.limits_on(("agent_type", "t"), ("target", None), ("slot", "other")) == []
    assert RateTable([]).limits_on(("target", "t")) == []


@pytest.mark.parametrize(
    ("limit", "tokens", "counted"), [(REQUESTS, 70, 1), (TOKENS, 70, 70), (TOKENS, 0, 0)]
)
def test_an_attempt_counts_once_or_with_its_tokens(
    limit: RateLimit, tokens: int, counted: int
) -> None:
    (charge,) = RateTable([limit]).count([limit], tokens=tokens, now=NOW)
    assert (charge.limit_id, charge.amount) == (limit.id, counted)


def test_tokens_used_beyond_the_estimate_count_against_tokens_alone() -> None:
    book = RateTable([REQUESTS, TOKENS])
    book.count_more([REQUESTS, TOKENS], tokens=30, now=NOW)
    carried = book.count([], tokens=1, now=NOW)
    assert [(charge.limit_id, charge.amount) for charge in carried] == [(TOKENS.id, 30)]
    book.take_back(carried, own=0)
    assert book.count([], tokens=1, now=NOW) == carried


def test_a_reached_limit_says_when_there_is_room() -> None:
    book = RateTable([REQUESTS])
    for _ in range(2):
        assert book.reached([REQUESTS], tokens=1, now=NOW) is None
        book.count([REQUESTS], tokens=1, now=NOW)
    no_room = book.reached([REQUESTS], tokens=1, now=NOW)
    assert no_room is not None
    assert no_room.until == NOW + 61
    assert no_room.why == "2 requests in 60 seconds are reached"
    assert book.reached([REQUESTS], tokens=1, now=NOW + 61) is None


def test_what_is_larger_than_the_limit_never_has_room() -> None:
    no_room = RateTable([TOKENS]).reached([TOKENS], tokens=101, now=NOW)
    assert no_room is not None
    assert no_room.until is None


def test_an_attempt_that_never_began_is_taken_back() -> None:
    book = RateTable([REQUESTS])
    kept = book.count([REQUESTS], tokens=1, now=NOW)
    book.take_back(book.count([REQUESTS], tokens=1, now=NOW), own=1)
    assert book.reached([REQUESTS], tokens=1, now=NOW) is None
    book.count([REQUESTS], tokens=1, now=NOW)
    assert book.reached([REQUESTS], tokens=1, now=NOW) is not None
    assert kept[0].amount == 1


def test_counts_go_on_from_what_was_kept_and_forget_limits_that_are_gone() -> None:
    before = RateTable([REQUESTS])
    charges = [before.count([REQUESTS], tokens=1, now=NOW + step)[0] for step in range(2)]
    gone = RateCharge(limit_id="target:gone:requests:60", bucket=1, amount=9)
    after = RateTable([REQUESTS])
    after.load([*reversed(charges), gone])
    assert after.reached([REQUESTS], tokens=1, now=NOW + 2) == before.reached(
        [REQUESTS], tokens=1, now=NOW + 2
    )


STEPS = st.lists(st.tuples(st.floats(0, 90), st.integers(1, 60)), max_size=60)


@settings(deadline=None)
@given(STEPS, st.sampled_from([REQUESTS, TOKENS]))
def test_no_window_ever_holds_more_than_the_limit(
    steps: list[tuple[float, int]], limit: RateLimit
) -> None:
    book, now = RateTable([limit]), NOW
    counted: list[tuple[float, int]] = []
    for seconds, tokens in steps:
        now += seconds
        if book.reached([limit], tokens=tokens, now=now) is None:
            book.count([limit], tokens=tokens, now=now)
            counted.append((now, limit.amount(tokens)))
    for start, _ in counted:
        within = [amount for at, amount in counted if start <= at < start + limit.window_seconds]
        assert sum(within) <= limit.most


@settings(deadline=None)
@given(st.floats(0, 500), st.integers(1, 100))
def test_when_there_is_said_to_be_room_there_is(waited: float, tokens: int) -> None:
    book = RateTable([TOKENS])
    book.count([TOKENS], tokens=60, now=NOW)
    book.count([TOKENS], tokens=40, now=NOW + waited)
    no_room = book.reached([TOKENS], tokens=tokens, now=NOW + waited)
    assert no_room is not None
    assert no_room.until is not None
    assert book.reached([TOKENS], tokens=tokens, now=no_room.until) is None
