"""The gateway: endpoints that speak the protocols of providers, and the way of a call.

A call comes in, waits for its turn and its money, goes to an upstream with a key, and comes back;
what it cost is booked by what the provider said. While it waits its client is kept alive.

| what happens | what is booked |
| --- | --- |
| refused, or its client went away before it was sent | nothing |
| the upstream was not reached, or answered 4xx or 5xx | nothing: it has sent no output |
| 408, 504, 524: somebody on the way stopped waiting | what was held |
| an answer that says what it used | that |
| an answer that does not | what was held, or what it can have been if that is more |
| an answer that was cut off | that, or what was counted so far if it is more |

Rule: a client that goes away changes nothing about what is booked. What was sent is read to its
end, within bounds.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path as FilePath
from time import perf_counter
from typing import Any, NamedTuple, NoReturn, TypedDict, cast
from urllib.parse import unquote, urlsplit
from weakref import ref

import msgspec
import structlog

from headgate.api.api import Api, Route
from headgate.api.auth import Admission
from headgate.api.budgets import check_own_scopes, undefined_budgets
from headgate.api.callers import Caller
from headgate.api.errors import ApiError, api_error_of
from headgate.api.forwarding import FORWARDED
from headgate.api.http.request import ClientGoneError, Head, Request
from headgate.api.http.response import Response
from headgate.api.http.slices import mapped
from headgate.api.shares import (
    ROOM_LOOK_SECONDS,
    HeldAnswer,
    Holder,
    Pool,
    check_room,
)
from headgate.api.submission import excerpt
from headgate.budgets.tracker import FRESH_SECONDS
from headgate.config.settings import GatewaySettings, Settings
from headgate.core import estimates
from headgate.core.budgets.ledger import Refused, Unit
from headgate.core.budgets.scopes import MAX_REMEMBERED_LENGTH, ROOT_NAME, Scope
from headgate.core.call import CallRecord, CallState
from headgate.core.dispatch_state import charged_by
from headgate.core.estimates import NOTHING, PROBE, Hold, Reserve
from headgate.core.gates import GateClosure
from headgate.core.lifecycle import Failed, Limited
from headgate.core.money import plain_usd
from headgate.core.task import read_traceparent
from headgate.core.task_money import TASK_TOKEN_PREFIX
from headgate.core.text import did_you_mean, duration
from headgate.engine.call_registry import (
    CallDraft,
    CallEnd,
    CallRefusedError,
    Calls,
    Grant,
    LiveCall,
)
from headgate.engine.call_registry import Route as CallRoute
from headgate.engine.task_calls import Offer, TaskAttempt
from headgate.errors import (
    CallerError,
    HeadgateError,
    LimitReachedError,
    NotDispatchingError,
    StoreError,
    to_call,
)
from headgate.executors.executor import shortened
from headgate.executors.http import refused
from headgate.executors.targets import gateway_targets
from headgate.executors.templates import ObserveSlot
from headgate.gateway.identity import (
    MAX_REMEMBERED,
    NO_KEYS,
    ClientKeys,
    Identities,
    Identity,
    Path,
    RequestHeaders,
    client_of,
    identify,
    keys_of,
    read_keys,
    session_of,
    split_prefix,
)
from headgate.gateway.protocols import (
    CODEX,
    EVENT_STREAM,
    ErrorAnswer,
    Failure,
    ListedModel,
    Protocol,
    StreamRelay,
    codex_headers,
    error_answer,
    failure_of,
    models_body,
    protocol_of,
    returned_headers,
    upstream_headers,
    upstream_query,
)
from headgate.gateway.relay import (
    FORWARDED_SECONDS,
    PLACE,
    HandoverReader,
    LeaderRelay,
    LostPlaces,
    NotRelayedError,
    Place,
    as_comment,
    forwarded_mark,
    is_forwarded_mark,
    key_of_request,
    relayed_headers,
)
from headgate.gateway.remaining import RemainingBudgets
from headgate.gateway.request_body import RequestBody
from headgate.gateway.routing import (
    CACHE_SECONDS,
    LONG_CACHE_SECONDS,
    Credentials,
    Kind,
    NoRouteError,
    SessionKeys,
    StreamMask,
    UnknownModelError,
    Upstream,
    Upstreams,
    limits_models,
)
from headgate.providers import requests
from headgate.providers.call_estimates import (
    SHORT_TOKENS,
    CallEstimates,
    strict_bound,
)
from headgate.providers.connection_pool import (
    UNCOUNTED_BYTES,
    NotSentError,
    UpstreamError,
    UpstreamResponse,
    header_lines,
)
from headgate.providers.content_coding import (
    ContentCodingError,
    ContentDecoder,
    coding_of,
    codings_of,
)
from headgate.providers.prices import (
    CHARACTERS_PER_TOKEN,
    MAX_MODEL_LENGTH,
    nearest_model,
    price_advice,
)
from headgate.providers.provider import (
    KEY_STATUSES,
    Shortage,
    error_in,
    refuses_key,
    shortage_of,
    told_to_others,
)
from headgate.providers.requests import (
    MAX_VALUES,
    ModelCall,
    has_too_many_values,
    kind_of,
    most_values,
    read_call,
    with_max_tokens,
    with_model,
    with_stream_usage,
)
from headgate.providers.usage import MAX_STREAM_BYTES, ReportedUsage, reported_in
from headgate.storage.tokens import Bounds

log = structlog.get_logger("headgate.gateway")

MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_ANSWER_BYTES = 64 * 1024 * 1024
MAX_ERROR_BYTES = 256 * 1024
MAX_TAIL_BYTES = 64 * 1024
RETRY_AFTER_SECONDS = 55
"""The longest wait that no client takes for a refusal."""

STOP_SECONDS = 5
"""After so long a client may come back that was sent away because the service stops."""

LEADER_LOOK_SECONDS = 0.1
"""How often a node that does not decide looks who does, while nobody takes a call."""

IN_MEMORY_SECONDS = 1.0
ENDED_SECONDS = 2.0
"""Since when the store is asked whether a call has ended, and for how long it is asked."""

BODY_ROOM_SECONDS = 600.0
"""How long a call with its turn waits for room in memory: others of its caller may take minutes."""

MAX_STORED = 10_000
MAX_STORED_EACH = 2_500
MAX_ID_PLACE = 4_096
"""How many stored responses are remembered, of all and of one project, and where in an answer its
id is looked for. The store is asked about others."""

RECALLED_CALLS = 5_000
"""From how many of the latest calls it is learned, after a start, what calls cost here."""

LEAST_CACHED_TOKENS = 1_024
"""Providers cache prompts from this length on, some of them without saying so."""

OTHER = "other"
"""The protocol of a request that is passed on as it came."""

MAX_CALLS = 10_000
SPILL_AGAIN_SECONDS = 2.0
"""After so long it is seen again whether a body has room on the disk that had none."""

SPILL_SHARE = 16
"""When bodies have one part in so many of the memory that is for them, none waits in it."""

LARGE_BODY_BYTES = 512 * 1024
LARGE_ANSWER_BYTES = 1024 * 1024
MANY_VALUES = 10_000
"""What is larger, or has more values, is read in a thread while others go on."""

LONGEST_ANSWER = 1_000_000
MAX_WARNING_BYTES = 1_000
MOST_ANSWERS = 1_000_000
"""How many answers to a call are kept as asked for; a request may name any number."""

_MARGIN_BYTES = 1_000
_MOST_DIGITS = 10
_OK = 200
_TOO_MANY = 429
_ERRORS = 400
_UPGRADE_REQUIRED = 426
_SERVER_ERRORS = 500


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long things may take on the way of a call, in seconds.

    A client that streams gets the head of its answer after `open_seconds` in the queue, and then an
    event every `keep_alive_seconds`. The place of a call is kept for `kept_seconds` whose client
    has gone, or is late to come back. A call with several members looks for an open one every
    `reroute_seconds`. An answer whose client has gone is read on for `drain_seconds` at most. The
    body of a call that waits is kept in memory for `memory_seconds`. A stream waits for a client
    that takes it too slowly for `slow_seconds` in all; then it counts as gone. A call that no node
    decides about, because they change places, is kept for `leader_seconds`, and for
    `stopping_seconds` where this one stops and may have been the last.
    """

    open_seconds: float = 5.0
    keep_alive_seconds: float = 15.0
    kept_seconds: float = 60.0
    reroute_seconds: float = 1.0
    drain_seconds: float = 300.0
    memory_seconds: float = 2.0
    slow_seconds: float = 60.0
    leader_seconds: float = 15.0
    stopping_seconds: float = 4.0


class _ClientLeft(Exception):  # noqa: N818 - it is no error
    """The client of a call has gone."""


class _HandedOver(Exception):  # noqa: N818 - it is no error
    """Another node decides about a call that waits; it keeps its place.

    With `was_taken` a node had it until now, or this one.
    """

    def __init__(self, place: Place, *, was_taken: bool) -> None:
        super().__init__()
        self.place = place
        self.was_taken = was_taken


class _Refusal(Exception):  # noqa: N818 - it becomes an answer
    """A call is not answered by a model; this is what its client is told."""

    def __init__(
        self,
        failure: Failure,
        message: str,
        *,
        resets_at: float | None = None,
        retry_after_seconds: float | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.failure = failure
        self.message = message
        self.resets_at = resets_at
        self.retry_after_seconds = retry_after_seconds
        self.headers = headers


class Client:
    """The client of one call: sends it the answer, and knows whether it has gone."""

    def __init__(
        self,
        request: Request,
        send: Any,  # noqa: ANN401 - as ASGI has it
        *,
        slow_seconds: float,
    ) -> None:
        self.request = request
        self._send = send
        self._slow_seconds = slow_seconds
        loop = asyncio.get_running_loop()
        self._time = loop.time
        self.came_at = loop.time()
        self.began_at = 0.0
        """Since when this node has worked on its request, less the time of the upload."""

        self.left_at = 0.0
        self.has_gone = False
        self.has_head = False
        self.relay: StreamRelay | None = None
        """What makes the events of its stream, once it has one."""

        self.live: LiveCall | None = None
        self.place: Place | None = None
        """The place that its call has kept from another node."""

        self.request_key = b""
        """What its place is bound to, once that is known."""

        self._body: bytes | None = None
        self._gone: asyncio.Future[None] | None = None
        request.when_gone(self._note_gone)

    @property
    def gone(self) -> asyncio.Future[None]:
        """What is done once the client has gone."""
        if self._gone is None:
            self._gone = asyncio.get_running_loop().create_future()
            if self.has_gone:
                self._gone.set_result(None)
        return self._gone

    def _note_gone(self) -> None:
        if not self.has_gone:
            self.left_at = self._time()
        self.has_gone = True
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)

    def body_at_once(self) -> bytes | None:
        """Return what the client has sent, if it is here; it is not kept here."""
        body, self._body = self._body, None
        return self.request.body_at_once() if body is None else body

    async def whole_body(self) -> bytes:
        """Return what the client has sent; it is not kept here."""
        body = self.body_at_once()
        return await self.request.whole_body() if body is None else body

    def read_again(self, body: bytes) -> None:
        """Keep the body for whoever answers instead."""
        self._body = body

    async def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head of an answer; what follows is sent in pieces."""
        self.has_head = True
        named = [(b"x-request-id", self.request.request_id), *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": named})

    async def piece(self, data: bytes) -> None:
        """Send a piece; a client that does not take it counts as gone, or takes all too slowly."""
        if self.has_gone or not data:
            return
        since = self._time()
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            self._note_gone()
        self._slow_seconds -= self._time() - since
        if self._slow_seconds < 0:
            # The answer is read on without it, and gives its permit back.
            self._note_gone()

    async def end(self) -> None:
        """End an answer that was sent in pieces."""
        if not self.has_gone:
            await self._send({"type": "http.response.body", "body": b""})

    async def whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Send an answer in one piece."""
        if self.has_gone:
            return
        self.has_head = True
        length = (b"content-length", b"%d" % len(body))
        named = [(b"x-request-id", self.request.request_id), length, *headers]
        answer = self.request.answer
        if answer is not None:
            answer(status, named, body)
            return
        await self._send({"type": "http.response.start", "status": status, "headers": named})
        await self._send({"type": "http.response.body", "body": body})


class Sender(NamedTuple):
    """Who sends a request: its identity, its keys, and under which token it came."""

    identity: Identity
    keys: ClientKeys
    caller: Caller
    headers: RequestHeaders
    holder: Holder
    reserve: Reserve
    task: TaskAttempt | None = None
    """The running task that makes the call."""
    warning: bytes = b""
    """What the answer says of budgets that the call names and nobody has defined."""

    @property
    def tenant(self) -> str:
        """Whose failures count together, whatever tokens and tasks they come from.

        It is empty where an operator makes the call. A tenant is what its tokens are bound to, or
        the project of a task; a token that is bound to nothing is one by itself.
        """
        if self.task is not None:
            task = self.task.task
            return f"project:{task.project_id}" if task.has_claims else ""
        caller = self.caller
        if caller.is_trusted:
            return ""
        if caller.project_id is not None:
            return f"project:{caller.project_id}"
        if caller.agent_id is not None:
            return f"agent:{caller.agent_id}"
        return f"token:{caller.token_id}"

    @property
    def tenants(self) -> frozenset[str]:
        """Who may be the tenant: a task was sent for its project, or for its agent alone."""
        task = None if self.task is None else self.task.task
        if task is None or not task.has_claims or task.agent_id is None:
            return frozenset((self.tenant,))
        return frozenset((self.tenant, f"agent:{task.agent_id}"))

    def has(self, stored: StoredResponse) -> bool:
        """Tell whether the sender may have a response; a task has what whoever sent it has."""
        bounds = self.caller.bounds
        if self.task is not None:
            task = self.task.task
            agent_id = task.agent_id if task.has_claims else None
            bounds = Bounds(project_id=task.project_id, agent_id=agent_id)
        return stored.project_id == self.identity.project_id and bounds.has(
            agent_id=stored.agent_id, project_id=stored.project_id
        )


class KnownSender(NamedTuple):
    """Who sends requests with one head, as long as the settings and the admission hold."""

    settings: Settings
    admission: Admission
    identity: Identity
    keys: ClientKeys
    headers: RequestHeaders
    reserve: Reserve


def _read_large(protocol: Protocol, body: bytes) -> tuple[ModelCall, RequestBody]:
    """Read a body; refuse one of so many values that to decode it would stop everybody."""
    if has_too_many_values(body):
        line = f"the body has more than {MAX_VALUES:,} values"
        raise _Refusal(Failure.TOO_LARGE, line)
    return read_call(protocol.path, body), RequestBody(body, hashlib.sha256(body))


class Asked:
    """One call as it was asked for, with what is known of it on its way."""

    __slots__ = (
        "__weakref__",
        "added_seconds",
        "body",
        "cache_seconds",
        "call",
        "client",
        "failed",
        "is_free",
        "is_large",
        "live",
        "members",
        "method",
        "name",
        "path",
        "protocol",
        "refused_keys",
        "reserve",
        "response_model",
        "sender",
        "session",
        "slot",
        "waited_seconds",
        "who",
    )

    def __init__(
        self,
        client: Client,
        sender: Sender,
        protocol: Protocol,
        call: ModelCall,
        body: RequestBody,
    ) -> None:
        self.waited_seconds = self.added_seconds = 0.0
        self.response_model = ""
        self.cache_seconds = 0.0
        """How long its provider keeps the prompt, if that is not as usual."""

        self.client = client
        self.sender = sender
        self.who = sender.identity
        self.protocol = protocol
        self.method = "POST"
        self.path = ""
        self.name = protocol._value_
        self.is_free = not protocol.is_model_call
        self.body = body
        self.call = call
        self.session = session_of(
            sender.headers, cache_key=call.cache_key, prefix_hash=call.prefix_hash
        )
        self.members: list[tuple[Upstream, str]] = []
        self.failed: set[tuple[str, str, str | None]] = set()
        """Where it has failed: the upstream, the model there, and the slot."""

        self.refused_keys: dict[str, int] = {}
        """The keys with which it got a 401 or 403, as people are told of them, and which it was."""

        self.slot: str | None = None
        """The key behind which the response is kept that it names: no other key will do."""

        self.reserve = sender.reserve
        self.is_large = False
        """Whether it takes longer to read its body than others should wait."""

        self.live: LiveCall | None = None

    @property
    def holds_stream(self) -> bool:
        """Whether its client can be kept alive while it waits."""
        return self.call.is_stream and self.protocol.has_streams


def _base_url_advice(path: str, base: str = "") -> str:
    """Return what is wrong with the base URL of a client, if its path shows it.

    `base` is what comes before the path.
    """
    if protocol_of(f"/v1{path}") is not None:
        before, _, name = base.rpartition("/")
        if protocol_of(f"/v1/{name}{path}") is not None:
            # In /p/web/chat/completions no agent is named chat.
            base = before
        return f"the base URL must end in /v1, as in OPENAI_BASE_URL={base}/v1"
    if path.startswith("/v1/v1/") and protocol_of(path.removeprefix("/v1")) is not None:
        return f"the base URL must not end in /v1, as in ANTHROPIC_BASE_URL={base}"
    return ""


def reached_at(address: str) -> str:
    """Return an address under which a process on this machine reaches the service."""
    parts = urlsplit(address)
    if parts.hostname not in ("0.0.0.0", "::"):  # noqa: S104
        return address.rstrip("/")
    return f"{parts.scheme}://127.0.0.1:{parts.port}"


def call_headers(live: LiveCall, now: Callable[[], float]) -> list[tuple[bytes, bytes]]:
    """Return which call an answer is of, and for how long it has waited; one that waits, so far."""
    record = live.record
    until = None if record.state is CallState.WAITING else record.started_at or record.ended_at
    waited = (until or now()) - record.created_at
    return [
        (b"x-headgate-call-id", record.id.encode()),
        (b"x-headgate-waited-ms", b"%d" % round(1_000 * max(0.0, waited))),
    ]


class StoredResponse(NamedTuple):
    """Whose a response is that a provider keeps, and behind which upstream and key."""

    project_id: str
    agent_id: str
    upstream: str = ""
    slot: str | None = None

    @classmethod
    def of(cls, record: CallRecord) -> StoredResponse:
        """Return what is known of a response by the call that made it."""
        return cls(record.project_id, record.agent_id, record.upstream, record.slot)


class StoredResponses:
    """The responses that providers keep; a busy project pushes out its own first."""

    def __init__(self) -> None:
        self._known: dict[str, StoredResponse] = {}
        self._by_project: dict[str, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, response_id: str) -> StoredResponse | None:
        """Return what is remembered of a response."""
        return self._known.get(response_id)

    def note(self, response_id: str, stored: StoredResponse) -> None:
        """Remember a response."""
        if response_id in self._known:
            return
        self._known[response_id] = stored
        own = self._by_project.setdefault(stored.project_id, {})
        own[response_id] = None
        if len(own) > MAX_STORED_EACH:
            self._forget_oldest(own)
        elif len(self._known) > MAX_STORED:
            self._forget_oldest(max(self._by_project.values(), key=len))

    def _forget_oldest(self, own: dict[str, None]) -> None:
        oldest = next(iter(own))
        del own[oldest]
        project_id = self._known.pop(oldest).project_id
        if not own:
            del self._by_project[project_id]


class Gateway:
    """Answers in the protocols of providers; follows the settings in force."""

    max_body_bytes = MAX_BODY_BYTES

    def __init__(
        self,
        api: Api,
        calls: Calls,
        upstreams: Upstreams,
        settings: Settings,
        *,
        observe_slot: ObserveSlot,
        folder: FilePath,
    ) -> None:
        self._api = api
        self._folder = folder
        """Where the bodies of calls lie that wait."""

        self._calls = calls
        self._upstreams = upstreams
        self._prices = api.prices
        self._estimates = CallEstimates()
        self._observe_slot = observe_slot
        self._leader = LeaderRelay(lambda: api.engine.node.leader_address)
        self._lost = LostPlaces()
        self._stored = StoredResponses()
        self._under_way: dict[str, str] = {}
        """The calls whose responses are made in the background, by the ids of these."""

        self._recalled: object = self
        self._recalling = asyncio.Lock()
        self.sessions = SessionKeys(calls.model_of)
        calls.is_paused = self._is_paused
        self._identities = Identities()
        self._in_hand = Pool(MAX_CALLS)
        self._relayed = 0
        self._follow(settings)
        self._is_stopping = False
        self._waiting: set[asyncio.Future[None]] = set()
        self._at_upstreams: Counter[str] = Counter()
        """How many calls each caller has at upstreams."""

        self._idle = asyncio.Event()
        self._remaining = RemainingBudgets(api.tracker.ledger)
        self._warnings: dict[tuple[tuple[Scope, ...], Bounds], tuple[bytes, float]] = {}
        self.patience = Patience()
        self.routes = ROUTES

    def _is_paused(self, slot: str, model: str) -> bool:
        return self.sessions.paused(slot, model, self._api.engine.now()) is not None

    @property
    def settings(self) -> GatewaySettings:
        """What applies to all calls."""
        return self._settings.gateway

    def reconfigure(self, settings: Settings) -> None:
        """Go by other settings, for calls that come from now on."""
        self._follow(settings)
        self._upstreams.reconfigure(settings)
        self._identities.forget()
        self._warnings.clear()
        self._tell_waiting()

    def _follow(self, settings: Settings) -> None:
        self._settings = settings
        self._task_targets = gateway_targets(settings.all_targets)
        self._has_strict_budgets = any(
            one.reserve is Reserve.STRICT for one in settings.budgets.values()
        )
        if self._calls.escrow is not None:
            self._calls.escrow.is_on = self.settings.escrow

    def _tell_waiting(self) -> None:
        """Have all calls that wait look at what has changed."""
        for news in self._waiting:
            if not news.done():
                news.set_result(None)

    @property
    def in_hand(self) -> int:
        """How many calls wait and run at this node."""
        return self._in_hand.taken

    async def drain(self, seconds: float) -> None:
        """Take no more calls, send those away that wait, and let those end that run.

        Running tasks go on making calls, which they need to finish.
        """
        self._is_stopping = True
        self._tell_waiting()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._in_hand.taken or self._relayed:
                    self._idle.clear()
                    await self._idle.wait()

    async def close(self) -> None:
        """Close the connections to all upstreams."""
        await self._upstreams.close()
        await self._leader.close()

    # At the door.

    def has(self, method: str, path: str) -> bool:
        """Tell whether a request is for the gateway."""
        if path.startswith(_PATHS):
            return self._settings.gateway.enabled
        if method == "POST" and _base_url_advice(path):
            return self.settings.enabled
        return method == "HEAD" and path in ("/", "/api/hello") and self.settings.enabled

    def takes(self, url: bytes) -> bool:
        """Tell by its address whether a request with a body is for the gateway."""
        if url.startswith(_URLS):
            return self._settings.gateway.enabled
        return self.has("POST", url.partition(b"?")[0].decode("latin-1"))

    def check_head(self, head: Head) -> Caller | None:
        """Refuse by its head what comes to another host, from a page of another, or from nobody.

        Return who sends a token that was looked up a moment ago, in whichever header.
        """
        auth = self._api.auth
        keys = NO_KEYS
        if head.authorization or head.api_key:
            keys = read_keys(head.authorization, head.api_key)
        if keys.token and not keys.token.startswith(TASK_TOKEN_PREFIX):
            return auth.check_head(head._replace(authorization=_shown(keys)))
        auth.check_host_and_origin(head.host, head.origin)
        if not keys.token and auth.rules.needs_token:
            raise ApiError("unauthorized", _SEND_TOKEN)
        if keys.token and not self._calls.tasks.may_be_token(keys.token):
            raise ApiError("unauthorized", _NO_ATTEMPT)
        return None

    def refusal(
        self, url: bytes, headers: Sequence[tuple[bytes, bytes]], api_error: ApiError
    ) -> Response:
        """Return the answer to a request that is refused by its head, as its protocol has it."""
        spoken: Protocol | None = None
        with suppress(ApiError):
            path = url.partition(b"?")[0].decode("latin-1")
            spoken = protocol_of(split_prefix(path).rest)
        answer = _error_answer(_refusal_of(api_error), spoken, RequestHeaders(headers))
        # What is wrong with a head itself has statuses that no protocol has another for.
        status = api_error.kind.status
        return Response(
            answer.status if status in _BY_STATUS else status, answer.body, answer.headers
        )

    async def serve(self, request: Request, send: Any) -> None:  # noqa: ANN401 - as ASGI has it
        """Answer a request, whatever happens, in the shape of its protocol."""
        client = Client(request, send, slow_seconds=self.patience.slow_seconds)
        protocol: Protocol | None = None
        try:
            asked_for = request.kept.get(_PATH)
            if asked_for is None:
                path = split_prefix(request.raw_path())
                asked_for = request.kept[_PATH] = (path, protocol_of(path.rest))
            path, protocol = asked_for
            await self._serve(client, path, protocol)
        except ClientGoneError:
            return
        except _Refusal as refusal:
            await self._fail(client, protocol, refusal)
        except ApiError as error:
            await self._fail(client, protocol, _refusal_of(error))
        except HeadgateError as error:
            await self._fail(client, protocol, _refusal_of(api_error_of(error)))
        except Exception:
            log.exception("a call failed", request_id=request.request_id.decode("ascii", "replace"))
            fault = _Refusal(Failure.INTERNAL, "an error of the gateway")
            await self._fail(client, protocol, fault)

    async def _fail(self, client: Client, spoken: Protocol | None, refusal: _Refusal) -> None:
        """Tell a client that its call is not answered: in its open stream, or instead of one."""
        if client.has_gone:
            return
        named = RequestHeaders(client.request.all_headers())
        if client.has_head:
            relay = client.relay or StreamRelay(_spoken_by(named, spoken))
            seconds = refusal.retry_after_seconds
            await client.piece(
                relay.fail(refusal.failure, refusal.message, retry_after_seconds=seconds)
            )
            await client.end()
            return
        answer = _error_answer(refusal, spoken, named)
        headers = [_JSON, *answer.headers, *refusal.headers]
        if client.live is not None:
            headers += call_headers(client.live, self._api.engine.now)
            headers += self._budget_headers(client.live.record, client.request.caller.bounds)
        await client.whole(answer.status, headers, answer.body)

    async def _serve(self, client: Client, prefixed: Path, protocol: Protocol | None) -> None:
        """Answer a request, or have the node that decides answer it, whichever that is by then."""
        request = client.request
        if request.method == "HEAD":
            await client.whole(_OK, [], b"")
            return
        if protocol is None:
            base = f"{request.address}{request.raw_path().removesuffix(prefixed.rest)}"
            if advice := _base_url_advice(prefixed.rest, base):
                raise _Refusal(Failure.NOT_FOUND, f"there is nothing at {prefixed.rest}: {advice}")
        if not self._api.engine.store.is_shared:
            try:
                await self._answer(client, prefixed, protocol)
            except _HandedOver:
                raise _stopping() from None
            return
        now = asyncio.get_running_loop().time
        is_forwarded = await self._is_forwarded(request)
        if is_forwarded:
            await self._take_forwarded_place(client)
        elif self._lost:
            body = await client.whole_body()
            client.read_again(body)
            client.place = self._lost.take(_lost_key(client, body), now())
            del body
        if not self._api.engine.dispatcher.is_leading and not is_forwarded:
            await self._note_sender(request)
        gives_up_at = now() + self.patience.leader_seconds
        while True:
            since, was_taken = now(), False
            try:
                if self._api.engine.dispatcher.is_leading:
                    await self._answer(client, prefixed, protocol)
                    return
                if is_forwarded:
                    await self._send_back(client)
                    return
                if self._is_stopping and client.place is None and not _is_of_task(request):
                    # It would keep this node from stopping. What waited here goes on.
                    raise _stopping()
                await self._pass_on(client)
            except _HandedOver as handed_over:
                client.place, was_taken = handed_over.place, handed_over.was_taken
            except NotDispatchingError:
                # Another node decides since the tasks were looked at.
                now_at = self._api.engine.now()
                client.place = client.place or Place(self._calls.new_call_id(), now_at)
            else:
                return
            if is_forwarded:
                continue
            if was_taken and now() - since > LEADER_LOOK_SECONDS:
                # Somebody had it until now.
                gives_up_at = now() + self.patience.leader_seconds
            await self._until_decided(client, gives_up_at)

    async def _answer(self, client: Client, prefixed: Path, protocol: Protocol | None) -> None:
        """Answer a request at the node that decides."""
        client.began_at = perf_counter()
        request, path = client.request, prefixed.rest
        if self._recalled != self._api.engine.dispatcher.leads_since:
            await self._recall()
        who = self._known_sender(request) or await self._sender(request, prefixed)
        if protocol is not None and request.method == "POST":
            await self._model_call(client, who, protocol)
        elif path.rstrip("/") == "/v1/models" and request.method == "GET":
            await self._show_models(client, who)
        elif path.startswith("/v1/models/") and request.method == "GET":
            await self._show_model(client, who, unquote(path.removeprefix("/v1/models/")))
        elif path.rstrip("/") == "/v1/responses" and request.method == "GET":
            line = "there are no WebSockets here; send POST /v1/responses"
            answer = error_answer(Protocol.RESPONSES, Failure.BAD_REQUEST, line)
            await client.whole(_UPGRADE_REQUIRED, [_JSON], answer.body)
        elif path.startswith("/v1/responses/"):
            rest = path.removeprefix("/v1")
            upstream = await self._keeper_of(rest, who) or self._first("openai")
            await self._pass_through(client, who, upstream, rest)
        elif path.startswith("/upstreams/"):
            await self._at_upstream(client, who, path)
        else:
            raise _Refusal(Failure.NOT_FOUND, f"there is nothing at {path} for {request.method}")

    async def _recall(self) -> None:
        """Learn from the latest calls what calls cost here, and whose the stored responses are.

        Another process may have made them: this one before its restart, or the last leader.
        """
        async with self._recalling:
            led_since = self._api.engine.dispatcher.leads_since
            store = self._api.engine.call_store
            if self._recalled == led_since or store is None:
                return
            self._upstreams.secret = await self._calls.tasks.secret_for("keys of clients")
            records = await store.latest(RECALLED_CALLS)
            learned = CallEstimates()
            await mapped(records, partial(_learn_again, learned))
            self._estimates = learned
            for one in records:
                if one.response_id:
                    self._stored.note(one.response_id, StoredResponse.of(one))
            under_way = {one.response_id: one.id for one in records if one.reservation_id}
            self._under_way = {**under_way, **self._under_way}
            self._recalled = led_since

    async def _until_decided(self, client: Client, gives_up_at: float) -> None:
        """Wait until some node may decide about a call; raise a refusal if that takes too long."""
        now = asyncio.get_running_loop().time
        if self._is_stopping:
            gives_up_at = min(gives_up_at, now() + self.patience.stopping_seconds)
        node, dispatcher = self._api.engine.node, self._api.engine.dispatcher
        while True:
            if now() >= gives_up_at:
                raise _stopping() if self._is_stopping else _undecided()
            await asyncio.wait((client.gone,), timeout=LEADER_LOOK_SECONDS)
            if client.has_gone:
                raise ClientGoneError
            is_elsewhere = node.leader_address and node.leader_id != node.node_id
            if dispatcher.is_leading or is_elsewhere:
                return

    async def _place_secret(self) -> bytes:
        return await self._calls.tasks.secret_for("places of calls")

    async def _is_forwarded(self, request: Request) -> bool:
        """Tell whether another node has passed a request on; a client may say so, and has not."""
        mark = request.header(FORWARDED)
        if not mark:
            return False
        secret = await self._place_secret()
        return is_forwarded_mark(mark, _target_of(request), self._api.engine.now(), secret)

    async def _take_forwarded_place(self, client: Client) -> None:
        """Take the place that came with a request, unless its call has ended: then its time."""
        body = await client.whole_body()
        client.read_again(body)
        client.request_key = await _request_key(client.request, body)
        place = await self._read_place(client, client.request.header(PLACE))
        if place is not None and await self._has_ended(place):
            place = place._replace(call_id=self._calls.new_call_id())
        client.place = place

    async def _has_ended(self, place: Place) -> bool:
        """Tell whether the store has the end of a call; what ended of late is known in memory."""
        store = self._api.engine.call_store
        if store is None or self._api.engine.now() - place.created_at < IN_MEMORY_SECONDS:
            return False
        try:
            async with asyncio.timeout(ENDED_SECONDS):
                return bool(await store.ended([place.call_id]))
        except (TimeoutError, StoreError):
            # Another id does no harm; one that is used twice is booked once.
            return True

    async def _read_place(self, client: Client, value: bytes) -> Place | None:
        if not value:
            return None
        place = Place.read(value, await self._place_secret(), client.request_key)
        if place is None:
            return None
        # One that has waited for too long is refused where it waits, and not here.
        most = self.settings.max_wait_seconds + FORWARDED_SECONDS
        return place if self._api.engine.now() - place.created_at <= most else None

    async def _send_back(self, client: Client) -> None:
        """Send a call back to the node that has its client: it is not decided about here."""
        if client.place is None:
            client.place = Place(self._calls.new_call_id(), self._api.engine.now())
        signed = client.place.signed(await self._place_secret(), client.request_key)
        if client.has_head:
            await client.piece(as_comment(signed))
            await client.end()
            return
        refusal = _undecided()
        protocol = protocol_of(split_prefix(client.request.raw_path()).rest) or Protocol.CHAT
        answer = error_answer(protocol, refusal.failure, refusal.message)
        await client.whole(answer.status, [_JSON, *answer.headers, (PLACE, signed)], answer.body)

    async def _pass_on(self, client: Client) -> None:
        """Pass a request on to the node that decides, and its answer back as it comes."""
        address = self._api.engine.node.leader_address
        body = await client.whole_body()
        if not address:
            self._ask_again(client, body)
        self._relayed += 1
        lost = self._leader.watch(address)
        try:
            await self._relay_to(address, client, body, lost)
        finally:
            self._leader.unwatch(address, lost)
            self._relayed -= 1
            self._idle.set()

    def _ask_again(self, client: Client, body: bytes, place: Place | None = None) -> NoReturn:
        """Have a call wait for another node to decide; none has had it, or one has sent it back."""
        client.read_again(body)
        was_taken = place is not None
        place = place or client.place
        place = place or Place(self._calls.new_call_id(), self._api.engine.now())
        raise _HandedOver(place, was_taken=was_taken)

    async def _relay_to(
        self, address: str, client: Client, body: bytes, lost: asyncio.Future[None]
    ) -> None:
        request = client.request
        path = _path_of(request)
        now = asyncio.get_running_loop().time
        if client.place is None:
            # Its id comes from here: its client is told it, whatever becomes of the node.
            came_at = self._api.engine.now() - (now() - client.came_at)
            client.place = Place(self._calls.new_call_id(), came_at)
        secret = await self._place_secret()
        client.request_key = client.request_key or await _request_key(request, body)
        sending = asyncio.ensure_future(
            self._leader.send(
                address,
                request.method,
                path,
                request.all_headers(),
                body,
                mark=forwarded_mark(_target_of(request), self._api.engine.now(), secret),
                place=client.place.signed(secret, client.request_key),
            )
        )
        await asyncio.wait((sending, client.gone, lost), return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():
            # Nobody waits for it any more, and whoever decides is to know that.
            sending.cancel()
            if client.has_gone:
                return
            raise self._lost_with_leader(client, client.place, body)
        try:
            sent = sending.result()
        except NotRelayedError as error:
            if not error.was_sent:
                self._ask_again(client, body)
            raise self._lost_with_leader(client, client.place, body) from None
        with sent as response:
            lost.add_done_callback(lambda _: response.close())
            kept = await self._read_place(client, response.header(PLACE))
            if kept is not None:
                self._ask_again(client, body, kept)
            await self._relay_answer(client, body, response)

    def _lost_with_leader(self, client: Client, place: Place, body: bytes) -> _Refusal:
        """Refuse a call whose node is lost, and keep its position.

        Whether it is to be sent again, its client decides; that is another call then.
        """
        retry = Place(self._calls.new_call_id(), place.created_at)
        self._lost.keep(_lost_key(client, body), retry, asyncio.get_running_loop().time())
        return _lost_with_node(place.call_id)

    async def _relay_answer(self, client: Client, body: bytes, response: UpstreamResponse) -> None:
        is_stream = response.header(b"content-type").startswith(b"text/event-stream")
        if not client.has_head:
            await client.head(response.status, relayed_headers(response))
        elif not is_stream:
            # Its stream is open, so this is an error, which it has to be told in the stream.
            raise _undecided()
        handover = HandoverReader()
        try:
            while not client.has_gone and (piece := await response.read()):
                await client.piece(handover.feed(piece) if is_stream else piece)
        except UpstreamError:
            # The connection is closed then, and the client notices that there is no end.
            return
        await client.piece(handover.finish())
        place = await self._read_place(client, handover.signed_place)
        if place is not None and not client.has_gone:
            self._ask_again(client, body, place)
        await client.end()

    async def _at_upstream(self, client: Client, sender: Sender, path: str) -> None:
        """Answer what was sent to one upstream by its name; its version may be in the path."""
        _, _, name, *parts = path.split("/")
        upstream = self._upstreams.get(unquote(name))
        if upstream is None:
            line = f"there is no upstream '{excerpt(name)}'; there are: {self._names()}"
            raise _Refusal(Failure.NOT_FOUND, line)
        rest = "/" + "/".join(parts)
        if upstream.settings.api_url.endswith("/v1"):
            rest = rest.removeprefix("/v1")
        protocol = protocol_of(f"/v1{rest}") if client.request.method == "POST" else None
        if protocol is not None and protocol.kind == upstream.kind:
            await self._model_call(client, sender, protocol, upstream)
        else:
            await self._pass_through(client, sender, upstream, rest)

    async def _sender(self, request: Request, path: Path) -> Sender:
        """Return who makes a call; a token is asked for where the rest of the API asks for one."""
        headers = RequestHeaders(request.all_headers())
        keys = keys_of(headers)
        if keys.token.startswith(TASK_TOKEN_PREFIX):
            return await self._sending_task(request, path, headers, keys)
        settings = self._settings
        admission = await self._admitted(request, headers, keys)
        caller = admission.caller
        who = self._identities.get(
            path,
            headers,
            bounds=caller.bounds,
            knows_project=self._api.submission_parser.knows_project,
            project_names=self._api.submission_parser.project_names,
        )
        if not self._passes_keys:
            keys = ClientKeys(token=keys.token)
        reserve = self._reserve_mode(who)
        further = caller.further(who.scopes)
        is_counted = bool(further) and not caller.is_trusted
        if is_counted:
            await check_own_scopes(self._api, caller, further)
        warning = await self._scope_warning(caller, further)
        if not is_counted and not warning:
            request.kept[_SENDER] = KnownSender(settings, admission, who, keys, headers, reserve)
        return Sender(who, keys, caller, headers, request.holder, reserve, warning=warning)

    async def _admitted(
        self, request: Request, headers: RequestHeaders, keys: ClientKeys
    ) -> Admission:
        """Let in whoever sends a request, or refuse it; from now on it counts for that token."""
        shown = _shown(keys)
        is_shown = headers.raw(b"authorization") == shown
        asked = request if is_shown else request.with_authorization(shown)
        auth = self._api.auth
        if not keys.token and auth.rules.needs_token:
            raise _Refusal(Failure.UNAUTHORIZED, _SEND_TOKEN)
        caller = auth.authenticate(asked, "submit")
        if caller is None:
            caller = await auth.look_up(asked, "submit")
        admission = auth.admission(asked, caller)
        request.identify(caller)
        return admission

    async def _note_sender(self, request: Request) -> None:
        """Have a request that another node answers count here for whoever sends it.

        That node lets it in or not: where the store is away it is asked all the same.
        """
        if request.seat is not None and request.seat.is_known:
            # Its head was enough.
            return
        headers = RequestHeaders(request.all_headers())
        keys = keys_of(headers)
        if not keys.token:
            return
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(ENDED_SECONDS):
                if keys.token.startswith(TASK_TOKEN_PREFIX):
                    project_id = await self._calls.tasks.project_of(keys.token)
                    if project_id is None:
                        raise _Refusal(Failure.UNAUTHORIZED, _NO_ATTEMPT)
                    request.identify(_caller_for_tasks(project_id))
                else:
                    await self._admitted(request, headers, keys)

    async def _scope_warning(self, caller: Caller, scopes: list[Scope]) -> bytes:
        """Return a warning about budgets that nobody has defined, most likely typing errors.

        What was found is kept for a while, so that not every call looks for a nearest name.
        """
        if not scopes:
            return b""
        now = asyncio.get_running_loop().time()
        key = (tuple(scopes), caller.bounds)
        warning, until = self._warnings.get(key, (b"", 0.0))
        if now < until:
            return warning
        lines = await undefined_budgets(self._api, caller, scopes)
        warning = " ".join(lines)[:MAX_WARNING_BYTES].encode("ascii", "replace")
        if sum(map(len, scopes)) <= MAX_REMEMBERED_LENGTH:
            if len(self._warnings) >= MAX_REMEMBERED:
                self._warnings.clear()
            self._warnings[key] = (warning, now + FRESH_SECONDS)
        return warning

    def _known_sender(self, request: Request) -> Sender | None:
        """Return who makes a call by the same head as one before, if that still holds."""
        known: KnownSender | None = request.kept.get(_SENDER)
        if known is None or known.settings is not self._settings:
            return None
        if not self._api.auth.still_holds(known.admission):
            return None
        caller = known.admission.caller
        request.identify(caller)
        seat = request.seat
        holder = request.holder if seat is None else seat.holder
        return Sender(known.identity, known.keys, caller, known.headers, holder, known.reserve)

    async def _sending_task(
        self, request: Request, path: Path, headers: RequestHeaders, keys: ClientKeys
    ) -> Sender:
        """Return the running task that makes a call: all that it is comes from the task."""
        self._api.auth.authenticate(request.with_authorization(b""), None)
        attempt = await self._calls.tasks.attempt_of(keys.token)
        if attempt is None:
            raise _Refusal(Failure.UNAUTHORIZED, _NO_ATTEMPT)
        task = attempt.task
        caller = _caller_for_tasks(task.project_id, attempt.agent_id)
        request.identify(caller)
        known = self._api.submission_parser.knows_project
        who = identify(path, headers, bounds=caller.bounds, knows_project=known)
        who = msgspec.structs.replace(who, scopes=task.scopes, priority=task.priority)
        if not self._passes_keys:
            keys = ClientKeys(token=keys.token)
        reserve = self._reserve_mode(who)
        return Sender(who, keys, caller, headers, request.holder, reserve, attempt)

    def offer_to_tasks(self, target: str) -> Offer | None:
        """Return what tasks of a target are handed: the address here, and whose protocols."""
        address = self._api.engine.node.address
        if target not in self._task_targets or not address or not self.settings.enabled:
            return None
        kinds = {one.kind for one in self._upstreams.all if self._upstreams.has_key(one)}
        return Offer(reached_at(address), tuple(sorted(kinds))) if kinds else None

    @property
    def _passes_keys(self) -> bool:
        """Whether the key of a client goes to an upstream that has none."""
        mode = self.settings.passthrough_keys
        return mode == "always" or (mode == "loopback" and self._api.auth.rules.is_loopback)

    def _first(self, kind: str) -> Upstream:
        found = [one for one in self._upstreams.all if one.kind == kind]
        with_key = [one for one in found if self._upstreams.has_key(one)]
        if not found:
            raise _Refusal(Failure.NOT_FOUND, f"there is no upstream of kind {kind}")
        return (with_key or found)[0]

    def _names(self) -> str:
        return ", ".join(one.name for one in self._upstreams.all)

    # The way of a call.

    async def _model_call(
        self,
        client: Client,
        sender: Sender,
        protocol: Protocol,
        upstream: Upstream | None = None,
    ) -> None:
        """Answer a call of a model; it goes where its model does, or to the upstream it names."""
        request = client.request
        # No name is given to the body here, or it would be kept for as long as the call waits.
        asked = await self._asked(client, sender, protocol)
        if not asked.call.is_readable:
            raise _Refusal(Failure.BAD_REQUEST, "the body is no JSON object")
        model = asked.call.model
        _check_model(model)
        asked.path = protocol.path
        if query := request.query_string():
            query = upstream_query(query.encode("latin-1")).decode("latin-1")
            asked.path += f"?{query}" if query else ""
        if upstream is not None:
            asked.members = [(upstream, model)]
        else:
            try:
                asked.members = self._upstreams.members(model, cast("Kind", protocol.kind))
            except UnknownModelError as error:
                raise _Refusal(Failure.UNKNOWN_MODEL, str(error)) from None
            except NoRouteError as error:
                raise _Refusal(Failure.WRONG_PROTOCOL, str(error)) from None
        if asked.call.previous_id:
            await self._keep_to(asked, asked.call.previous_id)
        if asked.call.stored_reference and sender.tenant:
            for member, _ in asked.members:
                self._check_own_key(member, f"a {asked.call.stored_reference}")
        if not self._are_priced(asked):
            await self._check_prices(asked)
        if asked.call.is_background:
            await self._check_background(asked)
        if asked.reserve is Reserve.STRICT and not asked.is_free:
            self._check_bounds(asked)
        await self._in_turn(asked)

    async def _asked(self, client: Client, sender: Sender, protocol: Protocol) -> Asked:
        """Read a call; a large body is read while others go on."""
        body = client.body_at_once()
        if body is None:
            since = perf_counter()
            body = await client.whole_body()
            client.began_at += perf_counter() - since
        if not _is_large(body):
            call = read_call(protocol.path, body)
            return Asked(client, sender, protocol, call, RequestBody(body))
        call, kept = await asyncio.to_thread(_read_large, protocol, body)
        asked = Asked(client, sender, protocol, call, kept)
        asked.is_large = True
        return asked

    async def _in_turn(self, asked: Asked) -> None:
        if self._is_stopping and asked.sender.task is None:
            raise _stopping()
        holder = asked.sender.holder
        check_room(self._in_hand, holder, "calls that wait and run")
        key = holder.key
        self._in_hand.take(key)
        try:
            await self._carry(asked)
        finally:
            asked.body.let_go()
            self._in_hand.give_back(key)
            if self._is_stopping:
                self._idle.set()

    def _reserve_mode(self, who: Identity) -> Reserve:
        """Return how careful a call is: as its header says, its budgets, its project, the gateway.

        A header may ask for more care than the settings, and not for less.
        """
        settings = self._settings
        if who.reserve is Reserve.STRICT:
            return Reserve.STRICT
        if self._has_strict_budgets:
            for scope in charged_by(who.scopes):
                budget = settings.budgets.get(scope)
                if budget is not None and budget.reserve is Reserve.STRICT:
                    return Reserve.STRICT
        project = settings.projects.get(who.project_id)
        if project is not None and project.reserve is not None:
            return project.reserve
        return settings.gateway.reserve

    def _are_priced(self, asked: Asked) -> bool:
        """Tell whether wherever a call may go its model has a price, or it needs none."""
        if asked.is_free or asked.name == OTHER:
            return True
        for _, name in asked.members:  # noqa: SIM110 - a generator costs more than the rest
            if not self._prices.is_known(name):
                return False
        return True

    async def _check_prices(self, asked: Asked) -> None:
        """Refuse a model that nobody knows the price of, where dollars are limited."""
        for _, name in asked.members:
            if self._prices.is_known(name):
                continue
            for scope in charged_by(asked.who.scopes):
                if await self._api.tracker.get_budget(scope) is not None:
                    near = nearest_model(name)
                    meant = f"{did_you_mean(near)} Otherwise " if near else ""
                    line = (
                        f"model '{name}' has no known price, and budget '{scope or ROOT_NAME}' is"
                        f" in dollars; {meant}{price_advice(name)}"
                    )
                    raise _Refusal(Failure.BAD_REQUEST, line)

    async def _check_background(self, asked: Asked) -> None:
        """Have a response that is made after its call has ended hold what it can cost at most.

        Nobody says here what it used. One that nobody can bound is refused where there is a limit.
        """
        try:
            for _, name in asked.members:
                strict_bound(asked.call, self._prices, model=name)
        except CallerError as error:
            for scope in charged_by(asked.who.scopes):
                accounts = await self._api.tracker.ledger.accounts(scope, most=1)
                if accounts[0].limit is not None:
                    line = f"background: budget '{scope or ROOT_NAME}' takes no response that"
                    line += f" ends after its call and is not bounded; {error}"
                    raise _Refusal(Failure.BAD_REQUEST, line) from None
        else:
            asked.reserve = Reserve.STRICT

    def _check_bounds(self, asked: Asked) -> None:
        """Leave out the members that a strict call cannot be bounded at; one has to be left."""
        bounded = []
        problem: CallerError | None = None
        for upstream, name in asked.members:
            try:
                self._hold(asked, name)
            except CallerError as error:
                problem = problem or error
            else:
                bounded.append((upstream, name))
        if not bounded and problem is not None:
            raise _Refusal(Failure.BAD_REQUEST, str(problem))
        asked.members = bounded

    def _hold(self, asked: Asked, model: str) -> Hold:
        if asked.is_free:
            return Hold(micro_usd=NOTHING, tokens=NOTHING)
        if asked.name == OTHER:
            kind = estimates.Kind(asked.who.project_id, model)
            return Hold(micro_usd=PROBE, tokens=PROBE, kind=kind.text)
        return self._estimates.hold(
            asked.call,
            model=model,
            project_id=asked.who.project_id,
            prices=self._prices,
            reserve=asked.reserve,
        )

    async def _carry(self, asked: Asked) -> None:
        """Have a call wait, send it, and book what it cost."""
        self._upstreams.call_begins(asked.sender.tenant)
        draft = self._draft(asked)
        # It may have its turn at once, and its key by its session.
        if asked.session:
            self.sessions.enter(draft.record.id, asked.session)
        self._remaining.look(asked.who.scopes)
        try:
            live = asked.live = asked.client.live = self._calls.enter(draft)
        except BaseException:
            self.sessions.leave(draft.record.id)
            raise
        seat = asked.client.request.seat
        if seat is not None:
            seat.is_awaited = live.has_permit
        try:
            if asked.client.place is not None and asked.client.place.is_open:
                await self._go_on(asked, live, asked.client.place)
            await self._until_answered(asked, live)
        except _ClientLeft:
            seconds = self.patience.kept_seconds
            self._calls.go_away(live, _identity(asked), seconds=seconds)
        except _Refusal as refusal:
            if refusal.failure is Failure.TRY_AGAIN:
                seconds = (refusal.retry_after_seconds or 0.0) + self.patience.kept_seconds
                self._calls.go_away(live, _identity(asked), seconds=seconds)
            else:
                self._not_answered(live, refusal)
            raise
        except CallRefusedError as error:
            line = self._advised(asked, live, str(error))
            self._not_answered(live, _of_budget(error, line))
            raise _of_budget(error, asked.sender.caller.told(line)) from None
        except NotDispatchingError:
            self._calls.hand_over(live)
            asked.client.read_again(await self._read_body(asked))
            events = -1 if asked.client.relay is None else asked.client.relay.events
            place = Place(live.id, live.record.created_at, events)
            raise _HandedOver(place, was_taken=True) from None
        except StoreError as error:
            self._lose(asked, live, api_error_of(error).body.error)
            raise
        except asyncio.CancelledError:
            self._lose(asked, live, "the service stopped")
            raise
        except Exception:
            self._lose(asked, live, "an error of the gateway")
            raise
        finally:
            if seat is not None:
                seat.wait_again()
            self.sessions.leave(live.id)
            if live.record.state.has_ended:
                self._observe(asked, live.record)

    async def _go_on(self, asked: Asked, live: LiveCall, place: Place) -> None:
        """Go on with a stream that another node has opened, or this one before it was none."""
        client = asked.client
        self._relay(asked, live).go_on(place.events)
        if not client.has_head:
            headers = [(b"content-type", EVENT_STREAM), *self._headers(asked, live)]
            await client.head(_OK, headers)

    def _observe(self, asked: Asked, record: CallRecord) -> None:
        """Show metrics and traces a call that has ended."""
        api, upstream = self._api, self._upstreams.get(record.upstream)
        if record.tries:
            api.metrics.calls.count_added(record, asked.added_seconds)
        if api.telemetry is not None and upstream is not None:
            sent = asked.client.request.header(b"traceparent").decode("latin-1")
            api.telemetry.called(
                record,
                traceparent=read_traceparent(sent),
                provider=upstream.kind,
                url=upstream.settings.api_url,
                response_model=asked.response_model,
            )

    def _draft(self, asked: Asked) -> CallDraft:
        who, call, task = asked.who, asked.call, asked.sender.task
        upstream, name = self._open_member(asked)
        route = self._route(asked, upstream, name)
        now = self._api.engine.now()
        hold = self._hold(asked, name)
        # Where no place is kept nobody can come back to one.
        identity = _identity(asked) if self._calls.has_places else ""
        place = asked.client.place
        created_at = now if place is None else place.created_at
        call_id = self._calls.kept_id(identity) if identity else None
        if call_id is None and place is not None and self._calls.get(place.call_id) is None:
            call_id = place.call_id
        record = CallRecord(
            id=call_id or self._calls.new_call_id(),
            project_id=who.project_id,
            agent_id=who.agent_id,
            model=call.model,
            upstream=upstream.name,
            upstream_model=name if name != call.model else "",
            protocol=asked.name,
            is_stream=call.is_stream,
            answers=min(call.answers, MOST_ANSWERS),
            priority=who.priority,
            scopes=who.scopes,
            client=who.client,
            session=asked.session,
            token_id="" if task is not None else asked.sender.caller.token_id,
            task_id=None if task is None else task.task.id,
            created_at=created_at,
        )
        tokens = hold.tokens.amount or self._estimates.input_tokens(call, name, who.project_id)
        return CallDraft(
            record=record,
            route=route,
            hold=_Holding(self._hold, asked, hold),
            estimate_tokens=max(1, tokens),
            identity=identity,
            has_claims=task.task.has_claims if task else not asked.sender.caller.is_trusted,
            is_free=asked.is_free,
            is_background=call.is_background,
        )

    def _open_member(self, asked: Asked) -> tuple[Upstream, str]:
        """Return the first member of a route that is open, otherwise the first."""
        if len(asked.members) == 1:
            return asked.members[0]
        for upstream, name in asked.members:
            if not self._calls.is_closed(self._route(asked, upstream, name), asked.who.project_id):
                return upstream, name
        return asked.members[0]

    def _route(self, asked: Asked, upstream: Upstream, name: str) -> CallRoute:
        route = self._upstreams.route(upstream, name, asked.sender.keys.provider_key)
        if asked.slot is not None and route.has_slots:
            return route._replace(slot=asked.slot)
        return route

    async def _until_answered(self, asked: Asked, live: LiveCall) -> None:
        while True:
            grant = self._calls.admit_at_once(live)
            if grant is None:
                since = perf_counter()
                grant = await self._granted(asked, live)
                asked.waited_seconds += perf_counter() - since
            if asked.client.has_gone:
                raise _ClientLeft
            upstream = self._check_upstream(live)
            if await self._sent(asked, live, upstream, grant):
                return
            if self._api.engine.now() - live.record.created_at >= self.settings.max_wait_seconds:
                raise self._waited_too_long(asked, live)

    # Waiting.

    async def _granted(self, asked: Asked, live: LiveCall) -> Grant:
        while True:
            if not live.turn.done():
                await self._wait(asked, live)
            try:
                grant = self._calls.admit_at_once(live) or await self._calls.admit(live)
            except CallRefusedError as error:
                if not await self._clamp(asked, live, error.refused):
                    raise
            else:
                if grant is not None:
                    return grant

    async def _wait(self, asked: Asked, live: LiveCall) -> None:
        """Wait for the turn of a call, and keep its client alive meanwhile."""
        client, settings, patience = asked.client, self.settings, self.patience
        loop = asyncio.get_running_loop()
        now = loop.time
        gives_up_at = live.record.created_at + settings.max_wait_seconds
        ends_at = now() + max(0.0, gives_up_at - self._api.engine.now())
        beats_at = client.came_at + settings.hold_seconds
        if asked.holds_stream:
            beats_at = now() if client.has_head else client.came_at + patience.open_seconds
        held = self._api.shares.bytes
        is_crowded = SPILL_SHARE * held.taken > held.most
        spills_at = now() if is_crowded else client.came_at + patience.memory_seconds
        news: asyncio.Future[None] = loop.create_future()
        self._waiting.add(news)
        try:
            while not live.turn.done():
                if news.done():
                    self._waiting.discard(news)
                    news = loop.create_future()
                    self._waiting.add(news)
                self._check_upstream(live)
                self._check_keys(asked)
                if await self._clamp(asked, live, self._calls.refusal_of(live)):
                    continue
                hopeless = self._calls.hopeless(live, gives_up_at)
                if hopeless is not None:
                    raise hopeless
                until = min(ends_at, beats_at)
                if asked.body.may_spill:
                    until = min(until, spills_at)
                if len(asked.members) > 1:
                    until = min(until, now() + patience.reroute_seconds)
                await asyncio.wait(
                    (live.turn, client.gone, news),
                    timeout=max(0.0, until - now()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if client.has_gone:
                    raise _ClientLeft
                if live.turn.done():
                    return
                if self._is_stopping and asked.sender.task is None:
                    raise _stopping()
                if now() >= ends_at:
                    raise self._waited_too_long(asked, live)
                if now() >= spills_at and asked.body.may_spill:
                    room, holder = self._api.shares.spilled, asked.sender.holder
                    if await asked.body.spill(room, holder, self._folder):
                        client.request.let_go_of_body()
                    spills_at = now() + SPILL_AGAIN_SECONDS
                if now() >= beats_at:
                    if not asked.holds_stream:
                        raise _Refusal(
                            Failure.TRY_AGAIN,
                            f"the call waits, and its position is kept: {self._why(asked, live)}",
                            retry_after_seconds=RETRY_AFTER_SECONDS,
                        )
                    await self._keep_alive(asked, live)
                    beats_at = now() + patience.keep_alive_seconds
                self._reroute(asked, live)
        finally:
            self._waiting.discard(news)

    def _check_upstream(self, live: LiveCall) -> Upstream:
        """Return where a call goes; refuse one whose upstream is not in the settings any more."""
        upstream = self._upstreams.get(live.route.upstream)
        if upstream is None:
            line = f"upstream '{live.route.upstream}' was taken out of the settings"
            raise _Refusal(Failure.UNAVAILABLE, line)
        slot = live.route.slot if live.route.has_slots else None
        if slot is not None and slot not in upstream.settings.slots:
            line = (
                f"slot '{slot}', which the call needs, was taken out of [upstreams.{upstream.name}]"
            )
            raise _Refusal(Failure.UNAVAILABLE, line)
        return upstream

    def _check_keys(self, asked: Asked) -> None:
        """Refuse a call for which no key can come back by itself, wherever it may go."""
        lines: dict[str, str] = {}
        failure = Failure.UNAUTHORIZED
        for upstream, name in asked.members:
            route = self._route(asked, upstream, name)
            closures = self._calls.unusable(route, asked.who.project_id)
            if not closures:
                return
            whys = [
                f"slot {one.name} ({one.why})" if one.kind == "slot" else one.why
                for one in closures
            ]
            lines[upstream.name] = (
                f"upstream '{upstream.name}' has no key that works: {', '.join(whys)}"
            )
            if any(one.cause == "credit" for one in closures):
                failure = Failure.REFUSED
        raise _Refusal(failure, "; ".join(lines.values()))

    def _waited_too_long(self, asked: Asked, live: LiveCall) -> _Refusal:
        seconds = self.settings.max_wait_seconds
        line = f"it has waited for {seconds:g} s; {self._why(asked, live)}"
        return _Refusal(Failure.UNAVAILABLE, line)

    async def _clamp(self, asked: Asked, live: LiveCall, refused: Refused | None) -> bool:
        """Lower the length of a strict call's answer to what its budget has left, if that helps.

        The call is queued again then.
        """
        is_clamped = self.settings.clamp and asked.reserve is Reserve.STRICT
        if refused is None or refused.kind or not is_clamped or asked.name == OTHER:
            return False
        left = refused.limit - refused.spent - refused.reserved - refused.overrun
        longest = self._longest_within(asked, live.route.model, refused.unit, left)
        if not longest:
            return False
        live.change(max_tokens=longest)
        if asked.body.at_once is None:
            await self._until_room(asked, live)
        path, body = asked.protocol.path, await self._read_body(asked)
        if _is_large(body):
            body = await asyncio.to_thread(with_max_tokens, path, body, longest)
            asked.call = await asyncio.to_thread(read_call, path, body)
        else:
            body = with_max_tokens(path, body, longest)
            asked.call = read_call(path, body)
        asked.body.change(body)
        self._calls.move(live, live.route)
        return True

    def _advised(self, asked: Asked, live: LiveCall, line: str) -> str:
        """Return why a budget refuses a call; a length that it does not set cannot be lowered."""
        call = asked.call
        if call.bound_tokens is not None or asked.name == OTHER:
            return line
        field = _LENGTH_FIELDS.get(asked.protocol, "max_tokens")
        is_strict = asked.reserve is Reserve.STRICT
        window = self._prices.context_window(live.route.model) if is_strict else None
        reserved = None if window is None else call.answers * window
        return to_call(line, field, reserved_tokens=reserved)

    def _longest_within(self, asked: Asked, model: str, unit: Unit, left: int) -> int:
        """Return how long an answer may be for the call to hold no more than is left; 0 is none."""
        call = asked.call

        def fits(length: int) -> bool:
            shorter = msgspec.structs.replace(call, max_tokens=length, bound_tokens=length)
            try:
                bound = strict_bound(shorter, self._prices, model=model)
            except CallerError:
                return False
            return (bound.tokens if unit is Unit.TOKENS else bound.micro_usd) <= left

        low = 0
        high = call.bound_tokens or self._prices.context_window(model) or LONGEST_ANSWER
        while low < high:
            middle = (low + high + 1) // 2
            if fits(middle):
                low = middle
            else:
                high = middle - 1
        is_lower = call.bound_tokens is None or low < call.bound_tokens
        return low if is_lower and fits(low) else 0

    async def _keep_alive(self, asked: Asked, live: LiveCall) -> None:
        relay = self._relay(asked, live)
        if not asked.client.has_head:
            await asked.client.head(
                _OK, [(b"content-type", EVENT_STREAM), *self._headers(asked, live)]
            )
        await asked.client.piece(relay.keep_alive())

    def _relay(self, asked: Asked, live: LiveCall) -> StreamRelay:
        client = asked.client
        if client.relay is None:
            client.relay = StreamRelay(
                asked.protocol,
                model=asked.call.model,
                call_id=live.id,
                created_at=live.record.created_at,
                hides_usage=asked.name != OTHER and not asked.call.wants_usage,
                is_stored=asked.call.is_stored,
            )
        return client.relay

    def _reroute(self, asked: Asked, live: LiveCall) -> None:
        """Send a call that waits to another member of its route, if that is open and its is not."""
        project_id = asked.who.project_id
        if len(asked.members) == 1 or not self._calls.is_closed(live.route, project_id):
            return
        route = self._route(asked, *self._open_member(asked))
        if route != live.route and not self._calls.is_closed(route, project_id):
            self._calls.move(live, route)

    def _why(self, asked: Asked, live: LiveCall) -> str:
        """Say why a call waits, which position it has, and about how long it still waits."""
        found = self._calls.why(live.id, asked.sender.caller.bounds)
        if found is None or not found.reasons:
            return "others go first"
        line = found.reasons[0].message
        if found.position is not None:
            line += f"; position {found.position} among the waiting calls of its agent"
        if found.expected_seconds is not None:
            line += f", about {duration(max(1.0, found.expected_seconds))} to go"
        return line

    # At the upstream.

    async def _sent(self, asked: Asked, live: LiveCall, upstream: Upstream, grant: Grant) -> bool:
        """Send a call; return False if it is to be sent once more, when it has its turn again."""
        keys = asked.sender.keys
        credentials = self._upstreams.credentials(
            upstream, grant.slot, keys.provider_key, is_bearer=keys.scheme == "bearer"
        )
        if credentials is None:
            raise self._no_key(upstream, grant.slot)
        is_own_key = grant.slot is not None and not upstream.settings.slots
        lines = _sent_lines(asked.client.request, is_own_key=is_own_key)
        if credentials is upstream.own:
            upstream.own_lines = upstream.own_lines or header_lines(
                (credentials.header, *upstream.headers)
            )
            lines += upstream.own_lines
        else:
            lines += header_lines((credentials.header, *upstream.headers))
        if not live.record.tries:
            asked.added_seconds = perf_counter() - asked.client.began_at - asked.waited_seconds
        live.change(tries=live.record.tries + 1)
        if asked.body.at_once is None:
            await self._until_room(asked, live)
        key = asked.sender.holder.key
        self._at_upstreams[key] += 1
        try:
            return await self._send(asked, live, upstream, grant, credentials, lines)
        finally:
            self._at_upstreams[key] -= 1
            if not self._at_upstreams[key]:
                del self._at_upstreams[key]

    async def _send(
        self,
        asked: Asked,
        live: LiveCall,
        upstream: Upstream,
        grant: Grant,
        credentials: Credentials,
        lines: bytes,
    ) -> bool:
        body = asked.body.at_once or await self._read_body(asked)
        if asked.is_large:
            body = await asyncio.to_thread(self._body, asked, live, body)
        else:
            body = self._body(asked, live, body)
        try:
            response = await upstream.pool.send(asked.method, asked.path, (), body, lines=lines)
        except NotSentError as error:
            return self._failed(asked, live, upstream, grant, Failed(error=str(error)))
        except UpstreamError as error:
            self._note_failure(asked, upstream, str(error))
            self._lose(asked, live, str(error))
            raise _Refusal(Failure.UPSTREAM_FAILED, str(error)) from None
        del body
        try:
            return await self._answered(asked, live, upstream, grant, response, credentials)
        finally:
            response.close()

    async def _until_room(self, asked: Asked, live: LiveCall) -> None:
        """Have a body that comes back from the disk wait for room in the memory of its caller.

        Rule: a caller none of whose calls is at an upstream waits for nobody. What it has in memory
        may be bodies of calls that wait for the very permit of this one. While one waits, another
        body may have its room on the disk. It ends if no room comes, or its client leaves: what it
        has had counts in the share.
        """
        pool, holder = self._api.shares.bytes, asked.sender.holder
        asked.body.leave_room()
        now = asyncio.get_running_loop().time
        beats_at = now() + self.patience.keep_alive_seconds
        try:
            async with asyncio.timeout(BODY_ROOM_SECONDS):
                while (
                    (holder.key in self._at_upstreams or not live.has_permit())
                    and pool.of(holder.key)
                    and not pool.has_room(holder, asked.body.size)
                ):
                    await asyncio.sleep(ROOM_LOOK_SECONDS)
                    if asked.client.has_gone:
                        raise _ClientLeft
                    if asked.holds_stream and now() >= beats_at:
                        await self._keep_alive(asked, live)
                        beats_at = now() + self.patience.keep_alive_seconds
        except TimeoutError:
            line = f"there was no room in memory for it within {duration(BODY_ROOM_SECONDS)}:"
            line += f" {pool.of(holder.key):,} bytes of your requests and answers are held, of"
            line += f" {pool.most:,} in all; send less at a time"
            raise _Refusal(Failure.UNAVAILABLE, line) from None

    async def _read_body(self, asked: Asked) -> bytes:
        """Return what the client has sent; from now on it counts as held in memory."""
        asked.client.request.count_body(asked.body.size)
        return await asked.body.read()

    def _body(self, asked: Asked, live: LiveCall, body: bytes) -> bytes:
        """Return what goes upstream for what the client has sent."""
        if asked.name == OTHER:
            return body
        if live.route.model != asked.call.model:
            body = with_model(body, live.route.model)
        if asked.call.is_stream and not asked.call.wants_usage:
            body = with_stream_usage(asked.protocol.path, body, is_forced=True)
        return body

    async def _answered(
        self,
        asked: Asked,
        live: LiveCall,
        upstream: Upstream,
        grant: Grant,
        response: UpstreamResponse,
        credentials: Credentials,
    ) -> bool:
        now = self._api.engine.now()
        texts = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers
        }
        slot = grant.slot or live.route.slot
        body = b""
        if response.status >= _ERRORS:
            with suppress(UpstreamError, ContentCodingError):
                coded = await response.read_all(MAX_ERROR_BYTES)
                body = credentials.hidden_in(_decoded(coded, texts, MAX_ERROR_BYTES))
        has_own_rates = limits_models(upstream.kind, texts)
        # Others behind the upstream may answer, and a request may choose who is asked.
        is_of_provider = bool(body) and bool(error_in(body).asked_provider)
        is_of_model = has_own_rates or is_of_provider
        used_up = self._upstreams.used_up(upstream, slot, texts, now) if has_own_rates else None
        is_limited = used_up is not None or response.status == _TOO_MANY
        if grant.slot is not None and not (is_of_model and is_limited):
            self._observe_slot(grant.slot, response.status, texts, now)
        if used_up is not None:
            self._pause(live, upstream, slot, used_up, is_of_model=is_of_model)
        returned = returned_headers(response.headers, credentials.hidden_in)
        if response.status >= _ERRORS:
            if asked.name != OTHER:
                shortage = shortage_of(response.status, body, model=live.route.model)
                if shortage is not None:
                    self._upstreams.answered(upstream)
                    return self._has_too_little(
                        asked, live, upstream, grant, shortage, response.status, body
                    )
            outcome = refused(
                response.status, texts, "", now=now, whom=upstream.name, is_model_api=True
            )
            if isinstance(outcome, Limited):
                if told := told_to_others(body):
                    outcome = msgspec.structs.replace(outcome, why=f"{outcome.why}: {told}")
                return self._limited(
                    asked,
                    live,
                    upstream,
                    grant,
                    outcome,
                    is_of_model=is_of_model,
                    is_of_provider=is_of_provider,
                )
            if response.status >= _SERVER_ERRORS or outcome.is_cut:
                return self._failed(asked, live, upstream, grant, outcome, response, body)
            self._upstreams.answered(upstream)
            has_clients_key = not (live.route.has_slots or live.route.is_shared)
            if response.status in KEY_STATUSES and not has_clients_key:
                is_refused = asked.name != OTHER and refuses_key(response.status, body)
                if is_refused:
                    await self._refuse_key(upstream, grant.slot, response.status, credentials)
                whom = f"upstream '{upstream.name}'"
                if is_of_provider:
                    whom = f"{shortened(error_in(body).asked_provider)} behind {whom}"
                return self._not_allowed(
                    asked, live, upstream, grant, response.status, whom, is_refused=is_refused
                )
            await self._pass_error(asked, live, response, body, returned)
            return True
        self._upstreams.answered(upstream)
        # It is not sent again.
        asked.body.let_go()
        asked.client.request.let_go_of_body()
        live.change(first_byte_at=now)
        is_stream = response.header(b"content-type").startswith(b"text/event-stream")
        if is_stream:
            # A provider may send it for minutes, in thousands of pieces.
            if (seat := asked.client.request.seat) is not None:
                seat.wait_again()
            await self._stream(asked, live, response, texts, returned, credentials)
        else:
            with HeldAnswer(self._api.shares, asked.sender.holder) as held:
                await self._whole(asked, live, response, texts, returned, credentials, held)
        if asked.session and grant.slot is not None:
            record = live.record
            self.sessions.used(
                asked.session,
                grant.slot,
                self._api.engine.now(),
                cached_tokens=_warm_tokens(record),
                fresh_tokens=max(0, (record.tokens or 0) - (record.cached_tokens or 0)),
                cache_seconds=asked.cache_seconds or CACHE_SECONDS[upstream.kind],
            )
        return True

    def _pause(
        self,
        live: LiveCall,
        upstream: Upstream,
        slot: str | None,
        closure: GateClosure,
        *,
        is_of_model: bool,
    ) -> None:
        """Close a key, or keep it from one model if that alone is limited."""
        if slot is not None and slot in upstream.settings.slots and is_of_model:
            self.sessions.pause(slot, live.route.model, closure)
        else:
            self._calls.close(closure)

    def _limited(
        self,
        asked: Asked,
        live: LiveCall,
        upstream: Upstream,
        grant: Grant,
        outcome: Limited,
        *,
        is_of_model: bool,
        is_of_provider: bool,
    ) -> bool:
        """Close what asked for a pause, and have the call go elsewhere or wait."""
        now = self._api.engine.now()
        slot = grant.slot or live.route.slot
        closure = self._upstreams.limited(
            upstream, slot, outcome, now, is_of_provider=is_of_provider
        )
        self._pause(live, upstream, slot, closure, is_of_model=is_of_model)
        open_route = self._untried(asked, live)
        if open_route is not None:
            self.sessions.avoid(live.id, self._failed_slots(asked, open_route))
        # It waits where it was if there is nowhere else to go, and others may use its money then.
        is_elsewhere = open_route is not None
        self._calls.move(live, open_route or live.route, keeps_money=is_elsewhere)
        return False

    def _has_too_little(
        self,
        asked: Asked,
        live: LiveCall,
        upstream: Upstream,
        grant: Grant,
        shortage: Shortage,
        status: int,
        body: bytes,
    ) -> bool:
        """Have a call go elsewhere whose key has too little for it, or refuse it: nothing heals it.

        A key without credit is closed for everybody. What is the client's own it alone is told of.
        """
        error = error_in(body)
        said = error.said or f"status {status}"
        if shortage is Shortage.PROVIDER:
            said = f"{error.asked_provider}: {said}"
        has_clients_key = not (live.route.has_slots or live.route.is_shared)
        if shortage is Shortage.CREDIT and not has_clients_key:
            place = self._upstreams.key_place(upstream, grant.slot)
            told = told_to_others(body) or f"it answered with status {status}"
            log.error("a key has no credit left", upstream=upstream.name, key=place, said=told)
            now = self._api.engine.now()
            self._calls.close(self._upstreams.without_credit(upstream, grant.slot, told, now))
            # Those that wait for this key alone are refused now.
            self._tell_waiting()
        if self._goes_on(asked, live, upstream, grant):
            return False
        line = f"upstream '{upstream.name}' does not answer this call: {shortened(said)}"
        is_too_large = shortage is Shortage.REQUEST and status == _TOO_MANY
        raise _Refusal(Failure.TOO_LARGE if is_too_large else Failure.REFUSED, line)

    def _goes_on(self, asked: Asked, live: LiveCall, upstream: Upstream, grant: Grant) -> bool:
        """Have a call go where it has not failed yet; False if there is nowhere."""
        asked.failed.add((upstream.name, live.route.model, grant.slot))
        route = self._untried(asked, live)
        if route is None:
            return False
        self.sessions.avoid(live.id, self._failed_slots(asked, route))
        self._calls.move(live, route)
        return True

    def _failed(
        self,
        asked: Asked,
        live: LiveCall,
        upstream: Upstream,
        grant: Grant,
        outcome: Failed,
        response: UpstreamResponse | None = None,
        body: bytes = b"",
    ) -> bool:
        """Have a call go elsewhere that its upstream failed before any output, within a budget."""
        self._note_failure(asked, upstream, outcome.error)
        if outcome.is_cut:
            self._lose(asked, live, outcome.error)
            raise _Refusal(Failure.UPSTREAM_FAILED, outcome.error)
        asked.failed.add((upstream.name, live.route.model, grant.slot))
        route = self._untried(asked, live)
        if route is not None and self._upstreams.may_retry(asked.sender.tenant):
            self.sessions.avoid(live.id, self._failed_slots(asked, route))
            self._calls.move(live, route)
            return False
        status = 0 if response is None else response.status
        failure, message = failure_of(status, body) if status else (None, outcome.error)
        line = f"upstream '{upstream.name}' failed: {message}"
        raise _Refusal(failure or Failure.UPSTREAM_FAILED, line)

    async def _refuse_key(
        self, upstream: Upstream, slot: str | None, status: int, credentials: Credentials
    ) -> None:
        """Disable the slot of a key that its provider refuses, or have the operator know."""
        if slot is None or slot not in upstream.settings.slots:
            place = self._upstreams.key_place(upstream, slot)
            log.error("a key was refused", upstream=upstream.name, key=place, status=status)
            return
        await self._api.slots.refuse_key(slot, status, credentials.key)

    def _not_allowed(
        self,
        asked: Asked,
        live: LiveCall,
        upstream: Upstream,
        grant: Grant,
        status: int,
        whom: str,
        *,
        is_refused: bool,
    ) -> bool:
        """Have a call go on with another key after a 401 or 403, or wait for one.

        What the provider said may show a part of the key, so that it is not for the client.
        """
        place = self._upstreams.key_place(upstream, grant.slot)
        key = (
            f"the key of slot {grant.slot} ({place})"
            if live.route.has_slots
            else f"the key in {place}"
        )
        asked.refused_keys[f"{whom} refused {key}"] = status
        if self._goes_on(asked, live, upstream, grant):
            return False
        self._check_keys(asked)
        if is_refused and self._calls.is_closed(live.route, asked.who.project_id):
            # Another key comes back by itself.
            self._calls.move(live, live.route, keeps_money=False)
            return False
        tried = ", ".join(f"{key} with status {one}" for key, one in asked.refused_keys.items())
        if is_refused:
            line = f"{tried}; put a key that works there, where Headgate runs"
            raise _Refusal(Failure.UNAUTHORIZED, line)
        failure = failure_of(status, b"")[0]
        raise _Refusal(failure, f"{tried}; the model or what was asked may not be allowed to it")

    def _note_failure(self, asked: Asked, upstream: Upstream, why: str) -> None:
        if asked.name == OTHER:
            # Nobody here knows what was asked, so that it may be what fails.
            return
        now, tenants = self._api.engine.now(), asked.sender.tenants
        closure = self._upstreams.failed(upstream, why, now, tenants=tenants)
        if closure is not None:
            self._calls.close(closure)

    def _untried(self, asked: Asked, live: LiveCall) -> CallRoute | None:
        """Return where a call may go that has not failed there: another key, another member."""
        at = [one for one in asked.members if self._route(asked, *one) == live.route]
        for upstream, name in (*at, *asked.members):
            route = self._route(asked, upstream, name)
            if self._calls.is_closed(route, asked.who.project_id):
                continue
            failed = self._failed_slots(asked, route)
            if not route.has_slots:
                if not failed:
                    return route
                continue
            # While the state is made anew all of them count; it waits for its turn anyway.
            known = self._calls.open_slots(route, asked.who.project_id)
            if known is None:
                known = list(upstream.settings.slots) if route.slot is None else [route.slot]
            if set(known) - failed:
                return route
        return None

    def _failed_slots(self, asked: Asked, route: CallRoute) -> set[str | None]:
        at = (route.upstream, route.model)
        return {slot for upstream, model, slot in asked.failed if (upstream, model) == at}

    async def _pass_error(
        self,
        asked: Asked,
        live: LiveCall,
        response: UpstreamResponse,
        body: bytes,
        returned: list[tuple[bytes, bytes]],
    ) -> None:
        """Give the client an error of the provider that is the client's own."""
        failure, message = failure_of(response.status, body)
        self._calls.end(
            live, CallEnd(state=CallState.FAILED, status=response.status, error=message)
        )
        if asked.client.has_head or failure is Failure.UPSTREAM_FAILED:
            raise _Refusal(failure, message)
        headers = [*returned, *self._headers(asked, live)]
        await asked.client.whole(response.status, headers, body)

    # The answer.

    async def _whole(
        self,
        asked: Asked,
        live: LiveCall,
        response: UpstreamResponse,
        texts: dict[str, str],
        returned: list[tuple[bytes, bytes]],
        credentials: Credentials,
        held: HeldAnswer,
    ) -> None:
        try:
            body = response.read_whole(MAX_ANSWER_BYTES)
            if body is None:
                body = await response.read_all(MAX_ANSWER_BYTES, held.count)
            if "content-encoding" in texts and codings_of(texts):
                body = await decoded_answer(body, texts, held)
        except (UpstreamError, ContentCodingError, LimitReachedError) as error:
            length = response.header(b"content-length")
            size = int(length) if length.isdigit() and len(length) < _MOST_DIGITS else held.size
            self._lose(asked, live, str(error), answer_bytes=size)
            is_full = isinstance(error, LimitReachedError)
            failure = Failure.UNAVAILABLE if is_full else Failure.UPSTREAM_FAILED
            raise _Refusal(failure, str(error)) from None
        self._note_stored(asked, live, body)
        if len(body) > LARGE_ANSWER_BYTES:
            reported, is_all = await asyncio.to_thread(reported_in, body, texts)
        else:
            reported, is_all = reported_in(body, texts)
        is_under_way = b'"status"' in body and _UNDER_WAY.search(body) is not None
        if asked.call.is_background and is_under_way:
            is_all = False
        record = self._left_open(asked, live, response.status) if is_under_way else None
        if record is None:
            record = self._book(
                asked,
                live,
                reported,
                is_all=is_all,
                status=response.status,
                answer_bytes=len(body),
            )
        if asked.is_free and is_all and not is_under_way and reported is not None:
            await self._correct(asked, reported)
        if live.record.task_id is not None and self._ends_elsewhere(live):
            await self._until_written(live)
        headers = [*returned, *self._headers(asked, live)]
        if record.micro_usd is not None:
            headers.append((b"x-headgate-cost-usd", plain_usd(record.micro_usd).encode()))
        if asked.client.has_head:
            # It asked for a stream, was kept alive, and gets no stream.
            raise _Refusal(Failure.UPSTREAM_FAILED, "the upstream did not answer with a stream")
        if len(body) > LARGE_ANSWER_BYTES:
            body = await asyncio.to_thread(credentials.hidden_in, body)
        else:
            body = credentials.hidden_in(body)
        seat = asked.client.request.seat
        held.hand_over(seat)
        await asked.client.whole(response.status, headers, body)
        if seat is not None:
            seat.admitted = 0

    def _left_open(self, asked: Asked, live: LiveCall, status: int) -> CallRecord | None:
        """Leave the money of a response held that is made in the background, for its last word."""
        if not asked.call.is_background or asked.name == OTHER or not live.record.response_id:
            return None
        record = self._calls.leave_open(live, status=status)
        if record is not None:
            self._under_way[record.response_id] = record.id
            if len(self._under_way) > MAX_STORED:
                del self._under_way[next(iter(self._under_way))]
        return record

    async def _correct(self, asked: Asked, reported: ReportedUsage) -> None:
        """Book what a response in the background cost, which somebody asks for now."""
        response_id = _response_in(asked.path.partition("?")[0])
        if not reported.is_possible:
            return
        call_id = self._under_way.get(response_id)
        if call_id is None:
            # Others may have pushed it out of memory.
            record = await self._call_of(response_id)
            if record is None or not record.reservation_id:
                return
            call_id = record.id
        usage = reported.cost(self._prices)
        if usage.tokens is None:
            return
        await self._calls.correct(
            call_id,
            CallEnd(
                state=CallState.DONE,
                status=_OK,
                tokens=usage.tokens,
                micro_usd=usage.micro_usd or 0,
                is_unpriced=usage.micro_usd is None,
                **_counts(reported),
            ),
        )
        self._under_way.pop(response_id, None)

    async def _stream(
        self,
        asked: Asked,
        live: LiveCall,
        response: UpstreamResponse,
        texts: dict[str, str],
        returned: list[tuple[bytes, bytes]],
        credentials: Credentials,
    ) -> None:
        client, relay = asked.client, self._relay(asked, live)
        mask = StreamMask(credentials)
        try:
            decoder = ContentDecoder(coding_of(texts), max_bytes=MAX_STREAM_BYTES)
        except ContentCodingError as problem:
            self._lose(asked, live, str(problem))
            raise _Refusal(Failure.UPSTREAM_FAILED, str(problem)) from None
        if not client.has_head:
            headers = [*returned, *self._headers(asked, live)]
            await client.head(response.status, headers)
        error = ""
        size = 0
        tail = b""
        keeps_tail = self._ends_elsewhere(live)
        try:
            while piece := await self._next_piece(client, response):
                # What has a coding although none was asked for is read and passed on without it.
                piece = decoder.feed(piece)
                while True:
                    if not size:
                        self._note_stored(asked, live, piece)
                    size += len(piece)
                    tail += mask.feed(relay.feed(piece))
                    if not (keeps_tail and relay.is_over and len(tail) < MAX_TAIL_BYTES):
                        await client.piece(tail)
                        tail = b""
                    if not decoder.has_more:
                        break
                    # It may go on for megabytes, and others have their turn between two slices.
                    await asyncio.sleep(0)
                    piece = decoder.feed(b"")
            tail += mask.feed(relay.finish())
        except (UpstreamError, ContentCodingError) as problem:
            error = str(problem)
        except TimeoutError:
            seconds = self.patience.drain_seconds
            error = f"its client has gone, and it did not end within {seconds:g} s"
        tail += mask.finish()
        self._book(
            asked,
            live,
            relay.usage,
            is_all=relay.is_over and not error,
            status=response.status,
            error=error or None,
            answer_bytes=size,
        )
        if keeps_tail:
            await self._until_written(live)
        await client.piece(tail)
        if error:
            await client.piece(relay.fail(Failure.UPSTREAM_FAILED, error))
        await client.end()

    def _ends_elsewhere(self, live: LiveCall) -> bool:
        """Tell whether another node may end the task of a call, and would not wait for its end."""
        return live.record.task_id is not None and self._api.engine.store.is_shared

    async def _until_written(self, live: LiveCall) -> None:
        """Have the store told of a call before its task is, which may end by that."""
        await self._calls.tasks.until_written(live.record.task_id or "", live.id)

    async def _next_piece(self, client: Client, response: UpstreamResponse) -> bytes:
        if not client.has_gone:
            return await response.read()
        # Nobody waits for it any more, but what it costs is said at its end.
        async with asyncio.timeout_at(client.left_at + self.patience.drain_seconds):
            return await response.read()

    def _headers(self, asked: Asked, live: LiveCall) -> list[tuple[bytes, bytes]]:
        """Return what an answer says of its call: its wait, and what its budgets have left."""
        headers = call_headers(live, self._api.engine.now)
        if live.record.max_tokens is not None:
            headers.append((b"x-headgate-max-tokens", b"%d" % live.record.max_tokens))
        headers += self._budget_headers(live.record, asked.sender.caller.bounds)
        if asked.sender.warning:
            headers.append((b"x-headgate-warning", asked.sender.warning))
        return headers

    def _budget_headers(self, record: CallRecord, bounds: Bounds) -> list[tuple[bytes, bytes]]:
        """Return what the budgets of a call have left, as far as a token may see it.

        Codex shows its user how much of each window is used.
        """
        headers = []
        found = self._remaining.get(record.scopes, bounds)
        if found.micro_usd is not None:
            headers.append((b"x-headgate-remaining-usd", found.usd))
        if record.client == CODEX:
            headers += codex_headers(found.windows)
        return headers

    # Books.

    def _book(
        self,
        asked: Asked,
        live: LiveCall,
        reported: ReportedUsage | None,
        *,
        is_all: bool,
        status: int,
        error: str | None = None,
        answer_bytes: int = 0,
    ) -> CallRecord:
        """Book what a call cost: what its provider said, otherwise what it is assumed to cost."""
        model = live.route.model
        if reported is not None:
            asked.response_model = reported.model
            if reported.cache_write_1h_tokens:
                asked.cache_seconds = LONG_CACHE_SECONDS
        usage = None
        if reported is not None and reported.is_possible and not asked.is_free:
            usage = reported.cost(self._prices)
            if usage.micro_usd is None:
                usage = reported.cost(self._prices, priced_as=model)
        is_known = usage is not None and usage.micro_usd is not None and is_all
        tokens = micro_usd = said_tokens = said_usd = 0
        if not asked.is_free and not is_known:
            tokens, micro_usd = self._assumed(asked, live, answer_bytes)
        is_unpriced = False
        prompt_chars = 0
        if usage is not None and reported is not None:
            said_tokens, said_usd = usage.tokens or 0, usage.micro_usd or 0
            is_unpriced = usage.micro_usd is None
            tokens = said_tokens if is_all else max(said_tokens, tokens)
            micro_usd = max(said_usd, micro_usd)
            if is_all and asked.name != OTHER:
                prompt_chars = self._estimates.learn(
                    asked.call, model=model, project_id=asked.who.project_id, usage=reported
                )
        state = CallState.DONE if error is None else CallState.FAILED
        if asked.client.has_gone and error is None:
            state = CallState.CANCELLED
        counts = _Counts() if reported is None else _counts(reported)
        return self._calls.end(
            live,
            CallEnd(
                state=state,
                status=status,
                error=error,
                tokens=tokens,
                micro_usd=micro_usd,
                assumed_tokens=max(0, tokens - said_tokens),
                assumed_micro_usd=max(0, micro_usd - said_usd),
                is_unpriced=is_unpriced,
                prompt_chars=prompt_chars,
                **counts,
            ),
        )

    def _assumed(self, asked: Asked, live: LiveCall, answer_bytes: int) -> tuple[int, int]:
        """Return the tokens and the money of a call of which nobody said what it used.

        It is what was held, and no less than its prompt and the bytes that came back make, or the
        longest answer that it asked for, unless that is so long that nobody expects it.
        """
        held_tokens, held_usd = live.record.reserved_tokens, live.record.reserved_micro_usd
        if asked.name == OTHER or asked.is_free:
            return held_tokens, held_usd
        call, model = asked.call, live.route.model
        size = call.prompt_chars
        if call.prompt_bytes <= 2 * size + _MARGIN_BYTES:
            # There is hardly more than text in it.
            size = call.prompt_bytes
        known = self._estimates.input_tokens(call, model, asked.who.project_id)
        given = max(known, -(-size // CHARACTERS_PER_TOKEN))
        made = answer_bytes // CHARACTERS_PER_TOKEN
        if call.bound_tokens is not None:
            longest = call.answers * call.bound_tokens
            is_short = call.bound_tokens <= SHORT_TOKENS
            made = longest if is_short else min(made, longest)
        with suppress(CallerError):
            cost = self._prices.cost(model, input_tokens=given, output_tokens=made)
            held_usd = max(held_usd, cost.micro_usd)
        return max(held_tokens, given + made), held_usd

    def _lose(self, asked: Asked, live: LiveCall, why: str, *, answer_bytes: int = 0) -> None:
        """Book what a call is assumed to cost that may have cost something: nobody knows."""
        if live.record.state is not CallState.RUNNING:
            self._calls.end(live, CallEnd(state=CallState.FAILED, error=why))
            return
        tokens, micro_usd = self._assumed(asked, live, answer_bytes)
        if asked.is_free:
            tokens = micro_usd = 0
        self._calls.end(
            live,
            CallEnd(
                state=CallState.FAILED,
                error=why,
                tokens=tokens,
                micro_usd=micro_usd,
                assumed_tokens=tokens,
                assumed_micro_usd=micro_usd,
            ),
        )

    def _not_answered(self, live: LiveCall, refusal: _Refusal) -> None:
        state = CallState.REFUSED if live.record.tries == 0 else CallState.FAILED
        status = refusal.failure.value.status
        self._calls.end(live, CallEnd(state=state, status=status, error=refusal.message))

    # Beside calls.

    async def _show_models(self, client: Client, sender: Sender) -> None:
        is_anthropic = bool(client.request.header(b"anthropic-version"))
        listed = await self._listed_models(client, sender)
        await client.whole(_OK, [_JSON], models_body(listed, is_anthropic=is_anthropic))

    async def _show_model(self, client: Client, sender: Sender, name: str) -> None:
        is_anthropic = bool(client.request.header(b"anthropic-version"))
        found = [one for one in await self._listed_models(client, sender) if one.id == name]
        if not found:
            line = f"there is no model '{excerpt(name)}' here"
            raise _Refusal(Failure.UNKNOWN_MODEL, line)
        body = models_body(found, is_anthropic=is_anthropic)
        shown = msgspec.json.decode(body)["data"][0]
        await client.whole(_OK, [_JSON], msgspec.json.encode(shown))

    async def _listed_models(self, client: Client, sender: Sender) -> list[ListedModel]:
        """Return the models that can be asked for: aliases, and what upstreams say they have."""
        is_anthropic = bool(client.request.header(b"anthropic-version"))
        kind = "anthropic" if is_anthropic else "openai"
        found = {
            name: ListedModel(name)
            for name, kinds in self._upstreams.aliases().items()
            if kind in kinds
        }
        speaking = [one for one in self._upstreams.all if one.kind == kind]
        for upstream in speaking:
            for name in upstream.settings.models:
                if not set(name) & set("*?["):
                    found.setdefault(name, ListedModel(name, upstream.name))
        keys = sender.keys
        lists = await asyncio.gather(
            *(
                self._upstreams.models_of(
                    one,
                    keys.provider_key,
                    is_bearer=keys.scheme == "bearer",
                    slots=self._open_first(one, sender.identity.project_id),
                )
                for one in speaking
            )
        )
        for upstream, names in zip(speaking, lists, strict=True):
            for name in names or ():
                found.setdefault(name, ListedModel(name, upstream.name))
        if not found and all(names is None for names in lists):
            raise self._no_models(kind, speaking, sender)
        return list(found.values())

    def _open_first(self, upstream: Upstream, project_id: str) -> list[str]:
        """Return the slots that a project may use of an upstream, those that are closed last."""
        may_use = self._api.submission_parser.is_slot_for
        slots = [one for one in upstream.settings.slots if may_use(one, project_id)]
        known = self._calls.open_slots(self._upstreams.route(upstream, OTHER, ""), project_id)
        return sorted(slots, key=lambda one: known is not None and one not in known)

    def _no_models(self, kind: str, speaking: list[Upstream], sender: Sender) -> _Refusal:
        """Say why nothing can be listed: an empty list would say that there are no models."""
        if not speaking:
            return _Refusal(Failure.NOT_FOUND, f"there is no upstream of kind {kind}")
        first = speaking[0]
        slot = next(iter(self._open_first(first, sender.identity.project_id)), None)
        has_key = self._upstreams.has_key(first)
        if self._upstreams.key_problem(first, slot) or not (has_key or sender.keys.provider_key):
            return self._no_key(first, slot)
        line = f"upstream '{first.name}' does not list its models now; a call may name one all the"
        line += f" same, and models = [...] in [upstreams.{first.name}] has them listed"
        return _Refusal(Failure.UPSTREAM_FAILED, line)

    def _no_key(self, upstream: Upstream, slot: str | None) -> _Refusal:
        """Say what is wrong with a configured key, or that there is none."""
        line = f"upstream '{upstream.name}' has no key: "
        problem = self._upstreams.key_problem(upstream, slot)
        if problem:
            return _Refusal(Failure.UNAUTHORIZED, f"{line}{problem}")
        variable = upstream.settings.key_env or "one"
        line += f"set {variable} where Headgate runs, or send your own"
        return _Refusal(Failure.UNAUTHORIZED, line)

    async def _pass_through(
        self, client: Client, sender: Sender, upstream: Upstream, path: str
    ) -> None:
        """Pass a request on that is no call of a model, and book what its answer says."""
        request = client.request
        segments = unquote(path).split("/")[1:]
        is_crooked = not {".", ".."}.isdisjoint(segments) or "" in segments[:-1]
        if is_crooked or _AMBIGUOUS.search(path):
            raise _Refusal(Failure.NOT_FOUND, "the path cannot be passed on")
        protocol = Protocol.MESSAGES if upstream.kind == "anthropic" else Protocol.CHAT
        asked = await self._asked(client, sender, protocol)
        query = upstream_query(request.query_string().encode("latin-1")).decode("latin-1")
        asked.method, asked.name = request.method, OTHER
        asked.path = path + (f"?{query}" if query else "")
        asked.is_free = kind_of(request.method, path) is requests.Kind.FREE
        _check_model(asked.call.model or OTHER)
        asked.members = [(upstream, asked.call.model or OTHER)]
        await self._check_passed_through(asked, upstream, path)
        await self._in_turn(asked)

    async def _check_passed_through(self, asked: Asked, upstream: Upstream, path: str) -> None:
        """Refuse what a tenant may not do with the key of the service, and what nobody can bound.

        Behind that key lies what all tenants have stored there, and the account itself. A tenant
        may have what it stored there through this service, by its id.
        """
        if asked.reserve is Reserve.STRICT and not asked.is_free:
            line = f'what {path} costs is not bounded, and its budget has reserve = "strict"'
            raise _Refusal(Failure.BAD_REQUEST, line)
        response_id = _response_in(path)
        if response_id and upstream.kind == "openai":
            await self._keep_to(asked, response_id)
            return
        if not asked.sender.caller.is_trusted:
            self._check_own_key(upstream, path)

    def _check_own_key(self, upstream: Upstream, what: str) -> None:
        """Refuse a tenant what leads to things of others with the key of the service."""
        if self._upstreams.has_key(upstream):
            line = f"this token may not use the key of upstream '{upstream.name}' for {what}"
            raise _Refusal(Failure.FORBIDDEN, f"{line}; send a key of your own, or ask an operator")

    def _note_stored(self, asked: Asked, live: LiveCall, answer: bytes) -> None:
        """Remember whose response an id is that a provider keeps."""
        if asked.protocol is not Protocol.RESPONSES or asked.name == OTHER:
            return
        found = _STORED_ID.search(answer, 0, MAX_ID_PLACE)
        if found is None or not asked.call.is_stored:
            return
        response_id = found[1].decode()
        live.change(response_id=response_id)
        self._stored.note(response_id, StoredResponse.of(live.record))

    async def _stored_response(self, response_id: str) -> StoredResponse | None:
        """Return what is known of a stored response; None if nobody knows it."""
        stored = self._stored.get(response_id)
        if stored is None and (record := await self._call_of(response_id)) is not None:
            stored = StoredResponse.of(record)
            self._stored.note(response_id, stored)
        return stored

    async def _keeper_of(self, path: str, sender: Sender) -> Upstream | None:
        """Return the upstream that keeps the response of a path, which its project has made."""
        stored = await self._stored_response(_response_in(path))
        if stored is None or not sender.has(stored):
            return None
        upstream = self._upstreams.get(stored.upstream)
        return upstream if upstream is not None and upstream.kind == "openai" else None

    async def _keep_to(self, asked: Asked, response_id: str) -> None:
        """Have a call go where the response is kept that it names, with the key that made it.

        Where the settings have that upstream or that key no more, its provider decides.
        """
        stored = await self._stored_response(response_id)
        if stored is not None and asked.sender.has(stored):
            kept_at = [one for one in asked.members if one[0].name == stored.upstream]
            asked.members = kept_at or asked.members
            if kept_at and stored.slot in kept_at[0][0].settings.slots:
                asked.slot = stored.slot
        for upstream, _ in asked.members:
            self._check_stored(asked.sender, upstream, response_id, stored)

    async def _call_of(self, response_id: str) -> CallRecord | None:
        """Return the call that has ended of which a stored response came."""
        store = self._api.engine.call_store
        if store is None or _RESPONSE_ID.fullmatch(response_id) is None:
            return None
        return await store.of_response(response_id)

    def _check_stored(
        self, sender: Sender, upstream: Upstream, response_id: str, stored: StoredResponse | None
    ) -> None:
        """Refuse a response behind the key of the service that another project has made.

        To a token that is for one agent it is as if other agents of the project had made none. Of
        one that nobody remembers an operator may ask, and a tenant may not.
        """
        if not self._upstreams.has_key(upstream):
            return
        project_id = sender.identity.project_id
        is_trusted = sender.caller.is_trusted
        if is_trusted if stored is None else sender.has(stored):
            return
        line = f"project '{project_id}' has made no response '{excerpt(response_id)}'"
        if is_trusted and stored is not None:
            line += f"; project '{stored.project_id}' has: ask under /p/{stored.project_id}/v1"
        raise _Refusal(Failure.NOT_FOUND, line)


_PATH, _SENDER, _SENT, _OWN_SENT = "path", "sender", "sent headers", "sent headers with own key"
"""What is kept of a head that a client may repeat."""

_JSON = (b"content-type", b"application/json")
_PATHS = ("/v1/", "/p/", "/upstreams/")
_URLS = tuple(path.encode() for path in _PATHS)
_AMBIGUOUS = re.compile(r"[;?#\\\x00-\x20]|%(?:[01][0-9a-f]|2[035f]|3[bf]|5c|7f)", re.IGNORECASE)
"""What some servers take for the end of a path or of a part of it, and others do not."""
_UNDER_WAY = re.compile(rb'"status"\s*:\s*"(?:queued|in_progress)"')
_RESPONSE_ID = re.compile(r"resp_[A-Za-z0-9_-]{1,128}")
_STORED_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,128})"')


def _response_in(path: str) -> str:
    """Return the id of the stored response that a path leads to; empty if it leads to none."""
    return path.partition("/responses/")[2].partition("/")[0]


def _learn_again(estimates: CallEstimates, record: CallRecord) -> None:
    """Learn from a call that has ended what its provider said of it."""
    if record.output_tokens is None or record.assumed_tokens or record.protocol == OTHER:
        return
    estimates.learn_of(
        record.upstream_model or record.model,
        record.project_id,
        chars=record.prompt_chars,
        input_tokens=record.input_tokens or 0,
        output_tokens=record.output_tokens,
        answers=record.answers,
    )


class _Counts(TypedDict, total=False):
    input_tokens: int
    cached_tokens: int
    cache_write_tokens: int
    output_tokens: int
    reasoning_tokens: int


def _counts(reported: ReportedUsage) -> _Counts:
    written = reported.cache_write_tokens + reported.cache_write_1h_tokens
    return {
        "input_tokens": reported.input_tokens,
        "cached_tokens": reported.cached_tokens,
        "cache_write_tokens": written,
        "output_tokens": reported.output_tokens,
        "reasoning_tokens": reported.reasoning_tokens,
    }


def _warm_tokens(record: CallRecord) -> int:
    """Return how much of a prompt its provider has cached by now; short ones are not cached."""
    said = (record.cached_tokens or 0) + (record.cache_write_tokens or 0)
    given = record.input_tokens or 0
    return said or (given if given >= LEAST_CACHED_TOKENS else 0)


_SEND_TOKEN = "send a token of Headgate as the API key: hg_…"  # noqa: S105
_NO_ATTEMPT = "the token is of no attempt at a task that runs here now"


_LENGTH_FIELDS = {
    Protocol.RESPONSES: "max_output_tokens",
    # Newer models take nothing but the first.
    Protocol.CHAT: "max_completion_tokens or max_tokens",
}


def _shown(keys: ClientKeys) -> bytes:
    """Return the header that shows a token to the API."""
    return f"Bearer {keys.token}".encode() if keys.token else b""


def _caller_for_tasks(project_id: str, agent_id: str | None = None) -> Caller:
    """Return who makes the calls of tasks: each has a token, and all of a project one share."""
    name = f"tasks of {project_id}"
    return Caller(
        name=name,
        permissions=frozenset(("submit",)),
        token_id=name,
        bounds=Bounds(project_id=project_id, agent_id=agent_id),
    )


def _identity(asked: Asked) -> str:
    """Return what a retry of the same call has in common with it."""
    sender = asked.sender
    sent_by = sender.holder.key if sender.task is None else sender.task.task.id
    parts = (sent_by, asked.session, asked.path, asked.who.project_id)
    digest = asked.body.hash()
    digest.update("\0".join(parts).encode(errors="replace"))
    return digest.hexdigest()


class _Holding:
    """What a call has to hold, where it is to go at the moment; never raises."""

    __slots__ = ("_asked", "_hold", "_last")

    def __init__(self, hold: Callable[[Asked, str], Hold], asked: Asked, first: Hold) -> None:
        self._hold = hold
        # The call has this one, and must not have itself: see `Connection._finish`.
        self._asked = ref(asked)
        self._last = first

    def __call__(self) -> Hold:
        asked = self._asked()
        if asked is not None and asked.live is not None:
            with suppress(CallerError):
                # Prices may have changed since, so that there is none any more.
                self._last = self._hold(asked, asked.live.route.model)
        return self._last


def _is_large(body: bytes) -> bool:
    """Tell whether it takes longer to read a body than others should wait."""
    if len(body) <= MANY_VALUES:
        # Each value has a byte of its own.
        return False
    return len(body) > LARGE_BODY_BYTES or most_values(body) > MANY_VALUES


def _decoded(body: bytes, texts: dict[str, str], max_bytes: int) -> bytes:
    """Return an answer without its coding; raises `ContentCodingError` if that is none."""
    if not codings_of(texts):
        return body
    decoder = ContentDecoder(coding_of(texts), max_bytes=max_bytes)
    made = decoder.feed_many(body)
    decoder.finish()
    return made


async def decoded_answer(body: bytes, texts: dict[str, str], held: HeldAnswer) -> bytes:
    """Return a whole answer without its coding; what is made of it counts as it is made."""
    decoder = ContentDecoder(coding_of(texts), max_bytes=MAX_ANSWER_BYTES)
    decode = partial(decoder.feed_many, max_bytes=LARGE_ANSWER_BYTES)
    made = bytearray(await asyncio.to_thread(decode, body))
    while True:
        size = len(body) + len(made)
        if size > UNCOUNTED_BYTES:
            await held.count(size)
        if not decoder.has_more:
            break
        made += await asyncio.to_thread(decode, b"")
    decoder.finish()
    return bytes(made)


def _check_model(model: str) -> None:
    """Refuse a name of a model that is none, or too long to be kept."""
    if not model or len(model) > MAX_MODEL_LENGTH or not model.isprintable():
        line = f"model: name one, in at most {MAX_MODEL_LENGTH} printable characters"
        raise _Refusal(Failure.BAD_REQUEST, line)


def _path_of(request: Request) -> str:
    query = request.query_string()
    return request.raw_path() + (f"?{query}" if query else "")


def _target_of(request: Request) -> str:
    return f"{request.method} {_path_of(request)}"


def _key_of(request: Request, body: bytes) -> bytes:
    keys = request.header(b"authorization"), request.header(b"x-api-key")
    return key_of_request(_target_of(request), *keys, body)


async def _request_key(request: Request, body: bytes) -> bytes:
    """Return what the place of a call is bound to; a large body is read while others go on."""
    if len(body) > LARGE_BODY_BYTES:
        return await asyncio.to_thread(_key_of, request, body)
    return _key_of(request, body)


def _lost_key(client: Client, body: bytes) -> bytes:
    """Return what a call and its retry have in common, as far as a node that relays it knows."""
    return _key_of(client.request, body) + client.request.peer.encode(errors="replace")


def _sent_lines(request: Request, *, is_own_key: bool) -> bytes:
    """Return the headers of a request that go upstream, as they are sent."""
    name = _OWN_SENT if is_own_key else _SENT
    lines: bytes | None = request.kept.get(name)
    if lines is None:
        headers = upstream_headers(request.all_headers(), is_own_key=is_own_key)
        lines = request.kept[name] = header_lines(headers)
    return lines


def _is_of_task(request: Request) -> bool:
    """Tell whether a running task makes a call, as far as its token says."""
    token = keys_of(RequestHeaders(request.all_headers())).token
    return token.startswith(TASK_TOKEN_PREFIX)


def _lost_with_node(call_id: str) -> _Refusal:
    line = "the node that had this call stopped; the provider may have been asked; "
    return _Refusal(
        Failure.UNAVAILABLE,
        line + "its outcome is unknown",
        retry_after_seconds=STOP_SECONDS,
        headers=((b"x-headgate-call-id", call_id.encode()), (b"x-should-retry", b"true")),
    )


def _stopping() -> _Refusal:
    line = "the service is stopping; try again in a moment"
    return _Refusal(Failure.UNAVAILABLE, line, retry_after_seconds=STOP_SECONDS)


def _undecided() -> _Refusal:
    line = "no node that decides about calls can be reached at this moment; try again in a moment"
    return _Refusal(Failure.UNAVAILABLE, line, retry_after_seconds=STOP_SECONDS)


def _of_budget(error: CallRefusedError, line: str) -> _Refusal:
    resets_at = None if error.refused is None else error.refused.resets_at
    return _Refusal(Failure.REFUSED, line, resets_at=resets_at)


_BY_STATUS = {
    400: Failure.BAD_REQUEST,
    401: Failure.UNAUTHORIZED,
    402: Failure.REFUSED,
    403: Failure.FORBIDDEN,
    404: Failure.NOT_FOUND,
    413: Failure.TOO_LARGE,
    421: Failure.FORBIDDEN,
    429: Failure.TRY_AGAIN,
    503: Failure.UNAVAILABLE,
    507: Failure.UNAVAILABLE,
}


def _refusal_of(error: ApiError) -> _Refusal:
    status = error.kind.status
    usual = Failure.BAD_REQUEST if status < _SERVER_ERRORS else Failure.INTERNAL
    failure = _BY_STATUS.get(status, usual)
    seconds = 5.0 if failure in (Failure.TRY_AGAIN, Failure.UNAVAILABLE) else None
    return _Refusal(failure, error.body.error, retry_after_seconds=seconds)


def _spoken_by(headers: RequestHeaders, spoken: Protocol | None) -> Protocol:
    """Return the protocol of a request, by its path or otherwise by its headers."""
    is_anthropic = bool(headers.raw(b"anthropic-version"))
    return spoken or (Protocol.MESSAGES if is_anthropic else Protocol.CHAT)


def _error_answer(
    refusal: _Refusal, spoken: Protocol | None, headers: RequestHeaders
) -> ErrorAnswer:
    """Return a refusal as the client reads it that has sent these headers."""
    return error_answer(
        _spoken_by(headers, spoken),
        refusal.failure,
        refusal.message,
        client=client_of(headers),
        resets_at=refusal.resets_at,
        retry_after_seconds=refusal.retry_after_seconds,
    )


# What the gateway answers to, as the description of the API has it. `Gateway.serve` takes a request
# before the table of routes is asked for it.

_IDENTITY = tuple(f"X-Headgate-{name}" for name in ("Project", "Agent", "Scope", "Priority"))
_CALL = (*_IDENTITY, "X-Headgate-Reserve")
_JSON_TYPE, _ANY_TYPE = "application/json", "*/*"


async def _is_served_before(_api: Api, _: Request, __: str) -> Response:
    raise ApiError("not_found", "the gateway is switched off")


def _described(
    method: str, path: str, summary: str, kind: str = _JSON_TYPE, headers: tuple[str, ...] = ()
) -> Route:
    return Route(
        method,
        path,
        _is_served_before,
        summary,
        "submit",
        responses={_OK: kind},
        headers=headers,
    )


ROUTES: tuple[Route, ...] = (
    *(
        _described("POST", f"/v1{protocol.path}", summary, _ANY_TYPE, _CALL)
        for protocol, summary in (
            (Protocol.CHAT, "ask a model, as OpenAI's chat completions do"),
            (Protocol.COMPLETIONS, "ask a model, as OpenAI's completions do"),
            (Protocol.RESPONSES, "ask a model, as OpenAI's responses do"),
            (Protocol.EMBEDDINGS, "have a model make embeddings, as OpenAI's do"),
            (Protocol.MESSAGES, "ask a model, as Anthropic's messages do"),
            (Protocol.COUNT_TOKENS, "count the tokens of a prompt, as Anthropic does"),
        )
    ),
    _described("GET", "/v1/models", "list the models that can be asked for"),
    _described("GET", "/v1/models/{id}", "show a model"),
    _described("GET", "/v1/responses/{id}", "show a response that its provider keeps"),
    _described("DELETE", "/v1/responses/{id}", "delete a response that its provider keeps"),
    *(
        _described(
            method, "/upstreams/{id}/{path}", "pass a request on to an upstream", _ANY_TYPE, headers
        )
        for method, headers in (("GET", ()), ("POST", _CALL), ("DELETE", ()))
    ),
)
