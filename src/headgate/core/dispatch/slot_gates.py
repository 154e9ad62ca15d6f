"""The slots as a desk knows them: which are held, and which providers have none that is open.

Rule: the gate of a provider follows from those of its slots, whatever closes them: a hold, a pause
that the provider asked for, a rate limit. So what may be planned for it can be given a slot.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from headgate.core.dispatch.closures import Closures
from headgate.core.dispatch.flights import Flights
from headgate.core.gates import GateClosure, GatePart
from headgate.core.key_slots.choice import most_headroom, provider_closure
from headgate.core.key_slots.slot import SlotStanding


class SlotGates:
    """The standings of all slots, and the gates of the providers that tasks name."""

    def __init__(self, closures: Closures, flights: Flights) -> None:
        self.standings: dict[str, SlotStanding] = {}
        self._closures = closures
        self._flights = flights
        self._by_provider: dict[str, list[SlotStanding]] = {}
        self._named: set[str] = set()

    def set(self, standings: Sequence[SlotStanding]) -> None:
        """Go by these standings, and no others; their order is that of the file."""
        self.standings = {standing.name: standing for standing in standings}
        self._by_provider = {}
        for standing in self.standings.values():
            self._by_provider.setdefault(standing.provider, []).append(standing)
        holds = {_part(one.name): one.hold for one in self.standings.values() if one.hold}
        self._closures.hold("slot", holds)
        for provider in sorted(self._named):
            self._look_at(provider)

    def know(self, provider: str) -> None:
        """Keep the gate of a provider from now on, because a task names it."""
        if provider not in self._named:
            self._named.add(provider)
            self._look_at(provider)

    def changed(self, slot: str) -> None:
        """Look again at the provider of a slot that was closed or opened."""
        standing = self.standings.get(slot)
        if standing is not None and standing.provider in self._named:
            self._look_at(standing.provider)

    def choose(self, provider: str, *, without: Collection[str]) -> str | None:
        """Return the open slot of a provider with the most headroom."""
        return most_headroom(
            self._by_provider.get(provider, ()),
            is_closed=lambda slot: self._closures.is_closed(_part(slot)),
            in_flight=self._flights.by_slot,
            without=without,
        )

    def _look_at(self, provider: str) -> None:
        standings = self._by_provider.get(provider, ())
        closure = provider_closure(provider, standings, self._closures_of)
        self._closures.stand(GatePart("provider", provider), closure)

    def _closures_of(self, slot: str) -> list[GateClosure]:
        return self._closures.of(_part(slot))


def _part(slot: str) -> GatePart:
    return GatePart("slot", slot)
