"""The entrance: whether a request is let in, and as whom.

Three questions, before any of the body is read. Does the Host name this service? Otherwise a page
could reach it under a name of its own, which leads to a loopback address. Does the Origin, where
there is one, name it too? Who asks: a token says so, or, on a loopback address that asks for none,
being on the machine.

Rule: whoever cannot be checked is not let in. What was looked up is good for `FRESH_SECONDS`, so a
token that is revoked at another node ends here within that time; at this node it ends at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from ipaddress import ip_address
from typing import NamedTuple

import msgspec
import structlog

from headgate.tokens import Tokens, read_token
from headgate.web.callers import LOCAL, Caller, Permission, caller_with
from headgate.web.refusals import Refusal
from headgate.web.requests import Request

FRESH_SECONDS = 4.0
MAX_KNOWN = 4_096
MAX_LOOK_UPS = 16
MAX_HOSTS = 64
LOG_SECONDS = 10.0

_BEARER = b"bearer "
_NOT_KNOWN = "the token is not known here"
log = structlog.get_logger("headgate.web")


class EntranceRules(msgspec.Struct, frozen=True, kw_only=True):
    """Whom the entrance lets in; hosts and origins are in lower case.

    `is_loopback` says that only this machine reaches the service; there a Host must be a name of
    the machine, or one of `hosts`. Elsewhere it must be one of `hosts`, if there are any.
    """

    is_loopback: bool = True
    needs_token: bool = False
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()


class _Known(NamedTuple):
    caller: Caller
    fresh_until: float


class Entrance:
    """Lets requests in; `rules` may be replaced while it does."""

    def __init__(
        self,
        tokens: Tokens | None = None,
        rules: EntranceRules | None = None,
        *,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokens = tokens
        self._ticks = ticks
        self._rules = rules or EntranceRules()
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._good_hosts: set[bytes] = set()
        self._turns = asyncio.Semaphore(MAX_LOOK_UPS)
        self._changes = 0
        self._refused = 0
        self._logged_at = float("-inf")

    @property
    def rules(self) -> EntranceRules:
        """Whom the entrance lets in."""
        return self._rules

    @rules.setter
    def rules(self, rules: EntranceRules) -> None:
        """Put other rules in place."""
        self._rules = rules
        self._good_hosts = set()

    def forget(self) -> None:
        """Look every token up again: one of them was changed."""
        self._changes += 1
        self._known.clear()

    def let_in(self, request: Request, needs: Permission | None) -> Caller | None:
        """Return who asks, or refuse; None if `look_up` is to find out.

        A route that needs nothing is open to all.
        """
        host, origin, authorization = request.identity()
        if origin:
            self._check_origin(origin, host)
        if needs is None:
            return LOCAL
        if host and host not in self._good_hosts:
            self._check_host(host)
        caller = self._at_once(authorization)
        if caller is not None:
            caller.check(needs)
        return caller

    def _at_once(self, authorization: bytes) -> Caller | None:
        """Return who asks, where nobody has to be asked for that."""
        is_token = authorization[: len(_BEARER)].lower() == _BEARER
        if not is_token and not self._rules.needs_token:
            return LOCAL
        if not is_token:
            raise Refusal("unauthorized", "send a token, as in 'Authorization: Bearer hg_…'")
        known = self._known.get(_digest(authorization))
        if known is None or self._ticks() >= known.fresh_until:
            return None
        expires_at = known.caller.expires_at
        is_over = expires_at is not None and self._now() >= expires_at
        return None if is_over else known.caller

    async def look_up(self, request: Request, needs: Permission | None) -> Caller:
        """Ask the store for the token of a request, and return who has it, or refuse."""
        caller = await self._found(request.identity()[2])
        caller.check(needs)
        return caller

    async def _found(self, authorization: bytes) -> Caller:
        read = read_token(authorization[len(_BEARER) :].decode("latin-1").strip())
        if read is None or self._tokens is None:
            raise self._refuse("", _NOT_KNOWN)
        token_id, secret = read
        async with self._turns:
            changes, asked_at = self._changes, self._ticks()
            kept = await self._tokens.get(token_id)
        if kept is None or not kept.is_opened_by(secret):
            raise self._refuse(token_id, _NOT_KNOWN)
        token = kept.token
        if not token.is_good(self._now()):
            was = "has expired" if token.revoked_at is None else "was revoked"
            raise self._refuse(token_id, f"the token {was}")
        caller = caller_with(token)
        if changes == self._changes:
            self._keep(_digest(authorization), _Known(caller, asked_at + FRESH_SECONDS))
        return caller

    def _keep(self, key: bytes, known: _Known) -> None:
        self._known[key] = known
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _now(self) -> float:
        return 0.0 if self._tokens is None else self._tokens.now()

    def _check_host(self, host: bytes) -> None:
        name = host.decode("latin-1").lower()
        if not _is_served(name, self._rules):
            line = "the Host header names no host of this service; auth.allowed_hosts may add it"
            raise Refusal("wrong_host", line, closes=True)
        if len(self._good_hosts) < MAX_HOSTS:
            self._good_hosts.add(host)

    def _check_origin(self, origin: bytes, host: bytes) -> None:
        is_own = origin.partition(b"://")[2] == host
        if not is_own and origin.decode("latin-1").lower() not in self._rules.origins:
            line = "requests are not taken from pages of other sites; auth.allowed_origins may add"
            raise Refusal("forbidden_origin", f"{line} one", closes=True)

    def _refuse(self, token_id: str, line: str) -> Refusal:
        """Make the refusal of a token, and log it, at most once in a while."""
        self._refused += 1
        now = self._ticks()
        if now - self._logged_at >= LOG_SECONDS:
            log.warning("token refused", token_id=token_id, why=line, since_last=self._refused)
            self._logged_at, self._refused = now, 0
        return Refusal("unauthorized", line)


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine, by its own name or address and not by looking it up."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def _is_served(host: str, rules: EntranceRules) -> bool:
    """Tell whether a Host header, in lower case, names this service."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if host in rules.hosts or name in rules.hosts:
        return True
    return is_loopback(name) if rules.is_loopback else not rules.hosts


def _digest(authorization: bytes) -> bytes:
    # No token is kept in memory, and comparing tells nothing about one.
    return hashlib.sha256(authorization).digest()
