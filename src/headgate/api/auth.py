"""Whether a request is let in, and as whom.

Three questions, asked of the head alone. Does the Host name this service? Otherwise a page
could reach it under a name of its own, which leads to a loopback address. Does the Origin, where
there is one, name it too, or, where no token is asked for, does the browser say that no page of
another site sends this? Who asks: a token says so, or, on a loopback address that asks for none,
being on the machine. What the head answers without asking the store is settled before the body is
read; whether a token of the right form is a good one, when the request is complete, unless it was
looked up a moment ago.

Rule: whoever cannot be checked is not let in. What was looked up is good for `FRESH_SECONDS`, so a
token that is revoked at another node ends here within that time; at this node it ends at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from math import inf
from typing import NamedTuple, TypeVar

import msgspec
import structlog

from headgate.api.callers import LOCAL, Caller, caller_with
from headgate.api.errors import ApiError
from headgate.api.http.request import Head, Request
from headgate.storage.tokens import KeptToken, Permission, TokenStore, read_token

FRESH_SECONDS = 4.0
MAX_KNOWN = 4_096
MAX_REFUSED = 1_024
MAX_LOOK_UPS = 16
MAX_HOSTS = 64
LOG_SECONDS = 10.0

_BEARER = b"bearer "
_TOKEN = re.compile(rb"bearer +hg_[0-9a-f_]{61} *", re.IGNORECASE)
"""What may be a token; `read_token` is more exact."""

_OWN_SITES = (b"", b"same-origin", b"none")
"""What Sec-Fetch-Site says of a page of this service, of a person, or of no browser at all."""

_PORT = re.compile(r":[0-9]*\Z")
_NOT_KNOWN = "this service does not recognise that token"
log = structlog.get_logger("headgate.api")

Kept = TypeVar("Kept")


class AuthRules(msgspec.Struct, frozen=True, kw_only=True):
    """Whom the service lets in; hosts and origins are in lower case.

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


class Admission(NamedTuple):
    """Who was let in by a head, and for how long the same head says the same."""

    caller: Caller
    changes: int
    until: float


class _Refused(NamedTuple):
    token_id: str
    line: str
    fresh_until: float


class Authenticator:
    """Lets requests in; `rules` may be replaced while it does."""

    def __init__(
        self,
        tokens: TokenStore,
        rules: AuthRules | None = None,
        *,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokens = tokens
        self._ticks = ticks
        self._rules = rules or AuthRules()
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._no_good: OrderedDict[bytes, _Refused] = OrderedDict()
        self._watchers: set[Callable[[], None]] = set()
        self._good_hosts: set[bytes] = set()
        self._asking: dict[tuple[bytes, int], asyncio.Future[Caller]] = {}
        self._turns = asyncio.Semaphore(MAX_LOOK_UPS)
        self._changes = 0
        self._refused = 0
        self._logged_at = float("-inf")

    @property
    def rules(self) -> AuthRules:
        """Whom the service lets in."""
        return self._rules

    @rules.setter
    def rules(self, rules: AuthRules) -> None:
        """Put other rules in place."""
        self._rules = rules
        self._good_hosts = set()
        self._changes += 1

    def forget(self) -> None:
        """Look every token up again: one of them was changed."""
        self._changes += 1
        self._known.clear()
        self._no_good.clear()
        for watcher in list(self._watchers):
            watcher()

    def watch(self, watcher: Callable[[], None]) -> None:
        """Have a stream called when a token was changed, until it is left."""
        self._watchers.add(watcher)

    def leave(self, watcher: Callable[[], None]) -> None:
        """Call a stream no more."""
        self._watchers.discard(watcher)

    def authenticate(
        self, request: Request, needs: Permission | None, *, is_page: bool = False
    ) -> Caller | None:
        """Return who asks, or refuse; None if `look_up` is to find out.

        A route that needs nothing is open to all. A link of another site may lead to a page.
        """
        host, origin, authorization = request.identity()
        if origin:
            self._check_origin(origin, host)
        elif not self._rules.needs_token:
            _check_site(request, is_page=is_page)
        if needs is None:
            return LOCAL
        if host and host not in self._good_hosts:
            self._check_host(host)
        caller = self._at_once(authorization)
        if caller is not None:
            caller.check(needs)
        return caller

    def admission(self, request: Request, caller: Caller) -> Admission:
        """Return for how long whoever was let in may come again with the same head."""
        until, authorization = inf, request.identity()[2]
        if self._is_token(authorization):
            known = self._known.get(_digest(authorization))
            until = self._ticks() if known is None else known.fresh_until
        if caller.expires_at is not None:
            until = min(until, self._ticks() + caller.expires_at - self._now())
        return Admission(caller, self._changes, until)

    def still_holds(self, admission: Admission) -> bool:
        """Tell whether the head of an admission would be let in again, as the same caller."""
        return admission.changes == self._changes and self._ticks() < admission.until

    def check_head(self, head: Head) -> Caller | None:
        """Refuse whoever is not let in whatever the store says; nothing is looked up.

        What was looked up a moment ago is known: return who sends it, or refuse it.
        """
        self.check_host_and_origin(head.host, head.origin)
        if not self._is_token(head.authorization):
            return None
        if _TOKEN.fullmatch(head.authorization) is None:
            raise self._refuse("", _NOT_KNOWN)
        digest = _digest(head.authorization)
        known = self._known.get(digest)
        if known is None:
            self._check_no_good(digest)
            return None
        return None if self._ticks() >= known.fresh_until else known.caller

    def check_host_and_origin(self, host: bytes, origin: bytes, *, is_secure: bool = False) -> None:
        """Refuse a request to another host than this service's, or from another's page.

        What came over HTTPS is not sent by a page that came without: anybody may have changed it.
        """
        if origin:
            self._check_origin(origin, host, b"https" if is_secure else b"")
        if host and host not in self._good_hosts:
            self._check_host(host)

    def _is_token(self, authorization: bytes) -> bool:
        """Tell whether a token is sent; refuse whoever sends none where one is needed."""
        is_token = authorization[: len(_BEARER)].lower() == _BEARER
        if not is_token and self._rules.needs_token:
            raise ApiError(
                "unauthorized",
                "this service needs a token; send it as 'Authorization: Bearer hg_…'",
            )
        return is_token

    def _at_once(self, authorization: bytes) -> Caller | None:
        """Return who asks, where nobody has to be asked for that."""
        if not self._is_token(authorization):
            return LOCAL
        digest = _digest(authorization)
        known = self._known.get(digest)
        if known is None:
            self._check_no_good(digest)
            return None
        if self._ticks() >= known.fresh_until:
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
        """Return who has a token. Hundreds of requests with one ask the store for it once.

        The question is nobody's in particular, so it waits for no turn of whoever asks.
        """
        key = (_digest(authorization), self._changes)
        asking = self._asking.get(key)
        if asking is None:
            asking = self._asking[key] = asyncio.ensure_future(self._ask(authorization))
            asking.add_done_callback(partial(self._end_asking, key))
        return await asyncio.shield(asking)

    def _end_asking(self, key: tuple[bytes, int], asking: asyncio.Future[Caller]) -> None:
        del self._asking[key]
        if not asking.cancelled():
            # Marks an error as seen: all who asked may have gone meanwhile.
            asking.exception()

    async def _ask(self, authorization: bytes) -> Caller:
        read = read_token(authorization[len(_BEARER) :].decode("latin-1").strip())
        if read is None:
            raise self._refuse("", _NOT_KNOWN)
        token_id, secret = read
        async with self._turns:
            changes, fresh_until = self._changes, self._ticks() + FRESH_SECONDS
            kept = await self._tokens.get(token_id)
        line = self._problem_with(kept, secret)
        is_current = changes == self._changes
        if kept is None or line:
            digest = _digest(authorization)
            self._known.pop(digest, None)
            if is_current:
                _keep(self._no_good, digest, _Refused(token_id, line, fresh_until), MAX_REFUSED)
            raise self._refuse(token_id, line)
        caller = caller_with(kept.token)
        if is_current:
            _keep(self._known, _digest(authorization), _Known(caller, fresh_until), MAX_KNOWN)
        return caller

    def _problem_with(self, kept: KeptToken | None, secret: str) -> str:
        if kept is None or not kept.is_opened_by(secret):
            return _NOT_KNOWN
        if kept.token.is_good(self._now()):
            return ""
        return "the token has expired" if kept.token.revoked_at is None else "the token was revoked"

    def _check_no_good(self, digest: bytes) -> None:
        """Refuse what was refused a moment ago, without asking the store for it again."""
        refused = self._no_good.get(digest)
        if refused is not None and self._ticks() < refused.fresh_until:
            raise self._refuse(refused.token_id, refused.line)

    def _now(self) -> float:
        return self._tokens.now()

    def _check_host(self, host: bytes) -> None:
        name = host.decode("latin-1").lower()
        if not _is_served(name, self._rules):
            line = "the Host header names no host of this service; auth.allowed_hosts may add it"
            raise ApiError("wrong_host", line, closes=True)
        if len(self._good_hosts) < MAX_HOSTS:
            self._good_hosts.add(host)

    def _check_origin(self, origin: bytes, host: bytes, needed_scheme: bytes = b"") -> None:
        scheme, _, name = origin.partition(b"://")
        is_own = name == host and needed_scheme in (b"", scheme)
        if not is_own and origin.decode("latin-1").lower() not in self._rules.origins:
            line = "requests from pages of other sites are refused; auth.allowed_origins may add"
            raise ApiError("forbidden_origin", f"{line} one", closes=True)

    def _refuse(self, token_id: str, line: str) -> ApiError:
        """Make the refusal of a token, and log it, at most once in a while."""
        self._refused += 1
        now = self._ticks()
        if now - self._logged_at >= LOG_SECONDS:
            log.warning("token refused", token_id=token_id, why=line, since_last=self._refused)
            self._logged_at, self._refused = now, 0
        return ApiError("unauthorized", line)


def _check_site(request: Request, *, is_page: bool) -> None:
    """Refuse what a browser says it sends for a page of another site.

    Many such requests name no origin, as those for pictures, scripts and links. Where no token is
    asked for, they would read and start what the person before the browser may.
    """
    if request.header(b"sec-fetch-site") in _OWN_SITES:
        return
    is_link = (
        request.method in ("GET", "HEAD")
        and request.header(b"sec-fetch-mode") == b"navigate"
        and request.header(b"sec-fetch-dest") == b"document"
    )
    if not (is_page and is_link):
        line = "requests from pages of other sites are refused; auth.allowed_origins may add"
        raise ApiError("forbidden_origin", f"{line} one", closes=True)


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine, by its own name or address and not by looking it up."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def _is_served(host: str, rules: AuthRules) -> bool:
    """Tell whether a Host header, in lower case, names this service."""
    name = _PORT.sub("", host)
    if host in rules.hosts or name in rules.hosts:
        return True
    return is_loopback(name) if rules.is_loopback else not rules.hosts


def _keep(kept: OrderedDict[bytes, Kept], key: bytes, value: Kept, most: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)


def _digest(authorization: bytes) -> bytes:
    # No token is kept in memory, and comparing tells nothing about one.
    return hashlib.sha256(authorization).digest()
