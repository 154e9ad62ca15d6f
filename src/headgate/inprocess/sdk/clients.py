"""HTTP clients that govern what is built on them: pass one to an SDK as its `http_client`.

Both SDKs take clients of httpx2. These have the limits and timeouts that the SDKs give their own,
and go through the proxies that the environment names, as those do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from ipaddress import IPv6Address, ip_address
from typing import TypedDict, Unpack
from urllib.request import getproxies

import httpx2

from headgate.budgets.tracker import BudgetTracker
from headgate.errors import HeadgateError
from headgate.inprocess.scheduler import LoadScheduler
from headgate.inprocess.sdk.governor import Governor, Name
from headgate.inprocess.sdk.transports import (
    GovernedAsyncTransport,
    GovernedTransport,
    LoopThread,
    shared,
)
from headgate.providers.prices import PriceList

TIMEOUT = httpx2.Timeout(600.0, connect=5.0)
LIMITS = httpx2.Limits(max_connections=1_000, max_keepalive_connections=100)


class GovernorFields(TypedDict, total=False):
    """The fields of a `Governor`."""

    scheduler: LoadScheduler | None
    agent_id: Name
    tracker: BudgetTracker | str | None
    scope: Name | None
    also: Iterable[str]
    prices: PriceList | None
    max_tokens: int
    cheaper: Mapping[str, str] | None
    permit_timeout: float | None
    lease_seconds: float
    ask_stream_usage: bool
    pause_when_limited: bool
    allow_other: bool
    on_unsettled: Callable[[HeadgateError], None] | None


def async_client(
    *, transport: httpx2.AsyncBaseTransport | None = None, **fields: Unpack[GovernorFields]
) -> httpx2.AsyncClient:
    """Return a client for `AsyncOpenAI` and `AsyncAnthropic`; `fields` are those of a `Governor`.

    It belongs to the event loop of its scheduler. A `transport` of your own replaces the usual
    connections and proxies.
    """
    governor = Governor(**fields)
    proxies = {} if transport is not None else proxies_of(getproxies())
    return httpx2.AsyncClient(
        transport=GovernedAsyncTransport(
            transport or httpx2.AsyncHTTPTransport(limits=LIMITS), governor
        ),
        mounts={
            pattern: None
            if proxy is None
            else GovernedAsyncTransport(
                httpx2.AsyncHTTPTransport(limits=LIMITS, proxy=proxy), governor
            )
            for pattern, proxy in proxies.items()
        },
        timeout=TIMEOUT,
        follow_redirects=True,
    )


def sync_client(
    *,
    transport: httpx2.BaseTransport | None = None,
    loop: asyncio.AbstractEventLoop | None = None,
    **fields: Unpack[GovernorFields],
) -> httpx2.Client:
    """Return a client for `OpenAI` and `Anthropic`; `fields` are those of a `Governor`.

    Permits and money are asked for on `loop`, which must be running in another thread than the one
    that calls. Without one they are asked for on a loop that all such clients of the process share,
    and then nothing else may use their scheduler, and trackers are best given as URLs.
    """
    governor = Governor(**fields)
    loop_thread = shared if loop is None else LoopThread(loop)
    proxies = {} if transport is not None else proxies_of(getproxies())
    return httpx2.Client(
        transport=GovernedTransport(
            transport or httpx2.HTTPTransport(limits=LIMITS), governor, loop_thread
        ),
        mounts={
            pattern: None
            if proxy is None
            else GovernedTransport(
                httpx2.HTTPTransport(limits=LIMITS, proxy=proxy), governor, loop_thread
            )
            for pattern, proxy in proxies.items()
        },
        timeout=TIMEOUT,
        follow_redirects=True,
    )


def proxies_of(named: Mapping[str, str]) -> dict[str, str | None]:
    """Return the proxy of each pattern of URLs, None for those that are reached directly.

    A client that is given a transport does not look at the environment by itself.
    """
    direct = [host.strip() for host in named.get("no", "").split(",") if host.strip()]
    if "*" in direct:
        return {}
    proxies: dict[str, str | None] = {
        f"{scheme}://": url if "://" in url else f"http://{url}"
        for scheme in ("http", "https", "all")
        if (url := named.get(scheme))
    }
    patterns = (_pattern(host) for host in direct)
    return proxies | {pattern: None for pattern in patterns if proxies and pattern is not None}


def _pattern(host: str) -> str | None:
    """Return what matches a host that is reached directly; None for a network, or what is none."""
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        is_name = host.lower() == "localhost" or "://" in host
        pattern = host if "://" in host else f"all://{'' if is_name else '*'}{host}"
        return pattern if "/" not in pattern.partition("://")[2] else None
    return f"all://[{address}]" if isinstance(address, IPv6Address) else f"all://{address}"
