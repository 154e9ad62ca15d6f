"""What `[webhooks] allow` may say: networks as CIDRs, and host names.

A network opens the addresses in it. A name opens what it resolves to, as long as that is an
address of a private network: a name is worth no more trust than its DNS, and nobody means to send
webhooks to a link-local address, where clouds keep their credentials.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import NamedTuple

from headgate.errors import InvalidFieldError

Network = IPv4Network | IPv6Network

MAX_ENTRIES = 256
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*")
_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)")
_TRANSLATED = tuple(
    map(
        IPv6Network,
        (
            "::/96",
            "::ffff:0:0/96",
            "::ffff:0:0:0/96",
            "64:ff9b::/96",
            "2002::/16",
            "2001::/32",
        ),
    )
)
_EXAMPLES = "write a network as 10.0.0.0/8 or a host name as hooks.internal"


class AllowList(NamedTuple):
    """The networks and the names that are open although they are private."""

    networks: tuple[Network, ...] = ()
    names: frozenset[str] = frozenset()

    def has_name(self, host: str) -> bool:
        """Tell whether a host is one of the names."""
        return host.lower().rstrip(".") in self.names


def parse_allow_list(entries: tuple[str, ...]) -> AllowList:
    """Read the entries of the setting; one that is neither is an `InvalidFieldError`."""
    if len(entries) > MAX_ENTRIES:
        raise InvalidFieldError("allow", f"has more than {MAX_ENTRIES} entries; leave some out")
    networks: list[Network] = []
    names: set[str] = set()
    for entry in entries:
        network = _network(entry)
        if network is not None:
            networks.append(network)
        else:
            names.add(_name(entry))
    return AllowList(tuple(networks), frozenset(names))


def ends_in_number(host: str) -> bool:
    """Tell whether the last part of a host is a number, as only that of an address may be."""
    last = host.lower().rstrip(".").rpartition(".")[2]
    return _NUMBER.fullmatch(last) is not None


def _network(entry: str) -> Network | None:
    try:
        network = ip_network("" if "%" in entry else entry)
    except ValueError:
        return None
    if isinstance(network, IPv6Network) and _is_translated(network):
        problem = f"{entry!r} carries IPv4 addresses; write the IPv4 network instead"
        raise InvalidFieldError("allow", problem)
    return network


def _is_translated(network: IPv6Network) -> bool:
    return not network.is_loopback and any(map(network.subnet_of, _TRANSLATED))


def _name(entry: str) -> str:
    name = entry.lower().rstrip(".")
    if _NAME.fullmatch(name) is None or ends_in_number(name):
        raise InvalidFieldError("allow", f"{entry[:60]!r} is neither; {_EXAMPLES}")
    return name
