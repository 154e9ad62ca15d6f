"""The places of one sender, and which message gets the next one.

Rule: a host has to earn its places. One that nobody here has heard of gets a single place, and each
try that is answered doubles that, up to a share of all; one without an answer puts the host back to
a single place. Hosts that take long share some places among them, and some are kept for hosts that
are known to be quick: whoever hangs, or invents hosts, waits beside them and not in front of them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable
from functools import lru_cache
from ipaddress import ip_address
from typing import NamedTuple

from headgate.deliveries import Candidate, Choice

HOSTS_AT_LEAST = 4
"""Among how many hosts the places are shared, however much there is to send to one of them."""

SLOW_SECONDS = 2.0
"""A try that takes longer is slow, whatever came of it."""

SITE_LABELS = 2
MAX_REMEMBERED = 2_000


class Pace(NamedTuple):
    """How long one try took, and whether the host said anything."""

    seconds: float
    has_answered: bool


class WebhookPlaces:
    """Counts what is under way to each host, and remembers who was quick."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._per_host = max(1, total // HOSTS_AT_LEAST)
        self._per_site = max(1, total // 2)
        self._for_slow = max(1, total // HOSTS_AT_LEAST)
        self._for_unproven = max(1, total - total // HOSTS_AT_LEAST)
        self._by_host: Counter[str] = Counter()
        self._quick: OrderedDict[str, int] = OrderedDict()
        self._slow: OrderedDict[str, int] = OrderedDict()

    @property
    def free(self) -> int:
        """How many more may be under way."""
        return self._total - self._by_host.total()

    def open_to(self) -> Choice:
        """Return for whom there is a place at all."""
        full = [host for host, count in self._by_host.items() if count >= self._allowance(host)]
        sites = [site for site, count in self._sites().items() if count >= self._per_site]
        if self._unproven() >= self._for_unproven:
            proven = [host for host in self._quick if host not in full]
            return Choice(only_hosts=tuple(proven), busy_sites=tuple(sites))
        slow = self._slow if self._under_way(self._slow) >= self._for_slow else ()
        return Choice(busy_hosts=tuple({*full, *slow}), busy_sites=tuple(sites))

    def choose(self, found: Iterable[Candidate], under_way: Container[str]) -> list[str]:
        """Return who gets a place: hosts with the least under way first, then by age."""
        kept, chosen = self._by_host, list[str]()
        self._by_host = kept.copy()
        for candidate in _in_turns(found, kept):
            if candidate.id not in under_way and self.has_place(candidate.host):
                self.begin(candidate.host)
                chosen.append(candidate.id)
        # A place is taken when the message is claimed.
        self._by_host = kept
        return chosen

    def has_place(self, host: str) -> bool:
        """Tell whether one more may go to a host now."""
        if self.free <= 0 or self._by_host[host] >= self._allowance(host):
            return False
        if self._sites()[_site(host)] >= self._per_site:
            return False
        if host in self._quick:
            return True
        if host in self._slow and self._under_way(self._slow) >= self._for_slow:
            return False
        return self._unproven() < self._for_unproven

    def begin(self, host: str) -> None:
        """Take a place."""
        self._by_host[host] += 1

    def end(self, host: str, pace: Pace | None) -> None:
        """Give a place back, and remember how the host did; None says nothing of it."""
        self._by_host[host] -= 1
        if not self._by_host[host]:
            del self._by_host[host]
        if pace is None:
            return
        is_slow = pace.seconds > SLOW_SECONDS
        # A refusal that comes at once holds nobody up, with an answer or without.
        has_earned = pace.has_answered or not is_slow
        earned = min(self._per_host, 2 * self._allowance(host)) if has_earned else 1
        here, there = (self._slow, self._quick) if is_slow else (self._quick, self._slow)
        there.pop(host, None)
        _remember(here, host, earned)

    def _allowance(self, host: str) -> int:
        return self._quick.get(host) or self._slow.get(host, 1)

    def _unproven(self) -> int:
        return self._by_host.total() - self._under_way(self._quick)

    def _under_way(self, hosts: Container[str]) -> int:
        return sum(count for host, count in self._by_host.items() if host in hosts)

    def _sites(self) -> Counter[str]:
        sites: Counter[str] = Counter()
        for host, count in self._by_host.items():
            sites[_site(host)] += count
        return sites


def _in_turns(found: Iterable[Candidate], under_way: Counter[str]) -> list[Candidate]:
    """Order candidates so that each host has one before any has two; who has some comes later."""
    turns = under_way.copy()
    ordered = []
    for candidate in found:
        turns[candidate.host] += 1
        ordered.append((turns[candidate.host], candidate))
    return [candidate for _, candidate in sorted(ordered, key=_turn)]


def _turn(ordered: tuple[int, Candidate]) -> int:
    return ordered[0]


def _remember(hosts: OrderedDict[str, int], host: str, places: int) -> None:
    hosts[host] = places
    hosts.move_to_end(host)
    if len(hosts) > MAX_REMEMBERED:
        hosts.popitem(last=False)


@lru_cache(maxsize=MAX_REMEMBERED)
def _site(host: str) -> str:
    """Return the end of a name, below which hosts cost nothing to make; an address is its own."""
    try:
        ip_address(host)
    except ValueError:
        return ".".join(host.split(".")[-SITE_LABELS:])
    return host
