"""The size of a slice: what is in flight is held, and headroom is small beside what is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.budgets.escrow import HEADROOM_SHARE, NEAR_SHARE, Amounts, slice_size
from headgate.core.budgets.ledger import Account, Balance, Limit
from headgate.core.budgets.scopes import Scope
from headgate.core.budgets.windows import parse_window
from headgate.core.money import MicroUsd

NOW = 1_790_000_000.0


def account(*, limit: int | None, spent: int = 0, window: str = "none") -> Account:
    return Account(
        scope=Scope("project:p"),
        limit=Limit(
            limit_micro_usd=None if limit is None else MicroUsd(limit), window=parse_window(window)
        ),
        balance=Balance(spent_micro_usd=MicroUsd(spent)),
    )


@pytest.mark.parametrize(
    ("limit", "spent", "in_flight", "wanted", "held", "is_near"),
    [
        (None, 0, 10, 500, 510, False),
        (16_000, 0, 0, 500, 500, False),
        (16_000, 0, 0, 5_000, 1_000, False),
        (16_000, 8_000, 0, 5_000, 500, False),
        (16_000, 14_500, 0, 5_000, 0, True),
        (16_000, 14_500, 700, 5_000, 700, True),
        (16_000, 17_000, 700, 5_000, 700, True),
    ],
)
def test_a_slice_has_headroom_by_what_is_left(
    limit: int | None, spent: int, in_flight: int, wanted: int, held: int, *, is_near: bool
) -> None:
    size = slice_size(
        [account(limit=limit, spent=spent)],
        in_flight=Amounts(in_flight),
        wanted=Amounts(wanted),
        now=NOW,
    )
    assert (size.held, size.is_near) == (Amounts(held), is_near)


def test_a_slice_ends_with_the_window_of_a_limit() -> None:
    size = slice_size(
        [account(limit=100, window="day"), account(limit=None)],
        in_flight=Amounts(),
        wanted=Amounts(1),
        now=NOW,
    )
    assert size.until is not None
    assert NOW < size.until <= NOW + 86_400


amounts = st.integers(0, 10**9)


@pytest.mark.hypothesis
@given(
    st.lists(st.tuples(st.integers(1, 10**9), amounts), max_size=4),
    amounts,
    amounts,
)
def test_headroom_never_passes_a_limit_nor_takes_much_of_what_is_left(
    limits: list[tuple[int, int]], in_flight: int, wanted: int
) -> None:
    accounts = [account(limit=limit, spent=spent) for limit, spent in limits]
    size = slice_size(accounts, in_flight=Amounts(in_flight), wanted=Amounts(wanted), now=NOW)
    headroom = size.held.micro_usd - in_flight
    assert 0 <= headroom <= wanted
    for limit, spent in limits:
        room = limit - spent - in_flight
        assert headroom <= max(0, room) / HEADROOM_SHARE
        assert headroom == 0 or room * NEAR_SHARE >= limit
