"""The guard: which addresses a webhook may reach, whoever named them.

A URL is judged twice. When it is named, by all that can be known without asking anybody: scheme,
user name, port, and an address that is written out. And when it is used, by every address that its
name then has. Rule: a connection goes to an address that was judged, never to a name, because a
second lookup may give another answer. And where clouds hand their machines credentials, no webhook
goes at all, whatever the allow list says.
"""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple
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

from headgate.errors import InvalidFieldError

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

METADATA = {
    "169.254.0.0/16": "link-local: nearly every cloud, containers, pod identities",
    "fe80::/10": "link-local: OpenStack",
    "168.63.129.16/32": "Azure wire server",
    "100.100.100.200/32": "Alibaba Cloud",
    "192.0.0.192/32": "Oracle Cloud",
    "fd00:ec2::/32": "AWS: instances, pod identities, DNS, time",
    "fd20:ce::/32": "Google Cloud",
    "fd00:c1::/32": "Oracle Cloud",
    "fd00:42::/32": "Scaleway",
    "fd00:100::100:200/128": "Alibaba Cloud",
    "fd00:a9fe:a9fe::/48": "Akamai, OpenStack",
}
"""Where clouds serve the machines that they run: no entry of the allow list opens any of it."""

METADATA_NAMES = frozenset(
    {
        "instance-data",
        "instance-data.ec2.internal",
        "metadata",
        "metadata.goog",
        "metadata.google.internal",
        "metadata.packet.net",
        "metadata.platformequinix.com",
        "metadata.tencentyun.com",
    }
)
"""Names by which clouds call it; they are refused before anybody is asked for their address."""

_METADATA_NETWORKS = tuple(map(ip_network, METADATA))
# Nobody can know the prefix by which a network of its own translates to IPv4 (RFC 6052), but the
# address is at the end nearly always. Whole ranges would refuse others that only look like it.
_METADATA_HOSTS = frozenset(
    int(IPv4Address(text))
    for text in (
        "168.63.129.16",
        "100.100.100.200",
        "192.0.0.192",
        "169.254.169.254",
        "169.254.169.249",
        "169.254.169.250",
        "169.254.170.2",
        "169.254.170.23",
        "169.254.42.42",
        "169.254.0.23",
        "169.254.10.10",
    )
)

_ALL_PORTS = frozenset(range(1, 65_536))
# Addresses are judged apart from the shape of a URL, so that each is refused in its own words.
_EVERYWHERE = (ip_network("0.0.0.0/0"), ip_network("::/0"))
_SHAPE = Policy(allowed_ports=_ALL_PORTS, allowed_networks=_EVERYWHERE)
_UNASSIGNED = ("::/3", "4000::/2", "8000::/1")
_OWN_BLOCKS = tuple(
    Block(ip_network(text), "not global", "RFC 4291", Reach.DENIED) for text in _UNASSIGNED
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
_CREDENTIALS = "clouds serve their machines there"
_NEVER = f"{_CREDENTIALS}, so webhooks.allow cannot open it"


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
        elif _is_metadata_name(checked.host):
            problem = f"the host {checked.host} may not be reached; {_NEVER}"
            raise ForbiddenAddressError(problem)
        return _taken_apart(url, checked)

    def check_addresses(self, host: str, addresses: Iterable[str]) -> None:
        """Refuse a host if any of its addresses may not be reached."""
        policy = self._named_policy if self._allowed.has_name(host) else self._policy
        for address in addresses:
            try:
                parsed = ip_address(address)
                carried = _carried(parsed) if isinstance(parsed, IPv6Address) else _Carried()
            except ValueError:
                raise _forbidden(address, _ALLOWED_BY) from None
            if _is_metadata(parsed, carried):
                raise _forbidden(address, _NEVER)
            try:
                for judged in (parsed, *carried.anywhere):
                    policy.check_address(judged)
            except SSRFGuardError:
                raise _forbidden(address, _ALLOWED_BY) from None


def _forbidden(address: str, why: str) -> ForbiddenAddressError:
    return ForbiddenAddressError(f"the address {address} may not be reached; {why}")


def _is_metadata(address: IPv4Address | IPv6Address, carried: _Carried) -> bool:
    if isinstance(address, IPv6Address) and int(address) & _WORD in _METADATA_HOSTS:
        return True
    meant = (address, *carried.by_prefix, *carried.anywhere)
    return any(one in network for one in meant for network in _METADATA_NETWORKS)


def _is_metadata_name(host: str) -> bool:
    return host.lower().rstrip(".") in METADATA_NAMES


class _Carried(NamedTuple):
    """The IPv4 addresses that a tunnel or a translator would take out of an IPv6 address.

    The table of the policy takes apart what it knows by its beginning; ISATAP may stand in any
    network, so what it carries is judged by the policy as well.
    """

    by_prefix: tuple[IPv4Address, ...] = ()
    anywhere: tuple[IPv4Address, ...] = ()


def _carried(address: IPv6Address) -> _Carried:
    number = int(address)
    last = IPv4Address(number & _WORD)
    found: list[IPv4Address] = []
    if any(address in network for network in _ENDING_IN_IPV4):
        found.append(last)
    if address in _LOCAL_NAT64:
        # By RFC 6052 the eight bits after the first 64 are left out.
        bits = (number >> 64) << 56 | number & ((1 << 56) - 1)
        found.extend(IPv4Address((bits >> shift) & _WORD) for shift in (40, 32, 24))
    if address.sixtofour is not None:
        found.append(address.sixtofour)
    if address.teredo is not None:
        found.extend(address.teredo)
    is_isatap = (number >> 32) & _WORD in _ISATAP
    return _Carried(tuple(found), (last,) if is_isatap else ())


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


# What `[webhooks] allow` may say: networks as CIDRs, and host names.
#
# A network opens the addresses in it. A name opens what it resolves to, as long as that is an
# address of a private network: a name is worth no more trust than its DNS. Neither opens what a
# cloud keeps for its machines, and an entry that could mean nothing else is refused.

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
_ENDING_IN_IPV4 = (*_TRANSLATED[:4], IPv6Network("64:ff9b:1::/48"))
_LOCAL_NAT64 = IPv6Network("64:ff9b:1::/48")
_LEAVE = "leave it out"
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
    if any(_is_inside(network, metadata) for metadata in _METADATA_NETWORKS):
        raise InvalidFieldError("allow", f"{entry!r} cannot be opened: {_CREDENTIALS}; {_LEAVE}")
    return network


def _is_inside(network: Network, other: Network) -> bool:
    if isinstance(network, IPv4Network):
        return isinstance(other, IPv4Network) and network.subnet_of(other)
    return isinstance(other, IPv6Network) and network.subnet_of(other)


def _is_translated(network: IPv6Network) -> bool:
    return not network.is_loopback and any(map(network.subnet_of, _TRANSLATED))


def _name(entry: str) -> str:
    name = entry.lower().rstrip(".")
    if _NAME.fullmatch(name) is None or ends_in_number(name):
        raise InvalidFieldError("allow", f"{entry[:60]!r} is neither; {_EXAMPLES}")
    if name in METADATA_NAMES:
        raise InvalidFieldError("allow", f"{entry!r} cannot be opened: {_CREDENTIALS}; {_LEAVE}")
    return name


# Looking up the addresses of a host, in threads of their own and a bounded number at a time.
#
# The system's resolver takes no time limit and cannot be stopped. A lookup that hangs keeps its
# thread, one of the few; it keeps nobody else who uses threads, nor the end of the
# process.

MAX_LOOKUPS = 16

Lookup = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host, in the order in which they are to be tried."""


class SystemLookup:
    """Asks the resolver of the system."""

    def __init__(self, *, most: int = MAX_LOOKUPS) -> None:
        self._free_threads = asyncio.Semaphore(most)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        """Return the addresses of a host; `OSError` if it has none."""
        if _is_address(host):
            return [host]
        await self._free_threads.acquire()
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Sequence[str]] = loop.create_future()
        found.add_done_callback(_retrieve)
        thread = threading.Thread(
            target=self._ask, args=(loop, found, host, port), name="headgate-lookup", daemon=True
        )
        thread.start()
        return await asyncio.shield(found)

    def _ask(
        self,
        loop: asyncio.AbstractEventLoop,
        found: asyncio.Future[Sequence[str]],
        host: str,
        port: int,
    ) -> None:
        addresses: Sequence[str] | OSError
        try:
            addresses = _addresses(host, port)
        except (OSError, UnicodeError) as error:
            addresses = OSError(str(error))
        # A loop that was closed has nobody left who waits.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._end, found, addresses)

    def _end(
        self, found: asyncio.Future[Sequence[str]], addresses: Sequence[str] | OSError
    ) -> None:
        self._free_threads.release()
        if found.done():
            return
        if isinstance(addresses, OSError):
            found.set_exception(addresses)
        else:
            found.set_result(addresses)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _retrieve(found: asyncio.Future[Sequence[str]]) -> None:
    """Mark an error as seen: whoever asked may have stopped waiting."""
    if not found.cancelled():
        found.exception()


def _addresses(host: str, port: int) -> Sequence[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # A scope such as fe80::1%eth0 is no part of the address that is judged.
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))
