"""Which slot a task gets that names only the provider, and what it waits for when there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.gates import GateClosure
from headgate.core.slots.slot import MAX_NAMED, SlotStanding, most_headroom, provider_closure


def slot(name: str, percent: float | None = None) -> SlotStanding:
    return SlotStanding(name=name, provider="zai", percent_used=percent)


def closed(name: str, until: float | None = None, why: str = "exhausted") -> GateClosure:
    return GateClosure(kind="slot", name=name, until=until, why=why)


CHOICES: list[tuple[str, Sequence[SlotStanding], set[str], Mapping[str, int], str | None]] = [
    ("no slot at all", [], set(), {}, None),
    ("the only one", [slot("a")], set(), {}, "a"),
    ("the lowest percentage", [slot("a", 50), slot("b", 20)], set(), {}, "b"),
    ("nothing used before something", [slot("a", 1), slot("b", 0)], set(), {}, "b"),
    ("known before unknown", [slot("a"), slot("b", 99)], set(), {}, "b"),
    ("unknown rather than closed", [slot("a"), slot("b", 5)], {"b"}, {}, "a"),
    ("fewest in flight", [slot("a", 5), slot("b", 5)], set(), {"a": 2, "b": 1}, "b"),
    ("percent before in_flight", [slot("a", 5), slot("b", 6)], set(), {"a": 9}, "a"),
    ("the order of the file", [slot("b", 5), slot("a", 5)], set(), {}, "b"),
    ("all closed", [slot("a", 5), slot("b", 6)], {"a", "b"}, {}, None),
]


@pytest.mark.parametrize(("case", "standings", "shut", "in_flight", "chosen"), CHOICES)
def test_the_slot_with_the_most_headroom_is_chosen(
    case: str,
    standings: Sequence[SlotStanding],
    shut: set[str],
    in_flight: Mapping[str, int],
    chosen: str | None,
) -> None:
    found = most_headroom(standings, is_closed=shut.__contains__, in_flight=in_flight)
    assert found == chosen, case


NAMES = st.sampled_from("abcdef")
STANDINGS = st.lists(
    st.builds(slot, NAMES, st.none() | st.floats(0, 120)), unique_by=lambda one: one.name
)


@settings(deadline=None)
@given(STANDINGS, st.sets(NAMES), st.sets(NAMES), st.dictionaries(NAMES, st.integers(0, 3)))
def test_what_is_chosen_is_open_and_nothing_open_has_more_headroom(
    standings: list[SlotStanding], shut: set[str], without: set[str], in_flight: dict[str, int]
) -> None:
    found = most_headroom(
        standings, is_closed=shut.__contains__, in_flight=in_flight, without=without
    )
    free = {one.name: one for one in standings if one.name not in shut | without}
    assert (found is None) == (not free)
    if found is not None:
        own = free[found].percent_used
        known = [one.percent_used for one in free.values() if one.percent_used is not None]
        assert own == min(known, default=None)


CLOSURES: list[tuple[str, dict[str, list[GateClosure]], float | str | None]] = [
    ("one is open", {"a": [closed("a", 10)], "b": []}, "open"),
    ("the earliest counts", {"a": [closed("a", 20)], "b": [closed("b", 10)]}, 10),
    ("one does not say", {"a": [closed("a", 20)], "b": [closed("b")]}, 20),
    ("nobody says", {"a": [closed("a")], "b": [closed("b")]}, None),
    ("both of one slot must end", {"a": [closed("a", 20), closed("a", 30)]}, 30),
    ("a time beside none", {"a": [closed("a"), closed("a", 30)]}, None),
]


@pytest.mark.parametrize(("case", "closures", "until"), CLOSURES)
def test_a_provider_is_closed_while_all_of_its_slots_are(
    case: str, closures: dict[str, list[GateClosure]], until: float | str | None
) -> None:
    closure = provider_closure("zai", [slot(name) for name in closures], closures.__getitem__)
    if until == "open":
        assert closure is None, case
        return
    assert closure is not None
    assert (closure.kind, closure.name, closure.until) == ("provider", "zai", until), case


def test_the_reason_of_a_provider_names_each_slot_with_its_own() -> None:
    closures = {"a": [closed("a", why="exhausted, 100% used")], "b": [closed("b", why="")]}
    closure = provider_closure("zai", [slot("a"), slot("b")], closures.__getitem__)
    assert closure is not None
    assert closure.why == "none of its slots is open: a (exhausted, 100% used), b (closed)"


def test_a_reason_does_not_grow_with_the_number_of_slots() -> None:
    names = [f"s{number}" for number in range(1_000)]
    closure = provider_closure("zai", [slot(name) for name in names], lambda name: [closed(name)])
    assert closure is not None
    assert closure.why.count("exhausted") == MAX_NAMED
    assert closure.why.endswith(f" and {1_000 - MAX_NAMED} more")


def test_a_provider_without_slots_says_what_to_do() -> None:
    closure = provider_closure("zai", [], lambda _name: [])
    assert closure is not None
    assert closure.until is None
    assert "no slot of zai is configured; add one" in closure.why
