"""The guard: what may be reached, what may not, and what an allow list changes."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import InvalidFieldError
from headgate.webhooks.guard import AllowList, ForbiddenAddressError, UrlGuard, parse_allow_list
from webhooks.battery import FINE, WRITTEN_OUT

GUARD = UrlGuard()


@pytest.mark.parametrize("url", WRITTEN_OUT.values(), ids=WRITTEN_OUT)
def test_what_is_written_out_is_refused_before_anybody_is_asked(url: str) -> None:
    problem = GUARD.problem_with(url)
    assert problem is not None
    assert "password" not in problem
    assert "credentials" not in problem


@pytest.mark.parametrize("url", FINE)
def test_public_addresses_are_fine(url: str) -> None:
    assert GUARD.problem_with(url) is None


def test_a_refused_address_is_named_with_what_would_open_it() -> None:
    problem = GUARD.problem_with("http://10.1.2.3:80/secret?key=1")
    assert problem is not None
    assert problem.startswith("the address 10.1.2.3 may not be reached; webhooks.allow")
    assert "key" not in problem


@pytest.mark.parametrize(
    ("url", "host", "port", "target", "authority"),
    [
        ("https://example.com", "example.com", 443, "/", "example.com"),
        ("http://EXAMPLE.com.:8080/a?b", "example.com", 8080, "/a?b", "example.com:8080"),
        ("https://h.example/a b#c", None, 0, "", ""),
        ("https://h.example/é?q=ü#c", "h.example", 443, "/%C3%A9?q=%C3%BC", "h.example"),
        ("http://[2606:4700::1]:81/", "2606:4700::1", 81, "/", "[2606:4700::1]:81"),
    ],
)
def test_a_url_is_taken_apart_once(
    url: str, host: str | None, port: int, target: str, authority: str
) -> None:
    if host is None:
        assert GUARD.problem_with(url) is not None
        return
    found = GUARD.destination(url)
    assert (found.host, found.port, found.target, found.authority) == (
        host,
        port,
        target,
        authority,
    )


def test_a_network_on_the_allow_list_is_open_and_its_neighbours_are_not() -> None:
    guard = UrlGuard(parse_allow_list(("10.0.0.0/8", "fd00:1::/32")))
    assert guard.problem_with("http://10.255.0.1/") is None
    assert guard.problem_with("http://[fd00:1::5]/") is None
    assert guard.problem_with("http://11.0.0.1/") is None
    assert guard.problem_with("http://172.16.0.1/") is not None
    assert guard.problem_with("http://[fd00:2::5]/") is not None


def test_a_name_on_the_allow_list_opens_private_addresses_and_no_other() -> None:
    guard = UrlGuard(parse_allow_list(("hooks.internal",)))
    for address in ("10.0.0.9", "127.0.0.1", "192.168.3.4", "fd12::1", "93.184.216.34"):
        guard.check_addresses("hooks.internal", (address,))
        guard.check_addresses("HOOKS.internal.", (address,))
    for address in ("169.254.169.254", "0.0.0.0", "224.0.0.1", "::ffff:169.254.169.254"):
        with pytest.raises(ForbiddenAddressError):
            guard.check_addresses("hooks.internal", (address,))
    with pytest.raises(ForbiddenAddressError):
        guard.check_addresses("evil.hooks.internal", ("10.0.0.9",))


def test_one_bad_address_among_good_ones_refuses_the_host() -> None:
    with pytest.raises(ForbiddenAddressError, match=r"127\.0\.0\.1"):
        GUARD.check_addresses("example.com", ("93.184.216.34", "127.0.0.1"))


@given(st.ip_addresses())
@settings(deadline=None)
def test_whatever_is_not_global_is_refused(address: object) -> None:
    text = str(address)
    if ip_address(text).is_global and not ip_address(text).is_multicast:
        return
    mapped = getattr(address, "ipv4_mapped", None)
    if mapped is not None and mapped.is_global:
        return
    with pytest.raises(ForbiddenAddressError):
        GUARD.check_addresses("example.com", (text,))


WRAPPINGS: dict[str, Callable[[int], int]] = {
    "compatible": lambda number: number,
    "mapped": lambda number: (0xFFFF << 32) | number,
    "SIIT": lambda number: (0xFFFF << 48) | number,
    "NAT64": lambda number: (0x64FF9B << 96) | number,
    "6to4": lambda number: (0x2002 << 112) | (number << 80),
    "Teredo server": lambda number: (0x20010000 << 96) | (number << 64) | 0xF7F7F7F7,
    "Teredo client": lambda number: (0x20010000 << 96) | (0x08080808 << 64) | (number ^ 0xFFFFFFFF),
    "ISATAP": lambda number: (0x20010470 << 96) | (0x5EFE << 32) | number,
    "ISATAP, unique": lambda number: (0x20010470 << 96) | (0x02005EFE << 32) | number,
}


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS)
@given(
    address=st.ip_addresses(v=4, network="127.0.0.0/8")
    | st.ip_addresses(v=4, network="169.254.0.0/16")
    | st.ip_addresses(v=4, network="10.0.0.0/8")
)
@settings(deadline=None, max_examples=30)
def test_no_wrapping_opens_a_forbidden_address(
    wrap: Callable[[int], int], address: IPv4Address
) -> None:
    text = str(IPv6Address(wrap(int(address))))
    with pytest.raises(ForbiddenAddressError):
        GUARD.check_addresses("example.com", (text,))
    problem = GUARD.problem_with(f"http://[{text}]/")
    assert problem is not None
    assert "may not be reached" in problem


@given(st.ip_addresses(v=6))
@settings(deadline=None)
def test_of_ipv6_only_what_was_given_out_is_reached(address: IPv6Address) -> None:
    carrying = ("::/96", "::ffff:0:0/96", "64:ff9b::/96")
    if not any(address in IPv6Network(text) for text in ("2000::/3", *carrying)):
        with pytest.raises(ForbiddenAddressError):
            GUARD.check_addresses("example.com", (str(address),))


def test_an_isatap_address_of_an_open_network_is_judged_by_what_it_carries() -> None:
    guard = UrlGuard(parse_allow_list(("2001:470:1::/48", "10.0.0.0/8")))
    assert guard.problem_with("http://[2001:470:1::5efe:10.0.0.1]/") is None
    assert guard.problem_with("http://[2001:470:1::5efe:127.0.0.1]/") is not None


@pytest.mark.parametrize(
    "entry",
    [
        "10.0.0.1/8",
        "10.0.0.0/33",
        "*",
        "*.internal",
        "",
        "http://x",
        "a b",
        "127.1",
        "0x7f",
        "::1%1",
    ],
)
def test_an_entry_that_is_neither_network_nor_name_is_refused(entry: str) -> None:
    with pytest.raises(InvalidFieldError, match="or a host name"):
        parse_allow_list((entry,))


def test_a_wrapped_network_is_refused_on_the_allow_list() -> None:
    for entry in ("::ffff:10.0.0.0/104", "::ffff:0:10.0.0.0/104", "64:ff9b::/96", "2002:a00::/24"):
        with pytest.raises(InvalidFieldError, match="write the IPv4 network"):
            parse_allow_list((entry,))


def test_an_address_alone_is_a_network_of_one() -> None:
    allowed = parse_allow_list(("10.0.0.7", "::1", "Hooks.Internal."))
    assert [str(network) for network in allowed.networks] == ["10.0.0.7/32", "::1/128"]
    assert allowed == AllowList(allowed.networks, frozenset({"hooks.internal"}))


CLOUD_METADATA = {
    "AWS": ("169.254.169.254", "fd00:ec2::254"),
    "AWS, a task of ECS": ("169.254.170.2",),
    "AWS, a pod of EKS": ("169.254.170.23", "fd00:ec2::23"),
    "AWS, DNS and time": ("169.254.169.253", "fd00:ec2::253", "169.254.169.123", "fd00:ec2::123"),
    "Google Cloud": ("169.254.169.254", "fd20:ce::254"),
    "Azure": ("168.63.129.16", "169.254.169.254"),
    "Oracle Cloud": ("192.0.0.192", "fd00:c1::a9fe:a9fe"),
    "Alibaba Cloud": ("100.100.100.200", "fd00:100::100:200"),
    "Tencent Cloud": ("169.254.0.23", "169.254.10.10"),
    "Scaleway": ("169.254.42.42", "fd00:42::42"),
    "Akamai": ("169.254.169.255", "fd00:a9fe:a9fe::1"),
    "OpenStack": ("fe80::a9fe:a9fe", "fd00:a9fe:a9fe::254"),
    "Rancher": ("169.254.169.250",),
    "link-local": ("169.254.0.1", "169.254.255.254", "fe80::1", "febf::1"),
}
EVERYTHING = UrlGuard(
    parse_allow_list(
        ("hooks.internal", "0.0.0.0/0", "128.0.0.0/1", "2000::/3", "fc00::/7", "64:ff9b:1::/48")
    )
)
"""A guard whose operator opened all that can be opened."""


@pytest.mark.parametrize("cloud", CLOUD_METADATA)
def test_no_entry_of_the_allow_list_opens_the_metadata_of_a_cloud(cloud: str) -> None:
    for address in CLOUD_METADATA[cloud]:
        for host in ("hooks.internal", "example.com"):
            with pytest.raises(ForbiddenAddressError, match=r"webhooks\.allow cannot open it"):
                EVERYTHING.check_addresses(host, ("10.0.0.1", address))
        literal = f"[{address}]" if ":" in address else address
        assert EVERYTHING.problem_with(f"http://{literal}/latest/") is not None


METADATA_V4 = sorted(
    {text for texts in CLOUD_METADATA.values() for text in texts if ":" not in text}
)
NAT64 = {
    "NAT64, own prefix": lambda number: (0xFD12 << 112) | number,
    "NAT64, local /96": lambda number: (0x64FF9B0001 << 80) | number,
    "NAT64, local /48": lambda number: (
        (0x64FF9B0001 << 80) | ((number >> 16) << 64) | ((number & 0xFFFF) << 40)
    ),
    "NAT64, local /56": lambda number: (
        (0x64FF9B0001 << 80) | ((number >> 24) << 64) | ((number & 0xFFFFFF) << 32)
    ),
    "NAT64, local /64": lambda number: (0x64FF9B0001 << 80) | (number << 24),
}
OWN_PREFIX_KNOWN = frozenset(METADATA_V4) - {
    "169.254.169.253", "169.254.169.123", "169.254.169.255", "169.254.0.1", "169.254.255.254"
}  # fmt: skip
"""What is recognised behind any prefix: where credentials are, and not all that is link-local."""


@pytest.mark.parametrize("way", [*WRAPPINGS, *NAT64])
def test_no_wrapping_of_a_metadata_address_is_opened_by_the_allow_list(way: str) -> None:
    wrap = (WRAPPINGS | NAT64)[way]
    known = OWN_PREFIX_KNOWN if way == "NAT64, own prefix" else METADATA_V4
    for text in known:
        wrapped = str(IPv6Address(wrap(int(IPv4Address(text)))))
        with pytest.raises(ForbiddenAddressError):
            EVERYTHING.check_addresses("hooks.internal", (wrapped,))


@pytest.mark.parametrize(
    "name",
    ["metadata.google.internal", "METADATA.google.internal.", "metadata.goog", "instance-data"],
)
def test_a_name_of_metadata_is_refused_in_a_url_and_on_the_allow_list(name: str) -> None:
    problem = GUARD.problem_with(f"http://{name}/computeMetadata/v1/")
    assert problem is not None
    assert "webhooks.allow cannot open it" in problem
    with pytest.raises(InvalidFieldError, match="cannot be opened"):
        parse_allow_list((name,))


@pytest.mark.parametrize(
    "entry",
    ["169.254.169.254", "169.254.0.0/16", "fe80::/10", "fd00:ec2::254", "168.63.129.16/32"],
)
def test_an_entry_that_means_metadata_alone_is_refused(entry: str) -> None:
    with pytest.raises(InvalidFieldError, match="cannot be opened"):
        parse_allow_list((entry,))


def test_private_networks_beside_the_metadata_stay_open() -> None:
    for address in ("10.0.0.9", "100.100.100.201", "fd00:ec1::1", "fd12::1", "192.168.0.1"):
        EVERYTHING.check_addresses("hooks.internal", (address,))
