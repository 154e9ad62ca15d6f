"""The guard: which addresses a webhook may reach, whoever named them.

A URL is judged twice. When it is named, by all that can be known without asking anybody: scheme,
user name, port, and an address that is written out. And when it is used, by every address that its
name then has. Rule: a connection goes to an address that was judged, never to a name, because a
second lookup may give another answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import quote, urlsplit

import msgspec
from ssrfguard import (
    DEFAULT_DENIED,
    AddressTable,
    Block,
    BlockedURLError,
    Policy,
    Reach,
    SSRFGuardError,
)
from ssrfguard import Target as CheckedUrl

from headgate.webhooks.allow_list import AllowList, ends_in_number

PRIVATE = (
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "fc00::/7",
    "::1/128",
)
"""What a name on the allow list may resolve to, beside public addresses."""

_ALL_PORTS = frozenset(range(1, 65_536))
# Addresses are judged apart from the shape of a URL, so that each is refused in its own words.
_EVERYWHERE = (ip_network("0.0.0.0/0"), ip_network("::/0"))
_SHAPE = Policy(allowed_ports=_ALL_PORTS, allowed_networks=_EVERYWHERE)
_UNASSIGNED = ("::/3", "4000::/2", "8000::/1")
# A cloud serves the machines that it runs from here, although the address looks public.
_WIRE_SERVER = "168.63.129.16/32"
_OWN_BLOCKS = (
    *(Block(ip_network(text), "not global", "RFC 4291", Reach.DENIED) for text in _UNASSIGNED),
    Block(ip_network(_WIRE_SERVER), "Azure wire server", "", Reach.DENIED),
)
# Without what is reachable inside a block that is not: a router's own services are there.
_DENIED = AddressTable(
    (
        *(block for block in DEFAULT_DENIED.blocks if block.reach is not Reach.PERMITTED),
        *_OWN_BLOCKS,
    )
)
# The middle of an ISATAP address, with and without the mark of an address that is unique.
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)
_WORD = 0xFFFF_FFFF
_MALFORMED = "must be an http or https address, without a user name and with a well-formed host"
_PATH_CHARACTERS = "/%:@!$&'()*+,;=-._~?"
_ALLOWED_BY = "webhooks.allow names private networks that may be reached"


class ForbiddenAddressError(Exception):
    """A webhook may not go there; the text says why, without the rest of the URL."""


class Destination(msgspec.Struct, frozen=True, kw_only=True):
    """A URL in the parts that a request is made of, each of them checked."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def authority(self) -> str:
        """The value of the `Host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        is_default = self.port == (443 if self.scheme == "https" else 80)
        return host if is_default else f"{host}:{self.port}"


class UrlGuard:
    """Judges URLs and addresses by one allow list."""

    def __init__(self, allowed: AllowList | None = None) -> None:
        self._allowed = allowed or AllowList()
        networks = tuple(self._allowed.networks)
        self._policy = Policy(denied_networks=_DENIED, allowed_networks=networks)
        self._named_policy = Policy(
            denied_networks=_DENIED,
            allowed_networks=(*networks, *map(ip_network, PRIVATE)),
        )

    def problem_with(self, url: str) -> str | None:
        """Say what is wrong with a URL, as far as that can be known without asking anybody."""
        try:
            self.destination(url)
        except ForbiddenAddressError as error:
            return str(error)
        return None

    def destination(self, url: str) -> Destination:
        """Take a URL apart, or raise `ForbiddenAddressError`."""
        try:
            checked = _SHAPE.check_url(url)
        except BlockedURLError:
            # The library's own words repeat parts of the URL, which may carry a secret.
            raise ForbiddenAddressError(_MALFORMED) from None
        if checked.is_literal_address:
            self.check_addresses(checked.host, (checked.host,))
        elif ends_in_number(checked.host):
            raise ForbiddenAddressError(_MALFORMED)
        return _taken_apart(url, checked)

    def check_addresses(self, host: str, addresses: Iterable[str]) -> None:
        """Refuse a host if any of its addresses may not be reached."""
        policy = self._named_policy if self._allowed.has_name(host) else self._policy
        for address in addresses:
            try:
                for judged in _all_meant(address):
                    policy.check_address(judged)
            except (SSRFGuardError, ValueError):
                problem = f"the address {address} may not be reached; {_ALLOWED_BY}"
                raise ForbiddenAddressError(problem) from None


def _all_meant(address: str) -> tuple[IPv4Address | IPv6Address, ...]:
    """Return an address, with the IPv4 address that a tunnel would take out of it.

    The table takes apart what it knows by its beginning; ISATAP may stand in any network.
    """
    parsed = ip_address(address)
    number = int(parsed)
    if parsed.version == 4 or (number >> 32) & _WORD not in _ISATAP:  # noqa: PLR2004
        return (parsed,)
    return (parsed, IPv4Address(number & _WORD))


def _taken_apart(url: str, checked: CheckedUrl) -> Destination:
    split = urlsplit(url)
    path = quote(split.path or "/", safe=_PATH_CHARACTERS)
    query = f"?{quote(split.query, safe=_PATH_CHARACTERS)}" if split.query else ""
    return Destination(
        scheme=checked.scheme,
        host=checked.host.rstrip("."),
        port=checked.port,
        target=path + query,
    )
