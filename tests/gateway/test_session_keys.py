"""Which key a session uses: the warm one, unless a window is lost that is worth more."""

from __future__ import annotations

import pytest

from headgate.core.dispatch_state import KeyChoice, KeyWait
from headgate.core.gates import GateClosure
from headgate.core.slots.slot import SlotStanding
from headgate.core.task import Task
from headgate.gateway.routing import CACHE_SECONDS, LONG_CACHE_SECONDS, SessionKeys

NOW = 1_000_000.0
DAY = 86_400.0


def standing(name: str, *, ends_in: float, percent: float = 20.0) -> SlotStanding:
    return SlotStanding(
        name=name, provider="anthropic", percent_used=percent, last_reset_at=NOW + ends_in
    )


def warm_session(
    *, cached: int = 100_000, fresh: int = 1_000, every: float = 10.0, ago: float = 0.0
) -> SessionKeys:
    """Return a session that has used the key `warm` for two turns, the last some seconds ago."""
    keys = SessionKeys()
    for at in (NOW - ago - every, NOW - ago):
        keys.used(
            "s",
            "warm",
            at,
            cached_tokens=cached,
            fresh_tokens=fresh,
            cache_seconds=CACHE_SECONDS["anthropic"],
        )
    keys.enter("c", "s")
    return keys


def chosen(keys: SessionKeys, *standings: SlotStanding) -> KeyChoice:
    choice = keys.choose(Task(id="c"), standings, {}, NOW)
    assert isinstance(choice, KeyChoice)
    return choice


WARM = standing("warm", ends_in=5 * DAY)


def test_a_warm_session_stays_beside_a_key_whose_window_ends_tomorrow() -> None:
    choice = chosen(warm_session(), WARM, standing("other", ends_in=DAY))
    assert choice.slot == "warm"
    assert "100,000 tokens are cached" in choice.rule


def test_it_moves_for_a_window_that_is_lost_otherwise() -> None:
    # A turn every ten seconds for half an hour spares 180 times 11,000 tokens of its key.
    choice = chosen(warm_session(), WARM, standing("lost", ends_in=1_800, percent=40.0))
    assert choice.slot == "lost"
    assert "30 min with 60% unused" in choice.rule
    assert "1,980,000 tokens of warm" in choice.rule


@pytest.mark.parametrize(
    ("keys", "other"),
    [
        (warm_session(every=250.0), standing("lost", ends_in=1_800)),
        (warm_session(), standing("lost", ends_in=60)),
        (warm_session(), standing("lost", ends_in=1_800, percent=95.0)),
        (warm_session(), standing("lost", ends_in=2 * 3_600)),
    ],
    ids=["few turns", "too late", "nearly used", "not soon"],
)
def test_it_stays_where_that_is_worth_more(keys: SessionKeys, other: SlotStanding) -> None:
    assert chosen(keys, WARM, other).slot == "warm"


def test_it_stays_where_its_own_window_ends_before() -> None:
    own = standing("warm", ends_in=600)
    assert chosen(warm_session(), own, standing("lost", ends_in=1_800)).slot == "warm"


def test_a_cold_session_goes_where_new_ones_go() -> None:
    keys = warm_session(ago=CACHE_SECONDS["anthropic"] + 1)
    choice = chosen(keys, WARM, standing("other", ends_in=DAY))
    assert choice.slot == "other"
    assert "soonest" in choice.rule


def test_what_was_written_for_an_hour_is_warm_for_an_hour() -> None:
    keys = SessionKeys()
    for at, seconds in (
        (NOW - 3_000, LONG_CACHE_SECONDS),
        (NOW - 2_000, CACHE_SECONDS["anthropic"]),
    ):
        keys.used("s", "warm", at, cached_tokens=9, fresh_tokens=1, cache_seconds=seconds)
    keys.enter("c", "s")
    assert chosen(keys, WARM, standing("other", ends_in=DAY)).slot == "warm"


def closed_until(until: float) -> GateClosure:
    return GateClosure(kind="slot", name="any", until=until, why="nothing left of its rate")


def test_a_key_that_is_paused_for_a_model_is_used_for_others() -> None:
    model = "large"
    keys = SessionKeys(lambda _call_id: model)
    one, two = standing("one", ends_in=DAY), standing("two", ends_in=2 * DAY)
    assert chosen(keys, one, two).slot == "one"
    keys.pause("one", "large", closed_until(NOW + 60))
    assert chosen(keys, one, two).slot == "two"
    keys.pause("two", "large", closed_until(NOW + 30))
    waits = keys.choose(Task(id="c"), (one, two), {}, NOW)
    assert waits == KeyWait(NOW + 30, "nothing left of its rate")
    assert keys.choose(Task(id="c"), (one, two), {}, NOW + 31) == KeyChoice(
        "two", "it is the only key that is open"
    )
    model = "small"
    assert chosen(keys, one, two).slot == "one"
