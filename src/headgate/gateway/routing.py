"""Which upstream and which key a call goes to, and what its answers say about both.

A model is an alias with members, matches the patterns of an upstream, or goes to the first upstream
that speaks the protocol of the request. A member is passed over while it is closed: by its circuit,
by a provider that asked for a pause, or because none of its keys is open.

Rule: a key is read when it is sent and kept nowhere. A key that a client brings along goes only to
an upstream that has none of its own, and is known by a keyed hash.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from math import inf
from typing import Literal, NamedTuple

import msgspec
import structlog

from headgate.config.settings import Settings, UpstreamSettings
from headgate.config.slot_keys import (
    MAX_KEY_BYTES,
    SlotKeys,
    read_upstream_key,
    upstream_headers,
    upstream_secrets,
)
from headgate.core.dispatch_state import KeyChoice, KeyWait
from headgate.core.gates import GateClosure
from headgate.core.lifecycle import Limited, pause_seconds
from headgate.core.slots.slot import SlotStanding
from headgate.core.task import UPSTREAM_PREFIX, Task
from headgate.engine.call_registry import Route
from headgate.errors import InvalidSettingError
from headgate.providers.connection_pool import UpstreamError, UpstreamPool
from headgate.providers.prices import MAX_MODEL_LENGTH
from headgate.providers.quota_apis import anthropic_rows_of, openai_rows_of

log = structlog.get_logger("headgate.gateway")

Kind = Literal["anthropic", "openai"]

CIRCUIT_FAILURES = 5
CIRCUIT_SECONDS = 5.0
MAX_CIRCUIT_SECONDS = 60.0
MAX_PAUSE_SECONDS = 3_600.0
"""The longest that one answer closes a key or an upstream for."""

MAX_PROVIDER_PAUSE_SECONDS = 30.0
"""The longest that a model rests at a key because of one of the providers behind its upstream."""

NO_CREDIT_SECONDS = 600.0
"""How long a key rests that has no credit left; somebody pays, or opens it by hand."""

RETRIES_PER_CALL = 0.2
MAX_RETRY_CREDIT = 50.0
"""A fifth of the calls may be sent a second time, in the long run; a crowd that fails is not sent
again and again. Each tenant has a budget of its own, which other tenants cannot use up."""

FIRST_RETRY_CREDIT = MAX_RETRY_CREDIT / 5
MAX_TENANTS = 1_000
"""Of how many tenants the budgets of retries are remembered; the one that came first goes first."""

CACHE_SECONDS: dict[Kind, float] = {"anthropic": 300.0, "openai": 3_600.0}
LONG_CACHE_SECONDS = 3_600.0
"""How long a provider keeps the prompt of a session after its last use, at most: usually, and where
it was asked for an hour."""

EXPIRING_SECONDS = 3_600.0
"""A window that ends within this time is about to be lost, as far as it is not used."""

WRITE_COST, READ_COST = 1.25, 0.1
"""What a token costs that is written to a cache, and one that is read from it, of a usual one."""

MAX_SESSIONS = 10_000
MAX_PAUSED = 1_000
"""How many pauses of a key for one model are remembered."""
MAX_ROUTES = 1_024
"""For how many models it is remembered where they go."""
MODELS_SECONDS = 5.0
MODELS_KEPT_SECONDS = 60.0
MAX_MODELS = 5_000
MAX_MODELS_BYTES = 4 * 1024 * 1024
KEPT_BACK_BYTES = 6 * MAX_KEY_BYTES
MAX_HELD_BYTES = 8 * MAX_KEY_BYTES
"""Of a line of a stream that is longer than this, so many bytes are kept back: the longest key with
each of its characters escaped."""
LEAST_HIDDEN_BYTES = 16
"""What is shorter is no secret but a word, as `ollama` or `EMPTY`, and answers may have it."""

KEY_NAME_LENGTH = 10
_LEFT_HEADERS: dict[Kind, tuple[str, ...]] = {
    "openai": ("x-ratelimit-remaining-requests", "x-ratelimit-remaining-tokens"),
    "anthropic": tuple(
        f"anthropic-ratelimit-{rate}-remaining"
        for rate in ("requests", "tokens", "input-tokens", "output-tokens")
    ),
}
_ROWS_OF = {"openai": openai_rows_of, "anthropic": anthropic_rows_of}
_OAUTH = "sk-ant-oat"
_UNIFIED = "anthropic-ratelimit-unified-"
_OK = 200


class NoRouteError(Exception):
    """A model goes to no upstream, or to none that speaks the protocol of the request."""


class UnknownModelError(NoRouteError):
    """A model goes to no upstream."""


class Credentials(NamedTuple):
    """The key of a call, as a header, and what else is secret in its headers; never shown."""

    header: tuple[bytes, bytes]
    secrets: tuple[bytes, ...] = ()

    def hidden_in(self, body: bytes) -> bytes:
        """Return what an upstream said, without the key if it repeats that, escaped or not."""
        body = self._hidden(body)
        if b"\\u00" in body or b"\\/" in body:
            plain = _ESCAPED.sub(_unescaped, body)
            hidden = self._hidden(plain)
            if hidden is not plain:
                return hidden
        return body

    @property
    def key(self) -> str:
        """The key itself."""
        return self.header[1].removeprefix(b"Bearer ").decode("latin-1")

    def _hidden(self, body: bytes) -> bytes:
        key = self.header[1].removeprefix(b"Bearer ")
        if len(key) >= LEAST_HIDDEN_BYTES and key in body:
            body = body.replace(key, b"[key]")
        for secret in self.secrets:
            if len(secret) >= LEAST_HIDDEN_BYTES and secret in body:
                body = body.replace(secret, b"[secret]")
        return body

    def __repr__(self) -> str:
        return "Credentials(…)"


class StreamMask:
    """Takes keys out of a stream that comes in any pieces.

    A line goes on when it is whole, since no client reads half of one; of a very long one the part
    that a key may have begun in is kept back.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """Return what may go on of what came."""
        if self._held:
            piece, self._held = self._held + piece, b""
        piece = self._credentials.hidden_in(piece)
        if piece.endswith((b"\n", b"\r")):
            return piece
        cut = max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1
        if len(piece) - cut > MAX_HELD_BYTES:
            cut = len(piece) - KEPT_BACK_BYTES
        self._held = piece[cut:]
        return piece[:cut]

    def finish(self) -> bytes:
        """Return what is left when the stream has ended."""
        rest, self._held = self._held, b""
        return self._credentials.hidden_in(rest)


_ESCAPED = re.compile(
    rb"\\(?:\\|/|u00(?:2[b-f]|3[0-9ad]|4[0-9a-f]|5[0-9af]|6[1-9a-f]|7[0-9ae]))", re.IGNORECASE
)
"""Characters of keys as JSON may write them; a backslash that is one stays."""


def _unescaped(found: re.Match[bytes]) -> bytes:
    said = found[0]
    if said == b"\\\\":
        return said
    return b"/" if said == b"\\/" else bytes((int(said[-2:], 16),))


class Circuit:
    """Whether an upstream answers at all; failures in a row close it for longer and longer.

    One tenant alone does not close it for others: its own requests may be what fails.
    """

    def __init__(self) -> None:
        self.failures = 0
        self._tenants: set[frozenset[str]] = set()
        self._is_of_many = False

    def answered(self) -> None:
        """Note an answer that is no failure of the upstream."""
        self.failures = 0
        self._tenants.clear()
        self._is_of_many = False

    def failed(self, tenants: frozenset[str]) -> float | None:
        """Note a failure; return for how many seconds the circuit opens, None if it does not.

        `tenants` are those one of whom has made the call; empty stands for an operator.
        """
        self.failures += 1
        if "" in tenants or any(tenants.isdisjoint(one) for one in self._tenants):
            self._is_of_many = True
        if len(self._tenants) < CIRCUIT_FAILURES:
            self._tenants.add(tenants)
        if self.failures < CIRCUIT_FAILURES or not self._is_of_many:
            return None
        doubled = CIRCUIT_SECONDS * 2.0 ** min(self.failures - CIRCUIT_FAILURES, 10)
        return min(doubled, MAX_CIRCUIT_SECONDS)


class Upstream:
    """One upstream with its connections."""

    def __init__(
        self,
        name: str,
        settings: UpstreamSettings,
        headers: Mapping[str, str],
        secrets: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.settings = settings
        self.pool = UpstreamPool(settings.api_url)
        self.circuit = Circuit()
        self.limited_hits = 0
        self.listed: dict[frozenset[str], tuple[float, asyncio.Task[Sequence[str] | None]]] = {}
        """Its models, by the slots whose keys may see them, and until when that is believed."""

        self.own: Credentials | None = None
        """Its own key, once that was read."""

        self.own_lines = b""
        """The headers of every request with its own key, once that was read."""

        self.headers = [
            (header.lower().encode(), value.encode()) for header, value in headers.items()
        ]
        self.secrets = tuple(one.encode() for one in secrets)

    @property
    def kind(self) -> Kind:
        """The protocol that it speaks."""
        return self.settings.kind

    @property
    def target(self) -> str:
        """The target of calls to it."""
        return UPSTREAM_PREFIX + self.name

    def takes(self, model: str) -> bool:
        """Tell whether its patterns name a model."""
        return any(fnmatchcase(model, pattern) for pattern in self.settings.models)


class Upstreams:
    """All upstreams, and the models that are routed to them; follows the settings in force."""

    def __init__(self, settings: Settings, environ: Mapping[str, str], slot_keys: SlotKeys) -> None:
        # That of a process is slow to ask, and nobody changes it.
        self._environ = dict(environ)
        self._slot_keys = slot_keys
        self.secret = secrets.token_bytes(32)
        """What the names of clients' keys are made with; the store has one that stays the same."""

        self._retry_credit: dict[str, float] = {}
        self._upstreams: dict[str, Upstream] = {}
        self._settings = settings
        self.reconfigure(settings)

    @property
    def all(self) -> Sequence[Upstream]:
        """Every upstream, those of the file first."""
        return list(self._upstreams.values())

    def get(self, name: str) -> Upstream | None:
        """Return an upstream by its name."""
        return self._upstreams.get(name)

    def reconfigure(self, settings: Settings) -> None:
        """Go by other settings; an upstream that stayed the same keeps its connections."""
        self._routes: dict[tuple[str, Kind], list[tuple[Upstream, str]]] = {}
        before, self._upstreams = self._upstreams, {}
        self._settings = settings
        for name, one in settings.all_upstreams.items():
            known = before.pop(name, None)
            if known is not None and known.settings == one:
                self._upstreams[name] = known
                continue
            if known is not None:
                known.pool.retire()
            try:
                headers = upstream_headers(name, one, self._environ)
            except InvalidSettingError as error:
                log.warning(
                    "an upstream is sent without its headers", upstream=name, why=str(error)
                )
                headers = {}
            secret = upstream_secrets(one, self._environ)
            self._upstreams[name] = Upstream(name, one, headers, secret)
        for gone in before.values():
            gone.pool.retire()

    async def close(self) -> None:
        """Close all connections."""
        for one in self._upstreams.values():
            await one.pool.close()

    # Where a model goes.

    def members(self, model: str, kind: Kind) -> list[tuple[Upstream, str]]:
        """Return where a model may go, the first choice first, each with the name it has there."""
        known = self._routes.get((model, kind))
        if known is None:
            known = self._members(model, kind)
            if len(self._routes) >= MAX_ROUTES:
                self._routes.clear()
            self._routes[model, kind] = known
        return known

    def _members(self, model: str, kind: Kind) -> list[tuple[Upstream, str]]:
        alias = self._settings.models.get(model)
        if alias is not None:
            found = [
                (upstream, name)
                for upstream_name, name in alias.members
                if (upstream := self._upstreams.get(upstream_name)) is not None
            ]
            speaking = [one for one in found if one[0].kind == kind]
            if not speaking:
                raise NoRouteError(_wrong_kind(model, [one[0] for one in found], kind))
            return speaking
        named = [one for one in self._upstreams.values() if one.takes(model)]
        prefix, _, rest = model.partition("/")
        if not named and rest and prefix in self._settings.upstreams:
            return self._speaking([(self._upstreams[prefix], rest)], model, kind)
        if named:
            return self._speaking([(one, model) for one in named], model, kind)
        usual = [
            (one, model)
            for one in self._upstreams.values()
            if one.kind == kind and not one.settings.models
        ]
        if not usual:
            line = f"model '{model}' goes to no upstream; name it in models of an [upstreams] table"
            raise UnknownModelError(line)
        with_key = [one for one in usual if self.has_key(one[0])]
        return (with_key or usual)[:1]

    def _speaking(
        self, found: list[tuple[Upstream, str]], model: str, kind: Kind
    ) -> list[tuple[Upstream, str]]:
        speaking = [one for one in found if one[0].kind == kind]
        if not speaking:
            raise NoRouteError(_wrong_kind(model, [one[0] for one in found], kind))
        return speaking

    def aliases(self) -> dict[str, list[str]]:
        """Return the models that the settings name, with the kinds of upstream they go to."""
        return {
            name: [
                upstream.kind
                for upstream_name, _ in one.members
                if (upstream := self._upstreams.get(upstream_name)) is not None
            ]
            for name, one in self._settings.models.items()
        }

    # Keys.

    def has_key(self, upstream: Upstream) -> bool:
        """Tell whether an upstream has a key of its own at this moment."""
        key_env = upstream.settings.key_env
        return bool(upstream.settings.slots) or (key_env is not None and key_env in self._environ)

    def key_place(self, upstream: Upstream, slot: str | None) -> str:
        """Return the variable or the file with a configured key."""
        if slot is None or slot not in upstream.settings.slots:
            return upstream.settings.key_env or ""
        settings = self._settings.slots[slot]
        return settings.key_env or settings.key_file or ""

    def route(self, upstream: Upstream, model: str, client_key: str) -> Route:
        """Return the route of a call: by the keys of the upstream, or by that of its client."""
        if upstream.settings.slots:
            return Route(upstream.name, model, has_slots=True)
        if self.has_key(upstream) or not client_key:
            shared = f"{upstream.name}/{model}"
            return Route(upstream.name, model, slot=shared, is_shared=True)
        return Route(upstream.name, model, slot=self.key_name(client_key))

    def key_name(self, key: str) -> str:
        """Return the name under which the key of a client is known."""
        digest = hmac.new(self.secret, key.encode(), hashlib.sha256).hexdigest()
        return f"key-{digest[:KEY_NAME_LENGTH]}"

    def credentials(
        self, upstream: Upstream, slot: str | None, client_key: str, *, is_bearer: bool
    ) -> Credentials | None:
        """Return the header with the key of a call; None if there is none, or nobody can read it.

        A configured key wins over that of the client.
        """
        try:
            if upstream.own is not None:
                return upstream.own
            key = self._configured_key(upstream, slot)
            if key is not None:
                credentials = _header(upstream, key)
                if not upstream.settings.slots:
                    upstream.own = credentials
                return credentials
        except InvalidSettingError as error:
            log.warning("a key cannot be read", upstream=upstream.name, slot=slot, why=str(error))
            return None
        if not client_key:
            return None
        return _header(upstream, client_key, is_bearer=is_bearer)

    def key_problem(self, upstream: Upstream, slot: str | None) -> str:
        """Return why the configured key of an upstream cannot be read; "" if it can."""
        try:
            self._configured_key(upstream, slot)
        except InvalidSettingError as error:
            return error.problem
        return ""

    def _configured_key(self, upstream: Upstream, slot: str | None) -> str | None:
        if slot is not None and upstream.settings.slots:
            return self._slot_keys(slot)
        if self.has_key(upstream):
            return read_upstream_key(upstream.name, upstream.settings, self._environ)
        return None

    # What upstreams list.

    async def models_of(
        self,
        upstream: Upstream,
        client_key: str,
        *,
        is_bearer: bool,
        slots: Iterable[str] = (),
    ) -> Sequence[str] | None:
        """Return the models that an upstream says it has, as of the last minute.

        One slot after the other is asked for, until the upstream answers its key; all who ask
        meanwhile wait for that. None if there is no key to ask with, or it does not say. Only an
        upstream with a key of its own is remembered: another key may see other models.
        """
        slots = (*slots,)
        if upstream.settings.slots and not slots:
            return None
        keys = [
            key
            for slot in slots or (None,)
            if (key := self.credentials(upstream, slot, client_key, is_bearer=is_bearer))
        ]
        if not (keys and self.has_key(upstream)):
            return await self._listed_by(upstream, keys)
        now, whose = asyncio.get_running_loop().time(), frozenset(slots)
        until, listing = upstream.listed.get(whose, (now, None))
        if listing is None or until <= now:
            listing = asyncio.create_task(self._listed_by(upstream, keys))
            upstream.listed[whose] = (now + MODELS_KEPT_SECONDS, listing)
        return await asyncio.shield(listing)

    async def _listed_by(
        self, upstream: Upstream, keys: Iterable[Credentials]
    ) -> Sequence[str] | None:
        try:
            async with asyncio.timeout(MODELS_SECONDS):
                for key in keys:
                    names = await self._listed_to(upstream, key)
                    if names is not None:
                        return names
        except TimeoutError:
            why = f"no answer within {MODELS_SECONDS:g} s"
            log.info("an upstream did not list its models", upstream=upstream.name, why=why)
        return None

    async def _listed_to(self, upstream: Upstream, key: Credentials) -> tuple[str, ...] | None:
        headers = [key.header, *upstream.headers, (b"accept-encoding", b"identity")]
        path = "/models"
        if upstream.kind == "anthropic":
            headers.append((b"anthropic-version", b"2023-06-01"))
            path = "/models?limit=1000"
        try:
            with closing(await upstream.pool.send("GET", path, headers, b"")) as response:
                body = await response.read_all(MAX_MODELS_BYTES)
                return _model_names(key.hidden_in(body)) if response.status == _OK else None
        except UpstreamError as error:
            log.info("an upstream did not list its models", upstream=upstream.name, why=str(error))
            return None

    # What answers say.

    def call_begins(self, tenant: str) -> None:
        """Earn a part of a retry for a tenant; `tenant` is empty for operators."""
        known = self._retry_credit
        credit = known.get(tenant)
        if credit is None:
            credit = FIRST_RETRY_CREDIT
            if len(known) >= MAX_TENANTS:
                del known[next(iter(known))]
        known[tenant] = min(credit + RETRIES_PER_CALL, MAX_RETRY_CREDIT)

    def may_retry(self, tenant: str) -> bool:
        """Take a retry from the budget of a tenant, if there is one."""
        credit = self._retry_credit.get(tenant, 0.0)
        if credit < 1.0:
            return False
        self._retry_credit[tenant] = credit - 1.0
        return True

    def limited(
        self,
        upstream: Upstream,
        slot: str | None,
        answer: Limited,
        now: float,
        *,
        is_of_provider: bool,
    ) -> GateClosure:
        """Return what an answer closes that asked for a pause: the key, or the model there.

        One provider behind an upstream asks for a short pause, and makes no other one longer.
        """
        if is_of_provider:
            seconds = min(pause_seconds(answer, 1), MAX_PROVIDER_PAUSE_SECONDS)
        else:
            upstream.limited_hits += 1
            seconds = pause_seconds(answer, upstream.limited_hits)
        return GateClosure(
            kind="target" if slot is None else "slot",
            name=upstream.target if slot is None else slot,
            until=now + min(seconds, MAX_PAUSE_SECONDS),
            why=answer.why or answer.error,
            cause="provider",
            by=upstream.name,
            since=now,
        )

    def used_up(
        self, upstream: Upstream, slot: str | None, headers: Mapping[str, str], now: float
    ) -> GateClosure | None:
        """Return what an answer closes whose headers say that nothing is left of a rate."""
        names = _LEFT_HEADERS[upstream.kind]
        if "0" not in headers.values() or not any(headers.get(name) == "0" for name in names):
            return None
        rows = _ROWS_OF[upstream.kind](headers, now).limits
        ends = [(one.next_reset_epoch_ms or 0) / 1_000 for one in rows if one.remaining == 0]
        until = max(ends, default=0.0)
        if until <= now:
            return None
        return GateClosure(
            kind="target" if slot is None else "slot",
            name=upstream.target if slot is None else slot,
            until=min(until, now + MAX_PAUSE_SECONDS),
            why=f"{upstream.name} says that there is nothing left of its rate",
            cause="provider",
            by=upstream.name,
            since=now,
        )

    def without_credit(
        self, upstream: Upstream, slot: str | None, said: str, now: float
    ) -> GateClosure:
        """Return what an answer closes that says that the credit of a key is used up."""
        return GateClosure(
            kind="target" if slot is None else "slot",
            name=upstream.target if slot is None else slot,
            until=now + NO_CREDIT_SECONDS,
            why=f"its credit is used up: {said}",
            cause="credit",
            by=upstream.name,
            since=now,
        )

    def failed(
        self, upstream: Upstream, why: str, now: float, *, tenants: frozenset[str]
    ) -> GateClosure | None:
        """Note a failure; return what it closes, if there were too many in a row."""
        seconds = upstream.circuit.failed(tenants)
        if seconds is None:
            return None
        return GateClosure(
            kind="target",
            name=upstream.target,
            until=now + seconds,
            why=f"{upstream.circuit.failures} calls in a row have failed, the last: {why}",
            cause="provider",
            by=upstream.name,
            since=now,
        )

    def answered(self, upstream: Upstream) -> None:
        """Note that an upstream answers."""
        upstream.circuit.answered()
        upstream.limited_hits = 0


def limits_models(kind: Kind, headers: Mapping[str, str]) -> bool:
    """Tell whether the rates in the headers of an answer are those of its model alone.

    Those of a plan are of the whole account, and have other names.
    """
    if headers.keys().isdisjoint(_LEFT_HEADERS[kind]):
        return False
    return not any(name.startswith(_UNIFIED) for name in headers)


class _Listed(msgspec.Struct):
    id: str


class _List(msgspec.Struct):
    data: list[_Listed]


_lists = msgspec.json.Decoder(_List)


def _model_names(body: bytes) -> tuple[str, ...]:
    try:
        found = _lists.decode(body).data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ()
    names = (one.id for one in found[:MAX_MODELS])
    return tuple(name for name in names if name.isprintable() and len(name) <= MAX_MODEL_LENGTH)


def _wrong_kind(model: str, found: list[Upstream], kind: Kind) -> str:
    others = ", ".join(f"{one.name} ({one.kind})" for one in found) or "no upstream"
    path = "/v1/messages" if kind == "openai" else "/v1/chat/completions or /v1/responses"
    return (
        f"model '{model}' goes to {others}, which does not speak the protocol of this address;"
        f" send it to {path}"
    )


def _header(upstream: Upstream, key: str, *, is_bearer: bool = False) -> Credentials:
    header = (b"x-api-key", key.encode())
    if upstream.kind == "openai" or is_bearer or key.startswith(_OAUTH):
        header = (b"authorization", b"Bearer " + key.encode())
    return Credentials(header, upstream.secrets)


# Which of several keys a call uses.


class Warmth(NamedTuple):
    """The key that a session used last, how much of its prompt is cached there, and for how long.

    `fresh_tokens` are those of a turn that no cache had, and `interval_seconds` is the time between
    two turns; None until there were two.
    """

    slot: str
    cached_tokens: int
    used_at: float
    cache_seconds: float
    fresh_tokens: int = 0
    interval_seconds: float | None = None

    @property
    def until(self) -> float:
        """When the cache is cold."""
        return self.used_at + self.cache_seconds

    @property
    def move_cost(self) -> float:
        """What it costs to come back from another key, in tokens: the prompt is written again."""
        return self.cached_tokens * (WRITE_COST - READ_COST)

    def spared_until(self, ends_at: float, now: float) -> float:
        """Return what the turns until a time would use of this key, in tokens."""
        if not self.interval_seconds:
            return 0.0
        turns = (ends_at - now) / self.interval_seconds
        return turns * (self.cached_tokens * READ_COST + self.fresh_tokens)


class SessionKeys:
    """Keeps a warm session on its key, and spreads new ones.

    To move a warm session costs as much as writing its prompt into a cache again, so it stays where
    it is until that key is closed or the cache is cold; unless the window of another key is about
    to end, and what the session would use of it until then, which is lost otherwise, is worth more
    than the way back. A new session goes to the key whose long window ends soonest, among those
    with room in the short one.
    """

    def __init__(self, model_of: Callable[[str], str] = lambda _call_id: "") -> None:
        self._model_of = model_of
        self._sessions: OrderedDict[str, Warmth] = OrderedDict()
        self._of_call: dict[str, str] = {}
        self._avoided: dict[str, Collection[str | None]] = {}
        self._paused: OrderedDict[tuple[str, str], KeyWait] = OrderedDict()

    def pause(self, slot: str, model: str, closure: GateClosure) -> None:
        """Keep a key from one model for a while: its provider limits models apart."""
        if closure.until is None:
            return
        self._paused[slot, model] = KeyWait(closure.until, closure.why)
        self._paused.move_to_end((slot, model))
        if len(self._paused) > MAX_PAUSED:
            self._paused.popitem(last=False)

    def paused(self, slot: str, model: str, now: float) -> KeyWait | None:
        """Return until when a key is kept from a model, and why; None if it is not."""
        if not self._paused:
            return None
        found = self._paused.get((slot, model))
        if found is not None and found.until <= now:
            del self._paused[slot, model]
            return None
        return found

    def enter(self, call_id: str, session: str) -> None:
        """Note the session of a call that is to wait."""
        if session:
            self._of_call[call_id] = session

    def leave(self, call_id: str) -> None:
        """Forget a call that has ended."""
        self._of_call.pop(call_id, None)
        self._avoided.pop(call_id, None)

    def avoid(self, call_id: str, slots: Collection[str | None]) -> None:
        """Note the keys with which a call has failed; it gets another as long as one is open."""
        self._avoided[call_id] = slots

    def used(
        self,
        session: str,
        slot: str | None,
        now: float,
        *,
        cached_tokens: int,
        fresh_tokens: int,
        cache_seconds: float,
    ) -> None:
        """Note that a session has a warm cache behind a key."""
        if not session or slot is None or not cached_tokens:
            return
        before = self._sessions.get(session)
        interval = None
        if before is not None:
            interval = max(1.0, now - before.used_at)
            if before.until > now:
                # What was written for an hour is read for an hour.
                cache_seconds = max(cache_seconds, before.cache_seconds)
        self._sessions[session] = Warmth(
            slot, cached_tokens, now, cache_seconds, fresh_tokens, interval
        )
        self._sessions.move_to_end(session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def choose(
        self,
        task: Task,
        standings: Sequence[SlotStanding],
        in_flight: Mapping[str, int],
        now: float,
    ) -> KeyChoice | KeyWait:
        """Choose the key of a call among those that are open; there is one at least.

        One that its provider has paused for the model of the call is none.
        """
        if self._paused:
            model = self._model_of(task.id)
            waits = [self.paused(one.name, model, now) for one in standings]
            if None not in waits:
                return min((one for one in waits if one is not None), key=lambda one: one.until)
            standings = [one for one, wait in zip(standings, waits, strict=True) if wait is None]
        avoided = self._avoided.get(task.id, ())
        standings = [one for one in standings if one.name not in avoided] or standings
        if task.slot is not None:
            return KeyChoice(task.slot, "the response that the call names is kept behind it")
        session = self._of_call.get(task.id, "")
        warm = self._sessions.get(session) if session else None
        if warm is not None and warm.until > now:
            for one in standings:
                if one.name == warm.slot:
                    moved = _expiring(warm, one, standings, now)
                    if moved is not None:
                        return moved
                    rule = f"its session is warm there, {warm.cached_tokens:,} tokens are cached"
                    return KeyChoice(one.name, rule)
        chosen = min(standings, key=lambda one: _preference(one, in_flight, now))
        if len(standings) == 1:
            return KeyChoice(chosen.name, "it is the only key that is open")
        resets_at = chosen.last_reset_at or chosen.resets_at
        if resets_at is not None and resets_at > now:
            return KeyChoice(chosen.name, "of the keys with room its window ends soonest")
        return KeyChoice(chosen.name, "of the keys with room it has the fewest calls in flight")


def _expiring(
    warm: Warmth, own: SlotStanding, standings: Sequence[SlotStanding], now: float
) -> KeyChoice | None:
    """Return a key with a window that is lost soon, if that is worth more than the warm cache."""
    found: list[tuple[float, SlotStanding]] = []
    for one in standings:
        ends_at = one.last_reset_at or one.resets_at
        percent = one.percent_used
        if one is own or ends_at is None or percent is None or percent >= NEARLY_USED_PERCENT:
            continue
        if now < ends_at <= min(now + EXPIRING_SECONDS, own.last_reset_at or inf):
            found.append((ends_at, one))
    for ends_at, one in sorted(found, key=lambda each: each[0]):
        spared = warm.spared_until(ends_at, now)
        if spared > warm.move_cost:
            rule = (
                f"its window ends in {(ends_at - now) / 60:.0f} min with"
                f" {100 - (one.percent_used or 0):.0f}% unused, and to use that spares"
                f" {spared:,.0f} tokens of {own.name}, where {warm.cached_tokens:,} are cached"
            )
            return KeyChoice(one.name, rule)
    return None


NEARLY_USED_PERCENT = 90.0


def _preference(
    standing: SlotStanding, in_flight: Mapping[str, int], now: float
) -> tuple[bool, float, float, int]:
    percent = standing.percent_used or 0.0
    resets_at = standing.last_reset_at or standing.resets_at
    ends_at = resets_at if resets_at is not None and resets_at > now else float("inf")
    return (percent >= NEARLY_USED_PERCENT, ends_at, percent, in_flight.get(standing.name, 0))
