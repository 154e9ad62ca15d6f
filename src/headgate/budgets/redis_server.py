"""The Redis or Valkey server behind a ledger: whether it is fit for one, and calls that never hang.

Rule: a server that may forget what it was told is refused. Each call has a deadline and a bounded
number of tries; since every request carries the caller's own id, a try that was applied without an
answer is recognised by the next. Whatever goes wrong comes out as `LedgerUnavailableError`.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar, cast
from urllib.parse import SplitResult, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,  # noqa: A004 - redis-py names it so
    NoScriptError,
    RedisError,
    ResponseError,
)

from headgate.errors import InvalidSettingError, LedgerUnavailableError

OLDEST_VERSION = (6, 2)
MAX_TRIES = 3
MAX_CONNECTIONS = 8
DEADLINE_SECONDS = 5.0
CHECKED_EVERY_SECONDS = 60.0
POLICY_FIELD = "maxmemory_policy"
SCHEMES = ("redis", "rediss", "unix")
URL_FORM = "write redis://host:6379/0, with the special characters of a password percent-encoded"

Result = TypeVar("Result")


class RedisPersistenceWarning(UserWarning):
    """The server keeps its data in memory only: a restart forgets budgets and what was spent."""


class RedisServer:
    """A server that holds one script, and whose clock is the clock of the ledger."""

    def __init__(
        self, url: str, script: str, *, deadline_seconds: float, accepts_unseen_policy: bool
    ) -> None:
        _check_options(url)
        self._url = url
        self._script = script
        self._deadline_seconds = deadline_seconds
        self._accepts_unseen_policy = accepts_unseen_policy
        self._client: Redis | None = None
        self._digest: bytes | str = ""
        self._checked_at = -CHECKED_EVERY_SECONDS
        # Against the monotonic clock: the wall clock of this machine may be set at any time.
        self._ahead_seconds = time.time() - time.monotonic()

    def now(self) -> float:
        """Return the time of the server, in Unix seconds, as the last check found it."""
        return time.monotonic() + self._ahead_seconds

    async def open(self) -> None:
        """Connect, refuse a server that is unfit, and warn about one that forgets."""
        self._client = _client_for(self._url)
        await self._attempt(self._check)
        await self._attempt(self._load_script)
        await self._attempt(self._warn_about_persistence)

    async def close(self) -> None:
        """Let go of all connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def abandon(self) -> None:
        """Forget the connections, where the event loop that made them is closed."""
        self._client = None

    async def run(self, step: str, keys: Sequence[str], parameters: bytes) -> bytes:
        """Run a step of the script, and return what it replied."""

        async def evaluate() -> bytes:
            await self._check_now_and_then()
            arguments: tuple[str | bytes | int, ...] = (len(keys), *keys, step, parameters)
            try:
                return await self._execute("EVALSHA", self._digest, *arguments)
            except NoScriptError:
                # A restart, a failover or SCRIPT FLUSH forgets scripts, and costs nothing more.
                await self._load_script()
                return await self._execute("EVALSHA", self._digest, *arguments)

        return await self._attempt(evaluate)

    async def read(self, *commands: tuple[str | int, ...]) -> list[object]:
        """Run commands that only read, all at the same instant."""

        async def transaction() -> list[object]:
            pipeline = self._open_client().pipeline(transaction=True)
            for command in commands:
                pipeline.execute_command(*command)
            return cast("list[object]", await pipeline.execute())

        return await self._attempt(transaction)

    async def create(self, key: str, value: str) -> str:
        """Write a value unless there is one, and return the one that is there."""

        async def set_once() -> str:
            client = self._open_client()
            await client.set(key, value, nx=True)
            kept = cast("bytes", await client.get(key))
            return kept.decode()

        return await self._attempt(set_once)

    def _open_client(self) -> Redis:
        if self._client is None:
            raise LedgerUnavailableError("the ledger is closed; open it again")
        return self._client

    async def _attempt(self, action: Callable[[], Awaitable[Result]]) -> Result:
        try:
            async with asyncio.timeout(self._deadline_seconds):
                return await self._attempt_again(action)
        except LedgerUnavailableError:
            await self._start_over()
            raise
        except TimeoutError as error:
            await self._start_over()
            problem = f"Redis did not answer within {self._deadline_seconds:g} seconds"
            raise _unavailable(problem, "nothing was granted") from error
        except (RedisError, OSError) as error:
            await self._start_over()
            raise LedgerUnavailableError(_problem(error)) from error

    async def _attempt_again(self, action: Callable[[], Awaitable[Result]]) -> Result:
        for _ in range(MAX_TRIES - 1):
            try:
                async with asyncio.timeout(self._deadline_seconds / MAX_TRIES):
                    return await action()
            except AuthenticationError:
                raise
            except (ConnectionError, OSError):
                await self._start_over()
        return await action()

    async def _start_over(self) -> None:
        """Check the server again, over new connections: its name may lead to another by now."""
        self._checked_at = -CHECKED_EVERY_SECONDS
        if self._client is not None:
            await self._client.connection_pool.disconnect(inuse_connections=False)

    async def _check_now_and_then(self) -> None:
        if time.monotonic() - self._checked_at > CHECKED_EVERY_SECONDS:
            await self._check()

    async def _check(self) -> None:
        client = self._open_client()
        info = cast("dict[str, object]", await client.info())
        _check_kind(info)
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
        client = self._open_client()
        info = cast("dict[str, object]", await client.info("persistence"))
        if info.get("aof_enabled") or await _setting(client, "save"):
            return
        problem = "Redis keeps this ledger in memory only, a restart forgets what was spent"
        warnings.warn(f"{problem}; set appendonly yes", RedisPersistenceWarning, stacklevel=2)


def split_url(url: str) -> SplitResult:
    """Take a URL apart, or refuse it without repeating any of it: it may carry a password."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise _bad_url("the host and the port cannot be read, a port is a number") from None
    if parts.scheme not in SCHEMES:
        problem = f"the scheme must be one of {', '.join(SCHEMES)}"
        raise _bad_url(problem)
    database = parts.path.removeprefix("/")
    if parts.scheme != "unix" and database and not (database.isascii() and database.isdecimal()):
        raise _bad_url("the database, which follows the host, must be a number")
    return parts


def _check_options(url: str) -> None:
    """Refuse options that a connection does not take; redis-py says so only when it connects."""
    try:
        pool = _client_for(url).connection_pool
        cast("Callable[[], object]", pool.make_connection)()
    except (TypeError, ValueError, RedisError):
        problem = "what follows ? has an option that Redis does not take, or not with this value"
        raise _bad_url(problem) from None


def _bad_url(problem: str) -> InvalidSettingError:
    return InvalidSettingError("url", f"{problem}; {URL_FORM}")


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


def _check_kind(info: dict[str, object]) -> None:
    version = str(info.get("redis_version", "0.0"))
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_VERSION:
        problem = f"Redis {version} is too old"
        raise _unavailable(problem, "use 6.2 or newer, or Valkey")
    if info.get("cluster_enabled"):
        problem = "a ledger over a Redis Cluster is not supported"
        raise _unavailable(problem, "give it a server of its own")
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
    line = str(error).partition("\n")[0].partition(" script:")[0][:200]
    described = f"{type(error).__name__}: {line}"
    for words, advice in _ADVICE.items():
        if words in described:
            return f"{advice}; nothing was granted ({line})"
    return f"Redis cannot be asked; nothing was granted ({described})"
