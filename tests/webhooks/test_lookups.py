"""Lookups: bounded, out of everybody's way, and never a second one for a written address."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from headgate.webhooks.guard import SystemLookup

FOUND = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", 80))]


def test_an_address_is_its_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", None)
    for address in ("93.184.216.34", "2606:4700::1111"):
        assert asyncio.run(SystemLookup()(address, 80)) == [address]


def test_a_host_has_each_of_its_addresses_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scoped = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1%eth0", 80, 0, 2))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [*FOUND, scoped, *FOUND])
    assert asyncio.run(SystemLookup()("h.example", 80)) == ["93.184.216.34", "fe80::1"]


@pytest.mark.parametrize("error", [socket.gaierror(-2, "unknown"), UnicodeError("label too long")])
def test_a_host_without_an_address_is_an_os_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(OSError, match=r"unknown|label"):
        asyncio.run(SystemLookup()("h.example", 80))


def test_a_lookup_that_hangs_keeps_its_place_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    is_asked, may_end = threading.Event(), threading.Event()
    asked: list[str] = []

    def answer(host: str, *_: object, **__: object) -> list[Any]:
        asked.append(host)
        if host == "hangs.example":
            is_asked.set()
            may_end.wait(60)
        return FOUND

    monkeypatch.setattr(socket, "getaddrinfo", answer)

    async def scenario() -> None:
        lookup = SystemLookup(most=1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await lookup("hangs.example", 80)
        assert await asyncio.to_thread(is_asked.wait, 30)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await lookup("other.example", 80)
        assert asked == ["hangs.example"]
        may_end.set()
        async with asyncio.timeout(30):
            assert await lookup("other.example", 80) == ["93.184.216.34"]

    asyncio.run(scenario())
