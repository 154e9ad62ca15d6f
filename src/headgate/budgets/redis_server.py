"""The Redis or Valkey behind a ledger: whether it is fit for one, and calls that never hang.

Rule: a server that may forget what it was told is refused. Each call has a deadline and a bounded
number of tries; since every request carries the caller's own id, a try that was applied without an
answer is recognised by the next. Whatever goes wrong comes out as `LedgerUnavailableError`.

Where replicas may take over, behind Sentinels or in a cluster, a second rule: what is granted is on
every replica that could be promoted. See docs/decisions/0035-redis-that-fails-over.md.
"""

from __future__ import annotations

import asyncio
import re
import time
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from math import inf
from typing import Literal, Protocol, TypeVar, cast
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

import msgspec
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    ConnectionError,  # noqa: A004 - redis-py names it so
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from headgate.budgets.connect import SCHEMES
from headgate.errors import InvalidSettingError, LedgerUnavailableError

OLDEST_VERSION = (6, 2)
MAX_TRIES = 3
MAX_CONNECTIONS = 8
DEADLINE_SECONDS = 5.0
CHECKED_EVERY_SECONDS = 60.0
POLICY_FIELD = "maxmemory_policy"
GOOD_REPLICAS_FIELD = "min_slaves_good_slaves"
"""The server has it where `min-replicas-to-write` is set, also for those who may not ask CONFIG."""

URL_FORMS = {
    "": "redis://host:6379/0",
    "sentinel": "redis+sentinel://host:26379,host2:26379/service/0",
    "cluster": "redis+cluster://host:6379,host2:6379",
}

CONFIRMED_WITHIN_MS = 800
FOUND_FOR_SECONDS = 1.0
"""After so long the primary is looked for again."""

TRUSTED_SECONDS = 3.0
"""What was written by who was found longer ago is not taken as confirmed."""

FOUND_WITHIN_SECONDS = 0.6
LATER_SECONDS = 0.05
"""So much longer than most may one take that is asked who the primary is."""

MAX_ASKED = 16
"""So many nodes of a cluster are asked at once."""

Result = TypeVar("Result")
Topology = Literal["", "sentinel", "cluster"]
Address = tuple[str, int]


class RedisPersistenceWarning(UserWarning):
    """The server keeps its data in memory only: a restart forgets budgets and what was spent."""


class ServerUrl(msgspec.Struct, frozen=True, kw_only=True):
    """Where a URL leads: to a server, to the Sentinels of a service, or to nodes of a cluster."""

    scheme: str
    topology: Topology
    place: str
    """The host with all before it; where there are several, only what is before them."""

    hosts: tuple[Address, ...]
    """Sentinels, or nodes of a cluster."""

    service: str
    path: str
    options: tuple[tuple[str, str], ...]
    sentinel_user: str
    sentinel_password: str
    ledger: str | None

    def of_server(self, address: Address | None = None) -> str:
        """Give the URL of one server, as redis-py reads it."""
        place = self.place if address is None else f"{self.place}{_written(address)}"
        return urlunsplit((self.scheme, place, self.path, urlencode(self.options), ""))

    def of_sentinel(self, address: Address) -> str:
        """Give the URL of a Sentinel: it has a password of its own."""
        shared = [each for each in self.options if each[0].startswith(("ssl_", "socket_"))]
        user, password = quote(self.sentinel_user, safe=""), quote(self.sentinel_password, safe="")
        place = f"{user}:{password}@{_written(address)}" if password else _written(address)
        return urlunsplit((self.scheme, place, "", urlencode(shared), ""))


class Replicated(msgspec.Struct, frozen=True):
    """The primary of a ledger, how many replicas could be promoted, and which could not.

    The address of a replica may be written in several ways, so those that could are counted.
    """

    primary: Address
    replicas: int
    down: frozenset[Address]


class Finder(Protocol):
    """Knows where the primary of a ledger is."""

    async def find(self) -> Replicated:
        """Return the primary and its replicas as a majority sees them, or raise."""
        ...

    async def close(self) -> None:
        """Let go of all connections."""
        ...


class _UnconfirmedError(Exception):
    """A step was taken, and not all replicas have it; it counts for nothing until they do."""


# The server is not, or not any more, the one to ask; the same call finds the other one.
_ELSEWHERE = (AskError, ClusterDownError, ReadOnlyError, TryAgainError, _UnconfirmedError)


class RedisServer:
    """A server that holds one script, and whose clock is the clock of the ledger."""

    def __init__(
        self,
        url: ServerUrl,
        key: str,
        script: str,
        *,
        deadline_seconds: float,
        accepts_unseen_policy: bool,
    ) -> None:
        """Keep one script for a ledger; all of its keys lie in a cluster where `key` does."""
        _check_options(url)
        self._url = url
        self._key = key
        self._script = script
        self._deadline_seconds = deadline_seconds
        self._accepts_unseen_policy = accepts_unseen_policy
        self._client: Redis | None = None
        self._digest: bytes | str = ""
        self._checked_at = -CHECKED_EVERY_SECONDS
        # Against the monotonic clock: the wall clock of this machine may be set at any time.
        self._ahead_seconds = time.time() - time.monotonic()
        # Only where replicas may take over.
        self._finder: Finder | None = None
        self._finding = asyncio.Lock()
        self._found: Replicated | None = None
        self._found_at = -inf
        self._online_replicas = 0
        self._steps_known = 0

    def now(self) -> float:
        """Return the time of the server, in Unix seconds, as the last check found it."""
        return time.monotonic() + self._ahead_seconds

    async def open(self) -> None:
        """Connect, refuse a server that is unfit, and warn about one that forgets."""
        self._steps_known = 0
        self._finding = asyncio.Lock()
        match self._url.topology:
            case "sentinel":
                self._finder = SentinelFinder(self._url)
            case "cluster":
                self._finder = ClusterFinder(self._url, self._key)
            case "":
                self._client = _client_for(self._url.of_server())
        await self._attempt(self._check)
        await self._attempt(self._load_script)
        await self._attempt(self._warn_about_persistence)

    async def close(self) -> None:
        """Let go of all connections."""
        client, finder = self._client, self._finder
        self.abandon()
        if client is not None:
            await client.aclose()
        if finder is not None:
            await finder.close()

    def abandon(self) -> None:
        """Forget the connections, where the event loop that made them is closed."""
        self._client = self._finder = self._found = None
        self._found_at = -inf

    async def run(self, step: str, keys: Sequence[str], parameters: bytes) -> bytes:
        """Run a step of the script, and return what it replied."""
        arguments: tuple[str | bytes | int, ...] = (len(keys), *keys, step, parameters)

        async def evaluate() -> bytes:
            await self._check_now_and_then()
            run_once = self._run_alone if self._finder is None else self._run_confirmed
            try:
                return await run_once(arguments)
            except NoScriptError:
                # A restart, a failover or SCRIPT FLUSH forgets scripts, and costs nothing more.
                await self._load_script()
                return await run_once(arguments)

        return await self._attempt(evaluate)

    async def read(self, *commands: tuple[str | int, ...]) -> list[object]:
        """Run commands that only read, all at the same instant."""

        async def transaction() -> list[object]:
            await self._follow()
            pipeline = self._open_client().pipeline(transaction=True)
            for command in commands:
                pipeline.execute_command(*command)
            return cast("list[object]", await pipeline.execute())

        return await self._attempt(transaction)

    async def create(self, key: str, value: str) -> str:
        """Write a value unless there is one, and return the one that is there."""

        async def set_once() -> str:
            await self._follow()
            client = self._open_client()
            await client.set(key, value, nx=True)
            kept = cast("bytes", await client.get(key))
            return kept.decode()

        return await self._attempt(set_once)

    async def _run_alone(self, arguments: Sequence[str | bytes | int]) -> bytes:
        return await self._execute("EVALSHA", self._digest, *arguments)

    async def _run_confirmed(self, arguments: Sequence[str | bytes | int]) -> bytes:
        """Run a step, and return its reply once all replicas have what it wrote.

        All on one connection, since `WAIT` speaks of what that connection wrote. The step counts
        itself, so that there is something to wait for even if its answer was known already. `WAIT`
        says how many have confirmed and not who, so `ROLE` says up to where each of them is.
        """
        found, found_at = self._found, self._found_at
        if found is None:
            raise _UnconfirmedError("the primary of Redis is looked for again")
        needed = max(1, found.replicas)
        pipeline = self._open_client().pipeline(transaction=False)
        pipeline.execute_command("EVALSHA", self._digest, *arguments, self._steps_known)
        pipeline.execute_command("ROLE")
        pipeline.execute_command("WAIT", max(needed, self._online_replicas), CONFIRMED_WITHIN_MS)
        pipeline.execute_command("ROLE")
        answers = cast("list[object]", await pipeline.execute(raise_on_error=False))
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        reply, written, count, role = answers
        packed, steps = cast("tuple[bytes, int]", reply)
        if not steps:
            # Nothing was written, and nothing granted.
            return packed
        if cast("list[object]", role)[0] != b"master":
            raise _UnconfirmedError("Redis has become a replica meanwhile")
        followers = cast("list[list[tuple[bytes, bytes, bytes]]]", role)[-1]
        up_to = [
            int(offset)
            for host, port, offset in followers
            if (host.decode(), int(port)) not in found.down
        ]
        self._online_replicas = len(up_to)
        confirmed = len(up_to)
        if cast("int", count) < len(followers):
            confirmed = sum(1 for offset in up_to if offset >= cast("list[int]", written)[1])
        needed = max(needed, len(up_to))
        if confirmed < needed:
            problem = f"{confirmed} of {needed} replicas of Redis have confirmed it in time"
            raise _UnconfirmedError(problem)
        if time.monotonic() - found_at > TRUSTED_SECONDS:
            raise _UnconfirmedError("Redis took too long, and may not be the primary any more")
        self._steps_known = max(self._steps_known, steps)
        return packed

    def _open_client(self) -> Redis:
        if self._client is None:
            raise LedgerUnavailableError("the ledger is closed; open it again")
        return self._client

    async def _attempt(self, action: Callable[[], Awaitable[Result]]) -> Result:
        last: list[Exception] = []
        try:
            async with asyncio.timeout(self._deadline_seconds):
                return await self._attempt_again(action, last)
        except LedgerUnavailableError:
            await self._start_over()
            raise
        except TimeoutError as error:
            await self._start_over()
            if last and not isinstance(last[-1], OSError):
                raise LedgerUnavailableError(_problem(last[-1])) from last[-1]
            problem = f"Redis did not answer within {self._deadline_seconds:g} seconds"
            raise _unavailable(problem, "nothing was granted") from error
        except (RedisError, OSError, _UnconfirmedError) as error:
            await self._start_over()
            raise LedgerUnavailableError(_problem(error)) from error

    async def _attempt_again(
        self, action: Callable[[], Awaitable[Result]], failed: list[Exception]
    ) -> Result:
        for _ in range(MAX_TRIES - 1):
            try:
                async with asyncio.timeout(self._deadline_seconds / MAX_TRIES):
                    return await action()
            except AuthenticationError:
                raise
            except (ConnectionError, OSError, *_ELSEWHERE) as error:
                if self._finder is None and isinstance(error, _ELSEWHERE):
                    raise
                failed.append(error)
                await self._start_over()
        return await action()

    async def _start_over(self) -> None:
        """Check the server again, over new connections: its name may lead to another by now."""
        self._checked_at = -CHECKED_EVERY_SECONDS
        self._found_at = -inf
        if self._client is not None:
            await self._client.connection_pool.disconnect(inuse_connections=False)

    async def _follow(self) -> None:
        """Find the primary, unless it was found a moment ago, and connect to it."""
        if self._finder is None:
            return
        async with self._finding:
            started = time.monotonic()
            if started - self._found_at < FOUND_FOR_SECONDS:
                return
            found = await self._finder.find()
            before, self._found, self._found_at = self._found, found, started
            if before is not None and before.primary == found.primary:
                return
            # All at once, before anything is waited for: a call must not see half of it.
            former, self._client = self._client, _client_for(self._url.of_server(found.primary))
            self._checked_at = -CHECKED_EVERY_SECONDS
            self._online_replicas = 0
            if former is not None:
                await former.aclose()

    async def _check_now_and_then(self) -> None:
        await self._follow()
        if time.monotonic() - self._checked_at > CHECKED_EVERY_SECONDS:
            await self._check()

    async def _check(self) -> None:
        await self._follow()
        client = self._open_client()
        info = cast("dict[str, object]", await client.info())
        _check_kind(info, self._url.topology)
        seen = await _setting(client, "maxmemory-policy")
        policy = info.get(POLICY_FIELD) if seen is None else seen
        if policy is not None:
            _check_policy(str(policy))
        elif not self._accepts_unseen_policy:
            problem = "the maxmemory-policy of Redis cannot be read"
            advice = "allow CONFIG GET or INFO, or pass accepts_unseen_policy=True"
            raise _unavailable(problem, advice)
        self._ahead_seconds = await _seconds_ahead(client)
        self._checked_at = time.monotonic()

    async def _load_script(self) -> None:
        digest = await self._execute("SCRIPT LOAD", self._script)
        self._digest = cast("bytes | str", digest)

    async def _execute(self, *command: str | bytes | int) -> bytes:
        execute = cast("Callable[..., Awaitable[bytes]]", self._open_client().execute_command)
        return await execute(*command)

    async def _warn_about_persistence(self) -> None:
        await self._follow()
        client = self._open_client()
        info = cast("dict[str, object]", await client.info("persistence"))
        if info.get("aof_enabled"):
            return
        problem = "Redis keeps this ledger in memory only, a restart forgets what was spent"
        if await _setting(client, "save"):
            if self._finder is None:
                return
            # Its replicas take over what it comes back with.
            problem = "a primary that restarts before it is replaced has its last snapshot only"
        warnings.warn(f"{problem}; set appendonly yes", RedisPersistenceWarning, stacklevel=2)


# Who is the primary, and which replicas could take its place.
#
# Rule: a replica may be left out of what confirms a grant only where a majority agrees that it is
# down. Whoever is cut off together with a primary sees the other replicas down as well, while the
# rest promotes one of them; he has no majority, so he grants nothing.


async def _heard(questions: Sequence[Coroutine[object, object, Result | None]]) -> list[Result]:
    """Return what is answered soon: most answers are enough, so one that is away delays nobody."""
    tasks = [asyncio.create_task(question) for question in questions]
    ends_at = time.monotonic() + FOUND_WITHIN_SECONDS
    try:
        waiting = set(tasks)
        while waiting and time.monotonic() < ends_at:
            _, waiting = await asyncio.wait(
                waiting,
                timeout=ends_at - time.monotonic(),
                return_when=asyncio.FIRST_COMPLETED,
            )
            heard = [each for each in tasks if each.done() and each.result() is not None]
            if len(heard) > len(tasks) // 2:
                ends_at = min(ends_at, time.monotonic() + LATER_SECONDS)
        answers = [each.result() for each in tasks if each.done()]
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [answer for answer in answers if answer is not None]


class _Opinion(msgspec.Struct, frozen=True, kw_only=True):
    """What one Sentinel says about a service."""

    primary: Address
    is_down: bool
    replicas: dict[Address, bool]
    """Whether each of them is down."""

    sentinels: int


class SentinelFinder:
    """Asks all Sentinels that a URL names; a majority of those that there are must agree."""

    def __init__(self, url: ServerUrl) -> None:
        self._service = url.service
        self._clients = [_client_for(url.of_sentinel(host)) for host in url.hosts]

    async def find(self) -> Replicated:
        """Return the primary that most Sentinels name, and how many replicas are not down."""
        answers = await _heard([self._ask(client) for client in self._clients])
        opinions = [answer for answer in answers if isinstance(answer, _Opinion)]
        total = max((opinion.sentinels for opinion in opinions), default=len(self._clients))
        majority = total // 2 + 1
        if len(self._clients) < majority:
            problem = f"the URL names {len(self._clients)} of {total} Sentinels"
            raise _unavailable(problem, f"name at least {majority}, or all of them")
        if len(opinions) < majority:
            for answer in answers:
                if isinstance(answer, LedgerUnavailableError):
                    raise answer
            problem = f"{len(opinions)} of {total} Sentinels answer, and {majority} must"
            raise _unavailable(problem, "nothing was granted")
        named = Counter(opinion.primary for opinion in opinions if not opinion.is_down)
        primary, count = max(named.items(), key=lambda each: each[1], default=(("", 0), 0))
        if count < majority:
            problem = "the Sentinels see no primary now"
            raise _unavailable(problem, "nothing was granted; they promote a replica soon")
        believed_down = Counter(
            replica
            for opinion in opinions
            for replica, is_down in opinion.replicas.items()
            if is_down
        )
        replicas = {replica for opinion in opinions for replica in opinion.replicas} - {primary}
        down = frozenset({each for each in replicas if believed_down[each] >= majority})
        return Replicated(primary, len(replicas - down), down)

    async def close(self) -> None:
        """Let go of all connections."""
        for client in self._clients:
            await client.aclose()

    async def _ask(self, client: Redis) -> _Opinion | LedgerUnavailableError | None:
        pipeline = client.pipeline(transaction=False)
        pipeline.execute_command("SENTINEL", "MASTER", self._service)
        pipeline.execute_command("SENTINEL", "REPLICAS", self._service)
        try:
            answers = cast("list[object]", await pipeline.execute(raise_on_error=False))
        except AuthenticationError:
            return _unavailable("a Sentinel refuses the password", HOW_TO_WRITE_IT)
        except (RedisError, OSError):
            await client.connection_pool.disconnect(inuse_connections=False)
            return None
        for answer in answers:
            if isinstance(answer, Exception):
                return _of_sentinel(answer)
        primary = _fields(cast("list[bytes]", answers[0]))
        replicas = [_fields(row) for row in cast("list[list[bytes]]", answers[1])]
        return _Opinion(
            primary=_address(primary),
            is_down=_is_down(primary),
            replicas={_address(replica): _is_down(replica) for replica in replicas},
            sentinels=int(primary["num-other-sentinels"]) + 1,
        )


HOW_TO_WRITE_IT = "write it as sentinel_password in the URL"


def _of_sentinel(error: Exception) -> LedgerUnavailableError:
    text = str(error)
    if "No such master" in text:
        return _unavailable("the Sentinels watch no service of this name", "see sentinel monitor")
    if "NOAUTH" in text or "Authentication" in text:
        return _unavailable("a Sentinel asks for a password", HOW_TO_WRITE_IT)
    return _unavailable("a Sentinel is unavailable", f"nothing was granted ({text[:200]})")


def _fields(row: Sequence[bytes]) -> dict[str, str]:
    texts = [value.decode(errors="replace") for value in row]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def _address(fields: dict[str, str]) -> Address:
    return fields["ip"], int(fields["port"])


def _is_down(fields: dict[str, str]) -> bool:
    return not {"s_down", "o_down"}.isdisjoint(fields["flags"].split(","))


class _Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node as another one of its cluster lists it."""

    name: str
    address: Address
    flags: frozenset[str]
    primary_name: str
    epoch: int
    slots: tuple[str, ...]

    @property
    def is_up(self) -> bool:
        """Whether most primaries have not given it up; a suspicion has a question mark."""
        return self.flags.isdisjoint({"fail", "handshake", "noaddr"})

    def has_slot(self, slot: int) -> bool:
        """Whether it serves a slot; what it imports or exports stands in brackets."""
        for text in self.slots:
            first, _, last = text.partition("-")
            if not text.startswith("[") and int(first) <= slot <= int(last or first):
                return True
        return False


class ClusterFinder:
    """Asks nodes of a cluster who serves the slot of a key; the latest election counts."""

    def __init__(self, url: ServerUrl, key: str) -> None:
        self._url = url
        self._slot = key_slot(key.encode())
        self._shard: tuple[Address, ...] = ()
        self._clients: dict[Address, Redis] = {}

    async def find(self) -> Replicated:
        """Return the primary of the slot, and how many of its replicas have not failed."""
        asked = tuple(dict.fromkeys((*self._shard, *self._url.hosts)))[:MAX_ASKED]
        for address in self._clients.keys() - set(asked):
            await self._clients.pop(address).aclose()
        listed = await _heard([self._ask(address) for address in asked])
        if not listed:
            raise _unavailable("no node of the cluster answers", "nothing was granted")
        owners = [node for nodes in listed for node in nodes if node.has_slot(self._slot)]
        # A primary that is cut off believes in itself; the one that was elected later is newer.
        primary = max(owners, key=lambda node: node.epoch, default=None)
        if primary is None or any(node.name == primary.name and not node.is_up for node in owners):
            problem = "the cluster has no primary for this ledger now"
            raise _unavailable(problem, "nothing was granted")
        replicas = [node for nodes in listed for node in nodes if node.primary_name == primary.name]
        up = {node.address for node in replicas if node.is_up}
        self._shard = (primary.address, *sorted(up))
        down = frozenset({node.address for node in replicas} - up)
        return Replicated(primary.address, len(up), down)

    async def close(self) -> None:
        """Let go of all connections."""
        for client in self._clients.values():
            await client.aclose()

    async def _ask(self, address: Address) -> list[_Node] | None:
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = _client_for(self._url.of_server(address))
        execute = cast("Callable[..., Awaitable[bytes]]", client.execute_command)
        try:
            listed = await execute("CLUSTER", "NODES")
        except AuthenticationError:
            raise
        except ResponseError as error:
            if "cluster support disabled" in str(error):
                problem = "this Redis is not a cluster"
                raise _unavailable(problem, f"write {URL_FORMS['']}") from None
            return None
        except (RedisError, OSError):
            with suppress(RedisError, OSError):
                await client.connection_pool.disconnect(inuse_connections=False)
            return None
        return [_node(line, address[0]) for line in listed.decode().splitlines()]


def _node(line: str, asked_host: str) -> _Node:
    name, place, flags, primary, _, _, epoch, _, *slots = line.split(" ")
    host, _, port = place.partition("@")[0].rpartition(":")
    return _Node(
        name=name,
        # A node that has met no other one yet does not know its own address.
        address=(host or asked_host, int(port)),
        flags=frozenset(flags.split(",")),
        primary_name=primary,
        epoch=int(epoch),
        slots=tuple(slots),
    )


_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(?::([0-9]{1,5}))?", re.ASCII)
DEFAULT_PORTS: dict[Topology, int] = {"sentinel": 26379, "cluster": 6379}
MAX_PORT = 65_535
NO_HOST = "the host and the port cannot be read, a port is a number"


def parse_url(url: str) -> ServerUrl:
    """Take a URL apart, or refuse it without repeating any of it: it may carry a password."""
    scheme, _, rest = url.partition("://")
    if scheme.lower() not in SCHEMES["redis"]:
        problem = f"the scheme must be one of {', '.join(SCHEMES['redis'])}"
        raise _bad_url(problem)
    scheme, _, named = scheme.lower().partition("+")
    topology = cast("Topology", named)
    before = ""
    hosts: tuple[Address, ...] = ()
    if topology:
        place = re.split(r"[/?#]", rest, maxsplit=1)[0]
        user, at, listed = place.rpartition("@")
        before, hosts = f"{user}{at}", _hosts(listed, topology)
        rest = rest[len(place) :]
    try:
        parts = urlsplit(f"{scheme}://{rest}")
        _ = parts.port
    except ValueError:
        raise _bad_url(NO_HOST, topology) from None
    service, path = "", parts.path
    if topology == "sentinel":
        service, _, database = path.removeprefix("/").partition("/")
        path = f"/{database}"
        if not service:
            raise _bad_url("the name of the service follows the Sentinels", topology)
    _check_database(scheme, path.removeprefix("/"), topology)
    options = parse_qsl(parts.query, keep_blank_values=True)
    own = {key: value for key, value in options if key in OWN_OPTIONS[topology]}
    return ServerUrl(
        scheme=scheme,
        topology=topology,
        place=before if topology else parts.netloc,
        hosts=hosts,
        service=unquote(service),
        path=path,
        options=tuple([each for each in options if each[0] not in own]),
        sentinel_user=own.get("sentinel_username", ""),
        sentinel_password=own.get("sentinel_password", ""),
        ledger=own.get("ledger"),
    )


OWN_OPTIONS: dict[Topology, tuple[str, ...]] = {
    "": ("ledger",),
    "sentinel": ("ledger", "sentinel_username", "sentinel_password"),
    "cluster": ("ledger",),
}
"""What follows ? and is not for redis-py."""


def _hosts(listed: str, topology: Topology) -> tuple[Address, ...]:
    hosts: list[Address] = []
    for text in listed.split(","):
        match = _HOST.fullmatch(text)
        port = DEFAULT_PORTS[topology] if match is None or not match[2] else int(match[2])
        if match is None or not 0 < port <= MAX_PORT:
            raise _bad_url(NO_HOST, topology)
        hosts.append((match[1].strip("[]"), port))
    return tuple(hosts)


def _check_database(scheme: str, database: str, topology: Topology) -> None:
    if scheme != "unix" and database and not (database.isascii() and database.isdecimal()):
        before = "service" if topology == "sentinel" else "host"
        problem = f"the database, which follows the {before}, must be a number"
        raise _bad_url(problem, topology)
    if topology == "cluster" and database.strip("0"):
        raise _bad_url("a cluster has the database 0 alone", topology)


def _written(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_options(url: ServerUrl) -> None:
    """Refuse options that a connection does not take; redis-py says so only when it connects."""
    addresses = [url.of_server(url.hosts[0])] if url.topology else [url.of_server()]
    if url.topology == "sentinel":
        addresses.append(url.of_sentinel(url.hosts[0]))
    try:
        for address in addresses:
            pool = _client_for(address).connection_pool
            cast("Callable[[], object]", pool.make_connection)()
    except (TypeError, ValueError, RedisError):
        problem = "what follows ? has an option that Redis does not take, or not with this value"
        raise _bad_url(problem, url.topology) from None


def _bad_url(problem: str, topology: Topology = "") -> InvalidSettingError:
    advice = f"write {URL_FORMS[topology]}, with the special characters of a password"
    return InvalidSettingError("url", f"{problem}; {advice} percent-encoded")


def _client_for(url: str) -> Redis:
    # Tries and time are counted by the caller; redis-py would do it once more, out of its sight.
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=MAX_CONNECTIONS,
        timeout=None,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=None,
        protocol=2,
    )
    pool.connection_kwargs.update(decode_responses=False)
    return Redis.from_pool(pool)


def _check_kind(info: dict[str, object], topology: Topology) -> None:
    version = str(info.get("redis_version", "0.0"))
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_VERSION:
        problem = f"Redis {version} is too old"
        raise _unavailable(problem, "use 6.2 or newer, or Valkey")
    if info.get("cluster_enabled") and topology != "cluster":
        raise _unavailable("this Redis is a cluster", f"write {URL_FORMS['cluster']}")
    if topology and GOOD_REPLICAS_FIELD not in info:
        problem = "this Redis takes writes without a replica"
        raise _unavailable(problem, "set min-replicas-to-write 1 on each server")
    if info.get("role", "master") != "master":
        problem = "this Redis is a replica and takes no writes"
        raise _unavailable(problem, "connect to its primary")


def _check_policy(policy: str) -> None:
    if policy != "noeviction":
        problem = f"Redis has the maxmemory-policy {policy} and may evict what was spent"
        raise _unavailable(problem, "set it to noeviction")


async def _setting(client: Redis, name: str) -> str | None:
    """Return a setting of the server, None where CONFIG is forbidden, as hosted servers do."""
    try:
        found = cast("dict[str, str]", await client.config_get(name))
    except ResponseError:
        return None
    value = cast("dict[str | bytes, str | bytes]", found).get(name)
    if value is None:
        value = cast("dict[str | bytes, str | bytes]", found).get(name.encode())
    return value.decode() if isinstance(value, bytes) else value


async def _seconds_ahead(client: Redis) -> float:
    before = time.monotonic()
    seconds, microseconds = await client.time()
    after = time.monotonic()
    return seconds + microseconds / 1_000_000 - (before + after) / 2


def _unavailable(problem: str, advice: str) -> LedgerUnavailableError:
    return LedgerUnavailableError(f"{problem}; {advice}")


# redis-py cuts the first word off some errors and makes a class of it.
_ADVICE = {
    "OutOfMemoryError": "Redis is out of memory, raise maxmemory",
    "OOM ": "Redis is out of memory, raise maxmemory",
    "ReadOnlyError": "this Redis has become a replica, connect to the primary",
    "READONLY ": "this Redis has become a replica, connect to the primary",
    "BusyLoadingError": "Redis is still loading its data, try again soon",
    "NoPermissionError": "this user of Redis lacks a permission",
    "MISCONF ": "Redis cannot write to its disk, see its log",
    "NOREPLICAS ": "Redis misses replicas that it must have, see its log",
}


def _problem(error: Exception) -> str:
    if isinstance(error, _UnconfirmedError):
        return f"{error}; nothing was granted"
    line = str(error).partition("\n")[0].partition(" script:")[0][:200]
    described = f"{type(error).__name__}: {line}"
    for words, advice in _ADVICE.items():
        if words in described:
            return f"{advice}; nothing was granted ({line})"
    return f"Redis is unavailable; nothing was granted ({described})"
